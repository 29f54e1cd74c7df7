"""Run sheets: the scenes of a class, in a TOML file. A scene has a title, minutes, notes for the lecturer, and exactly
one of KINDS. Everything is checked before anything opens. An error names the line and the field."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from minitui.teaching.contrasts import CONTRASTS
from minitui.teaching.lessons import lesson
from minitui.teaching.lessons.page import Lesson
from minitui.teaching.scenarios import DEMOS
from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader

BUNDLED = Path(__file__).resolve().parent / "run_sheets" / "fifty_minutes.toml"
LARGEST = 64 << 10  # bytes of a file
MOST_SCENES, LONGEST_TITLE, LONGEST_TEXT, MOST_MINUTES, MOST_STEPS, SLOWEST = 100, 80, 4000, 240, 100, 200
SCREENS = ("chat", "inspect", "lecture")
ENGINE = {"kv_blocks": 64}  # of questions, chats and recordings: a small pool, in which each block can be seen


@dataclass(frozen=True)
class Scene:
    """A scene. `what`: the value of its kind. `at`: the page of a lesson, from 0, or the step of a recording.
    `screen`: what is shown first; "": the usual screen of its kind. `slow`: each step takes this many times as long.
    `steps`: the engine is paused, and the key for the next scene runs this many steps first. `options`: those of its
    engine."""

    kind: str
    what: Any
    title: str
    minutes: float
    notes: str = ""
    at: int = 0
    screen: str = ""
    paused: bool = False
    steps: int = 0
    slow: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def lesson(self) -> Lesson:
        """The lesson of a scene that is a page of one."""
        return lesson(self.what)


@dataclass(frozen=True)
class RunSheet:
    """The scenes of a class, in their order."""

    title: str
    scenes: tuple[Scene, ...]

    @property
    def minutes(self) -> float:
        return sum(scene.minutes for scene in self.scenes)

    def begins(self, number: int) -> float:
        """Returns the minute in which a scene, counted from 0, begins if every scene before it takes its time."""
        return sum(scene.minutes for scene in self.scenes[:number])


def read_run_sheet(path: Path = BUNDLED) -> RunSheet:
    """Returns the run sheet in a file. Raises EngineError with the line and the field."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        text = data.decode()
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise EngineError(f"{path}, line {data.count(10, 0, error.start) + 1}: a run sheet must be UTF-8") from None
    if len(data) > LARGEST:
        raise EngineError(f"{path} is larger than {LARGEST >> 10} KiB: no run sheet is so long")
    try:
        found = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise EngineError(f"{path}: {error or 'it is nested too deeply'}") from None
    return _Reading(path, text).sheet(found)


def _steps(name: str) -> int:
    reader = TraceReader(find_trace(name))
    reader.check()
    return reader.last_step


# The field of each kind -> (its type, a function that raises EngineError if there is no such thing).
KINDS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "demo": (str, lambda name: _one_of(name, DEMOS)),
    "compare": (str, lambda name: _one_of(name, CONTRASTS)),
    "lesson": (int, lesson),
    "recording": (str, lambda name: TraceReader(find_trace(name))),
    "question": (str, lambda text: None),
    "chat": (bool, lambda on: None),
}
# Fields that a scene may have besides -> (type, kinds that have it).
OPTIONS: dict[str, tuple[type | tuple[type, ...], tuple[str, ...]]] = {
    "title": (str, tuple(KINDS)), "minutes": ((int, float), tuple(KINDS)), "notes": (str, tuple(KINDS)),
    "page": (int, ("lesson",)), "step": (int, ("recording",)),
    "screen": (str, ("recording", "question", "chat")), "paused": (bool, ("question", "chat")),
    "steps": (int, ("question", "chat")), "slow": ((int, float), ("question", "chat")),
}
WORDS: dict[Any, str] = {str: "a text", int: "a whole number", bool: "true or false", (int, float): "a number"}


def _one_of(name: str, known: Any) -> None:
    if name not in known:
        raise EngineError(f"{name[:40]!r} is not one of {', '.join(known)}")


class _Reading:
    """Checks one file. Its lines are searched only for an error."""

    def __init__(self, path: Path, text: str) -> None:
        self._path, self._text = path, text

    def sheet(self, found: dict[str, Any]) -> RunSheet:
        for name in found.keys() - {"title", "scene"}:
            raise self._error(-1, name, "there is no such field: a run sheet has a title and [[scene]] tables")
        title = found.get("title", "")
        if not isinstance(title, str) or not 0 < len(title) <= LONGEST_TITLE:
            raise self._error(-1, "title", f"it must be a text of 1 to {LONGEST_TITLE} characters")
        scenes = found.get("scene", [])
        if not isinstance(scenes, list) or not all(isinstance(scene, dict) for scene in scenes):
            raise self._error(-1, "scene", "each scene must be a [[scene]] table")
        if not 0 < len(scenes) <= MOST_SCENES:
            raise self._error(-1, "scene", f"there are {len(scenes)}: a run sheet has 1 to {MOST_SCENES}")
        return RunSheet(title, tuple(self._scene(number, scene) for number, scene in enumerate(scenes)))

    def _scene(self, number: int, found: dict[str, Any]) -> Scene:
        kinds = [name for name in found if name in KINDS]
        if len(kinds) != 1:
            has = f"it has {' and '.join(kinds)}" if kinds else "it has none"
            raise self._error(number, "scene", f"a scene is exactly one of {', '.join(KINDS)}, and {has}")
        [kind] = kinds
        for name, value in found.items():
            fields = {kind: KINDS[kind][0]} | {option: type_ for option, (type_, of) in OPTIONS.items() if kind in of}
            if name not in fields:
                raise self._error(number, name, f"a scene with {kind} has no such field: it has {', '.join(fields)}")
            type_ = fields[name]
            if not isinstance(value, type_) or (isinstance(value, bool) and type_ is not bool):
                raise self._error(number, name, f"it must be {WORDS[type_]}")
            if isinstance(value, str) and not 0 < len(value) <= (LONGEST_TITLE if name == "title" else LONGEST_TEXT):
                longest = LONGEST_TITLE if name == "title" else LONGEST_TEXT
                raise self._error(number, name, f"it has {len(value):,} characters: it must have 1 to {longest:,}")
        for name in {"title", "minutes"} - found.keys():
            raise self._error(number, name, "it is missing")
        if not 0 < found["minutes"] <= MOST_MINUTES:
            raise self._error(number, "minutes", f"{found['minutes']:g} is not above 0 and at most {MOST_MINUTES}")
        if not 1 <= found.get("slow", 1) <= SLOWEST:
            raise self._error(number, "slow", f"{found['slow']:g} is not 1 to {SLOWEST}")
        if not 0 <= found.get("steps", 0) <= MOST_STEPS:
            raise self._error(number, "steps", f"{found['steps']:,} is not 0 to {MOST_STEPS}")
        if found.get("screen", "chat") not in SCREENS:
            raise self._error(number, "screen", f"it must be one of {', '.join(SCREENS)}")
        what = found[kind]
        self._check(number, kind, KINDS[kind][1], what)
        if kind == "lesson":
            pages, page = len(lesson(what).pages) + 1, found.get("page", 1)
            if not 1 <= page <= pages:
                raise self._error(number, "page", f"lesson {what} has the pages 1 to {pages}, not {page}")
        if kind == "recording":
            last = self._check(number, kind, _steps, what)
            if not 0 <= found.get("step", 0) <= last:
                raise self._error(number, "step", f"the recording's last step is {last:,}, not {found['step']:,}")
        at = found.get("page", 1) - 1 if kind == "lesson" else found.get("step", 0)
        return Scene(
            kind, what, found["title"], float(found["minutes"]), found.get("notes", ""), at, found.get("screen", ""),
            found.get("paused", False), found.get("steps", 0), found.get("slow", 1.0), _options(kind, what),
        )

    def _check(self, number: int, name: str, check: Callable[[Any], Any], value: Any) -> Any:
        try:
            return check(value)
        except EngineError as error:
            raise self._error(number, name, str(error)) from None

    def _error(self, number: int, name: str, why: str) -> EngineError:
        place = f"scene {number + 1}, " if number >= 0 else ""
        return EngineError(f"{self._path}, line {self._line(number, name)}: {place}{name}: {why}")

    def _line(self, number: int, name: str) -> int:
        """Returns the line of a field; that of its scene if the field is not in the file."""
        scene, begin, within = -1, 1, ""
        for at, line in enumerate(self._text.split("\n"), 1):
            if within:  # a text of several lines
                within = "" if within in line else within
                continue
            if re.match(r"\s*\[\[\s*scene\s*\]\]", line):
                scene += 1
                begin = at if scene <= number else begin
            elif scene == number and re.match(rf"""\s*["']?{re.escape(name)}["']?\s*=""", line):
                return at
            within = next((quote for quote in ('"""', "'''") if line.count(quote) % 2), "")
        return begin


def _options(kind: str, what: Any) -> dict[str, Any]:
    """Returns the options of a scene's engine."""
    if kind == "demo":
        return DEMOS[what].options
    if kind == "compare":
        return CONTRASTS[what].engine(CONTRASTS[what].first)
    return lesson(what).options if kind == "lesson" else ENGINE
