"""Adds `deepstack compare --coordinates`."""

from collections.abc import Sequence
from typing import Any

from deepstack.cli import CompareTable, flag
from deepstack.runs import Runs


class CoordinateTable(CompareTable):
    """Exponents in width and depth of the stream's size and of its change."""

    place = 2
    problem = "no study has runs of two widths or depths with records of every layer"
    answer = ("quantity", "layer", "verdict")

    coordinates: bool = flag(
        "Print the exponents in width and in depth of the stream's size and of its change "
        "at the last record, by layer, with 95 % intervals and a verdict.",
        "--coordinates",
    )

    def table(self, runs: Runs) -> tuple[Sequence[dict[str, Any]], Sequence[str]]:
        from deepstack.tools.coordinates.table import coordinate_table

        return coordinate_table(runs), []
