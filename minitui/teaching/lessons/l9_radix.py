"""L9: the tree of cached prefixes."""

from __future__ import annotations

from engine.trace import views
from minitui.teaching import hybrid
from minitui.teaching.lessons import tree_walk
from minitui.teaching.lessons.page import Seen
from minitui.teaching.lessons.side_by_side import side_by_side
from minitui.teaching.lessons.written import read_lesson
from minitui.teaching.scenarios import QUESTIONS
from minitui.teaching.stage import Stage

PROMPTS, SYSTEM = 752, 112  # tokens: of the six prompts of `shared_system_prompt`, and of their common full blocks
BUDGET = 1024  # tokens: more than PROMPTS
PAGE = 256  # tokens between two checkpoints of a long prompt
BLOCKS = 56  # of the pool: enough for these six requests, even if they share nothing


async def shared_system_prompt(stage: Stage) -> Seen:
    """Sends six prompts with one system prompt at once."""
    sessions = await stage.write_all(QUESTIONS, [8] * len(QUESTIONS))
    await stage.step(2, seconds=1.0)
    await stage.answers(sessions)
    await stage.gate()
    figures = stage.figures()
    counts = {"all prompts": figures.prompt_tokens, "computed": figures.computed, "shared": figures.cached}
    rows = [(name, float(n), f"{n:,} tokens") for name, n in counts.items()]
    return Seen(
        "The common beginning was computed once, for all six:\n\n"
        f"{stage.bars(rows)}\n\nWhen the scheduler planned the first prompt, it added the prompt's full blocks to the "
        "tree. So the other five found them in the same step. vLLM can share within a step, too. In SGLang, only later "
        "steps find a prompt's new blocks.",
        {PROMPTS: 0, PROMPTS - SYSTEM: 1, PROMPTS - 5 * SYSTEM: 2, PROMPTS - 6 * SYSTEM: 3}.get(figures.computed),
    )


async def nearest_checkpoint(stage: Stage) -> Seen:
    """Runs three chats in a model that also keeps recurrent states. Their second hit ends at the nearest checkpoint."""
    await stage.other_engine(**hybrid.OPTIONS, checkpoint_interval=PAGE)
    await stage.gate()
    stage.begin_count()
    _, second, third = await hybrid.three_chats(stage, hybrid.SHORT)
    taken, equal = second["cached_tokens"], second["match"]["at"]
    counts = {"from the cache": taken, "computed again": equal - taken, "new": second["prompt_tokens"] - equal}
    rows = [(name, float(n), f"{n} tokens") for name, n in counts.items()]
    return Seen(
        f"The second prompt:\n\n{stage.bars(rows)}\n\nThe engine says: {hybrid.told(second)}. So it left a checkpoint "
        f"at {equal}, and the third chat took {third['cached_tokens']}: all full blocks of the shared text.",
        {hybrid.FOUND: 0, PAGE: 1, 0: 2, hybrid.SAME: 3}.get(taken),
    )


async def close(stage: Stage) -> None:
    """Starts three chats with one system prompt and stops the engine."""
    for question in QUESTIONS[:3]:
        await stage.write(question, 30, 2)


def _trunk(stage: Stage) -> str:
    state = stage.state()
    trunk = max((n for n in state.nodes.values() if n.id), key=lambda n: n.users)
    return f"{len(trunk.blocks)} blocks, {len(trunk.ids)} tokens, held by {trunk.users} requests"


def _hit(stage: Stage) -> str:
    lane = stage.view.history.lanes.lanes[max(stage.view.history.lanes.lanes)]
    return f"{lane.request.cached_tokens} of {lane.request.prompt_tokens}"


with_and_without_cache = side_by_side("cache")

LESSON = read_lesson(globals(), views, tree_walk, kv_blocks=BLOCKS, max_num_batched_tokens=BUDGET)
