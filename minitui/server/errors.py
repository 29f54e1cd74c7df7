"""Answers every error in OpenAI's format: {"error": {"message", "type", "param", "code"}}.

Under /v1/messages, the format is Anthropic's: {"type": "error", "error": {"type", "message"}}.

A message is a sentence for the caller. Tracebacks and paths go to the log, for the operator.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from engine.errors import EngineDead, EngineError, InvalidRequest

logger = logging.getLogger("minitui.server")

ANTHROPIC = "/v1/messages"
ANTHROPIC_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
                   413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
                   504: "timeout_error"}
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(BaseModel):
    """The body of every answer with a status of 400 and above."""

    error: ErrorDetail


class ApiError(Exception):
    """An error that the server answers with its status, message and headers."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None, details: dict[str, Any] | None = None,
    ) -> None:
        """`details`: what clients of Anthropic's API read besides the message."""
        super().__init__(message)
        message = message.encode("utf-8", "replace").decode()  # the message may quote lone surrogates of the request
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers, self.details = headers or {}, details

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        kind = ANTHROPIC_TYPES.get(self.status) or ("api_error" if self.status >= 500 else "invalid_request_error")
        unnamed = self.param is not None and self.param not in self.message  # this format has only the message
        message = f"{self.param}: {self.message}" if unnamed else self.message
        details = {"details": self.details} if self.details else {}
        return {"type": "error", "error": {"type": kind, "message": message, **details}}

    def response(self, path: str) -> JSONResponse:
        """Returns the answer in the format of the API to which the request's path belongs."""
        body = self.anthropic_body if path.startswith(ANTHROPIC) else self.body
        return JSONResponse(body, self.status, self.headers)


class ContextExceeded(ApiError):
    """A prompt leaves no room for a reply. `counted`: False if it may have more than `tokens` tokens."""

    def __init__(self, field: str, tokens: int, most: int, counted: bool = True) -> None:
        more = "" if counted else "more than "
        super().__init__(
            400,
            f"{field} has {more}{tokens:,} tokens; the context for prompt and reply is {most:,}: shorten the prompt",
            field, "context_length_exceeded",
        )
        self._tokens, self._longest = tokens, most - 1

    @property
    def anthropic_body(self) -> dict[str, Any]:
        # Anthropic's sentence: its clients read the two numbers, and then shorten the conversation.
        message = f"prompt is too long: {self._tokens} tokens > {self._longest} maximum"
        return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}


def as_api_error(error: Exception) -> ApiError:
    """Returns the ApiError for an exception. Logs an unexpected exception. Removes tracebacks and causes: they lead
    back to the exception, and would hold the request's body until the garbage collector finds them."""
    found = _as_api_error(error)
    part: BaseException | None = error
    while part is not None:
        cause = part.__cause__ or part.__context__
        part.__traceback__ = part.__cause__ = part.__context__ = None
        part = cause
    return found


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _describe(error)
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), error.field)
    if isinstance(error, EngineDead):
        return ApiError(
            503, "the engine does not respond or is being restarted: try again in a few seconds", code="engine_dead",
            headers={"Retry-After": "5"},
        )
    if isinstance(error, EngineError):
        return ApiError(500, str(error))
    logger.error("an unexpected error", exc_info=error)
    return ApiError(500, "unexpected error in the server: see the server's log for the details", code="internal_error")


def install(app: FastAPI) -> None:
    """Make the application answer every exception in OpenAI's format."""

    async def refused(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response(request.url.path)

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        path = request.url.path
        known = {404: f"there is no endpoint {path}", 405: f"{path} does not accept {request.method}"}
        message = known.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=dict(error.headers or {})).response(path)

    app.add_exception_handler(Exception, refused)
    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(EngineError, refused)
    app.add_exception_handler(RequestValidationError, refused)
    app.add_exception_handler(HTTPException, http)


def _describe(error: RequestValidationError) -> ApiError:
    """Returns an ApiError that names the first wrong field. The field's value is not quoted: it may be large."""
    found = error.errors()
    first = found[0]
    # A field of several types has an error for each of them. The deepest is about the type that the caller meant; but
    # only of that type is a list too long.
    same = [each for each in found if each["loc"][:2] == first["loc"][:2]]
    fields = [_field(each["loc"], error.body, each["type"] == "missing") for each in same]
    kinds = [each["type"] for each in same]
    best = max(range(len(same)), key=lambda i: (kinds[i] == "too_long", len(fields[i]), not kinds[i].endswith("_type")))
    param = ".".join(fields[best]) or None
    message = str(same[best]["msg"]).removeprefix("Value error, ").replace(" after validation", "")
    message = message.removesuffix(" or object to extract fields from").replace("a valid dictionary", "a JSON object")
    return ApiError(400, f"{param or 'the body'}: {message[:1].lower()}{message[1:]}", param, kinds[best])


def _field(location: Sequence[str | int], body: Any, missing: bool) -> list[str]:
    """Returns the path of the field at this location; empty for the whole body. The parts of the location that are in
    the body, and the last part if it is missing there, are names that the caller knows. Other parts are pydantic's
    names for the types that it tried."""
    kind, *names = location
    parts: list[str] = []
    for place, name in enumerate(names, 1):
        entries: Any = dict(enumerate(body)) if isinstance(body, list) else body
        if isinstance(entries, dict) and name in entries:
            body = entries[name]
        elif kind == "body" and not (missing and place == len(names)):
            continue
        parts.append(str(name))
    return parts


EVENT = {"type": "object", "properties": {"data": {"type": "string"}, "event": {"type": "string"}}}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": EVENT}}}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in {
        400: "The request is not valid; `param` names the field.",
        401: "The API key is missing or unknown.",
        403: "The API key's role does not allow this.",
        404: "The model or file does not exist.",
        408: "The body did not arrive in time.",
        413: "The body is too large.",
        415: "The body's Content-Encoding is not supported.",
        429: "The queue is full; see Retry-After.",
        500: "The engine could not finish this request.",
        503: "The engine is loading or being restarted, or the server is stopping.",
        504: "The reply took longer than the server allows.",
    }.items()
}
