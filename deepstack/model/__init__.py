"""The model of a configuration, independent of device, dtype and compiler."""

from deepstack.model.activations import Activation
from deepstack.model.attention import AttentionSublayer
from deepstack.model.build import build_model
from deepstack.model.feed_forward import FeedForwardSublayer
from deepstack.model.initialise import initialise
from deepstack.model.resolve import (
    extra_memory,
    flops_of,
    option_defaults,
    tokens_per_step,
    with_defaults,
    with_steps,
    without_defaults,
)
from deepstack.model.scheme_check import check_scheme, shallow
from deepstack.model.stack import Layer
from deepstack.model.transformer import Transformer

__all__ = [
    "Activation",
    "AttentionSublayer",
    "FeedForwardSublayer",
    "Layer",
    "Transformer",
    "build_model",
    "check_scheme",
    "extra_memory",
    "flops_of",
    "initialise",
    "option_defaults",
    "shallow",
    "tokens_per_step",
    "with_defaults",
    "with_steps",
    "without_defaults",
]
