"""The recordings that come with the program: `minitui replay` lists them, `minitui replay NAME` plays one.

Each is a file NAME.trace in this directory; what is said of it was read from it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from minitui.trace.reader import TraceError, TraceReader

HERE = Path(__file__).resolve().parent
WATCH_S = 60.0  # a recording that comes along is played so slowly that it lasts about as long as this
SPEEDS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)


def bundled() -> dict[str, Path]:
    """Names and files, in alphabetical order."""
    return {path.stem: path for path in sorted(HERE.glob("*.trace"))}


def is_bundled(path: Path) -> bool:
    """Does this file belong to the program? Then nothing is written to it or beside it."""
    return path.resolve().parent == HERE


def find_trace(text: str) -> Path:
    """The file of that name, else the recording that comes along under it; TraceError lists those."""
    path, known = Path(text), bundled()
    if path.exists() or text not in known:
        if not path.exists() and len(path.parts) == 1 and not path.suffix:
            names = ", ".join(known) or "none"
            raise TraceError(f"there is no file {text!r}, and no recording of that name comes with minitui: {names} do")
        if path.exists() and not path.is_file() and not path.is_dir():
            raise TraceError(f"{path} is no file but a device or a pipe: a trace is read from any place in it")
        return path
    return known[text]


def watching_speed(reader: TraceReader) -> float:
    """At which it lasts about WATCH_S: what an engine does in four seconds, nobody can follow in four."""
    return next((speed for speed in SPEEDS if reader.seconds / speed >= WATCH_S), SPEEDS[-1])


def describe(reader: TraceReader) -> str:
    """One sentence: what ran on what, how much of it, and whether its text means anything."""
    info = reader.info
    kinds = Counter(record[2] for record in reader.records())
    asked = kinds["submit"] + len(reader.part(0).snapshot["requests"])
    weights = ", random weights" if info.get("dummy_weights") else ""
    told = (
        f"{_count(asked, 'request')} to {info['model']} ({info['dtype']}{weights}) on {info['device']}, "
        f"{info['num_blocks']:,} blocks of {info['block_size']}: {_count(kinds['step'], 'step')} in "
        f"{reader.seconds:,.1f} s"
    )
    told += f", {_count(kinds['preempt'], 'preemption')}" if kinds["preempt"] else ""
    return told + ("; the text is random and not shown" if reader.header["random_text"] else "")


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" + ("" if n == 1 else "s")
