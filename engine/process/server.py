"""The engine process: it receives commands, runs steps, and sends text, records and answers.

The engine has its own process: in the process of a user interface, garbage collections would delay steps, and steps
would delay the interface. A socket connects this process to the client. When the client closes the socket, this process
ends.

    reader thread   blocks on the socket and queues commands; ends the process when the client has ended
    main thread     owns the engine: runs commands and steps, and detokenizes. If a command raises an exception, the
                    client gets a refusal (a sentence) and the engine continues, unless the device is lost
    heartbeat       sends the main thread's task and its duration every second (engine/process/heartbeat.py)
    writer thread   packs and sends messages. If the client reads too slowly, records are dropped, which leaves a gap in
                    their sequence numbers. Text is never dropped, and steps are never delayed

Without work the main thread blocks on its queue, so an idle engine uses no processor time.
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

from engine.config import EngineConfig
from engine.core.host_pauses import watch_stops
from engine.errors import DeviceLost, EngineError, InvalidRequest, loses_device
from engine.process.commands import Command
from engine.process.heartbeat import IDLE, Heart
from engine.process.startup import import_torch, log_to_stderr
from engine.text.output import Delta, OutputProcessor
from engine.trace.records import Record, packets
from engine.worker.cores import leave_a_core

logger = logging.getLogger("engine")

FLUSH_S = 0.004  # the longest delay of text and records
FEW = 12  # up to this many records are pickled as they are; the client packs them
MAX_UNSENT_RECORDS = 100_000
MAX_WAITING = 4096  # requests in the queue; more requests are refused
EXIT_GRACE_S = 2.0  # time for the main thread or the writer to end before the process exits
MAX_SENTENCE = 1000  # longest text of a refusal, in characters

Message = tuple[Any, ...]  # a message to the client: its kind, then its contents


class Writer:
    """Sends messages in order, from its own thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._unsent_records = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def send(self, *message: Any) -> None:
        self._queue.put(message)

    def send_beat(self, *beat: Any) -> None:
        """Send a heartbeat, but only if no message waits: while the client does not read, heartbeats must not pile
        up."""
        if self._queue.empty():
            self._queue.put(beat)

    def send_news(self, deltas: list[tuple[Any, ...]], records: list[Record]) -> None:
        """Send packed deltas, and also records unless too many records are unsent."""
        with self._lock:
            if self._unsent_records + len(records) > MAX_UNSENT_RECORDS:
                records = []
            self._unsent_records += len(records)
        if deltas or records:
            self._queue.put(("news", deltas, records))

    def close(self) -> None:
        """Send the queued messages, then stop."""
        self._queue.put(None)
        self._thread.join(timeout=EXIT_GRACE_S)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            with contextlib.suppress(OSError):  # the client has ended: the reader thread ends this process
                self._connection.send_bytes(_packed(message))
            if message[0] == "news":
                with self._lock:
                    self._unsent_records -= len(message[2])


def _packed(message: Message) -> bytes:
    """Returns a message as bytes. If packing fails, returns the news without records, or a message with the error."""
    try:
        return on_the_wire(message)
    except Exception as error:
        logger.exception("a message could not be packed")
        if message[0] == "news":
            return on_the_wire(("news", message[1], []))
        sentence = f"the engine's answer could not be sent ({type(error).__name__}: {error})"
        return on_the_wire(("answer", message[1], False, sentence) if message[0] == "answer" else ("failed", sentence))


def on_the_wire(message: Message) -> bytes:
    """Returns a message as bytes.

    Many records are sent as packets, which the client keeps packed. For a few records, pickling is faster.
    """
    if message[0] == "news" and len(message[2]) > FEW:
        message = ("packed", message[1], packets(message[2]))
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


class EngineServer:
    """The loop of the main thread: runs commands and steps, and sends text."""

    def __init__(self, built: Any, commands: queue.SimpleQueue[Command], writer: Writer, heart: Heart) -> None:
        self.engine = built.engine
        self.outputs = OutputProcessor(built.tokenizer, self.engine.log)
        self.commands = commands
        self.writer = writer
        self.heart = heart
        self._id_of: dict[int, int] = {}  # the client's tag -> request id
        self._tag_of: dict[int, int] = {}
        self._deltas: list[tuple[Any, ...]] = []  # packed
        self._next_flush = 0.0
        self._successor: Command | None = None  # the command that asks for another engine

    def run(self) -> Command | None:
        """Serve until the client closes the engine or asks for another engine; return the command that asks for
        another engine, or None."""
        engine = self.engine
        while True:
            may_step = engine.has_work and engine.gate.allows()
            if not may_step:
                self._queue_text(engine.drain())
                self._flush()
            if not self._run_commands(block=not may_step):
                return self._successor
            if may_step:
                self.heart.begin("step")
                self._queue_text(engine.step())
                if engine.gate.stretch_s > 0.0:
                    self._queue_text(engine.drain())
                    if not self._wait_for_slow_motion(engine.gate.stretch_s):
                        return self._successor
                elif time.perf_counter() >= self._next_flush:
                    self._flush()

    def _wait_for_slow_motion(self, seconds: float) -> bool:
        """Wait for `seconds`, the delay of slow motion; send and run commands meanwhile. A change of pace or gate ends
        the wait.

        Sending is a part of the delay: at full speed, the writer's thread sends while the next step runs, but here this
        thread would wait for it and count milliseconds in every step. Returns False if the engine must end.
        """
        gate = self.engine.gate
        began = time.perf_counter()
        until, pace, state = began + seconds, gate.pace, gate.state
        self._flush()
        if self.engine.has_work:
            self.engine.log.held += time.perf_counter() - began
        while (left := until - time.perf_counter()) > 0 and (gate.pace, gate.state) == (pace, state):
            with contextlib.suppress(queue.Empty):
                if not self._run_command(self._next_command(left)):
                    return False
                self._flush()
        return True

    def _run_commands(self, block: bool) -> bool:
        """Run all waiting commands; with `block`, wait for the first. Returns False if the engine must end."""
        ran_any = block
        if block and not self._run_command(self._next_command(None)):
            return False
        try:
            while self._run_command(self.commands.get(block=False)):
                ran_any = True
            return False
        except queue.Empty:
            if ran_any:
                self._flush()  # before the next step, which may take long
            return True

    def _next_command(self, timeout: float | None) -> Command:
        """Returns the next command. Raises queue.Empty after `timeout`. The wait does not count as work in the log."""
        began = time.perf_counter()
        self.heart.begin(IDLE)
        try:
            return self.commands.get(timeout=timeout)
        finally:
            if self.engine.has_work:
                self.engine.log.held += time.perf_counter() - began

    def _run_command(self, command: Command) -> bool:
        """Run one command; refuse it if it raises an exception. Returns False if the engine must end."""
        kind, tag, arguments, problem = command
        if kind == "lost":
            raise DeviceLost(arguments[0])
        if kind == "close":
            return False
        self.heart.begin(kind)
        try:
            if problem is not None:
                raise problem
            if kind == "submit":
                self._submit(tag, *arguments)
            elif kind == "abort":
                self._abort(tag)
            elif kind == "call":
                self.writer.send("answer", tag, True, self._answer(*arguments))
            elif kind == "start":
                _check_config(*arguments)
                self._successor = command
                return False
            else:
                raise InvalidRequest(f"there is no command {kind!r:.80}", "command")
            self.engine.gate.settle()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in a Rust library is not an Exception
            if loses_device(error):
                raise
            self._refuse(kind, tag, error)
        return True

    def _refuse(self, kind: str, tag: int, error: BaseException) -> None:
        if isinstance(error, InvalidRequest):
            sentence, field = str(error), error.field
        else:
            logger.error("a command of kind %r failed", kind, exc_info=error)
            sentence, field = f"the engine could not handle this ({type(error).__name__}: {_text(error)})", kind
        sentence = sentence[:MAX_SENTENCE]
        logger.info("refused: %s", sentence)
        if kind == "submit":
            self.writer.send("refused", tag, sentence, field)
        elif kind == "call":
            self.writer.send("answer", tag, False, sentence)
        elif kind == "start":
            self.writer.send("failed", sentence)

    def _submit(
        self, tag: int, ids: list[int], params: Any, group: str, sample_index: int, priority: int, cache_salt: str
    ) -> None:
        if tag in self._id_of:
            raise InvalidRequest(f"the tag {tag} belongs to a request that has not ended", "tag")
        request = self.engine.add_request(ids, params, group, sample_index, priority=priority, cache_salt=cache_salt)
        try:
            self.outputs.open(request)
        except BaseException:
            self.engine.abort(request.id)
            raise
        self._id_of[tag], self._tag_of[request.id] = request.id, tag
        self.writer.send("accepted", tag, request.id, request.seed)

    def _abort(self, tag: int) -> None:
        request_id = self._id_of.get(tag)
        if request_id is None:
            return
        self.engine.abort(request_id)
        delta = self.outputs.close(request_id, "abort")
        if delta is not None:
            self._emit([delta])

    def _answer(self, action: str, arguments: dict[str, Any]) -> Any:
        """Perform the action of a call and return its answer."""
        engine, gate = self.engine, self.engine.gate
        if action == "snapshot":
            self._flush()  # the records before the snapshot are sent first
            return engine.snapshot()
        if action == "pause":
            gate.pause()
            self._queue_text(engine.drain())
        elif action == "resume":
            gate.resume()
        elif action == "step":
            self._queue_text(engine.drain())  # a step in flight must not count as one of the n steps
            gate.step(arguments.get("n", 1))
        elif action == "run_until":
            predicate = arguments.get("predicate")
            if not isinstance(predicate, dict) or "event" not in predicate:
                raise InvalidRequest('run_until needs predicate={"event": name}', "predicate")
            self._queue_text(engine.drain())  # a step in flight must not fulfil the predicate
            gate.run_until(predicate["event"], predicate.get("ms", 0.0))
        elif action == "pace":
            gate.set_pace(arguments.get("factor", 1.0))
        elif action == "records":
            if not isinstance(arguments.get("enabled"), bool):
                raise InvalidRequest("records needs enabled=True or enabled=False", "enabled")
            engine.log.enabled = arguments["enabled"]
        elif action == "clear_cache":
            return engine.clear_cache()
        elif action == "check":
            engine.check()
        else:
            raise InvalidRequest(f"there is no action {action!r:.80}", "action")
        return None

    # ---- news

    def _queue_text(self, emitted: list[Any]) -> None:
        """Turn the tokens of a commit into deltas. If steps overlap, the next step already runs on the device."""
        if not emitted:
            return
        deltas, stopped = self.outputs.process(emitted)
        for request_id, tokens_shown in stopped:
            self.engine.abort(request_id, "stop", tokens_shown)
        self._emit(deltas)

    def _emit(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            tag = self._tag_of[delta.request_id]
            if delta.finish_reason:
                del self._tag_of[delta.request_id], self._id_of[tag]
            delta.request_id = tag  # the client identifies streams by tag
            self._deltas.append(delta.packed())

    def _flush(self) -> None:
        self.writer.send_news(self._deltas, self.engine.log.drain())
        self._deltas = []
        self._next_flush = time.perf_counter() + FLUSH_S


def _check_config(config: Any) -> None:
    if not isinstance(config, EngineConfig):
        raise InvalidRequest(f"the configuration is of type {type(config).__name__}, not EngineConfig", "config")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "without a text"


def _read(connection: Connection, commands: queue.SimpleQueue[Command]) -> None:
    """Queue the client's commands; runs in the reader thread. When the client has ended, ask the main thread to end,
    then end the process."""
    try:
        while True:
            commands.put(Command.read(connection.recv_bytes()))
    except (EOFError, OSError):
        logger.info("the client has ended")
    except BaseException:  # after a damaged message, the beginning of the next message is unknown
        logger.exception("the client's messages can no longer be read")
    commands.put(Command("close", 0))
    time.sleep(EXIT_GRACE_S)
    os._exit(0)


def main(fd: int) -> int:
    """Serve the client at the other end of socket `fd`; its first command is "start". Returns the exit status."""
    log_to_stderr()
    watch_stops()
    connection = Connection(fd)
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    writer = Writer(connection)
    heart = Heart(writer.send_beat)
    threading.Thread(target=_read, args=(connection, commands), name="reader", daemon=True).start()
    command: Command | None = commands.get()
    status = 0
    while command is not None and command.kind == "start" and not status:
        heart.begin("load")
        status, command = _serve(command, commands, writer, heart)
    writer.close()
    return status


def _serve(
    command: Command, commands: queue.SimpleQueue[Command], writer: Writer, heart: Heart
) -> tuple[int, Command | None]:
    """Build an engine and serve it; return the exit status and the command that asks for another engine, if any."""
    from engine.build import as_engine_error, build_engine

    try:
        if command.problem is not None:
            raise command.problem
        _check_config(*command.arguments)
        built = build_engine(
            command.arguments[0],
            on_progress=lambda progress: writer.send("progress", progress),
            on_lost=lambda sentence: _lost(sentence, commands, writer),
            before_torch=import_torch,
            max_waiting=MAX_WAITING,
        )
    except Exception as error:
        if not isinstance(error, EngineError):
            logger.exception("the engine could not start")
        writer.send("failed", str(as_engine_error(error)))
        return 1, None
    if built.info["device"].startswith("CPU") and command.arguments[0].cpu_threads is None:
        leave_a_core()
    writer.send("ready", built.info)
    try:
        return 0, EngineServer(built, commands, writer, heart).run()
    except Exception as error:
        logger.exception("the engine stopped")
        writer.send("died", str(error) if loses_device(error) else f"{type(error).__name__}: {error}")
        return 1, None
    finally:
        built.close()


def _lost(sentence: str, commands: queue.SimpleQueue[Command], writer: Writer) -> None:
    """End the engine, because a rank has ended: ask the main thread to end it. If the main thread hangs, end the
    process."""
    commands.put(Command("lost", 0, (sentence,)))
    time.sleep(EXIT_GRACE_S)
    writer.send("failed", sentence)
    writer.send("died", sentence)
    writer.close()
    os._exit(1)


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(status)  # do not wait for torch's threads
