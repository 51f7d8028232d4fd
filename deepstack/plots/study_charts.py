"""Charts of the runs of studies, drawn one after the other and written as files."""

import dataclasses
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from deepstack.base.errors import (
    BrokenChartError,
    ConfigError,
    DeepstackError,
    NothingMatchedError,
    PluginError,
    ResourceError,
)
from deepstack.base.plugins import bug_in
from deepstack.base.registry import unknown
from deepstack.plots.chart import CHARTS, Chart, ChartFunction, Options
from deepstack.plots.file_names import file_name
from deepstack.plots.files import DEFAULT_OPTIONS, FORMATS, save
from deepstack.plots.reference import read_reference
from deepstack.records import RunFolder
from deepstack.records.opened import followed
from deepstack.records.published import writable
from deepstack.runs.conditions import Where
from deepstack.runs.runs import Runs, choose_best
from deepstack.runs.studies import (
    Folders,
    find_studies,
    list_folders,
    refuse_unknown_diagnostic,
    use_readable,
)

NOT_DRAWN = " is not drawn: "  # between the name of a chart and the reason


def draw(
    directory: Folders,
    charts: Sequence[str] | Mapping[str, ChartFunction] | None = None,
    out: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda _: None,
    formats: Sequence[str] = FORMATS,
    options: Options = DEFAULT_OPTIONS,
    *,
    where: Where = (),
    sort: str | None = None,
    last: int | None = None,
    best: str | Sequence[str] = (),
    most: int | None = None,
    step: Callable[[str, int], None] = lambda name, total: None,
    written: Callable[[Chart, Sequence[Path]], None] = lambda chart, paths: None,
) -> list[Path]:
    """Draw charts (default: all) of the runs below a folder, into figures/ in each study or `out`.

    Charts compare the runs of one study; several studies go to `out`/<study>.  One run alone has
    its figures/ in its own folder.  Several folders make charts over the runs of all of them, in
    `out`; of runs with one configuration, seed included, the first alone is drawn.

    charts: names of registered charts, or functions by name.
    formats: of pdf, png, svg and csv.
    options: of all charts.

    where, last, best: as in `deepstack.load_runs`.
    sort: the order of runs, and so of the lines of a chart and its legend: a line has the place of
        its first run.

    most: draw of each study only the first so many charts that it allows; `say` gets no sentence on
        the others.

    step: is called before each chart with its name and the number of all charts.

    written: is called with each chart and its files.

    `say` gets a sentence for each run that cannot be read and is left out, and for each chart that
    these runs do not allow.
    Returns the files.
    Raises NothingMatchedError when there are no runs or nothing could be drawn, ResourceError when
    none of the runs can be read, ConfigError for an unknown chart, a reference.csv that cannot be
    used, or several folders without `out`; at the end BrokenChartError where the code of a chart
    has failed.
    """
    if not isinstance(charts, Mapping):
        charts = {name: CHARTS[name] for name in charts or CHARTS}
    for kind in formats:
        if kind not in FORMATS:
            raise ConfigError(unknown("--format", kind, FORMATS))
    folders = list_folders(directory)
    if len(folders) > 1 and out is None:
        raise ConfigError(
            f"charts over the runs of {len(folders)} folders need a folder of their own: --to "
            "FOLDER (out=… from Python)"
        )
    studies, skipped = find_studies(folders, where=where, sort=sort, last=last)
    studies = choose_best(studies, best)
    if options.diagnostic != DEFAULT_OPTIONS.diagnostic:
        every = [run for runs in studies.values() for run in runs]
        refuse_unknown_diagnostic(options.diagnostic, every)
    new_paths: list[Path] = []
    broken: list[str] = []
    notices: dict[str, None] = {}
    any_readable = False
    for study, members in studies.items():
        base = Path(folders[0]) if RunFolder(folders[0]).exists() else study
        several = len(studies) > 1
        subfolder = study.name if several else ""
        target = writable(base / "figures") if out is None else followed(Path(out)) / subfolder
        reference = options.reference
        if reference is None:
            reference = read_reference(folders, members)
        ordered = options.ordered or sort is not None
        shown = dataclasses.replace(options, reference=reference, ordered=ordered)
        draw_them = partial(
            draw_study,
            charts=charts,
            target=target,
            options=shown,
            formats=formats,
            notices=notices,
            most=most,
            step=lambda name: step(name, len(charts) * len(studies)),
            written=written,
        )
        paths, errors = use_readable(members, skipped, draw_them)
        new_paths += paths
        any_readable |= bool(paths or errors)
        for error in errors:
            reasons = broken if isinstance(error, BrokenChartError) else skipped
            reasons.append(f"{study.name}: {error}" if several else str(error))
    if broken:
        raise BrokenChartError("\n".join([*skipped, *broken]), new_paths)
    if not new_paths:  # the error says it all
        raise (NothingMatchedError if any_readable else ResourceError)("\n".join(skipped))
    for line in [*skipped, *list(notices)[:1]]:
        say(line)
    return new_paths


def draw_study(
    runs: Runs,
    charts: Mapping[str, ChartFunction],
    target: Path,
    options: Options,
    formats: Sequence[str],
    notices: dict[str, None],
    most: int | None,
    step: Callable[[str], None],
    written: Callable[[Chart, Sequence[Path]], None],
) -> tuple[list[Path], list[DeepstackError]]:
    """Draw charts of the runs of one study; return the files, and an error a chart not drawn.

    notices: gets the notice of each chart that has one.
    most: see `draw`; then the errors are only of broken charts, unless no chart is drawn.
    step: is called with the name of each chart.
    written: is called with each chart and its files.
    """
    paths: list[Path] = []
    errors: list[DeepstackError] = []
    drawn = 0
    for name, function in charts.items() if runs else ():
        if drawn == most:
            break
        step(name)
        result = try_chart(name, function, runs, options)
        if isinstance(result, DeepstackError):
            errors.append(result)
            continue
        notices |= dict.fromkeys(filter(None, [result.notice]))
        try:
            files = save(result, target, file_name(name, function, options), formats, options)
        except ResourceError as error:
            raise ResourceError(f"{error}; give another folder with --to") from error
        written(result, files)
        paths += files
        drawn += 1
    if most is not None and paths:
        errors = [error for error in errors if isinstance(error, BrokenChartError)]
    return paths, errors


def try_chart(
    name: str, function: ChartFunction, runs: Runs, options: Options
) -> Chart | DeepstackError:
    """Return the chart of these runs, or the error that prevents it.

    NothingMatchedError: these runs do not have its values.  BrokenChartError: its code has failed;
    the reason has the line of a plugin, or else the innermost line.
    """
    try:
        return function(runs, options=options)
    except NothingMatchedError as error:
        return NothingMatchedError(f"{name}{NOT_DRAWN}{error}")
    except PluginError as error:
        reason = str(error)
    except DeepstackError:
        raise
    except Exception as error:
        innermost = traceback.extract_tb(error.__traceback__)[-1]
        reason = bug_in(error) or f"{innermost.filename}:{innermost.lineno}: {error!r}"
    return BrokenChartError(f"{name}{NOT_DRAWN}its code has failed: {reason}", [])
