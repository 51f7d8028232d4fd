"""The roles of parameters: one word for each kind."""

from typing import Literal, get_args

Role = Literal[
    "q", "k", "v", "o", "w1", "w2", "w3", "cross_q", "cross_k", "cross_v", "cross_o", "bias",
    "norm_gain", "norm_bias", "final_norm", "scheme", "embedding", "position", "head",
]  # fmt: skip
ROLES: tuple[str, ...] = get_args(Role)
MATRICES = ROLES[: ROLES.index("bias")]  # of the layers


def in_order(roles: tuple[str, ...]) -> tuple[str, ...]:
    """Return each role once, in the order of ROLES: one experiment has one spelling."""
    return tuple(role for role in ROLES if role in roles)
