"""The recording of vLLM's real scheduler agrees with vLLM's own numbers after every step. Needs vLLM, but no GPU."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import psutil
import pytest

from engine.info import EngineInfo
from engine.trace.state import State
from engine.trace.views import CACHED, FREE

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed", exc_type=ImportError)

from vllm.config import CUDAGraphMode

import minitui.vllm.facts as facts
import minitui.vllm.recorder as recording
import minitui.vllm.scheduler as scheduling
from minitui.trace.check import UNKNOWN
from tests.support.vllm_direct import Direct, watch_steps
from tests.support.vllm_driver import Load, make_scheduler
from tests.support.vllm_wild import KINDS as WILD
from tests.support.vllm_wild import make_wild
from tests.support.waiting import started, wait_until

STEPS = 400
KINDS = [
    {}, {"asynchronous": True}, {"drafts": 3}, {"caching": False}, {"asynchronous": True, "caching": False},
    {"policy": "priority"}, {"policy": "priority", "asynchronous": True}, {"chunked": False},
    {"blocks": 400, "rows": 32, "budget": 512, "asynchronous": True},
    {"blocks": 300, "longest": 3000, "asynchronous": True}, {"schemas": 0.4}, {"schemas": 0.4, "asynchronous": True},
]


@pytest.fixture
def direct(monkeypatch):
    """Messages are translated at once, with vLLM's own numbers."""
    monkeypatch.setenv("MINITUI_VLLM_CHECK", "1")
    monkeypatch.setattr(recording, "Pipe", Direct)


@pytest.fixture
def make(direct, tmp_path):
    def make(**options):
        loads = {name: options.pop(name) for name in ("longest", "schemas") if name in options}
        scheduler = make_scheduler(tmp_path, **options)
        load = Load(scheduler, 1, 2 if options.get("asynchronous") else 1, drafts=options.get("drafts", 0), **loads)
        return scheduler, load, watch_steps(scheduler)

    return make


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_every_count_table_and_hit_is_vllms(make, options):
    scheduler, load, pipe = make(**options)
    load.run(STEPS)
    load.finish()
    assert scheduler._recorder is not None
    assert pipe.translator.checked >= STEPS
    assert pipe.translator.faults == [] and pipe.wrong == []
    assert {"admit", "alloc", "finish", "time"} <= set(pipe.kinds)
    assert pipe.kinds["time"] == load.steps, "the end of each step was recorded"
    assert pipe.follower.state.snapshot() == pipe.translator.blocks.state.snapshot()
    assert bool(load.waited) == bool(options.get("schemas"))


@pytest.mark.parametrize("seed", range(len(WILD)))
def test_nothing_is_lost_whatever_clients_do_and_whenever_messages_are_lost(direct, tmp_path, seed):
    """Requests are cancelled at any moment, preempted, resumed, sampled twice; the cache is reset, and hits."""
    load = make_wild(tmp_path, seed, WILD[seed])
    load.run(STEPS)
    pipe = load.pipe
    while WILD[seed].get("asynchronous") and pipe.kinds["preempt"] < 3:  # versions admit requests differently
        load.run(load.steps + 50)
        assert load.steps < 4 * STEPS
    load.finish()
    assert load.scheduler._recorder is not None and pipe.repairs == 0
    assert pipe.translator.faults == [] and pipe.wrong == []
    assert pipe.translator.totals["FINISHED_ABORTED"] > 5
    assert bool(load.losses) == bool(pipe.wholes)
    assert pipe.follower.state.snapshot() == pipe.translator.blocks.state.snapshot()


def test_a_block_that_was_cached_before_lost_messages_is_hit_again(make):
    """A `whole` message leaves out cached blocks that no request holds. vLLM prefers them to the blocks after it."""
    _, load, pipe = make()

    def run(*prompts):
        for prompt in prompts:
            load.add(prompt, 2)
        load.finish()

    two = list(range(32))  # two blocks
    run(two)
    pipe.lose()
    pipe.reads = True
    run([40] * 20)
    run(two)  # vLLM computes the last block of a prompt always: now there are two of it
    run([*two, 1], [*two, 2])
    assert (pipe.wholes, pipe.kinds["swap"], pipe.repairs) == (1, 1, 0)
    assert pipe.translator.faults == []


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ("window:64", "no layer of this model has full attention; minitui shows models that have some"),
        ("full" + 10 * " window:64", "this model has 11 KV cache groups; minitui shows up to 10"),
    ],
)
def test_a_model_with_other_groups_is_not_recorded_and_vllm_says_so(tmp_path, said, groups, why):
    scheduler = make_scheduler(tmp_path, groups=groups, blocks=400)
    load = Load(scheduler, 1)
    load.run(60)
    load.finish()
    assert scheduler._recorder is None and load.steps >= 60
    assert said == [f"minitui does not record this engine: {why}"]


@pytest.mark.parametrize("mode,ranks,known", [
    ("FULL", 1, True), ("FULL", 2, False), ("FULL_AND_PIECEWISE", 1, False), ("FULL_DECODE_ONLY", 1, False),
    ("NONE", 1, False),
])
def test_graphs_are_described_if_they_compute_whole_steps_with_prompts(mode, ranks, known):
    sizes = CUDAGraphMode[mode], [1, 8, 512, 64]
    compilation = SimpleNamespace(cudagraph_mode=sizes[0], cudagraph_capture_sizes=sizes[1])
    config = SimpleNamespace(compilation_config=compilation, parallel_config=SimpleNamespace(world_size=ranks))
    found = {"rows": [1, 8, 64], "decodes": [], "tokens": 512, "prompts": 64, "launch_ms": 0.0}
    assert facts.describe_graphs(config, 64) == (found if known else {})
    assert EngineInfo.from_json(UNKNOWN | {"graphs": found}).graphs == found


def test_a_step_leaves_out_a_running_request_and_takes_it_again(make, monkeypatch):
    """The messages name only the requests that a step leaves out."""
    _, load, pipe = make(rows=8, budget=8, drafts=3)
    left_out, send = [], pipe.send
    monkeypatch.setattr(pipe, "send", lambda message: left_out.extend(message[7:8]) or send(message))
    for i in range(8):  # with drafts, the budget is too small for all of them
        load.add([i] * 5, 40)
    load.finish()
    assert pipe.translator.faults == [] and pipe.wrong == [] and sum(map(bool, left_out)) > 10


@pytest.fixture
def said(monkeypatch):
    """What minitui writes into vLLM's log."""
    lines = []
    monkeypatch.setattr(scheduling.logger, "warning", lambda text, *values: lines.append(text % values))
    return lines


@pytest.mark.parametrize("given", [False, True])
def test_the_end_of_the_watcher_ends_the_recording_and_not_vllm(make, said, given):
    scheduler, load, pipe = make()
    load.run(20)
    pipe.broken, pipe.reason_given = BrokenPipeError(), given
    load.run(60)
    load.finish()
    assert scheduler._recorder is None
    assert "cache_full_blocks" not in vars(scheduler.kv_cache_manager.block_pool)
    assert said == ([] if given else ["minitui's recording ends: its watcher has ended"])


@pytest.mark.parametrize(
    "place", ["cached", "evicted", "preempted", "freed", "scheduled", "updated", "added", "send_events"]
)
def test_an_exception_anywhere_ends_the_recording_and_not_vllm(monkeypatch, tmp_path, said, place):
    def fail(*_, **__):
        raise AttributeError("it has another name")

    owner = recording.Recorder if hasattr(recording.Recorder, place) else recording.Hooks
    monkeypatch.setattr(owner, place, fail, raising=place != "cached")
    monkeypatch.setattr(recording, "Pipe", Direct)
    monkeypatch.setattr(facts, "__version__", "0.99.0")
    scheduler = make_scheduler(tmp_path)
    if place == "cached":
        scheduler._recorder.hooks.events = SimpleNamespace(append=fail)
    load = Load(scheduler, 1)
    load.run(80)
    scheduler.kv_cache_manager.block_pool.evict_blocks(set())
    load.run(120)
    load.finish()
    assert scheduler._recorder is None and load.steps >= 120
    why = "AttributeError('it has another name'); minitui was tried with vLLM 0.33.0, and this is vLLM 0.99.0"
    assert said == [f"minitui's recording ends: {why}"]


def test_a_version_without_a_method_is_not_recorded_and_vllm_says_so(monkeypatch, tmp_path, said):
    monkeypatch.setattr(facts, "OF_POOL", ("get_new_blocks", "cache_all_blocks"))
    monkeypatch.setattr(facts, "__version__", "0.99.0")
    scheduler = make_scheduler(tmp_path)
    Load(scheduler, 1).run(20)
    [line] = said
    assert line.startswith("minitui does not record this engine: AttributeError(") and "cache_all_blocks" in line
    assert line.endswith("; minitui was tried with vLLM 0.33.0, and this is vLLM 0.99.0")


def test_a_version_with_other_parameters_is_not_recorded_and_vllm_says_so(monkeypatch, tmp_path, said):
    def cache_full_blocks(self, request, blocks, block_hashes, num_cached_blocks, num_full_blocks, block_size):
        pass

    monkeypatch.setattr("vllm.v1.core.block_pool.BlockPool.cache_full_blocks", cache_full_blocks)
    make_scheduler(tmp_path)
    [line] = said
    assert line.startswith("minitui does not record this engine: AttributeError('cache_full_blocks has the parameters")


def test_a_vllm_without_this_scheduler_ends_with_a_sentence(monkeypatch):
    import minitui.vllm

    monkeypatch.setitem(sys.modules, "minitui.vllm.scheduler", None)
    with pytest.raises(ImportError, match=r"tried with vLLM 0.33.0 and does not fit this version .*: start vLLM with"):
        minitui.vllm.RecordingScheduler  # noqa: B018


def test_vllm_reads_the_header_of_a_rank_and_its_command_line_as_minitui_does(monkeypatch):
    import vllm.platforms

    pytest.importorskip("vllm.entrypoints.generate.base.serving", reason="it is elsewhere in this version")
    monkeypatch.setattr(vllm.platforms.current_platform, "device_type", "cpu")
    from starlette.datastructures import Headers
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:  # before 0.33
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from minitui.sources.vllm import RANK_HEADER
    from minitui.vllm.ports import options_of
    from tests.vllm.test_recorded import LINES

    request = SimpleNamespace(headers=Headers({RANK_HEADER: "1"}))
    assert GenerateBaseServing._get_data_parallel_rank(request) == 1
    parser, compared = make_arg_parser(FlexibleArgumentParser()), 0
    for line, *_ in LINES:
        words = line.split()
        if words[0] == "x":
            continue
        read = parser.parse_args(words[words.index("serve") + 1 :])
        for name, value in options_of(words).items():
            given = getattr(read, name.removeprefix("--").replace("-", "_"))
            assert given is True or given == int(value[0]), line
            compared += 1
    assert compared > 12


async def test_two_data_parallel_ranks_are_found_and_shown_as_replicas(monkeypatch, tmp_path):
    """Each rank has its scheduler, pool, watcher process, port and recording; vLLM's config names the rank."""
    from minitui.sources.replicas import ReplicaSource
    from minitui.trace.reader import TraceReader
    from tests.vllm.test_recorded import FakeVllm, found, free_ports, page

    api = await FakeVllm(models=("m",), port=free_ports(3), page=page(2)).start()
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "m", "--port", str(api.port), "--data-parallel-size=2"])
    monkeypatch.setenv("MINITUI_RECORD", str(tmp_path / "run.trace"))
    schedulers = [make_scheduler(tmp_path, blocks=60 + rank, rank=rank) for rank in range(2)]
    for rank, scheduler in enumerate(schedulers):
        load = Load(scheduler, rank + 1)
        load.run(60 + 40 * rank)
        scheduler._recorder.pipe.flush()
    try:
        async with started(ReplicaSource(await found(api.url, 2), cache=tmp_path)) as source:
            for scheduler, replica in zip(schedulers, source.replicas, strict=True):
                await source.watch(replica)
                state = State.from_snapshot(await source.snapshot())
                while state.step < scheduler._recorder.step:  # the watcher is still reading
                    state = State.from_snapshot(await source.snapshot())
                manager = scheduler.kv_cache_manager
                tables = [manager.get_block_ids(id)[0] for id in scheduler.requests]
                assert sorted(request.table for request in state.requests.values()) == sorted(tables) and any(tables)
                assert state.counts[FREE] + state.counts[CACHED] == manager.block_pool.get_num_free_blocks()
    finally:
        await api.kill()
        for scheduler in schedulers:
            scheduler.shutdown()
    for name in ("run.trace", "run.rank1.trace"):
        wait_until(lambda path=tmp_path / name: TraceReader(path).complete)


def test_a_request_that_gets_more_input_ends_the_recording_and_not_vllm(make, said):
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    scheduler, load, _ = make()
    load.run(20)
    for last in (False, True):
        scheduler.add_request(Request(
            request_id="chatcmpl-00000fff", prompt_token_ids=[1, 2, 3], sampling_params=SamplingParams(max_tokens=2),
            pooling_params=None, block_hasher=load._hasher, resumable=not last,
        ))
    load.run(40)
    load.finish()
    assert scheduler._recorder is None
    why = "chatcmpl-00000fff gets its input in parts, and minitui shows whole prompts only"
    assert said == [f"minitui's recording ends: {why}"]


@pytest.fixture
def watched(monkeypatch, tmp_path):
    """A scheduler, and the watcher process that it has started."""
    from tests.vllm.test_recorded import free_ports

    report = tmp_path / "report.json"
    monkeypatch.setenv("MINITUI_VLLM_CHECK", str(report))
    monkeypatch.setenv("MINITUI_TELEMETRY_PORT", str(free_ports(1)))
    monkeypatch.setattr(recording, "FLUSH_S", 0.0)
    scheduler = make_scheduler(tmp_path, asynchronous=True, blocks=300)
    Load(scheduler, 2, 2).finish()
    [watcher] = wait_until(lambda: [
        process for process in psutil.process_iter(["cmdline"])
        if "minitui.vllm.watcher" in (process.info["cmdline"] or ()) and process.ppid() != os.getpid()
        and process.environ().get("MINITUI_VLLM_CHECK") == str(report)
    ])
    wait_until(report.exists)
    return scheduler, watcher, report


def test_a_watcher_that_is_killed_is_one_line(watched, said):
    scheduler, watcher, _ = watched
    watcher.kill()
    watcher.wait(20)
    load = Load(scheduler, 3, 2)
    load.run(60)
    load.finish()
    assert scheduler._recorder is None and said == ["minitui's recording ends: its watcher has ended"]


def test_a_watcher_that_hangs_costs_bounded_memory_and_then_continues(watched, monkeypatch):
    from minitui.vllm import pipe

    scheduler, watcher, report = watched
    monkeypatch.setattr(pipe, "MOST_WAITING", 1 << 20)
    load, connection = Load(scheduler, 3, 2), scheduler._recorder.pipe
    load.run(50)
    watcher.suspend()
    try:
        while not connection.lost:
            load.run(load.steps + 50)
            assert connection._size < 2 << 20
        load.run(load.steps + 50)
        assert connection.lost and connection._size < 2 << 20
    finally:
        watcher.resume()
    wait_until(lambda: load.run(load.steps + 1) or not connection.lost)
    at = load.steps
    load.run(at + 100)
    wait_until(lambda: connection.flush() or json.loads(report.read_text())["steps"] > at)
    load.finish()
    scheduler.shutdown()
    watcher.wait(20)
    found = json.loads(report.read_text())
    assert found["differences"] == 0 and found["comparisons"] > 200, found["first"]
