"""A real Chromium without a window, driven over its DevTools protocol."""

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-port=0"
)
PATIENCE = 60


class Page:
    """One tab, and everything that its console said."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=PATIENCE))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        values = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(values["exceptionDetails"]))
        elif event.get("method") == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.problems.append(str(values["args"]))
        elif event.get("method") == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.problems.append(str(values["entry"]))

    def open(self, page: Path | str) -> None:
        """A file, or an address."""
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        end = time.monotonic() + PATIENCE
        while not self.value(condition):
            assert time.monotonic() < end, f"never became true: {condition}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """A real click of the mouse in the middle of an element."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{find}.scrollIntoView({{block: 'center'}})")
        box = self.value(f"(({{x, y, width, height}}) => ({{x, y, width, height}}))({find}.getBoundingClientRect())")
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2, "button": "left", "clickCount": 1}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **place)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, file: Path, *, whole: bool = False) -> None:
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(answer["data"]))


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile, and its one page."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = _address(profile / "DevToolsActivePort", process)
        with connect(address, max_size=None, open_timeout=PATIENCE) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE)


def _address(file: Path, process: "subprocess.Popen[bytes]") -> str:
    """The page's socket, when the browser is up."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        try:
            port = file.read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as answer:
                pages = [page for page in json.load(answer) if page["type"] == "page"]
            return pages[0]["webSocketDebuggerUrl"]
        except (OSError, IndexError):
            time.sleep(0.1)
    raise AssertionError("Chromium did not start")
