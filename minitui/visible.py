"""Replaces control characters by visible symbols, so that text from outside cannot control the terminal.

Models, servers, chat templates, traces, file names and pasted text may contain escape sequences that set the window's
title, write the clipboard, clear the screen or reverse the reading order. Stored text stays exact, because an answer is
part of the next prompt. Control characters are replaced only where text leaves the process:

    the application   panels pass minitui/tui/theme.py; all other widgets pass minitui/tui/terminal/line_filters.py
    commands          the command line replaces sys.stdout and sys.stderr by `PlainStream` (minitui/cli/main.py)
    documents         Markdown by `visible`; JSON by `json_text`, whose escapes keep the text exact
    clipboard         MinituiApp.copy_to_clipboard

Only Textual's driver and the status line (minitui/progress.py) write escape sequences. The status line writes them to
`PlainStream.stream`.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

LOST = "\ufffd"  # replaces the characters that have no symbol in _SYMBOLS
# C1 control characters, line separators, bidirectional embeddings, overrides and isolates, lone surrogates, and
# characters that XML forbids.
_RARE = "\x80-\x9f\u2028-\u202e\u2066-\u206f\ud800-\udfff\ufffe\uffff"
_IN_TEXT = re.compile(f"\r\n|[\\x00-\\x08\\x0b-\\x1f\\x7f{_RARE}]")
_IN_LINE = re.compile(f"[\\x00-\\x1f\\x7f{_RARE}]")
_IN_JSON = re.compile(f"[\\x7f{_RARE}]")
# What stands for frequent characters on a stdout whose encoding lacks these.
NEAREST = {
    "…": "...", "·": "-", "–": "-", "×": "x", "“": '"', "”": '"', "‘": "'", "’": "'", "→": "->", "µ": "u",
}
_SYMBOLS = {chr(code): chr(0x2400 + code) for code in range(32)} | {
    "\r\n": "\n", "\x7f": "\u2421", "\x85": "\u2424", "\u2028": "\u2424", "\u2029": "\u2424",
}


def _symbol(found: re.Match[str]) -> str:
    return _SYMBOLS.get(found[0], LOST)


def visible(text: str) -> str:
    """Returns the text with symbols for characters that control a terminal. Newlines and tabs are kept."""
    return text if text.isprintable() else _IN_TEXT.sub(_symbol, text)


def visible_line(text: str) -> str:
    """Returns the text with symbols for all characters that `visible` replaces, and for newlines and tabs."""
    return text if text.isprintable() else _IN_LINE.sub(_symbol, text)


def json_text(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Returns JSON. Characters that `visible` replaces are escaped instead, so the text stays exact."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
    return _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class PlainStream:
    """Writes to `stream`, with control characters replaced by `visible`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write `visible(text)`; returns the length of `text`."""
        self.stream.write(visible(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write all lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _nearest(error: UnicodeError) -> tuple[str, int]:
    """Returns the nearest ASCII text for characters that an encoding lacks."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(NEAREST.get(char, "?") for char in error.object[error.start : error.end]), error.end


codecs.register_error("minitui", _nearest)


@contextlib.contextmanager
def plain_output() -> Iterator[None]:
    """Inside this context, stdout and stderr replace control characters, and stdout replaces what it cannot encode."""
    before = sys.stdout, sys.stderr
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="minitui")
    sys.stdout, sys.stderr = (cast(TextIO, stream and PlainStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
