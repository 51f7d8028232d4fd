"""‖ΔF‖ and layer statistics of a PyTorch model that deepstack did not build.

Question: How far does a step move the function of my own model?
Asked in: docs/tutorials/own_model.md
"""

from typing import TYPE_CHECKING

from deepstack.base import lazy_face

if TYPE_CHECKING:
    from deepstack.tools.probe.groups import Groups as Groups
    from deepstack.tools.probe.groups import names_by_group as names_by_group
    from deepstack.tools.probe.model import ExternalModel as ExternalModel
    from deepstack.tools.probe.model import Hidden as Hidden
    from deepstack.tools.probe.probe import Probe as Probe

FACE = {
    "groups": ("Groups", "names_by_group"),
    "model": ("ExternalModel", "Hidden"),
    "probe": ("Probe",),
}
"""Names for other folders: module of this folder -> names."""

if not TYPE_CHECKING:
    __getattr__ = lazy_face(__name__, FACE)

PUBLIC = {"probe": ("probe", "Probe")}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
