"""Predict, then reveal: a question about a step whose answer the step itself gives.

The step has been taken, but the picture still stands at the one before it; the reader guesses, then sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from engine.trace.records import CLEARED

if TYPE_CHECKING:
    from minitui.viewmodel.model import View


@dataclass(frozen=True, slots=True)
class Question:
    """A question with up to three choices in random (but repeatable) order."""

    step: int
    text: str
    choices: tuple[str, ...]
    answer: int  # index of the right one


def question_about(view: View, step: int) -> Question | None:
    """A question about `step`, asked where the picture stands at the step before; None if it only decodes."""
    events = view.events.of_step(step)
    for asker in (_who_is_preempted, _who_is_evicted, _how_much_is_computed):
        question = asker(view, step, events)
        if question is not None:
            return question
    return None


def unasked(view: View, step: int) -> str:
    """Why a step that decides something has no question; nothing if it has one, or decides nothing."""
    events = view.events.of_step(step)
    if question_about(view, step) is not None:
        return ""
    if any(event.record[2] == "preempt" for event in events):
        return f"step {step:,} preempts a request, and there was no other to choose from"
    evicted = [event for event in events if event.kind == "evict" and event.record[5] != CLEARED]
    if evicted and any(event.node not in view.board.state.nodes for event in evicted):
        return f"step {step:,} evicts blocks that came into the tree with it: nobody could have chosen them before"
    if evicted:
        return f"step {step:,} evicts blocks, and no other text was unheld: there was nothing to choose"
    return ""


def _question(step: int, text: str, right: str, wrong: list[str]) -> Question | None:
    others = [choice for choice in dict.fromkeys(wrong) if choice != right][:2]
    if not others:
        return None
    choices = [right, *others]
    Random(step).shuffle(choices)
    return Question(step, text, tuple(choices), choices.index(right))


def _who_is_preempted(view: View, step: int, events: list) -> Question | None:
    event = next((event for event in events if event.record[2] == "preempt"), None)
    if event is None:
        return None
    running = sorted(r.id for r in view.board.state.requests.values() if r.state == "running")
    largest = sorted(running, key=lambda id: -len(view.board.state.requests[id].table))
    text = "A request needs one more block, none is free and none can be evicted. Who has to give its blocks back?"
    return _question(step, text, f"r{event.request}", [f"r{id}" for id in (running[0], largest[0], *running)])


def _who_is_evicted(view: View, step: int, events: list) -> Question | None:
    state = view.board.state
    evicted = (event for event in events if event.kind == "evict" and event.record[5] != CLEARED)
    event = next((event for event in evicted if event.node in state.nodes), None)
    if event is None:
        return None

    def quote(id: int) -> str:
        role, text = view.tree.text(state, state.nodes[id], view.decode)
        return f"{role} {text[:24]}"

    unheld = [node for node in state.nodes.values() if node.id and not node.users and node.id != event.node]
    unheld.sort(key=lambda node: -node.last_used)
    text = f"{event.record[5]}, and {state.counts[0]} blocks are free. Which of the texts that nobody uses has to go?"
    return _question(step, text, quote(event.node), [quote(node.id) for node in unheld])


def _how_much_is_computed(view: View, step: int, events: list) -> Question | None:
    row = view.steps.get(step)
    admitted = next((event for event in events if event.kind == "admit"), None)
    if row is None or admitted is None:
        return None
    lane = view.lanes.lanes.get(admitted.request)
    chunk = next((chunk for chunk in row.chunks if chunk[0] == admitted.request), None)
    if lane is None or chunk is None:
        return None
    cached = chunk[1]
    arrives = f"r{admitted.request} arrives with {lane.prompt_tokens:,} prompt tokens."
    text = f"{arrives} How many of them does the next step compute?"
    wrong = [lane.prompt_tokens, cached, lane.prompt_tokens // 2, view.board.state.budget]
    return _question(step, text, f"{chunk[2]:,}", [f"{n:,}" for n in wrong if n > 0])
