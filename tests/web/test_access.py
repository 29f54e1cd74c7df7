"""Access to `minitui chat --web`: raw sockets, pages of other origins, and the processes left after SIGKILL."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import until

pytest.importorskip("textual_serve", reason="the extra 'web' is not installed")
pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

import aiohttp
from aiohttp import web

from minitui.lifeline import VARIABLE
from minitui.web import site as web_site
from minitui.web.settings import WebSettings
from minitui.web.site import Site, is_served, messages
from minitui.web.tabs import TabSite

KEYS = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)
TYPIST, VIEWER = "the-token-of-the-typist", "viewers"


class Heard(Site):
    """Stores the messages of sockets that may type."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__(host, {TYPIST: True, VIEWER: False})
        self.opened: list[bool] = []
        self.typed: list[Any] = []

    async def attend(self, websocket: web.WebSocketResponse, request: web.Request, may_type: bool) -> None:
        self.opened.append(may_type)
        async for kind, rest in messages(websocket):
            if may_type:
                self.typed.append((kind, rest))


@contextlib.asynccontextmanager
async def served(site: Any) -> AsyncIterator[int]:
    """The port on which this site answers."""
    listening = socket.create_server(("127.0.0.1", 0))
    async with site.serving(listening):
        yield listening.getsockname()[1]


async def ask(port: int, request: str) -> tuple[int, str]:
    """(status, everything that comes back) for these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode("utf-8", "surrogateescape"))
    async with asyncio.timeout(90):
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split()[1])
        body = b"" if status == 101 else await reader.read(1 << 16)
    writer.close()
    return status, (head + body).decode("utf-8", "replace")


HERE = "127.0.0.1:PORT"
SOCKETS = [  # (token, Host, Origin or None, status)
    (TYPIST, HERE, f"http://{HERE}", 101),
    (TYPIST, "localhost:PORT", "http://localhost:PORT", 101),
    (TYPIST, "LOCALHOST.:PORT", "http://localhost:PORT", 101),
    (TYPIST, "[::1]:PORT", "http://[::1]:PORT", 101),
    (TYPIST, "localhost:9", "http://localhost:9", 101),  # a tunnel with another port
    (VIEWER, HERE, f"http://{HERE}", 101),
    (TYPIST, HERE, "http://evil.com", 403),
    (TYPIST, HERE, None, 403),
    (VIEWER, HERE, None, 403),
    (TYPIST, HERE, "null", 403),
    (TYPIST, HERE, "", 403),
    (TYPIST, HERE, "http://[", 403),
    (TYPIST, HERE, "http://127.0.0.1:1", 403),  # another server of this machine
    (TYPIST, HERE, "http://localhost:PORT", 403),
    (TYPIST, HERE, f"http://{HERE}@evil.com", 403),
    (TYPIST, HERE, f"http://{HERE}\r\nOrigin: http://evil.com", 403),
    (TYPIST, HERE, f"file://{HERE}", 403),
    (TYPIST, "evil.com", "http://evil.com", 403),  # DNS that was rebound
    (TYPIST, "evil.com:PORT", f"http://{HERE}", 403),
    (TYPIST, "127.0.0.1.evil.com:PORT", "http://127.0.0.1.evil.com:PORT", 403),
    (TYPIST, "[::1", "http://[::1", 400),
    (TYPIST, "", "http://", 400),
    (TYPIST, f"{HERE}/@evil.com", f"http://{HERE}", 400),
    (TYPIST[:-1], HERE, f"http://{HERE}", 403),
    (TYPIST + "x", HERE, f"http://{HERE}", 403),
    ("%ED%A0%80%FF", HERE, f"http://{HERE}", 403),
    ("..%2f..%2fetc%2fpasswd", HERE, f"http://{HERE}", 403),
]


@pytest.mark.parametrize("token, host, origin, status", SOCKETS)
async def test_a_socket_needs_the_printed_address_its_origin_and_the_token(
    token: str, host: str, origin: str | None, status: int
) -> None:
    site = Heard()
    async with served(site) as port:
        said = "" if origin is None else f"Origin: {origin}\r\n"
        request = f"GET /ws/{token}?width=80&height=24 HTTP/1.1\r\nHost: {host}\r\n{said}{KEYS}\r\n"
        got, text = await ask(port, request.replace("PORT", str(port)))
        assert got == status, text
        if status == 101:  # the answer comes before the site attends to the socket
            await until(lambda: site.opened)
    assert site.opened == ([token == TYPIST] if status == 101 else [])
    assert TYPIST not in text and "Traceback" not in text


@pytest.mark.parametrize("path, status", [
    (f"/?token={TYPIST}", 200), (f"/?token={VIEWER}", 200), ("/", 403), ("/?token=", 403), ("/?token=guess", 403),
    (f"/?token=x&token={TYPIST}", 403), ("/ws", 404), ("/ws/", 404), ("/static/js/textual.js", 200),
    ("/static/", 403), ("/static/../server.py", 404), ("/static/%2e%2e/server.py", 404),
    ("/static//etc/passwd", 404), ("/download/x", 404),
])
async def test_a_page_needs_the_token_and_does_not_leak_it(path: str, status: int) -> None:
    site = Heard()
    async with served(site) as port:
        got, text = await ask(port, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n")
        assert got == status, text
        away, _ = await ask(port, f"GET {path} HTTP/1.1\r\nHost: evil.com:{port}\r\nConnection: close\r\n\r\n")
        assert away == 403
    for header in ("Referrer-Policy: no-referrer", "Cache-Control: no-store", "frame-ancestors 'none'"):
        assert header in text
    assert "Set-Cookie" not in text and "import asyncio" not in text and "root:" not in text
    if path == f"/?token={VIEWER}":
        assert f'"/ws/{VIEWER}"' in text and TYPIST not in text
        assert "https://fonts" not in text, "the page needs the web"


def test_the_names_of_the_printed_address() -> None:
    own = socket.gethostname().lower()
    table = {
        "127.0.0.1": {"localhost": True, "127.0.0.1": True, "::1": True, own: own == "localhost", "10.0.0.7": False},
        "0.0.0.0": {"localhost": True, own: True, "10.0.0.7": True, "fe80::1": True, "10.0.0.7.evil.com": False},
        "10.0.0.7": {"10.0.0.7": True, "localhost": False, "10.0.0.8": False, "evil.com": False},
        "Desk.local.": {"desk.local": True, "desk.local.evil.com": False, "localhost": False},
    }
    for host, names in table.items():
        assert {name: is_served(name, host) for name in names} == names, host


async def test_a_full_class_keeps_the_typist_not_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "max_sockets", 2)
    async with served(site := Heard()) as port, aiohttp.ClientSession() as http:
        url, own = f"http://127.0.0.1:{port}/ws/", {"Origin": f"http://127.0.0.1:{port}"}
        open_ = [await http.ws_connect(url + VIEWER, headers=own) for _ in range(2)]
        with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):
            await http.ws_connect(url + VIEWER, headers=own)
        open_.append(await http.ws_connect(url + TYPIST, headers=own))
        await until(lambda: sorted(site.opened) == [False, False, True])


async def test_an_invalid_message_at_most_closes_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Heard()
    async with served(site) as port, aiohttp.ClientSession() as http:
        own = {"Origin": f"http://127.0.0.1:{port}"}
        socket_ = await http.ws_connect(f"http://127.0.0.1:{port}/ws/{TYPIST}", headers=own)
        for text in ("[" * 500_000, "{}", "[]", "7", "[[]]", '["ping", 1]', "\x00", '["stdin"', '[{"stdin": 1}]'):
            await socket_.send_str(text)
        await socket_.send_bytes(b'["stdin", "binary"]')
        await socket_.send_json(["stdin", "still here"])
        await until(lambda: site.typed)
        await socket_.send_str("x" * (web_site.MAX_TYPED + 1))
        closed = await socket_.receive(60)
        while closed.type == aiohttp.WSMsgType.TEXT:
            closed = await socket_.receive(60)
        assert closed.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.ERROR, aiohttp.WSMsgType.CLOSED)
    assert site.typed == [("ping", [1]), ("stdin", ["still here"])]


@pytest.mark.parametrize("most, head_s, gone", [(20, 600.0, 40), (600, 1.0, 60)], ids=["too many", "too long"])
async def test_idle_and_slow_connections_keep_no_client_out(
    monkeypatch: pytest.MonkeyPatch, most: int, head_s: float, gone: int
) -> None:
    monkeypatch.setattr(web_site, "MAX_CONNECTIONS", most)
    monkeypatch.setattr(web_site, "HEAD_S", head_s)
    site = Heard()
    async with served(site) as port, aiohttp.ClientSession() as http:
        own = {"Origin": f"http://127.0.0.1:{port}"}
        tab = await http.ws_connect(f"http://127.0.0.1:{port}/ws/{TYPIST}", headers=own)
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
        for _, writer in silent[::2]:
            writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        got, _ = await ask(port, f"GET /?token={TYPIST} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert got == 200
        async with asyncio.timeout(90):
            for reader, _ in silent[:gone]:  # the oldest are closed, slow or idle
                with contextlib.suppress(ConnectionResetError):
                    while await reader.read(1 << 16):
                        pass
        for _, writer in silent:
            writer.close()
        await tab.send_json(["stdin", "still here"])
        await until(lambda: site.typed)


# ---- the process of a tab

APPLICATION = """
    import os, signal, sys, time
    from minitui.lifeline import end_with_parent
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it hangs, and nothing polite ends it
    print("__GANGLION__", flush=True)
    while True:
        time.sleep(60)
"""
PARENT = """
    import asyncio, socket, sys
    from minitui.web.settings import WebSettings
    from minitui.web.tabs import serve_tabs
    listening = socket.create_server(("127.0.0.1", 0))
    asyncio.run(serve_tabs(WebSettings(), listening, [sys.executable, "-c", sys.argv[1]]))
"""


async def test_no_application_outlives_a_killed_parent_even_if_it_hangs() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), textwrap.dedent(APPLICATION)], stderr=subprocess.PIPE, text=True
    )
    assert parent.stderr is not None
    family: list[psutil.Process] = []
    try:
        page = (await asyncio.to_thread(parent.stderr.readline)).split()[-1]
        url, token = page.split("/?token=")
        async with aiohttp.ClientSession() as http:
            tabs = [await http.ws_connect(f"{url}/ws/{token}", headers={"Origin": url}) for _ in range(2)]
            await until(lambda: len(psutil.Process(parent.pid).children(recursive=True)) == len(tabs))
            family = psutil.Process(parent.pid).children(recursive=True)
            parent.kill()
            parent.wait()
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, 40)
        assert not alive, f"{[one.cmdline() for one in alive]} outlived their parent"
    finally:
        parent.kill()
        parent.wait()
        parent.stderr.close()
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def test_the_command_itself_ends_with_its_parent(tmp_path: Path) -> None:
    environment = {**os.environ, "MINITUI_DATA": str(tmp_path), "MINITUI_CONFIG": str(tmp_path / "none.toml")}
    read, write = os.pipe()
    command = [sys.executable, "-m", "minitui", "tail"]  # would wait for questions
    environment[VARIABLE] = str(read)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               pass_fds=[read], env=environment)
    try:
        os.close(read)
        os.close(write)
        assert process.wait(60)
    finally:
        process.kill()
        process.communicate()


async def test_a_tab_that_cannot_begin_says_why_and_a_closed_one_ends_its_application(tmp_path: Path) -> None:
    failing = [sys.executable, "-c", "import sys; sys.exit('minitui: no server answers')"]
    async with served(TabSite(WebSettings(), TYPIST, failing)) as port, aiohttp.ClientSession() as http:
        own = {"Origin": f"http://127.0.0.1:{port}"}
        tab = await http.ws_connect(f"http://127.0.0.1:{port}/ws/{TYPIST}", headers=own)
        assert b"no server answers" in (await tab.receive(40)).data
        assert (await tab.receive(40)).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
    echo = """
        import os, sys
        sys.stdout.buffer.write(b"__GANGLION__\\n" + b"D" + (5).to_bytes(4, "big") + b"drawn"); sys.stdout.flush()
        while packet := sys.stdin.buffer.read(5):
            data = sys.stdin.buffer.read(int.from_bytes(packet[1:], "big"))
            if b'"quit"' in data:
                break
            data = packet[:1] + b" " + data
            sys.stdout.buffer.write(b"D" + len(data).to_bytes(4, "big") + data); sys.stdout.flush()
    """
    command = [sys.executable, "-c", textwrap.dedent(echo)]
    async with served(TabSite(WebSettings(), TYPIST, command)) as port, aiohttp.ClientSession() as http:
        own = {"Origin": f"http://127.0.0.1:{port}"}
        tab = await http.ws_connect(f"http://127.0.0.1:{port}/ws/{TYPIST}?width=x&height=-1", headers=own)
        assert (await tab.receive(40)).data == b"drawn"
        family = psutil.Process().children()
        for message in (["stdin", "héllo"], ["resize", {"width": 10**9, "height": 1}], ["resize", {"width": "x"}],
                        ["stdin", 5], ["focus"]):
            await tab.send_json(message)
        got = [(await tab.receive(40)).data for _ in range(3)]
        assert got[0] == "D héllo".encode() and json.loads(got[1][2:]) == {"type": "resize", "width": 1000, "height": 5}
        assert json.loads(got[2][2:]) == {"type": "focus"}
        await tab.close()
        started = [one for one in family if "__GANGLION__" in " ".join(one.cmdline() if one.is_running() else ())]
        _, alive = await asyncio.to_thread(psutil.wait_procs, started, 40)
        assert not alive
