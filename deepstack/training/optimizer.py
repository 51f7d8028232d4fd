"""The optimizer of a run over the banks, with a parameter group for each set of factors."""

from collections.abc import Sequence
from typing import Any

import torch

from deepstack import config as conf
from deepstack.model.banks import Bank
from deepstack.model.build import Built
from deepstack.training.muon import Muon
from deepstack.training.optimizers import OPTIMIZERS, Groups, RuleOptimizer


def make_optimizer(
    train: conf.Train, built: Built, *, capturable: bool = False
) -> torch.optim.Optimizer:
    """Return the optimizer of `train.optimizer`; a group's learning rate is lr(t) * its 'factor'.

    A role's rate is lr times `train.lr_factors`, the scheme's factor and `train.lr_exponents`'
    factor.

    capturable: learning rates are tensors, which a captured or replayed step reads at every step;
        on a GPU they always are, so that an eager step rounds like a captured one.  Weight decay
        applies to matrices and tables (embedding, position, head), never to a bias or a norm.
    """
    definition = OPTIMIZERS.configured(train.optimizer, train.optimizer_options)
    groups: dict[tuple[float, ...], dict[str, Any]] = {}
    of_matrices: list[dict[str, Any]] = []
    for bank in built.trained:
        factors = built.optim(bank.roles[0])
        factor = train.lr_factor(bank.roles[0]) * factors.lr
        decay = train.weight_decay if bank.start in ("matrix", "table") else 0.0
        decay *= factors.weight_decay
        fresh = {"params": [], "factor": factor, "weight_decay": decay}
        if definition.takes_matrices and is_layer_matrix(bank):
            number, (rows, columns) = len(bank.roles), bank.shape
            shape = (number, rows // number, columns)
            of_matrices.append(fresh | {"params": bank.parameters, "shape": shape})
            continue
        if definition.adaptive:
            fresh["eps"] = train.eps * factors.eps
        groups.setdefault((factor, decay, factors.eps), fresh)["params"] += bank.parameters
    settings = list(groups.values())
    avoid_compiler_import()
    device = built.trained[0].parameters[0].device
    on_gpu = device.type == "cuda"
    if capturable or on_gpu:
        # Kernels of a GPU read a rate of 32 bits; kernels of a CPU read one as exact as a float.
        dtype = torch.float32 if on_gpu else torch.float64
        for group in settings + of_matrices:
            group["lr"] = torch.tensor(train.lr, device=device, dtype=dtype)
    more = {"capturable": True} if capturable and on_gpu else {}
    return definition().make(Groups(settings, of_matrices, train, more))


def is_layer_matrix(bank: Bank) -> bool:
    """Return whether a bank is of the matrices that Muon trains."""
    return bank.in_layers and bank.start == "matrix"


def avoid_compiler_import() -> None:
    """Keep torch from importing its compiler, which takes a second, to add a parameter group.

    torch excludes this function from compilation by a decorator that imports the compiler first.
    Nothing here compiles an optimizer.  In other versions of torch this does nothing.
    """
    inner = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if inner is not None and not hasattr(inner, "__dynamo_disable"):
        setattr(inner, "__dynamo_disable", inner)


def optimizer_state(
    optimizer: torch.optim.Optimizer, banks: Sequence[Bank]
) -> dict[str, torch.Tensor]:
    """Return the optimizer's state by '<bank>/<name>'.

    Moments are (depth, padded size); step counts have one number for each tensor of the bank.
    """
    state: dict[str, torch.Tensor] = {}
    for bank in banks:
        states = [optimizer.state[p] for p in bank.parameters]
        for name in states[0]:
            # A step count is a 0-d tensor a parameter; moments have the parameter's own shape.
            parts = [k[name].detach() for k in states]
            joined = torch.stack(parts) if parts[0].ndim == 0 else bank.whole(parts)
            state[f"{bank.key}/{name}"] = joined
    return state


def state_names(optimizer: torch.optim.Optimizer, bank: Bank) -> tuple[str, ...]:
    """Return the names of the state that the optimizer has for a bank after its first step."""
    if isinstance(optimizer, RuleOptimizer):
        return optimizer.rule.state
    if isinstance(optimizer, Muon) and is_layer_matrix(bank):
        return ("momentum_buffer",)
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if optimizer.defaults["momentum"] else ()
    return "step", "exp_avg", "exp_avg_sq"


def is_count(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Return whether a state is one number a parameter: the count of steps of torch's optimizers.

    All states of a rule are tensors like the parameter, whatever their names.
    """
    return name == "step" and not isinstance(optimizer, RuleOptimizer)


def create_optimizer_state(optimizer: torch.optim.Optimizer, banks: Sequence[Bank]) -> None:
    """Create the state that the first step would create, so that all steps run the same operations.

    A momentum of zero equals torch's, whose first step copies the gradient.
    """
    for bank in banks:
        for p in bank.parameters:
            if p not in optimizer.state:
                for name in state_names(optimizer, bank):
                    value = torch.zeros(()) if is_count(optimizer, name) else torch.zeros_like(p)
                    optimizer.state[p][name] = value


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, banks: Sequence[Bank], state: dict[str, torch.Tensor]
) -> None:
    """Load the result of `optimizer_state`, whether the banks were stacked or not.

    Raises ValueError unless the state is of exactly these banks.
    """
    keys = {f"{bank.key}/{n}": (bank, n) for bank in banks for n in state_names(optimizer, bank)}
    if wrong := keys.keys() ^ state.keys():
        raise ValueError(f"its optimizer is not this run's ({min(wrong)})")
    for key, (bank, name) in keys.items():
        values = state[key]
        if values.ndim == 1 and is_count(optimizer, name):
            parts = [values[min(i, len(values) - 1)] for i in range(len(bank.parameters))]
        else:
            parts = bank.parts(values)
        for p, value in zip(bank.parameters, parts, strict=True):
            if value.ndim and value.shape != p.shape:
                raise ValueError(f"its optimizer is not this run's ({key})")
            optimizer.state[p][name] = value.to(p.device, copy=True)
