"""The loss as the optimizer sees it: its diagonal preconditioner and its stability threshold."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.model import Bank
from deepstack.training import Muon, RuleOptimizer, learning_rate


def stability_threshold(train: conf.Train, step: int) -> float:
    """Return the curvature above which the optimizer diverges at the rate η of a step.

    SGD with momentum β, θ ← θ − ηm, m ← βm + g: (2 + 2β)/η.  Adam with frozen second moments,
    m ← βm + (1 − β)g: (2 + 2β)/((1 − β)η), 38/η at β = 0.9 (Cohen et al. 2022, arXiv:2207.14484).
    """
    rate = learning_rate(train, step)
    beta = train.momentum if train.optimizer == "sgd" else train.betas[0]
    sgd = (2 + 2 * beta) / rate
    return sgd if train.optimizer == "sgd" else sgd / (1 - beta)


def preconditioner_scales(
    optimizer: torch.optim.Optimizer, banks: Sequence[Bank]
) -> list[Tensor] | None:
    """Return the diagonal of P^{−1/2} of each bank, (depth, …); the optimizer moves by −η m / P.

    SGD: P = 1/f, f the factor on the rate of a parameter group.  Adam after t steps:
    P = (1 − β1^t) (√(v/(1 − β2^t)) + ε)/f.  0 where v is 0, since no such entry has moved yet.
    None for Muon and for rules of plugins, and for Adam before its first step.
    """
    if isinstance(optimizer, Muon | RuleOptimizer):
        return None
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    scales = []
    for bank in banks:
        group = group_of[bank.parameters[0]]
        if "betas" not in group:
            scales.append(torch.full_like(bank.values(), group["factor"]).sqrt())
            continue
        states = [optimizer.state[p] for p in bank.parameters]
        if not states[0]:
            return None
        beta1, beta2 = group["betas"]
        t = float(states[0]["step"])
        v = bank.shaped(bank.whole([state["exp_avg_sq"] for state in states]))
        P = (1 - beta1**t) * ((v / (1 - beta2**t)).sqrt() + group["eps"])
        scales.append(torch.where(v > 0, (group["factor"] / P).sqrt(), 0.0))
    return scales
