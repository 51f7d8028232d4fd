"""The claim that a norm's gain and bias can be folded into the linear map after it."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from deepstack.model import Transformer, set_values, values_of
from deepstack_lab.ledger.claim import Finding, Null, Part, at_most, beside, claim
from deepstack_lab.ledger.claim_stack import small_stack
from deepstack_lab.ledger.draws import ROUNDING, normals, random, repeats, seeds
from deepstack_lab.ledger.fold import fold_norm, readers_of_norms
from deepstack_lab.ledger.operations import count_operations
from deepstack_lab.ledger.sources import NORM_THEN_LINEAR
from deepstack_lab.ledger.statistics import agreement, means, time_ratios

WIDTH = 256  # of the norm and the map whose time and operations are compared


@claim("C17", NORM_THEN_LINEAR)
def folded(seed: int) -> Finding:
    """Linear(LN(x)) = Linear'(LN₀(x)), W' = W diag(γ), b' = Wβ + b: 2d parameters less a norm, and
    less computation.

    One norm and one linear map of several sizes, γ, β, W, b ~ N(0, 1); then all norms of a trained
    Pre-LN stack that linear maps alone read, in fp64.  Beside it Post-LN, where the stream reads
    what leaves a norm too.
    """
    rng, apart = random(seed), Null(0.0, "as far as 0 is")

    def of_one_norm(d: int, n_out: int) -> list[Part]:
        x, W = 1 + 2 * normals(rng, 32, d), normals(rng, n_out, d)
        gain, bias, b = normals(rng, d), normals(rng, d), normals(rng, n_out)
        before = F.linear(torch.layer_norm(x, (d,), gain, bias), W, b)
        near = agreement(F.linear(torch.layer_norm(x, (d,)), W * gain, W @ bias + b), before)
        quantity = f"1 − relative distance, d = {d}, {n_out} outputs"
        return [Part.mean(quantity, 1.0, near, tolerance=ROUNDING, null=apart)]

    def of_stack(draw_seed: int, scheme: str) -> tuple[float, int]:
        """Return the agreement of a trained stack with the folded one, and the numbers saved."""
        stack = small_stack(draw_seed, scheme=scheme, depth=3, lr=3e-3)
        stack.run(8)
        tokens = stack.batch(9)[0]
        with torch.no_grad():
            model, saved = fold(stack.model)
            return agreement(model(tokens), stack.model.double()(tokens)), saved

    def of_stacks(draw_seed: int) -> list[Part]:
        (pre, saved), (post, _) = (of_stack(draw_seed, name) for name in ("pre_ln", "post_ln"))
        return [
            Part.mean("the same, a trained Pre-LN stack", 1.0, pre, tolerance=ROUNDING, null=apart),
            Part.mean("parameters less over 2d a norm", 1.0, saved / (6 * 2 * 32),
                      null=Null(0.0, "none less")),
            beside("Post-LN folded alike", 1.0, post, tolerance=ROUNDING, null=apart),
        ]  # fmt: skip

    draws, sizes = repeats(8), ((8, 32), (64, 256), (256, 64))
    parts = [
        *means(of_one_norm(d, n_out) for d, n_out in sizes for _ in range(draws)),
        *means(map(of_stacks, seeds(seed, 8))),
        *operations_saved(),
        at_most("time over that before, d = 256", 1.0, fold_times(rng), stated=False,
                null=Null(1.0, "no time saved")),
    ]  # fmt: skip
    return Finding(
        parts,
        f"{draws} draws of a norm; 3 layers, d = 32, 8 steps, {draws} seeds. The last norm "
        "stays: a tied head is the token table as well. In Post-LN the fold changes the stream and "
        "is not exact. Operations are counted: those saved are a small share beside the products, "
        "and no time was saved (see the last part).",
    )


def fold(model: Transformer) -> tuple[Transformer, int]:
    """Return a copy of the model in fp64 whose layers' norms are folded, and the parameters saved.

    The last norm stays if the head's matrix is the token table.
    """
    values = {name: value.double() for name, value in values_of(model).items()}
    saved = 0
    for norm, readers in readers_of_norms(model).items():
        if any("embedding" in reader.weights for reader in readers):
            continue
        gain, bias = (values[f"{norm}.{name}"] for name in ("gain", "bias"))
        fold_norm(values, norm, readers)
        values |= {f"{norm}.gain": torch.ones_like(gain), f"{norm}.bias": torch.zeros_like(bias)}
        saved += gain.numel() + bias.numel()
    result = copy.deepcopy(model).double()
    set_values(result, values)
    return result, saved


def norm_and_map(x: Tensor, W: Tensor, b: Tensor, *affine: Tensor) -> Tensor:
    """Return the map of the layer norm of x, line by line; affine: the norm's gain and bias."""
    unit = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    if affine:
        gain, bias = affine
        unit = unit * gain + bias
    return F.linear(unit, W, b)


def operations_saved() -> list[Part]:
    """Return the parts on the operations of LN and a map of 256 outputs, for 256 tokens."""
    x, W = torch.ones(2, WIDTH, WIDTH)
    gain, bias, b = torch.ones(3, WIDTH)
    before = count_operations(lambda: norm_and_map(x, W, b, gain, bias))
    less, none = before - count_operations(lambda: norm_and_map(x, W, b)), Null(0.0, "none less")
    return [
        Part("operations less over 2d a token, d = 256", 1.0, less / (2 * x.numel()), 0.0,
             null=none),
        Part("the same, as a share of those of LN and map", 0.01, less / before, 0.0, ">=",
             stated=False, null=none),
    ]  # fmt: skip


def fold_times(rng: torch.Generator) -> list[float]:
    """Return times of LN₀ and a linear map over times of LN and the map, for 256 tokens."""
    x, W = torch.randn(2, WIDTH, WIDTH, generator=rng)
    gain, bias, b = torch.randn(3, WIDTH, generator=rng)
    return time_ratios(
        lambda: F.linear(torch.layer_norm(x, (WIDTH,)), W, b),
        lambda: F.linear(torch.layer_norm(x, (WIDTH,), gain, bias), W, b),
        blocks=8,
    )
