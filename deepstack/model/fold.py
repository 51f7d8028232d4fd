"""Folding: the gain and bias of a norm become part of the linear maps that read the norm.

Linear(g * z + b) = W diag(g) z + (W b + c), so a norm whose output enters only linear maps needs
neither.  Sublayers and heads state which of their maps read a value.  The model runs once under a
tracer, which records every other function that reads the output of a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from deepstack import config as conf
from deepstack.errors import ConfigError
from deepstack.model.build import Built, build_model
from deepstack.model.plain import fill, values_of
from deepstack.model.sublayers import LinearMap, LinearMaps
from deepstack.model.transformer import Transformer
from deepstack.schemes import SCHEMES, StackNorm

OF_THE_STACK = ("norm_gain", "norm_bias", "final_norm")
"""The roles of the norms configured by `model.norm`; a head's norms are not among them."""


@dataclass
class Reading:
    """The readers of a norm: linear maps, and the names of all other functions."""

    maps: list[LinearMap] = field(default_factory=list)
    others: set[str] = field(default_factory=set)


class Follow(TorchFunctionMode):
    """Records the readers of each norm of a model, while the model runs.

    readings: norm -> its readers.  used_by: parameter -> the norms whose outputs it multiplies;
    None: any other tensor.  origins: tensor -> a norm and a factor; the tensor is the
    factor times the norm's output.  entered: the inputs of the running sublayer, with their origin.
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.readings = {
            module: Reading()
            for module in model.modules()
            if isinstance(module, StackNorm)
            and any(p.roles[0] in OF_THE_STACK for p in (module.gain, module.bias) if p is not None)
        }
        self.used_by: dict[nn.Parameter, set[StackNorm | None]] = {model.embedding: {None}}
        self.origins = WeakTensorKeyDictionary()
        self.entered: list[tuple[Tensor, Any]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        origin = self.origin_of(args[0]) if args else None
        if origin and name == "mul" and (factor := constant(args[1])) is not None:
            self.origins[out] = origin[0], origin[1] * factor
        elif any(isinstance(value, Tensor) for value in flat(out)):
            for value in flat([*args, *(kwargs or {}).values()]):
                if origin := self.origin_of(value):
                    self.readings[origin[0]].others.add(name)
        return out

    def origin_of(self, value: Any) -> tuple[StackNorm, float] | None:
        """Return the norm whose output this tensor is, with its factor, or None."""
        return self.origins.get(value) if isinstance(value, Tensor) else None

    def enter(self, maps: list[LinearMap], value: Any) -> None:
        """Record that only these linear maps read a value, until `leave`."""
        if origin := self.origin_of(value):
            self.entered.append((value, self.origins.pop(value)))
        for weights, bias, scale in maps:
            for weight in weights:
                self.used_by.setdefault(weight, set()).add(origin[0] if origin else None)
            if origin:
                reader = LinearMap(weights, bias, scale * origin[1])
                self.readings[origin[0]].maps.append(reader)

    def leave(self) -> None:
        """Trace the inputs of a sublayer again, after it has run."""
        while self.entered:
            value, origin = self.entered.pop()
            self.origins[value] = origin


def flat(value: Any) -> list[Any]:
    """Return the items of nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in flat(part)]
    return [value]


def constant(value: Any) -> float | None:
    """Return a value as a float if it is a constant number, else None."""
    if isinstance(value, Tensor):
        return float(value) if value.ndim == 0 and not value.requires_grad else None
    return float(value) if isinstance(value, (int, float)) else None


def follow(model: Transformer) -> Follow:
    """Run the model once, on two tokens, and record the readers of its norms."""
    follow = Follow(model)

    def mark(norm: nn.Module, args: Any, out: Tensor) -> None:
        follow.origins[out] = norm, 1.0

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        if module is model.head:
            weight, bias = model.head.first_map(model.embedding)
            return follow.enter([LinearMap((weight,), bias, model.head.factor)], args[0])
        for name, value in (("x", args[0]), ("memory", kwargs.get("memory"))):
            if maps := module.readers(name):
                follow.enter(maps, value)

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        follow.leave()

    sublayers = [module for module in model.modules() if isinstance(module, LinearMaps)]
    in_slots = set()
    for module in sublayers:
        for slot, norm in module.slots.items():
            if norm in follow.readings and (maps := module.readers(slot)):
                in_slots.add(norm)
                follow.readings[norm].maps += maps
                follow.used_by |= {weight: {norm} for m in maps for weight in m.weights}
    hooks = [norm.register_forward_hook(mark) for norm in follow.readings if norm not in in_slots]
    for reader in (*sublayers, model.head):
        hooks.append(reader.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(reader.register_forward_hook(leave))
    tokens = torch.zeros(1, model.source_len + 2, dtype=torch.int64, device=model.embedding.device)
    was_training = model.training
    try:
        with torch.no_grad(), follow:
            model.eval()(tokens)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return follow


def fold(
    config: conf.Config, built: Built, *, untie: bool = False
) -> tuple[conf.Config, dict[str, Tensor]]:
    """Fold every norm (g, b) of the stack into the maps that read it: W' = W diag(g), c' = W b + c.

    A tied head's matrix is also the embedding and does not change: the last norm keeps its gain
    ('model.norm.final_gain: true'), and its bias moves into the head's.

    Returns the configuration of a model whose norms have neither gain nor bias, and its values by
    name (see `plain.values_of`), in double precision.  If a map has no bias to absorb the norm's
    ('model.bias: false'), norms keep a bias, b / g.

    untie: first give a tied head a separate matrix, (vocab_size, d_model) parameters more.
    Raises ConfigError if a function other than a linear map reads a norm (Post-LN: the residual),
    or if a matrix also reads another tensor.
    """
    if untie and config.model.head == "tied":
        config, built = untied(config, built)
    model = built.model
    followed = follow(model)
    names = {module: name for name, module in model.named_modules()}
    for norm, reading in followed.readings.items():
        refuse_inexact(config, model, names[norm], norm, reading, followed.used_by)
    maps = [reader for reading in followed.readings.values() for reader in reading.maps]
    keeps_bias = config.model.norm.bias and any(reader.bias is None for reader in maps)
    last = {s.final_norm for s in model.stacks.values() if s.final_norm is not None}
    tied = any(weight is model.embedding for reader in maps for weight in reader.weights)
    unfolded = {norm for norm in last if tied and norm.gain is not None}
    movable = [norm for norm in followed.readings if norm not in unfolded or norm.bias is not None]
    if not movable or (keeps_bias and not config.model.norm.gain):
        why = (
            "its linear maps have no bias that could take the norms' (model.bias: false)"
            if keeps_bias
            else "no norm of its stack has a gain or a bias"
        )
        raise ConfigError(f"nothing to fold: {why}; leave --fold out")
    values = {name: value.double() for name, value in values_of(model).items()}
    keys = {parameter: name for name, parameter in model.named_parameters()}
    for norm, reading in followed.readings.items():
        fold_norm(values, keys, norm, reading, norm in unfolded, keeps_bias)
    changes: dict[str, Any] = {"model.norm.gain": False, "model.norm.bias": keeps_bias}
    if unfolded or config.model.norm.final_gain:
        changes["model.norm.final_gain"] = True if unfolded else None
    if config.train.trainable != "all":  # removed roles cannot be trained
        left = [role for role in config.train.trainable if role not in OF_THE_STACK]
        changes["train.trainable"] = left or "all"
    return conf.with_overrides(config, changes), values


def fold_norm(
    values: dict[str, Tensor],
    keys: Mapping[nn.Parameter, str],
    norm: StackNorm,
    reading: Reading,
    keeps_gain: bool,
    keeps_bias: bool,
) -> None:
    """Move one norm's gain and bias, or only one of them, into the maps that read it."""
    gain = bias = None
    if norm.gain is not None and not keeps_gain:
        gain = values.pop(keys[norm.gain])
    if norm.bias is not None:
        bias = values.pop(keys[norm.bias])
        if keeps_bias:
            values[keys[norm.bias]] = bias if gain is None else bias / gain
            bias = None
    for weights, offset, scale in reading.maps:
        if bias is not None:
            assert offset is not None
            matrix = torch.cat([values[keys[weight]] for weight in weights])
            values[keys[offset]] = values[keys[offset]] + scale * (matrix @ bias)
        if gain is not None:
            for weight in weights:
                values[keys[weight]] = values[keys[weight]] * gain


def refuse_inexact(
    config: conf.Config,
    model: Transformer,
    name: str,
    norm: StackNorm,
    reading: Reading,
    used_by: Mapping[nn.Parameter, set[StackNorm | None]],
) -> None:
    """Raise ConfigError if folding this norm would change the model's function."""
    label = SCHEMES[config.model.scheme].label
    where = f"cannot fold {label}: the output of {name} is read"
    if reading.others:
        functions = ", ".join(sorted(reading.others))
        raise ConfigError(
            f"{where} not by linear maps alone but also by {functions}, which would be given "
            "another number: in Post-LN and its relatives that is the residual; leave --fold out"
        )
    for weight in (weight for reader in reading.maps for weight in reader.weights):
        if used_by[weight] != {norm}:
            if weight is model.embedding and name.endswith(".final_norm"):
                continue  # a tied head: the gain stays
            raise ConfigError(f"{where} by a matrix that also reads another tensor")
    if config.model.norm.bias and any(reader.bias is None for reader in reading.maps):
        if norm.gain is not None and bool((norm.gain == 0).any()):
            raise ConfigError(
                f"{where} by linear maps without a bias, and one of its gains is 0, so that its "
                "bias fits nowhere; leave --fold out"
            )


def untied(config: conf.Config, built: Built) -> tuple[conf.Config, Built]:
    """Return an equivalent model whose separate head has a copy of the token table."""
    config = conf.with_overrides(config, {"model.head": "separate"})
    values = values_of(built.model)
    folded = build_model(config, vocab_size=len(values["embedding"]), draw=False)
    factor = built.model.head.factor / folded.model.head.factor  # of schemes with a rule for width
    values["head.weight"] = values["embedding"] * factor
    fill(folded.model, values)
    return config, folded


class Comparison(NamedTuple):
    """The difference of two models' logits: max |difference| by dtype, and the largest |logit|.

    rounding: max |difference| of the first model's logits between float32 and float64.
    """

    float64: float
    float32: float
    rounding: float
    largest: float

    @property
    def equal(self) -> bool:
        """Whether the difference is rounding: tiny in float64, like the model's own in float32."""
        error = max(self.rounding, torch.finfo(torch.float32).eps * self.largest)
        return self.float64 <= 1e-9 * self.largest and self.float32 <= 16 * error


def compare(
    before: tuple[conf.Config, Mapping[str, Tensor]],
    after: tuple[conf.Config, Mapping[str, Tensor]],
    inputs: Tensor,
    *,
    step: int = 0,
) -> Comparison:
    """Compare both models' logits on a batch of tokens, in float64 and in float32.

    before, after: configuration and values by name; inputs: (batch, seq); step: the last training
    step, for schemes that change with it.
    """

    def logits(config: conf.Config, values: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        built = build_model(config, vocab_size=len(values["embedding"]), draw=False)
        built.at_step(step)
        built.model.to(dtype)
        fill(built.model, values)
        return output(built.model, inputs).double()

    float64, float32 = torch.float64, torch.float32
    exact, single = logits(*before, float64), logits(*before, float32)

    def max_abs(x: Tensor) -> float:
        # a NaN difference must not count as equal
        value = float(x.abs().max())
        return value if value == value else float("inf")

    return Comparison(
        float64=max_abs(logits(*after, float64) - exact),
        float32=max_abs(logits(*after, float32) - single),
        rounding=max_abs(single - exact),
        largest=max_abs(exact),
    )


def output(model: Transformer, inputs: Tensor) -> Tensor:
    """Return the logits as in validation: evaluation mode, batch norms with running averages."""
    with torch.no_grad(), model.statistics("followed"):
        after_fold: Tensor = model.eval()(inputs)
    return after_fold


def forward_times(
    models: Mapping[str, Transformer],
    inputs: Tensor,
    clock: Callable[[], float],
    *,
    rounds: int = 40,
    seconds: float = 20.0,
) -> dict[str, list[float]]:
    """Time a forward pass of each model in rounds, in seconds; the order reverses every round.

    Times are paired: other load on the machine affects all models of a round equally.  There are as
    many rounds as fit in `seconds`, at least 4 and at most `rounds`.
    """
    times: dict[str, list[float]] = {name: [] for name in models}
    order = list(models)
    for name in order:  # first calls allocate
        output(models[name], inputs)
    start = clock()
    for number in range(rounds):
        if number >= 4 and clock() - start > seconds:
            break
        for name in order:
            began = clock()
            output(models[name], inputs)
            times[name].append(clock() - began)
        order.reverse()
    return times
