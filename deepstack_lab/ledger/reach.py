"""How far a verdict reaches: the stacks of which a source speaks, and those that were measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from deepstack.config import Config

Verdict = Literal[
    "agrees",
    "agrees in part",
    "disagrees",
    "undecided",
    "not measured",
    "seen at this size",
    "seen in part at this size",
    "not seen at this size",
    "holds as an identity",
]
Span = tuple[float, float] | None

AT_THIS_SIZE: Mapping[Verdict, Verdict] = {
    "agrees": "seen at this size",
    "agrees in part": "seen in part at this size",
    "disagrees": "not seen at this size",
}


@dataclass(frozen=True)
class Extent:
    """The stacks of which a source speaks, or those that were measured.

    A property that is not known is () or None.

    family: kinds of networks, as in encoder, decoder or residual MLP.
    width: least and largest d_model.
    depth: least and largest number of layers, of each side of an encoder-decoder.
    tokens: least and largest number of training tokens a parameter; (0, 0) at the start.
    data: models, data and steps in words, which no rule compares.
    """

    family: tuple[str, ...] = ()
    width: Span = None
    depth: Span = None
    tokens: Span = None
    data: str = ""

    def __str__(self) -> str:
        """Return the range in words, as in `decoder, width 256, 2 to 128 layers, text`."""
        family = " or ".join(self.family).replace("_", "-")
        width = f"width {span(self.width)}" if self.width else ""
        depth = f"{span(self.depth)} layers" if self.depth else ""
        tokens = f"{span(self.tokens)} tokens a parameter" if self.tokens else ""
        if self.tokens == (0, 0):
            tokens = "at the start"
        known = ", ".join(filter(None, (family, width, depth, tokens, self.data)))
        return known or "no sizes"


def span(ends: Span) -> str:
    """Return a range as text, such as `4 to 64`, to two digits below 100."""
    assert ends is not None
    low, high = (f"{end:.2g}" if end < 100 else f"{end:.0f}" for end in ends)
    return low if low == high else f"{low} to {high}"


def outside(measured: Extent, source: Extent) -> tuple[str, ...]:
    """Return the properties in which a measurement is not shown to lie in the source's range.

    A property lies inside if both ranges are known and the measured one is a part of the source's.
    """
    is_inside = {
        "family": bool(measured.family) and set(measured.family) <= set(source.family),
        "width": lies_within(measured.width, source.width),
        "depth": lies_within(measured.depth, source.depth),
        "tokens": lies_within(measured.tokens, source.tokens),
    }
    return tuple(name for name, inside in is_inside.items() if not inside)


def lies_within(part: Span, whole: Span) -> bool:
    """Return whether a range is a part of another; not if one of them is not known."""
    return part is not None and whole is not None and whole[0] <= part[0] and part[1] <= whole[1]


def reached(
    decided: Verdict, source: Extent | None, measured: Extent | None, identity: bool = False
) -> Verdict:
    """Return the verdict of an entry: that of its rules, as far as the measurement reaches.

    An identity that agrees holds as an identity.  An exact statement keeps its verdict.  So does a
    measurement that lies in the source's range.  Otherwise the verdict speaks of the measured size
    alone: 'seen at this size', 'seen in part at this size' or 'not seen at this size'.

    decided: the verdict of the rules.
    source: the range of the source; None if it is exact: an equation or a start of every size.
    measured: the range of the measurement; None if it is not known.
    identity: whether the statement holds for every number, so that no measurement can refute it.
    """
    if identity and decided == "agrees":
        return "holds as an identity"
    if source is None or not outside(measured or Extent(), source):
        return decided
    return AT_THIS_SIZE.get(decided, decided)


def extent_of(configs: Iterable[Config]) -> Extent:
    """Return the range of the stacks that these configurations train."""
    from deepstack.config import parameter_count
    from deepstack.model import tokens_per_step
    from deepstack.tasks import Task, task_of

    families, tasks = set[str](), dict[str, Task]()
    widths, depths, tokens = set[float](), set[float](), set[float]()
    for config in configs:
        model, key = config.model, f"{config.task} {config.model.family}"
        task = tasks[key] if key in tasks else tasks.setdefault(key, task_of(config))
        parameters = sum(parameter_count(config, task.vocab_size).values())
        families.add(model.family)
        widths.add(model.d_model)
        depths |= {model.depth, model.decoder_depth or model.depth}
        tokens.add(config.train.steps * tokens_per_step(config, task) / parameters)
    width, depth, a_parameter = ((min(one), max(one)) for one in (widths, depths, tokens))
    names = ", ".join(sorted({f"task {task.name}" for task in tasks.values()}))
    return Extent(tuple(sorted(families)), width, depth, a_parameter, names)
