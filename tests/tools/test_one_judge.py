"""Random studies: every command names the same best setting, rate, margin and interval.

What they have to say is computed here from the losses that the studies were made of.
"""

import math
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import pytest
from helpers.plot_runs import make_run

from deepstack.cli.finding import sweep_finding
from deepstack.records import RunFolder
from deepstack.runs import Runs
from deepstack.runs.comparison import compare
from deepstack.tools.answer.sentence import find
from deepstack.tools.report.finding import finding_of

STUDIES, IN_A_TEST = 300, 10
SCHEMES = {"deepnorm": "DeepNorm", "pre_ln": "Pre-LN", "post_ln": "Post-LN", "mix_ln": "Mix-LN"}
DEPTHS, RATES, SEEDS = (6, 12), (0.01, 0.03, 0.1), (0, 1, 2, 3)
CHANCE = 3.26  # the loss without context of `make_run`
T = {3: 4.302653, 4: 3.182446}  # pairs of seeds -> quantile 0.975 of Student's t
MISSING, DIVERGED = None, math.inf
Seeds = dict[int, float | None]


class Lead(NamedTuple):
    """What a study shows at its greatest depth; low and high are None without an interval."""

    leader: str
    rate: float
    rival: str
    gap: float
    low: float | None
    high: float | None


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of every scheme, depth, rate and seed."""
    folder = tmp_path_factory.mktemp("pool")
    for scheme in SCHEMES:
        make_run(folder, scheme=scheme, masked=1.2345)
    return folder


def draw_study(rng: random.Random) -> dict[tuple[str, int], dict[float, Seeds]]:
    """Draw losses: setting and depth -> rate -> seed -> loss, MISSING or DIVERGED."""
    names = rng.sample(list(SCHEMES), rng.randint(2, 4))
    depths = DEPTHS[: rng.randint(1, 2)]
    rates, seeds = RATES[: rng.randint(1, 3)], SEEDS[: rng.randint(1, 4)]
    spread = rng.choice([0.003, 0.03])
    fails, stalls = rng.choice([(0.0, 0.0), (0.1, 0.0), (0.1, 0.2), (0.4, 0.3)])
    digits = rng.choice([1, 2, 4, 4])  # with few digits there are ties

    def loss() -> float | None:
        chance = rng.random()
        if chance < fails:
            return rng.choice([MISSING, DIVERGED])
        level = CHANCE if chance < fails + stalls else rng.choice([2.5, 2.55, 2.6])
        return round(rng.gauss(level, spread), digits)

    return {
        (name, depth): {rate: {seed: loss() for seed in seeds} for rate in rates}
        for name in names
        for depth in depths
    }


def write_study(pool: Path, study: dict[tuple[str, int], dict[float, Seeds]], to: Path) -> Runs:
    """Write the runs of a study, copies of the pool's with other settings and ends."""
    for (name, depth), by_rate in study.items():
        (template,) = pool.glob(f"{name}-*")
        for rate, seeds in by_rate.items():
            for seed, loss in seeds.items():
                path = to / f"{name}-{depth}-{rate}-{seed}"
                shutil.copytree(template, path)
                folder, config = RunFolder(path), path / "config.yaml"
                text = config.read_text().replace('"depth": 6', f'"depth": {depth}')
                text = text.replace('"lr": 0.001', f'"lr": {rate}')
                folder.write_config(text.replace('"seed": 0', f'"seed": {seed}'))
                evals = path / "evals.csv"
                evals.write_text(evals.read_text().replace("1.2345", f"{loss or 0:.4f}"))
                states = {MISSING: "failed", DIVERGED: "diverged"}
                folder.write_status(states.get(loss, "done"), 5)
    return Runs.below(to)


def best_of_rates(by_rate: dict[float, Seeds]) -> tuple[float, dict[int, float]] | None:
    """Return the rate at which most seeds learn, of these the least mean loss, then the least."""
    best = None
    for rate, seeds in sorted(by_rate.items()):
        ends = {seed: loss for seed, loss in seeds.items() if loss is not MISSING}
        if not ends:
            continue
        learnt = sum(loss < CHANCE - 0.1 for loss in ends.values())
        key = (-learnt / len(ends), fmean(loss - CHANCE for loss in ends.values()))
        if best is None or key < best[0]:
            best = key, rate, ends
    return best and best[1:]


def lead_of(study: dict[tuple[str, int], dict[float, Seeds]]) -> Lead | None:
    """Return what the study shows; None if fewer than two settings have losses."""
    depth = max(depth for _, depth in study)
    ends = {}
    for (name, at), by_rate in sorted(study.items(), key=lambda cell: SCHEMES[cell[0][0]]):
        best = best_of_rates(by_rate) if at == depth else None
        if best and all(map(math.isfinite, best[1].values())):
            ends[name] = best
    if len(ends) < 2:
        return None
    order = sorted(ends, key=lambda name: fmean(ends[name][1].values()))
    if len({tuple(sorted(losses)) for _, losses in ends.values()}) > 1:
        order.sort(key=lambda name: sum(is_beaten(ends[name][1], ends[one][1]) for one in ends))
    leader, *others_in_order = order
    rate, losses = ends.pop(leader)
    gaps = {}
    for name, (_, others) in ends.items():
        pairs = [others[seed] - losses[seed] for seed in losses if seed in others]
        shared = {(others[seed], losses[seed]) for seed in losses if seed in others}
        differ = len(pairs) > 2 and len(shared) > 1  # seeds that change nothing show no chance
        half = T[len(pairs)] * stdev(pairs) / len(pairs) ** 0.5 if differ else math.inf
        mean = fmean(pairs) if pairs else fmean(others.values()) - fmean(losses.values())
        gaps[name] = (mean, mean - half, mean + half)
    open_ones = [name for name in others_in_order if not math.isfinite(gaps[name][1])]
    closed = [name for name in gaps if name not in open_ones]
    rival = min(closed, key=lambda name: round(gaps[name][1], 9)) if closed else open_ones[0]
    nearer = [name for name in open_ones if round(gaps[name][0] - gaps[rival][0], 9) <= 0]
    rival = nearer[0] if closed and nearer else rival
    gap, *interval = gaps[rival]
    low, high = interval if math.isfinite(interval[0]) else (None, None)
    return Lead(SCHEMES[leader], rate, SCHEMES[rival], gap, low, high)


def is_beaten(losses: dict[int, float], others: dict[int, float]) -> bool:
    """Return whether the others are lower, over shared seeds if there are any."""
    shared = [seed for seed in losses if seed in others] or None
    mine, theirs = (
        [one[seed] for seed in shared] if shared else [*one.values()] for one in (losses, others)
    )
    return fmean(theirs) < fmean(mine) - 1e-9


def numbers_of(text: str) -> list[float]:
    """Return the numbers of a text in their order."""
    return [float(one) for one in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text.replace("−", "-"))]


def read_clause(text: str) -> tuple[str, str, list[float]]:
    """Return leader, rival, and the numbers of a clause: margin, and ends of an interval."""
    clear = re.search(r"(?:^|; |N = \d+ )([\w-]+) is better than ([\w-]+)(.*)", text)
    found = clear or re.search(r"undecided which of ([\w-]+) and ([\w-]+) is better:(.*)", text)
    assert found, text
    margin = re.search(r"ends (\S+) nats", found[3])
    interval = re.search(r"95 % interval (\S+) to ([^\s,]+)", found[3])
    assert margin
    sign = "-" if "higher over their shared seeds" in found[3] else ""
    ends = interval.groups() if interval else ()
    return found[1], found[2], numbers_of(" ".join([sign + margin[1], *ends]))


def statements(runs: Runs, folder: Path, lead: Lead) -> Iterator[tuple[str, str, str, list[float]]]:
    """Yield what each command says: its name, leader, rival, margin and ends of the interval."""
    yield "sweep", *read_clause(sweep_finding(runs)[-1])
    found = find(runs.results.values())
    if found.kind != "rates":
        yield "answer", *read_clause(found.sentence)
    sentences = finding_of(runs, (), None)["sentences"]
    (sentence,) = (s for s in sentences if re.search("is better than|undecided which of", s))
    yield "report", *read_clause(sentence)
    keys = ["train.lr"] if "train.lr" in runs.varying else []
    (against,) = (name for name, label in SCHEMES.items() if label == lead.leader)
    said: list[str] = []
    table = compare([folder], against=against, best=keys, say=said.append)
    yield "compare", *read_clause(said[-1])
    depths = table["depth"].astype(int)
    here = table[depths == depths.max()].set_index("setting")
    row: Any = here.loc[lead.rival]
    if not row["pairs"]:
        return  # the table has paired differences only
    ends_of_row = [row["diff_low"], row["diff_high"]] if math.isfinite(row["diff_low"]) else []
    if keys:
        assert here.loc[lead.leader, "train.lr"] == lead.rate
        several = f"{lead.leader} at its best rate ({lead.rate:g}"
        assert any(several in line for line in sweep_finding(runs)), "sweep names the rate"
    yield "table of compare", lead.leader, lead.rival, [row["difference"], *ends_of_row]


def test_a_rate_at_which_a_seed_fails_is_not_the_best(pool: Path, tmp_path: Path) -> None:
    """DeepNorm has its lowest mean at 0.01, where seed 2 learns nothing: its best rate is 0.001."""
    study: dict[tuple[str, int], dict[float, Seeds]] = {
        ("deepnorm", 12): {
            0.001: {0: 2.90, 1: 2.91, 2: 2.89},
            0.01: {0: 2.30, 1: 2.35, 2: 3.30},
        },
        ("pre_ln", 12): {0.001: {0: 2.78, 1: 2.79, 2: 2.77}, 0.01: {0: 2.85, 1: 2.86, 2: 2.84}},
    }
    lead = Lead("Pre-LN", 0.001, "DeepNorm", 0.12, 0.12, 0.12)
    said = list(statements(write_study(pool, study, tmp_path), tmp_path, lead))
    assert {command for command, *_ in said} > {"sweep", "answer", "report", "compare"}
    for command, leader, rival, (gap, *_) in said:
        assert (leader, rival) == ("Pre-LN", "DeepNorm") and gap == pytest.approx(0.12), command


CHUNKS = [
    pytest.param(first, marks=[pytest.mark.slow] if first else [])
    for first in range(0, STUDIES, IN_A_TEST)
]


@pytest.mark.parametrize("first", CHUNKS)
def test_commands_agree_on_leader_rate_margin_and_interval(
    first: int, pool: Path, tmp_path: Path
) -> None:
    compared = 0
    for number in range(first, first + IN_A_TEST):
        study = draw_study(random.Random(number))
        lead = lead_of(study)
        if lead is None:
            continue
        folder = tmp_path / str(number)
        runs = write_study(pool, study, folder)
        interval = [] if lead.low is None else [lead.low, lead.high]
        for command, leader, rival, numbers in statements(runs, folder, lead):
            what = f"study {number}, {command}"
            assert (leader, rival) == (lead.leader, lead.rival), what
            assert numbers == pytest.approx([lead.gap, *interval], abs=0.0051, rel=0.06), what
            compared += 1
    assert compared > IN_A_TEST
