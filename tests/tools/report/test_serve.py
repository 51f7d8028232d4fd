"""`deepstack report --serve` answers with one page, to this host alone, and follows the runs."""

import http.client
import json
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
from helpers.browser import CHROMIUM, open_browser
from helpers.plot_runs import make_run
from helpers.report_pages import draw_only

import deepstack.tools.report.page as page_module
from deepstack.cli.run_table import RunRow
from deepstack.records import RunFolder, change_labels
from deepstack.tools.report import server as server_module
from deepstack.tools.report.page import build_page
from deepstack.tools.report.server import ADDRESS, PageServer


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


def test_only_loopback_names_are_answered_at_any_port(server: PageServer) -> None:
    address, port = server.socket.getsockname()
    assert address == "127.0.0.1"
    tunnel = "127.0.0.1:9000", "localhost:9000", "LOCALHOST:9000", "[::1]:9000", "127.0.0.1"
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", *tunnel):
        assert ask(server, host=host)[0].status == 200
    for host in (
        f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", f"localhost.evil:{port}",
        f"xlocalhost:{port}", "127.0.0.1:", "127.0.0.1:1x", "127.0.0.1:9000@evil.example", "",
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
    change_labels(folder, ["good"])
    assert server.update() and b"good" in ask(server)[1]
    # A damaged study is told as text.
    folder.path.rename(study / "<b>x")
    (study / "<b>x" / "steps.csv").write_text("a,b\n1,2\n")
    assert server.update()
    answer, body = ask(server)
    assert answer.status == 200 and b"<b>" not in body and b"is left out" in body
    shutil.rmtree(study)
    assert server.update() and b"No runs below" in ask(server)[1]


def test_tables_come_first_and_each_chart_when_it_is_drawn(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_only(monkeypatch, "loss_vs_step", "update_vs_step")
    monkeypatch.setattr(page_module, "READY_SECONDS", 0.0)
    pages: list[str] = []
    last = build_page([str(study)], None, ready=lambda page: pages.append(page.text)).text
    assert [page.count("<figure") for page in (*pages, last)] == [0, 1, 2]
    assert all("<h3>Finding</h3>" in page and "deepnorm-d6-s0" in page for page in pages)
    assert ["charts to go" in page or "chart to go" in page for page in (*pages, last)] == [1, 1, 0]
    assert last == build_page([str(study)], None).text


# --- states are newer than the page ---------------------------------------------------------------


def states_in(body: bytes) -> str:
    (text,) = re.findall(rb'class="states" data-study="study">([^<]*)<', body)
    return str(text.decode())


@pytest.fixture
def running(study: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    """A second run of the study, at step 5 of 50 and held by this process; states are not kept."""
    monkeypatch.setattr(server_module, "READ_SECONDS", 0.0)
    folder = RunFolder(make_run(study, seed=1, config={"train.steps": 50}))
    folder.write_status("running", 5)
    with folder.lock():
        yield folder


def add_step(folder: RunFolder, step: int) -> None:
    with open(folder.steps_path, "a") as file:
        file.write(f"{step},2.5,0.1,1,0.125,1,1,1\n")


def test_the_states_are_those_of_now_in_a_page_of_before(
    running: RunFolder, server: PageServer
) -> None:
    page = server.page
    first, body = ask(server)
    at = f"1 done, 1 running ({running.name} at step 5 of 50)"
    assert states_in(body) == json.loads(first.headers["X-States"])["study"] == at
    add_step(running, 6)
    second, body = ask(server)
    assert states_in(body) == at.replace("step 5", "step 6")
    assert second.headers["ETag"] == first.headers["ETag"], "a step is no reason to load the page"
    running.write_status("done", 6)
    third, body = ask(server)
    assert states_in(body) == "2 done" and int(third.headers["Content-Length"]) == len(body)
    head, _ = ask(server, method="HEAD")
    assert json.loads(head.headers["X-States"]) == {"study": "2 done"}
    assert server.page == page, "nothing was drawn"


def test_states_are_answered_while_the_page_is_drawn(
    running: RunFolder, server: PageServer
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def draw() -> str:
        begun.set()
        assert may_end.wait(60)
        return "a later page"

    server.build = draw
    add_step(running, 6)
    drawing = threading.Thread(target=server.update)
    drawing.start()
    assert begun.wait(60)
    try:
        assert "at step 6 of 50" in states_in(ask(server)[1])
    finally:
        may_end.set()
        drawing.join()
    assert ask(server)[1] == b"a later page"


def test_the_pause_between_pages_ends_with_the_last_run(
    running: RunFolder, server: PageServer
) -> None:
    pause = threading.Thread(target=server_module.wait_for_runs, args=(server, 3600.0))
    pause.start()
    pause.join(0.3)
    assert pause.is_alive()
    running.write_status("done", 5)
    pause.join(60)
    assert not pause.is_alive()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_an_open_page_shows_the_states_of_now(
    running: RunFolder, server: PageServer, tmp_path: Path
) -> None:
    with open_browser(tmp_path / "profile") as browser:
        browser.open(f"http://{ADDRESS}:{server.server_address[1]}/")
        began = browser.run("performance.timeOrigin")
        add_step(running, 6)
        browser.wait_for("document.querySelector('.states').textContent.includes('step 6 of 50')")
        running.write_status("done", 6)
        browser.wait_for("document.querySelector('.states').textContent === '2 done'")
        assert browser.run("performance.timeOrigin") == began, "the page was not loaded again"


def test_only_some_running_runs_are_named_and_markup_stays_text() -> None:
    rows = [RunRow(f"<b>{number}", "running", 1, None) for number in range(6)]
    text = server_module.present_text([*rows, RunRow("a", "done", 9, 9)])
    assert text.startswith("6 running, 1 done (<b>0 at step 1 of ?, ")
    assert text.endswith("<b>3 at step 1 of ?, 2 more)")
    page = '<span class="states" data-study="a&amp;b">old</span>'
    shown = server_module.with_states(page, {"a&b": text, "other": "x"})
    assert "&lt;b&gt;0 at" in shown and "<b>" not in shown
    assert server_module.with_states(page, {}) == page


@pytest.mark.slow
def test_the_command_prints_its_address_and_ends_with_an_interrupt(study: Path) -> None:
    words = [sys.executable, "-m", "deepstack", "report", "--serve", str(study), "--port"]
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
        make_run(study, seed=1)
        server.update()
        browser.wait_for(f"performance.timeOrigin > {time_of_load}")
        browser.wait_for("document.body?.textContent.includes('2 runs: ')")
        refused = [text for text in browser.errors if "favicon" not in text and "404" not in text]
        assert refused == [] and os.path.isdir(tmp_path / "profile")


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_an_open_page_takes_charts_as_they_are_drawn(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_only(monkeypatch, "update_vs_depth", "loss_vs_step")
    monkeypatch.setattr(page_module, "READY_SECONDS", 0.0)
    answer = server_module.PageHandler.do_GET

    def answer_late(handler: server_module.PageHandler) -> None:
        time.sleep(0.2)  # later than the page asks again
        answer(handler)

    monkeypatch.setattr(server_module.PageHandler, "do_GET", answer_late)
    make_run(study, depth=18)
    pages: list[str] = []
    folders = [str(study)]
    pages.append(build_page(folders, None, ready=lambda page: pages.append(page.text)).text)
    with PageServer((ADDRESS, 0), folders, lambda: "") as server:
        server.show(pages[0])
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        with open_browser(tmp_path / "profile") as browser:
            soon = "const slow = setInterval; setInterval = (f, time) => slow(f, time / 20)"
            browser.call("Page.addScriptToEvaluateOnNewDocument", source=soon)
            browser.open(f"http://{ADDRESS}:{server.server_address[1]}/")
            assert browser.run("document.querySelectorAll('figure').length") == 0
            began = browser.run("performance.timeOrigin")
            for number, page in enumerate(pages):
                server.show(page)
                browser.wait_for(f"document.querySelectorAll('figure').length === {number}")
            browser.run("document.querySelector('.charts').scrollIntoView()")
            browser.wait_for("document.querySelectorAll('.panel canvas').length === 3")
            assert "exponent of N" in browser.run("document.querySelector('.finding').innerText")
            time.sleep(0.5)
            assert browser.run("performance.timeOrigin") == began
        server.shutdown()
