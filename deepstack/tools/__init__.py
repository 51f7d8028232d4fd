"""Commands and functions on runs and on models of others, one folder each.

The core finds them by the names of their files (`deepstack.base.extensions`).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what the folders' PUBLIC adds to `import deepstack`, for type checkers
    from deepstack.tools.answer.answer import answer as answer
    from deepstack.tools.calibrate.calibrate import calibrate as calibrate
    from deepstack.tools.calibrate.model import calibrate_model as calibrate_model
    from deepstack.tools.conform.conform import conform as conform
    from deepstack.tools.coordinates.check import assert_coordinates as assert_coordinates
    from deepstack.tools.coordinates.check import coordinates as coordinates
    from deepstack.tools.depth_use.external import analyze_model as analyze_model
    from deepstack.tools.depth_use.runs import analyze_run as analyze  # noqa: F401
    from deepstack.tools.probe.probe import Probe as probe  # noqa: F401
    from deepstack.tools.report.page import report as report
    from deepstack.tools.signal.signal import signal as signal
