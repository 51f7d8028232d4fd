"""The layers of a model that deepstack did not build: read right, or refused by name."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepstack.base import ConfigError, DeepstackError
from deepstack.model import (
    KeptState,
    call_model,
    refuse_noise,
    undisturbed,
    unwrapped,
    written_parameters,
)
from deepstack.tasks import IGNORE
from deepstack.tools.depth_use.layer_calls import (
    copy_of,
    in_full,
    logits_of,
    place_of,
    replaced_forward,
    with_stream,
)
from deepstack.tools.depth_use.layered import Call, Change, Layered, Sample


class ExternalLayers(Layered):
    """The layers of any PyTorch model whose layers take one stream and return it.

    read_out: from the stream after a layer to logits: a given head, or the model itself with each
        layer returning that stream.
    written: parameters that a pass writes into.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        name: str,
        head: Callable[[Tensor], Tensor] | None,
    ) -> None:
        read_out = self.logits_by_the_model if head is None else lambda _, x: head(copy_of(x))
        super().__init__(unwrapped(model), layers, name, read_out)
        self.has_own_head = head is not None
        self.written: list[nn.Parameter] = []
        self._repeatable: list[Sample] = []
        self._moving: tuple[Sample, list[str]] | None = None

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Disable what `undisturbed` does, and key-value caches that configs ask for."""
        configs = {id(c): c for m in self.model.modules() if (c := getattr(m, "config", None))}
        caching = [c for c in configs.values() if getattr(c, "use_cache", None) is True]
        for config in caching:
            config.use_cache = False
        try:
            with undisturbed(self.model, written=self.written):
                yield
        finally:
            for config in caching:
                config.use_cache = True

    @contextmanager
    def one_pass(self, sample: Sample) -> Iterator[None]:
        """Restore after the block all that the model and the batch held before."""
        state = KeptState(self.model, [sample.inputs], self.written)
        try:
            yield
        finally:
            state.restore()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Raise an error of the model's code as ConfigError, one line."""
        try:
            yield
        except DeepstackError:
            raise
        except Exception as error:  # whatever the model raises
            text = " ".join(str(error).split())
            kind = type(error).__name__
            raise ConfigError(f"the model's code fails: {kind}: {text[:300]}") from error

    def logits_by_the_model(self, sample: Sample, x: Tensor) -> Tensor:
        """Return the logits of the model in which every layer returns x."""
        places = self.places(sample)

        def forward(index: int, *args: Any, **kwargs: Any) -> Any:
            y = copy_of(x)
            if places[index].in_place:  # the caller may read the tensor that it passed
                y = place_of(args, kwargs, Tensor)[0].copy_(y)
            return with_stream(places[index].output, y)

        with ExitStack() as stack, self.guarded():
            for index, layer in enumerate(self.layers):
                stack.enter_context(replaced_forward(layer, partial(forward, index)))
            return self.plain_logits(sample)

    def plain_logits(self, sample: Sample) -> Tensor:
        """Return the logits of the model as it is now."""
        with self.guarded(), self.one_pass(sample):
            logits = logits_of(call_model(self.model, sample.inputs))
            if logits is None:
                raise ConfigError("model(batch) gives no logits")
            return logits.clone()  # the model may keep the tensor

    def learn_written(self, sample: Sample) -> None:
        """Find the parameters that a pass writes into, which `one_pass` then restores."""
        run = partial(self.plain_logits, sample)
        self.written = written_parameters(self.model, run, sample.inputs)

    def check(self, sample: Sample) -> None:
        """Raise ConfigError unless the layers, run one by one, are the model, and its head reads.

        Also unless the model gives the same logits under two random seeds.
        """
        refuse_noise(self.model, lambda: self.plain_logits(sample).float())
        plain = self.plain_logits(sample)
        states: list[Tensor] = []
        logits = self.run(sample, take=lambda _, x: states.append(copy_of(x)))
        refuse_stream(states[0], logits)
        refuse_targets(sample, logits)
        if not close(plain, logits):
            raise ConfigError(
                "layers: run one by one they give other logits than model(batch): the model keeps "
                "a state (of a cache: give use_cache=False), or reads a layer's input after the "
                "layer"
            )
        with self.guarded():
            read = self.read_out(sample, states[-1])
        if not close(read, logits):
            if not self.has_own_head:
                raise ConfigError(
                    f"layers: the logits are not read from the stream after {self.name}; give "
                    "layers=… and head=…"
                )
            raise ConfigError(
                "head: after the last layer it does not give the model's logits "
                f"{tuple(logits.shape)}; name all that follows the layers, as in "
                "head=('transformer.ln_f', 'lm_head'), or leave head out: the model itself reads"
            )

    def refuse_state(self, sample: Sample) -> None:
        """Raise ConfigError if a layer returns something else when it is called again."""
        if any(sample is each for each in self._repeatable):
            return
        states = self.states_and_logits(sample)[0]

        def again(index: int) -> Change:
            def change(call: Call, x: Tensor) -> Tensor:
                problem = ""
                try:
                    y = call(index, x)
                    if not close(in_full(y), states[index + 1]):
                        problem = "another output"
                except ConfigError as error:
                    problem = f"an error ({error})"
                if problem:
                    raise ConfigError(
                        f"layers: layer {index + 1} of {self.name} gives {problem} when it is "
                        "called a second time with the same stream: it keeps a state, such as a "
                        "key-value cache, or draws random numbers; for a cache, give "
                        "use_cache=False in the batch"
                    )
                return y

            return change

        torch.manual_seed(2)
        self.run(sample, {index: again(index) for index in range(self.depth)})
        self._repeatable.append(sample)

    def arguments_of_the_stream(self, sample: Sample) -> list[str]:
        """Return the names of arguments of layers that change with x_0, beside the stream."""
        if self._moving is None or self._moving[0] is not sample:
            places = self.places(sample)

            def moved(x: Tensor) -> Tensor:
                noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
                return x + noise.to(x) * x.float().std().to(x)

            others = self.trace(sample, enter=moved)[1]
            names = {n: None for a, b in zip(places, others, strict=True) for n in a.differing(b)}
            self._moving = sample, list(names)
        return self._moving[1]


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal up to the rounding of their type."""
    if a.shape != b.shape:
        return False
    largest = b.abs().max() if b.numel() else 0.0
    tolerance = float(torch.finfo(a.dtype).eps ** 0.5 * largest)
    return torch.allclose(a.double(), b.double(), rtol=0.0, atol=tolerance, equal_nan=True)


def refuse_stream(x: Tensor, logits: Tensor) -> None:
    """Raise ConfigError unless stream and logits are finite, and the stream (batch, seq, d)."""
    for name, tensor in {"the stream": x, "the logits": logits}.items():
        if not tensor.is_floating_point():
            raise ConfigError(f"layers: {name}: found {tensor.dtype}; allowed floating point")
        if not tensor.isfinite().all():
            raise ConfigError(f"layers: {name}: found values that are not finite; allowed finite")
    if x.ndim not in (2, 3):
        raise ConfigError(
            f"layers: the stream has the shape {tuple(x.shape)}; allowed (batch, seq, d)"
        )


def refuse_targets(sample: Sample, logits: Tensor) -> None:
    """Raise ConfigError unless the targets fit the logits and predict something."""
    targets = sample.targets
    if targets is None:
        return
    shape, vocabulary = tuple(logits.shape[:-1]), logits.shape[-1]
    if tuple(targets.shape) != shape or targets.is_floating_point():
        raise ConfigError(
            f"targets: found {targets.dtype} of shape {tuple(targets.shape)}; allowed integers of "
            f"shape {shape}, as the logits have it"
        )
    chosen = targets[targets != IGNORE]
    if not chosen.numel():
        raise ConfigError(f"targets: all are {IGNORE}, so no position is predicted; give some")
    if int(chosen.min()) < 0 or int(chosen.max()) >= vocabulary:
        raise ConfigError(
            f"targets: found {int(chosen.min())} to {int(chosen.max())}; allowed 0 to "
            f"{vocabulary - 1}, or {IGNORE} where none is predicted"
        )
