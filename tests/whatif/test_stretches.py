"""A player that visits only the rows that need something plays as one that visits each row in each step does."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from minitui.exercises import work
from minitui.viewmodel.history.steps import Steps
from minitui.whatif.asked import UNKNOWN, Asked, Recorded
from minitui.whatif.cost import Costs
from minitui.whatif.play import Player
from minitui.whatif.settings import Setting


class EachRow(Player):
    visits_all_rows = True


def random_requests(r: random.Random, size: int) -> Recorded:
    """Returns requests, some of which ran before the recording, end in their queue, stop early or share a beginning."""
    texts = [[r.randrange(9) for _ in range(r.randrange(4, 60))] for _ in range(3)]
    requests, at = [], 0.0
    for i in range(1, 40):
        at += r.choice([0.0, 0.0, r.expovariate(20.0)])
        prompt = r.choice([[], *texts]) + [r.randrange(9) for _ in range(r.randrange(1, 40))]
        reply = r.choice([0, 1, 2, r.randrange(3, 90)])
        one = Asked(i, f"chat {i % 7}", len(prompt), len(prompt) + max(1, reply), at, reply=reply)
        one.known = array("i", prompt + [r.randrange(9) for _ in range(reply)])
        if not reply:
            one.ended, one.reason = at + r.expovariate(10.0), "abort"
        elif r.random() < 0.3:
            one.reason, one.most = "stop", one.most + r.randrange(20)
        if i < 5 and r.random() < 0.5:
            one.at, one.before = 0.0, r.randrange(1, one.total)
        requests.append(one)
    earlier = [one for one in requests[8:] if one.ended is None]
    for one, after in zip(earlier[1::5], earlier[::5], strict=False):
        one.after, after.ended = after, after.at + 0.01
    return Recorded(requests, [(array("i", texts[0]), 0)], size, False, Steps(), [], UNKNOWN)


def outcome(kind: type[Player], recorded: Recorded, costs: Costs, setting: Setting, arrivals: str) -> tuple[Any, ...]:
    player = kind(recorded, costs, setting, arrivals, traced=True).run()
    requests = [
        (one.asked.id, one.submitted, one.cached, one.preemptions, one.finished, one.tokens)
        for one in player.played.values()
    ]
    return player.records, player.snapshot, requests, player.figures, player.notes, player.device.most


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_records_and_times_are_those_of_a_player_that_visits_each_row(seed, overlap):
    r = random.Random(seed)
    size = r.choice([1, 4, 16])
    recorded, costs = random_requests(r, size), work.costs()
    costs.overlap = overlap
    seqs = r.choice([2, 6, 20])
    setting = Setting(
        budget=r.choice([seqs, 30, 200]) if seqs < 30 else 40, seqs=seqs, blocks=r.randrange(140, 400) // size,
        block_size=size, context=r.choice([130, 2048]), policy=r.choice(["fcfs", "longest-prefix", "static"]),
        eviction=r.choice(["lru", "fifo"]), cache=r.random() < 0.7, chunking=r.random() < 0.7, gap=r.choice([0.0, 5.0]),
    )
    for arrivals in ("recorded", "closed"):
        each = outcome(EachRow, recorded, costs, setting, arrivals)
        found = outcome(Player, recorded, costs, setting, arrivals)
        for one, other in zip(found[0], each[0], strict=True):
            assert one == other
        assert found[1:] == each[1:]


def test_random_requests_are_preempted_and_stop_and_end_early():
    """The requests above meet what they are meant to meet."""
    kinds, reasons = [], set()
    for seed in range(10):
        r = random.Random(seed)
        setting = Setting(budget=30, seqs=6, blocks=50, block_size=4, context=2048)
        player = Player(random_requests(r, 4), work.costs(), setting, traced=True)
        kinds += [record[2] for record in player.run().records]
        reasons |= {record[4] for record in player.records if record[2] == "finish"}
        assert player.known is not None
    assert kinds.count("preempt") > 20 and kinds.count("evict") > 20
    assert reasons == {"length", "stop", "abort"}
