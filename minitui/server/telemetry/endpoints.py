"""The endpoints /minitui/…, which minitui's own client (minitui/sources/remote.py) uses.

    GET  info              facts about the engine, and the caller's role
    GET  tokenizer/{file}  the files that a client needs to encode and decode
    GET  snapshot          the engine's state after its latest record
    GET  records           the records from now on, as server-sent events
    POST submit            generate a reply to token ids, sent as deltas in server-sent events
    POST cancel            end the request that has the given tag
    POST control           control the gate and slow motion, or clear the cache
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field, model_validator

from engine.errors import EngineDead
from engine.params import PARAMETERS, SamplingParams
from minitui import __version__, tutor
from minitui.protocol import TOKENIZER_FILES
from minitui.server.access import owner_of
from minitui.server.answer import Answer, Output
from minitui.server.bodies import Endpoints
from minitui.server.errors import STREAMED, ApiError
from minitui.server.schema import Finite, Prompt, with_parameters
from minitui.server.service import Service
from minitui.server.settings import Role
from minitui.server.sse import EventStream, event
from minitui.server.strict import Body, Strict
from minitui.server.telemetry.broadcast import Watcher, encode_snapshot

Tag = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]


REMOTE = {name: parameter for name, parameter in PARAMETERS.items() if parameter.remote}


class Params(with_parameters(Strict, REMOTE)):  # type: ignore[misc]
    """The fields of SamplingParams that a client can send."""


class Submission(Body):
    """A request. `tag`: its name for /minitui/cancel. `group`: its label in the records."""

    tag: Tag
    ids: Prompt
    params: Params
    group: str = Field("", max_length=64)


class Cancellation(Body):
    tag: Tag


class Until(Strict):
    """The event at which run_until stops. `ms`: a step that takes longer than this is slow."""

    event: Literal["admission", "prefill", "hit", "eviction", "preemption", "finish", "slow"]
    ms: Finite = Field(0.0, ge=0)


class Control(Body):
    """An action and its argument: `n` for step, `predicate` for run_until, `factor` for pace."""

    action: Literal["pause", "resume", "step", "run_until", "pace", "clear_cache"]
    n: int = Field(1, ge=1, le=1_000_000)
    predicate: Until | None = None
    factor: Finite | None = Field(None, ge=1.0, le=100_000.0)

    @model_validator(mode="after")
    def _complete(self) -> Control:
        if self.action == "run_until" and self.predicate is None:
            raise ValueError("run_until needs a predicate")
        if self.action == "pace" and self.factor is None:
            raise ValueError("pace needs a factor")
        return self


class Done(BaseModel):
    value: int | None = None


AnswerName = tuple[str, str]  # (API key, tag): a key cannot end the requests of others
Answers = dict[AnswerName, "TokenAnswer"]


class TokenAnswer(Answer):
    """Answers a Submission with events. The first has request and seed; the others have text and ids. The last event
    also has finish_reason and metrics."""

    cancellable = True

    def __init__(self, service: Service, body: Submission, name: AnswerName, answers: Answers) -> None:
        """`answers`: the running answers. This answer is one of them while it has a place in the queue."""
        service.check_ready()
        if name in answers:
            raise ApiError(400, f"tag {body.tag} is in use", "tag")
        super().__init__(service, 1, stream=True)
        self.body = body
        answers[name] = self
        self._places.callback(answers.pop, name)

    async def prepare(self) -> None:
        body = self.body
        params = SamplingParams(**{"max_tokens": None} | body.params.model_dump(exclude_none=True))
        await self.submit([body.ids], params, self.service.label(chat=body.group), "ids")

    def opening(self) -> Iterator[bytes]:
        yield event({"request": self.streams[0].request_id, "seed": self.streams[0].seed})

    def events(self, index: int, part: Output, outputs: list[Output]) -> Iterator[bytes]:
        end = {"finish_reason": part.finish_reason, "metrics": part.metrics} if part.finish_reason else {}
        yield event({"text": part.text, "ids": part.ids, **end})

    def closing(self, outputs: list[Output]) -> Iterator[bytes]:
        return iter(())


@functools.lru_cache(maxsize=4)
def _digests(directory: Path) -> dict[str, str]:
    """Returns the SHA-256 of each tokenizer file in this directory, by file name."""
    paths = [directory / name for name in TOKENIZER_FILES]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}


Client = Annotated[str | None, Header(alias="X-Minitui-Client", max_length=64)]


def router(service: Service) -> APIRouter:
    """Returns the endpoints."""
    routes = Endpoints(service, prefix="/minitui")
    answers: Answers = {}  # the running ones

    @routes.get("/info")
    async def info(request: Request) -> dict[str, Any]:
        """Returns facts about the engine, and the caller's role."""
        role: Role = request.scope["state"]["role"]
        return {
            **service.info.public(), "model": service.model, "bundled": _directory() == tutor.model_dir(),
            "role": role.name.lower(), "hide_text": service.settings.hide_text,
            "server": __version__, "began": service.broadcast.engine,
            "tokenizer_files": await service.in_thread(_digests, _directory()),
        }

    def _directory() -> Path:
        return Path(service.info.model_dir)

    @routes.get("/tokenizer/{name}", response_class=FileResponse)
    async def tokenizer_file(name: str) -> FileResponse:
        """Sends one of the tokenizer files that /minitui/info lists."""
        path = _directory() / name
        if name not in TOKENIZER_FILES or not path.is_file():
            raise ApiError(404, "there is no such file; /minitui/info lists the files")
        return FileResponse(path)

    @routes.get("/snapshot")
    async def snapshot() -> Response:
        """Returns the whole state. Records that are sent after this answer continue it without a gap."""
        state = service.broadcast.snapshot()
        if state is None:
            raise EngineDead("the engine is not running")
        state["began"] = service.broadcast.engine
        return StreamingResponse(encode_snapshot(state), media_type="application/json")

    @routes.get("/records", response_class=Response, responses=STREAMED)
    async def records(client: Client = None) -> Response:
        """Sends every record from now on. A gap in their numbers means lost records: request a new snapshot."""
        if len(service.broadcast.watchers) >= service.settings.max_watchers:
            count = len(service.broadcast.watchers)
            raise ApiError(429, f"{count} clients are watching; more are not allowed", headers={"Retry-After": "10"})
        if service.draining:
            service.check_ready()
        watcher = Watcher(client)

        def end() -> None:
            service.broadcast.watchers.discard(watcher)
            # The same client may have connected again.
            if client == service.gate_owner and not service.broadcast.watches(client):
                service.release_gate()

        service.broadcast.pump()
        watcher.put(service.broadcast.greeting("hello"))
        service.broadcast.watchers.add(watcher)
        return EventStream(watcher.frames(), end, service.settings.stalled_reader_s)

    @routes.post("/submit", response_class=Response, responses=STREAMED)
    async def submit(body: Submission, request: Request) -> Response:
        """Answers token ids with an event {"request", "seed"}, then events {"text", "ids"}.

        The last event also has "finish_reason" and "metrics".
        """
        return await TokenAnswer(service, body, (owner_of(request), body.tag), answers).respond(request)

    @routes.post("/cancel", response_model=Done)
    async def cancel(body: Cancellation, request: Request) -> Done:
        """End the request with this tag and API key: its finish_reason is "abort".

        The value is the number of requests found.
        """
        answer = answers.get((owner_of(request), body.tag))
        for stream in answer.streams if answer is not None else ():
            stream.cancel()
        return Done(value=0 if answer is None else 1)

    @routes.post("/control", response_model=Done)
    async def control(body: Control, client: Client = None) -> Any:
        """Close or open the gate, run single steps, set slow motion, or clear the cache.

        When the watcher that closed the gate or slowed the engine disconnects, the engine runs freely again.
        """
        service.check_ready()
        arguments: dict[str, Any] = {}
        if body.action == "step":
            arguments = {"n": body.n}
        elif body.action == "run_until" and body.predicate is not None:
            arguments = {"predicate": body.predicate.model_dump()}
        elif body.action == "pace":
            arguments = {"factor": body.factor}
        if body.action in ("pause", "step", "run_until", "pace") and service.broadcast.watches(client):
            service.gate_owner = client  # only a watcher has a connection whose end the server notices
        value = await service.control(body.action, **arguments)
        return JSONResponse({"value": value if isinstance(value, int) else None})

    return routes
