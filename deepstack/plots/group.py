"""The series and depths of one panel."""

from collections.abc import Sequence
from dataclasses import dataclass

from deepstack.records import Run
from deepstack.runs.series import Series
from deepstack.runs.settings import SCHEME


@dataclass(frozen=True)
class Group:
    """The series and depths that one panel shows; name: None for the only panel."""

    name: str | None
    series: Sequence[Series]
    depths: Sequence[int]

    @property
    def label(self) -> str:
        return self.name or self.series[0].label

    @property
    def curves(self) -> int:
        return len(self.series) * len(self.depths)

    @property
    def runs(self) -> list[Run]:
        return [run for s in self.series for n in self.depths for run in s.at(n)]


def scheme_of(series: Series) -> str:
    """Return the name of the scheme of a series."""
    return str(series.runs[0].get(SCHEME, "?"))
