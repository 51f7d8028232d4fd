"""Adds `deepstack compare --transfer`."""

from collections.abc import Sequence
from typing import Any

from deepstack.cli import CompareTable, flag, option
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

    at: int | None = option(
        "With --transfer: also the rate of the power law at this depth, with its interval.",
        "--at",
        metavar="N",
        min=1,
    )

    def table(self, runs: Runs) -> tuple[Sequence[dict[str, Any]], Sequence[str]]:
        from deepstack.tools.transfer.table import transfer_table

        return transfer_table(runs, self.at)
