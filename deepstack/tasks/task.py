"""The interface of tasks: batches as a pure function of (seed, step), and reference losses."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from deepstack.base.errors import ConfigError, PluginError
from deepstack.base.options import OptionsByName, options_of_function, validated
from deepstack.base.registry import Registry, place_of, refuse_no_name
from deepstack.config import Config

IGNORE = -100
"""Target of a position where nothing is predicted (the default of torch's cross-entropy)."""

# The second word of every random seed. A task that draws more than batches (the Markov chain) uses
# STRUCTURE for it, so that no stream repeats another.
TRAIN, VALIDATION, PROBE, STRUCTURE = 1, 2, 3, 4


class Batch(NamedTuple):
    """Input sequences and their targets.

    inputs: (batch, seq) int64, the tokens that the model reads. For an encoder-decoder: the source,
        seq_len tokens, followed by the decoder's input, the target shifted right.
    targets: (batch, seq or target) int64, the true token, or IGNORE where nothing is predicted.
    masked: like targets, bool, the predicted positions whose token the inputs do not reveal. They
        show [MASK]; in a decoder, they predict the next token.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    masked: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Task:
    """A source of batches, batch = draw(random(seed, stream, index)): equal steps, equal batches.

    A task keeps no state between batches, so a resumed run needs no random state of it.

    name, vocab_size: of the model and the run folder; tokens are 0..vocab_size-1.
    seed: of the run.
    draw: (random, batch_size, held_out) -> Batch. `held_out` asks for data never trained on.
    references: losses in nats to compare the training loss with.
    data: name, sha256 and bytes of the training data, as recorded with the run.
    exact_loss: Batch -> the least expected loss, in nats, at the predicted positions of that batch.
    levels, level_of: the numbers k of steps that answers take, each with its own accuracy in
        evals.csv, and Batch -> the k of each predicted position, (batch, target).
    unigram: frequencies of the tokens among the `masked` targets of the training data, (tokens,).
    guess: Batch -> P(true) at the `masked` positions, (count,), of the best predictor that reads
        the query and not the data it asks about. None: that predictor is the unigram.
    memory: bytes of data that the task holds in memory.
    bytes_per_token: of the held-out text, if a loss per byte can be computed from one per token.
    notices: lines about the data for the user, at the start of a run.
    """

    name: str
    vocab_size: int
    seed: int
    draw: Callable[[np.random.Generator, int, bool], Batch]
    references: dict[str, float] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    exact_loss: Callable[[Batch], float] | None = None
    unigram: NDArray[np.float64] | None = None
    guess: Callable[[Batch], NDArray[np.float64]] | None = None
    levels: tuple[int, ...] = ()
    level_of: Callable[[Batch], NDArray[np.int64]] | None = None
    memory: int = 0
    bytes_per_token: float | None = None
    notices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        size = self.vocab_size
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 2:
            raise PluginError(
                f"task {self.name!r}: found vocab_size={size!r}; allowed an integer >= 2, tokens "
                "are 0 to vocab_size - 1"
            )
        try:
            inspect.signature(self.draw).bind(None, 2, True)
        except TypeError as error:
            raise PluginError(
                f"task {self.name!r}: {place_of(self.draw)}{error}; write Task(name, vocab_size, "
                "seed, draw) with a function draw(random, batch_size, held_out)"
            ) from None

    @cached_property
    def lengths(self) -> tuple[int, int]:
        """Return the length of the inputs and of the targets, the same in every batch."""
        batch = self.draw(np.random.default_rng([self.seed, PROBE, 0]), 2, True)
        return batch.inputs.shape[1], batch.targets.shape[1]

    @property
    def target_len(self) -> int:
        """Return the number of positions of the stack that predicts: seq_len for one stack."""
        return self.lengths[1]

    def train_batch(self, step: int, batch_size: int) -> Batch:
        """Return the batch of a training step: a pure function of (seed, step, batch_size)."""
        return self._batch(TRAIN, step, batch_size, held_out=False)

    def validation_batch(self, index: int, batch_size: int) -> Batch:
        """Return held-out batch number `index`, the same at every evaluation of a run."""
        return self._batch(VALIDATION, index, batch_size, held_out=True)

    def probe_batch(self, batch_size: int) -> Batch:
        """Return the fixed held-out batch on which the model update is measured."""
        return self._batch(PROBE, 0, batch_size, held_out=True)

    def optimal_loss(self, batch: Batch) -> float | None:
        """Return the mean of -ln P(true | inputs) over the predicted positions, in nats.

        None if the task's distribution is not known exactly.
        """
        return None if self.exact_loss is None else self.exact_loss(batch)

    def unigram_loss(self, batch: Batch) -> float | None:
        """Return the mean of -ln p(true) over the `masked` positions, in nats.

        p is the best prediction without context: `guess`, else the unigram.  None without such
        positions, or without either of the two.
        """
        if not batch.masked.any():
            return None
        if self.guess is not None:
            return float(-np.log(self.guess(batch)).mean())
        if self.unigram is None:
            return None
        return float(-np.log(self.unigram[batch.targets[batch.masked]]).mean())

    def _batch(self, stream: int, index: int, batch_size: int, *, held_out: bool) -> Batch:
        random = np.random.default_rng([self.seed, stream, index])
        batch = self.draw(random, batch_size, held_out)
        if wrong := self._wrong(batch, batch_size):
            raise PluginError(f"task {self.name!r}: {place_of(self.draw)}{wrong}")
        contiguous = np.ascontiguousarray  # torch takes no reversed view
        return Batch(contiguous(batch.inputs), contiguous(batch.targets), contiguous(batch.masked))

    def _wrong(self, batch: Batch, batch_size: int) -> str:
        """Describe the mistake in a batch, or return ''."""
        if not isinstance(batch, Batch):
            return f"draw gave {type(batch).__name__}; allowed a Batch(inputs, targets, masked)"
        for name, kind in (("inputs", np.int64), ("targets", np.int64), ("masked", np.bool_)):
            value, wanted = getattr(batch, name), np.dtype(kind)
            if not isinstance(value, np.ndarray) or value.dtype != wanted:
                actual = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
                return f"draw gave {name} of {actual}; allowed a numpy array of {wanted}"
            if value.ndim != 2 or len(value) != batch_size:
                return f"draw gave {name} {value.shape}; allowed ({batch_size}, length)"
        inputs, targets, masked = batch
        if masked.shape != targets.shape:
            return f"draw gave masked {masked.shape}; allowed the shape of targets {targets.shape}"
        if (inputs.shape[1], targets.shape[1]) != self.lengths:
            of_inputs, of_targets = self.lengths
            return (
                f"draw gave inputs {inputs.shape} and targets {targets.shape}; allowed the lengths "
                f"{of_inputs} and {of_targets} of the probe batch in every batch"
            )
        predicted = targets != IGNORE
        if not predicted.any():
            return "draw gave a batch with nothing to predict: every target is IGNORE"
        if masked[~predicted].any():
            return "draw gave masked where the target is IGNORE; allowed predicted positions alone"
        for name, tokens in (("inputs", inputs), ("targets", targets[predicted])):
            least, most = tokens.min(), tokens.max()
            if least < 0 or most >= self.vocab_size:
                bad = least if least < 0 else most
                return f"draw gave {name} with {bad}; allowed 0 to {self.vocab_size - 1}"
        return ""


TaskFunction = Callable[..., Task]
AnyTaskFunction = TypeVar("AnyTaskFunction", bound=TaskFunction)

TASKS: Registry[TaskFunction] = Registry("task")

_GIVEN = ("seq_len", "seed", "family")


def task(name: str) -> Callable[[AnyTaskFunction], AnyTaskFunction]:
    """Register the decorated function as a task.

    Its parameters are keyword-only: `seq_len`, `seed`, and its options, each with a type annotation
    and a default. A task for more than encoders also has `family`, a Literal of its families.
    `Annotated[float, Field(gt=0, le=1, description="...")]` states range and help text.
    Raises PluginError for any other signature.
    """

    refuse_no_name("task", name)

    def register(function: AnyTaskFunction) -> AnyTaskFunction:
        if not (function.__doc__ or "").strip():
            raise PluginError(f"task {name!r}: its function needs a docstring; lists show it")
        parameters = inspect.signature(function).parameters
        if not {"seq_len", "seed"} <= parameters.keys():
            raise PluginError(f"task {name!r}: its function needs the parameters seq_len and seed")
        for key, parameter in parameters.items():
            incomplete = parameter.empty in (parameter.annotation, parameter.default)
            if parameter.kind is not parameter.KEYWORD_ONLY or (incomplete and key not in _GIVEN):
                raise PluginError(
                    f"task {name!r}: parameter {key!r} must be keyword-only; an option also needs "
                    "a type annotation and a default"
                )
        if "family" in parameters and not get_args(get_type_hints(function)["family"]):
            raise PluginError(
                f"task {name!r}: parameter 'family' must be a Literal of the families it has "
                "batches for, as in Literal['encoder', 'decoder']"
            )
        TASKS.register(name, function)
        return function

    return register


def task_options(name: str) -> OptionsByName:
    """Return the options of task `name`, in the order of its function's parameters."""
    options = options_of_function(TASKS[name], f"task {name!r}")
    return {key: option for key, option in options.items() if key not in _GIVEN}


def task_families(name: str) -> tuple[str, ...]:
    """Return the families of models that task `name` has batches for."""
    hints = get_type_hints(TASKS[name])
    return get_args(hints["family"]) if "family" in hints else ("encoder",)


def build_task(
    name: str, options: Mapping[str, Any], *, seq_len: int, seed: int, family: str = "encoder"
) -> Task:
    """Build task `name` for a family of models, with its options validated.

    Raises ConfigError for an unknown name or a family without batches. Unknown options (with the
    nearest known one), wrong types and values out of range raise one with a line per problem.
    """
    try:
        function = TASKS[name]
    except ConfigError as error:
        raise ConfigError(str(error), key="task.name") from None
    values = validated(task_options(name), options, kind="task", name=name, section="task")
    families = task_families(name)
    if family not in families:
        able = ", ".join(other for other in TASKS if family in task_families(other))
        raise ConfigError(
            f"model.family: found {family}, for which the task {name} has no batches; "
            f"allowed with task.name={name}: {', '.join(families)}; tasks for {family}: {able}",
            key="model.family",
        )
    more = {"family": family} if "family" in inspect.signature(function).parameters else {}
    built = function(seq_len=seq_len, seed=seed, **more, **values)
    if not isinstance(built, Task):
        raise PluginError(f"task {name!r}: its function returned {type(built).__name__}, no Task")
    refuse_ill_drawn(built, seq_len, family)
    return built


def refuse_ill_drawn(task: Task, seq_len: int, family: str) -> None:
    """Raise PluginError if batches have a wrong length or depend on more than the generator."""
    batch, repeated = task.probe_batch(2), task.probe_batch(2)
    where = f"task {task.name!r}: {place_of(task.draw)}"
    if not all(np.array_equal(one, other) for one, other in zip(batch, repeated, strict=True)):
        raise PluginError(
            f"{where}draw gave two batches for one state of its generator; draw from `random` "
            "alone: no np.random, no counter, nothing remembered"
        )
    inputs, targets, _ = batch
    shapes = f"{where}draw gave inputs {inputs.shape} and targets {targets.shape}"
    if family == "encoder_decoder":
        if inputs.shape[1] != seq_len + targets.shape[1]:
            raise PluginError(f"{shapes}; allowed (2, {seq_len} + target) and (2, target)")
    elif inputs.shape != (2, seq_len) or targets.shape != (2, seq_len):
        raise PluginError(f"{shapes}; allowed (2, seq_len), here (2, {seq_len}), for both")


def task_of(config: Config) -> Task:
    """Return the task of a configuration.  Raises ConfigError as `build_task` does."""
    task = config.task
    return build_task(
        task.name,
        task.options(),
        seq_len=task.seq_len,
        seed=config.seed,
        family=config.model.family,
    )


def choose_positions(
    random: np.random.Generator, batch_size: int, seq_len: int, count: int
) -> NDArray[np.bool_]:
    """Choose exactly `count` positions of each row, all sets equally likely.

    Returns (batch, seq), True at the chosen ones.
    """
    keys = random.random((batch_size, seq_len))
    # Compare with the count-th smallest key and do not use argpartition: its order depends on the
    # processor, and equal seeds must give equal batches everywhere.
    bound = np.partition(keys, count - 1, axis=1)[:, count - 1 : count]
    return keys <= bound
