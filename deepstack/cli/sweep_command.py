"""deepstack sweep [CONFIG] [key=a,b …]"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepstack.cli.options import Json, Out, Plugins, Quiet, load_plugins
from deepstack.errors import Interrupted

if TYPE_CHECKING:
    from deepstack.sweeps import Cell, Progress

BUILT_IN = "depth_sweep"


def register(app: typer.Typer) -> None:
    app.command("sweep")(sweep)


def sweep(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[CONFIG] [KEY=A,B]…",
            help="A run's or a sweep's YAML (default: the built-in depth study), then settings; "
            "several values make a grid.",
        ),
    ] = [],
    depths: Annotated[str | None, typer.Option(help="model.depth: 6,48,200,1000.")] = None,
    schemes: Annotated[str | None, typer.Option(help="model.scheme: post_ln,deepnorm.")] = None,
    seeds: Annotated[str | None, typer.Option(help="seed: 0,1,2.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time (default: by cores or GPUs).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan; run nothing.")
    ] = False,
    retry: Annotated[
        bool, typer.Option("--retry", help="Run again what failed or had too little memory.")
    ] = False,
    out: Out = Path("results"),
    study: Annotated[str | None, typer.Option(help="Folder of the sweep under --out.")] = None,
    plugin: Plugins = [],
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train a grid of runs, several at once; print a table of scheme by depth.

    What is done already is skipped, what was interrupted goes on.
    """
    from deepstack import config as conf
    from deepstack.config.examples import example

    named = bool(words) and "=" not in words[0]
    path = Path(words[0]) if named else example(BUILT_IN)
    settings = words[1:] if named else list(words)
    lists = {"model.depth": depths, "model.scheme": schemes, "seed": seeds}
    settings += [f"{key}={values}" for key, values in lists.items() if values is not None]
    described = conf.load_study(path, settings)
    load_plugins(plugin)

    from deepstack.cli.signals import stop_on_signal
    from deepstack.cli.sweep_display import watch
    from deepstack.cli.tables import emit
    from deepstack.sweeps import Local, Pool, default_workers, plan

    name = study or conf.study_name(described.base, path)
    cells = plan(described.base, described.grid, study=name, out=out)
    count = workers or default_workers(cells)
    if dry_run:
        emit(plan_rows(cells, count), json)
        return
    refuse_full_disk(cells, out)
    bring_reference(path, out / name)
    launcher = Local(cells, name, out, count)
    with watch(quiet, cells, count) as show, stop_on_signal() as stop:
        progress = Pool(cells, launcher, retry=retry, stop=stop, show=show).run()
    emit(result_rows(progress, nested=json), json)
    for entry in progress:
        if entry.message:
            typer.echo(f"{entry.cell.folder.path}: {entry.state}: {entry.message}", err=True)
    if stop.signal is not None:
        raise Interrupted("interrupted, saved; the same command goes on", stop.signal)
    if any(entry.state not in ("done", "diverged") for entry in progress):
        raise typer.Exit(3)


def bring_reference(path: Path, study: Path) -> None:
    """Copy `<file>.reference.csv` beside a study's file to where its charts look for it.

    They draw these published values over the study's own (see `deepstack.plots.draw`).
    """
    reference = path.with_suffix(".reference.csv")
    if reference.is_file():
        study.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(reference, study / "reference.csv")


def plan_rows(cells: Sequence[Cell], workers: int) -> list[dict[str, Any]]:
    """What would be run: one row a run, a last one for the whole; times from a short probe."""
    from deepstack.sweeps import seconds_per_run

    todo = [cell for cell in cells if cell.state not in ("done", "diverged")]
    seconds = dict(zip(map(id, todo), seconds_per_run(todo), strict=True))
    rows: list[dict[str, Any]] = [
        {
            "run": cell.folder.name,
            "state": cell.state,
            "steps": cell.config.train.steps,
            "parameters": cell.parameters,
            "memory_mb": round(cell.memory / 1e6),
            "minutes": round(seconds[id(cell)] / 60, 1) if id(cell) in seconds else 0.0,
        }
        for cell in cells
    ]
    total = sum(seconds.values()) / 60
    longest = max(seconds.values(), default=0.0) / 60
    rows.append(
        {
            "run": f"{len(todo)} to run, {workers} at a time",
            "state": "",
            "steps": sum(cell.config.train.steps for cell in todo),
            "parameters": None,
            "memory_mb": round(sum(sorted(c.memory for c in todo)[-workers:]) / 1e6),
            "minutes": round(max(total / workers, longest), 1),
        }
    )
    return rows


def result_rows(progress: Sequence[Progress], nested: bool) -> list[dict[Any, Any]]:
    """Scheme by depth: last validation loss and ‖ΔF‖; for JSON one row a run."""
    from deepstack.records import Run, runs_table

    runs = [Run(e.cell.folder.path) for e in progress if e.cell.folder.exists()]
    if nested:
        return runs_table(runs).to_dict("records") if runs else []
    table: dict[str, dict[str, list[str]]] = {}
    depths = sorted({e.cell.config.model.depth for e in progress})
    for entry in progress:
        model = entry.cell.config.model
        cells = table.setdefault(model.scheme, {})
        cells.setdefault(str(model.depth), []).append(outcome(entry))
    return [
        {"validation loss (‖ΔF‖)": scheme} | {str(d): merged(cells.get(str(d), [])) for d in depths}
        for scheme, cells in table.items()
    ]


def outcome(entry: Progress) -> str:
    """'2.91 (3.4)', or the state of a run that is not done."""
    from deepstack.records import Run

    if entry.state != "done":
        return f"{entry.state} at {entry.step}"
    evals = Run(entry.cell.folder.path).evals
    masked = evals["loss_masked"].iloc[-1] if "loss_masked" in evals else float("nan")
    loss = masked if masked == masked else evals["loss"].iloc[-1]
    return f"{loss:.3f} ({entry.model_update:.3g})"


def merged(cells: list[str]) -> str:
    """Seeds and other settings of one scheme and depth, below each other."""
    return "\n".join(cells) if cells else "-"


def refuse_full_disk(cells: Sequence[Cell], out: Path) -> None:
    """Raise ResourceError when the sweep's weights and checkpoints cannot fit on the disk."""
    from deepstack.errors import ResourceError

    todo = [cell for cell in cells if cell.state not in ("done", "diverged")]
    # A finished run keeps its weights; running ones hold two checkpoints of three tensors each.
    needed = sum(4 * cell.parameters for cell in todo)
    needed += max((24 * cell.parameters for cell in todo), default=0)
    where = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(where).free
    if needed > free:
        raise ResourceError(
            f"{out}: the sweep needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; "
            "give another folder with --out"
        )
