"""Sends each request at its planned time and measures its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, TextIO

from engine.errors import EngineDead, EngineError
from minitui.bench.load.plan import Planned
from minitui.bench.load.report import Outcome

TEXT_FIELDS = ("content", "reasoning_content", "tool_calls")  # fields of a chat delta that count as text


async def send(client: Any, planned: Planned, began: float) -> Outcome:
    """Sends one request and reads its answer."""
    from minitui.sources.bounds import ANSWER
    from minitui.sources.http import check, httpx, parse, server_events

    outcome = Outcome(time.perf_counter() - began)
    started = time.perf_counter()
    pieces, ended = 0, False
    path = "/v1/chat/completions" if planned.chat else "/v1/completions"
    try:
        async with client.stream("POST", path, json=planned.body, extensions=ANSWER.extension()) as response:
            if response.status_code == 429:
                outcome.error = "refused (429)"
            await check(response)
            async for _, data in server_events(response):
                if data == "[DONE]":
                    ended = True
                    break
                chunk = parse(data)
                _count_usage(outcome, chunk.get("usage") or {})
                for choice in chunk.get("choices", ()):
                    text = choice.get("text") or any((choice.get("delta") or {}).get(key) for key in TEXT_FIELDS)
                    if text or choice.get("finish_reason"):
                        outcome.first = outcome.first or time.perf_counter() - started
                    pieces += bool(text)
                    ended = ended or bool(choice.get("finish_reason"))  # after this, some servers send no [DONE]
        if not ended:
            outcome.error, outcome.detail = "cut off", "the answer ended without a finish_reason"
    except EngineDead as error:
        outcome.error, outcome.detail = "not available", str(error)
    except EngineError as error:
        outcome.error, outcome.detail = outcome.error or "error", str(error)
    except (TypeError, AttributeError, ValueError) as error:  # JSON with another structure
        outcome.error, outcome.detail = "no answer", f"this is not an OpenAI-compatible server ({error})"
    except (httpx.HTTPError, OSError) as error:
        outcome.error, outcome.detail = type(error).__name__, str(error)
    finally:
        outcome.total = time.perf_counter() - started
        outcome.output_tokens = outcome.output_tokens or pieces  # without usage, each piece counts as a token
    return outcome


def _count_usage(outcome: Outcome, usage: dict[str, Any]) -> None:
    from minitui.sources.remote_checks import count

    outcome.prompt_tokens = count(usage.get("prompt_tokens")) or outcome.prompt_tokens
    outcome.output_tokens = count(usage.get("completion_tokens")) or outcome.output_tokens
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    outcome.cached_tokens = outcome.cached_tokens if count(cached) is None else cached


async def run_load(
    url: str, key: str, plan: Sequence[Planned], timeout_s: float, progress: TextIO | None = None
) -> list[Outcome]:
    """Sends each request at its planned time; returns the outcomes in the order of the plan."""
    from minitui.sources.http import open_client

    done: list[Outcome] = []
    began = time.perf_counter()

    async def one(planned: Planned) -> Outcome:
        await asyncio.sleep(max(0.0, planned.at - (time.perf_counter() - began)))
        # One client per request: one client with hundreds of connections would be slower than the server.
        async with open_client(url, key) as client:
            client.timeout = timeout_s
            outcome = await send(client, planned, began)
        done.append(outcome)
        return outcome

    tasks = [asyncio.create_task(one(planned)) for planned in plan]
    reporting = asyncio.create_task(_report_progress(progress, plan, done, began)) if progress else None
    try:
        return await asyncio.gather(*tasks)
    finally:
        if reporting is not None:
            reporting.cancel()
        for task in tasks:
            task.cancel()


async def _report_progress(out: TextIO, plan: Sequence[Planned], done: list[Outcome], began: float) -> None:
    while True:
        await asyncio.sleep(1.0)
        now = time.perf_counter() - began
        due = sum(planned.at <= now for planned in plan)
        failed = sum(bool(outcome.error) for outcome in done)
        line = f"{now:5.0f} s  {due} of {len(plan)} sent, {len(done)} finished, {failed} failed"
        print(line, file=out, flush=True)
