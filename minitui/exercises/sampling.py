"""The rules of the exercise `sample`: a student draws the tokens of the simulated device. The device's "model" has
twelve tokens and sixteen distributions; the position in the text chooses one. Token 0 ends a reply. What one draw tells
is checked at once; the shares of all draws are checked at the end."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any, NamedTuple, cast

from minitui.exercises.student import Broken, Student, shown
from minitui.exercises.trial import Trial
from minitui.exercises.work import TEMPERATURES
from minitui.whatif.asked import Asked
from minitui.whatif.play import STOP

TOKENS, TABLES = 12, 16
CELLS = 2 * TOKENS  # what is counted: draws of each token, and of each rank
SIGMAS = 5.0  # a share that is off by more standard deviations is no chance: 1 in 1.7 million
ADDED = 5.0  # to all logits, which changes no probability
CHANGED = 0.1  # the share of draws that may change then, by rounding
CHANCE = 5.0  # percent: exact draws are as far from softmax, by chance
FEWEST = 10  # draws that two requests must have in common, to be compared

Draw = Callable[[list[float], float, int, int], Any]


class Drawn(NamedTuple):
    """One draw. `moved`: the token with ADDED to all logits; None: not tried."""

    request: int
    position: int
    temperature: float
    token: int
    moved: int | None


def _tables() -> list[list[float]]:
    chance = random.Random(6)
    tables = [[chance.gauss(0.0, 1.5) for _ in range(TOKENS)] for _ in range(TABLES)]
    for table in tables:
        table[0] = min(table) - 0.5  # replies do not end at once
    tables[9] = [logit + 800.0 for logit in tables[9]]
    return tables


LOGITS = _tables()
# of each token, by table: how many tokens have a larger logit
RANKS = [[sum(other > logit for other in table) for logit in table] for table in LOGITS]


def softmax(logits: list[float], temperature: float) -> list[float]:
    """Returns the probabilities of the tokens. `temperature` is above 0."""
    most = max(logits)
    weights = [math.exp((logit - most) / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def reference(logits: list[float], temperature: float, seed: int, position: int) -> int:
    """Draws exactly: the first token at which the probabilities so far exceed a number from 0 to 1."""
    if temperature == 0:
        return logits.index(max(logits))
    number, total = random.Random(f"{seed} {position}").random(), 0.0
    for token, share in enumerate(softmax(logits, temperature)):
        total += share
        if number < total:
            return token
    return len(logits) - 1


def temperature_of(request: int) -> float:
    """Returns the temperature of a request."""
    return TEMPERATURES[request % len(TEMPERATURES)]


class Reply:
    """The text of a request, whose tokens are drawn when the device asks for them."""

    def __init__(self, request: int, drawing: Drawing) -> None:
        self._request, self._drawing = request, drawing

    def __getitem__(self, position: int) -> int:
        return self._drawing.token(self._request, position) or STOP


class Drawing:
    """Draws the tokens of a run, and keeps what was drawn."""

    def __init__(self, draw: Draw, student: Student | None) -> None:
        self._draw, self._student = draw, student
        self.drawn: list[Drawn] = []

    def token(self, request: int, position: int) -> int:
        """Draws a token. Raises Broken."""
        table, heat = LOGITS[position % TABLES], temperature_of(request)
        token = self._draw(list(table), heat, request, position)
        moved = None
        if self._student is not None:
            self._check(self._student, table, heat, request, position, token)
            if heat == 1.0 and position % 4 == 0:
                moved = self._draw([logit + ADDED for logit in table], heat, request, position)
        self.drawn.append(Drawn(request, position, heat, token, moved))
        return int(token)

    def _check(
        self, student: Student, table: list[float], heat: float, seed: int, position: int, token: object
    ) -> None:
        if type(token) is not int or not 0 <= token < TOKENS:
            raise student.broken(f"`sample` returned {shown(token)}: a token is a whole number from 0 to {TOKENS - 1}")
        again = self._draw(list(table), heat, seed, position)
        if again != token:
            raise student.broken(
                f"the same logits, seed {seed} and position {position} gave token {token}, and then token "
                f"{shown(again)}"
            )
        if heat == 0 and table[token] != max(table):
            raise student.broken(
                f"at temperature 0, token {token} was drawn for r{seed}, but token {table.index(max(table))} has the "
                "largest logit"
            )

    # ---- all draws

    def at(self, temperature: float) -> list[Drawn]:
        """Returns the draws at a temperature."""
        return [one for one in self.drawn if one.temperature == temperature]

    def off(self, draws: Iterable[Drawn], temperature: float) -> tuple[float, str, int, float]:
        """Returns how far counts are from softmax at `temperature`, where they are farthest: (standard deviations, what
        is counted, the count, the expected count). The draws of each token are counted, and of each rank: a draw of
        rank 1 is one of the token with the largest logit."""
        counts, expected, spread = [0] * CELLS, [0.0] * CELLS, [1e-9] * CELLS
        for one in draws:
            logits = LOGITS[one.position % TABLES]
            ranks = RANKS[one.position % TABLES]
            counts[one.token] += 1
            counts[TOKENS + ranks[one.token]] += 1
            for token, share in enumerate(softmax(logits, temperature)):
                for cell in (token, TOKENS + ranks[token]):
                    expected[cell] += share
                    spread[cell] += share * (1 - share)
        sigmas = [abs(n - e) / math.sqrt(s) for n, e, s in zip(counts, expected, spread, strict=True)]
        worst = max(range(CELLS), key=sigmas.__getitem__)
        name = f"token {worst}" if worst < TOKENS else f"the token with the largest logit but {worst - TOKENS}"
        name = "the token with the largest logit" if worst == TOKENS else name
        return sigmas[worst], name, counts[worst], expected[worst]

    @property
    def distance(self) -> float:
        """How far the shares of tokens are from softmax: half the sum of the differences, in percent; CHANCE if it is
        less."""
        heats = [heat for heat in TEMPERATURES if heat]
        total = 0.0
        for heat in heats:
            draws = self.at(heat)
            shares = [0.0] * TOKENS
            for one in draws:
                shares[one.token] += 1
                for token, share in enumerate(softmax(LOGITS[one.position % TABLES], heat)):
                    shares[token] -= share
            total += sum(map(abs, shares)) / 2 / max(1, len(draws))
        return max(CHANCE, 100 * total / len(heats))

    def check_all(self) -> None:
        """Raise Broken if the draws do not follow softmax, or do not depend on the seed or the position."""
        warm = self.at(1.0)
        texts: dict[int, dict[int, int]] = defaultdict(dict)
        for one in warm:
            texts[one.request][one.position] = one.token
        pairs = [(a, b, texts[a].keys() & texts[b].keys()) for a, b in combinations(list(texts)[:8], 2)]
        pairs = [pair for pair in pairs if len(pair[2]) >= FEWEST]
        if pairs and all(texts[a][at] == texts[b][at] for a, b, common in pairs for at in common):
            a, b, common = pairs[0]
            raise Broken(f"seeds {a} and {b} drew the same {len(common)} tokens: the seed has no effect")
        repeats = [(text[at], text[at + TABLES]) for text in texts.values() for at in text if at + TABLES in text]
        if len(repeats) >= FEWEST and all(a == b for a, b in repeats):
            raise Broken(f"a request draws the same token whenever it has the same logits, {len(repeats):,} times of "
                         f"{len(repeats):,}: the position has no effect")
        sums = [(a, b, token, texts[b][at - (b - a)]) for a, b in combinations(texts, 2) if (b - a) % TABLES == 0
                for at, token in texts[a].items() if at - (b - a) in texts[b]]
        if len(sums) >= FEWEST and all(one == other for *_, one, other in sums):
            a, b = sums[0][:2]
            raise Broken(f"seed {a} at any position, and seed {b} at a position that is smaller by {b - a}, drew the "
                         f"same token, {len(sums):,} times of {len(sums):,}: only their sum has an effect")
        tried = [one for one in warm if one.moved is not None]
        changed = sum(1 for one in tried if one.moved != one.token)
        if tried and changed > CHANGED * len(tried):
            raise Broken(f"with {ADDED:g} added to every logit, {changed} of {len(tried)} draws changed, but softmax "
                         "stays the same: the probabilities are not normalised")
        for heat in (heat for heat in TEMPERATURES if heat):
            draws = self.at(heat)
            sigmas, what, seen, expected = self.off(draws, heat)
            if sigmas <= SIGMAS:
                continue
            if heat != 1.0 and self.off(draws, 1.0)[0] <= SIGMAS:
                raise Broken(f"at temperature {heat:g} the tokens are drawn as at temperature 1: the temperature has "
                             "no effect")
            raise Broken(f"at temperature {heat:g}, {what} was drawn {seen} times in {len(draws):,} draws; "
                         f"softmax expects {expected:.0f}: the draws are biased")


class SampleTrial(Trial):
    """A run whose tokens are drawn by a student, or by the reference."""

    drawing: Drawing

    def draw_with(self, draw: Draw) -> None:
        """Let `draw` draw all tokens."""
        self.drawing = Drawing(draw, self.student)

    def _submit(self, asked: Asked, begin: int = 0) -> None:
        super()._submit(asked, begin)
        self.device.replies[asked.id] = cast("list[int]", Reply(asked.id, self.drawing))


def sample_end(trial: Trial, other: Trial) -> None:
    """Check all draws of a run. Raises Broken."""
    assert isinstance(trial, SampleTrial)
    trial.drawing.check_all()
