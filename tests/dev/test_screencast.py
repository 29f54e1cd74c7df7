"""Frames of the animated picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from minitui.dev import screencast
from minitui.dev.screencast import Frame, write_gif


def test_frames_stand_as_long_as_they_did_and_what_changed_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image")

    def draw(svg: str, path: Path, browser: str, scale: float) -> Path:
        image.new("RGBA", (32, 16), svg).save(path)
        return path

    monkeypatch.setattr(screencast, "write_png", draw)
    frames = [Frame("#ff0000", 0.5), Frame("#00ff00", 1.25), Frame("#0000ff", 3.0)]
    write_gif(frames, tmp_path / "a.gif", "browser", 1.0)
    with image.open(tmp_path / "a.gif") as gif:
        seen = []
        for number in range(gif.n_frames):
            gif.seek(number)
            seen.append((gif.info["duration"], gif.convert("RGB").getpixel((5, 5))))
    assert seen == [(500, (255, 0, 0)), (1250, (0, 255, 0)), (3000, (0, 0, 255))]
