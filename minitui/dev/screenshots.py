"""Pictures of the real application on the real engine: `python -m minitui.dev.screenshots [DIRECTORY] [NAME ...]`.

Each scene (minitui/dev/scenes.py) runs in a headless terminal with the bundled model, stops between two steps and is
written as SVG; with an installed Chromium also as PNG. Textual's SVG loads a font from the web; these files use
installed fonts instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import typer

from minitui import tutor
from minitui.chat.conversation import Sampling
from minitui.chat.model_choice import choose_model, load_codec
from minitui.chat.sessions import Chats
from minitui.cli.launch import live_source, recorded
from minitui.cli.options import engine_config
from minitui.cli.teaching import lesson_source
from minitui.dev.scenes import SCENES, Scene, settled, until
from minitui.export.png import find_browser, write_png
from minitui.export.svg import offline
from minitui.settings import Settings
from minitui.sources.replay import ReplaySource
from minitui.sources.replicas import ReplicaSource
from minitui.teaching.contrasts import CONTRASTS, Contrast
from minitui.teaching.demo import DEMOS, print_demo
from minitui.teaching.lessons import lesson as find_lesson
from minitui.trace.bundled import bundled
from minitui.tui.app import MinituiApp
from minitui.tui.compare_app import CompareApp, compare_in_app
from minitui.tui.lesson_app import LessonApp
from minitui.tui.replay_app import ReplayApp
from minitui.tui.replica_app import ReplicaApp
from minitui.web.serve import OwnServer

DEFAULTS: dict[str, Any] = {"kv_blocks": None, "no_prefix_caching": False}


@contextlib.asynccontextmanager
async def application(scene: Scene) -> AsyncIterator[MinituiApp]:
    """Runs the scene's application: with its own engine, over servers, or over a recording."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        app = await make(scene, Path(folder), servers)
        async with app.run_test(size=(scene.columns, scene.rows)):
            await until(lambda: app.feed.live and app.progress is None)
            yield app


async def make(scene: Scene, folder: Path, servers: contextlib.ExitStack) -> MinituiApp:
    """Returns the scene's application, not yet running. When `servers` is closed, it stops the servers of the scene."""
    settings = Settings(theme=f"minitui-{scene.theme}")
    if scene.demo or scene.recording:
        trace = folder / "demo.trace" if scene.demo else bundled()[scene.recording]
        if scene.demo:
            await record(scene.demo, trace)
        recording = ReplaySource(str(trace))
        return ReplayApp(recording, Chats(recording), settings, system="", speaker="model")
    restart: Any = None
    if scene.contrast:
        return two_runs(CONTRASTS[scene.contrast], settings)
    if scene.lesson is None:
        choice = choose_model(str(mixture(folder, scene.experts)) if scene.experts else None)
        source = live_source(choice, DEFAULTS | scene.options)
    else:
        choice, source, restart = lesson_source(scene.lesson)
    shared: dict[str, Any] = {
        "system": choice.system,
        "known_questions": choice.known_questions,
        "speaker": choice.speaker,
        "load_codec": load_codec,
    }
    if scene.replicas:
        several = await serve(scene, folder, servers)
        return ReplicaApp(several, Chats(several, sampling=Sampling(temperature=0.0)), settings, **shared)
    if scene.lesson is None:
        return MinituiApp(source, Chats(source, sampling=Sampling(temperature=0.0)), settings, **shared)
    chats = Chats(source, sampling=Sampling(temperature=0.0, max_tokens=60))
    return LessonApp(source, chats, settings, lesson=find_lesson(scene.lesson), restart=restart, **shared)


def two_runs(contrast: Contrast, settings: Settings) -> CompareApp:
    """Returns the application of `minitui compare`, without recordings of the runs."""
    choice = choose_model(None)
    source = live_source(choice, DEFAULTS | contrast.engine(contrast.first))

    async def restart(changes: dict[str, Any]) -> None:
        await source.reconfigure(engine_config(choice.name, **(DEFAULTS | contrast.options | changes)))

    def script(app: Any) -> Any:
        return compare_in_app(contrast, app, restart, lambda prefix: [])

    chats = Chats(source, sampling=Sampling(temperature=0.0, max_tokens=contrast.max_tokens))
    return CompareApp(source, chats, settings, system=choice.system, load_codec=load_codec, script=script)


def mixture(folder: Path, experts: int) -> Path:
    """Writes a checkpoint without weights, the bundled model with experts instead of MLPs; returns its directory."""
    directory = folder / "tiny-mixture"
    shutil.copytree(tutor.model_dir(), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 5,
        "num_experts": experts,
        "num_experts_per_tok": 4, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "norm_topk_prob": True,
    }  # fmt: skip
    path.write_text(json.dumps(config), encoding="utf-8")
    return directory


async def serve(scene: Scene, folder: Path, servers: contextlib.ExitStack) -> ReplicaSource:
    """Starts the servers of a scene, one after the other; returns a source for them and an address without a server."""
    choice, urls, key = choose_model(None), [], "screenshots"
    for number in range(scene.replicas):
        config = engine_config(choice.name, **scene.options)
        server = OwnServer(config, choice.label, folder / f"{number}.log", key)
        urls.append(await asyncio.to_thread(server.start))
        servers.callback(server.stop)
    return ReplicaSource([*urls, "http://127.0.0.1:9"], key)


async def record(name: str, trace: Path) -> None:
    """Plays a demo without a screen and records it."""
    demo, choice = DEMOS[name], choose_model(None)
    source = recorded(live_source(choice, DEFAULTS | demo.options), trace)
    with contextlib.redirect_stdout(io.StringIO()):
        await print_demo(demo, source, choice.system, Sampling(temperature=0.0, max_tokens=demo.max_tokens))


async def take(name: str, directory: Path) -> Path:
    """Runs a scene and writes its SVG; returns the path."""
    async with application(SCENES[name]) as app:
        await SCENES[name].play(app)
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


if __name__ == "__main__":
    typer.run(main)
