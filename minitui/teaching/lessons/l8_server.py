"""L8: from HTTP to the engine and back."""

from __future__ import annotations

from engine.trace.views import CACHED, FREE
from minitui.teaching.lessons.curl import QUESTION, TOKENS, request
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.stage import Stage


async def disconnect(stage: Stage) -> Seen:
    """Cancels one of two requests in the middle of its answer. The answer: which of its blocks become free, 0: all, 1:
    all that it does not share, 2: only the block that it was filling."""
    sessions = await stage.write_all(("What is the KV cache?", "What is prefill?"), [80] * 2)
    await stage.step(12, seconds=0.15)
    other, cancelled = (stage.request(session) for session in sessions)
    held, size = len(cancelled.table), stage.source.info["block_size"]
    shared = len(set(cancelled.table) & set(other.table))
    own = stage.state().computed(cancelled) // size - shared
    free_before = stage.state().counts[FREE]
    await stage.pause(1)
    stage.chats.cancel(sessions[1])
    await stage.until("the end of the request", lambda: cancelled.id not in stage.state().requests)
    state = stage.state()
    freed = state.counts[FREE] - free_before
    rows = (
        ("held", held), ("of these shared", shared), ("of its own, and full", own),
        ("became free", freed), ("stayed cached", state.counts[CACHED]),
    )  # fmt: skip
    return Seen(
        "Blocks of this request:\n\n" + "\n".join(f"   {name:<26}{n:>3}" for name, n in rows) + "\n\n"
        "The system prompt is in the shared blocks. Now only the other request holds them, and it continues "
        "unchanged. The request ended with the reason “abort”; its row was free at once.",
        {held: 0, held - shared: 1}.get(freed, 2),
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
        ("steps until all replies had ended", figures.steps), ("prompt tokens of all requests", figures.prompt_tokens),
        ("computed", figures.computed), ("from the cache", figures.cached),
    )  # fmt: skip
    return Seen(
        "\n".join(f"   {name:<36}{n:>6,}" for name, n in rows) + f"\n\nThe clients did nothing special: each of "
        f"the {len(metrics)} sent one request and read one reply.",
    )


async def close(stage: Stage) -> None:
    """Sends six requests to four rows and stops the engine."""
    for _ in range(6):
        session = stage.chat(max_tokens=30, whole=True)
        await stage.ask(session, "What is a token?")
    await stage.step(3)


LESSON = Lesson(
    8,
    "Server",
    "How do many people use one engine?",
    (
        Page(
            "Client, server, engine",
            """
            `minitui serve` offers the same engine over HTTP. Server and engine are two processes: requests go to the
            engine over a socket; text and token ids come back. In this lesson only page 2 starts a server;
            the other experiments send requests to the engine directly. The server has these endpoints:

              /v1/chat/completions, /v1/responses     the APIs of OpenAI
              /v1/messages                            the API of Anthropic
              /generate, /tokenize, /detokenize       simpler endpoints
              /v1/models, /health, /ready, /metrics   for monitoring
              /minitui/...                            records and control, for minitui chat --connect

            The server tokenizes and checks each request before it sends the request to the engine. An invalid request
            (a negative temperature, a prompt that can never fit) is refused with an error that names the field. An
            unknown field is ignored, and the header X-Minitui-Warning names it.
            """,
            code="minitui.server.service:Service",
        ),
        Page(
            "A request with curl",
            f"""
            The experiment starts the HTTP server on the engine of this lesson. It listens on a free port of this
            machine and accepts one key. Then curl, a program for HTTP requests, asks “{QUESTION}” twice, each time for
            up to {TOKENS} tokens: first for the whole reply, then with "stream": true. The panel shows the commands,
            and what the server sends. Some fields are left out.

            In a stream, the response stays open, and the server writes an event when it has new text. An event is a
            line that begins with “data:”. An empty line ends it. The text passes the detokenizer first (L7
            Detokenizer).
            """,
            panel="wire",
            code="minitui.server.chat",
            run=request,
            predict=Prediction(
                f"How many events of a streamed reply of {TOKENS} tokens have text?",
                ("one", f"at most {TOKENS}", f"always {TOKENS}"),
                (
                    "the server would have to wait for the last token. But then nothing would be streamed.",
                    "",
                    "each token would have an event of its own. But the text of a token can be held back, and the "
                    "server may send the text of several tokens together.",
                ),
            ),
        ),
        Page(
            "One queue for all",
            """
            Clients know nothing of each other. Their requests wait in the engine's queue, first come, first served.
            Here 8 requests with the same system prompt arrive at once. The engine has four rows.
            """,
            panel="lanes",
            run=crowd,
        ),
        Page(
            "A client disconnects",
            """
            A client may close its connection in the middle of an answer. The server notices, and the engine aborts the
            request before its next step. A request can be aborted in any state: in the queue, in the middle of its
            prompt, or while a token is computed.

            Here two requests with the same system prompt write answers, and the client of one disconnects.
            """,
            panel="occupancy",
            code="engine.core.engine:Engine.abort",
            run=disconnect,
            predict=Prediction(
                "Which of the blocks that this request holds become free?",
                ("all", "all that it does not share", "only the block that it is filling"),
                (
                    "the other request would lose its system prompt: both hold the same blocks.",
                    "full blocks would not stay in the tree. But the next prompt may begin with the same tokens, and "
                    "cached blocks can be evicted when another request needs room.",
                    "",
                ),
            ),
        ),
        Page(
            "Limits and failures",
            """
            Every queue has a limit. If too many requests wait, the server answers 429 and says when to try again
            (Retry-After). While the model loads, the server answers 503. For a slow client, the server keeps only a
            limited amount of output.

            If a step raises an exception, the requests of that step end with an error and the engine continues. If the
            GPU itself fails, the engine's process must be replaced: /health reports the failure, and the server starts
            a new process. Until the new process is ready, the server answers 503.

            Two figures describe a server's speed: the time to the first token (queue + prefill), and the time per token
            (about the length of a step). A larger batch shortens the queue, but makes each step longer. `/metrics` has
            a histogram of each figure.
            """,
            code="minitui.server.errors",
        ),
    ),
    close,
    (
        Check(
            "How many requests run, and how many wait?",
            "lanes",
            "the batch lanes: waiting requests are drawn as queued.",
            lambda stage: (
                f"{sum(r.state == 'running' for r in stage.state().requests.values())} run, "
                f"{len(stage.state().queue)} wait"
            ),
        ),
        Check(
            "Which request is next?",
            "events",
            "the events: the line with `waits` names the request and the reason.",
            lambda stage: f"r{stage.state().queue[0]}" if stage.state().queue else "none",
        ),
        Check(
            "If each request were a stream over HTTP: how many responses would be open now?",
            "lanes",
            "the batch lanes: a response stays open while its request waits or runs.",
            lambda stage: f"{len(stage.state().requests)}",
        ),
    ),
    {"kv_blocks": 64, "max_num_seqs": 4},
)
