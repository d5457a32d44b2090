"""Debian's headless Chromium, driven through its debugging pipe: what it shows, logs and requests."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 60


class Browser:
    """One page. console: every error, logged or not caught; requests: every address that was asked for."""

    def __init__(self, profile: Path):
        assert CHROMIUM, "needs Chromium: apt-get install chromium"
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        command += [
            "--no-first-run",
            "--disable-background-networking",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ]
        command += [f"--user-data-dir={profile}", "about:blank"]

        def place() -> None:  # Chromium reads commands from 3 and writes to 4
            reader, writer = os.dup(to_read), os.dup(to_write)
            os.dup2(reader, 3)
            os.dup2(writer, 4)

        self._process = subprocess.Popen(
            command, preexec_fn=place, close_fds=False, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._ids = itertools.count(1)
        self._rest = b""
        self._session = ""
        self.console: list[str] = []
        self.requests: list[str] = []
        (page,) = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        id = next(self._ids)
        message = {"id": id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == id:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def open(self, url: str) -> None:
        """Returns when the page and its files are there."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def js(self, expression: str) -> Any:
        """The value of an expression on the page, which may be a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = SECONDS) -> None:
        """Wait for an expression to be true."""
        deadline = time.monotonic() + seconds
        while not self.js(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.1)

    def look(self, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Be a window of this size, in CSS pixels, with this preference."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, format: str = "png") -> bytes:
        """The whole page."""
        quality = {"quality": 80} if format == "webp" else {}
        answer = self.call("Page.captureScreenshot", format=format, captureBeyondViewport=True, **quality)
        return base64.b64decode(answer["data"])

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            assert left > 0, "Chromium does not answer"
            if select.select([self._read], [], [], left)[0]:
                self._rest += os.read(self._read, 2**20)
        raw, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(raw)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.console.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.console.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
