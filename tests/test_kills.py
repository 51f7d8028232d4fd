"""A process that dies before any of its file-changing calls: the same command still goes on."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deepstack
from deepstack.config import Config, with_overrides
from deepstack.records import Run

CONFIG = with_overrides(
    Config(),
    {
        "model.depth": 2,
        "model.d_model": 8,
        "task.seq_len": 8,
        "train.batch_size": 2,
        "train.steps": 3,
        "train.eval_every": 2,
        "train.eval_batches": 1,
        "log.probe_sequences": 1,
        "log.layers_every": 2,
        "runtime.checkpoint_seconds": 0.0,  # a checkpoint after every step
    },
)
CALLS = ("replace", "rename", "write", "rmdir", "unlink", "mkdir", "open")


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours catches it, and every later call raises it too."""


class Killer:
    """Counts the calls of `os` that change files, and lets none through from number `limit` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.limit = 0, None
        for name in CALLS:
            monkeypatch.setattr(os, name, self.counting(getattr(os, name)))

    def counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.limit is not None and self.count >= self.limit:
                raise Killed
            return call(*args, **kwargs)

        return counted

    def run(self, out: Path, limit: int | None) -> Run | None:
        self.count, self.limit = 0, limit
        try:
            return deepstack.train(CONFIG, out=out)
        except Killed:
            return None
        finally:
            self.limit = None
            gc.collect()  # closes what the dead run held open, its lock above all


def data_of(run: Run) -> dict[str, bytes]:
    files = [run.path / "steps.csv", run.path / "evals.csv", *(run.path / "layers").glob("*.npy")]
    files += (run.path / "checkpoint").glob("*/weights.safetensors")
    return {str(f.relative_to(run.path)): f.read_bytes() for f in sorted(files)}


def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    killer = Killer(monkeypatch)
    killer.run(tmp_path / "first", None)  # what only a first run opens (modules) is not counted
    whole = killer.run(tmp_path / "whole", None)
    assert whole is not None
    total, wanted = killer.count, data_of(whole)
    assert total > 100
    for limit in range(1, total + 1, every):
        out = tmp_path / f"{limit}"
        assert killer.run(out, limit) is None, limit
        logs = list(out.glob("*/*/steps.csv"))
        assert all(wanted["steps.csv"].startswith(log.read_bytes()) for log in logs), limit
        again = killer.run(out, None)
        assert again is not None and again.state == "done", limit
        assert data_of(again) == wanted, limit


def test_a_kill_before_every_seventh_call_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path, monkeypatch, every=7)


@pytest.mark.slow
def test_a_kill_before_every_call_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tmp_path, monkeypatch, every=1)
