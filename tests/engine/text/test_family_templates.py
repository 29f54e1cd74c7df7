"""Chat templates and tokenizers in the formats of the families, against transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer
from engine.text.tool_messages import for_template
from tests.engine.text.test_tokenizer import TEXTS, byte_level, sentencepiece_like, write
from tests.support.checkpoints.templates import CHATS, FORMATS


def tiktoken_like() -> tokenizers.Tokenizer:
    """As Llama 3's, Phi-4-mini's and gpt-oss's: bytes, cut by a pattern with groups of three digits."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    pattern += r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def gemma_like() -> tokenizers.Tokenizer:
    """As Gemma's: ▁ for every space and none added, bytes as a fallback."""
    tokenizer = sentencepiece_like()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


KINDS = {
    "Gemma 2": gemma_like, "Gemma 3": gemma_like, "Ministral": sentencepiece_like, "Phi-4-mini": tiktoken_like,
    "gpt-oss": tiktoken_like, "GLM-4": tiktoken_like,
}


def made(name: str, directory: Path) -> Tokenizer:
    form = FORMATS[name]
    tokenizer, tokens = KINDS.get(name, byte_level)(), form.tokens.split()
    tokenizer.add_special_tokens(tokens)
    write(directory, tokenizer, chat_template=form.template, bos_token=tokens[0], eos_token=tokens[-1])
    return Tokenizer(directory)


@pytest.mark.parametrize("name", FORMATS)
def test_the_template_of_a_family_gives_the_ids_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    ours, form = made(name, tmp_path), FORMATS[name]
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for chat, messages in CHATS.items():
        if chat in form.texts and form.texts[chat] is None:
            with pytest.raises(InvalidRequest, match="the model's chat template refuses these messages: "):
                ours.apply_chat_template(messages)
            continue
        text = ours.render_chat(messages)
        assert text == form.texts.get(chat, text)
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True)
        assert ours.apply_chat_template(messages) == getattr(ids, "input_ids", ids)
    if form.options:
        text = ours.render_chat(CHATS["one question"], **form.options)
        assert form.optional in text and form.optional not in ours.render_chat(CHATS["one question"])
        assert text == theirs.apply_chat_template(
            CHATS["one question"], add_generation_prompt=True, tokenize=False, **form.options
        )
    ours.stop_rendering()


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like, gemma_like, tiktoken_like])
def test_texts_come_back_from_every_kind_of_tokenizer(make: Any, tmp_path: Path) -> None:
    """Whole and token by token, also those whose characters are only bytes."""
    from transformers import PreTrainedTokenizerFast

    ours = Tokenizer(write(tmp_path, make()))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        stream = ours.detokenizer()
        assert "".join([*(stream.push([token]) for token in ids), stream.flush()]) == ours.decode(ids)
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
        if make in (gemma_like, tiktoken_like):
            assert ours.decode(ids) == text


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("Gemma 3", ["<eos>", "<end_of_turn>"]), ("gpt-oss", ["<|return|>", "<|startoftext|>"]),
        ("GLM-4", ["<|endoftext|>", "<|user|>", "<|observation|>"]), ("Phi-4-mini", ["<|end|>", "<|endoftext|>"]),
    ],
)
def test_end_tokens_are_those_of_generation_config(name: str, ends: list[str], tmp_path: Path) -> None:
    """The token that ends a turn is often not the tokenizer's EOS."""
    tokenizer = tokenizers.Tokenizer.from_str(made(name, tmp_path).to_json())
    ids = [tokenizer.token_to_id(end) for end in ends]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids[0]}))
    assert set(Tokenizer(tmp_path).eos_ids) == {*ids, tokenizer.token_to_id(FORMATS[name].tokens.split()[-1])}


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {"n": {"type": "integer"}}}}}
    for name in ("now", "f")
]
HARMONY = [
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
     "<think>\nHm.\n</think>\n\nHello."),
    ("<|channel|>analysis<|message|>Hm", "<think>\nHm"),
    ("<|channel|>final<|message|>Hello <|x", "Hello <|x"),
    ("Hello", "Hello"),
    ('<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}',
     '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'),
    ('<|channel|>analysis<|message|>Hm<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}',
     '<think>\nHm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    ("<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant<|channel|>final<|message|>ça va 🫨",
     "I ask.ça va 🫨"),
]


@pytest.mark.parametrize(("reply", "shown"), HARMONY)
def test_channels_of_gpt_oss_are_shown_as_thinking_and_calls(reply: str, shown: str, tmp_path: Path) -> None:
    """The same text token by token, and the parser of the server finds the parts."""
    from minitui.server.openai.reply_parser import ReplyParser

    form = FORMATS["gpt-oss"]
    tokenizer = tiktoken_like()
    tokenizer.add_special_tokens([*form.tokens.split(), "<|constrain|>", "<|call|>"])
    ours = Tokenizer(write(tmp_path, tokenizer))
    ids, stream, parser = ours.encode(reply, allow_special=True), ours.detokenizer(), ReplyParser(tools=TOOLS)
    pieces = [*(stream.push([token]) for token in ids), stream.flush()]
    assert "".join(pieces) == shown == ours.decode(ids)
    assert ours.decode(ids, skip_special_tokens=False) == reply
    parts = [*map(parser.push, pieces), parser.flush()]
    content = re.sub(r"<(think|tool_call)>.*?(</\1>\s*|$)", "", shown, flags=re.DOTALL)
    assert "".join(part.content for part in parts) == content
    assert [call["function"]["name"] for part in parts for call in part.calls] == [
        name for name in ("now", "f") if f"functions.{name}" in reply
    ]


@pytest.mark.parametrize("tags", [("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]")])
@pytest.mark.parametrize("special", [False, True])
def test_other_marks_of_thinking_are_shown_as_the_usual_ones(special: bool, tags: Any, tmp_path: Path) -> None:
    tokenizer = byte_level()
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(list(tags))
    ours = Tokenizer(write(tmp_path, tokenizer))
    ids = ours.encode(f"{tags[0]}Hm.{tags[1]}Hello", allow_special=True)
    assert ours.decode(ids) == "<think>Hm.</think>Hello"
    assert ours.decode(ids, skip_special_tokens=False) == f"{tags[0]}Hm.{tags[1]}Hello"


@pytest.mark.parametrize(
    ("reply", "shown"),
    [
        ("<|channel>thought\nHm.<channel|>Hello", "<think>Hm.</think>Hello"),
        ("<|channel>thought\n<channel|>Hello", "<think></think>Hello"), ("<|channel>thou", "<think>thou"),
        ("<|channel>thoughts<channel|>thought\n", "<think>thoughts</think>thought\n"), ("<|channel>", "<think>"),
        ("thought\n", "thought\n"), ("<|channel>plan\nHm", "<think>plan\nHm"),
    ],
)
def test_the_name_of_gemma4s_channel_is_left_out(reply: str, shown: str, tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|channel>", "<channel|>"])
    ours = Tokenizer(write(tmp_path, tokenizer))
    ids, stream = ours.encode(reply, allow_special=True), ours.detokenizer()
    assert "".join([*(stream.push([token]) for token in ids), stream.flush()]) == shown == ours.decode(ids)


CALLS = {  # tokens of a family, a reply, its content, its calls
    "Granite": ("<|tool_call|>",
                '<|tool_call|>[{"name": "f", "arguments": {"n": 1}}, {"name": "now", "arguments": {}}]', "",
                [("f", {"n": 1}), ("now", {})]),
    "Mistral 7B": ("[TOOL_CALLS]", 'I look. [TOOL_CALLS][{"name": "f", "arguments": {"n": 1}}]', "I look. ",
                   [("f", {"n": 1})]),
    "Ministral 3": ("[TOOL_CALLS] [ARGS] [CALL_ID] [THINK] [/THINK]",
                    '[THINK]Hm.[/THINK][TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]now[CALL_ID]x1[ARGS]{}', "",
                    [("f", {"n": 1}), ("now", {})]),
    "Seed-OSS": ("<seed:tool_call> </seed:tool_call>",
                 "Ja: <seed:tool_call>\n<function=f>\n<parameter=n>12</parameter>\n<parameter=t>12</parameter>\n"
                 "</function>\n</seed:tool_call>", "Ja: ", [("f", {"n": 12, "t": "12"})]),
    "Gemma 4": ('<|tool_call> <tool_call|> <|"|> <|channel> <channel|>',
                '<|channel>thought\nHm.<channel|>Well.<|tool_call>call:f{n:1,o:{a:[1,true,<|"|>x<|"|>],<|"|>b:<|"|>:None},'
                't:<|"|>a{"n:1} None<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>', "Well.",
                [("f", {"n": 1, "o": {"a": [1, True, "x"], "b:": None}, "t": 'a{"n:1} None'}), ("now", {})]),
    "Gemma 4, no call": ('<|tool_call> <tool_call|> <|"|>', "<|tool_call>call:f{n:<tool_call|>",
                         "<tool_call>\ncall:f{n:\n</tool_call>", []),
    "Llama 3.1": ("<|python_tag|>", '<|python_tag|>{"name": "f", "parameters": {"n": 1}}; {"name": "now", '
                  '"parameters": {}}', "", [("f", {"n": 1}), ("now", {})]),
    "Llama 3.2": ("", "[f(n=1, t='é'), now()]", "", [("f", {"n": 1, "t": "é"}), ("now", {})]),
    "GLM-4": ("<|observation|>", 'f\n{"n": 1}', "", [("f", {"n": 1})]),
    "an unknown tool": ("", '{"name": "g", "parameters": {}}', '{"name": "g", "parameters": {}}', []),
    "a cut call": ("", '{"name": "f", "parameters": {"n"', '{"name": "f", "parameters": {"n"', []),
    "a link": ("", "[f](https://a.example) is a page about calls, and this text is longer than the head of a call.",
               "[f](https://a.example) is a page about calls, and this text is longer than the head of a call.", []),
    "not JSON": ("", "[f(n=b'x')]", "[f(n=b'x')]", []),
    "a list": ("", "[1, 2]", "[1, 2]", []),
    "Qwen3.5": (
        "", "Well.\n\n<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n<parameter=text>\ntwo\n\nlines\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Well.", [("f", {"n": 5, "text": "two\n\nlines"}), ("now", {})],
    ),
    "Qwen3.5, other text": (
        "", "<tool_call><function=f>Hm<parameter=n>5</parameter></function></tool_call>",
        "<tool_call><function=f>Hm<parameter=n>5</parameter></function></tool_call>", [],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_of_every_family_are_found(name: str, tmp_path: Path) -> None:
    """Token by token and as a whole, through the server's parser."""
    from minitui.server.openai.reply_parser import ReplyParser

    tokens, reply, content, calls = CALLS[name]
    tokenizer = tiktoken_like()
    tokenizer.add_special_tokens(tokens.split())
    ours = Tokenizer(write(tmp_path, tokenizer))
    ids, stream = ours.encode(reply, allow_special=True), ours.detokenizer()
    pieces = [*(stream.push([token]) for token in ids), stream.flush()]
    assert "".join(pieces) == ours.decode(ids)
    for texts in (pieces, [ours.decode(ids)]):
        parser = ReplyParser(tools=TOOLS)
        parts = [*map(parser.push, texts), parser.flush()]
        found = [call["function"] for part in parts for call in part.calls]
        assert [(call["name"], json.loads(call["arguments"])) for call in found] == calls
        assert "".join(part.content for part in parts) == content
    parser = ReplyParser()
    assert "".join(part.content for part in (parser.push(reply), parser.flush())) == reply, "no tools are offered"


ARGUMENTS = {
    "n": 5, "x": 0.5, "yes": True, "none": None, "text": "two\n\n  lines, and 12", "digits": "12", "list": [1, "a"],
    "object": {"a": {"b": "é <c>"}}, "maybe": 7, "nothing": None, "maybe_text": "7",
}
PARAMETERS: dict[str, Any] = {
    "n": {"type": "integer"}, "x": {"type": "number"}, "yes": {"type": "boolean"}, "none": {"type": "null"},
    "text": {"type": "string"}, "digits": {"type": "string"}, "list": {"type": "array"}, "object": {"type": "object"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "nothing": {"type": ["string", "null"]},
    "maybe_text": {"oneOf": [{"type": "string"}, {"type": "null"}]},
}


def test_calls_of_qwen35_are_parsed_from_what_its_template_writes(tmp_path: Path) -> None:
    """A whole turn: a question, two calls, their results, an answer; thinking of this turn stays in the prompt."""
    from transformers import PreTrainedTokenizerFast

    from minitui.server.openai.reply_parser import ReplyParser

    ours = made("Qwen3.5", tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": PARAMETERS}}}, TOOLS[0]]
    calls = [("f", ARGUMENTS), ("now", {})]

    def asked(as_text: bool) -> list[dict[str, Any]]:
        written = [
            {"id": f"c{i}", "type": "function",
             "function": {"name": name, "arguments": json.dumps(given) if as_text else given}}
            for i, (name, given) in enumerate(calls)
        ]
        return [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "I ask.", "reasoning_content": "Hm.", "tool_calls": written},
            {"role": "tool", "tool_call_id": "c0", "content": "one"},
            {"role": "tool", "tool_call_id": "c1", "content": "two"},
        ]

    messages, offered = for_template(asked(True), tools, ours.chat_template or "")
    text = ours.render_chat(messages, tools=offered)
    assert text == theirs.apply_chat_template(asked(False), tools=tools, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
                         "<|im_start|>assistant\n<think>\n")
    later = ours.render_chat([*messages, {"role": "assistant", "content": "So."}, {"role": "user", "content": "More"}])
    assert "Hm." in text and "Hm." not in later
    reply = text.partition("<|im_start|>assistant\n<think>\n")[2].partition("<|im_end|>")[0]
    for pieces in (list(reply), [reply]):
        parser = ReplyParser(thinking=True, tools=tools)
        parts = [*map(parser.push, pieces), parser.flush()]
        assert "".join(part.reasoning for part in parts).strip() == "Hm."
        assert "".join(part.content for part in parts) == "I ask."
        found = [call["function"] for part in parts for call in part.calls]
        assert [(call["name"], json.loads(call["arguments"])) for call in found] == calls
    ours.stop_rendering()


@pytest.mark.parametrize(
    ("reply", "content"),
    [
        ("<think>Hm.</think><response>Hello.</response>", "Hello."),
        ("<think>Hm.</think>\n<response>Hello.", "Hello."),
        ("<think>Hm.</think><resp", "<resp"),
        ("<think>Hm.</think>Hello </response>", "Hello </response>"),
    ],
)
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_the_answer_of_granite_is_the_content(reply: str, content: str, tools: list[Any]) -> None:
    from minitui.server.openai.reply_parser import ReplyParser

    for pieces in (list(reply), [reply]):
        parser = ReplyParser(tools=tools)
        parts = [*map(parser.push, pieces), parser.flush()]
        assert "".join(part.reasoning for part in parts) == "Hm."
        assert "".join(part.content for part in parts) == content


def test_templates_of_mistral_get_ids_of_nine_characters() -> None:
    call = {"id": "call_0123456789", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat: list[Any] = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": call["id"]}]
    [asked, answered], _ = for_template(chat, TOOLS, "{% if call.id | length != 9 %}… {{ tools }}")
    assert asked["tool_calls"][0]["id"] == answered["tool_call_id"] and len(answered["tool_call_id"]) == 9
    assert for_template(chat, TOOLS, "{{ tools }}")[0][1]["tool_call_id"] == call["id"]
