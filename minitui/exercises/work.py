"""The requests of each exercise, the engine that serves them, and what a step of its simulated device costs."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from minitui.viewmodel.explain.cost_model import PREFILL_TOKENS
from minitui.viewmodel.history.steps import Steps
from minitui.whatif.asked import UNKNOWN, Asked, Recorded
from minitui.whatif.cost import AS_FITTED, FEATURES, KINDS, Costs
from minitui.whatif.settings import Setting

STEP_MS, TOKEN_MS = 4.0, 0.05  # of a step, and of each of its tokens: round numbers, not those of a device
WORDS = 1_000  # ids of prompts
TEMPERATURES = (1.0, 0.0, 2.0, 0.5)  # of the requests of `sample`, in turn


class Work(NamedTuple):
    """Requests, and the settings of the engine that serves them."""

    recorded: Recorded
    setting: Setting


def costs() -> Costs:
    """Returns the costs of the simulated device: without deviations, and never extrapolated."""
    own = [0.0] * len(FEATURES)
    own[0] = STEP_MS
    own[FEATURES.index("rows")] = own[PREFILL_TOKENS] = TOKEN_MS
    nothing, most = [0.0] * len(FEATURES), [inf] * len(FEATURES)
    return Costs(own, nothing, False, most, 1, 0.0, [], [AS_FITTED] * len(KINDS))


def _work(asked: Iterable[tuple[float, list[int], int]], setting: Setting) -> Work:
    """Returns the work of (second of arrival, prompt, tokens of the reply) in the order of arrival."""
    requests = [
        Asked(i + 1, "", len(prompt), len(prompt) + reply, at, reply=reply, known=array("i", prompt))
        for i, (at, prompt, reply) in enumerate(sorted(asked, key=lambda one: one[0]))
    ]
    return Work(Recorded(requests, [], setting.block_size, False, Steps(), [], UNKNOWN), setting)


def _text(chance: random.Random, tokens: int) -> list[int]:
    return [chance.randrange(WORDS) for _ in range(tokens)]


def admissions() -> Work:
    """More requests than the batch has rows for: short questions, some about long documents."""
    chance = random.Random(1)
    documents = [_text(chance, 640) for _ in range(3)]
    asked, at = [], 0.0
    for i in range(90):
        at += chance.expovariate(60.0)
        text = chance.choice(documents) if i % 6 == 3 else []
        asked.append((at, text + _text(chance, chance.randrange(20, 120)), chance.randrange(10, 50)))
    return _work(asked, Setting(budget=512, seqs=8, blocks=420, block_size=16, context=2048))


def evictions() -> Work:
    """Chats that ask again and again about a text that grows, and texts that are asked once, in a small pool. Two long
    replies share a beginning, which becomes the least recently used text while both use it."""
    chance = random.Random(2)
    systems = [_text(chance, 48), _text(chance, 80)]
    asked = [(chance.uniform(0.0, 3.6), _text(chance, chance.randrange(100, 240)), 10) for _ in range(60)]
    shared = _text(chance, 48)
    asked += [(0.5, shared + _text(chance, 20), 150) for _ in range(2)]
    for chat in range(12):
        at, text = 0.3 * chat + chance.random() * 0.1, list(systems[chat % 3 > 0])
        for _ in range(7):
            text += _text(chance, chance.randrange(12, 40))
            asked.append((at, list(text), chance.randrange(5, 20)))
            at += chance.uniform(0.08, 0.22)
    return _work(asked, Setting(budget=512, seqs=4, blocks=80, block_size=16, context=1024))


def chunks() -> Work:
    """Chats that write replies, while long prompts arrive."""
    chance = random.Random(3)
    asked = [(chance.uniform(0.0, 0.2), _text(chance, chance.randrange(20, 80)), 200) for _ in range(12)]
    asked += [(0.1 + 0.12 * i, _text(chance, chance.randrange(900, 1600)), 40) for i in range(8)]
    return _work(asked, Setting(budget=512, seqs=24, blocks=1100, block_size=16, context=2048))


def preemptions() -> Work:
    """Replies of which the pool holds half."""
    chance = random.Random(4)
    asked, at = [], 0.0
    for _ in range(36):
        at += chance.expovariate(30.0)
        asked.append((at, _text(chance, chance.randrange(20, 110)), chance.randrange(30, 130)))
    return _work(asked, Setting(budget=256, seqs=8, blocks=44, block_size=16, context=640))


def samples() -> Work:
    """Replies whose tokens are drawn: prompts of one length, so that all have the same positions."""
    chance = random.Random(5)
    asked = [(0.004 * i, _text(chance, 16), 80) for i in range(80)]
    return _work(asked, Setting(budget=512, seqs=16, blocks=200, block_size=16, context=256))
