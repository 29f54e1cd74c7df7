"""The page of --web: its title, the buttons of a phone, and the room of the terminal."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from textual.drivers.web_driver import WebDriver

from minitui.tui.actions import ACTIONS, key_label, key_press
from minitui.tui.widgets.bars import StatusBar
from minitui.web.mirror import Application
from tests.support.app.driving import drawn
from tests.tui.keys.test_keys import recording
from tests.web.test_remote_browser import CHROMIUM, browser

HINTS = [["?", "help"], ["no key", "x"], ["esc r", "replay"]]


async def test_the_application_tells_the_page_its_title_and_the_keys_of_each_screen() -> None:
    told: list[dict[str, Any]] = []
    driver = object.__new__(WebDriver)
    driver.write_meta = told.append  # type: ignore[method-assign]

    def paint(app: Any) -> None:
        own, app._driver = app._driver, driver
        try:
            app.screen.query_one(StatusBar).paint(app.view)
        finally:
            app._driver = own

    async with recording((100, 30)) as (app, pilot):
        app.open_mode("inspect")
        await drawn(pilot)
        paint(app)
        paint(app)
        assert [message["title"] for message in told] == ["Inspect · minitui"], "the same message is sent once"
        assert ("tab", "panel") in told[0]["keys"]
        app.open_mode("lecture")
        await drawn(pilot)
        paint(app)
    assert told[-1]["title"] == "Lecture · minitui" and told[-1]["keys"] != told[0]["keys"]


def test_a_hint_presses_the_key_that_it_names() -> None:
    for action in ACTIONS:
        first = action.key.split(",")[0]
        assert not first or key_press(key_label(first)).key == first
    assert key_press("esc").key == "escape" and key_press("?").character == "?" and key_press("space").character == " "


async def test_a_page_message_reaches_the_presenter_and_the_viewers_of_a_mirror() -> None:
    pytest.importorskip("textual_serve", reason="the extra 'web' is not installed")
    from aiohttp.test_utils import TestClient, TestServer

    from minitui.web.mirror_server import MirrorSite

    application = Application([], (120, 36))
    site = MirrorSite(application, "127.0.0.1", "viewers", "sesame")
    keys = [["tab", "panel"]]
    async with TestClient(TestServer(site.app)) as client:
        own = {"Origin": str(client.make_url("")).rstrip("/")}

        async def texts(token: str, number: int) -> list[Any]:
            async with client.ws_connect(f"/ws/{token}", headers=own) as page:
                if token == "viewers":  # one is there before the message, the other comes after it
                    await application.handle(b"M", json.dumps({"type": "page", "title": "Chat", "keys": keys}).encode())
                got: list[Any] = []
                while len(got) < number:
                    message = await page.receive(5)
                    got += [json.loads(message.data)] if isinstance(message.data, str) else []
                return got

        assert sorted(await texts("viewers", 2)) == [["page", "Chat", keys], ["size", 120, 36]]
        assert await texts("sesame", 1) == [["page", "Chat", keys]]
        await application.handle(b"M", b'{"type": "exit"}')
        assert application.page == json.dumps(["page", "Chat", keys])
        await site.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
async def test_a_phone_has_buttons_that_press_keys_and_nothing_of_the_terminal_is_outside_the_window(
    tmp_path: Path,
) -> None:
    pytest.importorskip("textual_serve", reason="the extra 'web' is not installed")
    from minitui.web.site import Site, first_size, messages

    got: asyncio.Queue[Any] = asyncio.Queue()

    class Recorder(Site):
        async def attend(self, websocket: Any, request: Any, may_type: bool) -> None:
            await websocket.send_bytes(b"\x1b[?1049h\x1b[?1000h\x1b[?1003h\x1b[?1006h ready")
            await websocket.send_json(["page", "Inspect · minitui", HINTS])
            got.put_nowait(("size", first_size(request)))
            async for kind, rest in messages(websocket):
                if kind == "stdin":
                    got.put_nowait((kind, rest[0]))

    async def typed() -> str:
        async with asyncio.timeout(30):
            while (event := await got.get())[0] != "stdin":
                pass
        return str(event[1])

    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/?token=t"
    async with Recorder("127.0.0.1", {"t": True}).serving(listening), browser("about:blank", tmp_path) as page:

        async def value(expression: str) -> Any:
            answer = await page.call("Runtime.evaluate", returnByValue=True, expression=expression)
            return answer["result"].get("value")

        async def touch(*places: tuple[float, float]) -> None:
            for number, (x, y) in enumerate(places):
                kind = "touchMove" if number else "touchStart"
                await page.call("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y}])
            await page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

        for width, height, phone in ((390, 844, True), (844, 390, True), (1200, 760, False)):
            await page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=phone,
                            deviceScaleFactor=3 if phone else 1)
            await page.call("Emulation.setTouchEmulationEnabled", enabled=phone)
            await page.open(url)
            await page.until("ready")
            while not got.empty():  # of the page before
                got.get_nowait()
            async with asyncio.timeout(30):
                while await value("document.title") != "Inspect · minitui":
                    await asyncio.sleep(0.05)
            room = "document.getElementById('terminal')"
            screen, wide, high, whole = await value(f"""(() => {{
                const box = (element) => element.getBoundingClientRect();
                const s = box({room}.querySelector(".xterm-screen"));
                return [[s.left, s.top, s.right, s.bottom], innerWidth, box({room}).height,
                        [document.documentElement.scrollWidth, document.documentElement.scrollHeight]];
            }})()""")
            assert screen[0] >= 0 and screen[1] >= 0 and screen[2] <= wide + 1 and screen[3] <= high + 1
            assert screen[2] > 0.9 * wide and screen[3] > 0.9 * high, "a part of the window is black"
            assert whole == [width, height], "the page can be scrolled"
            assert (high < height - 40) is phone, "buttons are for fingers"
            if not phone:
                continue
            boxes = await value("""[...document.querySelectorAll("#keys button")].map((button) => {
                const box = button.getBoundingClientRect();
                return [button.innerText, box.x + box.width / 2, box.y + box.height / 2, box.width, box.height];
            })""")
            labels = [label for label, *_ in boxes]
            assert labels[:2] == ["?help", "esc rreplay"] and "ctrl+g" in labels and "no keyx" not in labels
            assert all(w >= 40 and h >= 40 for *_, w, h in boxes), "a finger does not hit it"
            for name, sent in (("esc rreplay", "\x1br"), ("↑", "\x1b[A"), ("enter", "\r")):
                _, x, y, *_ = boxes[labels.index(name)]
                await touch((x, y))
                assert await typed() == sent
            await touch((100, 150), (100, 120), (100, 90))
            assert (await typed()).startswith("\x1b[<65;"), "a swipe upwards turns the wheel down"
