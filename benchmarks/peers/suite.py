"""The shapes that `python -m benchmarks` knows by name, and suites of them."""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers.measure import bench, usual_peers
from benchmarks.peers.report import report
from benchmarks.peers.rows import Row
from deepstack import config as conf
from deepstack.base import ConfigError, unknown

SIZES = ("model.depth", "model.d_model", "model.n_heads", "train.batch_size", "task.seq_len")
SHAPES = {
    "narrow": (1000, 64, 2, 8, 32),
    "small": (200, 32, 2, 16, 16),
    "medium": (24, 256, 4, 16, 64),
    "wide": (12, 512, 8, 8, 128),
}
"""The SIZES of benchmarks by name: DeepNorm layers trained by AdamW on text."""
SUITES = {"cpu": ("narrow", "small", "medium", "wide")}
"""Suites by name, each with its shapes, which a CPU runs in one thread."""

LOGGED, IN_BF16, IN_SHARDS = "deepstack", "deepstack+bf16", "deepstack+shards"


def shape_config(name: str, overrides: Sequence[str] = ()) -> conf.Config:
    """Return the configuration of a named shape, with settings as on the command line."""
    if name not in SHAPES:
        raise ConfigError(f"bench: {unknown('shape', name, SHAPES)}")
    settings = [
        *(f"{key}={size}" for key, size in zip(SIZES, SHAPES[name], strict=True)),
        "task.name=text", "model.scheme=deepnorm",
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
        names = [IN_BF16, IN_SHARDS, *(usual_peers(config) if peers is None else peers)]
        measured = bench(config, steps=steps, peers=names, say=say)
        reports.append(report(config, measured, command, shape))
        measured_rows = [process.row for process in measured.rows]
        rows.append({"shape": shape, **compare(measured_rows, reports[-1])})
    return {"suite": name, "command": command, "rows": rows, "reports": reports}


def compare(rows: Sequence[Row], found: dict[str, Any]) -> dict[str, Any]:
    """Return deepstack's steps with ‖ΔF‖ logged beside the fastest peer's in fp32.

    rows: those of the report `found`.  ratio, ratio_bf16: medians over the rounds of deepstack's
    time, in fp32 and in bf16, over that of this peer; None without peers.  ratio_shards: of its
    time in two shards, on two threads, over its time on one.
    """
    logged, in_bf16, in_shards = (Row.parse(n).label for n in (LOGGED, IN_BF16, IN_SHARDS))
    times = {row["name"]: row["step_ms"] for row in found["rows"]}
    exact = [row.label for row in rows if not row.is_own and "bf16" not in row.variants]
    fastest = min(exact, key=lambda label: times[label], default=None)

    def ratio(label: str, other: str | None) -> float | None:
        return found["ratios"].get(f"{label} / {other}", {}).get("median")

    return {
        "deepstack_ms": times[logged],
        "deepstack_bf16_ms": times[in_bf16],
        "fastest_peer": fastest,
        "fastest_peer_ms": times.get(fastest),
        "ratio": ratio(logged, fastest),
        "ratio_bf16": ratio(in_bf16, fastest),
        "ratio_shards": ratio(in_shards, logged),
        "products_fraction": found["rows"][0]["matmul_fraction"],
        "interleaved": found["interleaved"],
    }
