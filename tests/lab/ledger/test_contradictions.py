"""docs/contradictions.md has the verdicts of docs/claims.md, and every contradiction of it."""

import re
from collections import Counter

from helpers import ROOT

from deepstack_lab.ledger.claims import CLAIMS, all_claims

DOCS = ROOT / "docs"
TEXT = (DOCS / "contradictions.md").read_text(encoding="utf-8")
PAGE = (DOCS / "claims.md").read_text(encoding="utf-8")
VERDICTS = dict(re.findall(r"^\| \[([\w-]+)\]\(#\S+\) \| .* \| ([a-z ]+) \|$", PAGE, re.M))
STATED = re.findall(r"\[([\w-]+)\]\(claims\.md#([\w-]+)\): ([a-z ]+)", TEXT)


def test_its_verdicts_are_those_of_the_page() -> None:
    assert set(VERDICTS) == {entry.id for entry in all_claims()}
    assert len(STATED) > 20
    for name, anchor, verdict in STATED:
        assert name in CLAIMS and anchor == name.lower(), name
        assert verdict.strip() == VERDICTS[name], name


def test_it_names_every_contradiction() -> None:
    named = {name for name, *_ in STATED}
    opposed = {entry.id for entry in all_claims() if entry.opposes}
    assert opposed <= named
    contradicted = "disagrees", "not seen at this size"
    assert {name for name, verdict in VERDICTS.items() if verdict in contradicted} <= named


def test_its_counts_are_those_of_the_page() -> None:
    (count,) = re.findall(r"^(\d+) entries\.", PAGE, re.M)
    assert f"{count} entries" in TEXT and int(count) == len(VERDICTS)
    counted = Counter(VERDICTS.values())
    (line,) = re.findall(r"^\d+ entries\.  (.*)\.$", PAGE, re.M)
    parts = (part.rpartition(": ") for part in line.lower().split(", "))
    assert {verdict: int(number) for verdict, _, number in parts} == counted
    stated = re.findall(r"^\| ([a-z ]+) \| (\d+) \|", TEXT, re.M)
    assert {verdict: int(number) for verdict, number in stated} == counted


def test_its_sources_have_authors_and_titles() -> None:
    assert "Document 0" not in TEXT and "Document 0" not in PAGE
    for entry in all_claims():
        assert f"Source: {entry.source.name}" in PAGE, entry.id
        assert entry.source.authors or entry.id == "DB-1", entry.id
