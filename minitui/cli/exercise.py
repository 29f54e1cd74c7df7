"""`minitui exercise`: students write a decision of the scheduler themselves."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.errors import EngineError
from minitui.cli.browser import open_in_browser
from minitui.cli.options import with_options
from minitui.tui.terminal.guard import has_terminal
from minitui.visible import json_text

if TYPE_CHECKING:
    from minitui.exercises.attempt import Attempt


@with_options("looks", "opening")
def exercise(
    context: typer.Context, looks: dict[str, Any], opening: dict[str, Any],
    name: Annotated[
        str | None,
        typer.Argument(help="admit, evict, chunk, preempt or sample. Default: list the exercises."),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Your file. Default: exercise_NAME.py in this directory.")] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="With --plain: save the runs as recordings; their names begin with this."),
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", "--headless", help="Run the file once and print the result; the default without a terminal."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Run the file once and print the result as JSON.")] = False,
) -> None:
    """Write a decision of the scheduler yourself. See what it does.

    \b
      minitui exercise                    list the exercises
      minitui exercise evict              which cached text is thrown away? Writes exercise_evict.py, and shows it
      minitui exercise evict --plain      run exercise_evict.py once; exit code 0 if all rules are kept, else 1
      minitui exercise evict --save run   also write run.reference.trace and run.yours.trace, for minitui compare

    The file has a function with comments. Change it in any editor: when it is saved, it runs in the real scheduler,
    allocator and prefix tree, over a device that computes nothing. The first broken rule is told in a sentence, and the
    panels show its step. If all rules are kept, there is a score: 100 is the reference's, and more is better.

    The code runs in a process of its own, with limits of time and memory. It has your rights: run only code that you
    trust.
    """
    from minitui.exercises.attempt import Attempts, begin
    from minitui.exercises.table import find_exercise
    from minitui.teaching.compare import save_copies

    if name is None:
        if file is not None or save is not None or json:
            raise EngineError("--file, --save and --json need the name of an exercise")
        _list()
        return
    one = find_exercise(name)
    if opening["record"] is not None:
        raise EngineError("--record belongs to an engine that runs on: --save writes the runs of an exercise")
    open_in_browser(context, opening, own_engine=False)
    path = file or Path(f"exercise_{one.name}.py")
    text = plain or json or save is not None or not has_terminal()
    new = begin(one, path)
    with tempfile.TemporaryDirectory() as folder:
        attempts = Attempts(one, Path(folder))
        if text:
            with attempts:
                attempt = attempts.run(path)
            saved = save_copies(zip(("reference", "yours"), attempt.runs, strict=False), save) if save else []
            _report(attempt, path, new, saved, json)
            raise typer.Exit(0 if attempt.passed else 1)
        from minitui.cli.launch import run_app, settings_with
        from minitui.tui.apps.exercise_app import ExerciseApp, ExerciseSource

        raise typer.Exit(run_app(ExerciseApp, ExerciseSource(attempts, path), settings_with(looks)))


def _list() -> None:
    from minitui.exercises.table import EXERCISES

    for one in EXERCISES.values():
        print(f"minitui exercise {one.name:<9} {one.teaches}")
        print(f"                           first: minitui lesson {one.lesson}; the score: {one.figure}")


def _report(attempt: Attempt, path: Path, new: bool, saved: list[Path], json: bool) -> None:
    from minitui.exercises.student import PRINTED

    if json:
        print(json_text(attempt.data | {"file": str(path), "recordings": list(map(str, saved))}, indent=2))
        return
    if new:
        print(f"{path} is new: read it, change it, and run this command again.")
    print(attempt.words)
    if attempt.printed:
        end = f" (the last {PRINTED:,} characters)" if len(attempt.printed) == PRINTED else ""
        print(f"It printed{end}:\n{attempt.printed.rstrip()}")
    if len(saved) == 2:
        print(f"saved: minitui compare {saved[0]} {saved[1]}")
