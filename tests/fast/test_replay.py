"""A step replayed by torch's kernels is the step itself: the same numbers, bit for bit."""

import random
import resource
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from helpers.configs import config_with, runs_with
from helpers.kernels import NEEDS_ONEDNN
from helpers.sampling import some
from helpers.small_runs import data_of, weights_of
from torch import Tensor

from deepstack.config import Config
from deepstack.fast import Measured, ReplayedStep, Update
from deepstack.fast.recording import FUNCTIONS, Call, Recording, TensorRef, map_nested
from deepstack.fast.replay import bind_recording, layout, padded
from deepstack.records import Run
from deepstack.schemes import SCHEMES

config = partial(config_with, {
    "model.depth": 3, "model.d_model": 24, "model.n_heads": 3, "task.name": "markov",
    "task.seq_len": 12, "train.batch_size": 4, "train.steps": 8, "train.eval_every": 5,
    "train.eval_batches": 1, "train.clip": 0.1, "log.layers_every": 4,
    "runtime.device": "cpu", "runtime.threads": 1,
})  # fmt: skip


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts the recordings that are prepared for their replay."""
    calls = Mock(wraps=bind_recording)
    monkeypatch.setattr("deepstack.fast.replay.bind_recording", calls)
    return calls


def both(given: Config, folder: Path, prepared: Mock) -> list[Run]:
    """The run step by step, and with all steps replayed: equal byte for byte."""
    one, two = runs_with(given, folder, {"runtime.replay": False}, {"runtime.replay": "python"})
    assert [run.meta["environment"]["replayed"] for run in (one, two)] == [False, True]
    in_threads = given.runtime.threads != 1 and not given.model.dropout
    parts = given.train.shards if in_threads else 1
    assert prepared.call_count == 2 + parts, "the start, each shard in a thread, and the rest"
    assert data_of(one) == data_of(two)
    return [one, two]


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
    {"train__micro_batches": 2, "model__dropout": 0.1},
    {"train__shards": 2, "runtime__threads": 2, "train__precision": "bf16"},
    {"runtime__banks": False},
    {"runtime__fused": False},
    {"model__norm__kind": "batch"},
    {"model__norm__kind": "rms"},
    {"model__norm__kind": "dynamic_tanh"},
    {"model__gated": True, "model__activation": "silu"},
    {"train__spectral_penalty": 0.1},
    {"train__label_smoothing": 0.2, "train__z_loss": 0.1},
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


# Of 128 tokens every product of the feed-forward is large, of 64 tokens each product of attention.
LARGE = {"model__d_model": 64, "model__n_heads": 1, "model__depth": 2, "train__batch_size": 8}
ONEDNN = [
    LARGE | {"task__seq_len": seq_len, "runtime__products": "onednn", "train__precision": precision}
    for seq_len, precision in ((16, "fp32"), (64, "fp32"), (64, "bf16"))
]
OF_SCHEMES = [{"model__scheme": name} for name in SCHEMES.names()]
CASES = [
    *some(OF_SCHEMES, 24, SCHEMES.names().index("depth_mup") % 24),
    *some(KINDS, 14),
    *(pytest.param(kind, marks=NEEDS_ONEDNN) for kind in ONEDNN),
]


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: "-".join(map(str, kind.values())))
def test_every_kind_of_step_replayed_gives_the_same_bytes(
    kind: dict[str, Any], tmp_path: Path, prepared: Mock
) -> None:
    one, _ = both(config(**kind), tmp_path, prepared)
    assert len(one.steps) == 8 and weights_of(one)


def test_a_diverging_run_ends_at_the_same_step(tmp_path: Path, prepared: Mock) -> None:
    rates = {"train__lr": 1.5, "train__clip": None, "train__optimizer": "sgd"}
    given = config(train__steps=12, train__max_loss=8.0, **rates)
    one, two = both(given, tmp_path, prepared)
    assert one.state == two.state == "diverged"
    assert len(one.steps) > 4, "it diverged before anything was replayed"
    assert one.status["first_bad_layer"] == two.status["first_bad_layer"]


class ValueOfBatch:
    """A value in place of the sums of gradients and loss."""

    count = 1

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function, self.loss = function, torch.zeros(())
        self.tensors = [self.loss]

    def split(self, *batch: Tensor) -> list[tuple[Tensor, ...]]:
        return [batch]

    def begin(self, targets: Tensor) -> None:
        self.loss.zero_()

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        self.loss.copy_(self.function(inputs, targets))

    compute = add


def update_of(compute: Callable[[Tensor, Tensor], Tensor]) -> Update:
    """An update that computes this value in place of gradients, and measures values of it."""
    batch: Any = ValueOfBatch(compute)
    return Update(
        batch,
        lambda: (batch.loss, batch.loss * 2),
        lambda value, norm: Measured(value.clone(), norm, {"more": value - 1}),
    )


def replayed(
    compute: Callable[[Tensor, Tensor], Tensor], shapes: list[int]
) -> tuple[int, list[str]]:
    """How often an update with equal results is called if it is replayed, and the notices."""
    counted, notices = Mock(wraps=compute), list[str]()
    ways = update_of(compute), ReplayedStep(update_of(counted), None, notices.append)
    for step, rows in enumerate(shapes):
        results = []
        for way in ways:
            torch.manual_seed(step)
            measured = way(torch.randn(rows, 6), torch.randint(6, (rows,)))
            results.append([*map(float, measured[:2]), float(measured.probe["more"])])
        assert results[0] == results[1]
    return counted.call_count, notices


def many_operations(x: Tensor, targets: Tensor) -> Tensor:
    """Results in lists, views of views, writing in place, drawn numbers, no results.

    And two results that share a storage, as an operation of somebody's own may give them.
    """
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
    one, two = torch.ops.deepstack_test.two_halves(x)
    return loss.detach() + total + (one * two + two).sum()


def test_many_operations_replayed_are_themselves() -> None:
    library = torch.library.Library("deepstack_test", "FRAGMENT")
    library.define("two_halves(Tensor x) -> (Tensor, Tensor)")
    library.impl("two_halves", lambda x: torch.cat([x, x * 2]).split(len(x)), "CPU")
    # the recorded step, and the one of another shape
    assert replayed(many_operations, [4] * 5 + [7] + [4] * 3) == (2, [])


def changes_shapes_in_place(x: Tensor, targets: Tensor) -> Tensor:
    """A value of tensors whose shape or memory changes after they are made."""
    h = x.clone().unsqueeze_(0).mul_(2).squeeze_(0)
    square = torch.mm(h, x.clone().t_(), out=torch.empty(0))
    ones = torch.empty(1).resize_(200).fill_(1.0)
    return (square * square.clone().transpose_(0, 1)).sum() + ones.cumsum(0).sum()


def test_tensors_that_change_their_shape_are_replayed() -> None:
    assert replayed(changes_shapes_in_place, [4] * 5) == (1, [])


READS_A_VALUE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "_local_scalar_dense": lambda x, targets: x * (2.0 if float(x.sum()) > 0 else 3.0),
    "index": lambda x, targets: x[x > 0],
    "_unique2": lambda x, targets: targets.unique(),
    "bincount": lambda x, targets: targets.bincount(),
    "repeat_interleave": lambda x, targets: torch.repeat_interleave(x, targets, dim=0),
}


@pytest.mark.parametrize("operation", READS_A_VALUE)
def test_a_step_whose_shapes_or_branches_depend_on_values_runs_eagerly(operation: str) -> None:
    of_batch = READS_A_VALUE[operation]
    notice = f"a step cannot be replayed: it reads a value ({operation})"
    # the recorded step is undone and repeated
    assert replayed(lambda *batch: of_batch(*batch).sum(), [4] * 5) == (6, [notice])


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
    offsets, total = layout([*used, frozenset(kept)], sizes)
    for call in range(41):
        living = sorted(
            (offsets[n], offsets[n] + padded(sizes[n]))
            for n, (first, last) in enumerate(spans)
            if first <= call <= last or (n in kept and first <= call)
        )
        for (start, end), (following, _) in pairwise([*living, (total, total)]):
            assert start % 64 == 0 and end <= following
    assert total < sum(map(padded, sizes)), "no memory was used twice"


class CountedInt(int):
    """An integer that counts how often a dict or a set looks it up."""

    lookups = 0

    def __hash__(self) -> int:
        CountedInt.lookups += 1
        return int.__hash__(self)


def lookups_of_binding(layers: int) -> int:
    """How often binding the recording of a stack looks a storage up: its work in any unit."""
    weights = [torch.eye(4) for _ in range(layers)]
    with torch.no_grad(), Recording() as recording:
        hidden = torch.ones(2, 4)
        for weight in weights:
            hidden = hidden + F.linear(hidden, weight).relu_()
    recording.finish(hidden)

    def counted(reference: TensorRef) -> TensorRef:
        return reference._replace(number=CountedInt(reference.number))

    recording.before = {CountedInt(n): storage for n, storage in recording.before.items()}
    recording.calls = [
        Call(
            call.operation,
            *map_nested((call.args, call.kwargs, call.results), counted, TensorRef),
            {*map(CountedInt, call.used)},
        )
        for call in recording.calls
    ]
    assert len(recording.calls) > 3 * layers and len(recording.before) == layers
    CountedInt.lookups = 0
    bind_recording(recording)
    return CountedInt.lookups


def test_the_work_of_binding_a_recording_is_linear_in_depth() -> None:
    assert lookups_of_binding(100) <= 2.2 * lookups_of_binding(50)


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
    values = values if isinstance(values, tuple) else (values,)
    recording.finish(values)
    bound = bind_recording(recording)
    [(_, _, options)] = bound.operations
    assert options.keys() >= set(FUNCTIONS[operation][1:])
    bound.run()
    for result, value in zip(bound.results, values, strict=True):
        assert torch.equal(result.view(torch.int32), value.view(torch.int32))


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
