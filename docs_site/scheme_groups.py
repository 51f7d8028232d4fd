"""Divides the table of schemes on the site by the modules that define them."""

import re
import sys
from collections import defaultdict

from deepstack.schemes import SCHEMES

PAGE = "docs/schemes.md"
TABLE = re.compile(r"^\| name \|.*\n\| --- .*\n((?:\| \w+ \|.*\n)+)", re.M)


def grouped(markdown: str) -> str:
    """Return the text of the page of schemes with a heading and a table for each module.

    The heading and the line below it are the first sentence of the module.  The largest is first.
    """
    found = TABLE.search(markdown)
    if found is None:
        raise LookupError(f"{PAGE} has no table of schemes")
    head = found[0].removesuffix(found[1])
    groups: dict[str, list[str]] = defaultdict(list)
    for row in found[1].splitlines():
        groups[SCHEMES[row.split()[1]].__module__].append(row)
    parts = []
    for module, rows in sorted(groups.items(), key=lambda group: -len(group[1])):
        line = (sys.modules[module].__doc__ or module).split("\n")[0]
        title = re.split(r"[,:.]", line)[0]
        parts.append(f"## {title}\n\n{line}\n\n{head}" + "\n".join(rows) + "\n")
    before, after = markdown[: found.start()], markdown[found.end() :]
    return before + "\n".join(parts) + "\n## Starts, norms and options\n" + after
