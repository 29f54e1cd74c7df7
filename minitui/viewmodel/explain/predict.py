"""Questions that let users predict what the next step does. The step itself then shows the answer. The engine has
already run that step, but the picture still shows the step before it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from engine.trace.eviction import RECORDED_POLICIES
from engine.trace.records import CLEARED
from minitui.text import count

if TYPE_CHECKING:
    from minitui.viewmodel.view import View


@dataclass(frozen=True, slots=True)
class Question:
    """A question with two or three choices, in a random order that depends only on the step."""

    step: int
    text: str
    choices: tuple[str, ...]
    answer: int  # index of the right choice


def question_about(view: View, step: int) -> Question | None:
    """Returns a question about `step`; None if the step has no decision to predict. The picture must show the step
    before it."""
    events = view.history.events.of_step(step)
    for ask in (_which_is_preempted, _which_is_evicted, _how_much_is_computed):
        question = ask(view, step, events)
        if question is not None:
            return question
    return None


def why_no_question(view: View, step: int) -> str:
    """Returns why there is no question about a step that preempts or evicts. Empty if there is a question, and for
    other steps."""
    events = view.history.events.of_step(step)
    if question_about(view, step) is not None:
        return ""
    if any(event.record.kind == "preempt" for event in events):
        return f"step {step:,} preempts the only running request: there is no choice to predict"
    evicted = [event for event in events if event.kind == "evict" and event.record.reason != CLEARED]
    if evicted and any(event.node not in view.moment.shown.state.nodes for event in evicted):
        return f"step {step:,} evicts blocks that it added to the tree: the eviction cannot be predicted"
    if evicted:
        return f"step {step:,} evicts the only text that no request holds: there is no choice to predict"
    return ""


def _question(step: int, text: str, right: str, wrong: list[str]) -> Question | None:
    others = [choice for choice in dict.fromkeys(wrong) if choice != right][:2]
    if not others:
        return None
    choices = [right, *others]
    Random(step).shuffle(choices)
    return Question(step, text, tuple(choices), choices.index(right))


def _which_is_preempted(view: View, step: int, events: list) -> Question | None:
    event = next((event for event in events if event.record.kind == "preempt"), None)
    if event is None:
        return None
    running = sorted(r.id for r in view.moment.shown.state.requests.values() if r.state == "running")
    largest = sorted(running, key=lambda id: -len(view.moment.shown.state.requests[id].table))
    text = "A request needs one more block; none is free and none can be evicted. Which request is preempted?"
    return _question(step, text, f"r{event.request}", [f"r{id}" for id in (running[0], largest[0], *running)])


def _which_is_evicted(view: View, step: int, events: list) -> Question | None:
    state = view.moment.shown.state
    evicted = (event for event in events if event.kind == "evict" and event.record.reason != CLEARED)
    event = next((event for event in evicted if event.node in state.nodes), None)
    if event is None:
        return None

    def quote(id: int) -> str:
        role, text = view.moment.tree.text(state, state.nodes[id], view.texts.decode)
        return f"{role} {text[:24]}"

    unheld = [node for node in state.nodes.values() if node.id and not node.users and node.id != event.node]
    unheld.sort(key=RECORDED_POLICIES[state.eviction_policy].age, reverse=True)
    blocks = "1 block is" if state.counts[0] == 1 else f"{state.counts[0]:,} blocks are"
    text = f"{event.record.reason}, and {blocks} free. Which of the unused texts is evicted?"
    return _question(step, text, quote(event.node), [quote(node.id) for node in unheld])


def _how_much_is_computed(view: View, step: int, events: list) -> Question | None:
    row = view.history.steps.get(step)
    admitted = next((event for event in events if event.kind == "admit"), None)
    if row is None or admitted is None:
        return None
    lane = view.history.lanes.lanes.get(admitted.request)
    chunk = next((chunk for chunk in row.chunks if chunk[0] == admitted.request), None)
    if lane is None or chunk is None:
        return None
    cached = chunk[1]
    arrives = f"r{admitted.request} arrives with {count(lane.request.prompt_tokens, 'prompt token')}."
    text = f"{arrives} How many of them does the next step prefill?"
    wrong = [lane.request.prompt_tokens, cached, lane.request.prompt_tokens // 2, view.moment.shown.state.budget]
    return _question(step, text, f"{chunk[2]:,}", [f"{n:,}" for n in wrong if n > 0])
