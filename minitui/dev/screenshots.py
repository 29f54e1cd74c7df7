"""Pictures of the real application on the real engine: `python -m minitui.dev.screenshots [DIRECTORY] [NAME ...]`.

Each scene (an application, and the actions before its picture is taken) runs in a headless terminal with the bundled
model, stops between two steps and is written as SVG; with an installed Chromium also as PNG. Textual's SVG loads a font
from the web; these files use installed fonts instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from textual import events

from minitui.chat.conversation import Sampling
from minitui.chat.model_choice import choose_model, load_codec
from minitui.chat.sessions import Chats
from minitui.cli.launch import changing_source, live_source
from minitui.cli.teaching import lesson_source
from minitui.export.png import find_browser, write_png
from minitui.export.svg import offline
from minitui.settings import Settings
from minitui.sources.replay import ReplaySource
from minitui.teaching.contrasts import CONTRASTS, Contrast
from minitui.teaching.lessons import lesson as find_lesson
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
from minitui.tui.apps.app import MinituiApp
from minitui.tui.apps.compare_app import CompareApp, RecordingsApp, TwoRecordings, compare_in_app
from minitui.tui.apps.lesson_app import LessonApp
from minitui.tui.apps.replay_app import ReplayApp
from minitui.tui.screens.compare import CompareScreen
from minitui.tui.screens.lesson import LessonScreen
from minitui.tui.screens.prefix import PrefixPanel
from minitui.whatif.answer import Question
from minitui.whatif.settings import changes

FOLLOW_UPS = (
    "What is a block table?",
    "What is continuous batching?",
    "What is prefill?",
    "Why is decode memory bound?",
)


@contextlib.asynccontextmanager
async def application(scene: Scene) -> AsyncIterator[MinituiApp]:
    """Runs the scene's application: with its own engine, or over a recording."""
    with tempfile.TemporaryDirectory() as folder:
        app = what_if(scene, Path(folder)) if scene.what_if else make(scene)
    async with app.run_test(size=(scene.columns, scene.rows)):
        await until(lambda: app.feed.live and app.progress is None)
        yield app


def make(scene: Scene) -> MinituiApp:
    """Returns the scene's application, not yet running."""
    settings = Settings(theme=f"minitui-{scene.theme}")
    if scene.recording:
        recording = ReplaySource(str(bundled()[scene.recording]))
        return ReplayApp(recording, Chats(recording), settings, system="", speaker="model")
    restart: Any = None
    if scene.contrast:
        return two_runs(CONTRASTS[scene.contrast], settings)
    if scene.lesson is None:
        choice = choose_model(None)
        source = live_source(choice, scene.options)
    else:
        choice, source, restart = lesson_source(scene.lesson)
    shared: dict[str, Any] = {
        "system": choice.system,
        "known_questions": choice.known_questions,
        "speaker": choice.speaker,
        "load_codec": load_codec,
    }
    if scene.lesson is None:
        return MinituiApp(source, Chats(source, sampling=Sampling(temperature=0.0)), settings, **shared)
    chats = Chats(source, sampling=Sampling(temperature=0.0, max_tokens=60))
    return LessonApp(source, chats, settings, lesson=find_lesson(scene.lesson), restart=restart, **shared)


def two_runs(contrast: Contrast, settings: Settings) -> CompareApp:
    """Returns the application of `minitui compare`, without recordings of the runs."""
    choice = choose_model(None)
    source, restart = changing_source(choice, contrast.options, contrast.engine(contrast.first))
    def script(app: Any) -> Any:
        return compare_in_app(contrast, app, restart, lambda prefix: [])

    chats = Chats(source, sampling=Sampling(temperature=0.0, max_tokens=contrast.max_tokens))
    return CompareApp(source, chats, settings, system=choice.system, load_codec=load_codec, script=script)


def what_if(scene: Scene, folder: Path) -> RecordingsApp:
    """Returns the application of `minitui replay --what-if`. Both recordings are short: they are read already."""
    question, path = Question(bundled()[scene.recording]), folder / "what-if.trace"
    question.play(question.changed(changes(scene.what_if)), traced=True).write(path, question.reader.info)
    source = TwoRecordings((question.reader, TraceReader(path)), ("recorded", scene.what_if))
    return RecordingsApp(source, Chats(source), Settings(theme=f"minitui-{scene.theme}"), system="", speaker="model")


async def take(name: str, directory: Path) -> Path:
    """Runs a scene and writes its SVG; returns the path."""
    scene = SCENES[name]
    async with application(scene) as app:
        await scene.play(app)
        await settled(app)
        if scene.key:
            await press(app, scene.key)
            await settled(app)
        svg = app.export_screenshot(title="minitui")
    path = directory / f"{name}.svg"
    path.write_text(offline(svg), encoding="utf-8")
    return path


def shrink(png: Path) -> Path:
    """Reduces a PNG to 256 colours, a third of the bytes, if Pillow is installed."""
    with contextlib.suppress(ImportError):
        from PIL import Image

        with Image.open(png) as image:
            image.convert("RGBA").quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
                png, optimize=True
            )
    return png


def main(
    directory: Annotated[Path, typer.Argument(help="The directory for the pictures.")] = Path("screenshots"),
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help=f"Scenes: {', '.join(SCENES)}. Default: all.")
    ] = None,
) -> None:
    """Take pictures of the real application on the real engine."""
    if unknown := set(names or ()) - set(SCENES):
        raise typer.BadParameter(f"there is no scene {', '.join(sorted(unknown))}")
    directory.mkdir(parents=True, exist_ok=True)
    browser = find_browser()
    for name in names or SCENES:
        path = asyncio.run(take(name, directory))
        if browser is not None:
            path = shrink(write_png(path.read_text(encoding="utf-8"), path.with_suffix(".png"), browser))
        print(path)


@dataclass(frozen=True)
class Scene:
    """An application, its options and its terminal, and the actions before the picture is taken (`play`)."""

    play: Callable[[MinituiApp], Awaitable[None]]
    columns: int = 120
    rows: int = 36
    theme: str = "dark"
    options: dict[str, Any] = field(default_factory=dict)  # of the engine
    lesson: int | None = None  # instead of the chat: this lesson
    contrast: str = ""  # instead of the chat: the two runs of `minitui compare NAME`
    recording: str = ""  # instead of the chat: this bundled recording
    what_if: str = ""  # and beside it the same requests under this setting
    key: str = ""  # pressed after `play`


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Waits until `condition()` is true. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the scene was not reached in time")
        await asyncio.sleep(0.02)


async def press(app: MinituiApp, *keys: str) -> None:
    """Presses keys, as a terminal sends them."""
    for key in keys:
        app.post_message(events.Key(key, " " if key == "space" else key if len(key) == 1 else None))
        await asyncio.sleep(0.15)


async def settled(app: MinituiApp) -> None:
    """Waits until every record is folded and painted, and highlights and notices have ended."""
    await until(lambda: app.feed.backlog == 0)
    await asyncio.sleep(1.6)  # until highlights have faded
    app.clear_notifications()
    await asyncio.sleep(0.5)


async def ask(app: MinituiApp, text: str) -> None:
    """Asks in the current chat and waits for the whole answer."""
    app.ask_question(text)
    await until(lambda: not app.session.busy)


async def steps(app: MinituiApp, count: int) -> None:
    """Runs `count` steps and stops."""
    end = (await app.source.snapshot())["step"] + count  # the view may be a frame behind
    await app.source.control("step", n=count)
    await until(lambda: app.view.history.live.state.step >= end)


async def chat(app: MinituiApp) -> None:
    """The second chat has one complete answer, and another is written in slow motion. Four more chats run; a fork of
    the first chat waits."""
    await ask(app, "What is prefill?")
    second = app.chats.new(app.system)
    app.select_session(second)
    await ask(app, "Can you give an example of paging?")
    await app.source.control("pause")
    app.chats.send(second, "What is prefix caching?")
    fork = app.chats.fork(app.chats.sessions[0])
    for question in FOLLOW_UPS:
        await asyncio.sleep(0.1)  # so that they queue in this order
        app.chats.send(app.chats.new(app.system), question)
    await asyncio.sleep(0.1)
    app.chats.send(fork, "And when is a block shared?")
    await asyncio.sleep(0.1)
    await app.source.control("pace", factor=60)
    await app.source.control("resume")
    await until(lambda: len(second.messages[-1].text) > 160)


async def four_share(app: MinituiApp) -> None:
    """Four chats share one system prompt; the long prompt of the fourth is computed in chunks."""
    for question in ("What is a token?", "What is a radix cache?", "What is preemption?"):
        await ask(app, question)
        app.select_session(app.chats.new(app.system))
    sessions = app.chats.sessions
    for session, question in zip(sessions, FOLLOW_UPS, strict=True):
        app.chats.rename(session, question.removeprefix("What is ").rstrip("?"))
    await app.source.control("pause")
    for session, question in zip(sessions[:3], FOLLOW_UPS, strict=False):
        app.chats.send(session, question)
    await steps(app, 40)
    notes = " ".join(f"Block {n} holds the tokens {16 * n} to {16 * n + 15}." for n in range(12))
    app.chats.rename(sessions[3], "long notes")
    app.chats.send(sessions[3], f"Here are my notes. {notes} What is a block table?")
    await asyncio.sleep(0.2)
    await steps(app, 2)
    app.select_session(sessions[3])
    app.switch_mode("inspect")
    await asyncio.sleep(0.3)


async def lecture(app: MinituiApp) -> None:
    """One chat decodes. Two chats that share a system prompt arrive: one of them uses the blocks of the other."""
    await app.source.control("pause")
    questions = ("What is a token?", "What is a KV cache?", "Why is decode slow?")
    sessions = [app.session, app.chats.new(app.system), app.chats.new(app.system)]
    app.chats.set_system(sessions[0], "")
    for session, question in zip(sessions, questions, strict=True):
        app.chats.rename(session, question.rstrip("?"))
    app.chats.send(sessions[0], questions[0])
    await asyncio.sleep(0.2)
    await steps(app, 12)
    for session, question in zip(sessions[1:], questions[1:], strict=True):
        app.chats.send(session, question)
        await asyncio.sleep(0.1)  # so that they queue in this order
    app.view.select(None)
    await steps(app, 1)
    app.switch_mode("lecture")
    await asyncio.sleep(0.3)


async def lesson(app: MinituiApp) -> None:
    """The fourth page of the radix lesson: six chats with one system prompt, with a prediction and the result."""
    assert isinstance(app, LessonApp)
    await until(lambda: isinstance(app.screen, LessonScreen) and app.screen.stage is not None)
    screen = app.screen
    assert isinstance(screen, LessonScreen)
    await press(app, "right", "right", "right", "a", "enter")
    await until(lambda: screen.reading.at in screen.reading.seen)


async def code(app: MinituiApp) -> None:
    """The second page of the radix lesson, with the code of the lookup."""
    await until(lambda: isinstance(app.screen, LessonScreen) and app.screen.stage is not None)
    await press(app, "right", "v")


async def compared(app: MinituiApp) -> None:
    """Both runs have ended; the cursor is a third of the way through."""
    await until(lambda: isinstance(app, CompareApp) and app.save is not None, 120.0)
    screen = app.screen
    assert isinstance(screen, CompareScreen) and screen.runs.comparison is not None
    await press(app, "left")
    screen.runs.cursor = screen.runs.comparison.end("ms") / 3


async def asked(app: MinituiApp) -> None:
    """The figures of a recording and of the same requests under another setting."""
    await until(lambda: isinstance(app.screen, CompareScreen) and app.screen.runs.comparison is not None)


async def at_its_fullest(app: MinituiApp) -> None:
    """A narrated recording at the bookmark of its fullest batch, or else at its last bookmark."""
    assert isinstance(app, ReplayApp)
    await app.replay.control("pause")
    marks = app.replay.trace.bookmarks
    step = next((step for step, text in marks if "fullest" in text), marks[-1][0])
    await app.seek(step)
    await until(lambda: app.position >= step)


async def completed(app: MinituiApp) -> None:
    """The prompt completes one of the questions that the model knows."""
    await ask(app, "What is a token?")
    app.focus_prompt()
    await press(app, *"how", "space", *"does", "space")


async def broken_prefix(app: MinituiApp) -> None:
    """Three chats: the date in the system prompt of one changes, and long answers in another evict what is cached."""
    dated = "Today is 2026-11-{day}. " + app.system
    first = app.session
    app.chats.rename(first, "dated")
    for day, question in ((28, "What is a token?"), (28, "What is prefill?"), (29, "What is a radix tree?")):
        app.chats.set_system(first, dated.format(day=day))
        await ask(app, question)
    for title, questions in (("notes", FOLLOW_UPS), ("other", FOLLOW_UPS[:1])):
        app.select_session(app.chats.new(app.system, title))
        for question in questions:
            await ask(app, question)
    app.select_session(first)
    await ask(app, "What is preemption?")
    app.commands.run("prefix")
    await until(lambda: any(isinstance(panel.found, list) for panel in app.screen.query(PrefixPanel)))


SMALL = {"kv_blocks": 80, "max_num_batched_tokens": 64}
BUSY = {"kv_blocks": 160, "max_num_seqs": 5}
SCHOOL = SMALL | {"max_num_batched_tokens": 256}
SCENES = {
    "chat": Scene(chat, 140, 40, options=BUSY),
    "chat-light": Scene(chat, 140, 40, "light", BUSY),
    "chat-projector": Scene(chat, 100, 30, "projector", BUSY),
    "chat-80x24": Scene(chat, 80, 24, options=BUSY),
    "prompt": Scene(completed, 100, 30, options=BUSY),
    "inspect": Scene(four_share, 160, 48, options=SMALL),
    "inspect-light": Scene(four_share, 160, 48, "light", SMALL),
    "inspect-projector": Scene(four_share, 120, 36, "projector", SMALL),
    "inspect-80x24": Scene(four_share, 80, 24, options=SMALL),
    "lecture": Scene(lecture, 120, 36, options=SCHOOL),
    "lecture-light": Scene(lecture, 120, 36, "light", SCHOOL),
    "lecture-projector": Scene(lecture, 80, 24, "projector", SCHOOL),
    "lecture-80x24": Scene(lecture, 80, 24, options=SCHOOL),
    "lesson": Scene(lesson, 140, 40, lesson=9),
    "lesson-light": Scene(lesson, 140, 40, "light", lesson=9),
    "lesson-projector": Scene(lesson, 100, 30, "projector", lesson=9),
    "lesson-80x24": Scene(lesson, 80, 24, lesson=9),
    "lesson-code": Scene(code, 140, 40, lesson=9),
    "compare": Scene(compared, 140, 30, contrast="batching"),
    "compare-80x24": Scene(compared, 80, 24, contrast="chunked-prefill"),
    **{f"replay-{name}": Scene(at_its_fullest, 160, 48, recording=name) for name in bundled()},
    "requests": Scene(at_its_fullest, 140, 40, recording="h200-8b", key="5"),
    "waterfall": Scene(at_its_fullest, 140, 40, recording="h200-8b", key="w"),
    "what-if-compare": Scene(asked, 140, 30, recording="h200-8b", what_if="seqs=32"),
    "prefix": Scene(broken_prefix, 120, 26, options={"kv_blocks": 36}),
    "help": Scene(four_share, 120, 36, options=SMALL, key="question_mark"),
    "commands": Scene(four_share, 120, 36, options=SMALL, key="colon"),
}


if __name__ == "__main__":
    typer.run(main)
