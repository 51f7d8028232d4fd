"""Folders of models that other libraries saved; each integration that reads some adds a reader.

Its file foreign_folder.py has `is_readable(folder)`, `other_format(folder)`, which returns a
refusal or None, and `analyze_folder(folder, names, text=…, bos=…, …)`, which returns the analyses.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from deepstack.base import ConfigError, import_extensions

KIND = "foreign_folder"


def reader_of(folder: str, text: Path | None) -> Callable[..., Any] | None:
    """Return the function that analyzes a folder of another library, or None for other folders.

    Raises ConfigError for a text, which only such a folder needs, if no integration reads any.
    """
    readers = import_extensions(KIND)
    if text is not None and not readers:
        raise ConfigError(
            "--text: it is for folders of Hugging Face transformers, and this deepstack has no "
            "integrations/huggingface, which reads them"
        )
    fitting = [one.analyze_folder for one in readers if one.is_readable(folder)]
    return fitting[0] if fitting else None


def refuse_other_formats(folders: Iterable[str]) -> None:
    """Raise ConfigError for a folder whose format can be named but not read."""
    for folder in folders:
        for one in import_extensions(KIND):
            if reason := one.other_format(folder):
                raise ConfigError(reason)
