"""The documentation site shows whole equations: rendered Markdown has the registry's text."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser

import pytest
from helpers import ROOT

from deepstack.schemes import SCHEMES

sys.path.insert(0, str(ROOT / "docs_site"))
from scheme_groups import grouped


class Cells(HTMLParser):
    """Collects the text of the cells of every row of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.is_open = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.is_open = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.is_open = False

    def handle_data(self, data: str) -> None:
        if self.is_open:
            self.rows[-1][-1] += data


@pytest.mark.slow  # among the tests that have the packages of the site
def test_every_equation_appears_whole_on_the_page_of_schemes() -> None:
    markdown = pytest.importorskip("markdown")
    cells = Cells()
    text = (ROOT / "docs/schemes.md").read_text(encoding="utf-8")
    cells.feed(markdown.markdown(text, extensions=["tables"]))
    shown = {row[0]: row[1] for row in cells.rows if len(row) == 6}
    for name in SCHEMES:
        assert shown[name] == SCHEMES[name].equation.replace("`", "")  # set as code


def test_the_site_has_every_scheme_once_below_a_heading_of_its_module() -> None:
    text = (ROOT / "docs/schemes.md").read_text(encoding="utf-8")
    groups = re.findall(
        r"^## (.+)\n\n.+\n\n\| name .+\n\| --- .+\n((?:\| .+\n)+)", grouped(text), re.M
    )
    names = [[row.split()[1] for row in rows.splitlines()] for _, rows in groups]
    assert sorted(name for group in names for name in group) == sorted(SCHEMES)
    assert len({title for title, _ in groups}) == len(names) > 5
    (family,) = (group for group in names if "deepnorm" in group)
    assert "deepnorm_adam" in family and "pre_ln" not in family
