"""Conversion of a model to plain tensors, one for each matrix, named by its module; and back.

Any program can read names such as `encoder.layers.0.attention.q.weight`.  Layers are counted from 0
as in a ModuleList, and matrices that the model joins (q, k and v) are separate tensors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from deepstack import config as conf
from deepstack.base.errors import ConfigError
from deepstack.model.build import Built, build_model
from deepstack.model.sublayers import JOINED
from deepstack.model.transformer import Transformer
from deepstack.records.files import mapping
from deepstack.schemes import BatchNorm
from deepstack.schemes.role import has_role


class Paths(NamedTuple):
    """The files of one export: weights, configuration, and a description of both."""

    weights: Path
    config: Path
    about: Path


def export_paths(to: Path) -> Paths:
    """Return the paths of an export: x.safetensors, x.yaml, x.json; in a folder x is `weights`."""
    weights = to if to.suffix == ".safetensors" else to / "weights.safetensors"
    return Paths(weights, weights.with_suffix(".yaml"), weights.with_suffix(".json"))


def values_of(model: Transformer) -> dict[str, Tensor]:
    """Return every parameter and batch-norm average by its name in the model, without copies."""
    values = {name: p.detach() for name, p in model.named_parameters()}
    for name, norm in model.named_modules():
        if isinstance(norm, BatchNorm):
            values |= {
                f"{name}.{buffer}": norm.get_buffer(buffer) for buffer in BatchNorm.REMEMBERED
            }
    return values


def set_values(model: Transformer, values: Mapping[str, Tensor]) -> None:
    """Overwrite the values that `values_of` returns.

    Raises ConfigError if the names or the shapes differ.
    """
    present = values_of(model)
    refuse_other_names(values, present)
    for name, value in values.items():
        shape, wanted = tuple(value.shape), tuple(present[name].shape)
        if shape != wanted:
            raise ConfigError(f"{name} is {shape}, and in the configuration's model {wanted}")
        present[name].copy_(value)


def to_plain(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values by plain name: joined matrices separated, each matrix `….weight`."""
    plain: dict[str, Tensor] = {}
    for name, value in values.items():
        names = plain_names(model, name)
        parts = [part.contiguous().clone() for part in value.chunk(len(names))]
        plain |= dict(zip(names, parts, strict=True))
    return plain


def from_plain(model: Transformer, plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Invert `to_plain`: return the values by the model's own names.

    Raises ConfigError if the names differ from this model's names.
    """
    names = {name: plain_names(model, name) for name in values_of(model)}
    refuse_other_names(plain, dict.fromkeys(part for parts in names.values() for part in parts))
    return {name: torch.cat([plain[part] for part in parts]) for name, parts in names.items()}


def plain_names(model: nn.Module, name: str) -> tuple[str, ...]:
    """Return the plain names of a tensor, one for each equal slice of its first axis."""
    path, dot, attribute = name.rpartition(".")
    value = getattr(model.get_submodule(path), attribute)
    is_matrix = has_role(value) and value.start in ("matrix", "table")
    base, kind = attribute, "weight"
    if not is_matrix:
        base, kind = attribute.removesuffix("_bias"), "bias"
    if attribute == "weight" or (base == attribute and not is_matrix):
        return (name,)
    return tuple(f"{path}{dot}{part}.{kind}" for part in JOINED.get(base, (base,)))


def load_export(to: str | Path) -> Built:
    """Load on the CPU a model that `deepstack export` wrote to a folder or a .safetensors file.

    Raises ConfigError if a file is missing or is not one of an export.
    """
    paths = export_paths(Path(to))
    config = conf.load_config(paths.config, [])
    try:
        plain = load_file(paths.weights)
        about = mapping(paths.about)
        vocab_size, step = len(plain["embedding.weight"]), int(about["step"])
    except (OSError, ValueError, TypeError, SafetensorError, KeyError) as error:
        raise ConfigError(f"{to} is not an export of deepstack: {error}") from error
    built = build_model(config, vocab_size=vocab_size, draw=False)
    set_values(built.model, from_plain(built.model, plain))
    built.at_step(step)
    return built


def refuse_other_names(found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """Raise ConfigError if the names differ; it shows the first difference."""
    if missing := [name for name in wanted if name not in found]:
        raise ConfigError(f"the weights have no {missing[0]}, which the configuration's model has")
    if unknown := [name for name in found if name not in wanted]:
        raise ConfigError(f"the weights have {unknown[0]}, which the configuration's model has not")
