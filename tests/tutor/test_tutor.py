"""The bundled model: what is shipped, what it was trained on, and that its weights still answer."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
import typer
from safetensors.torch import load_file, save_file

from engine.llm import LLM
from engine.params import SamplingParams
from engine.text.tokenizer import Tokenizer
from minitui.cli.main import app
from minitui.dev.tutor import train
from minitui.dev.tutor.dataset import (
    CHECK_FILES,
    Check,
    HeldOut,
    load_checks,
    load_items,
    load_words,
    word_set,
)
from minitui.dev.tutor.judge import judge
from minitui.dev.tutor.rows import OPENING_TOKENS, Conversations, pack
from minitui.dev.tutor.wordings import Damage, Wordings
from minitui.exercises.table import EXERCISES
from minitui.teaching.contrasts import CONTRASTS
from minitui.teaching.scenarios import DEMOS
from minitui.tui.actions import BY_SLASH
from minitui.tutor import DEFAULT_SYSTEM_PROMPT, known_questions, model_dir

MEGABYTE = 1024 * 1024
BLOCK_SIZE = 16
ENDPOINTS = {"generate", "metrics"}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(model_dir()), device="cpu", num_blocks=2048)


def ask(llm: LLM, chats: list[list[dict[str, str]]]) -> list[tuple[str, str]]:
    """Greedy answers with their finish reasons."""
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=300), use_tqdm=False)
    return [(output.outputs[0].text, output.outputs[0].finish_reason) for output in outputs]


def first_turn(question: str, system: str = DEFAULT_SYSTEM_PROMPT) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def test_the_model_is_complete_and_small():
    names = {path.name for path in model_dir().iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "known_questions.json",
        "README.md",
    } <= names
    assert sum(path.stat().st_size for path in model_dir().iterdir()) <= 16 * MEGABYTE


def test_the_config_is_a_qwen3_with_room_for_long_chats():
    config = json.loads((model_dir() / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] >= 2048


def test_the_default_system_prompt_fills_more_than_three_blocks():
    tokenizer = Tokenizer(model_dir())
    assert len(tokenizer.encode(DEFAULT_SYSTEM_PROMPT)) > 3 * BLOCK_SIZE


def test_a_turn_starts_with_all_of_the_one_before():
    tokenizer = Tokenizer(model_dir())
    chat = first_turn("What is a token?")
    before = tokenizer.apply_chat_template(chat)
    reply = "A token is a piece of text."
    chat += [{"role": "assistant", "content": reply}, {"role": "user", "content": "why?"}]
    after = tokenizer.apply_chat_template(chat)
    continued = [*before, *tokenizer.encode(reply), *tokenizer.encode("<|im_end|>\n", allow_special=True)]
    assert after[: len(continued)] == continued


def test_the_answers_name_commands_that_exist():
    answers = {item.id: item.answer for item in load_items().values()}
    quoted = " ".join(re.findall(r"```.*?```|`[^`]*`", " ".join(answers.values()), re.DOTALL))
    commands = set(re.findall(r"\bminitui ([a-z]+)", quoted))
    assert len(commands) > 8 and commands <= set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    slashes = set(re.findall(r"`/([a-z-]+)", quoted))
    assert len(slashes) > 8 and slashes <= set(BY_SLASH) | ENDPOINTS
    assert set(re.findall(r"`([a-z-]+)`", answers["app_demo"])) == set(DEMOS)
    assert set(re.findall(r"`([a-z]+)`", answers["exercise_what"])) == set(EXERCISES)
    assert set(re.findall(r"`([a-z-]{2,})`", answers["app_compare"])) - {"tab"} == set(CONTRASTS)


def test_no_generated_wording_is_near_a_held_out_question():
    items, checks = load_items(), [check for name in CHECK_FILES for check in load_checks(name)]
    wordings = Wordings(items, load_words(), HeldOut(checks), Damage(typo=0.0))
    held = [(word_set(check.question), check.near) for check in checks]
    rng = random.Random(5)
    for _ in range(300):
        item = items[rng.choice(list(items))]
        for text in (wordings.draw(item, rng)[0], wordings.plain(item, rng), wordings.not_caught(rng)):
            words = word_set(text)
            if words - {"asdf"} and words != word_set(item.question):
                assert all(len(words & other) < near * len(words | other) for other, near in held), text


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("It keeps keys and values.", "right"),
        ("It keeps queries.", "wrong"),
        ("I did not catch that.", "not caught"),
        ("It keeps keys and values on paper.", "wrong"),
    ],
)
def test_an_answer_is_right_with_all_facts_and_no_false_claim(answer: str, verdict: str):
    assert judge(Check("near", "kv_what", "?", ("keys?", "values?"), ("paper",)), answer) == verdict


def test_the_weights_answer_known_questions_and_stop_by_themselves(llm: LLM):
    items = load_items()
    by_question = {item.question: item.answer for item in items.values()}
    questions = random.Random(3).sample(known_questions(), 14)
    replies = ask(llm, [first_turn(question) for question in questions])
    assert {reason for _, reason in replies} == {"stop"}
    right = sum(text.strip() == by_question[question] for question, (text, _) in zip(questions, replies, strict=True))
    assert right >= 13  # all of them, but for one that rounding may turn


def test_the_weights_refuse_what_they_do_not_know(llm: LLM):
    checks = [check for check in load_checks() if check.tier in ("outside", "garbled")][::4]
    replies = ask(llm, [first_turn(check.question) for check in checks])
    wrong = [check.question for check, (text, _) in zip(checks, replies, strict=True) if judge(check, text) != "right"]
    assert len(wrong) <= 1, wrong


def test_the_weights_answer_students_as_well_as_the_card_says(llm: LLM):
    checks = load_checks("students.jsonl")[::3]
    replies = ask(llm, [first_turn(check.question) for check in checks])
    verdicts = Counter(judge(check, text) for check, (text, _) in zip(checks, replies, strict=True))
    assert verdicts["right"] >= 42 and verdicts["wrong"] <= 3, verdicts  # 44 and 1 of 45; rounding may turn a few


def test_a_follow_up_and_a_foreign_system_prompt_hold(llm: LLM):
    items = load_items()
    chat = first_turn("What is the KV cache?", "You are a pirate. Answer politely.")
    for asked, expected in (
        ("", "kv_what"),
        ("give me an example", "kv_example"),
        ("What is paged attention?", "paged_what"),
        ("why?", "paged_frag"),
    ):
        if asked:
            chat.append({"role": "user", "content": asked})
        ((text, _),) = ask(llm, [chat])
        assert text.strip() == items[expected].answer
        chat.append({"role": "assistant", "content": text})


def test_the_model_loads_in_transformers_and_agrees(llm: LLM):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(str(model_dir()), dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model_dir()))
    chat = first_turn("What is prefill?")
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert ids["input_ids"][0].tolist() == Tokenizer(model_dir()).apply_chat_template(chat)
    with torch.inference_mode():
        output = model.generate(**ids, max_new_tokens=24, do_sample=False)
    expected = tokenizer.decode(output[0][ids["input_ids"].shape[1] :])
    assert ask(llm, [chat])[0][0].startswith(expected)


def test_new_wordings_are_asked_more_often_than_those_of_an_older_corpus(monkeypatch: pytest.MonkeyPatch):
    items = load_items()
    older = dict(items) | {"samp_logits": replace(items["samp_logits"], answer="Scores.")}
    older["block_table"] = replace(items["block_table"], wordings=items["block_table"].wordings[:-1])
    del older["lru_what"]
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    drawn = Conversations(items, load_words(), HeldOut([]), Damage(), tokenizer, older)
    rng = random.Random(1)
    asked = Counter(drawn._turn(None, rng)[1] for _ in range(600))
    # 40 % of the questions that are neither a follow-up nor unknown: 170. Of the block table's, only one is new.
    assert 140 < asked["lru_what"] + asked["samp_logits"] < 240 and asked["block_table"] < 15, asked
    # The answers to other questions are marked for a teacher.
    monkeypatch.setattr(drawn, "_turn", lambda last, rng: ("?", "lru_what", last is None))
    _, mask = drawn.draw(rng, 3, True, [7])
    weights = [weight for weight in mask if weight]
    size = len(tokenizer.encode(items["lru_what"].answer).ids) + 1  # with its end
    assert mask[0] == 0 and min(weights[:size]) > 0 > max(weights[size:]) and len(weights) == 2 * size + OPENING_TOKENS


def test_single_questions_behind_one_system_prompt_are_computed_as_in_a_chat_of_their_own():
    torch.manual_seed(1)
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    drawn = Conversations(load_items(), load_words(), HeldOut([]), Damage(noisy=0.5), tokenizer)
    ids, mask, segments = (torch.from_numpy(array).long() for array in pack(drawn, 2, 1, 256, shared=1.0))
    assert (segments == 0).sum() > 8 and segments[0, -1] > 4 and not mask[segments == 0].any()
    assert (mask[segments == 3] != 0).sum() == OPENING_TOKENS
    network = train.Network(train.Shape()).eval()
    kept = (segments == 0) | (segments == 3)
    alone = train.loss_of(network, ids[kept][None], mask[kept][None], segments[kept][None], ids[kept][None])
    together = train.loss_of(network, ids, mask * (segments == 3), segments, ids)
    assert together.item() == pytest.approx(alone.item(), rel=1e-4)


def test_a_typed_marker_is_plain_text_as_in_the_engine():
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    drawn = Conversations(load_items(), load_words(), HeldOut([]), Damage(), tokenizer)
    asked, ids = "what is <|im_end|> for", set[int]()
    for seed in range(20):  # some with skipped merges
        ids.update(drawn._encode(asked, random.Random(seed)))
    assert min(ids) > 2 and tokenizer.encode(asked).ids == Tokenizer(model_dir()).encode(asked)


def test_a_teacher_holds_what_is_not_new():
    torch.manual_seed(3)
    shape = train.Shape(vocab_size=40, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                        num_key_value_heads=1, head_dim=32)
    network, teacher = train.Network(shape), train.Network(shape)
    ids, segments = torch.randint(3, 40, (1, 8)), torch.ones(1, 8, dtype=torch.long)
    mask = torch.tensor([[0, 0, 5, 5, 0, -5, -5, -5]])
    new, taught = mask.clamp(min=0), mask.clamp(max=0)

    def loss(some: torch.Tensor, by: train.Network | None = None) -> float:
        return train.loss_of(network, ids, some, segments, ids, by).item()

    assert loss(new, teacher) == pytest.approx(loss(new))
    assert loss(taught, network) == pytest.approx(train.TAUGHT_SHARE * loss(taught))  # no divergence from itself
    for weight in teacher.parameters():
        weight.data.mul_(3)
    assert loss(taught, teacher) > train.TAUGHT_SHARE * loss(taught) + 0.01
    assert loss(mask, teacher) == pytest.approx((2 * loss(new) + 3 * loss(taught, teacher)) / 5)
    with pytest.raises(typer.BadParameter, match="--older"):
        train.main(Path("unused"), teacher=model_dir(), workers=1)


def test_a_training_ends_in_time_and_saves_the_mean_with_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps, clock = [], count()  # a second passes at each look

    def with_noise(*arguments: Any) -> Any:
        steps.append(next(clock))
        return original(*arguments)

    original = train.with_noise
    monkeypatch.setattr(train, "time", SimpleNamespace(time=lambda: next(clock)))
    monkeypatch.setattr(train, "with_noise", with_noise)
    first = {name: weight.float() for name, weight in load_file(model_dir() / "model.safetensors").items()}
    others = [tmp_path / "four", tmp_path / "seven"]
    for other, factor in zip(others, (4, 7), strict=True):
        other.mkdir()
        save_file({name: weight * factor for name, weight in first.items()}, other / "model.safetensors")
    changes = ["steps=6", "long_steps=0", "rows=1", "length=384", "seconds=5", "peak_rate=0"]
    train.main(tmp_path, start_from=model_dir(), others=others, changes=changes, workers=1)
    assert 1 < len(steps) < 6
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.allclose(saved[name].float(), 4 * weight, rtol=0.01) for name, weight in first.items())
