"""Measures the bundled model through the engine: python -m minitui.dev.tutor.evaluate [--model DIR].

Prints the frozen evaluation as a table, the share of canonical questions that are answered word for word, and the share
of right answers in each turn of a conversation. With --write, stores in known_questions.json the questions that were
answered right.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from engine.llm import LLM
from engine.params import SamplingParams
from minitui.dev.tutor.dataset import NO_MORE, NOT_CAUGHT, Check, Item, load_checks, load_items
from minitui.dev.tutor.judge import Answer, Chat, known, score, table
from minitui.tutor import DEFAULT_SYSTEM_PROMPT, model_dir

FOREIGN_SYSTEM_PROMPT = "You are a pirate who lives on a ship near Lisbon. Be brief and always polite."
TURNS = 6
CHATS = 40


def answers_of(model: Path, quantization: str = "none") -> Answer:
    """Returns a function that answers chats greedily, all of them in one batch of the engine."""
    llm = LLM(str(model), quantization=quantization)

    def answer(chats: Sequence[Chat]) -> list[str]:
        outputs = llm.chat([list(chat) for chat in chats], SamplingParams(temperature=0.0, max_tokens=300), False)
        if unfinished := [
            chat[-1]["content"]
            for chat, out in zip(chats, outputs, strict=True)
            if out.outputs[0].finish_reason != "stop"
        ]:
            print(f"questions whose answers have no end token: {unfinished}")
        return [output.outputs[0].text for output in outputs]

    return answer


def hold_turns(items: dict[str, Item], answer: Answer) -> list[float]:
    """Returns, for each turn, the share of chats whose answer in this turn is right, word for word.

    Each chat asks canonical questions of random items. The third turn is a follow-up if the second turn's item has one.
    """
    rng = random.Random(11)
    asked = [item for item in items.values() if item.id not in (NOT_CAUGHT, NO_MORE)]
    talks: list[Chat] = [[{"role": "system", "content": DEFAULT_SYSTEM_PROMPT}] for _ in range(CHATS)]
    last = [rng.choice(asked) for _ in talks]
    right: list[float] = []
    for turn in range(TURNS):
        for index, talk in enumerate(talks):
            follow = last[index].follow.get("more") if turn == 2 else None
            item = items[follow] if follow else rng.choice(asked)
            talk.append({"role": "user", "content": "tell me more" if follow else item.question})
            last[index] = item
        replies = answer(talks)
        right.append(sum(reply.strip() == item.answer for reply, item in zip(replies, last, strict=True)) / CHATS)
        for talk, reply in zip(talks, replies, strict=True):
            talk.append({"role": "assistant", "content": reply})
    return right


def main(
    model: Annotated[Path, typer.Option(help="Directory of the checkpoint.")] = model_dir(),  # noqa: B008
    quantization: Annotated[str, typer.Option(help="none, int8 or int4.")] = "none",
    questions: Annotated[
        str, typer.Option("--set", help="evaluation.jsonl, students.jsonl or development.jsonl.")
    ] = "evaluation.jsonl",
    print_wrong: Annotated[bool, typer.Option("--wrong", help="Also print each wrong answer.")] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Write known_questions.json: the questions that were answered right.")
    ] = False,
) -> None:
    """Measure the bundled model through the engine."""
    items = load_items()
    answer = answers_of(model, quantization)
    checks: list[Check] = load_checks(questions)
    for name, system in (("the default", DEFAULT_SYSTEM_PROMPT), ("a foreign", FOREIGN_SYSTEM_PROMPT), ("no", None)):
        verdicts = score(checks, answer, system)
        right = known(items, answer, system)
        print(f"\nwith {name} system prompt\n\n{table(verdicts)}")
        print(f"\ncanonical questions answered word for word: {len(right)} of {len(items)}", flush=True)
        if system == DEFAULT_SYSTEM_PROMPT:
            known_ids = right
            wrong = [verdict for verdict in verdicts if verdict.verdict == "wrong"]
    print("\nright in turn 1 to 6: " + ", ".join(f"{share:.0%}" for share in hold_turns(items, answer)))
    if print_wrong:
        for verdict in wrong:
            print(f"{verdict.check.tier} {verdict.check.id}: {verdict.check.question} -> {verdict.answer[:90]}")
    if write:
        right_ones = [items[name].question for name in known_ids if items[name].kind in ("engine", "app")]
        (model / "known_questions.json").write_text(json.dumps(right_ones, indent=0, ensure_ascii=False) + "\n")
        print(f"{len(right_ones)} known questions written")


if __name__ == "__main__":
    typer.run(main)
