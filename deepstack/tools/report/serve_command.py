"""The command `deepstack serve DIR`: the report as a page on 127.0.0.1 that follows its runs."""

import hashlib
import html
import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import typer

from deepstack.base import (
    DeepstackError,
    NothingMatchedError,
    ResourceError,
    one_line,
    printable,
    tally,
)
from deepstack.cli import RunRow, command, ended_by_ctrl_c, log
from deepstack.cli import options as opt
from deepstack.records import find_runs
from deepstack.tools.report.watch_command import Watcher, stamp

ADDRESS = "127.0.0.1"
LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.ASCII | re.IGNORECASE)
LOOK_SECONDS = 1.0
# Drawing a page while runs train costs them time: the pauses are longer than the drawing.
PAUSE_FACTOR = 4
READ_SECONDS = 0.5  # states are read again after this time
MOST_NAMED = 4  # running runs that the page names
STATES = re.compile(r'(<span class="states" data-study="([^"]*)">)[^<]*')
# Browsers keep no copy, show the page in no frame, and give it to no other site. The page itself
# has the policy for its contents.
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
WAITING = (
    '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="1">'
    "<title>deepstack</title><p>{}</p></html>"
)


@command("Tools", "deepstack serve results/")
def serve_command(
    directories: opt.Folders = ["results"],
    port: int = opt.option("Port on 127.0.0.1; 0: a free one.", default=8765, min=0, max=65535),
    against: opt.Against = None,
    best: opt.Best = [],
    at_step: opt.AtStep = None,
    diagnostic: opt.Diagnostic = None,
    quiet: opt.Quiet = False,
    plugin: opt.Plugins = [],
) -> None:
    """Show the report as a read-only page on 127.0.0.1 that follows running sweeps; Ctrl-C ends it.

    The page has the tables at once and each chart when it is drawn, again when runs change.  The
    states and steps of its runs are at most two seconds old, also while it is drawn.  No other
    file can be read.  From another machine: ssh -L 8765:127.0.0.1:8765 HOST, then open the
    address that is printed.
    """
    opt.load_plugins(plugin)
    from deepstack.tools.report.page import build_page

    def build() -> str:
        # An older page with all charts stays until the newer one has them too.
        ready = None if server.has_report else lambda page: server.show(page.text)
        page = build_page(directories, None, against, best, at_step, diagnostic, ready=ready)
        server.has_report = True
        return page.text

    try:
        server = PageServer((ADDRESS, port), directories, build)
    except OSError as error:
        raise ResourceError(
            f"port {port} of {ADDRESS}: {error.strerror}; give another one with --port"
        ) from error
    say = (lambda line: None) if quiet else log
    with ended_by_ctrl_c(), server:
        typer.echo(f"http://{ADDRESS}:{server.server_address[1]}/")
        say("Ctrl-C ends the server")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        while True:
            began = time.monotonic()
            if server.update():
                seconds = time.monotonic() - began
                say(f"page drawn in {seconds:.1f} s")
                wait_for_runs(server, PAUSE_FACTOR * seconds)
            time.sleep(LOOK_SECONDS)


def wait_for_runs(server: "PageServer", seconds: float) -> None:
    """Wait so many seconds while runs train; return at once when the last of them has ended."""
    until = time.monotonic() + seconds
    was_running = server.live.is_running()
    while (left := until - time.monotonic()) > 0:
        if was_running and not server.live.is_running():
            return
        time.sleep(min(left, READ_SECONDS))


class LiveStates:
    """The states of all runs below some folders, from their status files and the ends of logs."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = folders
        self.watchers = [Watcher(Path(folder)) for folder in folders]
        self._lock = threading.Lock()
        self._read = -math.inf
        self._rows: dict[str, list[RunRow]] = {}

    def rows(self) -> dict[str, list[RunRow]]:
        """Return the rows of each study by its name; several folders are one study."""
        with self._lock:
            if time.monotonic() - self._read > READ_SECONDS:
                self._rows = {}
                for watcher in self.watchers:
                    for run, row in watcher.read_runs():
                        name = run.study if len(self.folders) == 1 else " and ".join(self.folders)
                        self._rows.setdefault(name, []).append(replace(row, name=run.name))
                self._read = time.monotonic()
            return self._rows

    def is_running(self) -> bool:
        """Return whether a run is being trained."""
        return any(row.state == "running" for rows in self.rows().values() for row in rows)

    def texts(self) -> dict[str, str]:
        """Return the states of each study in words, with the steps of runs that are running."""
        return {name: present_text(rows) for name, rows in self.rows().items()}


def present_text(rows: Sequence[RunRow]) -> str:
    """Return '8 done, 2 running (deepnorm-d6-s0 at step 120 of 300, …)'."""
    at = [f"{r.name} at step {r.step} of {r.steps or '?'}" for r in rows if r.state == "running"]
    more = [f"{len(at) - MOST_NAMED} more"] if len(at) > MOST_NAMED else []
    names = ", ".join(map(one_line, [*at[:MOST_NAMED], *more]))
    return tally(row.state for row in rows) + (f" ({names})" if names else "")


class PageServer(ThreadingHTTPServer):
    """Serves the newest page of the runs below some folders at `/`, and nothing else.

    build: returns the page.  It runs in one thread only: matplotlib's style is global.
    """

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], folders: Sequence[str], build: Callable[[], str]
    ) -> None:
        self.folders, self.build, self.live = folders, build, LiveStates(folders)
        self.seen: object = None
        self.has_report = False
        self.page = page_of_text("The page is being drawn.").encode()
        super().__init__(address, PageHandler)

    def update(self) -> bool:
        """Draw the page again if runs have changed; return whether they have."""
        files = [one for folder in self.folders for one in files_of_runs(folder)]
        if files == self.seen:
            return False
        self.seen = files
        try:
            page = self.build()
        except NothingMatchedError:
            page = page_of_text(f"No runs below {', '.join(self.folders)} yet.")
        except DeepstackError as error:  # such as a log that is half copied from another machine
            page = page_of_text(str(error))
        self.show(page)
        return True

    def show(self, page: str) -> None:
        """Answer with this page from now on."""
        self.page = printable(page).encode()


def with_states(page: str, states: Mapping[str, str]) -> str:
    """Return a page with the present states of its studies, by name, in place of earlier ones."""

    def present(match: re.Match[str]) -> str:
        text = states.get(html.unescape(match[2]))
        return match[0] if text is None else match[1] + html.escape(text)

    return STATES.sub(present, page)


def page_of_text(text: str) -> str:
    """Return a page with a text, until the report can be drawn."""
    return WAITING.format(html.escape(text))


def files_of_runs(folder: str) -> list[object]:
    """Return sizes and times of all entries of all runs."""
    files: list[object] = []
    with suppress(NothingMatchedError):
        for run in find_runs(folder):
            with suppress(OSError):  # of a run that was removed meanwhile
                files += [(path, stamp(path)) for path in run.path.iterdir()]
    return files


class PageHandler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of `/` for requests that name the loopback, at any port.

    Another name in the Host header comes from a page of another site whose name points to
    127.0.0.1.  The port belongs to the browser's machine: a tunnel of ssh may have another one.
    """

    server: PageServer
    server_version, sys_version = "deepstack", ""
    timeout = 30.0

    def do_GET(self) -> None:
        """Answer with the page."""
        self.wfile.write(self.do_HEAD())

    def do_HEAD(self) -> bytes:
        """Answer with the headers of the page; return it, or nothing if it is refused.

        The tag changes with the page, which asks for it every second.  The states of runs come with
        each answer, and do not count for the tag.
        """
        if not LOOPBACK.fullmatch(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.FORBIDDEN, "this server answers to 127.0.0.1 only")
            return b""
        if self.path.partition("?")[0] != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
            return b""
        page, states = self.server.page, self.server.live.texts()
        self.send_response(HTTPStatus.OK)
        self.send_header("ETag", f'"{hashlib.sha256(page).hexdigest()}"')
        self.send_header("X-States", json.dumps(states))
        page = with_states(page.decode(), states).encode()
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        return page

    def end_headers(self) -> None:
        """Add the headers of every answer."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *values: Any) -> None:
        """Print nothing: a page asks for the newest tag every few seconds."""
