"""L8: from HTTP to the engine and back."""

from __future__ import annotations

from engine.trace.views import CACHED, FREE
from minitui.teaching.lessons.curl import QUESTION, TOKENS, request
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.stage import Stage


async def disconnect(stage: Stage) -> Seen:
    """Cancels one of two requests in the middle of its answer."""
    sessions = await stage.write_all(("What is the KV cache?", "What is prefill?"), [80] * 2)
    await stage.step(12, seconds=0.15)
    other, cancelled = (stage.request(session) for session in sessions)
    held, step = len(cancelled.table), stage.state().step
    shared = len(set(cancelled.table) & set(other.table))
    free_before = stage.state().counts[FREE]
    await stage.pause(1)
    stage.chats.cancel(sessions[1])
    await stage.until("the end of the request", lambda: cancelled.id not in stage.state().requests)
    state = stage.state()
    later = state.step - step
    return Seen(
        f"r{cancelled.id} held {held} blocks when its client disconnected. {shared} of these blocks contain the "
        f"system prompt and were shared with r{other.id}. "
        f"{f'{later} step later' if later else 'Before the next step'} r{cancelled.id} had ended (reason “abort”) "
        f"and its row was free. Of its other {held - shared} blocks {state.counts[FREE] - free_before} became free; "
        f"{state.counts[CACHED]} stayed in the tree as cached. Now only r{other.id} holds the shared blocks; "
        f"r{other.id} continues unchanged.",
        0 if later <= 1 else 1,
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
    return Seen(
        f"After one step {running} requests ran and {waiting} waited. All {len(metrics)} replies had ended after "
        f"{figures.steps} steps. Their prompts had {figures.prompt_tokens:,} tokens in total: {figures.computed:,} "
        "were computed, and the others came from the cache.",
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
            up to {TOKENS} tokens: first as a whole, then with "stream": true. The panel shows the commands, and what
            the server sends. Some fields are left out.

            In a stream, the server writes events while the engine computes. An event is a line that begins with
            “data:”, and an empty line.
            """,
            panel="wire",
            code="minitui.server.chat",
            run=request,
            predict=Prediction(
                f"How many HTTP requests does curl send for a streamed reply of {TOKENS} tokens?",
                (f"{TOKENS}: one for each token", "one", "two: one for the first token, one for the others"),
                (
                    "the client would have to ask again and again whether there is a new token. But a response can "
                    "stay open: the server sends an event whenever it has new text.",
                    "",
                    "the response would have to end after the first token. But it stays open until the reply has "
                    "ended.",
                ),
            ),
        ),
        Page(
            "One queue for all",
            """
            Clients are independent. Their requests wait in the engine's queue, first come, first served.
            Here eight requests with the same system prompt arrive at once. The engine has four rows.
            """,
            panel="lanes",
            run=crowd,
        ),
        Page(
            "A client disconnects",
            """
            A client may close its connection in the middle of an answer. The server notices and tells the engine to
            abort the request. A request can be aborted in any state: in the queue, in the middle of its prompt, or
            with a token being computed.
            """,
            panel="occupancy",
            code="engine.core.engine:Engine.abort",
            run=disconnect,
            predict=Prediction(
                "After how many steps are the blocks of the request released?",
                ("at once, or after one", "when its answer would have ended", "when another request needs them"),
                (
                    "",
                    "every closed browser tab would cost a row and blocks until an answer is complete that no "
                    "client reads.",
                    "the row and the blocks would stay occupied. Full blocks do stay in the tree, but as cached "
                    "blocks, which any request can replace.",
                ),
            ),
        ),
        Page(
            "Limits and failures",
            """
            Every queue has a limit. If too many requests wait, the server answers 429 and says when to try again
            (Retry-After). While the model loads, the server answers 503. The output that the server keeps for a client
            that reads slowly is limited too.

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
