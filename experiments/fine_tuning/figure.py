"""Draws the losses and gradients of this experiment from figures/runs.csv.

python experiments/fine_tuning/figure.py [RESULTS: collect the runs there first]
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from deepstack.plots import deepstack_style, scheme_style
from deepstack.records import Run, find_runs

HERE = Path(__file__).parent
STUDIES = "fine_tuning_starts", "fine_tuning"
KINDS = {"starting points": 0, "trained start": 1, "from scratch": 2}
# Chain -> the kinds of runs that learn it
CHAINS = {"first chain": ["starting points"], "second chain": ["trained start", "from scratch"]}


def row_of(run: Run) -> dict[str, object]:
    """Return the last loss of a run, its distance from the optimum, and first gradient norms."""
    last = run.evals.iloc[-1]
    kind = "starting points" if run.get("train.steps") == 400 else "from scratch"
    row: dict[str, object] = {
        "scheme": run.get("model.scheme"),
        "kind": "trained start" if run.get("model.start") else kind,
        "seed": run.get("seed"),
        "loss": last["loss"],
        "gap": last["loss"] - last["optimal_loss"],
        "unigram_gap": last["unigram_loss"] - last["optimal_loss"],
        "model_update": run.steps["model_update"].iloc[-1],
    }
    if "grad_norm" in run.layer_names():
        first = run.layers("grad_norm")[1][0]
        row |= {f"grad_norm_{i}": value for i, value in enumerate(first, start=1)}
    return row


def read_table() -> pd.DataFrame:
    """Return a row for each run, from runs.csv, which is written first if a folder is given."""
    path = HERE / "figures" / "runs.csv"
    if len(sys.argv) < 2:
        return pd.read_csv(path)
    studies = [Path(sys.argv[1]) / study for study in STUDIES]
    table = pd.DataFrame([row_of(run) for study in studies for run in find_runs(study)])
    table = table.sort_values(["scheme", "kind", "seed"])
    path.parent.mkdir(exist_ok=True)
    table.round(5).to_csv(path, index=False)
    return table


def main() -> None:
    """Draw the figure."""
    table = read_table()
    with deepstack_style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(6.8, 2.6), layout="constrained")
        for i, (scheme, rows) in enumerate(table.groupby("scheme")):
            style = scheme_style(str(scheme))
            shift = 0.2 * i - 0.1
            for kind, x in KINDS.items():
                gaps = rows[rows["kind"] == kind]["gap"]
                dots = {"ls": "none", "marker": style["marker"], "color": style["color"]}
                left.plot(np.full(len(gaps), x + shift), gaps, alpha=0.5, **dots)
                left.plot(x + shift, gaps.mean(), ms=9, mfc="none", **dots)
            norms = rows[rows["kind"] == "trained start"].filter(regex="grad_norm_").to_numpy(float)
            layers = np.arange(1, norms.shape[1] + 1)
            label = "Post-LN" if scheme == "post_ln" else "Pre-LN"
            right.plot(layers, norms.mean(axis=0), label=label, **style)
            low, high = norms.min(axis=0), norms.max(axis=0)
            right.fill_between(layers, low, high, color=style["color"], alpha=0.18, lw=0)
        for chain, kinds in CHAINS.items():
            level = table[table["kind"].isin(kinds)]["unigram_gap"].mean()
            first, last = KINDS[kinds[0]] - 0.35, KINDS[kinds[-1]] + 0.35
            left.plot([first, last], [level, level], color="#888888", ls="--", lw=0.9)
            left.text(last, level, chain, ha="right", va="bottom", color="#888888", fontsize=7)
        left.plot([], [], color="#888888", ls="--", lw=0.9, label="unigram, mean over the seeds")
        left.plot([], [], "o", ms=9, mfc="none", color="#888888", label="mean of five seeds")
        left.legend(loc="lower left")
        left.set(ylabel="validation loss − optimum (nats)", ylim=(0, None))
        left.set_xticks(list(KINDS.values()), list(KINDS))
        right.set(xlabel="layer l", ylabel="gradient norm before step 1", yscale="log")
        right.legend(title="mean, least and most of five seeds")
        figure.savefig(HERE / "figures" / "fine_tuning.png", dpi=200)


if __name__ == "__main__":
    main()
