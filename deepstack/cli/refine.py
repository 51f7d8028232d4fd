"""`deepstack sweep --refine KEY`: finds the best value of a setting for each cell of the others."""

from __future__ import annotations

from typing import Any

from deepstack.cli.options import note, whole_numbers
from deepstack.cli.progress import show_runs
from deepstack.cli.tables import emit, emit_facts
from deepstack.config import Study


def refine_study(
    study: Study,
    key: str,
    seeds: str | None,
    search: dict[str, Any],
    *,
    dry_run: bool,
    quiet: bool,
    json: bool,
) -> None:
    """Run the search and print a row for each setting, or with `dry_run` the number of runs.

    seeds: those that select the value.  search: further arguments of `deepstack.sweeps.refine`.
    """
    from deepstack.sweeps.refine import SEED, count_runs, refine

    chosen = None if seeds is None else whole_numbers("--select-seeds", seeds)
    if dry_run:
        usual = study.grid.get(SEED, [study.base.seed])
        fewest, most = count_runs(study, key, chosen or usual, search["max_runs"])
        emit_facts({"least number of runs": fewest, "largest number of runs": most}, json)
        return
    with show_runs(f"refining {key}", quiet) as show:
        optima = refine(study, key, select_seeds=chosen, show=show, **search)
    rows = [
        one.setting
        | {key: one.value, "val_loss": one.loss}
        | ({} if one.reported is None else {"reported_loss": one.reported})
        | {"inside": one.inside, "tried": len(one.losses)}
        for one in optima
    ]
    emit(rows, json)
    if not quiet:
        note(f"next: deepstack compare {search['out'] / search['name']} --transfer")
