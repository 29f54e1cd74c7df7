"""Several servers behind the chats: routing, failures, and the table of replicas."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.params import SamplingParams
from minitui.chat.conversation import Sampling
from minitui.chat.describe import describe_answer
from minitui.chat.sessions import Chats
from minitui.settings import Settings
from minitui.sources.routing import FEW, capacity, order, rank
from tests.sources.test_remote_foreign import SGLANG, VLLM
from tests.support.fake_openai import FakeServer
from tests.support.server.serving import Running
from tests.support.waiting import ask, started, until

pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

from minitui.chat.model_choice import load_codec
from minitui.sources.replicas import ReplicaSource
from minitui.sources.routing import Opening
from minitui.tui.apps.replica_app import ForeignReplicaApp, ReplicaApp
from minitui.tui.widgets.servers.replicas import Replicas

NAMES = ["http://a:1", "http://b:1", "http://c:1", "http://d:1"]
PREFIXES = [f"You are assistant {i}." for i in range(2000)]


# ---- the rule


def test_the_same_prefix_always_goes_to_the_same_replica() -> None:
    for prefix in PREFIXES[:50]:
        assert rank(prefix, NAMES) == rank(prefix, reversed(NAMES)) and sorted(rank(prefix, NAMES)) == NAMES
        assert order(prefix, dict.fromkeys(NAMES, 0)) == rank(prefix, NAMES)
    share = Counter(rank(prefix, NAMES)[0] for prefix in PREFIXES)
    assert all(400 < share[name] < 600 for name in NAMES), share


def test_losing_a_replica_moves_only_its_own_chats_each_to_its_second() -> None:
    left = [name for name in NAMES if name != "http://b:1"]
    moved = Counter()
    for prefix in PREFIXES:
        before, after = rank(prefix, NAMES), rank(prefix, left)
        if before[0] == "http://b:1":
            moved[after[0]] += 1
            assert after[0] == before[1]
        else:
            assert after[0] == before[0]
    assert len(moved) == 3, "all of its share went to one of the others"


def test_a_full_replica_is_asked_last_and_at_least_one_has_room() -> None:
    first, second, third, fourth = rank("x", NAMES)
    assert order("x", {first: FEW - 1, second: 0, third: 0, fourth: 0})[0] == first, "a few cost nothing"
    assert order("x", {first: FEW, second: 0, third: 0, fourth: 0}) == [second, third, fourth, first]
    assert capacity([40, 40, 40, 40]) == 51
    assert order("x", {first: 50, second: 40, third: 40, fourth: 30})[0] == first
    assert order("x", {first: 90, second: 89, third: 1, fourth: 0})[:2] == [third, fourth]
    assert order("x", {first: 14, second: 6}) == [second, first]
    for prefix in PREFIXES[:200]:
        loads = {name: random.Random(f"{prefix}{name}").randrange(60) for name in NAMES}
        chosen = order(prefix, loads)
        assert loads[chosen[0]] < capacity(loads.values()) and sorted(chosen) == NAMES
    assert order("x", {first: 9}) == [first] and order("x", {}) == []


def test_a_chat_stays_where_its_last_answer_was_written_unless_that_is_full_or_gone() -> None:
    first, second, third, fourth = rank("x", NAMES)
    idle = dict.fromkeys(NAMES, 0)
    assert order("x", idle, third) == [third, first, second, fourth]
    assert order("x", {**idle, third: 20}, third)[0] == first
    assert order("x", {first: 0, second: 0}, third) == [first, second]


# ---- the source


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minitui.sources.server_metrics.POLL_S", 0.1)
    monkeypatch.setattr("minitui.sources.server_metrics.BACKOFF_S", (0.05, 0.1))


@contextlib.asynccontextmanager
async def replicated(*servers: FakeServer, model: str = "") -> AsyncIterator[tuple[Any, Chats]]:
    """A source over these servers, and chats that are asked on it."""
    try:
        async with started(ReplicaSource([server.url for server in servers], model=model, exact=False)) as source:
            await until(lambda: all(replica.tried.is_set() for replica in source.replicas))  # it starts with the first
            chats = Chats(source, sampling=Sampling(temperature=0.0))
            chats.use(source.codec)
            source.opening = lambda group: next(s for s in chats.sessions if s.id == group).opening
            yield source, chats
    finally:
        for server in servers:
            await server.kill()


async def two(*pages: str) -> tuple[FakeServer, FakeServer]:
    first, second = pages or ("vllm:num_requests_running 0", "sglang:num_running_reqs 0")
    return await FakeServer(page=first).start(), await FakeServer(page=second).start()


def home(source: Any, chat: Any, servers: tuple[FakeServer, ...]) -> tuple[Any, FakeServer, Any]:
    """Returns the replica that a chat would use now, its server, and the other replica."""
    replica = source.place(chat.id)
    other = next(r for r in source.replicas if r is not replica)
    return replica, next(s for s in servers if s.url == replica.url), other


@contextlib.asynccontextmanager
async def one_chat() -> AsyncIterator[tuple[Any, Chats, Any, tuple[Any, FakeServer, Any]]]:
    """As `replicated`, over two servers; gives a chat, too, and its `home`."""
    servers = await two()
    async with replicated(*servers) as (source, chats):
        chat = chats.new("S")
        yield source, chats, chat, home(source, chat, servers)


async def test_chats_that_begin_alike_meet_and_the_answer_says_where() -> None:
    servers = await two()
    async with replicated(*servers) as (source, chats):
        written: dict[str, set[str]] = {}
        for number in range(6):
            chat = chats.new(f"system {number % 3}")
            for _ in range(2):
                message = await ask(chats, chat, f"question {number}")
                assert message.state == "done" and message.text == "one two three"
                written.setdefault(chat.system, set()).add(message.metrics["replica"]["url"])
                assert ("replica", "dim") in [(t.split()[0], tone) for t, tone in describe_answer(message)]
        assert all(len(urls) == 1 for urls in written.values())
        assert sum(len(server.asked) for server in servers) == 12 and not any(r.streams for r in source.replicas)


async def test_a_dead_replica_is_passed_over_and_comes_back() -> None:
    async with one_chat() as (source, chats, chat, (replica, server, other)):
        await server.kill()  # the poller has not noticed yet
        message = await ask(chats, chat)
        assert message.state == "done" and message.metrics["replica"]["number"] == other.number
        assert replica.trouble and source.place(chats.new("S").id) is other
        assert replica.metrics.running is None and replica.retry_in < 1
        await server.start()
        await until(lambda: not source.reason_against(replica) and replica.metrics.running is not None)
        assert source.place(chats.new("S").id) in (replica, other)
        assert source.place(chat.id) is other, "the chat left the cache that holds it"


async def test_a_silent_replica_delays_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minitui.sources.server_metrics.PATIENCE_S", 0.3)
    async with one_chat() as (source, chats, chat, (replica, server, other)):
        server.silent.set()  # like a process that is stopped: the connection is made, and nothing comes
        message = await ask(chats, chat)
        assert message.state == "done" and message.metrics["replica"]["number"] == other.number
        assert "within 0.3 s" in replica.trouble
        assert f"because replica {replica.number} did not answer" in str(describe_answer(message))
        server.silent.clear()
        await until(lambda: not source.reason_against(replica))


async def test_a_begun_answer_ends_with_a_sentence_and_the_next_goes_elsewhere() -> None:
    async with one_chat() as (_, chats, chat, (replica, server, other)):
        server.dies_after = 2
        message = await ask(chats, chat)
        assert message.state == "error" and message.text == "one two "
        assert f"replica {replica.number}" in message.error and "during this answer" in message.error
        assert (await ask(chats, chat)).metrics["replica"]["number"] == other.number


async def test_a_request_that_crashes_replicas_is_not_passed_to_all_of_them() -> None:
    servers = tuple([await FakeServer().start() for _ in range(4)])
    for server in servers:
        server.dies_after = 0
    async with replicated(*servers) as (_, chats):
        message = await ask(chats, chats.new("S"))
        assert message.state == "error" and sum(len(server.asked) for server in servers) == 2


async def test_a_replica_that_takes_no_more_is_passed_over_and_refusals_of_the_request_are_not() -> None:
    async with one_chat() as (_, chats, chat, (replica, server, other)):
        server.status = 429
        assert (await ask(chats, chat)).metrics["replica"]["number"] == other.number
        assert not replica.trouble, "it is not away: it is busy"
        server.status, chat = 400, chats.new("S")
        message = await ask(chats, chat)
        assert message.state == "error" and "status 400" in message.error and len(server.asked) == 2


async def test_a_pinned_chat_uses_no_other_replica() -> None:
    servers = await two()
    async with replicated(*servers) as (source, chats):
        chat = chats.new("S")
        _, _, other = home(source, chat, servers)
        source.pins[chat.id] = other.url
        assert (await ask(chats, chat)).metrics["replica"]["number"] == other.number
        await next(s for s in servers if s.url == other.url).kill()
        message = await ask(chats, chat)
        assert message.state == "error" and f"pinned to replica {other.number}" in message.error
        assert "/unpin" in message.error
        del source.pins[chat.id]
        assert (await ask(chats, chat)).state == "done"
        assert source.find("1") is source.replicas[0] and source.find(source.replicas[1].name) is source.replicas[1]
        for text in ("3", "127.0.0.1", ""):
            with pytest.raises(InvalidRequest, match="of the replicas"):
                source.find(text)


async def test_load_is_the_polled_value_plus_requests_sent_since() -> None:
    servers = await two(VLLM, SGLANG)
    async with replicated(*servers) as (source, chats):
        vllm, sglang = source.replicas
        await until(lambda: vllm.load == 14 and sglang.load == 162 + 2826)  # the running and the waiting
        assert source.place(chats.new("S").id) is vllm, "the other has two hundred times as many"
        servers[0].hold = asyncio.Event()
        chat = chats.new("S")
        chats.send(chat, "Q")
        await until(lambda: chat.messages[-1].text)
        assert len(vllm.streams) == 1 and vllm.load in (14, 15)
        servers[0].hold.set()
        await asyncio.wait_for(chat._task, 60)
        assert not vllm.streams


async def test_a_replica_with_another_model_is_reported_and_not_used() -> None:
    servers = (await FakeServer(("big",)).start(), await FakeServer(("small",)).start())
    third = await FakeServer(("small", "big")).start()
    async with replicated(*servers, third) as (source, chats):
        assert source.info.model == "big" and "these chats use big" in source.reason_against(source.replicas[1])
        for number in range(8):
            await ask(chats, chats.new(f"system {number}"))
        assert not servers[1].asked and len(servers[0].asked) + len(third.asked) == 8
        assert {body["model"] for body in third.asked} <= {"big"}


async def test_a_replica_that_does_not_answer_at_the_start_counts_as_away(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("server_metrics", "replica"):
        monkeypatch.setattr(f"minitui.sources.{module}.PATIENCE_S", 0.5)
    silent, answering = await FakeServer(("big",)).start(), await FakeServer(("small",)).start()
    silent.silent.set()
    async with replicated(silent, answering) as (source, _):
        assert source.info.model == "small" and "within 0.5 s" in source.replicas[0].trouble
        silent.silent.clear()
        await until(lambda: "it serves big" in source.reason_against(source.replicas[0]))


async def test_without_a_usable_replica_the_sentence_has_every_reason() -> None:
    servers = await two()
    async with replicated(*servers) as (_, chats):
        for server in servers:
            await server.kill()
        message = await ask(chats, chats.new("S"))
        assert message.state == "error" and "none of the 2 replicas can answer" in message.error
        assert all(server.url.removeprefix("http://") in message.error for server in servers)
    source = ReplicaSource([server.url for server in servers], exact=False)
    with pytest.raises(EngineDead, match="none of the 2 replicas"):
        await source.start(lambda progress: None)
    with pytest.raises(EngineDead):
        await source.ready()
    with pytest.raises(InvalidRequest, match="at least two"):
        ReplicaSource([servers[0].url, servers[0].url.removeprefix("http://")])


async def test_cancelling_ends_the_answer_and_moves_nowhere() -> None:
    servers = await two()
    async with replicated(*servers) as (source, _):
        for server in servers:
            server.hold = asyncio.Event()
        prompt = source.codec.apply_chat_template([{"role": "user", "content": "x"}])
        source.opening = Opening
        stream = source.submit(prompt, SamplingParams(), group="g")
        async for _ in stream:
            stream.cancel()
        assert stream.finish_reason == "abort" and sum(len(server.asked) for server in servers) == 1


async def test_messages_go_to_servers_of_every_make_and_ours_can_be_watched_beside(
    server: Running, tmp_path: Path
) -> None:
    fake = await FakeServer(("tutor",)).start()
    source = ReplicaSource([fake.url, server.url], exact=False, cache=tmp_path)
    await source.start(lambda progress: None)
    ours = source.replicas[1]
    await until(lambda: all(not source.reason_against(r) for r in source.replicas))
    chats = Chats(source, sampling=Sampling(temperature=0.0, max_tokens=8))
    chats.use(source.codec)
    for replica in source.replicas:
        chat = chats.new("Answer briefly.")
        source.pins[chat.id] = replica.url
        message = await ask(chats, chat, "What is prefill?")
        assert message.state == "done" and message.metrics["replica"]["url"] == replica.url, message.error
    with pytest.raises(EngineError, match="does not publish"):
        await source.watch(source.replicas[0])
    await source.watch(ours)
    assert (await source.snapshot())["num_blocks"] == server.snapshot()["num_blocks"]
    await source.close()
    await fake.kill()


# ---- the application


class Door:
    """A proxy for a server; it can be closed, with all its connections."""

    def __init__(self, url: str) -> None:
        self._to = int(url.rsplit(":", 1)[1])
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> Door:
        self._server = await asyncio.start_server(self._enter, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def shut(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", self._to)

        async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    target.write(data)
                    await target.drain()
            target.close()

        self._open |= {writer, outer}
        await asyncio.gather(carry(reader, outer), carry(inner, writer))
        self._open -= {writer, outer}


async def test_the_application_shows_its_replicas_and_survives_one(server: Running, tmp_path: Path) -> None:
    doors = [await Door(server.url).start() for _ in range(2)]
    source = ReplicaSource([door.url for door in doors], cache=tmp_path)
    chats = Chats(source, sampling=Sampling(temperature=0.0, max_tokens=12))
    app = ReplicaApp(source, chats, Settings(), system="Answer briefly.", speaker="tutor", load_codec=load_codec)
    async with app.run_test(size=(80, 24)) as pilot:

        async def shown(true: Any) -> None:
            await until(true, lambda: f"it did not happen in time; there stands:\n{table()}")
            await pilot.pause()

        def table() -> str:
            return "\n".join(panel.text for panel in app.screen.query(Replicas))

        await shown(lambda: app.feed.live and all(not source.reason_against(r) for r in source.replicas))
        app.commands.run_slash("/replicas")
        await shown(lambda: "2 of 2 can answer" in table() and table().count(" up ") == 2)
        assert all(door.url.removeprefix("http://") in table() for door in doors)
        app._followed = source.shown = None
        await shown(lambda: source.shown is not None and source.shown is source.current(app.session.id))
        await pilot.press("down", "P")
        assert source.pins[app.session.id] == doors[1].url
        app.ask_question("What is prefill?")
        await shown(lambda: app.session.messages and not app.session.busy)
        assert app.session.messages[-1].metrics["replica"]["number"] == 2, app.session.messages[-1].error
        await shown(lambda: "pinned" in table())

        # The panels have followed the chat; they are held to another, and follow again.
        await shown(lambda: source.shown is source.replicas[1] and app.feed.live)
        assert source.replicas[0].telemetry is not None and source.replicas[0].telemetry.records.following is False
        await pilot.press("up", "enter")
        await shown(lambda: source.shown is source.replicas[0] and app.feed.live and not app._switching.locked())
        await app._check_replicas()
        assert source.shown is source.replicas[0], "the panels were held there"
        await pilot.press("enter")
        await shown(lambda: source.shown is source.replicas[1] and app.feed.live and not app._switching.locked())
        step = app.view.history.live.state.step
        app.commands.run("unpin")
        app.ask_question("What is decode?")
        await shown(lambda: not app.session.busy and app.view.history.live.state.step > step)

        doors[1].shut()
        await shown(lambda: " down " in table() and "1 of 2 can answer" in table())
        app.ask_question("What is a block?")
        await shown(lambda: not app.session.busy)
        assert app.session.messages[-1].metrics["replica"]["number"] == 1, app.session.messages[-1].error
        app.open_mode("chat")
        await shown(lambda: "1 of 2 replicas can answer" in app.story)
        app.commands.run("pin", "2")
        app.ask_question("And now?")
        await shown(lambda: not app.session.busy)
        assert "pinned to replica 2" in app.session.messages[-1].error
        await doors[1].start()
        await shown(lambda: "2 of 2 replicas can answer" in app.story and not source.connection)
        step = app.view.history.live.state.step
        app.commands.run("retry")
        await shown(lambda: not app.session.busy and app.view.history.live.state.step > step)
        assert app.session.messages[-1].metrics["replica"]["number"] == 2, app.session.messages[-1].error
    for door in doors:
        door.shut()


async def test_servers_without_metrics_have_dashes_and_no_panels() -> None:
    servers = (await FakeServer().start(), await FakeServer(page=VLLM).start())
    source = ReplicaSource([server.url for server in servers], exact=False)
    app = ForeignReplicaApp(source, Chats(source), Settings(), system="S", speaker="model", load_codec=None)
    async with app.run_test(size=(120, 36)) as pilot:
        await until(lambda: source.replicas[1].metrics.running is not None)
        app.action_do("replicas")

        def shown() -> list[str]:
            text = "\n".join(panel.text for panel in app.screen.query(Replicas))
            return [line for line in text.splitlines() if "127.0.0.1" in line and "http" not in line]

        await until(lambda: [" up " in row for row in shown()] == [True, True] and "75%" in shown()[1])
        assert all(server.visits["/v1/models"] == 1 for server in servers), "it was started twice"
        rows = shown()
        assert rows[0].count("–") == 6 and " 0%" not in rows[0], rows[0]
        assert rows[1].split()[4:9] == ["up", "12", "2", "38%", "75%"] and "50.0 ms" in rows[1], rows[1]
        app.action_do("inspect")
        await pilot.pause()
        assert app.current_mode == "replicas", "these servers send no records"
        app.action_do("chat")

        def vitals() -> str:
            return app.screen.query_one("#rail ServerVitals").text

        # Either server may have the chat; its figures are there with the next answer of its /metrics.
        figures = {"1 http": "unknown", "2 http": "75 %"}
        await until(lambda: any(name in (text := vitals()) and figures[name] in text for name in figures))
        assert ("75 %" in vitals()) != ("unknown" in vitals()), vitals()
        with pytest.raises(EngineError, match="does not publish"):
            await source.watch(source.replicas[0])
    for server in servers:
        await server.kill()
