"""A headless Chromium, driven over a pipe by its DevTools protocol: the standard library is enough for that."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE = 30.0  # seconds


def find() -> str | None:
    """The browser's path, None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Chromium:
    """One browser with one page.

    Attributes:
        events: What the browser has told, in order: requests, console messages, exceptions.
    """

    def __init__(self, path: str, profile: Path, width: int = 1400, height: int = 900) -> None:
        self.events: list[dict[str, Any]] = []
        self._number = 0
        self._buffer = b""
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        # The browser reads from 3 and writes to 4. Moved up first, so that neither stands in the other's place.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs_in, theirs_out)]
        self._pid: int | None = os.posix_spawn(
            path,
            [path, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"],
            os.environ | {"HOME": str(profile)},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, high[0], 3),
                (os.POSIX_SPAWN_DUP2, high[1], 4),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
            setpgroup=0,
        )
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self._in, self._out = ours_in, ours_out
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._in, selectors.EVENT_READ)
        targets = self.call("Target.getTargets", session=None)["targetInfos"]
        target = next(known["targetId"] for known in targets if known["type"] == "page")
        self._session = None
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def close(self) -> None:
        if self._pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._pid = None
        self._ready.close()
        for fd in (self._in, self._out):
            os.close(fd)

    def call(self, method: str, session: str | None = "", **arguments: Any) -> dict[str, Any]:
        """One command and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        if session == "" and self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == message["id"]:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            if "method" in answer:
                self.events.append(answer)

    def _receive(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not self._ready.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"The browser has not answered {what} in {PATIENCE:g} s.")
            chunk = os.read(self._in, 2**20)
            if not chunk:
                raise ConnectionError(f"The browser ended during {what}.")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, script: str, patience: float = PATIENCE) -> Any:
        """The value of an expression, once it is true."""
        deadline = time.monotonic() + patience
        while True:
            value = self.run(script)
            if value:
                return value
            if time.monotonic() > deadline:
                raise TimeoutError(f"Still not so after {patience:g} s: {script}")
            time.sleep(0.03)

    def mouse(self, kind: str, x: float, y: float, *, shift: bool = False) -> None:
        pressed = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, modifiers=8 if shift else 0, **pressed)

    def click(self, x: float, y: float, *, shift: bool = False) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, shift=shift)

    def press(self, key: str, code: int, *, shift: bool = False) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                modifiers=8 if shift else 0,
            )

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
