"""The reasons why runs do not allow a chart, found without drawing."""

from collections.abc import Sequence
from pathlib import Path

from deepstack.base.errors import DeepstackError, NothingMatchedError
from deepstack.plots.chart import CHARTS, DrawingBegins, Options, stops_before_drawing
from deepstack.plots.files import DEFAULT_OPTIONS
from deepstack.plots.study_charts import NOT_DRAWN, try_chart
from deepstack.runs.conditions import Where
from deepstack.runs.runs import Runs, choose_best
from deepstack.runs.studies import Folders, find_studies, list_folders


def reasons_against(
    directory: Folders,
    charts: Sequence[str] = (),
    options: Options = DEFAULT_OPTIONS,
    *,
    where: Where = (),
    last: int | None = None,
    best: str | Sequence[str] = (),
) -> dict[Path, dict[str, str]]:
    """Return for each study and chart why its runs do not allow the chart; '' if they do.

    charts: names of registered charts, by default all.
    where, last, best: as in `deepstack.load_runs`.
    """
    studies, _ = find_studies(list_folders(directory), where=where, last=last)
    return {
        study: {name: reason_against(name, runs, options) for name in charts or CHARTS}
        for study, runs in choose_best(studies, best).items()
    }


def reason_against(name: str, runs: Runs, options: Options = DEFAULT_OPTIONS) -> str:
    """Return why these runs do not allow a chart; '' if they do, or if its code fails."""
    token = stops_before_drawing.set(True)
    try:
        result = try_chart(name, CHARTS[name], runs, options)
    except (DrawingBegins, DeepstackError):
        return ""
    finally:
        stops_before_drawing.reset(token)
    is_reason = isinstance(result, NothingMatchedError)
    return str(result).partition(NOT_DRAWN)[2] if is_reason else ""
