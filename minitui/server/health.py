"""/health, /ready and /metrics report the engine's state to load balancers and Prometheus."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from engine.errors import EngineError
from minitui.server.errors import RESPONSES, ApiError, as_api_error
from minitui.server.prometheus import CONTENT_TYPE
from minitui.server.service import Service

PAGE: dict[str, Any] = {"content": {"text/plain": {"schema": {"type": "string"}}}}


class Health(BaseModel):
    """The state of the server. `open`: the number of running and waiting sequences.

    `status`: ok | loading | draining | restarting | stalled | busy | failed | stopped. For the last five,
    /health answers 503. stalled: the engine process has not responded for `silent_s` seconds. busy: the present step or
    command has taken longer than a minute. `long`: a description of a step or command that takes long.
    """

    status: str
    progress: str | None = None
    open: int | None = None
    silent_s: float | None = None
    long: str | None = None


def router(service: Service) -> APIRouter:
    """Returns the endpoints."""
    routes = APIRouter()

    @routes.get("/health", response_model=Health, responses={503: {"model": Health}})
    async def health() -> JSONResponse:
        """Answers 200 while the engine runs or loads its model; 503 while it is dead, does not respond, or is busy."""
        alive, state = service.health()
        return JSONResponse(state, 200 if alive else 503)

    @routes.get("/ready", response_model=Health, responses={503: {"model": Health}})
    async def ready() -> JSONResponse:
        """Answers 200 while the server accepts requests, else 503. If only the queue is full, it still answers 200."""
        _, state = service.health()
        try:
            service.check_ready()
        except (ApiError, EngineError) as error:
            return JSONResponse(state, 503, dict(as_api_error(error).headers))
        return JSONResponse(state)

    refusals: dict[int | str, dict[str, Any]] = {status: RESPONSES[status] for status in (400, 401, 403)}

    @routes.get("/metrics", response_class=Response, responses={200: PAGE, **refusals})
    async def metrics() -> Any:
        """Returns metrics for Prometheus, with vLLM's names."""
        service.broadcast.pump()
        service.metrics.read(service.broadcast.state)
        return PlainTextResponse(service.metrics.page(service.model), media_type=CONTENT_TYPE)

    return routes
