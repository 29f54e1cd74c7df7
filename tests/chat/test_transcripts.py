"""Chats as documents, pieces copied from them, and files quoted in them."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import pytest

from engine.errors import EngineError
from minitui.chat.conversation import Message, Session, title_of
from minitui.chat.store import Store
from minitui.chat.transcripts import (
    as_json,
    as_markdown,
    code_blocks,
    file_name,
    named_file,
    pieces,
    quoted_file,
    write,
)


def paging() -> Session:
    messages = [Message("user", "Why?", created=0.0), Message("assistant", "Because.", metrics={"prompt_tokens": 9})]
    return Session("a", "KV: paging!", "Be brief.\nAnd kind.", messages=messages, parent="b")


def test_a_chat_as_markdown():
    text = "# KV: paging!\n\n> Be brief.\n> And kind.\n\n## You\n\nWhy?\n\n## Assistant\n\nBecause.\n"
    assert as_markdown(paging()) == text
    cut = paging()
    cut.messages[1].state = "cancelled"
    assert as_markdown(cut).endswith("Because.\n\n*(cancelled)*\n")


def test_a_chat_as_json_has_its_parent_its_figures_and_how_each_answer_ended():
    chat = json.loads(as_json(paging()))
    assert (chat["title"], chat["system"], chat["forked_from"]) == ("KV: paging!", "Be brief.\nAnd kind.", "b")
    question, answer = chat["messages"]
    assert question == {"role": "user", "content": "Why?", "created": "1970-01-01T00:00:00+00:00"}
    assert (answer["content"], answer["state"], answer["metrics"]) == ("Because.", "done", {"prompt_tokens": 9})


def test_the_suffix_decides_the_format_and_no_file_is_overwritten(tmp_path):
    write(paging(), tmp_path / "a.json")
    write(paging(), tmp_path / "a.md")
    assert json.loads((tmp_path / "a.json").read_text())["id"] == "a"
    assert (tmp_path / "a.md").read_text() == as_markdown(paging())
    with pytest.raises(EngineError, match="exists already"):
        write(paging(), tmp_path / "a.md")
    with pytest.raises(EngineError, match="cannot be written"):
        write(paging(), tmp_path / "no" / "such.md")
    assert file_name(paging()) == "kv-paging.md"


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("no code", []),
        ("a\n```python\nx = 1\n\ny = 2\n```\nb\n~~~\nz\n~~~", ["x = 1\n\ny = 2", "z"]),
        ("````\n```\ninner\n```\n````", ["```\ninner\n```"]),
        ("```\nstill being writ", ["still being writ"]),
    ],
)
def test_code_blocks_are_the_text_between_the_fences(text, blocks):
    assert code_blocks(text) == blocks


def test_every_message_and_code_block_can_be_copied_the_newest_first():
    said = [Message("user", "Show me"), Message("assistant", "Here:\n```\nx\n```"), Message("assistant", "")]
    assert pieces(said) == [("code", "x"), ("answer", "Here:\n```\nx\n```"), ("question", "Show me")]


def test_a_file_is_quoted_between_fences_that_it_does_not_contain(tmp_path):
    path = tmp_path / "notes.md"
    path.write_text("see\n```\ncode\n```\n")
    assert quoted_file(path) == "notes.md:\n````\nsee\n```\ncode\n```\n````\n"
    assert code_blocks(quoted_file(path)) == ["see\n```\ncode\n```"]
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(EngineError, match="is not UTF-8 text \\(byte 0\\)"):
        quoted_file(path)
    path.write_bytes(b"a" * 300_000)
    with pytest.raises(EngineError, match="300,000 bytes: a prompt can quote at most 262,144"):
        quoted_file(path)
    with pytest.raises(EngineError, match="cannot be read: No such file"):
        quoted_file(tmp_path / "missing")


@pytest.mark.parametrize(
    ("question", "title"),
    [
        ("What is a radix tree?", "radix tree"),
        ("How does paging work?", "How does paging work"),
        ("Why is decode memory bound, and prefill not, on one machine?", "Why is decode memory bound, and prefill"),
        ("What is paging?\nIn two lines.", "paging"),
        ("what is", "is"),
    ],
)
def test_a_title_is_taken_from_the_question(question, title):
    assert title_of(question) == title


def test_every_word_must_occur_in_the_title_or_a_message(tmp_path):
    store = Store(tmp_path / "chats.sqlite")
    for id, title, text in (("abc1", "paging", "The 100% Radix tree\nsecond"), ("abc2", "Radix", "100 blocks")):
        store.save_chat(Session(id, title, "", created=float(id[-1])))
        store.save_message(id, 0, Message("user", text, created=1.0))
    store.close_chat("abc1")

    def ids(words: str) -> list[str]:
        return [found.id for found in store.search(words)]

    assert ids("") == ["abc2", "abc1"]
    assert ids("radix") == ["abc2", "abc1"]
    assert ids("RADIX tree") == ["abc1"]
    assert ids("100%") == ["abc1"], "a % is a letter like any other"
    assert ids("paging blocks") == []
    [found] = store.search("tree paging")
    assert (found.line, found.closed, found.messages) == ("The 100% Radix tree", True, 1)
    assert store.load("abc1").messages[0].text.startswith("The 100%")
    assert store.load("abc") is None, "two chats begin so"
    assert store.load("nothing") is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("/dev/zero", "a device"),
        ("PIPE", "a device or a pipe"),
        ("BIG", "has 10,000,000,000 bytes"),
        (".", "Is a directory"),
        ("none", "No such file"),
        ("~nobody-at-all/x", "no user 'nobody-at-all'"),
        ("a\0b", "zero byte"),
        ("a" * 300, "too long"),
    ],
)
def test_a_file_that_cannot_be_attached_is_refused_with_the_reason(tmp_path, name, why):
    os.mkfifo(tmp_path / "PIPE")
    with (tmp_path / "BIG").open("wb") as file:
        file.truncate(10_000_000_000)
    name = str(tmp_path / name) if name.isupper() else name
    with pytest.raises(EngineError, match=why):
        quoted_file(named_file(name))


def test_a_failed_write_is_reported_and_leaves_no_file(tmp_path):
    chat = Session("abc", "t", "", messages=[Message("user", "x" * 100_000, created=1.0)])
    with pytest.raises(EngineError, match="too long"):
        write(chat, tmp_path / ("a" * 300))
    with pytest.raises(EngineError, match="exists already"):
        write(chat, Path("/dev/full"))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(EngineError, match=r"out.md cannot be written: File too large"):
            write(chat, tmp_path / "out.md")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert not (tmp_path / "out.md").exists()
