"""The stack: scales at initialisation, positions, heads, banks."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.configs import config_with
from helpers.sampling import some
from helpers.small_runs import step_of
from torch.func import functional_call

from deepstack import config as conf
from deepstack.config import Config, with_overrides
from deepstack.fast import make_step
from deepstack.model import build_model
from deepstack.model.initialise import DISTRIBUTIONS, generator, zero_identity
from deepstack.model.transformer import sinusoidal
from deepstack.schemes import NORMS, SCHEMES, StackNorm
from deepstack.training import make_optimizer, mean_loss
from deepstack.training.optimizer import optimizer_state

TOKENS = torch.arange(60).view(3, 20) % 17


def built(vocab_size: int = 17, **changes: object):
    return build_model(config_with({}, **changes), vocab_size=vocab_size)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
def test_the_stream_starts_at_unit_variance(positions: str) -> None:
    model = built(400, model__d_model=256, model__positions=positions).model
    x0 = model.embed(torch.arange(400)[None, :60] * 5 % 400)
    # sines and cosines have a mean: their second moment is 1
    assert x0.square().mean().item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("distribution", some(DISTRIBUTIONS, 4))
def test_every_scheme_starts_from_every_distribution(distribution: str) -> None:
    for scheme in SCHEMES:
        if distribution == "ntk" and SCHEMES[scheme].constrains:
            continue  # refused: tests/schemes/test_ngpt.py
        init = {"model__init__distribution": distribution, "model__scheme": scheme}
        for bank in built(model__depth=2, **init).banks:
            assert bank.values().isfinite().all(), (scheme, bank.key)
            if bank.start == "matrix":
                gains = [SCHEMES[scheme].gain(role, 1, 2) for role in bank.roles]
                assert bank.values().any() == any(gains), (scheme, bank.key)


@pytest.mark.parametrize("kind", some(NORMS, 3, 1))
def test_every_scheme_has_gradients_in_bf16_without_gains(kind: str) -> None:
    without = {"model__norm__kind": kind, "model__norm__gain": False, "model__depth": 2}
    for scheme in SCHEMES:
        model = built(model__scheme=scheme, **without).model
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(TOKENS).float().square().mean()
        loss.backward()
        assert loss.isfinite(), scheme
        norms = {type(m) for m in model.modules() if isinstance(m, StackNorm)}
        assert norms <= {NORMS[kind]}


@pytest.mark.parametrize("name", SCHEMES)
def test_a_tied_head_starts_with_logits_of_the_scale_of_f(name: str) -> None:
    one = built(300, model__d_model=128, model__scheme=name)
    tokens = torch.randint(0, 300, (4, 40))
    table = one.schemes["encoder"].gain("embedding", 0)
    logits, scale = one.model(tokens), one.model.hidden(tokens).square().mean().sqrt()
    assert 0.7 < (logits.std() / scale / table).item() < 1.3


def test_sinusoidal_positions_are_the_published_formula() -> None:
    table = sinusoidal(50, 12)
    angles = torch.arange(50)[:, None] / 10000 ** (torch.arange(0, 12, 2) / 12)
    wanted = math.sqrt(2 / 12) * torch.stack([angles.sin(), angles.cos()], dim=2)
    torch.testing.assert_close(table, wanted.flatten(1), rtol=0, atol=1e-6)


def test_the_bert_head_is_dense_activation_norm_and_the_tied_table() -> None:
    model = built(model__head="bert").model
    head, final = model.head, torch.randn(2, 5, 64)
    with torch.no_grad():
        head.bias.normal_()
    hidden = F.layer_norm(F.gelu(final @ head.dense.T + head.dense_bias), (64,))
    torch.testing.assert_close(
        head(final, model.embedding), hidden @ model.embedding.T + head.bias, rtol=1e-4, atol=1e-4
    )


def test_dropout_is_off_in_evaluation_mode_only() -> None:
    model = built(model__dropout=0.5).model
    for training in (True, False):
        model.train(training)
        assert torch.equal(model(TOKENS), model(TOKENS)) is not training


def run_steps(config: Config, steps: int = 5):
    b = build_model(config, vocab_size=17)
    step = step_of(b, config)
    measured = [step((TOKENS + t) % 17, TOKENS, 1e-2) for t in range(steps)]
    return b, [(m.loss.item(), m.grad_norm.item()) for m in measured]


@pytest.mark.parametrize("name", some(SCHEMES.names(), 6, 2))
@pytest.mark.parametrize("optimizer", some(["adamw", "muon", "adam", "sgd"], 4))
@pytest.mark.parametrize("clip", some([0.05, None], 2))
def test_banks_are_plain_parameters_bit_for_bit(
    name: str, optimizer: str, clip: float | None
) -> None:
    changes = {
        "model.scheme": name, "model.depth": 7, "model.d_model": 20, "train.optimizer": optimizer,
        "train.clip": clip, "train.weight_decay": 0.1, "model.gated": clip is None,
        "train.momentum": 0.9 if optimizer == "sgd" else 0.0,
    }  # fmt: skip
    config = with_overrides(Config(), changes)
    stacked, rows = run_steps(config)
    plain, plain_rows = run_steps(with_overrides(config, {"runtime.banks": False}))
    assert rows == plain_rows
    torch.testing.assert_close(plain.banks.state(), stacked.banks.state(), rtol=0, atol=0)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_step_on_banks_is_a_step_of_torchs_ordinary_loop(clip: float | None) -> None:
    """zero_grad, backward, clip_grad_norm_ and AdamW as anyone would write them."""
    config = with_overrides(
        Config(), {"model.depth": 7, "model.d_model": 20, "train.clip": clip, "train.eps": 1e-3}
    )
    stacked, rows = run_steps(config)
    model = build_model(config, vocab_size=17).model
    ordinary = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    # an eps above the noise: the gradient of the bias of k is zero but for rounding
    optimizer = torch.optim.AdamW(
        ordinary.values(), lr=1e-2, betas=(0.9, 0.98), eps=1e-3, weight_decay=0.0
    )
    for t, (recorded, _) in enumerate(rows):
        optimizer.zero_grad()
        loss = mean_loss(functional_call(model, ordinary, ((TOKENS + t) % 17,)), TOKENS)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(ordinary.values(), clip)
        optimizer.step()
        assert loss.item() == pytest.approx(recorded, rel=1e-5)
    banked = dict(stacked.model.named_parameters())
    torch.testing.assert_close(banked, ordinary, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_diverged_step_changes_nothing_from_then_on(name: str) -> None:
    config = config_with({"train.optimizer": name, "train.weight_decay": 0.1})
    b = build_model(config, vocab_size=17)
    losses, optimizer = iter([1.0, float("nan"), 1.0]), make_optimizer(config.train, b)
    step = make_step(
        lambda x, y: mean_loss(b.model(x), y) * next(losses), b, optimizer, config.train
    )

    def state() -> dict[str, torch.Tensor]:
        moments = optimizer_state(optimizer, b.trained)
        return b.state() | {k: v for k, v in moments.items() if not k.endswith("/step")}

    step(TOKENS, TOKENS, 1e-3)
    held = {k: v.clone() for k, v in state().items()}
    assert step(TOKENS, TOKENS, 1e-3).loss.isnan()
    assert step(TOKENS, TOKENS, 1e-3).loss.isfinite()
    torch.testing.assert_close(state(), held, rtol=0, atol=0)


def drawn(distribution: str, n_out: int, n_in: int, scale: float = 1.0, **more: Any) -> Any:
    init = conf.Init(distribution=distribution, **more)
    start = DISTRIBUTIONS[distribution]
    matrix = torch.empty(n_out, n_in)
    start.fill(matrix, scale * start.scale(init, n_in, n_out), generator(0, 3, matrix.device))
    return matrix


@pytest.mark.parametrize(
    ("distribution", "std", "most"),
    [
        ("xavier_normal", math.sqrt(2 / 500), 9.0),
        ("xavier_uniform", math.sqrt(2 / 500), math.sqrt(3)),
        ("kaiming_normal", math.sqrt(2 / 300), 9.0),
        ("kaiming_uniform", math.sqrt(2 / 300), math.sqrt(3)),
        ("truncated_normal", math.sqrt(2 / 500), 2 / 0.87962566),
        ("torch_linear", 1 / 30, math.sqrt(3)),
        ("normal", 0.5, 9.0),
        ("orthogonal", math.sqrt(1 / 300), 9.0),
    ],
)
def test_standard_deviations_and_bounds(distribution: str, std: float, most: float) -> None:
    more = {"std": std} if distribution == "normal" else {}
    for scale in (1.0, 0.3):
        matrix = drawn(distribution, 200, 300, scale, **more)
        assert matrix.std().item() == pytest.approx(scale * std, rel=0.015)
        assert abs(matrix.mean().item()) < 5 * scale * std / math.sqrt(60_000)
        largest = matrix.abs().max().item() / (scale * std)
        assert largest <= most * 1.0001
        assert largest > (0.98 * most if most < 9 else 3.5)


@pytest.mark.parametrize("factors", [{}, {"q": 0.5}])  # q, k, v joined and apart
def test_torch_linear_is_the_start_of_nn_linear_with_gains_also_on_biases(
    factors: dict[str, float],
) -> None:
    init = {"model__init__distribution": "torch_linear", "model__scheme": "deepnorm",
            "model__d_model": 96, "model__n_heads": 3, "model__depth": 40}  # fmt: skip
    state = built(**init, train__lr_factors=factors).banks.state()
    bias = state["encoder.layers.attention.qkv_bias"]
    cases = [
        (state["encoder.layers.feed_forward.w2_bias"], (8 * 40) ** -0.25, 384),
        (state["encoder.layers.feed_forward.w2"], (8 * 40) ** -0.25, 384),
        (bias[:, :192], 1.0, 96),
        (bias[:, 192:], (8 * 40) ** -0.25, 96),
    ]
    for values, gain, n_in in cases:
        most = values.abs().max().item()
        assert most == pytest.approx(gain * n_in**-0.5, rel=0.06)
        assert values.std().item() == pytest.approx(most / math.sqrt(3), rel=0.05)
        assert not torch.equal(values[0], values[1])


@pytest.mark.parametrize("shape", [(12, 12), (12, 30), (30, 12)])
def test_orthogonal_matrices(shape: tuple[int, int]) -> None:
    q = drawn("orthogonal", *shape, scale=3.0)
    gram = q @ q.T if shape[0] <= shape[1] else q.T @ q
    torch.testing.assert_close(gram, 9 * torch.eye(12), rtol=1e-5, atol=1e-5)


def test_orthogonal_matrices_favour_no_sign() -> None:
    matrix, corners = torch.empty(3, 3), torch.empty(400)
    for i in range(400):
        DISTRIBUTIONS["orthogonal"].fill(matrix, 1.0, generator(0, i, matrix.device))
        corners[i] = matrix[0, 0]
    assert abs(corners.mean().item()) < 5 / math.sqrt(3 * 400)  # Var of an entry is 1/3


def test_zero_identity_is_identity_or_hadamard() -> None:
    none = torch.Generator()
    before = none.get_state()
    square, wide, tall = torch.empty(4, 4), torch.empty(2, 3), torch.empty(3, 2)
    for matrix in (square, wide, tall):
        zero_identity(matrix, 0.5, none)
    assert torch.equal(square, 0.5 * torch.eye(4))
    assert torch.equal(wide, torch.tensor([[0.5, 0, 0], [0, 0.5, 0]]))
    # H_2 = [[1, 1], [1, -1]] by itself, over sqrt(4)
    assert torch.equal(tall, torch.tensor([[0.25, 0.25], [0.25, -0.25], [0.25, 0.25]]))
    assert torch.equal(none.get_state(), before)
    large = drawn("zero_identity", 64, 16)
    torch.testing.assert_close(large.T @ large, torch.eye(16))
