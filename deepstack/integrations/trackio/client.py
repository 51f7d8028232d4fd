"""The package of trackio, which has one folder for each process."""

import os
from pathlib import Path
from typing import Any

from deepstack.base import ConfigError


def trackio_in(folder: str | Path) -> Any:
    """Return the module of trackio, which writes into this folder until the process ends."""
    absolute, given = Path(folder).resolve(), os.environ.get("TRACKIO_DIR")
    os.environ["TRACKIO_DIR"] = str(absolute)  # read once, by the import
    try:
        import trackio
    finally:
        if given is None:  # this folder is not the user's choice for the next run
            del os.environ["TRACKIO_DIR"]
        else:
            os.environ["TRACKIO_DIR"] = given
    if Path(trackio.TRACKIO_DIR) != absolute:
        raise ConfigError(
            f"trackio writes to {trackio.TRACKIO_DIR} until this process ends; set TRACKIO_DIR "
            "to one folder for all runs before it begins"
        )
    return trackio
