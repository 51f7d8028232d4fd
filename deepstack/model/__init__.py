"""The stack that a configuration describes; it knows no device, no dtype and no compiler."""

from deepstack.model.build import build_model
from deepstack.model.decoding import decoder_of, generate
from deepstack.model.initialise import initialise
from deepstack.model.layer import Layer
from deepstack.model.resolve import option_defaults, with_defaults, without_defaults
from deepstack.model.transformer import Transformer, places
from deepstack.model.trial import shallow, try_scheme

__all__ = [
    "Layer",
    "Transformer",
    "build_model",
    "decoder_of",
    "generate",
    "initialise",
    "option_defaults",
    "places",
    "shallow",
    "try_scheme",
    "with_defaults",
    "without_defaults",
]
