"""The process beside vLLM: reads the messages of its scheduler, serves the telemetry, and writes the recording.

    python -m minitui.vllm.watcher READ_END ASK_END

minitui/vllm/pipe.py starts it; environment variables configure it, because vLLM owns the command line:

    MINITUI_TELEMETRY_PORT   default: vLLM's port + 1, where `--connect` finds it; the next data parallel ranks follow
    MINITUI_TELEMETRY_HOST   default 127.0.0.1; any other address needs a key
    MINITUI_API_KEY, MINITUI_CHAT_KEY, MINITUI_WATCH_KEY   as for `minitui serve`; default: vLLM's own keys, because
                             --connect sends one key to vLLM and to the telemetry
    MINITUI_HIDE_TEXT=1      the telemetry has no texts
    MINITUI_ALLOWED_HOST=…   names in the Host header besides localhost, as of a proxy; only without keys
    MINITUI_RECORD=run.trace writes a recording

The endpoint has the paths /minitui/… of `minitui serve`, without requests and control.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import marshal
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI
from starlette.types import ASGIApp

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.hub.resolve import resolve_model
from engine.info import EngineInfo
from engine.process.client import EngineClient
from engine.text.tokenizer import Tokenizer
from engine.trace.records import Record
from minitui import __version__
from minitui.protocol import ServerInfo
from minitui.server import errors
from minitui.server.access import Guard
from minitui.server.command import Host, gather_keys
from minitui.server.errors import ApiError
from minitui.server.service import MASK_TEXT, Service
from minitui.server.settings import ServerSettings
from minitui.server.telemetry import endpoints as telemetry
from minitui.vllm.blocks import Inconsistent
from minitui.vllm.pipe import GAVE_REASON, LENGTH
from minitui.vllm.translate import Translator

ONLY_WATCHES = "this address only shows vLLM: send requests to vLLM's own address; it cannot be paused or slowed down"


class Feed:
    """The engine that `Broadcast` reads: the records of a Translator."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        facts = {**translator.info, "model_dir": _tokenizer_directory(translator.info)}
        self.info = ServerInfo.from_json(json.loads(json.dumps(facts, default=str)))

    async def snapshot(self) -> dict[str, Any]:
        return self._translator.blocks.state.snapshot()

    def drain_records(self) -> list[Record]:
        return self._translator.drain()


class VllmService(Service):
    """A service without requests: it sends the records of a translator to watchers and into the recording."""

    def __init__(self, translator: Translator, settings: ServerSettings) -> None:
        super().__init__(EngineConfig(), settings)
        self._client = cast(EngineClient, Feed(translator))
        if settings.hide_text:
            self.broadcast.mask_id = _mask(self.info)

    async def start(self) -> None:
        await self.broadcast.begin(self.client)

    async def drain(self) -> None:
        await self.broadcast.end()  # the watchers get the last records
        await super().drain()

    async def close(self) -> None:
        self._client = None  # nothing is to be ended
        await super().close()

    def check_ready(self) -> None:
        """Refuses requests and control."""
        raise ApiError(400, ONLY_WATCHES, code="only_watches")

    def application(self) -> ASGIApp:
        """Returns the endpoints, guarded as those of `minitui serve`."""
        api = FastAPI(title="minitui beside vLLM", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
        errors.install(api)
        api.include_router(telemetry.router(self))
        return Guard(api, self)


def _tokenizer_directory(info: dict[str, Any]) -> str:
    """Returns the directory of vLLM's tokenizer; an empty directory's name if it is not on this machine."""
    try:
        return str(resolve_model(info["tokenizer"], weights=False))
    except EngineError:
        return str(Path(info["tokenizer"]))


def _mask(info: EngineInfo) -> int:
    try:
        return Tokenizer(Path(info.model_dir)).encode(MASK_TEXT, add_special_tokens=False)[0]
    except EngineError:
        return 0


logger = logging.getLogger("minitui.vllm")
PIECE = 1 << 20  # bytes read at once
REPORT_S = 1.0  # between two reports of MINITUI_VLLM_CHECK
ASK_AGAIN_S = 5.0
MOST_ASKS = 10  # for a whole state, …
FORGIVEN_S = 3600.0  # … at shorter intervals than this
VARIABLES = {
    "--api-key (or MINITUI_API_KEY)": "MINITUI_API_KEY", "--port": "MINITUI_TELEMETRY_PORT",
    "--host": "MINITUI_TELEMETRY_HOST", "--record": "MINITUI_RECORD",
}
NICE = 5  # vLLM's processes come first


def settings_from(environment: dict[str, str], rank: int, port: int) -> ServerSettings:
    """Returns the settings of the telemetry endpoint. Raises EngineError with a sentence."""
    record = environment.get("MINITUI_RECORD")
    return ServerSettings(
        host=environment.get("MINITUI_TELEMETRY_HOST", "127.0.0.1"), port=port,
        keys=gather_keys([], [], []), record=path_of(record, rank) if record else None,
        allowed_hosts=tuple(environment.get("MINITUI_ALLOWED_HOST", "").split()),
        hide_text=environment.get("MINITUI_HIDE_TEXT", "") not in ("", "0"),
    )


def path_of(name: str, rank: int) -> Path:
    """Returns the file of a data parallel rank."""
    path = Path(name)
    return path.with_suffix(f".rank{rank}{path.suffix}") if rank else path


class Watcher:
    """Reads the pipe and feeds the service. Ends when vLLM closes its end, or ends itself."""

    def __init__(self, reader: int, asks: int) -> None:
        self._reader, self._asks = reader, asks
        self._rest = bytearray()
        self._done = asyncio.Event()
        self._waits = False  # for a whole state
        self._asked, self._asked_at = 0, -ASK_AGAIN_S
        self._translator: Translator | None = None
        self._began = asyncio.Event()

    async def run(self) -> None:
        """Serve until vLLM ends. Raises EngineError with a sentence."""
        os.set_blocking(self._reader, False)
        asyncio.get_running_loop().add_reader(self._reader, self._read)
        done = asyncio.create_task(self._done.wait())
        began = asyncio.create_task(self._began.wait())
        await asyncio.wait({done, began}, return_when=asyncio.FIRST_COMPLETED)
        if self._translator is None:
            return
        info = self._translator.info
        settings = settings_from(dict(os.environ), info["rank"], info["telemetry_port"])
        service = VllmService(self._translator, settings)
        host = self._host(service)
        running = asyncio.create_task(service.start() if host is None else host.run())
        failed = ""
        while not done.done():  # vLLM may kill this process with its other children, so the report is written all along
            await asyncio.wait({done}, timeout=REPORT_S)
            self._report()
            failed = _tell_failure(service, failed)
        if host is not None:
            host.stop()
        await running
        await service.close()
        _tell_failure(service, failed)

    def _host(self, service: VllmService) -> Host | None:
        """Returns what serves; None if that is not possible, and only a recording is written. Raises EngineError if
        there is none."""
        settings = service.settings
        try:
            host = Host(service.config, settings, service=service, app=service.application())
        except EngineError as error:
            if settings.record is None:
                raise
            logger.warning("minitui records this engine, but does not show it: %s", in_variables(str(error)))
            return None
        logger.warning("minitui shows this engine at %s", host.url)
        return host

    def _read(self) -> None:
        try:
            piece = os.read(self._reader, PIECE)
        except BlockingIOError:
            return
        if not piece:
            self._end()
            return
        rest = self._rest
        rest += piece
        start = 0
        while len(rest) - start >= LENGTH and not self._done.is_set():
            end = start + LENGTH + int.from_bytes(rest[start : start + LENGTH], "little")
            if end > len(rest):
                break
            self._take(marshal.loads(memoryview(rest)[start + LENGTH : end]))
            start = end
        del rest[:start]

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._reader)
        self._done.set()

    def _take(self, message: tuple[Any, ...]) -> None:
        if message[0] == "init":
            self._translator = Translator(*message[1:])
            self._began.set()
            return
        assert self._translator is not None
        if self._waits and message[0] != "whole":
            if time.monotonic() > self._asked_at + ASK_AGAIN_S:
                self._ask()
            return
        try:
            self._translator.take(message)
            self._waits = False
        except Inconsistent as error:
            self._waits = True
            if time.monotonic() > self._asked_at + FORGIVEN_S:
                self._asked = 0
            self._asked += 1
            if self._asked > MOST_ASKS:
                logger.warning("minitui does not show this engine any more: %s", error)
                self._end()
                return
            logger.warning("vLLM did something that minitui did not expect, and minitui asks for its state: %s", error)
            if time.monotonic() > self._asked_at + ASK_AGAIN_S:
                self._ask()

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        with contextlib.suppress(OSError):
            os.write(self._asks, b"?")

    def _report(self) -> None:
        """With MINITUI_VLLM_CHECK=file, write how the state compared with vLLM's own numbers."""
        name, translator = os.environ.get("MINITUI_VLLM_CHECK"), self._translator
        if name and translator is not None:
            path, state = path_of(name, translator.info["rank"]), translator.blocks.state
            report = {
                "comparisons": translator.checked, "steps": state.step + 1, "differences": len(translator.faults),
                "first": translator.faults[:20], "records": state.seq, "counts": translator.blocks.counts,
                "totals": translator.totals, "cost_us": translator.cost_us,
            }
            new = Path(f"{path}.new")
            new.write_text(json.dumps(report, indent=1))
            new.replace(path)


def _tell_failure(service: VllmService, known: str) -> str:
    """Returns why the recording has ended; logs the reason, unless it is `known`."""
    recording = service.broadcast.recording
    if recording is not None and recording.error != known:
        logger.warning("minitui's recording ends: %s", in_variables(recording.error))
        return recording.error
    return known


def in_variables(text: str) -> str:
    """Returns a sentence of `minitui serve` with the names of variables: the options beside vLLM are vLLM's."""
    for option, variable in VARIABLES.items():
        text = text.replace(option, variable)
    return text


def reason_of(error: Exception) -> str:
    """Returns why the watcher ends."""
    return in_variables(str(error)) if isinstance(error, EngineError) else repr(error)


def main() -> int:
    """Run the watcher; returns the exit code."""
    if os.fork():  # at its end, vLLM kills its child processes; the watcher must live on to close its recording
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when vLLM ends
    with contextlib.suppress(OSError, AttributeError):  # a sandbox forbids it, or not Linux
        os.nice(NICE)
        # Else a message that wakes this process may put it in vLLM's place on a busy core, for 1 to 3 ms.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns about each request that is not HTTP
    reader, asks = int(sys.argv[1]), int(sys.argv[2])
    try:
        asyncio.run(Watcher(reader, asks).run())
    except Exception as error:
        logger.error("minitui does not show this engine: %s", reason_of(error))
        return 1
    finally:
        with contextlib.suppress(OSError):
            os.write(asks, GAVE_REASON)
    return 0


if __name__ == "__main__":
    sys.exit(main())
