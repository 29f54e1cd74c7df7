"""The load generator, and the server under more load than it can take."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineDead, InvalidRequest
from minitui.bench.load import LoadOptions, find_rate, load, measure, poisson, replay, run_load
from minitui.bench.load_figures import Outcome, found_rate, read_result, report, side_by_side, spread, summarise
from minitui.goals import goals_of
from minitui.server.access import Turns
from tests.support.server.serving import Running, serving
from tests.support.waiting import wait_until

WAITING, RUNNING = 12, 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = {"max_num_seqs": RUNNING, "num_blocks": 96}
    with serving(tmp_path_factory.mktemp("server"), engine=engine, max_waiting=WAITING) as running:
        yield running


def options(**chosen: Any) -> LoadOptions:
    return LoadOptions(url="http://127.0.0.1:1", **chosen)


def run(server: Running, **chosen: Any) -> dict[str, Any]:
    return asyncio.run(measure(LoadOptions(url=server.url, ignore_eos=True, json=True, **chosen)))


async def begin_all(turns: Turns, count: int, cancelled: int) -> list[int]:
    """Returns in which turn of the event loop each of `count` requests of a burst began."""
    turn, began = 0, []

    async def request() -> None:
        await turns.wait()
        began.append(turn)

    tasks = [asyncio.create_task(request()) for _ in range(count + cancelled)]
    while len(began) < count:
        await asyncio.sleep(0)
        turn += 1
        for task in tasks[count:] if turn == 1 else ():
            task.cancel()
        assert turn < 10 * count, "a request never began"
    assert all(task.done() for task in tasks)
    return began


def test_a_burst_begins_in_many_turns_of_the_event_loop() -> None:
    turns = Turns()
    for _ in range(2):
        began = asyncio.run(begin_all(turns, 50, cancelled=7))
        assert max(map(began.count, began)) == Turns.AT_ONCE and began == sorted(began)


def test_arrivals_follow_a_poisson_process() -> None:
    plan = poisson(options(rate=50, requests=4000, seed=3), "m")
    gaps = [b.at - a.at for a, b in itertools.pairwise(plan)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.1), "the distances are not exponential"
    again = poisson(options(rate=50, requests=4000, seed=3), "m")
    assert [p.at for p in again] == [p.at for p in plan] and again[7].body == plan[7].body
    assert {p.at for p in poisson(options(rate=math.inf), "m")} == {0.0}


def test_a_trace_is_replayed_at_its_times_with_its_shared_beginnings() -> None:
    lines = ['{"t": 4, "words": 5, "prefix": "a", "prefix_words": 30, "max_tokens": 7}', "",
             '{"t": 2, "words": 5, "prefix": "a"}', '{"t": 3, "messages": [{"role": "user", "content": "hi"}]}',
             '{"t": 1, "prompt": "said"}']
    plan = replay(lines, options(speed=2, trace=Path("x")), "m")
    assert [p.at for p in plan] == [0.5, 1.0, 1.5, 2.0]
    assert plan[0].body["prompt"] == "said" and plan[2].chat and plan[3].body["max_tokens"] == 7
    first, second = plan[1].body["prompt"].split(), plan[3].body["prompt"].split()
    assert first[:30] == second[:30] and first[30:] != second[30:] and len(first) == 35
    for broken in ('{"t": "x"}', '{"words": 5}', "nonsense", '{"t": 1}'):
        with pytest.raises(InvalidRequest, match="line 2"):
            replay(['{"t": 0, "prompt": "x"}', broken], options(trace=Path("x")), "m")


def test_a_trace_of_hashed_blocks_has_texts_that_are_shared_where_the_hashes_are() -> None:
    lines = ['{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]}',
             '{"timestamp": 1500, "input_length": 1030, "output_length": 6, "hash_ids": [7, 9, 10]}']
    first, second = replay(lines, options(trace=Path("x")), "m")
    assert (first.at, second.at, second.body["max_tokens"]) == (0.0, 1.5, 6)
    one, two = first.body["prompt"].split(), second.body["prompt"].split()
    assert (len(one), len(two)) == (700, 1030)
    assert one[:512] == two[:512] and one[512:700] != two[512:700]
    with pytest.raises(InvalidRequest, match="line 1"):
        replay(['{"timestamp": 0, "hash_ids": [1]}'], options(trace=Path("x")), "m")


def test_the_summary_matches_the_outcomes() -> None:
    outcomes = [Outcome(sent=i, first=0.1, total=0.1 + 0.02 * 10, output_tokens=11, prompt_tokens=10) for i in range(9)]
    outcomes.append(Outcome(sent=9.0, total=1.0, error="refused (429)"))
    figures = summarise(outcomes, {"first": 150, "gap": 19})
    assert figures["answered"] == 9 and figures["not_answered"] == {"refused (429)": 1} and figures["seconds"] == 10.0
    assert figures["tpot_ms"]["p50"] == 20.0 and figures["within_limits"] == 0, "20 ms per token are over 19"
    assert summarise(outcomes, {"first": 150, "gap": 21})["goodput_per_s"] == 0.9
    assert summarise(outcomes, {"first": 99})["within_limits"] == 0
    told = "\n".join(report(figures))
    assert "cache use unknown" in told
    assert "within the goals (first token within 150 ms and a mean gap of at most 19.0 ms)" in told
    for wrong in ("first", "first=0", "last=5", "first=5,,", "gap=nan"):
        with pytest.raises(InvalidRequest, match="is not a list of goals: write first=500,gap=50"):
            goals_of(wrong)
    assert spread([x / 1000 for x in range(1, 101)]) == {"mean": 50.5, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert spread([]) is None


@pytest.mark.parametrize("limit", [0.3, 7.0, 40.0, 1e6])
async def test_the_search_finds_the_highest_rate_that_keeps_the_goals(limit: float, tmp_path: Path) -> None:
    """A server whose first tokens take 100 ms up to this rate, and ten times as long above. A comparison shows the
    run at the rate that was found."""
    lines: list[str] = []

    async def served(asked: LoadOptions, trial: int) -> dict[str, Any]:
        outcome = Outcome(sent=0, first=0.1 if asked.rate <= limit else 1.0, total=1, output_tokens=9, chunks=9)
        return {"url": "u", "model": "m", "rate": asked.rate, **summarise([outcome] * asked.requests, {"first": 500})}

    chosen = options(slo="first=500", find_rate=True, requests=200)
    found = await find_rate(chosen, lines.append, served)
    sentence = found_rate(found, 200)
    if limit > 200:
        assert "Even with all 200 requests within a second" in sentence
    else:
        assert limit / 1.06 < found["highest_rate"] <= limit < found["lowest_rate_missed"]
        assert sentence.startswith("Highest rate at which 99%")
    (tmp_path / "found.json").write_text(json.dumps(found))
    assert read_result(tmp_path / "found.json")["rate"] == found["highest_rate"]
    rates = [one["rate"] for one in found["trials"]]
    assert rates == sorted(rates) and len(lines) == len(rates) <= 16


def test_several_processes_send_the_plan_and_two_results_are_compared(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minitui.export.charts.write_png", _write_svg)
    base = tmp_path / "run"
    asked = {"requests": 6, "rate": 20, "output_tokens": 8, "processes": 2, "ignore_eos": True}
    with server.slowed():
        load(LoadOptions(url=server.url, json=True, out=base, **asked))
    figures = json.loads(capsys.readouterr().out)
    assert figures["answered"] == 6 and figures["output_tokens"] == 48
    assert 0 < figures["chunks_per_token"] <= 1 and figures["gap_ms"]["max"] >= figures["gap_ms"]["p50"] > 0
    assert figures["sent_late_ms"]["max"] >= 0 and json.loads(base.with_suffix(".json").read_text()) == figures
    assert "gap between chunks (ms)" in base.with_suffix(".png").read_text()
    slower = figures | {"output_tokens_per_s": figures["output_tokens_per_s"] / 2}
    (tmp_path / "slower.json").write_text(json.dumps(slower))
    rows = side_by_side(read_result(base.with_suffix(".json")), read_result(tmp_path / "slower.json"))
    changed = {row["name"]: row["change_share"] for row in rows if row["change_share"]}
    assert changed == {"output tokens/s": pytest.approx(-0.5)}
    (tmp_path / "bad.json").write_text('{"ttft_ms": 1}')
    with pytest.raises(InvalidRequest, match="is no result of one run"):
        read_result(tmp_path / "bad.json")


def _write_svg(svg: str, path: Path) -> Path:
    """In the place of the browser that makes a picture of it."""
    path.write_text(svg)
    return path


def test_a_run_reports_the_same_counts_as_the_server(server: Running) -> None:
    before = {name: server.metric(f"vllm:{name}_total") for name in ("prompt_tokens", "generation_tokens")}
    figures = run(server, requests=10, rate=50, shared_words=60, output_tokens=12)
    assert figures["answered"] == 10 and figures["output_tokens"] == 120 and figures["model"] == "tutor"
    server.wait_idle()
    wait_until(lambda: server.metric("vllm:generation_tokens_total") - before["generation_tokens"] == 120)
    wait_until(lambda: server.metric("vllm:prompt_tokens_total") - before["prompt_tokens"] == figures["prompt_tokens"])
    assert figures["cached_tokens"] > figures["prompt_tokens"] / 3, "the shared beginning was not found in the cache"
    assert 0 < figures["ttft_ms"]["p50"] <= figures["e2e_ms"]["p50"] and figures["tpot_ms"]["p99"] > 0


@pytest.mark.parametrize("times", [math.inf, 4], ids=["all at once", "four times what it can"])
def test_overload_loses_no_request_without_a_sentence_and_bounds_the_wait(server: Running, times: float) -> None:
    service, places, sent = server.service, RUNNING + WAITING, 120
    most = 0
    admitted = service.admit

    def watched(sequences: int) -> Any:
        nonlocal most
        most = max(most, service.open)
        return admitted(sequences)

    full = run(server, requests=places, rate=math.inf, output_tokens=24)
    assert full["answered"] == places
    refused = server.metric("minitui_requests_refused_total")
    rate = full["requests_per_s"] * times
    service.admit = watched  # type: ignore[method-assign]
    try:
        asked = options(requests=sent, rate=rate, output_tokens=24, ignore_eos=True)
        outcomes = asyncio.run(run_load(server.url, "", poisson(asked, "tutor"), 60))
    finally:
        del service.admit  # type: ignore[method-assign]
    figures = summarise(outcomes, {})
    assert figures["answered"] + figures["not_answered"].get("refused (429)", 0) == len(outcomes) == sent, figures
    missed = [outcome for outcome in outcomes if outcome.error]
    assert missed and all("the limit is 16: try again later" in outcome.detail for outcome in missed)
    assert server.metric("minitui_requests_refused_total") == refused + len(missed)
    assert figures["output_tokens"] == 24 * figures["answered"] and figures["answered"] >= places
    assert most <= places, "an accepted request waits for at most as many others as there are places"
    server.wait_idle()
    server.call(service.client.control("check"))


def test_the_command_prints_a_table_or_json(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"t": 0, "words": 4, "max_tokens": 3}\n{"t": 0.1, "words": 4, "max_tokens": 3}\n')
    command = [sys.executable, "-m", "minitui", "bench", "--url", server.url, "--trace", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "2 of 2 requests answered" in done.stdout and "first token" in done.stdout
    load(LoadOptions(url=server.url, trace=trace, json=True))
    assert json.loads(capsys.readouterr().out)["answered"] == 2
    with pytest.raises(EngineDead, match="cannot be reached"):
        load(LoadOptions(url="http://127.0.0.1:9", requests=1))
    with pytest.raises(InvalidRequest, match="rate"):
        load(LoadOptions(url=server.url, rate=0))
    with pytest.raises(InvalidRequest, match="--find-rate looks for"):
        load(LoadOptions(url=server.url, find_rate=True))
