"""Several kinds of memory in the real scheduler: windows and recurrent states beside full attention, over a simulated
device that reads what each layer would read."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from engine.core.engine import Engine
from engine.core.request import Request
from engine.params import SamplingParams
from engine.trace.kind import kind_of
from engine.trace.side_pool import SideGroup
from engine.trace.state import State
from minitui.text import match_reason
from minitui.trace import check
from minitui.trace.check import Follower
from tests.engine.core import test_scheduler_simulation as simulation
from tests.engine.core.test_scheduler_simulation import Load
from tests.support.simulation import run

PARAMS = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)


def window(pages: int, tokens: int) -> SideGroup:
    return SideGroup(f"window {tokens}", "window", pages + 1, tokens)


def states(slots: int) -> SideGroup:
    return SideGroup("state", "state", slots + 1)


def make_engine(*groups: SideGroup, blocks: int = 200, size: int = 4, budget: int = 64, **options: Any) -> Engine:
    return simulation.make_engine(blocks, size, budget, groups=groups, **options)


def ask(engine: Engine, ids: list[int]) -> Request:
    request = engine.add_request(ids, PARAMS)
    run(engine, check=True)
    return request


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("seed", range(14))
def test_any_schedule_gives_the_tokens_of_each_request_alone(seed: int, delay: int) -> None:
    """No page is used twice, none leaks, every hit is one that all groups can serve; the records tell all of it."""
    drafts = 3 * (seed % 3 == 1)

    def groups(r: random.Random, size: int) -> list[SideGroup]:
        found = [
            window(-(-tokens // size) + 2 + drafts + r.choice([0, 2, 20]), tokens)
            for tokens in r.sample([1, 3, 8, 17, 40], r.randrange(0, 3))
        ]
        return found if found and r.random() < 0.3 else [*found, states(2 + drafts + r.choice([0, 1, 4, 20]))]

    Load(
        seed, 0 if drafts else delay, failures=seed % 5 < 2, prefix_caching=seed % 7 > 0, drafts=drafts, groups=groups,
        checkpoint_interval=8 if seed % 2 else 32,
    ).run()


def test_a_hit_ends_at_the_last_checkpoint_and_the_next_request_has_one_where_the_texts_part() -> None:
    engine = make_engine(states(20), checkpoint_interval=16, budget=512)
    shared = [i % 40 for i in range(40)]
    ask(engine, [*shared, 41, 42, 43, 44, 45])
    second = ask(engine, [*shared, 1, 2, 3, 4, 5])
    assert second.match[:2] == ("state", 40) and second.cached_tokens == 32  # checkpoints: at 16, 32 and 44
    assert second.match[2] == "32 of 45 tokens, cut by state"
    third = ask(engine, [*shared, 6, 7, 8, 9])
    assert third.cached_tokens == 40


def test_a_window_is_served_only_where_its_pages_are_left() -> None:
    engine = make_engine(window(8, 12), budget=512)
    text = [i % 40 for i in range(30)]
    ask(engine, text)  # with 4 tokens of reply, pages 0 to 7; all but the last two are behind the window at some time
    assert ask(engine, [*text[:20], 1, 2, 3]).cached_tokens in (0, 20)
    ask(engine, [i % 7 for i in range(31)])  # takes all eight pages
    again = ask(engine, text)
    assert again.cached_tokens == 0 and again.match[0] == "window" and again.match[1] == 28


def test_a_reply_leaves_a_checkpoint_behind_for_the_next_turn() -> None:
    engine = make_engine(states(6), checkpoint_interval=1000)
    first = engine.add_request(list(range(10)), SamplingParams(max_tokens=21, seed=3, ignore_eos=True))
    run(engine, check=True)
    following = ask(engine, [*first.ids, 7, 8])
    assert following.cached_tokens == (len(first.ids) - 1) // 4 * 4


# The two workloads of vLLM's issue 45238: 64 prompts share their first tokens, and each goes on with text of its own.
WORKLOADS = pytest.mark.parametrize(("shared", "own"), [(1600, 500), (1500, 600)])


def workload(engine: Engine, shared: int, own: int, requests: int) -> list[Request]:
    r = random.Random(7)
    beginning = [r.randrange(40) for _ in range(shared)]
    prompts = [[*beginning, i % 40, i // 40, *(r.randrange(40) for _ in range(own - 2))] for i in range(requests)]
    return [ask(engine, prompt) for prompt in prompts]


@WORKLOADS
def test_with_one_checkpoint_a_shift_of_a_hundred_tokens_is_told_to_the_token(shared: int, own: int) -> None:
    """Blocks of 528 tokens and one checkpoint for each prompt, near its end, as in vLLM: at 1,584 in both workloads.

    There, the second workload never hits. Here, the second request leaves a checkpoint where its hit in full attention
    ended, so it is the only one that misses."""
    engine = make_engine(states(200), blocks=600, size=528, budget=4096, rows=4, checkpoint_interval=100_000)
    requests = workload(engine, shared, own, 64)
    whole = shared // 528 * 528
    if shared > 1584:
        assert [each.cached_tokens for each in requests] == [0, *[1584] * 63]
        assert {each.match[0] for each in requests[1:]} == {"whole"}
        return
    assert [each.cached_tokens for each in requests] == [0, 0, *[1056] * 62] and whole == 1056
    stop, at, detail = requests[1].match
    assert (stop, at, detail) == ("state", 1056, "0 of 2,100 tokens, cut by state")
    words = match_reason(stop, at, requests[1].cached_tokens, detail)
    assert words == "full attention has 1,056 tokens, but no checkpoint is in them: 1,056 tokens again"


@WORKLOADS
def test_with_the_defaults_a_shift_of_a_hundred_tokens_costs_no_hit(shared: int, own: int) -> None:
    engine = make_engine(states(100), blocks=4000, size=16, budget=4096, rows=4)
    requests = workload(engine, shared, own, 6)
    whole = shared // 16 * 16
    assert [each.cached_tokens for each in requests] == [0, 1024, *[whole] * 4]
    assert requests[1].match == ("state", whole, "1,024 of 2,100 tokens, cut by state")
    assert requests[2].match[0] == "differs"


def test_without_side_groups_nothing_is_planned_for_them() -> None:
    engine = make_engine()
    engine.add_request([1, 2, 3], PARAMS)
    scheduled = engine.scheduler.plan()
    assert scheduled is not None and scheduled.plan.segments is None and len(scheduled.plan.tables) == 1
    assert "groups" not in engine.snapshot()


def damaged(snapshot: dict[str, Any], path: list[Any], value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(snapshot))
    *outer, last = path
    at = copy
    for key in outer:
        at = at[key]
    at[last] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (["groups"], [], "has pages of 2 side groups, not of 0"),
        (["groups", 0, "kind"], "magic", "'kind' of side group 0"),
        (["groups", 0, "free"], [[1, 1000]], "more free pages than pages"),
        (["groups", 0, "free"], [], "free or idle"),
        (["groups", 0, "idle"], [1], "free or idle"),
        (["groups", 0, "kept"], [[190, 1]], "outside the tree"),
        (["groups", 1, "num_blocks"], 2, "not in its pool"),
        (["groups", 1, "kept", 0, 1], 1.5, "'kept' of side group 1"),
        (["requests", "2", "side"], [[[0, 1]]], "has pages of 1 side groups"),
        (["requests", "2", "side", 1, 0, 1], 5, "side group|free or idle|holders"),
    ],
)
def test_a_snapshot_whose_side_groups_do_not_agree_is_refused(path: list[Any], value: Any, fault: str) -> None:
    engine = make_engine(window(8, 12), states(6), checkpoint_interval=16)
    ask(engine, list(range(11)))
    engine.add_request([*range(11), *range(11)], PARAMS)
    engine.step()
    snapshot = json.loads(json.dumps(engine.snapshot()))
    with pytest.raises(ValueError, match=fault):
        check.snapshot(damaged(snapshot, path, value))
    assert State.from_snapshot(check.snapshot(snapshot)).snapshot() == engine.snapshot()


@pytest.mark.parametrize("kind", ["take", "borrow", "drop", "keep", "lose"])
def test_an_impossible_record_of_a_side_group_is_refused(kind: str) -> None:
    engine = make_engine(window(8, 12), states(3), checkpoint_interval=16)
    state = State.from_snapshot(engine.snapshot())
    for ids in (range(11), range(11), range(20, 40)):
        engine.add_request(list(ids), PARAMS)
        run(engine, check=True)
    follower, refused = Follower(state), False
    for record in engine.log.drain():
        if kind_of(record) == kind and not refused:
            head = record[: 4 if kind == "lose" else 5]
            wrong = [(7, 9)] if kind in ("take", "borrow", "keep") else [7]
            for broken in ((*head, wrong, *record[len(head) + 1 :]), (*record[:3], 2, *record[4:])):
                with pytest.raises(ValueError, match="impossible"):
                    Follower(state.copy()).take(broken)
            refused = True
        follower.take(record)
    assert refused and follower.state.snapshot() == engine.snapshot()
