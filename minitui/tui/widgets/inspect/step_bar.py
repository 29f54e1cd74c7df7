"""Step bar: what does a step compute? The bar is the token budget: decodes, prefill chunks, and the unused rest.

While the engine runs, the bar shows the mean of the steps since the last frame, and a mark shows the largest number of
tokens in one of these steps. The bar shows a single step if the engine is paused, if the panels show the past, if a
step is selected, or if there was only one step since the last frame (slow motion). Where steps overlap, the next step
has been planned when a step ends: a note says that the other panels show the requests and blocks after this plan.
"""

from __future__ import annotations

from textual.geometry import Size

from minitui.text import count, ms
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Runs, cells, fitting, legend, named
from minitui.viewmodel.explain.timing import USUAL, took_words, why_briefly, why_slow
from minitui.viewmodel.history.steps import StepRow
from minitui.viewmodel.view import View


def cause_within(view: View, row: StepRow, width: int) -> str:
    """Returns the longest text of at most `width` cells about why the step took its time: all causes with their steps,
    all without them, or the largest ones and dots. Empty if none fits."""
    model = view.models.of(row.step)
    whole = view.texts.labelled(why_slow(row, model))
    if len(whole) <= width:
        return whole
    whole = view.texts.labelled(why_briefly(row, model))
    brief = without_usual(whole).split(", ")  # the largest part first
    parts = [", ".join([*brief[:n], glyphs().dots]) for n in range(len(brief) - 1, 0, -1)]
    return next((text for text in (whole, ", ".join(brief), *parts) if text and len(text) <= width), "")


def without_usual(why: str) -> str:
    """Returns the text of `why_briefly` without its last part, if that is the usual time."""
    return why.rpartition(f", {USUAL}")[0] or why


def contents(view: View, row: StepRow, most: int = 4) -> str:
    """Returns what a step computes: "61 decodes + r88 prefill 512 + r89 prefill 40". It lists at most `most` chunks."""
    parts = []
    if row.decodes:
        parts.append(count(row.decodes, "decode"))
    if row.drafted:
        parts.append(count(row.drafted, "draft") + (f" ({row.accepted} accepted)" if row.end_seq else ""))
    parts += [f"{view.texts.request(chunk[0])} prefill {chunk[2]:,}" for chunk in row.chunks[:most]]
    if len(row.chunks) > most:
        parts.append(count(len(row.chunks) - most, "more chunk" if most else "chunk"))
    return " + ".join(parts)


class StepBar(LinePanel, can_focus=False):
    """Shows the bar with a line of text: in a frame, or in one or two lines without a frame."""

    TITLE = "Step"
    NEEDS_STATE = True
    DEFAULT_CSS = "StepBar { height: auto; }"

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return 2 if self.frame == "none" else 4

    def picture(self, view: View, width: int, height: int) -> Picture:
        budget = max(1, view.moment.shown.state.budget)
        row = view.shown_step()
        if view.moment.idle and row is None:
            row = view.history.steps.get(view.moment.horizon)
        if row is not None:
            text, bar, title = self._exact(view, row, width, budget), _bar(row, width, budget, view), "Step"
        elif view.last_frame.count:
            text, bar, title = self._mean(view, width), _mean_bar(view, width, budget), "Steps"
        else:
            last = view.moment.shown.state.step
            words = f"no step since step {last:,}: here the history begins" if last >= 0 else "no step to show yet"
            text = Row(words, "dim").done(width)
            bar = Row(glyphs().unused * width, "faint").done(width)
            title = "Step"
        full, unused = glyphs().active, glyphs().unused
        entries = [(full, "decode", "decode"), (glyphs().prefill, "prefill", "prefill")]
        entries.append((unused, "faint", "unused budget"))
        if row.drafted if row is not None else view.last_frame.drafted:
            entries += [(full, "draft", "accepted"), (full, "waiting", "rejected drafts")]
        rows = [bar] if height == 1 else [text, bar]
        note = [(text, "dim") for text in _ahead(view, row)[:1]]
        return Picture(rows, title=title, note=note, legend=legend(*entries, gap=" "))

    def _exact(self, view: View, row: StepRow, width: int, budget: int) -> Runs:
        line = Row()
        if view.moment.idle and row.step == view.moment.horizon:
            line.add("idle", "bold ink").add(" · last: ", "dim")
        line.add(f"step {row.step:,}", "bold ink").add("  ")
        line.add(f"{row.tokens:,}", "bold ink")
        text, of = contents(view, row), f" of {budget:,} tokens  "
        took = "" if row.took_ms is None else f"  {took_words(row)}"
        if line.width + len(of) + len(text) + len(took) > width:  # leave words out, so that no figure is cut off
            of, took = f" of {budget:,}  ", "" if row.took_ms is None else f"  {ms(row.took_ms)} ms"
            texts = [contents(view, row, most) for most in range(4, -1, -1)]
            room = width - line.width - len(of)
            timed = texts[:-1] if len(row.chunks) == 1 else texts  # the tokens of a single chunk before the time
            fitting = [text for text in timed if len(text) + len(took) <= room]
            text = next(iter(fitting or [text for text in texts if len(text) <= room]), texts[-1])
        line.add(of, "dim").extend(named(view, text))
        if took and line.width + len(took) <= width:
            line.add(took, "bold ink")
            _add_cause(line, view, row, width)
        for text in _ahead(view, row) if self.frame == "none" else ():
            if line.width + len(text) + 2 <= width:
                line.to(width - len(text)).add(text, "dim")
                break
        return line.done(width)

    def _mean(self, view: View, width: int) -> Runs:
        frame = view.last_frame
        line = Row(f"mean of {frame.count} steps", "bold ink").add("  ")
        line.add(f"{frame.tokens:,.0f}", "bold ink").add(f" of {view.moment.shown.state.budget:,} tokens", "dim")
        last = view.history.steps.get(frame.last)
        if last is not None:
            last_step = f"  last: step {last.step:,}"
            texts = [f"{last_step} = {contents(view, last, most)}" for most in range(4, -1, -1)]
            line.extend(named(view, fitting(width - line.width, *texts, last_step, "")))
            took = "" if last.took_ms is None else f" in {ms(last.took_ms)} ms"
            if took and line.width + len(took) <= width:
                line.add(took)
                _add_cause(line, view, last, width)
        return line.done(width)


def _ahead(view: View, row: StepRow | None) -> tuple[str, ...]:
    """Returns that the other panels show a later plan than that of `row`, the longest text first; empty if not."""
    ahead = view.moment.planned_ahead
    if ahead is None or row is None or row.step != view.moment.horizon:
        return ()
    steps = count(ahead - row.step, "step")
    return f"panels are {steps} ahead: with the plan of step {ahead:,}", f"panels are {steps} ahead"


def _add_cause(line: Row, view: View, row: StepRow, width: int) -> None:
    """Add the expected time and the causes of a longer time, or a shorter text if the whole one does not fit."""
    text = cause_within(view, row, width - line.width - 3)
    if text:
        line.extend(named(view, f" ({text})", "dim"))


def _bar(row: StepRow, width: int, budget: int, view: View) -> Runs:
    slices: list[tuple[float, list[str], str]] = []
    if row.decodes:
        slices.append((row.decodes, [f"D{glyphs().times}{row.decodes}"], "decode"))
    slices += _drafts(row.drafted, row.accepted)
    lit = view.links.requests
    for i, (request, _start, n, _samples) in enumerate(row.chunks):
        style = ("prefill", "prefill-2")[i % 2]
        labels = [f"{view.texts.request(request)} +{n}", f"r{request} +{n}", f"+{n}", ""]
        slices.append((n, labels, f"underline {style}" if request in lit else style))
    return _slices(slices, row.tokens, width, budget)


def _drafts(drafted: float, accepted: float) -> list[tuple[float, list[str], str]]:
    """Returns the slices of accepted and of rejected drafts."""
    rejected = drafted - accepted
    slices = [
        (accepted, [f"+{accepted:.0f} accepted", f"+{accepted:.0f}", ""], "draft"),
        (rejected, [f"{rejected:.0f} rejected", f"{rejected:.0f}", ""], "waiting"),
    ]
    return [part for part in slices if part[0] > 0]


def _mean_bar(view: View, width: int, budget: int) -> Runs:
    frame = view.last_frame
    slices: list[tuple[float, list[str], str]] = []
    if frame.decodes:
        slices.append((frame.decodes, [f"D{glyphs().times}{frame.decodes:.0f}"], "decode"))
    slices += _drafts(frame.drafted, frame.accepted)
    if frame.prefill_tokens:
        words = f"prefill {frame.prefill_tokens:,.0f}"
        slices.append((frame.prefill_tokens, [f"{words} in {frame.chunks:.1f} chunks", words, ""], "prefill"))
    row = _slices(slices, frame.tokens, width, budget)
    peak = f"{glyphs().peak} peak {frame.peak_tokens:,}"
    used = sum(cells(text) for text, style in row if style != "faint")
    at = min(width - 1, max(used, round(frame.peak_tokens / budget * width) - 1))
    if frame.peak_tokens <= frame.tokens or at + len(peak) + 2 > width:
        return row
    line = Row().extend([run for run in row if run[1] != "faint"])
    line.to(at, glyphs().unused, "faint").add(peak, "accent").add(" ").to(width, glyphs().unused, "faint")
    return line.done(width)


def _slices(slices: list[tuple[float, list[str], str]], tokens: float, width: int, budget: int) -> Runs:
    """Returns the bar. A slice is (tokens, labels, style); its longest label that fits is shown. The width of a slice
    is in proportion to its tokens, but at least one cell. The slice of the decodes is widened to fit its label."""
    scale = width / max(budget, tokens)
    widths = [max(1, round(n * scale)) for n, _, _ in slices]
    if slices and slices[0][2] == "decode":
        widths[0] = max(widths[0], len(slices[0][1][0]) + 2)
    while sum(widths) > width and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    line = Row()
    for (_n, labels, style), room in zip(slices, widths, strict=True):
        label = next((text for text in labels if len(text) <= room), "")
        modifier, colour = style.rpartition(" ")[::2]
        labelled = f"bold {modifier} on-fill on {colour}".replace("  ", " ")
        if not colour.startswith("prefill"):
            line.add(label.center(room), labelled)
            continue
        label = label if len(label) == room else f" {label} "[:room] if label else ""
        left = (room - len(label)) // 2
        line.add(glyphs().prefill * left, style).add(label, labelled)
        line.add(glyphs().prefill * (room - left - len(label)), style)
    return line.to(width, glyphs().unused, "faint").done(width)
