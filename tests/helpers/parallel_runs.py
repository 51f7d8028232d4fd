"""Runs that one process and two trained by torchrun must agree on; a script for both.

`python parallel_runs.py alone OUT PART`, then `torchrun --nproc-per-node=2 parallel_runs.py
together OUT PART`.  The scheme and the task of `register` are known in these processes only.
"""

import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import deepstack
from deepstack.base.errors import Interrupted
from deepstack.config import Config, with_overrides
from deepstack.schemes import SCHEMES, Scheme
from deepstack.schemes.role import parameter
from deepstack.tasks import IGNORE, Batch, Task, task
from helpers.extensions import known
from helpers.small_runs import small, stop_at

KINDS = ("data", "fully_sharded")
BEGUN = 7  # steps of the runs that are interrupted

CONFIG = small(
    task__seq_len=8, train__steps=20, train__lr=3e-3, train__clip=0.5, train__eval_every=0,
    train__eval_batches=1, log__layers_every=10,
)  # fmt: skip


# The changed settings of each run, by its name: every scheme, and settings that are hard to share.
CASES: dict[str, dict[str, Any]] = {
    **{
        f"scheme_{name}": {"model.scheme": name, "model.depth": 2}
        for name in (*SCHEMES, "one_number")
    },
    "deepnorm": {},
    "uneven": {
        "task.name": "uneven",
        "train.batch_size": 6,
        "train.micro_batches": 3,
        "train.optimizer": "sgd",
        "train.momentum": 0.9,
        **known({"log.attribution_every": 5, "log.first_order": True}),
    },
    "odd": {
        "model.d_model": 15,
        "model.n_heads": 3,
        "model.d_ff": 7,
        "model.head": "bert",
        "train.weight_decay": 0.1,
        "train.lr_factors": {"v": 0.5},
        "train.trainable": ["q", "v", "w1", "w2", "bias", "norm_gain", "head", "embedding"],
        "runtime.recompute_every": 2,
        "runtime.banks": False,
    },
    "muon": {"train.optimizer": "muon", "runtime.parallel": "data"},
    "bound": {"train.max_loss": 3.0},
}


def register() -> None:
    """Register a scheme and a task with properties that are hard to share."""

    class OneNumber(Scheme, name="one_number", label="One number", paper="none"):
        """x <- LN(x + a G(x)), a one trained number; b is not used."""

        def setup(self, parts: Any) -> None:
            self.a = parameter(1, role="scheme", start="one")
            self.b = parameter(3, role="scheme", start="zero")

        def residual(self, x: Any, G: Any, norm: Any) -> Any:
            return norm(x + self.a * G(x))

    @task("uneven")
    def uneven(*, seq_len: int, seed: int) -> Task:
        """Predict i + 1 tokens of sequence i: shares of a batch have different numbers of them."""

        def draw(random: np.random.Generator, batch_size: int, held_out: bool) -> Batch:
            tokens = random.integers(0, 11, (batch_size, seq_len))
            shown = np.arange(seq_len)[None] <= np.arange(batch_size)[:, None]
            return Batch(tokens, np.where(shown, tokens, IGNORE), np.zeros_like(shown))

        return Task(name="uneven", vocab_size=11, seed=seed, draw=draw)


PARTS = 3  # of the cases; a commit tries one of them


def cases_of(part: int) -> list[str]:
    """One third of the cases, and the one that the runs that go on have."""
    return [c for at, c in enumerate(CASES) if c == "deepnorm" or at % PARTS == part]


def config_of(case: str, parallel: str = "data") -> Config:
    """The configuration of a case."""
    return with_overrides(CONFIG, {"runtime.parallel": parallel, **CASES[case]})


def begin(out: Path, parallel: str) -> None:
    """A run that a signal to the last process interrupts after a few steps."""
    rank, ranks = (int(os.environ.get(*each)) for each in (("RANK", "0"), ("WORLD_SIZE", "1")))
    stop = stop_at(BEGUN) if rank == ranks - 1 else lambda: None
    with suppress(Interrupted):
        deepstack.train(config_of("deepnorm", parallel), out=out, study="begun", stop=stop)


def alone(out: Path, part: int) -> None:
    """The cases that are tried, and a run begun for each way of sharing to go on with."""
    for case in cases_of(part):
        deepstack.train(config_of(case), out=out / "alone", study=case)
    for kind in KINDS:
        begin(out / f"alone_{kind}", kind)


def together(out: Path, part: int) -> None:
    """The same cases in both ways of sharing, what one process began, and runs for it."""
    for kind in KINDS:
        for case in cases_of(part):
            deepstack.train(config_of(case, kind), out=out / kind, study=case)
        begin(out / f"{kind}_alone", kind)
        config = config_of("deepnorm", kind)
        begun = out / f"alone_{kind}"
        deepstack.train(config, out=begun, study="begun", allow_env_change=True)


def fail(out: Path) -> None:
    """A run in which the last process alone meets an error after a few steps."""

    def stop() -> None:
        if os.environ["RANK"] == "1" and (out / "failing").is_dir():
            raise ZeroDivisionError("made for the test")

    deepstack.train(config_of("deepnorm"), out=out, study="failing", stop=stop)


if __name__ == "__main__":
    warnings.simplefilter("error")
    register()
    work, place, *part = sys.argv[1:]
    {"alone": alone, "together": together, "fail": fail}[work](Path(place), *map(int, part))
