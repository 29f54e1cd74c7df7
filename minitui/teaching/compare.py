"""Runs a contrast: the work under the first setting, then under the second."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import EngineError
from engine.info import EngineInfo
from minitui.sources.recording import RecordingSource
from minitui.teaching.contrasts import Contrast
from minitui.teaching.stage import Stage

WARM_UP = "warm-up: "


@dataclass
class Outcome:
    """What the views of two runs do not have: their replies, and facts about their engines."""

    texts: list[list[str]] = field(default_factory=list)
    infos: list[EngineInfo] = field(default_factory=list)

    @property
    def replies(self) -> str:
        """Says whether the replies of the two runs were the same."""
        first, second = self.texts
        other = sum(a != b for a, b in zip(first, second, strict=True))
        return f"Replies that differ: {other} of {len(first)}." if other else "The replies were the same."


async def run_contrast(contrast: Contrast, stage: Stage) -> Outcome:
    """Does the work under both settings, each in a new engine, with `stage.view.earlier` as the first run at the end.
    Both are done once before, and not counted: the first steps in a process are slower, which would favour the second
    setting."""
    outcome = Outcome()
    for prefix in (WARM_UP, ""):
        for setting in contrast.settings:
            stage.source.name_groups(stage.chats.names)  # the next engine is recorded in another file
            for session in list(stage.chats.sessions):
                stage.chats.close(session)
            stage.say(f"{prefix}{setting.name}".capitalize() + f": {contrast.title}.")
            await stage.other_engine(**setting.options)
            await stage.begin_run(prefix + setting.name, first=setting is contrast.first)
            sessions = await contrast.work(stage)
            await stage.settle()
            if not prefix:
                outcome.texts.append([session.messages[-1].text for session in sessions])
                outcome.infos.append(stage.source.info)
    stage.source.name_groups(stage.chats.names)
    return outcome


def save_copies(recordings: Iterable[tuple[str, Path]], prefix: Path) -> list[Path]:
    """Copies recordings, each with a name, to prefix.NAME.trace; returns their paths. Raises EngineError."""
    saved = []
    for name, file in recordings:
        path = prefix.with_name(f"{prefix.name}.{name}.trace")
        try:
            shutil.copyfile(file, path)
        except OSError as error:
            raise EngineError(f"{path} cannot be written: {error.strerror}; choose another name") from None
        saved.append(path)
    return saved


class TracesOfRuns:
    """The recordings of the two runs, in a temporary directory until they are saved; or at `record`, where they stay.
    `source` records an engine that `run_contrast` replaces four times: the last two files are the two runs."""

    def __init__(self, record: Path | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="minitui-compare-")
        self.path = record or Path(self._directory.name) / "run.trace"  # of the first file
        self.source: RecordingSource | None = None

    @property
    def files(self) -> list[Path]:
        """The two recordings. Ends the recording."""
        assert self.source is not None
        if self.source.recording_error:
            raise EngineError(f"the runs were not recorded: {self.source.recording_error}")
        self.source.recording.close()
        return [self.path.with_suffix(f".{start}{self.path.suffix}") for start in (4, 5)]

    def save(self, contrast: Contrast, prefix: Path) -> list[Path]:
        """Copies the recordings to files whose names begin with `prefix`; returns their paths. Raises EngineError."""
        names = (setting.name.replace(" ", "-") for setting in contrast.settings)
        return save_copies(zip(names, self.files, strict=True), prefix)

    def close(self) -> None:
        """Deletes the temporary directory."""
        self._directory.cleanup()
