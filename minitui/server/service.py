"""Owns the engine client of a server: loads the model, restarts the engine, admits requests, and stops. Requests are
refused here, before they reach the engine: while the engine is not running (503), when the queue is full (429), and
when a prompt cannot fit (400)."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from engine.config import EngineConfig
from engine.errors import EngineDead, EngineError
from engine.info import EngineInfo
from engine.metrics.metrics import Metrics
from engine.params import SamplingParams
from engine.process.client import EngineClient
from engine.process.heartbeat import Condition
from engine.progress import Progress
from engine.text import early_tokenizer
from engine.text.limited_process import TakesLonger, patience
from engine.text.tokenizer import Tokenizer
from minitui.server.errors import ApiError, ContextExceeded
from minitui.server.openai.prompts import Encoder
from minitui.server.settings import ServerSettings
from minitui.server.telemetry.broadcast import Broadcast
from minitui.server.telemetry.http_metrics import HttpMetrics
from minitui.trace.recorder import Recording

logger = logging.getLogger("minitui.server")
T = TypeVar("T")

BACKOFF_S = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)  # the wait before a restart, after the first, second, … death in a row
STABLE_S = 60.0  # after a run of this length, a death counts as the first again
COMPILE_WAIT_S = 10.0  # a request whose grammar waits longer for other grammars of its API key is refused
STUCK_S = 30.0  # /health answers 503 when a text has waited and been encoded for longer than this
PATIENCE_S = 0.02  # the event loop waits so long for the template of a short chat, which usually takes 0.2 ms
CLOSE_S = 1.0  # when the server stops, the engine gets this much time to end by itself
MASK_TEXT = "."  # shown for every token of a hidden text
CHAT_ID = re.compile(r"[0-9a-f]{8}")  # the form of the random ids in minitui/chat/conversation.py


class Service:
    """The engine behind the endpoints. `state` is loading | ready | restarting | failed | stopped."""

    def __init__(self, config: EngineConfig, settings: ServerSettings, log_file: Path | None = None) -> None:
        self.config, self.settings, self.log_file = config, settings, log_file
        self.state = "loading"
        self.progress = "starting"
        self.on_progress: Progress = lambda progress: None
        self.draining = False
        self.metrics = Metrics()
        self.http_metrics = HttpMetrics()
        self.recording = None if settings.record is None else Recording(settings.record)
        self.broadcast = Broadcast(self.metrics, recording=self.recording)
        self.open = 0  # number of admitted sequences that have not ended
        self.began = int(time.time())
        self.connections: dict[Any, None] = {}  # open connections (connection.py), the oldest first
        self.gate_owner: str | None = None  # the watcher that closed the gate or slowed the engine
        self.gated, self.pace = False, 1.0  # what the last command to the gate and to slow motion set
        self._client: EngineClient | None = None
        self._tokenizer: Tokenizer | None = None
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenise")
        self.encoder = Encoder()
        self._jobs: dict[object, float] = {}  # waiting and running jobs of these threads, the oldest first -> its start
        self._compiling: dict[str, asyncio.Lock] = {}  # API key -> the lock of its compilation
        self._durations: deque[float] = deque(maxlen=64)  # seconds that the last requests took
        self._tasks: set[asyncio.Task[None]] = set()
        self._deaths = 0  # deaths of the engine in a row
        self._up_since = 0.0
        self._starting: asyncio.Task[None] | None = None
        self._launched: EngineClient | None = None  # set before the model is loaded; `_client` is set afterwards

    # ---- start and end

    async def start(self) -> None:
        """Load the model. Raises EngineError if that fails."""
        self._launched = EngineClient(self.config, self.log_file, self._tell_progress)
        self._starting = asyncio.ensure_future(self._launched.launch())
        try:
            await self._starting
            tokenizer = await self._use(self._launched)
        except (EngineError, asyncio.CancelledError):
            self.state = "failed"
            raise
        if self.settings.hide_text:
            self.broadcast.mask_id = tokenizer.encode(MASK_TEXT, add_special_tokens=False)[0]
        self._launched.on_death(self._died)
        await self._become_ready()

    async def _use(self, client: EngineClient) -> Tokenizer:
        """Serve the requests with this client. Returns its tokenizer."""
        self._client = client
        self._tokenizer = await asyncio.to_thread(early_tokenizer.load, client.info.model_dir)
        self._tokenizer.context = self.longest
        self._tokenizer.start_rendering()
        return self._tokenizer

    async def _become_ready(self) -> None:
        self.gated, self.pace = False, 1.0  # a new engine runs freely
        await self.broadcast.begin(self.client, self.model)
        self.state, self._up_since = "ready", time.monotonic()

    def _tell_progress(self, progress: dict[str, Any]) -> None:
        self.on_progress(progress)
        text, model = str(progress.get("text", "")), Path(self.config.model)
        # Callers see the model's name, not its path on this machine.
        self.progress = text.replace(str(model), model.name) if model.is_absolute() else text

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _died(self, sentence: str) -> None:
        logger.error("%s", sentence)
        if self.state == "ready":
            self.state = "restarting"
            self._spawn(self._restart())

    async def _restart(self) -> None:
        """Restart the engine after a wait. Each death in a row makes the wait longer."""
        await self.broadcast.end()
        if time.monotonic() - self._up_since > STABLE_S:
            self._deaths = 0
        while True:
            await asyncio.sleep(BACKOFF_S[min(self._deaths, len(BACKOFF_S) - 1)])
            self._deaths += 1
            try:
                self.metrics.restarts.add()
                await self.client.restart()
                await self._become_ready()
            except (EngineError, OSError) as error:
                logger.error("the engine could not be restarted: %s", error)
            else:
                logger.info("the engine runs again")
                return

    def release_gate(self) -> None:
        """Open the gate and end slow motion, because the watcher that controlled them has disconnected."""
        if self.gate_owner is None:
            return
        self.gate_owner = None

        async def release() -> None:
            with contextlib.suppress(EngineError):
                await self.control("resume")
                await self.control("pace", factor=1.0)

        self._spawn(release())

    async def control(self, action: str, **arguments: Any) -> Any:
        """Control the engine: see Source.control."""
        value = await self.client.control(action, **arguments)
        if action == "pace":
            self.pace = arguments["factor"]
        elif action != "clear_cache":
            self.gated = action != "resume"
        return value

    @property
    def held(self) -> str:
        """Says that somebody paused the engine or slowed it down; empty if it runs freely."""
        if self.gated:
            return "your lecturer paused the engine"
        return f"your lecturer slowed the engine down to 1/{self.pace:g} of its speed" if self.pace > 1 else ""

    async def drain(self) -> None:
        """Refuse new requests, and wait up to `drain_s` for the sequences that still run."""
        self.draining = True
        deadline = time.monotonic() + self.settings.drain_s
        while self.open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self.open:
            logger.warning("%d sequences have not finished within %g s and are ended", self.open, self.settings.drain_s)
        for watcher in list(self.broadcast.watchers):
            watcher.close()

    async def close(self) -> None:
        """End the engine process, by force if necessary."""
        self.state = "stopped"
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()  # this kills the engine process
            with contextlib.suppress(asyncio.CancelledError, EngineError):
                await self._starting
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.broadcast.end()
        if self._client is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._client.close()
            self._client.kill()
        if self.recording is not None:
            self.recording.close()
        if self._tokenizer is not None:
            self._tokenizer.stop_rendering()
        self.encoder.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- state

    @property
    def client(self) -> EngineClient:
        if self._client is None:
            raise ApiError(503, f"the model is still loading: {self.progress}", headers={"Retry-After": "2"})
        return self._client

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ApiError(503, f"the model is still loading: {self.progress}", headers={"Retry-After": "2"})
        return self._tokenizer

    @property
    def info(self) -> EngineInfo:
        return self.client.info

    @property
    def model(self) -> str:
        """The model's first name in requests and answers."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model in requests, except "default"."""
        names = tuple(filter(None, self.settings.served_names))
        return names or (str(self._client.info.model) if self._client is not None else "",)

    @property
    def condition(self) -> Condition:
        """Tells whether the engine process responds, and which step or command takes long."""
        return self._launched.condition if self._launched is not None else Condition()

    @property
    def overdue(self) -> bool:
        """True if one step or command has taken so long that load balancers should send no requests."""
        return bool(self.condition.long) and self.condition.task_s > self.settings.stalled_engine_s

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Returns (True if the engine runs without a problem, the body of /health)."""
        condition = self.condition
        if condition.hung:
            return False, {"status": "stalled", "silent_s": round(condition.silent_s, 1)}
        if self.state in ("restarting", "failed", "stopped"):
            return False, {"status": self.state}
        if self.state == "loading":
            return False, {"status": "loading", "progress": self.progress}
        long = {"long": condition.long} if condition.long else {}
        if (age := self.oldest_job_s) > STUCK_S:
            return False, {"status": "busy", "open": self.open, "long": f"encoding a request for {age:.0f} s"}
        if self.overdue:
            return False, {"status": "busy", "open": self.open, **long}
        more = {"held": self.held, "preparing": condition.preparing}
        more = {name: text for name, text in more.items() if text}
        return True, {"status": "draining" if self.draining else "ok", "open": self.open, **long, **more}

    def check_ready(self) -> None:
        """Raises ApiError 503 or EngineDead if no request can be accepted now."""
        if self.draining or self.state == "stopped":
            raise ApiError(503, "the server is stopping", code="stopping", headers={"Retry-After": "10"})
        if self.state == "loading":
            raise ApiError(503, f"the model is still loading: {self.progress}", headers={"Retry-After": "2"})
        if self.condition.hung:
            raise EngineDead("the engine does not respond")
        if self.state != "ready" or self.overdue:
            raise EngineDead("the engine is not running")

    @property
    def longest(self) -> int:
        """The largest number of tokens that a prompt and its reply may have together."""
        return int(self.info.max_model_len)

    # ---- admission

    @property
    def capacity(self) -> int:
        """The largest number of open sequences, running and waiting together."""
        return int(self.info.max_num_seqs) + self.settings.max_waiting

    @contextlib.contextmanager
    def admit(self, sequences: int) -> Iterator[None]:
        """Reserve places for this many sequences while the `with` block runs. Raises ApiError 429 if too few places are
        free, ApiError 400 if the server never has that many places, and the errors of `check_ready`."""
        self.check_ready()
        if sequences > self.capacity:
            raise ApiError(
                400, f"the request has {sequences:,} sequences; the limit is {self.capacity:,}", "n"
            )
        if self.open + sequences > self.capacity:
            raise ApiError(
                429, f"{self.open:,} sequences are running or waiting; the limit is {self.capacity:,}: try again later",
                code="queue_full", headers={"Retry-After": str(self.retry_after())},
            )
        self.open += sequences
        started = time.monotonic()
        try:
            yield
        finally:
            self.open -= sequences
            self._durations.append(time.monotonic() - started)

    def retry_after(self) -> int:
        """Returns an estimate of the seconds until a place is free, from the durations of the last replies."""
        if not self._durations:
            return 1
        mean = sum(self._durations) / len(self._durations)
        return max(1, min(60, math.ceil(mean * self.settings.max_waiting / max(1, self.capacity))))

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run slow work (a template, a long text, a large body) in a thread, off the event loop."""
        job = object()
        self._jobs[job] = time.monotonic()
        context = contextvars.copy_context()  # of the request: it has the notices
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, context.run, work, *arguments)
        finally:
            del self._jobs[job]

    async def at_once(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work on the event loop that is usually shorter than the way to a thread and back (0.7 ms of processor
        time). If its template takes longer than PATIENCE_S, run it in a thread."""
        token = patience.set(PATIENCE_S)
        try:
            return work(*arguments)
        except TakesLonger:
            pass
        finally:
            patience.reset(token)
        return await self.in_thread(work, *arguments)

    @property
    def oldest_job_s(self) -> float:
        """How long the oldest job of the threads has waited or run, in seconds."""
        return time.monotonic() - next(iter(self._jobs.values())) if self._jobs else 0.0

    @contextlib.asynccontextmanager
    async def compilation(self, owner: str) -> AsyncIterator[None]:
        """Wait for the place in which an API key compiles one grammar at a time. Raises ApiError 429 if it takes long.
        So the grammars of one key, however costly, leave the other processes free for the other keys."""
        lock = self._compiling.setdefault(owner, asyncio.Lock())
        try:
            async with asyncio.timeout(COMPILE_WAIT_S):
                await lock.acquire()
        except TimeoutError:
            raise ApiError(
                429, f"other grammars of this API key have been compiled for {COMPILE_WAIT_S:g} s, one at a time: "
                "try again later", code="compiling", headers={"Retry-After": str(math.ceil(COMPILE_WAIT_S))},
            ) from None
        try:
            yield
        finally:
            lock.release()

    def label(self, user: str | None = None, chat: str = "") -> str:
        """Returns the label of a request in the records. If texts are hidden, this is a chat id of minitui or empty."""
        if self.settings.hide_text:
            return chat if CHAT_ID.fullmatch(chat) else ""
        return user or chat

    def check_model(self, name: str | None) -> str:
        """Returns the name of the model in the answer to a request for the model `name`. None and "default" stand for
        the first name. Raises ApiError 404 if the model does not have this name."""
        if name in (None, "default"):
            return self.model
        if name not in self.names:
            known = " and ".join(map(repr, self.names))
            raise ApiError(404, f"there is no model {name!r}; this server has {known}", "model", code="model_not_found")
        return str(name)

    def check(self, prompts: list[list[int]], params: SamplingParams, field: str) -> None:
        """Raises ApiError or InvalidRequest, with the name of the field, if the engine cannot run the request."""
        vocabulary, longest = int(self.info.vocab_size), self.longest
        params.validate(vocabulary)
        for ids in prompts:
            if not ids:
                raise ApiError(400, f"{field} is empty; at least one token is needed", field)
            if len(ids) >= longest:
                raise ContextExceeded(field, len(ids), longest)
            if not 0 <= min(ids) <= max(ids) < vocabulary:
                raise ApiError(400, f"{field} has a token id outside the model's range, 0 to {vocabulary - 1:,}", field)


class Borrowed(Service):
    """A service on the engine of another owner, who reads its records and ends it. There is no telemetry."""

    def __init__(self, client: EngineClient, settings: ServerSettings) -> None:
        super().__init__(client.config, settings)
        self._borrowed = client

    async def start(self) -> None:
        self._launched = self._borrowed
        await self._use(self._borrowed)
        self.state = "ready"

    async def close(self) -> None:
        """Stop to serve; the engine goes on."""
        self._client = None
        await super().close()
