"""What a trace is exported to, opened by a parser of its format."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import re
import shutil
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from engine.errors import EngineDead
from engine.info import EngineInfo
from engine.params import SamplingParams
from engine.trace.kind import FIELDS
from engine.trace.state import State
from minitui.cli.recordings import run_export
from minitui.cli.tail import tail_live, tail_server, tail_trace
from minitui.export import export
from minitui.export.perfetto import DEVICE, HOST, NAMES, REQUESTS
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceError, TraceReader
from minitui.trace.recorder import Recorder
from minitui.viewmodel.compare.runs import recorded_view
from minitui.viewmodel.history.spans import LAUNCH_OR_WAIT, NOT_REPORTED
from minitui.viewmodel.state.eviction import EvictionOrder
from minitui.viewmodel.view import View
from minitui.viewmodel.words.teller import RequestTeller, Teller
from tests.support.app.fake_client import ByteCodec, FakeSource, sampling
from tests.support.records.golden import GOLDEN, INFO, make_engine, play
from tests.support.waiting import drained, until


@pytest.fixture(scope="module")
def perfetto(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = export(GOLDEN, "perfetto", tmp_path_factory.mktemp("export") / "golden.json")
    events = json.loads(path.read_text())["traceEvents"]
    assert all(set(event) >= {"ph", "pid", "name"} for event in events)
    return events


def tracks(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    out = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            out[event["pid"], event["tid"]].append(event)
    return out


def test_slices_of_a_track_nest_and_none_overlap(perfetto: list[dict[str, Any]]) -> None:
    found = tracks(perfetto)
    assert len([key for key in found if key[0] == REQUESTS]) > 20 and found[HOST, 1]
    for key, slices in found.items():
        stack: list[float] = []
        before = -1.0
        for piece in slices:  # in the file's order: by time, a parent before what it holds
            begin, end = piece["ts"], piece["ts"] + piece["dur"]
            assert piece["dur"] > 0 and begin >= before, f"{key}: {piece} is out of order"
            before = begin
            while stack and stack[-1] <= begin + 0.002:
                stack.pop()
            assert not stack or end <= stack[-1] + 0.002, f"{key}: {piece} reaches out of what holds it"
            stack.append(end)


def test_each_request_has_a_lane_from_its_submission_to_its_end(perfetto: list[dict[str, Any]]) -> None:
    reader = TraceReader(GOLDEN)
    records = list(reader.records())
    submitted = {record[3]: record for record in records if record[2] == "submit"}
    ended = {record[3]: record for record in records if record[2] == "finish"}
    lanes = {key[1]: slices for key, slices in tracks(perfetto).items() if key[0] == REQUESTS}
    names = {e["tid"]: e["args"]["name"] for e in perfetto if e["name"] == "thread_name" and e["pid"] == REQUESTS}
    assert lanes.keys() == submitted.keys() == names.keys()
    chunks = defaultdict(int)
    for record in records:
        if record[2] == "step":
            for id, _, n, _ in record[4]:
                chunks[id] += n
    for id, slices in lanes.items():
        whole = slices[0]
        assert whole["name"] == names[id] and whole["args"]["prompt tokens"] == submitted[id][5]
        if id in ended:
            assert whole["args"]["end"] == ended[id][4] and whole["args"]["output tokens"] == ended[id][5]
        drawn = sum(piece["args"]["tokens"] for piece in slices if piece["name"].startswith("prefill"))
        assert drawn <= chunks[id]
    total = sum(p["args"]["tokens"] for s in lanes.values() for p in s if p["name"].startswith("prefill"))
    assert total > 0.8 * sum(chunks.values()), "a chunk is left out only where its request ended with it"


def test_what_vllm_does_not_report_is_named_as_such(tmp_path: Path) -> None:
    """Its recording tells neither when a launch ended nor when a wait began: no time is said to be one of both."""
    events = json.loads(export(bundled()["vllm-8b"], "perfetto", tmp_path / "a.json").read_text())["traceEvents"]
    names = {piece["name"] for piece in tracks(events)[HOST, 1]}
    assert names == {"plan", "commit", NAMES[LAUNCH_OR_WAIT], NOT_REPORTED}
    assert "does not report" in NAMES[LAUNCH_OR_WAIT] and (DEVICE, 1) not in tracks(events)
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes[DEVICE] == "device: the engine does not report its times"
    own = json.loads(export(bundled()["h200-8b"], "perfetto", tmp_path / "b.json").read_text())["traceEvents"]
    assert not {piece["name"] for piece in tracks(own)[HOST, 1]} & {NAMES[LAUNCH_OR_WAIT], NOT_REPORTED}


async def test_the_device_is_drawn_where_its_time_is_known(tmp_path: Path) -> None:
    from minitui.trace.recorder import Recorder

    path = tmp_path / "device.trace"
    recorder = Recorder(path)
    source = FakeSource()
    await source.start(lambda progress: None)
    recorder.begin(EngineInfo(model="m", device="gpu"), await source.snapshot())
    recorder.feed(
        [
            (1, 1.0, "submit", 1, "a", 8, 20),
            (2, 1.001, "admit", 1, 0, "new"),
            (3, 1.002, "alloc", 1, [1]),
            (4, 1.003, "step", 0, [(1, 0, 8, True)], [], [], 8, 0),
            (5, 1.006, "step", 1, [], [1], [], 1, 0),  # planned while step 0 runs
            (6, 1.010, "comm", 0, 2, 1.5),
            (7, 1.010, "time", 0, 100, 200, 300, 6.5, 6.0, "prefill"),
            (8, 1.013, "time", 1, 5000, 200, 300, 3.0, 2.5, "decode"),  # planned longer than it can have been
        ]
    )
    recorder.close()
    found = tracks(json.loads(export(path, "perfetto").read_text())["traceEvents"])
    assert [p["dur"] for p in found[DEVICE, 1]] == pytest.approx([6000, 2500])
    host, device = found[HOST, 1], found[DEVICE, 1]
    assert [piece["args"].get("exchange between ranks, ms") for piece in device] == [1.5, None]
    plan = next(p for p in host if p["name"] == "plan" and p["args"]["step"] == 1)
    assert device[0]["ts"] < plan["ts"] + plan["dur"] < device[0]["ts"] + device[0]["dur"], "while the step before ran"
    for before, after in pairwise(host):
        assert before["ts"] + before["dur"] <= after["ts"] + 0.002


def test_json_names_every_field_of_every_record(tmp_path: Path) -> None:
    whole = json.loads(export(GOLDEN, "json", tmp_path / "a.json").read_text())
    told: dict[int, float] = {}
    for record in whole["records"]:
        if record["kind"] == "parts":
            parts = (record[f"{name}_us"] for name in ("commit", "emit", "plan", "launch", "wait"))
            told[record["step"]] = sum(parts) / 1e3
        elif record["kind"] == "time":
            assert record.pop("took_ms") == pytest.approx(told[record["step"]])
    records = list(TraceReader(GOLDEN).records())
    assert whole["complete"] and len(whole["records"]) == len(records)
    for named, record in zip(whole["records"], records, strict=True):
        assert named["seq"] == record[0] and set(named) == {"seq", "t", "kind", *FIELDS[named["kind"]]}


def test_the_narration_tells_every_decision_and_counts_what_was_recorded(tmp_path: Path) -> None:
    text = export(GOLDEN, "md", tmp_path / "a.md").read_text()
    records = list(TraceReader(GOLDEN).records())
    prompts = sum(r[5] for r in records if r[2] == "submit")
    cached, resumed = 0, set()
    for r in records:
        resumed |= {r[3]} if r[2] in ("preempt", "requeue") else set()
        cached += r[4] if r[2] == "match" and r[3] not in resumed else 0
    assert f"| prompt tokens computed | {prompts - cached:,} |" in text
    assert f"| prompt tokens from the cache | {cached:,} ({cached / prompts:.1%}) |" in text
    assert text.count("queues again") >= sum(1 for r in records if r[2] == "preempt")
    assert "**first preemption" in text
    parsed = MarkdownIt("commonmark").enable("table").parse(text)
    assert next(token.tag for token in parsed if token.type == "heading_open") == "h1"
    cells = {parsed[i + 1].content for i, token in enumerate(parsed) if token.type == "td_open"}
    assert cells >= {f"r{record[3]}" for record in records if record[2] == "submit"}


def test_the_narration_counts_what_was_cleared_apart_and_names_the_span_of_its_lines(tmp_path: Path) -> None:
    head, *lines = (json.loads(line) for line in gzip.decompress(GOLDEN.read_bytes()).splitlines())
    evicted = cleared = 0
    for line in lines:
        for row in line[2] if line[0] == "r" else ():
            row[0] += 60.0 if row[0] > 0.6 else 0.0  # a pause
            if row[1] == "evict":
                if row[0] > 60:
                    row[4], cleared = "cleared", cleared + row[3]
                else:
                    evicted += row[3]
    one = [line for line in lines if line[0] != "k" or line[1] == 0]  # the others tell the times of the original
    path = tmp_path / "cleared.trace"
    path.write_bytes(
        gzip.compress(b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in (head, *one)))
    )
    text = export(path, "md").read_text()
    assert f"| blocks evicted | {evicted:,} |" in text and f"| blocks cleared | {cleared:,} |" in text
    end = float(re.findall(r"([\d.]+) s of the engine's clock", text)[0])
    times = [float(t) for t in re.findall(r"^- ([\d.]+) s, ", text, re.MULTILINE)]
    assert min(times) >= 0 and max(times) <= end and end > 60


def test_tail_tells_each_step_once_and_each_decision(capsys: pytest.CaptureFixture[str]) -> None:
    assert tail_trace(str(GOLDEN), print) == 0
    out = capsys.readouterr().out
    records = list(TraceReader(GOLDEN).records())
    told: list[int] = []
    for line in out.splitlines():
        _, _, rest = line.partition(" s  ")
        if rest.startswith("steps "):
            first, last = rest.split("  ")[0].removeprefix("steps ").split(" to ")
            told += range(int(first), int(last) + 1)
        elif " tokens · " in rest and " of 24 tokens" in rest:
            told.append(int(rest.split()[1]))
    assert told == [r[3] for r in records if r[2] == "time"]
    assert out.count("eviction:") == sum(1 for r in records if r[2] == "evict")
    assert out.count(" finished (") == sum(1 for r in records if r[2] == "finish")
    assert out.isprintable() or "\x1b" not in out


def test_lines_do_not_depend_on_how_records_arrive() -> None:
    reader = TraceReader(GOLDEN)
    records = list(reader.records())

    def told(batch: int) -> list[str]:
        view = View()
        view.reset(reader.part(0).snapshot)
        teller = Teller(view)
        lines = []
        for i in range(0, len(records), batch):
            lines += [str(line) for line in teller.tell(records[i : i + batch])]
        return lines + [str(line) for line in teller.rest()]

    assert told(1) == told(7) == told(len(records))


@pytest.fixture(scope="module")
def with_a_gap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording from whose middle a third is missing: requests came, went and decoded meanwhile."""
    engine = make_engine()
    path = tmp_path_factory.mktemp("gap") / "gap.trace"
    recorder = Recorder(path)
    recorder.begin(INFO, engine.snapshot())
    play(engine)
    records = engine.log.drain()
    third = len(records) // 3
    recorder.feed(records[:third])
    state = State.from_snapshot(make_engine().snapshot())
    state.apply_all(records[: 2 * third])
    recorder.resume(state.snapshot())
    recorder.feed(records[2 * third :])
    recorder.close()
    return path


def test_a_recording_with_a_gap_has_lanes_for_whoever_was_there_behind_it(with_a_gap: Path) -> None:
    events = json.loads(export(with_a_gap, "perfetto").read_text())["traceEvents"]
    named = {event["tid"] for event in events if event["name"] == "thread_name" and event["pid"] == REQUESTS}
    ends = [event["args"]["end"] for event in events if "end" in event.get("args", {})]
    assert len(ends) == len(named) and "finished in a gap of the recording" in ends
    assert {event["tid"] for event in events if event["pid"] == REQUESTS and event["ph"] == "X"} == named


def test_the_story_of_a_recording_goes_on_behind_a_gap(with_a_gap: Path) -> None:
    told: list[str] = []
    tail_trace(with_a_gap, told.append)
    at = next(i for i, line in enumerate(told) if "records are missing here" in line)
    assert len(told) - at > 50
    story = export(with_a_gap, "md").read_text().split("## What happened")[1]
    assert story.partition("records are missing here")[2].count("\n- ") > 30


def test_the_lines_say_why_a_step_was_slow_and_sum_up_at_the_end() -> None:
    told: list[str] = []
    tail_trace(GOLDEN, told.append)
    slow = next(line for line in told if " step 83 " in line and "decode" in line)
    assert re.search(r" of 24 tokens · 0\.7\d ms · expected 0\.5\d ms, .*, \+0\.2\d: commit of previous step 82", slow)
    last = " ".join(told[-4:])
    reader, view = TraceReader(GOLDEN), View()
    view.reset(reader.part(0).snapshot)
    view.fold(list(reader.records()))
    first, second = (len(node.ids) for node in EvictionOrder(view.history.live.state).nodes[:2])
    assert f"the cache saved {view.moment.reused_lately.saved} prompt tokens since step 0: " in last
    assert re.search(rf"evicted next: 1\. “.*” \({first} tokens\); 2\. “.*” \({second} tokens\)", last)
    free = ", ".join(map(str, view.history.live.state.free[::-1]))
    evicted = EvictionOrder(view.history.live.state).nodes[0].blocks[-1]
    assert f"{free} (free), then evict {evicted}" in last
    words = r"the (host|device) limits the speed: (the host waits for it|it waits for the device only) \d+ % "
    words += "of the time"
    unread = r"( \(other programs: known for \d+ of 140 steps\))?"  # short steps before an idle time are not read
    assert re.search(f"{words}{unread} · last 140 steps$", last)


def test_all_lines_of_a_server_are_there_when_its_last_request_has_ended_and_tell_one_speed() -> None:
    reader = TraceReader(bundled()["small-pool"])
    told = {}
    for kind in (Teller, RequestTeller):
        view = View()
        view.reset(reader.part(0).snapshot)
        teller = kind(view)
        told[kind] = [str(line) for record in reader.records() for line in teller.tell([record])]
        assert not list(teller.rest()) or kind is RequestTeller
    assert re.search(r"step 158  r4 decodes one token", told[Teller][-1])
    ends = [
        [(line.split()[3], re.search(r"r\d+|$", line)[0], re.findall(r"[\d,]+ tok/s", line))  # type: ignore[index]
         for line in lines if " finished (" in line]
        for lines in told.values()
    ]
    assert len(ends[0]) == 4 and ends[0] == ends[1]


@pytest.mark.parametrize(("kind", "said"), [(Teller, "the cache saved "), (RequestTeller, "the longest gap of all")])
def test_a_server_s_lines_are_summed_up_every_minute(
    kind: type[Teller], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minitui.viewmodel.words.teller.SUMMARY_S", 0.5)
    reader, view = TraceReader(GOLDEN), View()
    view.reset(reader.part(0).snapshot)
    told = [line for line in kind(view).tell(reader.records()) if line.text.startswith(said)]
    assert len(told) == 2 and 0.45 < told[1].t - told[0].t < 0.8, [str(line) for line in told]


def test_each_file_of_a_recording_has_an_export_of_its_own(tmp_path: Path) -> None:
    """A class with several engines is class.trace, class.2.trace …: one picture must not replace the other."""
    for name in ("class.trace", "class.2.trace"):
        shutil.copyfile(GOLDEN, tmp_path / name)
    kinds = ("md", "svg")
    written = [run_export(str(tmp_path / name), kind, None, None, "80x24", None)
               for name in ("class.trace", "class.2.trace") for kind in kinds]
    assert [path.name for path in written] == ["class.md", "class.svg", "class.2.md", "class.2.svg"]
    assert all(path.parent == tmp_path and path.stat().st_size for path in written)


def test_a_recording_that_was_cut_off_is_said_beside_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cut.trace"
    path.write_bytes(bundled()["small-pool"].read_bytes()[:6000])
    assert tail_trace(path, print, "json") == 0
    lines, notes = capsys.readouterr()
    assert all(set(json.loads(line)) & {"request", "summary"} for line in lines.splitlines()) and lines
    assert notes == "(the recording is incomplete: it was cut off here)\n"
    assert tail_trace(path, print) == 0
    assert capsys.readouterr().out.endswith(notes)


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="perfetto, json, md"):
        export(GOLDEN, "gif")
    with pytest.raises(TraceError, match="cannot be written"):
        export(GOLDEN, "json", tmp_path / "no" / "x.json")


async def test_an_engine_is_told_live_and_a_server_is_watched() -> None:
    lines: list[str] = []
    questions = io.StringIO("hello\n\nand again\n")
    source = FakeSource()
    assert await tail_live(source, "short", sampling(20), questions, lines.append, lambda info: ByteCodec()) == 0
    assert sum(line.startswith("answer: ") for line in lines) == 2 and source.closed
    assert any("joins the queue" in line for line in lines) and any("r2 finished" in line for line in lines)

    lines.clear()
    watched = FakeSource()
    watching = asyncio.create_task(tail_server(watched, lines.append, lambda info: ByteCodec()))
    await until(lambda: watched.info)
    await drained(watched.submit(list(range(40)), SamplingParams(max_tokens=4, ignore_eos=True)))
    await until(lambda: any("r1 finished" in line for line in lines))
    watched.die("the server went away")
    with pytest.raises(EngineDead, match="went away"):
        await watching


def test_a_request_that_takes_its_own_blocks_again_after_a_preemption_is_no_hit(tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "again.trace"
    recorder = Recorder(path)
    recorder.begin(INFO, engine.snapshot())
    for first in range(1, 7):  # no two prompts begin alike
        engine.add_request([first] * 24, SamplingParams(max_tokens=40, seed=first, ignore_eos=True))
    while engine.has_work:
        engine.step()
    recorder.feed(engine.log.drain())
    recorder.close()
    reader = TraceReader(path)
    assert [record for record in reader.records() if record[2] == "match" and record[4] > 0]
    bookmarks = " ".join(text for _, text in reader.bookmarks)
    assert "first preemption" in bookmarks and "first hit" not in bookmarks
    events = json.loads(export(path, "perfetto", tmp_path / "a.json").read_text())["traceEvents"]
    names = {event["name"].split(":")[0] for event in events if event["ph"] == "i"}
    assert "cached again" in names and "hit" not in names
    assert recorded_view(reader).moment.reused.hit_rate in (None, 0.0)
