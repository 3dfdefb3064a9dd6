# SPDX-License-Identifier: Apache-2.0
"""Looks at the built site in headless Chromium: ``python -m docs.browser OUT [PAGE ...]``.

A PAGE is a page of the site, or else a file, such as one that ``actorsnap trace --html`` wrote.

Opens each page at 1280 and at 390 pixels and writes screenshots to OUT. Fails if a page logs an
error to the console, misses a file, asks another host for anything, or is wider than the window.
Needs ``chromium`` (Debian: ``apt-get install chromium``) and ``make site``.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tornado.httpclient import AsyncHTTPClient
from tornado.websocket import WebSocketClientConnection, websocket_connect

SITE = Path(__file__).resolve().parents[1] / "site"
WIDTHS = (1280, 390)
_PAGE_S = 30
"""Longest time for a page, in seconds."""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


class Tab:
    """A page of the browser, driven by its debugging protocol."""

    def __init__(self, socket: WebSocketClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        await self._socket.write_message(json.dumps(message))
        while True:
            answer = await self._next()
            if answer.get("id") == self._number:
                return dict(answer.get("result", {}))

    async def wait_for(self, event: str) -> None:
        while not any(found["method"] == event for found in self.events):
            await self._next()

    async def _next(self) -> dict[str, Any]:
        text = await self._socket.read_message()
        if text is None:
            raise ConnectionError("the browser is gone")
        found: dict[str, Any] = json.loads(text)
        if "method" in found:
            self.events.append(found)
        return found


def troubles(events: list[dict[str, Any]], host: str) -> Iterator[str]:
    """What a page did that it must not do."""
    for event in events:
        params = event["params"]
        match event["method"]:
            case "Network.requestWillBeSent":
                url = urlsplit(params["request"]["url"])
                if url.scheme in ("http", "https", "ws", "wss") and url.netloc != host:
                    yield f"asks {url.netloc}"
            case "Network.responseReceived" if params["response"]["status"] >= 400:
                yield f"{params['response']['status']}: {params['response']['url']}"
            case "Runtime.exceptionThrown":
                yield f"exception: {params['exceptionDetails']['text']}"
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                yield f"console: {params['args']}"
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                yield f"log: {params['entry']['text']}"


async def look(tab: Tab, url: str, width: int) -> tuple[bytes, list[str]]:
    """Opens a page; a screenshot, and what it did that it must not do."""
    await tab.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=900,
        deviceScaleFactor=1,
        mobile=width < 600,
    )
    tab.events.clear()
    await tab.call("Page.navigate", url=url)
    await tab.wait_for("Page.loadEventFired")
    await asyncio.sleep(0.3)  # scripts that start after the load
    found = await tab.call("Runtime.evaluate", expression="document.documentElement.scrollWidth")
    seen = [*troubles(tab.events, urlsplit(url).netloc)]
    if (wide := found["result"]["value"]) > width:
        seen.append(f"is {wide} pixels wide")
    shot = await tab.call("Page.captureScreenshot", captureBeyondViewport=False)
    return base64.b64decode(shot["data"]), seen


def is_of_site(page: str) -> bool:
    return not Path(page).is_absolute() and (SITE / page).is_file()


async def check(out: Path, pages: dict[str, str], browser_port: int) -> int:
    """Opens pages, given with their URLs; 1 if one of them does what it must not do."""
    answer = None
    for _ in range(100):
        try:
            answer = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{browser_port}/json/list")
            break
        except OSError:
            await asyncio.sleep(0.1)
    assert answer is not None, "the browser does not start"
    (target, *_) = [each for each in json.loads(answer.body) if each["type"] == "page"]
    tab = Tab(await websocket_connect(target["webSocketDebuggerUrl"], max_message_size=1 << 28))
    for domain in ("Page", "Network", "Runtime", "Log"):
        await tab.call(f"{domain}.enable")
    num_bad = 0
    for page, url in pages.items():
        for width in WIDTHS:
            picture = out / f"{page.strip('/').replace('/', '-')}-{width}.png"
            async with asyncio.timeout(_PAGE_S):
                shot, seen = await look(tab, url, width)
            await asyncio.to_thread(picture.write_bytes, shot)
            for text in dict.fromkeys(seen):
                num_bad += 1
                print(f"{page} at {width}: {text}")
    print(f"{len(pages)} pages, {num_bad} troubles")
    return min(num_bad, 1)


def main() -> int:
    out, pages = Path(sys.argv[1]), sys.argv[2:]
    if shutil.which("chromium") is None:
        print("skipped: chromium is not installed (Debian: apt-get install chromium)")
        return 0
    for page in pages:
        if not is_of_site(page) and not Path(page).is_file():
            print(f"{page}: no page of the site, and no file")
            return 2
    out.mkdir(parents=True, exist_ok=True)
    pages = pages or sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
    handler = functools.partial(_Quiet, directory=str(SITE))
    with (
        tempfile.TemporaryDirectory() as profile,
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"http://127.0.0.1:{server.server_port}"
        urls = {
            page: f"{host}/{page}" if is_of_site(page) else Path(page).resolve().as_uri()
            for page in pages
        }
        browser_port = server.server_port + 1
        browser = subprocess.Popen(
            ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            + [f"--user-data-dir={profile}", f"--remote-debugging-port={browser_port}"]
            + ["--no-first-run", "--disable-background-networking", "about:blank"],
            stderr=subprocess.DEVNULL,
        )
        try:
            return asyncio.run(check(out, urls, browser_port))
        finally:
            browser.kill()
            browser.wait()
            server.shutdown()


if __name__ == "__main__":
    sys.exit(main())
