"""Signal propagation: predicted gradients, updates, attention, and losses without a layer."""

import torch
from torch import Tensor

from deepstack.diagnostics.layers import diagnostic
from deepstack.diagnostics.snapshot import Snapshot


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
