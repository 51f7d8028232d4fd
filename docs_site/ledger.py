"""Divides the page of claims: on the site every entry has a page, and the table can be filtered."""

import re
from pathlib import Path

PAGE = "docs/claims.md"
SCRIPT = "filter.js"
ROW = re.compile(r"^\| \[([\w-]+)\]\(#[\w-]+\) \| (.*) \| (.*) \| .* \| (.*) \|$", re.M)
SOURCE = re.compile(r"^Source: (.+?)(?:: |, https?:)", re.M)
TABLE = "| entry | statement | reach | tier | verdict |\n| --- | --- | --- | --- | --- |\n"
COLUMNS = "| entry | statement | verdict | source | reach |\n" + "| --- " * 5 + "|\n"
FILTER = """<div class="filter" hidden markdown="0">
<label>Verdict <select data-column="2"><option value="">all</option></select></label>
<label>Source <select data-column="3"><option value="">all</option></select></label>
<label>Word <input type="search"></label>
<output></output>
</div>
"""


def pages(root: Path) -> dict[str, str]:
    """Return the text of the page of claims and of a page an entry, by their paths."""
    front, *parts = re.split(
        r"^(?=## [A-Z]+-?[A-Z0-9]+$)", (root / PAGE).read_text(encoding="utf-8"), flags=re.M
    )
    before, table = front.split(TABLE)
    entries = {part.split("\n", 1)[0].removeprefix("## "): part for part in parts}
    sources = {name: source_of(part) for name, part in entries.items()}

    def line(row: re.Match[str]) -> str:
        name, statement, reach, verdict = row.groups()
        cells = f"[{name}]({path_of(name)})", statement, verdict, sources[name], reach
        return f"| {' | '.join(cells)} |"

    table = ROW.sub(line, table)
    before = re.sub(r"\]\(#([\w-]+)\)", lambda link: f"]({path_of(link[1])})", before)
    head, rules = before.split("## Contradictions")
    made = {PAGE: f"{head}{FILTER}\n{COLUMNS}{table}\n## Contradictions{rules}"}
    for name, part in entries.items():
        text = re.sub(r"\]\(#([\w-]+)\)", r"](\1.md)", part.removeprefix("#"))
        text = text.replace("](claims/", "](")
        made[f"docs/{path_of(name)}"] = f"[All entries](../claims.md)\n\n{text}"
    return made


def path_of(name: str) -> str:
    """Return the path of an entry's page, from the folder of the page of claims."""
    return f"claims/{name.lower()}.md"


def source_of(part: str) -> str:
    """Return the authors and the year of an entry's source."""
    found = SOURCE.search(part)
    if found is None:
        raise LookupError(f"{PAGE} has an entry without a line 'Source: …': {part[:40]!r}")
    return found[1]
