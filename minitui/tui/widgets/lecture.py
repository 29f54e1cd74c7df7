"""The panels of the lecture: why a step did what it did, and how long recent requests waited for their first token."""

from __future__ import annotations

from minitui.teaching.prediction import LETTERS
from minitui.text import ms
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Run, Runs, clean, clip, legend, named, named_rows, plain, wrapped
from minitui.viewmodel.explain.predict import Question
from minitui.viewmodel.view import View
from minitui.viewmodel.words.narrate import narrate, notable

PARTS = (("queue", "queued", "waiting"), ("prefill", "prefill", "prefill"))  # (word, name of the glyph, style)


class FirstTokens(LinePanel, can_focus=False):
    """One bar per request, the newest at the top; its parts are the times in the queue and in prefill."""

    TITLE = "First token, ms"
    NEEDS_STATE = True

    def picture(self, view: View, width: int, height: int) -> Picture:
        items = view.history.first_tokens.until(view.moment.shown.state.seq)[-height:][::-1]
        if not items:
            return Picture([Row("no request has a first token yet", "dim").done(width)])
        longest = max(item.total_ms for item in items) or 1.0
        name = max(len(view.texts.request(item.request)) for item in items) + 1
        rows: list[Runs] = []
        for item in items:
            lane = view.history.lanes.lanes.get(item.request)
            request = lane.request if lane is not None else None
            cached = f"{request.cached_tokens:,} of {request.prompt_tokens:,} cached" if request is not None else ""
            room = max(6, width - name - 8 - 22)
            row = Row().extend(named(view, view.texts.request(item.request))).to(name)
            for value, (_, glyph, style) in zip((item.queue_ms, item.prefill_ms), PARTS, strict=True):
                cells = round(value / longest * room)
                row.add(getattr(glyphs(), glyph) * min(cells, name + room - row.width), style)
            row.to(name + room).right(ms(item.total_ms), name + room + 7, "bold ink")
            if width - row.width > len(cached):
                row.add(" ").add(cached, "hit" if request is not None and request.cached_tokens else "dim")
            rows.append(row.done(width))
        parts = ((getattr(glyphs(), glyph), style, word) for word, glyph, style in PARTS)
        return Picture(rows, legend=legend(*parts, gap=" "))


LOOK_BACK = 400  # number of steps in which to search for the last step that did more than decode


class Why(LinePanel, can_focus=False):
    """If the picture is paused or in the past, explains the step on screen. While the engine runs, explains the last
    step that did more than decode. A `question` replaces the explanation until its answer is shown."""

    TITLE = "Why"
    NEEDS_STATE = True

    question: Question | None = None
    predicting = False  # True: ask a question before each step
    verdict = (-1, "")  # the step that was predicted last, and whether the prediction was right
    _last = (-1, "")  # while the engine runs: the step explained last, and the explanation

    def picture(self, view: View, width: int, height: int) -> Picture:
        if self.question is not None:
            return self._ask(view, self.question, width)
        step, text, note = self._sentence(view)
        if not text:
            text = "No step so far. This panel will explain what each step does and why."
            return Picture(wrapped(text, "dim", width), title="Why")
        rows = named_rows(view, text, "bold ink", width)
        if len(rows) > height > 0:
            rows[height - 1 :] = [Row(clip(plain(rows[height - 1]) + glyphs().dots, width), "bold ink").done(width)]
        return Picture(rows, title=f"Why · step {step:,}", note=note, legend=self._keys(view))

    def _keys(self, view: View) -> list[Run]:
        if view.moment.exact:
            keys = [run for key, what in (("n", " next  "), (",", " back  ")) for run in ((key, "ink"), (what, "dim"))]
            predict = (" predict is on", "accent") if self.predicting else (" predict first", "dim")
            return [*keys, ("d", "ink"), predict]
        return [("p", "ink"), (" pause between two steps", "dim")]

    def _sentence(self, view: View) -> tuple[int, str, list[Run]]:
        if view.moment.exact:
            note: list[Run] = [(self.verdict[1], "accent")] if self.verdict[0] == view.moment.horizon else []
            return view.moment.horizon, narrate(view, view.moment.horizon), note
        last = self._last[0]
        for step in range(view.moment.horizon, max(last, view.moment.horizon - LOOK_BACK), -1):
            if notable(view, step):
                self._last = (step, narrate(view, step))
                break
        else:
            if last not in view.history.steps:
                self._last = (view.moment.horizon, narrate(view, view.moment.horizon))
        ago = view.moment.horizon - self._last[0]
        return *self._last, [(f"{ago:,} steps ago" if ago else "now", "dim")]

    def _ask(self, view: View, question: Question, width: int) -> Picture:
        rows = named_rows(view, question.text, "bold accent", width)
        choices = Row("  ")
        for letter, choice in zip(LETTERS, question.choices, strict=False):
            choice = view.texts.labelled(clean(choice))
            choices.add(f" {letter} ", "bold on-fill on accent").extend(named(view, f" {choice}   "))
        rows.append(choices.done(width))
        return Picture(rows, title="Predict", legend=[
            (" ".join(LETTERS[: len(question.choices)]), "ink"), (" answer  ", "dim"), ("n", "ink"), (" reveals", "dim")
        ])
