"""The card of the last cache hit: two bars on one scale, and how much faster its prefill was, in large digits."""

from __future__ import annotations

from engine.trace.views import RequestView
from minitui.text import count, ms
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.bars import Bar
from minitui.tui.widgets.base import Picture
from minitui.tui.widgets.rows import Row, Run, fitting, named
from minitui.viewmodel.explain.cut_hits import why_ended
from minitui.viewmodel.requests import Hit, last_hit
from minitui.viewmodel.view import View

ROWS = 3
LEAST_ROWS = 22  # of the screen
LEAST_BAR = 8  # cells
LEAST_S = 1.0  # a hit is shown for so long, also if there are more
# Each character has 5 rows of 3 dots: an octal digit is a row.
_DOTS = {
    "0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717", "6": "74757", "7": "71111",
    "8": "75757", "9": "75717", "×": "05250", "<": "12421", ".": "00001",
}
_HALVES = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}


def large(text: str) -> list[str]:
    """Returns `text`, digits and a few signs, in letters that are three rows high."""
    rows = []
    for upper in range(0, 6, 2):
        row = []
        for character in text:
            dots = [int(octal) for octal in _DOTS[character]] + [0]
            bits = (1,) if character == "." else (4, 2, 1)
            row.append("".join(_HALVES[bool(dots[upper] & bit), bool(dots[upper + 1] & bit)] for bit in bits))
        rows.append(" ".join(row))
    return rows


class HitCard(Bar):
    """Is hidden before the first hit; then it shows the last one. A click hides it until the next."""

    DEFAULT_CSS = f"HitCard {{ height: {ROWS}; display: none; }}"
    _hidden_for = -1  # the request whose card was clicked away
    _hit: Hit | None = None
    _since = 0.0  # when it was chosen

    _left_out = False
    _was_shown = False

    def leave_room(self, to_others: bool) -> None:
        """Hide the card while a maximised panel has the screen."""
        if to_others != self._left_out:
            self._was_shown, shown = bool(self.display), self._was_shown
            self.display = shown and not to_others
        self._left_out = to_others

    def paint(self, view: View) -> int:
        if self.app.size.height < LEAST_ROWS or self._left_out or not view.history.loaded:
            self._hit = None
        elif view.moment.still or self._hit is None or not 0 <= view.moment.now - self._since < LEAST_S:
            self._since, self._hit = view.moment.now, last_hit(view)
        return self.paint_if(self._hit is not None and self._hit.lane.id != self._hidden_for, view)

    def picture(self, view: View, width: int, height: int) -> Picture:
        assert self._hit is not None
        return Picture(rows(view, self._hit, width))

    def clicked(self, view: View, column: int, row: int) -> None:
        if self._hit is not None:
            self._hidden_for = self._hit.lane.id
            self.display = False


def rows(view: View, hit: Hit, width: int) -> list[tuple[Run, ...]]:
    """Returns the three rows of the card, each with `width` cells."""
    lane, request = hit.lane, hit.lane.request
    cached, computed = request.cached_tokens, request.prompt_tokens - request.cached_tokens
    gain, share = hit.times_faster, 100 * cached / max(1, request.prompt_tokens)
    if gain is not None:
        number, words = f"{gain:.1f}×" if gain < 99.5 else f"{gain:.0f}×", ("faster", "prefill", "")
    else:
        number, words = f"{share:.0f}" if share >= 1 else "<1", ("% of the", "prompt", "cached")
    bars = [bar for bar in (hit.source, lane) if bar is not None]
    most = max(bar.request.prompt_tokens for bar in bars)
    labels = [view.texts.request(bar.id) for bar in bars]
    times = [hit.source_ms, hit.prefill_ms][-len(bars) :]
    lead = max(map(len, labels)) + 1
    whole, none = list(zip(large(number), words, strict=True)), [("", "")] * ROWS
    bare = [(digit, "") for digit, _ in whole]
    phone = [(LEAST_BAR, None, whole), (LEAST_BAR, None, bare), (0, None, none)]
    for least, end, beside in (24, " computed", whole), (12, "", whole), *phone:
        texts = [_text(bar.request, time, end) for bar, time in zip(bars, times, strict=True)]
        right = len(beside[0][0]) + max(len(word) for _, word in beside) + 3
        room = width - lead - max(map(len, texts)) - right - 6
        if room >= least:  # the most that leaves room for the bars
            break
    room = max(1, room)
    lines = []
    for bar, label, text in zip(bars, labels, texts, strict=True):
        row = Row(" ").extend(named(view, label.ljust(lead), "bold ink"))
        cells = max(1, round(room * bar.request.prompt_tokens / most))
        reused = min(cells - 1, round(room * bar.request.cached_tokens / most))  # at least a token is computed
        row.add(glyphs().cached * reused, "on-fill on cached")
        row.add(glyphs().active * (cells - reused), "prefill").to(1 + lead + room + 1)
        lines.append(row.add(text, "bold ink" if bar is lane else "ink"))
    blocks = count(cached // max(1, view.moment.shown.state.block_size), "block")
    stop, at, detail = request.match
    why = why_ended(view.history, lane, stop, at, cached, detail)
    it, of = view.texts.request(lane.id), view.texts.request(lane.source)
    stories = [f"hit: {it} reused {blocks}{what} · {why}" for what in (f" of KV that {of} computed", f" of {of}")]
    stories += [f"hit: {it} reused {blocks} of {of}", f"hit: {blocks} reused"]
    if end is None:
        stories = [f"{cached:,} cached + {computed:,} computed", stories[-1]]
    lines.append(Row(" ").extend(named(view, fitting(width - right - 4, *stories), "ink")))
    lines = [Row()] * (ROWS - len(lines)) + lines
    return [
        line.to(width - right).add(digit, "bold hit").add(" " + word, "bold ink").done(width, "select")
        for line, (digit, word) in zip(lines, beside, strict=True)
    ]


def _text(request: RequestView, time: float | None, end: str | None) -> str:
    """Returns the tokens of a prompt and its time; `end` follows the computed tokens. None: only the time."""
    cached, computed = request.cached_tokens, request.prompt_tokens - request.cached_tokens
    took = f"{ms(time)} ms" if time is not None else "time unknown"
    if end is None:
        return took
    tokens = f"{cached:,} cached + {computed:,}{end}" if cached else f"{computed:,} computed"
    return f"{tokens}, {took}" if time is not None else tokens
