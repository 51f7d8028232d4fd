"""Weight decay by role, a scheme's ramp at each step of a run, dropout masks over steps."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.small_runs import small

import deepstack
from deepstack.model import build_model
from deepstack.tasks import Batch, Task, task, task_of
from deepstack.training import make_optimizer, mean_loss, to_device

# The parameters of the head by their names, all others by their roles.
DECAYS = {
    "q": True, "k": True, "v": True, "o": True, "w1": True, "w2": True, "w3": True,
    "cross_q": True, "cross_k": True, "cross_v": True, "cross_o": True,
    "embedding": True, "position": True, "head.weight": True, "head.dense": True,
    "bias": False, "norm_gain": False, "norm_bias": False, "final_norm": False, "scheme": False,
    "head.bias": False, "head.dense_bias": False, "head.norm.gain": False, "head.norm.bias": False,
}  # fmt: skip

STILL = 1e-30  # a learning rate that moves no parameter


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "muon"])
def test_matrices_and_tables_decay_and_nothing_else(optimizer: str) -> None:
    """After a step without a gradient only the parameters that decay have moved."""
    moved: dict[str, bool] = {}
    for scheme, head in (("admin", "bert"), ("pre_ln", "separate")):
        config = small(
            model__scheme=scheme, model__head=head, model__family="encoder_decoder",
            model__gated=True, train__optimizer=optimizer, train__weight_decay=0.1, train__lr=0.1,
        )  # fmt: skip
        built = build_model(config, vocab_size=11)
        for bank in built.banks:
            bank.copy_(torch.ones_like(bank.values()))
        make_optimizer(config.train, built).step()
        for bank in built.banks:
            for role, parts in bank.by_role():
                name = bank.key if role == "head" else role
                now = [bool((part < 1).all()) for part in parts]
                assert all(now) or all(bool((part == 1).all()) for part in parts), name
                moved[name] = now[0]
    assert moved == DECAYS


RAMP = 3
# The factor a of the branches of layer l at step t = 1, 2, ….
RAMPS: dict[str, Callable[[int, int], float]] = {
    "branch_norm": lambda t, l: min(1.0, t / RAMP),
    "pro_res": lambda t, l: min(1.0, (t - 1) / (l * RAMP)),
}


@pytest.mark.parametrize("scheme", RAMPS)
def test_a_ramp_has_its_value_at_every_step_of_a_run(scheme: str, tmp_path: Path) -> None:
    """If no parameter moves, loss and ‖ΔF‖ of a step equal the initial model's at a_t."""
    config = small(
        model__scheme=scheme, model__scheme_options={"ramp_steps": RAMP}, model__depth=2,
        train__lr=STILL, train__warmup_steps=0, train__steps=8,
    )  # fmt: skip
    steps = deepstack.train(config, out=tmp_path).steps.set_index("step")
    task = task_of(config)
    model = build_model(config, vocab_size=task.vocab_size).model.eval()
    probe, _ = to_device(task.probe_batch(config.log.probe_sequences), torch.device("cpu"))
    initial = model.hidden(probe)
    for t in range(1, 9):
        for layer, of_layer in enumerate(model.schemes, start=1):
            of_layer.ramp.fill_(RAMPS[scheme](t, layer))
        inputs, targets = to_device(task.train_batch(t, 4), torch.device("cpu"))
        with torch.no_grad():
            loss = mean_loss(model(inputs), targets).item()
            moved = (model.hidden(probe) - initial).norm(dim=-1).mean().item()
        found = [steps[name][t] for name in ("loss", "model_update")]
        assert found == pytest.approx([loss, moved], rel=1e-5)
    shares = {tuple(RAMPS[scheme](t, layer) for layer in (1, 2)) for t in range(1, 9)}
    assert len(set(steps["model_update"])) == len(shares) < 8  # constant once the ramp has ended


@pytest.mark.parametrize(("dropout", "different"), [(0.0, 1), (0.2, 6)])
def test_dropout_differs_between_steps(dropout: float, different: int, tmp_path: Path) -> None:
    """With one batch and no parameter that moves, losses differ by their masks alone."""

    @task("one_batch")
    def one_batch(*, seq_len: int, seed: int) -> Task:
        """Predict the same tokens at every step."""

        def draw(random: np.random.Generator, batch_size: int, held_out: bool) -> Batch:
            tokens = np.arange(batch_size * seq_len).reshape(batch_size, seq_len) % 7
            return Batch(tokens, tokens, np.ones_like(tokens, dtype=bool))

        return Task(name="one_batch", vocab_size=7, seed=seed, draw=draw)

    config = small(task__name="one_batch", model__dropout=dropout, train__lr=STILL, train__steps=6)
    losses = deepstack.train(config, out=tmp_path).steps["loss"].tolist()
    assert len(set(losses)) == different and all(map(math.isfinite, losses))
