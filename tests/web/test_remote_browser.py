"""The application in a real browser: a headless Chromium types a question and reads the answer, or watches."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyte
import pytest

from minitui.trace.reader import TraceReader
from tests.support.server.serving import Running
from tests.support.waiting import until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """A page of a headless Chromium, spoken to in the DevTools protocol."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._next = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._clear()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._channel:
            told = json.loads(message.data)
            if told.get("id") in self._answers:
                self._answers.pop(told["id"]).set_result(told.get("result", told))
            elif told.get("method") == "Network.webSocketFrameReceived":
                frame = told["params"]["response"]
                if frame["opcode"] == 2:  # text is for the page: the names of keys, for example
                    self._sent.append(base64.b64decode(frame["payloadData"]))

    def _clear(self) -> None:
        self._sent: list[bytes] = []  # sent to the page's terminal, unread by us
        self._terminal = pyte.Screen(240, 80)  # larger than the page's: positions are absolute
        self._reader = pyte.Stream(self._terminal)

    async def call(self, method: str, **params: Any) -> Any:
        self._next += 1
        answer = self._answers[self._next] = asyncio.get_running_loop().create_future()
        await self._channel.send_str(json.dumps({"id": self._next, "method": method, "params": params}))
        return await asyncio.wait_for(answer, 90)

    async def open(self, url: str) -> None:
        """Another page in the place of this one."""
        await self.call("Page.navigate", url="about:blank")
        self._clear()
        await self.call("Page.navigate", url=url)

    async def type(self, text: str) -> None:
        for character in text:
            await self.call("Input.dispatchKeyEvent", type="keyDown", text=character, key=character)
            await self.call("Input.dispatchKeyEvent", type="keyUp", key=character)

    async def focus(self) -> None:
        """Go where keys are taken."""
        await self.call("Runtime.evaluate", expression="document.querySelector('.xterm-helper-textarea').focus()")

    async def enter(self) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r",
                            windowsVirtualKeyCode=13)

    @property
    def words(self) -> str:
        """Returns the text on the page's terminal."""
        data = re.sub(rb"\x1b\[[?>=<][0-9;]*[a-zA-Z$]+", b"", b"".join(self._sent)).decode("utf-8", "replace")
        self._sent.clear()
        self._reader.feed(data)
        return "\n".join(line.rstrip() for line in self._terminal.display)

    async def until(self, text: str, seconds: float = 90.0) -> None:
        missing = f"{text!r} was not shown; there stands:\n"
        await until(lambda: text in self.words, lambda: missing + self.words.rstrip(), seconds)


@contextlib.asynccontextmanager
async def browser(url: str, profile: Path) -> AsyncIterator[Browser]:
    """A Chromium at `url`."""
    aiohttp = pytest.importorskip("aiohttp", reason="the extra 'web' is not installed")
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        "--remote-debugging-port=0", f"--user-data-dir={profile}", "--window-size=1200,760", "about:blank",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        port_file = profile / "DevToolsActivePort"
        words = await until(lambda: port_file.is_file() and port_file.read_text().split(), "Chromium did not start", 90)
        port = words[0]
        async with aiohttp.ClientSession() as http:
            pages = await (await http.get(f"http://127.0.0.1:{port}/json/list")).json()
            page = next(p for p in pages if p["type"] == "page")
            async with http.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as channel:
                session = Browser(channel)
                await session.call("Network.enable")
                await session.call("Page.enable")
                await session.call("Page.navigate", url=url)
                yield session
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def web(directory: Path, name: str, *options: str) -> Iterator[tuple[int, Callable[[], str]]]:
    """Runs `minitui chat --web` on a free port; yields the port, and a function for the command's output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = {"MINITUI_DATA": str(directory / f"{name} data"), "MINITUI_CONFIG": str(directory / "none.toml")}
    command = [sys.executable, "-m", "minitui", "chat", "--web", "--web-port", str(port), *options]
    log = directory / name
    with log.open("wb") as file:
        process = subprocess.Popen(command, env={**os.environ, **data}, stdout=file, stderr=file)

    def said() -> str:
        assert process.poll() is None, log.read_text()
        return log.read_text()

    try:
        yield port, said
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        process.kill()
    _, alive = psutil.wait_procs([p for p in family if p.is_running()], timeout=60)
    assert not alive, f"{[p.cmdline() for p in alive]} outlived the command"


async def until_said(said: Callable[[], str], port: int, words: str) -> str:
    """Returns a command's output once it contains these words and its port is open."""
    deadline = time.monotonic() + 60
    while words not in said() or not _open(port):
        assert time.monotonic() < deadline, said()
        await asyncio.sleep(0.1)
    return said()


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
async def test_a_browser_types_a_question_and_reads_the_answer_and_another_watches(
    server: Running, tmp_path: Path
) -> None:
    for package in ("textual_serve", "fastapi", "httpx"):
        pytest.importorskip(package, reason="the extras 'web' and 'serve' are not installed")
    recording = tmp_path / "class.trace"
    mirrored = web(tmp_path, "mirror", "--mirror", "--record", str(recording), "--connect", server.url)
    with web(tmp_path, "web") as (port, said), mirrored as (mirror_port, mirror_said):
        told = await until_said(said, port, "minitui is at")
        async with browser(told.partition("minitui is at ")[2].strip(), tmp_path / "profile") as page:
            await page.until("Ask, or / for commands")
            await page.until("blocks of")  # the engine's facts have come over the wire
            await page.focus()
            await page.type("What is the KV cache?")
            await page.enter()
            try:
                await page.until("The KV cache stores the key")
                await page.until("prompt tokens from cache")
                await asyncio.sleep(1.0 if "MINITUI_BROWSER_PICTURE" in os.environ else 0.0)
            finally:
                picture = await page.call("Page.captureScreenshot", format="png")
                target = Path(os.environ.get("MINITUI_BROWSER_PICTURE", tmp_path / "browser.png"))
                target.write_bytes(base64.b64decode(picture["data"]))
            told = await until_said(mirror_said, mirror_port, "you type at")
            viewers, *_, presenter = re.findall(r"token=(\S+)", told)
            await watch(page, f"http://127.0.0.1:{mirror_port}", viewers, presenter)
    reader = TraceReader(recording)
    assert reader.complete and any(record[2] == "step" for record in reader.records())


async def watch(page: Browser, url: str, viewers: str, presenters: str) -> None:
    """The page shows what the presenter types; its own keys have no effect."""
    import aiohttp

    own = {"Origin": url}
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/ws/{presenters}", headers=own) as presenter:
        await page.open(f"{url}/?token={viewers}")
        await page.until("Ask, or / for commands")
        await page.focus()
        await page.type("in vain")
        await page.enter()
        for key in (*"What is prefill?", "\r"):
            await presenter.send_json(["stdin", key])
        await page.until("Prefill is the first phase")
        await page.until("prompt tokens from cache")
        assert "in vain" not in page.words
        # The picture has the size of the presenter's window: it fills the viewer's, and a phone shows letters of 10 px.
        screen = "document.querySelector('.xterm-screen')"
        for (columns, rows), (width, height) in {(120, 36): (1920, 1080), (90, 30): (390, 844)}.items():
            await presenter.send_json(["resize", {"width": columns, "height": rows}])
            await page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                            mobile=width < height)
            await page.open(f"{url}/?token={viewers}")
            await page.until("Ask, or / for commands")
            got = await page.call("Runtime.evaluate", returnByValue=True, expression=f"""[document.title,
                {screen}.offsetWidth, {screen}.offsetHeight,
                Number(document.getElementById("terminal").dataset.fontSize)]""")
            title, wide, high, font = got["result"]["value"]
            assert title.endswith("minitui") and font >= 10
            if width > height:
                assert 0.93 * width < wide <= width and 0.93 * height < high <= height, "a part of the window is black"
            else:
                assert font == 10 and wide > width, "the letters are too small"


def _open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
