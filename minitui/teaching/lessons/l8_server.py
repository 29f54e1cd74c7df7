"""L8: from HTTP to the engine and back."""

from __future__ import annotations

from engine.trace.views import CACHED
from minitui.teaching.contrasts import EQUAL, ROWS
from minitui.teaching.lessons.curl import HELD, QUESTION, STOP, TOKENS, request
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen, fresh
from minitui.teaching.lessons.side_by_side import side_by_side, waits_and_gaps
from minitui.teaching.merges import quoted
from minitui.teaching.recorded_steps import recorded_device
from minitui.teaching.scenarios import paste
from minitui.teaching.stage import Stage
from minitui.text import ms

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
    prompt, cached = lane.prompt_tokens, lane.cached_tokens
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


LESSON = Lesson(
    8,
    "Server",
    "How do many people use one engine?",
    (
        Page(
            "Client, server, engine",
            """
            `minitui serve` offers this engine over HTTP: a client sends a request, and the server sends a response with
            the reply. The server and the engine are separate processes on one machine. The server's main endpoints
            (addresses):

              /v1/chat/completions, /v1/responses     like OpenAI's APIs
              /v1/messages                            like Anthropic's API
              /generate, /tokenize, /detokenize       simpler endpoints
              /health, /ready, /metrics               for monitoring
              /minitui/...                            for minitui chat --connect

            The server turns the text of a request into tokens. If a field is not valid, such as a negative temperature,
            the request is refused, and the error names the field. A request with an unknown field is refused, too.

            Only page 2 starts a server. On the other pages, chats stand for clients.
            """,
            code="minitui.server.service:Service",
        ),
        Page(
            "A request with curl",
            f"""
            The experiment starts the HTTP server. Then curl, a program for HTTP requests, asks “{QUESTION}” twice:
            first for the whole reply, then with "stream": true. The panel does not show all fields.

            The second response stays open until the reply ends (a stream). For new text, the server writes an event, a
            line that begins with “data:”. The engine is slowed down, so no two tokens share an event. Both requests set
            the stop string {quoted(STOP)} (L7 Detokenizer). The reply has only {quoted(HELD)}.
            """,
            panel="wire",
            code="minitui.server.openai.chat",
            run=request,
            predict=Prediction(
                f"How many events of the streamed reply of {TOKENS} tokens have text?",
                (
                    "one", f"{TOKENS}", f"{TOKENS} minus one for each token {quoted(HELD)}",
                    f"those before the first token {quoted(HELD)}, and one at the end",
                ),
                (
                    "the server would wait for the last token, as without a stream.",
                    f"each token would have an event. But {quoted(HELD)} may begin the stop string, so its text is "
                    "sent with the next token.",
                    "",
                    f"the text after {quoted(HELD)} would wait for the end of the reply. But the next token shows that "
                    "this is not the stop string.",
                ),
            ),
        ),
        Page(
            "One queue for all",
            """
            Clients know nothing of each other. Their requests go into one queue of the engine. By default, the
            engine admits the oldest request first. One step can compute tokens of all requests that have a row, so
            several clients get text at the same time. Until a request has a row, its client sees no text.

            Here 8 requests arrive at once. The engine has four rows. Each reply has 6 tokens. Look for the step in
            which the waiting requests begin.
            """,
            panel="lanes",
            run=crowd,
        ),
        Page(
            "How many rows?",
            f"""
            Two latencies describe the speed for one user: the time to first token (TTFT), with the wait in the queue
            and the prefill, and the time per token after it. Throughput is the tokens of all users in a second.

            With more rows, fewer requests wait in the queue. But a step then computes tokens of more requests, so it
            usually takes longer, and so does each token. How much longer depends on the device: in L2 Model and
            weights, a decode step of {LARGE.name} on the {GPU.name} took {ms(LARGE.decode[1])} ms with 1 row, and
            {ms(LARGE.decode[64])} ms with 64. The number of rows is a setting of the engine.

            Here eight requests arrive at once, each for {EQUAL} tokens. The first engine has two rows, the second has
            eight. Compare first token p99, nearly the longest time to a first token, and token gap p50, the median time
            between two tokens of a reply.
            """,
            panel="runs",
            run=side_by_side(ROWS, told=waits_and_gaps, shown=("time", "first_p99", "gap_p50")),
        ),
        Page(
            "A client disconnects",
            """
            A client may close its connection in the middle of a reply. When the server notices this, it tells the
            engine. The engine aborts the request before it plans another step.

            Here two chats with the same system prompt get replies. Then the second chat is cancelled: to the engine,
            this is the same. Soon the chat sends the same prompt again, while the first request still runs. The
            experiment uses a new engine with enough free blocks.
            """,
            panel="occupancy",
            code="engine.core.engine:Engine.abort",
            run=disconnect,
            predict=Prediction(
                "The same prompt arrives. Which of its tokens does the engine compute?",
                ("all", "those after the system prompt", "those after the last full block of the prompt"),
                (
                    "the abort would free all blocks of the request. But the first request holds some of them, too: "
                    "those of the system prompt.",
                    "the abort would free the request's other full blocks. But their keys and values are still right, "
                    "so they stay cached until room is needed.",
                    "",
                ),
            ),
        ),
        Page(
            "Limits and failures",
            """
            An HTTP response begins with a line that has a number, the status. If too many requests run or wait, the
            status is 429 (too many requests), and the response says when to try again (Retry-After). While the model
            loads, the status is 503 (not available). If the server cannot send a client's text for a long time, it
            ends the stream.

            If a step raises an exception, the requests of that step end with an error, and this engine continues. If
            the GPU itself fails, the engine process ends. /health reports this, and the server tries to start a new
            process. Until the new process is ready, the status is 503.
            """,
            code="minitui.server.errors",
        ),
    ),
    close,
    (
        Check(
            "How many requests run, and how many wait?",
            "lanes",
            "the batch lanes: a line such as “+ 2 waiting” counts requests that have no line.",
            lambda stage: (
                f"{sum(r.state == 'running' for r in stage.state().requests.values())} run, "
                f"{len(stage.state().queue)} wait"
            ),
        ),
        Check(
            "Which request is next?",
            "events",
            "the events: the newest line with `waits` has the request and the reason.",
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
