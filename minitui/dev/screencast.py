"""Plays a demo and writes an animated GIF of it: `python -m minitui.dev.screencast [FILE]`.

The real engine plays the demo in a headless terminal, in real time. A few frames are taken per second; equal frames
in a row become one longer frame. A headless Chromium draws the frames, and Pillow writes the GIF.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.errors import EngineError
from minitui.dev.screenshots import Scene, make, until
from minitui.export.png import NO_BROWSER, find_browser, write_png
from minitui.export.svg import offline
from minitui.teaching.scenarios import DEMOS
from minitui.tui.apps.app import MinituiApp
from minitui.tui.apps.demo import play_in_app

DEMO = "shared-prefix"
COLUMNS, ROWS = 110, 34
SCALE = 0.75  # device pixels per unit of the SVG
FRAMES_PER_S = 2.5
COLOURS = 128
LAST_FRAME_S = 6.0


@dataclass
class Frame:
    """A picture, and its duration in seconds."""

    svg: str
    seconds: float


async def film() -> list[Frame]:
    """Plays the demo to its end; returns the frames."""
    demo = DEMOS[DEMO]
    app = make(Scene(_nothing, COLUMNS, ROWS, options=demo.options))
    app.chats.sampling.max_tokens = demo.max_tokens
    frames: list[Frame] = []
    async with app.run_test(size=(COLUMNS, ROWS)):
        await until(lambda: app.feed.live and app.progress is None)
        playing = asyncio.create_task(play_in_app(demo, app, None))
        last = time.monotonic()
        while not playing.done():
            await asyncio.sleep(1 / FRAMES_PER_S)
            svg, now = offline(app.export_screenshot(title="minitui")), time.monotonic()
            if frames and _drawn(frames[-1].svg) == _drawn(svg):
                frames[-1].seconds += now - last
            else:
                frames.append(Frame(svg, now - last))
            last = now
        await playing
    frames[-1].seconds += LAST_FRAME_S
    return frames


async def _nothing(app: MinituiApp) -> None:
    """Does nothing: the demo's script drives the application."""


def _drawn(svg: str) -> str:
    """Returns the drawn part of the SVG, which is the same for equal frames, without the definitions."""
    return svg[svg.index("</defs>") :] if "</defs>" in svg else svg


def write_gif(frames: list[Frame], path: Path, browser: str) -> None:
    """Draws the frames and writes them with one palette, so that only changed pixels take bytes."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        pictures: list[Any] = []
        for number, frame in enumerate(frames):
            png = write_png(frame.svg, Path(folder) / f"{number}.png", browser, SCALE)
            with Image.open(png) as image:
                ground = Image.new("RGB", image.size, "#0d1117")
                ground.paste(image, mask=image.getchannel("A") if "A" in image.getbands() else None)
                pictures.append(ground)
    palette = _palette(pictures)
    pictures = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    pictures[0].save(
        path,
        save_all=True,
        append_images=pictures[1:],
        duration=[max(20, round(frame.seconds * 1000)) for frame in frames],
        loop=0,
        optimize=False,
        disposal=1,
    )


def _palette(pictures: list[Any]) -> Any:
    """Returns a palette of the colours of a few frames, spread over the whole film."""
    from PIL import Image

    chosen = pictures[:: max(1, len(pictures) // 8)]
    width, height = pictures[0].size
    sheet = Image.new("RGB", (width, height * len(chosen)))
    for number, picture in enumerate(chosen):
        sheet.paste(picture, (0, number * height))
    return sheet.quantize(COLOURS, method=Image.Quantize.FASTOCTREE)


def main(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("screenshots/shared-prefix.gif"),
) -> None:
    """Play a demo and write an animated GIF of it."""
    browser = find_browser()
    if browser is None:
        raise SystemExit(f"minitui.dev.screencast: {NO_BROWSER}")
    try:
        frames = asyncio.run(film())
        write_gif(frames, file, browser)
    except EngineError as error:
        raise SystemExit(f"minitui.dev.screencast: {error}") from None
    seconds = sum(frame.seconds for frame in frames)
    print(f"{file}: {len(frames)} frames, {seconds:.0f} s, {file.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    typer.run(main)
