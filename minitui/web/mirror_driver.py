"""The driver of a mirrored application: Textual's web driver, which can also send the whole screen.

The environment variable TEXTUAL_DRIVER selects this driver, and minitui/web/mirror.py reads its output. Textual's own
packets are D (output) and M (metadata). This driver adds K (the whole screen, on request), C (text for the presenter's
clipboard) and S (JSON: what the phones of a class show).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from textual._compositor import CompositorUpdate
from textual.drivers.web_driver import WebDriver
from textual.message import Message

CLIPBOARD = "\x1b]52;"
TO_APPLICATION = ("link", "counts", "class")  # types of messages that are passed on to the application


@dataclass
class FromPage(Message):
    """A message of the process that serves the pages. `payload["type"]` is one of TO_APPLICATION."""

    payload: dict[str, Any]


class MirrorDriver(WebDriver):
    """A web driver that can send the whole screen."""

    def write(self, data: str) -> None:
        if data.startswith(CLIPBOARD):
            self._packet(b"C", data)
        else:
            super().write(data)

    def on_meta(self, packet_type: str, payload: dict[str, object]) -> None:
        if packet_type == "keyframe":
            self._app.call_later(self.keyframe)
        elif packet_type in TO_APPLICATION:
            self._app.post_message(FromPage(dict(payload)))
        else:
            super().on_meta(packet_type, payload)

    def publish(self, state: dict[str, Any]) -> None:
        """Send what the phones of a class show."""
        self._packet(b"S", json.dumps(state))

    def keyframe(self) -> None:
        """Send the whole screen. Later output updates this screen."""
        self._packet(b"K", self.whole_screen())

    def whole_screen(self) -> str:
        """Returns the output that draws the whole screen. Pending updates stay pending."""
        app = self._app
        compositor = app.screen._compositor
        dirty = set(compositor._dirty_regions)
        update = compositor.render_update(full=True, screen_stack=app._background_screens)
        compositor._dirty_regions |= dirty
        assert isinstance(update, CompositorUpdate), "a full update is always a CompositorUpdate"
        # The background also fills the rest of a larger terminal.
        ground = ";".join(map(str, app.screen_stack[0].background_colors[1].rgb))
        return f"\x1b[0;48;2;{ground}m\x1b[2J\x1b[0m{update.render_segments(app.console)}"

    def _packet(self, kind: bytes, text: str) -> None:
        data = text.encode()
        self._write(b"%s%s%s" % (kind, len(data).to_bytes(4, "big"), data))
