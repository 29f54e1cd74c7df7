"""`minitui chat`: chats with a new engine, with one or several servers, or in a browser."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.errors import EngineError
from minitui import settings as settings_file
from minitui.chat.model_choice import Choice, choose_model, served_choice
from minitui.chat.store import Store
from minitui.cli.browser import in_browser
from minitui.cli.launch import live_source, log_path, make_sampling, recorded, run_app, settings_with
from minitui.cli.options import Key, Model, System, chosen_options, engine_config, with_options
from minitui.protocol import ServerInfo
from minitui.sources.base import Source
from minitui.tui.terminal.guard import need_terminal

if TYPE_CHECKING:
    from minitui.tui.apps.app import MinituiApp

TUTOR_KV_TOKENS = 4096  # the bundled model's longest conversation


@with_options("sampling", "looks", "opening", "engine")
def chat(
    context: typer.Context, sampling: dict[str, Any], looks: dict[str, Any], opening: dict[str, Any],
    engine: dict[str, Any],
    model: Model = None,
    system: System = None,
    resume: Annotated[bool, typer.Option("--resume", help="Reopen the chats of the last run.")] = False,
    connect: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of a server: minitui serve, vLLM, or any server with OpenAI's endpoints. For replicas, "
            "repeat the option or separate addresses with commas: each chat runs on the replica that has cached its "
            "prefix."
        ),
    ] = None,
    key: Key = "",
) -> None:
    """Chat, and see what the engine does.

    \b
      minitui chat
      minitui chat --model ./Qwen3-8B --device cuda
      minitui chat --model Qwen/Qwen3-8B --dummy-weights   the model's shape with random weights
      minitui chat --kv-blocks 64                          a small pool: see evictions and preemptions
      minitui chat --connect http://desk:8000              a server (minitui serve)
      minitui chat --connect http://vllm:8000              vLLM; its panels need --scheduler-cls
                                                           minitui.vllm.RecordingScheduler (see README)
      minitui chat --connect http://a:8000,http://b:8000   replicas; /pin keeps a chat on one of them
      minitui chat --web                                   in a browser; all tabs share one engine
      minitui chat --web --mirror --web-host 0.0.0.0       others watch your application in their browsers
    """
    urls = [url for text in connect or () for url in text.split(",") if url.strip()]
    if connect is not None and not urls:
        raise typer.BadParameter("--connect needs an address, as in http://host:8000")
    if urls and (own := chosen_options(engine)):
        raise typer.BadParameter(f"{', '.join(own)}: engine options belong to the server, not to --connect")
    ours = {*engine, *(() if urls else ("model",))}  # options of the engine that all tabs use
    if web := in_browser(context, opening, own_engine=False, without=frozenset(ours)):
        from minitui.web.serve import OwnServer, run_web

        if urls:
            raise typer.Exit(run_web(web))
        choice = choose_model(model)
        if web.mirror:  # one application; otherwise the tabs of many users share the pool
            engine = for_one_user(model, engine)
        key = os.environ["MINITUI_KEY"] = secrets.token_urlsafe(24)  # the applications inherit it
        raise typer.Exit(run_web(web, OwnServer(engine_config(choice.name, **engine), choice.label, log_path(), key)))
    record: Path | None = opening["record"]
    settings = settings_with(looks)
    need_terminal("minitui chat", 'minitui ask "What is a KV cache?"')
    chosen = make_sampling(sampling, settings.chat)
    system = settings.chat.system if system is None else system
    app: type[MinituiApp] | None = None
    source: Source
    if urls:
        source, choice, app = connect_to(urls, key, model, system, record is not None)
    else:
        choice = choose_model(model, system)
        source = live_source(choice, for_one_user(model, engine))
    store = Store(settings_file.data_dir() / "chats.sqlite")
    raise typer.Exit(run_app(app, recorded(source, record), settings, choice, chosen, store, resume))


def connect_to(
    urls: list[str], key: str, model: str | None, system: str | None, record: bool
) -> tuple[Source, Choice, type[MinituiApp] | None]:
    """Returns the source for one or several servers, their model, and the application class (None: MinituiApp). The
    data parallel ranks of vLLM are several servers. If all of several servers send minitui's records, they receive
    token ids, else texts. `record`: the caller will record the source. Raises EngineError."""
    from minitui.sources.openai import OpenAISource
    from minitui.sources.remote import RemoteSource
    from minitui.sources.replicas import ReplicaSource
    from minitui.sources.vllm import HOW, Engine, VllmSource, look_at
    from minitui.tui.apps.openai_app import ForeignApp
    from minitui.tui.apps.replica_app import ForeignReplicaApp, ReplicaApp

    if record and len(urls) > 1:
        raise EngineError("--record records one engine: connect to one address, or use minitui serve --record")
    looked = look_at(urls, key)
    errors = [found for found in looked if isinstance(found, EngineError)]
    if len(errors) == len(urls):
        raise errors[0] if len(urls) == 1 else EngineError("; ".join(map(str, errors)))
    found = [(None, []) if isinstance(one, EngineError) else one for one in looked]
    if len(urls) == 1:
        [url], [(info, engines)] = urls, found
        told = next((engine.info for engine in engines if engine.info), info)
        if told and model not in (None, told.model):
            raise EngineError(f"{url} serves {told.model!r}, not {model!r}: remove --model")
        if info is not None:
            return RemoteSource(url, key), served_choice(info, system), None
        if told is None and record:
            raise EngineError(f"{url} sends no engine records: there is nothing to record. For vLLM, {HOW}")
        if told is None:
            return OpenAISource(url, key, model or ""), served_choice(ServerInfo(), system), ForeignApp
        if len(engines) == 1:
            return VllmSource(engines[0], key), served_choice(told, system), None
        if record:
            addresses = ", ".join(engine.telemetry for engine in engines)
            raise EngineError(f"--record records one engine; this vLLM has several: connect to one of {addresses}")
        return ReplicaSource(engines, key), served_choice(told, system), ReplicaApp
    servers: list[str | Engine] = []
    for url, (_, engines) in zip(urls, found, strict=True):
        servers += engines or [url]
    infos = [info for info, _ in found if info is not None] + [e.info for _, engines in found for e in engines]
    exact = all(isinstance(one, EngineError) or one[0] is not None or one[1] for one in looked)
    source = ReplicaSource(servers, key, model or "", exact=exact)
    choice = served_choice(next(filter(None, infos), ServerInfo()), system)
    return source, choice, ReplicaApp if infos else ForeignReplicaApp


def for_one_user(model: str | None, engine: dict[str, Any]) -> dict[str, Any]:
    """Returns the engine options with a small pool for the bundled model, unless the user chose one. The pool holds one
    conversation of maximum length. In a pool as large as memory allows, the few blocks of a chat with this small model
    could not be seen."""
    if model is not None or engine["kv_blocks"] is not None:
        return engine
    return {**engine, "kv_tokens": TUTOR_KV_TOKENS}
