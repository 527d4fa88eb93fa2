"""A real Chromium without a window, driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

START_SECONDS = 60.0
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--no-default-browser-check", "--disable-extensions", "--hide-scrollbars"),
    # It may talk to the server under test and to nobody else.
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    """The path of a Chromium or Chrome on this machine."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


class Page:
    """One tab. Collects what the page writes to the console and what it asks for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.get_running_loop().create_task(self._read())
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": params}))
        message = await asyncio.wait_for(answer, 60)
        assert "error" not in message, (method, message["error"])
        return dict(message["result"])

    async def open(self, url: str) -> None:
        """Goes to a page and waits until it is loaded."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        await self.send("Page.navigate", url=url)
        loaded = f"location.href === {json.dumps(url)} && document.readyState === 'complete'"
        await self.until(loaded)

    async def run(self, expression: str) -> Any:
        """The value of a JavaScript expression (promises are awaited)."""
        result = await self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str, seconds: float = 30.0) -> Any:
        """Waits until an expression is true; returns its value."""
        deadline = time.monotonic() + seconds
        while not (value := await self.run(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}"
            await asyncio.sleep(0.05)
        return value

    async def text(self, selector: str) -> str:
        """The text of an element."""
        return str(await self.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    async def offline(self, cut: bool) -> None:
        """Cuts the page off from every server, or joins it to them again."""
        unlimited = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        await self.send("Network.emulateNetworkConditions", offline=cut, **unlimited)

    async def resize(self, width: int, height: int, phone: bool = False) -> None:
        """Sets the size of the window."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    async def scheme(self, name: str) -> None:
        """Prefers "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def click(self, x: float, y: float) -> None:
        """A mouse click at a place in the window."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.send(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    async def press(self, key: str) -> None:
        """A key, by its DOM name."""
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def screenshot(self, path: Path, full: bool = False) -> None:
        """Saves a picture of the window, or of the whole page."""
        result = await self.send("Page.captureScreenshot", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(result["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded":
                entry = event["params"]["entry"]
                if entry["level"] == "error":
                    self.errors.append(f"{entry['text']} {entry.get('url', '')}")
            elif event["method"] == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])


@asynccontextmanager
async def chromium(binary: str) -> AsyncIterator[Page]:
    """Starts a browser with an empty profile; ends it afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [binary, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(profile), process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                    targets = await reply.json()
                url = next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page")
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    page = Page(socket)
                    try:
                        yield page
                    finally:
                        await page.close()
        finally:
            process.kill()
            process.wait()


async def _port(profile: Path, process: subprocess.Popen[bytes]) -> int:
    told = profile / "DevToolsActivePort"
    deadline = time.monotonic() + START_SECONDS
    while not (told.exists() and "\n" in told.read_text()):
        assert process.poll() is None, "the browser ended at once"
        assert time.monotonic() < deadline, "the browser did not start in time"
        await asyncio.sleep(0.05)
    return int(told.read_text().split("\n", 1)[0])
