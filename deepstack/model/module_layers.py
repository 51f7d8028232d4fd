"""The layers of a PyTorch model that deepstack did not build, found by what they do in a call."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor, nn

from deepstack.base.errors import ConfigError
from deepstack.model.module_calls import (
    Layers,
    call_model,
    find_module,
    last_module,
    plain_name,
    tensor_of,
    undisturbed,
)

REMEDY = "name what holds the layers, as in layers='blocks', or layers=() for no values by layer"


class Visit(NamedTuple):
    """One call of a module that takes and returns a tensor of the same width.

    entered: numbers that identify the content of the tensor that it takes.
    """

    module: nn.Module
    width: int
    entered: tuple[float, float]


def find_layers(
    model: nn.Module,
    batch: Any,
    layers: Layers,
    width: int | None = None,
    written: Sequence[nn.Parameter] = (),
) -> tuple[str, list[nn.Module]]:
    """Return the name of the container of the layers, and the layers.

    By default they are the longest ModuleList whose members pass on one stream in model(batch):
    each takes and returns a tensor of the same width, in the order of the list, not all from the
    same input.  Lists inside of a repeated module are left out: attention heads, experts.  If there
    is no such ModuleList, a Sequential of equal modules counts.

    width: of F, if it is known; the members have it too.
    written: parameters that a forward pass writes into.

    Raises ConfigError if no list fits, or if the members of two take turns.
    """
    modules = dict(model.named_modules())
    if isinstance(layers, str):
        children = list(find_module(modules, layers).children())
        if not children:
            raise ConfigError(f"layers: {layers!r} holds no modules")
        return layers, children
    if layers is not None:
        return "those given", list(layers)
    lists = {n: list(m) for n, m in modules.items() if isinstance(m, nn.ModuleList) and len(m)}
    sequences = {n: list(m) for n, m in modules.items() if is_sequence_of_equals(m)}
    if not lists and not sequences:
        raise ConfigError(f"layers: the model has no ModuleList; {REMEDY}")
    ends = {last_module(m) for members in [*lists.values(), *sequences.values()] for m in members}
    with undisturbed(model, batch, written=written):
        visits = visits_of(model, batch, ends)
    outer = outermost(modules, {**lists, **sequences})
    for named in (lists, sequences):
        fitting = {
            name: turns
            for name, members in named.items()
            if name in outer and (turns := turns_of(members, visits, width))
        }
        if fitting:
            return longest(fitting, named)
    raise no_stream(lists, width)


def no_stream(lists: Mapping[str, Sequence[nn.Module]], width: int | None) -> ConfigError:
    """Return the error that none of these lists passes on one stream."""
    sizes = ", ".join(f"{plain_name(name) or 'the model'} ({len(m)})" for name, m in lists.items())
    of_width = f" of width {width}" if width else ""
    return ConfigError(
        f"layers: no list of modules passes on one stream{of_width} in model(batch), from one to "
        f"the next{f': not {sizes}' if sizes else ''}; {REMEDY}"
    )


def is_sequence_of_equals(module: nn.Module) -> bool:
    """Return whether a module is a Sequential of two or more modules of one class."""
    return (
        isinstance(module, nn.Sequential) and len(module) > 1 and len(set(map(type, module))) == 1
    )


def outermost(
    modules: Mapping[str, nn.Module], lists: Mapping[str, Sequence[nn.Module]]
) -> set[str]:
    """Return the names of the lists that are not inside of a repeated module.

    Repeated are the members of a list of two or more, and modules with a sibling of their class.
    """
    repeated = {module for members in lists.values() if len(members) > 1 for module in members}
    for module in modules.values():
        children = list(module.children())
        kinds = [type(child) for child in children]
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            repeated |= {child for child in children if kinds.count(type(child)) > 1}

    def parents(name: str) -> list[nn.Module]:
        parts = name.split(".")
        return [modules[".".join(parts[:count])] for count in range(1, len(parts))]

    return {name for name in lists if not repeated.intersection(parents(name))}


def visits_of(model: nn.Module, batch: Any, ends: set[nn.Module]) -> list[Visit]:
    """Return the calls of these modules in model(batch), in order."""
    entered: dict[nn.Module, tuple[int, tuple[float, float]] | None] = {}
    visits = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        first = next((x for x in tensors if x.is_floating_point() and x.ndim), None)
        content = None if first is None else (first.double().sum(), first.double().abs().sum())
        entered[module] = (
            None if first is None or content is None
            else (first.shape[-1], (content[0].item(), content[1].item()))
        )  # fmt: skip

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        x, before = tensor_of(output), entered.get(module)
        width = x.shape[-1] if x is not None and x.ndim else 0
        same = before is not None and before[0] == width
        visits.append(Visit(module, width if same else 0, before[1] if before else (0.0, 0.0)))

    with ExitStack() as hooks:
        for module in ends:
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        call_model(model, batch)
    return visits


def turns_of(members: Sequence[nn.Module], visits: Sequence[Visit], width: int | None) -> list[int]:
    """Return the positions of the members' last calls among all; [] unless they pass on a stream.

    The last calls count, if the model calls them more often than they are listed.
    """
    ends = [last_module(member) for member in members]
    turns = [i for i, visit in enumerate(visits) if visit.module in set(ends)][-len(ends) :]
    calls = [visits[i] for i in turns]
    widths = {call.width for call in calls}
    if [call.module for call in calls] != ends or len(widths) > 1 or 0 in widths:
        return []
    side_by_side = len(calls) > 1 and calls[0].entered == calls[1].entered
    return [] if side_by_side or width not in (None, *widths) else turns


def longest(
    fitting: Mapping[str, Sequence[int]], lists: Mapping[str, Sequence[nn.Module]]
) -> tuple[str, list[nn.Module]]:
    """Return the longest list; raise ConfigError if the members of another run between its own."""
    best = max(fitting, key=lambda name: len(fitting[name]))
    for name, turns in fitting.items():
        if name != best and turns[0] < fitting[best][-1] and fitting[best][0] < turns[-1]:
            raise ConfigError(
                f"layers: the members of {plain_name(best)!r} and of {plain_name(name)!r} take "
                f"turns; give the modules after which the stream is read, as in "
                f"layers=list(model.{plain_name(name)}), or layers=() for no values by layer"
            )
    return plain_name(best), list(lists[best])
