"""Small charts of figures over a setting, as one PNG; and what is written beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from engine.errors import EngineError
from minitui.export.png import write_png
from minitui.export.svg import FONTS
from minitui.tui.theme import COLOURS

_NAMES = ("ground", "frame", "ink", "dim", "hit")
GROUND, FRAME, INK, DIM, LINE = (COLOURS["minitui-dark"][name] for name in _NAMES)
Curve = tuple[str, Callable[[float | None], str], Sequence[float | None]]  # title, value in words, values
WIDE, HIGH, LEFT, TOP, GAP = 460, 190, 16, 44, 34  # pixels of a chart


def write_beside(base: Path, suffix: str, text: str) -> Path:
    """Writes the text to `base` with this suffix; returns the path. Raises EngineError."""
    path = base.with_name(base.name + suffix)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EngineError(f"{path} cannot be written: {error.strerror}; name another file with --out") from None
    return path


def write_charts(
    base: Path, title: str, values: Sequence[str], curves: Sequence[Curve], marked: Sequence[bool]
) -> Path:
    """Write the charts of `curves` over `values` to `base`.png; returns the path. `marked`: points drawn hollow,
    because they are extrapolated. Raises TraceError if there is no browser."""
    return write_png(charts_svg(title, values, curves, marked), base.with_name(base.name + ".png"))


def charts_svg(title: str, values: Sequence[str], curves: Sequence[Curve], marked: Sequence[bool]) -> str:
    """Returns the charts as SVG, two in a row."""
    rows = -(-len(curves) // 2)
    width, height = 2 * WIDE + 3 * LEFT, TOP + rows * (HIGH + GAP) + 10
    key = f'<text x="{width - LEFT}" y="26" fill="{INK}" text-anchor="end">○ extrapolated</text>' if any(marked) else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{FONTS}" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="{GROUND}"/>',
        f'<text x="{LEFT}" y="26" fill="{INK}" font-size="15">{escape(title)}</text>{key}',
    ]
    for i, curve in enumerate(curves):
        x, y = LEFT + i % 2 * (WIDE + LEFT), TOP + i // 2 * (HIGH + GAP)
        parts.append(f'<g transform="translate({x},{y})">{_chart(values, curve, marked)}</g>')
    return "\n".join([*parts, "</svg>"])


def _chart(values: Sequence[str], curve: Curve, marked: Sequence[bool]) -> str:
    title, words, figures = curve
    most = max((value for value in figures if value is not None), default=0.0) or 1.0
    bottom, span = HIGH - 22, HIGH - 74
    step = (WIDE - 80) / max(1, len(values) - 1)
    at = [(40 + i * step, bottom - span * (value or 0.0) / most) for i, value in enumerate(figures)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    parts = [
        f'<text x="8" y="16" fill="{INK}">{escape(title)}</text>',
        f'<line x1="8" y1="{bottom}" x2="{WIDE - 8}" y2="{bottom}" stroke="{FRAME}"/>',
        f'<polyline fill="none" stroke="{LINE}" stroke-width="2" points="{line}"/>',
    ]
    for (x, y), value, name, hollow in zip(at, figures, values, marked, strict=True):
        fill = GROUND if hollow else LINE
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{LINE}" stroke-width="2"/>')
        parts.append(_label(x, y - 9, words(value), INK, 11))
        parts.append(_label(x, bottom + 16, name, DIM, 12))
    return "".join(parts)


def _label(x: float, y: float, text: str, fill: str, size: int) -> str:
    shown = f'fill="{fill}" stroke="{GROUND}" stroke-width="4" paint-order="stroke"'  # no curve runs through it
    return f'<text x="{x:.1f}" y="{y:.1f}" {shown} font-size="{size}" text-anchor="middle">{escape(text)}</text>'
