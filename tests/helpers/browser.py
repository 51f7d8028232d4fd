"""Drives a headless Chromium over the pipe of its DevTools protocol."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)  # fmt: skip
SECONDS = 60.0  # for a call: two cores may be busy


class PageLeft(Exception):
    """The page went away before a script had a value."""


class Browser:
    """One tab; `errors` collects exceptions and errors on the console."""

    def __init__(self, send: int, receive: int) -> None:
        self.send, self.receive = send, receive
        self.buffer, self.number, self.session = b"", 0, ""
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        answer = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = answer["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.send, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                part = os.read(self.receive, 1 << 20)
                assert part, "Chromium has ended"
                self.buffer += part
            text, _, self.buffer = self.buffer.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self.number:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise PageLeft(answer["error"]["message"])
                assert "result" in answer, answer
                return dict(answer["result"])
            event, content = answer.get("method"), answer.get("params", {})
            if event == "Runtime.exceptionThrown":
                self.errors.append(str(content["exceptionDetails"].get("exception", content)))
            elif event == "Log.entryAdded" and content["entry"]["level"] == "error":
                self.errors.append(content["entry"]["text"])

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Return the value of an expression as soon as it is true, also on the next page."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            with suppress(PageLeft):
                if value := self.run(script):
                    return value
            time.sleep(0.05)
        raise AssertionError(script)

    def open(self, address: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a page in a window of this size and colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.wait_for("document.readyState == 'complete' && location.href != 'about:blank'")

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def move(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


@contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """Yield a browser whose profile is in `folder`."""
    assert CHROMIUM
    to_read, send = os.pipe()
    receive, to_write = os.pipe()

    def pipes() -> None:
        os.dup2(to_read, 13), os.dup2(to_write, 14)
        os.dup2(13, 3), os.dup2(14, 4)

    process = subprocess.Popen(
        [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
        pass_fds=(3, 4), preexec_fn=pipes, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_read), os.close(to_write)
    try:
        yield Browser(send, receive)
    finally:
        process.terminate()
        process.wait(30)
        os.close(send), os.close(receive)
