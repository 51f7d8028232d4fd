"""The reference: a stack of deepstack in double precision, with its parameters by short names."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepstack.base import ConfigError
from deepstack.config import Config, with_overrides
from deepstack.model import QueriesAndKeys, Rotation, Stack, build_model, plain_names
from deepstack.schemes import SCHEMES, StackNorm, StackScheme, defined_at, has_role
from deepstack.tools.conform.weights import Key, Piece, Weights

BATCH, SEQ = 2, 7
SIZES: Mapping[str, Any] = {
    "model.d_model": 24,
    "model.n_heads": 3,
    "model.d_ff": 40,
    "task.seq_len": SEQ,
}
GROUPED_HEADS = 6  # with model.n_kv_heads: two heads of keys then have three readers each
"""Sizes of the compared stacks: small, and no two equal, so that mixed-up axes are errors."""

LAYOUT = "rotary layout"
"""Beside the settings of a reference: `halves` if its rotary positions turn (i, i + d_head/2)."""

STEP = 7  # schemes that change with the step are compared at this one


class Entry(NamedTuple):
    """A parameter of the reference: role, shape, and start."""

    role: str
    shape: tuple[int, ...]
    start: Any


class HalfRotation(Rotation):
    """(h_i, h_(i + d_head/2)) turned by the angle p θ_i: the layout of Llama and GPT-NeoX."""

    def forward(self, h: Tensor, first: int = 0) -> Tensor:
        positions = slice(first, first + h.shape[2])
        cos, sin = self.cos[positions, 1::2], self.sin[positions, 1::2]
        x, y = h.chunk(2, dim=-1)
        return torch.cat([x * cos - y * sin, y * cos + x * sin], dim=-1)


class Reference(Weights):
    """A stack of deepstack: x_0 (batch, seq, d_model) -> F, and the scheme that it has.

    given: the settings that it was built with, and LAYOUT.
    entries: parameter -> role, shape and start.
    norms: every norm by name and layer.
    """

    def __init__(
        self, scheme: str, depth: int, settings: Mapping[str, Any], *, seed: int = 0
    ) -> None:
        self.given = settings
        known = {key: value for key, value in settings.items() if key != LAYOUT}
        heads = {"model.n_heads": GROUPED_HEADS} if "model.n_kv_heads" in known else {}
        chosen = {**SIZES, **heads, **known}
        chosen |= {"model.scheme": scheme, "model.depth": depth, "seed": seed}
        self.config = with_overrides(Config(), chosen)
        if self.config.model.family == "encoder_decoder":
            raise ConfigError("model.family: found encoder_decoder; allowed encoder, decoder")
        with double_precision():
            built = build_model(self.config, vocab_size=2)
            built.at_step(STEP)
        super().__init__(built.model.double(), lambda x: self.stack(x))
        self.stack: Stack = built.model.last
        self.depth = depth
        self.scheme: StackScheme = next(iter(built.schemes.values()))
        self.optim = built.optim
        self.entries: dict[Key, Entry] = {}
        self.norms: dict[Key, StackNorm] = {}
        self._name_all(built.model)
        if settings.get(LAYOUT) == "halves":
            for module in built.model.modules():
                if isinstance(module, QueriesAndKeys) and module.rotation is not None:
                    with double_precision():
                        module.rotation = HalfRotation(*module.rotation.cos.shape)

    def _name_all(self, model: nn.Module) -> None:
        several = SCHEMES[self.scheme.scheme_class.name].norms_per_sublayer > 1
        for name, p in model.named_parameters():
            assert has_role(p)
            plain = plain_names(model, name)
            for index, (part, role) in enumerate(
                zip(plain, p.roles * (len(plain) // len(p.roles)), strict=True)
            ):
                if (key := key_of(part, several)) is None:
                    continue
                count = len(plain) if len(plain) > 1 else 0
                piece = Piece(p, index if count else -1, count)
                self.pieces[key] = [piece]
                self.entries[key] = Entry(role, tuple(piece.view(p.data).shape), p.start)
        for name, module in model.named_modules():
            if isinstance(module, StackNorm) and (key := key_of(f"{name}.gain", several)):
                self.norms[key[0].removesuffix(".gain"), key[1]] = module

    def standard_deviation(self, key: Key) -> float:
        """Return the standard deviation of a matrix at the start, by the table of starts."""
        from deepstack.config import MATRICES
        from deepstack.model import DISTRIBUTIONS, ELSEWHERE, QKV

        entry, init = self.entries[key], self.config.model.init
        rule = DISTRIBUTIONS[init.distribution]
        if entry.role not in MATRICES:
            rule = ELSEWHERE.get(init.distribution, rule)
        n_out, n_in = entry.shape
        packed = 3 if init.qkv == "packed" and entry.role in QKV else 1
        gain = self.scheme.gain(entry.role, key[1])
        scale = rule.scale(init, n_in, packed * n_out)
        if init.distribution in ("orthogonal", "zero_identity"):
            scale = 1 / math.sqrt(max(n_in, n_out))
        return gain * scale


@contextmanager
def double_precision() -> Iterator[None]:
    """Make tensors in double precision inside the block: constants keep all of their digits."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def key_of(plain: str, several_norms: bool) -> Key | None:
    """Return the short name and the layer of a parameter; None for those outside of a stack."""
    match = re.fullmatch(r"(?:encoder|decoder)\.(?:layers\.(\d+)\.)?(.*)", plain)
    if match is None:
        return None
    name = match[2].removeprefix("scheme.").removeprefix("slots.")
    name = re.sub(r"^(?:attention|feed_forward)\.(\w+)\.(weight|bias)$", r"\1.\2", name)
    name = re.sub(
        r"_norms\.(\d+)\.",
        lambda n: f"_norm_{int(n[1]) + 1}." if several_norms else "_norm.",
        name,
    )
    return name.removesuffix(".weight"), int(match[1]) + 1 if match[1] else 0


def draw_input(config: Config, seed: int = 0) -> Tensor:
    """Return x_0, (batch, seq, d_model), of unit variance per coordinate."""
    rng = torch.Generator().manual_seed(seed)
    size = BATCH, config.task.seq_len, config.model.d_model
    return torch.randn(*size, generator=rng, dtype=torch.float64)


def place(function: Callable[..., Any]) -> str:
    """Return `deepstack/schemes/post_norm.py:12 (PostLN.residual)` of a function of deepstack."""
    inner = inspect.unwrap(function)
    inner = getattr(inner, "__func__", inner)
    if not hasattr(inner, "__code__"):
        inner = type(inner).forward if isinstance(inner, nn.Module) else inner
    lines, first = inspect.getsourcelines(inner)
    skipped = next((i for i, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)
    path = Path(inspect.getfile(inner))
    root = next((p.parent for p in path.parents if p.name == "deepstack"), path.parent)
    return f"{path.relative_to(root)}:{first + skipped} ({inner.__qualname__})"


def scheme_place(reference: Reference, *methods: str) -> str:
    """Return the place of the first of these methods that the scheme itself defines."""
    from deepstack.schemes import Scheme

    cls = SCHEMES[reference.scheme.scheme_class.name]
    for method in methods:
        own = inspect.unwrap(getattr(cls, method))
        default = inspect.unwrap(getattr(Scheme, method))
        if getattr(own, "__func__", own) is not getattr(default, "__func__", default):
            return place(own)
    return defined_at(cls, "layer")
