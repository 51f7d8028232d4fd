"""The command `deepstack serve DIR`: the report as a page on 127.0.0.1 that follows its runs."""

from __future__ import annotations

import hashlib
import html
import re
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from deepstack.cli import options as opt
from deepstack.cli.signals import ended_by_ctrl_c
from deepstack.cli.streams import log
from deepstack.errors import DeepstackError, NothingMatchedError, ResourceError
from deepstack.records import find_runs
from deepstack.records.cells import printable

if TYPE_CHECKING:
    from deepstack.reports.page import Page

ADDRESS = "127.0.0.1"
LOOK_SECONDS = 2.0
# Drawing a page while runs train costs them time: the pauses are longer than the drawing.
PAUSE_FACTOR = 4
# Browsers keep no copy, show the page in no frame, and give it to no other site.
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
POLICY = "default-src 'none'; frame-ancestors 'none'"
WAITING = (
    '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="3">'
    "<title>deepstack</title><p>{}</p></html>"
)


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

    The page is drawn again when runs change.  No other file can be read.  From another machine:
    ssh -L 8765:127.0.0.1:8765 HOST, then open the address that is printed.
    """
    opt.load_plugins(plugin)
    from deepstack.reports.page import build_page

    def build() -> Page:
        return build_page(directories, None, against, best, at_step, diagnostic)

    live = LivePage([Path(folder) for folder in directories], build)
    try:
        server = PageServer((ADDRESS, port), live)
    except OSError as error:
        raise ResourceError(
            f"port {port} of {ADDRESS}: {error.strerror}; give another one with --port"
        ) from error
    with ended_by_ctrl_c(), server:
        typer.echo(f"http://{ADDRESS}:{server.server_address[1]}/")
        if not quiet:
            log("Ctrl-C ends the server")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        live.follow(lambda line: None if quiet else log(line))


class LivePage:
    """The newest page of the runs below some folders, and its tag.

    build: draws the page.  It runs in one thread only: matplotlib's style is global.
    """

    def __init__(self, folders: Sequence[Path], build: Callable[[], Page]) -> None:
        self.folders, self.build = folders, build
        self.signature: object = None
        self.show(WAITING.format("The page is being drawn."))

    def show(self, text: str) -> None:
        """Make a text the newest page."""
        data = printable(text).encode("utf-8")
        self.current = data, f'"{hashlib.sha256(data).hexdigest()[:32]}"', policy_in(text)

    def update(self) -> bool:
        """Draw the page again if runs have changed; return whether they have."""
        signature = signature_of(self.folders)
        if signature == self.signature:
            return False
        self.signature = signature
        try:
            self.show(self.build().text)
        except NothingMatchedError:
            where = html.escape(", ".join(map(str, self.folders)))
            self.show(WAITING.format(f"No runs below {where} yet."))
        except DeepstackError as error:  # such as a log that is half copied from another machine
            self.show(WAITING.format(html.escape(str(error))))
        return True

    def follow(self, say: Callable[[str], None]) -> None:
        """Update the page until the process is interrupted."""
        while True:
            began = time.monotonic()
            if self.update():
                seconds = time.monotonic() - began
                say(f"page drawn in {seconds:.1f} s")
                time.sleep(PAUSE_FACTOR * seconds)
            time.sleep(LOOK_SECONDS)


def signature_of(folders: Sequence[Path]) -> object:
    """Return sizes and times of the files of all runs that a page shows."""
    from deepstack.cli.watch_command import stamp

    files = []
    for folder in folders:
        try:
            runs = find_runs(folder)
        except NothingMatchedError:
            continue
        for run in runs:
            one = run.folder
            paths = (one.status_path, one.steps_path, one.evals_path, one.layers_dir / "steps.npy")
            files.append((str(run.path), *map(stamp, paths)))
    return files


def policy_in(text: str) -> str:
    """Return the content security policy of a page for its header, where it can forbid frames."""
    if stated := re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text):
        return f"{html.unescape(stated[1])}; frame-ancestors 'none'"
    return POLICY


class PageServer(ThreadingHTTPServer):
    """Serves one page at `/` and nothing else."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], live: LivePage) -> None:
        self.live = live
        super().__init__(address, PageHandler)


class PageHandler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of `/` for requests that name this host.

    Another Host header comes from a page of another site whose name points to 127.0.0.1.
    """

    server: PageServer
    server_version, sys_version = "deepstack", ""
    timeout = 30.0

    def do_GET(self) -> None:
        """Answer with the page."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Answer with the headers of the page; its tag changes with the page."""
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        port = self.server.server_address[1]
        allowed = {f"{name}:{port}" for name in (ADDRESS, "localhost")}
        if self.headers.get_all("Host", []) not in [[name] for name in allowed]:
            self.send_error(HTTPStatus.FORBIDDEN, "this server answers to 127.0.0.1 only")
        elif self.path.partition("?")[0] != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            data, tag, policy = self.server.live.current
            is_known = self.headers.get("If-None-Match") == tag
            self.send_response(HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK)
            self.send_header("ETag", tag)
            self.send_header("Content-Security-Policy", policy)
            if not is_known:
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if with_body and not is_known:
                self.wfile.write(data)

    def end_headers(self) -> None:
        """Add the headers of every answer."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *values: Any) -> None:
        """Print nothing: a page asks for the newest tag every few seconds."""
