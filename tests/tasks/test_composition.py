"""Tasks that need depth: answers against a literal composition, and accuracies for each k."""

import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.configs import config_with
from helpers.plot_runs import make_chart, make_run, rows
from numpy.typing import NDArray

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.config import Config, digest, with_overrides
from deepstack.model import with_defaults, without_defaults
from deepstack.tasks import IGNORE, TASKS, Batch, build_task
from deepstack.training.evaluation import Evaluation, accuracies


@pytest.mark.parametrize(
    ("n", "max_k", "one_cycle", "seq_len"),
    [(2, 1, False, 6), (5, 7, False, 22), (8, 40, False, 32), (5, 2, True, 22), (17, 8, True, 64)],
)
def test_hops_follow_the_pairs_of_their_own_sequence(
    n: int, max_k: int, one_cycle: bool, seq_len: int
) -> None:
    options = {"n": n, "max_k": max_k, "one_cycle": one_cycle}
    built = build_task("hops", options, seq_len=seq_len, seed=3)
    batch = built.train_batch(1, 40)
    level = built.level_of(batch)
    asked = Counter()
    for line, target, k_of in zip(batch.inputs, batch.targets, level, strict=True):
        image = dict(zip(line[: 2 * n : 2].tolist(), line[1 : 2 * n : 2].tolist(), strict=True))
        assert sorted(image) == sorted(image.values()) == list(range(n))
        for at in range(2 * n, seq_len, 2):
            answer, k = line[at].item(), line[at + 1].item() - n + 1
            for _ in range(k):
                answer = image[answer]
            assert target[at] == IGNORE and target[at + 1] == answer and k_of[at + 1] == k
            asked[k] += 1
    assert set(asked) == set(range(1, max_k + 1)) and (batch.targets[:, : 2 * n] == IGNORE).all()
    assert not (batch.inputs[0, : 2 * n] == batch.inputs[1, : 2 * n]).all() or n == 2


def test_no_way_along_one_cycle_is_shorter_than_k() -> None:
    built = build_task("hops", {}, seq_len=64, seed=0)
    batch = built.train_batch(1, 50)
    for line, target in zip(batch.inputs, batch.targets, strict=True):
        image = dict(zip(line[:34:2].tolist(), line[1:34:2].tolist(), strict=True))
        for at in range(34, 64, 2):
            start, k = line[at].item(), line[at + 1].item() - 16
            way = [start]
            while len(way) < 17:
                way.append(image[way[-1]])
            steps = way.index(target[at + 1].item())
            assert len(set(way)) == 17 and min(steps, 17 - steps) == k


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"n": 8}, "task.max_k: found 8 with task.n=8; .* task.max_k=3, task.n=17 or task.one"),
        ({"n": 16, "max_k": 8}, "give task.max_k=7, task.n=17 or task.one_cycle=false"),
        ({"n": 2, "max_k": 1}, "give task.n=3 or task.one_cycle=false"),
    ],
)
def test_hops_past_half_of_the_cycle_are_refused(options: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice) as raised:
        build_task("hops", options, seq_len=64, seed=0)
    assert raised.value.key == "task.max_k"
    assert build_task("hops", {**options, "one_cycle": False}, seq_len=64, seed=0)


@pytest.mark.parametrize("degree", [2, 3, 5])
def test_group_targets_are_the_products_so_far(degree: int) -> None:
    batch = build_task("group", {"degree": degree}, seq_len=9, seed=1).train_batch(1, 20)
    elements = list(itertools.permutations(range(degree)))
    for line, target in zip(batch.inputs, batch.targets, strict=True):
        product = tuple(range(degree))
        for token, answer in zip(line, target, strict=True):
            product = tuple(elements[token][i] for i in product)
            assert elements[answer] == product
    assert len(set(batch.inputs.ravel())) > len(elements) / 2


def test_unigrams_are_the_frequencies_of_the_answers() -> None:
    for name, seq_len in (("hops", 64), ("group", 4)):
        built = build_task(name, {}, seq_len=seq_len, seed=0)
        batch = built.train_batch(1, 4000)
        # Answers of one sequence depend on each other: take one of each.
        counts = np.bincount(batch.targets[:, -1], minlength=len(built.unigram))
        expected = built.unigram * counts.sum()
        deviation = (counts - expected) / np.sqrt(expected)
        assert (deviation**2).mean() < 2 and built.optimal_loss(batch) == 0
        assert built.references["uniform_entropy"] == pytest.approx(np.log(len(built.unigram)))


def test_runs_of_the_first_defaults_of_hops_stay_the_same_runs() -> None:
    """Earlier versions dropped n = 8, max_k = 8 and one_cycle = false from the identity."""
    given = config_with({"task.name": "hops", "task.seq_len": 64})
    first = {"task.n": 8, "task.max_k": 8, "task.one_cycle": False}
    present = {"task.n": 17, "task.max_k": 8, "task.one_cycle": True}
    before, after = (
        digest(without_defaults(with_overrides(given, options))) for options in (first, present)
    )
    assert before == digest(given) != after == digest(without_defaults(given))
    assert with_defaults(given).task.options() == {"n": 17, "max_k": 8, "one_cycle": True}


OWN, NONE = "own token", "no token"
# A task, and the tokens that a predictor reads that does not look at the data asked about.
BLIND = {
    "copy, decoder": ("copy", "decoder", 6, {"vocab_size": 3}, OWN),
    "copy, encoder-decoder": ("copy", "encoder_decoder", 4, {"vocab_size": 3}, OWN),
    "reverse, encoder": ("reverse", "encoder", 4, {"vocab_size": 3}, OWN),
    "reverse, encoder, odd": ("reverse", "encoder", 3, {"vocab_size": 3}, OWN),
    "reverse, decoder": ("reverse", "decoder", 5, {"vocab_size": 3}, OWN),
    "reverse, encoder-decoder": ("reverse", "encoder_decoder", 3, {"vocab_size": 3}, OWN),
    "markov, encoder": ("markov", "encoder", 6, {"states": 3}, OWN),
    "markov, decoder": ("markov", "decoder", 4, {"states": 3}, NONE),
    "markov, encoder-decoder": ("markov", "encoder_decoder", 4, {"states": 3}, NONE),
    "hops": ("hops", "encoder", 16, {"n": 5, "max_k": 2}, "own token and the one before"),
    "hops, any cycles": (
        "hops", "encoder", 20, {"n": 4, "max_k": 6, "one_cycle": False},
        "own token and the one before",
    ),
    "group": ("group", "decoder", 3, {"degree": 2}, OWN),
    "group of six": ("group", "decoder", 4, {"degree": 3}, OWN),
}  # fmt: skip


def test_every_synthetic_task_has_a_blind_predictor() -> None:
    """docs/extending/task.md: a new task gets a row of BLIND."""
    assert {task for task, *_ in BLIND.values()} == set(TASKS) - {"text", "tokens"}


@pytest.mark.parametrize("name", BLIND)
def test_no_prediction_without_the_data_is_better_than_the_reference(name: str) -> None:
    """A predictor that counts answers by position and the tokens read there learns nothing more."""
    task, family, seq_len, options, read = BLIND[name]
    built = build_task(task, options, seq_len=seq_len, seed=1, family=family)
    batch = built.train_batch(1, 20_000)
    of_all = batch.targets != IGNORE
    references = {"masked": (batch.masked, built.unigram_loss(batch))}
    without = built.references.get("context_free_entropy", built.references.get("uniform_entropy"))
    if without and (name.startswith(("reverse", "group", "hops")) or family == "decoder"):
        references["all"] = (of_all, without)
    for where, reference in references.values():
        if not where.any():
            continue
        at = np.broadcast_to(np.arange(where.shape[1]), where.shape)[where]
        own = batch.inputs[:, -where.shape[1] :]
        seen = {NONE: 0 * own, OWN: own}.get(read, own * 1000 + np.roll(own, 1, axis=1))[where]
        keys = 0 if read not in (OWN, NONE) else at * 10**9
        loss = counted_loss(keys + seen, batch.targets[where])
        assert loss == pytest.approx(reference, abs=0.01)


def counted_loss(seen: NDArray[np.int64], answers: NDArray[np.int64]) -> float:
    """Return the entropy of the answers given the shown tokens, by counting, in nats."""
    numbers = np.unique(seen, return_inverse=True)[1]
    counts = np.zeros((numbers.max() + 1, answers.max() + 1))
    np.add.at(counts, (numbers, answers), 1)
    shares = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.log(shares[numbers, answers]).mean())


class Oracle(torch.nn.Module):
    """Answers as the task up to a level and wrongly above it."""

    def __init__(self, task: Any, most: int, batches: Iterable[Batch]) -> None:
        super().__init__()
        self.task, self.most, self.statistics = task, most, lambda _: torch.no_grad()
        self.batches = iter(batches)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        batch = next(self.batches)
        right = np.where(self.task.level_of(batch) <= self.most, batch.targets, batch.targets + 1)
        return torch.eye(self.task.vocab_size)[torch.from_numpy(right % self.task.vocab_size)]


@pytest.mark.parametrize(("most", "solved"), [(0, 0), (3, 3), (40, 40)])
def test_accuracy_of_each_k_and_the_largest_solved(most: int, solved: int) -> None:
    task = build_task("group", {"degree": 3}, seq_len=40, seed=0)
    evaluation = Evaluation(task, Config(), torch.device("cpu"))
    oracle = Oracle(task, most, evaluation.batches)
    row = evaluation.measure(oracle, oracle)
    assert {*row} == {*evaluation.columns[1:]}
    accuracies = {int(k.split("_")[1]): row[k] for k in row if k.startswith("accuracy_")}
    assert list(accuracies) == [*range(1, 33), 40]
    assert accuracies == {k: float(k <= most) for k in accuracies}
    assert row["solved"] == solved and row["accuracy"] == pytest.approx(most / 40)


def test_a_run_logs_accuracies_and_a_chart_shows_the_largest_k(tmp_path: Path) -> None:
    config = {
        "task.name": "hops", "task.n": 5, "task.max_k": 2, "task.seq_len": 18, "train.steps": 2,
        "model.family": "decoder", "model.d_model": 8, "model.depth": 1,
    }  # fmt: skip
    run = deepstack.train(config_with(config), out=tmp_path)
    last = run.evals.iloc[-1]
    shares = sorted([last["accuracy_1"], last["accuracy_2"]])
    assert 0 <= shares[0] <= last["accuracy"] <= shares[1] <= 1
    assert {"accuracy_1", "solved"} <= set(run.columns["columns"])
    assert "without the data" in run.columns["columns"]["unigram_loss"]["description"]
    assert last["unigram_loss"] == pytest.approx(np.log(4))
    # The folder states every option, so a run of older defaults stays the same.
    assert "  one_cycle: true" in (run.path / "config.yaml").read_text().splitlines()
    assert f"  solved {last['solved']:.0f}" in run.folder.log_path.read_text()
    make_run(tmp_path / "two", depth=6, seed=0, solved=3)
    make_run(tmp_path / "two", depth=6, seed=1, solved=5)
    make_run(tmp_path / "two", depth=18, seed=0, solved=8)
    points = rows(make_chart("solved_vs_depth", tmp_path / "two"), kind="point")
    assert points[["x", "y", "n"]].to_numpy().tolist() == [[6, 4, 2], [18, 8, 1]]


def test_a_k_above_an_unsolved_one_does_not_count_as_solved() -> None:
    right, steps = np.array([True, False, True]), np.array([1, 2, 3])
    assert accuracies(right, steps, (1, 2, 3))["solved"] == 1
