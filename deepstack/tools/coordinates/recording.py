"""One pass through a model: the outputs of its modules, the inputs of softmaxes, the loss's logits.

Batch norms use the statistics of the batch, as they do in training, and keep their averages.
Attention runs without fused kernels, which hide its logits.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from deepstack.model import plain_name, tensor_of, undisturbed
from deepstack.tools.coordinates.stacks import Names

Call = tuple[tuple[Any, ...], dict[str, Any], torch.dtype | None]
"""The arguments of a module, and autocast's dtype if it was on."""
LOGITS = "logits of the loss"
SOFTMAX = "softmax"
INPUT = "input"
MASKED = -1e4  # logits of attention below this are masked


def output_of(output: Any) -> Tensor | None:
    """Return the tensor of a module's output: its hidden state, its logits, or its first one.

    Losses, and other single numbers, are left out.
    """
    tensors = [tensor_of(output), getattr(output, "logits", None), *tree_leaves(output)]
    return next((x for x in tensors if is_measured(x)), None)


def is_measured(x: Any) -> bool:
    """Return whether a value is a tensor of several real numbers."""
    return (
        isinstance(x, Tensor)
        and x.is_floating_point()
        and x.numel() > 1
        and x.layout is torch.strided
    )


def copy_of(value: Any) -> Any:
    """Return arguments with copies of their tensors, which modules may change in place."""
    return tree_map_only(Tensor, lambda x: x.detach().clone(), value)


def share_of(layer: nn.Module, output: Tensor, x: Tensor) -> float:
    """Return the coefficient of a layer's input x in its output, by least squares; 1 where x is 0.

    It is near 1 for x + f(x), whose f(x) starts independent of x, lower if a norm follows, and near
    0 for a matrix.  A layer without parameters, such as an activation, adds nothing: 0.
    """
    if not any(True for _ in layer.parameters()):
        return 0.0
    squares = float(x.double().square().sum())
    return float((output.detach().double() * x.double()).sum()) / squares if squares else 1.0


def device_type_of(module: nn.Module) -> str:
    """Return the type of the device of a module's parameters: 'cpu' or 'cuda'."""
    return next(module.parameters()).device.type


def autocast_of(module: nn.Module) -> torch.dtype | None:
    """Return the dtype to which autocast casts a module's products now, or None without it."""
    device = device_type_of(module)
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


@dataclass
class Pass:
    """The tensors of one pass, by the names of modules.

    outputs: name -> output of each call, in fp32; in order of execution.
    same: name -> name of the earlier output that is the same tensor.
    branches: name of a layer -> output minus input.
    shares: name of a layer -> coefficient of its input in its output.
    calls: name -> path and first arguments of modules with parameters of their own.
    called: paths of all modules that were called.
    """

    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    branches: dict[str, Tensor] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    calls: dict[str, tuple[str, Call]] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)


class Recorder(TorchDispatchMode):
    """Records a pass.  The operations of softmaxes are seen below the modules."""

    def __init__(self, names: Names, wants_calls: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names, self.wants_calls = names, wants_calls
        self.record = Pass()
        self.open: list[str] = [""]  # paths of the modules that run
        self.seen: dict[tuple[int, int, int], tuple[tuple[str, ...], Tensor]] = {}
        self.held: list[Tensor] = []  # so that no other tensor gets their memory
        self.streams: dict[str, Tensor] = {}
        self.norms: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name in ("_softmax", "_safe_softmax") and args[0].ndim > 2:
            self.add(self.keys(self.open[-1], f" {SOFTMAX}"), args[0])
        elif name == "_log_softmax":
            self.record.outputs.pop(LOGITS, None)  # the last one counts
            self.record.same.pop(LOGITS, None)
            self.add((LOGITS,), args[0])
        return function(*args, **(kwargs or {}))

    def keys(self, path: str, end: str = "") -> tuple[str, ...]:
        """Return the names of a module, or of a part of it."""
        return tuple(f"{key}{end}".lstrip() for key in self.names.keys.get(path, ()))

    def add(self, keys: tuple[str, ...], x: Tensor) -> None:
        """Add an output, and note an earlier one of another module that is the same tensor."""
        if not keys:
            return
        content = (x.data_ptr(), x.numel(), x._version)
        if content not in self.seen:
            self.held.append(x)
            self.seen[content] = keys, x.detach().float().clone()
        others, values = self.seen[content]
        if others != keys:
            self.record.same |= {key: others[0] for key in keys}
        for key in keys:
            self.record.outputs.setdefault(key, []).append(values)

    def enter(self, path: str) -> Callable[..., None]:
        """Return the hook that runs before a module."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.open.append(path)
            self.record.called.add(path)
            if path in self.names.layers:
                x = next(filter(is_measured, tree_leaves((args, kwargs))), None)
                if x is not None:
                    self.streams[path] = x.detach().float().clone()
                    self.add(self.keys(path, f" {INPUT}"), x)
            if self.wants_calls and list(module.parameters(recurse=False)):
                for key in self.keys(path):
                    if key not in self.record.calls:
                        self.record.calls[key] = (
                            path,
                            (*copy_of((args, kwargs)), autocast_of(module)),
                        )

        return before

    def leave(self, path: str) -> Callable[..., None]:
        """Return the hook that runs after a module."""

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.open.pop()
            x = output_of(output)
            if x is None:
                return
            keys, start = self.keys(path), self.streams.get(path)
            self.add(keys, x)
            if "norm" in type(module).__name__.lower():
                self.norms |= set(keys)
            if start is not None and start.shape == x.shape:
                keys = tuple(key for key in keys if self.record.same.get(key) not in self.norms)
                self.record.branches |= dict.fromkeys(keys, x.detach().float() - start)
                self.record.shares |= dict.fromkeys(keys, share_of(module, x, start))

        return after


@contextmanager
def measured(model: nn.Module) -> Iterator[None]:
    """Enter the mode of a measurement: `undisturbed`, but for batch norms, and plain attention."""
    kept = []
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            kept.append((module, module.training, module.track_running_stats))
    with undisturbed(model), sdpa_kernel(SDPBackend.MATH):
        for module, _, _ in kept:
            module.training, module.track_running_stats = True, False
        try:
            yield
        finally:
            for module, training, tracks in kept:
                module.training, module.track_running_stats = training, tracks


def record(
    model: nn.Module, names: Names, run: Callable[[], object], seed: int, wants_calls: bool = False
) -> Pass:
    """Return the pass that `run` makes through a model.

    wants_calls: whether to keep the arguments of modules with parameters.
    """
    recorder = Recorder(names, wants_calls)
    with ExitStack() as stack:
        for name, module in model.named_modules():
            path = plain_name(name)
            before = module.register_forward_pre_hook(recorder.enter(path), with_kwargs=True)
            after = module.register_forward_hook(recorder.leave(path), with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        stack.enter_context(measured(model))
        torch.manual_seed(seed)
        with recorder:
            run()
    return recorder.record


def call_again(
    model: nn.Module,
    calls: Mapping[str, tuple[str, Call]],
    vectors: Mapping[str, dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Return the outputs of modules for the arguments of an earlier pass.

    vectors: path -> parameters that take the place of the module's.
    """
    modules = {plain_name(name): module for name, module in model.named_modules()}
    outputs = {}
    with measured(model):
        for key, (path, call) in calls.items():
            args, kwargs, dtype = copy_of(call)
            module, cast = modules[path], dtype is not None
            with torch.autocast(device_type_of(module), dtype, enabled=cast, cache_enabled=False):
                x = output_of(functional_call(module, vectors.get(path, {}), args, kwargs))
            if x is not None:
                outputs[key] = x.detach().float()
    return outputs
