"""Writes a trace as Markdown: model and device, totals, requests, and what each step did and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from engine.trace.kind import Reader, kind_of, named
from engine.trace.records import CLEARED
from minitui.text import count, duration
from minitui.trace.play_clock import LONGEST_PAUSE
from minitui.trace.reader import TraceReader
from minitui.viewmodel.compare.runs import Run
from minitui.viewmodel.history.lane import OPEN, Lane
from minitui.viewmodel.state.side_groups import strips, unit
from minitui.viewmodel.view import View
from minitui.viewmodel.words.narrate import narrate
from minitui.viewmodel.words.teller import Line, Teller
from minitui.visible import visible, visible_line

MOST_LINES = 4000  # longer texts are hard to read
NARRATED = frozenset(  # kinds of events without a line of their own: the text of their step includes them
    {"admit", "hit", "miss", "evict", "lose", "preempt", "finish", "wait", "submit"}
)


def write_markdown(reader: TraceReader, path: Path) -> None:
    """Write the trace to `path` as Markdown."""
    view = View()
    view.texts.ids_to_text = reader.decode
    view.texts.group_names = reader.names
    lanes: dict[int, Lane] = {}
    lines: list[Line] = []
    for line in Teller(view).tell_all(reader):
        if line.kind == "step":  # the view now has the state at the end of this step
            lines.append(replace(line, text=narrate(view, line.step) or line.text))
        elif line.kind not in NARRATED:
            lines.append(line)
        lanes.update(view.history.lanes.lanes)
    lanes.update(view.history.lanes.lanes)
    text = [*_head(reader), *_figures(reader, view, lanes), *_requests(view, lanes), *_story(reader, lines)]
    path.write_text(visible("\n".join(text)) + "\n", encoding="utf-8")


def _head(reader: TraceReader) -> list[str]:
    info = reader.info
    where = f"{info.model} on {info.device}"
    pool = f"{info.num_blocks:,} blocks of {info.block_size} tokens"
    for strip in strips(reader.part(0).state)[1:]:
        pool += f", {strip.name}: {count(strip.total, strip.unit)}"
    seconds = reader.end_t - reader.begin_t
    span = f"{seconds:.2f} s of the engine's clock"
    if seconds - reader.seconds > 0.05:
        span += f" ({reader.seconds:.1f} s {_shortened(reader)})"
    head = [f"# {where}", "", f"Recorded {reader.header['recorded']}, {span}; {pool}."]
    if reader.header["random_text"]:
        head += ["", "The text is random and not shown: this recording is about scheduling."]
    if not reader.complete:
        head += ["", "The recording was cut off."]
    return head


def _shortened(reader: TraceReader) -> str:
    """Returns what a replay leaves out of this recording (see PlayClock): "with pauses and idle times cut to 1 s"."""
    state = reader.part(0).state
    slow, paused = state.pace > 1, state.gate == "closed"
    for record in reader.records():
        slow |= kind_of(record) == "pace" and named(record).factor > 1
        paused |= kind_of(record) == "gate" and named(record).state == "closed"
    cut = f"with {'pauses and ' * paused}idle times cut to {LONGEST_PAUSE:g} s"
    return f"without slow motion, {cut}" if slow else cut


class _Totals(Reader):
    """Sums over the records of a recording."""

    def __init__(self, reader: TraceReader) -> None:
        self.computed = self.cached = self.resumed = self.steps = self.evicted = self.cleared = self.preemptions = 0
        self.lost: Counter[int] = Counter()  # by side group: pages evicted
        self._before = reader.step_before
        self._preempted = {id for id, r in reader.part(0).snapshot["requests"].items() if r["preemptions"]}

    def on_time(self, step: int) -> None:
        self.steps += step > self._before

    def on_step(self, prefills: list[tuple[int, int, int, bool]]) -> None:
        self.computed += sum(n for id, _, n, _ in prefills if id not in self._preempted)

    def on_match(self, request: int, tokens: int) -> None:
        if request in self._preempted:
            self.resumed += tokens
        else:
            self.cached += tokens

    def on_evict(self, blocks: int, reason: str) -> None:
        if reason == CLEARED:
            self.cleared += blocks
        else:
            self.evicted += blocks

    def on_lose(self, group: int, pages: list[int]) -> None:
        self.lost[group] += len(pages)

    def on_preempt(self, kind: str, request: int) -> None:
        self.preemptions += kind == "preempt"
        self._preempted.add(request)

    on_requeue = on_preempt


def _figures(reader: TraceReader, view: View, lanes: dict[int, Lane]) -> list[str]:
    """Returns the totals. Of prompt tokens, those of new requests count, as in `minitui tail` and `compare`."""
    totals = _Totals(reader)
    for record in reader.records():
        totals.read(record)
    cached, computed = totals.cached, totals.computed
    asked = cached + computed
    twice = sum(lane.recomputed(view.history.steps.committed) for lane in lanes.values())
    least = "at least " * any(lane.preempted_before for lane in lanes.values())
    run = Run(view)
    whole = run.first <= reader.first_step  # else the first tokens are no longer known
    rows = [
        ("steps", f"{totals.steps:,}"),
        ("requests", f"{len(lanes):,}"),
        ("prompt tokens computed", f"{computed:,}"),
        ("prompt tokens from the cache", f"{cached:,}" + (f" ({cached / asked:.1%})" if asked else "")),
        *([("tokens computed twice, after a preemption", f"{least}{twice:,}")] if twice or least else []),
        *([("tokens from the cache again, after a preemption", f"{totals.resumed:,}")] if totals.resumed else []),
        *([("reply tokens", f"{run.figures.replies:,}")] if whole else []),
        ("blocks evicted", f"{totals.evicted:,}"),
        *(
            (f"{unit(pool.group)}s of {pool.group.name} evicted", f"{totals.lost[index]:,}")
            for index, pool in enumerate(view.history.live.state.groups)
        ),
        *([("blocks cleared", f"{totals.cleared:,}")] if totals.cleared else []),
        ("preemptions", f"{totals.preemptions:,}"),
    ]
    return ["", "| | |", "|---|---:|", *(f"| {name} | {value} |" for name, value in rows)]


def _requests(view: View, lanes: dict[int, Lane]) -> list[str]:
    if not lanes:
        return []
    head = [
        "", "## Requests", "",
        "| request | chat | prompt | from the cache | first token | reply | end |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    rows = []
    for lane in sorted(lanes.values(), key=lambda lane: lane.id):
        first = duration(sum(lane.ttft)) if lane.ttft else "–"
        gaps = view.history.tokens.stats(lane, view.moment.horizon) if lane.finish_step == OPEN else None
        tokens = lane.output_tokens if gaps is None else gaps.tokens
        end = lane.finish_reason or "still running"
        if lane.preemptions:
            end += f", preempted {lane.preemptions}×"
        cells = (
            f"r{lane.id}", _cell(view.texts.group_name(lane.request.group)),
            f"{lane.request.prompt_tokens:,}", f"{lane.request.cached_tokens:,}",
            first,
            f"{tokens:,}", _cell(end),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return head + rows


def _cell(text: str) -> str:
    return visible_line(text).replace("|", "\\|")


def _story(reader: TraceReader, lines: list[Line]) -> list[str]:
    marks = list(reader.bookmarks)
    out = ["", "## What happened", ""]
    for line in lines[:MOST_LINES]:
        while marks and marks[0][0] <= line.step:
            out.append(f"\n**{marks.pop(0)[1]}**\n")
        text = line.text.replace("  ", ": ", 1) if line.kind == "steps" else f"{line.where}: {line.text}"
        out.append(f"- {line.t:.2f} s, {_cell(text)}")
    if len(lines) > MOST_LINES:
        out.append(f"\n… and {len(lines) - MOST_LINES:,} more lines: `minitui tail` prints all of them.")
    return out
