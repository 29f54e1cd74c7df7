"""L7: from HTTP to the engine and back."""

from __future__ import annotations

from engine.trace.state import ACTIVE, CACHED, FREE, SHARED
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.stage import Stage


async def hang_up(stage: Stage) -> Seen:
    """A client goes away in the middle of its answer."""
    sessions = [stage.chat(max_tokens=80, whole=True) for _ in range(2)]
    stage.show(sessions[0])
    for session, question in zip(sessions, ("What is the KV cache?", "What is prefill?"), strict=True):
        await stage.ask(session, question)
    await stage.step(12, seconds=0.15)
    gone = stage.request(sessions[1])
    other = stage.request(sessions[0])
    held, step = len(gone.table), stage.state().step
    shared = len(set(gone.table) & set(other.table))
    before = stage.state().counts[FREE]
    await stage.pause(1)
    stage.chats.cancel(sessions[1])
    await stage.until("the end of the request", lambda: gone.id not in stage.state().requests)
    state = stage.state()
    later = state.step - step
    return Seen(
        f"r{gone.id} held {held} blocks when its client hung up, {shared} of them, the system prompt's, together with "
        f"r{other.id}. "
        f"{'Before another step' if not later else f'{later} step later'} it was gone (reason “abort”) and its row was "
        f"free. Of its own {held - shared} blocks {state.counts[FREE] - before} became free, and "
        f"{state.counts[CACHED]}, which had been full, stayed as cache. The shared ones are r{other.id}'s alone now; "
        "it goes on, and nothing of it was touched.",
        0 if later <= 1 else 1,
    )


async def crowd(stage: Stage) -> Seen:
    """Eight clients at once on four rows."""
    sessions = [stage.chat(max_tokens=6, whole=True) for _ in range(8)]
    stage.show(sessions[0])
    for session in sessions:
        await stage.ask(session, "What is a token?")
    await stage.step(1, seconds=1.0)
    running = sum(r.state == "running" for r in stage.state().requests.values())
    waiting = len(stage.state().queue)
    metrics = await stage.answers(sessions)
    await stage.gate()
    figures = stage.figures()
    return Seen(
        f"After one step {running} ran and {waiting} waited. All {len(metrics)} replies were done after "
        f"{figures.steps} steps. Their prompts "
        f"had {figures.prompt_tokens:,} tokens, of which {figures.computed:,} were computed: the others found them in "
        "the tree.",
    )


async def close(stage: Stage) -> None:
    """Six clients on four rows."""
    for _ in range(6):
        session = stage.chat(max_tokens=30, whole=True)
        await stage.ask(session, "What is a token?")
    await stage.step(3)


LESSON = Lesson(
    7,
    "Server",
    "How do many people use one engine?",
    (
        Page(
            "Client, server, engine",
            """
            `minitui serve` puts HTTP in front of the same engine. The engine is a process of its own, as it is
            here; the server is another and talks to it over a socket: requests one way, text with ids the other.
            What it answers to:

              /v1/chat/completions, /v1/completions   the API that clients of OpenAI know
              /generate, /tokenize, /detokenize       the short way
              /v1/models, /health, /ready, /metrics   for machines that watch machines
              /minitui/...                            records and control, for minitui chat --connect

            Tokenising and checking are done in the server's process, not in the engine's. A request that is wrong (a
            negative temperature, an unknown field that matters, a prompt that can never fit) is refused with a
            sentence that names the field, and the engine never sees it.
            """,
            code="minitui.server.service:Service",
        ),
        Page(
            "A queue that ends",
            """
            Clients do not know of each other. What they send waits in the engine's queue, first come, first served.
            Here eight come at once to an engine of four rows, all with the same system prompt.
            """,
            panel="lanes",
            run=crowd,
        ),
        Page(
            "Somebody hangs up",
            """
            A client may close its connection in the middle of an answer. The server hears of it and tells the
            engine to abort. A request can be aborted wherever it stands: waiting, in the middle of its prompt, or
            with a token in flight.
            """,
            panel="occupancy",
            code="engine.core.engine:Engine.abort",
            run=hang_up,
            predict=Prediction(
                "After how many steps are its blocks given back?",
                ("at once, or one", "when its answer would have ended", "when somebody needs them"),
            ),
        ),
        Page(
            "Limits and failures",
            """
            Every queue has an end. When too much is waiting, the server answers 429 and says when to try again
            (Retry-After); while the model loads, 503. A client that reads slowly does not grow the server's memory
            without bound.

            If a step raises an exception, the requests of that step end with an error and the engine goes on. If
            the GPU itself has failed, its process must go: the server says so on /health, starts another, and
            answers 503 until it is there.

            Two figures tell how a server feels: the time to the first token (queue + prefill), and the time from
            token to token (the length of a step). A larger batch shortens the queue, but makes each step longer.
            `/metrics` has both as histograms.
            """,
            code="minitui.server.errors",
        ),
    ),
    close,
    (
        Check(
            "How many requests run, how many wait?",
            "lanes",
            "the batch lanes: rows that wait are drawn as queued.",
            lambda stage: (
                f"{sum(r.state == 'running' for r in stage.state().requests.values())} run, "
                f"{len(stage.state().queue)} wait"
            ),
        ),
        Check(
            "Who is next?",
            "events",
            "the events: who waits, and for what.",
            lambda stage: f"r{stage.state().queue[0]}" if stage.state().queue else "nobody",
        ),
        Check(
            "How many blocks have one holder, how many have several?",
            "occupancy",
            "the line of the KV pool: active blocks have one holder, shared ones several.",
            lambda stage: f"{stage.state().counts[ACTIVE]} are active, {stage.state().counts[SHARED]} shared",
        ),
    ),
    {"kv_blocks": 64, "max_num_seqs": 4},
)
