"""What vLLM's scheduler sent is folded into its own numbers, and the application finds and shows it. Needs no vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.params import SamplingParams
from engine.trace.state import State
from minitui.protocol import ServerInfo
from minitui.trace.reader import TraceError, TraceReader
from minitui.tutor import model_dir
from minitui.vllm.ports import Ports, key_variables, ports_of
from tests.support.fake_openai import FakeServer
from tests.support.vllm_direct import Direct, watch_steps
from tests.support.vllm_played import FACTS_EVERY, make_scheduler, messages_of, play, recorded
from tests.support.vllm_versions import IMPORTS, packages_of
from tests.support.waiting import drained, started, until, wait_until

PROMPT = list(range(40, 100))


@pytest.mark.parametrize("lost", [False, True], ids=["all messages", "lost messages"])
@pytest.mark.parametrize("name", recorded())
def test_every_count_table_hit_and_step_is_vllms(name: str, lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's recorded calls, played into the recorder, give vLLM's numbers of the rest after each call."""
    monkeypatch.setenv("MINITUI_VLLM_CHECK", "1")
    run = recorded()[name]
    scheduler = make_scheduler(run["info"], Direct)
    pipe, steps, hits, ended, step_of = watch_steps(scheduler), 0, [], [], {}
    for call in play(scheduler, run["calls"]):
        assert lost or pipe.ended == ended
        if call[0] == "schedule":
            _, new, old, tokens, _, facts, *_ = call
            step_of[len(step_of)] = steps if tokens else -1
            steps += bool(tokens)
            computed = dict(new) | {n: cached for n, cached, _, resumed in old if resumed}
            hits += [(n, computed[n]) for n, _ in tokens if n in computed]
            if lost and steps % FACTS_EVERY == FACTS_EVERY - 7:
                pipe.lose()
            pipe.reads = pipe.reads or bool(facts)
        elif call[0] == "update" and step_of[call[1]] >= 0:
            ended.append(step_of[call[1]])
    translator = pipe.translator
    assert scheduler._recorder is not None and pipe.repairs == 0
    assert translator.faults == [] and pipe.wrong == []
    assert pipe.follower.state.snapshot() == translator.blocks.state.snapshot()
    caching = run["info"]["prefix_caching"]
    if lost:
        assert pipe.wholes >= 4
    else:
        assert translator.checked >= 2 * len(ended) > 300
        assert sorted(ended) == list(range(steps))
        assert pipe.as_planned > len(ended) / 3 or "drafts" in name
        assert pipe.hits == (hits if caching else []) and bool(translator.totals["hits"]) == caching
        assert pipe.kinds["preempt"] and pipe.kinds["finish"] > 50
        assert bool(pipe.kinds["copy"] and pipe.kinds["evict"]) == caching


def test_the_recorded_calls_have_what_vllms_second_model_runner_does() -> None:
    """It names resumed requests after new ones, although it has admitted some before; stages have empty steps."""
    for name, run in recorded().items():
        steps = [call for call in run["calls"] if call[0] == "schedule"]
        first = [[n for n, _ in call[3] if n in dict(call[1])] for call in steps]
        others = sum([n for n, _ in call[1]] != order for call, order in zip(steps, first, strict=True))
        assert bool(others) == ("second" in name), name
        assert sum(not call[3] for call in steps) > (20 if "stages" in name else 0)


LINES: list[tuple[str, int, list[int]]] = [
    ("vllm serve m", 8000, [8001]), ("serve m --port 9000", 9000, [9001]), ("serve --port=9001 m", 9001, [9002]),
    ("x --port", 8000, [8001]), ("serve m -dp 3", 8000, [8001, 8002, 8003]),
    ("serve m --data_parallel_size=4 --data-parallel-size-local 2", 8000, [8001, 8002]),
    ("serve m --data-parallel-size 4 --nnodes 2", 8000, [8001, 8002]),
    ("serve m -dp 4 --data-parallel-rank 2 --port 8010", 8010, [8011]), ("serve m -dp 2 -dpe", 8000, [8001]),
    ("serve m -dp 4 -dpl 2 -dpm", 8000, [8002]),
]


@pytest.mark.parametrize(("line", "api", "telemetry"), LINES)
def test_the_telemetry_of_each_rank_is_after_vllms_port(line: str, api: int, telemetry: list[int]) -> None:
    assert ports_of(line.split()) == Ports(api, telemetry[0], tuple(telemetry))


def test_a_rank_and_a_file_have_their_ports(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("port: 9000\ndata_parallel_size: 2\nenforce-eager: false\n")
    pytest.importorskip("yaml")
    line = ["vllm", "serve", "m", "--config", str(file)]
    assert ports_of(line, None, 1, 1) == Ports(9000, 9002, (9001, 9002))
    assert ports_of([*line, "--port", "9500"]).api == 9500
    file.write_text("port: 9000\ndata-parallel-size: 2\ndata-parallel-rank: 0\ndata-parallel-external-lb: false\n")
    assert ports_of(line) == Ports(9000, 9001, (9001,))
    file.write_text("[")
    assert ports_of(line) == Ports(8000, 8001, (8001,))
    assert ports_of(["-dp", "8", "-dpr", "4", "-dpl", "4"], "7000", 6, 2) == Ports(8000, 7002, (7000, 7001, 7002, 7003))
    assert ports_of(["-dp", "8", "-dpr", "4", "-dpl", "4", "-dpm"], None, 6) == Ports(8002, 8006, (8006,))
    for wrong in ("0", "x", "65536", ""):
        with pytest.raises(EngineError, match="it must be a port, 1 to 65535"):
            ports_of([], wrong)
    with pytest.raises(EngineError, match="there is no port 65536"):
        ports_of(["--port", "65535"])


def test_the_telemetry_has_vllms_own_keys_unless_others_are_chosen(tmp_path: Path) -> None:
    line = ["vllm", "serve", "m", "--api-key", "secret-one", "secret-two", "--port", "9000"]
    assert key_variables(line, {}) == {"MINITUI_API_KEY": "secret-one secret-two"}
    assert ports_of(line).api == 9000
    assert key_variables(["serve", "--api_key=a", "m"], {"VLLM_API_KEY": "b"}) == {"MINITUI_API_KEY": "a"}
    assert key_variables(["serve", "m"], {"VLLM_API_KEY": "b"}) == {"MINITUI_API_KEY": "b"}
    assert key_variables(line, {"MINITUI_WATCH_KEY": "c"}) == {} == key_variables(["serve", "m"], {})
    pytest.importorskip("yaml")
    (tmp_path / "vllm.yaml").write_text("api-key: [d, e]\n")
    assert key_variables(["--config", str(tmp_path / "vllm.yaml")], {}) == {"MINITUI_API_KEY": "d e"}


# ---- the application's source, over a watcher that reads messages from a pipe as it does beside vLLM


class FakeVllm(FakeServer):
    """vLLM's endpoint: answers /v1/completions with token ids. A client that goes away closes its connection."""

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path != "/v1/completions":
            await super()._answer(path, body, writer)
            return
        self.asked.append(body)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for i, text in enumerate(self.pieces):
            if self.hold is not None and i == len(self.pieces) - 1:
                await self.hold.wait()
            reason = "length" if i == len(self.pieces) - 1 else None
            choice = {"index": 0, "text": text, "token_ids": [50 + i], "finish_reason": reason}
            writer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            await writer.drain()
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()


class Beside:
    """vLLM's two addresses in this event loop. `send`: a message of its scheduler."""

    def __init__(self, api: FakeVllm | None, pipe: int) -> None:
        self.api, self._pipe = api, pipe

    def send(self, *message: Any) -> None:
        data = marshal.dumps(message)
        os.write(self._pipe, len(data).to_bytes(4, "little") + data)

    def end(self) -> None:
        """vLLM's process ends."""
        if self._pipe >= 0:
            os.close(self._pipe)
        self._pipe = -1


def free_ports(n: int) -> int:
    """Returns a free port whose `n` - 1 successors are free, too."""
    while True:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError, OverflowError):
            first = held.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            for i in range(1, n):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port + i))
            return port


INFO = {
    "engine": "vLLM 0.0", "model": "tutor", "tokenizer": str(model_dir()), "revision": None, "num_blocks": 30,
    "block_size": 16, "max_num_batched_tokens": 128, "max_num_seqs": 4, "max_model_len": 400, "vocab_size": 8192,
    "prefix_caching": True, "generation": {}, "rank": 0, "api_port": 8000,
}


@contextlib.asynccontextmanager
async def beside_vllm(ranks: int = 1, **facts: Any) -> AsyncIterator[Any]:
    """Yields the addresses of one engine, or those of each data parallel rank. `facts`: more of each engine."""
    pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
    from minitui.vllm.watcher import Watcher

    api = await FakeVllm(models=("tutor",), port=free_ports(1 + ranks), page=page(ranks)).start()
    ports, engines, watching, ends = list(range(api.port + 1, api.port + 1 + ranks)), [], [], []
    for rank, port in enumerate(ports):
        (reader, pipe), (asked, asks) = os.pipe(), os.pipe()
        watching.append(asyncio.create_task(Watcher(reader, asks).run()))
        engines.append(Beside(api, pipe))
        ends += [reader, asked, asks]
        place = {"api_port": api.port, "telemetry_port": port, "telemetry_ports": ports, "rank": rank}
        engines[-1].send("init", 0.0, INFO | place | facts)
    try:
        yield engines if ranks > 1 else engines[0]
    finally:
        for engine in engines:
            engine.end()
        async with asyncio.timeout(60):
            await asyncio.gather(*watching)
        await api.kill()
        for end in ends:
            os.close(end)


def page(ranks: int) -> str:
    """Returns vLLM's /metrics: rank n runs 3 + n requests."""
    return "".join(f'vllm:num_requests_running{{engine="{n}"}} {3 + n}\n' for n in range(ranks))


async def found(url: str, ranks: int, **options: Any) -> list[Any]:
    """Returns the engines at an address, when their watchers are up."""
    from minitui.sources.remote_checks import probe
    from minitui.sources.vllm import find

    async with asyncio.timeout(60):
        while True:
            engines = await find(url, **options)
            with contextlib.suppress(EngineError):
                if len(engines) == ranks and all([await probe(e.telemetry, **options) for e in engines]):
                    return engines
            await asyncio.sleep(0.02)


async def filled(source: Any, part: str) -> Any:
    """Returns a part of the engine's state, when there is something in it."""
    async def current() -> Any:
        return (await source.snapshot())[part]

    return await until(current)


@contextlib.asynccontextmanager
async def attached(beside: Beside, cache: Path, to_telemetry: bool = False, **options: Any) -> AsyncIterator[Any]:
    from minitui.sources.vllm import VllmSource

    [engine] = await found(f"http://127.0.0.1:{beside.api.port + to_telemetry}", 1, **options)
    async with started(VllmSource(engine, cache=cache, **options)) as source:
        yield source


@pytest.mark.parametrize("to_telemetry", [False, True])
async def test_a_chat_with_vllm_is_the_request_in_the_panels(tmp_path: Path, to_telemetry: bool) -> None:
    async with beside_vllm() as beside, attached(beside, tmp_path, to_telemetry) as source:
        beside.api.hold = asyncio.Event()
        assert source.info.engine == "vLLM 0.0" and (Path(source.info.model_dir) / "tokenizer.json").is_file()
        state = State.from_snapshot(await source.snapshot())
        stream = source.submit(PROMPT, SamplingParams(temperature=0, max_tokens=3), group="0a1b2c3d")
        await until(lambda: beside.api.asked)
        body, head = beside.api.asked[0], beside.api.heads[-1]
        assert body["prompt"] == PROMPT and (body["temperature"], body["max_tokens"]) == (0, 3)

        id = f"cmpl-{head['x-request-id']}-0-1234abcd"
        beside.send("add", 0.001, id, PROMPT, 63, None)
        admission = (id, 0, [1, 2, 3, 4], 60, [])
        beside.send("schedule", 0.002, 0.003, 0, [], [admission], [], [], [(id, 60)], {}, 60, 1, 0, None)
        ended = ("f", id, "FINISHED_LENGTH_CAPPED", 3)
        beside.send("update", 0.013, 0.014, 0, [ended], None, [[7, 8, 9]], [id], 7.25, None)
        async with asyncio.timeout(60):
            while state.step < 0 or state.requests:
                for record in source.drain_records():
                    state.apply(record)
                await asyncio.sleep(0.01)
        beside.api.hold.set()
        await drained(stream)
        assert stream.request_id == 0 and stream.ids == [50, 51, 52] and stream.text == "one two three"
        assert stream.finish_reason == "length" and stream.metrics["cached_tokens"] == 0
        assert stream.metrics["match"]["stop"] == "empty" and stream.metrics["prompt_tokens"] == 60
        assert stream.metrics["queue_ms"] == 2.0 and stream.metrics["prefill_ms"] == 10.0
        with pytest.raises(InvalidRequest, match="vLLM cannot pause"):
            await source.control("pause")
        with pytest.raises(InvalidRequest, match="has 400 tokens; this model takes 400"):
            source.submit([1] * 400, SamplingParams())


async def test_the_data_parallel_ranks_are_replicas(tmp_path: Path) -> None:
    from minitui.cli.chat import connect_to
    from minitui.sources.replicas import ReplicaSource
    from minitui.tui.apps.replica_app import ReplicaApp

    async with beside_vllm(ranks=2) as (first, second):
        engines = await found(first.api.url, 2)
        assert [engine.name.split(" ", 1)[1] for engine in engines] == ["rank 0", "rank 1"]
        assert [(e.place, e.label) for e in await found(engines[1].telemetry, 1)] == [(1, 1)], "its own address: alone"
        address, other = first.api.url, engines[1].telemetry
        with pytest.raises(EngineError, match=f"this vLLM has several: connect to one of .*, {other}"):
            await asyncio.to_thread(connect_to, [address], "", None, None, True)
        for addresses in ([address], [address, other], [engines[0].telemetry, other]):
            made, choice, app = await asyncio.to_thread(connect_to, addresses, "", None, None, False)
            assert isinstance(made, ReplicaSource) and app is ReplicaApp and choice.speaker == "tutor" and made.exact
            assert [replica.url for replica in made.replicas] == [engine.telemetry for engine in engines]
        async with started(ReplicaSource(engines, cache=tmp_path)) as source:
            await until(lambda: [replica.metrics.running for replica in source.replicas] == [3, 4])
            assert {replica.kind for replica in source.replicas} == {"vllm"}
            second.send("add", 0.001, "cmpl-7", PROMPT, 63, None)
            await source.watch(source.replicas[1])
            state = await source.snapshot()
            assert source.shown is source.replicas[1] and state["num_blocks"] == 30
            await filled(source, "requests")
            for place in ("0", "1"):
                source.pins["0a1b2c3d"] = source.replicas[int(place)].url
                stream = source.submit(PROMPT, SamplingParams(max_tokens=3), group="0a1b2c3d")
                ids = [id async for delta in stream for id in delta.ids]
                heads = [head for head in first.api.heads if "x-request-id" in head]
                assert heads[-1]["x-data-parallel-rank"] == place and ids == [50, 51, 52]
            second.end()
            await until(lambda: bool(source.connection), 20)
            assert not source.reason_against(source.replicas[0])


async def test_vllm_is_a_replica_beside_servers_of_other_kinds(tmp_path: Path) -> None:
    from minitui.cli.chat import connect_to
    from minitui.sources.replicas import ReplicaSource

    async with beside_vllm() as beside:
        await found(beside.api.url, 1)
        other = await FakeServer(models=("tutor",)).start()
        made, _, _ = await asyncio.to_thread(connect_to, [other.url, beside.api.url], "", None, None, False)
        assert isinstance(made, ReplicaSource) and not made.exact
        for servers, exact in (([other.url, beside.api.url], False), ([beside.api.url, "http://127.0.0.1:9"], True)):
            async with started(ReplicaSource(servers, exact=exact, cache=tmp_path)) as source:
                vllm = source.replicas[servers.index(beside.api.url)]
                await asyncio.wait_for(vllm.tried.wait(), 60)
                await source.watch(vllm)
                assert vllm.kind == "vllm" and (await source.snapshot())["num_blocks"] == 30
        await other.kill()


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine": "minitui"}, {"engine": None}, {"api_port": "8000"}, {"api_port": True}, {"api_port": 0},
        {"api_port": 65536}, {"rank": None}, {"telemetry_ports": None}, {"telemetry_ports": [8002]},
        {"telemetry_ports": [8001, 0]}, {"telemetry_ports": [8001, "8002"]}, {"telemetry_ports": [8001] * 65},
        {"telemetry_port": None},
    ],
    ids=str,
)
def test_facts_that_are_not_valid_name_no_engine(wrong: dict[str, Any]) -> None:
    from minitui.sources.vllm import _engine

    facts = {**INFO, "telemetry_port": 8001, "telemetry_ports": [8001, 8002]}
    assert _engine("http://[::1]:8001", ServerInfo.from_json(facts)) is not None
    with contextlib.suppress(ValueError):
        assert _engine("http://[::1]:8001", ServerInfo.from_json(facts | wrong)) is None


async def test_an_engine_without_an_endpoint_is_watched(tmp_path: Path) -> None:
    """As on a second machine (--headless)."""
    async with beside_vllm() as beside:
        await found(beside.api.url, 1)
        await beside.api.kill()
        async with attached(beside, tmp_path, True) as source:
            assert (await source.snapshot())["num_blocks"] == 30
            stream = source.submit(PROMPT, SamplingParams(max_tokens=3))
            with pytest.raises(EngineDead, match=f"{beside.api.url} cannot be reached"):
                await drained(stream)


async def test_an_engine_with_several_groups_is_watched(tmp_path: Path) -> None:
    """Of its facts, the groups are not those of EngineInfo, which counts layers and bytes."""
    window = {"name": "window 64", "kind": "window", "window": 64, "chunk": 0, "size": 16}
    states = {"name": "state", "kind": "state", "window": 0, "chunk": 0, "size": 16}
    async with beside_vllm(side_groups=[window, states]) as beside, attached(beside, tmp_path) as source:
        assert [group["name"] for group in (await source.snapshot())["groups"]] == ["window 64", "state"]


async def test_an_answer_ends_when_the_records_do_not_come(tmp_path: Path) -> None:
    async with beside_vllm() as beside, attached(beside, tmp_path) as source:
        stream = source.submit(PROMPT, SamplingParams(max_tokens=3))
        await drained(stream)
        assert stream.finish_reason == "length" and stream.metrics["cached_tokens"] is None


async def test_the_telemetry_hides_texts_and_needs_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minitui.sources.vllm import find

    monkeypatch.setenv("MINITUI_API_KEY", "k" * 20)
    monkeypatch.setenv("MINITUI_HIDE_TEXT", "1")
    async with beside_vllm() as beside, attached(beside, tmp_path, key="k" * 20) as source:
        assert await find(beside.api.url, "wrong") == []
        beside.send("add", 0.001, "cmpl-1", PROMPT, 63, None)
        admission = ("cmpl-1", 0, [1, 2, 3, 4], 60, [])
        events = [("c", ["cmpl-1"], [0], [3])]
        beside.send("schedule", 0.002, 0.003, 0, events, [admission], [], [], [("cmpl-1", 60)], {}, 60, 1, 0, None)
        [leaf] = (await filled(source, "nodes")).values()
        assert leaf["blocks"] == [1, 2, 3] and len(set(leaf["ids"])) == 1


VLLM = """
import os
import sys
import time
from minitui.vllm.pipe import Pipe
from tests.support.vllm_versions import IMPORTS, packages_of
from tests.support.vllm_played import messages_of
from tests.vllm.test_recorded import INFO

pipe = Pipe()
if not os.fork():  # a process of vLLM that outlives its engine
    print(os.getpid(), flush=True)
    time.sleep(60)
(_, began, facts), *messages = messages_of("second runner, priorities")
pipe.send(("init", began, {**INFO, **facts, "telemetry_port": int(sys.argv[1])}))
for message in messages[:2000]:
    pipe.send(tuple(message))
    pipe.flush()
print("sent", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("killed", ["all processes", "the engine"])
def test_the_recording_is_closed_when_vllm_is_killed(tmp_path: Path, killed: str) -> None:
    pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
    path, port = tmp_path / "run.trace", free_ports(1)
    environment = {**os.environ, "MINITUI_RECORD": str(path)}
    with subprocess.Popen([sys.executable, "-c", VLLM, str(port)], env=environment, stdout=subprocess.PIPE) as vllm:
        assert vllm.stdout is not None
        said = {vllm.stdout.readline() for _ in range(2)}
        assert b"sent\n" in said
        [other] = said - {b"sent\n"}
        wait_until(lambda: path.exists() and path.stat().st_size > 0)
        if killed == "all processes":
            for process in psutil.Process(vllm.pid).children(recursive=True):
                process.kill()
        vllm.kill()

    def complete() -> bool:
        with contextlib.suppress(TraceError):
            return TraceReader(path).complete
        return False

    wait_until(complete)
    assert TraceReader(path).last_step > 100
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(other)).kill()


@pytest.mark.parametrize(
    ("variables", "lines"),
    [
        ({}, ["cannot listen on 127.0.0.1:{port}: Address already in use; choose another port with {port_name}"]),
        (
            {"MINITUI_RECORD": "run.trace"},
            ["minitui records this engine, but does not show it: cannot listen on 127.0.0.1:{port}: Address already in "
             "use; choose another port with {port_name}"],
        ),
        ({"MINITUI_RECORD": "no/run.trace"}, ["no/run.trace cannot be written: No such file or directory; name another "
                                              "file with MINITUI_RECORD"]),
        ({"MINITUI_TELEMETRY_HOST": "0.0.0.0"}, ["listening on 0.0.0.0 lets other machines use the engine, so a key is "
                                                 "needed: set MINITUI_API_KEY, or listen on 127.0.0.1"]),
        ({"MINITUI_TELEMETRY_HOST": "127.0.0.2", "MINITUI_RECORD": "/dev/full"},
         ["minitui shows this engine at http://127.0.0.2:{port}",
          "minitui's recording ends: /dev/full cannot be written: No space left on device"]),
    ],
)
async def test_a_mistake_of_the_operator_is_one_line(
    variables: dict[str, str], lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
    from minitui.vllm.watcher import Watcher, reason_of

    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (_, began, facts), *messages = messages_of("second runner, priorities")
    (reader, pipe), (asked, asks) = os.pipe(), os.pipe()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        beside, watcher = Beside(None, pipe), Watcher(reader, asks)
        beside.send("init", began, {**INFO, **facts, "telemetry_port": port})
        watching = asyncio.create_task(watcher.run())
        for message in messages[:100]:
            beside.send(*message)
        await until(lambda: watching.done() or bool(caplog.records))
        beside.end()
        [error] = await asyncio.gather(watching, return_exceptions=True)
    said = [*(record.getMessage() for record in caplog.records), *([reason_of(error)] if error else [])]
    assert said == [line.format(port=port, port_name="MINITUI_TELEMETRY_PORT") for line in lines]
    if variables.get("MINITUI_RECORD") == "run.trace":
        assert TraceReader(tmp_path / "run.trace").complete
    for end in (reader, asked, asks):
        os.close(end)


ONE_LINE = """
import os
import sys
from minitui.vllm.pipe import Pipe
from tests.support.waiting import wait_until
from tests.vllm.test_recorded import INFO

pipe = Pipe()
pipe.send(("init", 0.0, {**INFO, "telemetry_port": int(sys.argv[1])}))
pipe.flush()
wait_until(lambda: pipe.reason_given)
"""


def test_the_watcher_process_gives_its_reason_before_it_ends() -> None:
    pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = subprocess.run([sys.executable, "-c", ONE_LINE, str(port)], capture_output=True, timeout=60, text=True)
    [line] = ended.stderr.splitlines()
    assert line.startswith("ERROR minitui does not show this engine: cannot listen on") and not ended.returncode


BROUGHT = {  # packages that vLLM 0.33's requirements bring (tests/support/vllm_versions.py asks pip)
    "annotated-doc", "annotated-types", "anyio", "click", "fastapi", "h11", "jinja2", "markupsafe", "numpy",
    "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-semantic-conventions", "orjson", "prometheus-client",
    "pydantic", "pydantic-core", "python-multipart", "sniffio", "starlette", "tokenizers", "typing-extensions",
    "typing-inspection", "uvicorn",
}


def test_vllm_brings_all_that_the_recorder_and_its_watcher_import() -> None:
    """So `pip install --no-deps minitui` is enough, and vLLM's torch stays."""
    pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
    modules = json.loads(subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, check=True).stdout)
    assert {"fastapi", "uvicorn", "minitui"} <= set(modules) and "torch" not in modules
    assert packages_of(modules) <= BROUGHT


YIELDS = """
import os
import sys
from minitui.vllm import watcher

async def run(self):
    print(os.nice(0), os.sched_getscheduler(0) == os.SCHED_BATCH)

watcher.Watcher.run = run
sys.argv[1:] = map(str, os.pipe())
watcher.main()
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="not Linux")
def test_the_watcher_process_does_not_take_vllms_place_on_a_core() -> None:
    """A process of SCHED_BATCH that is woken waits until the running process has had its time."""
    pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
    ended = subprocess.run([sys.executable, "-c", YIELDS], capture_output=True, timeout=60, text=True)
    assert ended.stdout == f"{os.nice(0) + 5} True\n", ended.stderr


async def test_messages_that_do_not_fit_end_the_watcher_after_some_questions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("minitui.vllm.watcher.ASK_AGAIN_S", 0.0)
    async with beside_vllm() as beside:
        await found(beside.api.url, 1)
        for step in range(30):
            beside.send("whole", 0.1, step, [("a", 1)], [])  # vLLM's state does not fit, either
            beside.send("schedule", None, step)
        beside.send("events", 1.0, [])
        await until(lambda: any("any more" in record.message for record in caplog.records))
    asked = [record for record in caplog.records if "asks for its state" in record.message]
    assert len(asked) == 10, "one line for each question, and then no more"
