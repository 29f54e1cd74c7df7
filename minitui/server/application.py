"""Combines the endpoints into one ASGI application."""

from __future__ import annotations

import functools

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from jinja2 import Environment
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
    for part in (completions, chat, responses, messages, tokenize, health, telemetry):
        api.include_router(part.router(service))
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


PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string("""\
{% macro kind(schema) %}
{%- set options = schema.get("anyOf", schema.get("oneOf")) -%}
{%- if "$ref" in schema -%}
{%- set name = schema["$ref"].split("/")[-1] -%}<a href="#{{ name }}">{{ name }}</a>
{%- elif options -%}
{%- for option in options -%}{{ " or " if not loop.first }}{{ kind(option) }}{%- endfor -%}
{%- elif schema.get("type") == "array" -%}list of {{ kind(schema.get("items", {})) }}
{%- elif "enum" in schema -%}{{ schema["enum"] | join(", ") }}
{%- elif "const" in schema -%}{{ schema["const"] }}
{%- else -%}{{ schema.get("type", "any") }}
{%- endif -%}
{% endmacro %}
{% macro contents(content) %}
{% for type, value in content.items() %}{{ type }}: {{ kind(value.get("schema", {})) }} {% endfor %}
{% endmacro %}
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ document.info.title }}: endpoints</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em;
  color-scheme: light dark }
h2 { font-size: 1.1em; margin-top: 2em; overflow-wrap: anywhere }
td { padding: .1em 1em .1em 0; vertical-align: top }
p { white-space: pre-line }
</style>
<h1>{{ document.info.title }} {{ document.info.version }}</h1>
<p>{{ document.info.description }} The document for programs: <a href="/openapi.json">/openapi.json</a></p>
{% for path, operations in document.paths.items() %}
{% for method, operation in operations.items() %}
<h2 id="{{ method }}-{{ path }}"><code>{{ method | upper }} {{ path }}</code></h2>
<p>{{ operation.get("description", operation.get("summary", "")) }}</p>
<table>
{% for each in operation.get("parameters", []) %}
<tr><td><code>{{ each.name }}</code><td>in the {{ each.in }}: {{ kind(each.get("schema", {})) }}
{% endfor %}
{% if operation.get("requestBody") %}
<tr><td>body<td>{{ contents(operation.requestBody.get("content", {})) }}
{% endif %}
{% for status, answer in operation.get("responses", {}).items() %}
<tr><td>{{ status }}<td>{{ answer.description }} {{ contents(answer.get("content", {})) }}
{% endfor %}
</table>
{% endfor %}
{% endfor %}
{% for name, schema in document.components.schemas.items() %}
<h2 id="{{ name }}">{{ name }}</h2>
<p>{{ schema.get("description", "") }}</p>
<table>
{% for field, value in schema.get("properties", {}).items() %}
<tr><td><code>{{ field }}</code><td>{{ kind(value) }}
<td>{{ "required" if field in schema.get("required", []) }}
{% if value.get("default") is not none %}default {{ value.default }}{% endif %}
<td>{{ value.get("description", "") }}
{% else %}
<tr><td>{{ kind(schema) }}
{% endfor %}
</table>
{% endfor %}
""")
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}


def add_docs(api: FastAPI) -> None:
    """Add the page /docs."""

    @functools.cache
    def page() -> str:
        return PAGE.render(document=api.openapi())

    @api.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:  # not async: the first page takes a moment, and is made in a thread
        return HTMLResponse(page(), headers=HEADERS)
