"""`deepstack serve` answers with one page, to this host alone, and follows the runs."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.browser import CHROMIUM, open_browser
from helpers.plot_runs import make_run
from helpers.report_pages import draw_only

from deepstack.cli.serve_command import ADDRESS, LivePage, PageServer
from deepstack.records import RunFolder
from deepstack.reports.page import build_page


@pytest.fixture
def study(tmp_path: Path) -> Path:
    make_run(tmp_path / "study", seed=0)
    return tmp_path / "study"


@contextmanager
def serving(study: Path) -> Iterator[PageServer]:
    live = LivePage([study], lambda: build_page([study], None).text)
    with pytest.MonkeyPatch.context() as patched, PageServer((ADDRESS, 0), live) as running:
        draw_only(patched, "loss_vs_step")
        live.update()
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def server(study: Path) -> Iterator[PageServer]:
    with serving(study) as running:
        yield running


@pytest.fixture(scope="module")
def same_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """A server for requests that change nothing."""
    study = tmp_path_factory.mktemp("served") / "study"
    make_run(study, seed=0)
    with serving(study) as running:
        yield running


def ask(
    server: PageServer, path: str = "/", method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    port = server.server_address[1]
    connection = http.client.HTTPConnection(ADDRESS, int(port), timeout=30)
    connection.putrequest(method, path, skip_host=True)
    sent = {"Host": f"{ADDRESS}:{port}"} | {k.replace("_", "-"): v for k, v in headers.items()}
    for name, value in sent.items():
        if value:
            connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


def test_the_page_is_the_report(same_server: PageServer) -> None:
    answer, body = ask(same_server)
    assert answer.status == 200 and b"<h3>Finding</h3>" in body
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    policy = re.findall(rb'http-equiv="Content-Security-Policy" content="(.*?)"', body)[0]
    assert policy.startswith(b"default-src") and b"connect-src" in policy
    assert b"unsafe" not in policy
    assert b"deepnorm-d6-s0" in body and b'href="deepnorm' not in body  # no link to a folder
    head, nothing = ask(same_server, method="HEAD")
    assert head.status == 200 and nothing == b"" and head.headers["ETag"] == answer.headers["ETag"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{}", 200), ("localhost:{}", 200), ("127.0.0.1", 403), ("evil.example:{}", 403),
        ("127.0.0.1.evil.example:{}", 403), ("[::1]:{}", 403), ("", 403), ("127.0.0.1:1{}", 403),
    ],
)  # fmt: skip
def test_only_this_host_is_answered(same_server: PageServer, host: str, status: int) -> None:
    answer, body = ask(same_server, Host=host.format(same_server.server_address[1]))
    assert answer.status == status and (b"Finding" in body) == (status == 200)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_nothing_but_reading_is_answered(same_server: PageServer, method: str) -> None:
    assert ask(same_server, method=method)[0].status == 501


@pytest.mark.parametrize(
    "path",
    [
        "/deepnorm-d6-s0-0.001/config.yaml", "/report.html", "/../../etc/passwd", "/etc/passwd",
        "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/..%2fconfig.yaml", "/.", "/favicon.ico",
        "file:///etc/passwd", "http://127.0.0.1/etc/passwd", "*",
    ],
)  # fmt: skip
def test_no_file_can_be_read(same_server: PageServer, path: str) -> None:
    answer, body = ask(same_server, path)
    assert answer.status == 404 and b"root:" not in body and b"model:" not in body


def test_it_listens_to_this_host_alone(same_server: PageServer) -> None:
    assert same_server.socket.getsockname()[0] == "127.0.0.1"
    assert same_server.socket.family == socket.AF_INET


def test_the_page_follows_its_runs(server: PageServer, study: Path) -> None:
    before = server.live.page
    assert not server.live.update()
    folder = RunFolder(make_run(study, seed=1, state="running"))
    assert server.live.update()
    assert b"2 runs: " in ask(server)[1] and server.live.page != before
    with open(folder.steps_path, "a") as file:
        file.write("6,2.5,0.1,1,0.125,1,1,1\n")
    assert server.live.update()
    # A damaged study is told as text.
    folder.path.rename(study / "<b>x")
    (study / "<b>x" / "steps.csv").write_text("a,b\n1,2\n")
    assert server.live.update()
    answer, body = ask(server)
    assert answer.status == 200 and b"<b>" not in body and b"is left out" in body
    shutil.rmtree(study)
    assert server.live.update() and b"No runs below" in ask(server)[1]


def test_the_command_prints_its_address_and_ends_with_an_interrupt(study: Path) -> None:
    words = [sys.executable, "-m", "deepstack", "serve", str(study), "--port", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            address = process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:")
            lines = [process.stderr.readline() for _ in range(2)]
            assert lines[0] == "Ctrl-C ends the server\n" and "page drawn in" in lines[1]
            port = address.rstrip("/").rpartition(":")[2]
            taken = subprocess.run([*words[:-1], port], capture_output=True, text=True)
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
        server.live.update()
        browser.wait_for(f"performance.timeOrigin > {time_of_load}")
        browser.wait_for("document.body.textContent.includes('2 runs: ')")
        refused = [text for text in browser.errors if "favicon" not in text and "404" not in text]
        assert refused == [] and os.path.isdir(tmp_path / "profile")
