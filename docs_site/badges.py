"""Draws the badges of the README, docs/figures/badge_*.svg, from what this version contains.

python docs_site/badges.py
"""

import re
import tomllib
from pathlib import Path

from deepstack.cli.listing import names_of

ROOT = Path(__file__).resolve().parents[1]
BADGE = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img"
 aria-label="{label}: {value}">
<rect width="{width}" height="20" rx="3" fill="#3b5b92"/>
<rect width="{left}" height="20" rx="3" fill="#555"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="6" y="14">{label}</text><text x="{at}" y="14">{value}</text></g>
</svg>
"""


def badges() -> dict[Path, str]:
    """Return the text of each badge by its file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    shown = {
        "python": ("Python", f"{pythons[0]} to {pythons[-1]}"),
        "license": ("license", project["license"]),
        "schemes": ("residual schemes", str(len(names_of("schemes")))),
    }
    return {ROOT / f"docs/figures/badge_{name}.svg": draw(*both) for name, both in shown.items()}


def draw(label: str, value: str) -> str:
    """Return a badge: the label on grey, the value on blue."""
    left, right = 12 + 7 * len(label), 12 + 7 * len(value)
    return BADGE.format(label=label, value=value, left=left, at=left + 6, width=left + right)


if __name__ == "__main__":
    for path, text in badges().items():
        path.write_text(text, encoding="utf-8")
        print(path)
