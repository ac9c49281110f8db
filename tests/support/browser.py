"""A page in headless Chromium, asked over its pipe (the DevTools protocol); nothing else needed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")
# It reads from 3 and writes to 4, whatever the numbers are where it is started.
START = (
    "import os, sys; i, o = os.dup({}), os.dup({}); os.dup2(i, 3); os.dup2(o, 4); "
    "os.set_inheritable(3, True); os.set_inheritable(4, True); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def chromium() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One page; what it writes to the console, and what it fails to load, is kept."""

    def __init__(self, send: int, receive: int) -> None:
        self.send, self.receive, self.begun = send, receive, b""
        self.numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self.numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.send, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == number:
                assert "error" not in told, (method, told)
                result: dict[str, Any] = told["result"]
                return result
            self.events.append(told)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.begun:
            chunk = os.read(self.receive, 65536)
            assert chunk, "the browser has ended"
            self.begun += chunk
        line, _, self.begun = self.begun.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        return told

    def open(self, file: Path, width: int, dark: bool = False) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900,
                 deviceScaleFactor=1, mobile=False)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=file.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def move(self, x: float, y: float) -> None:
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and everything that was asked of a network."""
        wrong = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        found = [json.dumps(e) for e in self.events if e.get("method") in wrong]
        asked = [e["params"]["request"]["url"] for e in self.events
                 if e.get("method") == "Network.requestWillBeSent"]  # fmt: skip
        return found + [url for url in asked if not url.startswith(("file:", "data:"))]


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    program = chromium()
    assert program is not None
    theirs_in, send = os.pipe()
    receive, theirs_out = os.pipe()
    arguments = [program, *FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        [sys.executable, "-c", START.format(theirs_in, theirs_out), *arguments],
        pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(send, receive)
    finally:
        process.kill()
        process.wait()
        os.close(send)
        os.close(receive)
