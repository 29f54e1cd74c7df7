"""The timeline of a request: the gap before each of its tokens, and why the longest gap was so long."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from textual.binding import Binding
from textual.message import Message

from minitui.text import ms
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.chart import LABEL, bars, scale_of
from minitui.tui.widgets.rows import Row, Run, Runs, legend, wrapped
from minitui.viewmodel.explain.stalls import gap_words
from minitui.viewmodel.history.lane import Lane
from minitui.viewmodel.history.tokens import Arrivals
from minitui.viewmodel.requests import Requests
from minitui.viewmodel.view import View
from minitui.viewmodel.words.request_words import figures_in_words, why_first

LEAST = 4  # rows of the smallest chart
WHOLE_FIRST = 14  # rows; a lower panel leaves out the first token if it needs more than two of them


@dataclass
class JumpRequested(Message):
    """Asks the screen to show the engine as it was after a step."""

    step: int


class TimelineOpened(Message):
    """Asks the screen to show the timeline of the selected request."""


class TimelineClosed(Message):
    """Asks the screen to show the panel before the timeline again."""


class RequestTimeline(LinePanel):
    """Left and right choose a token, up and down a longer or shorter gap, Enter goes back in time to its step."""

    TITLE = "Timeline"
    NEEDS_STATE = True
    BINDINGS: ClassVar = [
        Binding("left", "move(-1)", "token before", show=False, id="timeline.left"),
        Binding("right", "move(1)", "next token", show=False, id="timeline.right"),
        Binding("pageup", "move(-10)", "ten columns back", show=False, id="timeline.pageup"),
        Binding("pagedown", "move(10)", "ten columns on", show=False, id="timeline.pagedown"),
        Binding("up", "rank(-1)", "longer gap", show=False, id="timeline.up"),
        Binding("down", "rank(1)", "shorter gap", show=False, id="timeline.down"),
        Binding("home", "longest", "the longest gap", show=False, id="timeline.longest"),
        Binding("enter", "jump", "go back in time to its step", show=False, id="timeline.jump"),
        Binding("escape", "close", "back", show=False, id="timeline.close"),
    ]

    def __init__(self, *, id: str | None = None, frame: str | None = None) -> None:
        super().__init__(id=id, frame=frame)
        self.request: int | None = None  # the request of the picture
        self.token: int | None = None  # the chosen gap is the one before this token; None: the longest
        self.per_column = 1
        self._requests = Requests()
        self._found: Arrivals | None = None
        self._gaps = np.empty(0)

    def picture(self, view: View, width: int, height: int) -> Picture:
        request = view.subject()
        lane = view.history.lanes.lanes.get(request) if request is not None else None
        if request != self.request:
            self.request, self.token = request, None
        if lane is None:
            self._found = None
            return Picture([Row("no request yet", "dim").done(width)])
        figures = self._requests.of(view, lane)
        self._found = view.history.tokens.arrivals(lane, view.moment.horizon) if figures.gaps is not None else None
        self._gaps = np.diff(self._found.at) * 1e3 if self._found is not None else np.empty(0)
        words = [figures.state, *figures_in_words(figures, why_first(view, figures))]
        running = figures.running
        late = wrapped(gap_words(view, lane, running), "bold bad", width) if running is not None else []
        least = 3 if height >= WHOLE_FIRST else 2  # the third is the first token, with what it waited for
        while len(rows := wrapped(" · ".join(words), "ink", width)) > 2 and len(words) > least:
            del words[-2 if len(words) > 4 else -1]  # the gaps, at the end, are left out last
        chat = view.texts.group_name(lane.request.group)
        title = f"Timeline of r{lane.id}" + (f" · {chat}" if chat else "")
        chosen = self._chosen()
        if chosen is None or self._found is None:
            gone = figures.gaps is None
            why = "its tokens are no longer kept" if gone else "no gap yet: a gap needs two tokens"
            rows.append(Row(why).done(width))
            return Picture([*rows, *late][:height], title=title)
        gap = self._found.gap(chosen + 1)
        longest = int(self._gaps.argmax())
        before = lane.earlier.stats.longest if lane.earlier is not None else None
        foot = [*late, *wrapped(gap_words(view, lane, gap), "bold ink", width)]
        if before is not None and before.ms > self._gaps[longest]:
            longer = f"an older gap was longer: {ms(before.ms)} ms before token {before.token:,}, not in the chart"
            foot += wrapped(longer, "dim", width)
        if len(self._found) - 1 < figures.gaps.count:  # type: ignore[union-attr]
            kept = f"the chart begins at token {int(self._found.last[0]):,}: older tokens are not kept"
            foot += wrapped(kept, "dim", width)
        room = height - len(rows) - len(foot)
        if room >= LEAST:
            rows += self._chart(view, lane, width, room, chosen, longest)
        rows += foot
        steps = f"1 column = the longest of {self.per_column} gaps" if self.per_column > 1 else "1 column = 1 gap"
        note: list[Run] = [(steps, "ink"), *self.own_key("← → ↑ ↓ choose · enter jump · esc back")]
        if sum(len(text) for text, _ in note) + len(title) > width - 8:
            note = [(f"1 column = {self.per_column}", "ink"), *self.own_key("enter jump · esc back")]
        brief = f"Timeline of r{lane.id}"
        return Picture(rows[:height], title=title, brief=brief, note=note, legend=self._legend())

    @staticmethod
    def _legend() -> list[Run]:
        g = glyphs()
        return legend(
            (g.busy, "decode", "decode"), (g.busy, "prefill", "with prompts"), (g.busy, "draft", "drafts"),
            (g.busy, "bad", "computed again"),
        )

    def _chosen(self) -> int | None:
        """Returns the index of the chosen gap; None if there is no gap."""
        if self._found is None or not len(self._gaps):
            return None
        if self.token is not None:
            at = int(np.searchsorted(self._found.first[1:], self.token))
            if at < len(self._gaps):
                return at
        return int(self._gaps.argmax())

    def _chart(self, view: View, lane: Lane, width: int, height: int, chosen: int, longest: int) -> list[Runs]:
        """Returns a row of marks, the bars, and a row of token numbers."""
        columns = max(1, width - LABEL)
        k = self.per_column = max(1, math.ceil(len(self._gaps) / columns))
        begins = np.arange(0, len(self._gaps), k)
        highest = np.maximum.reduceat(self._gaps, begins)
        places = [int(begin + self._gaps[begin : begin + k].argmax()) for begin in begins]
        styles = [self._style(view, lane, place + 1) for place in places]
        scale = scale_of(self._gaps)
        unit = "ms, log" if scale.low else "ms"
        marks = Row(unit.rjust(LABEL - 2), "dim").to(LABEL + longest // k).add(glyphs().unfolded, "bold bad")
        drawn = bars(highest, styles, scale, height - 2, width, ms, cursor=chosen // k)
        rows: list[Runs] = [marks.done(width), *drawn]
        return [*rows, self._axis(width, len(begins), chosen)]

    def _style(self, view: View, lane: Lane, arrival: int) -> str:
        assert self._found is not None
        step = int(self._found.steps[arrival])
        requests = {request for request, *_ in view.history.steps.chunks(step)} if step in view.history.steps else set()
        if lane.id in requests:
            return "bad"
        if requests:
            return "prefill"
        return "draft" if self._found.last[arrival] > self._found.first[arrival] else "decode"

    def _axis(self, width: int, columns: int, chosen: int) -> Runs:
        """Returns the numbers of the first, the chosen and the last token, below their columns."""
        assert self._found is not None
        first, last = f"{int(self._found.first[1]):,}", f"{int(self._found.last[-1]):,}"
        here = f"{glyphs().peak}{int(self._found.first[chosen + 1]):,}"
        row = Row("token", "dim").to(LABEL).add(first, "dim")
        at, end = LABEL + chosen // self.per_column, LABEL + columns
        if at + len(here) > width:
            at = width - len(here)
        if at <= row.width:
            row = Row("token", "dim").to(at).add(here, "bold accent")
        else:
            row.to(at).add(here, "bold accent")
        if row.width + len(last) + 1 <= end:
            row.right(last, end, "dim")
        return row.done(width)

    # ---- keys and the mouse

    def clicked(self, view: View, column: int, row: int) -> None:
        if self._found is not None and column >= LABEL:
            begin = (column - LABEL) * self.per_column
            part = self._gaps[begin : begin + self.per_column]
            if len(part):
                self._choose(begin + int(part.argmax()))

    def _choose(self, gap: int) -> None:
        assert self._found is not None
        self.token = int(self._found.first[max(0, min(len(self._gaps) - 1, gap)) + 1])

    def action_move(self, by: int) -> None:
        """Choose the longest gap of another column."""
        chosen = self._chosen()
        if chosen is not None:
            k = self.per_column
            begin = max(0, min((len(self._gaps) - 1) // k, chosen // k + by)) * k
            self._choose(begin + int(self._gaps[begin : begin + k].argmax()))

    def action_rank(self, by: int) -> None:
        """Choose the next longer or shorter gap."""
        chosen = self._chosen()
        if chosen is not None:
            order = np.argsort(-self._gaps, kind="stable")
            at = int(np.flatnonzero(order == chosen)[0])
            self._choose(int(order[max(0, min(len(order) - 1, at + by))]))

    def action_longest(self) -> None:
        self.token = None

    def action_jump(self) -> None:
        chosen = self._chosen()
        if chosen is not None and self._found is not None and self.request is not None:
            self.view.select("request", self.request)
            self.post_message(JumpRequested(int(self._found.steps[chosen + 1])))

    def action_close(self) -> None:
        self.post_message(TimelineClosed())
