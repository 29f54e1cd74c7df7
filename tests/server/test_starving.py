"""Whatever one client sends, the server goes on to answer the others: /health is answered within half a second."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from minitui.server import service
from tests.support.server.bodies import EXPLODING, ROUTES, bodies, filled
from tests.support.server.serving import Running
from tests.support.waiting import wait_until

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "What is paging?"}], "max_tokens": 2}
STALL_S = 0.5


class Stalls:
    """Measures how long the server's event loop runs without a pause for others. Of the time between two ticks and the
    processor time that this process used meanwhile, the smaller one counts. So the other programs of a busy machine do
    not count."""

    def __init__(self, server: Running) -> None:
        self.longest = 0.0
        self._ended = False
        self._ticking = asyncio.run_coroutine_threadsafe(self._tick(), server.loop)

    async def _tick(self) -> None:
        last = time.monotonic(), time.process_time()
        while not self._ended:
            await asyncio.sleep(0.005)
            now = time.monotonic(), time.process_time()
            self.longest = max(self.longest, min(now[0] - last[0], now[1] - last[1]))
            last = now

    def end(self) -> float:
        self._ended = True
        self._ticking.result(90)
        return self.longest


@pytest.fixture
def stalls(server: Running) -> Iterator[Stalls]:
    measured = Stalls(server)
    yield measured
    measured.end()


@pytest.mark.parametrize("path", ROUTES)
def test_no_body_stops_the_event_loop(server: Running, stalls: Stalls, path: str) -> None:
    json = {"Content-Type": "application/json"}
    for name, body in bodies(path):
        for _ in range(3):  # a stall that the body causes comes each time; one of a busy machine does not
            stalls.longest = 0.0
            answer = server.http.post(path, content=body, headers=json)
            assert answer.status_code in (200, 400, 404, 413, 422), f"{name}: {answer.text[:300]}"
            assert server.get("/health").status_code == 200
            if stalls.longest < STALL_S:
                break
        assert stalls.longest < STALL_S, f"{name} stopped the event loop for {stalls.longest:.1f} s"


def test_a_body_may_have_many_brackets_and_commas_in_its_texts(server: Running) -> None:
    text = '{"a": [1, 2, "\\\\"], "b": {}}, ' * 20_000
    answer = server.post("/tokenize", {"prompt": text})
    assert answer.status_code == 200, answer.text[:300]


@pytest.mark.parametrize(("value", "reason"), [
    (filled("[]"), "lists and objects; the limit is 20,000"), (filled("1"), "values; the limit is 400,000"),
    (filled('""'), "strings; the limit is 100,000"),
], ids=["containers", "values", "strings"])
def test_a_body_with_too_many_parts_is_refused_with_its_number_of_parts(
    server: Running, value: str, reason: str
) -> None:
    answer = server.http.post("/tokenize", content=f'{{"prompt": {value}}}'.encode())
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]


TOO_COSTLY = r"(?:[\p{L}\p{N}]{1,200})" * 20


def test_an_endless_compilation_ends_and_delays_neither_prompts_nor_steps(server: Running, stalls: Stalls) -> None:
    server.post(CHAT, {**ASK, "guided_regex": "warm"})
    answers: list[Any] = []
    attack = threading.Thread(target=lambda: answers.append(
        server.http.post(CHAT, json={**ASK, "guided_json": EXPLODING}, timeout=60)))
    attack.start()
    meanwhile = 0
    while attack.is_alive():
        assert server.post(CHAT, ASK).status_code == 200
        assert server.get("/health").json()["status"] == "ok"
        meanwhile += attack.is_alive()
    assert meanwhile > 2, "others waited for the compilation"
    assert answers[0].status_code == 400
    assert "did not end within 1 seconds of processor time" in answers[0].json()["error"]["message"]
    assert answers[0].json()["error"]["param"] == "guided_json"
    assert stalls.longest < 2 * STALL_S  # over seconds in which both cores are busy


def test_a_grammar_whose_masks_would_be_too_costly_is_a_400(server: Running) -> None:
    answer = server.post(CHAT, {**ASK, "guided_regex": TOO_COSTLY})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "guided_regex" and "make it smaller" in answer.text


def test_a_key_compiles_one_grammar_at_a_time_and_hears_when_to_try_again(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "COMPILE_WAIT_S", 0.1)

    async def held() -> Any:
        async with server.service.compilation(""):
            return await asyncio.to_thread(server.post, CHAT, {**ASK, "guided_regex": "a"})

    refused = server.call(held())
    assert refused.status_code == 429 and refused.headers["Retry-After"] == "1", refused.text
    assert "API key" in refused.json()["error"]["message"]
    assert server.post(CHAT, {**ASK, "guided_regex": "a"}).status_code == 200


def test_health_tells_of_texts_that_wait_for_their_encoding(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STUCK_S", 0.05)
    go = threading.Event()
    stuck = asyncio.run_coroutine_threadsafe(server.service.in_thread(go.wait, 30), server.loop)
    try:
        wait_until(lambda: server.get("/health").status_code == 503)
        assert server.get("/health").json()["status"] == "busy"
    finally:
        go.set()
        stuck.result(90)
    assert server.get("/health").status_code == 200
