"""Puts the parts together for one command: settings, model, engine process, chats, application."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from minitui import settings as settings_file
from minitui.models import Choice, choose_model, load_codec
from minitui.sessions import Chats, Sampling
from minitui.source import LiveSource


def live_source(choice: Choice, options: dict[str, Any]) -> LiveSource:
    """An engine of our own for `choice`, not started yet; its log goes to the data directory."""
    from minitui.cli import engine_config

    return LiveSource(engine_config(model=choice.name, **options), log_path(), choice.label)


def log_path() -> Path:
    """The log of this process's engine; those of earlier runs are kept to the last ten."""
    directory = settings_file.data_dir() / "logs"
    directory.mkdir(exist_ok=True)
    for old in sorted(directory.glob("engine-*.log"), key=lambda p: p.stat().st_mtime)[:-10]:
        old.unlink(missing_ok=True)
    return directory / f"engine-{os.getpid()}.log"


def make_sampling(options: dict[str, Any], defaults: settings_file.ChatSettings) -> Sampling:
    """Command line before settings before the checkpoint; raises InvalidRequest."""
    chosen = {name: getattr(defaults, name) if value is None else value for name, value in options.items()}
    sampling = Sampling(**chosen)
    sampling.params({}).validate(1 << 31)
    return sampling


def run_chat(
    model: str | None, system: str | None, options: dict[str, Any], sampling: dict[str, Any], looks: dict[str, Any], resume: bool
) -> int:  # fmt: skip
    """`minitui chat`; returns the exit code."""
    from minitui.store import Store

    settings = settings_file.load()
    apply_looks(settings, looks)
    choice = choose_model(model, settings.chat.system if system is None else system)
    drawn = make_sampling(sampling, settings.chat)
    source = live_source(choice, options)
    store = Store(settings_file.data_dir() / "chats.sqlite")
    return run_app(source, choice, settings, drawn, store, resume)


def apply_looks(settings: settings_file.Settings, looks: dict[str, Any]) -> None:
    """What the command line says about looks holds for this run."""
    if looks["theme"] is not None:
        name = looks["theme"].removeprefix("minitui-")
        if name not in ("dark", "light", "projector"):
            raise EngineError(f"there is no theme {looks['theme']!r}: there are dark, light and projector")
        settings.theme = f"minitui-{name}"
    for name in ("fps", "ascii"):
        if looks[name] is not None:
            setattr(settings, name, looks[name])


def run_app(
    source: LiveSource, choice: Choice, settings: settings_file.Settings, sampling: Sampling, store: Any = None,
    resume: bool = False, script: Any = None,
) -> int:  # fmt: skip
    """Run the application until it is left; returns the exit code. `script(app)`, a coroutine, drives a demo."""
    from minitui.app import MinituiApp
    from minitui.terminal import TerminalGuard

    chats = Chats(source, store, sampling)
    if resume:
        chats.restore()
    guard = TerminalGuard()
    app = MinituiApp(
        source, chats, settings, system=choice.system, known_questions=choice.known_questions, speaker=choice.speaker,
        load_codec=load_codec, guard=guard, script=script,
    )  # fmt: skip
    try:
        app.run()
    finally:
        guard.restore()
    return 128 + guard.signal if guard.signal else app.return_code or 0


def run_ask(
    question: str, model: str | None, system: str | None, options: dict[str, Any], sampling: dict[str, Any], as_json: bool
) -> int:  # fmt: skip
    """`minitui ask`; returns the exit code."""
    from minitui.ask import ask

    settings = settings_file.load()
    choice = choose_model(model, settings.chat.system if system is None else system)
    drawn = make_sampling(sampling, settings.chat)

    async def main() -> int:
        return await ask(live_source(choice, options), question, choice.system, drawn, as_json)

    return asyncio.run(main())


def run_demo(name: str, kv_blocks: int, plain: bool) -> int:
    """`minitui demo NAME`; returns the exit code."""
    from minitui.demo import DEMOS, tell_plainly

    if name not in DEMOS:
        raise EngineError(f"there is no demo {name!r}: there is {', '.join(DEMOS)}")
    demo = DEMOS[name]
    choice = choose_model(None)
    options = {"kv_blocks": kv_blocks, "no_prefix_caching": False, **demo.options}
    sampling = Sampling(temperature=0.0, max_tokens=demo.max_tokens)
    if plain:

        async def main() -> int:
            return await tell_plainly(demo, live_source(choice, options), choice.system, sampling)

        return asyncio.run(main())
    settings = settings_file.load()
    return run_app(live_source(choice, options), choice, settings, sampling, script=demo.script)
