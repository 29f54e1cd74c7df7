"""/health, /ready and /metrics: the truth about the engine, for load balancers and Prometheus."""

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
    """`status`: ok | loading | draining, or with 503 restarting | stalled | busy | failed | stopped.

    stalled: the engine's process has given no sign of life for `silent_s`. `long` tells of a step or command that takes
    long; busy: longer than a minute.
    """

    status: str
    progress: str | None = None
    open: int | None = None
    silent_s: float | None = None
    long: str | None = None


def router(service: Service) -> APIRouter:
    """The endpoints."""
    routes = APIRouter()

    @routes.get("/health", response_model=Health, responses={503: {"model": Health}})
    async def health() -> JSONResponse:
        """200 while the engine is alive or loading its model; 503 while it is dead or does not answer."""
        alive, told = service.health()
        return JSONResponse(told, 200 if alive else 503)

    @routes.get("/ready", response_model=Health, responses={503: {"model": Health}})
    async def ready() -> JSONResponse:
        """200 when a request would be taken now."""
        _, told = service.health()
        try:
            service.check_ready()
        except (ApiError, EngineError) as error:
            return JSONResponse(told, 503, dict(as_api_error(error).headers))
        return JSONResponse(told)

    refusals: dict[int | str, dict[str, Any]] = {status: RESPONSES[status] for status in (400, 401, 403)}

    @routes.get("/metrics", response_class=Response, responses={200: PAGE, **refusals})
    async def metrics() -> Any:
        """For Prometheus, under the names of vLLM."""
        service.hub.pump()
        service.meters.read(service.hub.state)
        return PlainTextResponse(service.meters.page(service.model), media_type=CONTENT_TYPE)

    return routes
