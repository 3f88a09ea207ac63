"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

from tests.integration.driver import REPOSITORY

SCREENSHOTS = REPOSITORY / "build" / "screenshots"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chromium-headless-shell")
BINARY = next((found for name in NAMES if (found := shutil.which(name))), "")
NO_BROWSER = "no Chromium: apt-get install chromium"
KEPT: list[Path] = []
"""Screenshots of this test run."""
PATIENCE_S = 60.0
POLL_S = 0.2
STILL, STILL_S = 3, 0.5
"""Pictures that have to be equal, and seconds between two of them."""
MAX_HEIGHT = 6000


class Browser:
    """One page of one browser process. Use as a context manager; `folder` takes its profile."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [BINARY, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
             "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._port_file = folder / "DevToolsActivePort"
        self._number = 0
        self.requests: list[str] = []
        """Addresses that pages asked for."""

    def __enter__(self) -> Browser:
        try:
            self._open()
        except BaseException:
            self._end()
            raise
        return self

    def _open(self) -> None:
        port = wait_for(self._port)
        self._socket = connect(f"ws://127.0.0.1:{port[0]}{port[1]}", max_size=None)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)

    def _port(self) -> list[str] | None:
        lines = self._port_file.read_text().split() if self._port_file.is_file() else []
        return lines if len(lines) == 2 else None

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; requests of the page that are told meanwhile are noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if hasattr(self, "_session"):
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=PATIENCE_S))
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    def show(self, url: str, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Open a page on a screen of this size, and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        wait_for(lambda: self.ask("document.readyState") == "complete")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def _settle(self) -> None:
        """Wait until what is drawn stays as it is: a canvas tells nothing of itself."""
        seen: list[str] = []

        def still() -> bool:
            seen.append(self.call("Page.captureScreenshot")["data"])
            return len(seen) >= STILL and len(set(seen[-STILL:])) == 1

        wait_for(still, interval_s=STILL_S)

    def keep(self, name: str, *, whole: bool = True) -> Path:
        """Keep a screenshot, of the whole page, or of the screen when it stands still."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        clip = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            area = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], MAX_HEIGHT), "scale": 1}
            clip = {"clip": area, "captureBeyondViewport": True}
        else:
            self._settle()
        path = SCREENSHOTS / f"{name}.png"
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **clip)["data"]))
        KEPT.append(path)
        return path


def wait_for(condition: Callable[[], Any], timeout_s: float = PATIENCE_S, interval_s: float = POLL_S) -> Any:
    """The first true value; a failure after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(interval_s)
    raise AssertionError(f"not within {timeout_s:.0f} s")
