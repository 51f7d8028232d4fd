"""One module opens every file for writing: deepstack/records/opened.py."""

import ast
import os
from collections.abc import Iterator

import pytest
from helpers import ROOT
from helpers.extensions import is_missing

PACKAGE = ROOT / "deepstack"
LAB = ROOT / "deepstack_lab"
OWNER = "records/opened.py"

# Attributes that write to a path, whatever they belong to.
METHODS = {
    "write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "to_csv", "to_parquet",
    "savefig", "tofile", "savez", "savez_compressed", "save_file", "NamedTemporaryFile",
    "EventFileWriter",
}  # fmt: skip
# Functions of modules that write to a path.
FUNCTIONS = {
    "os": {"open", "truncate", "link", "symlink", "mkfifo"},
    "shutil": {"copy", "copy2", "copyfile", "copymode", "copytree", "move"},
    "np": {"save", "savez"},
    "torch": {"save"},
    "io": {"open", "FileIO"},
}
MODES = set("wax+")

# (file, call) -> why it cannot write through a link of somebody else
ALLOWED = {
    ("cli/app.py", "os.open"): "/dev/null",
    ("cli/app.py", "open"): "a stream that is open",
    ("base/ending.py", "os.open"): "/dev/null",
    ("plots/files.py", "savefig"): "into memory",
    ("base/csv_text.py", "to_csv"): "into memory",
    ("plots/page.py", "savefig"): "into memory",
    ("../deepstack_lab/ledger/report.py", "savefig"): "into memory",
    ("records/file_values.py", "np.save"): "into memory",
    ("records/files.py", "FileIO"): "a descriptor of records/opened.py",
    ("records/files.py", "open"): "only reads: open_file",
    ("records/files.py", "os.open"): "only reads: open_file, sync_folder",
    ("records/lock.py", "os.open"): "only reads: holder",
    ("training/checkpoint.py", "open"): "a descriptor of records/opened.py",
    ("training/checkpoint.py", "save_file"): "into a new folder that is open",
    ("training/checkpoint.py", "shutil.copymode"): "in a new folder that is open",
    ("fast/native/cache.py", "os.open"): "only reads",
    ("fast/native/library.py", "open"): "into memory",
    ("fast/native/library.py", "write_bytes"): "in a temporary folder of this user alone",
    ("sweeps/worker.py", "open"): "in a temporary folder of this user alone",
    ("sweeps/fork_server.py", "write_text"): "in a temporary folder of this user alone",
    ("sweeps/fork_server.py", "touch"): "in a temporary folder of this user alone",
    ("integrations/ray/node.py", "write_bytes"): "in a temporary folder of this user alone",
    ("integrations/ray/launcher.py", "NamedTemporaryFile"): "a new file under a random name",
    (
        "integrations/tensorboard/events.py",
        "EventFileWriter",
    ): "a new file, random in its name",
    ("integrations/mlflow/tracker.py", "write_bytes"): "in a new folder, not known before",
}


def name_of(call: ast.Call) -> str | None:
    """Return the name of a call that may write to a path, or None."""
    function = call.func
    modes = {
        node.value
        for node in (*call.args, *(word.value for word in call.keywords if word.arg == "mode"))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    is_writing = any(len(mode) <= 3 and MODES & set(mode) for mode in modes)
    if isinstance(function, ast.Name):
        if function.id == "FileIO" or function.id in METHODS:
            return function.id
        # a mode that is not written out may be any
        is_open = function.id == "open" and (is_writing or has_variable_mode(call))
        return "open" if is_open else None
    if not isinstance(function, ast.Attribute):
        return None
    module = function.value.id if isinstance(function.value, ast.Name) else ""
    if function.attr in FUNCTIONS.get(module, ()):
        return f"{module}.{function.attr}"
    if function.attr == "open" and is_writing:
        return "open"
    return function.attr if function.attr in METHODS else None


def has_variable_mode(call: ast.Call) -> bool:
    """Return whether the mode of `open` is not a constant, or an `opener` is given."""
    given = [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "mode")]
    has_opener = any(word.arg == "opener" for word in call.keywords)
    return has_opener or any(not isinstance(node, ast.Constant) for node in given)


def writes_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of every call in a source that may write to a path."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and (name := name_of(node)):
            yield node.lineno, name


def test_no_other_module_opens_a_file_for_writing() -> None:
    wrong, used = [], set()
    for path in sorted([*PACKAGE.rglob("*.py"), *LAB.rglob("*.py")]):
        file = os.path.relpath(path, PACKAGE)
        for line, name in writes_in(path.read_text(encoding="utf-8")) if file != OWNER else ():
            used.add((file, name))
            if (file, name) not in ALLOWED:
                wrong.append(f"deepstack/{file}:{line}: {name}; use records.files.replace")
    assert wrong == []
    unused = ALLOWED.keys() - used
    assert [one for one in unused if not is_missing((PACKAGE / one[0]).resolve())] == []


@pytest.mark.parametrize(
    "text",
    [
        "open(path, 'w')", "open(path, mode='ab')", "open(path, how)", "path.open('x')",
        "path.write_text(x)", "np.save(path, x)", "figure.savefig(path)", "table.to_csv(path)",
        "os.open(path, flags)", "shutil.copyfile(a, b)", "save_file(x, path)", "torch.save(x, p)",
    ],
)  # fmt: skip
def test_a_planted_write_is_seen(text: str) -> None:
    assert list(writes_in(text))


@pytest.mark.parametrize("text", ["open(path)", "open(path, 'rb')", "Path(x).open()", "a.copy(b)"])
def test_reading_is_no_write(text: str) -> None:
    assert not list(writes_in(text))
