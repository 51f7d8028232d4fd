"""The stack that a configuration describes; it knows no device, no dtype and no compiler."""

from deepstack.model.build import build_model, take_ways
from deepstack.model.initialise import initialise
from deepstack.model.resolve import with_defaults, without_defaults
from deepstack.model.stack import Encoder, Layer

__all__ = [
    "Encoder",
    "Layer",
    "build_model",
    "initialise",
    "take_ways",
    "with_defaults",
    "without_defaults",
]
