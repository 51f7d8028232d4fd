"""deepstack bench: the same shape in all rows, rows that take turns, messages on missing peers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import QUICK, ROOT
from helpers.command_line import typed
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from deepstack import config as conf
from deepstack.bench import (
    PEERS,
    Peer,
    PeerModel,
    PeerTrainer,
    Shape,
    jax_peer,
    measure,
    report,
    shape_config,
    shape_of,
)
from deepstack.bench.peers import ShapeError
from deepstack.bench.products import Products
from deepstack.bench.rows import LOGGED, OWN, UNLOGGED, Row, RowError, RowProcess
from deepstack.bench.worker import build_peer, peer_steps
from deepstack.model import build_model
from deepstack.tasks import build_task
from deepstack.training import mean_loss

TINY = ["model.depth=2", "model.d_model=8", "task.seq_len=8", "train.batch_size=2"]
CPU = torch.device("cpu")
TORCH = Row("torch")
SHAPE = Shape(
    depth=3, d_model=16, n_heads=2, d_ff=40, vocab_size=31, seq_len=8,
    activation="relu", dropout=0.0, eps=1e-5, tied=True,
)  # fmt: skip


def config_of(**values: object) -> conf.Config:
    small = {"model.depth": 6, "task.seq_len": 16, "train.batch_size": 2}
    return conf.with_overrides(conf.Config(), {**small, **values})


@pytest.mark.slow
def test_bench_measures_deepstack_and_a_peer_and_names_what_is_missing(tmp_path: Path) -> None:
    PEERS.register("absent", Peer("Absent", "no_such_package", lambda shape: None))
    chart = tmp_path / "rows.png"
    words = ["--steps", 2, "--json", "--peers", "torch,absent"]
    result = typed("bench", QUICK, *TINY, *words, "--chart", chart)
    assert result.exit_code == 0, result.stderr
    assert "Absent: no_such_package is not installed; pip install '.[bench]'" in (result.stderr)
    found = json.loads(result.stdout)
    labels = ["deepstack", "deepstack, nothing logged", "nn.TransformerEncoder"]
    assert [row["name"] for row in found["rows"]] == [*labels, "matrix products alone"]
    for row in found["rows"]:
        assert 0 < row["step_ms_low"] <= row["step_ms"] <= row["step_ms_high"]
        assert row["tokens_per_s"] == pytest.approx(16 * row["steps_per_s"], rel=1e-2)
    for row in found["rows"][:-1]:
        assert 0 < row["matmul_fraction"] < 1
        assert row["peak_memory_mb"] > row["start_memory_mb"] > 50
        assert row["start_s"] > 0
    assert len({row["parameters"] for row in found["rows"][:-1]}) == 1
    assert f"{labels[0]} / {labels[2]}" in found["ratios"]
    assert found["machine"]["torch"] == torch.__version__ and found["machine"]["threads"] == 1
    assert found["machine"]["import_torch_s"] > 0
    assert found["interleaved"] is True and found["config"] == QUICK
    assert chart.stat().st_size > 10_000


@pytest.mark.parametrize(
    "words, message",
    [
        (["--peers", "torhc"], "did you mean 'torch'?"),
        (["--peers", "torch+shards"], "allowed with shards: deepstack, deepstack_unlogged"),
        (["--peers", "torch", "--no-peers"], "allowed one of them"),
        (["--depths", "6"], "two or more depths"),
        (["--chart", "rows.txt"], "allowed .png"),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(words: list[str], message: str) -> None:
    result = typed("bench", QUICK, *TINY, *words)
    assert result.exit_code == 2 and message in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 3 and result.stdout == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there() -> None:
    result = typed("bench", ROOT / "configs" / "bench_wide.yaml", "--no-peers")
    assert result.exit_code == 5 and "runtime.device=cpu" in result.stderr


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("torch", "adamw"),
        ("torch", "muon"),
        ("bert", "adamw"),
        ("torchscale", "adamw"),
        ("x_transformers", "adamw"),
    ],
)
def test_a_peer_has_as_many_parameters_and_learns(name: str, optimizer: str) -> None:
    """The loss on the first batch falls over some steps, under clipping as configured."""
    if not PEERS[name].installed():
        pytest.skip(f"{PEERS[name].package} is not installed")
    config = config_of(**{"train.optimizer": optimizer})
    built = build_peer(name, shape_of(config, 257), CPU)
    model = built.model
    ours = sum(build_model(config, vocab_size=257, device="meta").banks.count().values())
    theirs = sum(p.numel() for p in model.parameters())
    assert theirs == (ours if name == "torch" else pytest.approx(ours, rel=0.02))
    task = build_task("text", {}, seq_len=16, seed=0)
    batch = task.train_batch(1, 2)
    inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
    before = mean_loss(model(inputs), targets)
    steps = peer_steps(config, built, task, CPU)
    assert all(next(steps) > 0 for _ in range(8))
    largest = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert largest <= 1.0 + 1e-4
    after = mean_loss(model(inputs), targets)
    assert torch.isfinite(after) and after < before
    steps.close()


def test_jax_has_exactly_as_many_parameters_and_learns() -> None:
    jax = pytest.importorskip("jax")
    config = config_of(**{"runtime.device": "cpu"})
    shape = shape_of(config, 257)
    built = build_peer("jax", shape, CPU)
    assert isinstance(built, PeerTrainer)
    ours = sum(build_model(config, vocab_size=257, device="meta").banks.count().values())
    leaves = jax.tree.leaves(jax_peer.initial(jax, shape))
    assert built.parameters == ours == sum(leaf.size for leaf in leaves)
    task = build_task("text", {}, seq_len=16, seed=0)
    batch = task.train_batch(1, 2)
    train_step = built.start(config)
    losses = [train_step(torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets))]
    losses += [train_step(torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets))]
    steps = peer_steps(config, built, task, CPU)
    assert all(next(steps) > 0 for _ in range(3))
    assert losses[1] < losses[0] < 8


@pytest.mark.slow
def test_a_suite_has_one_row_for_each_shape() -> None:
    tiny = ["model.depth=2", "model.d_model=8", "model.n_heads=2", "task.seq_len=8"]
    words = ["--suite", "cpu", *tiny, "--steps", 1, "--peers", "torch,torch+bf16", "--json"]
    result = typed("bench", *words)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert [row["shape"] for row in found["rows"]] == ["narrow", "small", "medium", "wide"]
    for row, each in zip(found["rows"], found["reports"], strict=True):
        assert row["fastest_peer"] == "nn.TransformerEncoder"
        assert 0 < row["ratio"] and 0 < row["ratio_bf16"] and 0 < row["ratio_shards"]
        own = ["deepstack, bf16", "deepstack, two shards on two threads"]
        assert [r["name"] for r in each["rows"]][2:4] == own


def test_a_named_shape_is_a_config() -> None:
    config = shape_config("medium", ["model.depth=3"])
    assert (config.model.depth, config.model.d_model, config.train.batch_size) == (3, 256, 16)
    result = typed("bench", "mediun")
    assert result.exit_code == 2 and "did you mean 'medium'?" in result.stderr


def test_a_peer_with_other_layers_is_refused() -> None:
    def shallow(shape: Shape) -> PeerModel:
        stack = nn.Linear(shape.d_model, shape.d_model)
        return PeerModel(stack, stack)

    PEERS.register("shallow", Peer("Shallow", "torch", shallow))
    with pytest.raises(ShapeError, match="256 numbers, and 6,912 make 3 layers"):
        build_peer("shallow", SHAPE, CPU)


def test_the_products_are_those_of_a_training_step() -> None:
    """As many multiplications as torch counts in a step of nn.TransformerEncoder, unfused."""
    products = Products(SHAPE, 2, CPU, torch.float32)
    assert products.seconds() > 0
    model = build_peer("torch", SHAPE, CPU).model
    tokens = torch.arange(16).view(2, 8)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        mean_loss(model(tokens), tokens).backward()
    assert products.flops() == counter.get_total_flops()


def test_every_layer_has_weights_and_gradients_of_its_own() -> None:
    products = Products(SHAPE, 3, CPU, torch.float32)
    products.seconds()
    calls = [call for call in products.calls if call[0] is torch.mm]
    w1_and_w2 = {right.data_ptr() for _, _, right, _ in calls if right.shape == (16, 40)}
    gradients = {out.data_ptr() for _, _, _, out in calls if out.shape == (40, 16)}  # of w1
    assert len(w1_and_w2) == 2 * 3 and len(gradients) == 3
    assert all(out.abs().sum() > 0 for _, _, _, out in calls)


class FakeProcess(RowProcess):
    """A row that notes each request, and can fail."""

    requests: list[str]

    def __init__(
        self, row: Row, config: conf.Config | None = None, fails_at: str = "", exit_code: int = 1
    ) -> None:
        super().__init__(row, config or config_of())
        self.fails_at, self.exit_code = fails_at, exit_code

    def note(self, what: str) -> None:
        FakeProcess.requests.append(f"{what} {self.row.name}")
        if what == self.fails_at:
            raise RowError("no room", self.exit_code)

    def begin(self) -> None:
        self.note("begin")

    def step(self) -> None:
        self.note("step")

    def time_products(self) -> None:
        self.note("products")


def measured(*processes: FakeProcess, steps: int = 2) -> tuple[bool, list[Row], list[str]]:
    """Whether they took turns, the measured rows, and the messages."""
    FakeProcess.requests = []
    lines: list[str] = []
    together, left = measure.measure_rows(processes, steps, CPU, lines.append)
    return together, [process.row for process in left], lines


def test_the_rows_take_turns() -> None:
    together, left, _ = measured(FakeProcess(LOGGED), FakeProcess(TORCH))
    assert together and left == [LOGGED, TORCH]
    turn = ["step deepstack", "products deepstack", "step torch", "products torch"]
    assert FakeProcess.requests == ["begin deepstack", "begin torch", *turn, *turn]


def test_one_row_follows_the_other_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conf, "available_memory", lambda: 2**28)
    together, _, lines = measured(FakeProcess(LOGGED), FakeProcess(TORCH), steps=1)
    assert not together and "one follows the other" in lines[0]
    turn = ["begin {0}", "step {0}", "products {0}"]
    assert FakeProcess.requests == [
        line.format(row) for row in ("deepstack", "torch") for line in turn
    ]


def test_a_peer_that_fails_is_left_out_and_the_others_go_on() -> None:
    processes = FakeProcess(LOGGED), FakeProcess(Row("bert"), fails_at="step"), FakeProcess(TORCH)
    _, left, lines = measured(*processes)
    assert left == [LOGGED, TORCH] and "left out: Hugging Face BERT: no room" in lines
    assert FakeProcess.requests.count("step bert") == 1


@pytest.mark.parametrize(("at", "exit_code"), [("step", 5), ("begin", 2)])
def test_deepstacks_own_row_must_not_fail(at: str, exit_code: int) -> None:
    with pytest.raises(RowError, match="deepstack: no room") as caught:
        measured(FakeProcess(LOGGED, fails_at=at, exit_code=exit_code), FakeProcess(TORCH))
    assert caught.value.exit_code == exit_code


def test_other_depths_are_deepstacks_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeProcess.requests = []
    monkeypatch.setattr(measure, "facts_of", lambda config, device: {})
    monkeypatch.setattr(measure, "RowProcess", FakeProcess)
    found = measure.bench(config_of(), steps=1, peers=["deepstack+bf16"], depths=[3, 9])
    assert [process.row for process in found.rows] == [
        LOGGED,
        UNLOGGED,
        Row("deepstack", ("bf16",)),
    ]
    assert [process.config.model.depth for process in found.depths] == [3, 9]
    assert FakeProcess.requests[-4:] == ["begin deepstack"] * 2 + ["step deepstack"] * 2
    counts = build_model(config_of(), vocab_size=257, device="meta").banks.count()
    assert {process.parameters for process in found.rows} == {sum(counts.values())}


def measured_row(row: Row, steps: list[float], products: list[float]) -> RowProcess:
    process = RowProcess(row, config_of())
    process.steps, process.products = steps, products
    process.peak_memory, process.start_memory, process.parameters = 500.0, 300.0, 7
    return process


def test_medians_and_ratios_are_taken_pair_by_pair() -> None:
    # A machine that is ten times slower in the third round says nothing of either row.
    rows = [
        measured_row(LOGGED, [0.1, 0.2, 2.0], [0.05, 0.1, 1.0]),
        measured_row(UNLOGGED, [0.1, 0.2, 1.0], [0.05, 0.1, 1.0]),
        measured_row(TORCH, [0.4, 0.4, 8.0], [0.05, 0.1, 1.0]),
    ]
    facts = measure.Measured({}, rows, [], True)
    found = report(config_of(), facts, "deepstack bench x.yaml", "x.yaml")
    first, last = found["rows"][0], found["rows"][-1]
    assert (first["step_ms"], first["step_ms_low"], first["step_ms_high"]) == (200, 100, 2000)
    assert first["tokens_per_s"] == 160 and first["matmul_fraction"] == 0.5
    assert found["rows"][2]["matmul_fraction"] == 0.125
    assert last["step_ms"] == 100 and last["peak_memory_mb"] is None
    ratio = found["ratios"]["deepstack / nn.TransformerEncoder"]
    assert ratio == {"median": 0.25, "low": 0.25, "high": 0.5}
    assert set(OWN.values()) <= {row["name"] for row in found["rows"]}
    assert "exponents" not in found


def test_exponents_in_depth() -> None:
    deep = []
    for depth in (10, 100, 1000):
        process = measured_row(LOGGED, [depth**0.9, depth**0.9, 1e9], [])
        process.config = config_of(**{"model.depth": depth})
        process.peak_memory = process.start_memory + 3.0 * depth
        deep.append(process)
    own = measured_row(LOGGED, [1.0], [0.5])
    own_alone = measured_row(UNLOGGED, [1.0], [0.5])
    facts = measure.Measured({}, [own, own_alone], deep, True)
    found = report(config_of(), facts, "", "x.yaml")["exponents"]
    assert found["depth"] == [10, 100, 1000]
    assert found["step_ms"]["exponent"] == pytest.approx(0.9, abs=1e-3)
    assert found["memory_mb"]["exponent"] == pytest.approx(1.0, abs=1e-3)


def test_peers_that_are_built_otherwise_are_left_out() -> None:
    messages: list[str] = []
    assert (
        measure.available_peers(conf.Config(), [TORCH], messages.append) == [TORCH] and not messages
    )
    for key, value in (
        ("norm.kind", "rms"), ("activation", "tanh"), ("bias", False), ("gated", True),
        ("qk_norm", True), ("positions", "rotary"),
    ):  # fmt: skip
        given = conf.with_overrides(conf.Config(), {f"model.{key}": value})
        assert measure.available_peers(given, [TORCH], messages.append) == []
        assert messages.pop().startswith("left out: all peers") and not messages
