"""Stand-ins for CUDA graphs: they record operations of the CPU and run them again."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
HOST = {aten.lift_fresh.default, aten._local_scalar_dense.default, aten.nonzero.default}
"""Operations that read the host's memory or wait for the device: no capture may contain them."""


class CpuGraph(TorchDispatchMode):
    """A graph of the operations inside its block, which write into the same tensors again.

    The block itself changes no tensor from outside of it, as a capture launches nothing.
    """

    begun: ClassVar[list["CpuGraph"]] = []

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor | None]]] = []
        self.replays = 0
        self.saved: dict[int, tuple[Tensor, Tensor]] = {}
        self.new: set[int] = set()  # addresses of memory that the block has allocated

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in HOST:
            raise RuntimeError(f"{function} reads the host's memory in a capture")
        kwargs = kwargs or {}
        self.save(function, args, kwargs)
        result = function(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = {address(x) for x in given}  # of views and in-place results
        kept = [
            x if isinstance(x, Tensor) and address(x) not in known else None
            for x in tree_leaves(result)
        ]
        self.new |= {address(x) for x in kept if x is not None}
        self.operations.append((function, args, kwargs, kept))
        return result

    def save(self, function: Any, args: Any, kwargs: Any) -> None:
        """Keep what an operation overwrites outside of the block."""
        named = zip(function._schema.arguments, args, strict=False)
        pairs = [
            *named,
            *((a, kwargs[a.name]) for a in function._schema.arguments if a.name in kwargs),
        ]
        for argument, value in pairs:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for x in tree_leaves(value):
                    if isinstance(x, Tensor) and address(x) not in (*self.new, *self.saved):
                        whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                        self.saved[address(x)] = whole, whole.clone()

    def restore(self) -> None:
        """Undo the changes of the block."""
        for whole, before in self.saved.values():
            whole.copy_(before)
        self.saved.clear()

    def replay(self) -> None:
        """Run the operations again, unseen by modes as a GPU's graph is."""
        self.replays += 1
        with _disable_current_modes(), torch.no_grad():
            for function, args, kwargs, kept in self.operations:
                for old, new in zip(kept, tree_leaves(function(*args, **kwargs)), strict=True):
                    if old is not None:
                        old.copy_(new)

    def reset(self) -> None:
        """Forget the operations."""
        self.operations.clear()


def address(x: Tensor) -> int:
    """The address of a tensor's memory."""
    return x.untyped_storage().data_ptr()


@contextmanager
def graph(one: CpuGraph, **how: Any) -> Iterator[None]:
    """Record into the graph, as torch.cuda.graph does."""
    CpuGraph.begun.append(one)
    try:
        with one:
            yield
    finally:
        one.restore()


def pretend(monkeypatch: pytest.MonkeyPatch) -> list[CpuGraph]:
    """Replace torch's graphs and streams by stand-ins; return the graphs that are begun."""
    CpuGraph.begun = []
    stand_ins: dict[str, Any] = {
        "CUDAGraph": CpuGraph, "Stream": Mock(), "graph": graph,
        "stream": lambda stream: nullcontext(), "current_stream": Mock(),
        "graph_pool_handle": object, "synchronize": Mock(), "get_rng_state": Mock(),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(import_module("deepstack.fast.capture"), "abandon", Mock())
    return CpuGraph.begun
