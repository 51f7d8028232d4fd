"""Dated sets of checks: the numbers of a comparison that stay as they are, for tests and badges."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepstack.base import ConfigError, unknown

CHECKS = ("forward", "gradients", "start", "update")
TOLERANCE = 1e-9


@dataclass(frozen=True)
class CheckSet:
    """The comparisons of a block with a scheme.

    name: the month from which on it stays unchanged; '' for the present one with other numbers.
    schemes: the schemes with which it compares, () for all.
    checks: some of CHECKS, in any order.
    depths: of the stacks.
    tolerance: largest relative difference of F and of gradients, in double precision.
    update_tolerance: of the first step of SGD and Adam.
    """

    name: str = ""
    schemes: tuple[str, ...] = ()
    checks: tuple[str, ...] = CHECKS
    depths: tuple[int, ...] = (2, 7, 20)
    tolerance: float = TOLERANCE
    update_tolerance: float = 1e-6

    @property
    def title(self) -> str:
        """The name in texts: 'schemes 2026-12', or ''."""
        return f"schemes {self.name}" if self.name else ""


OF_2026_12 = """
admin attn_res b2t branch_norm complete_p deep_delta deep_scale_lm deepnorm deepnorm_adam
deepnorm_power deepnorm_rates deepnorm_runtime_beta deepnorm_tight dense_former depth_mup dlcl
ds_init fixup frac_connections gpas hybrid_norm hyper_connections keel laurel layer_scale ln_scaling
looped mhc mix_ln mudd mv_split ngpt norm_former orthogonal_update parallel parcae peri_ln post_ln
post_ln_init pre_ln pre_ln_scaled pro_res real_former res_former res_post_norm residual rezero
sandwich_ln siamese_norm skip_init sub_ln t_fixup x0_lambdas
"""
SETS = {one.name: one for one in (CheckSet("2026-12", tuple(OF_2026_12.split())),)}
"""The dated sets by name.  A later set is another entry: these are never changed."""


def set_of(
    name: str | None, scheme: str, checks: Sequence[str] = CHECKS, tolerance: float = TOLERANCE
) -> CheckSet:
    """Return the set of this name, or without one the present numbers with these checks.

    Raises ConfigError for an unknown set, a scheme that it lacks, and for other checks or another
    tolerance beside a set, which states its own.
    """
    if not 0 < tolerance < 1:
        raise ConfigError(f"tolerance: found {tolerance:g}; allowed a number above 0 and below 1")
    for one in checks:
        if one not in CHECKS:
            raise ConfigError(f"checks: {unknown('check', one, CHECKS)}")
    if name is None:
        return replace(CheckSet(), checks=tuple(checks), tolerance=tolerance)
    if name not in SETS:
        raise ConfigError(f"set: {unknown('set', name, SETS)}")
    chosen = SETS[name]
    if set(checks) != set(CHECKS) or tolerance != TOLERANCE:
        raise ConfigError(
            f"set {name} states its own checks and tolerance; leave out --checks and --tolerance, "
            "or leave out --set"
        )
    if scheme not in chosen.schemes:
        raise ConfigError(
            f"set {name} lacks the scheme {scheme!r}, which is newer; leave out --set"
        )
    return chosen


def badge_of(report: Any) -> dict[str, Any]:
    """Return the content of a badge in the endpoint format of shields.io.

    report: of a comparison with a dated set.
    """
    difference = report.difference
    result = report.count_text if difference is None else f"{difference.check} differs"
    return {
        "schemaVersion": 1,
        "label": f"deepstack {report.numbers.title}",
        "message": f"{report.label}: {result}",
        "color": "brightgreen" if difference is None else "red",
    }
