"""Chats without a terminal: exact token ids, forks, cancelling, saving."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from minitui.chat.conversation import Message, Sampling, Session
from minitui.chat.describe import describe_answer, split_thinking
from minitui.chat.prompt import continue_prompt
from minitui.chat.sessions import Chats
from minitui.chat.store import Store, StoreError
from tests.support.app.chat_file import open_chats
from tests.support.app.fake_client import END, START, ByteCodec, FakeSource
from tests.support.waiting import ask, until

CODEC = ByteCodec()
SYSTEM = "You explain inference engines. " * 3


async def chats_on(source: FakeSource, store: Store | None = None) -> Chats:
    await source.start(lambda progress: None)
    chats = Chats(source, store)
    chats.use(CODEC)
    return chats


async def answered(*sessions: Session) -> None:
    await until(lambda: not any(session.busy for session in sessions))


async def after_an_answer(store: Store | None = None) -> tuple[Chats, Session]:
    chats = await chats_on(FakeSource(), store)
    session = chats.new(SYSTEM)
    await ask(chats, session, "What is a block table?")
    return chats, session


async def test_a_second_turn_begins_with_exactly_the_ids_of_the_first():
    chats, session = await after_an_answer()
    kept = list(session.ids)
    assert kept[-1] == END  # the reply's end token belongs to the conversation
    session.messages.append(Message("user", "and a radix tree?"))
    prompt = chats.prompt(session)
    assert prompt.ids[: len(kept)] == kept
    assert prompt.kept == len(kept)
    assert prompt.diverges_at is None


async def test_the_second_turn_takes_every_full_block_of_the_first_from_the_cache():
    chats, session = await after_an_answer()
    written = len(session.ids) - 1  # the last token drawn has no KV
    await ask(chats, session, "and a radix tree?")
    assert session.messages[-1].metrics["cached_tokens"] == written // 16 * 16


def test_generated_ids_are_kept_where_the_tokenizer_would_use_others():
    class Pairs(ByteCodec):  # id 258 spells "ab" too
        def decode(self, ids, skip_special_tokens=False):
            return super().decode([b for i in ids for b in ((97, 98) if i == 258 else (i,))], skip_special_tokens)

    rendered = [START, 97, 98, END, 10]
    prompt = continue_prompt(rendered, [START, 258, END], Pairs())
    assert prompt.ids == [START, 258, END, 10]
    assert prompt.kept == 3


def test_after_a_cut_answer_the_template_continues_behind_its_last_token():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "half an ans"}]
    rendered = CODEC.apply_chat_template(messages)
    kept = [*CODEC.apply_chat_template(messages[:1]), *b"half an ans"]
    prompt = continue_prompt(rendered, kept, CODEC)
    assert prompt.ids == rendered
    assert prompt.kept == len(kept)
    assert prompt.diverges_at is None


def test_an_answer_cut_inside_a_character_gets_new_ids():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "half a 🫨"}]
    rendered = CODEC.apply_chat_template(messages)
    kept = [*CODEC.apply_chat_template(messages[:1]), *"half a 🫨".encode()[:-2]]
    prompt = continue_prompt(rendered, kept, CODEC)
    assert prompt.ids == rendered


async def test_a_template_that_drops_thinking_says_where_the_turn_diverges_and_why():
    chats = await chats_on(FakeSource(lambda prompt: "<think>hm</think>\n\nIt maps positions."))
    session = chats.new("")
    await ask(chats, session, "What is a block table?")
    assert split_thinking(session.messages[-1].text) == ("hm", "It maps positions.", False)
    kept = list(session.ids)
    await ask(chats, session, "more")
    diverged = session.messages[-1].metrics["diverged"]
    assert diverged["reason"] == "the template drops the thinking of earlier turns"
    at = diverged["at"]
    assert CODEC.decode(kept[:at]).endswith("assistant\n")  # everything before the thinking is still shared
    text = " ".join(t for t, _ in describe_answer(session.messages[-1]))
    assert f"the prompt changes from token {at} on" in text


async def test_a_changed_system_prompt_diverges_in_the_first_tokens():
    chats = await chats_on(FakeSource())
    session = chats.new("You are terse.")
    await ask(chats, session, "What is a block table?")
    chats.set_system(session, "You are wordy.")
    session.messages.append(Message("user", "again"))
    prompt = chats.prompt(session)
    assert prompt.reason == "the system prompt was changed"
    assert prompt.diverges_at == 1 + len(b"system\nYou are ")


@settings(deadline=None, suppress_health_check=list(HealthCheck))  # with busy cores, all of them may fail
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=12)), max_size=6), st.data())
def test_with_any_kept_ids_the_prompt_has_the_text_of_the_template(turns, data):
    rendered = CODEC.apply_chat_template([{"role": r, "content": c} for r, c in turns])
    kept = data.draw(st.one_of(st.just(rendered), st.lists(st.integers(0, 257), max_size=40)))
    if kept == rendered and rendered:
        kept = rendered[: data.draw(st.integers(0, len(rendered)))]
    prompt = continue_prompt(rendered, kept, CODEC)
    assert CODEC.decode(prompt.ids) == CODEC.decode(rendered)
    assert prompt.ids[: prompt.kept] == kept[: prompt.kept]


async def test_a_fork_shares_its_past_and_continues_independently():
    chats, session = await after_an_answer()
    fork = chats.fork(session)
    assert fork.parent == session.id
    assert fork.note.endswith("the blocks of it that the cache still has"), "it may have none"
    assert [m.text for m in fork.messages] == [m.text for m in session.messages]
    chats.send(fork, "one way")
    chats.send(session, "another way")
    await answered(session, fork)
    assert fork.messages[-2].text == "one way"
    assert session.messages[-2].text == "another way"
    for s in (session, fork):
        assert s.messages[-1].metrics["cached_tokens"] >= 16 * 8


async def test_eight_chats_are_answered_at_once_and_share_one_system_prompt():
    source = FakeSource(lambda prompt: "x" * 60, speed=0.001)
    chats = await chats_on(source)
    sessions = [chats.new(SYSTEM) for _ in range(8)]
    source.engine.gate.pause()
    assert chats.send_all("Say something long.") == sessions
    await until(lambda: len(source.engine.scheduler.waiting) == 8)
    source.engine.gate.resume()
    await until(lambda: len(source.engine.scheduler.running) == 8)  # all in one batch
    await answered(*sessions)
    assert [s.state for s in sessions] == ["done"] * 8
    cached = [s.messages[-1].metrics["cached_tokens"] for s in sessions]
    assert cached[0] == 0
    assert all(c >= len(SYSTEM) // 16 * 16 for c in cached[1:])


async def in_mid_answer(store: Store | None = None) -> tuple[Chats, Session]:
    source = FakeSource(lambda prompt: "y" * 2000, speed=0.001)
    chats = await chats_on(source, store)
    session = chats.new(SYSTEM)
    chats.send(session, "go on and on")
    await until(lambda: len(session.messages[-1].text) >= 5)
    return chats, session


async def test_cancelling_keeps_the_text_so_far_and_frees_the_request(tmp_path):
    store = Store(tmp_path / "chats.sqlite")
    chats, session = await in_mid_answer(store)
    assert chats.cancel(session)
    await answered(session)
    assert session.state == "cancelled"
    assert not chats.source.engine.has_work
    assert not chats.cancel(session)
    [kept] = open_chats(store)
    assert kept.messages[-1].state == "cancelled"
    assert kept.messages[-1].text == session.messages[-1].text


async def test_a_question_is_saved_before_it_is_answered(tmp_path):
    store = Store(tmp_path / "chats.sqlite")
    chats = Chats(FakeSource(), store)  # the engine never starts
    session = chats.new(SYSTEM)
    chats.send(session, "Is this kept?")
    [kept] = open_chats(Store(tmp_path / "chats.sqlite"))
    assert [(m.role, m.text, m.state) for m in kept.messages] == [
        ("user", "Is this kept?", "done"),
        ("assistant", "", "queued"),
    ]
    chats.cancel(session)
    assert session.state == "cancelled"


async def test_a_reopened_chat_continues_with_the_same_ids(tmp_path):
    store = Store(tmp_path / "chats.sqlite")
    _, session = await after_an_answer(store)
    store.close()
    again = await chats_on(FakeSource(), Store(tmp_path / "chats.sqlite"))
    assert again.restore() == 1
    restored = again.sessions[0]
    assert restored.ids == session.ids
    assert again.prompt(restored).kept == len(session.ids)
    assert again.asked() == ["What is a block table?"]
    assert [(m.role, m.text, m.state) for m in restored.messages] == [
        (m.role, m.text, m.state) for m in session.messages
    ]
    assert restored.messages[-1].metrics["prompt_tokens"] == session.messages[-1].metrics["prompt_tokens"]


async def test_chats_are_restored_before_the_engine_is_known_and_ids_of_another_model_are_not_used(tmp_path):
    store = Store(tmp_path / "chats.sqlite")
    chats, session = await after_an_answer(store)
    for model, kept in ((chats.model, len(session.ids)), ("another", 0)):
        source = FakeSource()
        store.close()
        store = Store(tmp_path / "chats.sqlite")
        again = Chats(source, store)
        again.restore()  # as the command line does it: nothing is loaded yet
        await source.start(lambda progress: None)
        source.info = replace(source.info, model=model)
        again.use(ByteCodec())
        assert again.prompt(again.sessions[0]).kept == kept


async def asked(store: Store, *questions: str) -> Chats:
    """Of one start: a chat for each question, answered, and an empty one."""
    chats = await chats_on(FakeSource(), store)
    for question in questions:
        chats.send(chats.new(SYSTEM), question)
        await answered(chats.sessions[-1])
    chats.new(SYSTEM)
    return chats


async def test_after_many_starts_only_the_chats_of_the_last_come_back_and_the_others_are_found(tmp_path):
    path = tmp_path / "chats.sqlite"
    for number in range(6):
        store = Store(path)
        await asked(store, f"start {number}")
        store.close()
    await asked(store := Store(path), "paging", "prefill")
    store.close()
    await asked(store := Store(path))  # looked in, and asked nothing
    store.close()
    chats = Chats(FakeSource(), Store(path))
    assert chats.restore() == 2 and [s.title for s in chats.sessions] == ["paging", "prefill"]
    assert chats.left_out == "F finds 6 older chats."
    assert [one.title for one in chats.store.search("start 3")] == ["start 3"]


async def test_a_chat_that_is_open_elsewhere_opens_as_a_copy_and_neither_overwrites_the_other(tmp_path):
    path = tmp_path / "chats.sqlite"
    first = await asked(Store(path), "paging")
    second = await chats_on(FakeSource(), Store(path))
    assert second.restore() == 0 and not second.sessions
    assert "1 chat is open in another minitui" in second.left_out and "opens a copy" in second.left_out
    mine = first.sessions[0]
    fork = second.reopen(mine.id)
    assert fork.id != mine.id and fork.parent == mine.id and "open in another minitui" in fork.note
    second.send(fork, "asked in the second")
    first.send(mine, "asked in the first")
    await answered(fork, mine)
    for session, word in ((mine, "first"), (fork, "second")):
        kept = second.store.load(session.id)
        assert [m.text for m in kept.messages if m.role == "user"] == ["paging", f"asked in the {word}"]
        assert [m.text for m in kept.messages] == [m.text for m in session.messages]
    first.close(mine)  # it belongs to no process now
    assert second.reopen(mine.id).id == mine.id
    assert first.reopen(mine.id).id != mine.id, "and now it is the second's"


def test_a_chat_is_free_when_the_minitui_that_had_it_open_was_killed(tmp_path):
    program = (
        "import sys, time; from minitui.chat.conversation import Message, Session;"
        "from minitui.chat.store import Store;"
        "store = Store(sys.argv[1]);"
        "store.save_chat(Session('a', 't', ''));"
        "store.save_message('a', 0, Message('user', 'q'));"
        "print('saved', flush=True); time.sleep(60)"
    )
    path = tmp_path / "chats.sqlite"
    other = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "saved\n"
        store = Store(path)
        assert not store.claim("a") and store.take_over(9).elsewhere == 1
    finally:
        other.kill()
        other.wait()
    assert [one.id for one in store.take_over(9).chats] == ["a"] and store.claim("a")
    store.close()
    left = list(tmp_path.glob("open-*.lock"))
    assert len(left) == 1, "that of the killed one"
    os.utime(left[0], (0, 0))
    store = Store(path)
    assert store.claim("a") and left[0] not in tmp_path.glob("open-*.lock"), "the next to begin takes it away"


async def test_when_the_engine_dies_the_answer_so_far_stays_and_says_so():
    chats, session = await in_mid_answer()
    source = chats.source
    source.die("the engine process ended by signal SIGKILL")
    await answered(session)
    assert session.state == "error"
    assert session.messages[-1].text.startswith("y")
    assert "SIGKILL" in session.messages[-1].error
    assert [tone for _, tone in describe_answer(session.messages[-1])] == ["bad"], "no figures of a part of an answer"
    await source.restart(lambda progress: None)
    chats.retry(session)
    await until(lambda: session.messages[-1].text)
    chats.cancel_all()


async def test_questions_reach_the_engine_in_the_order_in_which_they_were_sent(monkeypatch):
    chats = await chats_on(FakeSource())
    first, second, whole = chats.new(SYSTEM), chats.new(SYSTEM), chats.prompt

    def slow_for_the_first(session):
        time.sleep(0.05 * (session is first))
        return whole(session)

    monkeypatch.setattr(chats, "prompt", slow_for_the_first)
    chats.send(first, "Why?")
    chats.send(second, "Why?")
    await answered(first, second)
    assert first.request < second.request
    assert second.messages[-1].metrics["cached_tokens"] > first.messages[-1].metrics["cached_tokens"] == 0


async def test_only_what_was_cancelled_here_is_said_to_be_cancelled():
    source = FakeSource(lambda prompt: "z" * 2000, speed=0.001)
    chats = await chats_on(source)
    ended, cancelled, waiting = (chats.new(SYSTEM) for _ in range(3))
    for session in (ended, cancelled):
        chats.send(session, "go on")
    await until(lambda: ended.messages[-1].text and cancelled.messages[-1].text)
    source.abort(ended._stream)  # not by this chat
    chats.cancel(cancelled)
    await answered(ended, cancelled)
    assert (ended.state, cancelled.state) == ("error", "cancelled")
    assert ended.messages[-1].error == "the engine ended this answer before it was complete"
    chats.send(waiting, "why")
    chats.cancel_all("The engine could not start: no memory")
    assert (waiting.state, waiting.messages[-1].error) == ("error", "The engine could not start: no memory")


async def test_a_replay_computes_its_prompt_first_if_the_cache_has_nothing_of_it():
    chats = await chats_on(source := FakeSource())
    session = chats.new(SYSTEM)
    await ask(chats, session, "Why?")
    chats.begins_in_cache = lambda ids: True
    await answered(chats.replay(session, "Why?"))
    assert [record[2] for record in source.drain_records()].count("submit") == 2
    await source.control("clear_cache")
    source.drain_records()
    chats.begins_in_cache = lambda ids: False
    replay = chats.replay(session, "Why?")
    await answered(replay)
    submitted = [(record[4], record[5]) for record in source.drain_records() if record[2] == "submit"]
    prompt = replay.messages[-1].metrics["prompt_tokens"]
    assert submitted == [(session.id, prompt), (replay.id, prompt)], "the first request is one of the replayed chat"
    assert replay.messages[-1].metrics["cached_tokens"] > 0 and replay.primed
    assert len(session.messages) == 2, "its own conversation is as it was"


async def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers():
    chats = await chats_on(FakeSource(num_blocks=9))
    session = chats.new("")
    chats.send(session, "w" * 500)
    await answered(session)
    assert session.state == "error"
    assert "128" in session.messages[-1].error  # eight blocks of sixteen


async def test_asking_while_an_answer_is_written_is_refused():
    chats = await chats_on(FakeSource(lambda prompt: "y" * 500, speed=0.001))
    session = chats.new("")
    chats.send(session, "one")
    with pytest.raises(InvalidRequest, match="still answering"):
        chats.send(session, "two")
    chats.cancel_all()


def test_sampling_is_set_by_name_and_refused_with_a_sentence():
    sampling = Sampling()
    assert "0.5" in sampling.set("temperature", "0.5")
    sampling.set("ignore_eos", "on")
    assert sampling.params({}).ignore_eos
    sampling.set("temperature", "default")
    assert sampling.params({"temperature": 0.25}).temperature == 0.25
    for name, value in (("temperature", "-1"), ("temperature", "hot"), ("max_tokens", "0"), ("colour", "red")):
        with pytest.raises(InvalidRequest):
            sampling.set(name, value)
    assert sampling.max_tokens is None


@pytest.mark.parametrize(("full", "words"), [(False, "stopped at max_tokens"), (True, "stopped at 128 tokens")])
def test_a_cut_answer_names_the_limit_that_it_reached(full: bool, words: str) -> None:
    metrics = {"finish": "length", "full": full, "prompt_tokens": 124, "cached_tokens": 0, "output_tokens": 4}
    assert words in " · ".join(t for t, _ in describe_answer(Message("assistant", "x", metrics=metrics)))


@pytest.mark.parametrize(
    ("match", "words"),
    [
        ({"stop": "differs", "at": 37}, "differs at token 37"),
        ({"stop": "ends", "at": 32}, "the cached text ends at token 32"),
        ({"stop": "evicted", "at": 812}, "the rest was evicted at step 812"),
        ({"stop": "short", "at": 0}, "too short to share"),
        ({"stop": "empty", "at": 0}, "the beginning is not cached"),
        ({"stop": "whole", "at": 0}, "all full blocks were cached"),
    ],
)
def test_the_line_under_an_answer_says_what_came_from_the_cache_and_why_no_more(match, words):
    metrics = {"ttft_ms": 84.2, "decode_tok_s": 41.3, "output_tokens": 96, "prompt_tokens": 640, "cached_tokens": 512}
    text = " · ".join(t for t, _ in describe_answer(Message("assistant", "x", metrics={**metrics, "match": match})))
    assert "first token 84.2 ms · 41 tok/s · 96 tokens · 512 of 640 prompt tokens from cache" in text
    assert words in text


def test_thinking_is_split_off_also_while_its_tag_is_incomplete():
    assert split_thinking("<thi") == ("", "", True)
    assert split_thinking("<think>so it") == ("so it", "", True)
    assert split_thinking("<think>so</think>\nYes.") == ("so", "Yes.", False)
    assert split_thinking("<b>no</b>") == ("", "<b>no</b>", False)


def test_the_rate_depends_on_the_arrivals_and_not_on_the_calls():
    session = Session("a", "t", "")
    for tick in range(11):
        session._arrivals.append((tick * 0.1, 2))
    assert session.rate(now=1.0) == pytest.approx(20.0)
    assert session.rate(now=1.05) == pytest.approx(20.0)
    assert session.rate(now=3.0) == 0.0
    assert session.rate(window=5.0, now=3.0) == pytest.approx(20.0)
    session._arrivals.extend([(9.0, 10), (9.0001, 10), (9.1, 1)])
    assert session.rate(now=9.1) == 0.0, "the first tokens have no speed yet, nor have steps taken one by one"
    session._arrivals.append((9.2001, 1))
    assert session.rate(now=9.3) > 0
    session.forget_rate()
    assert session.rate(now=9.3) == 0.0, "in slow motion the speed before it does not count"


def test_an_answer_that_ended_with_the_process_and_a_cancelled_one_say_so(tmp_path):
    store = Store(tmp_path / "chats.sqlite")
    store.save_chat(Session("a", "t", ""))
    for position, state in ((1, "running"), (3, "cancelled")):
        store.save_message("a", position - 1, Message("user", "q", created=1.0))
        store.save_message("a", position, Message("assistant", "half", state, created=1.0))
    chats = Chats(FakeSource(), store)
    chats.restore()
    cut, cancelled = (m for m in chats.sessions[0].messages if m.role == "assistant")
    assert describe_answer(cut) == [("cut short: minitui ended before the answer was complete", "bad")]
    assert describe_answer(cancelled) == [("cancelled", "bad")]


async def test_a_removed_chat_keeps_its_title_and_loses_its_number():
    chats = await chats_on(FakeSource())
    first, second = chats.new(SYSTEM, "paging"), chats.new(SYSTEM, "caching")
    assert chats.names == {first.id: "#1 paging", second.id: "#2 caching"}
    chats.close(first)
    assert chats.names == {first.id: "paging", second.id: "#1 caching"}


async def test_a_chat_closed_in_mid_answer_stays_closed(tmp_path):
    store = Store(tmp_path / "chats.sqlite")
    chats, session = await in_mid_answer(store)
    chats.close(session)
    assert session.state == "cancelled"
    for _ in range(20):  # the engine's last delta has arrived
        await asyncio.sleep(0.001)
    assert not chats.source.engine.has_work
    assert open_chats(store) == []
    [kept] = [store.load(session.id)]
    assert kept.messages[-1].state == "cancelled" and kept.messages[-1].text.startswith("yyyyy")


async def test_after_a_failure_of_the_chat_file_all_chats_are_saved(tmp_path, monkeypatch):
    store = Store(tmp_path / "chats.sqlite")
    chats = await chats_on(FakeSource(), store)
    told: list[str] = []
    chats.saver.on_unsaved = told.append
    one, two, gone = chats.new(SYSTEM), chats.new(SYSTEM), chats.new(SYSTEM)
    await ask(chats, gone, "first of all")
    monkeypatch.setattr(store, "together", failing)
    for session in (one, two):
        chats.send(session, "Is this kept?")
    await answered(one, two)
    chats.close(gone)
    chats.retry(one, "Is that kept?")
    await answered(one)
    assert (one.state, two.state) == ("done", "done")
    assert [sentence for sentence in told if "disk is full" not in sentence] == [] and len(told) == 1
    assert chats.saver.unsaved.keys() == {one.id, two.id}
    monkeypatch.undo()
    chats.cancel_all()  # the application ends
    assert not chats.saver.unsaved
    assert {c.id: [m.text for m in c.messages] for c in open_chats(store)} == {
        s.id: [m.text for m in s.messages] for s in (one, two)
    }


@contextlib.contextmanager
def failing():
    raise StoreError("the chat file cannot be used: database or disk is full")
    yield


async def test_any_exception_ends_the_answer(monkeypatch):
    chats = await chats_on(FakeSource())
    session = chats.new(SYSTEM)
    monkeypatch.setattr(CODEC, "apply_chat_template", lambda *_, **__: 1 // 0, raising=False)
    await ask(chats, session, "x")
    assert session.state == "error" and "ZeroDivisionError" in session.messages[-1].error
