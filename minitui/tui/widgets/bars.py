"""The bars of the screens: the top bar, the status bar, the strip of panels, and the progress of an engine that is
starting."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from textual import getters
from textual.geometry import Size
from textual.message import Message
from textual.widgets import TextArea

from engine.info import EngineInfo
from minitui.tui.apps.app_base import AppBase
from minitui.tui.glyphs import glyphs
from minitui.tui.screens.base import PHONE, BaseScreen, Hint
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Run, clip, fit, named
from minitui.viewmodel.view import View


class Bar(LinePanel, can_focus=False):
    """A bar. Its height is one line, unless its own CSS sets another height."""

    app = getters.app(AppBase)
    FRAME = "none"
    SHOWS_ITSELF = True
    DEFAULT_CSS = "Bar { height: 1; }"
    places: Sequence[tuple[int, int, Any]] = ()  # (first column, end, what is there) of what a click can choose

    def thing_at(self, column: int) -> Any:
        """Returns what a click on this column chooses; None if there is nothing."""
        return next((thing for first, end, thing in self.places if first <= column < end), None)

    def paint_if(self, wanted: bool, view: View) -> int:
        """Paint the bar, or hide it. Returns the number of changed rows."""
        if self.display != wanted:
            self.display = wanted
        return super().paint(view) if wanted else 0


class Loading(Bar):
    """Shows a text, a percentage and a bar while `app.progress` is set; hidden otherwise."""

    DEFAULT_CSS = "Loading { height: 3; padding: 1 2 0 2; }"

    def paint(self, view: View) -> int:
        return self.paint_if(self.app.progress is not None, view)

    def picture(self, view: View, width: int, height: int) -> Picture:
        progress = self.app.progress or {}
        done, total = progress.get("done") or 0, progress.get("total") or 0
        text = str(progress.get("text") or progress.get("stage") or self.app.source.missing)
        row = Row(fit(text, width - 6), "dim")
        if not total:
            return Picture([row.done(width)])
        share = min(max(done / total, 0.0), 1.0)
        filled = round(share * width)
        g = glyphs()
        bar = Row(g.active * filled, "running").add(g.rule * (width - filled), "faint")
        return Picture([row.right(f"{share:4.0%}", width, "bold ink").done(width), bar.done(width)])


MARKED = "bold on-fill on bad"
LEAST_NAMES = 4  # of panels in the strip beside long marks
FRESH_S = 60.0  # dropped records are shown as an alarm for so long


class StatusBar(Bar):
    """The last line of a screen. It shows the screen's keys, or the prompt's keys while the prompt has the focus. A
    click on a key presses it. It is as high as the notices that cover it, so that these cover no panel."""

    def paint(self, view: View) -> int:
        notices = (textwrap.wrap(notice.message, max(8, self.size.width - 4)) for notice in self.app._notifications)
        self.styles.height = max(1, sum(map(len, notices)))
        return super().paint(view)

    def picture(self, view: View, width: int, height: int) -> Picture:
        screen, feed = self.screen, self.app.feed
        assert isinstance(screen, BaseScreen)
        typing = isinstance(self.app.focused, TextArea)
        row = Row(" TYPING " if typing else " KEYS ", "bold on-fill on running" if typing else "bold on-fill on decode")
        figures = ""
        if screen.FIGURES or feed.backlog or feed.dropped:
            dot = glyphs().middot
            figures = f"{view.steps_per_frame:,.0f} steps/frame {dot} " if width >= 100 else ""
            if width >= 100 or feed.backlog:
                figures += f"backlog {feed.backlog:,} {dot} "
            figures += f"{feed.dropped:,} dropped{_ago(view.moment.dropped_s) if feed.dropped else ''} "
        room = width - len(figures) - (2 if figures else 1)
        past = bool(view.moment.travel_text) and view.moment.playback is None
        hints = self._typing_hints() if typing else [(self.app.key_of("now"), "now")] * past + screen.hints()
        hints = [*self.app.class_keys, *hints]
        self.places = places = []
        for key, what in hints:
            if row.width + len(key) + len(what) + 3 > room:
                break
            places.append((row.width + 2, row.width + len(key) + len(what) + 5, key))
            row.add("  " + key, "bold ink").add(" " + what, "dim")
        self.app.tell_page(hints)
        fresh = feed.dropped > 0 and view.moment.dropped_s < FRESH_S
        return Picture([row.right(figures, width, "bad" if fresh else "dim").done(width)])

    def clicked(self, view: View, column: int, row: int) -> None:
        if (key := self.thing_at(column)) is not None:
            self.app.press(key)

    def _typing_hints(self) -> list[Hint]:
        if self.app.focused is not None and self.app.focused.screen is not self.screen:  # in a dialog
            return [("enter", "accept"), ("esc", "cancel")]
        escape = [("esc", "keys")]
        if self.app.answer_waits:
            state = "engine paused" if self.app.gated else "answer waits"
            escape = [("esc", f"keys ({state})"), ("esc esc", "cancel")]
        elif self.app.session.busy:
            escape = [("esc", "cancel"), (self.app.key_of("keys"), "keys")]
        return [("enter", "send"), *escape, ("/", "commands"), ("tab", "complete"), ("ctrl+j", "new line")]


def _ago(seconds: float) -> str:
    """Returns how long ago records were dropped: " 12 s ago", " 3 min ago", " 2 h ago"."""
    if seconds < FRESH_S:
        return f" {seconds:.0f} s ago"
    return f" {seconds / 60:.0f} min ago" if seconds < 3600 else f" {seconds / 3600:.0f} h ago"


class TopBar(Bar):
    """A line with screens, model and flags; below it, the story of a demo or a recording."""

    DEFAULT_CSS = "TopBar { height: auto; }"
    marks: Mapping[str, Sequence[str]] = {}  # what there is to see in panels, as in PanelStrip

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return 1 + len(self._story(width))

    def _story(self, width: int) -> list[str]:
        lines = filter(str.strip, self.app.view.texts.labelled(self.app.told).split("\n"))
        hung = ((line, " " * 2 * (len(line) - len(line.lstrip()))) for line in lines)  # a choice: "   a) its text"
        most = max(20, width - 4)
        return [piece for line, hang in hung for piece in textwrap.wrap(line, most, subsequent_indent=hang)]

    def paint(self, view: View) -> int:
        if self.size.width and self.size.height != 1 + len(self._story(self.size.width)):
            self.refresh(layout=True)
        return super().paint(view)

    def picture(self, view: View, width: int, height: int) -> Picture:
        flags, full, current = self._flags(view), self.app.TABS, self.app.current_mode
        keys = [(mode, label if mode == current else label.split()[0]) for mode, label in full]
        for name, tabs in ((" minitui " if width >= PHONE else "", full), ("", full), ("", keys)):
            parts = (name, *(f" {label} " for _, label in tabs), *(text for text, _ in flags))
            if sum(map(len, parts)) < width:
                break
        row = Row(name, "bold ink")
        self.places = places = []
        for mode, label in tabs:
            places.append((row.width, row.width + len(label) + 2, mode))
            row.add(f" {label} ", "bold on-fill on ink" if current == mode else "dim")
        for marks in (*_marks(self.marks), {}):
            end = width - sum(len(text) for text, _ in flags) - 1 - sum(len(text) + 1 for text in marks.values())
            if (room := end - row.width - 1) >= 0:
                break
        about = describe_engine(self.app.source.info, room - 3)
        if len(about) + 3 <= room:
            row.add("   " + about, "dim")
        elif room > 12:
            row.add("   " + clip(about, room - 3), "dim")
        row.to(end)
        for name, text in marks.items():
            places.append((row.width, row.width + len(text), name))
            row.add(text, MARKED).add(" ")
        rows = [row.extend(flags).done(width)]
        for line in self._story(width):
            rows.append(Row("  ").extend(named(view, line, "bold ink")).done(width, "select"))
        return Picture(rows)

    def _flags(self, view: View) -> list[Run]:
        """Returns a flag for each reason why the picture does not show the present state of a running engine."""
        feed, condition = self.app.feed, self.app.condition
        flags: list[Run] = []
        if condition.hung:
            flags.append((" the engine does not answer: /restart ", "bold on-fill on bad"))
        elif condition.long:
            flags.append((f" {condition.long} ", "bold on-fill on running"))
        elif condition.preparing:
            flags.append((f" {condition.preparing} ", "dim"))
        if feed.source.connection:
            flags.append((" no connection: trying again ", "bold on-fill on bad"))
        if feed.frozen:
            flags.append((f" FROZEN {glyphs().middot} {feed.steps_behind:,} steps behind ", "bold on-fill on hit"))
        times = [view.moment.travel_text, view.moment.gate_text, view.moment.pace_text]
        if view.moment.playback is not None:  # the bar of the replay says which moment is shown
            times = [f"recorded: {text}" for text in times[1:] if text]
        for text in times:
            if text:
                flags.append((f" {text} ", "bold on-fill on running"))
        return flags

    def clicked(self, view: View, column: int, row: int) -> None:
        if row == 0 and (there := self.thing_at(column)) in self.marks:
            self.post_message(PanelChosen(there))
        elif row == 0 and there is not None:
            self.app.open_mode(there)


def describe_engine(info: EngineInfo, room: int) -> str:
    """Returns the model, the device and the pool in a few words; empty before they are known. If they do not fit into
    `room` cells, the weights are left out, then the device and the pool."""
    if not info:
        return ""
    dot = f" {glyphs().middot} "
    weights = info.dtype if info.quantization in ("", "none") else info.quantization
    known = [fact for fact in (info.model, info.device, weights) if fact]
    if info.num_blocks:  # only minitui's servers report the pool
        small = " in fp8" if info.kv_cache_dtype == "fp8" else ""
        null = " (1 null)" if info.engine.startswith("vLLM") else ""  # vLLM counts its null block
        known.append(f"{info.num_blocks:,} blocks of {info.block_size}{small}{null}")
    while len(known) > 1 and len(dot.join(known)) > room:
        del known[-2 if len(known) > 2 else -1]
    return dot.join(known)


def _marks(marks: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Returns the marks of panels, each time in fewer words."""
    return [{name: words[min(i, len(words) - 1)] for name, words in marks.items()} for i in range(3)]


@dataclass
class PanelChosen(Message):
    """A panel was clicked in the strip, or its mark in the top bar."""

    name: str


class PanelStrip(Bar):
    """On a small terminal, which shows one panel at a time: one word for each panel, the current one in brackets, and
    what there is to see in it. A click on a word shows its panel."""

    SHOWS_ITSELF = False
    names: tuple[str, ...] = ()
    current = ""
    # Of the panels that have something to see (a stall, an eviction): texts, the longest first.
    marks: Mapping[str, Sequence[str]] = {}

    def show(self, names: tuple[str, ...], current: str) -> None:
        """Show these panels."""
        self.names, self.current = names, current
        self.repaint()

    def picture(self, view: View, width: int, height: int) -> Picture:
        words = {name: "blocks" if name == "map" else name for name in self.names}
        for marks in _marks(self.marks):
            names, room = list(self.names), width
            while len(names) > 1 and sum(len(words[name]) + len(marks.get(name, "")) + 2 for name in names) > room:
                del names[0 if names[-1] == self.current else -1]  # the current panel is always named
                room = width - 3  # for the number of the others
            if len(names) >= LEAST_NAMES:
                break
        row = Row()
        self.places = places = []
        for name in names:
            start = row.width
            if name == self.current:
                row.add(f"[{words[name]}]", "bold accent")
            else:
                row.add(f" {words[name]} ", "dim")
            row.add(marks.get(name, ""), MARKED)
            places.append((start, row.width, name))
        if len(names) < len(self.names):
            row.add(f" +{len(self.names) - len(names)}", "dim")
        return Picture([row.done(width)])

    def clicked(self, view: View, column: int, row: int) -> None:
        if (name := self.thing_at(column)) is not None:
            self.post_message(PanelChosen(name))
