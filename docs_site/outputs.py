"""Writes what the commands of docs/questions/*.md print below them.

python docs_site/outputs.py [PAGE …]

A block ```console has commands after `$ `, each followed by its output.  The commands of a page run
one after the other in a temporary folder that has the repository's configs, examples and
results/published, and the files that the page and the guides that it links show: blocks such as
```python title="build.py".
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs/questions").glob("*.md"))
BLOCK = re.compile(r"(?<=```console\n).*?(?=```)", re.DOTALL)
FILE = re.compile(r'```\w+ title="([\w.]+\.(?:py|yaml))"\n(.*?)```', re.DOTALL)
GUIDE = re.compile(r"\]\(\.\./([\w/]+\.md)")
PROGRESS = re.compile(r": \d+ of \d+ runs$")  # printed where a command takes half a minute
COLUMNS = "100"


def files_of(page: Path) -> dict[str, str]:
    """Return the files that a page shows, and those of the guides that it links, by name."""
    text = page.read_text(encoding="utf-8")
    guides = [ROOT / "docs" / name for name in GUIDE.findall(text)]
    texts = [text, *(path.read_text(encoding="utf-8") for path in guides)]
    return dict(match for each in reversed(texts) for match in reversed(FILE.findall(each)))


def outputs_of(page: Path) -> Iterator[tuple[str, str]]:
    """Run the commands of a page; yield each with what it prints."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "results").mkdir()
        for name in ("configs", "examples", "results/published"):
            (place / name).symlink_to(ROOT / name)
        for name, content in files_of(page).items():
            (place / name).write_text(content, encoding="utf-8")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "COLUMNS": COLUMNS, "OMP_NUM_THREADS": "1"}
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.splitlines():
                if line.startswith("$ "):
                    done = subprocess.run(
                        ["bash", "-c", line[2:]],
                        cwd=place,
                        env=environment,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                        check=True,
                    )
                    lines = done.stdout.strip("\n").splitlines()
                    yield line, "\n".join(x.rstrip() for x in lines if not PROGRESS.search(x))


def shown_on(page: Path) -> list[tuple[str, str]]:
    """Return the commands of a page with the output that it shows."""
    text = "".join(BLOCK.findall(page.read_text(encoding="utf-8")))
    parts = re.split(r"^(\$ .*)$", text, flags=re.MULTILINE)[1:]
    return [(c, o.strip("\n")) for c, o in zip(parts[::2], parts[1::2], strict=True)]


def write(page: Path) -> None:
    """Replace the outputs on a page by those of today."""
    outputs = dict(outputs_of(page))

    def renewed(block: re.Match[str]) -> str:
        commands = [line for line in block[0].splitlines() if line.startswith("$ ")]
        return "\n".join(f"{line}\n{outputs[line]}" for line in commands) + "\n"

    text = page.read_text(encoding="utf-8")
    page.write_text(BLOCK.sub(renewed, text), encoding="utf-8")


if __name__ == "__main__":
    for page in [Path(word).resolve() for word in sys.argv[1:]] or PAGES:
        write(page)
        print(page)
