"""Draws the figures of the experiments again from what git tracks.

    python experiments/redraw.py [--check] [PART OF A PATH …]

figures.yaml lists them.  Figures of published runs are drawn from the runs.  The other figures are
drawn from the CSV beside them, in the style of `deepstack plot`, or by the script of their study.
--check writes nothing: it fails where the drawn values differ from the tracked CSV.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from redraw_lines import Redrawing
from redraw_maps import draw_cells, draw_frontier, draw_outcomes, draw_shares

from deepstack.plots import CHARTS, Chart, Options, deepstack_style, save
from deepstack.runs import Runs

HERE = Path(__file__).parent
ROOT = HERE.parent


def entries() -> dict[str, dict[str, str]]:
    """Return the texts of each figure by its path below experiments, without a suffix."""
    return dict(yaml.safe_load((HERE / "figures.yaml").read_text(encoding="utf-8")))


def draw(name: str) -> Chart:
    """Return the chart of a figure: of its published runs, or of its CSV."""
    entry, stem = entries()[name], Path(name).name
    if "runs" in entry:
        step = entry.get("at_step")
        options = Options(at_step=None if step is None else int(step))
        return CHARTS[stem](Runs.below(ROOT / entry["runs"]), options=options)
    rows = pd.read_csv(HERE / f"{name}.csv")
    with deepstack_style():
        if stem == "outcomes":
            return draw_outcomes(rows, entry)
        if stem == "frontier":
            return draw_frontier(rows, entry)
        if stem == "attribution_vs_depth":
            return draw_shares(rows, entry)
        if set(rows["kind"]) == {"cell"}:
            return draw_cells(rows, entry, stem)
        return Redrawing(stem, rows, entry).chart()


def differs(chart: Chart, path: Path) -> bool:
    """Return whether a chart has other values than a CSV, in any order of the rows."""
    tables = []
    for table in (chart.data, pd.read_csv(path)):
        texts = [name for name in table if name in ("panel", "series", "kind", "mark")]
        numbers = [column for column in table if column not in texts]
        ordered = table.sort_values([*texts, *numbers], ignore_index=True)
        tables.append((ordered[sorted(texts)].fillna(""), ordered[sorted(numbers)].astype(float)))
    (texts, numbers), (tracked_texts, tracked) = tables
    if not texts.equals(tracked_texts) or list(numbers) != list(tracked):
        return True
    return not np.allclose(numbers, tracked, rtol=1e-6, atol=0, equal_nan=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="only figures whose path has one of these texts")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    args = parser.parse_args()
    names = [n for n in entries() if not args.parts or any(part in n for part in args.parts)]
    differing = []
    for name in names:
        if script := entries()[name].get("script"):
            if not args.check:
                subprocess.run([sys.executable, HERE / script], check=True, stdout=sys.stderr)
                print((HERE / name).with_suffix(".png").relative_to(ROOT))
            continue
        path, chart = HERE / name, draw(name)
        if differs(chart, path.with_suffix(".csv")):
            differing.append(name)
        if not args.check:
            save(chart, path.parent, path.name, ("png",))
            print(path.with_suffix(".png").relative_to(ROOT))
    if differing:
        sys.exit(f"other values than in the tracked CSV: {', '.join(differing)}")


if __name__ == "__main__":
    main()
