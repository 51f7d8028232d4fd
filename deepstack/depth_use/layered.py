"""A trained model as layers of one stream, which an analysis can change one at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack.diagnostics import evaluating
from deepstack.diagnostics.external_calls import call_model, tensor_of, undisturbed
from deepstack.errors import ConfigError
from deepstack.model import Transformer
from deepstack.schemes import Tap
from deepstack.schemes.tap import tapped
from deepstack.tasks import IGNORE

Call = Callable[[int, Any], Any]
"""call(i, x): the output of layer i (0, 1, …) for the stream x, at whatever position it is."""
Change = Callable[[Call, Any], Any]
"""A replacement of a layer: (call, x) -> the stream after it."""
Changes = Mapping[int, Change]
Take = Callable[[int, Any], None]
"""Receives l and the stream x_l, l = 0..depth, in their order."""


@dataclass(frozen=True)
class Sample:
    """A batch: the model's inputs, and targets, (batch, seq), or None; IGNORE is not predicted."""

    inputs: Any
    targets: Tensor | None = None

    def chosen(self, x: Tensor) -> Tensor:
        """Return the rows of x, (batch, seq, …), at predicted positions: (positions, …)."""
        if self.targets is None:
            return x.flatten(0, -2)
        return x[self.targets.to(x.device) != IGNORE]

    def predicted(self) -> int:
        """Return the number of predicted positions; 0 without targets."""
        return 0 if self.targets is None else int((self.targets != IGNORE).sum().item())

    def loss(self, logits: Tensor) -> float:
        """Return the mean cross-entropy at predicted positions in nats; NaN without targets."""
        if self.targets is None:
            return float("nan")
        flat = logits.flatten(0, -2).float()
        targets = self.targets.to(logits.device).flatten()
        return F.cross_entropy(flat, targets, ignore_index=IGNORE).item()


STREAM_NAMES = ("hidden_states", "x", "src", "input")
UNCHANGED: Changes = MappingProxyType({})


def ignore(index: int, x: Any) -> None:
    """Take a stream and do nothing with it."""


def calling(*indices: int) -> Change:
    """Return the change that runs these layers, one after the other; with none, the identity."""

    def change(call: Call, x: Any) -> Any:
        for index in indices:
            x = call(index, x)
        return x

    return change


class Layered:
    """A model as x_l = layer_l(x_{l-1}), l = 1..depth, and logits that a head reads from x_depth.

    A hook on each layer applies the changes to its output.
    one_tensor: whether the stream is one tensor (batch, seq, d), so that layers can be exchanged;
    why_not: the reason if it is not.  Methods run inside of `ready`.
    """

    one_tensor: bool = True
    why_not: str = ""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        name: str,
        read_out: Callable[[Sample, Any], Tensor],
    ) -> None:
        """Take a model apart; read_out: a sample and its x_l -> the logits that the head reads."""
        if len(set(layers)) < len(layers):
            raise ConfigError("layers: found one module several times; allowed each once")
        self.model, self.layers, self.name = model, layers, name
        self.read_out, self.depth = read_out, len(layers)

    def ready(self) -> AbstractContextManager[None]:
        """Set evaluation mode, plain operations and no gradients inside the block."""
        return undisturbed(self.model)

    def sublayer_cosines(self, sample: Sample) -> dict[str, Tensor]:
        """Return sublayer -> (depth,), the mean cosine of its output with the stream; {} if none.

        The stream is that which enters the sublayer.
        """
        return {}

    def run(self, sample: Sample, change: Changes = UNCHANGED, take: Take = ignore) -> Tensor:
        """Return the logits with the layers of `change` (0, 1, …) replaced."""
        order = iter(range(self.depth))

        def replace(
            index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> Any:
            if next(order, None) != index:
                raise ConfigError(f"layers: {self.name} are not called once each, in their order")
            x, rebuild = stream_among(args, kwargs, Tensor if self.one_tensor else object)
            if index == 0:
                take(0, x)

            def call(other: int, x: Tensor) -> Any:
                args, kwargs = rebuild(x)
                return stream_in(self.layers[other].forward(*args, **kwargs))  # without hooks

            def stream_in(output: Any) -> Any:
                y = tensor_of(output) if self.one_tensor else output
                if self.one_tensor and (y is None or y.shape != x.shape):
                    raise ConfigError(f"layers: layer {index + 1} does not return the stream")
                return y

            y = change[index](call, x) if index in change else stream_in(output)
            take(index + 1, y)
            if index not in change:
                return output
            return (y, *output[1:]) if isinstance(output, tuple) else y

        with ExitStack() as stack:
            for index, layer in enumerate(self.layers):
                hook = layer.register_forward_hook(partial(replace, index), with_kwargs=True)
                stack.callback(hook.remove)
            output = call_model(self.model, sample.inputs)
        logits = getattr(output, "logits", None)
        logits = tensor_of(output) if logits is None else logits
        if not isinstance(logits, Tensor) or next(order, None) is not None:
            raise ConfigError(f"model(batch) gives no logits, or does not call all {self.name}")
        return logits

    def states_and_logits(
        self, sample: Sample, change: Changes = UNCHANGED
    ) -> tuple[list[Tensor], Tensor]:
        """Return x_0, …, x_depth and the logits, with some layers replaced."""
        states: list[Tensor] = []
        logits = self.run(sample, change, lambda _, x: states.append(x))
        return states, logits

    def loss(self, sample: Sample, change: Changes = UNCHANGED) -> float:
        """Return the loss with some layers replaced."""
        return sample.loss(self.run(sample, change))


def stream_among(
    args: tuple[Any, ...], kwargs: dict[str, Any], kind: type
) -> tuple[Any, Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Return the stream among the arguments of a layer, and a function that replaces it.

    kind: of a stream that is the first argument.
    """
    if args and isinstance(args[0], kind):
        return args[0], lambda x: ((x, *args[1:]), kwargs)
    known = [name for name in STREAM_NAMES if isinstance(kwargs.get(name), Tensor)]
    if known:
        return kwargs[known[0]], lambda x: (args, kwargs | {known[0]: x})
    raise ConfigError("layers: a layer is called without a tensor as its first argument")


class CosineTap(Tap):
    """Record the mean cosine of each sublayer's output with the stream that it joins."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def enter(self, x: Tensor) -> None:
        self.x = x

    def branch(self, G: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
        out = G(y)
        if out.shape == self.x.shape:
            self.values.append(F.cosine_similarity(out, self.x, dim=-1).mean())
        return out


class StackLayers(Layered):
    """The layers of one stack of a deepstack model; the other stack stays as it is.

    side: 'encoder' or 'decoder'.  The lens of an encoder of two stacks reads through the decoder.
    """

    def __init__(self, model: Transformer, side: str) -> None:
        self.transformer, self.side, self.stack = model, side, model.stacks[side]
        super().__init__(model, list(self.stack.layers), side, self.logits)
        with torch.no_grad():
            some = model.embedding.new_zeros(1, 2, model.embedding.shape[1])
            stream = self.stack.enter(some)
        self.one_tensor = isinstance(stream, Tensor) and stream.shape == some.shape
        label = self.stack.schemes[0].label
        self.why_not = f"the stream of {label} is more than one tensor (batch, seq, d_model)"

    @contextmanager
    def ready(self) -> Iterator[None]:
        model = self.transformer
        with evaluating(model), model.statistics("followed"), model.unfused(), torch.no_grad():
            yield

    def logits(self, sample: Sample, x: Any) -> Tensor:
        """Return the logits that are read from x_l, of an encoder of two stacks by the decoder."""
        model, output = self.transformer, self.stack.leave(x)
        if self.side == "encoder" and "decoder" in model.stacks:
            output = model.stacks["decoder"](model.inputs(sample.inputs)[-1], output)
        logits: Tensor = model.head(output, model.embedding)
        return logits

    def sublayer_cosines(self, sample: Sample) -> dict[str, Tensor]:
        tap, names = CosineTap(), self.stack.schemes[0].sublayers
        with tapped(self.stack.schemes, tap):
            self.run(sample)
        if len(tap.values) != self.depth * len(names):
            return {}
        values = torch.stack(tap.values).unflatten(0, (self.depth, len(names)))
        return dict(zip(names, values.unbind(dim=1), strict=True))
