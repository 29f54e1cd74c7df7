"""KV events and /metrics of a server without minitui's recorder: the cached texts, and what is unknown."""

from __future__ import annotations

import asyncio
import contextlib
import io
import lzma
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Static

from engine.errors import EngineError
from engine.trace.state import State
from minitui.cli import inspect
from minitui.trace.check import Follower
from minitui.tutor import model_dir
from tests.support.fake_openai import FakeServer, FakeSglang
from tests.support.paths import ROOT
from tests.support.waiting import started, until
from tests.vllm.test_recorded import free_ports

pytest.importorskip("zmq", reason="the extra 'vllm' is not installed")
pytest.importorskip("msgpack", reason="the extra 'vllm' is not installed")

import msgpack
import zmq
import zmq.asyncio

from minitui.chat.sessions import Chats
from minitui.settings import Settings
from minitui.tui.apps.cache_app import CacheApp
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.servers.figures import MISSING, CachePool
from minitui.vllm import zmtp
from minitui.vllm.cached_tree import UNKNOWN_BEGINNING, CachedTree
from minitui.vllm.kv_messages import Event, read
from minitui.vllm.kv_sockets import endpoints, find_events
from minitui.vllm.kv_source import END, KvSource
from tests.support.vllm_direct import Kept

RECORDED = ROOT / "tests" / "vllm" / "kv_events.xz"  # of vLLM 0.25.1 on an H200; 4 bytes of length before each message
PAGE = (
    'vllm:cache_config_info{block_size="4",num_gpu_blocks="40"} 1.0\nvllm:kv_cache_usage_perc 0.25\n'
    "vllm:num_requests_running 3\n"
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minitui.vllm.kv_source.AGAIN_S", 0.02)


def stored(hashes: list[Any], parent: Any = None, first: int = 100, **fields: Any) -> dict[str, Any]:
    """Returns an event as vLLM sends it, with 4 tokens in each block: 100, 101, …"""
    ids = list(range(first, first + 4 * len(hashes)))
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": ids,
             "block_size": 4, "lora_id": None, "medium": "GPU", "lora_name": None}
    return {**event, **fields}


def removed(*hashes: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


class Publisher:
    """Publishes as vLLM does. `kept`: the messages that the replay endpoint still has."""

    def __init__(self, replays: bool) -> None:
        context = zmq.asyncio.Context.instance()
        self.number = 0
        self.kept: list[tuple[int, bytes]] = []
        self._events, self._replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self._events.setsockopt(zmq.XPUB_VERBOSE, 1)
        port = self._events.bind_to_random_port("tcp://127.0.0.1")
        other = self._replay.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}" + (f",{other}" if replays else "")
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            client, empty, start = await self._replay.recv_multipart()
            for number, payload in self.kept:
                if number >= int.from_bytes(start, "big"):
                    await self._replay.send_multipart([client, empty, number.to_bytes(8, "big"), payload])
            await self._replay.send_multipart([client, empty, END, b""])

    async def subscribed(self) -> None:
        async with asyncio.timeout(60):
            while await self._events.recv() != b"\1":
                pass

    async def publish(self, *events: Any, sent: bool = True, raw: bytes | None = None, rank: int = 0) -> None:
        """Publish one message. `sent`: False if it is lost on the way."""
        payload = msgpack.packb([1000.0 + self.number, list(events), rank]) if raw is None else raw
        number, self.number = self.number, self.number + 1
        self.kept.append((number, payload))
        if sent:
            await self._events.send_multipart([b"", number.to_bytes(8, "big"), payload])

    def begin_again(self) -> None:
        self.number, self.kept = 0, []

    async def restart(self, number: int = 0) -> None:
        """The process ends, and another one publishes at the same address. `number`: of its next message."""
        port = self._events.getsockopt(zmq.LAST_ENDPOINT).decode().rpartition(":")[2]
        self._events.close(0)
        self.begin_again()
        self.number = number
        self._events = zmq.asyncio.Context.instance().socket(zmq.XPUB)
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(zmq.ZMQError):
                    self._events.bind(f"tcp://127.0.0.1:{port}")
                    break
                await asyncio.sleep(0.01)
        await self.subscribed()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._events.close(0)
        self._replay.close(0)


@contextlib.asynccontextmanager
async def attached(
    replays: bool, *before: Any, api: FakeServer | None = None, tokenizer: str | None = None
) -> AsyncIterator[tuple[Publisher, KvSource, FakeServer]]:
    """`before`: events that the server published before minitui came."""
    publisher = Publisher(replays)
    for event in before:
        await publisher.publish(event)
    tokenizer = str(model_dir()) if tokenizer is None else tokenizer
    try:
        async with (
            api or FakeServer(models=("tutor",), page=PAGE) as api,
            started(KvSource(api.url, publisher.address, tokenizer=tokenizer)) as source,
        ):
            await publisher.subscribed()
            yield publisher, source, api
    finally:
        await publisher.close()


def texts(source: KvSource) -> list[list[int]]:
    """Returns the tokens of each node."""
    return sorted(list(node.ids) for node in source.tree.state.nodes.values() if node.id)


def tokens(first: int, n: int) -> list[int]:
    return list(range(first, first + n))


async def test_the_tree_follows_the_events_and_the_records_give_the_same_tree() -> None:
    async with attached(True, stored([1, 2, b"3"])) as (publisher, source, _):
        await until(lambda: len(source.tree) == 3)  # by the replay: it was published before
        assert source.num_blocks == 40 and source.tree.size == 4 and source.metrics.cache_use == 0.25
        source.drain_records()
        follower = Follower(State.from_snapshot(await source.snapshot()))
        await publisher.publish(stored([7, 8], parent=1, first=300))
        await publisher.publish(stored([1, 2]), stored([9], parent=b"3", first=400))  # the first two have copies now
        await until(lambda: len(source.tree) == 6)
        assert texts(source) == sorted([tokens(100, 4), [*tokens(104, 8), *tokens(400, 4)], tokens(300, 8)])
        await publisher.publish(removed(9), removed(b"3"), removed(2))  # a copy of 2 is left
        await until(lambda: len(source.tree) == 4)
        assert texts(source) == sorted([tokens(100, 4), tokens(104, 4), tokens(300, 8)])
        await publisher.publish(removed(2))
        await until(lambda: len(source.tree) == 3)
        for record in source.drain_records():
            follower.take(record)
        assert follower.state.snapshot() == await source.snapshot()
        assert source.texts.decode(tokens(300, 3)) and not source.no_texts
        await publisher.publish({"type": "AllBlocksCleared"})
        await until(lambda: not len(source.tree))


async def test_lost_messages_are_replayed() -> None:
    async with attached(True) as (publisher, source, _):
        await publisher.publish(stored([1]))
        await publisher.publish(stored([2], parent=1, first=104), sent=False)
        await publisher.publish(stored([3], parent=2, first=108))
        await until(lambda: len(source.tree) == 3)
        assert texts(source) == [tokens(100, 12)] and not source.began_again


async def test_without_a_replay_the_tree_begins_again_and_says_so() -> None:
    async with attached(False, stored([1])) as (publisher, source, _):
        await publisher.publish(stored([2], parent=1, first=104))
        await publisher.publish(stored([5]))
        await until(lambda: len(source.tree) == 1)
        assert source.late == 1 and source.tree.left_out == {UNKNOWN_BEGINNING: 1}
        await publisher.publish(removed(5), sent=False)
        await publisher.publish(stored([6], first=200))
        await until(lambda: bool(source.began_again))
        assert texts(source) == [tokens(200, 4)] and source.began_again == "lost messages: 1"


async def test_a_server_that_begins_again_has_a_new_tree() -> None:
    async with attached(True, stored([1]), stored([2], parent=1)) as (publisher, source, _):
        await until(lambda: len(source.tree) == 2)
        await publisher.publish(stored([3], first=108))
        publisher.begin_again()
        await publisher.publish(stored([4], first=200), sent=False)
        await publisher.publish(stored([5], first=300))
        await until(lambda: texts(source) == [tokens(200, 4), tokens(300, 4)])
        assert source.began_again == "the server began again"


async def test_a_publisher_without_replay_that_restarts_has_a_new_tree() -> None:
    async with attached(False) as (publisher, source, _):
        for i in range(3):
            await publisher.publish(stored([i], first=100 * i + 100))
        await until(lambda: len(source.tree) == 3 and source.joined is True)
        await publisher.restart()
        await publisher.publish(stored([9], first=900))
        await until(lambda: texts(source) == [tokens(900, 4)])
        assert source.began_again == "the server began again" and not source.late and source.joined


async def test_a_restart_shows_when_the_server_returns_even_if_the_numbers_fit() -> None:
    """The messages of a restarted publisher may be lost until its number is the next of the publisher before."""
    async with attached(False) as (publisher, source, api):
        await publisher.publish(stored([1]), stored([2], first=200))
        await until(lambda: len(source.tree) == 2)
        await api.kill()
        source.poller.report_failure("it was killed")
        await until(lambda: source.poller._failures > 0)
        await publisher.restart(number=1)
        await api.start()
        await until(lambda: source.began_again == "the server was away")
        await publisher.publish(stored([9], first=900))
        await until(lambda: texts(source) == [tokens(900, 4)])
        assert source.late == 1


@pytest.mark.parametrize(
    "frames", [[b""], [b"", b"x" * 8], [b"", b"x" * 7, b""], [b"", b"x" * 9, b""], [b"t" * 5_000_000, bytes(8), b""]],
    ids=["one", "two", "short number", "long number", "more than the limit"],
)
async def test_frames_that_are_not_valid_are_counted_and_end_nothing(frames: list[bytes]) -> None:
    async with attached(False) as (publisher, source, _):
        await publisher.publish(stored([1]))
        await publisher._events.send_multipart(frames)
        async with asyncio.timeout(60):
            while tokens(200, 4) not in texts(source):  # what is published before the connection is up again is lost
                await publisher.publish(stored([2], first=200))
                await asyncio.sleep(0.02)
        assert source.refused == 1 and source.why_refused


@pytest.mark.parametrize(
    ("frames", "why"),
    [(b"\1\0", "it has more than 8 parts"), (b"\1\xff" + bytes(255), "it has more than 8 parts"),
     (b"\3\0\0\0\0\0\x10\0\0" + bytes(1 << 20), "it has more than 4,194,304 bytes"),
     (b"\2" + b"\xff" * 8, "it has more than 4,194,304 bytes")],
    ids=["parts", "long parts", "bytes", "announced bytes"],
)
async def test_a_message_without_end_is_refused_before_it_takes_memory(frames: bytes, why: str) -> None:
    """libzmq waits for the last part without any limit. Here the publisher cannot send more than minitui reads."""
    sent = [0]

    async def publish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent.append(0)
        with contextlib.suppress(OSError):
            writer.write(zmtp.GREETING + b"\4\x19\5READY\x0bSocket-Type\0\0\0\3PUB")
            while True:
                piece = frames * (1 + 4096 // len(frames))
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
                sent[-1] += len(piece)

    async with (
        asyncio.timeout(60), await asyncio.start_server(publish, "127.0.0.1") as server,
        FakeServer(models=("tutor",), page=PAGE) as api,
    ):
        source = KvSource(api.url, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", tokenizer=str(model_dir()))
        async with started(source):
            await until(lambda: source.refused >= 2)
            assert source.why_refused == why and max(sent) < 32 << 20  # what the buffers of the system hold, too


async def test_a_message_with_too_many_events_is_refused_and_the_screen_says_so() -> None:
    async with attached(False) as (publisher, source, _):
        await publisher.publish(raw=msgpack.packb([1.0, [[""]] * 1_300_000]))
        await publisher.publish(stored([1]))
        await until(lambda: len(source.tree) == 1)
        assert source.refused == 1 and source.why_refused == "it has 1,300,000 events, and the limit is 131,072"
        assert any("1 message refused; the last one because it has" in text for text in CachePool(source)._sentences())


async def test_many_events_leave_the_application_its_turns() -> None:
    async with attached(False) as (publisher, source, _):
        await publisher.publish(*([""] for _ in range(30_000)), stored([1]))
        await until(lambda: source.messages == 1)
        turns = 0
        while not len(source.tree):
            await asyncio.sleep(0)
            turns += 1
        assert turns > 20


def test_the_end_of_a_long_text_is_removed_in_time_that_does_not_depend_on_its_length() -> None:
    tree = CachedTree(1 << 17, 1)
    hashes = list(range(100_000))
    tree.take(0.0, [Event("BlockStored", hashes, None, hashes, 1)])
    began = time.process_time()
    tree.take(0.0, [Event("BlockRemoved", hashes[:1000:-1])])
    assert time.process_time() - began < 5.0 and len(tree) == 1001  # a search for each block takes a minute


async def test_what_cannot_be_read_in_time_is_lost_and_the_tree_begins_again() -> None:
    """A flood: only some messages wait in memory."""
    async with attached(False) as (publisher, source, _):
        raw = msgpack.packb([1.0, [stored([5])], 0]) + b""
        for _ in range(3):
            for _ in range(2000):
                publisher._events.send_multipart([b"", publisher.number.to_bytes(8, "big"), raw])
                publisher.number += 1
            await asyncio.sleep(0)
        await until(lambda: source._last_live >= 0)
        async with asyncio.timeout(60):
            while texts(source) != [tokens(700, 4)]:
                await publisher.publish({"type": "AllBlocksCleared"}, stored([6], first=700))
                await asyncio.sleep(0.05)


async def test_kv_events_are_found_on_the_usual_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    context = zmq.asyncio.Context.instance()
    with contextlib.ExitStack() as held:
        first = free_ports(4)
        monkeypatch.setattr("minitui.vllm.kv_sockets.FIRST_PORT", first)
        monkeypatch.setattr("minitui.vllm.kv_sockets.FIND_S", 0.3)
        address = f"tcp://127.0.0.1:{first}"
        nothing = await find_events("http://127.0.0.1:8000")
        assert (nothing.events, nothing.tried) == ("", f"no KV events are published at {address}")
        with pytest.raises(EngineError, match=f"and no KV events are published at {address}. For vLLM, start"):
            await asyncio.to_thread(inspect.find_events, "http://127.0.0.1:8000")
        for i, kind in enumerate((zmq.PUB, zmq.XPUB)):  # two data parallel ranks
            socket = held.enter_context(context.socket(kind))
            socket.bind(f"tcp://127.0.0.1:{first + i}")
        deaf = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", first + 2)  # another service
        found = await find_events("127.0.0.1:8000/v1")
        assert (found.events, found.ranks) == (address, 2)
        assert found.tried == f"no replay endpoint was found at tcp://127.0.0.1:{first + 2}"
        deaf.close()
        await deaf.wait_closed()
        held.enter_context(context.socket(zmq.ROUTER)).bind(f"tcp://127.0.0.1:{first + 2}")
        events, note = await asyncio.to_thread(inspect.find_events, "http://127.0.0.1:8000")
        assert events == f"{address},{first + 2}"
        others = f"--kv-events tcp://127.0.0.1:{first + 1} shows rank 1."
        assert note == f"2 data parallel ranks publish KV events: this is rank 0; {others}"


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", b"x" * 100, msgpack.packb(7), msgpack.packb([1.0, [7]]), msgpack.packb([1.0, [["BlockStored"]]]),
        msgpack.packb([1.0, [stored([1], token_ids=[1 << 40] * 4)]]), msgpack.packb([1.0, [stored([1], block_size=0)]]),
        msgpack.packb([float("nan"), []]), msgpack.packb([1.0, [stored([1], block_hashes=[{}])]]), b"\x91" * 5000,
    ],
)
async def test_a_message_that_is_not_valid_ends_nothing(payload: bytes) -> None:
    with pytest.raises(ValueError):
        list(read(payload)[1])
    async with attached(True) as (publisher, source, _):
        await publisher.publish(stored([1]))
        await publisher.publish(raw=payload)
        await publisher.publish(stored([2], first=200))
        await until(lambda: texts(source) == [tokens(200, 4)])
        assert "does not fit" in source.began_again


def test_what_the_tree_does_not_show_is_counted() -> None:
    tree = CachedTree(4, 4)
    events = [
        stored([1], medium="CPU"), stored([2], group_idx=1), {"type": "New"}, stored([3], parent=99),
        stored([4, 5, 6, 7]), stored([8], token_ids=[1]),
    ]
    tree.take(0.0, list(read(msgpack.packb([1.0, events]))[1]))
    assert sum(tree.left_out.values()) == 6 and len(tree.left_out) == 6 and len(tree) == 0


def test_blocks_of_other_groups_are_kept_for_the_texts_of_the_tree() -> None:
    """Also if they are stored before the text, are there twice, or stay when the text has gone."""
    tree = CachedTree(9, 4)

    def take(*events: Any) -> dict[str, dict[int, int]]:
        tree.take(0.0, list(read(msgpack.packb([1.0, events]))[1]))
        return {pool.group.name: dict(pool.kept) for pool in tree.state.groups}

    state = {"group_idx": 0, "kv_cache_spec_kind": "mamba"}
    window = {"group_idx": 2, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    assert take(stored([2], parent=1, token_ids=[], **state), stored([1, 2], **window)) == {"state": {}, "window 8": {}}
    kept = take(stored([1, 2], **full))
    first, second = tree._block_of[1], tree._block_of[2]
    assert kept["state"].keys() == {second} and kept["window 8"].keys() == {first, second}
    assert take(stored([1], **window), removed(1) | {"group_idx": 2}) == kept, "there were two"
    assert take(removed(1) | {"group_idx": 2})["window 8"].keys() == {second}
    assert take(removed(2) | {"group_idx": 1}, removed(1) | {"group_idx": 1}) == {"state": {}, "window 8": {}}
    assert len(take(stored([1, 2], **full))["state"]) == 1 and not tree.left_out, "its text is back"
    assert take({"type": "AllBlocksCleared"}) == {"state": {}, "window 8": {}} == take(stored([1, 2], **full))
    assert len(tree._unused) == 6


@pytest.mark.parametrize(
    "wrong",
    [{"group_idx": -1}, {"group_idx": 64}, {"group_idx": "1"}, {"group_idx": True}, {"kv_cache_spec_kind": "x" * 41},
     {"kv_cache_spec_kind": 1}, {"kv_cache_spec_sliding_window": -1}, {"kv_cache_spec_sliding_window": 1 << 40}],
    ids=str,
)
def test_a_group_that_is_not_valid_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no valid KV cache group"):
        list(read(msgpack.packb([1.0, [stored([1], **wrong)]]))[1])


# SGLang 0.5: the labels and the comments of its page; a page of its pool is a block here
SGLANG = """# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 3.0
sglang:num_running_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="1"} 3.0
# HELP sglang:token_usage The token usage.
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.28
sglang:num_queue_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 2.0
sglang:cache_hit_rate{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.01
sglang:max_total_num_tokens{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 59902.0
# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{engine_type="unified",is_streaming="false",model_name="m"} 300.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="true",model_name="m"} 700.0
sglang:cached_tokens_total{cache_source="device",engine_type="unified",model_name="m"} 200.0
sglang:cached_tokens_total{cache_source="host",engine_type="unified",model_name="m"} 50.0
"""
SGLANG_POOL = """sglang:page_size{engine_type="unified",model_name="m",tp_rank="0"} 1.0
sglang:num_pages{engine_type="unified",model_name="m",tp_rank="0"} 59902.0
"""  # from 0.5.11 on
SGLANG_POOL_BEFORE = 'sglang:cache_config_info{num_pages="59902",page_size="1"} 1.0\n'


def pages(text: list[int], start: int = 0, medium: tuple[str, ...] = ("GPU",)) -> list[Any]:
    """Returns SGLang's events for a new node of its tree: one for each page. A page's hash: of all tokens up to it."""
    hashes = [hash(tuple(text[:i])) for i in range(1, len(text) + 1)]
    return [
        ["BlockStored", [hashes[i]], hashes[i - 1] if i else None, [text[i]], 1, None, *medium]
        for i in range(start, len(text))
    ]


@pytest.mark.parametrize(
    ("pool", "info", "medium"),
    [(SGLANG_POOL, "/model_info", ("GPU",)), (SGLANG_POOL_BEFORE, "/get_model_info", ())],
)
async def test_a_server_of_sglang_is_shown(pool: str, info: str, medium: tuple[str, ...]) -> None:
    """Its metrics and its events: arrays, one for each block of one token, negative hashes, the first removed first."""
    api = FakeSglang(page=SGLANG + pool)
    api.info = info
    first, second = tokens(0, 3000), tokens(0, 1000) + tokens(7000, 20)
    async with attached(True, api=api, tokenizer="") as (publisher, source, _):
        assert source.num_blocks == 59902 and source.tree.size == 1 and source.no_texts == ""
        metrics = source.metrics
        assert (metrics.running, metrics.waiting, metrics.cache_use, metrics.hit_rate) == (3, 2, 0.28, 0.25)
        await publisher.publish(*pages(first, medium=medium))
        await until(lambda: texts(source) == [first])
        assert len(source.drain_records()) < 5, "one record, not one for each token"
        await publisher.publish(*pages(second, 1000, medium))
        await until(lambda: len(source.tree) == 3020)
        assert texts(source) == sorted([first[:1000], first[1000:], second[1000:]])
        gone = [hash(tuple(first[:i])) for i in range(1001, 3001)]
        await publisher.publish(*(["BlockRemoved", [hash], *medium] for hash in gone))
        await until(lambda: len(source.tree) == 1020)
        assert source.tree.removed == 2000 and source.began_again == ""
        await publisher.publish(["AllBlocksCleared"])
        await until(lambda: len(source.tree) == 0)


def test_random_events_give_the_texts_that_are_cached() -> None:
    """A text can be reached if all of its beginning is cached; the tree has exactly these texts."""
    rnd = random.Random(3)
    tree, follower = CachedTree(4000, 2), None
    parents: dict[int, int | None] = {}
    for step in range(600):
        if rnd.random() < 0.5 or not parents:
            parent = rnd.choice([None, *parents])
            new = [1000 * step + i for i in range(rnd.randrange(1, 5))]
            event = stored(new, parent, token_ids=[rnd.randrange(9) for _ in range(2 * len(new))], block_size=2)
            parents.update(zip(new, [parent, *new[:-1]], strict=True))
        else:
            leaves = sorted(set(parents) - set(parents.values()))
            gone = rnd.choice(leaves if rnd.random() < 0.9 else sorted(parents))
            event = removed(gone)
            pending = [gone]
            while pending:  # no prefix leads to the texts below any more
                hash = pending.pop()
                parents.pop(hash, None)
                pending += [child for child, parent in parents.items() if parent == hash]
        tree.take(float(step), list(read(msgpack.packb([1.0, [event]]))[1]))
        follower = follower or Follower(State(4000, 2, 0, 0))
        for record in tree.drain():
            follower.take(record)
        assert set(tree._block_of) == set(parents)
    assert follower is not None and follower.state.counts == tree.state.counts


def test_after_each_message_of_a_real_run_the_tree_has_the_cached_blocks() -> None:
    tree, cached, messages = CachedTree(420, 16), Counter[Any](), io.BytesIO(lzma.decompress(RECORDED.read_bytes()))
    while length := messages.read(4):
        t, read_events, _ = read(messages.read(int.from_bytes(length, "big")))
        events = list(read_events)
        tree.take(t, events)
        for event in events:
            cached.update(dict.fromkeys(event.hashes, 1 if event.kind == "BlockStored" else -1))
        assert set(tree._block_of) == {h for h, n in cached.items() if n}
    assert tree.stored > 1000 and tree.removed > 500 and not tree.left_out


@pytest.mark.parametrize("groups", ["", "full window:64 state", "window:40 full"])
def test_the_events_of_vllms_own_classes_give_vllms_cache(
    groups: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed", exc_type=ImportError)
    from vllm.distributed.kv_events import KVEventBatch, msgspec
    from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

    import minitui.vllm.recorder as recording
    from tests.support.vllm_driver import Load, make_scheduler

    monkeypatch.setattr(recording, "Pipe", Kept)
    blocks, steps = (200, 150) if groups else (90, 400)
    scheduler = make_scheduler(tmp_path, blocks=blocks, rows=12, asynchronous=True, groups=groups)
    load, tree, encode = Load(scheduler, 5, 2), CachedTree(blocks, 16), msgspec.msgpack.Encoder().encode
    main = groups.split().index("full") if groups else 0
    pool = scheduler.kv_cache_manager.block_pool
    pool.enable_kv_cache_events = scheduler.kv_cache_manager.enable_kv_cache_events = True
    batches: list[bytes] = []
    monkeypatch.setattr(scheduler.kv_event_publisher, "publish", lambda batch: batches.append(encode(batch)))
    for _ in range(3):  # equal prompts at the same time: blocks with equal contents
        load.add([1] * 64, 5)
    copies = 0
    for step in range(1, steps):
        load.run(step)
        batches.append(encode(KVEventBatch(ts=float(step), events=scheduler.kv_cache_manager.take_events())))
        for batch in batches:
            tree.take(float(step), list(read(batch)[1]))
        batches.clear()
        cached: dict[int, dict[Any, int]] = {}  # of each group: hash -> blocks
        for key, value in pool.cached_block_hash_to_block._cache.items():
            hash = maybe_convert_block_hash(get_block_hash(key))
            cached.setdefault(get_group_id(key), {})[hash] = len(value) if isinstance(value, dict) else 1
        texts = cached.pop(main, {})
        assert set(tree._block_of) == set(texts) and tree.copies == sum(texts.values()) - len(texts)
        assert {n: dict(group.blocks) for n, group in tree.groups.others.items() if group.blocks} == cached
        for group in tree.groups.others.values():
            assert set(group.pages) == set(group.blocks) & set(texts), "kept for the texts that are in the tree"
            assert set(tree.state.groups[group.index].block_of) == set(group.pages.values())
        copies = max(copies, tree.copies)
    assert copies and tree.stored > (150 if groups else 300) and (tree.removed > 200 or groups)
    assert not tree.left_out
    assert len(tree.state.groups) == len(groups.split()[1:])
    assert State.from_snapshot(tree.state.snapshot()).snapshot() == tree.state.snapshot()


async def test_vllms_own_publishers_of_two_ranks_are_found_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed", exc_type=ImportError)
    from vllm.distributed.kv_events import BlockStored, KVEventBatch, ZmqEventPublisher

    port = free_ports(4)
    monkeypatch.setattr("minitui.vllm.kv_sockets.FIRST_PORT", port)
    publishers = [ZmqEventPublisher(rank, f"tcp://*:{port}", f"tcp://*:{port + 2}") for rank in range(2)]
    api = await FakeServer(models=("tutor",), page=PAGE).start()
    try:
        found = await find_events(api.url)
        assert (found.events, found.ranks) == (f"tcp://127.0.0.1:{port},{port + 2}", 2)
        for rank, publisher in enumerate(publishers):
            stored = BlockStored(
                block_hashes=[b"1"], parent_block_hash=None, token_ids=tokens(100 * rank, 4), block_size=4,
                lora_id=None, medium="GPU", lora_name=None,
            )
            publisher.publish(KVEventBatch(ts=1.0, events=[stored]))
        for rank in range(2):
            source = KvSource(api.url, f"tcp://127.0.0.1:{port + rank},{port + 2 + rank}", tokenizer=str(model_dir()))
            async with started(source):
                await until(lambda source=source: bool(len(source.tree)))
                assert texts(source) == [tokens(100 * rank, 4)] and source._rank == rank
    finally:
        await api.kill()
        for publisher in publishers:
            publisher.shutdown()


def test_addresses() -> None:
    assert endpoints("tcp://a:1") == ("tcp://a:1", "") and endpoints("tcp://a:1,2") == ("tcp://a:1", "tcp://a:2")
    for text in ("a:1", "tcp://a", "tcp://*:5557", "tcp://a:1,x"):
        with pytest.raises(EngineError, match="give tcp://HOST:PORT"):
            endpoints(text)


async def test_the_screen_shows_the_texts_the_pool_and_what_is_missing() -> None:
    publisher = Publisher(True)
    ids = list(range(500, 516))
    await publisher.publish(stored([1, 2, 3, 4], token_ids=ids), stored([9], medium="CPU"))
    api = await FakeServer(models=("tutor",), page=PAGE).start()
    source = KvSource(api.url, publisher.address, tokenizer=str(model_dir()))
    app = CacheApp(source, Chats(source), Settings(), system="")
    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: "16 tokens" in shown(app))
        picture = shown(app)
        assert "40 blocks of 4 tokens" in picture and "25 %" in picture and "--scheduler-cls" in picture
        assert "Not shown: blocks outside" in picture and "evictable" not in picture
        await api.kill()
        await pilot.press("z", "1", "down")
        assert app.current_mode == "cached"
        app.clear_notifications()
        await pilot.press("p")
        assert [notice.message for notice in app._notifications] == [MISSING], "the engine cannot be paused"
        await pilot.press("question_mark")
        keys = "\n".join(str(row.content) for row in app.screen.query(Static))
        assert "Quit" in keys and "slower" not in keys and "/fork" not in keys and "prompt" not in keys
    await publisher.close()


def shown(app: Any) -> str:
    """Returns the text of the panels."""
    panels = app.screen.query(LinePanel)
    rows = [[run[0] for run in row] for panel in panels if panel.painted for row in panel.drawn_rows]
    return "\n".join("".join(row) for row in rows)
