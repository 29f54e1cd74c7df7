"""The parts of a lesson: pages with text, code, a prediction and an experiment on a live engine, and three closing
questions. written.py reads them from Markdown, minitui/tui/screens/lesson.py shows them, plain.py prints them."""

from __future__ import annotations

import importlib.util
import re
import textwrap
import unicodedata
from ast import AsyncFunctionDef, ClassDef, FunctionDef, parse
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from minitui.teaching.stage import LETTERS, Stage

MIN_COLUMN = 16  # cells; a last column with less room is wrapped like a paragraph


@dataclass(frozen=True)
class Seen:
    """The result of an experiment. `answer`: the index of the prediction's right choice."""

    text: str
    answer: int | None = None


@dataclass(frozen=True)
class Prediction:
    """A question asked before an experiment. The experiment shows which choice is right. `why_not`: for each choice,
    the end of a sentence that begins with "If it were true, "; "" for the right choice."""

    question: str
    choices: tuple[str, ...]
    why_not: tuple[str, ...] = ()

    def explain(self, choice: int) -> str:
        """Returns what would have to be true for a wrong choice, and why that is not so; "" for the right choice."""
        why = self.why_not[choice] if self.why_not else ""
        return why and f"If {LETTERS[choice]} were true, {why}"


@dataclass(frozen=True)
class TypeIn:
    """A text that the reader may type for an experiment, in place of `default`. `longest`: its limit in characters."""

    title: str
    default: str
    longest: int


@dataclass(frozen=True)
class Page:
    """A page: see written.py. The experiment finds what the reader typed in `Stage.typed`."""

    title: str
    text: str
    panel: str = ""
    code: str = ""
    run: Callable[[Stage], Awaitable[Seen]] | None = None
    predict: Prediction | None = None
    type_in: TypeIn | None = None


@dataclass(frozen=True)
class Check:
    """A closing question. `where` tells the reader which panel shows the answer; `answer` reads it from the engine."""

    question: str
    panel: str
    where: str
    answer: Callable[[Stage], str]


@dataclass(frozen=True)
class Lesson:
    """A lesson. `options` are options of its engine; `close` is the experiment before the closing questions."""

    number: int
    title: str
    question: str
    pages: tuple[Page, ...]
    close: Callable[[Stage], Awaitable[Any]]
    checks: tuple[Check, Check, Check]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"L{self.number} {self.title}"


def paragraphs(text: str, width: int) -> list[str]:
    """Returns the text in lines of at most `width` cells."""
    lines: list[str] = []
    for part in text.strip("\n").split("\n\n"):
        if lines:
            lines.append("")
        run: list[str] = []
        for line in part.split("\n"):
            if line.startswith(" "):
                lines += _wrap(" ".join(run), width) if run else []
                run = []
                lines += _wrap_last_column(line, width)
            else:
                run.append(line)
        lines += _wrap(" ".join(run), width) if run else []
    return lines


def _wrap(text: str, width: int) -> list[str]:
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)  # characters of two cells
    return textwrap.wrap(text, width - wide)


def _wrap_last_column(line: str, width: int) -> list[str]:
    """Returns the line; if it is too long, its last column is wrapped."""
    if len(line) <= width:
        return [line]
    columns = [found.end() for found in re.finditer(r"\s{2,}", line)]
    first = len(line) - len(line.lstrip())
    indent = columns[-1] if len(columns) > 1 and columns[-1] <= width - MIN_COLUMN else first
    rest = _wrap(line[indent:], max(MIN_COLUMN, width - indent))
    return [(line[:indent] if i == 0 else " " * indent) + piece for i, piece in enumerate(rest)]


@dataclass(frozen=True)
class Code:
    """Part of a source file. `first` is the number of its first line."""

    reference: str
    path: str  # such as "engine/core/radix.py"
    first: int
    lines: list[str]


def find_code(reference: str) -> Code:
    """Returns the source of "package.module:Class.function", or of a whole module, from the installed package. Does not
    import the module: many modules of the engine import torch, which the user interface's process never loads."""
    module, _, name = reference.partition(":")
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    # Find only the top package: finding a subpackage would import its parents.
    root = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path(package)
    candidates = [root.joinpath(*rest).with_suffix(".py"), root.joinpath(*rest, "__init__.py")]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise EngineError(f"this installation has no module {module}")
    source = file.read_text(encoding="utf-8")
    path = f"{package}/{file.relative_to(root).as_posix()}"
    lines = source.split("\n")
    if not name:
        return Code(reference, path, 1, lines)
    node: Any = parse(source)
    for part in name.split("."):
        found = [
            child for child in node.body
            if isinstance(child, (ClassDef, FunctionDef, AsyncFunctionDef)) and child.name == part
        ]
        if not found:
            raise EngineError(f"{path} has no {name}")
        node = found[0]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return Code(reference, path, first, lines[first - 1 : node.end_lineno])


async def fresh(stage: Stage) -> None:
    """Pauses the engine and resets it: no requests, an empty cache, no slow motion. The picture and the figures start
    again, so the panels show no earlier request. The chats in which the reader has asked a question stay."""
    stage.forget_runs()
    await stage.go_home()
    await stage.gate()
    await stage.source.control("pace", factor=1)
    await stage.end_chats()
    stage.show(stage.chat(title="lesson"))
    await stage.source.control("clear_cache")
    await stage.until("an empty tree", lambda: len(stage.state().nodes) == 1)
    stage.view.select(None)
    stage.view.put(None)
    await stage.feed.sync()
    stage.begin_count()
