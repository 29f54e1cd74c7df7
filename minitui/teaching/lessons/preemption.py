"""An experiment: running requests fill the pool until one is preempted. What is computed again, and what survived?"""

from __future__ import annotations

from functools import partial

from minitui.teaching.lessons.page import Seen
from minitui.teaching.scenarios import VOICES, paste_of
from minitui.teaching.stage import Stage
from minitui.text import count

SHARES = (0.27, 0.42, 0.17)  # of the pool, for the prompts of three requests; the rest is soon full of replies
REPLY = 60  # tokens


async def too_small(stage: Stage) -> Seen:
    """Fills the pool. The answer: which request was preempted, 0 the oldest, 1 the largest, 2 the youngest."""
    pool = stage.source.info.num_blocks
    chats = [stage.chat(voice, max_tokens=REPLY, whole=True) for voice in VOICES[: len(SHARES)]]
    stage.show(chats[-1])
    ids = []
    for session, share in zip(chats, SHARES, strict=True):
        ids.append(await stage.ask(session, paste_of(stage, session.system, int(share * pool))))
    lanes = stage.view.history.lanes.lanes
    await stage.step_until("the end of the prompts", lambda: all(lanes[id].first_token for id in ids), seconds=0.15)
    await stage.step_until("a preemption", lambda: stage.events("preempt"), seconds=0.15)
    event = stage.events("preempt")[0]
    victim, reason, blocks = event.request, event.record.reason, event.record.blocks
    lane, written = lanes[victim], lanes[victim].highest
    await stage.pause(3)
    await stage.step_until("the resumption", partial(_resumed, stage, victim, event.seq), seconds=0.1)
    events = stage.view.history.events.newest_first()
    match = next(event for event in events if event.request == victim and event.kind in ("hit", "miss"))
    kept, resumed = match.record.tokens, match.step
    lost = written - kept
    await stage.step_until("the lost tokens", lambda: sum(n for _, n in lane.again) >= lost, seconds=0.3)
    steps = len({step for step, _ in lane.again})
    size = stage.source.info.block_size
    return Seen(
        f"   step {event.step:<6}{reason}: r{victim} is preempted\n"
        f"   {'':<11}r{victim} releases {blocks} blocks; {written // size} are full and stay cached\n"
        f"   {'then':<11}{written // size - kept // size} of the cached blocks are evicted for other requests\n"
        f"   step {resumed:<6}r{victim} resumes: {kept} of its {written} computed tokens are still cached\n"
        f"   {'':<11}the other {lost} are computed again, in {count(steps, 'step')}\n"
        f"   {'':<11}token {written + 1}, sampled before the preemption, is computed now\n"
        "No token of the reply was lost: the reply continues with its next token.",
        ids.index(victim) if victim == max(ids) or victim == min(ids) else 1,
    )


def _resumed(stage: Stage, request: int, since: int) -> bool:
    return any(event.request == request and event.seq > since for event in stage.events("admit"))
