"""Commands that follow runs: bars, the table of `watch` and of sweeps, the page of `serve`."""

import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import QUICK
from helpers.browser import CHROMIUM, open_browser
from helpers.command_line import TINY, typed
from helpers.plot_runs import make_run, update
from helpers.report_pages import draw_only
from helpers.terminals import terminal

from deepstack.cli import output, sweep_output, watch_command
from deepstack.cli.output import PrintableStream, show_work
from deepstack.cli.serve_command import ADDRESS, PageServer
from deepstack.cli.watch_command import RunRow, Watcher, caption_of
from deepstack.config import Config
from deepstack.records import RunFolder, change_tags
from deepstack.reports.page import build_page
from deepstack.sweeps import Cell, Progress


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["check", QUICK, *TINY], ["building the model"]),
        (["compare", "."], ["reading runs"]),
        (["plot", ".", "loss_vs_step", "--format", "csv"], ["drawing charts"]),
        (["verify", "."], ["comparing checksums", "comparing checksums: deepnorm-d6-s0-0.001"]),
        (["fit", "."], ["fitting"]),
    ],
)
def test_a_command_has_a_text(
    words: list[str], expected: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(here / "study")
    texts: list[str] = []
    monkeypatch.setattr(
        "rich.progress.Progress.add_task", lambda bar, text, total: texts.append(text)
    )
    monkeypatch.setattr(
        "rich.progress.Progress.update",
        lambda bar, task, description, **more: texts.append(description),
    )
    typed(*words)
    assert texts[: len(expected)] == expected


def test_a_pipe_gets_lines_alone_and_a_quiet_command_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.threading, "Timer", lambda *_: pytest.fail("a bar is due"))
    with show_work("working") as work:
        work.note("a line")
    assert capfd.readouterr() == ("", "a line\n")
    with terminal() as (stderr, _):
        monkeypatch.setattr(sys, "stderr", stderr)
        with show_work("working", quiet=True):
            pass


def test_a_short_command_shows_nothing_and_notes_stay_letters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with terminal() as (stderr, read):
        monkeypatch.setattr(sys, "stderr", stderr)
        with show_work("short"):
            pass
        monkeypatch.setattr(output, "DELAY_SECONDS", 0.0)
        with show_work("long\x1b[2J") as work:
            work.step("part\x1b[2J", 3)
            time.sleep(0.5)
            work.note("note\x1b[2J [red]")
        stderr.flush()
        text = "".join(iter(read, ""))
    assert "short" not in text and "part\\u001b[2J" in text and "━" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is there again
    assert "note\\u001b[2J [red]" in re.sub(r"\x1b\[[0-9;]*m", "", text) and "\x1b[2J" not in text


# --- `deepstack watch` shows the runs of any process, and ends with Ctrl-C ------------------------


WATCH = [sys.executable, "-m", "deepstack", "watch", "--interval", "0.1"]


def add_steps(path: Path, *steps: int) -> None:
    with open(path / "steps.csv", "a") as file:
        file.writelines(f"{step},2.5,0.1,1,0.125,1,1,1\n" for step in steps)


def make_running(root: Path, seed: int = 0) -> RunFolder:
    """A run of 50 steps that is at step 5; each of its steps took 200 ms."""
    folder = RunFolder(make_run(root, seed=seed, config={"train.steps": 50}))
    folder.write_status("running", 5)
    folder.timing_path.write_text(
        "step,step_ms,peak_memory_mb\n" + "".join(f"{step},200,1\n" for step in range(1, 6))
    )
    return folder


def test_a_running_run_has_speed_and_time_left(tmp_path: Path) -> None:
    make_run(tmp_path, scheme="post_ln", state="diverged")
    folder = make_running(tmp_path)
    watcher = Watcher(tmp_path)
    with folder.lock():
        running, diverged = watcher.read()
        assert running == RunRow(
            folder.name, "running", 5, 50, 3.5, pytest.approx(update(6, 5)), 200.0, 9.0
        )
        assert (diverged.state, diverged.step) == ("diverged", 5)
        assert caption_of([running, diverged], tmp_path) == (
            "0 of 2 done, 1 diverged, 1 running; the last of these in about 0:00:09"
        )
        add_steps(folder.path, 6)
        assert watcher.read()[0].step == 6
    # Without a process that holds it here, a log that grows belongs to one of another machine.
    assert Watcher(tmp_path).read()[0].state == "running"
    add_steps(folder.path, 7)
    assert Watcher(tmp_path).read()[0].step == 7
    os.utime(folder.steps_path, (0, 0))
    assert watcher.read()[0].state == "interrupted"


def test_unchanged_runs_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    watcher = Watcher(tmp_path)
    before = watcher.read()
    monkeypatch.setattr(watch_command, "row_of", lambda *_: pytest.fail("read again"))
    assert watcher.read() == before
    monkeypatch.undo()
    (run / "status.json").write_text("{")
    assert watcher.read()[0].state == "damaged"


def test_the_table_is_printed_once(tmp_path: Path) -> None:
    for study in ("one", "two\x1b[2J"):
        make_run(tmp_path / study)
    found = typed("watch", tmp_path, "--once", env={"COLUMNS": "120"})
    assert found.exit_code == 0 and "2 of 2 done" in found.stdout
    assert "one/" in found.stdout and "two\\u001b[2J/" in found.stdout
    assert typed("watch", tmp_path / "none", "--once").exit_code == 7


def test_lines_follow_states_and_an_interrupt_ends_them(tmp_path: Path) -> None:
    """It may begin before the first run does."""
    root = tmp_path / "results"
    with subprocess.Popen([*WATCH, root], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "no runs below" in process.stdout.readline()
            folder = make_running(tmp_path / "later")
            root.mkdir()
            folder.path.parent.rename(root / "study")
            assert process.stdout.readline().startswith("running      deepnorm-d6-s0")
            RunFolder(root / "study" / folder.name).write_status("failed", 5)
            assert process.stdout.readline().startswith("failed       deepnorm-d6-s0")
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


def test_a_terminal_shows_a_table_that_is_redrawn(tmp_path: Path) -> None:
    folder = make_running(tmp_path)
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    with terminal() as (stdout, read):
        process = subprocess.Popen([*WATCH, tmp_path], stdout=stdout, env=environment)

        def read_until(words: str) -> str:
            text, end = "", time.monotonic() + 60
            while words not in text:
                assert time.monotonic() < end, text
                text += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", read())
            return text

        try:
            text = read_until("about")
            assert "0 of 1 done, 1 running" in text and "u001b" not in text
            add_steps(folder.path, 7)
            read_until("7/50")
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


def test_a_sweep_shows_the_same_table_below_a_bar_of_its_flops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = make_running(tmp_path), RunFolder(tmp_path / "run\x1b[2J")
    cells = [Cell(Config(), each, "new", parameters=1, memory=1, flops=10**6) for each in folders]
    progress = list(map(Progress, cells, ("running", "waiting")))
    steps = Config().train.steps
    with terminal() as (stderr, read):
        monkeypatch.setattr(sys, "stderr", PrintableStream(stderr))
        with sweep_output.watch(False, cells) as show:
            show(progress)
        stderr.flush()
        text = "".join(iter(read, ""))
    assert "\x1b[36mrunning" in text and "━━━" in text and "0 of 2 done" in text
    assert text.count("\\u001b") == text.count("run\\u001b[2J") > 0 and f"5/{steps}" in text
    row = sweep_output.read_rows(progress, {})[0]
    assert (row.step_ms, row.seconds_left) == (200.0, (steps - 5) * 0.2)
    assert sweep_output.flops_left(progress[0], row) == 10**6 * (1 - 5 / steps)


# --- `deepstack serve` answers with one page, to this host alone, and follows the runs ------------


@pytest.fixture
def study(tmp_path: Path) -> Path:
    make_run(tmp_path / "study", seed=0)
    return tmp_path / "study"


@pytest.fixture
def server(study: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageServer]:
    draw_only(monkeypatch, "loss_vs_step")
    folders = [str(study)]
    with PageServer((ADDRESS, 0), folders, lambda: build_page(folders, None).text) as running:
        running.update()
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def ask(
    server: PageServer, path: str = "/", method: str = "GET", host: str | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    address, port = server.server_address[:2]
    connection = http.client.HTTPConnection(str(address), int(port), timeout=30)
    connection.putrequest(method, path, skip_host=True)
    if host := f"{ADDRESS}:{port}" if host is None else host:
        connection.putheader("Host", host)
    connection.endheaders()
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


def test_the_page_is_the_report(server: PageServer) -> None:
    answer, body = ask(server)
    assert answer.status == 200 and b"<h3>Finding</h3>" in body
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    policy = re.findall(rb'http-equiv="Content-Security-Policy" content="(.*?)"', body)[0]
    assert policy.startswith(b"default-src") and b"connect-src" in policy
    assert b"unsafe" not in policy
    assert b"deepnorm-d6-s0" in body and b'href="deepnorm' not in body  # no link to a folder
    head, nothing = ask(server, method="HEAD")
    assert head.status == 200 and nothing == b"" and head.headers["ETag"] == answer.headers["ETag"]


def test_only_this_host_is_answered(server: PageServer) -> None:
    address, port = server.socket.getsockname()
    assert address == "127.0.0.1"
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert ask(server, host=host)[0].status == 200
    for host in (
        "127.0.0.1", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", f"[::1]:{port}",
        f"127.0.0.1:1{port}", "",
    ):  # fmt: skip
        answer, body = ask(server, host=host)
        assert answer.status == 403 and b"Finding" not in body, host


def test_no_file_can_be_read_and_nothing_be_written(server: PageServer) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"):
        assert ask(server, method=method)[0].status == 501, method
    for path in (
        "/deepnorm-d6-s0-0.001/config.yaml", "/report.html", "/../../etc/passwd", "/etc/passwd",
        "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/..%2fconfig.yaml", "/.", "/favicon.ico",
        "file:///etc/passwd", "http://127.0.0.1/etc/passwd", "*",
    ):  # fmt: skip
        answer, body = ask(server, path)
        assert answer.status == 404 and b"root:" not in body and b"model:" not in body, path


def test_the_page_follows_its_runs(server: PageServer, study: Path) -> None:
    before = server.page
    assert not server.update()
    folder = RunFolder(make_run(study, seed=1, state="running"))
    assert server.update()
    assert b"2 runs: " in ask(server)[1] and server.page != before
    with open(folder.steps_path, "a") as file:
        file.write("6,2.5,0.1,1,0.125,1,1,1\n")
    assert server.update()
    change_tags(folder, ["good"])
    assert server.update() and b"good" in ask(server)[1]
    # A damaged study is told as text.
    folder.path.rename(study / "<b>x")
    (study / "<b>x" / "steps.csv").write_text("a,b\n1,2\n")
    assert server.update()
    answer, body = ask(server)
    assert answer.status == 200 and b"<b>" not in body and b"is left out" in body
    shutil.rmtree(study)
    assert server.update() and b"No runs below" in ask(server)[1]


def test_the_command_prints_its_address_and_ends_with_an_interrupt(study: Path) -> None:
    words = [sys.executable, "-m", "deepstack", "serve", str(study), "--port"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*words, "0"], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            address, port = process.stdout.readline().rstrip("/\n").rsplit(":", 1)
            assert address == "http://127.0.0.1"
            assert process.stderr.readline() == "Ctrl-C ends the server\n"
            assert "page drawn in" in process.stderr.readline()
            taken = subprocess.run([*words, port], capture_output=True, text=True)
            assert taken.returncode == 5 and "give another one with --port" in taken.stderr
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_an_open_page_loads_the_newest_one(server: PageServer, study: Path, tmp_path: Path) -> None:
    with open_browser(tmp_path / "profile") as browser:
        soon = "const slow = setInterval; setInterval = (f, time) => slow(f, time / 20)"
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=soon)
        browser.open(f"http://{ADDRESS}:{server.server_address[1]}/")
        assert browser.run("document.querySelector('.live').textContent") == "live"
        time_of_load = browser.run("performance.timeOrigin")
        browser.run("new Promise(done => setTimeout(done, 500))")  # the first tag is known
        make_run(study, seed=1)
        server.update()
        browser.wait_for(f"performance.timeOrigin > {time_of_load}")
        browser.wait_for("document.body?.textContent.includes('2 runs: ')")
        refused = [text for text in browser.errors if "favicon" not in text and "404" not in text]
        assert refused == [] and os.path.isdir(tmp_path / "profile")
