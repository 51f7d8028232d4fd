"""Names of differences: formulas of coefficients over depth, and causes of another start."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from deepstack.model import DISTRIBUTIONS, initialise
from deepstack.schemes import SCHEMES, StackPosition, StackScheme
from deepstack.tools.conform.hypothesis import Hypothesis
from deepstack.tools.conform.reference import Reference, place, scheme_place
from deepstack.tools.conform.start import Start
from deepstack.tools.conform.weights import Key

CLOSE = 1e-6
NEAR = 0.1  # relative difference of two measured deviations that count as equal


def scheme_at(reference: Reference, place: StackPosition) -> StackScheme | None:
    """Return the reference's scheme at another position, or None if it has none there."""
    own = reference.scheme
    if place.family not in own.scheme_class.families:
        return None
    return StackScheme(own.scheme_class.name, own.options, place, reference.config)


def at_depth(place: StackPosition, depth: int) -> StackPosition:
    """Return the position with another depth of its side."""
    if place.side == "encoder":
        return place._replace(encoder_depth=depth)
    return place._replace(decoder_depth=depth)


def positions(reference: Reference) -> dict[str, StackScheme]:
    """Return the scheme at other depths and in other stacks, by what it is there."""
    own, N = reference.scheme.place, reference.depth
    both = StackPosition("encoder_decoder", "decoder", N, N)
    found = {
        "N counted in sublayers (2N)": at_depth(own, 2 * N),
        "N/2 in place of N": at_depth(own, N // 2) if N % 2 == 0 else own,
        "N + 1 in place of N": at_depth(own, N + 1),
        "the decoder of an encoder-decoder": both,
        "the encoder of an encoder-decoder": both._replace(side="encoder"),
    }
    schemes = {name: scheme_at(reference, there) for name, there in found.items() if there != own}
    return {name: scheme for name, scheme in schemes.items() if scheme is not None}


def formula_of(values: Mapping[int, float], references: Mapping[int, Reference]) -> str:
    """Return in words which formula gives these values of alpha by depth, or ''."""

    def fits(expected: Callable[[int], float | None]) -> bool:
        wanted = {N: expected(N) for N in values}
        return all(
            w is not None and abs(w - values[N]) <= CLOSE * abs(w) for N, w in wanted.items()
        )

    formulas: dict[str, Callable[[int], float | None]] = {
        "1": lambda N: 1.0,
        "the value of the branch, 1/alpha": lambda N: 1 / (references[N].scheme.alpha or 1),
        "its square": lambda N: (references[N].scheme.alpha or 1) ** 2,
        "its square root": lambda N: (references[N].scheme.alpha or 1) ** 0.5,
    }
    for name in dict.fromkeys(n for r in references.values() for n in positions(r)):
        formulas[f"alpha of {name}"] = lambda N, name=name: (  # type: ignore[misc]
            there.alpha if (there := positions(references[N]).get(name)) else None
        )
    for name, formula in formulas.items():
        if fits(formula):
            return name
    if len(values) > 1 and max(values.values()) - min(values.values()) < CLOSE:
        first = next(iter(values.values()))
        reference = next(iter(references.values()))
        for n in range(1, 1001):
            there = scheme_at(reference, at_depth(reference.scheme.place, n))
            if there and there.alpha and abs(there.alpha - first) < 1e-3 * first:
                return f"alpha of depth {n} at every depth"
        return f"{first:.4g} at every depth"
    return ""


def power_of(values: Mapping[int, float]) -> str:
    """Return `0.7071 N^0.5` if the values by depth are a power of N, or ''."""
    if len(values) < 3 or min(values.values()) <= 0:
        return ""
    (N, c), *others = values.items()
    powers = [math.log(d / c) / math.log(n / N) for n, d in others]
    if abs(powers[0]) < CLOSE or max(powers) - min(powers) > 1e-4:
        return ""
    return f"{c * N ** -powers[0]:.4g} N^{powers[0]:.4g}"


def start_cause(
    failed: Sequence[Start], tests: Sequence[Start], references: Mapping[int, Reference]
) -> tuple[str, str, str]:
    """Return key, text and line of the cause of another start.

    A gain is the cause if it explains every ratio of the failing roles at all depths and layers.
    """
    first = failed[0]
    reference = references[first.depth]
    key = (first.name, first.layer or 1)
    roles = list(dict.fromkeys(one.name for one in failed))
    entry = reference.entries[key]
    if entry.start not in ("matrix", "table"):
        words = f"{first.name} starts at {first.found:.6g}, and at {first.expected:.6g} in the"
        return f"start {first.name}", f"{words} reference", scheme_place(reference, "setup", "gain")
    if not all(abs(one.mean) <= one.most for one in failed):
        text = f"the mean of {first.name} is {first.mean:.3g} of its deviation, not 0"
        return f"mean {first.name}", text, place(initialise)
    relevant = [one for one in failed if one.layer and one.expected]
    where = layers_of(relevant)
    line = scheme_place(reference, "gain") if has_gain(reference) else place(initialise)
    for name, gain in gains(references).items():
        wanted = [(one, gain(one)) for one in relevant]
        if relevant and all(w is not None and one.low <= w <= one.high for one, w in wanted):
            return (
                f"gain {', '.join(roles)}{where}: {name}",
                f"{listed(roles)}{where}: {name}",
                line,
            )
    ratios = ratios_text(failed, roles)
    text = f"another deviation{where}, in multiples of the reference's: {ratios}"
    return f"start {', '.join(roles)}{where}", text, line


def ratios_text(failed: Sequence[Start], roles: Sequence[str]) -> str:
    """Return the ratio of deviations of each role at each depth; roles of near ratios share one."""
    groups: list[tuple[list[str], Mapping[int, float]]] = []
    for role in roles:
        ratios = ratios_of(failed, role)
        same = (names for names, others in groups if are_near(ratios, others))
        if (names := next(same, None)) is not None:
            names.append(role)
        else:
            groups.append(([role], ratios))
    return "; ".join(
        f"{listed(names)} {', '.join(f'{ratio:.3g} at N = {N}' for N, ratio in ratios.items())}"
        for names, ratios in groups
    )


def ratios_of(failed: Sequence[Start], role: str) -> dict[int, float]:
    """Return the median ratio of a role's deviation to the reference's at each depth."""
    by_depth: dict[int, list[float]] = {}
    for one in failed:
        if one.name == role:
            by_depth.setdefault(one.depth, []).append(one.ratio)
    return {N: median(ratios) for N, ratios in by_depth.items()}


def are_near(ratios: Mapping[int, float], others: Mapping[int, float]) -> bool:
    """Return whether the ratios of two roles differ by less than a tenth at all depths."""
    return ratios.keys() == others.keys() and all(
        abs(ratio - others[N]) <= NEAR * max(ratio, others[N]) for N, ratio in ratios.items()
    )


def update_cause(
    reference: Reference, wrong: list[Key], distances: Mapping[Key, float], kind: str
) -> tuple[str, str, str, Reference, str]:
    """Return key, size, cause, reference and line of another first step."""
    name, layer = wrong[0]
    roles = list(dict.fromkeys(name for name, _ in wrong))
    factors = reference.optim(reference.entries[wrong[0]].role)
    size = (
        f"the first step of {kind} changes {name}{f' of layer {layer}' if layer else ''} by "
        f"another amount at N = {reference.depth}: {distances[wrong[0]]:.3g} of its size"
    )
    cause = (
        f"the reference multiplies the learning rate by {factors.lr:.4g} and epsilon by "
        f"{factors.eps:.4g} for {', '.join(roles[:8])}"
    )
    line = scheme_place(reference, "optim", "residual", "layer")
    return f"update {kind}", size, cause, reference, line


def layers_of(failed: Sequence[Start]) -> str:
    """Return the layers in which tests fail, in words: '' for all or for no rule."""
    by_depth: dict[int, set[int]] = {}
    for one in failed:
        by_depth.setdefault(one.depth, set()).add(one.layer)
    rules: dict[str, Callable[[int], set[int]]] = {
        " of the last layer": lambda N: {N},
        " of the first layer": lambda N: {1},
        " of all layers but the last": lambda N: {*range(1, N)},
    }
    for words, rule in rules.items():
        if by_depth and all(layers == rule(N) for N, layers in by_depth.items()):
            return words
    return ""


def has_gain(reference: Reference) -> bool:
    """Return whether the scheme has a gain other than 1 on a matrix of a layer."""
    return any(reference.scheme.gain(e.role, key[1]) != 1 for key, e in reference.entries.items())


def gains(references: Mapping[int, Reference]) -> dict[str, Callable[[Start], float | None]]:
    """Return causes of another deviation: test -> deviation over the reference's, or None."""

    def entry(one: Start) -> Any:
        return references[one.depth].entries[one.name, one.layer]

    def gain(one: Start) -> float:
        return references[one.depth].scheme.gain(entry(one).role, one.layer)

    def beta(one: Start) -> float:
        scheme = references[one.depth].scheme
        return scheme.beta or scheme.gain("o", one.layer) or scheme.gain("v", one.layer)

    def elsewhere(name: str) -> Callable[[Start], float | None]:
        def ratio(one: Start) -> float | None:
            scheme = positions(references[one.depth]).get(name)
            return scheme.gain(entry(one).role, one.layer) / gain(one) if scheme else None

        return ratio

    def distribution(name: str) -> Callable[[Start], float]:
        def ratio(one: Start) -> float:
            init = references[one.depth].config.model.init
            n_out, n_in = entry(one).shape
            return DISTRIBUTIONS[name].scale(init, n_in, n_out) * gain(one) / one.expected

        return ratio

    def distribution_alone(name: str) -> Callable[[Start], float]:
        return lambda one: distribution(name)(one) / gain(one)

    def mirrored(one: Start) -> float:
        reference = references[one.depth]
        other = reference.scheme.gain(entry(one).role, reference.depth - one.layer + 1)
        return other / gain(one)

    found: dict[str, Callable[[Start], float | None]] = {
        "the gain is missing": lambda one: 1 / gain(one),
        "the gain is upside down": lambda one: gain(one) ** -2,
        "the gain is applied twice": gain,
        "the square root of the gain": lambda one: gain(one) ** -0.5,
        "they start with beta, and with gain 1 in the reference": (
            lambda one: beta(one) if gain(one) == 1 else None
        ),
        "the gain of layer N - l + 1": mirrored,
        "packed q, k and v count as one matrix": lambda one: 2**-0.5,
    }
    names = dict.fromkeys(n for r in references.values() for n in positions(r))
    found |= {f"the gain of {name}": elsewhere(name) for name in names}
    for name in DISTRIBUTIONS:
        if name not in ("orthogonal", "zero_identity", "ntk"):
            found[f"drawn as model.init.distribution={name}"] = distribution(name)
            found[f"drawn as model.init.distribution={name}, without the gain"] = (
                distribution_alone(name)
            )
    return found


def listed(words: Sequence[str]) -> str:
    """Return `q, k and v`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def equation_of(reference: Reference) -> str:
    """Return the scheme's equation, the first line of its docstring."""
    return SCHEMES[reference.scheme.scheme_class.name].equation


def described(
    one: Hypothesis, values: Mapping[int, float], references: Mapping[int, Reference]
) -> tuple[str, str]:
    """Return key and text of a fault, with its constants by depth."""
    if not one.starts:
        return one.key, one.text
    by_depth = ", ".join(f"{c:.4g} at N = {N}" for N, c in sorted(values.items()))
    alphas = {N: reference.scheme.alpha for N, reference in references.items()}
    if one.key == "skip" and all(alpha is not None for alpha in alphas.values()):
        own = {N: values[N] * float(alphas[N] or 1) for N in values}
        formula = formula_of(own, references)
        pairs = ", ".join(
            f"{own[N]:.4f} where the reference has {alphas[N]:.4f} at N = {N}" for N in sorted(own)
        )
        name = f": {formula}" if formula else ""
        return f"alpha{name}", f"alpha is {pairs}{f'; that is {formula}' if formula else ''}"
    power = power_of(values)
    return one.key, one.text.replace("{c}", by_depth) + (f", as {power}" if power else "")
