"""Makes a thousand wordings of a question for training.

A model this small learns strings, not synonyms. So it rarely sees a user turn twice in one form. Wordings come from
templates filled with names, a table of synonyms, keywords, missing and foreign words, typos, casing and fillers.
Some of the heavily damaged wordings are answered "I did not catch that", so that the model learns when not to answer.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from typing import Any

from minitui.dev.tutor.dataset import HeldOut, Item

CHOICE = re.compile(r"\(([^()]*)\)")
KEYBOARD = "qwertyuiop asdfghjkl zxcvbnm"
ATTEMPTS = 12


@dataclass(frozen=True)
class Damage:
    """The probabilities with which wordings are changed."""

    plain: float = 0.25  # a wording of the corpus is not changed at all
    hard: float = 0.45  # a wording loses and swaps many words
    abstain: float = 0.45  # mean probability that a hard wording is answered "I did not catch that"
    synonym: float = 0.3  # each phrase of the table is replaced
    template: float = 0.25  # a wording comes from a generic template
    keywords: float = 0.12  # only the content words remain, in any order
    answer_span: float = 0.08  # a piece of the answer serves as the question
    concepts: float = 0.25  # the question is made of the item's concepts
    typo: float = 0.2
    newer: float = 0.4  # with an older corpus: a question is a wording that it lacks
    noisy: float = 0.0  # all content words of a wording stay, between unrelated words


def expand(pattern: str, rng: random.Random) -> str:
    """Returns one text of a pattern such as "(what|which) size": chooses at random, in the innermost brackets first."""
    while match := CHOICE.search(pattern):
        chosen = rng.choice(match.group(1).split("|"))
        pattern = pattern[: match.start()] + chosen + pattern[match.end() :]
    return re.sub(r"\s+", " ", pattern).strip()


def variants(pattern: str) -> int:
    """Returns how many texts a pattern without nested brackets stands for."""
    return math.prod(1 + choices.count("|") for choices in CHOICE.findall(pattern))


class Synonyms:
    """The table of interchangeable phrases; a plural "s" of the replaced phrase is kept."""

    def __init__(self, groups: list[list[str]]) -> None:
        self._others: dict[str, list[str]] = {}
        for group in groups:
            head, rest = group[0], group[1:]
            self._others.setdefault(head, []).extend(rest)
            for member in rest:
                if " " in member or len(member) > 4:
                    self._others.setdefault(member, []).extend([head, *(other for other in rest if other != member)])
        phrases = sorted(self._others, key=len, reverse=True)
        self._pattern = re.compile(r"\b(" + "|".join(map(re.escape, phrases)) + r")(s?)\b")

    def replace(self, text: str, chance: float, rng: random.Random) -> str:
        """Returns the text; each known phrase is replaced, with probability `chance`, by another of its group."""

        def other(match: re.Match[str]) -> str:
            if rng.random() >= chance:
                return match.group(0)
            return rng.choice(self._others[match.group(1)]) + match.group(2)

        return self._pattern.sub(other, text)


class Wordings:
    """Draws user turns for items, and inputs that the model should not understand."""

    def __init__(self, items: dict[str, Item], words: dict[str, Any], held_out: HeldOut, damage: Damage) -> None:
        self._items = items
        self._held_out = held_out
        self._damage = damage
        self._synonyms = Synonyms(words["synonyms"])
        self._templates: dict[str, list[str]] = words["templates"]
        self._prefixes: list[str] = words["prefixes"]
        self._suffixes: list[str] = words["suffixes"]
        self._common: list[str] = words["common"]
        self._slots: dict[str, list[str]] = words["slots"]
        self._unknown: list[str] = words["unknown"]
        self._stop: frozenset[str] = frozenset(words["stop"])
        self._glue: list[str] = words["glue"]
        self._openings: list[str] = words["openings"]
        # A pattern is drawn the more often, the more texts it stands for; the canonical question in one of eight draws.
        self._texts = {item.id: (item.question, *item.wordings) for item in items.values()}
        self._chances = {}
        for item in items.values():
            chances = [1 + math.log2(variants(wording)) for wording in item.wordings]
            self._chances[item.id] = [max(1.0, sum(chances) / 7), *chances]
        known = [item for item in items.values() if item.kind in ("engine", "app")]
        self._known = [item.id for item in known]
        self._domain = sorted(
            {
                word
                for item in known
                for wording in (item.question, *item.wordings)
                for word in self._content_words(wording)
            }
        )
        self._foreign = sorted({*self._common} - {*self._domain})

    def draw(self, item: Item, rng: random.Random) -> tuple[str, bool]:
        """Returns a wording of the item's question, and True if it is answered; False: "I did not catch that"."""
        for _ in range(ATTEMPTS):
            # 0: light damage at most; up to 1: the wording loses and swaps many of its words.
            severity = rng.random() if rng.random() < self._damage.hard else 0.0
            text = self._bend(self._source(item, rng), severity, rng)
            if text and not self._held_out.too_near(text):
                doubtful = 2 * severity * self._damage.abstain if item.kind in ("engine", "app") else 0.0
                return self._finish(text, rng), rng.random() >= doubtful
        return item.question, True

    def plain(self, item: Item, rng: random.Random) -> str:
        """Returns a wording of the corpus, with changes to capitals and end mark only: the model memorises it."""
        for _ in range(ATTEMPTS):
            text = self._wording(item, rng)
            if text == item.question or not self._held_out.too_near(text):
                return text if rng.random() < 0.6 else casing(text, rng)
        return item.question

    def lightly(self, item: Item, pattern: str, rng: random.Random) -> str:
        """Returns a text of the item's pattern, half of the time with synonyms, a lost word or typos."""
        for _ in range(ATTEMPTS):
            text = self.fill(expand(pattern, rng), rng)
            if rng.random() < 0.5:
                text = self._bend(text, 0.0, rng)
            if text and not self._held_out.too_near(text):
                return self._finish(text, rng)
        return item.question

    def noisy(self, item: Item, rng: random.Random) -> str:
        """Returns a wording of the item between unrelated words; some of its small words are missing."""
        for _ in range(ATTEMPTS):
            words, foreign = [rng.choice(self._prefixes)], 0.4 * rng.random()
            for word in self._wording(item, rng).lower().split():
                if word.strip("?.,!") not in self._stop or rng.random() < 0.75:
                    words.append(word)
                if rng.random() < foreign:
                    words.append(rng.choice(self._foreign))
            text = " ".join(words)
            if not self._held_out.too_near(text):
                return self._finish(text, rng)
        return item.question

    def _wording(self, item: Item, rng: random.Random) -> str:
        """Returns a text of the corpus for the item's question."""
        pattern = rng.choices(self._texts[item.id], self._chances[item.id])[0]
        return self.fill(expand(pattern, rng), rng)

    def fill(self, text: str, rng: random.Random) -> str:
        """Returns the text with every {slot} replaced by one of the slot's words."""
        return re.sub(r"\{(\w+)\}", lambda match: rng.choice(self._slots[match.group(1)]), text)

    def not_caught(self, rng: random.Random) -> str:
        """Returns an input without an answer: unknown terms, random words, an incomplete question, a mixture of two."""
        maker = rng.choices(
            (self._unknown_term, self._salad, self._letters, self._pointless, self._mixture),
            weights=(0.3, 0.15, 0.07, 0.23, 0.25),
        )[0]
        for _ in range(ATTEMPTS):
            text = self._finish(self.fill(maker(rng), rng), rng)
            if text and not self._held_out.too_near(text):
                return text
        return "asdf"

    def _unknown_term(self, rng: random.Random) -> str:
        if rng.random() < 0.35:
            return self._template_of(made_up(rng), rng.choice(("what", "why", "how")), rng)
        return self._bend(self.fill(expand(rng.choice(self._unknown), rng), rng), 0.0, rng)

    def _salad(self, rng: random.Random) -> str:
        """Returns random words after an opening."""
        words = [rng.choice(rng.choice((self._domain, self._common, self._glue))) for _ in range(rng.randint(3, 9))]
        return f"{rng.choice(self._openings)} {' '.join(words)}".strip()

    def _letters(self, rng: random.Random) -> str:
        if rng.random() < 0.3:
            return " ".join(made_up(rng) for _ in range(rng.randint(1, 3)))
        letters = "abcdefghijklmnopqrstuvwxyz" if rng.random() < 0.7 else "asdfghjkl;"
        return " ".join("".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(rng.randint(1, 4)))

    def _pointless(self, rng: random.Random) -> str:
        """Returns a wording of the corpus with every content word replaced by a common word."""
        while True:
            item = self._items[rng.choice(self._known)]
            words = expand(rng.choice((item.question, *item.wordings)), rng).lower().split()
            kept = [word for word in words if word.strip("?.,!") in self._stop]
            if len(kept) < len(words) - 1:
                return " ".join(
                    word if word.strip("?.,!") in self._stop else rng.choice(self._common) for word in words
                )

    def _mixture(self, rng: random.Random) -> str:
        """Returns pieces of questions about different things, which make no sense together."""
        pieces: list[str] = []
        for item in (self._items[name] for name in rng.sample(self._known, rng.randint(2, 3))):
            if item.concepts and rng.random() < 0.6:
                pieces.append(rng.choice(rng.choice(item.concepts)))
            else:
                words = self._content_words(rng.choice((item.question, *item.wordings)))
                pieces.append(rng.choice(words or ["it"]))
        glued = " ".join(f"{piece} {rng.choice(self._glue)}" if rng.random() < 0.5 else piece for piece in pieces)
        return self._synonyms.replace(f"{rng.choice(self._openings)} {glued}".strip(), self._damage.synonym, rng)

    def _source(self, item: Item, rng: random.Random) -> str:
        """Returns a wording of the item's question before any damage."""
        kind = rng.random()
        if item.names and kind < self._damage.template:
            aspect = rng.choice(list(item.names))
            return self._template_of(rng.choice(item.names[aspect]), aspect, rng)
        if item.kind in ("engine", "app") and kind > 1 - self._damage.answer_span:
            words = re.sub(r"[`*|#\n]", " ", item.answer).split()
            size = rng.randint(4, 10)
            start = rng.randrange(max(1, len(words) - size))
            return " ".join(words[start : start + size]).lower()
        if item.concepts and rng.random() < self._damage.concepts:
            return self._of_concepts(item.concepts, rng)
        text = self._wording(item, rng)
        if rng.random() < self._damage.keywords:
            content = self._content_words(text)
            if rng.random() < 0.5:
                rng.shuffle(content)
            return " ".join(content) or text
        return text

    def _of_concepts(self, concepts: tuple[tuple[str, ...], ...], rng: random.Random) -> str:
        """Returns a loose question: an opening, then one phrase from each of several groups, joined by small words."""
        groups = rng.sample(concepts, rng.randint(2, len(concepts)))
        if rng.random() < 0.6:
            groups.sort(key=concepts.index)
        words: list[str] = []
        for group in groups:
            if words and rng.random() < 0.6:
                words += rng.sample(self._glue, rng.randint(1, 2))
            words.append(rng.choice(group))
        return f"{rng.choice(self._openings)} {' '.join(words)}".strip()

    def _content_words(self, text: str) -> list[str]:
        """Returns the content words of the text in lower case."""
        words = re.findall(r"[a-z0-9_<>.,/+-]*[a-z0-9_<>/+-]", expand(text, random.Random(0)).lower())
        return [word for word in words if word not in self._stop]

    def _template_of(self, name: str, aspect: str, rng: random.Random) -> str:
        return rng.choice(self._templates[aspect]).replace("{x}", name)

    def _bend(self, text: str, severity: float, rng: random.Random) -> str:
        """Returns the text with synonyms, lost words, foreign words, and sometimes its two parts swapped."""
        text = self._synonyms.replace(text.lower(), self._damage.synonym, rng)
        words = text.split()
        if severity:
            lost, foreign = 0.4 * severity * rng.uniform(0.3, 1), 0.4 * severity * rng.uniform(0.3, 1)
        else:
            lost, foreign = (0.12, 0.03) if rng.random() < 0.4 else (0.0, 0.0)
        bent: list[str] = []
        for word in words:
            stop = word.strip("?.,!") in self._stop
            if rng.random() < (lost * 1.5 if stop else lost * 0.7) and len(words) > 2:
                continue
            if rng.random() < (foreign * 0.4 if stop else foreign):
                word = rng.choice(self._common)
            bent.append(word)
            if rng.random() < foreign * 0.25:
                bent.append(rng.choice(self._common))
        if len(bent) > 2 and rng.random() < (0.25 if severity else 0.05):
            cut = rng.randrange(1, len(bent))
            bent = bent[cut:] + bent[:cut]
        text = " ".join(bent)
        if rng.random() < 0.22:
            text = rng.choice(self._prefixes) + " " + text
        if rng.random() < 0.15:
            text = text.rstrip("?. ") + " " + rng.choice(self._suffixes)
        return text.strip()

    def _finish(self, text: str, rng: random.Random) -> str:
        if rng.random() < self._damage.typo:
            text = typos(text, rng)
        return casing(text, rng)


def typos(text: str, rng: random.Random) -> str:
    """Returns the text with one or two typing errors."""
    for _ in range(rng.randint(1, 2)):
        if len(text) < 5:
            return text
        at = rng.randrange(1, len(text) - 1)
        slip = rng.randrange(4)
        if slip == 0:
            text = text[:at] + text[at + 1 :]
        elif slip == 1:
            text = text[:at] + text[at + 1] + text[at] + text[at + 2 :]
        elif slip == 2:
            text = text[:at] + text[at] + text[at:]
        else:
            key = KEYBOARD.find(text[at].lower())
            text = text[:at] + (KEYBOARD[key - 1] if key > 0 else "") + text[at + 1 :]
    return text


def casing(text: str, rng: random.Random) -> str:
    """Returns the text with another capitalisation or end mark."""
    style = rng.random()
    text = text.strip()
    if style < 0.35:
        text = text[:1].upper() + text[1:]
    elif style < 0.4:
        text = text.upper()
    elif style < 0.43:
        text = text.title()
    elif style < 0.75:
        text = text.lower()
    if rng.random() < 0.4:
        text = text.rstrip("?.! ") + rng.choice(("?", "?", "?", "", "", ".", "!"))
    return text


def made_up(rng: random.Random) -> str:
    """Returns one or two words that do not exist."""

    def word() -> str:
        return "".join(rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))

    return word() if rng.random() < 0.6 else f"{word()} {word()}"
