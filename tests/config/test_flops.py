"""FLOPs computed from a configuration, against those that torch counts in the model's products."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.family_models import SEQ, VOCAB, config, tokens_for
from helpers.sampling import some
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from deepstack import config as conf
from deepstack.base.errors import ConfigError
from deepstack.config.flops import StepFlops
from deepstack.model import build_model, flops_of, tokens_per_step
from deepstack.schemes import SCHEMES, Scheme, cross_layer, scheme_flops
from deepstack.tasks import TASKS, task_families, task_of


def has_no_products(scheme: type[Scheme]) -> bool:
    """Return whether a scheme states no FLOPs beyond the sublayers'."""
    return scheme.extra_flops.__func__ is Scheme.extra_flops.__func__  # type: ignore[attr-defined]


TOGETHER = "model.depth=5 model.gated=true model.d_ff=40 model.n_heads=4"
ENCODER_DECODER = "model.family=encoder_decoder"
PLAIN = [name for name in SCHEMES if has_no_products(SCHEMES[name])]
CASES: list[Any] = [
    *some((f"model.scheme={name}" for name in PLAIN), 8),
    *(f"model.scheme={name}" for name in SCHEMES if name not in PLAIN),
    f"model.family=encoder {TOGETHER}",
    f"model.family=decoder {TOGETHER}",
    f"{ENCODER_DECODER} model.decoder_depth=2 {TOGETHER}",
    f"{ENCODER_DECODER} model.decoder_attention=merged model.scheme=post_ln",
    f"{ENCODER_DECODER} model.decoder_attention=average model.decoder_depth=2",
    f"{ENCODER_DECODER} model.scheme=hyper_connections",
    "model.family=decoder model.n_heads=4 model.n_kv_heads=2",
    "model.head=separate model.positions=rotary model.qk_norm=true",
    "model.head=bert model.init.distribution=ntk model.bias=false",
    "model.scheme=hyper_connections model.scheme_options.dynamic=false",
    "model.scheme=frac_connections model.scheme_options.dynamic=false",
    "model.scheme=dense_former model.depth=7 model.scheme_options.dilation=2 "
    "model.scheme_options.period=3",
    "model.scheme=mhc model.scheme_options.mixing=kronecker model.scheme_options.streams=2",
    "model.scheme=attn_res model.scheme_options.blocks=0",
    "model.scheme=attn_res model.scheme_options.blocks=4",
    "model.depth=4 train.batch_size=6 log.probe_sequences=3",
]


def weighed_by_products(values: Tensor, w: Tensor) -> Tensor:
    """`cross_layer.weighed` with matrix products, which torch counts."""
    keys = torch.rms_norm(values, w.shape, eps=1e-6)
    weights = torch.softmax(keys @ w[:, None], dim=-2)
    return (weights.transpose(-1, -2) @ values).squeeze(-2)


@pytest.mark.parametrize("changes", CASES)
def test_flops_count_the_matrix_products(changes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_layer, "weighed", weighed_by_products)
    settings = conf.parse_config(conf.to_yaml(config()), overrides=changes.split())
    built = build_model(settings, vocab_size=VOCAB)
    flops = conf.step_flops(settings, VOCAB, scheme_flops(settings), target_len=SEQ)
    tokens = tokens_for(built.model)[:1].expand(settings.train.batch_size, -1)
    probe = tokens[:1].expand(settings.log.probe_sequences, -1)
    assert_counted(built.model, tokens, probe, flops)


def assert_counted(model: Any, tokens: Tensor, probe: Tensor, flops: StepFlops) -> None:
    """Assert that torch counts these FLOPs in a training step and in a pass of the probe batch."""

    def counted(run: Any) -> int:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            run()
        return int(counter.get_total_flops())

    logits: list[Tensor] = []
    assert counted(lambda: logits.append(model(tokens))) == flops.forward
    assert counted(lambda: logits[0].sum().backward()) == flops.backward
    with torch.no_grad():
        assert counted(lambda: model.hidden(probe)) == flops.probe


OPTIONS = {"hops": "task.n=5 task.max_k=2 task.seq_len=14"}
DRAWN = [
    f"model.family={family} task.name={name} {OPTIONS.get(name, '')}"
    for name in TASKS
    for family in task_families(name)
    if family != "encoder"
]
SHORT = f"{ENCODER_DECODER} task.seq_len=24 task.name"  # with targets of 3 and of 8 tokens
BOTH = [n for n in SCHEMES if n not in PLAIN and "encoder_decoder" in SCHEMES[n].families]
UNEQUAL = [
    f"{SHORT}=text model.decoder_depth=2 {TOGETHER}",
    f"{SHORT}=tokens task.mask_rate=0.3 task.span=4 model.qk_norm=true model.head=bert",
    f"{SHORT}=text model.decoder_attention=merged model.scheme=post_ln model.head=separate",
    f"{SHORT}=text model.decoder_attention=average model.decoder_depth=2",
    *(f"{SHORT}=text model.scheme={name}" for name in BOTH),
]


@pytest.mark.parametrize("changes", [*DRAWN, *UNEQUAL])
def test_flops_count_the_lengths_of_the_tasks_batches(
    changes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_layer, "weighed", weighed_by_products)
    overrides = changes.split()
    if "task.name=tokens" in overrides:
        np.save(tmp_path / "ids.npy", np.arange(2000) % VOCAB)
        overrides.append(f"task.path={tmp_path / 'ids.npy'}")
    settings = conf.parse_config(conf.to_yaml(config()), overrides=overrides)
    task = task_of(settings)
    built = build_model(settings, vocab_size=task.vocab_size)
    batch = task.train_batch(1, settings.train.batch_size)
    tokens = torch.from_numpy(batch.inputs)
    probe = torch.from_numpy(task.probe_batch(settings.log.probe_sequences).inputs)
    assert_counted(built.model, tokens, probe, flops_of(settings, task))
    assert tokens_per_step(settings, task) == batch.inputs.size
    assert task.target_len == batch.targets.shape[1]
    if changes in UNEQUAL:
        assert task.target_len < settings.task.seq_len


def test_flops_of_an_encoder_decoder_need_the_length_of_its_targets() -> None:
    both = config(model__family="encoder_decoder")
    with pytest.raises(ConfigError, match=r"needs target_len.*task_of\(config\)\.target_len"):
        conf.step_flops(both, VOCAB, scheme_flops(both))


@pytest.mark.parametrize("mixing", ["permutations", "cayley"])
def test_mixing_by_constants_and_by_a_linear_system(mixing: str) -> None:
    changes = f"model.scheme=mhc model.depth=4 model.scheme_options.mixing={mixing}"
    flops, (forward, backward) = flops_and_counts(changes)
    assert flops.forward == forward
    assert flops.backward == pytest.approx(backward, rel=0.05)


def test_recomputed_layers_and_untrained_matrices() -> None:
    def flops_with(**changes: Any) -> StepFlops:
        return conf.step_flops(config(**changes), VOCAB, scheme_flops(config()))

    usual, d = flops_with(), 16
    again = flops_with(runtime__recompute_every=2)
    of_head = 2 * 2 * SEQ * d * VOCAB
    assert again == usual._replace(recompute=usual.forward - of_head)
    assert (again.step, again.total) == (usual.step, usual.total + again.recompute)
    fixed = flops_with(train__trainable=["w1", "norm_gain"])
    of_w1, of_attention = 3 * 2 * 2 * SEQ * d * 4 * d, 3 * 4 * 2 * SEQ * SEQ * d
    assert fixed == usual._replace(backward=usual.forward + of_w1 + of_attention)


ROLES = ["head", "final_norm", "w2", "w1,norm_gain", "q,w2,bias", "o", "norm_gain", "embedding"]
STACKS = [
    "model.scheme=pre_ln model.depth=3",
    "model.scheme=pre_ln model.depth=11 model.head=separate",
    "model.scheme=peri_ln model.depth=10 model.gated=true",
    "model.scheme=pre_ln model.depth=4 model.head=bert",
]
NEARLY = [
    f"{ENCODER_DECODER} model.scheme=pre_ln model.depth=9 model.decoder_depth=10",
    f"{ENCODER_DECODER} model.decoder_attention=merged model.scheme=pre_ln model.depth=6",
    "model.scheme=mhc model.depth=5",
    "model.scheme=mudd model.depth=7",
    "model.scheme=peri_ln model.depth=6 model.family=decoder model.n_heads=4 model.n_kv_heads=2",
]


def flops_and_counts(changes: str, roles: str = "") -> tuple[StepFlops, list[int]]:
    """FLOPs by the formulas, and those that torch counts in the whole model, pass by pass."""
    trained = [f"train.trainable=[{roles}]"] if roles else []
    settings = conf.parse_config(conf.to_yaml(config()), overrides=[*changes.split(), *trained])
    task = task_of(settings)
    model = build_model(settings, vocab_size=task.vocab_size).model
    tokens = torch.from_numpy(task.train_batch(1, settings.train.batch_size).inputs)
    counts, logits = [], []
    for run in (lambda: logits.append(model(tokens)), lambda: logits[0].sum().backward()):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            if not logits or logits[0].requires_grad:
                run()
        counts.append(int(counter.get_total_flops()))
    return flops_of(settings, task), counts


@pytest.mark.parametrize("roles", some(ROLES, 4))
@pytest.mark.parametrize("changes", STACKS)
def test_fixed_roles_need_no_products_before_the_first_trained_one(
    changes: str, roles: str
) -> None:
    flops, counts = flops_and_counts(changes, roles)
    assert [flops.forward, flops.backward] == counts


@pytest.mark.parametrize("changes", some(NEARLY, 3))
def test_fixed_roles_of_other_stacks_are_counted_to_a_tenth(changes: str) -> None:
    for roles in ROLES:
        flops, (forward, backward) = flops_and_counts(changes, roles)
        assert flops.forward == forward
        assert flops.backward == pytest.approx(backward, rel=0.1), roles


@pytest.mark.parametrize("depth", [1, 6, 12])
def test_the_backward_pass_of_few_roles_is_their_products(depth: int) -> None:
    """Counted by hand for Pre-LN with an untied head: multiply-adds of products, two FLOPs each."""
    changes = f"model.scheme=pre_ln model.head=separate model.depth={depth}"
    whole, _ = flops_and_counts(changes, "head,final_norm,w1")
    settings = conf.parse_config(conf.to_yaml(config()), overrides=changes.split())
    task, d = task_of(settings), settings.model.d_model
    tokens = settings.train.batch_size * task.lengths[0]
    head = 2 * tokens * d * task.vocab_size
    square, inner = 2 * tokens * d * d, 2 * tokens * d * 4 * d  # of q, and of w1
    scores = 4 * tokens * task.lengths[0] * d  # logits and weighted values
    layer = 4 * square + scores + 2 * inner
    assert whole.forward == depth * layer + head
    assert flops_and_counts(changes, "head")[0].backward == head  # its own gradient alone
    assert flops_and_counts(changes, "final_norm")[0].backward == head  # of F, and no layer
    # every layer but the first passes all gradients on; the first has that of w2 alone
    passed = (depth - 1) * (4 * square + 2 * scores + 2 * inner)
    of_w2 = flops_and_counts(changes, "w2")[0].backward
    assert of_w2 == head + passed + depth * inner
    # o: the first layer also passes its feed-forward
    of_o = flops_and_counts(changes, "o")[0].backward
    assert of_o == head + passed + 2 * inner + depth * square
