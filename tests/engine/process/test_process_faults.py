"""Faults put into the engine's process: bad commands, a process that is stopped or slow, a pipe that is full."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.params import SamplingParams
from engine.process import early_process
from engine.process.client import EngineClient
from engine.process.commands import Command, Link
from engine.process.heartbeat import SILENCE_S, TICK_S, WORKING_S, Watch, look_at
from tests.engine.process.test_process import PROMPT, config, long, read, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(config(), log_file=tmp_path_factory.mktemp("faults") / "engine.log")
    yield client
    client.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def client(running: EngineClient) -> EngineClient:
    """The engine of this file, open and at full speed."""
    if not running.alive:  # after a test that failed half-way
        await running.restart()
    await running.control("pace", factor=1.0)
    await running.control("resume")
    return running


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang is taken for one sooner, for the sake of the tests' time."""
    monkeypatch.setattr("engine.process.heartbeat.SILENCE_S", 2.0)


async def answers(client: EngineClient) -> None:
    """The engine lives: a plain request is answered."""
    async with asyncio.timeout(60):
        stream = await read(client.submit(PROMPT, long(max_tokens=2)))
    assert len(stream.ids) == 2


async def refusal(client: EngineClient, ids: Any, params: Any, *rest: Any) -> str:
    """The sentence with which a submission is refused."""
    with pytest.raises(InvalidRequest) as caught:
        async with asyncio.timeout(60):
            await read(client.submit(ids, params, *rest))
    return str(caught.value)


def forged(**fields: Any) -> SamplingParams:
    """Parameters with fields that their constructor would not take."""
    params = SamplingParams(max_tokens=2)
    for name, value in fields.items():
        object.__setattr__(params, name, value)
    return params


class Hostile:
    """Can be packed here; cannot be unpacked in the engine's process."""

    def __reduce__(self) -> Any:
        return eval, ("1 / 0",)


SUBMISSIONS: list[tuple[Any, ...]] = [
    (PROMPT, forged(regex=5)),
    (PROMPT, forged(json_schema={1, 2})),
    (PROMPT, forged(json_schema={"enum": {1, 2}})),
    (PROMPT, forged(json_schema={"a": float})),
    (PROMPT, forged(logit_bias=[1, 2])),
    (PROMPT, forged(logit_bias={"a": 1.0})),
    (PROMPT, forged(choice=(5,))),
    (PROMPT, forged(choice=5)),
    (PROMPT, forged(stop=5)),
    (PROMPT, forged(stop_token_ids=5)),
    (PROMPT, forged(temperature="hot")),
    (PROMPT, forged(seed="x")),
    (PROMPT, forged(ignore_eos=Hostile())),
    (PROMPT, forged(n=0)),
    (PROMPT, {"max_tokens": 5}),
    (PROMPT, None),
    (PROMPT, long(max_tokens=2), 5),
    (PROMPT, long(max_tokens=2), "chat", "x"),
    (["a"], long(max_tokens=2)),
    ([10**5000], long(max_tokens=2)),
    ([Hostile()], long(max_tokens=2)),
    (PROMPT, long(max_tokens=2), {"unhashable": []}),
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("run_until", {}),
    ("run_until", {"predicate": {}}),
    ("run_until", {"predicate": 5}),
    ("run_until", {"predicate": {"event": []}}),
    ("run_until", {"predicate": {"event": "slow", "ms": "x"}}),
    ("run_until", {"predicate": {"event": "slow", "ms": None}}),
    ("step", {"n": "x"}),
    ("step", {"n": 1.5}),
    ("pace", {"factor": "x"}),
    ("pace", {"factor": float("nan")}),
    ("records", {}),
    ("records", {"enabled": "no"}),
    ("dance", {}),
    ("snapshot", {"engine": Hostile()}),
]


async def test_what_cannot_be_obeyed_is_refused_with_a_sentence_and_the_engine_goes_on(client: EngineClient) -> None:
    for submission in SUBMISSIONS:
        assert " " in await refusal(client, *submission)
        await answers(client)
    for action, arguments in CALLS:
        with pytest.raises(InvalidRequest, match=" "):
            await client.control(action, **arguments)
        await answers(client)
    assert (await client.snapshot())["requests"] == {}


async def test_what_cannot_be_packed_is_refused_where_it_is_asked(client: EngineClient) -> None:
    with pytest.raises(InvalidRequest, match="built-in types"):
        client.submit(PROMPT, forged(regex=lambda: 0))
    with pytest.raises(InvalidRequest, match="built-in types"):
        await client.control("pace", factor=lambda: 0)
    assert not client._waiting.streams and not client._waiting._calls
    await answers(client)


def junk(random: random.Random, depth: int = 0) -> Any:
    """Any value that a pickle can carry."""
    leaves = [None, True, -1, 0, 3, 10**30, 0.5, float("nan"), "", "finish", "x" * 3000, b"\xff", Hostile(), int, ...]
    kinds = [lambda: random.choice(leaves)] * 3
    if depth < 3:
        few = range(random.randrange(4))
        kinds += [
            lambda: [junk(random, depth + 1) for _ in few],
            lambda: tuple(junk(random, depth + 1) for _ in few),
            lambda: {random.choice(["event", "ms", "n", 5]): junk(random, depth + 1) for _ in few},
        ]
    return random.choice(kinds)()


def hostile_message(random: random.Random) -> bytes:
    """What no client of ours would send."""
    tag = random.choice([random.randrange(-9999, -1), junk(random)])
    fields = [field.name for field in dataclasses.fields(SamplingParams)]
    actions = ["pause", "resume", "step", "run_until", "pace", "records", "clear_cache", "check", "snapshot"]
    kind = random.choice(["submit", "submit", "call", "call", "arguments", "bytes", "pickle"])
    if kind == "submit":
        params = forged(**{random.choice(fields): junk(random) for _ in range(2)})
        few = (random.choice([PROMPT, junk(random)]), params, random.choice(["", junk(random)]))
        return Command("submit", tag, (*few, random.choice([0, junk(random)]))).packed()
    if kind == "call":
        names = random.sample(["n", "factor", "predicate", "enabled"], 2)
        return Command("call", tag, (random.choice(actions), {name: junk(random) for name in names})).packed()
    if kind == "arguments":
        command = random.choice(["submit", "abort", "call", "start", junk(random)])
        return Command(command, tag, (junk(random),)).packed()
    return random.randbytes(random.randrange(40)) if kind == "bytes" else pickle.dumps(junk(random))


@pytest.mark.parametrize("seed", range(2))
async def test_no_command_ends_the_engine(client: EngineClient, seed: int) -> None:
    rng = random.Random(seed)
    client._tag += 10_000  # no hostile tag is one of ours
    for _ in range(40):
        assert client._link is not None
        client._link.put(hostile_message(rng))
        await client.control("records", enabled=True)
        await client.control("pace", factor=1.0)
        await client.control("resume")
        await answers(client)
    await until_idle(client)
    await client.control("check")


async def until_idle(client: EngineClient) -> None:
    """Until the few of those submissions that can be answered have been."""
    async with asyncio.timeout(60):
        while (await client.snapshot())["requests"]:
            await asyncio.sleep(0.02)


async def test_half_a_message_of_a_client_that_vanishes_ends_the_engine(client: EngineClient) -> None:
    """Nothing that follows could be told apart; and an engine without a client has no reason to live."""
    deaths: list[str] = []
    client.on_death(deaths.append)
    assert client._link is not None
    client._link.transport.write(b"\x00\x00\x10\x00half of it")
    with socket.socket(fileno=os.dup(client._link.transport.get_extra_info("socket").fileno())) as ours:
        ours.shutdown(socket.SHUT_WR)
    await until(lambda: not client.alive, "the engine ends")
    assert len(deaths) == 1
    await client.restart()
    await answers(client)


async def test_a_cancel_in_slow_motion_is_acknowledged_at_once(client: EngineClient) -> None:
    async for _ in (first := client.submit(PROMPT, long())):
        if len(first.ids) == 1:
            await client.control("pace", factor=1000.0)
        if len(first.ids) == 3:
            break  # from here the engine lingers after each step
    client.drain_records()
    second = client.submit(PROMPT[:20], long())
    await second.started()
    await client.control("check")
    assert any(record[2] == "submit" for record in client.drain_records()), "the screen is told before the stretch ends"
    snapshot = await client.snapshot()
    second.cancel()
    first.cancel()
    async with asyncio.timeout(60):
        for stream in (second, first):
            while not stream.finish_reason:
                stream.drain()
                await asyncio.sleep(0.01)
    assert (await client.snapshot())["t"] - snapshot["t"] < 30
    await client.control("pace", factor=1.0)


async def test_what_is_waited_for_may_happen_between_two_steps(client: EngineClient) -> None:
    await client.control("pause")
    stream = client.submit(PROMPT, long())
    await stream.started()
    await client.control("run_until", predicate={"event": "finish"})
    stream.cancel()
    await read(stream)
    await client.snapshot()
    assert [record[4] for record in client.drain_records() if record[2] == "gate"][-1].endswith("finished: abort")


async def test_sending_to_a_stopped_engine_does_not_hold_up_the_loop_and_restart_strands_nobody(
    client: EngineClient, impatient: None
) -> None:
    assert client.pid is not None
    stopped = client.pid
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    streams = [client.submit(list(range(300_000)), long()) for _ in range(8)]  # far more than a pipe holds
    call = asyncio.ensure_future(client.snapshot())
    assert time.monotonic() - began < 50, "the event loop waited for a process that is stopped"
    await until(lambda: client.condition.hung, "silence is noticed")
    assert str(stopped) in client.condition.hung and "kill -CONT" in client.condition.hung
    for stream in streams:
        stream.cancel()
    await client.restart()
    for stream in streams:
        with pytest.raises(EngineDead):
            await read(stream)
    with pytest.raises(EngineDead):
        await call
    assert client.alive and client.pid != stopped and not client.condition.hung
    await answers(client)


async def test_an_engine_that_goes_on_is_not_said_to_hang_any_more(client: EngineClient, impatient: None) -> None:
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    try:
        stream = client.submit(PROMPT, long(max_tokens=3))
        await until(lambda: client.condition.hung, "silence is noticed")
    finally:
        os.kill(client.pid, signal.SIGCONT)
    await until(lambda: not client.condition.hung, "it goes on")
    await read(stream)
    assert len(stream.ids) == 3


async def test_a_process_that_is_stopped_while_it_loads_can_be_started_again(tmp_path: Path, impatient: None) -> None:
    told: list[Any] = []
    client = EngineClient(config(), tmp_path / "engine.log", told.append)
    launch = asyncio.ensure_future(client.launch())
    await until(lambda: told, "it loads")
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    await until(lambda: client.condition.hung, "silence is noticed")
    await client.restart()
    with pytest.raises(EngineDead):
        await launch
    await answers(client)
    await client.close()


async def test_a_process_that_was_begun_early_serves_the_next_client_or_ends_with_this_process(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    early_process.begin(log)
    early_process.begin(log)
    client = EngineClient(dataclasses.replace(config(), model=str(tmp_path / "none")), log)
    begun = early_process._begun[log][0]
    for started_early in (True, False):
        with pytest.raises(EngineError, match="none"):
            await client.launch()
        assert (client.pid == begun.pid) == started_early
    early_process.begin(log)
    process, connection = early_process.take(log)
    connection.close()  # as the system does for a process that ends
    assert await asyncio.to_thread(process.wait, 60) == 0


KEEPS_THE_LOCK = """
import ctypes, re, sys
print("ready", flush=True)
if sys.argv[1] == "sleep":
    ctypes.PyDLL(None).sleep(1000)
re.match("(a+)+$", "a" * 60 + "b")
"""


@pytest.mark.parametrize(("kind", "hangs"), [("compute", False), ("sleep", True)])
async def test_a_long_call_that_uses_the_processor_is_no_hang_and_a_wait_that_uses_none_is(
    kind: str, hangs: bool
) -> None:
    """Both keep Python's lock, so that a heartbeat thread could not run in either."""
    process = subprocess.Popen([sys.executable, "-c", KEEPS_THE_LOCK, kind], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        watch = Watch(process.pid)
        for _ in range(round(SILENCE_S / TICK_S) + 3):
            used = look_at(process.pid).cpu_s
            if not hangs:
                await until(lambda used=used: look_at(process.pid).cpu_s > used + 1.1 * WORKING_S, "it computes")
            watch.tick()
        assert bool(watch.condition.hung) == hangs
    finally:
        process.kill()
        process.wait()


async def test_a_task_that_lasts_is_told_as_that() -> None:
    watch = Watch(os.getpid())
    watch.heard()
    watch.beat("step", 12.0)
    watch.tick()
    assert watch.condition.long == "one step has taken 12 s so far" and not watch.condition.hung
    watch.beat("", 100.0, "capturing CUDA graphs: 12/52")
    assert watch.condition.long == "", "an engine that waits for work is no long task"
    assert watch.condition.preparing == "capturing CUDA graphs: 12/52"


async def linked(received: list[bytes]) -> tuple[Link, Connection]:
    """A client's link that appends what it receives, and the connection of the engine's end."""
    ours, theirs = socket.socketpair()
    link = Link(received.append, lambda: received.append(b"the end"))
    await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
    return link, Connection(theirs.detach())


async def test_a_client_sends_no_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.process.commands.MAX_UNSENT", 1_000_000)
    link, theirs = await linked([])
    assert link.put(b"x" * 5_000_000), "one message of any size"
    assert not link.put(b"x" * 10)
    assert len(await asyncio.to_thread(theirs.recv_bytes)) == 5_000_000
    await until(lambda: link.put(b"y"), "room again")
    link.transport.close()
    theirs.close()


async def test_messages_arrive_whole_however_the_system_cuts_them() -> None:
    received: list[bytes] = []
    _, theirs = await linked(received)
    sizes = [0, 1, 3, 5_000_000, 0, 70_000, 2]
    for size in sizes:
        await asyncio.to_thread(theirs.send_bytes, b"m" * size)
    wire = b"".join(struct.pack("!i", size) + b"m" * size for size in sizes) + struct.pack("!iQ", -1, 4) + b"long"
    for byte in wire[:20]:
        os.write(theirs.fileno(), bytes([byte]))
        await asyncio.sleep(0)
    await asyncio.to_thread(theirs._send, wire[20:])  # type: ignore[attr-defined]
    theirs.close()
    await until(lambda: received[-1:] == [b"the end"], "the end of the socket")
    assert [len(each) for each in received] == [*sizes, *sizes, 4, len(b"the end")] and received[-2] == b"long"
