"""The results of a study as a table: settings by depths, or settings by learning rates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepstack.base.text import distinct_texts
from deepstack.records import ENDED
from deepstack.runs.outcomes import Result
from deepstack.runs.statistics import mean_of

LOSS = "validation loss"


def result_table(
    results: Iterable[Result],
    updates: Mapping[Result, float] | None = None,
) -> list[dict[str, Any]]:
    """Return a row for each setting: mean ± deviation of the loss and number of seeds in each cell.

    The columns are the depths, or the learning rates where a setting and depth has several; then
    each depth has a row.  A cell is a list of lines: loss, ‖ΔF‖, and the runs without a loss.

    updates: the last ‖ΔF‖ of runs, which a cell shows too.
    """
    every = list(results)
    cells: dict[tuple[str, int], dict[float, dict[int, Result]]] = {}
    for one in every:
        by_rate = cells.setdefault((one.setting, one.depth), {})
        seeds = by_rate.setdefault(one.rate, {})
        if one.seed not in seeds or one.state in ENDED:
            seeds[one.seed] = one
    by_rates = any(len(by_rate) > 1 for by_rate in cells.values())
    depths = sorted({one.depth for one in every})
    if by_rates:
        texts = distinct_texts(sorted({one.rate for one in every}))
        return [
            {LOSS: setting}
            | ({"N": depth} if len(depths) > 1 else {})
            | {
                f"lr {text}": cell_lines(by_rate.get(rate, {}), updates)
                for rate, text in texts.items()
            }
            for (setting, depth), by_rate in sorted(cells.items(), key=order_in(every))
        ]
    rows: dict[str, dict[str, Any]] = {}
    for (setting, depth), by_rate in cells.items():
        row = rows.setdefault(setting, {LOSS: setting} | {f"N = {n}": None for n in depths})
        (by_seed,) = by_rate.values()
        row[f"N = {depth}"] = cell_lines(by_seed, updates)
    return list(rows.values())


def order_in(results: Sequence[Result]) -> Any:
    """Return a key that sorts cells by the order of their settings in these results, then depth."""
    order = {setting: i for i, setting in enumerate(dict.fromkeys(r.setting for r in results))}
    return lambda item: (order[item[0][0]], item[0][1])


def cell_lines(
    by_seed: Mapping[int, Result], updates: Mapping[Result, float] | None
) -> list[str] | None:
    """Return the lines of a cell: '2.781 ± 0.012, n 3', '‖ΔF‖ 3.4', '1 diverged'."""
    if not by_seed:
        return None
    ends = list(by_seed.values())
    done = [one for one in ends if one.state == "done" and one.loss is not None]
    loss = mean_of([one.loss for one in done])
    lines = []
    if done:
        deviation = f" ± {loss.sd:.3f}" if math.isfinite(loss.sd) else ""
        lines.append(f"{loss.value:.3f}{deviation}, n {loss.n}")
        if updates:
            mean = mean_of([updates.get(one) for one in done]).value
            lines += [f"‖ΔF‖ {mean:.3g}"] if math.isfinite(mean) else []
    others = Counter(one.state for one in ends if one not in done)
    lines += [
        f"{count} {'without a loss' if state == 'done' else state.replace('_', ' ')}"
        for state, count in others.items()
    ]
    return lines
