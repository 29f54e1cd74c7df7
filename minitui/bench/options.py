"""Makes command lines from dataclasses: each field is an option, declared as `Annotated[type, typer.Option(...)]`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, get_type_hints

import typer

Options = TypeVar("Options")


def run(
    options: type[Options], action: Callable[[Options], None], arguments: Sequence[str] | None, name: str, help: str
) -> NoReturn:
    """Parses `arguments` (None: the arguments of this process), calls `action` with the options, and exits."""

    def command(**given: Any) -> None:
        action(options(**given))

    hints = get_type_hints(options, include_extras=True)
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [field.replace(annotation=hints[name]) for name, field in inspect.signature(options).parameters.items()]
    )
    command.__annotations__ = hints
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.command(help=help)(command)
    app(None if arguments is None else list(arguments), prog_name=name)
    raise SystemExit
