"""Kinds of study files, other than configurations with `sweep:`, that `deepstack sweep` takes.

A subclass of StudyKind stands in a file study_kind.py in a folder of tools/ or integrations/.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from deepstack.base.errors import ConfigError
from deepstack.base.extensions import import_extensions
from deepstack.base.registry import nearest
from deepstack.base.yaml_reader import read
from deepstack.config import Config
from deepstack.config.load import printable_path, read_file

if TYPE_CHECKING:
    from deepstack.cli.added_options import SweepOption
    from deepstack.cli.sweep_training import SweepTraining
    from deepstack.config import Study


class StudyKind:
    """A study file of another kind, and the settings that follow it on the command line.

    path: of the file.
    settings: words KEY=A,B.
    words: the kind in messages: 'a study of commands'.
    signs: keys of which a file of this kind has at least one, and a configuration none.
    """

    file = "study_kind"
    words = ""
    signs: tuple[str, ...] = ()

    def __init__(self, path: Path, settings: Sequence[str]) -> None:
        self.path, self.settings = path, settings

    @classmethod
    def of(cls, path: Path, settings: Sequence[str]) -> Self | None:
        """Return the study in a file if it is of one of the kinds; None for a configuration."""
        import_extensions(cls.file)
        text = read_file(path)
        kinds = [
            one for one in cls.__subclasses__() if any(sign.encode() in text for sign in one.signs)
        ]
        if not kinds:  # most files: they are parsed once, later
            return None
        keys = read(text, printable_path(path))[0].section
        found = (one for one in kinds if not keys.keys().isdisjoint(one.signs))
        return next((one(path, settings) for one in found), None)

    def load(self) -> Study:
        """Return the grid of the study.  Raises ConfigError with the place of each mistake."""
        raise NotImplementedError

    def refuse(self, tasks: Sequence[SweepOption], given: Sequence[str]) -> None:
        """Raise ConfigError for tasks, and for options of the command, that the kind cannot do."""
        raise NotImplementedError

    def training(self, given: SweepTraining) -> SweepTraining:
        """Return the training of the study's runs with the options of a given one."""
        raise NotImplementedError

    def end(self, training: SweepTraining, tasks: Sequence[SweepOption]) -> None:
        """Print the lines after the results; may raise typer.Exit."""


@contextmanager
def naming_mistyped_signs(path: Path) -> Iterator[None]:
    """Name the key of another kind that the file of the block mistypes, such as `comand`."""
    try:
        yield
    except ConfigError:
        keys = read(read_file(path), printable_path(path))[0].section
        for kind in StudyKind.__subclasses__() if "model" not in keys else ():
            for key in sorted(keys.keys() - Config.model_fields.keys()):
                if sign := nearest(key, kind.signs):
                    raise ConfigError(
                        f"{path}: found the unknown key {key!r}; did you mean {sign!r}, of "
                        f"{kind.words}?"
                    ) from None
        raise


@contextmanager
def naming_other_kinds(path: Path) -> Iterator[None]:
    """Name the kind of a file that the block cannot read: another study, or a foreign run."""
    try:
        yield
    except ConfigError:
        from deepstack.records import RunFolder

        folder = RunFolder(path.parent)
        if path.name == folder.config_path.name and folder.exists():
            from deepstack.training import require_trained_here

            require_trained_here(folder)
        if path.is_file() and (kind := StudyKind.of(path, ())) is not None:
            command = f"deepstack sweep {shlex.quote(str(path))}"
            raise ConfigError(f"{path}: found {kind.words}; use: {command}") from None
        raise
