"""Reports the engine's state to load balancers and Prometheus: /health, /ping, /ready, /metrics. /version and
/server_info describe the server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from engine.errors import EngineError
from engine.metrics.prometheus import CONTENT_TYPE
from minitui import __version__
from minitui.server.errors import RESPONSES, ApiError, as_api_error
from minitui.server.service import Service

LINKS = {
    "/docs": "the endpoints", "/v1/models": "the model", "/server_info": "the engine and the server's limits",
    "/health": "whether it can answer", "/metrics": "for Prometheus",
}
FRONT = (
    '<!doctype html><meta name="viewport" content="width=device-width"><title>minitui</title>'
    "<h1>minitui serves a model here</h1><ul>{}</ul>"
).format("".join(f'<li><a href="{path}">{path}</a>: {about}' for path, about in LINKS.items()))
PAGE: dict[str, Any] = {"content": {"text/plain": {"schema": {"type": "string"}}}}


class Version(BaseModel):
    version: str


class Health(BaseModel):
    """The state of the server. `open`: the number of running and waiting sequences.

    `status`: ok | draining | loading | restarting | stalled | busy | failed | stopped. For all but the first two,
    /health answers 503. stalled: the engine process has not responded for `silent_s` seconds. busy: the present step or
    command has taken longer than a minute. `long`: a description of a step or command that takes long.
    `held`: says that a client with all rights has paused or slowed down the engine. `preparing`: what will make steps
    faster, such as "capturing CUDA graphs: 12/52".
    """

    status: str
    progress: str | None = None
    open: int | None = None
    silent_s: float | None = None
    long: str | None = None
    held: str | None = None
    preparing: str | None = None


def router(service: Service) -> APIRouter:
    """Returns the endpoints."""
    routes = APIRouter()
    refusals: dict[int | str, dict[str, Any]] = {status: RESPONSES[status] for status in (400, 401, 403)}

    @routes.get("/", response_class=HTMLResponse)
    async def front() -> str:
        """Returns a page with links to the pages that a browser can show."""
        return FRONT

    @routes.get("/health", response_model=Health, responses={503: {"model": Health}})
    async def health() -> JSONResponse:
        """Answers 200 while the engine runs; 503 while it loads, is dead, does not respond, or is busy."""
        alive, state = service.health()
        return JSONResponse(state, 200 if alive else 503, {} if alive else {"Retry-After": "2"})

    @routes.get("/ping", response_model=Health, responses={503: {"model": Health}})
    @routes.post("/ping", response_model=Health, responses={503: {"model": Health}})
    async def ping() -> JSONResponse:
        """Answers like /health, under the name that some hosting services ask for."""
        return await health()

    @routes.get("/version", response_model=Version, responses=refusals)
    async def version() -> Version:
        """Returns the version of minitui."""
        return Version(version=__version__)

    @routes.get("/server_info", responses={**refusals, 503: RESPONSES[503]})
    async def server_info() -> dict[str, Any]:
        """Returns facts about the engine, and the server's limits."""
        settings = service.settings
        limits = {
            "max_body": settings.max_body, "max_waiting": settings.max_waiting, "request_s": settings.request_s,
            "capacity": service.capacity,
        }
        return {**service.info.public(), "version": __version__, "model": service.model, "served_names": service.names,
                "scheduling_policy": service.config.scheduling_policy, "limits": limits}

    @routes.get("/ready", response_model=Health, responses={503: {"model": Health}})
    async def ready() -> JSONResponse:
        """Answers 200 while the server accepts requests, else 503. If only the queue is full, it still answers 200."""
        _, state = service.health()
        try:
            service.check_ready()
        except (ApiError, EngineError) as error:
            return JSONResponse(state, 503, dict(as_api_error(error).headers))
        return JSONResponse(state)

    @routes.get("/metrics", response_class=Response, responses={200: PAGE, **refusals})
    async def metrics() -> Any:
        """Returns metrics for Prometheus, with vLLM's names; and of the process and of HTTP requests."""
        service.broadcast.pump()
        service.metrics.measure(service.broadcast.state)
        page = service.metrics.page(service.model) + service.http_metrics.page()
        return PlainTextResponse(page, media_type=CONTENT_TYPE)

    return routes
