"""An attempt at an exercise: the student's file, run in a process with limits, and the two runs as recordings."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.info import EngineInfo
from engine.text.limited_process import LimitedProcess, LimitExceeded, Limits
from minitui.exercises.table import Exercise
from minitui.text import count
from minitui.trace import check
from minitui.trace.recorder import Recorder
from minitui.viewmodel.compare.runs import SCORED

LIMITS = Limits(seconds=40.0, memory=4 << 30, longest=64 << 20, cpu_seconds=30.0)  # of a run, with the reference's
CPU_S, SECONDS = 5.0, 20.0  # of the student's code: after that, a sentence says so
LONGEST_FILE = 200_000  # bytes


@dataclass(frozen=True, slots=True)
class Attempt:
    """The result of an attempt. `broken`: a sentence, "" if all rules are kept; `step`: the step that it names.
    `figure`, `reference`: the figures of both runs; the first is None if a rule is broken. `runs`: the recordings of
    the reference and of the student's code, as far as they exist. `printed`: what the code printed; `latest`: the last
    step in which it printed (None: before the first), and what it printed there."""

    exercise: Exercise
    broken: str
    step: int | None
    figure: float | None
    reference: float | None
    runs: tuple[Path, ...]
    printed: str
    latest: tuple[int | None, str] = (None, "")

    @property
    def passed(self) -> bool:
        """True if all rules are kept."""
        return not self.broken

    @property
    def line(self) -> int | None:
        """The line of the file that the sentence names."""
        found = re.search(r"\bline (\d{1,6})\b", self.broken)
        return int(found[1]) if found else None

    @property
    def score(self) -> int | None:
        """100 for the figure of the reference, more for a better one; None if a rule is broken."""
        if self.figure is None or self.reference is None:
            return None
        return self.exercise.score(self.figure, self.reference)

    @property
    def words(self) -> str:
        """The result in a sentence or two."""
        if self.broken:
            return f"Not yet: {self.broken.rstrip('.')}."
        one = self.exercise
        assert self.figure is not None and self.reference is not None
        return (
            f"All rules are kept. Score {self.score}: {one.figure} {one.text(self.figure)}, "
            f"reference {one.text(self.reference)}."
        )

    @property
    def data(self) -> dict[str, Any]:
        """The result for scripts."""
        yours, reference = (one and round(one, 6) for one in (self.figure, self.reference))
        return {
            "exercise": self.exercise.name, "passed": self.passed, "broken": self.broken or None, "step": self.step,
            "score": self.score, "figure": self.exercise.figure, "yours": yours, "reference": reference,
            "printed": self.printed,
        }


class Attempts:
    """Runs attempts, each in a new process. A context manager; any thread may call `run`, one at a time."""

    def __init__(self, exercise: Exercise, folder: Path, cpu: float = CPU_S) -> None:
        """`folder`: where the recordings are written. `cpu`: the limit of the student's code, in seconds."""
        self.exercise, self._folder = exercise, folder
        self._limits = (cpu, SECONDS)
        script = str(Path(__file__).with_name("process.py"))
        self._process = LimitedProcess(script, "runs exercises", lambda: b"{}", LIMITS)
        self._process.start()
        self._number, self._closed = 0, False

    def __enter__(self) -> Attempts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop(self) -> None:
        """End the attempt that runs; its result is a sentence."""
        self._process.stop()

    def close(self) -> None:
        """End the process, with the attempt that runs."""
        self._closed = True
        self.stop()

    def run(self, path: Path) -> Attempt:
        """Run the file of a student. Raises EngineError if the file cannot be read."""
        source = read(path)
        try:
            _, answer = self._process.ask(json.dumps([self.exercise.name, source, *self._limits]).encode())
            found = json.loads(answer)
        except LimitExceeded as error:
            return Attempt(self.exercise, f"the code {error}", None, None, None, (), "")
        finally:
            self._process.end()  # the next attempt finds nothing that this one has changed
            if not self._closed:
                self._process.start()
        try:
            return self._attempt(found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"the process of the exercise sent a wrong answer: {error}") from None

    def _attempt(self, found: dict[str, Any]) -> Attempt:
        broken, step = " ".join(str(found["broken"]).split()), found["step"]
        self._number += 1
        runs = []
        for name in ("reference", "yours"):
            if found[name] is not None:
                path = self._folder / f"{self._number}.{name}.trace"
                whole = name == "reference" or not broken
                self._record(path, name, found[name], ("", None) if whole else (broken, step))
                runs.append(path)
        figure = float(found["yours"]["figure"]) if found["yours"] is not None and not broken else None
        return Attempt(
            self.exercise, broken, step if type(step) is int else None, figure, float(found["reference"]["figure"]),
            tuple(runs), str(found["printed"]), (found["latest"][0], str(found["latest"][1])),
        )

    def _record(self, path: Path, name: str, run: dict[str, Any], mark: tuple[str, int | None]) -> None:
        setting = self.exercise.work().setting
        info = EngineInfo(
            model=f"{self.exercise.name}, {name}", device="simulated", random_text=True,
            max_model_len=setting.context,
        )
        snapshot = check.snapshot(run["snapshot"])
        recorder = Recorder(path)
        recorder.begin(setting.info(info), snapshot)
        recorder.feed(check.record(snapshot["seq"] + 1 + i, row) for i, row in enumerate(run["records"]))
        sentence, step = mark
        if sentence and type(step) is int:
            recorder.bookmark(sentence, step)
        elif not sentence:
            recorder.bookmark(f"{SCORED}{self.exercise.figure} {self.exercise.text(float(run['figure']))}")
        recorder.close()


def read(path: Path) -> str:
    """Returns the text of a student's file. Raises EngineError."""
    try:
        size = path.stat().st_size
        if size > LONGEST_FILE:
            raise EngineError(f"{path} has {count(size, 'byte')}: an exercise has at most {LONGEST_FILE:,}")
        return path.read_text(encoding="utf-8-sig")  # Windows' Notepad writes a byte order mark
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise EngineError(f"{path} is not text in UTF-8") from None


def begin(exercise: Exercise, path: Path) -> bool:
    """Write the file with which an exercise begins, if there is none. Returns True if it was written. Raises
    EngineError."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(exercise.start)
    except FileExistsError:
        return False
    except OSError as error:
        raise EngineError(f"{path} cannot be written: {error.strerror}; name another file with --file") from None
    return True
