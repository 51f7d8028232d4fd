"""Draws losses after equal starting points from figures/equal.csv.

python experiments/fine_tuning/equal.py [RESULTS: collect the runs there first]
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from deepstack.plots import deepstack_style, scheme_style
from deepstack.records import Run, find_runs
from deepstack.runs import mean_of

HERE = Path(__file__).parent
LABELS = {"post_ln": "Post-LN", "pre_ln": "Pre-LN"}


def row_of(run: Run) -> dict[str, object]:
    """Return the settings, the loss of the starting point and the last loss, above the optimum."""
    start = run.get("model.start")
    row = {key.split(".")[-1]: run.get(key) for key in ("model.scheme", "train.lr", "seed")}
    row |= {"start": bool(start), "gap": last_gap(run)}
    if start:
        before = Run(start)
        row |= {"start_steps": before.get("train.steps"), "start_gap": last_gap(before)}
    return row


def last_gap(run: Run) -> float:
    """Return the last validation loss above the optimum."""
    last = run.evals.iloc[-1]
    return last["loss"] - last["optimal_loss"]


def interval(values: pd.Series) -> str:
    """Return mean and 95 % interval (Student's t) of paired values."""
    mean = mean_of(values.tolist())
    return f"{mean.value:.3f} ({mean.low:.3f} to {mean.high:.3f})"


def main() -> None:
    """Write equal.png from equal.csv, and print differences paired by seed."""
    path = HERE / "figures" / "equal.csv"
    if len(sys.argv) > 1:
        runs = find_runs(Path(sys.argv[1]) / "fine_tuning_equal")
        rows = pd.DataFrame([row_of(run) for run in runs])
        rows = rows.sort_values(["lr", "scheme", "start", "seed"])
        rows.round(5).to_csv(path, index=False)
    table = pd.read_csv(path)
    gaps = table.pivot(index="seed", columns=["lr", "scheme", "start"], values="gap")
    rates = sorted(set(table["lr"]))
    for lr in rates:
        post, pre = gaps[lr]["post_ln"], gaps[lr]["pre_ln"]
        print(
            f"lr {lr}: {gaps[lr].mean().round(3).to_dict()} ± {gaps[lr].std().round(3).to_dict()}"
        )
        print("  Post-LN minus Pre-LN, trained start:", interval(post[True] - pre[True]))
        print("  from scratch:", interval(post[False] - pre[False]))
        gains = {"Post-LN": post[False] - post[True], "Pre-LN": pre[False] - pre[True]}
        print("  gain of the start:", {name: interval(gain) for name, gain in gains.items()})
        print("  gain of Post-LN minus of Pre-LN:", interval(gains["Post-LN"] - gains["Pre-LN"]))
    with deepstack_style():
        figure, panels = plt.subplots(
            1, len(rates), figsize=(6.8, 2.8), sharey=True, layout="constrained"
        )
        for panel, lr in zip(panels, rates, strict=True):
            started = table[(table["lr"] == lr) & table["start"]]
            for scheme, rows in started.groupby("scheme"):
                style = scheme_style(str(scheme))
                dots = {"ls": "none", "marker": style["marker"], "color": style["color"]}
                panel.plot(rows["start_gap"], rows["gap"], label=LABELS[str(scheme)], **dots)
            for scheme, rows in table[(table["lr"] == lr) & ~table["start"]].groupby("scheme"):
                color = scheme_style(str(scheme))["color"]
                label = f"{LABELS[str(scheme)]} from scratch, mean"
                panel.axhline(rows["gap"].mean(), color=color, ls="--", lw=0.9, label=label)
            panel.set(title=f"lr {lr:g}", xlabel="starting point: loss − optimum (nats)")
            panel.set(xlim=(0, None), ylim=(0, None))
        panels[0].set_ylabel("second chain: loss − optimum (nats)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.savefig(HERE / "figures" / "equal.png", dpi=200)


if __name__ == "__main__":
    main()
