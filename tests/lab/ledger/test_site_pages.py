"""On the documentation site every claim has a page, and the page of claims a row for each."""

import re
import sys

from helpers import ROOT

from deepstack_lab.ledger.claims import CLAIMS

sys.path.insert(0, str(ROOT / "docs_site"))
from ledger import PAGE, pages


def test_every_claim_has_a_page_with_its_statement_and_its_source_in_the_table() -> None:
    made = pages(ROOT)
    table = made.pop(PAGE).split("\n## ")[0]
    rows = re.findall(r"^\| \[(\S+)\]\((\S+)\) \| `.+` \| (.+) \| (.+) \| .+ \|$", table, re.M)
    assert {name for name, *_ in rows} == set(CLAIMS) and len(made) == len(CLAIMS)
    for name, path, verdict, source in rows:
        page = made[f"docs/{path}"]
        assert f"# {name}\n" in page and f": **{verdict}**." in page
        assert f"Source: {source}" in page
        assert source in (CLAIMS[name].source.authors, CLAIMS[name].source.title)


def test_pages_link_to_pages_and_pictures_that_are_there() -> None:
    made = pages(ROOT)
    for path, text in made.items():
        folder = (ROOT / path).parent
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            if "://" not in target:
                place = (folder / target).resolve().relative_to(ROOT).as_posix()
                assert place in made or (ROOT / place).is_file(), (path, target)
