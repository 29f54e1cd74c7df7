"""Shows the thinking and the tool calls of every family with the markers of Qwen, which all clients here understand.

    gpt-oss       <|channel|>analysis<|message|>… <|end|>                        <think>…</think>
                  <|channel|>commentary to=functions.f <|message|>{…} <|call|>   <tool_call>{"name": "f", …}</tool_call>
                  <|start|>assistant<|channel|>final<|message|>…                 …
    Seed-OSS      <seed:think>…</seed:think>                                     <think>…</think>
    Ministral 3   [THINK]…[/THINK]                                               <think>…</think>
    Gemma 4       <|channel>thought, a new line, …<channel|>                     <think>…</think>
                  <|tool_call>call:f{a:<|"|>b<|"|>,n:1}<tool_call|>              <tool_call>{"name": "f", …}</tool_call>
    Granite, Mistral, Seed-OSS: calls after a token of their own (`as_blocks`)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from engine.text.detokenizer import Detokenizer

ARGUMENTS, CALL_ID = "[ARGS]", "[CALL_ID]"
SINGLE = {
    "<seed:think>": "<think>", "</seed:think>": "</think>", "[THINK]": "<think>", "[/THINK]": "</think>",
    "<|channel>": "<think>", "<channel|>": "</think>",
}
BEGINS, MESSAGE, ENDS = ("<|start|>", "<|channel|>"), "<|message|>", ("<|end|>", "<|return|>", "<|call|>")
CALLS = ("<|tool_call|>", "[TOOL_CALLS]", "<seed:tool_call>", "<|tool_call>")
END_CALLS = ("</seed:tool_call>", "<tool_call|>")
CHANNEL, THOUGHT, QUOTE = "<|channel>", "thought\n", '<|"|>'  # of Gemma 4: the name of a channel is text
BARE_KEY = re.compile(r'([{,]\s*)([^\s"{}\[\],:]+)\s*:')
FUNCTION = re.compile(r"to=functions\.([\w.-]+)")


class Markers:
    """The ids of the tokens that are shown as other markers; empty if the vocabulary has none of them."""

    def __init__(self, id_of: Callable[[str], int | None], decode: Callable[[list[int]], str]) -> None:
        """`decode`: ids to text, with control tokens; for the few tokens of a header."""

        def known(names: Mapping[str, str]) -> dict[int, str]:
            return {found: text for name, text in names.items() if (found := id_of(name)) is not None}

        self.decode = decode
        self.single = known(SINGLE)
        self.message = id_of(MESSAGE) if id_of("<|channel|>") is not None else None
        has_channels = self.message is not None
        self.begins = frozenset(known(dict.fromkeys(BEGINS, ""))) if has_channels else frozenset()
        self.ends = frozenset(known(dict.fromkeys(ENDS, ""))) if has_channels else frozenset()
        self.calls = frozenset(known(dict.fromkeys(CALLS, "")))
        self.end_calls = frozenset(known(dict.fromkeys(END_CALLS, "")))
        self.channel = id_of(CHANNEL)

    def __bool__(self) -> bool:
        return bool(self.single or self.begins or self.calls)


class MarkedDetokenizer:
    """A detokenizer that writes the markers in place of the family's own tokens."""

    def __init__(self, markers: Markers, inner: Detokenizer) -> None:
        self._markers = markers
        self._inner = inner
        self._header: list[int] | None = None  # the ids since the last <|start|> or <|channel|>; None: no header
        self._close = ""  # the text that ends the open part
        self._call: list[int] | None = None  # the ids since a token of CALLS; None: no call
        self._name: str | None = None  # the text since CHANNEL while it may be THOUGHT; None: no channel just began

    def push(self, ids: list[int]) -> str:
        markers, text = self._markers, ""
        for token_id in ids:
            if token_id in markers.calls:
                text += self._inner.flush() + self._end_call()
                self._call = []
            elif self._call is not None and token_id in markers.end_calls:
                text += self._end_call()
            elif self._call is not None:
                self._call.append(token_id)
            elif token_id in markers.single:
                text += self._without_name(self._inner.flush(), True) + markers.single[token_id]
                self._name = "" if token_id == markers.channel else None
            elif token_id in markers.begins:
                text += self._end()
                self._header = [*(self._header or ()), token_id]
            elif token_id in markers.ends:
                text += self._end()
                self._header = None
            elif self._header is None:
                text += self._without_name(self._inner.push([token_id]))
            elif token_id == markers.message:
                text += self._begin(markers.decode(self._header))
                self._header = None
            else:
                self._header.append(token_id)
        return text

    def flush(self) -> str:
        if self._call is not None:
            return self._end_call()
        if self._close.endswith("</tool_call>"):  # the end token of a call is not pushed
            return self._end()
        return self._without_name(self._inner.flush(), True)

    def _without_name(self, text: str, ends: bool = False) -> str:
        """Returns the next text without THOUGHT at the beginning of a channel. `ends`: no more text follows."""
        if self._name is None:
            return text
        self._name += text
        if THOUGHT.startswith(self._name) and self._name != THOUGHT and not ends:
            return ""
        found, self._name = self._name.removeprefix(THOUGHT), None
        return found

    def _begin(self, header: str) -> str:
        """Returns the marker that begins the part with this header, such as "<|start|>assistant<|channel|>analysis"."""
        if found := FUNCTION.search(header):
            self._close = "}\n</tool_call>"
            return f'<tool_call>\n{{"name": {json.dumps(found[1])}, "arguments": '
        if "analysis" in header:
            self._close = "\n</think>\n\n"
            return "<think>\n"
        return ""

    def _end_call(self) -> str:
        call, self._call = self._call, None
        return as_blocks(self._markers.decode(call)) if call else ""

    def _end(self) -> str:
        text, self._close = self._inner.flush() + self._close, ""
        return text


def as_blocks(text: str) -> str:
    """Returns the calls that a family wrote as blocks of Qwen. Text without a call becomes one block as it is."""
    text = text.strip()
    name, found, arguments = text.partition(ARGUMENTS)
    if found:
        name = name.partition(CALL_ID)[0].strip()
        return _block(f'{{"name": {json.dumps(name)}, "arguments": {arguments.strip() or "{}"}}}')
    functions = _tagged(text, "function")
    if text.startswith("call:"):
        calls = _quoted(text)
    elif functions:
        calls = [{"name": name, "arguments": dict(_tagged(body, "parameter"))} for name, body in functions]
    else:
        calls = _listed(text)
    return "\n".join(_block(json.dumps(call, ensure_ascii=False)) for call in calls) if calls else _block(text)


def _block(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def _tagged(text: str, tag: str) -> list[tuple[str, str]]:
    """Returns (name, content) of each <tag=name>content</tag>. The content may be on lines of its own."""
    found = []
    for part in text.split(f"<{tag}=")[1:]:
        name, _, rest = part.partition(">")
        content, end, _ = rest.partition(f"</{tag}>")
        if end:
            found.append((name.strip(), content.removeprefix("\n").removesuffix("\n")))
    return found


def _quoted(text: str) -> list[dict[str, Any]]:
    """Returns the call of "call:f{a:<|"|>text<|"|>,n:1}"; [] if the text is something else. Strings are between QUOTEs,
    and keys have none."""
    name, _, _ = text.removeprefix("call:").partition("{")
    syntax = text[len("call:") + len(name) :].split(QUOTE)
    syntax[::2] = [BARE_KEY.sub(r'\1"\2":', re.sub(r"\bNone\b", "null", part)) for part in syntax[::2]]
    syntax[1::2] = map(json.dumps, syntax[1::2])
    try:
        arguments = json.loads("".join(syntax))
    except (ValueError, RecursionError):
        return []
    return [{"name": name.strip(), "arguments": arguments}] if isinstance(arguments, dict) else []


def _listed(text: str) -> list[dict[str, Any]]:
    """Returns the objects of a list in JSON; [] if the text is something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) and all(isinstance(each, dict) for each in found) else []
