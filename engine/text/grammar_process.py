"""The script of the process that compiles grammars first, with limits (engine/text/limited_child.py).

The time and the memory that llguidance takes for a grammar can grow exponentially with its length. So each grammar is
compiled and tried here before the engine compiles it (engine/text/structured.py). The setup is the tokenizer. A request
is a constraint. Its answer is the grammar in llguidance's notation, or the reason why it cannot be used.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from engine.text.json_schema import Unsupported, rewrite
from engine.text.limited_child import FAILURE, TEXT, Answer, serve

MAX_SYMBOLS = 20_000  # symbols in a grammar: compiling this many takes about 0.3 s
MAX_STATES = 50_000  # of the lexer of one reply; each takes 1 to 2 kB
MAX_STEP_ITEMS = 20_000  # of the parser for one mask; a longer computation would delay the step
MAX_PATTERNS = 256  # in one schema
MAX_PATTERN = 8_192  # characters
MAX_REPEATS = 10_000  # of {n} in a pattern
MAX_REASON = 300  # characters of an error message
# Many grammars that are too costly fail within a few tokens of a reply.
TRIED_REPLIES, TRIED_TOKENS = 4, 16

REPEATS = re.compile(r"(?<!\\)\{(\d+)(?:,(\d*))?\}")
TOO_COSTLY = ("InternalError", "ParserTooComplex", "LexerTooComplex")  # llguidance's reasons


def prepare(setup: bytes) -> Callable[[bytes, int], Answer]:
    """Returns the function that compiles and tries a constraint."""
    import llguidance

    made = json.loads(setup)
    vocabulary = llguidance.LLTokenizer(made["tokenizer"], n_vocab=made["n_vocab"], eos_token=made["ends"])

    def compile(request: bytes, longest: int) -> Answer:
        try:
            source = source_of(llguidance.LLMatcher, **json.loads(request))
            matcher = new_matcher(llguidance, vocabulary, source)
            reason = reason_of(matcher) if matcher.is_error() else _try(matcher, made["ends"])
        except BaseException as error:  # llguidance is written in Rust, and a Rust panic is not an Exception
            reason = short(str(error))
        contents = (reason or source).encode("utf-8", "surrogatepass")
        if len(contents) > longest:
            return FAILURE, f"its grammar has more than {longest >> 20} MiB".encode()
        return FAILURE if reason else TEXT, contents

    return compile


def new_matcher(llguidance: Any, vocabulary: Any, source: str) -> Any:
    """Returns a new matcher for a grammar in llguidance's notation."""
    limits = llguidance.LLParserLimits(
        max_grammar_size=MAX_SYMBOLS, max_lexer_states=MAX_STATES, step_max_items=MAX_STEP_ITEMS, verbose_errors=False
    )
    return llguidance.LLMatcher(vocabulary, source, log_level=0, limits=limits)


def reason_of(matcher: Any) -> str:
    """Returns why a matcher has failed."""
    error = matcher.get_error().replace("<non-verbose/>", "")
    return "no reply can satisfy it" if error.startswith(("NoExtension", "Unsatisfiable")) else short(error)


def short(error: str) -> str:
    """Returns the error in one short line, because it may quote a whole grammar."""
    line = " ".join(error.split())
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}…"


def source_of(matcher: Any, kind: str, value: Any, closed: bool) -> str:
    """Returns a constraint as a grammar in llguidance's notation. `kind`, `value`: a field of SamplingParams."""
    if kind == "json_schema":
        document = json.loads(value) if isinstance(value, str) else value
        _check_patterns(list(_patterns(document)))
        return str(matcher.grammar_from_json_schema(json.dumps(rewrite(document, closed))))
    if kind == "regex":
        _check_patterns([value])
        return str(matcher.grammar_from_regex(value))
    if kind == "grammar":
        from llguidance.gbnf_to_lark import any_to_lark

        return str(matcher.grammar_from_lark(any_to_lark(value)))
    return str(matcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in value)))


def _patterns(document: Any) -> Iterator[str]:
    """Yields the regular expressions of a JSON schema."""
    open_parts = [document]
    while open_parts:
        part = open_parts.pop()
        if isinstance(part, dict):
            if isinstance(part.get("pattern"), str):
                yield part["pattern"]
            if isinstance(part.get("patternProperties"), dict):
                yield from part["patternProperties"]
        open_parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def _check_patterns(patterns: list[str]) -> None:
    if len(patterns) > MAX_PATTERNS:
        raise Unsupported(f"it has {len(patterns):,} patterns; the limit is {MAX_PATTERNS:,}")
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN:
            raise Unsupported(f"a pattern has {len(pattern):,} characters; the limit is {MAX_PATTERN:,}")
        for digits in (number for found in REPEATS.findall(pattern) for number in found if number):
            if len(digits) > len(str(MAX_REPEATS)) or int(digits) > MAX_REPEATS:
                raise Unsupported(f"a pattern repeats a part {digits[:20]} times; the limit is {MAX_REPEATS:,}")


def _try(matcher: Any, ends: list[int]) -> str:
    """Write the beginnings of random replies. Returns the reason if that is too costly, else an empty string."""
    draw = random.Random(0)  # the same replies each time, so that a grammar is always refused or never
    for _ in range(TRIED_REPLIES):
        matcher.reset()
        for _ in range(TRIED_TOKENS):
            mask = bytearray(matcher.compute_bitmask())
            for token in ends:
                mask[token // 8] &= ~(1 << token % 8)
            if matcher.is_error() or not any(mask):
                break
            matcher.consume_token(_random_token(mask, draw))
        if matcher.is_error() and matcher.stop_reason() in TOO_COSTLY:
            return f"it is too costly to apply after a few tokens ({reason_of(matcher)}): make it smaller"
    return ""


def _random_token(mask: bytearray, draw: random.Random) -> int:
    """Returns the first token of the mask after a random place."""
    begin = draw.randrange(len(mask))
    rotated = mask[begin:] + mask[:begin]
    skipped = len(rotated) - len(rotated.lstrip(b"\0"))
    byte = rotated[skipped]
    return (begin + skipped) % len(mask) * 8 + (byte & -byte).bit_length() - 1


if __name__ == "__main__":
    serve(prepare)
