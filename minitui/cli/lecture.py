"""`minitui class`: the scenes of a run sheet, for a lecture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from engine.errors import EngineError
from minitui.chat.conversation import Sampling
from minitui.chat.model_choice import choose_model
from minitui.cli.browser import class_file, in_browser, open_in_browser
from minitui.cli.launch import changing_source, run_app, settings_with
from minitui.cli.options import with_options
from minitui.tui.terminal.guard import need_terminal
from minitui.visible import json_text

TOLD = 300  # the most steps of a scene on the page for afterwards


@with_options("looks", "opening")
def lecture(
    context: typer.Context, looks: dict[str, Any], opening: dict[str, Any],
    sheet: Annotated[
        Path | None, typer.Argument(help="A run sheet. Default: the bundled one, of 50 minutes.", metavar="[RUN.toml]")
    ] = None,
    beat: Annotated[
        float, typer.Option(min=0, max=10, help="Scale of the pauses for reading in demos; 0: no pauses.")
    ] = 1.0,
    check: Annotated[bool, typer.Option("--check", help="Check the run sheet, list its scenes, and end.")] = False,
    afterwards: Annotated[
        bool,
        typer.Option("--afterwards", help="Serve the scenes, answers and recordings under the link of the class."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the scenes and answers of the class as JSON.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print the answers of the class as CSV.")] = False,
) -> None:
    """Give a lecture from a run sheet. It has demos, comparisons, lessons, steps of recordings, questions and chats.

    \b
      minitui class                                          the bundled run sheet, in this terminal
      minitui class run.toml --check                         its scenes with their minutes
      minitui class run.toml --web --mirror --web-host 0.0.0.0 --class-link paging --record paging.trace
                                                             for a projector, viewers and phones
      minitui class --class-link paging --csv                the answers
      minitui class --class-link paging --afterwards --web --web-host 0.0.0.0
                                                             the same link, with scenes and recordings

    Key f8 shows the answer of an open question, runs a running experiment to its end, else it opens the next scene:
    with a new engine in the same process, an empty cache and no chats. f9 lists all scenes. With --web --mirror, an
    address for the lecturer is printed: the page has notes, minutes and these keys as buttons. On another page, phones
    show the step and answer its questions.
    """
    from minitui.teaching.run_sheet import BUNDLED, read_run_sheet

    if json or csv or afterwards:
        _kept(context, opening, json, csv)
        return
    run = read_run_sheet(sheet or BUNDLED)
    from minitui.tui.apps.class_app import ClassApp, about

    if check:
        print(about(run))
        return
    open_in_browser(context, opening)
    settings = settings_with(looks)
    need_terminal("minitui class", "minitui class --check")
    choice = choose_model(None)
    source, restart = changing_source(choice, {}, run.scenes[0].options, opening["record"])
    raise typer.Exit(run_app(
        ClassApp, source, settings, choice, Sampling(temperature=0.0), sheet=run, file=class_file(opening), beat=beat,
        restart=restart,
    ))


def _kept(context: typer.Context, opening: dict[str, Any], json: bool, csv: bool) -> None:
    """Prints or serves what the file of a class has."""
    file = class_file(opening, new=False)
    if file is None:
        raise typer.BadParameter("--json, --csv and --afterwards need --class-link NAME, the class that is meant")
    if json:
        print(json_text({"class": file.name, "title": file.data["title"], "scenes": file.scenes}, indent=2))
    elif csv:
        print(file.as_csv(), end="")
    else:
        web = in_browser(context, opening | {"mirror": True})
        if web is None:
            raise typer.BadParameter("--afterwards needs --web")
        try:
            from minitui.server.command import listen
            from minitui.web.afterwards import run_afterwards
        except ImportError as error:
            from engine.errors import not_installed

            raise EngineError(not_installed("the page of a class", error, "web,serve")) from error
        from minitui.teaching.class_told import told_scenes

        title, scenes = file.data["title"] or file.name, told_scenes(file, TOLD)
        raise typer.Exit(run_afterwards(web, listen(web.host, web.port), title, scenes, file.recordings))
