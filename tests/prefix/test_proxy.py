"""The proxy passes bytes on unchanged, and its log has prompts and what the server said, but no keys."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from engine.errors import EngineError
from minitui.prefix import proxy as proxy_module
from minitui.prefix.diagnose import diagnose
from minitui.prefix.proxy import Log, Proxy
from minitui.prefix.session import read_log

KEY = "sk-very-secret"
STREAM = (
    b'data: {"choices": [{"delta": {"content": "caf\xc3"}}]}\n\n',
    b'\xa9"}}]}\n\ndata: {"choices": [], "usage": {"prompt_tokens": 400, ',
    b'"prompt_tokens_details": {"cached_tokens": 384}}}',
    b"\n\ndata: [DONE]\n\n",
)


class Upstream:
    """A server that answers with these chunks, and notes what it got."""

    def __init__(self, chunks: tuple[bytes, ...] = STREAM, kind: bytes = b"text/event-stream", status: int = 200):
        self.chunks, self.kind, self.status = chunks, kind, status
        self.got: list[tuple[dict[bytes, bytes], str, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.got.append((dict(scope["headers"]), scope["path"], body))
        headers = [(b"content-type", self.kind), (b"x-data-parallel-rank", b"3")]
        headers += [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def through(upstream: Upstream, path: Any, hide: bool = False) -> tuple[httpx.AsyncClient, Log]:
    log = Log(path, hide)
    server = httpx.AsyncClient(transport=httpx.ASGITransport(upstream))
    app = Proxy("http://server:1234/base", log, server)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8080"), log


def asked(system: str = "Be brief.") -> dict[str, Any]:
    return {"model": "m", "cache_salt": "tenant secret", "messages": [
        {"role": "system", "content": system}, {"role": "user", "content": "What is a block?"}]}  # fmt: skip


async def test_bytes_pass_unchanged_and_keys_are_not_stored(tmp_path):
    upstream = Upstream()
    client, log = through(upstream, tmp_path / "log")
    headers = {"Authorization": f"Bearer {KEY}", "X-Api-Key": KEY, "Accept-Encoding": "gzip"}
    answer = await client.post("/v1/chat/completions?trace=1", json=asked(), headers=headers)
    assert answer.content == b"".join(STREAM)
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    got, path, body = upstream.got[0]
    assert got[b"authorization"].decode() == f"Bearer {KEY}" and got[b"accept-encoding"] == b"identity"
    assert path == "/base/v1/chat/completions" and json.loads(body) == asked()
    log.close()
    text = (tmp_path / "log").read_text()
    assert KEY not in text and "tenant secret" not in text and "What is a block?" in text
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    (turn,) = read_log(tmp_path / "log")
    assert (turn.prompt, turn.cached, turn.replica, turn.adapter, turn.salt) == (400, 384, "3", "m", "salt 1")


async def test_hidden_texts_are_not_in_the_log_and_still_compared(tmp_path):
    client, log = through(Upstream(), tmp_path / "log", hide=True)
    for system in ("word " * 100, "word " * 100, "word " * 50 + "other " * 50):
        await client.post("/v1/chat/completions", json=asked(system))
    log.close()
    text = (tmp_path / "log").read_text()
    assert "word" not in text and "What" not in text
    hashes = json.loads(text.splitlines()[1])["parts"][0]["hashes"]
    assert len(set(hashes)) == len(hashes) == 16  # that words repeat does not show, either
    found = diagnose(read_log(tmp_path / "log"))
    assert [one.cause for one in found] == ["first", "none", "system prompt changed"]


@pytest.mark.parametrize(("path", "body", "usage", "expected"), [
    ("/v1/messages", {"system": "s", "messages": [{"role": "user", "content": "q"}]},
     {"usage": {"input_tokens": 20, "cache_read_input_tokens": 300, "cache_creation_input_tokens": 80}}, (400, 300)),
    ("/v1/responses", {"instructions": "s", "input": "q"},
     {"usage": {"input_tokens": 50, "input_tokens_details": {"cached_tokens": 0}}}, (50, 0)),
    ("/v1/completions", {"prompt": "q"}, {"usage": {"prompt_tokens": 7}}, (7, None)),
    ("/v1/completions", {"prompt": "q"}, {"usage": {"prompt_tokens": "many"}}, (None, None)),
])  # fmt: skip
async def test_what_servers_tell(path, body, usage, expected, tmp_path):
    client, log = through(Upstream((json.dumps(usage).encode(),), b"application/json"), tmp_path / "log")
    await client.post(path, json=body)
    await client.get("/v1/models")
    log.close()
    (turn,) = read_log(tmp_path / "log")
    assert (turn.prompt, turn.cached) == expected
    assert turn.parts


async def test_what_is_refused_and_what_is_not_noted(tmp_path, monkeypatch):
    upstream = Upstream()
    client, log = through(upstream, tmp_path / "log")
    monkeypatch.setattr(proxy_module, "MOST_BODY", 1000)
    assert (await client.post("/v1/chat/completions", content=b"x" * 1001)).status_code == 413
    assert (await client.get("/v1/models", headers={"Host": "evil.example"})).status_code == 403
    assert (await client.get("/v1/models", headers={"Origin": "http://localhost:8080"})).status_code == 403
    assert not upstream.got
    assert (await client.post("/v1/chat/completions", content=b"[" * 900)).content == b"".join(STREAM)
    upstream.status = 500
    assert (await client.post("/v1/chat/completions", json=asked())).status_code == 500
    log.close()
    assert read_log(tmp_path / "log") == []
    with pytest.raises(EngineError, match="exists"):
        Log(tmp_path / "log", False)


def test_logs_from_elsewhere_are_checked(tmp_path):
    log = tmp_path / "log"
    for text, why in (
        ("{}", "not the first line"), ("x", "line 1"), ('{"format": "minitui-prefix-1"}\n{"number": 1}', "line 2"),
        ('{"format": "minitui-prefix-1"}\n{"number": 1, "at": 0, "parts": [], "cached": "all"}', "a number is wrong"),
        ('{"format": "minitui-prefix-1"}\n' + "[" * 100_000, "line 2"),
    ):  # fmt: skip
        log.write_text(text)
        with pytest.raises(EngineError, match=why):
            read_log(log)
