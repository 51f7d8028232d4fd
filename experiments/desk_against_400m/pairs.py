"""Compares the order of nine designs at the desk with the published order at 400M parameters.

    python experiments/desk_against_400m/pairs.py [results]

With a folder of results it first writes runs.csv, the final loss of every run.  It prints shares
of agreeing pairs and writes pairs.csv and figures/pairs.png.
"""

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from deepstack.plots import deepstack_style
from deepstack.records import ENDED, Run, find_runs
from deepstack.runs import final_value, mean_of

HERE = Path(__file__).parent
PUBLISHED = pd.read_csv(HERE / "published.csv", index_col="design")
DESIGNS = list(PUBLISHED.index)
SEPARATED = 0.006  # nats: the least published difference that counts as an order
DRAWS = 10_000
SCHEMES = {
    "pre_ln": "Pre-LN",
    "hyper_connections": "Hyper-connections",
    "mhc": "mHC",
    "sandwich_ln": "Sandwich norm",
    "ln_scaling": "LayerNorm scaling",
    "deepnorm": "DeepNorm",
    "keel": "KEEL",
}


def design_of(run: Run) -> str:
    """Return the name of a run's design in published.csv."""
    scheme = run.get("model.scheme")
    if scheme == "attn_res":
        blocks = run.get("model.scheme_options.blocks", 8)
        return "Block attention residuals" if blocks else "Attention residuals"
    return SCHEMES[scheme]


def loss_of(run: Run) -> float:
    """Return the final validation loss; infinite for a run that diverged or did not end."""
    loss = final_value(run, "loss") if run.state == "done" else math.inf
    return loss if math.isfinite(loss) else math.inf


def separated_pairs(published: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the pairs (better, worse) of designs whose published losses differ enough."""
    pairs = []
    for one, other in itertools.combinations(published, 2):
        better, worse = sorted((one, other), key=lambda design: published[design])
        if round(1000 * (published[worse] - published[better])) >= round(1000 * SEPARATED):
            pairs.append((better, worse))
    return pairs


def agreement(pairs: Sequence[tuple[str, str]], desk: Mapping[str, float]) -> float:
    """Return how many pairs have the published order at the desk; a tie counts one half."""
    gaps = [(desk[better], desk[worse]) for better, worse in pairs]
    return sum(1.0 if low < high else 0.5 if low == high else 0.0 for low, high in gaps)


def ends_of(shares: np.ndarray) -> tuple[float, float]:
    """Return the ends of the middle 95 % of shares, each a share that occurs."""
    low, high = np.quantile(shares, [0.025, 0.975], method="inverted_cdf")
    return float(low), float(high)


def seed_interval(pairs: Sequence[tuple[str, str]], losses: pd.DataFrame) -> tuple[float, float]:
    """Return the middle 95 % of shares over every bootstrap draw of the seeds; see the page.

    losses: a row for each seed, a column for each design.
    """
    n = len(losses)
    draws = np.array(list(itertools.product(range(n), repeat=n)))
    means = losses.to_numpy()[draws].mean(axis=1)
    at = {design: i for i, design in enumerate(losses.columns)}
    agreeing = sum((means[:, at[low]] < means[:, at[high]]).astype(float) for low, high in pairs)
    return ends_of(agreeing / len(pairs))


def design_interval(
    pairs: Sequence[tuple[str, str]], desk: Mapping[str, float]
) -> tuple[float, float]:
    """Return the middle 95 % of shares over bootstrap draws of designs, each with its pairs.

    A pair of designs that are drawn k and m times counts k·m times.
    """
    random = np.random.default_rng(0)
    n = len(DESIGNS)
    counts = random.multinomial(n, [1 / n] * n, size=DRAWS)
    at = {design: i for i, design in enumerate(DESIGNS)}
    weights = np.array([counts[:, at[low]] * counts[:, at[high]] for low, high in pairs], float)
    agree = np.array([agreement([pair], desk) for pair in pairs])
    shares = (agree @ weights)[weights.any(axis=0)] / weights.sum(axis=0)[weights.any(axis=0)]
    return ends_of(shares)


def permutation_counts(pairs: Sequence[tuple[str, str]], desk: Mapping[str, float]) -> np.ndarray:
    """Return the number of agreeing pairs for each assignment of the desk's losses to designs."""
    designs = list(desk)
    at = {design: i for i, design in enumerate(designs)}
    values = np.array(list(itertools.permutations(desk.values())))
    return sum((values[:, at[low]] < values[:, at[high]]).astype(int) for low, high in pairs)


def decided_pairs(pairs: Sequence[tuple[str, str]], losses: pd.DataFrame) -> tuple[int, int]:
    """Return how many pairs the desk decides, and how many of these it orders as published.

    A pair is decided if the 95 % interval of its differences by seed excludes 0 (Student's t).
    """
    gaps = [mean_of((losses[worse] - losses[better]).tolist()) for better, worse in pairs]
    right, wrong = sum(gap.low > 0 for gap in gaps), sum(gap.high < 0 for gap in gaps)
    return right + wrong, right


def halves_agreement(pairs: Sequence[tuple[str, str]], losses: pd.DataFrame) -> float:
    """Return the mean share of pairs that two and the other seeds order alike, over all splits."""
    shares = []
    for two in itertools.combinations(losses.index, 2):
        first, second = losses.loc[list(two)].mean(), losses.drop(list(two)).mean()
        alike = [(first[a] < first[b]) == (second[a] < second[b]) for a, b in pairs]
        shares.append(sum(alike) / len(alike))
    return sum(shares) / len(shares)


def summary_row(losses: pd.DataFrame, column: str) -> dict[str, object]:
    """Return the agreement with one column of the published table, with intervals and p."""
    pairs, desk = separated_pairs(PUBLISHED[column].to_dict()), losses.mean().to_dict()
    agree = agreement(pairs, desk)
    null = permutation_counts(pairs, desk)
    low, high = ends_of(null / len(pairs))
    row: dict[str, object] = {"pairs": len(pairs), "agree": agree, "share": agree / len(pairs)}
    row["seeds_low"], row["seeds_high"] = seed_interval(pairs, losses)
    row["designs_low"], row["designs_high"] = design_interval(pairs, desk)
    row |= {"null_low": low, "null_high": high, "p": float(np.mean(null >= agree))}
    row["decided"], row["decided_agree"] = decided_pairs(pairs, losses)
    return row


def row_of(run: Run, setting: str) -> dict[str, object]:
    """Return setting, design, rate, seed and final validation loss of a run."""
    row: dict[str, object] = {"setting": setting, "design": design_of(run)}
    row |= {"lr": run.get("train.lr"), "seed": run.get("seed")}
    return row | {"val_loss": round(loss_of(run), 5)}


def collect(results: Path) -> pd.DataFrame:
    """Return a row for each run of the three studies that is done or diverged."""
    rows = []
    for ending, setting in {"_rates": "rates", "": "best", "_tenth": "tenth"}.items():
        folder = results / f"desk_against_400m{ending}"
        if folder.is_dir():
            ended = [run for run in find_runs(folder) if run.state in ENDED]
            rows += [row_of(run, setting) for run in ended]
    return pd.DataFrame(rows).sort_values(["setting", "design", "lr", "seed"])


def losses_of(runs: pd.DataFrame, setting: str) -> pd.DataFrame:
    """Return the losses of a setting: a row for each seed with every design, a column for each."""
    wide = runs[runs["setting"] == setting].pivot(index="seed", columns="design", values="val_loss")
    return wide.reindex(columns=DESIGNS).dropna()


def draw(best: pd.DataFrame, summary: pd.DataFrame) -> None:
    """Draw the losses in the published order, and the shares with their intervals."""
    with deepstack_style():
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(6.8, 3.0), width_ratios=(1.3, 1), layout="constrained"
        )
        ordered = PUBLISHED["16"].sort_values(ascending=False)
        for y, design in enumerate(ordered.index):
            left.plot(best[design], [y] * len(best), "o", color="#0072B2", alpha=0.4, mew=0)
            left.plot(best[design].mean(), y, "|", color="#000000", ms=11, mew=1.6)
        names = [f"{design}, {loss:.3f}" for design, loss in ordered.items()]
        left.set_yticks(range(len(names)), names)
        left.set(
            ylabel="design and published loss, 16 layers", xlabel="loss of this study (nats a byte)"
        )
        rows = summary[summary["seeds"] == "all"].reset_index(drop=True)
        labels = []
        for i, row in rows.iterrows():
            y = -i
            right.plot(
                [row["null_low"], row["null_high"]],
                [y, y],
                color="#DDDDDD",
                lw=9,
                solid_capstyle="butt",
            )
            right.plot([row["designs_low"], row["designs_high"]], [y, y], color="#0072B2", lw=1.1)
            right.plot(
                [row["seeds_low"], row["seeds_high"]],
                [y, y],
                color="#D55E00",
                lw=2.6,
                solid_capstyle="butt",
            )
            right.plot(row["share"], y, "o", color="#000000")
            rate = {"best": "best rate", "tenth": "a tenth of it"}[row["setting"]]
            labels.append(f"{rate},\n{row['column']} layers")
        right.axvline(0.5, color="#888888", ls="--", lw=0.9)
        right.set(xlim=(0, 1), xlabel="share of pairs in the published order")
        right.set_yticks([-i for i in range(len(rows))], labels)
        right.set_ylim(-len(rows) + 0.4, 0.6)
        handles = [
            plt.Line2D([], [], color="#000000", marker="|", ls="", ms=9, mew=1.6, label="mean"),
            plt.Line2D([], [], color="#D55E00", lw=2.6, label="draws of seeds"),
            plt.Line2D([], [], color="#0072B2", lw=1.1, label="draws of designs"),
            plt.Line2D([], [], color="#DDDDDD", lw=5, label="shuffled designs"),
        ]
        figure.legend(handles=handles, loc="outside lower right", ncols=4, handletextpad=1.0)
        (HERE / "figures").mkdir(exist_ok=True)
        figure.savefig(HERE / "figures" / "pairs.png", dpi=150)


def main() -> None:
    if len(sys.argv) > 1:
        collect(Path(sys.argv[1])).to_csv(HERE / "runs.csv", index=False)
    runs = pd.read_csv(HERE / "runs.csv")
    rows: list[dict[str, object]] = []
    for setting in ("best", "tenth"):
        losses = losses_of(runs, setting)
        sets = {"all": losses}
        if len(losses) > 2:
            sets |= {"first two": losses.iloc[:2], "others": losses.iloc[2:]}
        for seeds, part in sets.items() if len(losses) else ():
            for column in ("16", "32"):
                head = {"setting": setting, "seeds": seeds, "n": len(part), "column": column}
                rows.append(head | summary_row(part, column))
    summary = pd.DataFrame(rows)
    summary.to_csv(HERE / "pairs.csv", index=False, float_format="%.4g")
    print(summary.round(3).to_string())
    best = losses_of(runs, "best")
    pairs = separated_pairs(PUBLISHED["16"].to_dict())
    if len(best) > 2:
        print(f"two seeds and the others agree: {halves_agreement(pairs, best):.3f}")
    for column in PUBLISHED.columns[1:]:
        share = agreement(pairs, PUBLISHED[column].to_dict()) / len(pairs)
        print(f"published 16 and {column} layers agree: {share:.3f}")
    for design in DESIGNS:
        mean = mean_of(best[design].tolist())
        print(f"{design}: {mean.value:.4f} ± {mean.sd:.4f} ({mean.low:.4f} to {mean.high:.4f})")
    draw(best, summary)


if __name__ == "__main__":
    main()
