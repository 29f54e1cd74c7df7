"""How answers are judged: by the facts that they must contain, and the false claims that they must not contain."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minitui.dev.tutor.dataset import Check, Item

Chat = list[dict[str, str]]
Answer = Callable[[Sequence[Chat]], list[str]]

NOT_CAUGHT_OPENING = "I did not catch that"
REFUSAL = re.compile(r"only knows? (about )?(LLM )?inference engines", re.IGNORECASE)


@dataclass(frozen=True)
class Verdict:
    """The judgement of one answer: "right", "wrong" or "not caught"."""

    check: Check
    answer: str
    verdict: str


def judge(check: Check, answer: str) -> str:
    """Returns the verdict: "right" if the answer has all facts and no false claim, "not caught" if the model says that
    it did not understand, else "wrong".

    If the input is garbled or outside the domain, a refusal and "I did not catch that" are both right.
    """
    if check.tier in ("outside", "garbled"):
        return "right" if answer.startswith(NOT_CAUGHT_OPENING) or REFUSAL.search(answer) else "wrong"
    if answer.startswith(NOT_CAUGHT_OPENING):
        return "not caught"
    found = all(re.search(fact, answer, re.IGNORECASE) for fact in check.facts)
    false = any(re.search(claim, answer, re.IGNORECASE) for claim in check.never)
    return "right" if found and not false else "wrong"


def score(checks: Sequence[Check], answer: Answer, system: str | None) -> list[Verdict]:
    """Asks the question of each check in a new chat; returns the verdicts."""
    head: Chat = [] if system is None else [{"role": "system", "content": system}]
    answers = answer([[*head, {"role": "user", "content": check.question}] for check in checks])
    return [Verdict(check, text, judge(check, text)) for check, text in zip(checks, answers, strict=True)]


def known(items: dict[str, Item], answer: Answer, system: str | None) -> list[str]:
    """Returns the ids of the items whose canonical question gets the item's answer, word for word."""
    head: Chat = [] if system is None else [{"role": "system", "content": system}]
    asked = list(items.values())
    answers = answer([[*head, {"role": "user", "content": item.question}] for item in asked])
    return [item.id for item, text in zip(asked, answers, strict=True) if text.strip() == item.answer.strip()]


def table(verdicts: Sequence[Verdict]) -> str:
    """Returns a Markdown table: the numbers of right, not caught and wrong answers in each tier."""
    lines = ["| tier | asked | right | not caught | wrong |", "|---|---|---|---|---|"]
    tiers = list(dict.fromkeys(verdict.check.tier for verdict in verdicts))
    groups = [(tier, [v for v in verdicts if v.check.tier == tier]) for tier in tiers]
    both = [v for v in verdicts if v.check.tier in ("near", "far")]
    if both:
        groups.append(("near + far", both))
    for name, group in groups:
        counts = Counter(v.verdict for v in group)
        shares = [
            f"{counts[kind]} ({100 * counts[kind] / len(group):.1f} %)" for kind in ("right", "not caught", "wrong")
        ]
        lines.append(f"| {name} | {len(group)} | {' | '.join(shares)} |")
    return "\n".join(lines)
