"""What the one mirrored application writes with: Textual's web driver, which can also tell the whole screen.

TEXTUAL_DRIVER names this class to the application's process; minitui/web/mirror.py is at the other end of its pipes.
Beside the packets of Textual (D, what is drawn, and M, about it) it sends K, the whole screen as it stands when it was
asked for, and C, what concerns the presenter's clipboard alone. """

from __future__ import annotations

from textual._compositor import CompositorUpdate
from textual.drivers.web_driver import WebDriver

CLIPBOARD = "\x1b]52;"


class MirrorDriver(WebDriver):
    """Its size is fixed: that of COLUMNS and ROWS."""

    def write(self, data: str) -> None:
        if data.startswith(CLIPBOARD):
            self._packet(b"C", data)
        else:
            super().write(data)

    def on_meta(self, packet_type: str, payload: dict[str, object]) -> None:
        if packet_type == "keyframe":
            self._app.call_later(self.keyframe)
        elif packet_type != "resize":
            super().on_meta(packet_type, payload)

    def keyframe(self) -> None:
        """Send the whole screen. What is drawn afterwards goes on from there."""
        self._packet(b"K", self.whole_screen())

    def whole_screen(self) -> str:
        """What draws the screen as it stands. Nothing of what is still to be drawn is taken for drawn."""
        app = self._app
        compositor = app.screen._compositor
        dirty = set(compositor._dirty_regions)
        update = compositor.render_update(full=True, screen_stack=app._background_screens)
        compositor._dirty_regions |= dirty
        assert isinstance(update, CompositorUpdate), "a full update is always one"
        ground = ";".join(map(str, app.screen_stack[0].background_colors[1].rgb))  # for a terminal that is larger
        return f"\x1b[0;48;2;{ground}m\x1b[2J\x1b[0m{update.render_segments(app.console)}"

    def _packet(self, kind: bytes, text: str) -> None:
        data = text.encode()
        self._write(b"%s%s%s" % (kind, len(data).to_bytes(4, "big"), data))
