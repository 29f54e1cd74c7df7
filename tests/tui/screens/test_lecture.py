"""The lecture screen, the sentences it tells, and the questions it asks."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from engine.trace.state import State
from minitui.dev.simulator import SMALL, Load, Stress
from minitui.text import count
from minitui.tui.apps.audience import Audience
from minitui.tui.screens.lecture import LectureScreen
from minitui.tui.widgets.lecture import Why
from minitui.viewmodel.explain.predict import Question, question_about
from minitui.viewmodel.view import View
from minitui.viewmodel.words.narrate import narrate, notable
from tests.support.app.driving import lines, settled
from tests.support.paths import SNAPSHOTS
from tests.support.records.panels import simulated
from tests.support.records.views import TIGHT


def told(load: Load, steps: int, seed: int = 0):
    """Each step's sentence, told when the picture stands at it, with the records of the step."""
    stress = Stress(Load(**{**{f: getattr(load, f) for f in load.__slots__}, "seed": seed}))
    view = View()
    view.texts.ids_to_text = stress.words.decode
    view.reset(State(load.blocks + 1, load.block_size, load.budget, load.rows).snapshot())
    stress.gate(True)
    for _ in range(steps):
        stress.run_steps(1)
        records = stress.show(view)
        yield stress, view, records, narrate(view, view.history.steps.last)


def test_each_sentence_says_what_the_records_say():
    seen = set()
    for _stress, view, records, text in told(TIGHT, 500, seed=3):
        kinds = {record[2] for record in records}
        seen |= kinds
        step = next(record for record in records if record[2] == "step")
        prefills = {chunk[0]: chunk for chunk in step[4]}
        decodes = step[7] - sum(chunk[2] for chunk in step[4])
        matches = {record[3]: record for record in records if record[2] == "match"}
        for record in records:
            if record[2] == "admit" and record[3] in prefills and sum(r[2] == "admit" for r in records) <= 3:
                verb = "is admitted again after its preemption" if record[5] == "resumed" else "is admitted"
                assert f"r{record[3]} {verb}" in text
                match = matches.get(record[3])
                if match is not None and match[4] > 0:
                    assert f"the first {match[4]:,} of its" in text
                n = prefills[record[3]][2]
                assert re.search(rf"\b{n:,} tokens? (is|are) prefilled|(last|only) token is prefilled", text), (n, text)
            elif record[2] == "preempt":
                assert f"r{record[3]}, the newest running request, is preempted" in text
                assert f"it releases its {record[5]} block" in text
                assert record[4] in text
            elif record[2] == "finish":
                assert f"r{record[3]} " in text and f"after {record[5]:,} token" in text
            elif record[2] == "wait":
                assert f"r{record[3]} waits for {record[4]}." in text
        evicted = sum(record[4] for record in records if record[2] == "evict")
        if evicted:
            assert f"{count(evicted, 'block')} that no request held" in text
        if decodes == 1:
            assert "decodes one token" in text
        elif decodes:
            assert "decode one token each" in text
        decisions = kinds & {"admit", "evict", "preempt", "finish", "wait", "match"}
        assert notable(view, step[3]) == bool(prefills or decisions)
    assert {"preempt", "evict", "finish", "wait", "match"} <= seen, "the load must show everything"


def test_nothing_is_said_of_a_step_that_is_not_known():
    assert narrate(View(), 0) == "" and not notable(View(), 3)


def test_the_right_answer_is_among_the_choices_of_every_question():
    kinds = set()
    for _stress, view, records, _text in told(TIGHT, 500, seed=3):
        step = view.history.steps.last
        if not {record[2] for record in records} & {"admit", "evict", "preempt"}:
            assert question_about(view, step) is None
            continue
        if step < 3 or not view.travel_to(step - 1):
            continue
        question = question_about(view, step)
        view.moment.present()
        if question is None:
            continue
        right = question.choices[question.answer]
        assert 2 <= len(question.choices) <= 3 and len(set(question.choices)) == len(question.choices)
        preempted = [record[3] for record in records if record[2] == "preempt"]
        evicted = [record[3] for record in records if record[2] == "evict"]
        if preempted:
            assert right == f"r{preempted[0]}"
            kinds.add("preempt")
        elif "is evicted?" in question.text:
            assert evicted
            kinds.add("evict")
        else:
            taken = next(record for record in records if record[2] == "step")
            admitted = next(record[3] for record in records if record[2] == "admit")
            assert right == f"{next(chunk[2] for chunk in taken[4] if chunk[0] == admitted):,}"
            kinds.add("admit")
    assert kinds == {"preempt", "evict", "admit"}


# ---- the screen


def opened(size: tuple[int, int]) -> Any:
    return simulated(SMALL, size, 3.0, 10, "3")


async def until(app, pilot, frames, kind: str) -> None:
    for _ in range(400):
        await pilot.press("n")
        await frames()
        if any(event.kind == kind for event in app.view.history.events.of_step(app.view.moment.horizon)):
            return
    pytest.fail(f"no {kind} in 400 steps")


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_the_screen_is_complete_at_its_size(size):
    async with opened(size) as (app, pilot, frames):
        await until(app, pilot, frames, "hit")
        await frames(2)  # each draws half of the panels, and the card of the hit makes room for itself
        await settled()
        text = "\n".join(line.rstrip() for line in lines(app)) + "\n"
        assert all(len(line) == size[0] for line in lines(app)) and len(lines(app)) == size[1]
        sentence = narrate(app.view, app.view.moment.horizon)
        shown = " ".join(app.screen.query_one(Why).text.replace("│", " ").split())
        assert sentence in shown
        for word in ("KV blocks", "Radix tree", " of 128 tokens", "PAUSED at step", "n next"):
            assert word in text
        path = SNAPSHOTS / f"lecture-{size[0]}x{size[1]}.txt"
        if os.environ.get("UPDATE_SNAPSHOTS"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{path.name} differs: look, then UPDATE_SNAPSHOTS=1"


async def test_a_remote_steps_forward_and_back_and_its_other_keys_do_no_harm():
    async with opened((80, 24)) as (app, pilot, frames):
        await pilot.press("pagedown")
        await frames()
        at = app.view.history.steps.last
        assert app.view.moment.gate_text == f"PAUSED at step {at:,}"
        await pilot.press("pagedown", "pagedown")
        await frames()
        assert app.view.history.steps.last == at + 2
        await pilot.press("pageup")
        await frames()
        assert app.view.moment.horizon == at + 1 and narrate(app.view, at + 1)
        assert f"Why · step {at + 1:,}" in "\n".join(lines(app))
        await pilot.press("pagedown")
        await frames()
        assert app.view.moment.horizon == at + 2 and not app.view.moment.travel_text, (
            "forward in time before forward in steps"
        )
        before = (app.view.history.steps.last, app.view.history.live.state.snapshot(), app.screen)
        await pilot.press("f5", "escape", "full_stop", "escape")
        await frames()
        assert (app.view.history.steps.last, app.view.history.live.state.snapshot(), app.screen) == before
        assert isinstance(app.screen, LectureScreen)


async def test_predict_asks_before_it_shows_and_says_whether_a_letter_was_right():
    async with opened((100, 34)) as (app, pilot, frames):
        why = app.screen.query_one(Why)
        await pilot.press("n", "d")
        await frames()

        async def asked() -> Question:
            for _ in range(400):
                before = app.view.moment.horizon
                await pilot.press("n")
                await frames()
                if why.question is not None:
                    return why.question
                assert app.view.moment.horizon == before + 1, "a step without a question is shown at once"
            raise AssertionError("no question in 400 steps")

        question = await asked()
        assert app.view.moment.horizon == question.step - 1
        text = "\n".join(lines(app))
        assert "Predict" in text and "n reveals" in text and "answer" in text
        assert f"step {question.step - 1:,}  " in text, "the step is not given away"
        await pilot.press("n")
        await frames()
        assert why.question is None and app.view.moment.horizon == question.step
        assert narrate(app.view, question.step)[:30] in " ".join(why.text.replace("│", " ").split())
        question = await asked()
        audience = Audience(app)
        audience.refresh()
        assert f"Step {question.step:,}: " in audience.ballots[-1].poll.question and audience.ballots[-1].right is None
        await pilot.press("abc"[question.answer])
        audience.refresh()
        assert [ballot.right for ballot in audience.ballots] == [question.answer]
        await frames()
        assert why.question is None and app.view.moment.horizon == question.step and len(app.screen_stack) == 1
        assert f"You said {'abc'[question.answer]}: correct." in "\n".join(lines(app))
        await pilot.press("n")
        await frames()
        assert "You said" not in "\n".join(lines(app))


async def test_while_the_engine_runs_the_sentence_is_of_the_last_step_that_did_more():
    async with opened((100, 34)) as (app, _, frames):
        await frames(40)
        title = next(line for line in lines(app)[1:] if re.search(r"step [\d,]+", line))
        step = int(re.search(r"step ([\d,]+)", title).group(1).replace(",", ""))
        newest = next(at for at in range(app.view.history.steps.last, -1, -1) if notable(app.view, at))
        assert step == newest
        assert "steps ago" in title or "now" in title
