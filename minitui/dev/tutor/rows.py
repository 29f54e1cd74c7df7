"""Training rows: conversations rendered as token ids, packed end to end.

A row holds several conversations that do not attend to each other (segment ids). Only the assistant's tokens have a
loss. Most conversations are short, and their last answer is cut after its first tokens: these tokens already decide
which answer it is. So the model sees more questions for the same compute.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from minitui.dev.tutor.dataset import NO_MORE, NOT_CAUGHT, HeldOut, Item
from minitui.dev.tutor.wordings import Damage, Wordings, casing, expand, typos
from minitui.tutor import DEFAULT_SYSTEM_PROMPT

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OPENING_TOKENS = 8  # tokens kept of an answer that is cut
# The loss of an answer's first tokens weighs more, because they decide which answer it is. That of "I did not catch
# that" weighs most: in doubt, this is better than an answer to another question. The longest answer has 162 tokens.
LOSS_WEIGHTS, CAUTIOUS_WEIGHTS = ([weight] * 7 + [1] * 512 for weight in (20, 50))
MOST_TURNS = 8
BPE_DROPOUT = 0.1
NOT_CAUGHT_SHARE = 0.12  # share of questions without an answer in the corpus; NOT_CAUGHT answers them


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """Returns a byte-level BPE tokenizer trained on `texts`; its first ids are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_texts(items: dict[str, Item], words: dict[str, Any]) -> list[str]:
    """Returns the texts to train the tokenizer on: answers three times, wordings, system prompts, common words."""
    texts = [DEFAULT_SYSTEM_PROMPT] * 10
    for item in items.values():
        texts += [item.answer] * 3
        texts += [expand(text, random.Random(seed)) for text in (item.question, *item.wordings) for seed in range(2)]
    texts += [" ".join(words["common"])] * 2
    texts += words["system"]
    return texts


class Conversations:
    """Draws whole conversations, follow-ups included, and renders them as token ids with a loss mask."""

    def __init__(
        self, items: dict[str, Item], words: dict[str, Any], held_out: HeldOut, damage: Damage, tokenizer: Tokenizer,
        older: dict[str, Item] | None = None,
    ) -> None:
        self._items = items
        # Wordings that `older` lacks, and all wordings of an answer that is not the same there.
        self._newer = [
            (item, text)
            for item in (items.values() if older is not None else ())
            for old in ((older or {}).get(item.id),)
            for text in (item.question, *item.wordings)
            if old is None or old.answer != item.answer or text not in (old.question, *old.wordings)
        ]
        self._wordings, self._damage = Wordings(items, words, held_out, damage), damage
        self._system: list[str] = words["system"]
        self._follow_ups: dict[str, list[str]] = words["follow_ups"]
        self._common: list[str] = words["common"]
        self._tokenizer = tokenizer
        # This copy skips merges at random (BPE dropout): words split into other tokens, as after a typo.
        self._rough = Tokenizer.from_str(tokenizer.to_str())
        self._rough.model.dropout = BPE_DROPOUT
        # A marker that a user types is plain text, as in the engine.
        tokenizer.encode_special_tokens = self._rough.encode_special_tokens = True
        self._start, self._end = (SPECIAL_TOKENS.index(token) for token in ("<|im_start|>", "<|im_end|>"))
        self._answer_ids = {item.id: tokenizer.encode(item.answer).ids for item in items.values()}
        self._role_ids = {role: tokenizer.encode(role + "\n").ids for role in ("system", "user", "assistant")}
        self._newline = tokenizer.encode("\n").ids
        self._asked = [item for item in items.values() if item.id not in (NOT_CAUGHT, NO_MORE)]
        kind_weight = {"engine": 1.0, "app": 1.0, "talk": 0.8, "refusals": 2.0}
        self._weights = [kind_weight[item.kind] for item in self._asked]

    def draw(self, rng: random.Random, turns: int, cut: bool, system: list[int]) -> tuple[list[int], list[int]]:
        """Returns the ids and the loss mask of a conversation with `turns` turns; `cut` ends it in the last answer."""
        ids, mask = [*system], [0] * len(system)
        last: str | None = None
        for turn in range(turns):
            asked, answer, newer = self._turn(last, rng)
            self._say("user", self._encode(asked, rng), ids, mask)
            answer_ids = self._answer_ids[answer]
            weights = CAUTIOUS_WEIGHTS if answer == NOT_CAUGHT else LOSS_WEIGHTS
            if self._newer and not newer:  # negative: a teacher can give this answer
                weights = [-weight for weight in weights]
            head = [self._start, *self._role_ids["assistant"]]
            ids += head
            mask += [0] * len(head)
            if cut and turn == turns - 1 and len(answer_ids) > OPENING_TOKENS:
                ids += answer_ids[:OPENING_TOKENS]
                mask += weights[:OPENING_TOKENS]
                break
            ids += [*answer_ids, self._end, *self._newline]
            mask += [*weights[: len(answer_ids) + 1], *[0] * len(self._newline)]
            last = answer
        return ids, mask

    def _encode(self, text: str, rng: random.Random) -> list[int]:
        return list((self._rough if rng.random() < 0.3 else self._tokenizer).encode(text).ids)

    def _say(self, role: str, content: list[int], ids: list[int], mask: list[int]) -> None:
        said = [self._start, *self._role_ids[role], *content, self._end, *self._newline]
        ids += said
        mask += [0] * len(said)

    def _turn(self, last: str | None, rng: random.Random) -> tuple[str, str, bool]:
        """Returns a question, the id of its answer, and True if the question is a newer or noisy wording."""
        kind = rng.random()
        if kind < 0.17 and (last is not None or kind < 0.02):
            return *self._follow_up(last, rng), False
        if kind < 0.17 + NOT_CAUGHT_SHARE:
            return self._wordings.not_caught(rng), NOT_CAUGHT, False
        if self._newer and rng.random() < self._damage.newer:
            item, pattern = rng.choice(self._newer)
            return self._wordings.lightly(item, pattern, rng), item.id, True
        item = rng.choices(self._asked, self._weights)[0]
        if rng.random() < self._damage.noisy:
            return self._wordings.noisy(item, rng), item.id, True
        if rng.random() < self._damage.plain:
            return self._wordings.plain(item, rng), item.id, False
        asked, answered = self._wordings.draw(item, rng)
        return asked, item.id if answered else NOT_CAUGHT, False

    def _follow_up(self, last: str | None, rng: random.Random) -> tuple[str, str]:
        item = self._items[last] if last is not None else None
        if item is not None and item.asked_next and rng.random() < 0.5:
            wordings, target = rng.choice(item.asked_next)
            return casing(expand(rng.choice(wordings), rng), rng), target
        kind = rng.choice(list(self._follow_ups))
        asked = rng.choice(self._follow_ups[kind])
        if rng.random() < 0.15:
            asked = typos(asked, rng)
        asked = casing(asked, rng)
        if item is None or item.id == NOT_CAUGHT or item.kind in ("talk", "refusals"):
            return asked, NOT_CAUGHT
        return asked, item.follow.get(kind, NO_MORE)

    def system(self, rng: random.Random, short: bool) -> list[int]:
        """Returns the ids of a system turn, or none."""
        kind = rng.random()
        if kind < 0.3:
            return []
        parts = [DEFAULT_SYSTEM_PROMPT]
        if kind >= (0.4 if short else 0.7):
            parts = [rng.choice(self._system) for _ in range(rng.randint(1, 2 if short else 5))]
            if not short and rng.random() < 0.3:
                parts.append(" ".join(rng.choice(self._common) for _ in range(rng.randint(3, 40))))
            if not short and rng.random() < 0.15:
                parts.append(self._items[rng.choice(list(self._items))].answer)
        ids: list[int] = []
        self._say("system", self._tokenizer.encode(" ".join(parts)).ids, ids, [])
        return ids


def pack(
    conversations: Conversations, seed: int, rows: int, length: int, one_chat: bool = False, shared: float = 0.0
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int8], npt.NDArray[np.uint8]]:
    """Returns rows of ids, loss masks and segment numbers, each [rows, length].

    With one_chat, conversations have 4 to 60 turns, so that a few fill a row: for the phase with long contexts. A share
    `shared` of the rows has single questions behind one system prompt, which has the segment 0: all of them read it.
    """
    rng = random.Random(seed)
    ids = np.zeros((rows, length), np.int16)
    mask = np.zeros((rows, length), np.int8)
    segments = np.zeros((rows, length), np.uint8)
    for row in range(rows):
        together = rng.random() < shared
        head = conversations.system(rng, short=False)[: length // 2] if together else []
        ids[row, : len(head)] = head
        filled, segment = len(head), 1
        while filled < length:
            turns, cut = rng.randint(4, 60) if one_chat else rng.randint(1, MOST_TURNS), False
            if together:
                turns, cut = 1, True
            elif not one_chat and rng.random() < 0.75:
                turns, cut = 1 if rng.random() < 0.8 else 2, rng.random() < 0.85
            system = [] if together else conversations.system(rng, cut)
            some_ids, some_mask = conversations.draw(rng, turns, cut, system)
            size = min(len(some_ids), length - filled)
            ids[row, filled : filled + size] = some_ids[:size]
            mask[row, filled : filled + size] = some_mask[:size]
            segments[row, filled : filled + size] = segment
            filled, segment = filled + size, min(segment + 1, 255)
    return ids, mask, segments
