"""Faults and attacks: invalid requests, disconnects, slow readers, crashes of the engine."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engine.errors import EngineError
from engine.process.client import EngineClient
from engine.process.heartbeat import Condition
from engine.process.stream import Stream
from minitui.server.answer import Answer
from minitui.server.application import create_app
from minitui.server.command import DEAD_PEER_S, listen
from minitui.server.connection import Connection
from minitui.server.openai.completions import CompletionAnswer
from minitui.server.settings import Role, ServerSettings
from minitui.server.sse import EventStream
from minitui.server.telemetry.broadcast import MAX_UNREAD, Watcher
from tests.support.server.bodies import EXPLODING
from tests.support.server.events import chunks_of, data_of
from tests.support.server.serving import Open, Running, serving
from tests.support.waiting import ended, wait_until

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "What is paging?"}]}
LONG: dict[str, Any] = {**ASK, "max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("server"), engine={"max_num_seqs": 2}, max_waiting=2, max_body=2 << 20,
                 request_s=20.0, body_s=0.5) as running:
        yield running


# ---- the plain endpoint


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "application/json; charset=utf-8"])
def test_generate_accepts_a_bare_curl_request(server: Running, kind: str | None) -> None:
    prompt = b'"<|im_start|>user\\nWhat is the KV cache?<|im_end|>\\n<|im_start|>assistant\\n"'
    body = b'{"prompt": %s, "max_tokens": 6, "temperature": 0, "top_k": 5, "top_p": 0.9, "rep_penalty": 1.1}' % prompt
    streamed = server.http.post("/generate", content=body, headers={"content-type": kind} if kind else {})
    whole = server.http.post("/generate", content=body[:-1] + b', "stream": false}')
    assert whole.status_code == 200 and whole.json()["usage"]["completion_tokens"] == 6
    data = data_of(streamed.text)
    assert data[-1] == "[DONE]" and "".join(json.loads(d)["text"] for d in data[:-1]) == whole.json()["text"]


def test_no_text_can_break_the_framing_or_forge_the_end(server: Running) -> None:
    text = "a\n\ndata: [DONE]\n\nb\r\n: \u2028[DONE]"
    body = {**ASK, "stream": True, "max_tokens": 100, "guided_choice": [text]}
    data = data_of(server.post(CHAT, body).text)
    chunks = [json.loads(d) for d in data[:-1]]
    assert data.count("[DONE]") == 1 and data[-1] == "[DONE]"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text


# ---- limits


def test_a_full_queue_is_a_429_that_says_when_to_come_back(server: Running) -> None:
    server.post("/minitui/control", {"action": "pause"})
    opened = [Open(server.host.port, CHAT, {**ASK, "stream": True, "max_tokens": 2}) for _ in range(4)]
    try:
        wait_until(lambda: len(server.snapshot()["requests"]) == 4)
        refused = server.post(CHAT, ASK)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert server.get("/health").status_code == 200
    finally:
        server.post("/minitui/control", {"action": "resume"})
    for one in opened:
        with one:
            one.read_until(b"[DONE]")
    assert server.post(CHAT, {**ASK, "max_tokens": 2}).status_code == 200


TOKENS = {"tag": "a", "ids": [5], "params": {"max_tokens": 2, "ignore_eos": True}}


@pytest.mark.parametrize(("path", "body"), [
    (CHAT, {**LONG, "max_tokens": 2}), (CHAT, {**LONG, "max_tokens": 2, "stream": True, "n": 2}),
    ("/generate", {"prompt": "x", "max_tokens": 2}), ("/minitui/submit", TOKENS),
    (CHAT, {**ASK, "stream": True, "guided_regex": "("}),
], ids=["whole", "two samples", "generate", "tokens", "refused"])
def test_a_reply_has_given_its_places_back_before_its_caller_sees_the_end(
    server: Running, path: str, body: dict[str, Any]
) -> None:
    """Who asks again at once, perhaps with the same tag, must not be refused for the request before."""
    server.wait_idle()
    app, open_at_end = create_app(server.service), list[int]()

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def see(message: Any) -> None:
            if re.search(rb'"finish_reason":"|"error"|DONE', message.get("body", b"")):
                open_at_end.append(server.service.open)
            await send(message)

        await app(scope, receive, see)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(watched), base_url="http://localhost") as client:
            await client.post(path, json=body)

    server.call(ask())
    assert open_at_end and open_at_end[-1] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_everything_before_the_next_step(server: Running, stream: bool) -> None:
    server.wait_idle()
    running = Open(server.host.port, CHAT, {**LONG, "stream": stream})
    wait_until(lambda: any(r["state"] == "running" for r in server.snapshot()["requests"].values()))
    server.post("/minitui/control", {"action": "pause"})
    queued = Open(server.host.port, CHAT, {**LONG, "stream": stream})
    try:
        wait_until(lambda: len(server.snapshot()["requests"]) == 2)
        step = server.snapshot()["step"]
        running.socket.close()
        queued.socket.close()
        server.wait_idle()
        state = server.state()
        assert state.step == step, "it took steps to notice"
        assert sum(state.holders) == 0
    finally:
        server.post("/minitui/control", {"action": "resume"})


def test_a_reply_has_a_time_limit(server: Running, monkeypatch: Any) -> None:
    monkeypatch.setattr(server.service, "settings", ServerSettings(request_s=0.4))
    late = server.post(CHAT, LONG)
    assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
    data = data_of(server.post(CHAT, {**LONG, "stream": True}).text)
    assert json.loads(data[-2])["error"]["code"] == "timeout" and data[-1] == "[DONE]"
    server.wait_idle()


def test_a_reader_that_stops_reading_is_dropped() -> None:
    ended: list[bool] = []
    sent: list[int] = []

    async def frames() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1000

    async def send(message: Any) -> None:
        sent.append(1)
        if len(sent) > 5:
            await asyncio.sleep(3600)  # as a full socket does

    async def receive() -> Any:
        await asyncio.sleep(3600)

    async def main() -> float:
        started = time.monotonic()
        await EventStream(frames(), lambda: ended.append(True), stalled_s=0.2)({"type": "http"}, receive, send)
        return time.monotonic() - started

    assert asyncio.run(main()) < 60 and ended == [True] and len(sent) == 6


def test_a_reader_that_pauses_gets_the_whole_text(server: Running, monkeypatch: Any) -> None:
    asked, paused = itertools.count(), []
    write = Connection._write

    def sometimes(connection: Connection, piece: bytes) -> bool:
        if not piece and next(asked) % 3 == 0:  # the next event waits for its reader
            paused.append(1)
            return False
        return write(connection, piece)

    monkeypatch.setattr(Connection, "_write", sometimes)
    body = {"prompt": "What is paging?", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    with server.slowed():
        chunks = chunks_of(server.post("/v1/completions", {**body, "stream": True}).text)
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == server.answer("/v1/completions", body)["choices"][0]["text"] and len(paused) > 2


def test_an_error_in_the_middle_of_a_stream_ends_it(server: Running, monkeypatch: Any) -> None:
    def broken(answer: CompletionAnswer, index: int, part: Any, outputs: Any) -> Iterator[bytes]:
        if len(outputs[0].ids) > 2:
            raise EngineError("a reason")
        yield b": \n\n"

    monkeypatch.setattr(CompletionAnswer, "events", broken)
    with server.slowed():
        body = {"prompt": "What is paging?", "max_tokens": 40, "ignore_eos": True, "stream": True}
        data = data_of(server.post("/v1/completions", body).text)
    assert json.loads(data[0])["error"]["message"] == "a reason" and data[1:] == ["[DONE]"]
    server.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "status"), [("/v1/completions", 200), (CHAT, 200), ("/v1/completions", 400)])
def test_a_request_leaves_nothing_to_the_garbage_collector(
    server: Running, path: str, status: int, stream: bool
) -> None:
    prompt = {"prompt": "What is paging?" if status == 200 else [10**7]}
    body = {"max_tokens": 4, "stream": stream, **(ASK if path == CHAT else prompt)}
    server.wait_idle()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)  # what it finds stays in gc.garbage
    try:
        with server.slowed():
            assert server.post(path, body, headers={"Connection": "close"}).status_code == status
        server.wait_idle()
        wait_until(lambda: all(one.cycle.response_complete for one in server.service.connections))
        gc.collect()
        left = [type(each).__name__ for each in gc.garbage if isinstance(each, (Answer, Stream, Connection))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not left


def test_a_client_of_an_older_http_gets_a_stream_without_chunks(server: Running) -> None:
    data = json.dumps({**ASK, "stream": True, "max_tokens": 4}).encode()
    with socket.create_connection(("127.0.0.1", server.host.port), timeout=60) as older:
        head = f"POST {CHAT} HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
        older.sendall(head.encode() + data)
        with older.makefile("rb") as answer:  # it ends with the connection
            _, _, body = answer.read().partition(b"\r\n\r\n")
    assert {line[:6] for line in body.split(b"\n") if line} == {b"data: "} and body.endswith(b"[DONE]\n\n")


def test_a_slow_watcher_loses_records_not_memory() -> None:
    watcher = Watcher()
    for _ in range(100):
        watcher.put(b"x" * (MAX_UNREAD // 10))
        assert watcher._size <= MAX_UNREAD
    assert watcher.dropped > 0


# ---- keys


def test_listening_beyond_the_loopback_needs_a_key_and_a_key_some_length() -> None:
    for settings in ({"host": "0.0.0.0"}, {"host": "192.168.1.1"}, {"keys": {"short": Role.CHAT}}):
        with pytest.raises(EngineError, match="key"):
            ServerSettings(**settings)  # type: ignore[arg-type]
    assert ServerSettings(host="::1").loopback and ServerSettings(host="localhost").loopback


def test_every_path_wants_its_role(server: Running, monkeypatch: Any) -> None:
    keys = {"watch-key-1": Role.WATCH, "chat-key-12": Role.CHAT, "control-key": Role.CONTROL}
    monkeypatch.setattr(server.service, "settings", ServerSettings(keys=keys))
    table = [
        ("GET", "/health", None, Role.NOBODY), ("GET", "/ready", None, Role.NOBODY),
        ("GET", "/metrics", None, Role.WATCH), ("GET", "/v1/models", None, Role.WATCH),
        ("GET", "/minitui/info", None, Role.WATCH), ("GET", "/minitui/snapshot", None, Role.WATCH),
        ("GET", "/openapi.json", None, Role.WATCH),
        ("POST", "/generate", {"prompt": "x", "max_tokens": 1}, Role.CHAT),
        ("POST", CHAT, {**ASK, "max_tokens": 1}, Role.CHAT),
        ("POST", "/tokenize", {"prompt": "x"}, Role.CHAT),
        ("POST", "/minitui/control", {"action": "resume"}, Role.CONTROL),
    ]
    bearers = [(None, Role.NOBODY), ("wrong-key-12", Role.NOBODY), ("watch-key-", Role.NOBODY), *keys.items()]
    for method, path, body, needed in table:
        for key, role in bearers:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            answer = server.http.request(method, path, json=body, headers=headers)
            expected = 200 if role >= needed else 401 if role == Role.NOBODY else 403
            assert answer.status_code == expected, (path, key, answer.text)
    info = server.get("/minitui/info", headers={"Authorization": "Bearer chat-key-12"}).json()
    assert info["role"] == "chat" and "model_dir" not in info and "log_file" not in info


def test_a_key_cannot_end_the_requests_of_another(server: Running, monkeypatch: Any) -> None:
    keys = {"the-key-of-ann": Role.CHAT, "the-key-of-bob": Role.CHAT}
    monkeypatch.setattr(server.service, "settings", ServerSettings(keys=keys))
    ann, bob = ({"headers": {"Authorization": f"Bearer {key}"}} for key in keys)
    body = {"tag": "a", "ids": [5], "params": {"max_tokens": 3000, "ignore_eos": True}}
    with server.slowed(200), server.http.stream("POST", "/minitui/submit", json=body, **ann) as answer:
        lines = answer.iter_lines()
        assert '"request"' in next(lines)
        assert server.post("/minitui/cancel", {"tag": "a"}, **bob).json() == {"value": 0}
        same_tag = server.post("/minitui/submit", {**body, "params": {"max_tokens": 1}}, **bob)
        assert same_tag.status_code == 200 and '"length"' in same_tag.text
        assert server.post("/minitui/cancel", {"tag": "a"}, **ann).json() == {"value": 1}
        assert any('"abort"' in line for line in lines)


# ---- the truth about the engine


def test_an_unexpected_error_reveals_no_internals_to_the_caller(server: Running, monkeypatch: Any) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(server.service, "check", broken)
    answer = server.post(CHAT, ASK)
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"
    monkeypatch.undo()
    assert server.service.open == 0, "the place in the queue was lost"


def test_a_dead_engine_is_reported_and_restarted(server: Running) -> None:
    stream = Open(server.host.port, CHAT, {**LONG, "stream": True})
    stream.read_until(b"content")
    before = server.service.broadcast.engine_count
    slept = EngineClient.restart

    async def restart_when_asked(client: EngineClient) -> None:
        await asyncio.to_thread(go_on.wait, 20)
        await slept(client)

    go_on = threading.Event()
    EngineClient.restart = restart_when_asked  # type: ignore[method-assign]
    try:
        os.kill(server.service.client.pid or 0, signal.SIGKILL)
        with stream:
            assert b"engine_dead" in stream.read_until(b"[DONE]")
        wait_until(lambda: server.get("/health").status_code == 503)
        assert server.get("/health").json()["status"] == "restarting"
        assert server.get("/ready").status_code == 503
        refused = server.post(CHAT, ASK)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert server.get("/metrics").status_code == 200
    finally:
        EngineClient.restart = slept  # type: ignore[method-assign]
        go_on.set()
    wait_until(lambda: server.get("/ready").status_code == 200)
    assert server.service.broadcast.engine_count == before + 1
    assert server.post(CHAT, {**ASK, "max_tokens": 2}).status_code == 200
    assert server.metric("minitui_engine_restarts_total") == 1


def test_health_notices_an_engine_that_does_not_answer(server: Running) -> None:
    pid = server.service.client.pid or 0
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: server.get("/health").json()["status"] == "stalled")
        assert server.get("/health").status_code == 503 and server.get("/health").json()["silent_s"] >= 5
        assert server.get("/ready").status_code == 503
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: server.get("/ready").status_code == 200)


def test_health_reports_a_long_step_and_fails_only_after_a_minute(server: Running, monkeypatch: Any) -> None:
    def working(seconds: float, preparing: str = "") -> tuple[int, dict[str, Any]]:
        condition = Condition(task="step", task_s=seconds, preparing=preparing)
        monkeypatch.setattr(type(server.service.client), "condition", property(lambda _: condition))
        reply = server.get("/health")
        return reply.status_code, reply.json()

    server.wait_idle()
    some = "capturing CUDA graphs: 12/52"
    assert working(2.0, some) == (200, {"status": "ok", "open": 0, "preparing": some})
    assert working(30.0) == (200, {"status": "ok", "open": 0, "long": "one step has taken 30 s so far"})
    assert working(61.0)[0] == 503 and working(61.0)[1]["status"] == "busy"


def test_sigterm_ends_server_and_engine_in_time(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MINITUI_DATA": str(tmp_path)}
    command = [sys.executable, "-m", "minitui", "serve", "--port", str(port), "--kv-blocks", "256",
               "--drain-seconds", "0.5"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while "is served at" not in (line := process.stderr.readline()):
            assert line, "the server ended"
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2, "the engine, and the process that renders templates"
        with Open(port, CHAT, {**LONG, "stream": True}) as stream, Open(port, CHAT, {**ASK, "guided_json": EXPLODING}):
            stream.read_until(b"content")
            server = psutil.Process(process.pid)
            wait_until(lambda: len(server.children(recursive=True)) > 2, "no process compiles the grammar")
            children = server.children(recursive=True)
            process.terminate()
            assert process.wait(40) == 0  # half a second for the answers, then the engine process ends
            wait_until(lambda: ended(child.pid for child in children), "a process of the server's outlived it")
            stream.read_until(b"the server is stopping")
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system notices lost networks otherwise")
def test_a_dead_peer_is_dropped_in_time() -> None:
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == DEAD_PEER_S * 1000
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; choose ano"):
            listen("127.0.0.1", port)
    with pytest.raises(EngineError, match=r"--host 'no\.such\.host\.invalid' is not an address of this machine"):
        listen("no.such.host.invalid", 0)
