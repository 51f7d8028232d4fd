"""Predicts which runs of who_diverges train, from signals before training.

    python experiments/signal_predicts/predict.py [--collect results]

Reads signals.csv and the published outcomes; writes scores.csv, schemes.csv and figures/.
--collect: first writes signals.csv from the studies signal_predicts* below this folder.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy.optimize import minimize

from deepstack.plots import COLOURS, deepstack_style
from deepstack.runs import Runs
from deepstack.tools.signal import seed_rows, signal_layers

HERE = Path(__file__).parent
OUTCOMES = HERE.parent / "who_diverges"
# study of the signals -> folder of the outcomes, and the name of its series where it differs
STUDIES = {
    "signal_predicts": ("figures", None),
    "signal_predicts_branch": ("figures", "BranchNorm, ramp_steps 25"),
    "signal_predicts_more": ("figures_more", None),
    "signal_predicts_sandwich": ("figures_sandwich", "Sandwich-LN, start plain"),
}
TOTALS = {
    "variance_change": "variance_growth",
    "angle_change": "angle_exponent",
    "gradient_change": "gradient_exponent",
    "parameter_gradient_change": "parameter_gradient_exponent",
}
CELL = ["ln_depth", "ln_lr"]
EXPONENTS = ["angle_change", "gradient_change"]
SIGNALS = [*TOTALS, "cosine_last", "ln_jacobian", "attention_entropy"]
MODELS = {
    "depth and rate": CELL,
    "with two exponents": [*CELL, *EXPONENTS],
    "with all signals": [*CELL, *SIGNALS],
}
FOLDS, DRAWS = 10, 2000


def collect(results: Path) -> pd.DataFrame:
    """Return a row per setting, depth and seed, of all studies of signals."""
    tables = []
    for study, (folder, name) in STUDIES.items():
        layers = signal_layers(Runs.below(results / study))
        first = layers[layers["layer"] == 1].set_index(["setting", "depth", "seed"])["jacobian"]
        rows = seed_rows(layers).set_index(["setting", "depth", "seed"])
        rows["jacobian_first"] = first
        rows = rows.reset_index()
        rows["setting"] = name or rows["setting"]
        tables.append(rows.assign(outcomes=folder).drop(columns=["side", "scheme"]))
    return pd.concat(tables, ignore_index=True)


def outcomes() -> pd.DataFrame:
    """Return setting, outcomes, depth, lr, runs and trained: a row per cell of who_diverges."""
    tables = []
    for folder in sorted({folder for folder, _ in STUDIES.values()}):
        table = pd.read_csv(OUTCOMES / folder / "outcomes.csv")
        table["lr"] = (
            table["panel"].str.replace("\u00a0", " ").str.removeprefix("lr ").astype(float)
        )
        table["setting"] = table["series"].str.replace("\u00a0", " ")
        table["trained"] = table["n"].where(table["kind"] == "trained", 0)
        cells = table.groupby(["setting", "x", "lr"])[["n", "trained"]].sum().reset_index()
        tables.append(cells.rename(columns={"x": "depth", "n": "runs"}).assign(outcomes=folder))
    return pd.concat(tables, ignore_index=True)


def cells_of(signals: pd.DataFrame) -> pd.DataFrame:
    """Return a row per cell with its outcome, its group and all features."""
    signals = signals[signals["setting"] != "DeepNorm (power)"].copy()
    for name, rate in TOTALS.items():
        signals[name] = signals[rate] * (signals["depth"] - 1)
    signals["ln_jacobian"] = np.log(signals["jacobian_first"])
    means = signals.groupby(["setting", "outcomes", "depth"])[SIGNALS].mean().reset_index()
    cells = outcomes().merge(means, on=["setting", "outcomes", "depth"], validate="many_to_one")
    cells["ln_depth"], cells["ln_lr"] = np.log(cells["depth"]), np.log(cells["lr"])
    cells["group"] = cells["setting"].str.extract(r"^(DeepNorm|Sandwich-LN|[^,]*)", expand=False)
    return cells


def fit(X: np.ndarray, trained: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """Return the weights of the logistic regression, intercept last, with penalty |w|²/2."""

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        z = X @ w[:-1] + w[-1]
        value = runs @ np.logaddexp(0, z) - trained @ z + w[:-1] @ w[:-1] / 2
        slope = runs / (1 + np.exp(-z)) - trained
        return value, np.append(X.T @ slope + w[:-1], slope.sum())

    return minimize(loss, np.zeros(X.shape[1] + 1), jac=True, method="L-BFGS-B").x


def held_out(cells: pd.DataFrame, features: Sequence[str], folds: np.ndarray) -> np.ndarray:
    """Return the probability of training of every cell, from a fit to the other folds."""
    X, p = cells[list(features)].to_numpy(float), np.empty(len(cells))
    trained, runs = (cells[name].to_numpy(float) for name in ("trained", "runs"))
    for fold in range(FOLDS):
        test = folds == fold
        mean, deviation = X[~test].mean(axis=0), X[~test].std(axis=0)
        Z = np.clip((X - mean) / deviation, -3, 3)
        w = fit(Z[~test], trained[~test], runs[~test])
        p[test] = 1 / (1 + np.exp(-(Z[test] @ w[:-1] + w[-1])))
    return p


def scores_of(cells: pd.DataFrame, p: np.ndarray) -> pd.DataFrame:
    """Return the number of runs predicted and the log loss, summed over the runs of each cell."""
    trained, runs = cells["trained"], cells["runs"]
    p = np.clip(p, 1e-12, 1 - 1e-12)
    right = np.where(p > 0.5, trained, runs - trained)
    log_loss = -(trained * np.log(p) + (runs - trained) * np.log(1 - p))
    return pd.DataFrame({"right": right, "log_loss": log_loss, "runs": runs})


def intervals(cells: pd.DataFrame, scores: pd.DataFrame, base: pd.DataFrame) -> dict[str, float]:
    """Return mean scores, their differences from `base`, and 95 % intervals over groups."""
    sums = pd.concat([scores[["right", "log_loss", "runs"]], base[["right", "log_loss"]]
                      .add_suffix("_base")], axis=1).groupby(cells["group"]).sum()  # fmt: skip
    random = np.random.default_rng(0)
    draws = [np.arange(len(sums)), *random.integers(len(sums), size=(DRAWS, len(sums)))]
    totals = pd.DataFrame([sums.iloc[draw].sum() for draw in draws])
    row: dict[str, float] = {}
    for name, column in {"accuracy": "right", "log_loss": "log_loss"}.items():
        value = totals[column] / totals["runs"]
        gain = value - totals[f"{column}_base"] / totals["runs"]
        for label, values in {name: value, f"{name}_gain": gain}.items():
            low, high = np.quantile(values[1:], [0.025, 0.975])
            row |= {label: values[0], f"{label}_low": low, f"{label}_high": high}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collect", type=Path, metavar="RESULTS")
    args = parser.parse_args()
    if args.collect:
        collect(args.collect).to_csv(HERE / "signals.csv", index=False, float_format="%.6g")
    cells = cells_of(pd.read_csv(HERE / "signals.csv"))
    random = np.random.default_rng(0)
    groups = sorted(cells["group"].unique())
    of_group = dict(zip(groups, random.permutation(len(groups)) % FOLDS, strict=True))
    splits = {
        "by scheme": cells["group"].map(of_group).to_numpy(),
        "at random": random.permutation(len(cells)) % FOLDS,
    }
    rows, by_scheme = [], []
    for split, folds in splits.items():
        scores = {m: scores_of(cells, held_out(cells, f, folds)) for m, f in MODELS.items()}
        base = scores["depth and rate"]
        for model, score in scores.items():
            rows.append({"split": split, "model": model} | intervals(cells, score, base))
            sums = score.groupby(cells["setting"]).sum()
            share = (sums["right"] / sums["runs"]).rename("accuracy").reset_index()
            by_scheme.append(share.assign(split=split, model=model))
    table = pd.DataFrame(rows)
    table.to_csv(HERE / "scores.csv", index=False, float_format="%.4f")
    schemes = pd.concat(by_scheme).pivot(
        index="setting", columns=["split", "model"], values="accuracy"
    )
    schemes.columns = [f"{split}: {model}" for split, model in schemes.columns]
    trained = cells.groupby("setting")[["trained", "runs"]].sum()
    schemes.insert(0, "trained", trained["trained"] / trained["runs"])
    schemes.to_csv(HERE / "schemes.csv", float_format="%.3f")
    share = cells["trained"].sum() / cells["runs"].sum()
    print(
        f"{len(cells)} cells, {cells['runs'].sum()} runs, {len(groups)} groups, {share:.3f} trained"
    )
    print(table.round(3).T.to_string())
    draw(table, schemes, max(share, 1 - share))


def draw(table: pd.DataFrame, schemes: pd.DataFrame, majority: float) -> None:
    """Draw the accuracies with their intervals, and those of each scheme under two models."""
    with deepstack_style():
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(7.2, 5.6), width_ratios=(1, 1.25), layout="constrained"
        )
        for i, (split, part) in enumerate(table.groupby("split", sort=False)):
            at = np.arange(len(part)) + (i - 0.5) * 0.16
            ends = [
                part["accuracy"] - part["accuracy_low"],
                part["accuracy_high"] - part["accuracy"],
            ]
            left.errorbar(
                at, part["accuracy"], ends, fmt="o", color=COLOURS[i], label=f"split {split}"
            )
        left.axhline(majority, color="grey", ls="--", lw=0.9, label="always 'trains'")
        left.set(xticks=range(len(MODELS)), ylabel="share of held-out runs predicted")
        left.set_xticklabels([m.replace(" ", "\n", 1) for m in MODELS])
        left.set(xlim=(-0.5, len(MODELS) - 0.5), ylim=(0.66, 0.91))
        left.legend(loc="lower left", fontsize=7)
        columns = [f"by scheme: {model}" for model in ("depth and rate", "with all signals")]
        ordered = schemes.sort_values(["trained", *columns])
        for i, column in enumerate(columns):
            label = column.removeprefix("by scheme: ")
            right.plot(ordered[column], range(len(ordered)), "os"[i], ms=4, label=label,
                       color=COLOURS[2 * i], mfc="none" if i == 0 else None)  # fmt: skip
        right.set(yticks=range(len(ordered)), xlim=(-0.03, 1.03), ylim=(-0.7, len(ordered) - 0.3))
        right.set_yticklabels(ordered.index, fontsize=6)
        right.set(xlabel="share predicted, scheme held out (least trained below)")
        right.legend(loc="upper left", fontsize=7)
        (HERE / "figures").mkdir(exist_ok=True)
        figure.savefig(HERE / "figures" / "predicted.png", dpi=150)


if __name__ == "__main__":
    main()
