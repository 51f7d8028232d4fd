"""python -m benchmarks: one shape in all rows, rows that take turns, messages on missing peers."""

import json
from functools import partialmethod
from itertools import islice, product
from pathlib import Path

import pytest
import torch
from helpers import QUICK
from helpers.command_line import refusal, succeed, typed
from helpers.sampling import some
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.__main__ import app
from benchmarks.peers import (
    PEERS,
    Peer,
    PeerModel,
    Shape,
    jax_peer,
    measure,
    report,
    shape_config,
    shape_of,
    suite,
)
from benchmarks.peers.peers import ShapeError
from benchmarks.peers.products import Products
from benchmarks.peers.rows import LOGGED, OWN, UNLOGGED, Row, RowError, RowProcess
from benchmarks.peers.worker import build_peer, peer_optimizers, peer_steps
from deepstack import config as conf
from deepstack.model import build_model
from deepstack.tasks import Task, build_task
from deepstack.training import mean_loss

TINY = ["model.depth=2", "model.d_model=8", "task.seq_len=8", "train.batch_size=2"]
CPU = torch.device("cpu")
TORCH = Row("torch")
STACKS = ("torch", "bert", "torchscale", "x_transformers")
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
    words = ["--steps", 2, "--json", "--peers", "torch,absent", "--chart", tmp_path / "rows.png"]
    result = typed(QUICK, *TINY, *words, program=app)
    assert result.exit_code == 0, result.stderr
    assert "Absent: no_such_package is not installed; pip install '.[bench]'" in result.stderr
    found = json.loads(result.stdout)
    *rows, products = found["rows"]
    labels = ["deepstack", "deepstack, nothing logged", "nn.TransformerEncoder"]
    assert [row["name"] for row in rows] == labels
    assert products["name"] == "matrix products alone"
    for row in rows:
        assert 0 < row["matmul_fraction"] < 1
        assert row["peak_memory_mb"] > row["start_memory_mb"] > 50
        assert row["start_s"] > 0
    assert len({row["parameters"] for row in rows}) == 1
    machine = found["machine"]
    assert (machine["torch"], machine["threads"]) == (torch.__version__, 1)
    assert machine["import_torch_s"] > 0
    assert found["interleaved"] is True and found["config"] == QUICK
    assert (tmp_path / "rows.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--peers", "torhc"], 2, "did you mean 'torch'?"),
        (["--peers", "torch+shards"], 2, "allowed with shards: deepstack, deepstack_unlogged"),
        (["--peers", "torch", "--no-peers"], 2, "allowed one of them"),
        (["--depths", "6"], 2, "two or more depths"),
        (["--chart", "rows.txt"], 2, "allowed .png"),
        (["runtime.device=cuda"], 5, "runtime.device=cpu"),
    ],
)
def test_a_mistake_is_refused_before_a_run(words: list[str], code: int, message: str) -> None:
    result = typed(QUICK, *TINY, *words, program=app)
    assert result.exit_code == code and message in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 3 and result.stdout == ""


def count_parameters(config: conf.Config) -> int:
    """Return the parameters of deepstack's model."""
    return sum(build_model(config, vocab_size=257, device="meta").banks.count().values())


def first_batch() -> tuple[Task, torch.Tensor, torch.Tensor]:
    """Return a task with the inputs and targets of its first batch."""
    task = build_task("text", {}, seq_len=16, seed=0)
    batch = task.train_batch(1, 2)
    return task, torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "optimizer"), some([("torch", "muon"), *product(STACKS, ["adamw"])], 3)
)
def test_a_peer_has_as_many_parameters_and_learns(name: str, optimizer: str) -> None:
    """The loss on the first batch falls over some steps, under clipping as configured."""
    if not PEERS[name].installed():
        pytest.skip(f"{PEERS[name].package} is not installed")
    config = config_of(**{"train.optimizer": optimizer})
    built = build_peer(name, shape_of(config, 257), CPU)
    model = built.model
    ours = count_parameters(config)
    theirs = sum(p.numel() for p in model.parameters())
    assert theirs == (ours if name == "torch" else pytest.approx(ours, rel=0.02))
    task, inputs, targets = first_batch()
    before = mean_loss(model(inputs), targets)
    steps = peer_steps(config, built, task, CPU)
    assert all(next(steps) > 0 for _ in range(8))
    largest = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert largest <= 1.0 + 1e-4
    assert mean_loss(model(inputs), targets) < before
    steps.close()


def test_jax_has_exactly_as_many_parameters_and_learns() -> None:
    jax = pytest.importorskip("jax")
    config = config_of(**{"runtime.device": "cpu"})
    shape = shape_of(config, 257)
    built = build_peer("jax", shape, CPU)
    leaves = jax.tree.leaves(jax_peer.initial(jax, shape))
    assert built.parameters == count_parameters(config) == sum(leaf.size for leaf in leaves)
    task, *batch = first_batch()
    train_step = built.start(config)
    before = train_step(*batch)
    assert train_step(*batch) < before < 8
    assert all(seconds > 0 for seconds in islice(peer_steps(config, built, task, CPU), 3))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimizers_of_jax_decay_weights_as_torchs_do(name: str) -> None:
    optax = pytest.importorskip("optax")
    values = {"train.optimizer": name, "train.weight_decay": 0.3, "train.lr": 0.1}
    train = config_of(**values, **{"train.momentum": 0.9, "train.clip": None}).train
    layer = nn.Linear(3, 2, bias=False)
    (optimizer,) = peer_optimizers(train, PeerModel(layer, layer))
    theirs = jax_peer.optimizer_of(optax, train)
    weight = layer.weight.detach().numpy().copy()
    state = theirs.init(weight)
    for _ in range(3):
        layer.weight.grad = torch.randn(2, 3)
        changes, state = theirs.update(layer.weight.grad.numpy(), state, weight)
        weight = optax.apply_updates(weight, changes)
        optimizer.step()
    torch.testing.assert_close(torch.tensor(weight.tolist()), layer.weight.detach())


@pytest.mark.full
def test_a_suite_has_one_row_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    assert suite.SUITES == {"cpu": ("narrow", "small", "medium", "wide")}
    monkeypatch.setitem(suite.SUITES, "cpu", ("narrow", "wide"))
    tiny = ["model.depth=2", "model.d_model=8", "model.n_heads=2", "task.seq_len=8"]
    words = ["--suite", "cpu", *tiny, "--steps", 1, "--peers", "torch,torch+bf16", "--json"]
    found = json.loads(succeed(*words, program=app))
    assert [row["shape"] for row in found["rows"]] == ["narrow", "wide"]
    for row, each in zip(found["rows"], found["reports"], strict=True):
        assert row["fastest_peer"] == "nn.TransformerEncoder"
        assert 0 < row["ratio"] and 0 < row["ratio_bf16"] and 0 < row["ratio_shards"]
        own = ["deepstack, bf16", "deepstack, two shards on two threads"]
        assert [r["name"] for r in each["rows"]][2:4] == own


def test_a_named_shape_is_a_config() -> None:
    config = shape_config("medium", ["model.depth=3"])
    assert (config.model.depth, config.model.d_model, config.train.batch_size) == (3, 256, 16)
    assert "did you mean 'medium'?" in refusal(2, "mediun", program=app)


def test_a_peer_with_other_layers_is_refused() -> None:
    stack = nn.Linear(SHAPE.d_model, SHAPE.d_model)
    PEERS.register("shallow", Peer("Shallow", "torch", lambda shape: PeerModel(stack, stack)))
    with pytest.raises(ShapeError, match="256 numbers, and 6,912 make 3 layers"):
        build_peer("shallow", SHAPE, CPU)


def test_the_products_equal_a_training_steps() -> None:
    """As many multiplications as torch counts in a step of nn.TransformerEncoder, unfused."""
    products = Products(SHAPE, 3, CPU, torch.float32)
    assert products.seconds() > 0
    model = build_peer("torch", SHAPE, CPU).model
    tokens = torch.arange(24).view(3, 8)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        mean_loss(model(tokens), tokens).backward()
    assert products.flops() == counter.get_total_flops()
    # Every layer has separate weights and gradients.
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

    begin = partialmethod(note, "begin")
    step = partialmethod(note, "step")
    time_products = partialmethod(note, "products")


def measured(*processes: FakeProcess, steps: int = 2) -> tuple[bool, list[Row], list[str]]:
    """Whether they took turns, the measured rows, and the messages."""
    FakeProcess.requests = []
    lines: list[str] = []
    together, left = measure.measure_rows(processes, steps, CPU, lines.append)
    return together, [process.row for process in left], lines


def test_the_rows_take_turns_if_memory_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    together, _, _ = measured(FakeProcess(LOGGED), FakeProcess(TORCH))
    turn = ["step deepstack", "products deepstack", "step torch", "products torch"]
    assert together and FakeProcess.requests == ["begin deepstack", "begin torch", *turn, *turn]
    monkeypatch.setattr(conf, "available_memory", lambda: 2**28)
    together, _, lines = measured(FakeProcess(LOGGED), FakeProcess(TORCH), steps=1)
    assert not together and "one follows the other" in lines[0]
    assert FakeProcess.requests == ["begin deepstack", *turn[:2], "begin torch", *turn[2:]]


def test_a_peer_that_fails_is_left_out() -> None:
    _, left, lines = measured(
        FakeProcess(LOGGED), FakeProcess(Row("bert"), fails_at="step"), FakeProcess(TORCH)
    )
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
    bf16 = Row("deepstack", ("bf16",))
    assert [process.row for process in found.rows] == [LOGGED, UNLOGGED, bf16]
    assert [process.config.model.depth for process in found.depths] == [3, 9]
    assert FakeProcess.requests[-4:] == ["begin deepstack"] * 2 + ["step deepstack"] * 2
    assert {process.parameters for process in found.rows} == {count_parameters(config_of())}


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
    found = report(config_of(), measure.Measured({}, rows, [], True), "", "x.yaml")
    first, unlogged, peer, products = found["rows"]
    assert (first["step_ms"], first["step_ms_low"], first["step_ms_high"]) == (200, 100, 2000)
    assert first["tokens_per_s"] == 160 and first["matmul_fraction"] == 0.5
    assert peer["matmul_fraction"] == 0.125
    assert products["step_ms"] == 100 and products["peak_memory_mb"] is None
    ratio = found["ratios"]["deepstack / nn.TransformerEncoder"]
    assert ratio == {"median": 0.25, "low": 0.25, "high": 0.5}
    assert {first["name"], unlogged["name"]} == set(OWN.values())
    assert "exponents" not in found


def test_exponents_in_depth() -> None:
    deep = []
    for depth in (10, 100, 1000):
        process = measured_row(LOGGED, [depth**0.9, depth**0.9, 1e9], [])
        process.config = config_of(**{"model.depth": depth})
        process.peak_memory = process.start_memory + 3.0 * depth
        deep.append(process)
    own = [measured_row(row, [1.0], [0.5]) for row in (LOGGED, UNLOGGED)]
    found = report(config_of(), measure.Measured({}, own, deep, True), "", "x.yaml")["exponents"]
    assert found["depth"] == [10, 100, 1000]
    assert found["step_ms"]["exponent"] == pytest.approx(0.9, abs=1e-3)
    assert found["memory_mb"]["exponent"] == pytest.approx(1.0, abs=1e-3)


def test_peers_that_are_built_otherwise_are_left_out() -> None:
    messages: list[str] = []
    assert measure.available_peers(conf.Config(), [TORCH], messages.append) == [TORCH]
    assert not messages
    for changed in (
        "model.norm.kind=rms", "model.activation=tanh", "model.bias=false", "model.gated=true",
        "model.qk_norm=true", "model.positions=rotary", "model.head=bert",
        "train.label_smoothing=0.1", "train.z_loss=1e-4",
    ):  # fmt: skip
        given = conf.parse_config("", overrides=[changed])
        assert measure.available_peers(given, [TORCH], messages.append) == []
        assert messages.pop().startswith("left out: all peers") and not messages
