"""Adds the pages of the documentation site: Markdown files of the repository and the reference.

Pages keep the paths that they have in the repository, so a link works in both places.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import ledger  # noqa: E402  (lies in this folder)
import reference  # noqa: E402  (the same)
import scheme_groups  # noqa: E402  (the same)

PAGES = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "benchmarks/*.md",
    "results/README.md",
)  # fmt: skip
EXPERIMENTS = ("experiments/*/README.md",)
PICTURES = ("docs/**/*.png", "docs/**/*.svg", "experiments/*/figures*/*.png", "benchmarks/**/*.png")
# Files of this folder, and where the site has them.
OWN = {
    "extra.css": "stylesheets/extra.css",
    "iframe_worker.js": "javascripts/iframe_worker.js",
    ledger.SCRIPT: f"javascripts/{ledger.SCRIPT}",
}
# The rank of pages in a search, where it is not 1.
RANKS = {"docs/tutorials/": 4, "docs/questions/": 4, "docs/extending/": 0.5, "reference/": 0.5}
# The front page of the site is its own; the README is the page after it.
PLACES = {"docs/index.md": "index.html", "README.md": "readme.html"}
SHIM = "https://unpkg.com/iframe-worker/shim"
BLOCK = re.compile(r'<div class="language-text highlight">.*?</pre>', re.S)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Replace the files of docs/ by all pages and pictures at their paths in the repository."""
    others = [file for file in files if file.inclusion.is_included() and _is_theme(file, config)]
    made = ledger.pages(ROOT) | reference.pages(ROOT)
    pages = [path for glob in (*PAGES, *EXPERIMENTS, *PICTURES) for path in sorted(ROOT.glob(glob))]
    for path in pages:
        name = path.relative_to(ROOT).as_posix()
        if name in made:
            continue
        file = File.generated(config, name, abs_src_path=str(path))
        file.dest_uri = PLACES.get(name, file.dest_uri)
        others.append(file)
    for name, target in OWN.items():
        path = Path(__file__).with_name(name)
        others.append(File.generated(config, target, abs_src_path=str(path)))
    for name, text in made.items():
        others.append(File.generated(config, name, content=text))
    return Files(others)


def _is_theme(file: File, config: Any) -> bool:
    """Return whether a file comes from the theme, not from docs/."""
    return not Path(file.abs_src_path or "").is_relative_to(Path(config["docs_dir"]))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Load the script for search without a server from the site itself."""
    up = "../" * page.file.dest_uri.count("/")
    return output.replace(SHIM, f"{up}{OWN['iframe_worker.js']}")


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """Do the same in the page for missing addresses, which lies at the top."""
    return output.replace(SHIM, OWN["iframe_worker.js"])


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Let keys reach tables, which scroll, and mark blocks with a rule of dashes, which do too."""
    html = html.replace("<table>", '<table tabindex="0">')
    if page.file.src_uri == scheme_groups.PAGE:  # an equation a row, in one line
        html = f'<div class="equations">{html}</div>'
    if page.file.src_uri == ledger.PAGE:
        html += f'<script src="../{OWN[ledger.SCRIPT]}"></script>'
    return BLOCK.sub(
        lambda block: (
            block[0].replace("language-text", "language-text aligned", 1)
            if "──" in block[0]
            else block[0]
        ),
        html,
    )


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to files that are not pages into their paths; set the page's rank in a search."""
    for start, boost in RANKS.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = {"boost": boost}
    if page.file.src_uri == scheme_groups.PAGE:
        markdown = scheme_groups.grouped(markdown)
    folder = (ROOT / page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        text, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        path = (folder / target).resolve()
        if not path.is_relative_to(ROOT):
            return match.group(0)
        name = path.relative_to(ROOT).as_posix()
        if name == ledger.PAGE and files.get_file_from_path(f"docs/claims/{anchor[1:]}.md"):
            return f"[{text}]({target.removesuffix('.md')}/{anchor[1:]}.md)"
        if files.get_file_from_path(name):
            return match.group(0)
        if files.get_file_from_path(f"{name}/README.md"):
            return f"[{text}]({target.rstrip('/')}/README.md{anchor})"
        return f"`{name}`" if text.strip("`") in name else f"{text} (`{name}`)"

    return LINK.sub(replace, markdown)
