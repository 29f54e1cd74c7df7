"""The script of the process that renders a chat template, with limits (engine/text/limited_child.py).

A template is a program that comes with a checkpoint. engine/text/chat_template.py starts this process. The setup is the
template, and each request has the values of a rendering, both as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from engine.text.limited_child import FAILURE, TEXT, Answer, serve

LONGEST_MESSAGE = 500  # characters of an error


def prepare(setup: bytes) -> Callable[[bytes, int], Answer]:
    """Returns the function that renders the template. The first rendering compiles it, within the limits."""
    template = None

    def render(values: bytes, longest: int) -> Answer:
        nonlocal template
        compiling = template is None
        try:
            template = template or environment().from_string(json.loads(setup))
            compiling = False
            return TEXT, b"".join(pieces(template, json.loads(values), longest))
        except Exception as error:
            kind = "broken" if compiling else "refused" if isinstance(error, jinja2.TemplateError) else "failed"
            sentence = str(error)[:LONGEST_MESSAGE]
            return FAILURE, json.dumps([kind, type(error).__name__, sentence]).encode()

    return render


class TooLong(Exception):
    """The rendering is longer than allowed."""


def pieces(template: jinja2.Template, values: dict[str, Any], max_bytes: int) -> Iterator[bytes]:
    """Yields the rendering in UTF-8, piece by piece. Raises TooLong after `max_bytes` bytes."""
    size = 0
    for piece in template.generate(values):
        encoded = piece.encode("utf-8", "surrogatepass")
        size += len(encoded)
        if size > max_bytes:
            raise TooLong
        yield encoded


def environment() -> jinja2.Environment:
    """Returns the environment that transformers uses: loops with break, tojson, raise_exception, strftime_now."""
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = strftime_now
    return sandbox


class GenerationTag(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}, which marks replies for training. Here it only renders its contents."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Returns the value as JSON, as the filter of transformers does; jinja2's own filter also escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """Refuse the messages. Templates call this."""
    raise jinja2.TemplateError(message)


def strftime_now(pattern: str) -> str:
    """Returns the local time. Templates call this."""
    return datetime.now().strftime(pattern)


if __name__ == "__main__":
    serve(prepare)
