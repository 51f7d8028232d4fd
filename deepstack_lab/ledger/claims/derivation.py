"""Statements of the derivation of DeepNorm, measured in whole stacks and after training."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from deepstack.schemes import Tap, tapped
from deepstack_lab.ledger.claim import Drawn, Null, Rule, claim
from deepstack_lab.ledger.claim_stack import FLAT, POST_LN, Trial, small_stack
from deepstack_lab.ledger.claims.gradients import gradient_of_output
from deepstack_lab.ledger.claims.training import NO_CHANGE
from deepstack_lab.ledger.draws import F64, seeds
from deepstack_lab.ledger.reach import Extent
from deepstack_lab.ledger.sources import LAYER_CAKE, NO_SIZES
from deepstack_lab.ledger.statistics import exponents, gather, per_seed, slopes

VALUE_PATH = ("v", "o", "w1", "w2")  # θ_l of the derivation, which leaves out q and k
KINDS = ("attention", "feed-forward")
LARGEST = "largest of 12 sublayers: ‖Δx_{l+1}‖ over the bound"
MEAN = "mean of 12 sublayers: ‖Δx_{l+1}‖ over the bound with 1/α"
AT_BOUND = Null(1.0, "as large as the bound")


class Streams(Tap):
    """Records the stream before every sublayer."""

    def __init__(self) -> None:
        self.entering: list[Tensor] = []

    def enter(self, x: Tensor) -> None:
        self.entering.append(x)


@torch.no_grad()
def streams(trial: Trial, change: Tensor | float = 0.0) -> Tensor:
    """Return x_1 + change, x_2, …, x_{2N+1} on the probe batch in fp64: (2N + 1, tokens, d)."""
    tap = Streams()
    with tapped(trial.model.schemes, tap):
        last = trial.model.last(trial.model.embed(trial.probe) + change)
    return torch.stack([*tap.entering, last]).double().flatten(1, -2)


def sizes(change: Tensor) -> Tensor:
    """Return the root mean square over tokens of the norms of changes, (2N + 1,)."""
    return change.square().sum(dim=-1).mean(dim=-1).sqrt()


def slack(seed: int) -> dict[str, Tensor]:
    """Return the changes of a DeepNorm stack's streams, over those that the derivation allows.

    stretch: ‖Δx_{l+1}‖/‖Δx_l‖ of a random change of x_1, mean over the sublayers of each kind.
    independent, gradient: by a random step of the matrices of equal size for each sublayer, and by
        a step of gradient descent; tight: over the bound with 1/√(α² + v²w²), loose: with 1/α.
    """
    from deepstack.instruments.bound import terms

    trial, rng = Trial(seed, scheme="deepnorm", depth=6), torch.Generator().manual_seed(seed)
    before, banks = streams(trial), trial.banks_of(*VALUE_PATH)
    start, (snapshot,) = trial.values(), trial.snapshots()
    symbols = terms(snapshot)
    alpha, v, w = (one.double().flatten() for one in (symbols.alpha, symbols.v, symbols.w))
    noise = 1e-3 * torch.randn(before.shape[-2:], generator=rng).view(*trial.probe.shape, -1)
    moved = sizes(streams(trial, noise) - before)
    result = {"stretch": (moved[1:] / moved[:-1]).view(-1, len(KINDS)).mean(dim=0)}

    def over_bound(name: str, step_of: Callable[[Tensor], Tensor]) -> None:
        """Add the ratios of a step that a function makes of the gradient of each matrix."""
        steps = {role: step_of(gradient) for role, gradient in gradients.items()}

        def move(role: str, values: Tensor) -> None:
            values += steps.get(role, 0.0)

        for bank in banks:
            bank.change(move)
        (after,) = trial.snapshots(initial=start)
        step, change = terms(after).moved.double().flatten(), sizes(streams(trial) - before)
        for word, factor in (("tight", (alpha**2 + (v * w) ** 2).sqrt()), ("loose", alpha)):
            allowed = change[:-1] + (v**2 + w**2).sqrt() / factor * step
            result[f"{name}, {word}"] = change[1:] / allowed
        for bank, values in zip(trial.layer_banks, start, strict=True):
            bank.copy_(values)

    trial.backward()
    gradients = {
        role: part.clone()
        for bank in banks
        for role, part in zip(bank.roles, bank.gradients().chunk(len(bank.roles), 1), strict=True)
        if role in VALUE_PATH
    }
    over_bound("independent", lambda g: 1e-4 * torch.randn(g.shape, generator=rng))
    over_bound("gradient", lambda g: -1e-3 * g)
    return result


@claim(
    "C66", LAYER_CAKE, place="sections 4.2, 5.1 (3)",
    rules=(
        *(
            Rule(f"{kind}: ‖Δx_{{l+1}}‖/‖Δx_l‖ of a change of x_1", 1.0, tolerance=0.1,
                 null=Null(12**0.25, "α, as without the norm"))
            for kind in KINDS
        ),
        Rule(f"Δθ independent, {LARGEST}", 1.0, "<=", null=AT_BOUND),
        Rule(f"a gradient step, {LARGEST}", 1.0, "<=", null=AT_BOUND),
        Rule(f"Δθ independent, {MEAN}", 1.0, "<=", stated=False, null=AT_BOUND),
        Rule(f"a gradient step, {MEAN}", 1.0, "<=", stated=False, null=AT_BOUND),
    ),
)  # fmt: skip
def change_of_a_sublayer(seed: int) -> Drawn:
    """∂f_l/∂x_l ≍ 1, and ‖Δx_{l+1}‖ ≤ ‖Δx_l‖ + √(v² + w²)/√(α² + v²w²) ‖Δθ_l‖, which is below
    ‖Δx_l‖ + √(v² + w²)/α ‖Δθ_l‖.

    DeepNorm of 6 layers at the start, d = 32, task text, 24 seeds. α, v, w are those of each
    sublayer, norms root mean squares over 64 tokens, and θ_l the matrices of the value path.
    """
    drawn = gather(slack(draw_seed) for draw_seed in seeds(seed, 24))
    result = {
        f"{kind}: ‖Δx_{{l+1}}‖/‖Δx_l‖ of a change of x_1": drawn["stretch"][:, i]
        for i, kind in enumerate(KINDS)
    }
    for name, words in (("independent", "Δθ independent"), ("gradient", "a gradient step")):
        result[f"{words}, {LARGEST}"] = drawn[f"{name}, tight"].amax(dim=1)
        result[f"{words}, {MEAN}"] = drawn[f"{name}, loose"].mean(dim=1)
    return result


STACKS = {"DeepNorm": "deepnorm", "Post-LN": "post_ln", "Pre-LN": "pre_ln"}


@claim(
    "C67", LAYER_CAKE, place="section 4.3", source_range=NO_SIZES,
    trials=tuple(POST_LN | {"depth": depth, "steps": 50} for depth in (6, 24)),
    rules=tuple(
        rule
        for name in STACKS
        for rule in (
            Rule(f"{name}: ‖∂L/∂F‖ at N = 24 over N = 6, after 50 steps", 1.0, tolerance=FLAT,
                 null=Null(2.0, "grows as √N")),
            Rule(f"{name}: ‖∂L/∂F‖ after 50 steps over before, N = 24", 1.0, tolerance=FLAT,
                 null=Null(0.0, "it vanishes with the loss")),
        )
    ),
)  # fmt: skip
def output_gradient_after_training(seed: int) -> Drawn:
    """‖∂L/∂F‖ depends neither on N nor on the parameters.

    L is the mean loss of a batch of 8 sequences, before and after 50 steps of Adam at 1e-3, d = 32,
    task text, 8 seeds. C39 has the start alone.
    """

    def around(draw_seed: int, scheme: str, depth: int) -> list[float]:
        keys = {"scheme": scheme, "depth": depth, "optimizer": "adam", "lr": 1e-3}
        trial = small_stack(draw_seed, **keys)
        before = gradient_of_output(trial)
        trial.run(50)
        return [before, gradient_of_output(trial)]

    result = {}
    for name, scheme in STACKS.items():
        shallow, deep = (
            per_seed(partial(around, scheme=scheme, depth=depth), seeds(seed, 8))
            for depth in (6, 24)
        )
        over = deep[:, 1] / shallow[:, 1]
        result[f"{name}: ‖∂L/∂F‖ at N = 24 over N = 6, after 50 steps"] = over
        result[f"{name}: ‖∂L/∂F‖ after 50 steps over before, N = 24"] = deep[:, 1] / deep[:, 0]
    return result


DECAY = "Post-LN, {} layers: slope of ln ‖∂L/∂W_2‖ in l"


@claim(
    "C68", LAYER_CAKE, place="section 4.3",
    rules=tuple(
        Rule(DECAY.format(depth), 0.0, ">=", null=Null(0.0, "equal in every layer"))
        for depth in (24, 96)
    ),
)  # fmt: skip
def exponential_decay(seed: int) -> Drawn:
    """‖∂F/∂θ_i‖ falls exponentially with 2N − i, as On Layer Normalization in the Transformer
    Architecture says.

    Post-LN at the start, d = 32, task text, 40 seeds. The source names no rate, so any fall counts:
    a slope above 0. A first rule asked for 0.05 a layer, which no source states; both slopes lie
    below it. XI-1 has the last layer alone, C9 the formula for DeepNorm.
    """

    def slope(draw_seed: int, depth: int) -> float:
        trial = Trial(draw_seed, scheme="post_ln", depth=depth)
        trial.backward()
        (bank,) = trial.banks_of("w2")
        logs = bank.gradients().double().flatten(1).norm(dim=1).log()
        return slopes(range(depth), logs[None]).item()

    return {
        DECAY.format(depth): per_seed(partial(slope, depth=depth), seeds(seed, 40))
        for depth in (24, 96)
    }


POWERS = {"0": 0.0, "¼": 0.25, "½": 0.5}
DEEP = 200


@claim(
    "C69", LAYER_CAKE, tier="cpu", place="section 4.3",
    source_range=Extent(depth=(1000, 1000)),
    trials=({"depth": DEEP, "steps": 15, "task": "markov"},),
    rules=(
        Rule("√(v² + w²) of a sublayer at the start, p = ¼", 1 / 3, "<=",
             null=Null(math.sqrt(2), "Xavier's gain 1")),
        Rule("exponent of ‖Δθ‖/‖θ_0‖ in α, lr 0.1", -1.0, tolerance=0.1,
             null=Null(0.0, "α changes nothing")),
        *(
            Rule(f"p = {end}: loss less that at ¼, lr {rate}", 0.0, ">=", null=NO_CHANGE)
            for end in ("0", "½")
            for rate in (0.1, 1.0)
        ),
        Rule("‖θ_i‖_F of the two matrices of a sublayer at the start, p = ¼", 1 / 3, "<=",
             stated=False, null=Null(1.0, "a vector of norm 1")),
    ),
)  # fmt: skip
def power_in_deep_stacks(seed: int) -> Drawn:
    """‖θ_i‖ ≪ 1 at the start, and too small an α lets θ leave its start within few steps, which
    endangers a thousand layers; too large an α converges slowly.

    α = (2N)^p, β = α/√(4N), as C40, at N = 200. 15 steps of gradient descent on the matrices that β
    starts, task markov, d = 32, 18 seeds (six were undecided and asked for 18). ≪ 1 is read as a
    third or less. Danger and slowness are read as a loss above that at p = ¼, mean of the last five
    steps.
    """
    alphas = [(2 * DEEP) ** power for power in POWERS.values()]
    roles = list(VALUE_PATH)

    def flat(stack: Trial) -> Tensor:
        return torch.cat([stack.matrices()[role].flatten() for role in roles]).double()

    def sample(draw_seed: int, rate: float, power: float) -> list[float]:
        """Return ‖Δθ‖/‖θ_0‖, the loss, √(v² + w²) and ‖θ_i‖_F at the start."""
        from deepstack.instruments.bound import terms

        stack = small_stack(
            draw_seed, scheme="deepnorm_power", scheme_options={"power": power}, depth=DEEP,
            task="markov", batch_size=4, lr=rate, optimizer="sgd", clip=None, trainable=roles,
        )  # fmt: skip
        symbols = terms(stack.snapshots()[0])
        gain, start = (symbols.v**2 + symbols.w**2).sqrt().mean().item(), flat(stack)
        loss = sum(stack.run(15)[-5:]) / 5
        moved = (flat(stack) - start).norm() / start.norm()
        return [moved.item(), loss, gain, start.norm().item() / math.sqrt(2 * DEEP)]

    def of_seed(draw_seed: int) -> Sequence[Sequence[Sequence[float]]]:
        return [[sample(draw_seed, lr, p) for p in POWERS.values()] for lr in (0.1, 1.0)]

    drawn = per_seed(of_seed, seeds(seed, 18))
    moved, loss, gain, norm = drawn.to(F64).unbind(dim=3)  # (seeds, rates, powers) each
    less, names = loss - loss[..., 1:2], list(POWERS)
    return {
        "√(v² + w²) of a sublayer at the start, p = ¼": gain[:, 0, 1],
        "exponent of ‖Δθ‖/‖θ_0‖ in α, lr 0.1": exponents(alphas, moved[:, 0]),
        **{
            f"p = {end}: loss less that at ¼, lr {rate}": less[:, i, names.index(end)]
            for end in ("0", "½")
            for i, rate in enumerate((0.1, 1.0))
        },
        "‖θ_i‖_F of the two matrices of a sublayer at the start, p = ¼": norm[:, 0, 1],
    }
