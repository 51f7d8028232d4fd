"""The activations of feed-forwards: one class each, a function of a tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepstack.base.errors import ConfigError
from deepstack.base.kinds import Definition, Kind

# The roots of E[sigmoid(z)^2] = 0.2933790 and E[tanh(z)^2] = 0.3942945, z ~ N(0, 1): divided by
# these, an activation preserves the second moment.  Derived: no paper defines them.
SIGMOID_RMS, TANH_RMS = 0.29337903585809**0.5, 0.39429449039784**0.5
# Gated feed-forwards, as papers call them, and the activation of their gate.
GATES = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "glu": "sigmoid"}


class ActivationKind(Kind["Activation"]):
    """The registry of activations, which knows the names of gates."""

    def look_up(self, name: str) -> type[Activation]:
        """Return an activation; the error for the name of a gate says how to get the gate."""
        try:
            return super().look_up(name)
        except ConfigError as error:
            if gate := GATES.get(name.lower()):
                raise ConfigError(
                    f"{error}; {name} is model.activation={gate} with model.gated=true",
                    key=error.key,
                ) from None
            raise


ACTIVATIONS: Kind[Activation] = ActivationKind("activation", "model.activation")


class Activation(Definition, kind=ACTIVATIONS):
    """A function z -> phi(z) of each number; each activation is a subclass with a name."""

    def __call__(self, z: Tensor) -> Tensor:
        """Return phi(z), of the shape of z."""
        raise NotImplementedError


class Relu(Activation, name="relu"):
    """max(z, 0)."""

    def __call__(self, z: Tensor) -> Tensor:
        return torch.relu(z)


class Gelu(Activation, name="gelu"):
    """z Phi(z), exact, Phi the distribution function of N(0, 1)."""

    def __call__(self, z: Tensor) -> Tensor:
        return F.gelu(z)


class Sigmoid(Activation, name="sigmoid"):
    """1/(1 + exp(-z))."""

    def __call__(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z)


class Tanh(Activation, name="tanh"):
    """tanh(z)."""

    def __call__(self, z: Tensor) -> Tensor:
        return torch.tanh(z)


class Selu(Activation, name="selu"):
    """1.0507 z above 0, 1.0507 * 1.6733 (exp(z) - 1) below.

    Klambauer et al. 2017, arXiv:1706.02515.
    """

    def __call__(self, z: Tensor) -> Tensor:
        return F.selu(z)


class Silu(Activation, name="silu"):
    """z sigmoid(z)."""

    def __call__(self, z: Tensor) -> Tensor:
        return F.silu(z)


class SquaredRelu(Activation, name="relu2"):
    """max(z, 0)^2.  So et al. 2021, arXiv:2109.08668."""

    def __call__(self, z: Tensor) -> Tensor:
        return torch.relu(z).square()


class ScaledSigmoid(Activation, name="scaled_sigmoid"):
    """sigmoid(z) / sqrt(E[sigmoid(z)^2]), z ~ N(0, 1): of unit mean square."""

    def __call__(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z) / SIGMOID_RMS


class ScaledTanh(Activation, name="scaled_tanh"):
    """tanh(z) / sqrt(E[tanh(z)^2]), z ~ N(0, 1): of unit mean square."""

    def __call__(self, z: Tensor) -> Tensor:
        return torch.tanh(z) / TANH_RMS


def activation_of(model: Any) -> Activation:
    """Return the activation of a model's settings."""
    return ACTIVATIONS.configured(model.activation, model.activation_options)()
