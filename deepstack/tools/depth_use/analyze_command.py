"""The command `deepstack analyze RUN…`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import typer

from deepstack.base import ConfigError, NothingMatchedError
from deepstack.cli import (
    Json,
    Plugins,
    command,
    complete_names,
    emit,
    emit_json,
    flag,
    load_plugins,
    log,
    option,
    show_work,
)
from deepstack.records import Analysis, find_runs

Analyze = Callable[..., dict[str, Analysis]]
TRAINING, PROBES = 16, 8


@command("Tools", "deepstack analyze results/quick/RUN --what lens,effects")
def analyze_command(
    runs: list[str] = typer.Argument(metavar="RUN", help="Runs, or folders of runs."),
    what: str = option(
        "Analyses, as in lens,effects: deepstack list analyses.",
        default="lens",
        autocompletion=complete_names("analyses"),
    ),
    batches: int = option("Held-out batches of train.batch_size sequences.", default=4, min=1),
    training_batches: int = option(
        "Training batches on which linear maps are fitted.", default=TRAINING, min=1
    ),
    every: int | None = option(
        "Change every so many-th layer (default: at most 128 layers are changed).", min=1
    ),
    other: Path | None = option(
        "A run that `similarity` compares with RUN.", "--with", metavar="RUN2"
    ),
    side: str | None = option("encoder or decoder, of a model with both (default: the decoder)."),
    probes: int = option("Random probes of a Jacobian.", default=PROBES, min=2),
    step: int | None = option(
        "Weights of a step that train.keep_weights kept (default: the newest).", min=0
    ),
    text: Path | None = option(
        "Text, or a file of tokens, for a Hugging Face folder in place of RUN."
    ),
    bos: bool = flag("With --text: begin each sequence with the folder's bos_token_id.", "--bos"),
    plugin: Plugins = [],
    json: Json = False,
) -> None:
    """Measure on saved weights what each layer contributes: does a stack use its depth?

    Arrays go to analysis/<name>/ in the run's folder, with their meaning and checksums; a repeated
    call replaces them. The table has the numbers. An analysis changes one layer at a time and runs
    the model on held-out batches: it costs as many forward passes as it changes layers.

    RUN may be a folder of Hugging Face transformers with config.json and *.safetensors, which
    --text gives text for its tokenizer.json. It needs transformers, and runs no code of the folder.
    """
    load_plugins(plugin)
    from deepstack.tools.depth_use.runs import analyze_run

    names = names_of(what)
    given = {"every": every is not None, "probes": probes != PROBES, "other": other is not None}
    refuse_unused(names, given | {"training_batches": training_batches != TRAINING})
    trained, external = find_inputs(runs, text)
    if bos and not external:
        raise ConfigError("--bos: found no Hugging Face folder; allowed with --text")
    if external and (other or side or step is not None):
        raise ConfigError("--with, --side, --step: found a Hugging Face folder; allowed with runs")
    results: dict[Path, dict[str, Analysis]] = {}
    with show_work("analyzing") as work:
        of_run: Analyze = partial(analyze_run, side=side, other=other, step=step, say=work.note)
        paths = {path.resolve(): (path, of_run) for path in trained}
        for path, reader in external.items():
            paths[path.resolve()] = path, partial(reader, text=text or "", bos=bos)
        for path, analyze in paths.values():
            work.step(f"analyzing {path.name}", len(paths))
            try:
                results[path] = analyze(
                    path,
                    names,
                    batches=batches,
                    training_batches=training_batches,
                    every=every,
                    probes=probes,
                )
            except (ConfigError, NothingMatchedError) as error:
                if len(paths) == 1:
                    raise
                work.note(f"left out: {error}")
    if not results:
        raise NothingMatchedError("no run could be analyzed")
    if json:
        emit_json([{"run": str(path), "analyses": json_of(one)} for path, one in results.items()])
        return
    for path, analyses in results.items():
        log_notes(path, analyses)
    emit([row for path, analyses in results.items() for row in rows_of(path, analyses)], False)


def names_of(what: str) -> list[str]:
    """Return the analyses that `--what` names.  Raises ConfigError for none, or an unknown one."""
    from deepstack.tools.depth_use.analyses import MEASURES

    names = [name.strip() for name in what.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--what: found no name; allowed some of {', '.join(MEASURES)}")
    for name in names:
        MEASURES[name]
    return names


def refuse_unused(names: list[str], given: dict[str, bool]) -> None:
    """Raise ConfigError for a given setting that none of the analyses reads."""
    from deepstack.tools.depth_use.measure import USED

    for setting in [setting for setting, is_given in given.items() if is_given]:
        users = [name for name, used in USED.items() if setting in used]
        if not set(users) & set(names):
            option_name = "with" if setting == "other" else setting.replace("_", "-")
            raise ConfigError(
                f"--{option_name}: found with --what {','.join(names)}, which does not use it; "
                f"allowed with {', '.join(users)}"
            )


def find_inputs(runs: list[str], text: Path | None) -> tuple[list[Path], dict[Path, Analyze]]:
    """Return the run folders, and the Hugging Face folders with their analysis.

    Raises ConfigError for a folder of another format, and for one of --text and a Hugging Face
    folder without the other.
    """
    from deepstack.tools.depth_use.foreign_folders import reader_of, refuse_other_formats

    readers = {run: reader_of(run, text) for run in runs}
    refuse_other_formats(run for run in runs if readers[run] is None)
    external = {Path(run): reader for run, reader in readers.items() if reader is not None}
    trained = [one.path for run in runs if readers[run] is None for one in find_runs(run)]
    if bool(external) != (text is not None):
        problem = "no text" if external else "text and no Hugging Face folder"
        raise ConfigError(f"--text: found {problem}; allowed a text file with such a folder")
    return trained, external


def log_notes(path: Path, analyses: dict[str, Analysis]) -> None:
    """Print the device, the notes of the analyses, and where those without numbers lie."""
    about = next(iter(analyses.values())).about
    computed = about.get("device", "cpu"), about.get("precision", "fp32")
    if computed != ("cpu", "fp32"):
        log(f"{path.name}: computed on {computed[0]}, products in {computed[1]}")
    for note in dict.fromkeys(note for one in analyses.values() for note in one.notes):
        log(note)
    if arrays := [name for name, one in analyses.items() if one.columns and not one.scalars]:
        log(f"{', '.join(arrays)}: no numbers; arrays are in {path / 'analysis'}")


def json_of(analyses: dict[str, Analysis]) -> dict[str, Any]:
    """Return the numbers of a run's analyses, with notes, for JSON."""
    parts = ("scalars", "notes", "about")
    return {name: {part: getattr(one, part) for part in parts} for name, one in analyses.items()}


def rows_of(path: Path, analyses: dict[str, Analysis]) -> list[dict[str, Any]]:
    """Return a row of the table for each number."""
    return [
        {"run": path.name, "analysis": name, "number": number, "value": value}
        | {key: one.columns[number][key] for key in ("unit", "meaning")}
        for name, one in analyses.items()
        for number, value in one.scalars.items()
    ]
