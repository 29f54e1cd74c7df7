"""Text leaves the engine as it should: stop strings across borders, held-back beginnings, ends that are not shown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.core.request import Request
from engine.core.step import Emitted
from engine.errors import InvalidRequest
from engine.params import SamplingParams
from engine.text.output import Delta, OutputProcessor
from engine.trace.records import RecordLog
from tests.engine.core.test_scheduler_simulation import make_engine

EOS = 999


class Letters:
    """A tokenizer whose ids are code points."""

    def detokenizer(self, skip_special_tokens: bool = True) -> Letters:
        return Letters()

    def push(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def flush(self) -> str:
        return ""


class Words(Letters):
    """A tokenizer whose ids are places in a list of words."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def detokenizer(self, skip_special_tokens: bool = True) -> Words:
        return self

    def push(self, ids: list[int]) -> str:
        return "".join(self._words[token] for token in ids)


class Aborted:
    """Stands in for the engine: notes which requests are ended, and after how many tokens."""

    def __init__(self) -> None:
        self.log = RecordLog()
        self.requests: list[tuple[int, str, int]] = []

    def abort(self, *request: Any) -> None:
        self.requests.append(request)


def feed(text: str, params: SamplingParams, end: str = "length") -> tuple[list[Delta], bool]:
    """All deltas for a reply drawn one letter at a time, and whether a stop string ended it."""
    engine: Any = Aborted()
    outputs = OutputProcessor(Letters(), engine)
    request = Request(1, [1], params, 0, 10_000, stop_ids=frozenset({EOS}), prompt_len=1)
    outputs.open(request)
    deltas: list[Delta] = []
    tokens = [*map(ord, text), *([EOS] if end == "stop" else [])]
    for i, token in enumerate(tokens):
        request.ids.append(token)
        deltas += outputs.process([Emitted(request, token, end if i == len(tokens) - 1 else "")])
        if engine.requests:
            # One more token was in flight: it must not be shown.
            assert outputs.process([Emitted(request, ord("!"))]) == [] and engine.requests == [(1, "stop", i + 1)]
            return deltas, True
    return deltas, False


@given(
    text=st.text("abc", max_size=40), stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_a_stop_string_cuts_the_text_where_it_first_stands_and_is_never_half_streamed(
    text: str, stops: list[str], include: bool
) -> None:
    deltas, stopped = feed(text, SamplingParams(stop=tuple(stops), include_stop_str_in_output=include), "length")
    # What a reader of the finished text would do: look after every letter, since that is how it was drawn.
    expected, met = text, False
    for n in range(1, len(text) + 1):
        hits = sorted((text[:n].find(s), -len(s)) for s in stops if s in text[:n])
        if hits:
            where, length = hits[0]
            expected, met = text[: where - length if include else where], True
            break
    assert "".join(d.text for d in deltas) == expected
    assert stopped == met
    if deltas:
        assert deltas[-1].finish_reason == ("stop" if met else "length") and deltas[-1].metrics is not None
        assert all(not d.finish_reason for d in deltas[:-1])


@given(
    words=st.lists(st.text("abc", max_size=4), max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4), min_tokens=st.integers(0, 12),
)
@example(words=list("abENDcdENDx"), stops=["END", "ENDED"], min_tokens=5)  # held back as the beginning of another
@example(words=list("abENDcdEND"), stops=["END"], min_tokens=9)
@settings(max_examples=150, deadline=None)
def test_a_stop_string_fires_if_it_ends_beyond_min_tokens_and_only_then(
    words: list[str], stops: list[str], min_tokens: int
) -> None:
    """Tokens of several letters, against a search of the whole text after each."""
    expected, met = "".join(words), False
    for n in range(min_tokens + 1, len(words) + 1):
        text, protected = "".join(words[:n]), len("".join(words[:min_tokens]))
        hits = [
            (at, -len(s)) for s in stops for at in range(len(text))
            if text.startswith(s, at) and at + len(s) > protected
        ]
        if hits:
            expected, met = text[: min(hits)[0]], True
            break
    shown, engine = "", Aborted()
    outputs = OutputProcessor(Words(words), engine)  # type: ignore[arg-type]
    request = Request(1, [1], SamplingParams(stop=tuple(stops), min_tokens=min_tokens), 0, 10_000, prompt_len=1)
    outputs.open(request)
    for i in range(len(words)):
        deltas = outputs.process([Emitted(request, i, "length" if i == len(words) - 1 else "")])
        shown += "".join(delta.text for delta in deltas)
    assert (shown, bool(engine.requests)) == (expected, met)


@pytest.mark.parametrize(("params", "end", "reason"), [
    (SamplingParams(stop=("cd", "bcd")), "length", "bcd"),
    (SamplingParams(stop=("x",), stop_token_ids=(EOS,)), "stop", EOS),
    (SamplingParams(stop=("x",)), "stop", None),
    (SamplingParams(stop=("x",)), "length", None),
])
def test_the_metrics_name_the_stop_string_or_stop_token(params: SamplingParams, end: str, reason: object) -> None:
    deltas, _ = feed("abcd", params, end)
    assert deltas[-1].metrics is not None and deltas[-1].metrics["stop_reason"] == reason


def test_text_that_could_begin_a_stop_string_is_held_back_and_flushed_at_the_end() -> None:
    deltas, _ = feed("hello EN", SamplingParams(stop=("END",)))
    assert [d.text for d in deltas] == ["h", "e", "l", "l", "o", " ", "", "EN"]


def test_the_token_that_ends_a_reply_is_in_the_ids_but_not_in_the_text() -> None:
    deltas, stopped = feed("ok", SamplingParams(), "stop")
    assert "".join(d.text for d in deltas) == "ok" and not stopped
    assert [i for d in deltas for i in d.ids] == [ord("o"), ord("k"), EOS]


def test_closing_gives_back_what_was_held() -> None:
    outputs = OutputProcessor(Letters(), Aborted())  # type: ignore[arg-type]
    request = Request(1, [1], SamplingParams(stop=("END",)), 0, 100, prompt_len=1)
    outputs.open(request)
    outputs.process([Emitted(request, ord("E"))])
    delta = outputs.close(1, "abort")
    assert delta is not None and (delta.text, delta.finish_reason) == ("E", "abort")
    assert outputs.close(1, "abort") is None


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("max_tokens", {"max_tokens": 0}), ("max_tokens", {"max_tokens": -1}), ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": float("nan")}), ("top_p", {"top_p": 0.0}), ("top_p", {"top_p": 1.5}),
        ("top_k", {"top_k": 1 << 40}), ("top_k", {"top_k": -2}), ("min_p", {"min_p": float("inf")}), ("n", {"n": 0}),
        ("repetition_penalty", {"repetition_penalty": 0.0}), ("seed", {"seed": 1 << 64}), ("stop", {"stop": ("",)}),
        ("stop_token_ids", {"stop_token_ids": (50,)}), ("logit_bias", {"logit_bias": {50: 1.0}}),
        ("min_tokens", {"min_tokens": 20}), ("logprobs", {"logprobs": 21}), ("temperature", {"temperature": "hot"}),
        ("presence_penalty", {"presence_penalty": 2.5}), ("max_tokens", {"max_tokens": 1.5}),
    ],
)
def test_a_bad_parameter_is_refused_by_name_and_the_engine_is_untouched(field: str, options: dict[str, object]) -> None:
    engine = make_engine()
    before = engine.snapshot()
    with pytest.raises(InvalidRequest) as caught:
        engine.add_request([1, 2], SamplingParams(**options))  # type: ignore[arg-type]
    assert caught.value.field == field and str(next(iter(options.values()))).strip("({")[:2] in str(caught.value)
    after = engine.snapshot()
    assert {**after, "seq": 0, "t": 0} == {**before, "seq": 0, "t": 0} and not engine.has_work


@pytest.mark.parametrize("ids", [[50], [-1], [1, True], [1, "a"], [1.0]])
def test_a_prompt_with_ids_outside_the_vocabulary_is_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="0 to 49"):
        make_engine().add_request(ids, SamplingParams())
