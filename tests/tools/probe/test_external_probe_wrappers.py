"""The external probe on compiled models and in one of several processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from helpers.probe_models import D, adamw, batch_of, encoder, loop
from helpers.sampling import some
from helpers.two_processes import run_two
from torch import nn

import deepstack
from deepstack.base.errors import ConfigError
from deepstack.records import Run

# -- compiled modules ------------------------------------------------------------------------------


def whole(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def each_layer(model: Any) -> Any:
    for layer in model.layers:
        layer.compile(backend="eager")
    return model


def layers_wrapped(model: Any) -> Any:
    model.layers = nn.ModuleList(torch.compile(layer, backend="eager") for layer in model.layers)
    return model


def forward_alone(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler reads it
@pytest.mark.parametrize(
    "how", some([whole, in_place, each_layer, layers_wrapped, forward_alone], 5)
)
def test_a_compiled_model_has_the_values_of_the_same_model_without(
    how: Callable[[Any], Any], tmp_path: Path
) -> None:
    runs: list[Run] = []
    for change in (lambda model: model, how):
        model = change(encoder(2, dropout=0.0))
        out = tmp_path / str(len(runs))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with deepstack.probe(model, batch_of(0), optimizer, out=out) as probe:
            loop(model, optimizer, 3, probe.step)
        runs.append(probe.run)
    plain, compiled = runs
    for name in ("loss", "grad_norm", "model_update", "model_update_step"):
        assert compiled.steps[name].tolist() == pytest.approx(plain.steps[name].tolist(), rel=1e-4)
    for name in ("stream_norm", "grad_norm", "param_update_norm"):
        pairs = zip(compiled.layers(name)[1][1:], plain.layers(name)[1][1:], strict=True)
        for one, other in pairs:
            assert one.tolist() == pytest.approx(other.tolist(), rel=1e-4), name
    tables = [pd.read_csv(run.path / "attribution.csv") for run in runs]
    assert tables[1]["whole"].tolist() == pytest.approx(tables[0]["whole"].tolist(), rel=1e-4)


# -- several processes -----------------------------------------------------------------------------

TWO_PROCESSES = """
import torch, deepstack
from contextlib import nullcontext
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.map = nn.BatchNorm1d(8), nn.Linear(8, 8)
    def forward(self, x):
        return x + self.map(self.norm(x.transpose(1, 2)).transpose(1, 2))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
class Inside(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        return self.inner(x)
model = DistributedDataParallel(Model())
model = Inside(model) if kind == "inside" else model
hidden = (lambda m, b: m(b)) if kind == "function" else None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))
probe = None
with (deepstack.probe(model, batch, optimizer, out=folder + "/run", hidden=hidden) if rank == 0
      else nullcontext()) as probe:
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        if rank == 0:
            probe.step(loss)
torch.save(model.state_dict(), f"{folder}/end{rank}.pt")
torch.distributed.destroy_process_group()
"""


def train_one_rank(rank: int, kind: str, folder: str) -> None:
    exec(TWO_PROCESSES, {"rank": rank, "kind": kind, "folder": folder})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "inside", "function"])
def test_a_probe_on_one_of_two_processes_leaves_the_other_alone(kind: str, tmp_path: Path) -> None:
    run_two(train_one_rank, kind, str(tmp_path))
    run = Run(tmp_path / "run")
    assert run.state == "done" and len(run.steps) == 3
    ends = [torch.load(tmp_path / f"end{rank}.pt") for rank in (0, 1)]
    # running averages come from rank 0's last forward pass, as without a probe
    for key in ends[0]:
        if "running" not in key:
            torch.testing.assert_close(ends[0][key], ends[1][key], rtol=0, atol=0)


def measure_sharded(rank: int, folder: str) -> None:
    """Make a step of a model that is cut over two processes, with a loss of 1 and one of 4."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(6, D)
    with deepstack.probe(model, batch, optimizer, out=f"{folder}/run", layers=()) as probe:
        model(batch).square().mean().backward()
        optimizer.step()
        probe.step(1.0 + 3 * rank)
    dist.destroy_process_group()


def test_the_loss_of_a_sharded_model_is_the_mean_over_its_processes(tmp_path: Path) -> None:
    run_two(measure_sharded, str(tmp_path))
    assert Run(tmp_path / "run").steps["loss"].tolist() == [2.5]


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(D))


def stage_3() -> nn.Module:
    model = nn.Linear(D, D)
    model.weight.ds_id = 0  # as DeepSpeed marks its empty parameters
    return model


def flat() -> nn.Module:
    kind = type("FullyShardedDataParallel", (nn.Linear,), {})
    return kind(D, D)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lazy, "0.weight has no shape yet; call the model once"),
        (stage_3, "weight is cut over several processes"),
        (flat, "weight is cut over several processes"),
    ],
)
def test_parameters_that_are_not_whole_are_refused(
    make: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    model = make()
    optimizer = adamw(encoder(1))
    with pytest.raises(ConfigError, match=message):
        deepstack.probe(model, batch_of(0), optimizer, out=tmp_path / "run", layers=())
