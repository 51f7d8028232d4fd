"""Measures the contribution of each layer of a trained model.

Question: Which layers does a trained model use?  Asked in: docs/questions/which_layers.md
"""

from typing import TYPE_CHECKING

from deepstack.base import lazy_face

if TYPE_CHECKING:
    from deepstack.tools.depth_use.external import analyze_model as analyze_model
    from deepstack.tools.depth_use.runs import HELD_OUT as HELD_OUT
    from deepstack.tools.depth_use.runs import TRAINING as TRAINING
    from deepstack.tools.depth_use.runs import analyze_run as analyze_run
    from deepstack.tools.depth_use.runs import draw as draw

FACE = {"external": ("analyze_model",), "runs": ("HELD_OUT", "TRAINING", "analyze_run", "draw")}
"""Names for other folders: module of this folder -> names."""

if not TYPE_CHECKING:
    __getattr__ = lazy_face(__name__, FACE)

PUBLIC = {
    "analyze": ("runs", "analyze_run"),
    "analyze_model": ("external", "analyze_model"),
}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
