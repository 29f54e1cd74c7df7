"""Tells a caller where the server does not follow the request: in the header X-Minitui-Warning, and once in the log."""

from __future__ import annotations

import logging
import re
from contextvars import ContextVar

logger = logging.getLogger("minitui.server")

HEADER = "X-Minitui-Warning"
LONGEST = 1000  # characters of the header
MAX_LOGGED = 1000  # different notices; later ones are only in the header

_notices: ContextVar[list[str]] = ContextVar("notices")
_logged: set[str] = set()


def begin() -> list[str]:
    """Start the list of a request's notices; returns the list. Call this in the task that runs the request."""
    notices: list[str] = []
    _notices.set(notices)
    return notices


def notice(sentence: str) -> None:
    """Add a notice to the current request. The log gets each notice only once, because clients repeat requests."""
    sentence = as_ascii(sentence)
    notices = _notices.get(None)
    if notices is None or sentence in notices:
        return
    notices.append(sentence)
    if sentence not in _logged and len(_logged) < MAX_LOGGED:
        _logged.add(sentence)
        logger.warning("notice to a caller: %s", sentence)


def header(notices: list[str]) -> str:
    """Returns the header's value. HTTP allows no spaces at its end."""
    return "; ".join(notices)[:LONGEST].strip()


def as_ascii(text: str) -> str:
    """Returns the text with ? for each character that a header or a terminal should not get."""
    return re.sub(r"[^ -~]", "?", text)
