"""The scheme of one stack: a scheme's class with its options, depth and position."""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any, TypeGuard

from torch import Tensor

from deepstack.base.errors import ConfigError, PluginError
from deepstack.base.options import OptionsByName, validated
from deepstack.config import Config, Model, StackSizes
from deepstack.schemes.checks import check_layers, defined_at
from deepstack.schemes.parts import Parts, StackPosition
from deepstack.schemes.scheme import SCHEMES, Optim, Scheme


class StackScheme:
    """A scheme in one stack: its coefficients, its constraint and its layers.

    scheme_class: a subclass of the registered class, configured for this stack.
    options: all options with their values.
    place: the position; its depth is the stack's.
    """

    alpha: float | None
    """The residual coefficient of this stack, or None."""
    beta: float | None
    """The initialisation gain of this stack, or None."""
    head_factor: float
    """The constant by which the head multiplies F."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        place: StackPosition,
        config: Config | None = None,
    ) -> None:
        """Validate the options, and bind the arguments that class methods name."""
        known, section = scheme_options(name), "model.scheme_options"
        values = validated(known, options, kind="scheme", name=name, section=section)
        self.options = {key: option.default for key, option in known.items()} | values
        self.place, self.depth = place, place.depth
        self.scheme_class = SCHEMES[name].configure(self.options, place)
        arguments = {**self.options, "config": config, "place": place}
        if config is not None:
            arguments["qkv"] = config.model.init.qkv
            arguments["optimizer"] = config.train.optimizer

        def bind(method: Callable[..., Any]) -> Callable[..., Any]:
            names = inspect.signature(method).parameters
            return partial(method, **{key: arguments[key] for key in arguments if key in names})

        scheme = self.scheme_class
        self.alpha = self.number_of("alpha", bind(scheme.alpha), self.depth)
        self.beta = self.number_of("beta", bind(scheme.beta), self.depth)
        self.head_factor = float(self.number_of("head_factor", bind(scheme.head_factor)))
        self.extra_memory = partial(self.number_of, "extra_memory", bind(scheme.extra_memory))
        self.extra_flops = partial(self.number_of, "extra_flops", bind(scheme.extra_flops))
        self._gain, self._optim = bind(scheme.gain), bind(scheme.optim)
        self._project = bind(scheme.project)

    def gain(self, role: str, layer: int) -> float:
        """Return the factor on a role's initial matrix; layer is 1..N, 0 outside the layers.

        Raises PluginError unless it is a finite number >= 0.
        """
        return float(self.number_of("gain", self._gain, role, layer, self.depth))

    def number_of(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Return a method's value; raise PluginError unless it is a finite number >= 0.

        alpha and beta may also be negative, or None.
        """
        value, is_coefficient = method(*arguments), name in ("alpha", "beta")
        if not (value is None or is_finite(value) if is_coefficient else is_factor(value)):
            allowed = "a finite number or None" if is_coefficient else "a finite number >= 0"
            raise PluginError(
                f"{defined_at(self.scheme_class, name)}{name}({', '.join(map(repr, arguments))}) "
                f"gave {value!r}; allowed {allowed}"
            )
        return value

    def optim(self, role: str) -> Optim:
        """Return the factors on a role's learning rate, weight decay and epsilon.

        Raises PluginError unless they are an Optim of finite numbers >= 0.
        """
        value = self._optim(role, self.depth)
        if not isinstance(value, Optim) or not all(map(is_factor, value)):
            raise PluginError(
                f"{defined_at(self.scheme_class, 'optim')}optim{(role, self.depth)!r} gave "
                f"{value!r}; allowed deepstack.schemes.Optim(lr=…, weight_decay=…, eps=…), "
                "factors >= 0"
            )
        return value

    def constrain(self, role: str, matrices: Tensor) -> None:
        """Apply the scheme's constraint to a role's matrices, (layers, n_out, n_in), in place."""
        if self._project(role, matrices) is not None:
            raise PluginError(
                f"{defined_at(self.scheme_class, 'project')}project gave something; it changes the "
                "matrices in place, matrices.copy_(…), and returns nothing"
            )

    def layers(self, parts: Parts) -> list[Scheme]:
        """Return the scheme of every layer, with equal parameters."""
        arguments = {key: self.options[key] for key in self.scheme_class.argument_options}
        numbers = range(1, self.depth + 1)
        schemes = [self.scheme_class(layer, self.depth, parts, **arguments) for layer in numbers]
        check_layers(schemes, Scheme)
        return schemes


def is_finite(value: object) -> TypeGuard[Real]:
    """Return whether a value is a finite number."""
    return isinstance(value, Real) and math.isfinite(value)


def is_factor(value: object) -> bool:
    """Return whether a value is a finite number >= 0."""
    return is_finite(value) and float(value) >= 0


def scheme_options(name: str) -> OptionsByName:
    """Return the options of a registered scheme; raise ConfigError for an unknown name."""
    try:
        scheme = SCHEMES[name]
    except ConfigError as error:
        raise ConfigError(f"model.scheme: {error}", key="model.scheme") from None
    return {**scheme.attribute_options, **scheme.argument_options}


def stack_positions(model: Model) -> dict[str, StackPosition]:
    """Return the position of each stack of a configuration, by side."""
    family, depth = model.family, model.depth
    depths = {"encoder": (depth, 0), "decoder": (0, depth)}
    depths["encoder_decoder"] = (depth, model.decoder_depth or depth)
    sublayers = 2 if model.decoder_attention == "merged" else 3
    loop = model.unique_layers or 0, model.prelude_layers, model.coda_layers
    counts = *depths[family], sublayers, *loop
    encoder = StackPosition(family, "encoder", *counts)
    positions = {"encoder": encoder, "decoder": encoder._replace(side="decoder")}
    return {side: position for side, position in positions.items() if position.depth}


def stack_schemes(config: Config) -> dict[str, StackScheme]:
    """Return the scheme of each stack of a configuration, by side."""
    name, options = config.model.scheme, config.model.scheme_options
    return {
        side: StackScheme(name, options, place, config)
        for side, place in stack_positions(config.model).items()
    }


def scheme_memory(config: Config) -> Callable[[StackSizes], int]:
    """Return the memory that the scheme of a configuration adds, for `config.memory_estimate`."""
    return next(iter(stack_schemes(config).values())).extra_memory


def scheme_flops(config: Config) -> Callable[[StackSizes], int]:
    """Return the FLOPs that the scheme of a configuration adds, for `config.step_flops`."""
    return next(iter(stack_schemes(config).values())).extra_flops
