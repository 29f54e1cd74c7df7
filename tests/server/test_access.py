"""Requests as browsers, proxies, containers and monitors send them: CORS, Host, encodings of the body, HEAD."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.errors import EngineError
from minitui.server.access import Turns
from minitui.server.application import create_app
from minitui.server.settings import Role, ServerSettings
from tests.support.server.serving import Running
from tests.support.waiting import wait_until

PAGE, KEY = "https://class.example", "a-key-of-the-tests"
TEXT = {"prompt": "The KV cache holds the keys", "add_special_tokens": False}
FORM = "application/x-www-form-urlencoded"
EMPTY = gzip.compress(b"{}", mtime=0)  # names of tests have it: it must not depend on the time


# ---- pages of other sites


@pytest.fixture
def asks(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Asks the server as a browser does for a page, if the server has a key and lets PAGE use it."""
    server.set(monkeypatch, cors_origins=(PAGE,), keys={KEY: Role.CHAT})
    transport = httpx.ASGITransport(create_app(server.service))
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def ask(method: str, origin: str, **headers: str) -> Any:
        return server.call(client.request(method, "/v1/models", headers={"Origin": origin, **headers}))

    yield ask
    server.call(client.aclose())


def test_an_allowed_page_may_send_every_header_of_the_official_clients(asks: Any) -> None:
    def preflight(origin: str, names: str) -> Any:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": names}
        return asks("OPTIONS", origin, **asked)

    sent = {  # by openai and anthropic, for Python and JavaScript
        "accept", "accept-encoding", "anthropic-beta", "anthropic-dangerous-direct-browser-access", "anthropic-version",
        "authorization", "content-type", "idempotency-key", "openai-organization", "openai-project", "user-agent",
        "x-api-key", "x-stainless-arch", "x-stainless-async", "x-stainless-helper", "x-stainless-helper-method",
        "x-stainless-lang", "x-stainless-os", "x-stainless-package-version", "x-stainless-retry-count",
        "x-stainless-runtime", "x-stainless-runtime-version", "x-stainless-timeout",
    }
    answer = preflight(PAGE, ",".join(sorted(sent)))
    allowed = {name.strip() for name in answer.headers["access-control-allow-headers"].lower().split(",")}
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
    assert sent <= allowed, sent - allowed
    refused = preflight("https://other.example", "x-stainless-lang")
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers


def test_only_an_allowed_page_gets_answers_and_only_with_a_key(asks: Any) -> None:
    key = {"Authorization": f"Bearer {KEY}"}
    answer = asks("GET", PAGE, **{"Sec-Fetch-Site": "cross-site"}, **key)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    assert asks("GET", PAGE).status_code == 401
    other = asks("GET", "https://other.example", **key)
    assert other.status_code == 403 and "access-control-allow-origin" not in other.headers


def test_a_refused_page_is_told_the_option(server: Running) -> None:
    message = server.get("/v1/models", headers={"Origin": PAGE}).json()["error"]["message"]
    assert f"--cors-origin {PAGE}" in message


# ---- Host


def test_a_proxy_s_or_a_container_s_host_can_be_allowed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def status(host: str) -> int:
        return server.get("/v1/models", headers={"Host": host}).status_code

    refused = server.get("/v1/models", headers={"Host": "host.docker.internal:8000"})
    assert refused.status_code == 403
    assert "--allowed-host host.docker.internal, or with --api-key" in refused.json()["error"]["message"]
    server.set(monkeypatch, allowed_hosts=("host.docker.internal", "*.Class.example"))
    allowed = ("host.docker.internal", "Host.Docker.Internal:8000", "a.class.example", "b.a.class.example.")
    for host in allowed:
        assert status(host) == 200, host
    for host in ("docker.internal", "class.example", "evilclass.example", "a.class.example.evil", "evil.example"):
        assert status(host) == 403, host
    own = {"Host": "a.class.example", "Origin": "https://a.class.example"}
    assert server.get("/v1/models", headers=own).status_code == 200
    assert server.get("/v1/models", headers={**own, "Origin": "https://b.class.example"}).status_code == 403


@pytest.mark.parametrize("name", ["*", "https://a.example", "a.example:8000", "*.*.example", ""])
def test_a_host_that_is_none_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(EngineError, match=r"without a port.*with API keys, every host is allowed"):
        ServerSettings(allowed_hosts=(name,))


# ---- the body's type and encoding

SENT = {
    "gzip": gzip.compress, "x-gzip": gzip.compress, "GZIP": gzip.compress, "deflate": zlib.compress,
    "identity": bytes, "": bytes,
}


@pytest.mark.parametrize("coding", SENT)
@pytest.mark.parametrize("kind", ["application/json", "text/plain", "text/plain;charset=UTF-8", FORM, None])
def test_a_body_is_read_however_it_is_packed(server: Running, coding: str, kind: str | None) -> None:
    headers = {"Content-Encoding": coding} | ({"Content-Type": kind} if kind else {})
    body = SENT[coding](json.dumps(TEXT).encode())
    answer = server.http.post("/tokenize", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json() == server.post("/tokenize", TEXT).json()


@pytest.mark.parametrize(("coding", "body", "words"), [
    ("br", b"x", "'br' is not supported"), ("gzip, gzip", EMPTY, "is not supported"),
    ("gzip", b"{}", "is not valid gzip"), ("gzip", EMPTY[:-3], "its end is missing"),
    ("gzip", EMPTY * 2, "bytes after its end"), ("gzip", b"", "its end is missing"),
])
def test_a_damaged_or_unknown_encoding_is_the_callers_error(
    server: Running, coding: str, body: bytes, words: str
) -> None:
    answer = server.http.post("/tokenize", content=body, headers={"Content-Encoding": coding})
    assert answer.status_code == (415 if "supported" in words else 400)
    assert words in answer.json()["error"]["message"]


def test_a_zip_bomb_is_refused_at_the_limit_of_the_inflated_size(server: Running) -> None:
    import tracemalloc

    packed = gzip.compress(b" " * (64 << 20), 1)
    assert len(packed) < server.service.settings.max_body
    tracemalloc.start()
    try:
        answer = server.http.post("/tokenize", content=packed, headers={"Content-Encoding": "gzip"})
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
    assert answer.status_code == 413 and "the limit is 4,194,304" in answer.json()["error"]["message"]


# ---- HEAD, and the first page


def test_refused_requests_and_reads_take_no_turn(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(turns: Turns) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Turns, "wait", never)
    assert server.http.get("/health").status_code == 200
    server.set(monkeypatch, keys={KEY: Role.CHAT})
    assert server.http.post("/v1/completions", json=TEXT).status_code == 401


def test_head_is_get_without_the_body(server: Running) -> None:
    for path in ("/", "/health", "/v1/models", "/metrics", "/openapi.json", "/minitui/tokenizer/tokenizer.json"):
        whole, head = server.get(path), server.http.head(path)
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert server.http.head("/nothing").status_code == 404 and server.http.head("/generate").status_code == 405
    watching = len(server.service.broadcast.watchers)
    assert server.http.head("/minitui/records").status_code == 200
    wait_until(lambda: len(server.service.broadcast.watchers) <= watching, "its stream lives on")


def test_the_first_page_links_what_a_browser_can_show(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    import re

    page = server.get("/")
    assert page.headers["content-type"].startswith("text/html")
    links = re.findall('href="([^"]+)"', page.text)
    assert "/docs" in links and "/metrics" in links
    assert all(server.get(link).status_code == 200 for link in links)
    server.set(monkeypatch, keys={KEY: Role.CONTROL})
    assert server.get("/").status_code == 200


def test_a_paused_engine_is_a_status_for_students_and_slow_motion_a_notice(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, lecturer = "the-key-of-students", "the-key-of-lecturers"
    server.set(monkeypatch, keys={student: Role.CHAT, lecturer: Role.CONTROL})
    ask = {"messages": [{"role": "user", "content": "What is paging?"}], "max_tokens": 2}
    own, other = ({"Authorization": f"Bearer {key}"} for key in (lecturer, student))

    def control(**body: object) -> None:
        assert server.post("/minitui/control", body, headers=own).status_code == 200

    control(action="pause")
    try:
        refused = server.post("/v1/chat/completions", ask, headers=other)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["message"].startswith("your lecturer paused the engine")
        assert refused.json()["error"]["code"] == "engine_paused"
        assert server.get("/health").json()["held"] == "your lecturer paused the engine"
        tokens = server.post("/tokenize", {"prompt": "a"}, headers=other)
        assert tokens.status_code == 200, "this needs no engine"
        control(action="resume")
        control(action="pace", factor=2)
        slow = server.post("/v1/chat/completions", ask, headers=other)
        assert slow.status_code == 200 and "lecturer slowed the engine down to 1/2" in slow.headers["x-minitui-warning"]
    finally:
        control(action="resume")
        control(action="pace", factor=1)
    free = server.post("/v1/chat/completions", ask, headers=other)
    assert free.status_code == 200 and "lecturer" not in free.headers.get("x-minitui-warning", "")
    assert "held" not in server.get("/health").json() or server.get("/health").json()["held"] is None
