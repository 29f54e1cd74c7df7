"""One application with many viewers: what each viewer gets, and who may type."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from typing import Any

import pyte
import pytest
from textual.app import App, ComposeResult
from textual.geometry import Region
from textual.widgets import Static

from engine.errors import EngineError
from minitui.web.mirror import MAX_UNREAD, Application, Mirror, Viewer
from minitui.web.mirror_driver import MirrorDriver
from tests.support.waiting import until


class Tab:
    """A viewer's connection. `got`: the bytes that arrived; while `stuck`, none do."""

    def __init__(self, mirror: Mirror, presenter: bool = False) -> None:
        self.got: list[bytes] = []
        self.free = asyncio.Event()
        self.free.set()
        self.viewer = Viewer(self._send, presenter)
        self.task = asyncio.create_task(mirror.show(self.viewer))

    async def _send(self, data: bytes) -> None:
        await self.free.wait()
        self.got.append(data)

    @property
    def pictures(self) -> bytes:
        """The bytes after the terminal's setup."""
        return b"".join(self.got[1:])


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Mirror, list[float]]]:
    """A mirror, and the times at which it has asked for a keyframe."""
    monkeypatch.setattr("minitui.web.mirror.KEYFRAME_S", 0.1)
    asked: list[float] = []
    mirror = Mirror(lambda: asked.append(asyncio.get_running_loop().time()))
    yield mirror, asked


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_late_viewers_share_one_keyframe_of_the_whole_screen(stage: Any) -> None:
    mirror, asked = stage
    first = Tab(mirror)
    mirror.drawn(b"too early")
    await until(lambda: asked)
    mirror.keyframe(b"[K1]")
    mirror.drawn(b"a")
    late = [Tab(mirror) for _ in range(5)]
    await settle()
    mirror.drawn(b"b")
    await until(lambda: len(asked) == 2)
    mirror.drawn(b"c")
    mirror.keyframe(b"[K2]")
    mirror.drawn(b"d")
    await settle()
    assert first.pictures == b"[K1]abcd" and {tab.pictures for tab in late} == {b"[K2]d"}
    assert len(asked) == 2 and asked[1] - asked[0] >= 0.09, "keyframes come too often"


async def test_a_slow_viewer_has_a_bounded_queue_delays_no_other_and_continues_with_a_keyframe(stage: Any) -> None:
    mirror, asked = stage
    slow, quick = Tab(mirror), Tab(mirror)
    await until(lambda: asked)
    mirror.keyframe(b"[K1]")
    await settle()
    slow.free.clear()
    piece = b"x" * 10_000
    most = 0
    for _ in range(100):
        mirror.drawn(piece)
        most = max(most, slow.viewer._size)
        await settle()
    assert quick.pictures == b"[K1]" + 100 * piece
    assert 10_000 < most <= MAX_UNREAD and slow.viewer._size == 0
    await asyncio.sleep(0.15)
    assert len(asked) == 1, "he cannot take a keyframe yet"
    slow.free.set()
    await until(lambda: len(asked) == 2)
    mirror.drawn(b"unseen")
    mirror.keyframe(b"[K2]")
    mirror.drawn(b"e")
    await settle()
    assert slow.pictures.endswith(b"[K2]e") and b"unseen" not in slow.pictures
    assert quick.pictures.endswith(b"unseene") and b"[K2]" not in quick.pictures


async def test_only_the_presenter_has_clipboard_and_mouse_and_a_viewer_that_leaves_is_removed(stage: Any) -> None:
    mirror, asked = stage
    viewer, presenter = Tab(mirror), Tab(mirror, presenter=True)
    await until(lambda: asked)
    mirror.keyframe(b"[K]")
    mirror.copied(b"secret")
    await settle()
    assert viewer.pictures == b"[K]" and presenter.pictures == b"[K]secret"
    assert b"?1000h" in presenter.got[0] and b"?1000h" not in viewer.got[0]
    viewer.task.cancel()
    await asyncio.gather(viewer.task, return_exceptions=True)
    assert mirror.viewers == {presenter.viewer}

    async def broken(data: bytes) -> None:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await mirror.show(Viewer(broken))
    assert mirror.viewers == {presenter.viewer}
    presenter.task.cancel()


# ---- the application's end


class Two(App[None]):
    def compose(self) -> ComposeResult:
        yield Static("first line", id="one")
        yield Static("second [b]line[/b]", id="two")


async def test_a_keyframe_is_the_screen_and_other_viewers_miss_nothing() -> None:
    app = Two()
    async with app.run_test(size=(40, 6)) as pilot:
        driver = object.__new__(MirrorDriver)
        driver._app = app
        app.query_one("#one", Static).update("another line")
        await pilot.pause()
        compositor = app.screen._compositor
        waiting = Region(0, 1, 40, 1)
        compositor._dirty_regions.add(waiting)
        drawn = driver.whole_screen()
        assert waiting in compositor._dirty_regions, "what was still to be drawn is forgotten"
        screen = pyte.Screen(60, 9)
        pyte.Stream(screen).feed("left over from before" + drawn)
        assert [line.rstrip() for line in screen.display[:3]] == ["another line", "second line", ""]

        told: list[tuple[bytes, str]] = []
        driver._packet = lambda kind, text: told.append((kind, text))  # type: ignore[method-assign]
        driver._write = lambda data: told.append((data[:1], data[5:].decode()))
        driver.write("\x1b]52;c;c2VjcmV0\a")
        driver.write("drawn")
        driver.on_meta("keyframe", {})
        await pilot.pause()
        assert [kind for kind, _ in told] == [b"C", b"D", b"K"] and told[2][1] == drawn
        driver.on_meta("resize", {"width": 30, "height": 5})
        await pilot.pause()
        assert app.size == (30, 5)


async def test_an_application_that_does_not_begin_says_why() -> None:
    application = Application([sys.executable, "-c", "import sys; sys.exit('minitui: no such engine')"], (80, 24))
    with pytest.raises(EngineError, match=r"^no such engine$"):
        await application.start()
    await application.stop()


# ---- the browsers' end: also tests/web/test_access.py


async def test_only_the_presenter_types_and_sets_the_size() -> None:
    pytest.importorskip("textual_serve", reason="the extra 'web' is not installed")
    from aiohttp.test_utils import TestClient, TestServer

    from minitui.web.mirror_server import MirrorSite

    application = Application([], (120, 36))
    reached: list[Any] = []
    application.type = lambda text: reached.append(text)  # type: ignore[method-assign,assignment]
    application.send = lambda **message: reached.append(message)  # type: ignore[method-assign,assignment]
    site = MirrorSite(application, "127.0.0.1", "viewers", "sesame")
    async with TestClient(TestServer(site.app)) as client:
        own = {"Origin": str(client.make_url("")).rstrip("/")}
        watching, presenting = [await client.ws_connect(f"/ws/{token}", headers=own) for token in ("viewers", "sesame")]
        assert '["size", 120, 36]' in [(await watching.receive(5)).data for _ in range(2)]
        await until(lambda: len(application.mirror.viewers) == 2 and reached == [{"type": "keyframe"}])
        for socket in (watching, presenting):
            for message in (["stdin", "q"], ["resize", {"width": 100, "height": 9}], ["focus"], ["stdin"], [7], {}, []):
                await socket.send_json(message)
            await socket.send_str("nonsense")
            await socket.send_json(["ping", "1"])
        application.mirror.keyframe(b"[K]")
        for socket in (watching, presenting):
            got = [(await socket.receive(5)).data for _ in range(3)]
            assert '["pong", "1"]' in got and b"[K]" in got
            assert ('["size", 100, 9]' in got) is (socket is watching)
        assert reached[1:] == ["q", {"type": "resize", "width": 100, "height": 9}, {"type": "focus"}]
        viewers = await (await client.get("/?token=viewers")).text()
        assert not re.search(r"https?://(?!www\.w3\.org)", viewers), "the page needs the web"
        assert "columns = 100, rows = 9" in viewers, "the font fits another picture"

        # The picture fits in all of the presenter's windows.
        async with client.ws_connect("/ws/sesame?width=80&height=24", headers=own):
            await until(lambda: application.size == (80, 9))
        await until(lambda: application.size == (100, 9))
        await site.close()


@pytest.mark.parametrize("token", ["viewers", "sesame"])
async def test_a_page_has_a_title_an_icon_and_a_width_for_phones(token: str) -> None:
    pytest.importorskip("textual_serve", reason="the extra 'web' is not installed")
    from minitui.web.mirror_server import MirrorSite
    from minitui.web.pages import page

    site = MirrorSite(Application([], (120, 36)), "127.0.0.1", "viewers", "sesame")
    text = page("/ws/x", site.head(token == "sesame"))
    head = text[: text.index("<body")]
    for tag in ("<title>minitui</title>", '<link rel="icon" href="data:image/svg', 'name="viewport"'):
        assert head.count(tag) == 1, f"{tag} is missing: the browser asks for /favicon.ico or shows 980 columns"
    assert head.count("const fitting = ") == 1


async def test_without_a_mirror_the_network_is_refused() -> None:
    pytest.importorskip("textual_serve", reason="the extra 'web' is not installed")
    from minitui.web.serve import run_web
    from minitui.web.settings import WebSettings

    with pytest.raises(EngineError, match="add --mirror"):
        run_web(WebSettings("0.0.0.0", 0, ("chat", "--connect", "http://127.0.0.1:9")))


def test_half_a_surrogate_pair_can_be_typed() -> None:
    application = Application([], (120, 36))
    written: list[bytes] = []
    application._write = lambda kind, data: written.append(kind + data)  # type: ignore[method-assign]
    application.type("a\ud83db")
    assert written == [b"Da?b"]
