"""Draws docs/figures/terminal.svg: what `deepstack train configs/quick.yaml` shows, of a real run.

python docs_site/terminal.py [--to FILE] [key=value …]

The run is trained in a temporary folder.  The picture has the screen at three fifths of the steps,
with the bar, and the lines that follow it.
"""

import argparse
import io
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.terminal_theme import TerminalTheme

from deepstack import load_config, train
from deepstack.cli.finding import next_command, run_finding
from deepstack.cli.views import TerminalView, run_view
from deepstack.training import PlainLines

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs/figures/terminal.svg"
COMMAND = ["train", "configs/quick.yaml"]
WIDTH = 104
COLOURS = [(40, 42, 54), (220, 80, 80), (95, 180, 110), (215, 175, 80), (100, 150, 230),
           (180, 120, 210), (90, 185, 190), (220, 220, 220)]  # fmt: skip
THEME = TerminalTheme((30, 31, 38), (222, 224, 230), COLOURS, COLOURS)
# rich's own format fetches a font from the network.
FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
 aria-label="deepstack train configs/quick.yaml in a terminal">
<style>.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace;
 font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width }}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
<rect fill="#1e1f26" width="{width}" height="{height}" rx="8"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


class RecordedLines(PlainLines):
    """Prints the lines of a run on a console that records them, and its bar once."""

    def __init__(self, screen: Console, view: TerminalView) -> None:
        super().__init__(0.0, view)
        self.screen = screen

    def line(self, text: str) -> None:
        self.screen.print(text, highlight=False)

    def stepped(self, step: int, row: Any) -> None:
        super().stepped(step, row)
        assert self.run is not None
        if step == max(1, self.run.steps * 3 // 5):
            self.screen.print(self.view.bar)  # type: ignore[attr-defined]
            self.screen.print(Rule("a few seconds later", style="dim", characters="·"))


def screen_of(overrides: list[str]) -> Console:
    """Return a console that has recorded what the command shows."""
    screen = Console(
        record=True, width=WIDTH, force_terminal=True, color_system="truecolor", file=io.StringIO()
    )
    screen.print(f"[bold green]$[/] deepstack {' '.join(COMMAND)}")
    config = load_config(ROOT / COMMAND[1], overrides)
    here = Path.cwd()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            view = run_view(Console(width=WIDTH, file=io.StringIO(), force_terminal=True))
            run = train(config, study="quick", observer=RecordedLines(screen, view))
            screen.print(run.path, highlight=False)
            screen.print(run_finding(run), highlight=False)
            screen.print(f"next: {next_command(run, COMMAND)}\n", highlight=False)
        finally:
            os.chdir(here)
    return screen


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--to", type=Path, default=FILE)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    screen = screen_of(arguments.overrides)
    text = screen.export_svg(theme=THEME, code_format=FORMAT, unique_id="terminal")
    arguments.to.write_text(text, encoding="utf-8")
    print(arguments.to)


if __name__ == "__main__":
    main()
