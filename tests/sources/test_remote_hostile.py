"""Servers that send too much, too slowly, or contradictory data: each gives a sentence, and nothing is stored."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from engine.errors import EngineError
from engine.params import SamplingParams
from tests.support.server.serving import Running
from tests.support.waiting import drained, started

pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

import httpx

from minitui.bench.load import Planned, send
from minitui.chat.conversation import Message
from minitui.chat.describe import describe_answer
from minitui.sources import remote_checks
from minitui.sources.http import RECORDS, Bounds, Excess, open_client, server_events
from minitui.sources.openai import OpenAISource
from minitui.sources.remote import RemoteSource
from minitui.sources.remote_checks import MOST_REQUESTS, Watch, metrics
from minitui.sources.server_metrics import read_samples
from minitui.viewmodel.updater import Updater
from minitui.viewmodel.view import View

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@contextlib.asynccontextmanager
async def hostile(*, get: Script | None = None, post: Script | None = None) -> AsyncIterator[str]:
    """A server whose answers these scripts write; without one for GET it lists the model "m"."""

    async def models(writer: asyncio.StreamWriter) -> None:
        body = json.dumps({"data": [{"id": "m"}]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                asked = head.startswith(b"POST")
                script = post if asked else get
                if asked:
                    length = next(x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length"))
                    await reader.readexactly(int(length.split(b":")[1]))
                await (script or models)(writer)
                await writer.drain()
                if script is not None:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def endless(start: bytes, piece: bytes, every: float = 0.0) -> Script:
    """Writes `start`, then `piece` for ever."""

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(every)

    return write


def once(data: bytes) -> Script:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return write


def compressed(size: int) -> bytes:
    body = gzip.compress(bytes(size))
    return b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body) + body


HEAD = b"HTTP/1.1 200 OK\r\n"
DEEP = b"[" * 100_000
WIDE = b'{"data": [' + b"[]," * 2_000_000 + b"[]]}"


def whole(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (once(compressed(100 << 20)), "compressed its answer"),
        (endless(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunk(bytes(1 << 16))), "more than 8 MiB"),
        (once(HEAD + b"Content-Length: 99999999999\r\n\r\n" + bytes(9 << 20)), "more than 8 MiB"),
        (endless(HEAD + b"X-Long: ", b"x" * 65536), "was lost|cannot be reached"),
        (endless(HEAD, b"X-Many: x\r\n" * 1000), "was lost|cannot be reached"),
        (endless(HEAD, b"X: y\r\n", every=0.02), "no complete head within 0.5 s"),
        (endless(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n", every=0.001), "no complete head within 0.5 s"),
        (once(whole(DEEP)), "not JSON"),
        (once(whole(WIDE)), "of 2,000,005 parts"),
        (once(whole(b'{"data": 3}')), "an unexpected form"),
    ],
    ids=["gzip", "body", "announced length", "line", "head", "slow head", "hints", "deep", "wide", "odd"],
)
async def test_a_body_or_head_beyond_its_bounds_is_a_sentence(
    script: Script, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "no complete head" in said:
        monkeypatch.setattr("minitui.sources.http.SILENCE_S", 0.5)
        monkeypatch.setattr("minitui.sources.http.CONNECT_S", 0.5)
    monkeypatch.setattr("minitui.sources.http.MAX_VALUES", 1_000_000)
    async with hostile(get=script) as url:
        source = OpenAISource(url)
        tracemalloc.start()
        try:
            with pytest.raises(EngineError, match=said):
                await asyncio.wait_for(source.start(lambda progress: None), 30)
            assert tracemalloc.get_traced_memory()[1] < 120 << 20
        finally:
            tracemalloc.stop()
            await source.close()


async def test_a_body_that_drips_ends_at_its_time() -> None:
    drip = endless(HEAD + b"Content-Length: 1000000\r\n\r\n", b"x", every=0.01)
    async with hostile(get=drip) as url, open_client(url) as client:
        with pytest.raises(Excess, match=r"only [\d,]+ bytes in 0.3 s"):
            await asyncio.wait_for(client.get("/", extensions={"bounds": Bounds(seconds=0.3)}), 30)


CONTENT = b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n'


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (b"data: " + b"x" * 65536, "an event of more than 8 MiB"),
        (b"x" * 65536, "an event of more than 8 MiB"),
        (b"data:\n" * 8192, "an event of more than 8 MiB"),
        (CONTENT % b"a" * 1000, "characters in 2,001 pieces"),
        (CONTENT % (b"a" * 30_000), "characters in 34 pieces"),
        (b'data: {"error": {"message": "%s"}}\n\n' % (b"no" * 100_000), "^(no){1000}$"),
        (b'data: {"choices": 7}\n\n', "not answer like an OpenAI"),
    ],
    ids=["data", "line", "event", "pieces", "characters", "long error", "odd"],
)
async def test_an_answer_beyond_its_bounds_ends_with_a_sentence(
    piece: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minitui.sources.http.MAX_PIECES", 2_000)
    monkeypatch.setattr("minitui.sources.http.MAX_CHARACTERS", 1_000_000)
    async with hostile(post=endless(OK, chunk(piece))) as url, started(OpenAISource(url)) as source:
        stream = source.submit(source.codec.apply_chat_template([{"role": "user", "content": "Q"}]), SamplingParams())
        with pytest.raises(EngineError, match=said):
            async with asyncio.timeout(60):
                await drained(stream)


async def test_comments_alone_are_no_answer() -> None:
    async with (
        hostile(get=endless(OK, chunk(b": wait\n\n"), every=0.01)) as url,
        open_client(url) as client,
        client.stream("GET", "/", extensions=RECORDS) as response,
    ):
        with pytest.raises(EngineError, match=r"no event for 0.3 s"):
            await drained(server_events(response, quiet_s=0.3))


@pytest.mark.parametrize("cancel", [True, False])
async def test_a_flood_leaves_the_loop_its_turns_and_can_be_left(cancel: bool) -> None:
    async with hostile(post=endless(OK, chunk(CONTENT % b"a" * 1000))) as url:
        source = OpenAISource(url)
        await source.start(lambda progress: None)
        stream = source.submit(source.codec.apply_chat_template([{"role": "user", "content": "Q"}]), SamplingParams())
        await stream.started()
        for _ in range(50):  # the application must stay responsive meanwhile
            await asyncio.wait_for(asyncio.sleep(0.001), 30)
        if cancel:
            stream.cancel()
        await asyncio.wait_for(source.close(), 60)
        assert stream._task.done()
        async with asyncio.timeout(60):
            try:
                assert [delta.finish_reason async for delta in stream][-1] == "abort" and cancel
            except EngineError as error:  # only what the user cancelled is called cancelled
                assert "was closed" in str(error) and not cancel


async def test_bench_takes_no_flood_for_an_answer() -> None:
    odd = b'data: {"usage": {"completion_tokens": "7"}, "choices": 3}\n\n'
    for piece, said in ((b"x" * 65536, "more than 8 MiB"), (odd, "OpenAI-compatible")):
        async with hostile(post=endless(OK, chunk(piece))) as url, open_client(url) as client:
            outcome = await asyncio.wait_for(send(client, Planned(0.0, {}, True), 0.0), 60)
            assert said in outcome.detail and outcome.error


def test_labels_of_a_metric_are_read_in_time_that_grows_with_their_length() -> None:
    began = time.process_time()
    for labels in ("a" * 60_000, 'a="b",' * 10_000, 'a="\\"' * 15_000, "} " * 30_000):
        assert read_samples("vllm:num_requests_running{" + labels + "} 1")
    assert time.process_time() - began < 5.0  # with their square, the first takes half a minute


# ---- telemetry


STEP = [2, 0.1, "step", 0, [], [], [], 1, 0]


@pytest.mark.parametrize(
    "event",
    [
        None, {}, 7, "records", [7], [[]], [[1]], [["1", 0.0, "settle", 0]], [[10**30, 0.0, "settle", 0]],
        [[1, "now", "settle", 0]], [[1, 0.0, "settle", -5]], [[1, 0.0, "settle", 10**30]], [[1, 0.0, "settle", True]],
        [[1, 0.0, "novel", 0]], [[1, 0.0, ["settle"], 0]], [[1, 0.0, "settle"]], [[1, 0.0, "settle", 0, 0]],
        [[1, 0.0, "alloc", 1, "blocks"]], [[1, 0.0, "alloc", 1, [10**12]]], [[1, 0.0, "alloc", 1, [-1]]],
        [[1, float("nan"), "settle", 0]], [[1, 0.0, "pace", float("inf")]], [[1, 0.0, "wait", 1, "x" * 5000]],
        [[1, 0.0, "experts", 1, [[0, [1] * 70_000]]]], [STEP, STEP], [[2, 0.1, "step", 0, [[1, 2]], [], [], 1, 0]],
        [[1, 0.0, "match", 1, 8, "whole", 8, "of"]],
    ],
    ids=str,
)
def test_records_that_are_none_are_refused(event: Any) -> None:
    with pytest.raises(ValueError) as refused:
        remote_checks.records(event)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", 10**12), ("num_blocks", -1), ("num_blocks", "many"), ("block_size", 0), ("block_size", 10**30),
        ("vocab_size", 1.5), ("model", 7), ("model", "x" * 10_000), ("tokenizer_files", ["a"]), ("began", None),
        ("generation", {"temperature": {"deep": []}}), ("max_model_len", -3), ("device", []),
    ],
)
def test_facts_that_are_none_are_refused(field: str, value: Any) -> None:
    facts = {"model": "m", "began": "a.1", "tokenizer_files": {}, "num_blocks": 64, "block_size": 16}
    assert facts.items() <= remote_checks.info(facts | {"speculation": None}).to_json().items()
    with pytest.raises(ValueError, match=field):
        remote_checks.info({**facts, field: value})


def test_figures_that_are_none_do_not_reach_the_line_under_an_answer() -> None:
    odd: list[Any] = ["x", -1, 10**30, float("nan"), None, [], {}, True]
    names = ("output_tokens", "cached_tokens", "prompt_tokens", "ttft_ms", "decode_tok_s", "match", "drafted_tokens")
    for value in odd:
        told = metrics({**dict.fromkeys(names, value), "unknown": value, "diverged": value, "replica": value})
        assert describe_answer(Message("assistant", state="done", metrics={**told, "finish": "stop"}))
        assert "unknown" not in told and "replica" not in told
    assert metrics("none") == {}


@pytest.fixture
async def source(server: Running, tmp_path: Any) -> AsyncIterator[Any]:
    async with started(RemoteSource(server.url, cache=tmp_path)) as source:
        yield source


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("finish", (10**9, "stop", 3), "there is no request"),
        ("insert", (5, 5, 10**9, [], [], -1), "there is no request"),
        ("evict", (0, 1, "room"), "not a leaf"),
        ("merge", (10**6, 10**6 + 1), "not the only child"),
        ("settle", (10**30,), "out of range"),
        ("step", (10**6, [], [], [], 0, 0), "does not follow"),
    ],
)
async def test_records_that_contradict_the_state_end_the_watching_with_a_sentence(
    source: Any, kind: str, fields: tuple[Any, ...], said: str
) -> None:
    feed, deaths = Updater(source, View()), list[str]()
    source.on_death(deaths.append)
    await feed.sync()
    feed.pump()
    seq = source.records._watch.state.seq + 1 - source.records._offset
    try:
        source.records._take("", json.loads(json.dumps([[seq, 1e6, kind, *fields]])))
    except ValueError as error:  # as its reader does
        source.records._refuse(error)
    feed.pump()
    assert len(deaths) == 1 and said in deaths[0] and source.url in deaths[0] and source.connection == deaths[0]
    assert not source.records.backlog and source.drain_records() == []


async def test_a_snapshot_of_an_absurd_pool_is_refused_before_memory_is_taken(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = (await source.http.get("/minitui/snapshot")).json()
    answer = httpx.Response(200, json={**told, "num_blocks": 10**12}, request=httpx.Request("GET", source.url))

    async def ask(*_: Any, **__: Any) -> Any:
        return answer

    monkeypatch.setattr(source.http, "get", ask)
    with pytest.raises(EngineError, match=r"num_blocks.*out of range|pool has"):
        await source.snapshot()
    assert "cannot be shown" in source.error


async def test_requests_without_end_are_refused(source: Any) -> None:
    watch = Watch(await source.snapshot())
    seq, youngest = watch.state.seq, max(watch.state.requests, default=10**6)
    with pytest.raises(ValueError, match="more than 65,536 requests"):
        for n in range(1, MOST_REQUESTS + 2):
            watch.take((seq + n, 0.0, "submit", youngest + n, "g", 8, 9))
