"""Whether the best learning rate stays the same over depth or width.

Question: Does the best learning rate move with depth?  Asked in: docs/questions/rate_with_depth.md
"""

from typing import TYPE_CHECKING

from deepstack.base import lazy_face

if TYPE_CHECKING:
    from deepstack.tools.transfer.chart import typeset_law as typeset_law
    from deepstack.tools.transfer.table import PUBLISHED_LAWS as PUBLISHED_LAWS
    from deepstack.tools.transfer.table import Losses as Losses
    from deepstack.tools.transfer.table import Transfer as Transfer
    from deepstack.tools.transfer.table import can_refine as can_refine
    from deepstack.tools.transfer.table import final_losses as final_losses
    from deepstack.tools.transfer.table import losses_of as losses_of
    from deepstack.tools.transfer.table import transfer as transfer
    from deepstack.tools.transfer.table import transfer_table as transfer_table

FACE = {
    "chart": ("typeset_law",),
    "table": (
        "PUBLISHED_LAWS",
        "Losses",
        "Transfer",
        "can_refine",
        "final_losses",
        "losses_of",
        "transfer",
        "transfer_table",
    ),
}
"""Names for other folders: module of this folder -> names."""

if not TYPE_CHECKING:
    __getattr__ = lazy_face(__name__, FACE)
