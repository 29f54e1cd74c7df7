"""`--web`: the command of each application in a browser is the command that the user typed, without these options."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import typer

from minitui.cli.options import GROUPS
from minitui.settings import data_dir

if TYPE_CHECKING:
    from minitui.teaching.class_file import ClassFile
    from minitui.web.settings import WebSettings

ABOUT_WEB = {option.name for option in GROUPS["opening"]} - {"web", "record", "class_link"}
TEXT = ("plain", "json", "handout", "export", "what_if", "sweep")  # options that print or write, and open nothing
ONE = {  # options that only one application can have -> what would happen without --mirror
    "record": "every tab would write the same file", "save": "every tab would write the same files",
    "resume": "every tab would reopen the same chats",
}


def in_browser(
    context: typer.Context, opening: dict[str, Any], own_engine: bool = True, without: frozenset[str] = frozenset()
) -> WebSettings | None:
    """Returns the settings of --web; None without this option. Raises BadParameter if options exclude each other.
    `own_engine`: each application has an engine. `without`: names of options that the applications do not get."""
    from minitui.server.origins import check_names
    from minitui.web.settings import TABS, TABS_WITH_ENGINES, WebSettings

    given = {name for name in context.params if _typed(context, name)}
    if not opening["web"]:
        if useless := sorted(given & ABOUT_WEB):
            raise typer.BadParameter(f"{_option(useless[0])} needs --web")
        return None
    if text := [name for name in TEXT if name in given]:
        raise typer.BadParameter(f"--web opens the application, and {_option(text[0])} does not: remove one of them")
    for name in sorted(given & ONE.keys()):
        if not opening["mirror"]:
            raise typer.BadParameter(f"with --web, {_option(name)} needs --mirror, or {ONE[name]}")
    names = tuple(opening["allowed_host"] or ())
    check_names(names)
    link = {}
    if (file := class_file(opening)) is not None:
        link = {"link": file.name, "token": file.data["token"]}
    return WebSettings(
        opening["web_host"] or "127.0.0.1", opening["web_port"] or 8001,
        (str(context.info_name), *_words(context, ABOUT_WEB | {"web"} | without)), mirror=opening["mirror"],
        names=names, tabs=TABS_WITH_ENGINES if own_engine else TABS, **link,
    )


def class_file(opening: dict[str, Any], new: bool = True) -> ClassFile | None:
    """Returns the file of the class of --class-link; None without this option. Raises EngineError."""
    from minitui.teaching.class_file import ClassFile

    name = opening["class_link"]
    return ClassFile(data_dir() / "classes", name, new) if name else None


def open_in_browser(context: typer.Context, opening: dict[str, Any], own_engine: bool = True) -> None:
    """With --web, serves this command in a browser, and exits at the end. Without --web, returns."""
    web = in_browser(context, opening, own_engine)
    if web is not None:
        from minitui.web.serve import run_web

        raise typer.Exit(run_web(web))


def _typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _words(context: typer.Context, without: set[str]) -> list[str]:
    """Returns the options and arguments of this command as the user types them. A value that can also come from the
    environment, such as a key, is put there: other users of this machine see the words of a process."""
    words: list[str] = []
    arguments: list[str] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        if name in without or not _typed(context, name):
            continue
        value = context.params[name]
        values = list(value) if isinstance(value, list | tuple) else [value]
        if isinstance(parameter.envvar, str):
            os.environ[parameter.envvar] = str(value)
        elif parameter.param_type_name == "argument":
            arguments += map(str, values)
        elif isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            words += (f"{max(parameter.opts, key=len)}={one}" for one in values)
    return [*words, "--", *arguments] if arguments else words
