"""`minitui demo` and `minitui lesson`: play scenarios and lessons on the bundled model."""

from __future__ import annotations

import asyncio
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.errors import EngineError
from minitui import settings as settings_file
from minitui.chat.conversation import Sampling
from minitui.chat.model_choice import Choice, choose_model
from minitui.cli.browser import open_in_browser
from minitui.cli.launch import changing_source, report_recording, run_app, settings_with
from minitui.cli.options import KvBlocks, with_options
from minitui.tui.terminal.guard import has_terminal

if TYPE_CHECKING:
    from minitui.teaching.lessons.page import Lesson
    from minitui.teaching.stage import Restart


@with_options("looks", "opening")
def demo(
    context: typer.Context, looks: dict[str, Any], opening: dict[str, Any],
    name: Annotated[str | None, typer.Argument(help="Name of a demo. Default: list the demos.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", "--headless", help="Print lines of text; the default without a terminal.")
    ] = False,
    beat: Annotated[
        float | None,
        typer.Option(min=0, max=10, help="Scale of the pauses for reading; 0: no pauses. Default: 1; with --plain: 0."),
    ] = None,
    kv_blocks: KvBlocks = None,
) -> None:
    """Watch a scenario step by step on a small engine.

    \b
      minitui demo shared-prefix     four chats share the blocks of one system prompt
      minitui demo cache             the same six requests with the prefix cache off and on
      minitui demo chunked-prefill   a long prompt while other replies run: in one step and in chunks
      minitui demo fairness          a long prompt and many short ones while replies run: with a target for gaps
      minitui demo eviction          a full pool: predict whose blocks are evicted
      minitui demo preemption        a pool that is too small: predict which request is preempted
      minitui demo fork              one conversation with four continuations
      minitui demo batching          static and continuous batching
      minitui demo hybrid            recurrent states: a shift of about 100 tokens, and hits are gone
      minitui demo speculation       draft tokens are copied from the text; one step checks several tokens
      minitui demo cache --plain     print the demo `cache` as text
    """
    from minitui.teaching.scenarios import DEMOS, print_demo
    from minitui.tui.apps.demo import play_in_app

    if name is None:
        print(_columns([(f"minitui demo {name}", one.title) for name, one in DEMOS.items()]))
        return
    if name not in DEMOS:
        raise EngineError(f"there is no demo {name!r}: the demos are {', '.join(DEMOS)}")
    open_in_browser(context, opening)
    chosen = DEMOS[name]
    choice = choose_model(None)
    options = chosen.options | ({} if kv_blocks is None else {"kv_blocks": kv_blocks})
    source, restart = changing_source(choice, options, record=opening["record"])
    sampling = Sampling(temperature=0.0, max_tokens=chosen.max_tokens)
    if plain or not has_terminal():
        playing = print_demo(chosen, source, choice.system, sampling, beat=beat or 0.0, restart=restart)
        raise typer.Exit(report_recording(source, asyncio.run(playing)))
    from minitui.teaching.contrasts import CONTRASTS
    from minitui.tui.apps.compare_app import DemoApp

    pauses = 1.0 if beat is None else beat
    settings = settings_with(looks)
    make = DemoApp if name in CONTRASTS else None
    raise typer.Exit(run_app(
        make, source, settings, choice, sampling, script=lambda app: play_in_app(chosen, app, restart, pauses)
    ))


@with_options("looks", "opening")
def lesson(
    context: typer.Context, looks: dict[str, Any], opening: dict[str, Any],
    number: Annotated[str | None, typer.Argument(help="0 to 10. Default: list the lessons.")] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", "--headless", help="Print text and run every experiment; the default without a terminal."
        ),
    ] = False,
    handout: Annotated[
        Path | None, typer.Option(help="Write all lessons, or the given one, to FILE.md, FILE.html or FILE.pdf.")
    ] = None,
) -> None:
    """Read a lesson and run its experiments on the bundled model.

    \b
      minitui lesson              list the lessons
      minitui lesson 0            begin here: text, tokens, a forward pass, one more token
      minitui lesson 9            the radix cache
      minitui lesson 9 --plain    print lesson 9 as text
      minitui lesson --handout class.pdf    for a class: texts, questions, pictures, and the answers at the end
    """
    from minitui.teaching.lesson_progress import FILE, LessonProgress
    from minitui.teaching.lessons import LESSONS
    from minitui.teaching.lessons import lesson as find_lesson
    from minitui.teaching.lessons.plain import print_with_own_engine

    if handout is not None:
        _write_handout(handout, LESSONS if number is None else (find_lesson(number),))
        return
    progress = LessonProgress(settings_file.data_dir() / FILE)
    if number is None:
        told = ((one, progress.summary(one)) for one in LESSONS)
        rows = [(f"minitui lesson {one.number:<2}   {one.title}", f"{one.question} ({done})" if done else one.question)
                for one, done in told]
        print(_columns(rows))
        print("\nOpen a lesson with its number: `minitui lesson 0` is the first.\nKey L in a lesson shows the others.")
        print("`minitui exercise` lists decisions of the engine that you can then write yourself.")
        return
    chosen = find_lesson(number)
    open_in_browser(context, opening)
    choice, source, restart = lesson_source(chosen.number, opening["record"])
    sampling = Sampling(temperature=0.0, max_tokens=60)
    if plain or not has_terminal():
        printing = print_with_own_engine(chosen, source, choice.system, sampling, print, restart=restart)
        raise typer.Exit(report_recording(source, asyncio.run(printing)))
    from minitui.tui.apps.lesson_app import LessonApp

    settings = settings_with(looks)
    raise typer.Exit(run_app(
        LessonApp, source, settings, choice, sampling, lesson=chosen, restart=restart, progress=progress
    ))


def _write_handout(path: Path, lessons: Sequence[Lesson]) -> None:
    from minitui.export.handout import check_file, write_handout

    check_file(path)
    choice, source, restart = lesson_source(lessons[0].number)
    sampling = Sampling(temperature=0.0, max_tokens=60)
    print("The experiments run. This can take a minute.", file=sys.stderr)
    asyncio.run(
        write_handout(
            path, lessons, source, choice.system, sampling, restart, lambda name: print(f"  {name}", file=sys.stderr)
        )
    )
    print(path)


def lesson_source(number: int, record: Path | None = None) -> tuple[Choice, Any, Restart]:
    """Returns the bundled model, an engine with the lesson's options, and a coroutine that replaces this engine.
    `record`: the file of a recording."""
    from minitui.teaching.lessons import lesson as find_lesson

    choice = choose_model(None)
    return choice, *changing_source(choice, {}, find_lesson(number).options, record)


def _columns(rows: list[tuple[str, str]]) -> str:
    """Returns `rows` as two columns. The second column is wrapped to the width of the terminal."""
    widest = max(len(name) for name, _ in rows) + 3
    room = max(24, shutil.get_terminal_size().columns - widest)
    return "\n".join(
        f"{name:<{widest}}" + ("\n" + " " * widest).join(textwrap.wrap(words, room)) for name, words in rows
    )
