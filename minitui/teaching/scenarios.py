"""The scenarios of the demos. Each demo has its own small engine.

A scenario is a coroutine that gets a Stage. Replies are greedy and requests arrive in a fixed order, so every run is
the same. All figures are counted from the records of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from statistics import median
from typing import Any

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.trace.state import State
from engine.trace.views import CACHED, FREE, SHARED, NodeView
from minitui.chat.conversation import Session
from minitui.teaching.contrasts import (
    CONTRASTS,
    LENGTHS,
    QUESTIONS,
    WRITERS,
    Contrast,
    ask_again,
    paste,
)
from minitui.teaching.stage import Figures, Stage
from minitui.text import duration, match_reason
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
from minitui.viewmodel.runs import Run

GPU_RECORDING = "h200-8b"  # a bundled recording


@dataclass(frozen=True)
class Demo:
    """A demo: its scenario, the limit of its answers in tokens, and the engine's options."""

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
    assert stage.chats.codec is not None
    size = stage.source.info["block_size"]
    for lines in range(1, 1000):
        text = paste(lines)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        if len(stage.chats.codec.apply_chat_template(messages)) > blocks * size:
            return text
    raise EngineError(f"no prompt fills {blocks} blocks of {size}")


# ---- shared-prefix


async def shared_prefix(stage: Stage) -> None:
    """Runs four chats with one system prompt: the prompt's blocks are computed once and shared by four requests."""
    size = stage.source.info["block_size"]
    first = stage.chats.sessions[0] if stage.chats.sessions else stage.chat()
    stage.show(first)
    await stage.gate()
    stage.tell(
        "Chat 1 asks its first question. Nothing is cached, so the whole prompt is computed, system prompt included."
    )
    await stage.pause(3)
    await stage.ask(first, QUESTIONS[0])
    await stage.step()
    one = stage.request(first)
    stage.tell(
        f"One step computed the {one.prompt_tokens} prompt tokens. They fill {one.prompt_tokens // size} blocks of "
        f"{size} tokens, which are now in the radix tree. The remaining {one.prompt_tokens % size} tokens are in "
        "another block, which is not shared. Chat 1 writes its answer, one token in each step."
    )
    stage.look("inspect")
    await stage.step(6, seconds=0.4)
    others = [stage.chat() for _ in range(3)]
    stage.tell("Three more chats with the same system prompt ask other questions, all at the same moment.")
    await stage.pause(2)
    for session, question in zip(others, QUESTIONS[1:], strict=False):
        await stage.ask(session, question)
    await stage.run_until("hit")
    two = stage.request(others[0])
    cached = stage.view.lanes.lanes[two.id].cached_tokens
    shared = stage.state().counts[SHARED]
    stage.tell(
        f"Chat 2 found {cached} of its {two.prompt_tokens} prompt tokens in the tree and computed only "
        f"{two.prompt_tokens - cached}. {shared} blocks are now shared by several requests: the same memory, no copies."
    )
    await stage.pause(4)
    await stage.slow(0.12)
    metrics = await stage.answers([first, *others])
    total, hit = sum(m["prompt_tokens"] for m in metrics), sum(m["cached_tokens"] for m in metrics)
    stage.tell(
        f"The four prompts have {total} tokens in total: {hit} came from the cache and {total - hit} were computed. "
        f"The cache saved {hit / total:.0%}. Apart from rounding, the answers are the same as without the cache."
    )


# ---- cache


async def _first(stage: Stage, contrast: Contrast) -> Figures:
    """Does the work of a contrast under its first setting, which the engine already has."""
    await stage.begin_run(contrast.first.name, first=True)
    return await _worked(stage, contrast)


async def _second(stage: Stage, contrast: Contrast) -> Figures:
    """Does the work under the second setting, in another engine, and shows both runs side by side."""
    await stage.other_engine(**contrast.second.options)
    await stage.begin_run(contrast.second.name)
    figures = await _worked(stage, contrast)
    stage.look("compare")
    return figures


async def _worked(stage: Stage, contrast: Contrast) -> Figures:
    stage.begin_count()
    await contrast.work(stage)
    await stage.settle()
    return stage.figures()


async def cache_on_off(stage: Stage) -> None:
    """Runs the same six requests without the prefix cache, and then with it."""
    contrast = CONTRASTS["cache"]
    stage.tell("The prefix cache is off. Six chats with the same system prompt ask at once. Every prompt is computed.")
    await stage.pause(1.5)
    without = await _first(stage, contrast)
    stage.tell(
        f"Without the cache {without.computed} prompt tokens were computed. "
        "Now the same six requests run in an engine with the cache on."
    )
    with_cache = await _second(stage, contrast)
    rows = [
        ("cache off", without.computed, f"{without.computed:,} tokens computed"),
        ("cache on", with_cache.computed, f"{with_cache.computed:,} computed, {with_cache.cached:,} shared"),
    ]
    stage.tell(
        f"The prompts ({with_cache.prompt_tokens:,} tokens) and the answers were the same. "
        f"The cache saved {with_cache.share_cached:.0%} of the prefill.\n{stage.bars(rows)}\n"
        f"The prompts took {without.prefill_ms:,.0f} ms without the cache and {with_cache.prefill_ms:,.0f} ms with it. "
        "One step computed the first request's blocks. The other five requests shared them in that step."
    )


# ---- chunked-prefill

def _pasted(stage: Stage) -> tuple[float, int, int, float]:
    """Returns (longest gap between two tokens of a reply in ms, tokens of the long prompt, number of steps that
    computed the prompt, time from its first step to its first token in ms)."""
    run = Run(stage.view)
    lane = run.lanes[-1]
    assert lane.ttft is not None and run.figures.longest is not None
    chunks = sum(
        any(chunk[0] == lane.id for chunk in stage.view.steps.chunks(step)) for step in range(run.first, run.last + 1)
    )
    return run.figures.longest.ms, lane.prompt_tokens, chunks, lane.ttft[1]


async def chunked_prefill(stage: Stage) -> None:
    """Computes a long prompt at once, and then in chunks, while three chats write."""
    contrast = CONTRASTS["chunked-prefill"]
    stage.tell(
        f"Chunked prefill is off. {WRITERS} chats write, each one token in a step. Then a user pastes a long text."
    )
    await stage.pause(1.5)
    await _first(stage, contrast)
    at_once, tokens, _, whole = _pasted(stage)
    stage.tell(
        f"All {tokens:,} tokens of the long prompt were computed in one step. The {WRITERS} writing chats waited for "
        f"it: {at_once:,.0f} ms without a token. Now the same with chunks: no step may compute more than "
        f"{stage.source.info['max_num_batched_tokens']} tokens."
    )
    await _second(stage, contrast)
    chunked, tokens, chunks, in_chunks = _pasted(stage)
    rows = [
        ("at once", at_once, f"{at_once:,.0f} ms without a token"),
        ("in chunks", chunked, f"{chunked:,.0f} ms at most, {chunks} chunks"),
    ]
    stage.tell(
        f"The longest wait of a writing chat for its next token, while {tokens:,} prompt tokens were computed:\n"
        f"{stage.bars(rows)}\n"
        f"The first token of the long prompt itself came after {in_chunks:,.0f} ms instead of {whole:,.0f} ms"
        + (": its chunks share steps with decoding requests." if in_chunks > whole else ".")
    )


# ---- eviction


def _blocks(stage: Stage) -> int:
    return stage.source.info["num_blocks"]


def leaves(state: State) -> list[NodeView]:
    """Returns the nodes that can be evicted now, in the order of eviction."""
    free = [node for node in state.nodes.values() if node.id and not node.children and not node.users]
    return sorted(free, key=lambda node: (node.last_used, node.id))


async def eviction(stage: Stage) -> None:
    """Fills the pool with cached prefixes, and shows that the least recently used prefix is evicted."""
    await stage.gate()
    names = ("Alpha", "Bravo", "Charlie")
    chats = [stage.chat(voice, name) for voice, name in zip(VOICES, names, strict=False)]
    stage.show(chats[0])
    stage.look("inspect")
    stage.tell(
        f"The pool has {_blocks(stage)} blocks. Three chats with different system prompts, Alpha, Bravo and Charlie, "
        "ask a question."
    )
    for session in chats:
        await stage.ask(session, QUESTIONS[0])
        await stage.run_until("finish")
        await stage.pause(0.5)
    cached = stage.state().counts[CACHED]
    stage.tell(
        f"All three answers have ended, and no request holds their blocks. {cached} blocks stay cached in the tree; "
        f"{stage.state().counts[FREE]} are free. Now Alpha asks again. This makes its blocks the most recently used."
    )
    await stage.pause(2)
    await stage.ask(chats[0], QUESTIONS[4])
    await stage.run_until("finish")
    newcomer = stage.chat(VOICES[3], "Delta")
    await stage.ask(newcomer, paste_of(stage, VOICES[3], stage.state().counts[FREE] + 5))
    owner = _owners(stage, chats)
    order = list(dict.fromkeys(owner(node) for node in leaves(stage.state())))
    await stage.predict("Delta arrives and needs more blocks than are free. Whose blocks are evicted first?", names)
    before = {node.id: node for node in stage.state().copy().nodes.values()}
    await stage.run_until("eviction")
    records = [event.record for event in stage.events("evict")]
    evicted = " and then ".join(f"{record[4]} of {owner(before[record[3]])}" for record in records)
    stage.tell(
        f"{stage.verdict(names.index(order[0]))}Evicted blocks: {evicted}, because {records[0][5]}. "
        "Of the blocks that no request holds, the least recently used are evicted first: the order was "
        f"{', '.join(order)}. Alpha asked last, so its blocks are evicted last."
    )
    await stage.pause(4)
    await stage.answers([newcomer])
    await stage.gate()
    first = order[0]
    repeat = stage.chat(chats[names.index(first)].system, f"{first} again")
    await stage.ask(repeat, QUESTIONS[0])
    (metrics,) = await stage.answers([repeat])
    match = metrics["match"]
    stage.tell(
        f"Then {first} asks its first question again: {metrics['cached_tokens']} of its {metrics['prompt_tokens']} "
        f"prompt tokens are still cached. The engine gives the reason: {match_reason(match['stop'], match['at'])}."
    )


def _owners(stage: Stage, chats: list[Session]) -> Callable[[NodeView], str]:
    """Returns a function from a node to the title of the chat that contains the node's text."""

    def owner(node: NodeView) -> str:
        for session in chats:
            text = stage.view.decode(session.ids)
            if stage.view.decode(node.ids).strip() in text:
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
    stage.tell(
        f"The pool has {_blocks(stage)} blocks. Four chats write long answers. Together they will need more than "
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
    stage.tell(f"The pool is full, no block is cached, and a request needs another block: {lengths}.")
    await stage.pause(1.5)
    await stage.predict("Which request is preempted and releases its blocks?", [f"r{id}" for id in ids])
    await stage.run_until("preemption")
    record = stage.events("preempt")[-1].record
    stage.tell(
        f"{stage.verdict(ids.index(record[3]))}Why: {record[4]}. So r{record[3]}, the youngest, releases its "
        f"{record[5]} blocks and waits at the head of the queue. The tokens of its reply are kept. Its full blocks "
        "stay in the tree until other requests need the memory. Evicted blocks are computed again, like a prompt."
    )
    await stage.pause(4)
    await stage.slow(0.03)
    metrics = await stage.answers(chats)
    times = {id: metric["preemptions"] for id, metric in zip(ids, metrics, strict=True)}
    preempted = " and ".join(f"r{id} {_times(times[id])}" for id in sorted(ids, reverse=True) if times[id])
    stage.tell(
        f"Each of the four answers has {metrics[0]['output_tokens']} tokens. Preempted: {preempted}. A preempted "
        "request computes its evicted blocks again and continues with the next token."
    )


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"


# ---- fork


async def fork(stage: Stage) -> None:
    """Continues one conversation in four chats, which share the blocks before the first difference."""
    trunk = stage.chat(title="trunk", max_tokens=40)
    stage.show(trunk)
    await stage.gate()
    stage.tell("One chat asks a question and gets an answer.")
    await stage.ask(trunk, QUESTIONS[1])
    stage.look("inspect")
    await stage.step(5, seconds=0.3)
    await stage.answers([trunk])
    await stage.gate()
    forks = [stage.chats.fork(trunk) for _ in range(4)]
    stage.tell("Four chats are forked from this chat. Each fork asks a different question, at the same moment.")
    await stage.pause(2)
    for session, question in zip(forks, (QUESTIONS[0], QUESTIONS[2], QUESTIONS[3], QUESTIONS[5]), strict=True):
        await stage.ask(session, question)
    await stage.step(3, seconds=1.0)
    requests = [stage.request(session) for session in forks]
    same = len(list(takewhile(lambda blocks: len(set(blocks)) == 1, zip(*(r.table for r in requests), strict=False))))
    size = stage.source.info["block_size"]
    rows = [
        f"   r{r.id}  {' '.join(str(b) for b in r.table[max(0, same - 4) : same])} | "
        f"{' '.join(str(b) for b in r.table[same:])}" for r in requests
    ]  # fmt: skip
    stage.tell(
        f"These are the four block tables. Their first {same} blocks, {same * size} tokens, are the same physical "
        "blocks; the rows begin with the last four of them. A block after the sign | belongs to one request only. The "
        "last block of each request is being written:\n"
        + "\n".join(rows)
    )
    await stage.pause(5)
    held = sum(len(r.table) for r in requests)
    distinct = len({block for r in requests for block in r.table})
    metrics = await stage.answers(forks)
    cached = sum(m["cached_tokens"] for m in metrics)
    total = sum(m["prompt_tokens"] for m in metrics)
    stage.tell(
        f"The four tables had {held} entries but used only {distinct} blocks. Without sharing they would use {held}. "
        f"{cached} of {total} prompt tokens were not computed again ({cached / total:.0%})."
    )


# ---- batching

async def batching(stage: Stage) -> None:
    """Writes eight replies of different lengths in four rows, with static and then with continuous batching."""
    stage.tell(
        f"Static batching: {len(LENGTHS)} replies of {min(LENGTHS)} to {max(LENGTHS)} tokens, four rows. "
        "The next four start when all of the first four have ended."
    )
    await stage.pause(2)
    contrast = CONTRASTS["batching"]
    static = await _first(stage, contrast)
    times = [Run(stage.view).figures.time]
    stage.tell(
        f"That took {static.steps} steps. Now the same replies with continuous batching: a finished request frees its "
        "row at once."
    )
    continuous = await _second(stage, contrast)
    times.append(Run(stage.view).figures.time)
    rows = [
        (name, run.steps, f"{run.steps} steps, {duration(time)}")
        for name, run, time in zip(("static", "continuous"), (static, continuous), times, strict=True)
    ]
    step_times = await _step_times(static.decode_step_ms, "row", "rows")
    less = times[1] * static.steps > times[0] * continuous.steps
    stage.tell(
        f"The same {sum(LENGTHS)} tokens in the same four rows:\n{stage.bars(rows)}\n{step_times} "
        "Continuous batching keeps the rows full, so it needs fewer steps."
        + " The time differs less: steps with more rows take longer, and all wait while a prompt is computed." * less
    )


async def _step_times(times: dict[int, float], one: str, several: str) -> str:
    """Returns sentences on the smallest and the largest decode steps, here and on a GPU. `times`: tokens -> ms."""
    least, most = min(times), max(times)
    model, device, there = await asyncio.to_thread(recorded_decode_ms, GPU_RECORDING)
    few, many = min(there), max(n for n in there if n <= most)
    return (
        f"Here, a decode step with {least} {one if least == 1 else several} took {times[least]:.1f} ms, and one with "
        f"{most} {several} took {times[most]:.1f} ms. In the recording of {model} on an {device}: {there[few]:.1f} ms "
        f"with {few}, {there[many]:.1f} ms with {many}."
    )


@cache
def recorded_decode_ms(name: str) -> tuple[str, str, dict[int, float]]:
    """Returns the model and the device of a bundled recording, and {rows: median ms} of its decode steps."""
    reader = TraceReader(bundled()[name])
    rows: dict[int, int] = {}  # step -> rows
    times: dict[int, list[float]] = {}
    for record in reader.records():
        if record[2] == "step" and not record[4]:
            rows[record[3]] = record[7]
        elif record[2] == "time" and record[3] in rows:
            times.setdefault(rows[record[3]], []).append(record[7])
    return reader.info["model"], reader.info["device"], {n: median(some) for n, some in times.items()}


# ---- speculation


async def speculation(stage: Stage) -> None:
    """Writes the same answer without and with speculation, which copies drafts from the text and checks them."""
    stage.tell(
        "A chat asks a question, and then the same question again. The second answer repeats the first, token for "
        "token. Without speculation each token still needs its own step."
    )
    await stage.pause(2)
    contrast = CONTRASTS["speculation"]
    await stage.begin_run(contrast.first.name, first=True)
    session = await ask_again(stage)
    await stage.slow(0.05)
    [metrics] = await stage.answers([session])
    without = stage.figures()
    tokens = metrics["output_tokens"]
    stage.tell(f"The second answer has {tokens} tokens and took {without.steps} steps. Now with prompt lookup.")
    await stage.other_engine(**contrast.second.options)
    await stage.begin_run(contrast.second.name)
    session = await ask_again(stage)
    stage.tell(
        "Prompt lookup searches the earlier text for the last three tokens. The tokens after the place found, at most "
        f"{EngineConfig.speculative_tokens}, are drafts: guesses of the next tokens. The next step computes the drafts "
        "together with the last token, and samples at each position as usual. A draft is accepted only if it equals "
        "the sampled token. So the answer stays the same; only the number of steps changes."
    )
    await stage.pause(4)
    await stage.predict(
        f"How many steps does the same answer of {tokens} tokens take now?",
        [f"{without.steps}, as before", f"{without.steps // 2}, half as many", f"fewer than {without.steps // 4}"],
    )
    await stage.step_until("an accepted draft", lambda: stage.last_row().accepted > 0, seconds=0.5)
    row = stage.last_row()
    request, drafted, accepted = row.drafts[0]
    stage.tell(
        f"Step {row.step} computed {row.tokens} tokens for r{request}: its last token and {drafted} drafts. "
        f"{accepted} drafts were accepted, and the token sampled after them is used, too: {accepted + 1} tokens in "
        "one step."
    )
    await stage.pause(4)
    await stage.slow(0.25)
    await stage.answers([session])
    drafting = stage.figures()
    stage.look("compare")
    rows = [
        ("one by one", without.steps, f"{without.steps} steps, {without.decode_ms:,.0f} ms"),
        ("with drafts", drafting.steps, f"{drafting.steps} steps, {drafting.decode_ms:,.0f} ms"),
    ]
    times = await _step_times(without.decode_step_ms | drafting.decode_step_ms, "token", "tokens")
    right = 2 if drafting.steps < without.steps // 4 else 1 if drafting.steps < without.steps else 0
    stage.tell(
        f"{stage.verdict(right)}The same {tokens} tokens of the second answer:\n{stage.bars(rows)}\n"
        f"{drafting.accepted} of {drafting.drafted} drafts were accepted. {times} A reply without repetition gets a "
        "little slower. After rejected drafts, a request gets fewer drafts."
    )


def _of(name: str, title: str, play: Callable[[Stage], Awaitable[None]]) -> Demo:
    """Returns the demo of a contrast; its engine begins with the first setting."""
    contrast = CONTRASTS[name]
    return Demo(title, play, contrast.max_tokens, contrast.engine(contrast.first))


DEMOS = {
    "shared-prefix": Demo("four chats share the blocks of one system prompt", shared_prefix, 48, {"kv_blocks": 64}),
    "cache": _of("cache", "the same six requests with the prefix cache off and on", cache_on_off),
    "chunked-prefill": _of(
        "chunked-prefill", "a long prompt beside running answers: at once and in chunks", chunked_prefill
    ),
    "eviction": Demo("a full pool: predict whose blocks are evicted", eviction, 24, {"kv_blocks": 18}),
    "preemption": Demo(
        "a pool that is too small: predict which request is preempted", preemption, 120, {"kv_blocks": 24}
    ),
    "fork": Demo("one conversation with four continuations", fork, 24, {"kv_blocks": 64}),
    "batching": _of("batching", "static and continuous batching", batching),
    "speculation": _of("speculation", "draft tokens copied from the text, several checked in one step", speculation),
}
