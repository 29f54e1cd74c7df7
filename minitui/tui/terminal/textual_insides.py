"""What minitui changes in Textual, and what it uses of Textual beyond the documented interface: all of it is here.

It was written for the Textual of TEXTUAL. tests/tui/terminal/test_textual_insides.py has a digest of each piece of
Textual that this file, guard.py and web/mirror_driver.py replace or rely on, and fails when one of them changes.

Lines    Textual divides, crops and pads every line, and each Strip caches the results. If nothing is cut off, the
         result is the strip itself. Such a strip refers to itself, so only a full garbage collection frees it. Full
         collections are rare here, because each causes a visible pause. So the process would grow by megabytes per
         minute. Rich caches the last 16,384 segments that it cut.
Keys     The event loop handles a key in several turns. Between two of them, it runs whatever else is due. What is noted
         in the thread that reads the terminal is known to all of this work at once.
         Textual passes a key from widget to widget, and each of these has its own queue. A binding takes effect at the
         end of this path. So of two keys in one packet, the second could be handled before the binding of the first:
         tab and enter sent the text as it was before the completion. KeyOrder lets a key wait until the key before it
         has reached the end.
Updates  For an update, Textual asks every widget in the rectangle around all changes for its lines, cuts each line at
         every edge of a widget, and writes a line from the left edge of the changed widget. Several panels change in
         each frame, so this rectangle is most of the screen. RowUpdates takes only the changed cells, from the panel in
         front.
Sizes    Textual 8 lays a screen out with the size in a Resize message, and each change of size posts a new Resize
         message. Two messages with different sizes can cause each other for ever: then a CPU core is busy and no key is
         read. SizedScreen has the size of the application.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual import events, screen
from textual._compositor import Compositor, CompositorUpdate
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.driver import Driver
from textual.drivers.web_driver import WebDriver
from textual.geometry import Region, Size
from textual.message import Message
from textual.message_pump import MessagePump
from textual.notifications import SeverityLevel
from textual.strip import Strip
from textual.widget import Widget

from minitui.tui.widgets.rows import cells
from minitui.visible import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

TEXTUAL = "8.2"
Result = TypeVar("Result")
MAX_NOTICE = 400  # characters of a notice
NOTICE_S = 2.0
ESC = "\x1b"
ROUNDS = 2  # a key may post a message, which takes the same path: the second round comes after this message
LOST_S = 0.1  # a key whose path has ended (its screen was closed) delays the next keys by this time at most
_key_events = XTermParser._sequence_to_key_events
_divide, _crop_extend, _adjust = Strip.divide, Strip.crop_extend, Strip.adjust_cell_length
_split_cells = Segment._split_cells.__wrapped__  # without the cache


def _divide_acyclic(self: Strip, cuts: Iterable[int]) -> Sequence[Strip]:
    cuts = [cut for cut in cuts if cut <= self.cell_length]
    return [self] if cuts == [self.cell_length] else _divide(self, cuts)


def _crop_extend_acyclic(self: Strip, start: int, end: int, style: Style | None) -> Strip:
    return self if start == 0 and end == self.cell_length else _crop_extend(self, start, end, style)


def _adjust_acyclic(self: Strip, cell_length: int, style: Style | None = None) -> Strip:
    return self if cell_length == self.cell_length else _adjust(self, cell_length, style)


def change_textual() -> None:
    """Replace caching methods of Strip and Segment by methods with the same results. Let Textual write a changed screen
    up to 120 times a second: usually it writes up to 60 times, and a key whose effect just missed one of these times
    waited up to 33 ms; nothing is written while nothing changes. Let it read an escape and a letter or digit in one
    packet as AltEscape and a key, not as "™"."""
    screen.UPDATE_PERIOD = 1 / 120  # type: ignore[misc]
    XTermParser._sequence_to_key_events = _escape_and_key  # type: ignore[method-assign]
    setattr(Segment, "_split_cells", classmethod(_split_cells))  # noqa: B010  (mypy allows no assignment here)
    Strip.divide, Strip.crop_extend, Strip.adjust_cell_length = (  # type: ignore[method-assign]
        _divide_acyclic, _crop_extend_acyclic, _adjust_acyclic,
    )


class KeyDone(Message):
    """Follows a key on its path, from the widget with the focus up to the application."""

    def __init__(self, target: MessagePump, rounds: int = ROUNDS) -> None:
        super().__init__()
        self.target, self.rounds = target, rounds


class KeyOrder:
    """Tells when the next key can be handled."""

    def __init__(self) -> None:
        self.waiting: deque[events.Event] = deque()  # keys and pasted texts
        self.open: KeyDone | None = None  # follows the key that is being handled
        self.number = 0  # of this key
        self.limited = 0  # the last key for which others wait LOST_S at most

    @property
    def pending(self) -> bool:
        """True until the key has taken effect, or its widget is gone."""
        return self.open is not None and self.open.target.is_attached

    def follow(self, target: MessagePump) -> None:
        """Begin to follow a key that was passed to `target`."""
        self.number += 1
        self._send(KeyDone(target))

    def came(self, done: KeyDone) -> None:
        """Note that `done` has reached the application. If `open` is then None, the next key can be handled."""
        if done is self.open:
            self.open = None
            if done.rounds > 1:
                self._send(KeyDone(done.target, done.rounds - 1))

    def _send(self, done: KeyDone) -> None:
        self.open = done if done.target.post_message(done) else None


class AltEscape(events.Key):
    """The escape that a terminal sends before a key if alt is held, or if a program sends both at once."""


def _escape_and_key(self: XTermParser, sequence: str, alt: bool = False) -> Iterable[events.Key]:
    if len(sequence) == 2 and sequence[0] == ESC and sequence[1].isdigit():
        alt, sequence = True, sequence[1]
    if alt and sequence not in "[O":  # these begin the sequences of other keys
        yield AltEscape("escape", ESC)
        alt = False
    yield from _key_events(self, sequence, alt)


def noting_keys(driver: type[Driver], note: Callable[[], None]) -> type[Driver]:
    """Returns a driver that calls `note` for each key, in the thread that reads the terminal."""

    class NotingKeys(driver):  # type: ignore[valid-type, misc]
        def send_message(self, message: Message) -> None:
            if isinstance(message, events.Key):
                note()
            super().send_message(message)

    return NotingKeys


def write_to_page(driver: Driver | None, message: dict[str, object]) -> None:
    """Send a message to the process that serves the page of a browser; without a browser, do nothing."""
    if isinstance(driver, WebDriver):
        driver.write_meta(message)


class CellWidget(Widget):
    """A widget that draws whole lines itself (`render_line`), and says which of their cells have changed."""

    def refresh_cells(self, regions: list[Region]) -> None:
        """Let the screen draw these regions. `refresh` does the same, but it first sends a message to this panel and
        then one to the screen; for 60 panels a second, this takes a fiftieth of a core."""
        if not self.is_mounted or self.styles.gutter:
            self.refresh(*regions)
            return
        self._repaint_regions.update(regions)
        self.screen._dirty_widgets.add(self)
        self.screen.check_idle()

    def forget_dirty(self) -> None:
        """Forget which cells are dirty: they are being drawn. Otherwise they would grow without end."""
        self._dirty_regions.clear()


Front = tuple[int, int, CellWidget | None, Region]  # columns from, to; in front (None: no panel); region
Part = tuple[int, int, list[Segment]]  # column and row of the first cell; what to write there


class RowUpdate(CompositorUpdate):
    """Parts of lines."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts

    def render_segments(self, console: Console) -> str:
        """Returns the parts as text for the terminal."""
        colours = console._color_system or ColorSystem.TRUECOLOR
        render = Strip.render_style
        out: list[str] = []
        for x, y, segments in self.parts:
            out.append(f"\x1b[{y + 1};{x + 1}H")
            out += [render(style, text, colours) if style else text for text, style, _ in segments]
        return "".join(out)


class RowUpdates:
    """Makes the updates of one screen."""

    def __init__(self) -> None:
        self._cuts: list[list[int]] = []  # the layout of `_fronts`: Textual makes a new list for each layout
        self._fronts: dict[int, list[Front]] = {}  # by line of the screen

    def update(self, compositor: Compositor) -> RowUpdate | None:
        """Returns the update for all dirty regions, and clears them; None if a widget that is no panel is dirty."""
        regions = compositor._dirty_regions
        if not regions or compositor.size.region in regions:
            return None
        if compositor.cuts is not self._cuts:
            self._cuts, self._fronts = compositor.cuts, {}
        parts: list[Part] = []
        for y, left, right in compositor._regions_to_spans(regions):
            for start, end, panel, region in self._line(compositor, y):
                if start >= right or end <= left:
                    continue
                if panel is None:
                    return None
                panel.forget_dirty()
                first, last = max(start, left), min(end, right)
                parts.append((first, y, _crop(panel.render_line(y - region.y), first - region.x, last - region.x)))
        regions.clear()
        return RowUpdate(parts)

    def _line(self, compositor: Compositor, y: int) -> list[Front]:
        """Returns what is in front on a line of the screen, from left to right."""
        fronts = self._fronts.get(y)
        if fronts is None:
            fronts = self._fronts[y] = []
            for start, end in zip(self._cuts[y], self._cuts[y][1:], strict=False):
                for widget, cropped, region in compositor.layers_visible[y]:
                    if cropped.x <= start < cropped.right:
                        panel = widget if isinstance(widget, CellWidget) and not widget.styles.gutter else None
                        fronts.append((start, end, panel, region))
                        break
        return fronts


def _crop(strip: Strip, first: int, last: int) -> list[Segment]:
    """Returns the cells from `first` to `last` of a line. Changes begin and end between two segments almost always, and
    then this is faster than `Strip.crop`, which divides a segment at both ends and keeps the result."""
    segments, column, begin = strip._segments, 0, -1
    for at, segment in enumerate(segments):
        if column == first and begin < 0:
            begin = at
        if column >= last:
            break
        column += cells(segment.text)
    else:
        at = len(segments)
    return segments[begin:at] if begin >= 0 and column == last else strip.crop(first, last)._segments


class SizedScreen(screen.Screen[Result]):
    """A screen whose layout has the size of the application, and which writes only the changed cells of panels."""

    def __init__(self, name: str | None = None, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(name, id, classes)
        self._row_updates = RowUpdates()

    def _screen_resized(self, size: Size) -> None:
        super()._screen_resized(self.app.size)

    def _compositor_refresh(self) -> None:
        """Write what has changed; if this is in panels only, write just the changed cells."""
        app = self.app
        update = self._row_updates.update(self._compositor) if self is app.screen and not app.is_inline else None
        if update is None:
            super()._compositor_refresh()
        else:
            app._display(self, cast("RenderableType", update))  # Textual calls `render_segments`
            self._dirty_widgets.clear()
            app._update_mouse_over(self)
        if isinstance(app, Notices):
            app.note_drawn()


class Notices(App[int]):
    """An application whose notices are plain text. One notice is shown at a time, besides errors: a stack of notices
    would cover the panels."""

    def note_drawn(self) -> None:
        """Called when the screen has been written."""

    def say(self, text: str, error: bool = False) -> None:
        """Show a sentence for a few seconds."""
        text = visible(text)
        if len(text) > MAX_NOTICE:
            text = text[:MAX_NOTICE] + "…"  # an error may quote a long text that was pasted in place of a name
        seconds = max(4 * NOTICE_S if error else NOTICE_S, len(text) / 25)  # enough time to read the text
        self.notify(text, severity="error" if error else "information", timeout=seconds, markup=False)

    def notify(
        self, message: str, *, title: str = "", severity: SeverityLevel = "information", timeout: float | None = None,
        markup: bool = False,
    ) -> None:
        """Show a notice, always without markup. It replaces one with the same text and, if it is no error, others
        that are no errors."""
        kinds = {severity} - {"error"}
        for notice in [one for one in self._notifications if one.message == message or one.severity in kinds]:
            self._unnotify(notice, refresh=False)
        super().notify(message, title=title, severity=severity, timeout=timeout, markup=False)
