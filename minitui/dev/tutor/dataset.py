"""The corpus on disk: questions with their answers and wordings, and the frozen evaluation.

The files are in corpus/: JSON lines, except words.json. An *item* is one question: its id, the canonical question, the
answer, wordings to train on (patterns such as "(what|which) block (size|length)"), names of its subject for the generic
templates, and the answers to follow-ups such as "why?".
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).resolve().parent / "corpus"
ITEM_FILES = ("engine.jsonl", "app.jsonl", "talk.jsonl", "refusals.jsonl")
# The frozen evaluation, questions as students would put them, and the questions by which wordings are improved.
CHECK_FILES = ("evaluation.jsonl", "students.jsonl", "development.jsonl")
NOT_CAUGHT = "not_caught"  # id of the item with the answer "I did not catch that"
NO_MORE = "no_more"  # id of the item that answers a follow-up without an answer of its own
NEAR_DUPLICATE = 0.8  # similarity from which a wording is too near to a held-out question
NEAR_STUDENTS = 0.6  # the same for the questions of students.jsonl: they are younger, and judged more strictly


@dataclass(frozen=True)
class Item:
    """One question that the model should know.

    names: an aspect ("what", "why", "how") -> names of the subject. follow: a kind of follow-up ("why", "example",
    "more") -> the id of the item with its answer. asked_next: further follow-ups, each a list of wordings and the id of
    the answer. concepts: groups of interchangeable phrases; a user's question is likely to contain some of them.
    """

    id: str
    kind: str  # engine, app, talk or refusals
    question: str
    answer: str
    wordings: tuple[str, ...] = ()
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    follow: dict[str, str] = field(default_factory=dict)
    asked_next: tuple[tuple[tuple[str, ...], str], ...] = ()
    concepts: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Check:
    """One input of the frozen evaluation. facts and never are regular expressions, matched ignoring case."""

    tier: str  # near, far, outside, garbled, students, or seven: the seven questions of five phrasings each
    id: str
    question: str
    facts: tuple[str, ...]
    never: tuple[str, ...]

    @property
    def near(self) -> float:
        """The similarity from which a wording is too near to this question."""
        return NEAR_STUDENTS if self.tier in ("seven", "students") else NEAR_DUPLICATE


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All objects of a JSON lines file."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def load_items(folder: Path = CORPUS) -> dict[str, Item]:
    """Returns all items by id, in corpus order. Raises ValueError for an id that is used twice, or a follow-up that is
    not in the corpus."""
    items: dict[str, Item] = {}
    for name in ITEM_FILES:
        for row in read_jsonl(folder / name):
            if row["id"] in items:
                raise ValueError(f"corpus id {row['id']!r} is used twice; the second time in {name}: rename one")
            items[row["id"]] = Item(
                id=row["id"],
                kind=name.removesuffix(".jsonl"),
                question=row["question"],
                answer=row["answer"],
                wordings=tuple(row.get("wordings", ())),
                names={aspect: tuple(names) for aspect, names in row.get("names", {}).items()},
                follow=row.get("follow", {}),
                asked_next=tuple((tuple(asked), target) for asked, target in row.get("asked_next", ())),
                concepts=tuple(tuple(group) for group in row.get("concepts", ())),
            )
    for item in items.values():
        for target in [*item.follow.values(), *(target for _, target in item.asked_next)]:
            if target not in items:
                raise ValueError(f"follow-up of {item.id!r} leads to {target!r}, which is not in the corpus")
    return items


def load_checks(name: str = CHECK_FILES[0]) -> list[Check]:
    """Returns the checks of a file of CHECK_FILES."""
    return [
        Check(row["tier"], row["id"], row["question"], tuple(row.get("facts", ())), tuple(row.get("never", ())))
        for row in read_jsonl(CORPUS / name)
    ]


def load_words() -> dict[str, Any]:
    """Returns the tables from which wordings are made: synonyms, templates, fillers, system sentences, common words."""
    return json.loads((CORPUS / "words.json").read_text(encoding="utf-8"))


def word_set(text: str) -> frozenset[str]:
    """Returns the words of a text in lower case, without punctuation, to find near-duplicates."""
    return frozenset(re.findall(r"[a-z0-9]+", text.lower().replace("'", "")))


class HeldOut:
    """Finds wordings that are too near to a held-out question, by the Jaccard similarity of the two word sets."""

    def __init__(self, checks: list[Check]) -> None:
        sets = [(word_set(check.question), check.near) for check in checks]
        common = Counter(word for words, _ in sets for word in words)
        # A wording that is too near lacks at most a share of 1 - near of the question's words. So it contains at least
        # one of the question's rarest words, if that share of the words plus one are taken as the rarest: only these
        # are indexed.
        self._by_word: dict[str, list[tuple[frozenset[str], float]]] = {}
        for words, near in sets:
            rare = sorted(words, key=lambda word: (common[word], word))
            for word in rare[: int((1 - near) * len(words) + 1e-9) + 1]:
                self._by_word.setdefault(word, []).append((words, near))

    def too_near(self, text: str) -> bool:
        """Returns True if a wording must not be used for training."""
        words = word_set(text)
        return any(
            len(words & held) >= near * len(words | held)
            for word in words
            for held, near in self._by_word.get(word, ())
        )
