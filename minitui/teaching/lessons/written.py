"""Reads the text of a lesson: a Markdown file beside the module with its experiments, and with the same name.

    # Title of the lesson

    The question that the lesson answers

    ## Title of a page
    panel: a key of minitui.tui.widgets.lesson.panels.PANELS; that panel is shown beside the text
    code: the source to show, as package.module:Class.function
    run: the function that runs the experiment
    type_in: a TypeIn: the text that the reader may type for the experiment

    The text. Lines that begin with spaces are not joined to other lines.

    ? The prediction: a question about the experiment
    - a wrong choice | the end of a sentence that begins with "If it were true, "
    - the right choice

    ## Questions

    ? A closing question
    panel: the panel that shows the answer
    see: tells the reader where in the panel
    answer: the answer, of which `stage` is the run

A page has the lines that it needs. In braces is Python, as in an f-string, with the names of the module. The module's
function `close` is the experiment before the closing questions."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction
from minitui.teaching.merges import quoted
from minitui.teaching.stage import Stage
from minitui.text import listed, match_reasons, ms

FIELD = re.compile(r"^(panel|code|run|type_in|see|answer): (.*(?:\n  .*)*)\n?", re.M)


def read_lesson(module: dict[str, Any], *others: ModuleType, **options: Any) -> Lesson:
    """Returns the lesson of a module with these globals. The text may use names of the `others`, too. `options` are
    options of the lesson's engine."""
    names: dict[str, Any] = {"listed": listed, "match_reasons": match_reasons, "ms": ms, "quoted": quoted}
    for more in (*map(vars, others), module):
        names |= more
    file = Path(module["__file__"]).with_suffix(".md")
    head, *pages, questions = re.split(r"^## ", file.read_text(encoding="utf-8"), flags=re.M)
    title, question = head.removeprefix("# ").split("\n", 1)
    checks = [_check(part, names) for part in questions.split("\n? ")[1:]]
    number = int(file.name[1:].partition("_")[0])
    return Lesson(
        number, title, _fill(_joined(question), names), tuple(_page(part, names) for part in pages), names["close"],
        (checks[0], checks[1], checks[2]), options,
    )


def _page(source: str, names: dict[str, Any]) -> Page:
    title, rest = source.split("\n", 1)
    fields, text = _fields(rest)
    text, *asked = text.split("\n\n? ")
    return Page(
        title, _fill(re.sub(r"^    ", "  ", text.strip("\n"), flags=re.M), names), fields.get("panel", ""),
        fields.get("code", ""), names[fields["run"]] if "run" in fields else None,
        _prediction(asked[0], names) if asked else None, names[fields["type_in"]] if "type_in" in fields else None,
    )


def _prediction(source: str, names: dict[str, Any]) -> Prediction:
    question, *choices = (_fill(_joined(part), names) for part in source.split("\n- "))
    told = [choice.partition(" | ") for choice in choices]
    return Prediction(question, tuple(choice for choice, _, _ in told), tuple(why for _, _, why in told))


def _check(source: str, names: dict[str, Any]) -> Check:
    fields, question = _fields(source)

    def answer(stage: Stage) -> str:
        return _fill(fields["answer"], {**names, "stage": stage})

    return Check(_fill(_joined(question), names), fields["panel"], _fill(fields["see"], names), answer)


def _fields(source: str) -> tuple[dict[str, str], str]:
    """Returns the lines with a name, and the other text."""
    return {name: _joined(value) for name, value in FIELD.findall(source)}, FIELD.sub("", source)


def _joined(text: str) -> str:
    return " ".join(text.split())


def _fill(text: str, names: dict[str, Any]) -> str:
    return str(eval(f"rf'''{text}'''", names))  # the lessons' files are part of the program, as their modules are
