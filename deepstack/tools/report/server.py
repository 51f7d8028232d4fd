"""Serves the report as a page on 127.0.0.1 that follows its runs: `deepstack report --serve`."""

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
from typing import Any

from deepstack.base import (
    DeepstackError,
    NothingMatchedError,
    ResourceError,
    one_line,
    print_now,
    printable,
    tally,
)
from deepstack.cli import RunRow, RunWatcher, ended_by_ctrl_c, log, time_and_size
from deepstack.records import Run, find_runs
from deepstack.runs import Runs, Where
from deepstack.tools.report.page import build_page

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


def serve(
    folders: Sequence[str],
    port: int,
    quiet: bool = False,
    *,
    where: Where = (),
    last: int | None = None,
    **options: Any,
) -> None:
    """Show the report at a port of 127.0.0.1, until Ctrl-C.

    The page has the tables at once and each chart when it is drawn, again when runs change.  The
    states and steps of its runs are at most two seconds old, also while it is drawn.  No other
    file can be read.

    port: 0 for a free one.
    options: other arguments of `build_page`.

    Raises ResourceError for a port in use.
    """

    def build() -> str:
        # An older page with all charts stays until the newer one has them too.
        ready = None if server.has_report else lambda page: server.show(page.text)
        page = build_page(folders, None, where=where, last=last, ready=ready, **options)
        server.has_report = True
        return page.text

    try:
        server = PageServer((ADDRESS, port), folders, build, where, last)
    except OSError as error:
        raise ResourceError(
            f"port {port} of {ADDRESS}: {error.strerror}; give another one with --port"
        ) from error
    say = (lambda line: None) if quiet else log
    with ended_by_ctrl_c(), server:
        print_now(f"http://{ADDRESS}:{server.server_address[1]}/")
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
    """The states of the runs of a report, from their status files and the ends of logs."""

    def __init__(self, folders: Sequence[str], where: Where, last: int | None) -> None:
        self.folders = folders
        self.watcher = RunWatcher(lambda: runs_below(folders).select(where, None, last))
        self._lock = threading.Lock()
        self._read = -math.inf
        self._rows: dict[str, list[RunRow]] = {}

    def rows(self) -> dict[str, list[RunRow]]:
        """Return the rows of each study by its name; several folders are one study."""
        with self._lock:
            if time.monotonic() - self._read > READ_SECONDS:
                self._rows = {}
                for run, row in self.watcher.read_runs():
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
    where, last: choose its runs.
    """

    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        folders: Sequence[str],
        build: Callable[[], str],
        where: Where = (),
        last: int | None = None,
    ) -> None:
        self.folders, self.build, self.live = folders, build, LiveStates(folders, where, last)
        self.seen: object = None
        self.has_report = False
        self.page = page_of_text("The page is being drawn.").encode()
        super().__init__(address, PageHandler)

    def update(self) -> bool:
        """Draw the page again if runs have changed; return whether they have."""
        files = files_of_runs(self.folders)
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


def with_tag(page: str, tag: str) -> str:
    """Return a page with its tag, which it compares with the tag of the newest page."""
    return page.replace("<body data-live=", f'<body data-tag="{tag}" data-live=', 1)


def page_of_text(text: str) -> str:
    """Return a page with a text, until the report can be drawn."""
    return WAITING.format(html.escape(text))


def runs_below(folders: Sequence[str]) -> Runs:
    """Return the runs that some folders have now; a folder may have none yet."""
    runs: list[Run] = []
    for folder in folders:
        with suppress(NothingMatchedError):
            runs += find_runs(folder)
    return Runs(runs)


def files_of_runs(folders: Sequence[str]) -> list[object]:
    """Return sizes and times of all entries of all runs."""
    files: list[object] = []
    for run in runs_below(folders):
        with suppress(OSError):  # of a run that was removed meanwhile
            files += [(path, time_and_size(path)) for path in run.path.iterdir()]
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
        tag = hashlib.sha256(page).hexdigest()
        self.send_header("ETag", f'"{tag}"')
        self.send_header("X-States", json.dumps(states))
        page = with_tag(with_states(page.decode(), states), tag).encode()
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
