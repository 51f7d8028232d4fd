"""Numbers of papers on the stream over layers: variance, contributions, use of depth, mixing."""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deepstack.diagnostics import largest_sums, stream_mixing
from deepstack.records import Run
from deepstack.runs import Runs, final_value
from deepstack_lab.ledger.claim import Drawn, Null, Rule, claim
from deepstack_lab.ledger.claim_stack import Trial
from deepstack_lab.ledger.draws import seeds
from deepstack_lab.ledger.reach import Extent
from deepstack_lab.ledger.run_values import along, by_seed, layers
from deepstack_lab.ledger.sources import (
    CURSE,
    DEPTH_BENCH,
    EFFECTIVE_DEPTH,
    LANGUAGE_MODELS,
    MHC,
    NEIGHBOURS,
    PERI_LN,
    STREAMS,
    USE_OF_DEPTH,
)  # fmt: skip
from deepstack_lab.ledger.statistics import exponents, gather


def fits(run: Run) -> tuple[float, float]:
    """Return R² of ln Var x_l, after training, as a line in l and as a line in ln l."""
    logs = np.log(layers(run, "stream_variance"))
    at = np.arange(1, len(logs) + 1)
    line, power = (float(np.corrcoef(x, logs)[0, 1] ** 2) for x in (at, np.log(at)))
    return line, power


def exponential(run: Run) -> float:
    """Return by how much the exponential explains ln Var x_l better than a power of l."""
    line, power = fits(run)
    return line - power


def last_variance(run: Run, record: int = -1) -> float:
    """Return ln Var x_N of a snapshot."""
    return float(np.log(layers(run, "stream_variance", record)[-1]))


def growth_exponent(run: Run) -> float:
    """Return the exponent in l − 1 of Var x_l − Var x_1 after training."""
    variance = layers(run, "stream_variance")
    at, rise = np.arange(1, len(variance)), variance[1:] - variance[0]
    kept = rise > 0
    return float(np.polyfit(np.log(at[kept]), np.log(rise[kept]), 1)[0])


NO_CHANGE = Null(0.0, "no difference")


@claim(
    "LNS-V", CURSE, tier="cpu", place="sections 3, 4", study="variance.yaml",
    source_range=Extent(LANGUAGE_MODELS, (768, 2048), (12, 24), (8.9, 17), "LLaMA, 130M to 1B"),
    published="training turns Pre-LN's variance from Θ(L) to Θ(e^L); LayerNorm Scaling's is at "
    "most polynomial",
    rules=(
        Rule("Pre-LN: ln Var x_N after training less before", 0.0, ">=", null=NO_CHANGE),
        Rule("Pre-LN: R² of the exponential less R² of the power", 0.0, ">=", null=NO_CHANGE),
        Rule("LN scaling: R² of the exponential less R² of the power", 0.0, "<=", null=NO_CHANGE),
        Rule("ln Var x_N after training, LN scaling less Pre-LN", 0.0, "<=", null=NO_CHANGE),
    ),
)  # fmt: skip
def variance_laws(runs: Runs) -> Drawn:
    """Training makes the variance of Pre-LN's stream grow exponentially with the layer, and that of
    LayerNorm Scaling as a polynomial at most.

    Decoders of 48 layers, width 32, 300 steps of AdamW at 3e-3 on text, five seeds.
    """

    def grown(run: Run) -> float:
        return last_variance(run) - last_variance(run, 0)

    pre, scaled = (by_seed(runs, last_variance, scheme=s) for s in ("pre_ln", "ln_scaling"))
    return {
        "Pre-LN: ln Var x_N after training less before": by_seed(runs, grown, scheme="pre_ln"),
        "Pre-LN: R² of the exponential less R² of the power": by_seed(
            runs, exponential, scheme="pre_ln"
        ),
        "LN scaling: R² of the exponential less R² of the power": by_seed(
            runs, exponential, scheme="ln_scaling"
        ),
        "ln Var x_N after training, LN scaling less Pre-LN": scaled - pre,
    }


@claim(
    "PL-V", PERI_LN, tier="cpu", place="section 3", study="variance.yaml",
    source_range=Extent(LANGUAGE_MODELS, data="0.4B to 3.2B parameters, 30B tokens"),
    published="Var(x_{l+1}) ≈ Var(x_l) + β_0 in Peri-LN, in training too",
    rules=(
        Rule("Peri-LN: exponent of Var x_l − Var x_1 in l − 1 after training", 1.0, tolerance=0.15,
             null=Null(2.0, "quadratic")),
        Rule("Peri-LN: R² of the exponential less R² of the power", 0.0, "<=", null=NO_CHANGE),
        Rule("Pre-LN: exponent of Var x_l − Var x_1 in l − 1 after training", 1.0, tolerance=0.15,
             stated=False, null=Null(2.0, "quadratic")),
    ),
)  # fmt: skip
def linear_variance(runs: Runs) -> Drawn:
    """The variance of Peri-LN's stream grows linearly with the layer, in training too.

    The runs of LNS-V: decoders of 48 layers, width 32.
    """
    result: dict[str, Any] = {
        f"{label}: exponent of Var x_l − Var x_1 in l − 1 after training": by_seed(
            runs, growth_exponent, scheme=scheme
        )
        for label, scheme in (("Peri-LN", "peri_ln"), ("Pre-LN", "pre_ln"))
    }
    name = "Peri-LN: R² of the exponential less R² of the power"
    return result | {name: by_seed(runs, exponential, scheme="peri_ln")}


@claim(
    "LNS-P", CURSE, tier="gpu", place="Table 1", study="lns_gpu.yaml",
    source_range=Extent(LANGUAGE_MODELS, (768, 768), (12, 12), (17, 17), "LLaMA of 130M, C4"),
    published="130M, 12 layers: perplexity 26.73 (Pre-LN), 25.76 (LayerNorm Scaling)",
    rules=(Rule("loss, LN scaling less Pre-LN", 0.0, "<=", null=NO_CHANGE),),
)  # fmt: skip
def scaled_norms_learn_more(runs: Runs) -> Drawn:
    """LayerNorm Scaling ends below Pre-LN in loss.

    Twelve layers of width 768, 300 steps on text, five seeds: the sign alone.
    """
    pre, scaled = (
        by_seed(runs, lambda run: final_value(run, "loss"), scheme=s)
        for s in ("pre_ln", "ln_scaling")
    )
    return {"loss, LN scaling less Pre-LN": scaled - pre}


def contribution(run: Run) -> np.ndarray:
    """Return ‖G(x)‖/‖x‖ by layer after training, mean of both sublayers."""
    return (layers(run, "branch_ratio_attention") + layers(run, "branch_ratio_feed_forward")) / 2


@claim(
    "ED-1", USE_OF_DEPTH, tier="cpu", study="variance.yaml",
    source_range=Extent(LANGUAGE_MODELS, data="Llama 3.1, Qwen 3, OLMo 2"),
    published="the second half of the layers adds less, with a change of phase near N/2",
    read="from the abstract; a smooth decay as 1/l would give 0.92 at the middle",
    rules=(
        Rule("‖G‖/‖x‖, second half of the layers over the first", 1.0, "<=",
             null=Null(1.0, "as much")),
        Rule("‖G‖/‖x‖, layers 25 to 28 over layers 21 to 24", 0.7, "<=",
             null=Null(0.92, "a smooth decay")),
    ),
)  # fmt: skip
def second_half(runs: Runs) -> Drawn:
    """Layers of the second half contribute less, with a change of phase near N/2.

    Small Pre-LN decoders in place of large language models: the runs of LNS-V.
    """

    def halves(run: Run) -> float:
        sizes = contribution(run)
        return float(sizes[24:].mean() / sizes[:24].mean())

    def middle(run: Run) -> float:
        sizes = contribution(run)
        return float(sizes[24:28].mean() / sizes[20:24].mean())

    return {
        "‖G‖/‖x‖, second half of the layers over the first": by_seed(runs, halves, scheme="pre_ln"),
        "‖G‖/‖x‖, layers 25 to 28 over layers 21 to 24": by_seed(runs, middle, scheme="pre_ln"),
    }


@claim(
    "ED-2", EFFECTIVE_DEPTH, tier="cpu", study="use_of_depth.yaml",
    source_range=Extent(LANGUAGE_MODELS, (1536, 5120), (28, 64), (550, 12_000), "Qwen2.5"),
    published="the ratio of effective depth to depth is constant from 1.5B to 32B",
    read="from the abstract",
    rules=(
        Rule("exponent of the effective ratio in N, 6 to 96 layers", 0.0, tolerance=0.2,
             null=Null(-1.0, "a fixed number of layers")),
    ),
)  # fmt: skip
def effective_ratio(runs: Runs) -> Drawn:
    """The share of layers that a stack uses does not depend on depth.

    Effective depth: least l with KL_l < 0.5 max KL. Small Pre-LN encoders on a masked Markov chain,
    of one width where the paper's models grow in width too; each depth with its best rate, 24 seeds
    (five of a second set were undecided and asked for 23). An earlier study of three seeds was
    known.
    """
    from deepstack.tools.depth_use import analyze_run

    def ratio(run: Run) -> float:
        ratio = analyze_run(run.path, ["lens"])["lens"].scalars["effective_depth_ratio"]
        return math.nan if ratio is None else float(ratio)

    at, ratios = along(runs, ratio)
    return {"exponent of the effective ratio in N, 6 to 96 layers": exponents(at, ratios)}


@claim(
    "ED-3", NEIGHBOURS, tier="cpu",
    source_range=Extent(LANGUAGE_MODELS, data="pre-trained models of seven families"),
    trials=({"family": "decoder", "depth": 12, "batch_size": 8, "steps": 200},),
    published="contributions of neighbouring layers have a negative cosine in 5 of 7 families",
    read="from the abstract",
    rules=(
        Rule("mean cosine of x_l − x_{l−1} and x_{l+1} − x_l after training", 0.0, "<=",
             null=NO_CHANGE),
        Rule("the same at the start", 0.0, "<=", stated=False, null=NO_CHANGE),
    ),
)  # fmt: skip
def neighbours(seed: int) -> Drawn:
    """Contributions of neighbouring layers are negatively correlated.

    Small Pre-LN decoders of 12 layers, width 32, 200 steps of Adam at 3e-3 on text in place of
    pre-trained models; 8 seeds. The paper finds it absent at the start and growing in pre-training.
    """

    def cosine(trial: Trial) -> Tensor:
        states = trial.snapshots(trial.probe_batch)[0].states
        added = states[1:] - states[:-1]
        return F.cosine_similarity(added[1:], added[:-1], dim=-1).mean().double()

    rows = []
    for draw_seed in seeds(seed, 8):
        keys = {"family": "decoder", "scheme": "pre_ln", "depth": 12, "batch_size": 8}
        trial = Trial(draw_seed, optimizer="adam", lr=3e-3, **keys)
        start = cosine(trial)
        trial.run(200)
        rows.append({"start": start, "end": cosine(trial)})
    drawn = gather(rows)
    return {
        "mean cosine of x_l − x_{l−1} and x_{l+1} − x_l after training": drawn["end"],
        "the same at the start": drawn["start"],
    }


def mixing(seed: int, scheme: str, steps: int) -> dict[str, float]:
    """Return gain and distance from I of the product of A_r, and the share of the largest stream.

    gain: largest sum of absolute values in a row or column, the mean over tokens of the largest
        over products of the first 1, 2, … sublayers.
    """
    trial = Trial(seed, scheme=scheme, depth=24, family="decoder", optimizer="adam", lr=3e-3)
    trial.run(steps)
    (recorded,) = stream_mixing(trial.model, trial.probe).values()
    product, gains = None, []
    for A_r in recorded.matrices:
        product = A_r if product is None else A_r @ product
        gains.append(torch.maximum(*largest_sums(product)).mean())
    return {
        "gain": torch.stack(gains).max().item(),
        "apart": recorded.distances().mean().item(),
        "share": recorded.shares()[-1].item(),
    }


GROWTH = "hyper-connections: ln of the composite gain after training over that at the start"
ABOVE_MHC = "ln of the composite gain after training, hyper-connections over mHC"


@claim(
    "MH-1", MHC, tier="cpu", place="sections 3.1 and 5.4",
    source_range=Extent(LANGUAGE_MODELS, data="mixture of experts of 27B parameters"),
    trials=({"family": "decoder", "depth": 24, "steps": 100},),
    published="the composite gain of hyper-connections peaks at 3000, mHC's at about 1.6",
    read="in the text, of models of 27B parameters",
    rules=(
        Rule(GROWTH, math.log(10), ">=", null=Null(0.0, "it does not grow")),
        Rule("mHC: composite gain after training", 2.0, "<=", null=Null(10.0, "it explodes")),
        Rule(ABOVE_MHC, math.log(2), ">=", null=Null(0.0, "no difference")),
    ),
)  # fmt: skip
def composite_gain(seed: int) -> Drawn:
    """The composite gain of hyper-connections explodes with depth in training, and mHC's stays near
    1.6.

    Largest row or column sum of products of A_r over sublayers. Decoders of 24 layers, width 32,
    100 steps of Adam at 3e-3 on text, 16 seeds. A first rule took the ratios, not their logarithms:
    five seeds gave 57 to 296, and it was undecided. By logarithms these five agreed, and five of a
    second set were undecided and asked for 9. mHC's part holds at the start too.
    """
    before, after, constrained = (
        gather(mixing(s, scheme, steps) for s in seeds(seed, 16))["gain"]
        for scheme, steps in (("hyper_connections", 0), ("hyper_connections", 100), ("mhc", 100))
    )
    return {
        GROWTH: (after / before).log(),
        "mHC: composite gain after training": constrained,
        ABOVE_MHC: (after / constrained).log(),
    }


@claim(
    "MH-2", STREAMS, tier="cpu", place="abstract",
    source_range=Extent(LANGUAGE_MODELS, data="trained models with hyper-connections"),
    trials=({"family": "decoder", "depth": 24, "steps": 100},),
    published="trained mHC keeps its mixing near the identity, and one stream dominates",
    read="from the abstract; 'near' is read as 0.2, 'dominates' as half of the power of four",
    rules=(
        Rule("mHC: ‖A_r − I‖_F/√n after training", 0.2, "<=",
             null=Null(0.866, "a mean of streams")),
        Rule("mHC: share of the largest of four streams in ‖H‖²", 0.5, ">=",
             null=Null(0.25, "equal streams")),
    ),
)  # fmt: skip
def collapsing_streams(seed: int) -> Drawn:
    """In trained mHC the mixing stays near the identity and the streams collapse: one dominates.

    The stacks of MH-1, the streams before the last sublayer; 5 seeds. The mixing starts near the
    identity, so that its part holds without training too: it says that 100 steps do not leave it.
    """
    drawn = gather(mixing(s, "mhc", 100) for s in seeds(seed, 5))
    return {
        "mHC: ‖A_r − I‖_F/√n after training": drawn["apart"],
        "mHC: share of the largest of four streams in ‖H‖²": drawn["share"],
    }


@claim(
    "DB-1",
    DEPTH_BENCH,
    source_range=Extent(LANGUAGE_MODELS, None, (16, 70), (20, 20), "200M to 400M parameters"),
    tier="gpu",
    published="late pairs of layers above the threshold at 32 layers (Pre-LN, hyper-connections, "
    "attention residuals): causal score above 0.45: 1, 7, 16 %; permutation score above 0.15: 8, "
    "35, 46 %",
    read="from the project page",
    needs="a loader of the published checkpoints",
    rules=(
        Rule(
            "attention residuals: share of late pairs with a causal score above 0.45",
            0.16,
            tolerance=0.3,
            null=Null(0.01, "as Pre-LN's"),
        ),
        Rule(
            "attention residuals: share of late pairs with a permutation score above 0.15",
            0.46,
            tolerance=0.3,
            null=Null(0.08, "as Pre-LN's"),
        ),
    ),
)
def depth_scores(runs: Runs) -> Drawn:
    """In late layers attention residuals use their depth: more pairs of layers depend on each other
    than in Pre-LN.

    `deepstack analyze` computes both scores.
    """
    return {}
