"""The shapes that `deepstack bench` knows by name, and suites of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from deepstack import config as conf
from deepstack.bench.measure import Measured, bench
from deepstack.bench.report import report, rounded
from deepstack.bench.rows import LOGGED, is_own, label_of, parse_row
from deepstack.errors import ConfigError
from deepstack.registry import unknown


class BenchShape(NamedTuple):
    """The sizes of a benchmark: DeepNorm layers trained by AdamW on text."""

    depth: int
    d_model: int
    n_heads: int
    batch_size: int
    seq_len: int


SHAPES = {
    "narrow": BenchShape(1000, 64, 2, 8, 32),
    "small": BenchShape(200, 32, 2, 16, 16),
    "medium": BenchShape(24, 256, 4, 16, 64),
    "wide": BenchShape(12, 512, 8, 8, 128),
}
SUITES = {"cpu": ("narrow", "small", "medium", "wide")}
"""Suites by name, each with its shapes, which a CPU runs in one thread."""

IN_BF16, IN_SHARDS = f"{LOGGED}+bf16", f"{LOGGED}+shards"


def shape_config(name: str, overrides: Sequence[str] = ()) -> conf.Config:
    """Return the configuration of a named shape, with settings as on the command line."""
    if name not in SHAPES:
        raise ConfigError(f"bench: {unknown('shape', name, SHAPES)}")
    shape = SHAPES[name]
    settings = [
        f"model.depth={shape.depth}", f"model.d_model={shape.d_model}",
        f"model.n_heads={shape.n_heads}", f"train.batch_size={shape.batch_size}",
        f"task.seq_len={shape.seq_len}", "task.name=text", "model.scheme=deepnorm",
        "train.optimizer=adamw", "train.lr=1e-4", "train.clip=1.0", "train.eval_every=0",
        "train.eval_batches=1", "log.probe_sequences=1", "log.layers_every=0",
        "runtime.device=cpu", "runtime.threads=1",
    ]  # fmt: skip
    return conf.parse_config("", overrides=[*settings, *overrides])


def run_suite(
    name: str,
    overrides: Sequence[str],
    *,
    steps: int,
    peers: Sequence[str] | None,
    command: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return the reports of a suite's shapes, and one row per shape that compares them.

    Every shape is measured in fp32, in bf16 and in two shards; the rows of a shape take turns.
    """
    if name not in SUITES:
        raise ConfigError(f"--suite: {unknown('suite', name, SUITES)}")
    reports, rows = [], []
    for shape in SUITES[name]:
        say(f"{shape}: {' x '.join(map(str, SHAPES[shape][:2]))}")
        config = shape_config(shape, overrides)
        measured = bench(config, steps=steps, peers=peers, own=[IN_BF16, IN_SHARDS], say=say)
        reports.append(report(config, measured, command, shape))
        rows.append({"shape": shape, **compare(measured)})
    return {"suite": name, "command": command, "rows": rows, "reports": reports}


def compare(measured: Measured) -> dict[str, Any]:
    """Return deepstack's steps with ‖ΔF‖ logged beside those of the fastest peer in fp32.

    ratio, ratio_bf16: medians over the rounds of deepstack's time, in fp32 and in bf16, over that
    of this peer; None without peers.  ratio_shards: of its time in two shards, on two threads, over
    its time on one.
    """
    by_row = {worker.row: worker.steps for worker in measured.rows}
    exact_steps, half = by_row[LOGGED], by_row.get(IN_BF16)
    exact = [row for row in by_row if not is_own(row) and "bf16" not in parse_row(row)[1]]
    fastest = min(exact, key=lambda row: statistics.median(by_row[row]), default=None)

    def milliseconds(steps: list[float] | None) -> float | None:
        return None if steps is None else rounded(1000 * statistics.median(steps))

    def ratio(row: str, other: str | None) -> float | None:
        if row not in by_row or other is None:
            return None
        pairs = zip(by_row[row], by_row[other], strict=True)
        return rounded(statistics.median([ours / theirs for ours, theirs in pairs]))

    return {
        "deepstack_ms": milliseconds(exact_steps),
        "deepstack_bf16_ms": milliseconds(half),
        "fastest_peer": None if fastest is None else label_of(fastest),
        "fastest_peer_ms": None if fastest is None else milliseconds(by_row[fastest]),
        "ratio": ratio(LOGGED, fastest),
        "ratio_bf16": ratio(IN_BF16, fastest),
        "ratio_shards": ratio(IN_SHARDS, LOGGED),
        "products_fraction": rounded(
            statistics.median(
                [p / s for p, s in zip(measured.rows[0].products, exact_steps, strict=True)]
            )
        ),
        "interleaved": measured.interleaved,
    }
