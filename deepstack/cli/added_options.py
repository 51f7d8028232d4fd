"""Options that an instrument or integration adds to a command of the core.

A subclass of CompareTable, SweepOption or LauncherOption stands in a file of the name that its
base gives, in a folder of instruments/, tools/ or integrations/.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from deepstack.base.extensions import import_extensions

if TYPE_CHECKING:
    from deepstack.config import Study
    from deepstack.runs import Runs
    from deepstack.sweeps import Cell, CellProgress, Launcher

F = TypeVar("F", bound=Callable[..., None])


class AddedOptions:
    """Options of a command: the annotated attributes of a subclass, with `option(…)` as defaults.

    An instance has the values that the user gave.

    file: the name of the files that define subclasses.
    place: options are listed by this number.
    """

    file = ""
    place = 100

    def __init__(self, values: Mapping[str, Any]) -> None:
        for name in inspect.get_annotations(type(self)):
            setattr(self, name, values[name])

    @property
    def name(self) -> str:
        """The name of the first option."""
        return next(iter(inspect.get_annotations(type(self))))

    @property
    def is_chosen(self) -> bool:
        """Whether the user gave the first option."""
        return getattr(self, self.name) not in (None, False)

    @classmethod
    def parameters(cls) -> list[Parameter]:
        """Return the options as parameters of a command."""
        return [
            Parameter(
                name,
                Parameter.POSITIONAL_OR_KEYWORD,
                default=vars(cls)[name],
                annotation=annotation,
            )
            for name, annotation in inspect.get_annotations(cls, eval_str=True).items()
        ]

    @classmethod
    def defined(cls) -> list[type[Self]]:
        """Return the subclasses in the order of their places."""
        import_extensions(cls.file)
        return sorted(cls.__subclasses__(), key=lambda one: one.place)

    @property
    def changed(self) -> list[str]:
        """The options whose values are not the defaults."""
        defaults = {name: vars(type(self))[name].default for name in vars(self)}
        return [name for name, value in vars(self).items() if value != defaults[name]]

    @classmethod
    def idle(cls, values: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return the options that the user gave without effect, each with those that it needs."""
        every = [each(values) for each in cls.defined()]
        used = {name for one in every if one.is_chosen for name in vars(one)}
        idle: dict[str, list[str]] = {}
        for one in every:
            for name in set(one.changed) - used:
                idle.setdefault(name, []).append(one.name)
        return idle

    @classmethod
    def chosen(cls, values: Mapping[str, Any]) -> list[Self]:
        """Return an instance of each subclass whose options the user gave."""
        return [one for one in (each(values) for each in cls.defined()) if one.is_chosen]


class CompareTable(AddedOptions):
    """A table that `deepstack compare` prints in place of the default one.

    problem: the message if no study has rows.
    answer: the columns that a narrow terminal never leaves out, beside the row's name; None: all.
    """

    file = "compare_table"
    problem = ""
    answer: Sequence[str] | None = None

    def rows(
        self, directories: Sequence[str], where: Sequence[str], last: int | None
    ) -> Sequence[dict[str, Any]]:
        """Return the rows of all studies below some folders; print notes on stderr."""
        from deepstack.cli.output import study_rows

        return study_rows(directories, where, last, self.table, self.problem)

    def table(self, runs: "Runs") -> tuple[Sequence[dict[str, Any]], Sequence[str]]:
        """Return rows and notes for the runs of a study, or raise NothingMatchedError."""
        raise NotImplementedError


@dataclass(frozen=True)
class SweepOrder:
    """A sweep as the user typed it.

    name: the study's folder below `out`.
    hours: the limit of --max-hours.
    """

    study: "Study"
    name: str
    out: Path
    workers: int | None
    hours: float | None
    dry_run: bool
    quiet: bool
    json: bool


class Training(Protocol):
    """Trains grids of runs into the study of a sweep, as its options say."""

    order: SweepOrder

    def train(self, study: "Study", *, part: bool = False) -> "list[CellProgress]":
        """Train the runs of a study, and return how they ended.  part: whether others follow."""

    def into(self, name: str) -> "Training":
        """Return the training of another study beside it, within the same limits."""

    def finish(self, progress: "Sequence[CellProgress]") -> None:
        """Print the results; raise Interrupted or typer.Exit(3) if a run is not done."""

    def end(self, progress: "Sequence[CellProgress]") -> None:
        """Do the same as `finish`, without the results."""


class SweepOption(AddedOptions):
    """A task of `deepstack sweep` in place of training the grid of runs once."""

    file = "sweep_option"

    def run(self, order: SweepOrder, training: Training) -> None:
        """Do the task, or with --dry-run print its size.

        training: trains its runs, at the place and within the limits that the user gave.
        """
        raise NotImplementedError


class LauncherOption(AddedOptions):
    """A place for the runs of `deepstack sweep` other than this machine.

    flag: the option in messages.
    """

    file = "launcher_option"
    flag = ""

    def own_words(self, words: Sequence[str]) -> list[str]:
        """Return the words of the command line that belong to this option, such as an address."""
        return []

    def launcher(self, order: SweepOrder, cells: "Sequence[Cell]") -> "Launcher | None":
        """Return the launcher of these cells; None if the cells were handed to another program."""
        raise NotImplementedError


def with_added(options: type[AddedOptions], before: str) -> Callable[[F], F]:
    """Decorate a command that takes the added options as `**added`.

    before: the command's own parameter before which its help lists them.
    """

    def extend(function: F) -> F:
        signature = inspect.signature(function, eval_str=True)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        at = [one.name for one in own].index(before)
        added: dict[str, Parameter] = {}
        for one in (one for each in options.defined() for one in each.parameters()):
            if one.name in added:  # two tasks share an option
                added[one.name].default.help += f" {one.default.help}"
            added.setdefault(one.name, one)
        parameters = [*own[:at], *added.values(), *own[at:]]
        vars(function)["__signature__"] = signature.replace(parameters=parameters)
        return function

    return extend
