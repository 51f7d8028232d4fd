"""Analyses of models that deepstack did not build: the numbers of plain PyTorch, or a refusal."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.tools.depth_use.analyses import MEASURES

VOCAB, D, DEPTH = 13, 16, 3
SCALES = (0.5, 0.9, 0.3)


def draw(*shape: int) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(1))


TOKENS, TARGETS, TRAINING = draw(2, 6), draw(2, 6).flip(0), draw(4, 10)


class Block(nn.Module):
    """x + scale · tanh(W LN(x)): each kind computes this, and passes it on in another way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm, self.mix = kind, nn.LayerNorm(D), nn.Linear(D, D)
        self.memory: Any = None

    def forward(self, x: Tensor, scale: float = 0.5, *, past: Any = None) -> Any:
        # the copy protects the norm's saved tensor from an addition in place
        h = scale * torch.tanh(self.mix(self.norm(x.clone())))
        if self.kind.startswith("in place"):
            x += h
            return x
        if self.kind == "state":
            h, self.memory = h + (0 if self.memory is None else 0.3 * self.memory), h
        if self.kind == "random":
            h = F.dropout(h, 0.5, training=True)
        if self.kind == "side":  # a value that later layers read too
            past = h if past is None else past
            return x + h + 0.1 * past, past
        return (x + h, None) if self.kind == "tuple" else x + h


class Model(nn.Module):
    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.embed = kind, nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(DEPTH))
        self.last, self.out = nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x, side = self.embed(tokens), None
        for number, block in enumerate(self.blocks):
            if self.kind == "in place, ignored":
                block(x)
            elif self.kind == "tuple":
                x, _ = block(x)
            elif self.kind == "side":
                x, side = block(x, past=side)
            elif self.kind == "own arguments":
                x = block(x, SCALES[number])
            elif self.kind == "between":
                x = block(x) + 1.0
            elif self.kind == "between, in place":
                x = block(x)
                x += 1.0
            else:
                x = block(x)
        return 3.0 * torch.tanh(self.out(self.last(x)))  # capped, as some models do


def measured(model: nn.Module, what: Sequence[str], **given: Any) -> Any:
    batch = given.pop("batch", TOKENS)
    options: dict[str, Any] = {"targets": TARGETS, "training": TRAINING, "probes": 4}
    return deepstack.analyze_model(model, batch, what, **(options | given))


def literal(model: Any, order: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """The streams and the logits of these blocks, by their formula alone."""
    states = [model.embed(TOKENS)]
    for number in order:
        block, x = model.blocks[number], states[-1]
        scale = SCALES[number] if model.kind == "own arguments" else 0.5
        states.append(x + scale * torch.tanh(block.mix(block.norm(x))))
    return states, logits_of(model, states[-1])


def logits_of(model: Any, x: Tensor) -> Tensor:
    return 3.0 * torch.tanh(model.out(model.last(x)))


def loss_of(logits: Tensor) -> float:
    return F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten()).item()


@pytest.mark.parametrize("kind", ["in place", "in place, ignored", "tuple", "own arguments"])
@torch.no_grad()
def test_numbers_equal_the_formula(kind: str) -> None:
    model = Model(kind)
    result = measured(model, list(MEASURES))
    states, logits = literal(model, range(DEPTH))
    lens = result["lens"].arrays["loss"]
    assert lens == pytest.approx([loss_of(logits_of(model, x)) for x in states], rel=1e-5)
    assert result["lens"].scalars["final_loss"] == pytest.approx(loss_of(logits), rel=1e-5)
    sizes = [((y - x).norm(dim=-1) / x.norm(dim=-1)).mean().item() for x, y in pairwise(states)]
    effects = result["effects"].arrays
    assert effects["contribution"] == pytest.approx(sizes, rel=1e-5)
    without = [[j for j in range(DEPTH) if j != i] for i in range(DEPTH)]
    losses = [loss_of(literal(model, order)[1]) for order in without]
    assert effects["loss_without"] == pytest.approx(losses, rel=1e-5)
    swapped = [loss_of(literal(model, order)[1]) for order in ([1, 0, 2], [0, 2, 1])]
    assert result["swap"].arrays["loss_swapped"][:2] == pytest.approx(swapped, rel=1e-5)
    twice = [loss_of(literal(model, sorted([*range(DEPTH), i]))[1]) for i in range(DEPTH)]
    assert result["swap"].arrays["loss_repeated"] == pytest.approx(twice, rel=1e-5)
    differ = "swap: layers differ in argument 2, which they are given from outside"
    assert any(differ in note for note in result["swap"].notes) == (kind == "own arguments")
    for number, block in enumerate(model.blocks):
        scale = SCALES[number] if kind == "own arguments" else 0.5
        squares = []
        for token in states[number].flatten(0, 1):
            J = torch.autograd.functional.jacobian(
                lambda x, b=block, s=scale: s * torch.tanh(b.mix(b.norm(x))), token
            )
            squares.append(J.square().sum() / D)
        exact = torch.stack(squares).mean().sqrt().item()
        jacobian = result["jacobian"].arrays
        error = jacobian["from_identity_error"][number]
        assert abs(jacobian["from_identity"][number] - exact) < 5 * error
    assert not model.embed.weight.grad and "forward" not in vars(model.blocks[0])


def test_layers_that_work_in_place_have_equal_analyses() -> None:
    wanted, found = (measured(Model(each), list(MEASURES)) for each in ("plain", "in place"))
    for name in MEASURES:
        for key, values in wanted[name].arrays.items():
            same = pytest.approx(values, rel=1e-4, abs=1e-6, nan_ok=True)
            assert found[name].arrays[key] == same, key


def test_a_given_head_reads_as_the_model_does() -> None:
    model = Model()
    given = measured(model, ["lens"], head=lambda x: logits_of(model, x))["lens"]
    own = measured(model, ["lens"])["lens"]
    assert given.arrays["kl"] == pytest.approx(own.arrays["kl"], abs=1e-6)
    with pytest.raises(ConfigError, match=r"head: .*or leave head out: the model itself reads"):
        measured(model, ["lens"], head=("last", "out"))


def test_one_analysis_that_fails_leaves_the_others() -> None:
    model = Model("state")
    wanted = measured(Model(), ["similarity"])["similarity"]
    for block in model.blocks:
        block.memory = None

        def reset(block: Any, *_: Any) -> None:
            block.memory = None

        model.register_forward_pre_hook(lambda m, _, b=block: reset(b))
    result = measured(model, ["similarity", "swap", "jacobian", "linear"])
    assert result["similarity"].arrays["cka"] == pytest.approx(wanted.arrays["cka"], rel=1e-4)
    for name in ("swap", "jacobian", "linear"):
        assert not result[name].arrays
        assert f"{name} is not measured: layers: layer 1 of blocks" in result[name].notes[0]
        assert "keeps a state" in result[name].notes[0]
    with pytest.raises(ConfigError, match="keeps a state"):
        measured(model, ["swap"])


def test_arguments_that_depend_on_the_stream_are_named() -> None:
    result = measured(Model("side"), ["effects", "jacobian", "swap"])
    assert "swap is not measured: swap: layers are given past" in result["swap"].notes[0]
    for name in ("effects", "jacobian"):
        assert "layers are also given past, which depends on earlier" in result[name].notes[0]


class Odd(nn.Module):
    """A model whose stream is of a kind that no analysis reads."""

    def __init__(
        self, change: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.change, self.back = change, back
        self.embed, self.out = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB)
        self.blocks = nn.ModuleList(nn.Identity() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.change(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.out(self.back(x))
        return out


class Mixing(nn.Module):
    """Sequence first: each row of the stream is a position, and rows are mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB)
        layer = nn.TransformerEncoderLayer(D, 2, 24, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.encoder(self.embed(tokens)))
        return out


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(x.unbind()))


REFUSED: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (lambda: Model("state"), {}, "when it is called a second time .* keeps a state"),
    (lambda: Model("random"), {}, r"model: blocks\.0 \(Block\) draws random numbers in evaluation"),
    (lambda: Model("between"), {}, "between layers 1 and 2 of blocks the model changes the stream"),
    (lambda: Model("between, in place"), {}, "between layers 1 and 2 of blocks the model"),
    (lambda: Odd(lambda x: x + 0j, lambda x: x.real), {}, "the stream: found a complex tensor"),
    (lambda: Odd(nested, lambda x: x.to_padded_tensor(0.0)), {}, "the stream: found a nested"),
    (lambda: Odd(lambda x: x.to_sparse(), Tensor.to_dense), {}, "the stream: found a sparse"),
    (lambda: Odd(lambda x: x[None], lambda x: x[0]), {}, r"shape \(1, 2, 6, 16\); allowed \(batch"),
    (lambda: Odd(lambda x: x / 0, lambda x: x), {}, "values that are not finite"),
    (Mixing, {"layers": "encoder.layers"}, "jacobian: layer 1 mixes the rows of the stream"),
    (Model, {"batch": TOKENS + VOCAB}, "the model's code fails: IndexError: index out of range"),
    (Model, {"targets": TARGETS[:, 1:]}, r"targets: .*shape \(2, 5\); allowed .*\(2, 6\)"),
    (Model, {"targets": torch.full_like(TARGETS, -100)}, "targets: all are -100"),
    (Model, {"targets": TARGETS + VOCAB}, "targets: found .*; allowed 0 to 12, or -100"),
    (Model, {"batch": TOKENS.float()}, "the model's code fails: RuntimeError"),
    (Model, {"layers": ()}, "layers: found none"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("make", "given", "message"), REFUSED)
def test_a_stream_that_cannot_be_read_is_refused_by_name(
    make: Callable[[], nn.Module], given: dict[str, Any], message: str
) -> None:
    options = {"layers": "blocks"} | given
    with pytest.raises(ConfigError, match=message):
        measured(make(), ["jacobian"], **options)


def test_a_model_in_bfloat16_has_statistics_in_full_precision() -> None:
    model = Model().bfloat16()
    states = [model.embed(TOKENS)]
    for block in model.blocks:
        states.append(block(states[-1]).detach())
    first, second = (x.detach().float() for x in states[:2])
    size = ((second - first).norm(dim=-1) / first.norm(dim=-1)).mean().item()
    found = measured(model, ["effects"])["effects"].arrays["contribution"][0]
    assert found == pytest.approx(size, rel=1e-6)
    assert np.isfinite(found)


# -- compiled and wrapped models, nested tensors ---------------------------------------------------


def compiled(model: Any) -> Any:
    model = torch.compile(model, backend="eager")
    model(TOKENS)
    return model


def with_compiled_blocks(model: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")
    model(TOKENS)
    return model


@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.parametrize("wrap", [compiled, with_compiled_blocks, nn.DataParallel])
def test_a_wrapped_model_has_the_numbers_of_the_model_inside(wrap: Callable[[Any], Any]) -> None:
    what = ["effects", "swap", "lens"]
    wanted, found = (measured(wrapped(Model()), what) for wrapped in (lambda model: model, wrap))
    for name in what:
        assert found[name].about["layers"] == "blocks"
        for key, values in wanted[name].arrays.items():
            assert found[name].arrays[key] == pytest.approx(values, rel=1e-5, nan_ok=True), key


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_scripted_modules_are_refused() -> None:
    model = Model()
    model.out = torch.jit.trace(nn.Linear(D, VOCAB), torch.zeros(1, D))
    with pytest.raises(ConfigError, match="model: out is a TorchScript module"):
        measured(model, ["lens"])


class Padded(nn.Module):
    """torch's encoder with its defaults, which nests a padded batch in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(D, 2, 24, dropout=0.0, batch_first=True)
        self.embed, self.out = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB)
        self.encoder = nn.TransformerEncoder(layer, DEPTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encoder(self.embed(tokens), src_key_padding_mask=tokens == 0)
        out: Tensor = self.out(x)
        return out


@torch.no_grad()
def test_a_padded_batch_of_torch_s_encoder_is_read_at_all_positions() -> None:
    model, tokens = Padded(), TOKENS.clone()
    tokens[0, 4:] = 0
    result = measured(model, ["lens", "effects"], batch=tokens)
    x, losses = model.embed(tokens), []
    for layer in model.encoder.layers.train():  # training mode is never nested
        losses.append(loss_of(model.out(x)))
        x = layer(x, src_key_padding_mask=tokens == 0)
    losses.append(loss_of(model.out(x)))
    assert result["lens"].arrays["loss"] == pytest.approx(losses, rel=1e-5)
