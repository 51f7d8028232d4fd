"""Signal propagation: gradients through norms and residual sums, entropy of attention."""

import torch
from torch import Tensor

from deepstack.diagnostics.layers import diagnostic
from deepstack.diagnostics.snapshot import Snapshot


@diagnostic("beta_ln", "β_{LN}")
def beta_ln(snapshot: Snapshot) -> Tensor:
    """β_LN = ‖δ_r‖/‖δ_o‖ of the last norm in each sublayer, δ a gradient by its input or output.

    δ_r is the gradient through the norm alone.  Zhang et al. 2019, arXiv:1908.11365, section 3.
    """
    return snapshot.delta_norm_in / snapshot.delta_norm_out


@diagnostic("beta_rc", "β_{RC}")
def beta_rc(snapshot: Snapshot) -> Tensor:
    """β_RC = ‖δ_z‖/‖δ_r‖ of each sublayer, δ the gradient by what enters it and by its residual sum

    δ_z is the whole gradient, through all paths of the stream.  NaN where the sublayer's input is
    not the stream (hyper-connections).  Zhang et al. 2019, arXiv:1908.11365, section 3.
    """
    return snapshot.delta_in / snapshot.delta_sum


@diagnostic("beta_ln_predicted", "1/sqrt(α² + Var G)")
def beta_ln_predicted(snapshot: Snapshot) -> Tensor:
    """1/sqrt(α² + Var G), what β_LN is where x has variance 1, is independent of G(x), and gains 1.

    Var G: over the coordinates, mean over probe tokens.  NaN where the last norm of a sublayer does
    not read α x + G(x), or is neither LayerNorm nor RMSNorm.  The Jacobian of LN divides by the
    standard deviation of that sum.
    """
    expected = (snapshot.alpha.square() + snapshot.branch_variance.mean(dim=-1)).rsqrt()
    return expected.masked_fill(snapshot.norm_slope.isnan().all(dim=-1), float("nan"))


@diagnostic("ln_input_variance", "Var z")
def ln_input_variance(snapshot: Snapshot) -> Tensor:
    """Variance over the d coordinates of the last norm's input in a sublayer, mean over tokens.

    It is the biased variance, which LN itself uses.
    """
    return snapshot.norm_variance.mean(dim=-1)


@diagnostic("ln_jacobian", "‖∂LN(z)/∂z‖₂")
def ln_jacobian(snapshot: Snapshot) -> Tensor:
    """max |g|/σ(z), the spectral norm of the last norm's Jacobian in a sublayer, mean over tokens.

    LN's Jacobian is diag(g) Q/σ, Q = I − (11ᵀ + z̄z̄ᵀ)/d up to epsilon, a projection.  With equal
    gains g the number is exact (d >= 3).  With other gains it is an upper bound; the third largest
    |g| instead of the largest gives a lower bound.  With g = 1 it is sqrt(d)/‖z − mean(z)‖.
    RMSNorm: Q = I − z̄z̄ᵀ/d, rms(z) for σ(z).  NaN for other norms.  Xiong et al. 2020,
    arXiv:2002.04745, Lemma 3, has it as O(sqrt(d)/‖z‖).
    """
    return snapshot.norm_slope.mean(dim=-1)


@diagnostic("grad_norm_predicted", "‖∂L/∂W_N‖ Π ((α² − v²w²)/(α² + v²w²))^(1/2)", parts=())
def grad_norm_predicted(snapshot: Snapshot) -> Tensor:
    """matrix_grad_norm of layer N times ((α² − v²w²)/(α² + v²w²))^(1/2) a sublayer after layer l.

    Effective gains of the current weights, E[W²] the mean square of the entries: attention w² =
    d E[W_v²], v² = d E[W_o²]; feed-forward w² = d E[W_1²]/2, for ReLU, v² = d_ff E[W_2²].  A ratio
    below 0 counts as 0: at α = v = w = 1 the prediction is 0 below the last layer.  NaN where a
    sublayer above is not LN(α x + G(x)), and where the derivation does not cover norm or activation
    (`uncovered_names`).  NaN in a decoder with cross-attention, whose branch hardly depends on x.
    This is DeepNet's prediction of ‖∂F/∂θ_i‖, θ_i the matrices of a sublayer; compare it with
    matrix_grad_norm.
    """
    if snapshot.sublayers != ("attention", "feed_forward"):
        return torch.full_like(snapshot.matrix_grad_norm, float("nan"))
    power = {
        role: W.square().mean(dim=(1, 2)) * (1.0 if snapshot.scaled else W.shape[2])
        for role, W in snapshot.matrices.items()
    }
    both = [power["v"] * power["o"], power["w1"] / 2 * power["w2"]]
    vw = torch.stack(both, dim=1).double()
    square = snapshot.alpha.double().square()
    ratio = ((square - vw).clamp(min=0) / (square + vw)).sqrt().prod(dim=1)
    above = torch.cat([ratio[1:], ratio.new_ones(1)])
    falling = above.flip(0).cumprod(dim=0).flip(0)
    return (snapshot.matrix_grad_norm[-1] * falling).to(snapshot.matrix_grad_norm.dtype)


@diagnostic("update_to_weight", "‖θ_l,t − θ_l,t−1‖/‖θ_l‖", parts=())
def update_to_weight(snapshot: Snapshot) -> Tensor:
    """Norm of the last step's change of each layer's parameters over the norm of the parameters."""
    return snapshot.param_update_norm / snapshot.param_norm


@diagnostic("attention_entropy", "H", unit="nats", parts=("attention", "cross_attention"))
def attention_entropy(snapshot: Snapshot) -> dict[str, Tensor]:
    """H = −Σ_j p_j ln p_j of the attention weights, mean over sequences, heads and positions.

    ln n if all n positions read have equal weight; 0 if one has all.  A causal position
    i reads i positions.  Zhai et al. 2023, arXiv:2303.06296, follow it through training.
    """
    return dict(snapshot.entropy)


@diagnostic("largest_logit", "max_{ij} q_i·k_j/√d_head", parts=("attention", "cross_attention"))
def largest_logit(snapshot: Snapshot) -> dict[str, Tensor]:
    """Largest logit of the attention, over sequences, heads and pairs of positions.

    Its growth precedes divergence in large models: Dehghani et al. 2023, arXiv:2302.05442.
    """
    return dict(snapshot.largest_logit)


@diagnostic("skip_loss", "L without layer l", unit="nats", parts=())
def skip_loss(snapshot: Snapshot) -> dict[str, Tensor] | Tensor:
    """Probe loss with one layer replaced by the identity (log.skipped_layers of them are tried)."""
    return {} if snapshot.skip_loss is None else snapshot.skip_loss


@diagnostic("skip_loss_increase", "L without layer l − L", unit="nats", parts=())
def skip_loss_increase(snapshot: Snapshot) -> dict[str, Tensor] | Tensor:
    """Increase of the probe loss when the identity replaces a layer: the layer's contribution."""
    return {} if snapshot.skip_loss is None else snapshot.skip_loss - snapshot.loss
