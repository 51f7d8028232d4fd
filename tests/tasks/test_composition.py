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

import deepstack
from deepstack.config import Config
from deepstack.tasks import IGNORE, Batch, build_task
from deepstack.training.evaluation import Evaluation


@pytest.mark.parametrize(("n", "max_k", "seq_len"), [(2, 1, 6), (5, 7, 22), (8, 40, 32)])
def test_hops_follow_the_pairs_of_their_own_sequence(n: int, max_k: int, seq_len: int) -> None:
    built = build_task("hops", {"n": n, "max_k": max_k}, seq_len=seq_len, seed=3)
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


def test_one_cycle_comes_back_after_all_elements() -> None:
    built = build_task("hops", {"n": 7, "max_k": 8, "one_cycle": True}, seq_len=94, seed=0)
    batch = built.train_batch(1, 50)
    k = built.level_of(batch)[:, 15::2]
    start, answer = batch.inputs[:, 14::2], batch.targets[:, 15::2]
    assert ((answer == start) == (k == 7)).all() and (k == 7).any()


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
        assert built.references["uniform_entropy"] == pytest.approx(built.unigram_loss(batch))


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
    evaluation = Evaluation(task, Config().train, torch.device("cpu"))
    row = evaluation.measure(Oracle(task, most, evaluation.batches), torch.no_grad)
    assert list(row) == list(evaluation.columns)[1:]
    accuracies = {int(k.split("_")[1]): row[k] for k in row if k.startswith("accuracy_")}
    assert list(accuracies) == [*range(1, 33), 40]
    assert accuracies == {k: float(k <= most) for k in accuracies}
    assert row["solved"] == solved and row["accuracy"] == pytest.approx(most / 40)


def test_a_run_logs_accuracies_and_a_chart_shows_the_largest_k(tmp_path: Path) -> None:
    config = {
        "task.name": "hops", "task.n": 2, "task.max_k": 2, "task.seq_len": 12, "train.steps": 2,
        "model.family": "decoder", "model.d_model": 8, "model.depth": 1,
    }  # fmt: skip
    run = deepstack.train(config_with(config), out=tmp_path)
    last = run.evals.iloc[-1]
    shares = sorted([last["accuracy_1"], last["accuracy_2"]])
    assert 0 <= shares[0] <= last["accuracy"] <= shares[1] <= 1
    assert {"accuracy_1", "solved"} <= set(run.columns["columns"])
    assert f"  solved {last['solved']:.0f}" in run.folder.log_path.read_text()
    make_run(tmp_path / "two", depth=6, seed=0, solved=3)
    make_run(tmp_path / "two", depth=6, seed=1, solved=5)
    make_run(tmp_path / "two", depth=18, seed=0, solved=8)
    points = rows(make_chart("solved_vs_depth", tmp_path / "two"), kind="point")
    assert points[["x", "y", "n"]].to_numpy().tolist() == [[6, 4, 2], [18, 8, 1]]
