"""The part of ‖ΔF‖ that comes from one role or one range of layers.

Question: Which roles and layers move the function?
Asked in: experiments/where_the_update_comes_from/README.md
"""

from typing import TYPE_CHECKING

from deepstack.base import lazy_face

if TYPE_CHECKING:
    from deepstack.instruments.attribution.chart import ROLE_COLOURS as ROLE_COLOURS

FACE = {"chart": ("ROLE_COLOURS",)}
"""Names for other folders: module of this folder -> names."""

if not TYPE_CHECKING:
    __getattr__ = lazy_face(__name__, FACE)
