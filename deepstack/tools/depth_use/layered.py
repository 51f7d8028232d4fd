"""A trained model as layers of one stream, which an analysis can change one at a time."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack.base import ConfigError
from deepstack.diagnostics import evaluating
from deepstack.model import Transformer, call_model, tensor_of, undisturbed
from deepstack.schemes import Tap, tapped
from deepstack.tasks import IGNORE
from deepstack.tools.depth_use.layer_calls import (
    Place,
    copy_of,
    in_full,
    is_passed_on,
    logits_of,
    place_of,
    refuse_kind,
    replaced_forward,
    with_stream,
)

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
        targets = self.targets.to(logits.device).flatten().long()
        return F.cross_entropy(flat, targets, ignore_index=IGNORE).item()


class LayerOutput(NamedTuple):
    """A layer on a sample: z before it, its output, and the output if it were the identity."""

    state: Tensor
    output: Tensor
    passed: Tensor


UNCHANGED: Changes = MappingProxyType({})


def ignore(index: int, x: Any) -> None:
    """Take a stream and do nothing with it."""


def unchanged(x: Any) -> Any:
    """Return the stream as it is."""
    return x


def calling(*indices: int) -> Change:
    """Return the change that runs these layers, one after the other; with none, the identity."""

    def change(call: Call, x: Any) -> Any:
        for index in indices:
            x = call(index, x)
        return x

    return change


class Layered:
    """A model as x_l = layer_l(x_{l-1}), l = 1..depth, and logits that a head reads from x_depth.

    While it runs, the forward of each layer is replaced.  The layer computes on a copy of the
    stream, so that one that works in place changes nothing that an analysis holds.

    A stream of several tensors has a state z_l, (batch, seq, w): all numbers of a token that layers
    pass on and change.  What a layer adds to such a stream is its output, which z_l may follow
    from.  Of one tensor both are x_l.

    one_tensor: whether the stream is one tensor (batch, seq, d).  Methods run inside of `ready`.
    """

    one_tensor: bool = True

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
        self._places: tuple[Sample, list[Place]] | None = None

    def ready(self) -> AbstractContextManager[None]:
        """Set evaluation mode, plain operations and no gradients inside the block."""
        return undisturbed(self.model)

    def guarded(self) -> AbstractContextManager[None]:
        """Return a context in which code of the model runs."""
        return nullcontext()

    def one_pass(self, sample: Sample) -> AbstractContextManager[None]:
        """Return the context of one pass, after which the model holds the same as before."""
        return nullcontext()

    def refuse_state(self, sample: Sample) -> None:
        """Raise ConfigError if a layer returns something else when it is called again."""

    def arguments_of_the_stream(self, sample: Sample) -> list[str]:
        """Return the names of arguments of layers that depend on the stream, beside it."""
        return []

    def sublayer_cosines(self, sample: Sample) -> dict[str, Tensor]:
        """Return sublayer -> (depth,), the mean cosine of its output with the stream; {} if none.

        The stream is the sublayer's input.
        """
        return {}

    def places(self, sample: Sample) -> list[Place]:
        """Return the arguments and the output of each layer in the unchanged model."""
        if self._places is None or self._places[0] is not sample:
            self.run(sample)
        assert self._places is not None
        return self._places[1]

    def run(self, sample: Sample, change: Changes = UNCHANGED, take: Take = ignore) -> Tensor:
        """Return the logits with the layers of `change` (0, 1, …) replaced.

        A layer at another place keeps the arguments that it has at its own.
        """
        return self.trace(sample, change, take)[0]

    def trace(
        self,
        sample: Sample,
        change: Changes = UNCHANGED,
        take: Take = ignore,
        enter: Callable[[Any], Any] = unchanged,
    ) -> tuple[Tensor, list[Place]]:
        """Return logits as `run`, and what each layer is given.  enter: changes x_0."""
        own = self.places(sample) if change else []
        originals = [layer.forward for layer in self.layers]
        places: list[Place] = []
        last: tuple[Any, int] = (None, 0)

        def forward(index: int, *args: Any, **kwargs: Any) -> Any:
            nonlocal last
            if len(places) != index:
                raise ConfigError(f"layers: {self.name} are not called once each, in their order")
            stream, place = place_of(args, kwargs, Tensor if self.one_tensor else object)
            if index and self.one_tensor and not is_passed_on(stream, *last):
                raise ConfigError(
                    f"layers: between layers {index} and {index + 1} of {self.name} the model "
                    "changes the stream; give layers=[…] modules that pass it on as it is"
                )
            places.append(place)
            if self.one_tensor:
                refuse_kind(stream)
            x = enter(stream) if index == 0 else stream
            if index == 0:
                take(0, x)

            def call(other: int, x: Any) -> Any:
                at = place if other == index else own[other]
                rest, named = at.arguments(copy_of(x))
                with self.guarded():
                    return self.stream_in(originals[other](*rest, **named), x, other)

            given = copy_of(x)
            rest, named = place.arguments(given)
            output = originals[index](*rest, **named)
            y = self.stream_in(output, x, index)
            place.in_place = y is given
            if index in change:
                y = change[index](call, x)
            take(index + 1, y)
            if place.in_place and isinstance(stream, Tensor):  # the caller may read its tensor
                y = stream.copy_(y)
            if not self.one_tensor:
                return y
            place.output, last = with_stream(output, None), (y, y._version)
            return with_stream(output, y)

        with ExitStack() as stack, self.guarded():
            for index, layer in enumerate(self.layers):
                stack.enter_context(replaced_forward(layer, partial(forward, index)))
            stack.enter_context(self.one_pass(sample))
            logits = copy_of(logits_of(call_model(self.model, sample.inputs)))
        if logits is None or len(places) != self.depth:
            raise ConfigError(f"model(batch) gives no logits, or does not call all {self.name}")
        if not change and enter is unchanged:
            self._places = sample, places
        return logits, places

    def stream_in(self, output: Any, x: Any, index: int) -> Any:
        """Return the stream in the output of a layer that took x."""
        y = tensor_of(output) if self.one_tensor else output
        if self.one_tensor and (y is None or y.shape != x.shape):
            raise ConfigError(f"layers: layer {index + 1} does not return the stream")
        return y

    def state(self, index: int, x: Any) -> Tensor:
        """Return z of the stream that layer `index` takes, or, of `depth`, the last one returns."""
        return x

    def with_state(self, index: int, x: Any, z: Tensor) -> Any:
        """Return the stream x, which layer `index` takes, with another z."""
        return z

    def output(self, index: int, x: Any, y: Any) -> Tensor:
        """Return the output of a layer, given the streams before and after it."""
        return y

    def with_output(self, index: int, x: Any, output: Tensor) -> Any:
        """Return the stream after a layer that has this output, given the stream before it."""
        return output

    def pass_over(self, index: int, x: Any) -> Any:
        """Return the stream after a removed layer, which is the identity."""
        return x

    def removed(self, index: int) -> Change:
        """Return the change that removes a layer."""
        return lambda call, x: self.pass_over(index, x)

    def repeated(self, index: int) -> Change:
        """Return the change that applies a layer twice: again to x with the z that it has left."""

        def change(call: Call, x: Any) -> Any:
            z = self.state(index + 1, call(index, x))
            return call(index, self.with_state(index, x, z))

        return change

    def states_and_logits(
        self, sample: Sample, change: Changes = UNCHANGED
    ) -> tuple[list[Tensor], Tensor]:
        """Return z_0, …, z_depth, in float32 at least, and logits, with some layers replaced."""
        states: list[Tensor] = []

        def take(index: int, x: Any) -> None:
            states.append(in_full(copy_of(self.state(index, x))))

        return states, self.run(sample, change, take)

    def outputs_and_logits(
        self, sample: Sample, chosen: Collection[int]
    ) -> tuple[dict[int, LayerOutput], Tensor]:
        """Return what the chosen layers take and add, in float32 at least, and logits."""
        outputs: dict[int, LayerOutput] = {}
        before: Any = None

        def take(after: int, y: Any) -> None:
            nonlocal before
            y = copy_of(y) if self.one_tensor else y  # a later layer may change it in place
            index, x, before = after - 1, before, y
            if index in chosen:
                passed = self.output(index, x, self.pass_over(index, x))
                parts = self.state(index, x), self.output(index, x, y), passed
                outputs[index] = LayerOutput(*map(in_full, parts))

        return outputs, self.run(sample, take=take)

    def loss(self, sample: Sample, change: Changes = UNCHANGED) -> float:
        """Return the loss with some layers replaced."""
        return sample.loss(self.run(sample, change))


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
    bf16: whether matrix products are in bf16, under autocast.
    """

    def __init__(self, model: Transformer, side: str, *, bf16: bool = False) -> None:
        self.transformer, self.side, self.stack = model, side, model.stacks[side]
        self.schemes, self.bf16 = self.stack.schemes, bf16
        super().__init__(model, list(self.stack.layers), side, self.logits)
        with torch.no_grad():
            some = model.embedding.new_zeros(1, 2, model.embedding.shape[1])
            stream = self.stack.enter(some)
        self.one_tensor = isinstance(stream, Tensor) and stream.shape == some.shape

    @contextmanager
    def ready(self) -> Iterator[None]:
        model = self.transformer
        kind = model.embedding.device.type
        with (
            evaluating(model),
            model.statistics("followed"),
            model.unfused(),
            torch.no_grad(),
            torch.autocast(kind, torch.bfloat16, enabled=self.bf16),
        ):
            yield

    def state(self, index: int, x: Any) -> Tensor:
        return self.schemes[min(index, self.depth - 1)].token_state(x)

    def with_state(self, index: int, x: Any, z: Tensor) -> Any:
        return self.schemes[index].set_token_state(x, z)

    def output(self, index: int, x: Any, y: Any) -> Tensor:
        return self.schemes[index].layer_output(x, y)

    def with_output(self, index: int, x: Any, output: Tensor) -> Any:
        return self.schemes[index].set_layer_output(x, output)

    def pass_over(self, index: int, x: Any) -> Any:
        return self.schemes[index].pass_over(x)

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
