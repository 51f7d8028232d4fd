"""Pre-LN with factors by depth and width: depth-µP and CompleteP."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from deepstack.base.errors import ConfigError
from deepstack.config import Config
from deepstack.config.roles import MATRICES
from deepstack.schemes.parts import Parts
from deepstack.schemes.scheme import Norm, Optim, Scheme, Sublayer

# The optimizers for which there are rules for width.
WITH_RULE = ("adamw", "adam", "sgd", "muon")


class ScaledQueries(nn.Module):
    """q <- factor * q.  q: (batch, head, seq, d_head)."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, q: Tensor) -> Tensor:
        return q * self.factor


class DepthMuP(Scheme, name="depth_mup", label="depth-µP", paper="arXiv:2310.02244", static=True):
    """x <- x + (N/base)^(-1/2) G(LN(x)).  Yang et al. 2023, arXiv:2310.02244.

    Learning rates and epsilon inside the layers are multiplied by (N/base)^(-1/2) (Adam and AdamW;
    SGD's rates are unchanged).  This is the rule for depth.  With `base_width` the rule for width,
    µP, is applied too: see `width_optim`, and docs/schemes.md for its table.  Logits of attention
    are then q kᵀ sqrt(base_d_head)/d_head in place of q kᵀ/sqrt(d_head).
    """

    final_norm = True
    base: Annotated[int, Field(ge=1, description="depth at which nothing is scaled")] = 2
    base_width: Annotated[
        int | None, Field(ge=1, description="d_model at which nothing is scaled; null: no rule")
    ] = None
    base_d_head: Annotated[
        int | None, Field(ge=1, description="d_head at base_width; null: base_width / n_heads")
    ] = None
    power: ClassVar[float] = 0.5

    def setup(self, parts: Parts) -> None:
        self.factor = (self.depth / self.base) ** -0.5
        if self.base_width is not None:
            d_head = parts.d_model // parts.n_heads
            base = self.base_d_head or self.base_width / parts.n_heads
            if d_head != base:
                self.slots["q"] = ScaledQueries((base / d_head) ** 0.5)

    @classmethod
    def width_multiple(cls, config: Config | None) -> float:
        """Return m = d_model / base_width, or 1 without a base width."""
        if cls.base_width is None or config is None:
            return 1.0
        refuse_without_rule(config)
        return config.model.d_model / cls.base_width

    @classmethod
    def gain(cls, role: str, layer: int, depth: int, *, config: Config | None = None) -> float:
        m = cls.width_multiple(config)
        if m == 1 or config is None:
            return 1.0
        if role in MATRICES and config.model.init.distribution == "normal":
            return m**-0.5  # the other distributions have this factor already
        return m**0.5 if role == "head" and has_wide_head(config) else 1.0

    @classmethod
    def optim(cls, role: str, depth: int, *, config: Config | None = None) -> Optim:
        is_sgd = config is not None and config.train.optimizer == "sgd"
        by_depth = branch_optim(role, depth / cls.base, cls.power, is_sgd)
        m = cls.width_multiple(config)
        if m == 1 or config is None:
            return by_depth
        by_width = width_optim(role, m, config)
        return Optim(*(a * b for a, b in zip(by_depth, by_width, strict=True)))

    @classmethod
    def head_factor(cls, *, config: Config | None = None) -> float:
        m = cls.width_multiple(config)
        return 1 / m if config is not None and has_wide_head(config) else m**-0.5

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return torch.add(x, G(norm(x)), alpha=self.factor)


class CompleteP(
    DepthMuP, name="complete_p", label="CompleteP", paper="arXiv:2505.01618", static=True
):
    """x <- x + (N/base)^(-1) G(LN(x)).  Dey et al. 2025, arXiv:2505.01618.

    Learning rates are unchanged; epsilon inside the layers is multiplied by (N/base)^(-1) (Adam and
    AdamW; SGD's learning rates by N/base).  This is the rule for depth.  With `base_width` the rule
    for width is applied too, as in depth-µP: Table 1 of the paper.
    """

    power = 1.0

    def setup(self, parts: Parts) -> None:
        super().setup(parts)
        self.factor = self.base / self.depth


def branch_optim(role: str, multiple: float, power: float, is_sgd: bool) -> Optim:
    """Return the factors inside the layers: m^(a - 1) for the learning rate, m^(-a) for epsilon.

    m = N/base; outside the layers the factors are 1.  arXiv:2505.01618, Table 1, for AdamW: a = 1/2
    is depth-µP, a = 1 CompleteP.  For SGD the learning rate's power is 2 a - 1.
    """
    if role in ("embedding", "position", "head", "final_norm"):
        return Optim()
    if is_sgd:
        return Optim(lr=multiple ** (2 * power - 1))
    return Optim(lr=multiple ** (power - 1), eps=multiple**-power)


def width_optim(role: str, m: float, config: Config) -> Optim:
    """Return the factors of a role at m times the base width.

    Yang et al. 2022, arXiv:2203.03466, Table 8, and, for epsilon and decay, arXiv:2505.01618, Table
    1.  Tables here have entries N(0, 1/d_model), and the model multiplies x_0 by a number that
    grows as sqrt(d_model).  The papers have neither, so the factors of `embedding` and `position`
    are the papers' over sqrt(m) (over m under SGD).  Muon: the spectral norm of an update of a
    matrix stays the same, arXiv:2310.17813.  Rate times decay never changes.
    """
    train = config.train
    if role in ("embedding", "position"):
        lr = eps = 1.0 if train.optimizer == "sgd" else m**-0.5
    elif train.optimizer == "sgd":
        lr, eps = 1.0 if role in (*MATRICES, "head") else m, 1.0
    elif train.optimizer == "muon" and role in MATRICES:
        lr, eps = 1.0 if train.muon.adjust_lr == "original" else m**-0.5, 1.0
    else:
        lr, eps = 1 / m if role in MATRICES else 1.0, 1 / m
    return Optim(lr=lr, weight_decay=1 / lr, eps=eps)


def has_wide_head(config: Config) -> bool:
    """Return whether the head's matrix starts with a deviation that does not depend on width.

    It does for a separate head under an optimizer like Adam; the factor on its input is then 1/m.
    A tied head's matrix starts as the token table, and SGD's as one, so that the factor is
    m^(-1/2).
    """
    return config.model.head == "separate" and config.train.optimizer != "sgd"


def refuse_without_rule(config: Config) -> None:
    """Raise ConfigError for settings for which no paper gives a rule for width."""
    distribution, decay = config.model.init.distribution, config.train.weight_decay
    adds_decay = config.train.optimizer == "adam" and decay > 0
    with_adam = f"{decay:g} with adam, which adds it to the gradient; allowed: 0, or "
    for key, has_no_rule, problem in (
        ("model.head", config.model.head == "bert", "bert; allowed: tied, separate"),
        (
            "model.init.distribution",
            distribution in ("ntk", "zero_identity"),
            f"{distribution}; allowed: another",
        ),
        (
            "train.optimizer",
            config.train.optimizer not in WITH_RULE,
            f"{config.train.optimizer}; allowed: {', '.join(WITH_RULE)}",
        ),
        ("train.weight_decay", adds_decay, with_adam + "train.optimizer=adamw"),
    ):
        if has_no_rule:
            raise ConfigError(
                f"{key}: found {problem} (µP has no rule for it; model.scheme_options.base_width "
                "is set)",
                key=key,
            )
