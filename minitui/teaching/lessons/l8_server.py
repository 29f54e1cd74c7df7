"""L8: from HTTP to the engine and back."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from engine.errors import EngineError, not_installed
from engine.trace.views import CACHED
from minitui.sources.local import LocalSource
from minitui.teaching import contrasts
from minitui.teaching.contrasts import ROWS
from minitui.teaching.lessons.page import Seen, fresh
from minitui.teaching.lessons.side_by_side import side_by_side, waits_and_gaps
from minitui.teaching.lessons.written import read_lesson
from minitui.teaching.merges import quoted
from minitui.teaching.recorded_steps import recorded_device
from minitui.teaching.scenarios import paste
from minitui.teaching.stage import Stage
from minitui.viewmodel.board import Wire

PATH = "/v1/chat/completions"
QUESTION = "What is decode?"
TOKENS = 12  # of each reply
HELD, STOP = " the", " the zebra"  # a token of the reply, and a stop string that begins with this token
PACE = 10  # of an engine without slow motion
LIMIT_S = 30.0  # for the server's start, and for each request
LONGEST_LINE = 1 << 16  # bytes
# Fields that the picture of an answer leaves out; it also leaves out fields that are null.
HIDDEN = ("id", "created", "system_fingerprint", "object", "model", "index", "logprobs")


async def request(stage: Stage) -> Seen:
    """Asks once for the whole answer and once for a stream. The answer: whether one event of the stream had text (0),
    one for each token (1), or several, but fewer than tokens (2)."""
    async with _server(stage) as (url, key):
        whole, _ = await _ask(stage, url, key, stream=False)
        answer = json.loads("\n".join(whole))
        reply = answer["choices"][0]
        await stage.pause(4)
        await stage.slow(0.25)
        if not stage.beat:  # the steps of a small model are faster than the server's events: all text could be in one
            await stage.source.control("pace", factor=PACE)
        lines, steps = await _ask(stage, url, key, stream=True)
        await stage.source.control("pace", factor=1)
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    parts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]
    texts = [part for part in parts if part]
    joined = sum(part.startswith(HELD) and part != HELD for part in texts)
    others = [_kind(chunk) for chunk, part in zip(chunks, parts, strict=False) if not part] + ["[DONE]"]
    same = "the same text" if "".join(parts) == reply["message"]["content"] else "another text"
    rows = (
        ("steps of the stream", steps), ("lines with data:", len(events)), ("  of these with text", len(texts)),
        (f"    {quoted(HELD)} and the next token", joined),
        (f"  others: {', '.join(others)}", len(events) - len(texts)),
    )
    return Seen(
        "\n".join(f"   {name:<38}{n:>4}" for name, n in rows)
        + "\n\nThe first response is one JSON object. The second is a stream of events. "
        f"{quoted(HELD)} may begin the stop string, so its text was sent with the text of the next token. (With a fast "
        f"engine, one event can have the text of several tokens.) All pieces together make {same}.",
        0 if len(texts) == 1 else 1 if len(texts) == TOKENS else 2 if joined and events[-1] == "[DONE]" else None,
    )


def _kind(chunk: dict[str, Any]) -> str:
    """Returns what an event without text tells."""
    choices = chunk["choices"]
    if not choices:
        return "usage"
    if choices[0].get("finish_reason"):
        return "finish_reason"
    return " and ".join(name for name, value in choices[0]["delta"].items() if value) or "nothing"


@asynccontextmanager
async def _server(stage: Stage) -> AsyncIterator[tuple[str, str]]:
    """Serves the running engine on a free port of this machine; yields the URL and the API key."""
    try:
        from minitui.server.command import Host
        from minitui.server.service import Borrowed
        from minitui.server.settings import Role, ServerSettings
    except ImportError as error:
        raise EngineError(not_installed("this experiment", error, "serve")) from error
    source = stage.source
    if not isinstance(source, LocalSource):
        raise EngineError("this experiment needs an engine that minitui started on this machine")
    key = secrets.token_hex(8)
    settings = ServerSettings(port=0, keys={key: Role.CHAT}, served_names=(source.info.model,), drain_s=0.0)
    host = Host(source.config, settings, service=Borrowed(source.client, settings))
    ready = asyncio.Event()
    serving = asyncio.create_task(host.run(ready.set))
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({serving, waiting}, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        if not ready.is_set():
            raise EngineError(f"the server did not start within {LIMIT_S:.0f} s")
        await stage.open()
        yield host.url, key
    finally:
        waiting.cancel()
        host.stop()
        await asyncio.gather(serving, waiting, return_exceptions=True)
        await stage.gate()


async def _ask(stage: Stage, url: str, key: str, stream: bool) -> tuple[list[str], int]:
    """Sends the question; returns the lines of the answer, and the number of steps meanwhile."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS, "temperature": 0}
    body["stop"] = [STOP]
    if stream:
        body["stream"] = True
    command = ["curl", *(["-N"] if stream else []), f"{url}{PATH}", "-H", f"Authorization: Bearer {key}"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    # -s has no meaning for the request, so the command that is shown does not have it.
    shown, lines = [("sent", shlex.join(command))], list[str]()
    before = stage.state().step

    def got(line: str) -> None:
        lines.append(line)
        if line:
            shown.append(("got", _short(line)))
            stage.view.put(Wire("HTTP requests and responses", tuple(shown)))

    stage.view.put(Wire("HTTP requests and responses", tuple(shown)))
    await stage.pause(3)
    try:
        async with asyncio.timeout(LIMIT_S + 60 * stage.beat):
            await (_curl(command, got) if shutil.which("curl") else _httpx(url, key, body, got))
    except TimeoutError:
        raise EngineError("the server did not answer in time") from None
    return lines, stage.state().step - before


async def _curl(command: list[str], got: Callable[[str], None]) -> None:
    environment = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        command[0], "-sS", *command[1:], stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment,
        limit=LONGEST_LINE,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        async for line in process.stdout:
            got(line.decode(errors="replace").rstrip("\r\n"))
        said = (await process.stderr.read(4096)).decode(errors="replace").strip()
        if await process.wait():
            raise EngineError(f"curl failed: {said}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _httpx(url: str, key: str, body: dict[str, Any], got: Callable[[str], None]) -> None:
    """Sends the same request without curl."""
    import httpx

    async with (
        httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client,
        client.stream("POST", f"{url}{PATH}", json=body, headers={"Authorization": f"Bearer {key}"}) as response,
    ):
        async for line in response.aiter_lines():
            got(line)


def _short(line: str) -> str:
    """Returns the line without fields that say nothing about the answer. A line that is no JSON stays as it is."""
    prefix = "data: " if line.startswith("data: ") else ""
    try:
        found = json.loads(line[len(prefix) :])
    except ValueError:
        return line
    return prefix + json.dumps(_shown(found), ensure_ascii=False) if isinstance(found, dict) else line


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return [_shown(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _shown(item) for name, item in value.items() if name not in HIDDEN and item is not None}


GPU = recorded_device()
LARGE = GPU.models["8B"]


async def disconnect(stage: Stage) -> Seen:
    """Cancels one of two requests in the middle of its reply, and sends its prompt again. The answer: which tokens are
    computed, 0: all, 1: those after the shared blocks, 2: those after the prompt's last full block."""

    if stage.state().step >= 0:  # the panel's counts are of the whole life of an engine
        await stage.other_engine(**stage.home)
        await fresh(stage)
    sessions = await stage.write_all(("What is the KV cache?", paste(1)), [80] * 2)
    await stage.step(12, seconds=0.15)
    other, cancelled = (stage.request(session) for session in sessions)
    held, size = len(cancelled.table), stage.source.info.block_size
    shared = len(set(cancelled.table) & set(other.table))
    own = stage.state().computed(cancelled) // size - shared
    await stage.pause(1)
    stage.chats.cancel(sessions[1])
    await stage.until("the end of the request", lambda: cancelled.id not in stage.state().requests)
    kept = stage.state().counts[CACHED]
    await stage.pause(2)
    again = await stage.ask(stage.chat(max_tokens=80, whole=True), paste(1))
    await stage.step(1, seconds=1.0)
    lane = stage.view.history.lanes.lanes[again]
    prompt, cached = lane.request.prompt_tokens, lane.request.cached_tokens
    rows = (
        ("blocks of the aborted request", held), ("  shared with the other request", shared),
        ("  its own, full", own), ("cached blocks after the abort", kept),
        ("tokens of the prompt, sent again", prompt), ("  from the cache", cached), ("  computed", prompt - cached),
    )
    return Seen(
        "\n".join(f"   {name:<36}{n:>4}" for name, n in rows) + "\n\nThe full blocks of the aborted request stayed in "
        "the cache. Only the block that it was filling became free. The other request also holds the shared blocks, "
        f"with the system prompt, and went on. The {prompt - cached} computed tokens are the end of the prompt: "
        "they do not fill a block, and only full blocks are found.",
        {prompt: 0, prompt - shared * size: 1, prompt - prompt // size * size: 2}.get(prompt - cached),
    )


async def crowd(stage: Stage) -> Seen:
    """Sends eight requests at once to four rows."""
    sessions = await stage.write_all(["What is a token?"] * 8, [6] * 8)
    await stage.step(1, seconds=1.0)
    running = sum(r.state == "running" for r in stage.state().requests.values())
    waiting = len(stage.state().queue)
    metrics = await stage.answers(sessions)
    await stage.gate()
    figures = stage.figures()
    rows = (
        ("requests running after one step", running), ("requests waiting after one step", waiting),
        ("steps until all replies had ended", figures.steps),
    )
    return Seen(
        "\n".join(f"   {name:<36}{n:>6,}" for name, n in rows) + f"\n\nEach of the {len(metrics)} chats sent one "
        "request and read one reply. No chat had to know of the others.",
    )


async def close(stage: Stage) -> None:
    """Sends six requests to four rows and stops the engine."""
    for _ in range(6):
        session = stage.chat("", max_tokens=30, whole=True)
        await stage.ask(session, "What is a token?")
    await stage.step(3)


two_rows_or_eight = side_by_side(ROWS, told=waits_and_gaps, shown=("time", "first_p99", "gap_p50"))

LESSON = read_lesson(globals(), contrasts, kv_blocks=64, max_num_seqs=4)
