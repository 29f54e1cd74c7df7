"""Shows a status line on stderr, for example while a model loads."""

from __future__ import annotations

from typing import Any, TextIO

from minitui.visible import PlainStream, visible_line


class Status:
    """A status line, which each call overwrites. Nothing is written if the file is not a terminal."""

    def __init__(self, file: TextIO) -> None:
        # The unfiltered stream: our own escape sequences must reach the terminal.
        self._file = file.stream if isinstance(file, PlainStream) else file
        self._shown = False

    def __call__(self, progress: dict[str, Any]) -> None:
        if not self._file.isatty():
            return
        done, total = progress.get("done") or 0, progress.get("total") or 0
        share = f" {done / total:4.0%}" if total else ""
        text = visible_line(str(progress.get("text") or progress.get("stage") or ""))
        self._file.write(f"\r\x1b[2K{text}{share}")
        self._file.flush()
        self._shown = True

    def clear(self) -> None:
        """Erases the line."""
        if self._shown:
            self._file.write("\r\x1b[2K")
            self._file.flush()
            self._shown = False

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
