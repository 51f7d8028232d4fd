"""Variance, correlation and gradients of every layer before training.

Question: Is this stack dead before it trains?  Asked in: docs/questions/dead_at_the_start.md
"""

from typing import TYPE_CHECKING

from deepstack.base import lazy_face

if TYPE_CHECKING:
    from deepstack.tools.signal.table import seed_rows as seed_rows
    from deepstack.tools.signal.table import signal_layers as signal_layers

FACE = {"table": ("seed_rows", "signal_layers")}
"""Names for other folders: module of this folder -> names."""

if not TYPE_CHECKING:
    __getattr__ = lazy_face(__name__, FACE)

PUBLIC = {"signal": ("signal", "signal")}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
