"""Faults inside attention and feed-forward: scales, masks, positions, layouts of weights."""

from collections.abc import Iterator
from functools import partial
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F

from deepstack.model import ACTIVATIONS, Attention, FeedForward, LinearMaps
from deepstack.tools.conform import mutations as change
from deepstack.tools.conform.attention_mutations import (
    Q_K_V,
    Change,
    exchanged,
    interleaved_heads,
    joined_without_transpose,
    key_heads_in_turn,
    later_mask,
    offset_mask,
    packed_by_head,
    rotated,
    split_without_transpose,
    transposed,
    wider_window,
)
from deepstack.tools.conform.hypothesis import STARTS, Hypothesis, inside_of, scopes
from deepstack.tools.conform.naming import listed
from deepstack.tools.conform.reference import LAYOUT, Reference, place


def inside(reference: Reference) -> Iterator[Hypothesis]:
    """Yield faults inside attention and feed-forward."""
    qkv = ("qkv", "q", "kv")
    maps = {"attention": (*qkv, "o"), "feed_forward": ("w1", "w13", "w2")}
    run = partial(inside_of, reference)
    everywhere = next(iter(scopes(reference)))[1]
    attention, line = place(Attention.forward), place(LinearMaps.apply_map)
    bias_scopes = [
        ("o and w2", ("o", "w2")), ("o", ("o",)), ("w2", ("w2",)), ("w1", ("w1", "w13")),
        ("q, k and v", qkv), ("all maps", sum(maps.values(), ())),
    ]  # fmt: skip
    for words, names in bias_scopes:

        def bias(c: float, names: Any = names) -> Any:
            return change.sublayers(reference, everywhere, change.scaled_map(names, 1.0, c))

        yield Hypothesis(
            f"bias of {words}", f"the bias of {words} is multiplied by {{c}}", line, run(bias),
            STARTS,
        )  # fmt: skip
    for words, names in bias_scopes:

        def weight(c: float, names: Any = names) -> Any:
            return change.sublayers(reference, everywhere, change.scaled_map(names, c, 1.0))

        yield Hypothesis(
            f"matrix of {words}", f"the product with {words} is multiplied by {{c}}", line,
            run(weight), STARTS,
        )  # fmt: skip

    def logits(c: float) -> Any:
        chosen = [one for one in everywhere if one[1] == "attention"]
        return change.sublayers(reference, chosen, change.scaled_logits(c))

    yield Hypothesis(
        "logits", "the logits of attention are multiplied by {c}", attention, run(logits), STARTS
    )
    functions: dict[str, Any] = {name: one() for name, one in ACTIVATIONS.items()}
    functions["gelu by tanh"] = partial(F.gelu, approximate="tanh")
    functions["gelu by a sigmoid, z sigmoid(1.702 z)"] = lambda z: z * torch.sigmoid(1.702 * z)
    for name, function in functions.items():

        def activation(c: float, function: Any = function) -> Any:
            chosen = [one for one in everywhere if one[1] == "feed_forward"]
            return change.sublayers(reference, chosen, lambda _: ("activation", function))

        text = f"the activation is {name}"
        yield Hypothesis(f"activation {name}", text, place(FeedForward.forward), run(activation))


Fault = tuple[str, str, Change]
"""Key and text of a fault, and the change of a sublayer that makes it."""
PAIRS = {"pairs": "(2i, 2i + 1)", "halves": "(i, i + d_head/2)"}
"""The coordinates that rotary positions turn together, by layout."""
BASES = (500_000.0, 1_000_000.0, 100_000.0, 1_000.0, 500.0)


def layouts(reference: Reference) -> Iterator[Hypothesis]:
    """Yield faults of masks, positions, heads, matrices and axes."""
    of_attention = [*masks(reference), *positions(reference), *heads(reference)]
    of_attention += [*matrices(reference)]
    gate = exchanged(("w3", "w1"), ("w1", "w3"))
    of_feed_forward = [("gate", "the activation is applied to the product with w3, not w1", gate)]
    for kind, line, faults in (
        ("attention", place(Attention.forward), of_attention),
        ("feed_forward", place(FeedForward.forward), of_feed_forward),
    ):
        chosen = [(n, kind) for n in range(1, reference.depth + 1)]
        for key, text, one in faults:

            def faulty(c: float, chosen: Any = chosen, one: Any = one) -> Any:
                return change.sublayers(reference, chosen, one)

            yield Hypothesis(key, text, line, inside_of(reference, faulty))
    yield Hypothesis(
        "axes", "the block takes x as (seq, batch, d_model), so that attention reads the rows of a "
        "batch, as torch.nn.MultiheadAttention does without batch_first=True",
        place(Attention.forward),
        lambda x, c: reference.run(x.transpose(0, 1)).transpose(0, 1),
    )  # fmt: skip


def masks(reference: Reference) -> Iterator[Fault]:
    """Yield other masks."""
    yield (
        "mask", "attention reads all positions in place of earlier ones, or the reverse",
        change.other_mask,
    )  # fmt: skip
    if reference.stack.schemes[0].place.side == "decoder":
        ahead = "the mask is off by one: a position also reads the next one"
        before = "the mask is off by one: a position does not read itself"
        yield "mask off by one, ahead", ahead, offset_mask(1)
        yield "mask off by one, before", before, offset_mask(-1)
        yield "mask off by one, before", before, offset_mask(-1, adds=True)
        yield "mask of later positions", "a position reads later ones, not earlier ones", later_mask
    for more, words in ((1, "wider"), (-1, "narrower")):
        text = f"the window of attention is one position {words}"
        yield f"window {words}", text, wider_window(more)


def positions(reference: Reference) -> Iterator[Fault]:
    """Yield rotary positions: none, in the other layout, with another angle."""
    has_rotary = reference.config.model.positions == "rotary"
    own = "halves" if reference.given.get(LAYOUT) == "halves" else "pairs"
    if has_rotary:
        text = "queries and keys have no rotary positions"
        yield "no rotary positions", text, rotated(reference, "none")
    else:
        for kind, which in PAIRS.items():
            text = f"rotary positions turn the pairs {which} of queries and keys; the reference "
            text += "does so with model.positions=rotary"
            yield f"rotary positions, {kind}", text, rotated(reference, kind)
        return
    for base in BASES:
        text = f"the base of rotary positions is {base:g} in place of 10000"
        yield f"rotary base {base:g}", text, rotated(reference, own, base)
    text = "rotary positions turn by the opposite angle"
    yield "rotary backwards", text, rotated(reference, own, sign=-1.0)


def heads(reference: Reference) -> Iterator[Fault]:
    """Yield heads that are split, joined or grouped in another way."""
    yield (
        "heads joined", "heads are joined without exchanging the axes of heads and positions",
        joined_without_transpose,
    )  # fmt: skip
    yield (
        "heads split", "heads are split without exchanging the axes of heads and positions",
        split_without_transpose,
    )  # fmt: skip
    text = "coordinate i of q, k and v belongs to head i mod n_heads"
    yield "heads interleaved", text, interleaved_heads
    if reference.config.model.n_kv_heads:
        text = "query head h reads key head h mod n_kv_heads, in place of h // (readers of a head)"
        yield "key heads in turn", text, key_heads_in_turn


def matrices(reference: Reference) -> Iterator[Fault]:
    """Yield matrices that are transposed, exchanged, or packed in another order."""
    for roles in (("q", "k", "v", "o"), Q_K_V, *((role,) for role in "qkvo")):
        text = f"the block uses the transposed matrix of {listed(roles)}: append .T to its name"
        yield f"transposed {', '.join(roles)}", text, transposed(roles)
    for order in permutations(Q_K_V):
        if order != Q_K_V:
            moved = [pair for pair in zip(order, Q_K_V, strict=True) if len(set(pair)) == 2]
            words = ", ".join(f"{own} as {role}" for own, role in moved)
            text = f"q, k and v are exchanged: the block uses {words}"
            yield f"exchanged {', '.join(order)}", text, exchanged(order, Q_K_V)
    if not reference.config.model.n_kv_heads:
        text = (
            "q, k and v are packed head by head, (n_heads, 3, d_head) rows as in GPT-NeoX, where "
            "PARAMETERS takes three slices; split them in build, or declare modules apart"
        )
        count = reference.config.model.n_heads
        yield "packed by head", text, packed_by_head(count)
