"""The clients of bench_vllm.py's servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
import urllib.request
from typing import Any

import aiohttp

from minitui.dev.vllm_servers import Server

SYSTEMS = (
    "You are the support assistant of a small bicycle shop in Utrecht. Answer briefly, in plain words, and never "
    "promise a delivery date. ",
    "You review Python code. Point out defects first, style last; quote the line you mean, and suggest the smallest "
    "change that mends it. ",
    "You are a patient teacher of linear algebra. Use small matrices as examples, and end every answer with a question "
    "to the student. ",
)
QUESTIONS = (
    "What does it cost to mend a flat tyre?", "My chain skips under load; what should I check first?",
    "Why is this function slow?", "Explain eigenvalues.", "What is a basis?", "Is `except:` bad?",
    "Which lock do you advise?", "What is the rank of a matrix?", "Do you sell children's bikes?",
    "How do I profile this?",
)  # fmt: skip
PIECE_S = 0.005  # of an answer without a stream: a client goes away after so many seconds for each piece


class Streams:
    """Clients of one server."""

    def __init__(self, server: Server, http: aiohttp.ClientSession, seed: int) -> None:
        self.server, self.http, self.random = server, http, random.Random(seed)
        self.done = self.cancelled = self.refused = 0

    async def chat(self, system: int, turns: int, tokens: int, cancel_after: int = 0, **extra: Any) -> None:
        """Runs a conversation. `cancel_after`: goes away after this many pieces."""
        messages = [{"role": "system", "content": SYSTEMS[system] * 6}]
        for _ in range(turns):
            messages.append({"role": "user", "content": self.random.choice(QUESTIONS)})
            messages.append({"role": "assistant", "content": await self.ask(messages, tokens, cancel_after, **extra)})
            await asyncio.sleep(self.random.random() * 0.2)

    async def ask(self, messages: list[dict[str, str]], tokens: int, cancel_after: int = 0, **extra: Any) -> str:
        body = {
            "model": f"Qwen3-{self.server.shape}", "messages": messages, "max_tokens": tokens,
            "stream": self.server.shape != "tiny", "temperature": 0.8,
            "chat_template_kwargs": {"enable_thinking": False}, **extra,
        }  # fmt: skip
        text, pieces = "", 0
        try:
            async with (
                asyncio.timeout(None if body["stream"] or not cancel_after else cancel_after * PIECE_S),
                self.http.post(f"{self.server.url}/v1/chat/completions", json=body) as response,
            ):
                if response.status != 200:
                    self.refused += 1
                    return ""
                if not body["stream"]:
                    text = (await response.json())["choices"][0]["message"]["content"] or ""
                else:
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            choices = json.loads(line[6:]).get("choices")
                            text += (choices[0]["delta"].get("content") or "") if choices else ""
                            pieces += 1
                            if cancel_after and pieces >= cancel_after:
                                self.cancelled += 1
                                return text  # leaving the block closes the connection
        except TimeoutError:
            self.cancelled += 1
            return text
        self.done += 1
        return text

    async def drive(self) -> None:
        """Three long system prompts shared by 24 chats of two turns, a client that vanishes, 40 chats more than fit."""

        async def later(delay: float, *arguments: int) -> None:
            await asyncio.sleep(delay)
            await self.chat(*arguments)

        await self.chat(0, 1, 40)
        await asyncio.gather(
            *(later(i * 0.05, i % 3, 2, 60 + 10 * (i % 7)) for i in range(24)), self.chat(1, 1, 400, 20)
        )
        await asyncio.gather(*(later(self.random.random(), i % 3, 1, 300) for i in range(40)))

    async def wild(self, until: float, workers: int) -> None:
        """`workers` streams: long prompts, schemas, several samples, clients that vanish."""

        async def work() -> None:
            rnd = self.random
            while time.monotonic() < until:
                kind, cancel = rnd.random(), rnd.randrange(1, 60) if rnd.random() < 0.15 else 0
                with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
                    if kind < 0.5:
                        await self.chat(rnd.randrange(3), 2, rnd.choice([8, 60, 200]), cancel)
                    elif kind < 0.7:
                        words = " ".join(rnd.choice(QUESTIONS) for _ in range(rnd.randrange(50, 250)))
                        await self.ask([{"role": "user", "content": words}], rnd.choice([1, 40, 150]), cancel)
                    elif kind < 0.78:
                        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
                        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
                        await self.chat(rnd.randrange(3), 1, 40, cancel, response_format=form)
                    elif kind < 0.84:
                        await self.chat(rnd.randrange(3), 1, 60, cancel, n=2)
                    else:
                        await self.ask(
                            [{"role": "user", "content": rnd.choice(QUESTIONS)}], 300, cancel, ignore_eos=True
                        )

        await asyncio.gather(*(work() for _ in range(workers)))


async def load(server: Server, seconds: float, seed: int) -> None:
    """Runs the clients of one server until the time is over, or until Ctrl+C."""
    until = time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        streams = Streams(server, http, seed)
        try:
            if server.shape == "8B":
                await streams.drive()
            await streams.wild(until, 64 if server.shape == "8B" else 30)
        finally:
            print(f"{server.url}: {streams.done} answers, {streams.cancelled} cancelled, {streams.refused} refused")


async def steady(server: Server, rows: int, tokens: int, until: float) -> None:
    """Keeps `rows` requests with random prompts running. Their lengths vary, so that they do not end together."""
    rnd = random.Random(1)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def work() -> None:
            while time.monotonic() < until:
                body = {
                    "model": f"Qwen3-{server.shape}", "prompt": [rnd.randrange(1000, 50_000) for _ in range(128)],
                    "max_tokens": rnd.randrange(tokens // 2, tokens * 3 // 2), "ignore_eos": True, "temperature": 0,
                }  # fmt: skip
                async with http.post(f"{server.url}/v1/completions", json=body) as response:
                    answer = await response.json()
                    if response.status != 200:
                        raise SystemExit(f"{server.name} refuses a request: {str(answer)[:400]}")

        await asyncio.gather(*(work() for _ in range(rows)))


def read_records(url: str) -> None:
    """Reads a snapshot and then the record stream, as the application does, until killed."""
    json.load(urllib.request.urlopen(f"{url}/minitui/snapshot"))
    for line in urllib.request.urlopen(f"{url}/minitui/records"):
        if line.startswith(b"data: "):
            json.loads(line[6:])
