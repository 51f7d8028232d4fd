"""Power laws of the loss over depth and compute, with their intervals.

Question: How does the loss fall with depth, width, compute or loops?  Asked in: docs/compute.md
"""

from typing import TYPE_CHECKING

from deepstack.base import lazy_face

if TYPE_CHECKING:
    from deepstack.tools.laws.loops import Size as Size
    from deepstack.tools.laws.loops import fit_loops as fit_loops

FACE = {"loops": ("Size", "fit_loops")}
"""Names for other folders: module of this folder -> names."""

if not TYPE_CHECKING:
    __getattr__ = lazy_face(__name__, FACE)
