"""BibTeX entries of the sources of schemes, and of deepstack."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from deepstack import __version__
from deepstack.records import Run
from deepstack.runs import scheme_label
from deepstack.tools.answer import bibtex

DEEPSTACK = "deepstack"
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
ENTRY = re.compile(r"^@misc\{(\w+),\n(?:  .*\n)+\}", re.MULTILINE)
FILE = Path(__file__).with_name("papers.bib")


def sources_of(runs: Sequence[Run]) -> dict[str, str]:
    """Return the source of each scheme in these runs by its label: 'arXiv:2203.00555'."""
    return {
        scheme_label(run): str(run.columns.get("scheme", {}).get("paper") or "none") for run in runs
    }


@cache
def known_entries() -> dict[str, tuple[str, str]]:
    """Return the entries of papers.bib by arXiv number: key, and text."""
    text = FILE.read_text(encoding="utf-8")
    entries = {}
    for match in ENTRY.finditer(text):
        number = re.search(r"eprint = \{(.*?)\}", match[0])
        assert number, match[0]
        entries[number[1]] = (match[1], match[0])
    return entries


def entry_of(label: str, paper: str) -> tuple[str, str] | None:
    """Return key and BibTeX of a scheme's source; None if it has none.

    A source whose authors papers.bib lacks has an entry with its address alone.
    """
    if paper.startswith("none"):
        return None
    number = ARXIV.search(paper)
    if number and number[1] in known_entries():
        return known_entries()[number[1]]
    key = re.sub(r"[^a-z0-9]+", "_", f"{label} {number[1] if number else ''}".strip().lower())
    fields = {"title": f"Source of the scheme {label}"}
    if number:
        fields |= {"eprint": number[1], "archivePrefix": "arXiv"}
        fields["url"] = f"https://arxiv.org/abs/{number[1]}"
    else:
        fields["howpublished"] = paper
    fields["note"] = "Author and title are not recorded by deepstack"
    return key, bibtex.entry("misc", key, fields, whole=["title"])


def keys_of(runs: Sequence[Run]) -> dict[str, str]:
    """Return the key of the entry of each scheme with a source, by the scheme's label."""
    entries = {label: entry_of(label, paper) for label, paper in sources_of(runs).items()}
    return {label: entry[0] for label, entry in entries.items() if entry is not None}


def bibtex_of(runs: Sequence[Run]) -> str:
    """Return the entries of all schemes of these runs, each once, and deepstack's."""
    entries = {label: entry_of(label, paper) for label, paper in sources_of(runs).items()}
    texts = {entry[0]: entry[1] for entry in entries.values() if entry is not None}
    versions = {section(run.meta, "environment").get("deepstack") or __version__ for run in runs}
    commits = {str(section(run.meta, "git").get("commit") or "")[:12] for run in runs} - {""}
    fields = {
        "author": "The deepstack authors",
        "title": "deepstack: depth-scaling studies of Transformers",
        "version": ", ".join(sorted(map(str, versions))),
    }
    fields |= {"note": f"commit {', '.join(sorted(commits))}"} if commits else {}
    texts[DEEPSTACK] = bibtex.entry("software", DEEPSTACK, fields, whole=["author"])
    return "\n\n".join(texts.values())


def section(meta: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section of meta.json, empty if it is missing."""
    found = meta.get(name)
    return found if isinstance(found, dict) else {}
