"""The experiment of lesson 9 with a model that keeps recurrent states beside keys and values."""

from __future__ import annotations

from minitui.teaching.hybrid import FOUND, OPTIONS, SAME, SHORT, three_chats, told
from minitui.teaching.lessons.page import Seen
from minitui.teaching.stage import Stage

PAGE = 256  # tokens between two checkpoints of a long prompt


async def nearest_checkpoint(stage: Stage) -> Seen:
    """Runs three chats in a hybrid model, whose second hit ends at the nearest checkpoint."""
    await stage.other_engine(**OPTIONS, checkpoint_interval=PAGE)
    await stage.gate()
    stage.begin_count()
    _, second, third = await three_chats(stage, SHORT)
    taken, equal = second["cached_tokens"], second["match"]["at"]
    counts = {"from the cache": taken, "computed again": equal - taken, "new": second["prompt_tokens"] - equal}
    rows = [(name, float(n), f"{n} tokens") for name, n in counts.items()]
    return Seen(
        f"The second prompt:\n\n{stage.bars(rows)}\n\nThe engine says: {told(second)}. So it left a checkpoint at "
        f"{equal}, and the third chat took {third['cached_tokens']}: all full blocks of the shared text.",
        {FOUND: 0, PAGE: 1, 0: 2, SAME: 3}.get(taken),
    )
