"""`deepstack sweep --refine KEY`: finds the best value of a setting for each cell of the others."""

from __future__ import annotations

from pathlib import Path

from deepstack.cli.options import note, whole_numbers
from deepstack.cli.progress import show_runs
from deepstack.cli.tables import emit, emit_facts
from deepstack.config import Study


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
    from deepstack.sweeps.refine import SEED, count_runs, refine

    chosen = None if select_seeds is None else whole_numbers("--select-seeds", select_seeds)
    seeds = chosen or study.grid.get(SEED, [study.base.seed])
    if dry_run:
        fewest, most = count_runs(study, key, seeds, max_runs)
        emit_facts({"least number of runs": fewest, "largest number of runs": most}, json)
        return
    with show_runs(f"refining {key}", quiet) as show:
        optima = refine(
            study,
            key,
            tolerance=tolerance,
            max_runs=max_runs,
            select_seeds=chosen,
            name=name,
            out=out,
            workers=workers,
            show=show,
        )
    rows = [
        one.setting
        | {key: one.value, "val_loss": one.loss}
        | ({} if one.reported is None else {"reported_loss": one.reported})
        | {"inside": one.inside, "tried": len(one.losses)}
        for one in optima
    ]
    emit(rows, json)
    if not quiet:
        note(f"next: deepstack compare {out / name} --transfer")
