"""The block under test: a user's file or functions, built for a depth."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from deepstack.base import ConfigError, unknown
from deepstack.model import guarded, run_file
from deepstack.tools.conform.reference import STEP, Reference, double_precision
from deepstack.tools.conform.weights import PATTERN, Key, Piece, Weights, at_layer, pieces_of

Patterns = str | Sequence[str]
BIASES = ("q.bias", "k.bias", "v.bias", "o.bias", "w1.bias", "w2.bias", "w3.bias")


@dataclass
class Block:
    """A block to compare: how it is built, and the names of its parameters.

    name: of messages.
    build: (depth, d_model, n_heads, d_ff) -> a module x_0 -> F.
    residual: in place of `build`, (x, G, …) -> the new stream, for one sublayer.
    parameters: name in the reference -> name of a parameter, or of a submodule with weight and
        bias, with {l} for the layer, from 0.
    settings: of the reference, as in a configuration.
    optimizer: (module, 'sgd' or 'adam', lr, eps) -> an optimizer with the scheme's factors.
    at_step: (module, step) sets the values of schemes that change with the step.
    """

    name: str
    build: Callable[..., nn.Module] | None = None
    residual: Callable[..., Tensor] | None = None
    parameters: Mapping[str, Patterns] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    at_step: Callable[[nn.Module, int], None] | None = None

    def reference_settings(self) -> dict[str, Any]:
        """Return the settings of the reference, with switches that follow from the declarations.

        Without any declared bias of a linear map the reference has none, and likewise for the
        gains and biases of norms and for the gate w3.
        """
        names = {name.removesuffix(".weight") for name in self.parameters}
        chosen: dict[str, Any] = {}
        if self.build is not None and names:
            norm = [name for name in names if "norm" in name or name.startswith("before_")]
            chosen["model.bias"] = bool(names & set(BIASES))
            chosen["model.gated"] = "w3" in names
            if norm:
                chosen["model.norm.bias"] = any(name.endswith(".bias") for name in norm)
        return chosen | dict(self.settings)

    def weights(self, reference: Reference, *, seed: int | None = None) -> Weights:
        """Return the block at the reference's depth, in double precision.

        It sets biases of the reference to 0 that the block does not have.

        seed: of torch, before the block is built; None: a fixed one.
        """
        if self.residual is not None:
            with guarded(f"{self.name}: residual"):
                stack = residual_stack(self.residual, reference)
            stack.run = self.watched(stack, stack.stack, "residual(x, G)")
            return stack
        module = self.module(reference, seed)
        own = Weights(module, module, self._pieces(module, reference))
        own.run = self.watched(own, module, "module(x)")
        for key in reference.entries.keys() - own.pieces.keys():
            if reference.entries[key].role == "bias":
                reference.assign(key, torch.zeros(reference.size(key), dtype=torch.float64))
        return own

    def watched(
        self, weights: Weights, module: Callable[..., Any], call: str
    ) -> Callable[[Tensor], Tensor]:
        """Return x_0 -> F by a call of the user's code, which notes whether it changes x_0."""

        def run(x: Tensor) -> Tensor:
            given = x.clone()  # the code may write into it
            with guarded(f"{self.name}: {call}"):
                y = module(given)
            y = y if isinstance(y, Tensor) else y[0]
            if y.shape != x.shape:
                raise ConfigError(
                    f"{self.name}: the module returned {tuple(y.shape)} for x of {tuple(x.shape)}; "
                    "allowed F of the same shape, the stream after the last layer and final norm"
                )
            weights.input_change = max(weights.input_change, relative_change(given, x))
            return y.clone() if y is given else y

        return run

    def module(self, reference: Reference, seed: int | None = None) -> nn.Module:
        """Return the module at the reference's depth and sizes, in double precision."""
        assert self.build is not None
        model, depth = reference.config.model, reference.depth
        sizes = model.d_model, model.n_heads, model.d_ff
        torch.manual_seed(0 if seed is None else seed)
        try:
            inspect.signature(self.build).bind(depth, *sizes)
        except TypeError as error:
            raise ConfigError(
                f"{self.name}: build cannot be called with four numbers ({error}); type:\n"
                "    def build(depth, d_model, n_heads, d_ff):"
            ) from None
        with guarded(f"{self.name}: build({depth}, …)"), double_precision():
            module = self.build(depth, *sizes)
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"{self.name}: build returned {type(module).__name__}; allowed a torch.nn.Module"
            )
        module = module.double().eval()
        if self.at_step is not None:
            with guarded(f"{self.name}: at_step"):
                self.at_step(module, STEP)
        return module

    def expanded(self, reference: Reference) -> "Block":
        """Return the block with the weight and the bias of each declared module."""
        if self.build is None:
            return self
        modules = dict(self.module(reference).named_modules())
        patterns: dict[str, Patterns] = {}
        for name, pattern in self.parameters.items():
            owner = modules.get(at_layer(pattern, 1)) if isinstance(pattern, str) else None
            if owner is None or getattr(owner, "weight", None) is None:
                patterns[name] = pattern
                continue
            patterns[name] = f"{pattern}.weight"
            if getattr(owner, "bias", None) is not None:
                patterns[f"{name}.bias"] = f"{pattern}.bias"
        return replace(self, parameters=patterns)

    def _pieces(self, module: nn.Module, reference: Reference) -> dict[Key, list[Any]]:
        known = {name for name, _ in reference.entries}
        patterns: dict[str, Patterns] = {}
        for given, pattern in self.parameters.items():
            name = given.removesuffix(".weight")
            if name not in known and f"{name}.gain" in known:
                name = f"{name}.gain"
            if name not in known:
                raise ConfigError(f"{self.name}: PARAMETERS: {unknown('parameter', given, known)}")
            patterns[name] = pattern
        pieces, named = {}, dict(module.named_parameters())
        for name, layer in reference.entries:
            if name in patterns:
                where = f"{self.name}: PARAMETERS[{name!r}]"
                refuse_computed(patterns[name], module, layer, where)
                parts = pieces_of(patterns[name], named, layer, where)
                refuse_shape(parts, reference.entries[name, layer].shape, where)
                pieces[name, layer] = parts
        return pieces


def refuse_computed(patterns: Patterns, module: nn.Module, layer: int, where: str) -> None:
    """Raise ConfigError for the name of a tensor that a module computes, as weight norm does."""
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        match = PATTERN.fullmatch(at_layer(pattern, layer).strip())
        if match is None:
            continue
        path, _, leaf = match["name"].rpartition(".")
        try:
            owner = module.get_submodule(path)
        except AttributeError:
            continue
        if leaf not in owner._parameters and isinstance(getattr(owner, leaf, None), Tensor):
            own = [name for name, _ in owner.named_parameters()]
            made_of = f"computed from {' and '.join(own)}" if own else "no parameter"
            raise ConfigError(
                f"{where}: {match['name']} is {made_of}; conform sets the matrix itself, so build "
                "the module without weight norm or another parametrization of it"
            )


def relative_change(now: Tensor, before: Tensor) -> float:
    """Return ‖now − before‖ / ‖before‖ of an input, the number that stays 0 if none writes it."""
    with torch.no_grad():
        return float((now - before).norm() / before.norm())


def refuse_shape(parts: Sequence[Piece], shape: tuple[int, ...], where: str) -> None:
    """Raise ConfigError unless these parts have the shape of the reference's parameter.

    A matrix needs its shape, anything else the same number of numbers.
    """
    found = [tuple(part.view(part.parameter).shape) for part in parts]
    is_matrix = len(shape) == 2 and len(found) == 1
    if found[0] != shape if is_matrix else sum(map(math.prod, found)) != math.prod(shape):
        sizes = " and ".join(" x ".join(map(str, one)) or "1" for one in found)
        hint = "; append .T to transpose it" if found[0] == shape[::-1] else ""
        wanted = " x ".join(map(str, shape))
        raise ConfigError(f"{where}: found {sizes}; the reference has {wanted}{hint}")


def undeclared(weights: Weights) -> list[str]:
    """Return the names of the module's parameters that no declared name has."""
    declared = {part.parameter for parts in weights.pieces.values() for part in parts}
    return [name for name, p in weights.module.named_parameters() if p not in declared]


def undeclared_of_reference(reference: Reference, weights: Weights) -> list[str]:
    """Return the names of the reference's parameters that the module does not declare."""
    return list(dict.fromkeys(key[0] for key in reference.entries if key not in weights.pieces))


def residual_stack(function: Callable[..., Tensor], reference: Reference) -> Reference:
    """Return the reference's stack with a user's function in the place of `Scheme.residual`.

    The function gets, by name: x, G, norm (the first), norms (all), layer, depth, sublayer, and
    the scheme's own parameters such as omega.
    """
    name = reference.scheme.scheme_class.name
    own = Reference(name, reference.depth, reference.given)
    wanted = inspect.signature(function).parameters
    for scheme in own.stack.schemes:
        if scheme.joins_sublayers:
            raise ConfigError(
                f"the scheme {name} joins its sublayers by more than x and G; give build(depth, "
                "d_model, n_heads, d_ff) in place of residual(x, G)"
            )
        names = cycle(scheme.sublayers)

        def call(
            x: Tensor, G: Any, *norms: Any, scheme: Any = scheme, names: Any = names, **values: Any
        ) -> Tensor:
            sublayer = next(names)
            given = {
                "x": x, "G": G, "norm": norms[0] if norms else None, "norms": norms,
                "layer": scheme.layer_index, "depth": scheme.depth, "sublayer": sublayer,
                **dict(scheme.named_parameters()), **values,
            }  # fmt: skip
            if missing := [key for key in wanted if key not in given]:
                raise ConfigError(f"residual: {unknown('argument', missing[0], given)}")
            return function(**{key: given[key] for key in wanted})

        scheme.residual = call  # type: ignore[method-assign]
    return own


def load_block(source: Any, parameters: Mapping[str, Patterns] | None = None) -> Block:
    """Return the block of a file, a module, or a function.

    A file or module has `build` and PARAMETERS, or `residual`; and may have SETTINGS, `optimizer`
    and `at_step`.  A function whose first argument is x is a `residual`, another one a `build`.
    Raises ConfigError if it cannot be loaded.
    """
    if isinstance(source, str | Path):
        source = run_file(Path(source), "docs/conform.md")
    name = str(getattr(source, "__file__", None) or getattr(source, "__name__", source))
    if callable(source) and not isinstance(source, ModuleType):
        first = next(iter(inspect.signature(source).parameters), "")
        kind = {"residual": source} if first == "x" else {"build": source}
        block = Block(name, parameters=parameters or {}, **kind)
    else:
        block = Block(
            Path(name).name,
            build=getattr(source, "build", None),
            residual=getattr(source, "residual", None),
            parameters=parameters or getattr(source, "PARAMETERS", {}),
            settings=getattr(source, "SETTINGS", {}),
            optimizer=getattr(source, "optimizer", None),
            at_step=getattr(source, "at_step", None),
        )
    if (block.build is None) == (block.residual is None):
        raise ConfigError(
            f"{block.name}: allowed one of build(depth, d_model, n_heads, d_ff) -> module, with "
            "PARAMETERS, and residual(x, G) -> x"
        )
    if block.build is not None and not block.parameters:
        raise ConfigError(
            f"{block.name}: PARAMETERS is missing: the names of q, k, v, o, w1, w2 and others in "
            "the module; deepstack conform --scheme NAME --template prints them"
        )
    return block
