"""Defines `Source`: an engine on this machine, a server, several servers, or a recording. The rest of minitui uses a
Source, never an engine directly. Only `start` imports the heavy modules, so that the application can draw its first
screen without them."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.info import EngineInfo
from engine.params import PARAMETERS, SamplingParams
from engine.process.heartbeat import Condition
from engine.process.stream import Stream
from engine.progress import Progress
from engine.trace.records import Packet, Record, packets

if TYPE_CHECKING:
    from engine.config import EngineConfig


class Source(ABC):
    """An engine, or a recording of one, that the application shows. Every source implements the abstract methods. The
    other methods have defaults, for sources that do not support them."""

    log_file: Path | None = None  # the log of an engine process on this machine
    missing = "the engine is starting"  # why there is no state yet, as a sentence

    def __init__(self) -> None:
        self.info = EngineInfo()  # false before `start`
        self.error: str | None = None  # why there is no engine, as a sentence
        self._ready = asyncio.Event()  # set when `start` has succeeded or failed
        self._on_death: list[Callable[[str], None]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    # ---- start and end

    @abstractmethod
    async def start(self, on_progress: Progress) -> None:
        """Make the source ready and report progress. Raises EngineError with a sentence for the user."""

    async def restart(self, on_progress: Progress) -> None:
        """End the tasks that still run, and start again."""
        self._ready.clear()
        await self._stop()
        await self.start(on_progress)

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        """The `with` block starts the engine. Afterwards `ready` returns, or raises the block's error as EngineDead."""
        self.error = None
        try:
            yield
        except EngineError as error:
            self.error = str(error)
            self._ready.set()
            raise
        self._ready.set()

    def keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a task that is cancelled when this source closes or starts again."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _stop(self) -> None:
        """End the tasks, so that `start` can be called again."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Close the source; returns when it is closed."""
        await self._stop()

    async def ready(self) -> None:
        """Returns when the source can answer. Raises EngineDead if it could not be started or has ended."""
        await self._ready.wait()
        if self.error is not None:
            raise EngineDead(self.error)

    async def reconfigure(self, config: EngineConfig) -> None:
        """Restart the engine with another configuration. Raises EngineError if that fails or is not supported."""
        raise EngineError("only an engine that this minitui started can change its configuration")

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with a sentence when the source ends by itself. Some sources never end by themselves."""
        self._on_death.append(callback)

    def _died(self, sentence: str) -> None:
        self.error = sentence
        for callback in self._on_death:
            callback(sentence)

    # ---- requests

    @abstractmethod
    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> Stream:
        """Ask for an answer; `group` labels the request in the records."""

    def cannot_use(self, name: str) -> str:
        """Returns the reason, as a sentence, if `submit` refuses the sampling parameter `name`; else empty."""
        return ""

    def sent(self, params: SamplingParams, always: Collection[str] = (), server: str = "") -> dict[str, Any]:
        """Returns the fields of a request to a server: the parameters that differ from their defaults, and `always`.
        `server`: its kind, if it may have other names. Raises InvalidRequest if this source refuses a parameter."""
        body = {}
        for name, parameter in PARAMETERS.items():
            value = getattr(params, name)
            if value != parameter.default and (reason := self.cannot_use(name)):
                raise InvalidRequest(reason, name)
            if value is not None and (value != parameter.default or name in always):
                body[parameter.spellings.get(server, name)] = value
        return body

    @abstractmethod
    async def control(self, verb: str, **arguments: Any) -> Any:
        """Control the engine: pause | resume | step (n) | run_until (predicate) | pace (factor) | clear_cache. Raises
        InvalidRequest if this source does not support the verb."""

    @property
    def uncontrolled(self) -> str:
        """The reason, as a sentence, if `control` refuses every verb; else empty."""
        return ""

    # ---- records

    @abstractmethod
    async def snapshot(self) -> dict[str, Any]:
        """Returns the current state, for engine.trace.state.State. Raises EngineError if this source has none."""

    def recorded(self) -> tuple[dict[str, Any], Iterator[Record]] | None:
        """Returns the beginning of the recording that is played: its first snapshot, and the records after it. None:
        there is no recording, or the last snapshot is of a later part."""
        return None

    @abstractmethod
    def drain_records(self) -> list[Record]:
        """Returns the records since the last call; cheap enough for every frame."""

    def drain_packets(self) -> list[Packet]:
        """Returns the same records, packed, for a reader that unpacks them later."""
        return packets(self.drain_records())

    # ---- health

    @property
    def condition(self) -> Condition:
        """Tells whether the engine process responds. A source without a process on this machine reports no problem."""
        return Condition()

    @property
    def connection(self) -> str:
        """The reason, as a sentence, while the server cannot be reached; else empty."""
        return ""

    # ---- recording

    @property
    def recording_error(self) -> str:
        """The reason why the recording stopped; else empty."""
        return ""

    def add_note(self, text: str) -> int:
        """Store a text for the last step in the recording; returns the step. Raises InvalidRequest without one."""
        raise InvalidRequest("nothing is recorded here: start minitui with --record FILE")

    @property
    def recording_file(self) -> Path | None:
        """The file that is being written; None if nothing is recorded."""
        return None

    def name_groups(self, names: dict[str, str]) -> None:  # noqa: B027  (most sources have no recording)
        """Store the titles of chats in the recording. `names`: the title of each group."""
