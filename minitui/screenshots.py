"""Pictures of the real application on the real engine: `python -m minitui.screenshots [DIRECTORY] [NAME ...]`.

Each scene is played in a headless terminal with the bundled model, held between two steps, and written as SVG; where a
Chromium is installed, as PNG too. Textual's SVG names a font from the web: here it names fonts that machines have.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from textual import events

from minitui.app import MinituiApp
from minitui.launch import live_source
from minitui.models import choose_model, load_codec
from minitui.sessions import Chats, Sampling
from minitui.settings import Settings

FONTS = "'DejaVu Sans Mono', 'Liberation Mono', Menlo, Consolas, 'Cascadia Mono', monospace"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FOLLOW_UPS = (
    "What is a block table?",
    "What is continuous batching?",
    "What is prefill?",
    "Why is decode memory bound?",
)


@dataclass(frozen=True)
class Scene:
    """What is played before the picture is taken."""

    play: Callable[[MinituiApp], Awaitable[None]]
    columns: int = 120
    rows: int = 36
    theme: str = "dark"
    options: dict[str, Any] = field(default_factory=dict)


async def until(true: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for `true()`; TimeoutError says so otherwise."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise TimeoutError("the scene did not come about")
        await asyncio.sleep(0.02)


async def press(app: MinituiApp, *keys: str) -> None:
    """Keys, as a terminal would send them."""
    for key in keys:
        app.post_message(events.Key(key, key if len(key) == 1 else None))
        await asyncio.sleep(0.15)


async def settled(app: MinituiApp) -> None:
    """Every record folded and painted."""
    await until(lambda: app.feed.backlog == 0)
    await asyncio.sleep(1.6)  # what glows has faded to what is warm, and notices are gone
    app.clear_notifications()
    await asyncio.sleep(0.5)


async def ask(app: MinituiApp, text: str) -> None:
    """Ask in the chat that is shown, and wait for the whole answer."""
    app.ask_question(text)
    await until(lambda: not app.session.busy)


async def steps(app: MinituiApp, count: int) -> None:
    """Let the engine take `count` steps and stop."""
    end = (await app.source.snapshot())["step"] + count  # the view may be a frame behind
    await app.source.control("step", n=count)
    await until(lambda: app.view.live.state.step >= end)


async def chat(app: MinituiApp) -> None:
    """An answer stands and the next is being written in slow motion; four more chats run, and the last one waits."""
    await ask(app, "What is prefill?")
    first = app.chats.new(app.system)
    app.select_session(first)
    await ask(app, "Can you give an example of paging?")
    await app.source.control("pause")
    app.chats.send(first, "What is prefix caching?")
    fork = app.chats.fork(app.chats.sessions[0])
    for question in FOLLOW_UPS:
        await asyncio.sleep(0.1)  # the queue's order is theirs
        app.chats.send(app.chats.new(app.system), question)
    await asyncio.sleep(0.1)
    app.chats.send(fork, "And when is a block shared?")
    await asyncio.sleep(0.1)
    await app.source.control("pace", factor=20)
    await app.source.control("resume")
    await until(lambda: len(first.messages[-1].text) > 160)


async def four_share(app: MinituiApp) -> None:
    """Four chats share one system prompt; the fourth has just come with a long prompt, which is computed in chunks."""
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
    """Two new chats with one system prompt come at once: the second shares what the first is still computing."""
    await ask(app, "What is a token?")
    await app.source.control("clear_cache")
    await app.source.control("pause")
    for question in ("What is a KV cache?", "Why is decode slow?"):
        session = app.chats.new(app.system)
        app.chats.rename(session, question.rstrip("?"))
        app.chats.send(session, question)
    app.view.select(None)
    await asyncio.sleep(0.2)
    await steps(app, 1)
    app.switch_mode("lecture")
    await asyncio.sleep(0.3)


SMALL = {"kv_blocks": 80, "max_num_batched_tokens": 64}
BUSY = {"kv_blocks": 160, "max_num_seqs": 5}
SCENES = {
    "chat": Scene(chat, 140, 40, options=BUSY),
    "inspect": Scene(four_share, 160, 48, options=SMALL),
    "lecture": Scene(lecture, 120, 36, options=SMALL | {"max_num_batched_tokens": 256}),
    "lecture-80x24": Scene(lecture, 80, 24, options=SMALL | {"max_num_batched_tokens": 256}),
    "chat-80x24": Scene(chat, 80, 24, options=BUSY),
    "inspect-80x24": Scene(four_share, 80, 24, options=SMALL),
    "chat-light": Scene(chat, 140, 40, "light", BUSY),
    "inspect-light": Scene(four_share, 160, 48, "light", SMALL),
    "inspect-projector": Scene(four_share, 120, 36, "projector", SMALL),
}


@contextlib.asynccontextmanager
async def application(scene: Scene) -> AsyncIterator[MinituiApp]:
    """The application on an engine of its own, ready."""
    choice = choose_model(None)
    source = live_source(choice, {"kv_blocks": None, "no_prefix_caching": False} | scene.options)
    app = MinituiApp(
        source,
        Chats(source, sampling=Sampling(temperature=0.0)),
        Settings(theme=f"minitui-{scene.theme}"),
        system=choice.system,
        known_questions=choice.known_questions,
        speaker=choice.speaker,
        load_codec=load_codec,
    )
    async with app.run_test(size=(scene.columns, scene.rows)):
        await until(lambda: app.feed.live and app.progress is None)
        yield app


async def take(name: str, directory: Path) -> Path:
    """Play a scene and write its SVG; returns the path."""
    async with application(SCENES[name]) as app:
        await SCENES[name].play(app)
        await settled(app)
        svg = app.export_screenshot(title="minitui")
    path = directory / f"{name}.svg"
    path.write_text(local_fonts(svg), encoding="utf-8")
    return path


def local_fonts(svg: str) -> str:
    """Without the web font: an SVG must look right offline."""
    svg = re.sub(r"@font-face\s*\{[^}]*\}", "", svg)
    return re.sub(r"font-family:\s*Fira Code[^;]*;", f"font-family: {FONTS};", svg)


def to_png(svg: Path, browser: str) -> Path:
    """By a headless Chromium, at twice the size; other converters misplace Textual's spaces and corners."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg.read_text(encoding="utf-8"))
    if box is None:
        raise ValueError(f"{svg} has no viewBox")
    width, height = (int(float(n)) + 1 for n in box.groups())
    png = svg.with_suffix(".png")
    with tempfile.TemporaryDirectory() as profile:
        page = Path(profile) / "page.html"
        style = "body{margin:0;background:transparent}svg{display:block}"
        page.write_text(f"<style>{style}</style>{svg.read_text(encoding='utf-8')}", encoding="utf-8")
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                "--default-background-color=00000000",
                "--force-device-scale-factor=1.5",
                f"--window-size={width},{height}",
                f"--screenshot={png}",
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )
    return png


def main() -> None:
    """Take the pictures asked for, or all."""
    parser = argparse.ArgumentParser(prog="python -m minitui.screenshots", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", nargs="?", default="screenshots", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCENES)}; all if none")
    options = parser.parse_args()
    if unknown := set(options.names) - set(SCENES):
        parser.error(f"there is no scene {', '.join(sorted(unknown))}")
    options.directory.mkdir(parents=True, exist_ok=True)
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    for name in options.names or SCENES:
        path = asyncio.run(take(name, options.directory))
        print(path if browser is None else to_png(path, browser))


if __name__ == "__main__":
    main()
