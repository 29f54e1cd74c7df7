"""Combines the endpoints into one ASGI application."""

from __future__ import annotations

import functools
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from minitui import __version__
from minitui.server import errors
from minitui.server.access import OPEN, Guard
from minitui.server.messages import endpoints as messages
from minitui.server.openai import chat, completions, tokenize
from minitui.server.responses import endpoints as responses
from minitui.server.service import Service
from minitui.server.telemetry import endpoints as telemetry
from minitui.server.telemetry import health


def create_api(service: Service) -> FastAPI:
    """Returns the endpoints without access checks; their OpenAPI document is at /openapi.json."""
    api = FastAPI(
        title="minitui", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False,
        description="An LLM inference engine with telemetry, OpenAI's and Anthropic's endpoints, POST /generate.",
    )
    errors.install(api)
    api.state.direct = {}
    for part in (completions, chat, responses, messages, tokenize, health, telemetry):
        router = part.router(service)
        api.include_router(router)
        api.state.direct |= getattr(router, "direct", {})
    add_docs(api)
    if service.settings.keys:
        _document_keys(api, service)  # after all routes: a new route makes FastAPI forget the document
    return api


def _document_keys(api: FastAPI, service: Service) -> None:
    """Add the API key to the OpenAPI document."""
    document = api.openapi()  # FastAPI caches this object, so changes to it are served
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
    for path in (*OPEN, *(["/metrics"] if service.settings.open_metrics else [])):
        for operation in document["paths"][path].values():
            operation["security"] = []


def create_app(service: Service) -> ASGIApp:
    """Returns the endpoints with access checks and, if origins are configured, with CORS."""
    guarded = Guard(create_api(service), service)
    origins = service.settings.cors_origins
    if not origins:
        return guarded
    return CORSMiddleware(
        guarded, allow_origins=list(origins), allow_methods=["GET", "HEAD", "POST", "DELETE"],
        allow_headers=["*"],  # those that the page asks for: the official clients send many, and more with each version
        expose_headers=["Retry-After", "X-Request-Id", "X-Minitui-Warning"],
    )


TEMPLATES = FileSystemLoader(Path(__file__).parent)
PAGES = Environment(loader=TEMPLATES, autoescape=True, trim_blocks=True, lstrip_blocks=True)
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}


def add_docs(api: FastAPI) -> None:
    """Add the page /docs."""

    @functools.cache
    def page() -> str:
        return PAGES.get_template("docs.html").render(document=api.openapi())

    @api.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:  # not async: the first page takes a moment, and is made in a thread
        return HTMLResponse(page(), headers=HEADERS)
