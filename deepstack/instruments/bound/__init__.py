"""The theorem's bound on ‖ΔF‖, and its terms in every layer.

Question: How tight is the theorem's bound?  Asked in: experiments/bound_against_measured/README.md
"""

from typing import TYPE_CHECKING

from deepstack.base import lazy_face

if TYPE_CHECKING:
    from deepstack.instruments.bound.measure import bound as bound
    from deepstack.instruments.bound.measure import terms as terms

FACE = {"measure": ("bound", "terms")}
"""Names for other folders: module of this folder -> names."""

if not TYPE_CHECKING:
    __getattr__ = lazy_face(__name__, FACE)
