"""EngineClient: the async client of an engine process. It submits and aborts requests, and reads text and records.

    client = await EngineClient.start(EngineConfig(model="Qwen/Qwen3-0.6B"))
    async for delta in client.submit(ids, SamplingParams(max_tokens=64)):
        print(delta.text, end="")
    await client.close()

The client loads neither torch nor a model, so the process of a user interface stays small. Steps of the engine do not
delay the client's process. If the engine process ends, every open stream and call raises EngineDead at once. Then
`restart()` starts a new process. `condition` reports a hang or a long task (engine/process/heartbeat.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.info import EngineInfo
from engine.params import SamplingParams
from engine.process import early_process
from engine.process.commands import MAX_UNSENT, Command, Link
from engine.process.heartbeat import TICK_S, Condition, Watch
from engine.process.stream import Stream
from engine.progress import Progress
from engine.text import early_tokenizer
from engine.text.output import Delta
from engine.trace.records import Packet, Record, packets

MAX_RECORDS = 200_000  # if more records wait for the reader, the oldest are dropped
CLOSE_S = 4.0  # seconds; a process that takes longer to end is killed


class EngineStream(Stream):
    """The answer to a request of this client."""

    def __init__(self, client: EngineClient, tag: int) -> None:
        super().__init__()
        self._client, self._tag = client, tag

    def cancel(self) -> None:
        """Ask the engine to end this request. Its last delta has finish_reason "abort"."""
        self._client._send("abort", self._tag)


class EngineClient:
    """The client of one engine process. Use it only on the event loop on which it was created."""

    def __init__(self, config: EngineConfig, log_file: Path | None = None, on_progress: Progress | None = None) -> None:
        """`log_file`: the log of the process; None: a file in the temporary directory. `launch` starts the process."""
        self.config = config
        self.log_file = log_file or Path(tempfile.gettempdir()) / f"minitui-engine-{os.getpid()}.log"
        self.info = EngineInfo()
        self.error: str | None = None  # why the engine has ended, as a sentence; None: it has not ended
        self._loop = asyncio.get_running_loop()
        self._waiting = Waiting(self._loop)
        # The next fields belong to the process that was started last; `_generation` counts the starts.
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._watch: Watch | None = None
        self._ticks: asyncio.Task[None] | None = None
        self._records = UnreadRecords()
        self._closing = False
        self._reason = ""  # why the process ended, as it told
        self._generation = 0
        self._tag = 0
        self._on_progress = on_progress
        self._on_death: list[Callable[[str], None]] = []

    @classmethod
    async def start(
        cls, config: EngineConfig, log_file: Path | None = None, on_progress: Progress | None = None
    ) -> EngineClient:
        """Start an engine process and wait until its model is loaded. Raises EngineError if it cannot start."""
        client = cls(config, log_file, on_progress)
        await client.launch()
        return client

    @property
    def alive(self) -> bool:
        return self.error is None and self._link is not None

    @property
    def condition(self) -> Condition:
        """The task of the engine process, and whether the process seems to hang."""
        return self._watch.condition if self._watch is not None and self._link is not None else Condition()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Call `callback(sentence)` on the event loop if the process ends without `close` or `kill`."""
        self._on_death.append(callback)

    async def launch(self) -> None:
        """Kill the running process, if any, then start a new one and wait until its model is loaded. Raises EngineError
        if the new process cannot start."""
        self.kill()
        self._disconnect()
        self._waiting.fail(EngineDead("the engine was started again"))
        try:
            process, connection = early_process.take(self.log_file)
        except OSError as error:
            self.error = f"the engine process could not be started with the log file {self.log_file}: {error}"
            raise EngineError(self.error) from error
        self._process, self._watch = process, Watch(process.pid)
        ready = self._waiting.for_start()
        self.error = None
        self._closing = False
        self._generation += 1
        self._records = UnreadRecords()
        self._ticks = asyncio.ensure_future(self._tick(self._watch))
        self._reason = ""
        link = Link(partial(self._read, self._generation), partial(self._wait_for_end, self._generation, process))
        try:
            await self._loop.create_connection(lambda: link, sock=connection)
            self._link = link
            self._send("start", 0, self.config)
            self.info = replace(await ready, log_file=str(self.log_file))
        except (asyncio.CancelledError, EngineError):
            if process is self._process:
                self.kill()
            raise

    async def _tick(self, watch: Watch) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            watch.tick()

    def _read(self, generation: int, data: bytes) -> None:
        """Read a message of the process: keep its records, and pass the rest on."""
        if generation != self._generation or self._watch is None:
            return
        try:
            message = pickle.loads(data)
        except Exception as error:
            self._reason = f"a message from it could not be read ({type(error).__name__}: {error})"
            if self._process is not None:
                self._process.kill()
            return
        self._watch.heard()
        match message:
            case "news" | "packed", deltas, records:
                self._records.add(packets(records) if message[0] == "news" else records)
                if deltas:
                    self._loop.call_soon(self._deliver, ("news", deltas), generation)
            case "beat", *beat:
                self._watch.beat(*beat)
            case "died", reason:
                self._reason = reason
            case _:
                self._loop.call_soon(self._deliver, message, generation)

    def _wait_for_end(self, generation: int, process: subprocess.Popen[bytes]) -> None:
        """Report the end of a process that has closed its socket, once it has ended."""

        def wait() -> None:
            status = process.wait()
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                self._loop.call_soon_threadsafe(self._ended, status, generation)

        threading.Thread(target=wait, name="end of the engine", daemon=True).start()

    def _deliver(self, message: tuple[Any, ...], generation: int) -> None:
        if generation != self._generation:
            return
        if message[0] != "progress":
            self._waiting.deliver(message)
            return
        progress = message[1]
        if self.config.load_tokenizer and (directory := progress.get("model_dir")):
            early_tokenizer.begin(directory)  # users of this client need it to encode prompts
        if self._on_progress is not None:
            self._on_progress(progress)

    def _ended(self, status: int, generation: int) -> None:
        """Report to all waiting streams and calls that the process has ended."""
        if generation != self._generation:
            return
        self._disconnect()
        if self._closing:
            self.error = "the engine was closed"
        else:
            how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            why = f": {self._reason}" if self._reason else ""
            self.error = f"the engine process ended {how}{why}; its log is {self.log_file}"
        self._waiting.fail(EngineDead(self.error))
        if not self._closing:
            for callback in self._on_death:
                callback(self.error)

    def _disconnect(self) -> None:
        """Stop sending to the process and watching it."""
        if self._link is not None:
            self._link.transport.close()
            self._link = None
        if self._ticks is not None:
            self._ticks.cancel()
            self._ticks = None

    def _send(self, kind: str, tag: int, *arguments: Any) -> None:
        """Queue a command without waiting. Raises InvalidRequest if it cannot pack the command or the queue is full."""
        if self._link is None:
            raise EngineDead(self.error or "the engine is not running")
        try:
            packed = Command(kind, tag, arguments).packed()
        except Exception as error:
            raise InvalidRequest(
                f"these values cannot be sent to the engine ({type(error).__name__}: {error}): use built-in types", kind
            ) from error
        if not self._link.put(packed):
            raise InvalidRequest(
                f"more than {MAX_UNSENT >> 20} MiB of commands wait for the engine: try again later", "queue"
            )

    # ---- requests and control

    def submit(
        self, ids: list[int], params: SamplingParams, group: str = "", sample_index: int = 0, *, priority: int = 0,
        cache_salt: str = "",
    ) -> Stream:
        """Queue a prompt without waiting. If the engine refuses it, iterating over the stream raises InvalidRequest.
        The arguments are those of `Engine.add_request`."""
        self._tag += 1
        stream = EngineStream(self, self._tag)
        self._send("submit", self._tag, list(ids), params, group, sample_index, priority, cache_salt)
        self._waiting.streams[self._tag] = stream
        return stream

    async def control(self, action: str, **arguments: Any) -> Any:
        """Let the engine perform `action` between two steps; return its answer. The actions: pause, resume, step n=,
        run_until predicate={"event", "ms"}, pace factor=, clear_cache preempt=, snapshot, check, and records enabled=.
        While records are disabled, the sequence numbers still increase. Take a snapshot after this gap."""
        self._tag += 1
        self._send("call", self._tag, action, arguments)
        return await self._waiting.for_answer(self._tag)

    async def snapshot(self) -> dict[str, Any]:
        """Returns the engine's state; `seq`: the number of its last record. The next drain may still return records up
        to `seq`."""
        return await self.control("snapshot")

    def drain_records(self) -> list[Record]:
        """Returns the records since the last drain, without waiting."""
        return [record for packet in self.drain_packets() for record in packet.records()]

    def drain_packets(self) -> list[Packet]:
        """Returns the records since the last drain as packets, for a reader that unpacks them later."""
        return self._records.drain()

    async def restart(self) -> None:
        """End the process and start a new one with the same configuration."""
        await self.close()
        await self.launch()

    async def reconfigure(self, config: EngineConfig) -> None:
        """Replace the engine with an engine of another configuration, in the same process. This is seconds faster than
        a new process, because torch is imported already. Open streams end with an error. Raises EngineError if the new
        engine cannot start."""
        self._send("start", 0, config)
        self._waiting.end_streams(InvalidRequest("another engine replaced this one"))
        self.config = config
        ready = self._waiting.for_start()
        self.info = replace(await ready, log_file=str(self.log_file))
        self.drain_packets()  # drop the records of the previous engine

    async def close(self) -> None:
        """End the process. Kill it if it has not ended after CLOSE_S, or at once if it hangs."""
        process = self._process
        if process is None:
            return
        self._closing = True
        if not self.condition.hung:
            with contextlib.suppress(EngineError):
                self._send("close", 0)
            deadline = time.monotonic() + CLOSE_S
            while process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
        early_process.end(process)

    def kill(self) -> None:
        """Kill the process and its children at once. Safe at any time, also without a running loop."""
        self._closing = True
        if self._process is not None:
            early_process.end(self._process)


class UnreadRecords:
    """A queue of packets of records."""

    def __init__(self) -> None:
        self._packets: deque[Packet] = deque()
        self._count = 0  # records in _packets

    def add(self, new: list[Packet]) -> None:
        """Add packets; drop the oldest if there are too many, which leaves a gap in the sequence numbers."""
        self._packets.extend(new)
        self._count += sum(map(len, new))
        while self._count > MAX_RECORDS:
            self._count -= len(self._packets.popleft())

    def drain(self) -> list[Packet]:
        """Returns all packets, and forget them."""
        drained, self._count = list(self._packets), 0
        self._packets.clear()
        return drained


class Waiting:
    """Passes each message to the stream or the future that waits for it. Use it only on its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.streams: dict[int, Stream] = {}  # tag -> the open stream
        self._calls: dict[int, asyncio.Future[Any]] = {}  # tag -> the answer
        self._ready: asyncio.Future[EngineInfo] = loop.create_future()
        self._told: dict[Stream, None] = {}  # streams whose readers will be told of new deltas
        self._loop = loop

    def for_start(self) -> asyncio.Future[EngineInfo]:
        """Returns the description of the engine that starts now. Raises EngineError if it cannot start."""
        self._ready = self._loop.create_future()
        return self._ready

    def for_answer(self, tag: int) -> asyncio.Future[Any]:
        """Returns the answer to the call `tag`. Raises InvalidRequest if the engine refuses the call."""
        self._calls[tag] = self._loop.create_future()
        return self._calls[tag]

    def deliver(self, message: tuple[Any, ...]) -> None:
        """Pass a message on. A stream or call that no longer waits gets nothing."""
        match message:
            case "news", deltas:
                if not self._told:  # what arrives in one turn of the event loop is read together
                    self._loop.call_soon(self._tell)
                for packed in deltas:
                    if (stream := self.streams.get(packed[0])) is not None:
                        delta = Delta(*packed)
                        delta.request_id = stream.request_id or 0
                        if delta.finish_reason:
                            del self.streams[packed[0]]
                        stream.add(delta)
                        self._told[stream] = None
            case "accepted", tag, request_id, seed if tag in self.streams:
                self.streams[tag].accept(request_id, seed)
            case "refused", tag, sentence, field if tag in self.streams:
                self.streams.pop(tag).put(InvalidRequest(sentence, field))
            case "answer", tag, done, answer:
                future = self._calls.pop(tag, None)
                if future is None or future.done():
                    return
                if done:
                    future.set_result(answer)
                else:
                    future.set_exception(InvalidRequest(answer, "control"))
            case "ready", info if not self._ready.done():
                self._ready.set_result(info)
            case "failed", sentence if not self._ready.done():
                self._ready.set_exception(EngineError(sentence))

    def _tell(self) -> None:
        told, self._told = self._told, {}
        for stream in told:
            stream.tell()

    def fail(self, error: EngineError) -> None:
        """Raise `error` in the start and in every open stream and call."""
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # mark it as retrieved, because the waiting task may have been cancelled
        self.end_streams(error)
        calls, self._calls = list(self._calls.values()), {}
        for future in calls:
            if not future.done():
                future.set_exception(error)

    def end_streams(self, error: EngineError) -> None:
        """Raise `error` in every open stream."""
        streams, self.streams = list(self.streams.values()), {}
        for stream in streams:
            stream.put(error)
