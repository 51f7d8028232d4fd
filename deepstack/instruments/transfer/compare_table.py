"""Adds `deepstack compare --transfer`."""

from collections.abc import Sequence
from typing import Any

from deepstack.cli.added_options import CompareTable
from deepstack.cli.options import flag
from deepstack.runs import Runs


class TransferTable(CompareTable):
    """The best learning rate at each depth, with its exponent and its cost."""

    place = 1
    answer = ("depth", "best_lr", "exponent", "exponent_low", "exponent_high")
    problem = "no study has finished runs of two learning rates"

    transfer: bool = flag(
        "Print the best learning rate at each depth, its exponent in N, and the loss "
        "that the smallest depth's rate costs, with 95 % intervals over three seeds or more.",
        "--transfer",
    )

    def table(self, runs: Runs) -> tuple[Sequence[dict[str, Any]], Sequence[str]]:
        from deepstack.instruments.transfer.table import transfer_table

        return transfer_table(runs)
