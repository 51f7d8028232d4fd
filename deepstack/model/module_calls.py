"""Calls of a PyTorch model that deepstack did not build: its modules, its outputs and its layers.

Nothing here changes the model: all that it holds, random states and hooks are restored.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from deepstack.base.errors import ConfigError
from deepstack.base.registry import nearest
from deepstack.model.module_state import KeptState

T = TypeVar("T")

Layers = str | Sequence[nn.Module] | None
"""The layers: modules, or the name of the module that holds them; None: see `find_layers`."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of torch.compile, DataParallel and DistributedDataParallel.

    Its parameters are the same.  A call of it waits for no other process.
    """
    parallel = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    inner = model.module if parallel else getattr(model, "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def plain_name(name: str) -> str:
    """Return the name of a module or parameter without the parts that wrappers add.

    torch.compile adds `_orig_mod` anywhere; data parallel training adds `module` in front.
    """
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if parts[0:1] == ["module"] and len(parts) > 1 else parts)


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model with the batch unpacked according to its type."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def copied(batch: Any) -> Any:
    """Return the batch with copies of its tensors, so that a loader may reuse its memory.

    Raises ConfigError for a batch that is not a tensor, tuple, list or mapping.
    """
    if isinstance(batch, Mapping):
        batch = dict(batch)
    elif not isinstance(batch, (Tensor, tuple, list)):
        raise ConfigError(
            f"batch: found {type(batch).__name__}; allowed a tensor, given as model(batch), a "
            "tuple or list, as model(*batch), or a mapping, as model(**batch)"
        )
    return tree_map_only(Tensor, lambda x: x.detach().clone(), batch)


def find_module(modules: Mapping[str, nn.Module], name: str) -> nn.Module:
    """Return the module of this name, with or without what wrappers add to it.

    Raises ConfigError with the nearest name.
    """
    modules = {plain_name(each): module for each, module in modules.items()} | dict(modules)
    name = name if name in modules else plain_name(name)
    if name not in modules:
        near = nearest(name, modules)
        hint = f"did you mean {near!r}?" if near else "allowed a name of model.named_modules()"
        raise ConfigError(f"unknown module {name!r}; {hint}")
    return modules[name]


def last_module(layer: nn.Module) -> nn.Module:
    """Return the module that outputs the stream after a layer: itself, or a container's last child.

    A ModuleList is never called: x-transformers keeps a sublayer's norm, block and residual in one.
    """
    while isinstance(layer, (nn.ModuleList, nn.ModuleDict)) and len(layer):
        layer = list(layer.children())[-1]
    return layer


def tensor_of(output: Any) -> Tensor | None:
    """Return the hidden state of a module's output: a tensor, `last_hidden_state`, or the first."""
    if isinstance(output, (tuple, list)) and output:
        return tensor_of(output[0])
    if isinstance(output, Mapping):
        output = output.get("last_hidden_state")
    output = getattr(output, "last_hidden_state", output)
    return output if isinstance(output, Tensor) else None


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that can be trained, by name: quantised ones are integers."""
    numbers = model.named_parameters()
    return {n: p for n, p in numbers if p.is_floating_point() or p.is_complex()}


def is_sharded(x: Tensor) -> bool:
    """Return whether fully_shard or tensor parallelism cuts a tensor over processes."""
    return type(x).__name__ == "DTensor"


def fully_sharded(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters torch's fully_shard (FSDP2) cuts over the processes."""
    return [m for m in model.modules() if any(k.__name__ == "FSDPModule" for k in type(m).__mro__)]


def reshard(model: nn.Module) -> None:
    """Let each process hold only its part of the parameters of `fully_sharded` modules.

    The outermost module keeps whole parameters after a forward pass.
    """
    for module in fully_sharded(model):
        cast(Any, module).reshard()


def refuse_partial_parameters(model: nn.Module) -> None:
    """Raise ConfigError for parameters that have no shape yet, or whose parts cannot be joined.

    Parts of `fully_shard` over all processes can.
    """
    is_flat = any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())
    is_joined = bool(fully_sharded(model))
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"model: {name} has no shape yet; call the model once with a batch before the probe"
            )
        joined = not is_sharded(parameter) or (is_joined and is_cut_once(parameter))
        if is_flat or not joined or hasattr(parameter, "ds_id"):  # ds_id: of DeepSpeed's stage 3
            raise ConfigError(
                f"model: {name} is cut over several processes (FullyShardedDataParallel, tensor "
                "parallelism, ZeRO-3); allowed torch's fully_shard over all processes, and whole "
                "parameters in each process, as under DistributedDataParallel"
            )


def is_cut_once(parameter: Any) -> bool:
    """Return whether all processes together hold a DTensor, cut along one dimension at most."""
    cuts = sum(placement.is_shard() for placement in parameter.placements)
    return bool(cuts <= 1 and parameter.device_mesh.size() == torch.distributed.get_world_size())


@contextmanager
def unsynchronised(model: nn.Module) -> Iterator[None]:
    """Let DistributedDataParallel modules run without the other processes inside the block.

    Their forward pass broadcasts buffers, for which the others would have to call it as well.
    """
    kind, name = nn.parallel.DistributedDataParallel, "require_forward_param_sync"
    synchronised = [m for m in model.modules() if isinstance(m, kind) and getattr(m, name)]
    for module in synchronised:
        setattr(module, name, False)
    try:
        yield
    finally:
        for module in synchronised:
            setattr(module, name, True)


@contextmanager
def undisturbed(
    model: nn.Module, *values: Any, written: Sequence[nn.Parameter] = ()
) -> Iterator[None]:
    """Disable training mode, gradients, autocast, compilation and torch's fused encoder kernels.

    Afterwards modes, random states and all that the modules and these values hold are as they were
    (`KeptState`).  The flag `training` is set on each module: some layers merge weights, and round
    them, in the methods that switch the mode.  Compiled code keeps the hooks of the call that
    compiled it, and fused encoders turn a padded batch into a nested tensor: neither can be read.
    Modules of DistributedDataParallel run without the other processes; a model of fully_shard needs
    them, and is sharded again afterwards.

    values: of the call, such as the batch.
    written: parameters that the model changes.
    """
    reshard(model)
    state = KeptState(model, values, written)
    training = [module for module in model.modules() if module.training]
    devices = {t.device for t in model.parameters() if t.device.type == "cuda"}
    device = next((t.device.type for t in model.parameters()), "cpu")
    plain, numbers = random.getstate(), np.random.get_state()
    fused = torch.backends.mha.get_fastpath_enabled()
    for module in training:
        module.training = False
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            torch.random.fork_rng(devices=[d.index for d in devices]),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(device, enabled=False),
            torch.compiler.set_stance("force_eager"),
            unsynchronised(model),
        ):
            yield
    finally:
        reshard(model)
        torch.backends.mha.set_fastpath_enabled(fused)
        for module in training:
            module.training = True
        state.restore()
        random.setstate(plain)
        np.random.set_state(numbers)


@contextmanager
def outputs_of(
    modules: Iterable[nn.Module], take: Callable[[Tensor], T]
) -> Iterator[list[tuple[nn.Module, T]]]:
    """Collect the calls of these modules that return a tensor x, as (module, take(x)), in order."""
    calls: list[tuple[nn.Module, T]] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        x = tensor_of(output)
        if x is not None:
            calls.append((module, take(x)))

    with ExitStack() as hooks:
        for module in set(modules):
            hooks.callback(module.register_forward_hook(record).remove)
        yield calls
