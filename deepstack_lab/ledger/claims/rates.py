"""Numbers of papers on learning rates and sizes over depth: transfer and the coordinate check."""

from typing import Any

import torch
from torch import Tensor

from deepstack.records import Run
from deepstack.runs import Runs, final_value, has_diverged
from deepstack_lab.ledger.claim import Drawn, Null, Rule, claim
from deepstack_lab.ledger.draws import F64
from deepstack_lab.ledger.reach import Extent
from deepstack_lab.ledger.run_values import DEPTH, along, best_rate, layers
from deepstack_lab.ledger.sources import (
    COMPLETE_P,
    DEPTH_MUP,
    DEPTHWISE_SPECTRAL,
    EFFECTIVE_RATE,
    HYPERP,
    LANGUAGE_MODELS,
)  # fmt: skip
from deepstack_lab.ledger.statistics import exponents

STAYS, FALLS = Null(-0.5, "it falls as 1/√N"), Null(0.0, "it stays")
EXPONENT = "exponent of the best rate in N, 4 to 64 layers"


def loss(run: Run) -> float:
    """Return the final validation loss on [MASK]; infinite for a diverged run."""
    return float("inf") if has_diverged(run) else final_value(run, "loss_masked")


def rate_exponents(runs: Runs, scheme: str) -> Tensor:
    """Return the exponent of every seed's best rate in depth, (seeds,)."""
    depths = sorted({run.get(DEPTH) for run in runs if run.get("model.scheme") == scheme})
    best = []
    for depth in depths:
        rates, losses = along(runs, loss, "train.lr", scheme=scheme, depth=depth)
        best.append([best_rate(rates, row) for row in losses])
    return exponents(depths, torch.tensor(best, dtype=F64).t())


@claim(
    "CP-2", COMPLETE_P, tier="cpu", place="Figure 2", study="rates.yaml",
    source_range=Extent(LANGUAGE_MODELS, None, (2, 128), data="language models"),
    published="the best rate is the same from 2 to 128 layers for α = 1; for SP it falls",
    read="from the figure; the range of depths from memory",
    rules=(
        Rule(f"CompleteP: {EXPONENT}", 0.0, tolerance=0.15, null=STAYS),
        Rule(f"Pre-LN: {EXPONENT}", -0.15, "<=", null=FALLS),
    ),
)  # fmt: skip
def complete_p_transfers(runs: Runs) -> Drawn:
    """The best learning rate does not depend on depth with branches 1/N (CompleteP), and falls with
    depth in a plain Pre-LN stack.

    A masked Markov chain of 8 states, width 32, 50 steps of AdamW at nine rates a factor of two
    apart, the best one by a parabola for each seed; 12 seeds (five were undecided and asked for
    19). A factor of 1.5 from 4 to 64 layers (an exponent of 0.15) counts as the same. The grid grew
    where the stack of a seed was best at its end. An earlier study was known.
    """
    return {
        f"CompleteP: {EXPONENT}": rate_exponents(runs, "complete_p"),
        f"Pre-LN: {EXPONENT}": rate_exponents(runs, "pre_ln"),
    }


@claim(
    "CP-3", COMPLETE_P, tier="cpu", place="Figure 2", study="rates.yaml", opposes=("TP-1",),
    source_range=Extent(LANGUAGE_MODELS, None, (2, 128), data="language models"),
    published="the best rate shifts with depth for α = 1/2",
    read="from the figure; its direction from memory",
    rules=(Rule(f"depth-µP: {EXPONENT}", -0.15, "<=", null=FALLS),),
)  # fmt: skip
def half_does_not_transfer(runs: Runs) -> Drawn:
    """With branches 1/√N (depth-µP) the best learning rate depends on depth.

    The runs of CP-2. An earlier study was known.
    """
    return {f"depth-µP: {EXPONENT}": rate_exponents(runs, "depth_mup")}


@claim(
    "TP-1", DEPTH_MUP, tier="cpu", place="section 1", study="rates.yaml", opposes=("CP-3",),
    source_range=Extent(("residual MLP",), data="blocks of one matrix, CIFAR-10, to 1024 layers"),
    published="depth-µP transfers the learning rate over depth where a block has one matrix; for "
    "deeper blocks, as a Transformer's, the paper finds limits",
    read="from the abstract",
    rules=(Rule(f"depth-µP: {EXPONENT}", 0.0, tolerance=0.15, null=STAYS),),
)  # fmt: skip
def depth_mup_transfers(runs: Runs) -> Drawn:
    """With branches 1/√N and rates 1/√N (depth-µP) the best learning rate is the same at every
    depth.

    The runs of CP-2, of Transformers, whose blocks have two matrices or four. An earlier study was
    known.
    """
    return {f"depth-µP: {EXPONENT}": rate_exponents(runs, "depth_mup")}


@claim(
    "HP-1", HYPERP, tier="cpu", study="rates_ngpt.yaml",
    source_range=Extent(LANGUAGE_MODELS, data="Muon, matrices of fixed Frobenius norm"),
    published="matrices of fixed norm need depth-µP's 1/√N on branches",
    read="from the abstract; the paper's exponent 0.32 in data is not tested",
    rules=(Rule(f"nGPT: {EXPONENT}", -0.15, "<=", null=FALLS),),
)  # fmt: skip
def sphere_needs_branches(runs: Runs) -> Drawn:
    """On the sphere, without 1/√N on the branches, the best learning rate falls with depth.

    nGPT with AdamW, whose rows have unit norm, in place of Muon and matrices of fixed Frobenius
    norm: another sphere. Its step a starts at 0.05; eight rates, else as CP-2, 14 seeds (five were
    undecided and asked for 14). A first grid ended at 0.032, where stacks of 4 layers were best. An
    earlier study was known.
    """
    return {f"nGPT: {EXPONENT}": rate_exponents(runs, "ngpt")}


SIZE = "exponent of ‖x_N‖ in N after 10 steps, 8 to 1000 layers"
MOVED = "exponent of ‖x_N − x_N,0‖ in N after 10 steps"


@claim(
    "CP-C", COMPLETE_P, tier="cpu", place="Figure 3", study="coordinates.yaml",
    source_range=Extent(LANGUAGE_MODELS, (256, 256), (2, 64), data="text, ten steps"),
    published="sizes of the stream are flat in depth for α = 1 after ten steps",
    read="from the figure",
    rules=(
        Rule(f"CompleteP: {SIZE}", 0.0, tolerance=0.1, null=Null(0.5, "it grows as √N")),
        Rule(f"CompleteP: {MOVED}", 0.0, tolerance=0.1, null=Null(0.5, "it grows as √N")),
        Rule(f"Pre-LN: {SIZE}", 0.5, tolerance=0.2, stated=False, null=Null(0.0, "flat")),
    ),
)  # fmt: skip
def coordinates_over_depth(runs: Runs) -> Drawn:
    """After ten steps the size of the stream and of its change do not depend on depth with branches
    1/N.

    Width 32, a Markov chain, ten steps of AdamW at 1e-3; 8, 90 and 1000 layers, five seeds.
    """

    def size(run: Run) -> float:
        return float(layers(run, "stream_norm")[-1])

    def moved(run: Run) -> float:
        return float(layers(run, "stream_update")[-1])

    result: dict[str, Any] = {}
    for label, scheme in (("CompleteP", "complete_p"), ("Pre-LN", "pre_ln")):
        result[f"{label}: {SIZE}"] = exponents(*along(runs, size, scheme=scheme))
    result[f"CompleteP: {MOVED}"] = exponents(*along(runs, moved, scheme="complete_p"))
    return result


@claim(
    "CP-F", COMPLETE_P, tier="gpu", place="abstract",
    source_range=Extent(LANGUAGE_MODELS, data="1.5 billion parameters"),
    published="FLOPs saved at the same loss: 11.8 % at the best shape, 34.4 % for the deepest",
    needs="models of 1.5 billion parameters",
    rules=(
        Rule("FLOPs saved at the best shape", 0.118, tolerance=0.1, null=Null(0.0, "none")),
        Rule("FLOPs saved by the deepest stack", 0.344, tolerance=0.1, null=Null(0.0, "none")),
    ),
)  # fmt: skip
def saved_flops(runs: Runs) -> Drawn:
    """CompleteP saves 12 to 34 % of the training FLOPs beside µP.

    Measured at 1.5 billion parameters.
    """
    return {}


@claim(
    "WD-1", DEPTHWISE_SPECTRAL, tier="cpu",
    source_range=Extent(LANGUAGE_MODELS, data="GPT-2 style"),
    published="blocks of one matrix need 1/√L, of two or more 1/L",
    read="from the text of the second version",
    needs="a feed-forward of one matrix",
    rules=(
        Rule("one matrix: exponent of the best multiplier in L", -0.5, tolerance=0.2,
             null=Null(-1.0, "as with two")),
        Rule("two matrices: exponent of the best multiplier in L", -1.0, tolerance=0.2,
             null=Null(-0.5, "as with one")),
    ),
)  # fmt: skip
def spectral_condition(runs: Runs) -> Drawn:
    """Residual blocks of one matrix need the multiplier 1/√L, blocks of two or more 1/L.

    The statistic would be the exponent of the multiplier that keeps the best learning rate.
    """
    return {}


LAW = f"Pre-LN: {EXPONENT}"


@claim(
    "HT-1", EFFECTIVE_RATE, tier="cpu", study="rates.yaml",
    source_range=Extent(data="CNNs, ResNets and Transformers, largest stable update of one step"),
    published="the best rate falls with effective depth, the shortest path from input to output, "
    "to the power -3/2",
    read="from the abstract",
    rules=(Rule(LAW, -1.5, tolerance=0.2, null=FALLS),),
)  # fmt: skip
def three_halves(runs: Runs) -> Drawn:
    """With equal rates in all layers the best learning rate falls as N^(-3/2) with depth.

    Pre-LN, whose shortest path grows as N, in the runs of CP-2: the rate with the lowest loss after
    50 steps. The paper speaks of the largest update of the first step, under its own start. The
    exponents of experiments/which_law were known, all above -1.
    """
    return {LAW: rate_exponents(runs, "pre_ln")}
