"""The same work under two settings: what `minitui compare` runs, and the demos that compare two settings. The work of a
contrast is a coroutine that gets a Stage. It asks the same questions in the same order under both settings, and replies
are greedy. Without pauses for a reader (`beat` 0), the engine is paused only to let requests arrive together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from engine.errors import EngineError
from minitui.chat.conversation import Session
from minitui.teaching.stage import Stage

QUESTIONS = (
    "What is the KV cache?", "What is paged attention?", "What is a radix cache?", "What is continuous batching?",
    "What is prefill?", "What is a block table?",
)
LENGTHS = (12, 110, 12, 12, 96, 12, 16, 20)  # tokens of the replies: in each four, one is long
EQUAL = 24  # tokens of each reply, where all have the same length
WRITERS = 3
PASTED_LINES, PASTED = 40, 711  # of the long prompt: lines of its text, and tokens
BUSY, SHORT = 8, 16  # chats that write, and short questions, beside a long prompt
PIECE, PIECES = 192, 4  # one-piece allocation: tokens of a piece, and pieces in the memory


@dataclass(frozen=True)
class Setting:
    """One of the two settings: its name, and the engine options that make it."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Contrast:
    """Work, and two settings to do it with. `options`: the engine options of both; `max_tokens`: the limit of a
    reply."""

    title: str
    work: Callable[[Stage], Awaitable[list[Session]]]
    first: Setting
    second: Setting
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> tuple[Setting, Setting]:
        return self.first, self.second

    def engine(self, setting: Setting) -> dict[str, Any]:
        """Returns the engine options of one setting."""
        return self.options | setting.options


def notes(lines: int) -> str:
    """Returns a text of many lines, of 17 to 19 tokens each."""
    return " ".join(f"Note {i}: block {i} holds the tokens {16 * i} to {16 * i + 15}." for i in range(lines))


def paste(lines: int) -> str:
    """Returns a long prompt, as a user might paste it."""
    return f"What is the KV cache? Here are my notes. {notes(lines)}"


# ---- the work; each coroutine returns its chats


async def six_chats(stage: Stage) -> list[Session]:
    """Six chats with the same system prompt ask at once."""
    await stage.gate()
    sessions = await stage.write_all(QUESTIONS, [12] * len(QUESTIONS))
    stage.look("inspect")
    await stage.watch(3, seconds=1.0)
    await stage.slow(0.12)
    await stage.answers(sessions)
    return sessions


async def long_paste(stage: Stage) -> list[Session]:
    """Chats write, and then a long prompt is pasted in another chat, the last one."""
    await stage.gate()
    writers = await stage.write_all(QUESTIONS[:WRITERS], [60] * WRITERS, system="")
    stage.look("inspect")
    await stage.step(5, seconds=0.25)
    pasted = stage.chat("", "the paste", max_tokens=4, whole=True)
    request = await stage.ask(pasted, paste(PASTED_LINES))
    if stage.beat:  # without pauses, the user sees no steps
        lane = stage.view.history.lanes.lanes[request]
        await stage.step_until("the long prompt's first token", lambda: lane.first_token is not None, 0.3)
    await stage.watch(3, seconds=0.25)
    await stage.answers([*writers, pasted])
    return [*writers, pasted]


async def storm(stage: Stage) -> list[Session]:
    """Chats write, and then a long prompt and many short questions arrive at the same moment."""
    await stage.gate()
    writers = await stage.write_all((QUESTIONS * 2)[:BUSY], [120] * BUSY, system="")
    stage.look("inspect")
    await stage.run_steps(20)
    pasted = stage.chat("", "the paste", max_tokens=4, whole=True)
    await stage.ask(pasted, paste(PASTED_LINES))
    asking = await stage.write_all((QUESTIONS * 3)[:SHORT], [4] * SHORT, system="")
    await stage.watch(4, seconds=1.0)
    await stage.answers([*writers, pasted, *asking])
    return [*writers, pasted, *asking]


async def eight_replies(stage: Stage, lengths: Sequence[int] = LENGTHS) -> list[Session]:
    """Eight chats want replies of these lengths, in tokens."""
    sessions = [stage.chat("", f"limit {n}", max_tokens=n, whole=True) for n in lengths]
    stage.show(sessions[0])
    await stage.gate()
    for session in sessions:
        await stage.ask(session, "What is decode?")
    stage.look("inspect")
    await stage.watch(2, seconds=0.5)
    await stage.slow(0.03)
    await stage.answers(sessions)
    return sessions


async def ask_again(stage: Stage) -> Session:
    """Asks a question twice in a new chat, and pauses the engine before the second prompt's step. Returns the chat."""
    session = stage.chat("", max_tokens=70)
    stage.show(session)
    await stage.gate()
    await stage.ask(session, QUESTIONS[0])
    stage.look("inspect")
    await stage.watch(3, seconds=0.4)
    await stage.slow(0.02)
    await stage.answers([session])
    await stage.gate()
    stage.begin_count()
    await stage.ask(session, QUESTIONS[0])
    return session


async def asked_twice(stage: Stage) -> list[Session]:
    """A chat asks a question, and then the same question again."""
    session = await ask_again(stage)
    await stage.answers([session])
    return [session]


async def four_long_replies(stage: Stage) -> list[Session]:
    """Four chats write long replies at the same time."""
    await stage.gate()
    sessions = await stage.write_all(QUESTIONS[:4], [120] * 4, system="")
    await stage.answers(sessions)
    return sessions


CONTRASTS = {
    "cache": Contrast(
        "six chats with one system prompt, without and with the prefix cache", six_chats,
        Setting("cache off", {"no_prefix_caching": True}), Setting("cache on", {"no_prefix_caching": False}),
        48, {"kv_blocks": 96, "max_num_batched_tokens": 1024},  # all six prompts fit into the first step
    ),
    "batching": Contrast(
        f"eight replies of {min(LENGTHS)} to {max(LENGTHS)} tokens in four rows, with static and with continuous "
        "batching",
        eight_replies,
        Setting("static batching", {"scheduling_policy": "static"}),
        Setting("continuous batching", {"scheduling_policy": "fcfs"}),
        max(LENGTHS), {"kv_blocks": 64, "max_num_seqs": 4, "no_prefix_caching": True},
    ),
    "chunked-prefill": Contrast(
        "a long prompt beside three running replies, computed in one step and in chunks of 64 tokens", long_paste,
        Setting("whole prefill", {"enable_chunked_prefill": False}),
        Setting("chunked prefill", {"enable_chunked_prefill": True}),
        48, {"kv_blocks": 128, "max_num_batched_tokens": 64, "no_prefix_caching": True},
    ),
    "fairness": Contrast(
        f"a long prompt and {SHORT} short questions beside {BUSY} running replies, without and with a target for gaps",
        storm,
        Setting("no target", {}), Setting("target of 10 ms", {"max_gap_ms": 10.0}),
        120, {"kv_blocks": 512, "max_num_batched_tokens": 512, "no_prefix_caching": True},
    ),
    "speculation": Contrast(
        "a chat asks the same question twice, without and with drafts copied from its text", asked_twice,
        Setting("no speculation", {"speculation": "off"}), Setting("prompt lookup", {"speculation": "prompt-lookup"}),
        70, {"kv_blocks": 64},
    ),
    "allocation": Contrast(
        f"eight replies in memory for {PIECES * PIECE} tokens: one piece of {PIECE} for each request, and blocks of 16",
        eight_replies,
        Setting("one piece", {"block_size": PIECE, "kv_blocks": PIECES}),
        Setting("paging", {"block_size": 16, "kv_blocks": PIECES * PIECE // 16}),
        max(LENGTHS), {"no_prefix_caching": True},
    ),
    "pool": Contrast(
        "four replies of 120 tokens, in a pool that is too small for them and in one that is large enough",
        four_long_replies,
        Setting("24 blocks", {"kv_blocks": 24}), Setting("64 blocks", {"kv_blocks": 64}), 120,
    ),
}

ROWS = Contrast(  # of a lesson
    f"eight replies of {EQUAL} tokens at once, with two rows and with eight",
    partial(eight_replies, lengths=[EQUAL] * len(LENGTHS)),
    Setting("2 rows", {"max_num_seqs": 2}), Setting("8 rows", {"max_num_seqs": 8}),
    EQUAL, {"kv_blocks": 64, "no_prefix_caching": True},
)


def find_contrast(name: str) -> Contrast:
    """Returns a contrast by its name. Raises EngineError with the names if there is none."""
    if name not in CONTRASTS:
        raise EngineError(
            f"there is no comparison {name!r}: the comparisons are {', '.join(CONTRASTS)}; two recordings are compared "
            "with `minitui compare A.trace B.trace`"
        )
    return CONTRASTS[name]


def with_pools(contrast: Contrast, pools: tuple[int, int]) -> Contrast:
    """Returns the contrast "pool" with two other sizes, in blocks."""
    first, second = (Setting(f"{blocks:,} blocks", {"kv_blocks": blocks}) for blocks in pools)
    return replace(contrast, first=first, second=second)
