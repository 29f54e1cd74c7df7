"""The rules of the exercise `sample`: a student draws the tokens of the simulated device. The device's "model" has
twelve tokens and sixteen distributions; the position in the text chooses one. Token 0 ends a reply. What one draw tells
is checked at once; the shares of all draws are checked at the end."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import numpy as np

from minitui.exercises.student import Broken, Student, shown, whole
from minitui.exercises.trial import Trial
from minitui.exercises.work import TEMPERATURES
from minitui.text import count
from minitui.whatif.asked import Asked
from minitui.whatif.stretches import STOP

TOKENS, TABLES = 12, 16
CELLS = 2 * TOKENS  # what is counted: draws of each token, and of each rank
SIGMAS = 5.0  # a share that is off by more standard deviations is no chance: 1 in 1.7 million
ADDED = 5.0  # to all logits, which changes no probability
CHANGED = 0.1  # the share of draws that may change then, by rounding
CHANCE = 5.0  # percent: exact draws are as far from softmax, by chance
SEEDS, POSITIONS = 16, 200  # of the draws from equal logits, at temperature 1
FEWEST = 90  # pairs of such draws, to be compared
SAME = 0.25  # the share of these pairs that may draw the same, beside those that do by chance
OFTEN = 0.5  # a share of one of TOKENS equal logits that is no chance, even among a few independent draws
NO_EFFECT = {(1, 0): ": the seed has no effect", (0, 1): ": the position has no effect",
             (1, -1): ": only their sum has an effect"}

SORTED = "the tokens are drawn as if the logits were sorted: is it an index of `logits` in their order?"

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


# words for usual faults, and what these draw instead of softmax(logits, temperature)
GUESSES: tuple[tuple[str, Callable[[list[float], float], list[float]]], ...] = (
    ("the tokens are drawn as at temperature 1, so the temperature has no effect",
     lambda logits, heat: softmax(logits, 1.0)),
    ("the logits are multiplied by the temperature: divide by it", lambda logits, heat: softmax(logits, 1 / heat)),
    ("small logits are drawn most: is the sign wrong?", lambda logits, heat: softmax([-x for x in logits], heat)),
    (SORTED, lambda logits, heat: softmax(sorted(logits), heat)),
    (SORTED, lambda logits, heat: softmax(sorted(logits, reverse=True), heat)),
)


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
        self.grid = np.zeros((0, POSITIONS), np.int64)  # tokens drawn from equal logits, by seed and position

    def draw_grid(self) -> None:
        """Draw from equal logits, with neighbouring seeds and positions. Raises Broken."""
        equal, student = [0.0] * TOKENS, cast(Student, self._student)
        student.printed.muted = True
        self.grid = np.array([[self._token(student, self._draw(list(equal), 1.0, seed, position))
                               for position in range(POSITIONS)] for seed in range(1, SEEDS + 1)])

    def token(self, request: int, position: int) -> int:
        """Draws a token. Raises Broken."""
        table, heat = LOGITS[position % TABLES], TEMPERATURES[request % len(TEMPERATURES)]
        token = self._draw(list(table), heat, request, position)
        moved = None
        if self._student is not None:
            token = self._checked(self._student, table, heat, request, position, token)
            if heat == 1.0 and position % 4 == 0:
                moved = self._draw([logit + ADDED for logit in table], heat, request, position)
        self.drawn.append(Drawn(request, position, heat, token, moved))
        return int(token)

    @staticmethod
    def _token(student: Student, drawn: object) -> int:
        token = whole(drawn)
        if token is None or not 0 <= token < TOKENS:
            raise student.broken(f"`sample` returned {shown(drawn)}: a token is a whole number from 0 to {TOKENS - 1}")
        return token

    def _checked(
        self, student: Student, table: list[float], heat: float, seed: int, position: int, drawn: object
    ) -> int:
        token = self._token(student, drawn)
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
        return token

    # ---- all draws

    def at(self, temperature: float) -> list[Drawn]:
        """Returns the draws at a temperature."""
        return [one for one in self.drawn if one.temperature == temperature]

    def off(self, draws: Iterable[Drawn], probabilities: list[list[float]]) -> tuple[float, str, int, float]:
        """Returns how far counts are from the `probabilities` of each table, where they are farthest: (standard
        deviations, what is counted, the count, the expected count). The draws of each token are counted, and of each
        rank: a draw of rank 1 is one of the token with the largest logit."""
        counts, expected, spread = [0] * CELLS, [0.0] * CELLS, [1e-9] * CELLS
        for one in draws:
            ranks = RANKS[one.position % TABLES]
            counts[one.token] += 1
            counts[TOKENS + ranks[one.token]] += 1
            for token, share in enumerate(probabilities[one.position % TABLES]):
                for cell in (token, TOKENS + ranks[token]):
                    expected[cell] += share
                    spread[cell] += share * (1 - share)
        sigmas = [abs(n - e) / math.sqrt(s) for n, e, s in zip(counts, expected, spread, strict=True)]
        worst = max(range(CELLS), key=sigmas.__getitem__)
        place = worst - TOKENS + 1
        nth = {1: "", 2: "2nd ", 3: "3rd "}.get(place, f"{place}th ")
        name = f"token {worst}" if worst < TOKENS else f"the token with the {nth}largest logit"
        return sigmas[worst], name, counts[worst], expected[worst]

    @staticmethod
    def likelihood(draws: Iterable[Drawn], probabilities: list[list[float]]) -> float:
        """Returns the logarithm of the probability of draws, given the `probabilities` of each table."""
        return sum(math.log(max(1e-9, probabilities[one.position % TABLES][one.token])) for one in draws)

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

    @staticmethod
    def _pairs() -> Iterable[tuple[tuple[int, int], str, np.ndarray, np.ndarray]]:
        """Yields pairs of draws that a usual mistake makes equal: (the steps in seed and position, what they have in
        common, the indices of the first draws in the grid, those of the second)."""
        at = np.arange(SEEDS * POSITIONS).reshape(SEEDS, POSITIONS)  # row 0 is seed 1
        for up in range(1, POSITIONS // 2):
            yield (0, up), f"the same seed, the position larger by {up}", at[:, :-up], at[:, up:]
        for right in (1, 2, 3, 4):
            for up in range(-POSITIONS + 1, POSITIONS) if right < 4 else (0,):
                low, high = max(0, -up), POSITIONS - max(0, up)
                moved = f"position {'larger' if up > 0 else 'smaller'} by {abs(up)}" if up else "same position"
                yield (right, up), f"the seed larger by {right}, the {moved}", (
                    at[:-right, low:high]), at[right:, low + up : high + up]
        half, square = POSITIONS // 2, at[:, 1 : SEEDS + 1]
        yield (0, 0), "equal products of seed and position", at[: SEEDS // 2, 2::2], at[1::2, 1:half]
        above = np.triu_indices(SEEDS, 1)
        yield (0, 0), "seed and position exchanged", square[above], square.T[above]
        yield (0, 0), "the same digits, one after the other", at[0, 110:200], at[10, 10:100]

    def _check_chance(self) -> None:
        """Raise Broken if draws that should be independent are often the same."""
        tokens, worst, told = self.grid.ravel(), SAME, ""
        counts, warm = np.bincount(tokens, minlength=TOKENS), self.at(1.0)
        if counts.max() == tokens.size and len({(one.position % TABLES, one.token) for one in warm}) <= TABLES:
            raise Broken(f"neither seed nor position has an effect: at temperature 1, the same logits gave the same "
                         f"token in all {len(warm):,} draws")
        if counts.max() > OFTEN * tokens.size:
            raise Broken(f"with {TOKENS} equal logits, token {counts.argmax()} was drawn {counts.max():,} times of "
                         f"{tokens.size:,}; softmax expects 1 in {TOKENS}: do the weights add up to 1, or is a token "
                         "found by its logit?")
        chance = float(((counts / tokens.size) ** 2).sum())  # more than 1 in TOKENS if the draws are biased
        for steps, words, first, second in self._pairs():
            same = tokens[first] == tokens[second]
            more = (same.mean() - chance) / (1 - chance)
            if same.size < FEWEST or more <= worst:
                continue
            worst = more
            likely = same + same.mean(-1, keepdims=True) + same.mean(0)  # a pair that is the same by no chance
            (a, p), (b, q) = (divmod(int(which.flat[likely.argmax()]), POSITIONS) for which in (first, second))
            told = (f"seed {a + 1} at position {p} and seed {b + 1} at position {q} draw the same: of {same.size:,} "
                    f"such pairs ({words}), {same.sum():,} drew the same of {TOKENS} tokens with equal logits; "
                    f"by chance about {same.size / TOKENS:,.0f} do (1 in {TOKENS})"
                    + (NO_EFFECT.get(steps, "") if same.all() else ""))
        if told:
            raise Broken(told)

    def check_all(self) -> None:
        """Raise Broken if the draws do not follow softmax, or do not depend on the seed or the position."""
        warm = self.at(1.0)
        if warm and not any(RANKS[one.position % TABLES][one.token] for one in warm):
            raise Broken("nothing is drawn: at temperature 1, the token with the largest logit came every time, "
                         f"{len(warm):,} times of {len(warm):,}")
        self._check_chance()
        tried = [one for one in warm if one.moved is not None]
        changed = sum(1 for one in tried if one.moved != one.token)
        if tried and changed > CHANGED * len(tried):
            raise Broken(f"with {ADDED:g} added to every logit, {changed} of {len(tried)} draws changed, but softmax "
                         "stays the same: the probabilities are not normalised")
        for heat in (heat for heat in TEMPERATURES if heat):
            draws = self.at(heat)
            sigmas, what, seen, expected = self.off(draws, [softmax(logits, heat) for logits in LOGITS])
            if sigmas <= SIGMAS:
                continue
            guesses = [(words, [draw(logits, heat) for logits in LOGITS]) for words, draw in GUESSES]
            why, guess = max(guesses, key=lambda one: self.likelihood(draws, one[1]))
            why = why if self.off(draws, guess)[0] <= SIGMAS else "the draws are biased"
            raise Broken(f"at temperature {heat:g}, {what} was drawn {count(seen, 'time')} in {len(draws):,} draws; "
                         f"softmax expects {expected:,.0f}: {why}")


class SampleTrial(Trial):
    """A run whose tokens are drawn by a student, or by the reference."""

    drawing: Drawing

    def draw_with(self, draw: Draw) -> None:
        """Let `draw` draw all tokens."""
        self.drawing = Drawing(draw, self.student)

    def run(self) -> SampleTrial:
        super().run()
        if self.student is not None:
            self.drawing.draw_grid()
        return self

    def _submit(self, asked: Asked, begin: int = 0) -> None:
        super()._submit(asked, begin)
        self.device.replies[asked.id] = cast("list[int]", Reply(asked.id, self.drawing))


def sample_end(trial: Trial, other: Trial) -> None:
    """Check all draws of a run. Raises Broken."""
    assert isinstance(trial, SampleTrial)
    trial.drawing.check_all()
