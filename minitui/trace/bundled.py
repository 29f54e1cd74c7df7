"""The bundled recordings: `minitui replay` lists them, `minitui replay NAME` plays one. Each recording is a file
NAME.trace in this directory. Its description is computed from the file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from engine.trace.kind import kind_of, named
from minitui.text import count
from minitui.trace.reader import TraceError, TraceReader

HERE = Path(__file__).resolve().parent
WATCH_S = 60.0  # minimum duration of a replay, in seconds, if one of SPEEDS is slow enough
SPEEDS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)


def bundled() -> dict[str, Path]:
    """Returns {name: file} of all bundled recordings, in alphabetical order."""
    return {path.stem: path for path in sorted(HERE.glob("*.trace"))}


def is_bundled(path: Path) -> bool:
    """Returns True for a bundled recording. Callers write nothing to its file or its directory."""
    return path.resolve().parent == HERE


def find_trace(text: str) -> Path:
    """Returns the file named `text`, else the bundled recording of that name. Raises TraceError if neither exists."""
    path, known = Path(text), bundled()
    if path.exists():
        if not path.is_file() and not path.is_dir():
            raise TraceError(f"{path} is a device or a pipe: a trace must be a regular file")
        return path
    if text not in known and len(path.parts) == 1 and not path.suffix:
        names = ", ".join(known) or "none"
        raise TraceError(f"there is no file {text!r} and no bundled recording of that name; the names are: {names}")
    return known.get(text, path)


def watching_speed(reader: TraceReader) -> float:
    """Returns the highest of SPEEDS at which the recording lasts at least WATCH_S: real time is too fast to follow."""
    return next((speed for speed in SPEEDS if reader.seconds / speed >= WATCH_S), SPEEDS[-1])


def describe(reader: TraceReader) -> str:
    """Returns a description of the recording: model, device, requests, steps, and whether the text is random."""
    info = reader.info
    kinds = Counter(map(kind_of, reader.records()))
    asked = kinds["submit"] + len(reader.part(0).snapshot["requests"])
    ended = sum(kind_of(record) == "time" and named(record).step > reader.step_before for record in reader.records())
    weights = ", random weights" if info.dummy_weights else ""
    text = (
        f"{count(asked, 'request')} to {info.model} ({info.dtype}{weights}) on {info.device}, "
        f"{info.num_blocks:,} blocks of {info.block_size}: {count(ended, 'step')}"
    )
    text += f", {count(kinds['preempt'], 'preemption')}" if kinds["preempt"] else ""
    text += f"; lasts {reader.seconds:,.1f} s"
    return text + ("; the text is random and not shown" if reader.header["random_text"] else "")
