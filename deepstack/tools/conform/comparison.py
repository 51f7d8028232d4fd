"""The checks of a block, in order: forward pass, gradients, start, first update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepstack.config import MATRICES
from deepstack.model import LinearMaps
from deepstack.schemes import NORMS
from deepstack.tools.conform.block import Block, undeclared, undeclared_of_reference
from deepstack.tools.conform.causes import hypotheses
from deepstack.tools.conform.compare import (
    compare_gradients,
    compare_updates,
    copy,
    distance,
    gradient_distances,
    gradients,
    has_factors,
    move,
    pair,
)
from deepstack.tools.conform.effect import effect
from deepstack.tools.conform.hypothesis import Hypothesis, matched
from deepstack.tools.conform.mutations import (
    branches,
    residuals,
    scaled_skip,
    without_stop_gradient,
)
from deepstack.tools.conform.naming import (
    described,
    equation_of,
    start_cause,
    update_cause,
)
from deepstack.tools.conform.reference import (
    LAYOUT,
    Reference,
    draw_input,
    place,
    scheme_place,
)
from deepstack.tools.conform.report import Difference, Report
from deepstack.tools.conform.sets import CHECKS, CheckSet
from deepstack.tools.conform.start import Start, check_starts, sample_starts
from deepstack.tools.conform.sublayer_causes import PAIRS
from deepstack.tools.conform.weights import Key, Weights


@dataclass
class Comparison:
    """The checks of one block, in order; the first that fails ends them."""

    block: Block
    scheme: str
    settings: dict[str, Any]
    numbers: CheckSet
    report: Report

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths of the stacks that are compared."""
        return self.numbers.depths

    @property
    def tolerance(self) -> float:
        """The largest relative difference in double precision."""
        return self.numbers.tolerance

    def run(self) -> None:
        """Run the checks until one finds a difference."""
        self.note_undeclared()
        self.recognise_layout()
        for name in CHECKS:
            if name in self.numbers.checks and self.report.difference is None:
                getattr(self, name)()

    def note_undeclared(self) -> None:
        """Note the parameters of the reference that the block does not declare."""
        reference, own = pair(self.block, self.scheme, self.depths[0], self.settings)
        if missing := undeclared_of_reference(reference, own):
            self.report.notes.append(
                f"not declared, and kept at their start in the reference: {', '.join(missing)}"
            )

    def recognise_layout(self) -> None:
        """Take the layout of the block's rotary positions for the reference, if it is the other.

        The layout is no part of a scheme: reordered rows of q and k make one of the other.
        """
        reference, own = pair(self.block, self.scheme, self.depths[0], self.settings)
        if reference.config.model.positions != "rotary" or self.block.build is None:
            return
        halves = self.settings | {LAYOUT: "halves"}
        other, own_too = pair(self.block, self.scheme, self.depths[0], halves)
        x = draw_input(reference.config)
        with torch.no_grad():
            sizes = [
                distance(block.run(x), stack.run(x))
                for block, stack in ((own, reference), (own_too, other))
            ]
        if sizes[1] <= self.tolerance < sizes[0]:
            self.settings = halves
        kind = "halves" if LAYOUT in self.settings else "pairs"
        if min(sizes) <= self.tolerance:
            self.report.layout = f"rotary positions in the pairs {PAIRS[kind]}"

    def row(
        self,
        check: str,
        depth: int,
        what: str,
        found: float,
        most: float,
        agrees: bool | None = None,
    ) -> None:
        """Add a comparison to the report.  agrees: None: whether it is within the tolerance."""
        row = {"check": check, "depth": depth, "of": what, "difference": found, "allowed": most}
        self.report.rows.append(row | {"agrees": found <= most if agrees is None else agrees})

    def differ(
        self, check: str, key: str, size: str, cause: str, reference: Reference, line: str
    ) -> None:
        """Record the first difference."""
        if all(row["agrees"] for row in self.report.rows):  # a fault beside the numbers compared
            self.row(check, reference.depth, key, 1.0, 0.0)
        consequence = effect(self.block, self.scheme, self.settings, copied=check != "start")
        self.report.difference = Difference(
            check, key, size, cause, equation_of(reference), line, consequence
        )

    # --- forward --------------------------------------------------------------------------------

    def forward(self) -> None:
        """Compare F at every depth; at the first difference, look for its cause."""
        for depth in self.depths:
            reference, own = pair(self.block, self.scheme, depth, self.settings)
            x = draw_input(reference.config)
            with torch.no_grad():
                found, expected = own.run(x), reference.run(x)
            size = distance(found, expected)
            self.row("forward", depth, "F", size, self.tolerance)
            if own.input_change:
                words = f"module(x) changes x by {100 * own.input_change:.3g} % of its size"
                cause = "the block changes its input in place; write x = x + y in place of x += y"
                line = scheme_place(reference, "residual", "layer")
                self.differ("forward", "in place", words, cause, reference, line)
                return
            if size > self.tolerance:
                words = f"‖F − F_ref‖ / ‖F_ref‖ = {size:.3g} at N = {depth}"
                self.differ("forward", *self.forward_cause(reference, x, found, words))
                return

    def forward_cause(
        self, reference: Reference, x: torch.Tensor, found: torch.Tensor, size: str
    ) -> tuple[str, str, str, Reference, str]:
        """Return key, size, cause, reference and line of a difference in the forward pass."""
        best: tuple[Hypothesis, dict[int, float]] | None = None
        for one in hypotheses(reference):
            fits, c = matched(one, x, found, self.tolerance)
            if not fits:
                continue
            others = self.constants(one, reference.depth)
            if best is None or others is not None:
                best = one, {reference.depth: c} | (others or {})
            if others is not None:
                break  # it explains F at all depths
        if best is not None:
            one, values = best
            key, cause = described(one, values, self.references(values))
            return key, size, cause, reference, one.line
        if reference.config.model.positions == "rotary" and LAYOUT not in self.settings:
            if (other := self.cause_in_other_layout(x, found, size)) is not None:
                return other
        cause = "cause unknown: none of the tested faults gives the block's numbers"
        if extra := undeclared(self.block.weights(reference)):
            cause += f"; parameters that PARAMETERS does not name: {', '.join(extra[:6])}"
        return "unknown", size, cause, reference, scheme_place(reference, "residual", "layer")

    def cause_in_other_layout(
        self, x: torch.Tensor, found: torch.Tensor, size: str
    ) -> tuple[str, str, str, Reference, str] | None:
        """Return the cause beside the other rotary layout, or None without one."""
        before = self.settings
        self.settings = before | {LAYOUT: "halves"}
        depth = self.report.rows[-1]["depth"]
        reference, _ = pair(self.block, self.scheme, depth, self.settings)
        cause = self.forward_cause(reference, x, found, size)
        if cause[0] == "unknown":
            self.settings = before
            return None
        self.report.layout = f"rotary positions in the pairs {PAIRS['halves']}"
        return cause

    def references(self, depths: Mapping[int, Any]) -> dict[int, Reference]:
        """Return the reference of each depth."""
        return {N: Reference(self.scheme, N, self.settings) for N in depths}

    def constants(self, one: Hypothesis, first: int) -> dict[int, float] | None:
        """Return the constant of a fault at the other depths, or None if it fails at one."""
        values = {}
        for depth in self.depths:
            if depth == first:
                continue
            reference, own = pair(self.block, self.scheme, depth, self.settings)
            x = draw_input(reference.config)
            with torch.no_grad():
                found = own.run(x)
                if distance(found, reference.run(x)) <= self.tolerance:
                    values[depth] = 1.0
                    continue
            same = next((h for h in hypotheses(reference) if h.key == one.key), None)
            fits, c = matched(same, x, found, self.tolerance) if same else (False, 1.0)
            if not fits:
                return None
            values[depth] = c
        return values

    # --- gradients ------------------------------------------------------------------------------

    def gradients(self) -> None:
        """Compare the gradients of x_0 and of every parameter."""
        for depth in self.depths:
            reference, own = pair(self.block, self.scheme, depth, self.settings)
            distances = compare_gradients(reference, own, self.tolerance)
            for what, worst in largest(distances).items():
                self.row("gradients", depth, what, worst, self.tolerance)
            wrong = [key for key, size in distances.items() if size > self.tolerance]
            extra = self.trained_besides(own)
            if not wrong and not extra:
                continue
            if wrong:
                name, layer = wrong[0]
                where = f" of layer {layer}" if layer else ""
                size = f"the gradient of {name}{where} differs by {distances[wrong[0]]:.3g} of its"
                size += f" size at N = {depth}"
                key, cause, line = self.gradient_cause(reference, own, wrong, distances)
            else:
                key, size = "extra parameter", f"a gradient other than 0 at N = {depth}"
                cause = f"the block trains {extra[0]}, which the reference does not have"
                if missing := undeclared_of_reference(reference, own):
                    cause = f"the block trains {extra[0]}, which PARAMETERS does not name; "
                    cause += f"the reference's {' and '.join(missing)} may be the same: name them"
                line = scheme_place(reference, "setup", "residual", "layer")
            self.differ("gradients", key, size, cause, reference, line)
            return

    def trained_besides(self, own: Weights) -> list[str]:
        """Return the undeclared parameters that F depends on, in double precision."""
        named = dict(own.module.named_parameters())
        grads = {name: named[name].grad for name in undeclared(own)}
        return [name for name, g in grads.items() if g is not None and bool((g != 0).any())]

    def gradient_cause(
        self, reference: Reference, own: Weights, wrong: list[Key], distances: dict[Key, float]
    ) -> tuple[str, str, str]:
        """Return key, text and line of a difference in gradients alone."""
        x = draw_input(reference.config)
        found = gradients(own, x)
        sublayers = [
            (number, name)
            for number, layer in enumerate(reference.stack.layers, start=1)
            for name in layer.names
        ]

        def detach(z: Any) -> Any:
            return z.detach()

        def same(z: Any) -> Any:
            return z

        own_line = scheme_place(reference, "residual", "layer")
        for key, text, context in (
            ("no stop-gradient", "gradients flow where the scheme stops them",
             without_stop_gradient()),
            ("detached stream", "the residual stream is detached",
             residuals(reference, sublayers, scaled_skip(1.0, detached=True))),
            ("detached branch", "the branch is detached",
             branches(reference, sublayers, same, detach)),
            ("detached input", "the sublayer's input is detached",
             branches(reference, sublayers, detach, same)),
        ):  # fmt: skip
            with context:
                expected = gradients(reference, x)
            distances = gradient_distances(found, expected, self.tolerance)
            if max(distances.values()) <= self.tolerance:
                return key, text, own_line
        untrained = [key for key in wrong if found[key] is None]
        name, layer = untrained[0] if untrained else wrong[0]
        text = f"of {len(distances)} gradients {len(wrong)} differ"
        if untrained:
            text = f"{name} of layer {layer} is not trained: its gradient is missing"
        entry = reference.entries.get((name, layer))
        line = own_line
        if entry and entry.role in (*MATRICES, "bias"):
            line = place(LinearMaps.apply_map)
        elif entry and "norm" in entry.role:
            line = place(NORMS[reference.config.model.norm.kind].forward)
        return ("not trained" if untrained else "gradient"), text, line

    # --- start ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Compare mean, variance and gain of every parameter at the start."""
        if self.block.build is None:
            self.report.notes.append("the start: residual(x, G) has no parameters of its own")
            return
        drawn = sample_starts(self.block, self.scheme, self.depths, self.settings)
        tests = check_starts(drawn)
        references = {depth: reference for depth, (reference, _) in drawn.items()}
        if not tests:
            self.report.notes.append("the start: the scheme's constraint changes it")
        failed = [one for one in tests if not one.holds]
        wrong = {(one.name, one.depth) for one in failed}
        for one in largest_tests(tests):
            most = max(one.high / one.ratio - 1, 0.0) if one.ratio else 0.0
            agrees = (one.name, one.depth) not in wrong
            self.row("start", one.depth, one.name, abs(one.ratio - 1), most, agrees)
        if failed:
            first = failed[0]
            key, cause, line = start_cause(failed, tests, references)
            where = f" of layer {first.layer}" if first.layer else " of all layers"
            size = (
                f"{first.name}{where} at N = {first.depth}: {first.ratio:.4g} times the "
                f"reference's ({first.low:.4g} to {first.high:.4g}); {len(failed)} of "
                f"{len(tests)} tests fail"
            )
            self.differ("start", key, size, cause, references[first.depth], line)

    # --- first update ---------------------------------------------------------------------------

    def update(self) -> None:
        """Compare the change of every parameter by the first step of SGD and of Adam."""
        for kind in ("sgd", "adam"):
            settings = self.settings | {"train.optimizer": kind}
            for depth in self.depths:
                reference = Reference(self.scheme, depth, settings)
                if has_factors(reference) and self.block.optimizer is None:
                    self.report.notes.append(
                        f"the first step of {kind}: the scheme has factors on the rates, and the "
                        "block has no optimizer(module, name, lr, eps)"
                    )
                    break
                own = self.block.weights(reference)
                move(reference, own.pieces)
                copy(reference, own)
                distances = compare_updates(reference, own, self.block, kind, self.tolerance)
                allowed = max(self.numbers.update_tolerance, self.tolerance)
                for what, size in largest(distances).items():
                    self.row(f"{kind} step", depth, what, size, allowed)
                wrong = [key for key, size in distances.items() if size > allowed]
                if wrong:
                    self.differ("update", *update_cause(reference, wrong, distances, kind))
                    return
        if self.block.optimizer is not None:
            self.report.notes.append("weight decay: its factors are not compared")


def largest(distances: Mapping[Key, float]) -> dict[str, float]:
    """Return the largest distance over layers of each parameter."""
    found: dict[str, float] = {}
    for (name, _), size in distances.items():
        found[name] = max(size, found.get(name, 0.0))
    return found


def largest_tests(tests: Sequence[Start]) -> list[Start]:
    """Return the test of each parameter and depth whose deviation differs most."""
    found: dict[tuple[str, int], Start] = {}
    for one in tests:
        there = found.get((one.name, one.depth))
        if there is None or abs(one.ratio - 1) > abs(there.ratio - 1):
            found[one.name, one.depth] = one
    return list(found.values())
