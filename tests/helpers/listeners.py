"""An observer that keeps the notices of a run."""

from deepstack.training import Observer


class Listens(Observer):
    """Keeps the notices."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def notify(self, line: str) -> None:
        self.lines.append(line)
