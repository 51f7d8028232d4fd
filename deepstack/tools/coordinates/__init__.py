"""The coordinate check: sizes of outputs and of their changes over width and depth.

Question: Which module of my model breaks µP, CompleteP or depth-µP first?
Asked in: docs/coordinates.md
"""

from typing import TYPE_CHECKING

from deepstack.base import lazy_face

if TYPE_CHECKING:
    from deepstack.tools.coordinates.chart import LINE_STYLES as LINE_STYLES
    from deepstack.tools.coordinates.exponent_fits import exponents as exponents
    from deepstack.tools.coordinates.result import CoordinateCheck as CoordinateCheck

FACE = {"chart": ("LINE_STYLES",), "exponent_fits": ("exponents",), "result": ("CoordinateCheck",)}
"""Names for other folders: module of this folder -> names."""

if not TYPE_CHECKING:
    __getattr__ = lazy_face(__name__, FACE)

PUBLIC = {
    "assert_coordinates": ("check", "assert_coordinates"),
    "coordinates": ("check", "coordinates"),
}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
