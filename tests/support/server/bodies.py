"""Request bodies that try to keep a server from its other clients. Most are nearly as large as a body may be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache

SIZE = 2_400_000  # bytes
WORST = ("objects", "objects below the limit")

CHAT = '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, %s}'
ANTHROPIC = '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "model": "default", %s}'

# The POST routes, each with a body that has a hole in it, and the fields that fill the hole.
ROUTES = {
    "/v1/chat/completions": (CHAT, ("unknown", "messages", "tools", "logit_bias", "stop", "chat_template_kwargs")),
    "/v1/completions": ('{"max_tokens": 1, %s}', ("prompt", "unknown", "logit_bias")),
    "/generate": ('{"max_tokens": 1, "stream": false, %s}', ("prompt", "unknown")),
    "/v1/responses": ('{"max_output_tokens": 1, %s}', ("input", "unknown", "tools", "metadata")),
    "/v1/messages": (ANTHROPIC, ("messages", "system", "tools", "unknown")),
    "/v1/messages/count_tokens": (ANTHROPIC, ("messages", "system", "tools", "unknown")),
    "/tokenize": ("{%s}", ("prompt", "messages", "unknown")),
    "/detokenize": ("{%s}", ("tokens", "unknown")),
    "/minitui/submit": ('{"tag": "hostile", "max_tokens": 1, "stream": false, %s}', ("ids", "unknown", "stop")),
    "/minitui/cancel": ('{"tag": "hostile", %s}', ("unknown",)),
    "/minitui/control": ('{"action": "resume", %s}', ("predicate", "unknown")),
    "/ping": ("{%s}", ("unknown",)),
}


def filled(text: str, size: int = SIZE) -> str:
    """Returns a list that repeats an element up to this size."""
    return f"[{','.join([text] * (size // (len(text) + 1)))}]"


@cache
def values() -> dict[str, str]:
    """Returns name -> a value in JSON."""
    letters, message = "x" * 1000, '{"role":"user","content":"%s"}'
    return {
        "lists": filled("[]"),
        "objects": filled("{}"),
        "nested lists": filled("[[[[[[]]]]]]"),
        "depth": "[" * 900 + "]" * 900,
        "endless depth": "[" * (SIZE // 2) + "]" * (SIZE // 2),
        "objects below the limit": filled('{"type":"text"}', 16 * 19_000),
        "numbers": filled("1"),
        "numbers below the limit": filled("1", 2 * 390_000),
        "a long number": "9" * SIZE,
        "long numbers": filled("9" * 4000),
        "long fractions": filled("0." + "1" * 1000 + "e-300"),
        "a string": json.dumps("a b " * (SIZE // 4)),
        "a string without spaces": json.dumps("ab" * (SIZE // 2)),
        "strings": filled('""'),
        "long strings": filled(f'"{letters}"'),
        "escapes": '"' + r"\ud83d\ude00" * (SIZE // 12) + '"',
        "lone surrogates": '"' + r"\ud800" * (SIZE // 6) + '"',
        "joiners": json.dumps("\u200d\u0301" * (SIZE // 12)),
        "control tokens": json.dumps("<|im_start|>" * (SIZE // 12)),
        "keys": "{" + ",".join(f'"{i}":1' for i in range(90_000)) + "}",
        "more keys": "{" + ",".join(f'"{i}":1' for i in range(300_000)) + ',"x":[]' * 30_000 + "}",
        "one key many times": "{" + ",".join(['"1":1'] * (SIZE // 6)) + "}",
        "messages": filled(message % "hi", 4_000 * 33),
        "many messages": filled(message % "hi"),
        "long messages": filled(message % ("word " * 160), SIZE),
        "messages of parts": filled(message.replace('"%s"', filled('{"type":"text","text":"hi"}', 100)), 4_000 * 133),
        "images": filled('{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,x"}}]}', 6_000 * 75),
        "tools": filled('{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}', 6_000 * 75),
        "prompts": filled("[1,2,3]", 19_000 * 8),
    }


def bodies(path: str) -> Iterator[tuple[str, bytes]]:
    """Yields (name, body). Each hole of the route's body gets the worst values, and all holes together get all."""
    body, fields = ROUTES[path]
    for place, field in enumerate(fields):
        for number, (name, value) in enumerate(values().items()):
            if name in WORST or number % len(fields) == place:
                yield f"{field}: {name}", (body % f'"{field}": {value}').encode()

# A schema whose automaton doubles with each pattern: its compilation does not end.
EXPLODING = {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{10 + i}}}"} for i in range(29)]}
