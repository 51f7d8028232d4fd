"""`deepstack sweep --refine KEY`: finds the best value of a setting for each cell of the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstack.cli.options import note
from deepstack.cli.tables import emit, emit_facts
from deepstack.errors import ConfigError

if TYPE_CHECKING:
    from deepstack.config import Study
    from deepstack.sweeps import Progress
    from deepstack.sweeps.refine import Optimum


def refine_study(
    study: Study,
    key: str,
    *,
    tolerance: float,
    max_runs: int | None,
    select_seeds: str | None,
    name: str,
    out: Path,
    workers: int | None,
    dry_run: bool,
    quiet: bool,
    json: bool,
) -> None:
    """Run the search and print a row for each setting, or with `dry_run` the number of runs."""
    from rich.console import Console

    from deepstack.sweeps.refine import SEED, count_runs, refine

    chosen = None if select_seeds is None else whole_numbers("--select-seeds", select_seeds)
    seeds = chosen or study.grid.get(SEED, [study.base.seed])
    if dry_run:
        fewest, most = count_runs(study, key, seeds, max_runs)
        emit_facts({"least number of runs": fewest, "largest number of runs": most}, json)
        return
    with Console(stderr=True, quiet=quiet).status(f"refining {key}") as status:
        optima = refine(
            study,
            key,
            tolerance=tolerance,
            max_runs=max_runs,
            select_seeds=chosen,
            name=name,
            out=out,
            workers=workers,
            show=lambda progress: status.update(f"refining {key}: {progress_line(progress)}"),
        )
    emit([row_of(optimum, key) for optimum in optima], json)
    if not quiet:
        note(f"next: deepstack compare {out / name} --transfer")


def row_of(optimum: Optimum, key: str) -> dict[str, Any]:
    """Return a row of the table: the setting, its best value, loss and the values tried."""
    return optimum.setting | {
        key: optimum.value,
        "val_loss": optimum.loss,
        **({} if optimum.reported is None else {"reported_loss": optimum.reported}),
        "inside": optimum.inside,
        "tried": len(optimum.losses),
    }


def progress_line(progress: Sequence[Progress]) -> str:
    """Return how many runs have ended."""
    ended = sum(entry.state in ("done", "diverged") for entry in progress)
    return f"{ended} of {len(progress)} runs"


def whole_numbers(option: str, text: str) -> list[int]:
    """Return the numbers of a comma-separated list.  Raises ConfigError for anything else."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option}: found {text!r}; allowed whole numbers, as in 6,12") from None
