"""/minitui/…: everything the local application has, over the wire. minitui/sources/remote.py is the other end.

    GET  info              what is served, to whom
    GET  tokenizer/{file}  the files that a client needs to encode and decode
    GET  snapshot          the state at a record's number
    GET  records           the records from now on, as server-sent events
    POST submit            token ids in, deltas out as server-sent events
    POST cancel            end what was submitted under a tag
    POST control           the gate, slow motion, the cache
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field, model_validator

from engine.errors import EngineDead
from engine.params import MAX_LOGPROBS, SamplingParams
from minitui import __version__, tutor
from minitui.protocol import TOKENIZER_FILES
from minitui.server.broadcast import Watcher, encode_snapshot
from minitui.server.errors import RESPONSES, STREAMED, ApiError
from minitui.server.generation import Reply
from minitui.server.schema import Finite, Prompt, Stop, Strict
from minitui.server.service import Service
from minitui.server.settings import Role
from minitui.server.sse import EventStream, event, unless_gone

PRIVATE = ("model_dir", "log_file")  # paths of this machine
Tag = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]


class Drawn(Strict):
    """SamplingParams as they travel; every field as there."""

    temperature: Finite = Field(1.0, ge=0, le=100)
    top_p: Finite = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=1 << 31)
    min_p: Finite = Field(0.0, ge=0, le=1)
    repetition_penalty: Finite = Field(1.0, gt=0, le=100)
    presence_penalty: Finite = Field(0.0, ge=-2, le=2)
    frequency_penalty: Finite = Field(0.0, ge=-2, le=2)
    min_tokens: int = Field(0, ge=0, le=1 << 31)
    max_tokens: int | None = Field(None, ge=1, le=1 << 31)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    stop: Stop = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class Submission(Strict):
    """`tag` names it for a cancellation; `group` labels it in the records."""

    tag: Tag
    ids: Prompt
    params: Drawn
    group: str = Field("", max_length=64)


class Cancellation(Strict):
    tag: Tag


class Until(Strict):
    event: Literal["admission", "prefill", "hit", "eviction", "preemption", "finish", "slow"]
    ms: Finite = Field(0.0, ge=0)


class Control(Strict):
    """One of the actions, with what it takes."""

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


@functools.lru_cache(maxsize=4)
def _digests(directory: Path) -> dict[str, str]:
    """The files of a tokenizer that are there, and their SHA-256."""
    paths = [directory / name for name in TOKENIZER_FILES]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}


Client = Annotated[str | None, Header(alias="X-Minitui-Client", max_length=64)]


def router(service: Service) -> APIRouter:
    """The endpoints."""
    routes = APIRouter(prefix="/minitui", responses=RESPONSES)
    open_replies: dict[str, Reply] = {}

    @routes.get("/info")
    async def info(request: Request) -> dict[str, Any]:
        """The engine's facts, and what the caller may do."""
        known = {key: value for key, value in service.info.items() if key not in PRIVATE}
        role: Role = request.scope["state"]["role"]
        return {
            **known, "model": service.model, "bundled": _directory() == tutor.model_dir(),
            "role": role.name.lower(), "hide_text": service.settings.hide_text,
            "server": __version__, "began": service.hub.engine,
            "tokenizer_files": await service.in_thread(_digests, _directory()),
        }  # fmt: skip

    def _directory() -> Path:
        return Path(service.info["model_dir"])

    @routes.get("/tokenizer/{name}", response_class=FileResponse)
    async def tokenizer_file(name: str) -> FileResponse:
        """One of the files that `info` lists."""
        path = _directory() / name
        if name not in TOKENIZER_FILES or not path.is_file():
            raise ApiError(404, "there is no such file; /minitui/info lists those there are")
        return FileResponse(path)

    @routes.get("/snapshot")
    async def snapshot() -> Response:
        """The whole state; the records that a watcher is sent afterwards follow it."""
        state = service.hub.snapshot()
        if state is None:
            raise EngineDead("the engine is not there")
        state["began"] = service.hub.engine
        return StreamingResponse(encode_snapshot(state), media_type="application/json")

    @routes.get("/records", response_class=Response, responses=STREAMED)
    async def records(client: Client = None) -> Response:
        """Every record from now on. A gap in their numbers means that some were lost: take a new snapshot."""
        if len(service.hub.watchers) >= service.settings.max_watchers:
            raise ApiError(
                429, f"{len(service.hub.watchers)} watch already, and that is the limit", headers={"Retry-After": "10"}
            )
        if service.draining:
            service.check_ready()
        watcher = Watcher(client)

        def end() -> None:
            service.hub.watchers.discard(watcher)
            if client == service.gate_owner and not service.hub.watches(client):  # he may have connected again
                service.release_gate()

        service.hub.pump()
        watcher.put(service.hub.greeting("hello"))
        service.hub.watchers.add(watcher)
        return EventStream(watcher.frames(), end, service.settings.stalled_reader_s)

    @routes.post("/submit", response_class=Response, responses=STREAMED)
    async def submit(body: Submission, request: Request) -> Response:
        """Token ids in; events {"text", "ids"} out, the last with "finish_reason" and "metrics"."""
        service.check_ready()
        if body.tag in open_replies:
            raise ApiError(400, f"tag {body.tag} is in use", "tag")
        values = body.params.model_dump()
        values["top_k"] = min(values["top_k"], int(service.info["vocab_size"]))
        reply = Reply(service, 1)
        open_replies[body.tag] = reply
        group = service.label(chat=body.group)

        def end() -> None:
            open_replies.pop(body.tag, None)
            reply.close()

        async def frames() -> AsyncIterator[bytes]:
            stream = reply.streams[0]
            yield event({"request": stream.request_id, "seed": stream.seed})
            async for _, deltas in reply.batches():
                told: dict[str, Any] = {
                    "text": "".join(delta.text for delta in deltas), "ids": [i for delta in deltas for i in delta.ids]
                }  # fmt: skip
                if deltas[-1].finish_reason:
                    told |= {"finish_reason": deltas[-1].finish_reason, "metrics": deltas[-1].metrics}
                yield event(told)

        try:
            await unless_gone(request.receive, reply.submit([body.ids], SamplingParams(**values), group, "ids"))
        except BaseException:
            end()
            raise
        return EventStream(frames(), end, service.settings.stalled_reader_s)

    @routes.post("/cancel", response_model=Done)
    async def cancel(body: Cancellation) -> Done:
        """End what was submitted under this tag: its last event says "abort"."""
        reply = open_replies.get(body.tag)
        for stream in reply.streams if reply is not None else ():
            stream.cancel()
        return Done(value=0 if reply is None else 1)

    @routes.post("/control", response_model=Done)
    async def control(body: Control, client: Client = None) -> Any:
        """Hold, step, slow down. What one watcher holds is let go when he disconnects."""
        service.check_ready()
        arguments: dict[str, Any] = {}
        if body.action == "step":
            arguments = {"n": body.n}
        elif body.action == "run_until" and body.predicate is not None:
            arguments = {"predicate": body.predicate.model_dump()}
        elif body.action == "pace":
            arguments = {"factor": body.factor}
        if body.action in ("pause", "step", "run_until", "pace") and service.hub.watches(client):
            service.gate_owner = client  # who does not watch is not seen to leave
        value = await service.client.control(body.action, **arguments)
        return JSONResponse({"value": value if isinstance(value, int) else None})

    return routes
