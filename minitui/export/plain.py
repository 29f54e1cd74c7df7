"""Writes a trace as one JSON object with named fields, for other programs."""

from __future__ import annotations

from pathlib import Path

from engine.trace.records import as_dict
from minitui.trace.reader import TraceReader
from minitui.visible import json_text


def write_json(reader: TraceReader, path: Path) -> None:
    """Write the trace to `path`:

    {"header", "complete", "bookmarks", "chats", "start": snapshot, "records": [{"seq", "t", "kind", ...}]}
    """
    head = {
        "header": reader.header,
        "complete": reader.complete,
        "bookmarks": [{"step": step, "text": text} for step, text in reader.bookmarks],
        "chats": reader.names,
        "start": reader.part(0).snapshot,
    }
    with path.open("w", encoding="utf-8") as file:
        file.write(json_text(head)[:-1])
        file.write(', "records": [')
        for i, record in enumerate(reader.records()):
            file.write(",\n" if i else "\n")
            file.write(json_text(as_dict(record)))
        file.write("\n]}\n")
