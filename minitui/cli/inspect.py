"""`minitui inspect`: the panels over a server that somebody else uses: minitui serve, or vLLM."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import typer

from minitui import settings as settings_file
from minitui.chat.conversation import Sampling
from minitui.cli.chat import connect_to
from minitui.cli.launch import apply_looks, recorded, run_app
from minitui.cli.options import Record, with_options
from minitui.tui.terminal import need_terminal


@with_options("looks")
def inspect(
    looks: dict[str, Any],
    connect: Annotated[str, typer.Option(help="Address of the server, as in http://host:8000.")],
    key: Annotated[
        str, typer.Option(help="The server's API key. The environment variable is safer.", envvar="MINITUI_KEY")
    ] = "",
    record: Record = None,
) -> None:
    """Watch a server: the same application as `minitui chat --connect`, which begins with the panels.

    \b
      minitui inspect --connect http://desk:8000     minitui serve
      minitui inspect --connect http://vllm:8000     vLLM, started with
                                                     --scheduler-cls minitui.vllm.RecordingScheduler
    """
    settings = settings_file.load()
    apply_looks(settings, looks)
    need_terminal("minitui inspect", "minitui tail run.trace")
    source, choice, app = connect_to([connect], key, None, None, record is not None)
    from minitui.tui.app import MinituiApp

    class InspectApp(app or MinituiApp):  # type: ignore[misc]
        DEFAULT_MODE: ClassVar[str] = "inspect"

    raise typer.Exit(run_app(recorded(source, record), choice, settings, Sampling(), make=InspectApp))
