"""RemoteSource shows exactly what the engine behind the server does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.parameters import Biases, Flag, Ids, Integer, Number, Texts
from engine.params import PARAMETERS, SamplingParams
from engine.trace.state import State
from minitui.server.settings import Role, ServerSettings
from tests.support.server.serving import Running
from tests.support.waiting import drained, started, until, wait_until

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

from engine.text.tokenizer import Tokenizer
from minitui.chat.model_choice import load_codec
from minitui.chat.sessions import Chats
from minitui.cli.prefix import watch
from minitui.prefix.recorded import findings_in
from minitui.server.telemetry.endpoints import Params
from minitui.sources.http import open_client
from minitui.sources.remote import RemoteSource
from minitui.trace.reader import TraceReader

PROMPT = list(range(40, 100))


@pytest.fixture
async def source(server: Running, tmp_path: Path) -> AsyncIterator[Any]:
    async with connected(server, tmp_path) as source:
        yield source


def connected(server: Running, cache: Path, **options: Any) -> contextlib.AbstractAsyncContextManager[Any]:
    return started(RemoteSource(server.url, cache=cache, **options))


async def follow(source: Any, state: State, seq: int) -> None:
    """Apply the source's records until the state is at `seq`."""
    async with asyncio.timeout(60):
        while state.seq < seq:
            for record in source.drain_records():
                if record[0] > state.seq:
                    state.apply(record)
            await asyncio.sleep(0.02)


async def engine_snapshot(server: Running) -> dict[str, Any]:
    return await asyncio.to_thread(server.snapshot)


def greedy(tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **options)


async def test_an_answer_arrives_with_ids_text_and_metrics(server: Running, source: Any) -> None:
    await source.control("pause")
    try:
        stream = source.submit(PROMPT, greedy(20), group="mine")
        assert await stream.started() > 0
        await source.control("step")
        deltas = aiter(stream)
        pieces = [await anext(deltas)]
        assert len(pieces[0].ids) == 1  # it is here before the other tokens are computed
    finally:
        await source.control("resume")
    pieces += [delta async for delta in deltas]
    assert stream.finish_reason == "length" and len(stream.ids) == 20
    assert stream.text == "".join(piece.text for piece in pieces) == server.service.tokenizer.decode(stream.ids)
    assert stream.metrics["output_tokens"] == 20 and stream.metrics["ttft_ms"] > 0


async def test_the_records_give_the_same_state_as_the_engine(server: Running, source: Any) -> None:
    state = State.from_snapshot(await source.snapshot())
    streams = [source.submit(PROMPT[: 20 + i], greedy(30 + i), group=f"chat {i}") for i in range(6)]
    for stream in streams[:5]:
        await drained(stream)
    streams[5].cancel()
    await drained(streams[5])  # the cancellation has a connection of its own: the pause could overtake it
    await source.control("pause")
    try:
        told = await engine_snapshot(server)
        await follow(source, state, told["seq"])
        assert state.snapshot() == told
        assert (await source.snapshot())["nodes"] == told["nodes"]
    finally:
        await source.control("resume")


async def test_a_fault_in_following_the_records_is_logged_and_the_state_found_again(
    server: Running, source: Any, monkeypatch: Any, caplog: Any
) -> None:
    broadcast, faults = server.service.broadcast, [ValueError("odd")]
    observe = server.service.metrics.observe

    def faulty(record: Any, state: Any) -> None:
        if faults:
            raise faults.pop()
        observe(record, state)

    monkeypatch.setattr(server.service.metrics, "observe", faulty)
    await drained(source.submit(PROMPT, greedy(4)))
    while faults or broadcast.state is None or broadcast.state.seq != (await engine_snapshot(server))["seq"]:
        await asyncio.sleep(0.05)
    assert "do not fit its state" in caplog.text


async def test_a_cancelled_answer_ends_as_cancelled(server: Running, source: Any) -> None:
    stream = source.submit(PROMPT, greedy(3000))
    async for _ in stream:
        stream.cancel()
    assert stream.finish_reason == "abort"
    hasty = source.submit(PROMPT, greedy(3000))
    await asyncio.sleep(0)  # the cancellation may overtake the request
    hasty.cancel()
    assert [delta.finish_reason async for delta in hasty][-1] == "abort"
    await asyncio.to_thread(server.wait_idle)


async def test_a_refusal_names_the_field(source: Any) -> None:
    with pytest.raises(InvalidRequest, match="context"):
        await drained(source.submit([5] * 5000, greedy(5)))
    with pytest.raises(InvalidRequest):
        await source.submit([10**8], greedy(5)).started()
    with pytest.raises(InvalidRequest, match="n:"):
        await source.control("step", n=0)


async def test_the_tokenizer_comes_along_and_is_kept(server: Running, source: Any, tmp_path: Path) -> None:
    here = Tokenizer(Path(source.info.model_dir))
    messages = [{"role": "user", "content": "What is paging?"}]
    assert here.apply_chat_template(messages) == server.service.tokenizer.apply_chat_template(messages)
    file = Path(source.info.model_dir) / "tokenizer.json"
    assert file.is_relative_to(tmp_path)
    before = file.stat().st_mtime_ns
    async with connected(server, tmp_path) as again:
        assert again.info.model_dir == source.info.model_dir and file.stat().st_mtime_ns == before


async def test_a_chat_over_the_wire_finds_its_earlier_turns_in_the_cache(source: Any) -> None:
    chats = Chats(source)
    chats.use(load_codec(source.info))
    chat = chats.new("Answer briefly.")
    for question in ("What is the KV cache?", "What is prefill?"):
        chats.send(chat, question)
        assert chat._task is not None
        await asyncio.wait_for(chat._task, 60)
    assert [m.state for m in chat.messages] == ["done"] * 4, [m.error for m in chat.messages]
    assert chat.messages[3].metrics["cached_tokens"] >= chat.messages[1].metrics["prompt_tokens"] - 16


async def test_a_lost_connection_is_made_again_and_the_gap_shows(server: Running, source: Any) -> None:
    state = State.from_snapshot(await source.snapshot())
    seen = state.seq

    async def cut() -> None:
        for watcher in list(server.service.broadcast.watchers):
            watcher.close()

    await asyncio.to_thread(server.call, cut())
    await drained(source.submit(PROMPT, greedy(5)))  # while the record stream is closed
    later = await until(lambda: [record for record in source.drain_records() if record[0] > seen])
    assert later[0][0] > seen + 1, "the gap did not show"
    snapshot = await source.snapshot()
    state = State.from_snapshot(snapshot)
    await drained(source.submit(PROMPT, greedy(5)))
    told = await engine_snapshot(server)
    await follow(source, state, told["seq"] + source.records._offset)
    assert state.snapshot()["requests"] == told["requests"] and source.connection == ""


async def test_another_engine_behind_the_server_is_a_gap_too(server: Running, source: Any) -> None:
    await drained(source.submit(PROMPT, greedy(5)))
    state = State.from_snapshot(await source.snapshot())
    stream = source.submit(PROMPT, greedy(3000))
    await stream.started()
    os.kill(server.service.client.pid or 0, signal.SIGKILL)
    with pytest.raises(EngineDead):
        await drained(stream)
    await asyncio.to_thread(wait_until, lambda: server.get("/ready").status_code == 200)
    old = state.seq
    snapshot = await source.snapshot()
    assert snapshot["seq"] > old, "numbers went back: a reader would skip what comes"
    state = State.from_snapshot(snapshot)
    await drained(source.submit(PROMPT, greedy(5)))
    told = await engine_snapshot(server)
    await follow(source, state, told["seq"] + source.records._offset)
    assert {**state.snapshot(), "seq": 0, "nodes": 0} == {**told, "seq": 0, "nodes": 0}


async def test_the_gate_opens_when_the_watcher_that_closed_it_disconnects(server: Running, tmp_path: Path) -> None:
    async with connected(server, tmp_path) as holder:
        await holder.control("pause")
        async with holder.http.stream("GET", "/minitui/records") as again:
            await anext(again.aiter_bytes())  # one of two streams of his ends: he is still there
        async with open_client(server.url) as stranger:  # a client that does not watch cannot own the gate
            await stranger.post("/minitui/control", json={"action": "step"})
        await asyncio.sleep(0.2)
        assert (await engine_snapshot(server))["gate"] == "closed"
    while (await engine_snapshot(server))["gate"] == "closed":
        await asyncio.sleep(0.02)


async def test_several_watch_one_engine(server: Running, tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        sources = [await stack.enter_async_context(connected(server, tmp_path)) for _ in range(5)]
        states = [State.from_snapshot(await source.snapshot()) for source in sources]
        streams = [source.submit(PROMPT, greedy(10), group=str(i)) for i, source in enumerate(sources)]
        for stream in streams:
            await drained(stream)
        await asyncio.to_thread(server.wait_idle)
        told = await engine_snapshot(server)
        for source, state in zip(sources, states, strict=True):
            await follow(source, state, told["seq"])
            assert state.snapshot() == told


async def test_hidden_texts_leave_the_server_in_no_form(server: Running, tmp_path: Path, monkeypatch: Any) -> None:
    secret = server.service.tokenizer.encode("the secret word is xylophone " * 4)
    mask = server.service.tokenizer.encode(".")[0]
    monkeypatch.setattr(server.service.broadcast, "mask_id", mask)
    async with connected(server, tmp_path) as source:
        state = State.from_snapshot(await source.snapshot())
        await drained(source.submit(secret, greedy(40), group="other"))
        await asyncio.to_thread(server.wait_idle)
        told = await engine_snapshot(server)
        assert any(secret[:16] == node["ids"][:16] for node in told["nodes"].values())
        await follow(source, state, told["seq"])
        for nodes in (state.snapshot()["nodes"], (await source.snapshot())["nodes"]):
            assert {id: len(node["ids"]) for id, node in nodes.items()} == {
                id: len(node["ids"]) for id, node in told["nodes"].items()
            }
            grown = [node["ids"] for id, node in nodes.items() if told["nodes"][id]["ids"][:16] == secret[:16]]
            assert grown and all(set(ids) == {mask} for ids in grown)


async def test_the_keys_role_decides_what_is_allowed(server: Running, tmp_path: Path, monkeypatch: Any) -> None:
    keys = {"watch-key-1": Role.WATCH, "chat-key-12": Role.CHAT}
    monkeypatch.setattr(server.service, "settings", ServerSettings(keys=keys))
    async with connected(server, tmp_path, key="watch-key-1") as watcher:
        assert watcher.info.role == "watch"
        with pytest.raises(EngineError, match="chat"):
            await watcher.submit(PROMPT, greedy(5)).started()
    async with connected(server, tmp_path, key="chat-key-12") as chatter:
        await drained(chatter.submit(PROMPT, greedy(2)))
        with pytest.raises(EngineError, match="control"):
            await chatter.control("pause")
    with pytest.raises(EngineError, match="API key"):
        async with connected(server, tmp_path, key="wrong-key-1"):
            pass


async def test_an_unreachable_server_gives_one_sentence(tmp_path: Path) -> None:
    source = RemoteSource("http://127.0.0.1:9", cache=tmp_path)
    with pytest.raises(EngineDead, match="cannot be reached"):
        await source.start(lambda progress: None)
    with pytest.raises(EngineDead):
        await source.ready()
    await source.close()
    for url in ("", "ftp://x", "http://", "http://host:port"):
        with pytest.raises(InvalidRequest, match="address"):
            RemoteSource(url)


@pytest.mark.parametrize("event", ['{"ids": [1]}', "[]", "3", '{"request": 1}'])
async def test_an_invalid_event_ends_the_answer_with_a_sentence(event: str) -> None:
    import httpx

    source = RemoteSource("http://m")
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=f"data: {event}\n\n"))
    async with httpx.AsyncClient(transport=transport, base_url="http://m") as source.http:
        with pytest.raises(EngineError, match="does not answer like a minitui server"):
            await asyncio.wait_for(anext(aiter(source.submit([1], SamplingParams()))), 1)


async def test_a_server_that_stays_away_counts_as_dead(tmp_path: Path) -> None:
    async def hello(reader: Any, writer: Any) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\nevent: hello\n')
        writer.write(b'data: {"began": "x", "seq": 5}\n\n')
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(hello, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    source = RemoteSource(f"http://127.0.0.1:{port}", cache=tmp_path, give_up_s=0.5)
    deaths: list[str] = []
    source.on_death(deaths.append)
    await source.records.follow()
    server.close()
    async with asyncio.timeout(60):
        await source.records._following
    assert len(deaths) == 1 and "has not been reached" in deaths[0] and source.connection
    await source.close()


VALUES: dict[type, Any] = {Number: 0.5, Integer: 3, Texts: ("x",), Ids: (5,), Biases: {5: 1.0}}


@pytest.mark.parametrize("name", PARAMETERS)
async def test_a_sampling_parameter_reaches_a_minitui_server_or_is_refused(name: str) -> None:
    row = PARAMETERS[name]
    value = not row.default if isinstance(row, Flag) else VALUES.get(type(row), "x")
    source = RemoteSource("http://127.0.0.1:1")
    params = SamplingParams(**{"max_tokens": None, name: value})
    if row.remote:
        told = Params.model_validate_json(json.dumps(source.sent(params))).model_dump(exclude_none=True)
        assert SamplingParams(**{"max_tokens": None} | told) == params
    else:
        with pytest.raises(InvalidRequest, match=f"cannot use {name}"):
            source.sent(params)
    await source.close()


async def test_the_prefix_doctor_watches_a_server(server: Running, tmp_path: Path) -> None:
    path = tmp_path / "watched.trace"
    watching = asyncio.create_task(watch(server.url, path, None))
    await until(lambda: path.exists() or watching.done())  # it is made when the first state has arrived
    assert not watching.done(), watching.exception()
    async with connected(server, tmp_path) as source:
        prompt = [150, *range(60, 140)]
        for end in ([41, 42], [43, 44], [45, 46]):  # with the records of the third come those of the second
            assert [ids async for delta in source.submit([*prompt, *end], greedy(3)) for ids in delta.ids]
    watching.cancel()  # as after its seconds; it first takes the records until now
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    first, second, *_ = findings_in(TraceReader(path))
    assert (first.cause, second.cause, second.ancestor) == ("first", "none", first.number)
    assert second.could == second.cached == 80 and (first.prompt, second.prompt) == (83, 83)
