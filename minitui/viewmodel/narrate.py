"""One step in a sentence or two: what it did and why, told from the engine's reason codes.

    "r61 joins: 544 of its 1,039 prompt tokens are in the tree, the other 495 are computed. 17 others decode one token
    each."
"""

from __future__ import annotations

from engine.trace.records import CLEARED
from minitui.viewmodel.events import looked_up, stop_text
from minitui.viewmodel.lanes import DECODING
from minitui.viewmodel.model import Event, Lane, StepRow, View

NAMED = 3  # requests named one by one; more are counted


def narrate(view: View, step: int) -> str:
    """What step `step` did and why; nothing if it is not (or no longer) in the history."""
    row = view.steps.get(step)
    if row is None:
        return ""
    events = view.events.of_step(step)
    told: list[str] = []
    told += _failures(events)
    told += _preemptions(events)
    joined = {event.request for event in events if event.kind == "admit"}
    told += _admissions(view, row, events)
    told += _evictions(events)
    told += _chunks(view, row, joined)
    told += _decodes(view, row)
    told += _drafts(row)
    told += _waiting(events)
    told += _finishes(view, events)
    return " ".join(told)


def moment(view: View, step: int) -> bool:
    """Does the step do more than decode? Such steps are worth stopping at."""
    row = view.steps.get(step)
    return row is not None and bool(row.chunks or view.events.of_step(step))


def _failures(events: list[Event]) -> list[str]:
    failed = [event for event in events if event.kind == "fail"]
    return [f"The step failed ({event.record[4]}): its requests end with that error." for event in failed]


def _preemptions(events: list[Event]) -> list[str]:
    told = []
    for event in events:
        if event.record[2] == "preempt":
            reason, blocks = event.record[4], event.record[5]
            told.append(
                f"The pool is full: {reason}. So r{event.request}, the youngest, gives back its {_blocks(blocks)} and "
                "queues again; what it computed stays in the tree until somebody needs the room."
            )
        elif event.record[2] == "requeue":
            told.append(f"r{event.request} queues again: {event.record[4]}.")
    return told


def _evictions(events: list[Event]) -> list[str]:
    told = []
    evictions = [event for event in events if event.kind == "evict"]
    cleared = sum(event.record[4] for event in evictions if event.record[5] == CLEARED)
    if cleared:
        told.append(f"Somebody cleared the cache: {_blocks(cleared)} left the tree.")
    total = sum(event.record[4] for event in evictions) - cleared
    if total:
        reasons = list(dict.fromkeys(event.record[5] for event in evictions if event.record[5] != CLEARED))
        why = _list(reasons[:NAMED]) + (f" and {len(reasons) - NAMED} more" if len(reasons) > NAMED else "")
        which = "that nobody held, used longest ago, leaves" if total == 1 else "that nobody held, the oldest, leave"
        told.append(f"To make room, {_blocks(total)} {which} the tree ({why}).")
    return told


def _admissions(view: View, row: StepRow, events: list[Event]) -> list[str]:
    told = []
    chunks = {chunk[0]: chunk for chunk in row.chunks}
    matches = {event.request: event for event in events if event.kind in ("hit", "miss")}
    admitted = [event for event in events if event.kind == "admit"]
    for event in admitted[:NAMED]:
        lane = view.lanes.lanes.get(event.request)
        verb = "runs again after its preemption" if event.record[5] == "resumed" else "joins"
        prompt = _prompt(view, lane, matches.get(event.request), chunks.get(event.request))
        told.append(f"r{event.request} {verb}{prompt}.")
    if len(admitted) > NAMED:
        told.append(f"{len(admitted) - NAMED} more join.")
    return told


def _prompt(view: View, lane: Lane | None, match: Event | None, chunk: tuple[int, int, int, bool] | None) -> str:
    """Where the tokens of somebody who joins come from."""
    if chunk is None:
        return ", and waits for tokens of the budget"
    _request, start, n, done = chunk
    total = lane.prompt_tokens if lane is not None else start + n
    if match is not None:
        total = looked_up(match)
    size = view.board.state.block_size
    if match is not None and match.kind == "hit":
        taken = match.record[4]
        where = f"being computed by r{match.writer} already" if match.writer >= 0 else "in the tree already"
        text = f": the first {taken:,} of its {total:,} tokens are {where} ({_blocks(taken // size)})"
    elif match is not None:
        stop, at = match.record[5], match.record[6]
        text = f": nothing of its prompt is in the tree ({stop_text(stop, at)})"
        if stop in ("empty", "short"):
            text = f": {stop_text(stop, at)}"
        elif stop == "evicted":
            text = f": what it begins with was evicted at step {at:,}"
    else:
        text = f": {total:,} prompt tokens"
    left = total - start - n
    if left > 0:
        return f"{text}; {n:,} tokens are computed now, {left:,} {'remains' if left == 1 else 'remain'} for later"
    count = f"all {n:,} tokens are" if start == 0 else "only one is" if n == 1 else f"only {n:,} are"
    return f"{text}; {count} computed, and its first token is drawn" if done else text


def _chunks(view: View, row: StepRow, joined: set[int]) -> list[str]:
    told = []
    going_on = [chunk for chunk in row.chunks if chunk[0] not in joined]
    for request, start, n, done in going_on[:NAMED]:
        lane = view.lanes.lanes.get(request)
        total = f" of {lane.prompt_tokens:,}" if lane is not None and start + n <= lane.prompt_tokens else ""
        end = ", the last of its prompt, and draws its first token" if done else ""
        tokens = f"token {start:,}" if n == 1 else f"tokens {start:,} to {start + n - 1:,}"
        told.append(f"r{request} goes on with {tokens}{total}{end}.")
    if len(going_on) > NAMED:
        told.append(f"{len(going_on) - NAMED} more go on with their prompts.")
    return told


def _decodes(view: View, row: StepRow) -> list[str]:
    if not row.decodes:
        return []
    lanes = [lane.id for lane in view.lanes.around(row.step) if lane.code_at(row.step, DECODING)]
    others = "others" if row.chunks else "requests"
    if len(lanes) != row.decodes or row.decodes > NAMED:
        return [f"{row.decodes:,} {others} decode one token each{_new_blocks(view, row, lanes)}."]
    if row.decodes == 1:
        return [f"r{lanes[0]} decodes one token{_new_blocks(view, row, lanes)}."]
    return [f"{_list([f'r{id}' for id in sorted(lanes)])} decode one token each{_new_blocks(view, row, lanes)}."]


def _drafts(row: StepRow) -> list[str]:
    """What was guessed beside the decoded tokens, and what came of it."""
    if not row.drafts:
        return []
    if len(row.drafts) > 1:
        who = "They" if len(row.drafts) == row.decodes else f"{len(row.drafts)} of them"
        told = f"{who} have {row.drafted:,} draft tokens checked as well"
        if not row.end_seq:
            return [f"{told}."]
        return [f"{told}: {row.accepted:,} are right, so they come {_tokens(len(row.drafts) + row.accepted)} further."]
    request, drafted, accepted = row.drafts[0]
    told = f"r{request} has {_tokens(drafted)} checked as well, which followed when its last ones stood there before"
    if accepted < 0:
        return [f"{told}."]
    if accepted == 0:
        return [f"{told}: already the first is not what it draws."]
    right = "all are" if accepted == drafted else f"the first {accepted} are" if accepted > 1 else "the first is"
    return [f"{told}: {right} what it draws, so it comes {_tokens(1 + accepted)} further."]


def _tokens(n: int) -> str:
    return f"{n:,} token" + ("" if n == 1 else "s")


def _new_blocks(view: View, row: StepRow, decoding: list[int]) -> str:
    """Who began a block with this token: told when the picture stands at this very step."""
    if view.horizon != row.step or not view.exact:
        return ""
    state = view.board.state
    begun = []
    drafting = {draft[0] for draft in row.drafts}  # they may have come further than one token
    for id in decoding:
        request = state.requests.get(id)
        if request is not None and request.joined_at >= 0 and id not in drafting:
            computed = state.computed(request)
            if computed % state.block_size == 1 and computed // state.block_size < len(request.table):
                begun.append((id, request.table[computed // state.block_size]))
    if not begun or len(begun) > NAMED:
        return f"; {len(begun)} of them begin a new block" if begun else ""
    if len(decoding) == 1:
        return f", the first in a new block, {begun[0][1]}"
    return "; " + _list([f"r{id} begins block {block}" for id, block in begun])


def _waiting(events: list[Event]) -> list[str]:
    return [f"r{event.request} has to wait: {event.record[4]}." for event in events if event.kind == "wait"][-1:]


def _finishes(view: View, events: list[Event]) -> list[str]:
    told = []
    finished = [event for event in events if event.kind == "finish"]
    for event in finished[:NAMED]:
        reason, tokens = event.record[4], event.record[5]
        how = {
            "stop": "said all it had to say", "length": "reached its limit", "abort": "was cancelled",
        }.get(reason, f"ended with {reason}")  # fmt: skip
        told.append(f"r{event.request} {how} after {tokens:,} token{'' if tokens == 1 else 's'}.")
    if len(finished) > NAMED:
        told.append(f"{len(finished) - NAMED} more finished.")
    return told


def _blocks(n: int) -> str:
    return f"{n:,} block" + ("" if n == 1 else "s")


def _list(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
