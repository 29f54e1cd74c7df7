"""`minitui inspect`: the panels over a server that somebody else uses: minitui serve, or vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from engine.errors import EngineError
from minitui import settings as settings_file
from minitui.chat.model_choice import served_choice
from minitui.cli.browser import open_in_browser
from minitui.cli.chat import connect_to
from minitui.cli.launch import recorded, run_app, settings_with
from minitui.cli.options import Key, with_options
from minitui.protocol import ServerInfo
from minitui.tui.terminal.guard import need_terminal

INSTALL = "pip install 'minitui[vllm]'"


@with_options("looks", "opening")
def inspect(
    context: typer.Context, looks: dict[str, Any], opening: dict[str, Any],
    connect: Annotated[str, typer.Option(help="Address of the server, as in http://host:8000.")],
    key: Key = "",
    kv_events: Annotated[
        str | None,
        typer.Option(
            help="Without minitui's recorder: where vLLM or SGLang publishes KV events, tcp://HOST:PORT[,REPLAY_PORT]. "
            "Default: where SGLang says, else port 5557 of the server's host, and the next port for the replay.",
        ),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="For KV events: the tokenizer, a directory or a model's name. Default: the model's.")
    ] = "",
) -> None:
    """Watch a server. It is the application of `minitui chat --connect`, and begins with the panels.

    \b
      minitui inspect --connect http://desk:8000     minitui serve
      minitui inspect --connect http://vllm:8000     vLLM, started with
                                                     --scheduler-cls minitui.vllm.RecordingScheduler
      minitui inspect --connect http://vllm:8000 --kv-events tcp://vllm:5557,5558
                                                     vLLM or SGLang without this class: the cached
                                                     texts, the pool and the server's metrics. The
                                                     usual ports need no --kv-events
    """
    open_in_browser(context, opening, own_engine=False)
    record: Path | None = opening["record"]
    settings = settings_with(looks)
    need_terminal("minitui inspect", "minitui tail run.trace")
    if kv_events is not None:
        if record is not None:
            raise EngineError("--record needs the records of steps, and KV events have none: remove --record")
        raise typer.Exit(_over_events(connect, kv_events, "", key, tokenizer, settings))
    source, choice, app = connect_to([connect], key, None, None, record is not None)
    from minitui.sources.openai import OpenAISource
    from minitui.tui.apps.app import MinituiApp

    if isinstance(source, OpenAISource):
        raise typer.Exit(_over_events(connect, *find_events(connect, key), key, tokenizer, settings))

    class InspectApp(app or MinituiApp):  # type: ignore[misc]
        DEFAULT_MODE: ClassVar[str] = "inspect"

    raise typer.Exit(run_app(InspectApp, recorded(source, record), settings, choice))


def find_events(url: str, key: str = "") -> tuple[str, str]:
    """Returns where the server publishes KV events, and a sentence about them. Raises EngineError if it does not."""
    try:
        from minitui.vllm import kv_sockets
    except ImportError as error:
        raise EngineError(_nothing(url, f"its KV events need more packages: {INSTALL} ({error})")) from error
    found = asyncio.run(kv_sockets.find_events(url, key))
    if not found.events:
        raise EngineError(_nothing(url, found.tried))
    if found.ranks == 1:
        return found.events, f"{found.tried[:1].upper()}{found.tried[1:]}." if found.tried else ""
    ranks = f"{found.ranks} data parallel ranks publish KV events"
    return found.events, f"{ranks}: this is rank 0; --kv-events {found.second} shows rank 1."


def _nothing(url: str, tried: str) -> str:
    from minitui.sources.vllm import HOW

    return (
        f"{url} does not report what its engine does, and {tried}. For vLLM, {HOW}, or let it publish KV events "
        "(README, Watch vLLM). minitui chat --connect shows the server's own figures"
    )


def _over_events(url: str, events: str, note: str, key: str, tokenizer: str, settings: settings_file.Settings) -> int:
    """Runs the application over KV events; returns the exit code. `note`: a sentence about the events."""
    try:
        from minitui.tui.apps.cache_app import CacheApp
        from minitui.vllm.kv_source import KvSource
    except ImportError as error:
        raise EngineError(f"--kv-events needs more packages ({error}): {INSTALL}") from error
    return run_app(CacheApp, KvSource(url, events, key, tokenizer, note), settings, served_choice(ServerInfo(), None))
