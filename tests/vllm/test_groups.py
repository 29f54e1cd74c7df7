"""Models with several KV cache groups in vLLM's real scheduler: all that is recorded is vLLM's own. Needs vLLM, no GPU.
MINITUI_VLLM_STEPS=100000 makes the runs as long; each step is compared with vLLM's numbers."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed", exc_type=ImportError)

import minitui.vllm.recorder as recording
from engine.trace.state import State
from minitui.text import match_reason
from minitui.trace import check
from minitui.trace.reader import TraceReader
from tests.support.vllm_direct import Direct, watch_steps
from tests.support.vllm_driver import Load, make_scheduler
from tests.support.waiting import wait_until
from tests.vllm.test_recorded import free_ports

STEPS = int(os.environ.get("MINITUI_VLLM_STEPS", "100"))
KINDS: list[dict[str, Any]] = [
    {"groups": "full window:64", "blocks": 160},
    {"groups": "window:64 full window:100", "blocks": 150, "asynchronous": True},
    {"groups": "full state state state", "blocks": 200, "asynchronous": True},
    {"groups": "full state", "blocks": 120, "drafts": 3}, {"groups": "full chunks:64", "blocks": 120},
    {"groups": "full:32 window:64:16", "blocks": 120}, {"groups": "full full window:40 state", "blocks": 200},
    {"groups": "full state", "caching": False, "blocks": 120, "asynchronous": True},
    {"groups": "full" + 4 * " window:64" + 5 * " state", "blocks": 400, "asynchronous": True},
]


@pytest.fixture
def make(monkeypatch, tmp_path):
    monkeypatch.setenv("MINITUI_VLLM_CHECK", "1")
    monkeypatch.setattr(recording, "Pipe", Direct)

    def make(**options):
        scheduler = make_scheduler(tmp_path, **options)
        load = Load(scheduler, 1, 2 if options.get("asynchronous") else 1, drafts=options.get("drafts", 0))
        return scheduler, load, watch_steps(scheduler)

    return make


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_every_count_table_hit_and_cached_block_of_each_group_is_vllms(make, options):
    scheduler, load, pipe = make(**options)
    load.run(STEPS)
    state = pipe.translator.blocks.state
    assert state.requests
    check.snapshot(json.loads(json.dumps(state.snapshot())))  # as readers of recordings do
    assert State.from_snapshot(state.snapshot()).snapshot() == state.copy().snapshot() == state.snapshot()
    load.finish()
    assert scheduler._recorder is not None
    assert pipe.translator.checked >= STEPS
    assert pipe.translator.faults == [] and pipe.wrong == [] and pipe.repairs == 0
    assert {"take", "finish", "time"} <= set(pipe.kinds)
    assert pipe.follower.state.snapshot() == state.snapshot()
    assert len(state.groups) == len(options["groups"].split()) - 1
    caching = options.get("caching", True)
    assert bool(pipe.kinds["keep"] and pipe.translator.totals["hits"]) == caching
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert {pool.available for pool in state.groups} == {free}, "vLLM has one pool for all groups"


@pytest.mark.parametrize(
    "options",
    [
        {"groups": "full state state state", "blocks": 200, "asynchronous": True},
        {"groups": "window:64 full", "blocks": 150},
    ],
    ids=str,
)
def test_after_lost_messages_all_groups_are_vllms_again(make, options):
    scheduler, load, pipe = make(**options)
    for i in range(1, 7):
        load.run(50 * i)
        pipe.lose()
        load.run(50 * i + 8)
        pipe.reads = True
    load.finish()
    assert scheduler._recorder is not None and (pipe.wholes, pipe.repairs) == (6, 0)
    assert pipe.translator.faults == [] and pipe.wrong == []
    assert pipe.follower.state.snapshot() == pipe.translator.blocks.state.snapshot()


def test_the_watcher_process_serves_and_records_all_groups(monkeypatch, tmp_path):
    report, recorded = tmp_path / "report.json", tmp_path / "run.trace"
    monkeypatch.setenv("MINITUI_VLLM_CHECK", str(report))
    monkeypatch.setenv("MINITUI_RECORD", str(recorded))
    monkeypatch.setenv("MINITUI_TELEMETRY_PORT", str(free_ports(1)))
    scheduler = make_scheduler(tmp_path, groups="full window:64 state", blocks=160)
    load = Load(scheduler, 1)
    load.run(STEPS)
    wait_until(report.exists)
    load.run(2 * STEPS)
    load.finish()
    scheduler.shutdown()
    wait_until(lambda: recorded.exists() and TraceReader(recorded).complete)
    found = json.loads(report.read_text())
    assert found["comparisons"] > STEPS and found["differences"] == 0, found["first"]
    names = [group["name"] for group in TraceReader(recorded).part(0).snapshot["groups"]]
    assert names == ["window 64", "state"]


LENGTH, TEXTS, REQUESTS, SIZE = 2200, 12, 64, 528


@pytest.mark.parametrize(("shared", "dense"), [(1600, True), (1500, True), (1600, False), (1500, False)])
def test_the_two_workloads_of_vllm_45238_are_explained_to_the_token(make, shared, dense):
    """https://github.com/vllm-project/vllm/issues/45238: prompts of 2,200 tokens begin with one of 12 texts of 1,600 or
    1,500 tokens; blocks of 528 tokens (Qwen3.5-4B), one request at once. There, 52 and 0 of 64 requests hit.

    A request leaves one checkpoint, before its own last tokens. Full attention finds the text; the next request with it
    finds no state in it. vLLM 0.33 then stores one at the end of the shared text, so the third request hits.
    """
    _, load, pipe = make(
        groups="full state state state", blocks=2000, size=SIZE, budget=8192, rows=4, chunked=True, dense=dense
    )
    matches: list[tuple[int, str, int, str]] = []
    apply = pipe.follower.take

    def take(record):
        apply(record)
        if record[2] == "match":
            matches.append(record[4:])

    pipe.follower.take = take
    draw = load.random.randrange
    texts = [[draw(900) for _ in range(shared)] for _ in range(TEXTS)]
    for i in range(REQUESTS):
        load.add(texts[i % TEXTS] + [draw(900) for _ in range(LENGTH - shared)], 1)
        load.finish()
    assert pipe.translator.faults == [] and len(matches) == REQUESTS
    whole = shared // SIZE * SIZE  # full attention has the whole blocks of the shared text
    first, second, later = matches[:TEXTS], matches[TEXTS : 2 * TEXTS], matches[2 * TEXTS :]
    assert {n for n, *_ in first} == {0} and {stop for _, stop, *_ in first} <= {"empty", "differs"}
    assert Counter(second) == {(0, "state", whole, f"0 of {LENGTH:,} tokens, cut by state"): TEXTS}
    cached, stop, at, detail = second[0]
    words = f"full attention has {whole:,} tokens, but no checkpoint is in them: {whole:,} tokens again"
    assert match_reason(stop, at, cached, detail) == words, "what the panels say"
    assert {n for n, *_ in later} == {whole}
