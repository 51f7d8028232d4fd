"""Claims about training and generalisation, by short runs from the same random numbers."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from deepstack.config import with_overrides
from deepstack.tasks import task_of
from deepstack.training import to_device
from deepstack_lab.ledger.claim import (
    Curves,
    Finding,
    Line,
    Null,
    Part,
    at_least,
    at_most,
    beside,
    claim,
)  # fmt: skip
from deepstack_lab.ledger.claim_stack import CPU, POST_LN, Trial, small_stack
from deepstack_lab.ledger.claims.add_and_norm import layer_by_layer
from deepstack_lab.ledger.draws import F64, seeds
from deepstack_lab.ledger.sources import ADD_AND_NORM, LAYER_CAKE, NO_SIZES, READING_NOTES
from deepstack_lab.ledger.statistics import exponents, gather, per_seed

Keys = Mapping[str, Any]

PLAIN: Keys = {"scheme": "skip_init", "scheme_options": {"start": 1.0}}  # x <- x + G(x)
POST, PRE, T_FIXUP = ({"scheme": name} for name in ("post_ln", "pre_ln", "t_fixup"))
STACKS: Mapping[str, Keys] = {
    "Post-LN": POST, "Pre-LN": PRE, "Post-BN": {"norm_kind": "batch"},
    "no norms": PLAIN, "T-Fixup": T_FIXUP,
}  # fmt: skip
TASKS = ("text", "markov")
ADAM: Keys = {"optimizer": "adam", "lr": 3e-3}
NO_CHANGE = Null(0.0, "no difference")
AS_WITHOUT = Null(1.0, "as without norms")


def losses(seeds: Sequence[int], steps: int, /, **changes: Any) -> Tensor:
    """Return the losses of a small stack with these changes at every step, (seeds, steps)."""
    return per_seed(lambda seed: small_stack(seed, **changes).run(steps), seeds)


@claim(
    "C45", LAYER_CAKE, source_range=NO_SIZES,
    trials=(POST_LN | {"depth": 3, "steps": 30},),
)  # fmt: skip
def fan_in_trains(seed: int) -> Finding:
    """Var W = 1/n_in trains better than Xavier's 2/(n_in + n_out).

    DeepNorm stacks that differ in W_1 and W_2 alone, from the same random numbers, at two rates.
    """
    repetitions, steps = seeds(seed, 8), 30
    parts, lines = [], []
    for rate in (1e-3, 3e-3):
        fan_in, xavier = (
            losses(repetitions, steps, scheme="deepnorm", depth=3, lr=rate, init_fan=fan)
            for fan in ("in", "in_out")
        )
        less = fan_in - xavier
        for words, half in (("1 to 15", less[:, :15]), ("16 to 30", less[:, 15:])):
            quantity = f"loss less Xavier's, lr {rate:g}, steps {words}"
            parts.append(at_most(quantity, 0.0, half.mean(dim=1), null=NO_CHANGE))
        lines.append(Line.mean(f"lr {rate:g}", range(1, steps + 1), less, measured=False))
    return Finding(
        parts,
        f"3 layers, d = 32, {len(repetitions)} seeds, task text, AdamW.  The larger W_1 and the "
        "smaller W_2 train faster; at the larger rate the difference fades soon.  Runs of this "
        "length do not show who ends lower.",
        Curves("step", "loss, 1/n_in less Xavier", lines),
    )


@claim(
    "C41", ADD_AND_NORM, source_range=NO_SIZES,
    trials=(POST_LN | {"depth": 3, "steps": 24},),
)  # fmt: skip
def larger_rates(seed: int) -> Finding:
    """Normalisation allows larger learning rates and converges faster.

    Post-LN and Pre-LN beside the same stack without norms, x ← x + G(x), over a grid of rates of
    Adam.  A rate trains if the last losses are below the loss of an even guess.  Beside it T-Fixup,
    which has no norms either, and a start that makes up for them.
    """
    repetitions, steps, rates = seeds(seed, 16), 24, (1e-3, 3e-3, 1e-2, 1e-1)
    even_guess, drawn, best_rates = math.log(small_stack(seed).task.vocab_size), {}, {}
    for label in ("Post-LN", "Pre-LN", "no norms", "T-Fixup"):
        changes = {"depth": 3, "optimizer": "adam", **STACKS[label]}
        runs = [losses(repetitions, steps, lr=rate, **changes) for rate in rates]
        drawn[label] = torch.stack(runs, dim=1)[..., -10:].mean(dim=2)  # (seeds, rates)
        trains = drawn[label] < even_guess
        best_rates[label] = (trains * torch.tensor(rates, dtype=F64)).amax(dim=1)
    parts = []
    for label in ("Post-LN", "Pre-LN"):
        quantity = f"{label}: largest rate that trains, over that without norms"
        over = best_rates[label] / best_rates["no norms"]
        parts.append(at_least(quantity, 2.0, over, null=AS_WITHOUT))
        for at, rate in enumerate(rates[:2]):
            less = drawn[label][:, at] - drawn["no norms"][:, at]
            quantity = f"{label}: loss less that without norms, lr {rate:g}"
            parts.append(at_most(quantity, 0.0, less, null=NO_CHANGE))
    quantity = "Pre-LN: largest rate that trains, over T-Fixup's"
    over = best_rates["Pre-LN"] / best_rates["T-Fixup"]
    parts.append(at_least(quantity, 2.0, over, stated=False, null=Null(1.0, "as T-Fixup's")))
    lines = [Line.mean(label, rates, ends) for label, ends in drawn.items()]
    return Finding(
        parts,
        f"3 layers, d = 32, task text, {len(repetitions)} seeds, {steps} steps; the loss is the "
        "mean of the last ten.  Without norms 0.1 diverges, and so it does under T-Fixup, "
        "whose start makes up for the norms.",
        Curves("learning rate", "loss after 24 steps", lines, log_x=True, log_y=True),
    )


@claim(
    "C40", LAYER_CAKE, source_range=NO_SIZES,
    trials=({"depth": 8, "steps": 20, "task": "markov"},),
)  # fmt: skip
def power_of_alpha(seed: int) -> Finding:
    """‖Δθ‖ = O(η‖θ‖/α): too small an α and θ leaves its start, too large a one and convergence is
    slow; α = (2N)^¼ balances.

    α = (2N)^p, β = α/√(4N) for p = 0, ¼, ½.  Gradient descent on the matrices that β starts, and
    beside it at a larger rate.  'Balances' is read as a lower loss than at either end.
    """
    repetitions, steps, depth = seeds(seed, 32), 20, 8
    rates, powers, roles = (0.1, 1.0), (0.0, 0.25, 0.5), ["v", "o", "w1", "w2"]
    alphas = [(2 * depth) ** power for power in powers]

    def sample(draw_seed: int, rate: float, power: float) -> list[float]:
        """Return ‖Δθ‖/‖θ_0‖ at the end and the mean loss of the last ten steps."""
        stack = small_stack(
            draw_seed, scheme="deepnorm_power", scheme_options={"power": power}, depth=depth,
            task="markov", batch_size=4, lr=rate, optimizer="sgd", clip=None, trainable=roles,
        )  # fmt: skip
        start = torch.cat([stack.matrices()[role].flatten() for role in roles])
        loss = fmean(stack.run(steps)[-10:])
        end = torch.cat([stack.matrices()[role].flatten() for role in roles])
        return [((end - start).norm() / start.norm()).item(), loss]

    drawn = per_seed(lambda s: [[sample(s, lr, p) for p in powers] for lr in rates], repetitions)
    moved, loss = drawn.unbind(dim=3)  # (seeds, rates, powers) each
    less = loss - loss[..., 1:2]
    parts = [
        Part.mean("exponent of ‖Δθ‖/‖θ_0‖ in α, lr 0.1", -1.0, exponents(alphas, moved[:, 0]),
                  tolerance=0.1, null=Null(0.0, "α changes nothing")),
        at_least("p = ½: loss less that at ¼, lr 0.1", 0.0, less[:, 0, 2], null=NO_CHANGE),
        at_least("p = 0: loss less that at ¼, lr 0.1", 0.0, less[:, 0, 0], null=NO_CHANGE),
        at_least("p = 0: loss less that at ¼, lr 1", 0.0, less[:, 1, 0], stated=False,
                 null=NO_CHANGE),
        at_most("p = ½: loss less that at ¼, lr 1", 0.0, less[:, 1, 2], stated=False,
                null=NO_CHANGE),
    ]  # fmt: skip
    lines = [Line.mean(f"lr {lr:g}", alphas, moved[:, i]) for i, lr in enumerate(rates)]
    return Finding(
        parts,
        f"{depth} layers, d = 32, {len(repetitions)} seeds, {steps} steps of SGD, task markov.  θ "
        "leaves its start as 1/α and a large α is slow.  But ¼ does not balance: which power ends "
        "lowest depends on the rate, p = 0 at 0.1 and not at 1.  A thousand layers may "
        "need other powers.",
        Curves("α", "‖Δθ‖/‖θ_0‖", lines, log_x=True, log_y=True),
    )


@claim(
    "C44", ADD_AND_NORM, source_range=NO_SIZES,
    trials=({"depth": 12, "steps": 24}, POST_LN | {"depth": 3, "steps": 100},),
)  # fmt: skip
def warm_up(seed: int) -> Finding:
    """Pre-LN, unlike Post-LN, needs no warm-up, converges faster and ends worse than Post-LN where
    both train.

    Adam in stacks of 12 layers with and without a warm-up.  That Pre-LN loses nothing without one
    tells it from Post-LN only if Post-LN does lose.  Stacks of 3 layers, which both train, run down
    to a rate of 0.  'Worse' is read as a loss higher by 0.03 nats, one in a hundred.
    """
    repetitions, steps, end = seeds(seed, 12), 24, 100

    def gain(scheme: Keys) -> Tensor:
        """Return the loss without a warm-up less that with one, (seeds,)."""
        deep = {"depth": 12, "batch_size": 4, **ADAM, **scheme}
        without, with_one = (losses(repetitions, steps, warmup_steps=w, **deep) for w in (0, 8))
        return (without - with_one)[:, -10:].mean(dim=1)

    linear = {"depth": 3, "steps": end, "schedule": "linear", **ADAM}

    def apart(drawn: Sequence[int], steps: int) -> Tensor:
        """Return the loss of Pre-LN less Post-LN's at every step, (seeds, steps)."""
        pre, post = (losses(drawn, steps, **linear, **keys) for keys in (PRE, POST))
        return pre - post

    whole = seeds(seed, 12)
    runs, beginnings = apart(whole, end), apart(seeds(seed, 40)[len(whole) :], 30)
    early = torch.cat([runs[:, 10:30], beginnings[:, 10:]]).mean(dim=1)
    late = runs[:, -20:].mean(dim=1)
    pre, post = gain(PRE), gain(POST)
    parts = [
        at_least("Post-LN, 12 layers: loss without a warm-up less with one", 0.0, post,
                 null=NO_CHANGE),
        at_most("3 layers: loss of Pre-LN less Post-LN's, steps 11 to 30", 0.0, early,
                null=NO_CHANGE),
        at_least("the same, the last 20 steps", 0.03, late, null=NO_CHANGE),
        at_most("Pre-LN, 12 layers: loss without a warm-up less with one", 0.0, pre, stated=False,
                null=NO_CHANGE),
        at_most("the same, less Post-LN's", 0.0, pre - post, stated=False,
                null=Null(0.0, "as Post-LN's")),
    ]  # fmt: skip
    return Finding(
        parts,
        f"d = 32, lr 0.003, task text; {len(pre)} seeds of {steps} steps, of which 8 are a "
        f"warm-up, at depth 12; at depth 3 {len(early)} of the first 30 steps and {len(late)} of "
        f"all {end}.  Post-LN needs none either here, at twelve layers: its trouble begins deeper "
        "(C35, experiments/who_diverges). Nor does Pre-LN end worse, but these runs are short.",
    )


class SmallText(Trial):
    """A trial that trains on two batches again and again."""

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch of step 1 or 2, in turn."""
        return super().batch(1 + (step - 1) % 2)


def small_texts(seeds: Sequence[int], task: str, keys: Keys, steps: int) -> Tensor:
    """Return losses of training and validation after these steps on two batches, (seeds, 2)."""

    def sample(seed: int) -> list[float]:
        stack = SmallText(seed, **{**POST_LN, **ADAM, "depth": 2, "task": task, **keys})
        stack.run(steps)
        seen = [stack.batch(1), stack.batch(2)]
        held_out = [to_device(stack.task.validation_batch(i, 32), CPU) for i in range(2)]
        with torch.no_grad():
            return [sum(stack.loss(*batch).item() for batch in b) / 2 for b in (seen, held_out)]

    return per_seed(sample, seeds)


@claim(
    "C42", ADD_AND_NORM, source_range=NO_SIZES,
    trials=(POST_LN | {"depth": 2, "steps": 30},),
)  # fmt: skip
def against_overfitting(seed: int) -> Finding:
    """Normalisation resists overfitting: a smaller validation loss less training loss.

    Two batches, again and again, until every stack knows them: LN and BN beside the same stack
    without norms, x ← x + G(x), and T-Fixup, which has none either.
    """
    repetitions, steps = seeds(seed, 8), 30
    parts = []
    for task in TASKS:
        drawn = {label: small_texts(repetitions, task, k, steps) for label, k in STACKS.items()}
        gaps = {label: pairs[:, 1] - pairs[:, 0] for label, pairs in drawn.items()}
        for label in ("Post-LN", "Pre-LN", "Post-BN"):
            over = gaps[label] / gaps["no norms"]
            quantity = f"{task}: gap of {label} over that without norms"
            parts.append(at_most(quantity, 1.0, over, null=AS_WITHOUT))
        over, quantity = gaps["Pre-LN"] / gaps["T-Fixup"], f"{task}: gap of Pre-LN over T-Fixup's"
        parts.append(at_most(quantity, 1.0, over, null=AS_WITHOUT))
        over, same = gaps["Post-BN"] / gaps["Post-LN"], Null(1.0, "as LN's")
        parts.append(at_least(f"{task}: gap of BN over LN's", 1.0, over, stated=False, null=same))
        known, quantity = drawn["Pre-LN"][:, 0], f"{task}: training loss of Pre-LN"
        unseen = Null(drawn["Pre-LN"][:, 1].mean().item(), "as on unseen text")
        parts.append(at_most(quantity, 0.5, known, stated=False, null=unseen))
    return Finding(
        parts,
        f"2 layers, d = 32, {len(repetitions)} seeds, {steps} steps of Adam at 0.003 on two "
        "batches of 8 sequences.  Without norms the last hidden state grows, and with it the "
        "certainty of wrong predictions.  BN, which trains on statistics of a batch, overfits more "
        "than LN here.",
    )


@claim(
    "C46", READING_NOTES, source_range=NO_SIZES,
    trials=(POST_LN | {"depth": 2, "steps": 32},),
)  # fmt: skip
def penalties(seed: int) -> Finding:
    """L2 and spectral-norm penalties generalise better: a lower validation loss.

    Pre-LN stacks on two batches, again and again, with and without λ/2 ‖W‖_F² (Adam)
    and λ/2 Σ‖W‖₂² in the loss.
    """
    repetitions, steps = seeds(seed, 24), 32
    kinds: dict[str, Keys] = {
        "L2, λ = 0.1": {"weight_decay": 0.1},
        "spectral, λ = 1": {"spectral_penalty": 1.0},
    }
    parts = []
    for task in TASKS:
        without = small_texts(repetitions, task, PRE, steps)
        for label, penalty in kinds.items():
            less = small_texts(repetitions, task, {**PRE, **penalty}, steps) - without
            quantity = f"{task}: validation loss less that without, {label}"
            parts.append(at_most(quantity, 0.0, less[:, 1], null=NO_CHANGE))
            quantity = f"{task}: the same, training loss"
            parts.append(at_least(quantity, 0.0, less[:, 0], stated=False, null=NO_CHANGE))
    return Finding(
        parts,
        f"2 layers, d = 32, {len(repetitions)} seeds, {steps} steps of Adam at 0.003 on two "
        "batches of 8 sequences, which both penalties keep from being learnt by heart.  It shows "
        "less overfitting; whether they help where texts are many, it does not.",
    )


@claim(
    "C47", READING_NOTES, source_range=NO_SIZES,
    trials=(POST_LN | {"depth": 3, "steps": 90, "task": "markov"},),
)  # fmt: skip
def fine_tuning(seed: int) -> Finding:
    """Post-LN fine-tunes better than Pre-LN; BN biases residual blocks to the identity.

    Stacks trained on one Markov chain, then on another; 'better' is read as a loss lower by 0.03
    nats, one in a hundred.  BN: the share ‖x_{l+1} − x_l‖/‖x_{l+1}‖ of
    layer l at the start falls with l under x ← x + G(BN(x)), and does not under x ← x + G(x).
    """
    repetitions = seeds(seed, 10)
    post, pre = (per_seed(partial(tune, keys=keys), repetitions) for keys in (POST, PRE))
    less = post - pre
    parts = [
        at_most("second chain: loss of Post-LN less Pre-LN's, last 10 steps", -0.03, less[:, 1],
                null=NO_CHANGE),
        beside("first chain: the same", 0.0, less[:, 0], tolerance=0.1,
               null=Null(1.0, "Post-LN learns nothing")),
    ]  # fmt: skip
    layers, first, quantity = 32, 8, "exponent of layer l's share in l"
    at = [float(layer) for layer in range(first + 1, layers + 1)]

    def falls(keys: Keys) -> Tensor:
        drawn = gather(layer_by_layer(s, depth=layers, **keys) for s in repetitions)
        return exponents(at, drawn["contribution"][:, first:])

    batch = falls({**PRE, "norm_kind": "batch"})
    alike, plain = Null(0.0, "as without norms"), falls(PLAIN)
    parts.append(at_most(f"BN: {quantity}", 0.0, batch, null=alike))
    as_batch = Null(batch.mean().item(), "as with BN")
    parts.append(beside(f"no norms: {quantity}", 0.0, plain, tolerance=0.1, null=as_batch))
    return Finding(
        parts,
        f"3 layers, d = 32, {len(repetitions)} seeds, 60 steps of Adam at 0.003 on the first "
        "chain and 30 on the second; the share in stacks of 32 layers, d = 64, exponents over the "
        "upper three quarters.  Post-LN ends level with Pre-LN on the second chain.  "
        "experiments/fine_tuning has 12 layers and longer runs.",
    )


def tune(seed: int, keys: Keys) -> list[float]:
    """Return the last losses on the first chain and on the second."""
    stack = small_stack(seed, depth=3, task="markov", **ADAM, **keys)
    first = stack.run(60)
    stack.task = task_of(with_overrides(stack.config, {"seed": seed + 500}))
    return [fmean(run[-10:]) for run in (first, stack.run(30))]
