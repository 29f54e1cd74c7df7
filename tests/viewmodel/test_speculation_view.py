"""Speculation on the screen, in exports and in /metrics: the figures are those of the run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.core.request import Request
from engine.metrics.metrics import Metrics
from engine.params import SamplingParams
from engine.trace.records import Record
from engine.trace.state import State
from minitui.export import export
from minitui.trace.reader import TraceReader
from minitui.trace.recorder import Recorder
from minitui.tui.widgets.inspect.lanes import BatchLanes
from minitui.tui.widgets.inspect.step_bar import StepBar
from minitui.tui.widgets.inspect.timings import StepTimings
from minitui.tui.widgets.inspect.vitals import Vitals
from minitui.tui.widgets.rows import plain
from minitui.viewmodel.history.lane import DECODING, GAINING
from minitui.viewmodel.view import View
from minitui.viewmodel.words.narrate import narrate
from minitui.viewmodel.words.story import tell
from minitui.viewmodel.words.teller import Teller
from tests.engine.core.test_speculation import REPEATING, drafting_seed, make_engine
from tests.support.records.golden import INFO
from tests.support.records.views import codes


@dataclass
class Run:
    """A run of three requests: one whose drafts are right, two with others, and the records of it."""

    requests: list[Request]
    snapshot: dict[str, Any]
    records: list[Record]
    emitted: dict[int, list[int]]  # by step, the tokens drawn by each request

    @property
    def drafts(self) -> tuple[int, int]:
        """Tokens drafted and accepted, as the requests count them."""
        return sum(r.drafted_tokens for r in self.requests), sum(r.accepted_tokens for r in self.requests)

    def view(self, until: int | None = None) -> View:
        """The view after step `until`, at the gate; by default at the end."""
        view = View()
        view.reset(self.snapshot)
        for record in self.records:
            view.fold([record], now=record[1])
            if record[2] == "time" and record[3] == until:
                break
        view.history.live.state.gate = "closed"
        view.frame(self.records[-1][1] + 1)
        return view


@pytest.fixture(scope="module")
def played() -> Run:
    engine = make_engine(blocks=200, tokens=6, budget=64)
    snapshot, seed = engine.snapshot(), drafting_seed(REPEATING, 12)
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=24, seed=seed + i, ignore_eos=True), group="chat")
        for i, prompt in enumerate((REPEATING, [9, *REPEATING], [8, 7, *REPEATING]))
    ]
    emitted = {}
    while engine.has_work:
        items = engine.step()
        emitted[engine.scheduler.step] = [item.request.id for item in items]
    return Run(requests, snapshot, engine.log.drain(), emitted)


def drafting_step(run: Run, requests: int | None = None) -> int:
    """The first step in which so many requests had drafts, and some but not all of them were right."""
    view = run.view()
    for step in range(view.history.steps.last + 1):
        row = view.history.steps.get(step)
        assert row is not None
        if 0 < row.accepted < row.drafted and requests in (None, len(row.drafts)):
            return step
    raise AssertionError("there is none")


def test_the_tokens_of_a_step_are_decodes_drafts_and_prefill(played: Run) -> None:
    view = played.view()
    for step, drew in played.emitted.items():
        row = view.history.steps.get(step)
        assert row is not None
        assert row.decodes + row.accepted + sum(chunk[3] for chunk in row.chunks) == len(drew)
        assert row.prefill_tokens == sum(chunk[2] for chunk in row.chunks)
        assert (row.kind == "decode") == (not row.chunks)
    assert (
        view.history.rates.series("decode", 100, view.history.rates.bucket + 1).sum()
        == sum(map(len, played.emitted.values())) - 3
    )
    drafted, accepted = played.drafts
    assert (view.timings.drafted, view.timings.accepted) == (drafted, accepted) and 0 < accepted < drafted
    lanes = view.history.lanes.lanes
    assert [(lanes[r.id].drafted, lanes[r.id].accepted) for r in played.requests] == [
        (r.drafted_tokens, r.accepted_tokens) for r in played.requests
    ]
    decodes = sum(view.history.steps.get(step).decodes for step in played.emitted)  # type: ignore[union-attr]
    assert view.timings.per_row == pytest.approx(1 + accepted / decodes)


def test_the_step_bar_shows_drafts_right_and_wrong(played: Run) -> None:
    step = drafting_step(played)
    view = played.view(step)
    row = view.history.steps.get(step)
    assert row is not None
    picture = StepBar().picture(view, 140, 2)
    text, bar = (plain(line) for line in picture.rows)
    assert f"{row.drafted} draft{'s' if row.drafted > 1 else ''} ({row.accepted} accepted)" in text
    assert f"+{row.accepted}" in bar and str(row.drafted - row.accepted) in bar
    assert any("rejected drafts" in part for part, _ in picture.legend)


def test_lanes_mark_the_steps_in_which_drafts_were_right(played: Run) -> None:
    view = played.view()
    request = played.requests[0]
    lane = view.history.lanes.lanes[request.id]
    gained = {step for step, drew in played.emitted.items() if drew.count(request.id) > 1}
    found = codes(lane, 0, 1, view.history.steps.last + 1, view.history.steps.last)
    assert gained == {step for step, code in enumerate(found) if code == GAINING} and gained
    assert DECODING in found
    assert "═" in "".join(plain(row) for row in BatchLanes().picture(view, 100, 8).rows)


def test_timings_and_vitals_show_the_tokens_per_row(played: Run) -> None:
    view = played.view()
    t = view.timings
    panel = [plain(row) for row in StepTimings().picture(view, 80, 9).rows]
    expected = f"{100 * t.accepted / t.drafted:.0f} % of {t.drafted} accepted: {t.per_row:.1f} tokens per row and step"
    assert any("drafts" in row and expected in row for row in panel)
    vitals = [plain(row) for row in Vitals(frame="box").picture(view, 60, 12).rows]
    assert any(f"{t.per_row:.1f} per row and step" in row for row in vitals)


def test_the_sentence_of_a_step_has_its_drafts_and_the_accepted_ones(played: Run) -> None:
    alone = drafting_step(played, 1)
    (request, drafted, accepted), *_ = played.view(alone).history.steps.get(alone).drafts  # type: ignore[union-attr]
    told = narrate(played.view(alone), alone)
    assert f"r{request} also verifies {drafted} draft token" in told and "copied from earlier in its text" in told
    assert f"so it advances by {accepted + 1} tokens." in told
    assert f"r{request} starts block" not in told, "not with the token that it decodes"
    several = drafting_step(played, 2)
    row = played.view(several).history.steps.get(several)
    assert row is not None
    told = narrate(played.view(several), several)
    assert f"verify {row.drafted} draft tokens: {row.accepted} are accepted" in told
    assert f"so together they advance by {2 + row.accepted} tokens" in told
    story = tell(played.view(several), "step", several)
    assert any(label == "drafts" for label, _ in story.lines)


def test_tail_counts_accepted_drafts_as_tokens(played: Run) -> None:
    view = View()
    view.reset(played.snapshot)
    teller = Teller(view)
    lines = [str(line) for line in [*teller.tell(played.records), *teller.rest()]]
    assert any("drafts accepted" in line or "draft tokens" in line for line in lines)


def test_exports_and_metrics_count_drafts(played: Run, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run.trace")
    recorder.begin(INFO, played.snapshot)
    recorder.feed(played.records)
    recorder.close()
    assert list(TraceReader(tmp_path / "run.trace").records()) == played.records
    written = json.loads(export(tmp_path / "run.trace", "perfetto", tmp_path / "run.json").read_text())["traceEvents"]
    by_step = {event["args"]["step"]: event["args"] for event in written if "draft tokens" in event.get("args", {})}
    plans = list(by_step.values())
    drafted, accepted = played.drafts
    assert sum(args["draft tokens"] for args in plans) == drafted
    assert sum(args["accepted"] for args in plans) == accepted
    story = export(tmp_path / "run.trace", "md", tmp_path / "run.md").read_text()
    total = sum(len(r.output_ids) for r in played.requests)
    assert f"| reply tokens | {total:,} |" in story

    metrics, state = Metrics(), State.from_snapshot(played.snapshot)
    for record in played.records:
        metrics.observe(record, state)
        state.apply(record)
    page = metrics.page("m")
    for name, value in (("draft_tokens", drafted), ("accepted_tokens", accepted)):
        line = next(line for line in page.splitlines() if line.startswith(f"vllm:spec_decode_num_{name}_total{{"))
        assert float(line.split()[-1]) == value
