"""Measurements, analyses, charts and commands beyond the core, one folder each.

The core finds them by the names of their files (`deepstack.base.extensions`).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what the folders' PUBLIC adds to `import deepstack`, for type checkers
    from deepstack.instruments.answer.answer import answer as answer
    from deepstack.instruments.calibrate.calibrate import calibrate as calibrate
    from deepstack.instruments.calibrate.model import calibrate_model as calibrate_model
    from deepstack.instruments.conform.conform import conform as conform
    from deepstack.instruments.coordinates.check import assert_coordinates as assert_coordinates
    from deepstack.instruments.coordinates.check import coordinates as coordinates
    from deepstack.instruments.depth_use.external import analyze_model as analyze_model
    from deepstack.instruments.depth_use.runs import analyze_run as analyze  # noqa: F401
    from deepstack.instruments.probe.probe import Probe as probe  # noqa: F401
    from deepstack.instruments.report.page import report as report
    from deepstack.instruments.signal.signal import signal as signal
