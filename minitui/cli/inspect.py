"""`minitui inspect`: the panels over a server that somebody else uses: minitui serve, or vLLM."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar

import typer

from engine.errors import EngineError
from minitui import settings as settings_file
from minitui.chat.conversation import Sampling
from minitui.chat.model_choice import served_choice
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
    kv_events: Annotated[
        str | None,
        typer.Option(
            help="Without minitui's recorder: where vLLM or SGLang publishes KV events, tcp://HOST:PORT[,REPLAY_PORT]. "
            "Default: port 5557 of the server's host, and the next port for the replay.",
        ),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="For KV events: the tokenizer, a directory or a model's name. Default: the model's.")
    ] = "",
    record: Record = None,
) -> None:
    """Watch a server: the same application as `minitui chat --connect`, which begins with the panels.

    \b
      minitui inspect --connect http://desk:8000     minitui serve
      minitui inspect --connect http://vllm:8000     vLLM, started with
                                                     --scheduler-cls minitui.vllm.RecordingScheduler
      minitui inspect --connect http://vllm:8000 --kv-events tcp://vllm:5557,5558
                                                     vLLM or SGLang without this class: the cached
                                                     texts, the pool and the server's metrics. The
                                                     usual ports need no --kv-events
    """
    settings = settings_file.load()
    apply_looks(settings, looks)
    need_terminal("minitui inspect", "minitui tail run.trace")
    if kv_events is not None:
        if record is not None:
            raise EngineError("--record needs the records of steps, and KV events have none: remove --record")
        raise typer.Exit(_over_events(connect, kv_events, key, tokenizer, settings))
    source, choice, app = connect_to([connect], key, None, None, record is not None)
    from minitui.sources.openai import OpenAISource
    from minitui.tui.app import MinituiApp

    tried = ""
    if isinstance(source, OpenAISource):
        events, tried = _find_events(connect)
        if events:
            raise typer.Exit(_over_events(connect, events, key, tokenizer, settings, tried))

    class InspectApp(app or MinituiApp):  # type: ignore[misc]
        DEFAULT_MODE: ClassVar[str] = "inspect"
        TRIED = f", and {tried}" if tried else ""

    raise typer.Exit(run_app(recorded(source, record), choice, settings, Sampling(), make=InspectApp))


def _find_events(url: str) -> tuple[str, str]:
    """Returns where KV events are published (empty: nowhere), and a clause about what was tried or found."""
    try:
        from minitui.vllm.kv_sockets import FIRST_PORT, find_events
    except ImportError:
        return "", "its KV events were not looked for, because pyzmq is missing (pip install 'minitui[vllm]')"
    found = asyncio.run(find_events(url))
    if found.ranks > 1:
        host = found.events.partition(f":{FIRST_PORT}")[0]
        ranks = f"{found.ranks} data parallel ranks publish KV events: this is rank 0"
        return found.events, f"{ranks}; --kv-events {host}:{FIRST_PORT + 1} shows rank 1"
    return found.events, found.tried


def _over_events(
    url: str, events: str, key: str, tokenizer: str, settings: settings_file.Settings, note: str = ""
) -> int:
    """Runs the application over KV events; returns the exit code. `note`: a clause about the events."""
    try:
        from minitui.tui.cache_app import CacheApp
        from minitui.vllm.kv_source import KvSource
    except ImportError as error:
        raise EngineError(f"--kv-events needs more packages ({error}): pip install 'minitui[vllm]'") from error
    source = KvSource(url, events, key, tokenizer, f"{note[0].upper()}{note[1:]}." if note else "")
    return run_app(source, served_choice({}, None), settings, Sampling(), make=CacheApp)
