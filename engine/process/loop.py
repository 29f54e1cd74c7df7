"""The main thread of the engine process: runs commands and steps, and detokenizes.

Without work the thread blocks on its queue of commands, so an idle engine uses no processor time. Grammars are compiled
in other threads: the steps of other requests do not wait for them.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine.config import EngineConfig
from engine.core.request import Grammar
from engine.errors import DeviceLost, InvalidRequest, loses_device
from engine.params import SamplingParams
from engine.process.commands import Command
from engine.process.heartbeat import IDLE, Heart
from engine.process.writer import Writer
from engine.text.output import Delta, OutputProcessor
from engine.trace.records import Record

logger = logging.getLogger("engine")

FLUSH_S = 0.004  # the longest delay of records; without overlap, also of text
COMPILERS = 2  # grammars that are compiled at once
MAX_SENTENCE = 1000  # longest text of a refusal, in characters
PREPARE_SHARE = 0.05  # of the time while requests run may be spent on capturing the CUDA graphs that steps lack


class EngineLoop:
    """Owns an engine: runs the commands of the client and the steps of the engine, and sends text."""

    def __init__(self, built: Any, commands: queue.SimpleQueue[Command], writer: Writer, heart: Heart) -> None:
        self.engine = built.engine
        self.outputs = OutputProcessor(built.tokenizer, self.engine)
        self.commands = commands
        self.writer = writer
        self.heart = heart
        self._id_of: dict[int, int] = {}  # the client's tag -> request id
        self._tag_of: dict[int, int] = {}
        self._compilers = ThreadPoolExecutor(COMPILERS, "compile")
        self._compiling: set[int] = set()  # tags of requests whose grammars are being compiled
        self._deltas: list[tuple[Any, ...]] = []  # packed
        self._next_flush = 0.0
        self._successor: Command | None = None  # the command that asks for another engine
        self._prepare: Callable[[bool], dict[str, Any] | None] | None = built.prepare  # None: nothing is left
        self._next_prepare = 0.0  # when a running request may be delayed by it

    def run(self) -> Command | None:
        """Serve until the client closes the engine or asks for another engine; return the command that asks for
        another engine, or None."""
        engine = self.engine
        while True:
            may_step = engine.has_work and engine.gate.allows()
            if not may_step:
                self._queue_text(engine.drain())
                self._flush()
                self._prepare_until_a_command()
            if not self._run_commands(block=not may_step):
                return self._successor
            if may_step and engine.gate.allows():  # a command may have closed the gate
                self.heart.begin("step")
                self._queue_text(engine.step())
                if engine.gate.stretch_s > 0.0:
                    self._queue_text(engine.drain())
                    if not self._wait_for_slow_motion(engine.gate.stretch_s):
                        return self._successor
                elif time.perf_counter() >= self._next_flush:
                    self._flush()
                elif engine.delay and self.writer.idle:  # the device computes meanwhile: sending delays no step
                    self._send_text([])
                if self._prepare is not None and not engine.scheduler.waiting:
                    self._prepare_wanted()

    def _prepare_until_a_command(self) -> None:
        """Prepare later steps (Runner.prepare) while there is nothing else to do. A command waits for one piece."""
        began = time.perf_counter()
        self.heart.begin(IDLE)
        while self._prepare is not None and self.commands.empty():
            self._prepare_piece(self._prepare, False)
        if self.engine.has_work:
            self.engine.log.held += time.perf_counter() - began

    def _prepare_wanted(self) -> None:
        """Prepare what the last steps lacked, for a share of the time of the requests that run."""
        began = time.perf_counter()
        if self._prepare is None or began < self._next_prepare:
            return
        self._prepare_piece(self._prepare, True)
        took = time.perf_counter() - began
        self.engine.log.held += took
        self._next_prepare = began + took / PREPARE_SHARE

    def _prepare_piece(self, prepare: Callable[[bool], dict[str, Any] | None], wanted: bool) -> None:
        """Do one piece. After an error, steps go on without what is left."""
        try:
            left = prepare(wanted)
        except Exception as error:
            if loses_device(error):
                raise
            logger.exception("the preparation of steps ends")
            left = None
        self.heart.preparing = "" if left is None else left["text"]
        if left is None:
            self._prepare = None

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
                self._receive(tag, *arguments)
            elif kind == "compiled":
                if tag in self._compiling:  # it was not aborted meanwhile
                    self._compiling.remove(tag)
                    self._submit(tag, *arguments)
            elif kind == "abort":
                self._abort(tag)
            elif kind == "call":
                self.writer.send("answer", tag, True, self._answer(*arguments))
            elif kind == "start":
                check_config(*arguments)
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
        if kind in ("submit", "compiled"):
            self.writer.send("refused", tag, sentence, field)
        elif kind == "call":
            self.writer.send("answer", tag, False, sentence)
        elif kind == "start":
            self.writer.send("failed", sentence)

    def _receive(self, tag: int, ids: list[int], params: Any, *others: Any) -> None:
        """Submit a request, or compile its grammar first: then the command "compiled" submits it."""
        if tag in self._id_of or tag in self._compiling:
            raise InvalidRequest(f"the tag {tag} belongs to a request that has not ended", "tag")
        if not (isinstance(params, SamplingParams) and params.structured):
            self._submit(tag, ids, params, *others)
            return
        self._compiling.add(tag)
        future = self._compilers.submit(self.engine.compile, params)
        arguments = (ids, params, *others, future.result)
        future.add_done_callback(lambda _: self.commands.put(Command("compiled", tag, arguments)))

    def _submit(
        self, tag: int, ids: list[int], params: Any, group: str, sample_index: int, priority: int, cache_salt: str,
        compiled: Callable[[], Grammar] | None = None,
    ) -> None:
        request = self.engine.add_request(
            ids, params, group, sample_index, priority=priority, cache_salt=cache_salt, compiled=compiled
        )
        try:
            self.outputs.open(request)
        except BaseException:
            self.engine.abort(request.id)
            raise
        self._id_of[tag], self._tag_of[request.id] = request.id, tag
        self.writer.send("accepted", tag, request.id, request.seed)

    def _abort(self, tag: int) -> None:
        if tag in self._compiling:
            self._compiling.remove(tag)
            self.writer.send("refused", tag, "the request was cancelled before its grammar was compiled", "")
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
            self._flush()  # no token arrives after the answer
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
            return engine.clear_cache(arguments.get("preempt") is True)
        elif action == "check":
            engine.check()
        else:
            raise InvalidRequest(f"there is no action {action!r:.80}", "action")
        return None

    # ---- news

    def _queue_text(self, emitted: list[Any]) -> None:
        """Turn the tokens of a commit into deltas. If steps overlap, the next step already runs on the device."""
        if emitted:
            self._emit(self.outputs.process(emitted))

    def _emit(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            tag = self._tag_of[delta.request_id]
            if delta.finish_reason:
                del self._tag_of[delta.request_id], self._id_of[tag]
            delta.request_id = tag  # the client identifies streams by tag
            self._deltas.append(delta.packed())

    def _send_text(self, records: list[Record]) -> None:
        self.writer.send_news(self._deltas, records)
        self._deltas = []

    def _flush(self) -> None:
        self._send_text(self.engine.log.drain())
        self._next_flush = time.perf_counter() + FLUSH_S


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "without a text"


def check_config(config: Any) -> None:
    if not isinstance(config, EngineConfig):
        raise InvalidRequest(f"the configuration is of type {type(config).__name__}, not EngineConfig", "config")
