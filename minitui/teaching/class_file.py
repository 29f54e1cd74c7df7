"""The file of a class: the token of its link, its scenes with the recordings, and the answers of the phones. The link
works as long as this file exists. It is one JSON file in the data directory, which only its owner can read."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from minitui.settings import replace_file
from minitui.web.settings import LEGIBLE, TOKEN, new_token

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
LARGEST = 4 << 20  # bytes
VERSION = 1


class ClassFile:
    """The file of the class `name`, written if there is none and `new` is set. Raises EngineError if the name or the
    file is not valid."""

    def __init__(self, folder: Path, name: str, new: bool = True) -> None:
        if not NAME.fullmatch(name):
            raise EngineError(
                f"the class link {name[:40]!r} is not valid: use 1 to 32 lower-case letters, digits and hyphens"
            )
        self.name, self.path = name, folder / f"{name}.json"
        self.data: dict[str, Any] = {"version": VERSION, "token": new_token(), "title": "", "scenes": []}
        if self.path.exists():
            self.data = self._read()
        elif new:
            self.save()
        else:
            names = ", ".join(sorted(path.stem for path in folder.glob("*.json")))
            known = f"the classes are {names}" if names else "there is none yet"
            raise EngineError(f"there is no class {name!r}: {known}")

    @property
    def link(self) -> str:
        """The path of the link, such as "/paging-7k3mqx2hpa"."""
        return f"/{self.name}-{self.data['token']}"

    @property
    def scenes(self) -> list[dict[str, Any]]:
        """The scenes that were opened, in this order: "number", "title", "began_s", "recording", "step", "answers", and
        "more", the recordings of the engines that an experiment or a demo started in the scene."""
        scenes: list[dict[str, Any]] = self.data["scenes"]
        return scenes

    @property
    def recordings(self) -> list[Path]:
        """The recordings of the scenes that still exist."""
        names = dict.fromkeys(name for scene in self.scenes for name in (scene["recording"], *scene.get("more", ())))
        return [path for path in map(Path, names) if path.is_file()]

    def _read(self) -> dict[str, Any]:
        try:
            if self.path.stat().st_size > LARGEST:
                raise ValueError
            data = json.loads(self.path.read_text(encoding="utf-8"))
            token, scenes = data["token"], data["scenes"]
            if data["version"] != VERSION or len(token) != TOKEN or set(token) - set(LEGIBLE):
                raise ValueError
            for scene in scenes:
                texts = [scene["title"], scene["recording"], *scene.get("more", ())]
                if not all(isinstance(text, str) for text in texts):
                    raise ValueError
                for asked in scene["answers"]:
                    if len(asked["choices"]) != len(asked["counts"]):
                        raise ValueError
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise EngineError(f"{self.path} is not the file of a class: move it away, or choose another name") from None
        return dict(data)

    def save(self) -> None:
        """Replace the file. Raises EngineError if it cannot be written."""
        try:
            replace_file(self.path, json.dumps(self.data, indent=1, ensure_ascii=False))
        except OSError as error:
            raise EngineError(f"{self.path} cannot be written: {error.strerror}") from None

    def as_csv(self) -> str:
        """Returns the answers, a line for each choice of each question."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["scene", "title", "question", "choice", "text", "count", "phones"])
        writer.writerows(map(_harmless, self._rows()))
        return out.getvalue()

    def _rows(self) -> Iterable[list[Any]]:
        for scene in self.scenes:
            for asked in scene["answers"]:
                for i, (choice, n) in enumerate(zip(asked["choices"], asked["counts"], strict=True)):
                    yield [scene["number"], scene["title"], asked["question"], "abcd"[i], choice, n, asked["phones"]]


def _harmless(row: list[Any]) -> list[Any]:
    """Returns the row with no text that a spreadsheet takes for a formula."""
    return [f"'{cell}" if isinstance(cell, str) and cell[:1] in "=+-@\t\r" else cell for cell in row]
