"""The engine in its own process: answers, cancellation, control, and every way in which one side can disappear."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from engine.config import EngineConfig
from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.params import SamplingParams
from engine.process.client import EngineClient
from engine.process.stream import Stream
from engine.text import early_tokenizer
from engine.trace.state import State
from minitui.tutor import model_dir
from tests.support.waiting import drained, ended, until, wait_until

PROMPT = list(range(40, 100))


def config(**options: object) -> EngineConfig:
    return EngineConfig(model=str(model_dir()), device="cpu", num_blocks=256, max_num_seqs=16, **options)  # type: ignore[arg-type]


def long(**options: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 1500, "ignore_eos": True, **options})  # type: ignore[arg-type]


shared = pytest.mark.asyncio(loop_scope="module")  # of tests that use the engine of this file
Progress = list[dict[str, object]]


@pytest.fixture(scope="module")
def progress() -> Progress:
    """What was told while the engine of this file was loading."""
    return []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory, progress: Progress) -> AsyncIterator[EngineClient]:
    log = tmp_path_factory.mktemp("process") / "engine.log"
    begin = early_tokenizer.begin

    def recorded(directory: str) -> None:
        progress.append({"stage": "tokenizer", "done": 0, "total": 0, "text": directory})
        begin(directory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(early_tokenizer, "begin", recorded)
        client = await EngineClient.start(config(), log_file=log, on_progress=progress.append)
    yield client
    await client.close()


@pytest_asyncio.fixture(loop_scope="module")
async def client(running: EngineClient) -> AsyncIterator[EngineClient]:
    """The engine of this file, with nothing to do and an empty cache: each test leaves it without a request."""
    if not running.alive:  # after a test that failed half-way
        await running.restart()
    await running.control("pace", factor=1.0)
    await running.control("resume")
    await running.control("clear_cache")
    await running.snapshot()  # the records so far are on their way before its answer
    running.drain_records()
    yield running
    if running.alive:
        assert (await running.snapshot())["requests"] == {}


async def read(stream: Stream) -> Stream:
    """Read an answer to its end."""
    await drained(stream)
    return stream


@shared
async def test_several_requests_stream_at_once_and_agree_with_each_alone(client: EngineClient) -> None:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True)
    alone = await read(client.submit(PROMPT, params))
    streams = [client.submit([*PROMPT, *range(50, 50 + i)], params, group=f"chat {i}") for i in range(8)]

    async def pieces(stream: Stream) -> int:
        return sum([1 async for _ in stream])

    assert min(await asyncio.gather(*map(pieces, streams))) > 5, "the text came in one piece: it was not streamed"
    assert streams[0].ids == alone.ids and streams[0].text == alone.text
    for stream in streams:
        assert stream.finish_reason == "length" and len(stream.ids) == 24
        assert stream.metrics["output_tokens"] == 24 and stream.metrics["ttft_ms"] > 0
    assert streams[0].metrics["cached_tokens"] >= 48


@shared
async def test_records_fold_to_what_the_engine_says_it_is(client: EngineClient) -> None:
    state = State.from_snapshot(await client.snapshot())
    client.drain_records()
    streams = [client.submit(PROMPT[: 20 + 5 * i], long(max_tokens=40 + i)) for i in range(6)]
    for stream in streams[:4]:
        await read(stream)
    streams[5].cancel()
    await client.control("pause")
    snapshot = await client.snapshot()
    while state.seq < snapshot["seq"]:
        for record in client.drain_records():
            if record[0] > state.seq and record[0] <= snapshot["seq"]:
                state.apply(record)
        await asyncio.sleep(0.01)
    assert state.snapshot() == snapshot
    await client.control("check")

    await client.control("resume")
    for stream in streams[4:]:
        await read(stream)
    await client.control("records", enabled=False)
    await client.snapshot()  # what was written before is on its way before its answer
    client.drain_records()
    unseen = await read(client.submit(PROMPT, long(max_tokens=10)))
    snapshot = await client.snapshot()
    assert client.drain_records() == [] and snapshot["seq"] > state.seq and len(unseen.ids) == 10
    await client.control("records", enabled=True)
    await read(client.submit(PROMPT, long(max_tokens=10)))
    await client.snapshot()
    assert client.drain_records()[0][0] == snapshot["seq"] + 1, "whoever has a snapshot can fold on from there"


@shared
async def test_a_cancelled_answer_ends_and_its_blocks_return(client: EngineClient) -> None:
    stream = client.submit(PROMPT, long())
    async for _ in stream:
        if len(stream.ids) == 5:
            stream.cancel()
            stream.cancel()
    assert stream.finish_reason == "abort" and stream.metrics["output_tokens"] >= 5
    assert (await client.snapshot())["requests"] == {}


@shared
async def test_a_bad_request_is_refused_by_name_and_the_engine_goes_on(client: EngineClient) -> None:
    for ids, params, field in [
        ([], SamplingParams(), "prompt"),
        ([10**9], SamplingParams(), "prompt"),
        ([5] * 5000, SamplingParams(), "prompt"),
        (PROMPT, SamplingParams(temperature=float("nan")), "temperature"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            await read(client.submit(ids, params))
        assert caught.value.field == field
    stream = await read(client.submit(PROMPT, long(max_tokens=3)))
    assert len(stream.ids) == 3


@shared
async def test_gate_step_by_step_over_the_wire(client: EngineClient) -> None:
    await client.control("pause")
    stream = client.submit(PROMPT, long(max_tokens=20))
    await asyncio.sleep(0.05)
    assert stream.drain() == [] and (await client.snapshot())["queue"] == [stream.request_id]
    await client.control("step", n=3)
    await until(lambda: (stream.drain(), len(stream.ids) >= 3)[1], "three steps")
    await asyncio.sleep(0.2)
    stream.drain()
    assert len(stream.ids) == 3, "a gated engine went on by itself"
    await client.control("run_until", predicate={"event": "finish"})
    await read(stream)
    assert len(stream.ids) == 20
    with pytest.raises(InvalidRequest, match="sunrise"):
        await client.control("run_until", predicate={"event": "sunrise"})
    with pytest.raises(InvalidRequest):
        await client.control("dance")


@shared
async def test_slow_motion_is_slow_and_can_be_left_at_once(client: EngineClient) -> None:
    await client.control("pace", factor=1000.0)
    stream = client.submit(PROMPT, long(max_tokens=30))
    await asyncio.sleep(0.3)
    stream.drain()
    assert len(stream.ids) < 5
    await client.control("pace", factor=1.0)
    async with asyncio.timeout(40):  # of slow motion, more than a minute would be left
        await read(stream)
    assert len(stream.ids) == 30


@shared
async def test_figures_are_of_the_engine_and_not_of_who_holds_it_back(client: EngineClient) -> None:
    async def held_back() -> list[dict[str, float]]:
        """Metrics of a request that was held for 0.6 s, and of one that came then; both in slow motion."""
        await client.control("pause")
        streams = [client.submit(PROMPT, long(max_tokens=4))]
        await asyncio.sleep(0.6)
        streams.append(client.submit([*PROMPT, 50], long(max_tokens=4)))
        await client.control("pace", factor=30.0)
        await client.control("resume")
        for stream in streams:
            await read(stream)
        await client.control("pace", factor=1.0)
        return [stream.metrics for stream in streams]

    def theirs(metrics: dict[str, float]) -> bool:
        ours = metrics["queue_ms"] > 400 or metrics["ttft_ms"] > 600 or metrics["decode_tok_s"] < 10
        return not ours and metrics["queue_ms"] >= 0 and metrics["ttft_ms"] > 0

    for _ in range(4):  # on a busy machine a step may take as long by itself
        told = await held_back()
        if all(map(theirs, told)):
            return
    raise AssertionError(told)


@shared
async def test_an_engine_killed_in_mid_answer_is_told_at_once_and_can_be_started_again(client: EngineClient) -> None:
    deaths: list[str] = []
    client.on_death(deaths.append)
    stream = client.submit(PROMPT, long())
    waiting = client.submit(PROMPT, long())
    with pytest.raises(EngineDead, match="SIGKILL"):
        async for _ in stream:
            if len(stream.ids) == 3:
                assert client.pid is not None
                os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDead):
        await read(waiting)
    assert len(deaths) == 1 and "log" in deaths[0] and not client.alive
    with pytest.raises(EngineDead):
        client.submit(PROMPT, long())
    await client.restart()
    assert client.alive
    again = await read(client.submit(PROMPT, long(max_tokens=3)))
    assert len(again.ids) == 3


@shared
async def test_an_idle_engine_uses_no_cpu(client: EngineClient) -> None:
    await read(client.submit(PROMPT, long(max_tokens=20)))
    await asyncio.sleep(0.1)
    process = psutil.Process(client.pid)
    before = sum(process.cpu_times()[:2])
    await asyncio.sleep(0.6)
    assert sum(process.cpu_times()[:2]) - before < 0.02


async def test_a_model_that_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"config\.json") as caught:
        (tmp_path / "empty").mkdir()
        await EngineClient.start(EngineConfig(model=str(tmp_path / "empty")), log_file=tmp_path / "log")
    assert "\n" not in str(caught.value)


def test_progress_is_told_while_loading(running: EngineClient, progress: Progress) -> None:
    assert {p["stage"] for p in progress} >= {"weights"}
    assert all({"done", "total", "text"} <= p.keys() for p in progress)


def test_the_client_loads_its_tokenizer_while_the_engine_loads(running: EngineClient, progress: Progress) -> None:
    stages = [p["stage"] for p in progress]
    begun = stages.index("tokenizer")
    assert progress[begun]["text"] == str(model_dir()) and begun < stages.index("weights")


def test_the_engine_exits_when_its_parent_dies_for_any_reason(tmp_path: Path) -> None:
    def script(how: str) -> str:
        die = "os._exit(3)" if how == "exit" else f"os.kill(os.getpid(), signal.{how})"
        return textwrap.dedent(f"""
            import asyncio, os, signal, sys
            from pathlib import Path
            from engine.process.client import EngineClient
            from engine.config import EngineConfig
            from engine.params import SamplingParams
            async def main():
                config = EngineConfig(model={str(model_dir())!r}, device="cpu")
                client = await EngineClient.start(config, Path({str(tmp_path / how)!r}))
                stream = client.submit(list(range(40, 90)), SamplingParams(max_tokens=3000, ignore_eos=True))
                async for _ in stream:
                    if len(stream.ids) > 3:
                        print(client.pid, flush=True)
                        {die}
            asyncio.run(main())
        """)

    parents = [
        subprocess.Popen([sys.executable, "-c", script(how)], stdout=subprocess.PIPE, text=True)
        for how in ("SIGKILL", "exit")
    ]
    engines = [int(parent.communicate(timeout=90)[0].split()[0]) for parent in parents]
    assert [parent.returncode for parent in parents] == [-signal.SIGKILL, 3]
    wait_until(lambda: ended(engines), "an engine outlived its parent")


def test_an_engine_does_not_import_what_lies_in_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "tokenizers.py").write_text("raise SystemExit('imported by accident')")
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import engine.process.client, os; os.chdir(os.environ['HERE']); import asyncio;"
         "from engine.config import EngineConfig; from engine.process.client import EngineClient;"
         "asyncio.run(EngineClient.start(EngineConfig(model='./empty', device='cpu')))"],
        env={**os.environ, "HERE": str(tmp_path), "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path)},
        capture_output=True, text=True, timeout=60,
    )
    # It comes as far as to look for a model, with everything imported that takes part in that: tokenizers is.
    assert "EngineError" in done.stderr and "config.json" in done.stderr


@shared
async def test_another_engine_takes_the_place_of_the_first_in_the_same_process(client: EngineClient) -> None:
    open_stream = client.submit([5, 6, 7], SamplingParams(max_tokens=None, ignore_eos=True))
    await open_stream.started()
    pid = client.pid
    before = client.config
    await client.reconfigure(replace(before, num_blocks=7, scheduling_policy="static"))
    assert client.info.num_blocks == 7 and client.pid == pid
    assert not client.drain_records(), "records of the engine before"
    with pytest.raises(InvalidRequest, match="another engine"):
        await read(open_stream)
    stream = await read(client.submit([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True)))
    assert len(stream.ids) == 3 and client.drain_records()[0][0] == 1
    await client.reconfigure(before)


async def test_a_log_that_cannot_be_written_is_told_and_no_process_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"could not be started with the log file .*file.engine\.log: .*exists"):
        await EngineClient.start(config(), log_file=tmp_path / "file" / "engine.log")
