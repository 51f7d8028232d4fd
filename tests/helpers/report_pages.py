"""Reads the HTML pages of reports."""

from html.parser import HTMLParser
from pathlib import Path

import pytest

from deepstack.plots import CHARTS


def draw_only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let reports draw only these charts, which take most of their time."""
    from deepstack.tools.report import page

    monkeypatch.setattr(page, "FIRST", names)
    monkeypatch.setattr(page, "CHARTS", {name: CHARTS[name] for name in names})


class Page(HTMLParser):
    """The tags of a page with their attributes, the cells of its tables, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.text += "\n" if tag == "li" else ""

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data.strip()

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]
