"""Statements of the documents on what short training does to layers, features and losses."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepstack.config import with_overrides
from deepstack.model import layer_norms, restored
from deepstack.tasks import task_of
from deepstack_lab.ledger.claim import Drawn, Null, Rule, claim
from deepstack_lab.ledger.claim_stack import POST_LN, Trial, small_stack
from deepstack_lab.ledger.claims.add_and_norm import layer_by_layer
from deepstack_lab.ledger.claims.attention import (
    KINDS,
    TRANSLATOR,
    decoding_flops,
    unigram_losses,
)  # fmt: skip
from deepstack_lab.ledger.claims.training import ADAM, STACKS, losses
from deepstack_lab.ledger.draws import F64, normals, random, repeats, seeds
from deepstack_lab.ledger.sources import (
    ADD_AND_NORM,
    DEEP_TRANSLATION,
    DEPTH_SCALED,
    NO_SIZES,
    READING_NOTES,
)  # fmt: skip
from deepstack_lab.ledger.statistics import exponents, gather, per_seed

SAME = Null(0.0, "no difference")
AS_LARGE = Null(1.0, "as large")


def drift(seed: int, label: str, steps: int = 40) -> dict[str, Tensor | float]:
    """Return |ln| of the change of every layer's variance by training, and the loss's roughness."""
    stack = small_stack(seed, depth=6, **ADAM, **STACKS[label])

    def variances() -> Tensor:
        (snapshot,) = stack.snapshots(stack.probe_batch)
        return snapshot.states[1:].double().var(dim=-1).mean(dim=(1, 2)).log()

    before = variances()
    curve = torch.tensor(stack.run(steps), dtype=F64)
    moved = (variances() - before).abs()
    half = len(moved) // 2
    bends = curve[2:] - 2 * curve[1:-1] + curve[:-2]
    return {"all": moved.mean(), "slope": moved[half:].mean() - moved[:half].mean(),
            "rough": bends.square().mean().sqrt()}  # fmt: skip


@claim(
    "C53", ADD_AND_NORM, place="section 2.1", source_range=NO_SIZES,
    trials=(POST_LN | {"depth": 6, "steps": 40},),
    rules=(
        Rule("no norms: shift of the upper half less that of the lower", 0.0, ">=", null=SAME),
        Rule("Post-LN: shift less that without norms", 0.0, "<=", null=SAME),
        Rule("Pre-LN: shift less that without norms", 0.0, "<=", null=SAME),
        Rule("Post-LN: roughness of the loss over that without norms", 1.0, "<=", null=AS_LARGE),
        Rule("Pre-LN: roughness of the loss over that without norms", 1.0, "<=", null=AS_LARGE),
    ),
)  # fmt: skip
def shifting_features(seed: int) -> Drawn:
    """The distribution of features shifts with depth during training, and norms keep it stable;
    training is smoother.

    The shift is |Δ ln Var x_l| after 40 steps of Adam at 3e-3, the roughness the root mean square
    of second differences of the training loss. 6 layers, d = 32, task text, 16 seeds.
    """
    drawn = {
        label: gather(drift(s, label) for s in seeds(seed, 16))
        for label in ("Post-LN", "Pre-LN", "no norms")
    }
    plain = drawn["no norms"]
    result: dict[str, Any] = {
        "no norms: shift of the upper half less that of the lower": plain["slope"]
    }
    for label in ("Post-LN", "Pre-LN"):
        result[f"{label}: shift less that without norms"] = drawn[label]["all"] - plain["all"]
        rough = drawn[label]["rough"] / plain["rough"]
        result[f"{label}: roughness of the loss over that without norms"] = rough
    return result


def movement(stack: Trial, steps: int) -> list[Tensor]:
    """Return ‖θ_l,t − θ_l,0‖/‖θ_l,0‖ of every layer after each step, (depth,)."""
    before, moved = stack.values(), []

    def after(step: int) -> None:
        change = [a - b for a, b in zip(stack.values(), before, strict=True)]
        moved.append((layer_norms(change) / layer_norms(before)).double())

    stack.run(steps, after)
    return moved


@claim(
    "C57", READING_NOTES, source_range=NO_SIZES,
    trials=(POST_LN | {"depth": 12, "steps": 60, "task": "markov"},),
    rules=(
        Rule("movement of the upper quarter over that of the lower, 10 steps", 1.0, ">=",
             null=AS_LARGE),
        Rule("share of the movement of 60 steps made in the first 20, upper less lower quarter",
             0.0, ">=", null=SAME),
    ),
)  # fmt: skip
def upper_layers_first(seed: int) -> Drawn:
    """Without a warm-up, parameters near the output learn faster, and upper layers converge early.

    Post-LN, 12 layers, d = 32, Adam at 1e-3 on a Markov chain, 36 seeds (12 were undecided and
    asked for 14, of a second set for 29). Movement of a layer is ‖Δθ_l‖/‖θ_l‖.
    """
    rows = []
    for draw_seed in seeds(seed, 36):
        stack = small_stack(draw_seed, depth=12, task="markov", optimizer="adam", lr=1e-3)
        moved = movement(stack, 60)
        share = moved[19] / moved[-1]
        rows.append({"speed": moved[9][-3:].mean() / moved[9][:3].mean(),
                     "share": share[-3:].mean() - share[:3].mean()})  # fmt: skip
    drawn = gather(rows)
    name = "share of the movement of 60 steps made in the first 20, upper less lower quarter"
    return {
        "movement of the upper quarter over that of the lower, 10 steps": drawn["speed"],
        name: drawn["share"],
    }


@claim(
    "C58", READING_NOTES, source_range=NO_SIZES,
    trials=(POST_LN | {"depth": 12, "steps": 80, "task": "markov"},),
    rules=(
        Rule("Post-LN: movement of the lower quarter over that of the upper in fine-tuning", 1.0,
             "<=", null=AS_LARGE),
        Rule("the same ratio, Post-LN less Pre-LN", 0.0, "<=", null=SAME),
    ),
)  # fmt: skip
def spared_layers(seed: int) -> Drawn:
    """Vanishing gradients spare lower layers in fine-tuning.

    12 layers, 60 steps of Adam at 1e-3 on one Markov chain, then 20 on another, d = 32, 12 seeds.
    """

    def ratio(draw_seed: int, label: str) -> float:
        keys = {"task": "markov", "optimizer": "adam", "lr": 1e-3, "depth": 12}
        stack = small_stack(draw_seed, **keys, **STACKS[label])
        stack.run(60)
        stack.task = task_of(with_overrides(stack.config, {"seed": draw_seed + 500}))
        moved = movement(stack, 20)[-1]
        return (moved[:3].mean() / moved[-3:].mean()).item()

    post, pre = (
        per_seed(partial(ratio, label=label), seeds(seed, 12)) for label in ("Post-LN", "Pre-LN")
    )
    return {
        "Post-LN: movement of the lower quarter over that of the upper in fine-tuning": post,
        "the same ratio, Post-LN less Pre-LN": post - pre,
    }


@claim(
    "C60", READING_NOTES, source_range=NO_SIZES,
    trials=(POST_LN | {"depth": 6, "steps": 80, "task": "markov"},),
    rules=(
        Rule("Post-LN: rise of the loss by a reset layer, upper less lower half", 0.0, ">=",
             null=SAME),
        Rule("Pre-LN: rise of the loss by a reset layer, upper less lower half", 0.0, ">=",
             null=SAME),
    ),
)  # fmt: skip
def knowledge_above(seed: int) -> Drawn:
    """Upper layers hold more knowledge of the task.

    6 layers, 80 steps of Adam at 1e-3 on a Markov chain, d = 32, 16 seeds; then each layer gets its
    initial parameters back, one at a time, and the loss of a held-out batch rises.
    """

    def rise(draw_seed: int, label: str) -> float:
        keys = {"task": "markov", "optimizer": "adam", "lr": 1e-3, "depth": 6}
        stack = small_stack(draw_seed, **keys, **STACKS[label])
        initial = stack.values()
        stack.run(80)
        rises = []
        with torch.no_grad(), restored(stack.layer_banks):
            trained, batch = stack.values(), stack.batch(1000)
            loss = stack.loss(*batch)
            for layer in range(6):
                for bank, new, old in zip(stack.layer_banks, trained, initial, strict=True):
                    values = new.clone()
                    values[layer] = old[layer]
                    bank.copy_(values)
                rises.append((stack.loss(*batch) - loss).item())
        return (sum(rises[3:]) - sum(rises[:3])) / 3

    return {
        f"{label}: rise of the loss by a reset layer, upper less lower half": per_seed(
            partial(rise, label=label), seeds(seed, 16)
        )
        for label in ("Post-LN", "Pre-LN")
    }


@claim(
    "C61", READING_NOTES, identity=True,
    rules=(
        Rule("deviation of the logits over 0.02 √d, d = 768", 1.0, tolerance=0.05,
             null=Null(1 / 0.02, "deviation 1 in place of 0.02")),
        Rule("entropy of the softmax over ln V", 0.95, ">=", null=Null(0.5, "a sure softmax")),
    ),
)  # fmt: skip
def flat_logits(seed: int) -> Drawn:
    """With a small initial deviation and tied embeddings logits are too small and the softmax is
    too flat.

    F of norm √d, d = 768, a table of 4096 tokens with deviation 0.02, 24 draws.
    """
    rng, rows = random(seed), []
    for _ in range(repeats(24)):
        hidden = F.layer_norm(normals(rng, 8, 768), (768,))
        logits = hidden @ (0.02 * normals(rng, 4096, 768)).t()
        p = torch.softmax(logits, dim=-1)
        entropy = torch.special.entr(p).sum(dim=-1).mean() / math.log(4096)
        rows.append({"size": logits.std() / (0.02 * math.sqrt(768)), "entropy": entropy})
    drawn = gather(rows)
    return {
        "deviation of the logits over 0.02 √d, d = 768": drawn["size"],
        "entropy of the softmax over ln V": drawn["entropy"],
    }


@claim(
    "C62", DEPTH_SCALED, place="section 3",
    rules=(
        Rule("exponent of ‖δ_r‖ in the deviation of the residual sum", 0.0, ">=",
             null=Null(-1.0, "it falls as 1/σ")),
        Rule("the same, as the formula says", -1.0, tolerance=0.01, stated=False,
             null=Null(1.0, "it grows as σ")),
    ),
)  # fmt: skip
def gradient_and_variance(seed: int) -> Drawn:
    """δ_r grows with the variance of the residual sum r = z + G(z), o = LN(r).

    δ_o of independent normals and r of deviation 0.25 to 4, d = 64, 24 draws of 16 tokens. The
    document's formula has the factor 1/σ, which says the contrary of its sentence.
    """
    rng, sizes, rows = random(seed), (0.25, 0.5, 1.0, 2.0, 4.0), []
    for _ in range(repeats(24)):
        r, delta = normals(rng, 16, 64), normals(rng, 16, 64)
        by_size = []
        for size in sizes:
            scaled = (size * r).requires_grad_()
            out = F.layer_norm(scaled, (64,), eps=0.0)
            by_size.append(torch.autograd.grad((out * delta).sum(), scaled)[0].norm())
        rows.append(torch.stack(by_size))
    slope = exponents(sizes, torch.stack(rows))
    return {
        "exponent of ‖δ_r‖ in the deviation of the residual sum": slope,
        "the same, as the formula says": slope,
    }


USES = {
    "encoder, masked text": {"family": "encoder", "task": "text"},
    "decoder, next byte": {"family": "decoder", "task": "text"},
    "encoder-decoder, reversing": {"family": "encoder_decoder", "task": "reverse"},
}


@claim(
    "C63", DEPTH_SCALED, place="section 4", source_range=DEEP_TRANSLATION,
    trials=tuple(POST_LN | {"depth": 8, "steps": 40, **keys} for keys in USES.values()),
    rules=tuple(
        Rule(f"{use}: loss less Post-LN's, {depth} layers", 0.0, "<=", null=SAME)
        for use in USES
        for depth in (2, 8)
    ),
)  # fmt: skip
def suits_every_use(seed: int) -> Drawn:
    """Depth-scaled initialisation suits every use and helps.

    DS-Init beside Post-LN, mean loss of steps 31 to 40 of Adam at 1e-3, d = 32, 12 seeds.
    """
    result: dict[str, Any] = {}
    for use, keys in USES.items():
        for depth in (2, 8):
            sizes = {"depth": depth, "optimizer": "adam", "lr": 1e-3, **keys}
            ends = [
                losses(seeds(seed, 12), 40, scheme=scheme, **sizes)[:, -10:].mean(dim=1)
                for scheme in ("ds_init", "post_ln")
            ]
            result[f"{use}: loss less Post-LN's, {depth} layers"] = ends[0] - ends[1]
    return result


@claim(
    "C64", ADD_AND_NORM, place="section 2.6", source_range=NO_SIZES,
    trials=({"depth": 32, "d_model": 64, "steps": 60, "task": "markov"},),
    rules=(
        Rule("exponent of ‖x_{l+1} − x_l‖/‖x_{l+1}‖ in l after training", -0.5, tolerance=0.2,
             null=Null(0.0, "the same in every layer")),
        Rule("exponent of the angle in l after training", 0.0, "<=",
             null=Null(0.0, "the same in every layer")),
        Rule("exponent in l of the share of a branch that changes with the input of layer l − 1",
             0.0, "<=", null=Null(0.0, "the same in every layer")),
    ),
)  # fmt: skip
def width_after_training(seed: int) -> Drawn:
    """Pre-LN adds width more than depth, also in trained stacks.

    As C16, after 60 steps of Adam at 1e-3 on a Markov chain: 32 layers, d = 64, 12 seeds, exponents
    over the upper three quarters.
    """
    trained = {"scheme": "pre_ln", "depth": 32, "task": "markov", "optimizer": "adam", "lr": 1e-3}
    drawn = gather(layer_by_layer(s, steps=60, **trained) for s in seeds(seed, 12))
    at = [float(layer) for layer in range(9, 33)]
    name = "exponent in l of the share of a branch that changes with the input of layer l − 1"
    return {
        "exponent of ‖x_{l+1} − x_l‖/‖x_{l+1}‖ in l after training": exponents(
            at, drawn["contribution"][:, 8:]
        ),
        "exponent of the angle in l after training": exponents(at, drawn["angle"][:, 8:]),
        name: exponents(at, drawn["change"][:, 8:]),
    }


@claim(
    "C65", DEPTH_SCALED, place="sections 4, 5", source_range=DEEP_TRANSLATION,
    trials=(POST_LN | {"depth": 1, "family": "encoder_decoder", "steps": 50, "task": "markov"},),
    rules=(
        *(
            Rule(f"FLOPs of products with weights, separate over merged, {length} positions", 1.0,
                 ">=", null=Null(1.0, "as many"))
            for length in (8, 16, 64)
        ),
        Rule("loss less that of separate attentions, steps 41 to 50", 0.0, "<=", null=SAME),
    ),
)  # fmt: skip
def merged_at_every_length(seed: int) -> Drawn:
    """Merged attention decodes faster at every length, and brings some effect in quality.

    Counted FLOPs of greedy decoding, 4 decoder layers, which are the same for every seed; the loss
    on a Markov translation, 1 + 1 layers, d = 32, Adam at 3e-3, 16 seeds. C31 has times.
    """
    result: dict[str, Any] = {
        f"FLOPs of products with weights, separate over merged, {length} positions": [
            decoding_flops(s, length) for s in seeds(seed, 3)
        ]
        for length in (8, 16, 64)
    }
    rows = []
    for draw_seed in seeds(seed, 16):
        ends = {}
        for kind in KINDS:
            stack = small_stack(draw_seed, decoder_attention=kind, lr=3e-3, **TRANSLATOR)
            learnt = unigram_losses(stack, 50) - torch.tensor(stack.run(50), dtype=F64)
            ends[kind] = -learnt[-10:].mean()
        rows.append(ends["merged"] - ends["separate"])
    result["loss less that of separate attentions, steps 41 to 50"] = torch.stack(rows)
    return result
