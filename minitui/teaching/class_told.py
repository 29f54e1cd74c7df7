"""The steps of a class in sentences, read from its recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minitui.teaching.class_file import ClassFile
from minitui.trace.lines import TraceError
from minitui.trace.reader import TraceReader
from minitui.viewmodel.compare.runs import recorded_view
from minitui.viewmodel.view import View
from minitui.viewmodel.words.narrate import narrate, notable


def told_scenes(file: ClassFile, most: int) -> list[dict[str, Any]]:
    """Returns the scenes of a class, each with "told": a sentence for each step that did more than decode, at most
    `most`. A scene ends where the next scene in the same recording begins; its "more" recordings are told whole."""
    views: dict[str, View | None] = {}
    scenes = []
    for at, scene in enumerate(file.scenes):
        recording, first = scene["recording"], int(scene["step"]) + 1
        if recording not in views:
            views[recording] = _view(recording)
        view = views[recording]
        later = (one for one in file.scenes[at + 1 :] if one["recording"] == recording)
        told = [] if view is None else _told(view, first, int(next(later, {"step": view.history.steps.last})["step"]))
        for number, more in enumerate((_view(name) for name in scene.get("more", ())), 2):
            told += [] if more is None else _told(more, 0, more.history.steps.last, f"Engine {number}, step")
        scenes.append(scene | {"told": told[:most]})
    return scenes


def _view(recording: str) -> View | None:
    if not recording or not Path(recording).is_file():
        return None
    try:
        return recorded_view(TraceReader(Path(recording)))
    except TraceError:
        return None


def _told(view: View, first: int, last: int, named: str = "Step") -> list[str]:
    return [
        f"{named} {step}: {narrate(view, step)}"
        for step in range(first, last + 1)
        if step in view.history.steps and notable(view, step)
    ]
