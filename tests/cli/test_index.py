"""The index equals the registries, and is not used where the source differs from it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers import ROOT

from deepstack.base.extensions import HOMES
from deepstack.cli import index, make_index
from deepstack.cli.index import Entry, Index
from deepstack.cli.listing import short_table


def test_make_fix_has_made_the_index() -> None:
    index.stored.cache_clear()
    stored, made = index.stored(), make_index.fresh()
    if all((ROOT / folder).is_dir() for folder in stored.folders):
        assert index.FILE.read_text(encoding="utf-8") == make_index.text_of(made), "run: make fix"
    entries = [one for one in stored.entries if index.exists(one.file)]
    assert entries == [Entry(*one) for one in json.loads(json.dumps(made.entries))]
    assert made.folders.items() <= stored.folders.items()
    assert made.files.items() <= stored.files.items()


def test_the_index_has_one_entry_a_line() -> None:
    lines = index.FILE.read_text(encoding="utf-8").splitlines()
    starts = [line for line in lines if line.startswith('["schemes", ')]
    assert [json.loads(line.rstrip(","))[2] for line in starts] == short_table("schemes")


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"folders": {}, "files": {}}', None])
def test_a_damaged_index_is_not_used(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(index, "FILE", path)
    monkeypatch.setattr(index, "stored", index.stored.__wrapped__)
    assert index.stored() == Index({}, {}, []) and not index.is_fresh.__wrapped__()
    assert not index.is_unchanged("deepstack/cli/list_command.py")


# Each place is tried by a new process.  It prints, as JSON, what these tests compare.
PROGRAM = """
import json, os, sys
place = sys.argv[1]
os.chdir(place)
sys.path.insert(0, place)
from deepstack.base.extensions import PACKAGE
from deepstack.cli import index
from deepstack.cli.commands import find_commands
from deepstack.cli.listing import listings, short_table

assert str(PACKAGE).startswith(place), PACKAGE
commands = {name: one.summary for name, one in find_commands().items()}
light = "torch" not in sys.modules
kinds = ["schemes", "charts", "diagnostics", "schedules"]
rows = {kind: {row["name"]: row for row in short_table(kind)} for kind in kinds}
found = dict(rows, commands=commands, light=light, kinds=list(listings()))
print(json.dumps(found | {"fresh": index.is_fresh(), "torch": "torch" in sys.modules}))
"""


def linked(place: Path, written: Mapping[str, str], deleted: str = "") -> Path:
    """Make a folder with the package by links, some files with another text, one folder deleted."""
    folders = {"deepstack", *HOMES}
    for name in written:
        folders |= {parent.as_posix() for parent in Path(name).parents} - {"."}
    for folder in sorted(folders):
        (place / folder).mkdir(parents=True, exist_ok=True)
        for child in (ROOT / folder).iterdir() if (ROOT / folder).is_dir() else ():
            name = child.relative_to(ROOT).as_posix()
            if name not in {*folders, *written, deleted} and child.name != "__pycache__":
                (place / name).symlink_to(child)
    for name, text in written.items():
        (place / name).write_text(text, encoding="utf-8")
    return place


def found_in(place: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Return the entries that a process finds in a folder with the package."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", PROGRAM, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, dict[str, str]]] = json.loads(done.stdout)
    return found


def source(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_a_deleted_folder_takes_its_entries_with_it(tmp_path: Path) -> None:
    folder = "deepstack/tools/depth_use"
    if not (ROOT / folder).is_dir():
        pytest.skip("the folder is deleted already")
    whole, rest = found_in(linked(tmp_path / "a", {})), found_in(linked(tmp_path / "b", {}, folder))
    gone = set(whole["charts"]) - set(rest["charts"])
    assert gone and set(rest["charts"]) < set(whole["charts"])
    assert {"analyze"} == set(whole["commands"]) - set(rest["commands"])
    assert "analyses" in whole["kinds"] and "analyses" not in rest["kinds"]
    assert whole["fresh"] and rest["fresh"] and not rest["torch"]


SCHEME = '''
class Added(Scheme, name="added", label="Added", paper="none"):
    """x <- x + G(x) + 0."""

    def residual(self, x, G, norm):
        return x + G(x)
'''
NEW_COMMAND = '''
from deepstack.cli.commands import command

@command("Tools", "deepstack wave")
def wave_command() -> None:
    """Wave a hand."""
'''


@pytest.mark.slow(turn=26)
def test_new_and_changed_files_are_listed_at_once(tmp_path: Path) -> None:
    """A changed docstring, a scheme in a new file, a new command, a new folder with a chart."""
    plots, verify = "deepstack/plots/update.py", "deepstack/cli/verify_command.py"
    chart = '''
from deepstack.plots import Chart, chart


@chart("blank")
def blank(runs, *, options):
    """Nothing at all."""
    raise NotImplementedError
'''
    first = {row["name"]: row["description"] for row in short_table("charts")}["update_vs_depth"]
    summary = source(verify).split('"""')[3].split("\n")[0]
    assert first in source(plots) and summary in source(verify)
    changes = {
        plots: source(plots).replace(first, "Another sentence."),
        verify: source(verify).replace(summary, "Another summary."),
        "deepstack/cli/wave_command.py": NEW_COMMAND,
        "deepstack/schemes/added.py": f"from deepstack.schemes.scheme import Scheme\n\n{SCHEME}",
        "deepstack/tools/blank/__init__.py": "",
        "deepstack/tools/blank/chart.py": chart,
    }
    found = found_in(linked(tmp_path, changes))
    assert not found["fresh"] and found["light"]  # commands alone need no torch
    assert found["charts"]["update_vs_depth"]["description"] == "Another sentence."
    assert found["charts"]["blank"]["description"] == "Nothing at all."
    assert found["schemes"]["added"]["equation"] == "x <- x + G(x) + 0"
    assert found["commands"]["wave"] == "Wave a hand."
    assert found["commands"]["verify"].startswith("Another summary.")


SETTINGS = '''
from deepstack.config import Section, log_settings


@log_settings(place=99)
class FlavourSettings(Section):
    flavour: str = "plain"
    """The flavour of the records."""
    flavour_options: dict[str, float] = {}
    """Options of the flavour."""
'''
MEASURE = '''
from typing import ClassVar

from deepstack.base.kinds import Definition, Kind
from deepstack.diagnostics import Instrument

FLAVOURS = Kind("flavour", "log.flavour")
HALF = 1 / 2


class Flavour(Definition, kind=FLAVOURS):
    """A flavour."""


class Plain(Flavour, name="plain"):
    """No flavour."""


class Vanilla(Flavour, name="vanilla"):
    __doc__ = f"Flavour {HALF}."
    share: float = HALF


class Taste(Instrument, name="taste"):
    """Measures nothing."""

    columns = {"sweetness": ("s", "", "Sweetness of the stream.")}

    def measure(self, state):
        return {"sweetness": 0.0}
'''
WORDS = """
import sys
place = sys.argv[1]
sys.path.insert(0, place)
from deepstack.cli import app
from deepstack.cli.completion import values_of

for words in (
    ["list", "flavours"], ["list", "flavours", "--json"], ["list", "settings", "log"],
    ["list", "diagnostics"], ["init", "--schema"], ["check", "quick", "log.flavour=vanila"],
):
    print("$", *words)
    try:
        app(words)
    except SystemExit as end:
        print("exit", end.code)
print("$ values", *values_of("log.flavour"))
"""


@pytest.mark.slow
def test_a_kind_of_definitions_and_an_instrument_need_no_line_elsewhere(tmp_path: Path) -> None:
    """A folder defines a kind, and an instrument without columns in settings.py."""
    folder = "deepstack/instruments/flavours"
    files = {"__init__": "", "settings": SETTINGS, "measure": MEASURE}
    place = linked(tmp_path, {f"{folder}/{name}.py": text for name, text in files.items()})
    command = [sys.executable, "-c", WORDS, str(place)]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    parts = dict(part.split("\n", 1) for part in done.stdout.split("$ ") if part)
    for table in ("list flavours", "list flavours --json"):
        assert all(word in parts[table] for word in ("vanilla", "Flavour 0.5", "share", "plain"))
    (setting,) = (
        line for line in parts["list settings log"].splitlines() if "log.flavour " in line
    )
    assert "plain, vanilla" in setting
    assert "Sweetness of the stream." in parts["list diagnostics"]
    schema = json.loads(parts["init --schema"].rpartition("exit")[0])
    assert schema["$defs"]["Log"]["properties"]["flavour"]["examples"] == ["plain", "vanilla"]
    assert "did you mean 'vanilla'?" in done.stderr
    assert list(parts)[-1] == "values plain vanilla"


@pytest.mark.parametrize(
    "changes",
    [
        {"deepstack/schemes/added.py": ""},
        {"deepstack/schemes/pre_norm.py": source("deepstack/schemes/pre_norm.py") + "\n"},
        {"deepstack/schemes/scheme.py": source("deepstack/schemes/scheme.py") + "\n"},
        {"deepstack/cli/listed.py": source("deepstack/cli/listed.py") + "\n"},
        {"deepstack/tools/new/__init__.py": ""},
    ],
    ids=["new file", "file with entries", "base class", "row function", "new folder"],
)
def test_the_index_is_stale_after_a_change(
    changes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("exists", "is_fresh"):
        monkeypatch.setattr(index, name, getattr(index, name).__wrapped__)
    monkeypatch.setattr(index, "ROOT", linked(tmp_path / "same", {}))
    assert index.is_fresh()
    monkeypatch.setattr(index, "ROOT", linked(tmp_path / "changed", changes))
    assert not index.is_fresh()
