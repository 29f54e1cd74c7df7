"""A number that several panels, the texts and the JSON of a recording show is the same everywhere."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from minitui.cli.tail import tail_trace
from minitui.export import export
from minitui.text import duration, exact, ms
from minitui.trace.bundled import bundled, describe
from minitui.trace.reader import TraceReader
from minitui.tui.widgets.base import Picture
from minitui.tui.widgets.chat.occupancy import waste_words
from minitui.tui.widgets.inspect.events import Events
from minitui.tui.widgets.inspect.lanes import BatchLanes
from minitui.tui.widgets.inspect.requests import RequestTable
from minitui.tui.widgets.inspect.timings import StepTimings
from minitui.tui.widgets.inspect.tree import RadixTree
from minitui.tui.widgets.inspect.trends import TrendCharts
from minitui.tui.widgets.inspect.vitals import Vitals
from minitui.tui.widgets.rows import plain
from minitui.viewmodel.compare.comparison import Comparison, as_data
from minitui.viewmodel.compare.runs import Run, recorded_view
from minitui.viewmodel.explain.timing import step_times
from minitui.viewmodel.moment import Playback
from minitui.viewmodel.view import View
from minitui.viewmodel.words.story import tell
from minitui.viewmodel.words.summary import summary
from tests.support.records.golden import GOLDEN
from tests.support.records.traces import beginning
from tests.support.records.views import percentiles

RECORDINGS = {
    "golden": GOLDEN, "small-pool": bundled()["small-pool"],
    **{name: beginning(name) for name in ("h200-8b", "vllm-8b")},
}
PANELS = {
    "events": Events, "lanes": BatchLanes, "requests": RequestTable, "timings": StepTimings, "trends": TrendCharts,
    "tree": RadixTree, "vitals": Vitals,
}
HEIGHTS = {"timings": 12}  # a larger panel shows charts


class Shown:
    """What a recording shows at its end: the panels, and the output of `minitui tail`."""

    def __init__(self, path: Path) -> None:
        self.reader = TraceReader(path)
        self.view = view = recorded_view(self.reader)
        compared = as_data(Comparison([Run(view), Run(view)]), "", [self.reader.info] * 2, [])
        self.compared: list[dict[str, Any]] = compared["runs"][0]["requests"]
        view.moment.playback = Playback(1.0, paused=True)
        view.frame(0.0)
        self.panels = {
            name: text_of(panel().picture(view, 200, HEIGHTS.get(name, 60))) for name, panel in PANELS.items()
        }
        self.panels["waste"] = waste_words(view.waste, 200, view.recomputed)
        self.lines: list[str] = []
        tail_trace(path, self.lines.append)
        self.summary = "\n".join(summary(view))
        told: list[str] = []
        tail_trace(path, told.append, "json")
        *self.requests, last = [json.loads(line) for line in told]
        self.summed_up: dict[str, Any] = last["summary"]
        self.run = Run(view).figures

    def number(self, panel: str, pattern: str) -> float:
        """Returns the number that a panel shows at the group of `pattern`."""
        found = re.search(pattern, self.panels[panel])
        assert found is not None, f"{panel} does not show {pattern}:\n{self.panels[panel]}"
        return float(found.group(1).replace(",", ""))

    def total(self, key: str) -> int:
        """Returns the sum of a figure of all requests in the JSON."""
        return sum(request[key] or 0 for request in self.requests)


def text_of(picture: Picture) -> str:
    rows = [picture.title or "", plain([*picture.note]), *map(plain, picture.rows), plain([*picture.legend])]
    return "\n".join(rows)


@cache
def shown(name: str) -> Shown:
    return Shown(RECORDINGS[name])


@pytest.fixture(params=RECORDINGS)
def at_end(request: pytest.FixtureRequest) -> Shown:
    return shown(request.param)


def test_requests_and_steps(at_end: Shown) -> None:
    view, told = at_end.view, describe(at_end.reader)
    requests, steps = len(at_end.requests), int(at_end.number("timings", r"([\d,]+) steps in"))
    assert f"{requests:,} request" in told and f" {steps:,} steps" in told
    charted = step_times(view.history.steps, view.moment.horizon, view.history.steps.capacity)
    assert at_end.run.requests == requests and at_end.run.steps == steps == len(charted.took)
    kinds = [at_end.number("timings", rf"{kind} +([\d,]+) ") for kind in ("decode only", "mixed", "prefill only")]
    assert sum(kinds) == steps
    finished = sum(request["finished"] for request in at_end.requests)
    lanes = BatchLanes()
    (*_, rest) = map(plain, lanes.picture(view, 120, 20).rows)
    hidden = re.findall(r"([\d,]+) (?:decode throughout|decoding|prefilling|waiting|done)", rest)
    assert lanes.first_step <= view.history.steps.begin
    assert sum(int(n.replace(",", "")) for n in hidden) + sum(map(len, lanes.rows.slots)) == requests
    assert at_end.number("requests", r"([\d,]+) live") == requests - finished
    assert at_end.number("requests", r"([\d,]+) finished") == finished == at_end.run.finished


def test_tokens_and_their_times(at_end: Shown) -> None:
    run, requests = at_end.run, at_end.requests
    firsts = [request["first_token_ms"] for request in requests if request["first_token_ms"] is not None]
    shown_firsts = re.search(r"first token  p50 (\S+) ms  p99 (\S+) ms  of (\S+)", at_end.panels["trends"])
    assert shown_firsts is not None and int(shown_firsts.group(3)) == len(firsts) == run.firsts
    expected = percentiles(firsts)
    assert (run.first_p50, run.first_p99) == pytest.approx(expected, abs=0.001)
    assert [float(shown_firsts.group(i)) for i in (1, 2)] == pytest.approx(expected, rel=0.005)
    _, (p50, p99, gaps) = at_end.view.history.trends.series(
        "token gaps", 7200, 100, at_end.view.history.rates.now, live=True
    )
    assert gaps == run.gaps == at_end.total("gaps")
    assert (p50, p99) == pytest.approx((run.gap_p50, run.gap_p99))
    longest = max((request["longest_gap"]["ms"] for request in requests if request["longest_gap"]), default=0.0)
    assert run.gap_longest == pytest.approx(longest, abs=0.001)


def test_a_duration_has_one_text(at_end: Shown, tmp_path: Path) -> None:
    view, run = at_end.view, Run(at_end.view)
    exported = json.loads(export(at_end.reader.path, "perfetto", tmp_path / "a.json").read_text())["traceEvents"]
    found = [event["args"] for event in exported if "step ms" in event.get("args", {})]
    took = {args["step"]: args["step ms"] for args in found}
    told = {
        int(step.replace(",", "")): text
        for line in at_end.lines
        for step, text in re.findall(
            r" s  step ([\d,]+)  .*? tokens(?: · [\d,]+ waiting)? · (?:[\d.,]+ ms on the device, ready )?([\d.,]+ m?s)",
            line,
        )
    }
    assert len(told) > 5
    for step in sorted(told)[:100]:
        row = view.history.steps.get(step)
        assert row is not None and row.took_ms is not None
        assert told[step] == duration(row.took_ms) == duration(took.get(step, row.took_ms))
        in_words = dict(tell(view, "step", step).lines)["took"].split(" on the device, ready ")[-1]
        assert in_words.startswith((f"{told[step]};", f"{told[step]} after step {step - 1:,};"))
    markdown = export(at_end.reader.path, "md", tmp_path / "a.md").read_text()
    for row in at_end.requests:
        lane = view.history.lanes.lanes[row["request"]]
        if row["first_token_ms"] is not None:
            first = duration(row["first_token_ms"])
            assert re.search(rf"^\| r{lane.id} \|.*\| {re.escape(first)} \|", markdown, re.MULTILINE)
            assert dict(tell(view, "request", lane.id).lines)["first token"].startswith(f"{first} = queue")
        if row["longest_gap"]:
            gap = row["longest_gap"]
            assert gap["text"].startswith(f"{ms(gap['ms'])} ms ")
            assert gap["ms"] == pytest.approx(sum(gap["causes_ms"].values()), abs=0.003 * len(gap["causes_ms"]))
            if " + usual " in gap["text"]:  # the parts that the text names add up, too
                why = re.sub(r"\([^)]*\)", "", gap["text"].partition(": ")[2])
                named = re.findall(r" (\d[\d,]*(?:\.\d+)?)(?=, | \+ usual | ms(?:;|$| ·))", why)
                total, rounded = sum(float(part.replace(",", "")) for part in named), 0.006 * len(named)
                assert total == pytest.approx(gap["ms"], rel=0.01, abs=rounded), why
    for lane in run.lanes:  # the gap of a step is the time that it took
        arrivals = view.history.tokens.arrivals(lane, view.moment.horizon)
        for i in range(1, min(len(arrivals), 50)):
            between, ended = arrivals.gap(i), view.history.steps.get(int(arrivals.steps[i]))
            assert ended is not None and ended.took_ms is not None
            if between.since == between.step - 1:
                assert exact(between.ms) == exact(ended.took_ms)


def test_the_exports_count_the_same(at_end: Shown, tmp_path: Path) -> None:
    text, run = export(at_end.reader.path, "md", tmp_path / "a.md").read_text(), at_end.run
    totals = {name: int(n.replace(",", "")) for name, n in re.findall(r"^\| ([^|]+) \| ([\d,]+)", text, re.MULTILINE)}
    assert totals["steps"] == run.steps and totals["requests"] == run.requests
    assert totals["prompt tokens computed"] == run.computed and totals["prompt tokens from the cache"] == run.cached
    assert totals.get("tokens computed twice, after a preemption", 0) == run.twice
    again = totals.get("tokens from the cache again, after a preemption", 0)
    assert again == at_end.total("tokens_cached_after_preemption")
    assert totals["reply tokens"] == run.replies and totals["preemptions"] == run.preemptions
    assert totals["blocks evicted"] == run.evicted
    rows = re.findall(r"^\| r(\d+) \|.*\| ([^|]+) \| ([\d,]+) \| [^|]+ \|$", text, re.MULTILINE)
    told = {request["request"]: request for request in at_end.requests}
    assert len(rows) == len(told)
    for id, first, tokens in rows:
        assert int(tokens.replace(",", "")) == told[int(id)]["output_tokens"]
        assert (first == "–") == (told[int(id)]["first_token_ms"] is None)
    events = json.loads(export(at_end.reader.path, "perfetto", tmp_path / "a.json").read_text())["traceEvents"]
    evicted = [int(found.group(1)) for event in events if (found := re.match(r"evict (\d+) block", event["name"]))]
    assert sum(evicted) == run.evicted
    assert sum(event["name"] == "preempted" for event in events) == run.preemptions
    view, last = at_end.view, {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    if view.history.live.state.step == view.history.steps.committed:  # else the panels show the next step's plan
        named = dict(zip(("free", "active", "shared", "cached"), view.history.live.state.counts, strict=True))
        assert last["KV blocks"] == named
        assert last["requests"] == {"running": at_end.number("vitals", r"running +([\d,]+)"), "waiting": 0}


def test_the_json_of_a_comparison_has_the_requests_of_tail(at_end: Shown) -> None:
    told = {request["request"]: request for request in at_end.requests}
    assert len(at_end.compared) == len(told)
    for request in at_end.compared:
        assert request == told[request["request"]]


def test_events_and_their_steps(at_end: Shown) -> None:
    reader, run = at_end.reader, at_end.run
    events = list(at_end.view.history.events.newest_first())
    # A wait that began before the recording is known only when the first token arrives.
    words = {at_end.view.texts.event(event).partition(" · waited")[0] for event in events}
    lines = [line for line in at_end.lines if any(text in line for text in words)]
    assert len(lines) == len(events) == at_end.number("events", r"([\d,]+) so far")
    steps = [
        int(found.replace(",", "")) for line in at_end.lines for found in re.findall(r" s  .*?steps? ([\d,]+)", line)
    ]
    assert all(reader.step_before < step <= at_end.view.history.steps.last for step in steps)
    rows = [row.split()[0] for row in at_end.panels["events"].splitlines()[2:-1] if row.split()]
    numbers = [int(step.replace(",", "")) for step in rows if step[0].isdigit()]
    assert all(reader.step_before < step <= at_end.view.history.steps.last for step in numbers)
    count = {kind: sum(event.kind == kind for event in events) for kind in ("preempt", "finish", "evict")}
    assert count["preempt"] == run.preemptions == at_end.total("preemptions")
    assert count["finish"] == run.finished
    assert sum(event.record[4] for event in events if event.kind == "evict") == run.evicted


def test_chunks_end_within_their_prompt_or_the_reply_so_far(at_end: Shown) -> None:
    resumed = {event.request for event in at_end.view.history.events.newest_first() if event.kind == "preempt"}
    chunks = [
        found for step in range(at_end.view.history.steps.begin, at_end.view.moment.horizon + 1)
        for _, text in tell(at_end.view, "step", step).lines
        for found in re.findall(r"^r(\d+): tokens ([\d,]+) to ([\d,]+)(?: of ([\d,]+))?(; samples)?", text)
    ]
    for request, _, last, total, samples in chunks:
        assert total or int(request) in resumed
        end, whole = (int(number.replace(",", "") or 0) for number in (last, total))
        assert not total or (end + 1 == whole if samples else end + 1 < whole)
    assert chunks


def test_the_history_of_levels_does_not_depend_on_the_batches_of_records(at_end: Shown) -> None:
    records, snapshot = list(at_end.reader.part(0).records), at_end.reader.part(0).snapshot
    histories = []
    for size in (len(records), 40, 7):
        view = View()
        view.reset(snapshot)
        for begin in range(0, len(records), size):
            view.fold(records[begin : begin + size])
        histories.append([view.history.rates.series(name, 100).tolist() for name in view.history.rates.LEVELS])
    assert histories[0] == histories[1] == histories[2]


def test_what_the_cache_saved(at_end: Shown) -> None:
    view, again = at_end.view, at_end.total("tokens_computed_twice")
    assert at_end.run.twice == again and at_end.number("waste", r"([\d,]+) tokens computed twice") == again
    saved, data = view.moment.reused_lately.saved, at_end.summed_up
    assert f"saved {saved:,} prompt token" in at_end.summary and saved == at_end.run.cached
    assert data["saved_prompt_tokens"] == saved and "\n".join(data["text"]) == at_end.summary
    assert data["tokens_cached_after_preemption"] == at_end.total("tokens_cached_after_preemption")
    assert data["hit_rate"] == pytest.approx(view.moment.reused.hit_rate, abs=1e-4)
    for node in data["evicted_next"]:
        assert f"{node['name']} ({node['tokens']:,} token" in at_end.summary
    for limit in data["limits"]:
        known = f"the {limit['by']} limits" if limit["by"] else "limit unknown"
        assert known in at_end.summary and (limit["host_waits"] is None) == (limit["by"] is None)
    assert at_end.number("tree", r"([\d,]+) (?:prompt tokens )?saved") == saved
    if view.moment.reused.hit_rate is not None:
        assert f"{100 * view.moment.reused.hit_rate:.1f} % of all" in at_end.summary
        assert at_end.number("vitals", r"hit rate ([\d.]+)") == pytest.approx(
            100 * view.moment.reused.hit_rate, abs=0.05
        )
    resumed = at_end.total("tokens_cached_after_preemption")
    assert view.moment.reused_lately.resumed == resumed
    if resumed:
        assert f"took {resumed:,} tokens from the cache again" in at_end.summary
        assert at_end.number("tree", r"([\d,]+) again after preemptions") == resumed


def test_a_reply_has_one_speed(at_end: Shown) -> None:
    view, told, speeds = at_end.view, "\n".join(at_end.lines), 0
    by_request: list[str] = []
    tail_trace(at_end.reader.path, by_request.append, "requests")
    ends = {event.request: event for event in view.history.events.newest_first() if event.kind == "finish"}
    table = {int(row.split()[0][1:]): row for row in re.findall(r"^r\d+ .*$", at_end.panels["requests"], re.MULTILINE)}
    assert len(table) > 3
    for request in at_end.requests:
        id, speed = request["request"], request["tokens_per_second"]
        words = f"{speed:,.0f} tok/s" if speed else ""
        line = next(line for line in by_request if f"  r{id} " in line)
        assert re.findall(r"[\d,]+ tok/s", line) == [words] * bool(words)
        if id in table and words:
            assert f" {words.split()[0]} " in table[id]
        if request["finished"]:
            end = view.texts.event(ends[id])
            assert re.findall(r"[\d,]+ tok/s", end) == [words] * bool(words) and end in told
            assert f", {words}," in dict(tell(view, "request", id).lines)["finished"] or not words
            speeds += bool(words)
    assert speeds
