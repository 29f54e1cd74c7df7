"""Reads the texts of the help, help.md: one for each screen, named as its mode, and one for each panel, named as its
TITLE. A paragraph is wrapped to the width of the help; a line that begins with spaces is an entry of two columns."""

from __future__ import annotations

import re
from pathlib import Path


def _sections(part: str) -> dict[str, str]:
    _, *sections = re.split(r"^## ", part, flags=re.M)
    return {title: text.strip("\n") for title, _, text in (section.partition("\n") for section in sections)}


_, _screens, _panels = re.split(r"^# .*$", Path(__file__).with_suffix(".md").read_text(encoding="utf-8"), flags=re.M)
SCREENS, PANELS = _sections(_screens), _sections(_panels)
