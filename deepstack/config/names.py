"""Check the names of studies, which become folders below the folder of results."""

from __future__ import annotations

import re

from deepstack.config.schema import RUN_NAME
from deepstack.errors import ConfigError
from deepstack.yaml_reader import quote

LONGEST_NAME = 64


def checked_study(name: str) -> str:
    """Return the name of a study if a configuration's `name` may have it.

    Raises ConfigError for what would lead elsewhere ('../x', '/x', 'a/b', '.'), hide ('.x'),
    look like an option ('-x'), be no folder at all ('') or be too long.
    """
    if re.fullmatch(RUN_NAME, name) and len(name) <= LONGEST_NAME:
        return name
    raise ConfigError(
        f"--study: found {quote(name)}; allowed letters, digits, '.', '_' and '-', not starting "
        f"with '.' or '-' (at most {LONGEST_NAME})"
    )
