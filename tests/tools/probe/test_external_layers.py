"""The search for the layers of a model that deepstack did not build."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.probe_models import D, adamw, batch_of, encoder, probe_of
from helpers.sampling import some
from torch import Tensor, nn

import deepstack
from deepstack.base.errors import ConfigError

TOKENS = torch.arange(10).view(2, 5)


class Heads(nn.Module):
    """Attention heads in a ModuleList, as lectures write them."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(D, D // count) for _ in range(count))
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.cat([head(x) for head in self.heads], dim=-1)


class Experts(nn.Module):
    """A mixture of experts of which every token takes all."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts]).mean(dim=0)


class Block(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.parts(x))


class Stack(nn.Module):
    """Tokens in, logits out; codebooks, blocks and parallel output heads in lists."""

    def __init__(self, blocks: Any) -> None:
        super().__init__()
        self.books = nn.ModuleList(nn.Embedding(11, D) for _ in range(6))
        self.blocks = blocks
        self.norm = nn.LayerNorm(D)
        self.outputs = nn.ModuleList(nn.Linear(D, D) for _ in range(7))

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.stack([book(tokens) for book in self.books]).sum(dim=0)
        blocks = self.blocks if isinstance(self.blocks, nn.ModuleList) else [self.blocks]
        for block in blocks:
            x = block(x)
        x = self.norm(x)
        return torch.cat([head(x) for head in self.outputs], dim=-1)


class Interleaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(3))
        self.maps = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.maps, strict=True):
            x = norm(x + linear(x))
        return x


class Siblings(nn.Module):
    """An encoder and a decoder of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder(2), encoder(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "heads in a sequential": lambda: Stack(nn.Sequential(*(Block(Heads()) for _ in range(3)))),
    "heads in a list": lambda: Stack(nn.ModuleList(Block(Heads()) for _ in range(3))),
    "experts": lambda: Stack(nn.ModuleList(Block(Experts()) for _ in range(3))),
    "sequentials in a list": lambda: Stack(
        nn.ModuleList(Block(nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)) for _ in range(3))
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_are_the_modules_that_pass_on_the_stream(name: str, tmp_path: Path) -> None:
    model: Any = MODELS[name]().eval()
    norms: list[float] = []
    for block in model.blocks:
        block.register_forward_hook(
            lambda _, args, y: norms.append(y.norm(dim=-1).mean().item()) and None
        )
    model(TOKENS)
    literal = norms[:]
    probe = probe_of(tmp_path, model, TOKENS, hidden="norm")
    assert probe.subject.layers_name == "blocks" and probe.subject.layers == list(model.blocks)
    assert probe.config["model"] == {"scheme": "Stack", "depth": 3, "d_model": D}
    assert probe.subject.stream_norm().tolist() == pytest.approx(literal)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Interleaved, r"layers: the members of 'norms' and of 'maps' take turns; .*layers=list"),
        (Siblings, r"no list of modules passes on one stream .*layers='blocks'"),
        (lambda: nn.Sequential(Heads(), nn.Linear(D, 12)), "no list of modules passes on"),
    ],
)
def test_layers_that_are_not_sure_are_asked_for(
    model: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        probe_of(tmp_path, model(), batch_of(0))


def test_lists_of_two_stacks_are_found_in_turn(tmp_path: Path) -> None:
    model = nn.Transformer(D, 2, 2, 3, 24, batch_first=True)
    probe = probe_of(tmp_path, model, (batch_of(0), batch_of(1)))
    assert probe.subject.layers_name == "decoder.layers" and len(probe.subject.layers) == 3


# -- compiled and wrapped models ---------------------------------------------------------------


def compiled(model: Any) -> Any:
    """The model compiled as a whole, and run before hooks are set."""
    model = torch.compile(model, backend="eager")
    model(TOKENS)
    return model


def with_compiled_blocks(model: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")
    model(TOKENS)
    return model


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    model(TOKENS)
    return model


WRAPPED = [compiled, with_compiled_blocks, compiled_in_place, nn.DataParallel]


@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.parametrize("wrap", some(WRAPPED, 3))
def test_a_wrapped_model_is_measured_as_the_model_inside(
    wrap: Callable[[Any], nn.Module], tmp_path: Path
) -> None:
    runs = []
    for make in (lambda model: model, wrap):
        torch.manual_seed(0)
        model = make(MODELS["experts"]().eval())
        optimizer = adamw(model)
        with deepstack.probe(
            model, TOKENS, optimizer, out=tmp_path / str(len(runs)), hidden="norm", layers_every=1
        ) as probe:
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(TOKENS).square().mean()
                loss.backward()
                optimizer.step()
                probe.step(loss)
        runs.append(probe.run)
    plain, other = runs
    assert (
        other.config == plain.config and other.meta["groups"].keys() == plain.meta["groups"].keys()
    )
    assert other.steps["model_update"].tolist() == pytest.approx(
        plain.steps["model_update"].tolist()
    )
    for key in ("stream_norm", "grad_norm", "param_update_norm"):
        assert other.layers(key)[1] == pytest.approx(plain.layers(key)[1], nan_ok=True)


# -- nested tensors ----------------------------------------------------------------------------


def test_a_padded_batch_of_torch_s_encoder_stays_padded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, 2, 24, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)  # torch's default
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2] * 2)
    x, expected = batch_of(0), []
    h = x
    for own in model.layers:
        h = own.train()(h, src_key_padding_mask=padding)  # training mode is never nested
        expected.append(h.norm(dim=-1).mean().item())
    batch = {"src": x, "src_key_padding_mask": padding}
    probe = probe_of(tmp_path, model, batch, layers="layers")
    torch.testing.assert_close(probe.subject.initial, h.detach())
    assert probe.subject.stream_norm().tolist() == pytest.approx(expected)
    assert torch.backends.mha.get_fastpath_enabled()
