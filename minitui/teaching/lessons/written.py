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

FIELD = re.compile(r"^(panel|see|answer): (.*(?:\n  .*)*)\n?", re.M)


def read_lesson(module: dict[str, Any], *others: ModuleType, **options: Any) -> Lesson:
    """Returns the lesson of a module with these globals. The text may use names of the `others`, too. `options` are
    options of the lesson's engine. An error has a note with the page."""
    names: dict[str, Any] = {"listed": listed, "match_reasons": match_reasons, "ms": ms, "quoted": quoted}
    for more in (*map(vars, others), module):
        names |= more
    file = Path(module["__file__"]).with_suffix(".md")
    head, *parts, questions = re.split(r"^## ", file.read_text(encoding="utf-8"), flags=re.M)
    title, question = head.removeprefix("# ").split("\n", 1)
    pages = []
    for part in parts:
        try:
            pages.append(_page(part, names))
        except Exception as error:
            error.add_note(f"{file.name}, page {part.partition(chr(10))[0]!r}")
            raise
    checks = [_check(part, names) for part in questions.split("\n? ")[1:]]
    return Lesson(
        int(file.name[1:].partition("_")[0]), title, _fill(_joined(question), names), tuple(pages), names["close"],
        (checks[0], checks[1], checks[2]), options,
    )


def _page(source: str, names: dict[str, Any]) -> Page:
    head, _, text = source.partition("\n\n")
    title, *lines = head.split("\n")
    fields: dict[str, Any] = dict(line.split(": ", 1) for line in lines)
    for name in fields.keys() & {"run", "type_in"}:
        fields[name] = names[fields[name]]
    text, *asked = text.strip("\n").split("\n\n? ")
    predict = _prediction(asked[0], names) if asked else None
    return Page(title, _fill(re.sub(r"^    ", "  ", text, flags=re.M), names), predict=predict, **fields)


def _prediction(source: str, names: dict[str, Any]) -> Prediction:
    question, *choices = (_fill(_joined(part), names) for part in source.split("\n- "))
    told = [choice.partition(" | ") for choice in choices]
    return Prediction(question, tuple(choice for choice, _, _ in told), tuple(why for _, _, why in told))


def _check(source: str, names: dict[str, Any]) -> Check:
    fields = {name: _joined(value) for name, value in FIELD.findall(source)}

    def answer(stage: Stage) -> str:
        return _fill(fields["answer"], {**names, "stage": stage})

    question = _fill(_joined(FIELD.sub("", source)), names)
    return Check(question, fields["panel"], _fill(fields["see"], names), answer)


def _joined(text: str) -> str:
    return " ".join(text.split())


def _fill(text: str, names: dict[str, Any]) -> str:
    return str(eval(f"rf'''{text}'''", names))  # the lessons' files are part of the program, as their modules are
