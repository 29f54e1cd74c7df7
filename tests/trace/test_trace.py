"""What a recording keeps: everything, in order, readable from any keyframe on and when it was cut off."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from engine.errors import InvalidRequest
from engine.info import EngineInfo
from engine.params import SamplingParams
from engine.trace.state import State
from minitui.sources.recording import RecordingSource
from minitui.trace.play_clock import LONGEST_PAUSE, PlayClock
from minitui.trace.reader import MOST_PARTS, TraceError, TraceReader, timeless
from minitui.trace.recorder import Recorder
from tests.support.app.fake_client import FakeSource
from tests.support.records.golden import GOLDEN, INFO, make_engine, play, untimed
from tests.support.records.traces import final_state, state_at


@pytest.fixture(scope="module")
def golden() -> TraceReader:
    return TraceReader(GOLDEN)


def test_the_scheduler_decides_as_it_did_when_the_golden_trace_was_recorded(golden: TraceReader) -> None:
    engine = make_engine()
    play(engine)
    now = [untimed(record) for record in engine.log.drain()]
    then = [untimed(record) for record in golden.records()]
    for a, b in zip(now, then, strict=False):
        assert a == b, "a decision has changed: if that is meant, write the golden trace anew (records/golden.py)"
    assert len(now) == len(then)
    kinds = {record[2] for record in then}
    assert {"evict", "preempt", "match", "split", "extend", "wait", "finish", "hold"} <= kinds, "it must show all"


def test_the_fold_of_a_trace_is_the_state_of_the_engine(golden: TraceReader) -> None:
    engine = make_engine()
    play(engine)
    assert timeless(final_state(golden).snapshot()) == timeless(engine.snapshot())


def test_every_step_can_be_found_and_equals_a_fold_from_the_beginning(golden: TraceReader) -> None:
    assert len(golden.keyframes) >= 3
    state = golden.part(0).state
    expected: dict[int, object] = {}
    for record in golden.records():
        state.apply(record)
        if record[2] == "time":
            expected[record[3]] = state.snapshot()
    assert golden.last_step == max(record[3] for record in golden.records() if record[2] == "step")
    for step, snapshot in expected.items():
        assert state_at(golden, step).snapshot() == snapshot, f"step {step}"


def test_a_trace_is_small(golden: TraceReader) -> None:
    records = sum(1 for _ in golden.records())
    assert GOLDEN.stat().st_size / records < 40, "bytes a record, keyframes included"


def record_golden(path: Path, keyframe_every: int = 300) -> State:
    engine = make_engine()
    recorder = Recorder(path, decode=lambda token: f"<{token}>".encode(), keyframe_every=keyframe_every)
    recorder.begin(INFO, engine.snapshot())
    play(engine)
    recorder.feed(engine.log.drain())
    recorder.close()
    return State.from_snapshot(engine.snapshot())


def test_a_trace_cut_off_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    whole = tmp_path / "whole.trace"
    record_golden(whole)
    data = whole.read_bytes()
    all_records = [untimed(record) for record in TraceReader(whole).records()]
    seen = []
    for length in range(len(data) // 7, len(data), len(data) // 7):
        cut = tmp_path / "cut.trace"
        cut.write_bytes(data[:length])
        reader = TraceReader(cut)
        records = [untimed(record) for record in reader.records()]
        assert records == all_records[: len(records)]
        assert not reader.complete or len(records) == len(all_records)
        final_state(reader)
        seen.append(len(records))
    assert seen == sorted(seen) and seen[-1] > len(all_records) // 2
    assert TraceReader(whole).complete


def test_a_damaged_end_does_not_hide_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "damaged.trace"
    record_golden(path)
    data = path.read_bytes()
    whole = [untimed(record) for record in TraceReader(path).records()]
    rng = random.Random(3)
    for _ in range(60):  # wherever it begins, and whatever stands there: it may decompress to something
        start = rng.randrange(len(data) * 3 // 5, len(data))
        path.write_bytes(data[:start] + rng.choice((b"\x00\xff", b"\x11", b"~q0")) * 400)
        reader = TraceReader(path)
        records = [untimed(record) for record in reader.records()]
        assert len(records) > 200
        assert records == whole[: len(records)]
        final_state(reader)
    path.write_bytes(data[:40] + b"~q0" * 20 + data[100:])
    with pytest.raises(TraceError, match="is damaged, before its first keyframe"):
        TraceReader(path)


def test_what_is_no_trace_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(TraceError, match="cannot be read"):
        TraceReader(path)
    later = json.dumps({"minitui_trace": 99, "info": {}}).encode()
    for data, why in (
        (b"hello", "not a minitui trace"), (gzip.compress(b'{"a": 1}\n'), "not a header"),
        (gzip.compress(later + b"\n"), "version 99"), (b"", "has no bytes"),
    ):
        path.write_bytes(data)
        with pytest.raises(TraceError, match=why):
            TraceReader(path)
    with pytest.raises(TraceError, match="cannot be written"):
        Recorder(tmp_path / "no" / "such" / "directory")


def test_two_recordings_do_not_write_one_file(tmp_path: Path) -> None:
    first = Recorder(tmp_path / "a.trace")
    with pytest.raises(TraceError, match=r"a.trace is being written by another recording; name another file"):
        Recorder(tmp_path / "a.trace")
    first.close()
    record_golden(tmp_path / "a.trace")
    assert TraceReader(tmp_path / "a.trace").complete


def test_the_words_of_tokens_travel_with_the_trace_and_random_ones_are_called_random(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    record_golden(path)
    reader = TraceReader(path)
    node = next(iter(n for n in final_state(reader).nodes.values() if n.ids))
    assert reader.decode(node.ids[:2]) == f"<{node.ids[0]}><{node.ids[1]}>"
    engine = make_engine()
    recorder = Recorder(path)
    recorder.begin(replace(INFO, dummy_weights=True), engine.snapshot())
    recorder.close()
    assert "random" in TraceReader(path).decode([1, 2, 3])


def test_bookmarks_mark_the_first_of_each_kind_and_can_be_added(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    record_golden(path)
    reader = TraceReader(path)
    assert {text.split(":")[0] for _, text in reader.bookmarks} >= {"first hit", "first eviction", "first preemption"}
    step, text = next(mark for mark in reader.bookmarks if "preemption" in mark[1])
    before, after = state_at(reader, step - 1), state_at(reader, step)
    request = int(text.split(": r")[1].split()[0])
    assert before.requests[request].state == "running" and after.requests[request].state != "running"
    reader.add_bookmark(11, "here")
    again = TraceReader(path)
    assert (11, "here") in again.bookmarks and again.complete
    assert [untimed(r) for r in again.records()] == [untimed(r) for r in reader.records()]


def test_after_a_gap_nothing_is_written_until_a_snapshot_comes(tmp_path: Path) -> None:
    engine = make_engine()
    recorder = Recorder(tmp_path / "gap.trace")
    recorder.begin(INFO, engine.snapshot())
    play(engine)
    records = engine.log.drain()
    recorder.feed(records[:100])
    recorder.feed(records[150:200])
    assert recorder.waits_for_snapshot
    state = State.from_snapshot(make_engine().snapshot())
    state.apply_all(records[:200])
    recorder.resume(state.snapshot())
    recorder.feed(records[190:])  # what the snapshot knows already is skipped
    recorder.close()
    reader = TraceReader(tmp_path / "gap.trace")
    assert [r[0] for r in reader.records()] == [*range(1, 101), *range(201, len(records) + 1)]
    assert final_state(reader).snapshot() == engine.snapshot()


def test_play_leaves_out_slow_motion_and_long_pauses() -> None:
    clock = PlayClock(0.0, 0.0, State(8, 4, 16, 4))
    due = [
        clock.advance(record)
        for record in (
            (1, 60.0, "submit", 1, "", 4, 8),  # nothing to do for a minute
            (2, 60.1, "pace", 10.0),
            (3, 60.1, "step", 0, [], [], [], 1, 0),
            (4, 60.2, "time", 0, 1, 1, 1, 100.0, None, "decode"),  # 0.1 s of work, stretched by 0.9 s
            (5, 61.1, "step", 1, [], [], [], 1, 0),
            (6, 61.2, "time", 1, 1, 1, 1, 100.0, None, "decode"),
        )
    ]
    assert due == pytest.approx([LONGEST_PAUSE, 1.1, 1.1, 1.2, 1.2, 1.3])


async def test_any_source_can_be_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    source = RecordingSource(FakeSource(), path)
    await source.start(lambda progress: None)
    stream = source.submit(list(range(60)), SamplingParams(max_tokens=5, ignore_eos=True), group="a")
    drains = cycle([source.drain_records, source.drain_packets])  # whichever way they are asked for
    async for _ in stream:
        next(drains)()
    expected = await source.source.snapshot()
    source.name_groups({"a": "1 paging"})
    await source.close()
    reader = TraceReader(path)
    assert reader.complete and reader.info.num_blocks == 256 and reader.names == {"a": "1 paging"}
    assert final_state(reader).snapshot() == expected


async def test_a_disk_that_fails_ends_the_recording_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(writer: object, line: str) -> None:
        raise OSError(28, "No space left on device")

    source = RecordingSource(FakeSource(), tmp_path / "run.trace")
    monkeypatch.setattr("minitui.trace.recorder.TraceWriter._line", full)
    await source.start(lambda progress: None)
    stream = source.submit(list(range(60)), SamplingParams(max_tokens=5, ignore_eos=True), group="a")
    async for _ in stream:
        source.drain_records()
    await source.close()
    assert "No space left on device" in source.recording_error


async def test_an_engine_put_in_the_place_of_another_gets_a_file_of_its_own(tmp_path: Path) -> None:
    class Changeable(FakeSource):
        async def reconfigure(self, config: object) -> None:
            await self.restart(lambda progress: None)

    source = RecordingSource(Changeable(), tmp_path / "run.trace")
    await source.start(lambda progress: None)
    for change in (False, True):
        source.name_groups({"a": "1 paging"})
        if change:
            await source.reconfigure(None)
        assert source.recording_file == tmp_path / ("run.2.trace" if change else "run.trace")
        async for _ in source.submit(list(range(60)), SamplingParams(max_tokens=5, ignore_eos=True)):
            source.drain_records()
        assert source.add_note(f"told {change}") == 4
    await source.close()
    with pytest.raises(InvalidRequest, match="nothing is recorded"):
        source.source.add_note("nowhere")
    for name in ("run.trace", "run.2.trace"):
        reader = TraceReader(tmp_path / name)
        assert reader.complete and next(reader.records())[0] == 1 and reader.last_step == 4
        assert (4, f"told {name == 'run.2.trace'}") in reader.bookmarks
        assert reader.names == {"a": "1 paging"}, "chats outlive an engine, and so do their names"


def test_a_recording_whose_last_bytes_find_no_room_says_so() -> None:
    recorder = Recorder("/dev/full")
    state = State(num_blocks=3, block_size=16, budget=8, max_num_seqs=1)
    recorder.begin(EngineInfo(model="m"), state.snapshot(), t=1.0)
    with pytest.raises(TraceError, match="No space left"):
        recorder.close()


def test_all_cores_read_the_same_parts(tmp_path):
    record_golden(tmp_path / "run.trace", keyframe_every=60)
    reader = TraceReader(tmp_path / "run.trace")
    assert len(reader.keyframes) > 2 * MOST_PARTS
    alone, together = (
        [(part.keyframe, part.records, part.due, missing) for part, missing in reader.parts(on_all_cores)]
        for on_all_cores in (False, True)
    )
    assert alone == together
    path, keyframe = reader.path, reader.keyframes[6]
    data = bytearray(path.read_bytes())
    data[keyframe.offset + 30 : keyframe.offset + 60] = bytes(30)
    path.write_bytes(data)
    with pytest.raises(TraceError, match="cannot be read beyond line"):
        list(reader.parts(True))
