"""Power laws of the loss over depth and compute, with their intervals.

Question: How does the loss fall with depth, width, compute or loops?  Asked in: docs/compute.md
"""

from deepstack.tools.laws.loops import LoopLaw as LoopLaw
from deepstack.tools.laws.loops import Size as Size
from deepstack.tools.laws.loops import fit_loops as fit_loops
