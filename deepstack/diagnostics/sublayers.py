"""Diagnostics of every sublayer: its branch, its residual sum and its last norm."""

import torch
from torch import Tensor

from deepstack.diagnostics.layers import diagnostic
from deepstack.diagnostics.sublayer_statistics import SublayerStatistics


@diagnostic("branch_ratio", "‖G(x)‖/‖x‖")
def branch_ratio(snapshot: SublayerStatistics) -> Tensor:
    """Mean over probe tokens of ‖G‖₂/‖x‖₂, each sublayer's output over the stream entering it."""
    return (snapshot.branch / snapshot.entering).mean(dim=-1)


@diagnostic("ln_input", "‖z‖")
def ln_input(snapshot: SublayerStatistics) -> Tensor:
    """Mean over probe tokens of ‖z‖₂, which the last norm of a sublayer reads; √d at unit scale"""
    return snapshot.norm_input.mean(dim=-1)


@diagnostic("beta_ln", "β_{LN}")
def beta_ln(snapshot: SublayerStatistics) -> Tensor:
    """β_LN = ‖δ_r‖/‖δ_o‖, the gradient at input over output of the last norm in each sublayer.

    δ_r is the gradient through the norm alone.  Zhang et al. 2019, arXiv:1908.11365, section 3.
    """
    return snapshot.delta_norm_in / snapshot.delta_norm_out


@diagnostic("beta_rc", "β_{RC}")
def beta_rc(snapshot: SublayerStatistics) -> Tensor:
    """β_RC = ‖δ_z‖/‖δ_r‖, the gradient at input over residual sum of each sublayer.

    δ_z is the whole gradient, through all paths of the stream.  NaN where the sublayer's input is
    not the stream (hyper-connections).  Zhang et al. 2019, arXiv:1908.11365, section 3.
    """
    return snapshot.delta_in / snapshot.delta_sum


@diagnostic("beta_ln_predicted", "1/sqrt(α² + Var G)")
def beta_ln_predicted(snapshot: SublayerStatistics) -> Tensor:
    """1/sqrt(α² + Var G), what β_LN is where x has variance 1, is independent of G(x), and gains 1.

    Var G: over the coordinates, mean over probe tokens.  NaN where the last norm of a sublayer does
    not read α x + G(x), or is neither LayerNorm nor RMSNorm.  The Jacobian of LN divides by the
    standard deviation of that sum.
    """
    predicted = (snapshot.alpha**2 + snapshot.branch_variance.mean(dim=-1)).rsqrt()
    return predicted.masked_fill(snapshot.norm_slope.isnan().all(dim=-1), torch.nan)


@diagnostic("ln_input_variance", "Var z")
def ln_input_variance(snapshot: SublayerStatistics) -> Tensor:
    """Variance over the d coordinates of the last norm's input in a sublayer, mean over tokens.

    It is the biased variance, which LN itself uses.
    """
    return snapshot.norm_variance.mean(dim=-1)


@diagnostic("ln_jacobian", "‖∂LN(z)/∂z‖₂")
def ln_jacobian(snapshot: SublayerStatistics) -> Tensor:
    """max |g|/σ(z), the spectral norm of the last norm's Jacobian in a sublayer, mean over tokens.

    LN's Jacobian is diag(g) Q/σ, Q = I − (11ᵀ + z̄z̄ᵀ)/d up to epsilon, a projection.  With equal
    gains g the number is exact (d >= 3).  With other gains it is an upper bound; the third largest
    |g| instead of the largest gives a lower bound.  With g = 1 it is sqrt(d)/‖z − mean(z)‖.
    RMSNorm: Q = I − z̄z̄ᵀ/d, rms(z) for σ(z).  NaN for other norms.  Xiong et al. 2020,
    arXiv:2002.04745, Lemma 3, has it as O(sqrt(d)/‖z‖).
    """
    return snapshot.norm_slope.mean(dim=-1)
