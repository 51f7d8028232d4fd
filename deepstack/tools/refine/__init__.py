"""A search for the best learning rates of every setting of a sweep.

Question: Which learning rate is best for each setting?  Asked in: docs/calibration.md
"""

from typing import TYPE_CHECKING

from deepstack.base import lazy_face

if TYPE_CHECKING:
    from deepstack.tools.refine.search import refine as refine

FACE = {"search": ("refine",)}
"""Names for other folders: module of this folder -> names."""

if not TYPE_CHECKING:
    __getattr__ = lazy_face(__name__, FACE)
