"""Exports of a recording: Perfetto's JSON, plain JSON, Markdown, and screens as SVG or PNG."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from minitui.export.markdown import write_markdown
from minitui.export.perfetto import write_perfetto
from minitui.export.plain import write_json
from minitui.trace.reader import TraceError, TraceReader

WRITERS: dict[str, tuple[str, Callable[[TraceReader, Path], None]]] = {
    "perfetto": (".perfetto.json", write_perfetto),
    "json": (".json", write_json),
    "md": (".md", write_markdown),
}
PICTURES = ("svg", "png")
FORMATS = (*WRITERS, *PICTURES)
SUFFIXES = {kind: suffix for kind, (suffix, _) in WRITERS.items()} | {kind: f".{kind}" for kind in PICTURES}


def export(trace: str | Path, kind: str, out: str | Path | None = None) -> Path:
    """Write `trace` as perfetto, json or md to `out` (None: beside the trace); returns the path. Raises TraceError."""
    if kind not in WRITERS:
        raise TraceError(f"unknown export format {kind!r}: choose one of {', '.join(FORMATS)}")
    suffix, write = WRITERS[kind]
    reader = TraceReader(trace)
    path = Path(out) if out is not None else reader.path.with_name(reader.path.name.removesuffix(".trace") + suffix)
    try:
        write(reader, path)
    except OSError as error:
        if path.is_file():  # remove the incomplete file, but never a device
            path.unlink()
        raise TraceError(f"{path} cannot be written: {error.strerror}; name another file with --out") from None
    return path
