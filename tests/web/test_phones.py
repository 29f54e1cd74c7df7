"""The phones of a class: what they see, one vote for each, and who is kept out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import until

pytest.importorskip("textual_serve", reason="the extra 'web' is not installed")
pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

import aiohttp
from aiohttp.test_utils import TestClient, TestServer

from minitui.web import phones as web_phones
from minitui.web.afterwards import Afterwards
from minitui.web.mirror import Application
from minitui.web.mirror_server import MirrorSite
from minitui.web.settings import WebSettings

LINK = "/paging-viewers"


def state(number: int = 0, **more: Any) -> bytes:
    ask = {"number": number, "question": "Who is preempted?", "choices": ["r1", "r2", "r3"]} if number else None
    return json.dumps({"all": {"say": "a step", "ask": ask} | more, "lecturer": {"notes": "secret"}}).encode()


@asynccontextmanager
async def classroom() -> AsyncIterator[tuple[Application, TestClient[Any, Any], list[Any]]]:
    application = Application([], (80, 24))
    sent: list[Any] = []
    application.send = lambda **message: sent.append(message)  # type: ignore[method-assign,assignment]
    site = MirrorSite(application, "127.0.0.1", "viewers", "sesame", link="paging")
    # The cookies of a phone are given by hand: an address of digits has no cookies in aiohttp's jar.
    async with TestClient(TestServer(site.app), cookie_jar=aiohttp.DummyCookieJar()) as client:
        yield application, client, sent


async def joined(client: TestClient[Any, Any]) -> dict[str, str]:
    """The headers of a new phone's votes."""
    page = await client.get(LINK)
    assert page.status == 200 and "secret" not in await page.text()
    cookie = page.cookies["phone"]
    assert cookie["httponly"] and cookie["samesite"] == "Strict"
    return {"Origin": str(client.make_url("")).rstrip("/"), "Cookie": f"phone={cookie.value}"}


async def vote(client: TestClient[Any, Any], headers: dict[str, str], body: Any) -> int:
    text = body if isinstance(body, str) else json.dumps(body)
    return (await client.post(f"{LINK}/vote", data=text, headers=headers)).status


async def test_one_vote_for_each_phone_and_the_newest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_phones, "VOTE_S", 0.0)
    monkeypatch.setattr(web_phones, "COUNTS_S", 0.0)
    async with classroom() as (application, client, sent):
        application._published(state(7))
        phones = [await joined(client) for _ in range(4)]
        for phone, choice in zip(phones, (0, 1, 1, 2), strict=True):
            assert await vote(client, phone, {"number": 7, "choice": choice}) == 204
        assert await vote(client, phones[3], {"number": 7, "choice": 1}) == 204
        await until(lambda: sent and sent[-1].get("counts") == [1, 3, 0])
        assert sent[-1] == {"type": "counts", "number": 7, "counts": [1, 3, 0], "phones": 4}, "4 of 0 have answered"
        application._published(state(8))
        assert await vote(client, phones[0], {"number": 7, "choice": 0}) == 409, "the question is closed"
        assert await vote(client, phones[0], {"number": 8, "choice": 2}) == 204
        await until(lambda: sent[-1].get("counts") == [0, 0, 1])


@pytest.mark.parametrize(("body", "headers", "status"), [
    ({"number": 7, "choice": 3}, {}, 400),
    ({"number": 7, "choice": -1}, {}, 400),
    ({"number": 0, "choice": 0}, {}, 409),
    ({"number": "7", "choice": 0}, {}, 400),
    ([7, 0], {}, 400),
    ("[" * 200, {}, 400),
    ("x" * 300, {}, 413),
    ({"number": 7, "choice": 0}, {"Origin": "http://other.example"}, 403),
    ({"number": 7, "choice": 0}, {"Cookie": ""}, 403),
    ({"number": 7, "choice": 0}, {"Cookie": "phone=abc.def"}, 403),
    ({"number": 7, "choice": 0}, {"Cookie": "phone=."}, 403),
    ({"number": 7, "choice": 0}, {"Host": "other.example"}, 403),
])
async def test_a_vote_that_is_none_is_refused(body: Any, headers: dict[str, str], status: int) -> None:
    async with classroom() as (application, client, _):
        application._published(state(7))
        assert await vote(client, await joined(client) | headers, body) == status


async def test_votes_new_phones_and_streams_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_phones, "VOTE_S", 1000.0)
    monkeypatch.setattr(web_phones, "MOST_VOTERS", 1)
    monkeypatch.setattr(web_phones, "PER_ADDRESS", 2)
    monkeypatch.setattr(web_phones, "MOST_PHONES", 1)
    async with classroom() as (application, client, _):
        application._published(state(7))
        one, two = await joined(client), await joined(client)
        assert await vote(client, one, {"number": 7, "choice": 0}) == 204
        assert await vote(client, one, {"number": 7, "choice": 1}) == 429, "too fast"
        assert await vote(client, two, {"number": 7, "choice": 1}) == 429, "too many"
        assert (await client.get(LINK)).status == 429
        assert (await client.get(LINK, headers={"Cookie": one["Cookie"]})).status == 200, "a phone may load again"
        async with client.get(f"{LINK}/events") as stream:
            await stream.content.readline()
            assert (await client.get(f"{LINK}/events")).status == 503


async def test_a_phone_sees_each_new_state_without_the_lecturers_notes() -> None:
    async with classroom() as (application, client, _):
        application._published(state(7))
        async with client.get(f"{LINK}/events") as stream, client.get("/lecturer/events?token=sesame") as lecturer:
            for number in (7, 8):
                application._published(state(number))
                async with asyncio.timeout(20):
                    while True:
                        data = (await stream.content.readline()).decode()
                        if data.startswith("data: ") and json.loads(data[6:]).get("ask", {}).get("number") == number:
                            break
                assert "secret" not in data
            async with asyncio.timeout(20):
                while "secret" not in (await lecturer.content.readline()).decode():
                    pass
        for nonsense in (b"[]", b"{", b'{"all": 3}', b'{"all": {}}'):
            application._published(nonsense)
        assert (await client.get(LINK)).status == 200


async def test_only_the_lecturer_opens_scenes() -> None:
    async with classroom() as (_, client, sent):
        own = {"Origin": str(client.make_url("")).rstrip("/")}
        act = "/lecturer/act?token=sesame"
        assert (await client.post(act, json={"verb": "scene", "number": 3}, headers=own)).status == 204
        assert sent == [{"type": "class", "verb": "scene", "number": 3}]
        assert (await client.post(act, json={"verb": "quit", "number": 3}, headers=own)).status == 400
        assert (await client.post(act, json={"verb": "next", "number": 0})).status == 403
        for token in ("viewers", "", "x"):
            assert (await client.get(f"/lecturer?token={token}")).status == 403
            assert (await client.get(f"/lecturer/events?token={token}")).status == 403
            other = f"/lecturer/act?token={token}"
            assert (await client.post(other, json={"verb": "next", "number": 0}, headers=own)).status == 403
        assert (await client.get("/lecturer?token=sesame")).status == 200
        for wrong in ("/paging-viewerz", "/paging-viewers2/events", "/viewers", "/paging-%ff"):
            assert (await client.get(wrong)).status == 403
        assert len(sent) == 1


async def test_afterwards_the_link_has_scenes_answers_and_recordings(tmp_path: Path) -> None:
    (tmp_path / "a\r\nb.trace").write_bytes(b"records")
    asked = {"question": "<script>", "choices": ["r1", "r2"], "counts": [7, 2], "phones": 9, "right": 1}
    scene = {"number": 1, "title": "Paging & more", "answers": [asked], "told": ["Step 3: r1 <b>joins</b>"]}
    settings = WebSettings(link="paging", token="viewers")
    site = Afterwards(settings, "A class", [scene], [tmp_path / "a\r\nb.trace"])
    async with TestClient(TestServer(site.app)) as client:
        text = await (await client.get(LINK)).text()
        assert "Paging &amp; more" in text and "r1 &lt;b&gt;joins" in text
        assert "r1: <b>7</b><" in text and "r2: <b>2</b> (right)<" in text
        assert "<script>" not in text
        file = await client.get(f"{LINK}/0")
        assert await file.read() == b"records" and "a__b.trace" in file.headers["Content-Disposition"]
        assert (await client.get(f"{LINK}/1")).status == 404
        for wrong in ("/paging-x", "/paging-x/0", "/?token=", "/ws/x"):
            assert (await client.get(wrong)).status == 403
