"""Commands run no code from files, open no connection and reveal no secret."""

import io
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT
from helpers.command_line import TINY, typed
from helpers.extensions import needs

import deepstack as package
from deepstack.base.errors import Interrupted
from deepstack.config import parse_config, to_yaml
from deepstack.records import find_runs

CANARY = "canary_7f3a91"
SECRETS = {
    "SECRET_TOKEN": "tok-5e884898da28047151d0e56f8dc62927",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIbPxRfiCYEXAMPLEKEY0",
    "WANDB_API_KEY": "b109f3bbbc244eb82441917ed06d618b",
    "DATABASE_URL": "postgres://someone:hunter2hunter2@db.example",
    "MAIL_OF_SOMEONE": "someone.private@mail.example",
}

# A sitecustomize.py: every Python process that has it on its path is watched from its first line
# on, the fork server of a sweep and the runs that are forked from it too.
WATCH = """
import os, sys
DATA = os.environ["WATCHED"]
CANARY = os.environ["WATCHED_WORD"]
LOG = os.open(os.environ["WATCHED_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
FORBIDDEN = ("pickle.find_class", "socket.connect", "socket.getaddrinfo", "socket.gethostbyname",
             "socket.sendto", "socket.bind", "urllib.Request", "os.system", "os.exec",
             "os.posix_spawn", "os.spawn", "pty.spawn")
CHECKED = ("marshal.loads", "import", "compile", "exec", "subprocess.Popen", "ctypes.dlopen",
           "open")
UNPICKLERS = ("/pickle.py", "/_weights_only_unpickler.py", "/torch/serialization.py")
FORK_SERVER = "from deepstack.sweeps.fork_server import serve; serve("

def say(*words):
    os.write(LOG, (" ".join(map(str, words))[:300].replace("\\n", " ") + "\\n").encode())

def is_data(path):
    path = os.fsdecode(path) if isinstance(path, bytes) else path
    return isinstance(path, str) and os.path.abspath(path).startswith(DATA)

def files_below(frame):
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back

def has_canary(code):
    return any(CANARY in one if isinstance(one, str) else hasattr(one, "co_consts")
               and has_canary(one) for one in code.co_consts)

def is_forbidden(event, args, caller):
    calling = caller.f_code.co_filename if caller else ""
    if event == "marshal.loads":
        return not calling.startswith("<frozen importlib")
    if event == "import":
        return is_data(args[1])
    if event == "compile":
        text = args[0].decode("utf-8", "replace") if isinstance(args[0], bytes) else args[0]
        # numpy parses the header of an array to a tree (ast.literal_eval), which runs nothing
        is_parsed = calling.endswith("/ast.py")
        return is_data(args[1]) or isinstance(text, str) and CANARY in text and not is_parsed
    if event == "exec":
        return is_data(args[0].co_filename) or has_canary(args[0])
    if event == "subprocess.Popen":
        words = [args[1]] if isinstance(args[1], str) else list(map(str, args[1]))
        is_git = os.path.basename(words[0]) == "git" and "-C" in words[1:4]
        is_fork_server = words[1:3] == ["-P", "-c"] and FORK_SERVER in words[3]
        # fc-list is matplotlib's, where it has no cache
        return not (is_git or is_fork_server or os.path.basename(words[0]) == "fc-list")
    return is_data(args[0]) and (
        event != "open" or any(file.endswith(UNPICKLERS) for file in files_below(caller)))

def hook(event, args):
    if event in FORBIDDEN:
        say("found", event, args[:2])
    elif event in CHECKED:  # sys._getframe has an event of its own
        caller = sys._getframe().f_back
        if is_forbidden(event, args, caller):
            say("found", event, args[:2], *files_below(caller))

sys.addaudithook(hook)
say("watching", os.getpid())
"""

COMMANDS = """
import os, sys
from deepstack.cli import app

def command(*words):
    try:
        app(list(words))
    except SystemExit as stop:
        print("exit", stop.code or 0, *words[:1])

out, config, study, *report = sys.argv[1:]
run = os.path.join(out, study, os.listdir(os.path.join(out, study))[0])
command("train", config, "--out", out)
command("sweep", config, "--depths", "1,3", "--workers", "2", "--out", out, "-q")
command("plot", "layer_step_heat_map", out)
command("ls", out, "--json")
command("compare", out)
if report:
    command("report", out)
command("export", run, "--to", out + "/../exported")
command("verify", out)
"""


class Planted:
    """Unpickled, it makes a folder, which shows that code was run."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return (os.mkdir, ("planted",))


def watched(code: str, *words: object, data: Path, log: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code in a watched process, with secrets in its environment."""
    site = log.with_suffix(".site")
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(WATCH)
    environment = os.environ | SECRETS
    environment |= {"WATCHED": str(data), "WATCHED_LOG": str(log), "WATCHED_WORD": CANARY}
    environment["PYTHONPATH"] = os.pathsep.join([str(site), str(ROOT)])
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


@pytest.mark.slow
def test_commands_unpickle_nothing_and_reveal_no_secret(tmp_path: Path) -> None:
    """Run every command on data; the report draws all charts.

    A word that is nothing else's is the study's name, in the text, and so in whatever is read.
    """
    data = tmp_path / "data"
    data.mkdir()
    (data / "text.txt").write_text(f"a text of {CANARY}, import os; " * 60)
    text = [f"task.path={data / 'text.txt'}", "train.steps=6", "log.layers_every=2"]
    config = parse_config(f"name: {CANARY}", overrides=[*TINY, *text])
    (data / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(Interrupted):
        package.train(config, study=CANARY, out=data / "out", stop=lambda: 15)
    log = data.with_suffix(".log")
    words = data / "out", data / "config.yaml", CANARY, "report"
    done = watched(COMMANDS, *words, data=data, log=log)
    output = done.stdout + done.stderr
    ended = [line.split()[1:] for line in output.splitlines() if line.startswith("exit ")]
    names = ["train", "sweep", "plot", "ls", "compare", "report", "export", "verify"]
    assert ended == [["0", name] for name in names], output
    runs = find_runs(data / "out")
    assert [run.state for run in runs] == ["done"] * 3
    assert any((run.path / "log.txt").read_text().count("steps 2 to 6") for run in runs)
    lines = log.read_text().splitlines()
    assert sum(line.startswith("watching") for line in lines) >= 2  # the fork server too
    assert [line for line in lines if not line.startswith("watching")] == []
    written = {path: path.read_bytes() for path in (data / "out").rglob("*") if path.is_file()}
    assert len(written) > 30
    assert CANARY.encode() in next(text for path, text in written.items() if path.suffix == ".yaml")
    for secret in SECRETS.values():
        assert secret not in output
        assert not any(secret.encode() in text or secret in str(p) for p, text in written.items())


PLANTS = """
import ctypes, io, marshal, os, pickle, socket, subprocess, sys
data = sys.argv[1]
def attempt(what, *words):
    try:
        what(*words)
    except Exception:
        pass
def forked(what):
    pid = os.fork()
    if pid == 0:
        attempt(what)
        os._exit(0)
    os.waitpid(pid, 0)
class Odd:
    def __reduce__(self):
        return (print, ())
attempt(pickle.loads, pickle.dumps(Odd()))
attempt(marshal.loads, marshal.dumps(compile("1", "x", "eval")))
attempt(lambda: exec(open(data + "/code.py").read()))
attempt(lambda: exec(compile("1", data + "/code.py", "exec")))
attempt(ctypes.CDLL, data + "/code.py")
attempt(subprocess.run, ["true"])
attempt(os.system, "true")
attempt(socket.create_connection, ("127.0.0.1", 9), 1)
forked(lambda: socket.socket().connect(("127.0.0.2", 9)))
sys.path.insert(0, data)
attempt(__import__, "code_7f3a91")
import torch
torch.save({"x": 1}, io.BytesIO())
attempt(torch.load, data + "/weights.pt")
attempt(lambda: torch.load(data + "/weights.pt", weights_only=False))
"""


@pytest.mark.slow
def test_the_watch_sees_what_is_planted(tmp_path: Path) -> None:
    """Each thing forbidden, done on purpose: in the process, in a fork of it, by torch.load."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "code.py").write_text(f"x = '{CANARY}'")
    (data / "code_7f3a91.py").write_text("x = 1")
    torch.save({"x": torch.ones(3)}, data / "weights.pt")
    log = tmp_path / "log"
    done = watched(PLANTS, data, data=data, log=log)
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    events = {line.split()[1] for line in lines if "found" in line}
    assert {
        "pickle.find_class", "marshal.loads", "compile", "exec", "ctypes.dlopen", "os.system",
        "subprocess.Popen", "socket.connect", "open",
    } <= events  # fmt: skip
    assert any("127.0.0.2" in line for line in lines)  # in a fork
    assert sum("serialization.py" in line for line in lines) >= 2  # both kinds of torch.load
    assert any("code_7f3a91.py" in line for line in lines)  # an import from the data


@needs("report")
def test_an_array_of_objects_is_not_unpickled(run: Path, here: Path) -> None:
    array = run / "layers" / "grad_norm.npy"
    objects = io.BytesIO()
    np.save(objects, np.array([Planted()], dtype=object), allow_pickle=True)
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "-" * 5000 + "1, 2), }\n"
    deep = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    for content in (objects.getvalue(), pickle.dumps(3), deep):
        array.write_bytes(content)
        for words in (["plot", "layer_step_heat_map", "--diagnostic", "grad_norm"], ["report"]):
            result = typed(*words, run)
            assert result.exit_code == 5 and "grad_norm.npy: is not an array" in result.stderr
    assert not (here / "planted").exists()
    assert typed("compare", run).exit_code == 0  # reads no layers


UNSAFE = re.compile(
    r"^\s*(import|from) (c?[pP]ickle|dill|cloudpickle|shelve|marshal|joblib|code)\b"
    r"|\btorch\.(load|jit\.load|hub\.load|package)\b|\bread_pickle\b|\ballow_pickle=True"
    r"|(?<![\w.])(eval|exec|compile|__import__)\(|\bos\.(system|popen)\(|\bshell=True"
    r"|\byaml\.(load|unsafe_load|full_load|load_all|Loader|UnsafeLoader|FullLoader)\b"
)
"""A line of Python that could run code from a file."""


def test_no_source_could_run_what_it_reads() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), line.strip())
        for path in ROOT.glob("deepstack*/**/*.py")
        for line in path.read_text().splitlines()
        if UNSAFE.search(line)
    }
    # only files that the command line names are run: by --plugin, `conform` and `coordinates`
    run_it = 'exec(compile(content, str(path), "exec"), module.__dict__)'
    runners = ("deepstack/base/plugins.py", "deepstack/model/user_code.py")
    assert found == {(file, run_it) for file in runners if (ROOT / file).exists()}
