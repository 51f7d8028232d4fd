"""The pages of questions: every command prints what the page shows."""

import re
import sys
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "docs_site"))
outputs: Any = import_module("outputs")
SHOWING = [page for page in outputs.PAGES if outputs.shown_on(page)]
NUMBER = re.compile(r"[−-]?\d[\d,]*\.?\d*(?:e-?\d+)?")


def values_of(word: str) -> list[float]:
    """Return the numbers in a word; names of runs are words."""
    is_name = re.search(r"-d\d+-s\d+-", word)
    found = [] if is_name else NUMBER.findall(word)
    return [float(number.replace(",", "").replace("−", "-")) for number in found]


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow, id=page.stem) for page in SHOWING]
)
def test_the_commands_of_a_page_print_what_it_shows(page: Path) -> None:
    """Words are equal; numbers differ by rounding, which depends on the processor."""
    shown = outputs.shown_on(page)
    assert all(output for _, output in shown)
    for (command, there), (_, printed) in zip(shown, outputs.outputs_of(page), strict=True):
        for old, new in zip_longest(there.split(), printed.split(), fillvalue=""):
            if values := values_of(old):
                assert values_of(new) == pytest.approx(values, rel=0.1, abs=0.02), command
                old, new = (NUMBER.sub("0", word) for word in (old, new))
            assert set(old) == set("─") == set(new) or old == new, command


def test_every_page_of_questions_begins_with_one_and_is_listed() -> None:
    index = (ROOT / "docs/questions/index.md").read_text(encoding="utf-8")
    for page in outputs.PAGES:
        title = page.read_text(encoding="utf-8").splitlines()[0]
        if page.stem != "index":
            assert title.endswith("?") and f"[{title[2:]}]({page.name})" in index
