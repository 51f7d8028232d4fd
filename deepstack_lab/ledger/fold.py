"""Folding: the gain and bias of a norm become part of the linear maps that read the norm.

Linear(g * z + b) = W diag(g) z + (W b + c), so a norm whose output enters only linear maps needs
neither.  Running the model shows which maps read the outputs of norms.  `compare` shows whether
anything else reads them.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.base import ConfigError
from deepstack.model import (
    Built,
    LinearMaps,
    Transformer,
    build_model,
    scaled_linear,
    set_values,
    values_of,
)
from deepstack.schemes import StackNorm

OF_THE_STACK = ("norm_gain", "norm_bias", "final_norm")
"""The roles of the norms configured by `model.norm`; a head's norms are not among them."""


class Reader(NamedTuple):
    """A linear map that reads a norm: y = scale * n Wᵀ + b, n the norm's output.

    weights: the names of the parameters that hold the rows of W.
    bias: the name of b, or None.
    """

    weights: tuple[str, ...]
    bias: str | None
    scale: float


def readers_of_norms(model: Transformer) -> dict[str, list[Reader]]:
    """Return the linear maps that read each norm of the stack, by the norm's name.

    A copy of the model runs once in float64, on two tokens.  A map reads a norm if its input is the
    norm's output, or a multiple of the last norm's output.
    """
    model = copy.deepcopy(model).double().eval()
    names = {parameter: name for name, parameter in model.named_parameters()}
    readers: dict[str, list[Reader]] = {}
    outputs: list[tuple[str, Tensor]] = []

    def note_output(name: str, norm: Any, args: Any, out: Tensor) -> None:
        outputs.append((name, out))

    def note_input(value: Tensor, reader: Reader) -> None:
        same = [pair for pair in outputs if pair[1].data_ptr() == value.data_ptr()]
        for norm, out in same or outputs[-1:]:
            if out.numel() != value.numel():
                continue
            value, out = value.flatten(), out.flatten()
            factor = float((value * out).sum() / out.square().sum())
            if torch.allclose(value, factor * out, rtol=1e-9, atol=0.0):
                readers[norm].append(reader._replace(scale=reader.scale * factor))

    def apply_map(path: str, maps: LinearMaps, name: str, x: Tensor) -> Tensor:
        weight, bias = maps.matrix(name)
        scale = weight.shape[1] ** -0.5 if maps.linear is scaled_linear else 1.0
        weights = tuple(f"{path}.{part}" for part in maps.parts[name])
        note_input(x, Reader(weights, f"{path}.{name}_bias" if maps.has_bias else None, scale))
        return maps.linear(x, weight, bias)

    def note_final(head: Any, args: Any) -> None:
        weight, bias = head.first_map(model.embedding)
        note_input(args[0], Reader((names[weight],), names[bias], head.factor))

    for name, module in model.named_modules():
        if isinstance(module, StackNorm) and not name.startswith("head."):
            readers[name] = []
            module.register_forward_hook(partial(note_output, name))
        if isinstance(module, LinearMaps):
            module.apply_map = partial(apply_map, name, module)  # type: ignore[method-assign]
    model.head.register_forward_pre_hook(note_final)
    with torch.no_grad():
        tokens = torch.zeros(1, model.source_len + 2, dtype=torch.int64)
        model(tokens.to(model.embedding.device))
    return readers


def fold(
    config: conf.Config, built: Built, *, untie: bool = False
) -> tuple[conf.Config, dict[str, Tensor]]:
    """Fold every norm (g, b) of the stack into the maps that read it: W' = W diag(g), c' = W b + c.

    A tied head's matrix is also the embedding and does not change: the last norm keeps its gain
    ('model.norm.final_gain: true'), and its bias moves into the head's.

    Returns the configuration of a model whose norms have neither gain nor bias, and its values by
    name (see `plain.values_of`), in double precision.  If a map has no bias to absorb the norm's
    ('model.bias: false'), norms keep a bias, b / g.  If anything but a linear map reads a norm
    (Post-LN: the residual), that model computes something else: see `compare`.

    untie: first give a tied head a separate matrix, (vocab_size, d_model) parameters more.

    Raises ConfigError if no norm has a gain or a bias to fold, or if a bias that stays in its norm
    would be divided by a gain of 0.
    """
    if untie and config.model.head == "tied":
        config, built = untied(config, built)
    readers = readers_of_norms(built.model)
    maps = [reader for each in readers.values() for reader in each]
    keeps_bias = config.model.norm.bias and any(reader.bias is None for reader in maps)
    values = {name: value.double() for name, value in values_of(built.model).items()}
    if config.model.qk_norm:
        refuse_unread_norms(readers, values)
    is_tied = any("embedding" in reader.weights for reader in maps)
    keep_gain = [
        n for n in readers if is_tied and f"{n}.gain" in values and n.endswith("final_norm")
    ]
    count = len(values)
    for norm, each in readers.items():
        fold_norm(values, norm, each, keeps_gain=norm in keep_gain, keeps_bias=keeps_bias)
    if len(values) == count:
        raise ConfigError(
            "nothing to fold: no norm of its stack has a gain, or a bias that linear maps could "
            "take (model.bias: true)"
        )
    return folded_config(config, keeps_bias, keeps_gain=bool(keep_gain)), values


def folded_config(config: conf.Config, keeps_bias: bool, keeps_gain: bool) -> conf.Config:
    """Return the configuration of a model whose norms are folded.

    keeps_bias: whether norms keep a bias; keeps_gain: whether the last norm keeps its gain.
    """
    changes: dict[str, Any] = {"model.norm.gain": False, "model.norm.bias": keeps_bias}
    if keeps_gain or config.model.norm.final_gain:
        changes["model.norm.final_gain"] = True if keeps_gain else None
    if config.train.trainable != "all":  # removed roles cannot be trained
        left = [role for role in config.train.trainable if role not in OF_THE_STACK]
        changes["train.trainable"] = left or "all"
    return conf.with_overrides(config, changes)


def refuse_unread_norms(
    readers: Mapping[str, Sequence[Reader]], values: Mapping[str, Tensor]
) -> None:
    """Raise ConfigError if norms of queries or keys have a trained gain or bias."""
    neutral = {"gain": 1.0, "bias": 0.0}
    for norm in (name for name, each in readers.items() if not each):
        for part, value in neutral.items():
            trained = values.get(f"{norm}.{part}")
            if trained is not None and bool((trained != value).any()):
                raise ConfigError(
                    f"cannot fold with model.qk_norm: true: no linear map reads {norm}, whose "
                    f"{part} is trained, and model.norm.{part}: false would remove it"
                )


def fold_norm(
    values: dict[str, Tensor],
    norm: str,
    readers: Sequence[Reader],
    *,
    keeps_gain: bool = False,
    keeps_bias: bool = False,
) -> None:
    """Move one norm's gain and bias, or only one of them, into the maps that read it."""
    gain = None if keeps_gain else values.pop(f"{norm}.gain", None)
    bias = values.pop(f"{norm}.bias", None)
    if keeps_bias and bias is not None:
        if gain is not None and not gain.all():
            raise ConfigError(
                f"cannot fold {norm}: a bias cannot be divided by a gain of 0, and no linear map "
                "could take it (model.bias: false)"
            )
        values[f"{norm}.bias"] = bias if gain is None else bias / gain
        bias = None
    for weights, offset, scale in readers:
        if bias is not None and offset is not None:
            matrix = torch.cat([values[weight] for weight in weights])
            values[offset] = values[offset] + scale * (matrix @ bias)
        if gain is not None:
            values |= {weight: values[weight] * gain for weight in weights}


def untied(config: conf.Config, built: Built) -> tuple[conf.Config, Built]:
    """Return an equivalent model whose separate head has a copy of the token table."""
    config = conf.with_overrides(config, {"model.head": "separate"})
    values = values_of(built.model)
    folded = build_model(config, vocab_size=len(values["embedding"]), draw=False)
    factor = built.model.head.factor / folded.model.head.factor  # of schemes with a rule for width
    values["head.weight"] = values["embedding"] * factor
    set_values(folded.model, values)
    return config, folded


class Comparison(NamedTuple):
    """The largest difference of two models' logits in float64, and the largest |logit|."""

    difference: float
    largest: float

    @property
    def equal(self) -> bool:
        """Whether the difference is rounding."""
        return self.difference <= 1e-9 * self.largest  # False for NaN


def compare(
    before: tuple[conf.Config, Mapping[str, Tensor]],
    after: tuple[conf.Config, Mapping[str, Tensor]],
    inputs: Tensor,
    *,
    step: int = 0,
) -> Comparison:
    """Compare both models' logits on a batch of tokens, in float64.

    before, after: configuration and values by name.
    inputs: (batch, seq).
    step: the last training step, for schemes that change with it.
    """

    def logits(config: conf.Config, values: Mapping[str, Tensor]) -> Tensor:
        built = build_model(config, vocab_size=len(values["embedding"]), draw=False)
        built.at_step(step)
        built.model.double()
        set_values(built.model, values)
        return output(built.model, inputs)

    exact = logits(*before)
    difference = (logits(*after) - exact).abs().max()
    return Comparison(float(difference), float(exact.abs().max()))


def output(model: Transformer, inputs: Tensor) -> Tensor:
    """Return the logits as in validation: evaluation mode, batch norms with running averages."""
    with torch.no_grad(), model.statistics("followed"):
        after_fold: Tensor = model.eval()(inputs)
    return after_fold
