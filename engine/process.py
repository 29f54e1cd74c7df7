"""The engine in a process of its own: commands come in, text, records and answers go out.

Why a process: in the process of a user interface the engine would suffer its garbage collection and it the engine's
steps. The parent holds the other end of a socket; when that closes, for whatever reason, this process ends.

    reader thread   blocks on the socket, puts commands on a queue; ends the process when the parent is gone
    main thread     owns the engine: takes commands, steps, detokenizes
    writer thread   packs and sends; a reader that is too slow loses records (and learns it from the gap in their
                    numbers), never text, and never holds up a step

Idle costs nothing: without work the main thread blocks on its queue.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from engine.errors import DeviceLost, EngineError, InvalidRequest
from engine.output import Delta, OutputProcessor
from engine.records import Record, pack
from engine.startup import import_torch

logger = logging.getLogger("engine")

FLUSH_S = 0.004  # news are sent at most this late
FEW = 12  # records that are packed by whoever reads them
MAX_UNSENT_RECORDS = 100_000
MAX_WAITING = 4096  # requests in the queue; others are refused
EXIT_GRACE_S = 2.0  # after the parent is gone, a step may end in peace for this long

Message = tuple[Any, ...]


class Writer:
    """Sends messages from a thread of its own, in order."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._unsent_records = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def send(self, *message: Any) -> None:
        self._queue.put(message)

    def send_news(self, deltas: list[tuple[Any, ...]], records: list[Record]) -> None:
        """Deltas, packed, always; records only while the reader keeps up."""
        with self._lock:
            if self._unsent_records + len(records) > MAX_UNSENT_RECORDS:
                records = []
            self._unsent_records += len(records)
        if deltas or records:
            self._queue.put(("news", deltas, records))

    def close(self) -> None:
        """Send what is queued, then stop."""
        self._queue.put(None)
        self._thread.join(timeout=EXIT_GRACE_S)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            with contextlib.suppress(OSError):  # the parent is gone: the reader ends this process
                self._connection.send_bytes(on_the_wire(message))
            if message[0] == "news":
                with self._lock:
                    self._unsent_records -= len(message[2])


def on_the_wire(message: Message) -> bytes:
    """A message as bytes; the records of news are packed on their own, so that the reader can leave them so. A few
    are not: that would take longer here than to pickle them, and the reader can do it."""
    if message[0] == "news" and len(message[2]) > FEW:
        message = ("packed", message[1], pack(message[2]))
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


class EngineServer:
    """The main thread's loop: commands, steps, text."""

    def __init__(self, built: Any, commands: queue.SimpleQueue[Message], writer: Writer) -> None:
        self.engine = built.engine
        self.outputs = OutputProcessor(built.tokenizer, self.engine.log)
        self.commands = commands
        self.writer = writer
        self._id_of: dict[int, int] = {}  # the client's tag -> request id
        self._tag_of: dict[int, int] = {}
        self._deltas: list[tuple[Any, ...]] = []  # packed
        self._next_flush = 0.0
        self._successor: Message | None = None

    def run(self) -> Message | None:
        """Until the client says close; the message, if it says to start another engine instead."""
        engine = self.engine
        while True:
            may_step = engine.has_work and engine.gate.allows()
            if not may_step:
                self._take(engine.drain())
                self._flush()
            if not self._obey(block=not may_step):
                return self._successor
            if may_step:
                self._take(engine.step())
                if engine.gate.stretch_s > 0.0:
                    self._take(engine.drain())
                    self._flush()
                    if not self._linger(engine.gate.stretch_s):
                        return self._successor
                elif time.perf_counter() >= self._next_flush:
                    self._flush()

    def _linger(self, seconds: float) -> bool:
        """Slow motion: wait, obeying commands meanwhile. A change of pace or gate ends the wait."""
        gate = self.engine.gate
        until, pace, state = time.perf_counter() + seconds, gate.pace, gate.state
        while (left := until - time.perf_counter()) > 0 and (gate.pace, gate.state) == (pace, state):
            with contextlib.suppress(queue.Empty):
                if not self._command(self._held(left)):
                    return False
        return True

    def _obey(self, block: bool) -> bool:
        """Take all commands that wait, or block for one. False if the engine is to end."""
        if block and not self._command(self._held(None)):
            return False
        with contextlib.suppress(queue.Empty):
            while self._command(self.commands.get(block=False)):
                pass
            return False
        return True

    def _held(self, timeout: float | None) -> Message:
        """The next command; while work waits for it, the clock of work stands. Raises queue.Empty after `timeout`."""
        began = time.perf_counter()
        try:
            return self.commands.get(timeout=timeout)
        finally:
            if self.engine.has_work:
                self.engine.log.held += time.perf_counter() - began

    def _command(self, message: Message) -> bool:
        kind, *rest = message
        if kind == "close":
            return False
        if kind == "start":
            self._successor = message
            return False
        if kind == "lost":
            raise DeviceLost(rest[0])
        try:
            if kind == "submit":
                self._submit(*rest)
            elif kind == "abort":
                self._abort(*rest)
            elif kind == "call":
                self._call(*rest)
        except InvalidRequest as error:
            logger.info("refused: %s", error)
        return True

    def _submit(self, tag: int, ids: list[int], params: Any, group: str, sample_index: int) -> None:
        try:
            request = self.engine.add_request(ids, params, group, sample_index)
        except InvalidRequest as error:
            self.writer.send("refused", tag, str(error), error.field)
            return
        self.outputs.open(request)
        self._id_of[tag], self._tag_of[request.id] = request.id, tag
        self.writer.send("accepted", tag, request.id, request.seed)

    def _abort(self, tag: int) -> None:
        request_id = self._id_of.get(tag)
        if request_id is None:
            return
        delta = self.outputs.close(request_id, "abort")
        self.engine.abort(request_id)
        if delta is not None:
            self._emit([delta])

    def _call(self, call: int, action: str, arguments: dict[str, Any]) -> None:
        """Answer a call of the client: control, snapshot and the like."""
        try:
            value = self._answer(action, **arguments)
        except (InvalidRequest, TypeError) as error:
            self.writer.send("answer", call, False, str(error))
        else:
            self.writer.send("answer", call, True, value)

    def _answer(self, action: str, **arguments: Any) -> Any:
        engine, gate = self.engine, self.engine.gate
        if action == "snapshot":
            self._flush()  # so that the records up to its number are on their way before it
            return engine.snapshot()
        if action == "pause":
            gate.pause()
            self._take(engine.drain())
        elif action == "resume":
            gate.resume()
        elif action == "step":
            gate.step(arguments.get("n", 1))
        elif action == "run_until":
            predicate = arguments["predicate"]
            gate.run_until(predicate["event"], predicate.get("ms", 0.0))
        elif action == "pace":
            gate.set_pace(arguments["factor"])
        elif action == "records":
            engine.log.enabled = arguments["enabled"]
        elif action == "clear_cache":
            return engine.clear_cache()
        elif action == "check":
            engine.check()
        elif action == "ping":
            return os.getpid()
        else:
            raise InvalidRequest(f"there is no action {action!r}", "action")
        return None

    # ---- news

    def _take(self, emitted: list[Any]) -> None:
        """Turn what a commit emitted into deltas; the next step is already on the device."""
        if not emitted:
            return
        deltas, stopped = self.outputs.process(emitted)
        for request_id in stopped:
            self.engine.abort(request_id, "stop")
        self._emit(deltas)

    def _emit(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            tag = self._tag_of[delta.request_id]
            if delta.finish_reason:
                del self._tag_of[delta.request_id], self._id_of[tag]
            delta.request_id = tag  # the client knows its streams by the tags it gave
            self._deltas.append(delta.packed())

    def _flush(self) -> None:
        self.writer.send_news(self._deltas, self.engine.log.drain())
        self._deltas = []
        self._next_flush = time.perf_counter() + FLUSH_S


def _read(connection: Connection, commands: queue.SimpleQueue[Message]) -> None:
    """The reader thread. When the parent is gone it asks the main thread to end, and makes it if it does not."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            commands.put(pickle.loads(connection.recv_bytes()))
    commands.put(("close",))
    time.sleep(EXIT_GRACE_S)
    os._exit(0)


def main(fd: int) -> int:
    """Serve the client at the other end of socket `fd`. Its first message is the EngineConfig."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    connection = Connection(fd)
    commands: queue.SimpleQueue[Message] = queue.SimpleQueue()
    writer = Writer(connection)
    threading.Thread(target=_read, args=(connection, commands), name="reader", daemon=True).start()
    message: Message | None = commands.get()
    status = 0
    while message is not None and message[0] == "start" and not status:
        status, message = _serve(message[1], commands, writer)
    writer.close()
    return status


def _serve(config: Any, commands: queue.SimpleQueue[Message], writer: Writer) -> tuple[int, Message | None]:
    """Build an engine and serve it: (exit status, the message that asks for another engine, if one does)."""
    try:
        from engine.build import as_engine_error, build_engine

        try:
            built = build_engine(
                config,
                on_progress=lambda progress: writer.send("progress", progress),
                on_lost=lambda sentence: _lost(sentence, commands, writer),
                before_torch=import_torch,
                max_waiting=MAX_WAITING,
            )
        except Exception as error:
            if not isinstance(error, EngineError):
                logger.exception("the engine could not start")
            raise as_engine_error(error) from error
    except EngineError as error:
        writer.send("failed", str(error))
        return 1, None
    writer.send("ready", built.info)
    try:
        return 0, EngineServer(built, commands, writer).run()
    except Exception as error:
        logger.exception("the engine stopped")
        writer.send("died", str(error) if isinstance(error, DeviceLost) else f"{type(error).__name__}: {error}")
        return 1, None
    finally:
        built.close()


def _lost(sentence: str, commands: queue.SimpleQueue[Message], writer: Writer) -> None:
    """Called in a thread when a rank is gone: the main thread ends the engine, or it is ended if a collective holds
    it."""
    commands.put(("lost", sentence))
    time.sleep(EXIT_GRACE_S)
    writer.send("failed", sentence)
    writer.send("died", sentence)
    writer.close()
    os._exit(1)


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(status)  # without waiting for torch's threads
