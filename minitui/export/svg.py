"""Writes a screen of a recording as SVG, with local fonts only, or as PNG."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from minitui.export.png import NO_BROWSER, find_browser, write_png
from minitui.trace.reader import TraceError, TraceReader

FONTS = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"
LOAD_TIMEOUT_S = 30.0


async def screen_svg(trace: str, step: int | None, size: tuple[int, int], theme: str = "minitui-dark") -> str:
    """Returns the Inspect screen as SVG, after `step` of `trace` (None: its last step). `size`: (columns, rows)."""
    from minitui.tui.apps.replay_app import replay_app

    app = replay_app(trace)
    async with app.run_test(size=size) as pilot:
        app.theme = theme
        for _ in range(int(LOAD_TIMEOUT_S / 0.05)):
            if app.feed.live:
                break
            await pilot.pause(0.05)
        else:
            raise TraceError(f"{trace} could not be shown within {LOAD_TIMEOUT_S:.0f} s")
        await app.replay.control("pause")
        step = app.replay.trace.last_step if step is None else step
        await app.seek(step)
        while app.position < step or app.feed.backlog:
            await pilot.pause(0.02)
        await pilot.pause(0.3)
        return offline(app.export_screenshot(title="minitui"))


def offline(svg: str) -> str:
    """Returns the SVG with local fonts in place of Textual's web font."""
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family:\s*Fira Code[^;]*;", f"font-family: {FONTS};", svg)
    return re.sub(r'font-family="[^"]*Fira Code[^"]*"', f'font-family="{FONTS}"', svg)


def write_picture(
    trace: str, kind: str, out: str | Path | None, step: int | None, size: tuple[int, int], theme: str
) -> Path:
    """Write a picture of the format `kind` ("svg" or "png") to `out` (None: beside the trace); returns the path."""
    path = Path(out) if out is not None else Path(f"{trace.removesuffix('.trace')}.{kind}")
    browser = find_browser()
    if kind == "png" and browser is None:
        raise TraceError(NO_BROWSER)
    reader = TraceReader(trace)
    reader.check()  # fails before the application starts: inside the application, an error prints a traceback
    if step is not None and not reader.first_step <= step <= reader.last_step:
        raise TraceError(f"{trace} has no step {step:,}: it has steps {reader.first_step:,} to {reader.last_step:,}")
    svg = asyncio.run(screen_svg(trace, step, size, theme))
    if kind == "png":
        return write_png(svg, path, browser)
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror}; name another file with --out") from None
    return path
