"""A replayed step is the step itself: the same numbers, bit for bit."""

from __future__ import annotations

import random
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.configs import config_with
from helpers.kernels import NEEDS_ONEDNN
from helpers.sampling import some
from helpers.small_runs import data_of, weights_of
from torch import Tensor

import deepstack
from deepstack.config import Config, with_overrides
from deepstack.fast import Measured, ReplayedStep, Update
from deepstack.fast.recording import Recording, TensorRef
from deepstack.fast.replay import FUNCTIONS, bind, bind_recording, layout, padded
from deepstack.fast.step import Shard
from deepstack.records import Run
from deepstack.schemes import SCHEMES

config = partial(config_with, {
    "model.depth": 3, "model.d_model": 24, "model.n_heads": 3, "task.name": "markov",
    "task.seq_len": 12, "train.batch_size": 4, "train.steps": 8, "train.eval_every": 5,
    "train.eval_batches": 1, "train.clip": 0.1, "log.layers_every": 4,
    "runtime.device": "cpu", "runtime.threads": 1,
})  # fmt: skip


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """The recordings that are replayed."""
    found: list[Recording] = []

    def seen(recording: Recording, *replaced: Any) -> Any:
        found.append(recording)
        return bind_recording(recording, *replaced)

    monkeypatch.setattr("deepstack.fast.replay.bind_recording", seen)
    return found


def both(given: Config, folder: Path, recordings: list[Recording]) -> list[Run]:
    """The run with its steps made one by one, and with all but two of them replayed."""
    runs = []
    for replay in (False, True):
        own = with_overrides(given, {"runtime.replay": replay})
        runs.append(deepstack.train(own, out=folder / str(replay)))
        assert runs[-1].meta["environment"]["replayed"] is replay
        shards = given.train.shards
        assert len(recordings) == (shards + 1 if replay else 0), "each shard, and the rest"
    return runs


def assert_equal(one: Run, two: Run) -> None:
    """All logs and the weights, byte for byte."""
    assert len(one.steps) == 8 and weights_of(one)
    assert data_of(one) == data_of(two)


KINDS: list[dict[str, Any]] = [
    {"train__optimizer": "sgd", "train__momentum": 0.9},
    {"train__optimizer": "adam", "train__clip": None},
    {"train__optimizer": "muon", "train__weight_decay": 0.1},
    {"model__dropout": 0.1},
    {"train__precision": "bf16"},
    {"runtime__recompute_every": 2},
    {"train__shards": 2, "runtime__threads": 2},
    {"train__shards": 4, "runtime__threads": 3, "runtime__fused": False},
    {"train__shards": 2, "runtime__threads": 2, "model__dropout": 0.1},
    {"train__shards": 2, "runtime__threads": 2, "train__precision": "bf16"},
    {"runtime__banks": False},
    {"runtime__fused": False},
    {"model__norm__kind": "batch"},
    {"model__norm__kind": "rms"},
    {"model__norm__kind": "dynamic_tanh"},
    {"model__gated": True, "model__activation": "silu"},
    {"train__spectral_penalty": 0.1},
    {"train__label_smoothing": 0.2},
    {"model__family": "decoder"},
    {"model__family": "encoder_decoder", "task__name": "copy"},
    {"model__head": "bert"},
    {"train__trainable": ["q", "v", "bias"]},
    {"task__name": "copy"},
    {"train__lr_factors": {"w1": 0.5}},
    {"model__positions": "sinusoidal"},
    {"model__positions": "rotary", "model__qk_norm": True},
    {"model__norm__bias": False},
    {"train__trainable": ["norm_gain"]},
    # rows of a batch norm that do not lie side by side, of which torch's form that writes is wrong
    {"model__norm__kind": "batch", "model__scheme": "hyper_connections"},
    {"model__norm__kind": "batch", "model__scheme": "hybrid_norm"},
    {"model__norm__kind": "batch", "model__scheme": "norm_former"},
    {"model__family": "encoder_decoder", "model__decoder_attention": "average"},
]


@pytest.mark.parametrize("name", some(SCHEMES.names(), 6, SCHEMES.names().index("depth_mup") % 6))
def test_every_scheme_replayed_gives_the_same_bytes(
    name: str, tmp_path: Path, recordings: list[Recording]
) -> None:
    assert_equal(*both(config(model__scheme=name), tmp_path, recordings))


# Of 128 tokens every product of the feed-forward is large; over 64 tokens those of attention are.
LARGE = {"model__d_model": 64, "model__n_heads": 1, "model__depth": 2, "train__batch_size": 8}
ONEDNN = [
    LARGE | {"task__seq_len": seq_len, "runtime__products": "onednn", "train__precision": precision}
    for seq_len, precision in ((16, "fp32"), (64, "fp32"), (64, "bf16"))
]
CASES = [*some(KINDS, 3), *(pytest.param(kind, marks=NEEDS_ONEDNN) for kind in ONEDNN)]


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: "-".join(map(str, kind.values())))
def test_every_kind_of_step_replayed_gives_the_same_bytes(
    kind: dict[str, Any], tmp_path: Path, recordings: list[Recording]
) -> None:
    assert_equal(*both(config(**kind), tmp_path, recordings))


def test_a_diverging_run_ends_at_the_same_step(tmp_path: Path, recordings: list[Recording]) -> None:
    rates = {"train__lr": 1.5, "train__clip": None, "train__optimizer": "sgd"}
    given = config(train__steps=12, train__max_loss=8.0, **rates)
    one, two = both(given, tmp_path, recordings)
    assert one.state == two.state == "diverged"
    assert len(one.steps) > 4, "it diverged before anything was replayed"
    assert (one.path / "steps.csv").read_bytes() == (two.path / "steps.csv").read_bytes()
    assert one.status["first_bad_layer"] == two.status["first_bad_layer"]


class Steps:
    """An update that counts how often it is called."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.compute, self.calls = compute, 0

        self.value = torch.zeros(())
        self.update = Update(
            [Shard(self.gradients, [], [])],
            lambda: (self.value, self.value * 2),
            lambda value, norm: Measured(value.clone(), norm, {"more": value - 1}),
        )

    def gradients(self, inputs: Tensor, targets: Tensor) -> None:
        self.calls += 1
        self.value.copy_(self.compute(inputs, targets))


def results(update: Callable[[Tensor, Tensor], Measured], shapes: list[int]) -> list[list[float]]:
    found = []
    for step, rows in enumerate(shapes):
        torch.manual_seed(step)
        inputs, targets = torch.randn(rows, 6), torch.randint(6, (rows,))
        measured = update(inputs, targets)
        found.append([float(v) for v in (*measured[:2], *measured.probe.values())])
    return found


def replayed(
    compute: Callable[[Tensor, Tensor], Tensor], shapes: list[int]
) -> tuple[int, list[str]]:
    """How often an update with equal results is called if it is replayed, and the notices."""
    steps, notices = Steps(compute), list[str]()
    expected = results(Steps(compute).update, shapes)
    assert results(ReplayedStep(steps.update, None, notices.append), shapes) == expected
    return steps.calls, notices


def many_operations(x: Tensor, targets: Tensor) -> Tensor:
    """Results in lists and tuples, views of views, writing in place, drawn numbers, no results."""
    w = torch.linspace(-1, 1, 36).view(6, 6).requires_grad_()
    h = torch.relu(F.linear(x, w).clone())
    a, b = h.chunk(2, dim=1)
    top, where = (a * b).topk(2, dim=1)
    left, right = torch.split(torch.cat([top, a.flip(1)], dim=1), [2, 3], dim=1)
    h = h + F.pad(right, (3, 0)).cumsum(1) * left.sum(1, keepdim=True)
    h = h.index_add(0, torch.arange(2), torch.ones(2, 6)).t().contiguous().t()
    var, mean = torch.var_mean(h, dim=1, keepdim=True)
    h = F.dropout((h - mean) / (var + 1).sqrt(), 0.3) + torch.randn_like(h).mul_(0.1)
    q = h.view(1, -1, 2, 3).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(h.shape)
    y = torch.where(y > 0, y, torch.full_like(y, 0.5)) + torch.einsum("ij,kj->ik", y, w)
    y[:, 0] = where.float().mean()
    loss = F.cross_entropy(y, targets) + y.norm(dim=1).max() + torch.logsumexp(y, 0).mean()
    loss.backward()
    assert w.grad is not None
    total = sum(part.square().sum() for part in torch._foreach_mul([w.grad, y.detach()], 2.0))
    return loss.detach() + total


def test_many_operations_replayed_are_themselves() -> None:
    calls, notices = replayed(many_operations, [4] * 5 + [7] + [4] * 3)
    assert calls == 3, "two steps, and the one of another shape"
    assert not notices


def test_a_step_that_reads_a_value_runs_eagerly() -> None:
    def reads_a_value(x: Tensor, targets: Tensor) -> Tensor:
        return x.sum() * (2.0 if float(x.sum()) > 0 else 3.0)

    calls, notices = replayed(reads_a_value, [4] * 5)
    assert calls == 5
    assert notices == ["a step cannot be replayed: it reads a value (_local_scalar_dense)"]


@pytest.mark.parametrize("seed", range(20))
def test_no_two_results_share_memory_while_both_are_read(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([0, 4, 64, 100, 4096, 5000]) for _ in range(60)]
    spans = [sorted(draw.choices(range(40), k=2)) for _ in sizes]
    kept = {number for number in range(60) if draw.random() < 0.1}
    used = [
        frozenset(n for n, (first, last) in enumerate(spans) if call in (first, last))
        for call in range(40)
    ]
    offsets, total = layout(used, sizes, kept)
    ends = [(first, 40 if n in kept else last) for n, (first, last) in enumerate(spans)]
    for a in range(60):
        assert offsets[a] % 64 == 0 and offsets[a] + sizes[a] <= total
        for b in range(a):
            together = ends[a][0] <= ends[b][1] and ends[b][0] <= ends[a][1]
            apart = (
                offsets[a] + padded(sizes[a]) <= offsets[b]
                or offsets[b] + padded(sizes[b]) <= offsets[a]
            )
            assert apart or not together, (a, b)
    assert total <= sum(map(padded, sizes))
    assert total < sum(map(padded, sizes)), "no memory was used twice"


ATEN = torch.ops.aten
X, Y, W = (torch.randn(8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
NORM = (X, [8], X.mean(1, keepdim=True), (X.var(1, keepdim=True) + 1).rsqrt(), Y[0], Y[1])
ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    ATEN._softmax.default: (X, -1, False),
    ATEN._softmax_backward_data.default: (X, Y, -1, torch.float32),
    ATEN._to_copy.default: (X,),
    ATEN.add.Tensor: (X, Y[0]),
    ATEN.addcmul.default: (X, Y, W),
    ATEN.addmm.default: (Y[0], X, W),
    ATEN.baddbmm.default: (X[None], Y[None], W[None]),
    ATEN.bmm.default: (X[None], W[None]),
    ATEN.cat.default: ([X, Y], 1),
    ATEN.clone.default: (X,),
    ATEN.div.Scalar: (X, 3.0),
    ATEN.linalg_vector_norm.default: (X, 2, [1], True),
    ATEN.mul.Scalar: (X, 3.0),
    ATEN.mv.default: (X, Y[0]),
    ATEN.native_layer_norm.default: (X, [8], Y[0], Y[1], 1e-5),
    ATEN.native_layer_norm_backward.default: (W, *NORM, [True, True, True]),
    ATEN.sum.dim_IntList: (X, [0], True),
    ATEN.threshold_backward.default: (Y, X, 0),
} | {packet.default: (X,) for packet in (ATEN.gelu, ATEN.sigmoid, ATEN.silu, ATEN.tanh)}


@pytest.mark.parametrize("operation", [op for op, (_, *outs) in FUNCTIONS.items() if outs], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_function_of_the_table_gives_the_bits_of_its_operation(
    operation: Any, transposed: bool
) -> None:
    args = ARGUMENTS.get(operation, (X, Y))
    if transposed:
        args = tuple(
            arg.mT.contiguous().mT if isinstance(arg, Tensor) and arg.ndim > 1 else arg
            for arg in args
        )
    with Recording() as recording:
        values = operation(*args)
    recording.finish(())
    [call] = recording.calls
    tensors = {}
    values = values if isinstance(values, tuple) else (values,)
    for index, reference in call.results.items():
        empty = torch.full(values[index].shape, torch.nan)
        tensors[reference] = empty.as_strided(reference.size, reference.stride)

    def tensor(reference: TensorRef) -> Tensor:
        if reference not in tensors:
            storage, (_, *where, dtype) = recording.before[reference.number], reference
            tensors[reference] = torch.empty(0, dtype=dtype).set_(storage, *where)
        return tensors[reference]

    function, arguments, options = bind(call, tensor)
    assert options.keys() >= set(FUNCTIONS[operation][1:])
    function(*arguments, **options)
    for index, reference in call.results.items():
        assert torch.equal(tensors[reference].view(torch.int32), values[index].view(torch.int32)), (
            index
        )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_recording_reuses_the_memory_that_a_step_frees() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    x, w = torch.randn(256, 64), torch.randn(256, 64)
    with torch.no_grad(), Recording() as recording:
        before = resident()
        for _ in range(500):  # numbers of several sizes, freed in another order
            hidden = F.linear(x, w).relu_()
            F.layer_norm(F.linear(hidden, w.mT), [64]) + x
        grown = resident() - before
    assert len(recording.calls) == 2500
    assert grown < 40e6, "small objects lie between the freed results"


def test_results_that_share_a_storage_are_both_taken_over() -> None:
    """As of an operation of somebody's own that gives two halves of what it has made."""

    def two_halves(x: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([x, x * 2])
        return both[: len(x)], both[len(x) :]

    library = torch.library.Library("deepstack_test", "FRAGMENT")
    library.define("two_halves(Tensor x) -> (Tensor, Tensor)")
    library.impl("two_halves", two_halves, "CPU")

    def compute(x: Tensor, targets: Tensor) -> Tensor:
        one, two = torch.ops.deepstack_test.two_halves(x)
        return (one * two + two).sum()

    with torch.no_grad():
        assert replayed(compute, [4] * 6) == (2, [])
