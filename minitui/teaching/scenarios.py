"""The demos, and their scenarios (those that compare two settings: contrast_scenarios.py). Each demo has its own small
engine. A scenario is a coroutine that gets a Stage. Replies are greedy and requests arrive in a fixed order, so every
run is the same. All figures are counted from the records of the run."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from engine.errors import EngineError
from engine.trace.views import CACHED, FREE, SHARED, NodeView
from minitui.chat.conversation import Sampling, Session
from minitui.chat.model_choice import load_codec
from minitui.sources.base import Source
from minitui.teaching.contrast_scenarios import batching, cache_on_off, chunked_prefill, fairness, speculation
from minitui.teaching.contrasts import CONTRASTS, QUESTIONS, paste
from minitui.teaching.hybrid import INTERVAL, OPTIONS, hybrid
from minitui.teaching.stage import Restart, Stage, plain_stage
from minitui.text import match_reason
from minitui.viewmodel.state.eviction import EvictionOrder


@dataclass(frozen=True)
class Demo:
    """A demo: its scenario, the limit of its replies in tokens, and the engine's options."""

    title: str
    play: Callable[[Stage], Awaitable[None]]
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict)


VOICES = (  # system prompts: their first words differ, and each fills at least one block
    "Alpha is the name you answer to. You explain inference engines to people who have never seen one, in short words.",
    "Bravo is the name you answer to. You explain inference engines to people who build them, with exact numbers.",
    "Charlie is the name you answer to. You explain inference engines to students, and you always give an example.",
    "Delta is the name you answer to. You explain inference engines to operators at night: first what to do, then why.",
)


def paste_of(stage: Stage, system: str, blocks: int) -> str:
    """Returns a long prompt that, with its system prompt, fills just over `blocks` blocks."""
    size = stage.source.info.block_size
    for lines in range(1, 1000):
        text = paste(lines)
        if len(stage.prompt(text, system)) > blocks * size:
            return text
    raise EngineError(f"no prompt fills {blocks} blocks of {size}")


# ---- shared-prefix


async def shared_prefix(stage: Stage) -> None:
    """Runs four chats with one system prompt: the prompt's blocks are computed once and shared by four requests."""
    size = stage.source.info.block_size
    first = stage.chats.sessions[0] if stage.chats.sessions else stage.chat()
    stage.show(first)
    await stage.gate()
    stage.say(
        "Chat 1 asks its first question. Nothing is cached, so the whole prompt is computed, system prompt included."
    )
    await stage.pause(3)
    await stage.ask(first, QUESTIONS[0])
    await stage.step()
    one = stage.request(first)
    stage.say(
        f"One step computed the {one.prompt_tokens} prompt tokens. They fill {one.prompt_tokens // size} blocks of "
        f"{size} tokens, which are now in the radix tree. The remaining {one.prompt_tokens % size} tokens are in "
        "another block. It is not full, so it is not shared. Chat 1 writes its reply, one token in each step."
    )
    stage.look("inspect")
    await stage.step(6, seconds=0.4)
    others = [stage.chat() for _ in range(3)]
    stage.say("Three more chats with the same system prompt ask other questions, all at the same moment.")
    await stage.pause(2)
    for session, question in zip(others, QUESTIONS[1:], strict=False):
        await stage.ask(session, question)
    await stage.run_until("hit")
    two = stage.request(others[0])
    cached = stage.view.history.lanes.lanes[two.id].request.cached_tokens
    shared = stage.state().counts[SHARED]
    stage.say(
        f"Chat 2 found {cached} of its {two.prompt_tokens} prompt tokens in the tree and computed only "
        f"{two.prompt_tokens - cached}. {shared} blocks are now shared by several requests: the same memory, no copies."
    )
    await stage.pause(4)
    await stage.slow(0.12)
    metrics = await stage.answers([first, *others])
    total, hit = sum(m["prompt_tokens"] for m in metrics), sum(m["cached_tokens"] for m in metrics)
    stage.say(
        f"The four prompts have {total} tokens in total: {hit} came from the cache and {total - hit} were computed. "
        f"The cache saved {hit / total:.0%}. Apart from rounding, the replies are the same as without the cache."
    )


# ---- eviction


def _blocks(stage: Stage) -> int:
    return stage.source.info.num_blocks


async def eviction(stage: Stage) -> None:
    """Fills the pool with cached prefixes, and shows that the least recently used prefix is evicted."""
    await stage.gate()
    names = ("Alpha", "Bravo", "Charlie")
    chats = [stage.chat(voice, name) for voice, name in zip(VOICES, names, strict=False)]
    stage.show(chats[0])
    stage.look("inspect")
    stage.say(
        f"The pool has {_blocks(stage)} blocks. Three chats with different system prompts, Alpha, Bravo and Charlie, "
        "ask a question."
    )
    for session in chats:
        await stage.ask(session, QUESTIONS[0])
        await stage.run_until("finish")
        await stage.pause(0.5)
    cached = stage.state().counts[CACHED]
    stage.say(
        f"All three replies have ended, and no request holds their blocks. {cached} blocks stay cached in the tree; "
        f"{stage.state().counts[FREE]} are free. Now Alpha asks again. This makes its blocks the most recently used."
    )
    await stage.pause(2)
    await stage.ask(chats[0], QUESTIONS[4])
    await stage.run_until("finish")
    newcomer = stage.chat(VOICES[3], "Delta")
    await stage.ask(newcomer, paste_of(stage, VOICES[3], stage.state().counts[FREE] + 5))
    owner = _owners(stage, chats)
    held: dict[str, list[int]] = {}  # in the order of eviction
    for node, block in EvictionOrder(stage.state()).blocks():
        held.setdefault(owner(node), []).append(block)
    order = list(held)
    await stage.predict(
        "Delta arrives and needs more blocks than are free. Whose blocks are evicted first?",
        [
            f"{session.title:<7}  blocks {' '.join(map(str, sorted(held[session.title])))}: "
            + ", ".join(
                f"r{lane.id} until step {lane.finish_step}"
                for lane in stage.view.history.lanes.lanes.values() if lane.request.group == session.id
            )
            for session in chats
        ],
    )
    before = {node.id: node for node in stage.state().copy().nodes.values()}
    await stage.run_until("eviction")
    records = [event.record for event in stage.events("evict")]
    evicted = " and then ".join(f"{record.blocks} of {owner(before[record.node])}" for record in records)
    stage.say(
        f"{stage.verdict(names.index(order[0]))}Evicted blocks: {evicted}, because {records[0].reason}. "
        "Of the blocks that no request holds, the least recently used are evicted first: the order was "
        f"{', '.join(order)}. Alpha asked last, so its blocks are evicted last."
    )
    await stage.read_answer()
    await stage.answers([newcomer])
    await stage.gate()
    first = order[0]
    repeat = stage.chat(chats[names.index(first)].system, f"{first} again")
    await stage.ask(repeat, QUESTIONS[0])
    (metrics,) = await stage.answers([repeat])
    match = metrics["match"]
    stage.say(
        f"Then {first} asks its first question again: {metrics['cached_tokens']} of its {metrics['prompt_tokens']} "
        f"prompt tokens are still cached. The engine gives the reason: "
        f"{match_reason(match['stop'], match['at'], metrics['cached_tokens'])}."
    )


def _owners(stage: Stage, chats: list[Session]) -> Callable[[NodeView], str]:
    """Returns a function from a node to the title of the chat that contains the node's text."""

    def owner(node: NodeView) -> str:
        for session in chats:
            text = stage.view.texts.decode(session.ids)
            if stage.view.texts.decode(node.ids).strip() in text:
                return session.title
        raise EngineError("the evicted node belongs to none of the chats")

    return owner


# ---- preemption


async def preemption(stage: Stage) -> None:
    """Fills the pool with running requests, until one is preempted; later it resumes."""
    chats = [stage.chat("", max_tokens=120, whole=True) for _ in range(4)]
    stage.show(chats[0])
    await stage.gate()
    stage.look("inspect")
    stage.say(
        f"The pool has {_blocks(stage)} blocks. Four chats write long replies. Together they will need more than "
        f"{_blocks(stage)} blocks."
    )
    ids = [await stage.ask(session, question) for session, question in zip(chats, QUESTIONS, strict=False)]
    await stage.step(4, seconds=0.4)

    def full() -> bool:
        state = stage.state()
        if state.counts[FREE] or state.counts[CACHED]:
            return False
        # The next token of a request needs a block that it does not have.
        running = [r for r in state.requests.values() if r.state == "running"]
        return any(state.computed(r) >= len(r.table) * state.block_size for r in running)

    await stage.step_until("a full pool", full, seconds=0.04)
    state = stage.state()
    lengths = ", ".join(f"r{r.id} holds {len(r.table)}" for r in state.requests.values())
    stage.say(f"The pool is full, no block is cached, and a request needs another block: {lengths}.")
    await stage.pause(1.5)
    await stage.predict(
        "Which request is preempted and releases its blocks? They arrived in this order.", [f"r{id}" for id in ids]
    )
    await stage.run_until("preemption")
    record = stage.events("preempt")[-1].record
    stage.say(
        f"{stage.verdict(ids.index(record.request))}Why: {record.reason}. So r{record.request}, the youngest, releases "
        f"its {record.blocks} blocks and waits at the head of the queue. The tokens of its reply are kept. Its full "
        "blocks stay in the tree until other requests need the memory. What is not in the tree then is computed again."
    )
    await stage.read_answer()
    await stage.slow(0.03)
    metrics = await stage.answers(chats)
    times = sorted(((id, metric["preemptions"]) for id, metric in zip(ids, metrics, strict=True)), reverse=True)
    preempted = " and ".join(f"r{id} {'once' if n == 1 else f'{n} times'}" for id, n in times if n)
    stage.say(
        f"Each of the four replies has {metrics[0]['output_tokens']} tokens. Preempted: {preempted}. A preempted "
        "request computes again what is no longer cached, and continues with the next token."
    )


# ---- fork


async def fork(stage: Stage) -> None:
    """Continues one conversation in four chats, which share the blocks before the first difference."""
    trunk = stage.chat(title="trunk", max_tokens=40)
    stage.show(trunk)
    await stage.gate()
    stage.say("One chat asks a question and gets a reply.")
    await stage.ask(trunk, QUESTIONS[1])
    stage.look("inspect")
    await stage.step(5, seconds=0.3)
    await stage.answers([trunk])
    await stage.gate()
    forks = [stage.chats.fork(trunk) for _ in range(4)]
    stage.say("Four chats are forked from this chat. Each fork asks a different question, at the same moment.")
    await stage.pause(2)
    for session, question in zip(forks, (QUESTIONS[0], QUESTIONS[2], QUESTIONS[3], QUESTIONS[5]), strict=True):
        await stage.ask(session, question)
    await stage.step(3, seconds=1.0)
    requests = [stage.request(session) for session in forks]
    same = len(list(takewhile(lambda blocks: len(set(blocks)) == 1, zip(*(r.table for r in requests), strict=False))))
    size = stage.source.info.block_size
    rows = [
        f"   r{r.id}  {' '.join(str(b) for b in r.table[max(0, same - 4) : same])} | "
        f"{' '.join(str(b) for b in r.table[same:])}" for r in requests
    ]
    stage.say(
        f"These are the four block tables. Their first {same} blocks, {same * size} tokens, are the same physical "
        "blocks. Each line begins with the last four of them. A block after the sign | belongs to one request only. "
        "The last block of each line is not full yet:\n"
        + "\n".join(rows)
    )
    await stage.pause(5)
    held = sum(len(r.table) for r in requests)
    distinct = len({block for r in requests for block in r.table})
    metrics = await stage.answers(forks)
    cached = sum(m["cached_tokens"] for m in metrics)
    total = sum(m["prompt_tokens"] for m in metrics)
    stage.say(
        f"The four tables had {held} entries but used only {distinct} blocks. Without sharing, they would use {held}. "
        f"{cached} of {total} prompt tokens were not computed again ({cached / total:.0%})."
    )


def _of(name: str, title: str, play: Callable[[Stage], Awaitable[None]]) -> Demo:
    """Returns the demo of a contrast; its engine begins with the first setting."""
    contrast = CONTRASTS[name]
    return Demo(title, play, contrast.max_tokens, contrast.engine(contrast.first))


DEMOS = {
    "shared-prefix": Demo("four chats share the blocks of one system prompt", shared_prefix, 48, {"kv_blocks": 64}),
    "cache": _of("cache", "the same six requests with the prefix cache off and on", cache_on_off),
    "chunked-prefill": _of(
        "chunked-prefill", "a long prompt while other replies run: in one step and in chunks", chunked_prefill
    ),
    "fairness": _of(
        "fairness", "a long prompt and many short ones while replies run, without and with a target for gaps", fairness
    ),
    "eviction": Demo("a full pool: predict whose blocks are evicted", eviction, 24, {"kv_blocks": 18}),
    "preemption": Demo(
        "a pool that is too small: predict which request is preempted", preemption, 120, {"kv_blocks": 24}
    ),
    "fork": Demo("one conversation with four continuations", fork, 24, {"kv_blocks": 64}),
    "batching": _of("batching", "static and continuous batching", batching),
    "hybrid": Demo(
        "recurrent states: a shift of about 100 tokens, and no checkpoint is in the shared text", hybrid, 4,
        OPTIONS | {"checkpoint_interval": INTERVAL},
    ),
    "speculation": _of("speculation", "draft tokens copied from the text, several checked in one step", speculation),
}


async def print_demo(
    demo: Demo, source: Source, system: str, sampling: Sampling, load: Any = load_codec, beat: float = 0.0,
    restart: Restart | None = None,
) -> int:
    """Plays a demo and prints its texts; returns the exit code. `load`: loads the codec of a model. `beat`: scales all
    pauses. `restart`: starts another engine."""
    began = time.monotonic()

    def say(text: str) -> None:
        source.name_groups(stage.chats.names)
        first, *rest = text.split("\n")
        lines = [f"{time.monotonic() - began:5.1f} s  {first}", *(f"         {line}" for line in rest)]
        print("\n".join(lines), flush=True)

    async def named_restart(changes: dict[str, Any]) -> None:
        assert restart is not None
        source.name_groups(stage.chats.names)  # now, because the new engine is recorded in another file
        await restart(changes)

    async with plain_stage(
        source, sampling, load, system=system, say=say, restart=named_restart if restart else None, beat=beat
    ) as stage:
        try:
            await demo.play(stage)
        finally:
            source.name_groups(stage.chats.names)
    return 0
