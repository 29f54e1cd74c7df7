"""Writes a trace as one JSON object with named fields, for other programs."""

from __future__ import annotations

from pathlib import Path

from engine.trace.kind import as_dict
from minitui.text import exact
from minitui.trace.reader import TraceReader
from minitui.viewmodel.history.steps import Steps
from minitui.visible import json_text


def write_json(reader: TraceReader, path: Path) -> None:
    """Write the trace to `path`:

    {"header", "complete", "bookmarks", "chats", "start": snapshot, "records": [{"seq", "t", "kind", ...}]}

    A "time" record also has "took_ms": the step's duration in the panels. It includes the commit of the step before and
    the output, which are not in "wall_ms".
    """
    steps = Steps()
    head = {
        "header": reader.header | {"info": reader.info.to_json()},
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
            fields = as_dict(record)
            steps.read(record)
            if fields["kind"] == "time" and (took := steps.took_ms(fields["step"])) is not None:
                fields["took_ms"] = exact(took)
            file.write(json_text(fields))
        file.write("\n]}\n")
