"""A Source for a server without minitui's recorder: its KV events (ZeroMQ) and its /metrics.

The events are numbered. A server keeps some of them for subscribers that came late, at its replay endpoint. If
messages are lost and cannot be replayed, the tree begins again. vLLM and SGLang publish events if they are
started with

    --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
                         "replay_endpoint": "tcp://*:5558"}'
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from engine.errors import EngineError, InvalidRequest
from engine.hub.resolve import resolve_model
from engine.text.tokenizer import Tokenizer
from engine.trace.records import Record
from minitui.sources.base import Progress
from minitui.sources.http import give_turn, httpx, load_json
from minitui.sources.openai import OpenAISource
from minitui.sources.vllm import ONLY_WATCHES
from minitui.vllm.blocks import Inconsistent
from minitui.vllm.cached_tree import CachedTree
from minitui.vllm.kv_messages import Event, read
from minitui.vllm.kv_sockets import endpoints
from minitui.vllm.zmtp import Connection, Excess, connect

END = b"\xff" * 8  # the number of the last message of a replay
REPLAY_S = 10.0  # the longest wait for the next message of a replay
WHOLE_REPLAY_S = 120.0
AGAIN_S = 0.5  # between two connections
AT_ONCE = 4096  # events, hashes and tokens between two turns of the event loop
MOST_REPLAYED = 100_000
ROOM = 1 << 17  # blocks that the tree can hold if the size of the pool is unknown
MOST_ROOM = 1 << 21
POOL = (  # blocks, and tokens of a block: vLLM, SGLang, SGLang before 0.5.11
    (
        r'^vllm:cache_config_info\{.*?\bnum_gpu_blocks="(\d{1,9})"', r"^sglang:num_pages(?:\{.*\})? (\d{1,9})(?:\.0)?$",
        r'^sglang:cache_config_info\{.*?\bnum_pages="(\d{1,9})"',
    ),
    (
        r'^vllm:cache_config_info\{.*?\bblock_size="(\d{1,4})"', r"^sglang:page_size(?:\{.*\})? (\d{1,4})(?:\.0)?$",
        r'^sglang:cache_config_info\{.*?\bpage_size="(\d{1,4})"',
    ),
)
OTHER_RANKS = "events of other data parallel ranks"


class Texts:
    """Decodes with the tokenizer of the server's model; without one, shows the token ids."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> NoReturn:
        """Raises InvalidRequest: this source only watches."""
        raise InvalidRequest(ONLY_WATCHES)


class KvSource(OpenAISource):
    """The cached texts of one server. `texts`: decodes the tokens."""

    def __init__(self, url: str, events: str, key: str = "", tokenizer: str = "", note: str = "") -> None:
        """`events`: see `endpoints`. `tokenizer`: a directory or a name on the hub; empty: the server's model. `note`:
        a sentence about the events, for the panels."""
        super().__init__(url, key)
        self.events, self.replay = endpoints(events)
        self.texts = Texts(None)
        self.note = note
        self.joined: bool | None = None  # to the publisher; None: never yet
        self.no_texts = ""  # why token ids are shown, as a sentence
        self.num_blocks: int | None = None  # of the server's pool; None: unknown
        self.late = 0  # messages that the server published before, and that are unknown
        self.began_again = ""  # why the tree began again the last time, as a sentence
        self.messages = 0
        self.refused = 0  # messages, or their rest, that minitui did not take
        self.why_refused = ""  # the last of them, as the end of a sentence
        self.tree = CachedTree(ROOM, 16)
        self._tokenizer = tokenizer
        self._rank: int | None = None
        self._origin: float | None = None
        self._last = self._last_live = -1  # numbers of messages
        self._cut = False  # the connection was lost since the tree began
        self._listening: asyncio.Task[None] | None = None

    async def start(self, on_progress: Progress) -> None:
        """Connect to the server and to its events. Raises EngineError with a sentence for the user."""
        await super().start(on_progress)
        size = 16
        with contextlib.suppress(httpx.HTTPError, OSError):
            page = (await self.http.get("/metrics")).text
            self.num_blocks, size = pool_of(page)
        self.tree = CachedTree(min(self.num_blocks or ROOM, MOST_ROOM), size)
        on_progress({"stage": "tokenizer", "done": 0, "total": 0, "text": "loading the tokenizer"})
        name = self._tokenizer or await self._root()
        try:
            directory = await asyncio.to_thread(resolve_model, name, None, False)
            self.texts = Texts(await asyncio.to_thread(Tokenizer, directory))
        except EngineError as error:
            self.no_texts = f"token ids are shown, because there is no tokenizer of {name}: {error}"
        self.info = replace(self.info, num_blocks=self.num_blocks or 0, block_size=size, prefix_caching=True)
        self.poller.on_return = self._returned
        self._listening = self.keep(self._listen())

    async def _root(self) -> str:
        """Returns the name under which the server loaded its tokenizer or model; else the name in its list."""
        with contextlib.suppress(httpx.HTTPError, OSError, EngineError, LookupError, TypeError):
            model = load_json((await self.http.get("/v1/models")).content)["data"][0]
            if model.get("owned_by") == "sglang":  # its root is the name that it serves
                for path in ("/model_info", "/get_model_info"):  # new and old
                    answer = await self.http.get(path)
                    if answer.status_code == 200:
                        return str(load_json(answer.content)["tokenizer_path"])[:400]
            if type(model.get("root")) is str:
                return str(model["root"])[:400]
        return self.info.model

    async def snapshot(self) -> dict[str, Any]:
        return self.tree.state.snapshot()

    def drain_records(self) -> list[Record]:
        return self.tree.drain()

    # ---- messages

    def _returned(self) -> None:
        """The server was away: it may have begun again. Without a replay, older texts would be lost, so the tree begins
        again only if the publisher was away, too."""
        if self.replay and self._listening is not None:
            self._listening.cancel()
            self._begin_again("the server was away")
            self._listening = self.keep(self._listen())
        elif self._cut:
            self._begin_again("the server was away")

    async def _listen(self) -> None:
        """Receive until cancelled; connect again when the connection is lost or a message is beyond the limits."""
        while True:
            with contextlib.suppress(OSError):
                async with connect("SUB", self.events) as publisher:
                    self.joined = True
                    try:
                        await self._receive(publisher)
                    except Excess as error:
                        self._refuse(f"it {error}")
                    finally:
                        self.joined, self._cut = False, True
            await asyncio.sleep(AGAIN_S)

    async def _receive(self, publisher: Connection) -> None:
        await publisher.send(b"\1")  # subscribe to all topics
        if self.replay:
            await self._ask(self._last + 1)
        while True:
            frames = await publisher.receive()
            if len(frames) == 3 and len(frames[1]) == 8:
                await self._live(int.from_bytes(frames[1], "big"), frames[2])
            elif frames:
                self._refuse("it does not consist of a topic, a number of 8 bytes and events")
            await asyncio.sleep(0)  # a waiting message is received without a turn of the event loop

    async def _live(self, number: int, payload: bytes) -> None:
        if number <= self._last_live:
            self._begin_again("the server began again")
        self._last_live = number
        if number > self._last + 1 and self.replay:
            await self._ask(self._last + 1)
        await self._take(number, payload)

    async def _ask(self, number: int) -> None:
        """Take the messages from `number` on from the replay endpoint; without an answer, do nothing."""
        try:
            async with asyncio.timeout(WHOLE_REPLAY_S), connect("DEALER", self.replay) as endpoint:
                await endpoint.send(b"", number.to_bytes(8, "big"))
                for _ in range(MOST_REPLAYED):
                    async with asyncio.timeout(REPLAY_S):
                        frames = await endpoint.receive()
                    if frames and (len(frames) < 2 or len(frames[-2]) != 8 or frames[-2] == END):
                        return
                    if frames:
                        await self._take(int.from_bytes(frames[-2], "big"), frames[-1])
                    await asyncio.sleep(0)
        except Excess as error:
            self._refuse(f"it {error}")
        except OSError:
            return

    async def _take(self, number: int, payload: bytes) -> None:
        if number <= self._last:
            return
        lost, self._last = number - self._last - 1, number
        if lost and not self.messages:
            self.late = lost
        elif lost:
            self._begin_again(f"lost messages: {lost:,}", number)
        self.messages += 1
        began = time.monotonic()
        try:
            t, events, rank = read(payload)
            self._rank = rank if self._rank is None else self._rank
            if rank != self._rank:
                self.tree.left_out[OTHER_RANKS] += 1
                return
            self._origin = t if self._origin is None else self._origin
            for part in in_parts(events):
                size = next((event.size for event in part if event.size), self.tree.size)
                if size != self.tree.size and not self.tree.stored:
                    self._new_tree(size)
                self.tree.take(t - self._origin, part)
                await give_turn(began)
                began = time.monotonic()
        except (ValueError, Inconsistent, RecursionError) as error:
            self._refuse(str(error))
            if self.tree.stored:
                self._begin_again(f"a message does not fit: {error}"[:200], number + 1)
            await give_turn(began)

    def _refuse(self, why: str) -> None:
        self.refused += 1
        self.why_refused = why[:200]

    def _begin_again(self, reason: str, late: int = 0) -> None:
        """Begin with an empty tree. `late`: the same publisher goes on, and so many of its messages are unknown; 0: it
        began again, and numbers its messages from 0."""
        if not late:
            self._last = self._last_live = -1
        self.late, self.messages, self._cut = late, 0, False
        self.began_again = reason
        self._new_tree(self.tree.size)

    def _new_tree(self, size: int) -> None:
        """Begin with an empty tree. The gap in the record numbers asks readers to take a snapshot."""
        seq, t = self.tree.state.seq, self.tree.t
        self.tree = CachedTree(self.tree.state.num_blocks, size)
        self.tree.state.seq, self.tree.t = seq + 2, t
        self.tree.write("gate", "open", "")


def in_parts(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Yields the events in lists that take some milliseconds to apply."""
    part: list[Event] = []
    size = 0
    for event in events:
        part.append(event)
        size += 1 + len(event.hashes) + len(event.ids)
        if size >= AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part


def pool_of(page: str) -> tuple[int | None, int]:
    """Returns the number of blocks of the pool and the tokens of a block, from a /metrics page; None: unknown."""
    blocks, size = (next(filter(None, (re.search(form, page, re.M) for form in forms)), None) for forms in POOL)
    number = int(blocks[1]) if blocks else 0
    return number if number > 1 else None, max(1, int(size[1])) if size else 16
