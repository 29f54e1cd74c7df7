"""L8: the tree of prefixes that are known."""

from __future__ import annotations

from engine.trace.state import FREE, SHARED
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.scenarios import QUESTIONS, VOICES, leaves, paste_of
from minitui.teaching.stage import Stage
from minitui.viewmodel.events import stop_text


async def replay(stage: Stage) -> Seen:
    """The same system prompt twice, with different questions."""
    first = stage.chat(max_tokens=12, whole=True)
    stage.show(first)
    await stage.ask(first, QUESTIONS[0])
    await stage.step(4, seconds=0.5)
    second = stage.chat(max_tokens=12, whole=True)
    id = await stage.ask(second, QUESTIONS[1])
    await stage.run_until("hit")
    await stage.pause(1.5)
    record = stage.events("hit")[-1].record
    lane = stage.view.lanes.lanes[id]
    size = stage.source.info["block_size"]
    return Seen(
        f"r{id} took {record[4]} of its {lane.prompt_tokens} prompt tokens from the tree, {record[4] // size} whole "
        "blocks, and computed "
        f"{lane.prompt_tokens - record[4]}: {record[4] / lane.prompt_tokens:.0%} of its prefill saved. Why not more? "
        f"The engine says: {stop_text(record[5], record[6])}. What it looks up are the whole blocks before the last "
        "token, and all of them were there; the questions differ only behind them.",
        1 if 0 < record[4] < lane.prompt_tokens else 0,
    )


async def shared_system_prompt(stage: Stage) -> Seen:
    """Six chats with one system prompt, all at once."""
    sessions = [stage.chat(max_tokens=8, whole=True) for _ in QUESTIONS]
    stage.show(sessions[0])
    for session, question in zip(sessions, QUESTIONS, strict=True):
        await stage.ask(session, question)
    await stage.step(2, seconds=1.0)
    shared = stage.state().counts[SHARED]
    await stage.answers(sessions)
    await stage.gate()
    figures = stage.figures()
    rows = [
        ("without", float(figures.prompt_tokens), f"{figures.prompt_tokens:,} tokens"),
        ("with", float(figures.computed), f"{figures.computed:,} tokens"),
    ]
    return Seen(
        "All six came in the same moment, and none was computed before. Still the system prompt was computed once: "
        f"of {figures.prompt_tokens:,} prompt tokens the engine computed {figures.computed:,} and shared "
        f"{figures.cached:,}, {figures.share_cached:.0%} of the prefill saved. Both are counted from the records, step "
        "by step and hit by hit; the first of the six, which paid for all, is included. "
        f"{shared} blocks were held by several at once.\n\n{stage.bars(rows)}",
        2 if figures.share_cached > 0.5 else 0,
    )


async def touch_and_evict(stage: Stage) -> Seen:
    """The least recently used leaf goes first."""
    chats = [stage.chat(voice, name, max_tokens=8, whole=True) for voice, name in zip(VOICES, ("A", "B"), strict=False)]
    for session in (chats[0], chats[1], chats[0]):
        await stage.ask(session, QUESTIONS[0])
        await stage.run_until("finish")
    stage.show(chats[0])
    expected, free = leaves(stage.state())[0].id, stage.state().counts[FREE]
    whose = {
        node.id: "B" if "Bravo" in stage.view.decode(node.ids) else "A"
        for node in stage.state().nodes.values()
        if node.id
    }
    await stage.pause(1.5)
    big = stage.chat(VOICES[2], "C", max_tokens=8, whole=True)
    await stage.ask(big, paste_of(stage, VOICES[2], free + 2))
    await stage.run_until("eviction")
    gone = [event.record[3:] for event in stage.events("evict")]
    blocks = ", then ".join(f"{n} of {whose[node]}'s blocks" for node, n, _ in gone)
    return Seen(
        f"C needed room. The record says “{gone[0][2]}”: so many blocks, and of the pool's "
        f"{stage.source.info['num_blocks']} only {free} were free. Out of the tree went {blocks}. A came first, but "
        "was used again after B, and every use makes it young again.",
        (0 if whose[gone[0][0]] == "A" else 1) if gone[0][0] == expected else 2,
    )


async def close(stage: Stage) -> None:
    """Three chats that share a system prompt, standing."""
    for question in QUESTIONS[:3]:
        session = stage.chat(max_tokens=30, whole=True)
        stage.show(session)
        await stage.ask(session, question)
        await stage.step(2)


def _trunk(stage: Stage) -> str:
    state = stage.state()
    trunk = max((n for n in state.nodes.values() if n.id), key=lambda n: n.users)
    return f"{len(trunk.blocks)} blocks, {len(trunk.ids)} tokens, held by {trunk.users} requests"


def _hit(stage: Stage) -> str:
    lane = stage.view.lanes.lanes[max(stage.view.lanes.lanes)]
    return f"{lane.cached_tokens} of {lane.prompt_tokens}"


LESSON = Lesson(
    8,
    "Radix cache",
    "How does a prompt find what others have computed before?",
    (
        Page(
            "What can be shared",
            """
            Keys and values of a token depend on all tokens before it and on nothing else. So two prompts that begin
            alike have, for that beginning, the same keys and values, rounding aside. It is enough to compute them
            once.

            A passage in the middle of two prompts that begin differently cannot be shared, even if it is the same
            word for word: what stands before it is part of its keys and values.

            What sharing saves is prefill: the first token comes sooner, and the device has more time for others.
            Once a reply is being written, it is not written faster; and it is the same reply as without the cache,
            rounding aside (L4 tells more).
            """,
        ),
        Page(
            "A tree of blocks",
            """
            The engine keeps a tree of what is in the pool. A node is a run of whole blocks with their token ids;
            its children are found by the ids of their first block. To look up a prompt means to walk down: one
            dictionary access for each node. Where a prompt leaves a node in the middle, the node is split at the
            block boundary, and the common part becomes a parent.

            Only whole blocks are shared, and a shared block is never written again. The block that a request is
            filling belongs to it alone. And the last token of a prompt is never taken from the tree, because its
            logits are needed: even a prompt that is known completely computes at least one token. (The idea is
            SGLang's RadixAttention.)
            """,
            code="engine.core.radix:RadixTree.match",
        ),
        Page(
            "The same beginning, another question",
            """
            Two chats with the same system prompt. The first has been computed and stands in the tree; the second
            asks something else.
            """,
            panel="tree",
            run=replay,
            predict=Prediction(
                "How much of the second prompt is computed?",
                (
                    "all of it",
                    "what comes after the last whole block that both have in common",
                    "exactly what differs",
                    "only its last token",
                ),
            ),
        ),
        Page(
            "All at the same time",
            """
            Six chats with one system prompt arrive together, in an empty engine. None of them has been computed
            when the first step is planned. But a prompt's blocks are published when the step that writes them is
            planned, marked as pending: every layer writes all keys of a step before it reads any, so the others may
            rely on them in the same step. (A reply's blocks are published when their step is committed: before that
            its tokens are not known.)
            """,
            panel="tree",
            code="engine.core.cache:KVCache.publish_planned",
            run=shared_system_prompt,
            predict=Prediction(
                "How often is the system prompt computed?",
                ("six times: nobody could know it", "twice: the others wait for the next step", "once"),
            ),
        ),
        Page(
            "What goes, and when",
            """
            When a request ends, its blocks stay in the tree as long as nobody needs them: a cache costs nothing
            while there is room. If room is needed, leaves that nobody holds are evicted, the least recently used
            first, whole or from their end. A block that a request holds is never evicted. What was evicted is
            remembered for a while, so that a later miss can say when it was still a hit.

            Chats A and B have different prompts. The order of use is A, B, A. Then C comes with a long text.
            """,
            panel="tree",
            code="engine.core.radix:RadixTree.evict",
            run=touch_and_evict,
            predict=Prediction(
                "Whose blocks are evicted first?",
                ("A's: it came first", "B's: it was used longest ago", "both, in equal parts"),
            ),
        ),
        Page(
            "Why a hit fails",
            """
            Under every answer in the chat stands how much of its prompt came from the cache, and why not more:

              all that can be shared           all whole blocks before the last token
              differs at token n               in one of those: often it is a date or a name
              no more is cached                a block is kept once it is full
              nothing cached begins like this  the first token is new
              shorter than a block             the prompt has no more than 16 tokens
              evicted at step n                the next block was there, and had to go

            To profit from the cache, put what is always the same first, and what changes last. One changed token at
            the beginning of a system prompt makes everything after it new.
            """,
            panel="events",
        ),
    ),
    close,
    (
        Check(
            "How long is the prefix that all three chats share, and who holds it?",
            "tree",
            "the radix tree: the node at the top of the branch, its tokens and users.",
            _trunk,
        ),
        Check(
            "How many blocks are shared?",
            "occupancy",
            "the line of the KV pool: shared are those with two holders or more.",
            lambda stage: f"{stage.state().counts[SHARED]}",
        ),
        Check(
            "How many prompt tokens did the third chat take from the tree?",
            "events",
            "the events: the last hit, with what was taken and why it stopped.",
            _hit,
        ),
    ),
    {"kv_blocks": 32},
)
