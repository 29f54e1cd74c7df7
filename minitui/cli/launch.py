"""Puts the parts together for one command: settings, model, engine process, chats, application."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError
from minitui import settings as settings_file
from minitui.chat.model_choice import Choice, choose_model, load_codec
from minitui.chat.sessions import Chats, Sampling
from minitui.sources.local import LiveSource
from minitui.tui.terminal import TerminalGuard, need_terminal, takes_unicode, tolerant_input
from minitui.visible import visible_line

if TYPE_CHECKING:
    from minitui.tui.app import MinituiApp
    from minitui.web.serve import WebSettings

FOR_PIPES = 'minitui ask "What is a KV cache?"'


def live_source(choice: Choice, options: dict[str, Any]) -> LiveSource:
    """An engine of our own for `choice`, not started yet; its log goes to the data directory."""
    from minitui.cli.options import engine_config

    return LiveSource(engine_config(choice.name, **options), log_path(), choice.label)


def log_path() -> Path:
    """The log of this process's engine; those of earlier runs are kept to the last ten."""
    directory = settings_file.data_dir() / "logs"
    try:
        directory.mkdir(exist_ok=True)
        for old in sorted(directory.glob("engine-*.log"), key=_modified)[:-10]:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise settings_file.SettingsError(
            f"{directory} cannot be written: {error.strerror}. Set MINITUI_DATA to a directory that can."
        ) from None
    return directory / f"engine-{os.getpid()}.log"


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another minitui has just taken it away
        return 0.0


def make_sampling(options: dict[str, Any], defaults: settings_file.ChatSettings) -> Sampling:
    """Command line before settings before the checkpoint; raises InvalidRequest."""
    chosen = {name: getattr(defaults, name) if value is None else value for name, value in options.items()}
    sampling = Sampling(**chosen)
    sampling.params({}).validate(1 << 31)
    return sampling


def run_chat(
    model: str | None,
    system: str | None,
    options: dict[str, Any],
    sampling: dict[str, Any],
    looks: dict[str, Any],
    resume: bool,
    record: Path | None = None,
) -> int:
    """`minitui chat`; returns the exit code."""
    from minitui.chat.store import Store

    settings = settings_file.load()
    apply_looks(settings, looks)
    need_terminal("minitui chat", FOR_PIPES)
    choice = choose_model(model, settings.chat.system if system is None else system)
    drawn = make_sampling(sampling, settings.chat)
    source = recorded(live_source(choice, options), record)
    store = Store(settings_file.data_dir() / "chats.sqlite")
    return run_app(source, choice, settings, drawn, store, resume)


def run_connected(
    urls: list[str],
    key: str,
    model: str | None,
    system: str | None,
    sampling: dict[str, Any],
    looks: dict[str, Any],
    resume: bool,
    record: Path | None = None,
) -> int:
    """`minitui chat --connect URL`, with one address or several; returns the exit code."""
    from minitui.chat.model_choice import PLAIN_SYSTEM_PROMPT
    from minitui.chat.store import Store
    from minitui.sources.remote import RemoteSource, probe

    settings = settings_file.load()
    apply_looks(settings, looks)
    need_terminal("minitui chat", FOR_PIPES)
    drawn = make_sampling(sampling, settings.chat)
    wanted = settings.chat.system if system is None else system
    store = Store(settings_file.data_dir() / "chats.sqlite")
    if len(urls) > 1:
        if record is not None:
            raise EngineError("--record keeps what one engine does: connect to one address, or minitui serve --record")
        return _run_replicas(urls, key, model, wanted, settings, drawn, store, resume)
    info = probe(urls[0], key)
    if info is None:
        prompt = PLAIN_SYSTEM_PROMPT if system is None else system
        if record is not None:
            raise EngineError(f"{urls[0]} does not tell what its engine does, so that there is nothing to record")
        return _run_foreign(urls[0], key, model, prompt, settings, drawn, store, resume)
    if info and model not in (None, info["model"]):
        raise EngineError(f"{urls[0]} serves {info['model']!r}, not {model!r}: leave --model out")
    source = recorded(RemoteSource(urls[0], key), record)
    return run_app(source, _served(info, wanted), settings, drawn, store, resume)


def _served(info: dict[str, Any], system: str | None) -> Choice:
    """What a minitui server has, as the application needs it."""
    from minitui import tutor
    from minitui.chat.model_choice import PLAIN_SYSTEM_PROMPT

    if info.get("bundled"):
        prompt = tutor.DEFAULT_SYSTEM_PROMPT if system is None else system
        return Choice("", "", prompt, "tutor", tutor.known_questions())
    return Choice("", "", PLAIN_SYSTEM_PROMPT if system is None else system, "model")


def _run_replicas(
    urls: list[str], key: str, model: str | None, system: str | None, settings: settings_file.Settings,
    sampling: Sampling, store: Any, resume: bool,
) -> int:  # fmt: skip
    """Chats on several servers; token-exact if all of them are minitui servers."""
    from minitui.sources.remote import probe_all
    from minitui.sources.replicas import ReplicaSource
    from minitui.tui.replica_app import BlindReplicaApp, ReplicaApp

    found = probe_all(urls, key)
    told = [info for info in found if info is not None and not isinstance(info, EngineError)]
    if not told and None not in found:
        raise EngineError("; ".join(str(error) for error in found))
    exact = None not in found
    source = ReplicaSource(urls, key, model or "", exact)
    choice = _served(next((info for info in told if info), {}), system)
    app = ReplicaApp if told else BlindReplicaApp
    return run_app(source, choice, settings, sampling, store, resume, make=app)


def _run_foreign(
    url: str, key: str, model: str | None, system: str, settings: settings_file.Settings, sampling: Sampling,
    store: Any, resume: bool,
) -> int:  # fmt: skip
    """Chats on a server of another make."""
    from minitui.sources.openai import ForeignSource
    from minitui.tui.openai_app import ForeignApp

    source = ForeignSource(url, key, model or "")
    return run_app(source, Choice("", "", system, "model"), settings, sampling, store, resume, make=ForeignApp)


def run_in_browser(
    model: str | None, options: dict[str, Any], web: WebSettings, key: str, told: dict[str, Any]
) -> int:
    """`minitui chat --web`; returns the exit code. `told`: what the applications are told on their command lines; None
    is left out."""
    from minitui.cli.options import engine_config
    from minitui.web.serve import run_web

    choice = choose_model(None if web.connect else model)
    if key:
        os.environ["MINITUI_KEY"] = key  # for the applications that are started
    if web.connect:
        told = {**told, "model": model}
    flags = {("ascii", True): "--ascii", ("ascii", False): "--unicode", ("resume", True): "--resume"}
    passed = (
        flags.get((name, value)) or f"--{name.replace('_', '-')}={value}"
        for name, value in told.items() if value is not None
    )  # fmt: skip
    web = replace(web, options=tuple(passed))
    return run_web(web, engine_config(choice.name, **options), choice.label, log_path())


def apply_looks(settings: settings_file.Settings, looks: dict[str, Any]) -> None:
    """What the command line says about looks holds for this run."""
    if looks["theme"] is not None:
        settings.theme = theme_name(looks["theme"])
    for name in ("fps", "ascii"):
        if looks[name] is not None:
            setattr(settings, name, looks[name])


def theme_name(theme: str) -> str:
    """The full name of a theme. Raises EngineError if there is none of that name."""
    name = theme.removeprefix("minitui-")
    if name not in ("dark", "light", "projector"):
        raise EngineError(f"there is no theme {theme!r}: there are dark, light and projector")
    return f"minitui-{name}"


def run_app(
    source: Any,
    choice: Choice,
    settings: settings_file.Settings,
    sampling: Sampling,
    store: Any = None,
    resume: bool = False,
    script: Any = None,
    make: Any = None,
) -> int:
    """Run the application until it is left; returns the exit code. `script(app)`, a coroutine, drives a demo; `make` is
    the application's class, or makes one of what that takes."""
    # How many times a second Textual looks whether something must be redrawn. At its default of 60 an echo waits up to
    # 17 ms for that; measured while eight chats are answered, 120 takes a quarter off the 95th percentile.
    os.environ.setdefault("TEXTUAL_FPS", "120")
    from minitui.tui.app import MinituiApp

    if not takes_unicode(sys.__stderr__):  # where Textual draws
        settings.ascii = True
    chats = Chats(source, store, sampling)
    if resume:
        chats.restore()
    guard = TerminalGuard()
    app = (make or MinituiApp)(
        source,
        chats,
        settings,
        system=choice.system,
        known_questions=choice.known_questions,
        speaker=choice.speaker,
        load_codec=load_codec,
        guard=guard,
        script=script,
    )
    status = 1
    try:
        status = show(app, guard)
    finally:
        status = tell_recording(source, status)
        if chats.unsaved:
            print(f"minitui: {len(chats.unsaved)} chats were not kept: {chats.save_error}", file=sys.stderr)
            status = status or 1
    return status


def show(app: MinituiApp, guard: TerminalGuard) -> int:
    """Run the application until it is left, and give the terminal back; the exit code. Raises what crashed it."""
    with guard.watching(), tolerant_input():
        app.run()
    if app.crash is not None:
        raise app.crash
    return 128 + guard.signal if guard.signal else app.return_code or 0


def run_ask(
    question: str,
    model: str | None,
    system: str | None,
    options: dict[str, Any],
    sampling: dict[str, Any],
    as_json: bool,
    record: Path | None = None,
) -> int:
    """`minitui ask`; returns the exit code."""
    from minitui.cli.ask import ask

    settings = settings_file.load()
    choice = choose_model(model, settings.chat.system if system is None else system)
    drawn = make_sampling(sampling, settings.chat)

    async def main() -> int:
        source = recorded(live_source(choice, options), record)
        status = await ask(source, question, choice.system, drawn, as_json)
        return tell_recording(source, status)

    return asyncio.run(main())


def run_chats(words: str, show: str | None, export: Path | None) -> int:
    """`minitui chats`: what the chat file holds; returns the exit code."""
    import time

    from minitui.chat import transcripts
    from minitui.chat.store import Store

    store = Store(settings_file.data_dir() / "chats.sqlite")
    try:
        if show is not None:
            chat = store.load(show)
            if chat is None:
                raise EngineError(f"there is not one chat whose id begins with {show!r}: minitui chats lists them")
            if export is None:
                print(transcripts.as_markdown(chat), end="")
            else:
                transcripts.write(chat, export)
                print(f"written to {export}")
            return 0
        if export is not None:
            raise EngineError("which chat? --export goes with --show ID; minitui chats lists them")
        found = store.search(words, most=1000)
        titles = {one.id: one.title for one in store.search(most=100_000)} if any(one.parent for one in found) else {}
        for one in found:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.created))
            fork = f", fork of {titles.get(one.parent, one.parent)}" if one.parent else ""
            told = f"{one.title} ({one.messages} messages{', closed' if one.closed else ''}{fork})"
            print(f"{one.id}  {when}  {visible_line(told)}")
            print(f"          {visible_line(one.line[:100])}")
        if not found:
            raise EngineError(f"no chat holds {words!r}" if words else "no chat has been kept yet")
        return 0
    finally:
        store.close()


def run_demo(name: str, options: dict[str, Any], plain: bool, beat: float, record: Path | None = None) -> int:
    """`minitui demo NAME`; returns the exit code. `options` of the command line come before the scenario's own."""
    from minitui.teaching.demo import DEMOS, tell_plainly
    from minitui.tui.demo import play_in_app

    if name not in DEMOS:
        raise EngineError(f"there is no demo {name!r}: there are {', '.join(DEMOS)}")
    demo = DEMOS[name]
    choice = choose_model(None)
    chosen = {"kv_blocks": None, "no_prefix_caching": False, **demo.options}
    chosen |= {key: value for key, value in options.items() if value is not None}
    source = recorded(live_source(choice, chosen), record)
    sampling = Sampling(temperature=0.0, max_tokens=demo.max_tokens)

    async def restart(changes: dict[str, Any]) -> None:
        from minitui.cli.options import engine_config

        await source.reconfigure(engine_config(choice.name, **{**chosen, **changes}))

    if plain:
        status = asyncio.run(tell_plainly(demo, source, choice.system, sampling, beat=beat, restart=restart))
        return tell_recording(source, status)
    settings = settings_file.load()
    return run_app(source, choice, settings, sampling, script=lambda app: play_in_app(demo, app, restart, beat))


def recorded(source: Any, path: Path | None) -> Any:
    """The source, with everything that it says written to `path`, if there is one."""
    if path is None:
        return source
    from minitui.sources.recording import RecordingSource

    return RecordingSource(source, path)


def tell_recording(source: Any, status: int = 0) -> int:
    """Say so if a recording was not completed; returns the exit code, which is `status` if it was."""
    if error := getattr(source, "recording_error", ""):
        print(f"minitui: the recording is not complete: {error}", file=sys.stderr)
        return status or 1
    return status


def lesson_source(number: int) -> tuple[Choice, LiveSource, Any]:
    """The bundled model in an engine with a lesson's options, and what puts another engine in its place."""
    from minitui.cli.options import engine_config
    from minitui.teaching.lessons import lesson

    choice = choose_model(None)
    base = {"kv_blocks": None, "no_prefix_caching": False}
    source = live_source(choice, {**base, **lesson(number).options})

    async def restart(options: dict[str, Any]) -> None:
        await source.reconfigure(engine_config(choice.name, **{**base, **options}))

    return choice, source, restart


def run_lesson(number: str, plain: bool) -> int:
    """`minitui lesson N`; returns the exit code."""
    from minitui.teaching.lessons import lesson

    chosen = lesson(number)
    choice, source, restart = lesson_source(chosen.number)
    sampling = Sampling(temperature=0.0, max_tokens=60)
    if plain:
        from minitui.teaching.lessons.plain import tell_alone

        return asyncio.run(tell_alone(chosen, source, choice.system, sampling, print))
    from minitui.tui.lessons_app import LessonApp

    def make(*arguments: Any, **options: Any) -> LessonApp:
        del options["script"]
        return LessonApp(*arguments, lesson=chosen, restart=restart, **options)

    return run_app(source, choice, settings_file.load(), sampling, make=make)


def run_list() -> int:
    """`minitui replay` without a file: the recordings that come along; returns the exit code."""
    from minitui.trace.bundled import bundled, describe
    from minitui.trace.reader import TraceReader

    for name, path in bundled().items():
        print(f"minitui replay {name}\n    {describe(TraceReader(path))}")
    print("minitui replay FILE\n    one of your own, written with --record FILE")
    return 0


def run_replay(trace: str, speed: float | None, looks: dict[str, Any]) -> int:
    """`minitui replay FILE|NAME`; returns the exit code."""
    from minitui.sources.replay import ReplaySource
    from minitui.trace.bundled import find_trace, is_bundled, watching_speed
    from minitui.trace.reader import TraceReader
    from minitui.tui.replay_app import ReplayApp

    settings = settings_file.load()
    apply_looks(settings, looks)
    need_terminal("minitui replay", "minitui tail FILE or minitui replay FILE --export md")
    path = find_trace(trace)
    reader = TraceReader(path)  # what is wrong with it is said before the screen is taken
    if speed is None:
        speed = watching_speed(reader) if is_bundled(path) else 1.0
    source = ReplaySource(path, speed)
    return run_app(source, Choice("", "", "", "model"), settings, Sampling(), make=ReplayApp)


def run_export(
    trace: str | Path, kind: str, out: Path | None, step: int | None, size: str, theme: str | None
) -> Path:
    """`minitui replay FILE|NAME --export KIND`; returns the file written, beside FILE or in the working directory."""
    from minitui.export import PICTURES, SUFFIXES, export
    from minitui.trace.bundled import find_trace, is_bundled

    trace = find_trace(str(trace))
    if out is None and is_bundled(trace) and kind in SUFFIXES:
        out = Path(trace.stem + SUFFIXES[kind])
    if kind not in PICTURES:
        return export(trace, kind, out)
    from minitui.export.svg import write_picture

    columns, _, rows = size.partition("x")
    digits = size.isascii() and columns.isdigit() and rows.isdigit()
    if not (digits and len(size) < 9 and 40 <= int(columns) <= 1000 and 12 <= int(rows) <= 500):
        raise EngineError(f"the size is {size!r}: it must be columns x rows, from 40x12 to 1000x500, as in 120x36")
    name = theme_name(theme or "dark")
    return write_picture(str(trace), kind, out, step, (int(columns), int(rows)), name)


def run_tail(trace: str | None, kv_blocks: int | None) -> int:
    """`minitui tail`; returns the exit code."""
    from minitui.cli.tail import tail_live, tail_trace, tail_watch

    if trace is not None and trace.startswith(("http://", "https://")):
        from minitui.sources.remote import RemoteSource

        address = trace

        async def watch() -> int:
            return await tail_watch(RemoteSource(address, os.environ.get("MINITUI_KEY", "")), print)

        return asyncio.run(watch())
    if trace is not None:
        from minitui.trace.bundled import find_trace

        return tail_trace(find_trace(trace), print)
    choice = choose_model(None)
    source = live_source(choice, {"kv_blocks": kv_blocks, "no_prefix_caching": False})
    if sys.stdin.isatty():
        print("Type a question and press enter; ctrl+d ends.", file=sys.stderr)
    return asyncio.run(tail_live(source, choice.system, Sampling(), sys.stdin, print))
