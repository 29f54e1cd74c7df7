"""Chats on servers of other makers, and the values of their Prometheus pages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Static

from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.info import EngineInfo
from engine.params import SamplingParams
from minitui.chat.conversation import Sampling
from minitui.chat.sessions import Chats
from minitui.chat.store import Store
from tests.support.fake_openai import FakeServer
from tests.support.server.serving import Running
from tests.support.waiting import ask, drained, started, until

pytest.importorskip("httpx", reason="the extra 'serve' is not installed")

from minitui.chat.prompt import continue_prompt
from minitui.settings import Settings
from minitui.sources.openai import OpenAISource, TextCodec
from minitui.sources.server_metrics import MetricsPoller, ServerMetrics, read_page
from minitui.tui.apps.openai_app import ForeignApp

# Pages as the two servers write them, cut to a few lines of each kind.
VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-8B"} 7.0
vllm:num_requests_running{engine="1",model_name="Qwen/Qwen3-8B"} 5.0
vllm:num_requests_waiting{engine="0",model_name="Qwen/Qwen3-8B"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="Qwen/Qwen3-8B"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="Qwen/Qwen3-8B"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="Qwen/Qwen3-8B"} 40000.0
vllm:prefix_cache_hits_total{engine="0",model_name="Qwen/Qwen3-8B"} 30000.0
vllm:prompt_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} 40000.0
vllm:generation_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} 9000.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="Qwen/Qwen3-8B"} 0.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="Qwen/Qwen3-8B"} 50.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="Qwen/Qwen3-8B"} 2.5
"""
SGLANG = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="meta-llama/Llama-3.1-8B-Instruct"} 162.0
sglang:num_queue_reqs{model_name="meta-llama/Llama-3.1-8B-Instruct"} 2826.0
sglang:token_usage{model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.28
sglang:cache_hit_rate{model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.007507552643049313
sglang:gen_throughput{model_name="meta-llama/Llama-3.1-8B-Instruct"} 86.50814177726902
sglang:prompt_tokens_total{model_name="meta-llama/Llama-3.1-8B-Instruct"} 8.128902e+06
sglang:generation_tokens_total{model_name="meta-llama/Llama-3.1-8B-Instruct"} 7.557572e+06
sglang:time_to_first_token_seconds_sum{model_name="meta-llama/Llama-3.1-8B-Instruct"} 2.3518979474117756e+06
sglang:time_to_first_token_seconds_count{model_name="meta-llama/Llama-3.1-8B-Instruct"} 11008.0
"""


def unknown(vitals: Any) -> list[str]:
    """Returns the names of the unknown values."""
    return [name for name, value in vars(vitals).items() if value is None]


def test_the_names_of_vllm_and_sglang_are_both_known() -> None:
    vllm = read_page(VLLM)
    assert (vllm.running, vllm.waiting, vllm.cache_use, vllm.hit_rate) == (12, 2, 0.375, 0.75)
    assert vllm.ttft_mean_s == 0.05 and unknown(vllm) == ["tokens_per_s"]
    later = read_page(VLLM.replace("9000.0", "9500.0"), vllm, 2.0)
    assert later.tokens_per_s == 250 and unknown(later) == []
    sglang = read_page(SGLANG)
    assert (sglang.running, sglang.waiting, sglang.cache_use) == (162, 2826, 0.28)
    assert sglang.hit_rate == pytest.approx(0.0075, abs=1e-4) and unknown(sglang) == []


def test_ranks_and_priorities_of_one_engine_are_counted_once() -> None:
    def running(tp: int, dp: int, priority: str, value: int) -> str:
        labels = f'dp_rank="{dp}",model_name="m {{x}}",pp_rank="0",priority="{priority}",tp_rank="{tp}"'
        return f"sglang:num_running_reqs{{{labels}}} {value}.0"

    ranks = [running(tp, dp, "", 14 + dp) for tp in (0, 1) for dp in (0, 1)]
    assert read_page("\n".join([*ranks, running(0, 0, "-1", 9), running(0, 0, "0", 5)])).running == 14 + 15


def test_a_missing_value_is_unknown_and_not_zero() -> None:
    running = "vllm:num_requests_running"
    for page in ("", "nonsense", f"{running} NaN", f"{running} +Inf", f"{running}{{}} x", "{} 5"):
        assert len(unknown(read_page(page))) == 8
    assert "running unknown" in ServerMetrics().describe() and "0" not in ServerMetrics().describe()
    assert "running 12  waiting 2  KV in use 38%  prefix hits 75%" in read_page(VLLM).describe()


@pytest.mark.parametrize(
    ("status", "page", "said"),
    [(404, "", "its /metrics answers 404"), (200, "python_info 1", "no metric that minitui knows"), (200, VLLM, "")],
)
async def test_a_page_without_known_values_is_reported(status: int, page: str, said: str) -> None:
    import httpx

    answer = httpx.MockTransport(lambda request: httpx.Response(status, text=page))
    async with httpx.AsyncClient(transport=answer, base_url="http://m") as http:
        poller = MetricsPoller(http)
        await poller.ask()
    assert (said in poller.no_metrics) and bool(poller.no_metrics) == bool(said) and not poller.trouble


def test_ids_of_texts_keep_a_conversation() -> None:
    codec = TextCodec()
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi <assistant> <end>"}]
    prompt = codec.apply_chat_template(messages)
    assert codec.messages(prompt) == messages
    kept = [*prompt, codec.intern("The "), codec.intern("answer")]
    rendered = codec.apply_chat_template(
        [*messages, {"role": "assistant", "content": "The answer"}, {"role": "user", "content": "more"}]
    )
    following = continue_prompt(rendered, kept, codec)
    assert following.diverges_at is None and following.ids[: len(kept)] == kept
    assert codec.messages(following.ids)[2] == {"role": "assistant", "content": "The answer"}


@contextlib.asynccontextmanager
async def attached(store: Store | None = None, **fields: Any) -> AsyncIterator[tuple[FakeServer, OpenAISource, Chats]]:
    """A server with these attributes, a source that is connected to it, and chats on this source."""
    fake = FakeServer()
    for name, value in fields.items():
        setattr(fake, name, value)
    async with fake, started(OpenAISource(fake.url)) as source:
        chats = Chats(source, store)
        chats.use(source.codec)
        yield fake, source, chats


async def two_turns(url: str) -> tuple[Any, Any]:
    """A chat of two turns on a server."""
    source = OpenAISource(url)
    await source.start(lambda progress: None)
    chats = Chats(source, sampling=Sampling(temperature=0.0, max_tokens=30))
    chats.use(source.codec)
    chat = chats.new("Answer briefly.")
    for question in ("What is the KV cache?", "What is prefill?"):
        await ask(chats, chat, question)
    assert [m.state for m in chat.messages] == ["done"] * 4, [m.error for m in chat.messages]
    return source, chat


async def test_a_chat_through_the_openai_endpoints_of_our_own_server(server: Running) -> None:
    source, chat = await two_turns(server.url)
    assert "key" in chat.messages[1].text and chat.messages[3].metrics["prompt_tokens"] > 20
    # The page may still be that of before.
    await until(lambda: source.metrics.hit_rate and source.metrics.running == 0)
    assert source.metrics.cache_use == 0
    prompt = source.codec.apply_chat_template([{"role": "user", "content": "x"}])
    long = source.submit(prompt, SamplingParams(max_tokens=3000))
    async for _ in long:
        long.cancel()
    assert long.finish_reason == "abort"
    await asyncio.to_thread(server.wait_idle)
    with pytest.raises(InvalidRequest, match="pause"):
        await source.control("pause")
    with pytest.raises(EngineError, match="state"):
        await source.snapshot()
    await source.close()


SETTINGS = {"temperature": 0.5, "top_k": 1, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "seed": 7}


@pytest.mark.parametrize(
    ("owner", "unlike"),
    [
        ("someone", {"top_k": None, "repetition_penalty": None}), ("sglang", {}), ("vllm", {}), ("minitui", {}),
        ("llamacpp", {"repetition_penalty": "repeat_penalty"}),
    ],
)
async def test_a_sampling_option_is_sent_or_refused_when_it_is_set(owner: str, unlike: dict[str, str | None]) -> None:
    """`unlike`: the options that this kind of server calls otherwise; None: it has no such option."""
    async with attached(owner=owner) as (fake, source, chats):
        chat, expected = chats.new(""), {}
        for name, value in SETTINGS.items():
            if (spelled := unlike.get(name, name)) is not None:
                assert f"{name} is {value}" in chat.sampling.set(name, str(value), source.cannot_use)
                expected[spelled] = value
                continue
            with pytest.raises(InvalidRequest, match=f"cannot use {name}: OpenAI's API does not have it"):
                chat.sampling.set(name, str(value), source.cannot_use)
            assert getattr(chat.sampling, name) is None
        await ask(chats, chat)
        [body] = fake.asked
        assert {**body, **expected} == body
        assert {*body} - {*expected} == {"model", "messages", "stream", "stream_options", "top_p"}
        chat.sampling = Sampling(top_k=1)  # of settings.toml
        message = await ask(chats, chat)
        assert len(fake.asked) == 2 if "top_k" not in unlike else "/set top_k default" in message.error


async def test_a_chat_on_such_a_server_is_stored_and_can_continue_later(tmp_path: Path) -> None:
    fake = await FakeServer().start()
    for question in ("first?", "second?"):
        store = Store(tmp_path / "chats.sqlite")
        async with started(OpenAISource(fake.url)) as source:
            chats = Chats(source, store)
            chats.use(source.codec)
            await ask(chats, chats.sessions[0] if chats.restore() else chats.new("Answer briefly."), question)
        store.close()
    said = [message["content"] for message in fake.asked[-1]["messages"]]
    assert said == ["Answer briefly.", "first?", "one two three", "second?"]
    await fake.kill()


@pytest.mark.parametrize(
    ("pieces", "text", "error"),
    [(("half \ud83d", " of it"), "half ? of it", ""), (("odd ", ["parts"]), "odd ", "not answer like an OpenAI")],
    ids=["half a surrogate pair", "content that is no text"],
)
async def test_whatever_a_server_sends_the_answer_ends_and_is_kept(
    tmp_path: Path, pieces: tuple[Any, ...], text: str, error: str
) -> None:
    store = Store(tmp_path / "chats.sqlite")
    async with attached(store, pieces=pieces) as (_, _, chats):
        chat = chats.new("")
        await ask(chats, chat, "first?")
        kept = store.load(chat.id)
        assert kept is not None and kept.messages[-1].text == text and error in kept.messages[-1].error
        assert kept.messages[-1].state == ("error" if error else "done")


async def test_a_wrong_model_and_an_unreachable_server_give_sentences(server: Running) -> None:
    for url, model, said in [(server.url, "gpt-9", "has no model"), ("http://127.0.0.1:9", "", "cannot be reached")]:
        source = OpenAISource(url, model=model)
        with pytest.raises(EngineError, match=said):
            await source.start(lambda progress: None)
        with pytest.raises(EngineDead):
            await source.ready()
        await source.close()


async def test_only_an_answer_that_was_cancelled_ends_as_cancelled() -> None:
    silent = await asyncio.start_server(lambda reader, writer: reader.read(), "127.0.0.1", 0)
    async with silent:
        source = OpenAISource(f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}", model="m")
        source.info = EngineInfo(model="m")
        prompt = source.codec.apply_chat_template([{"role": "user", "content": "why"}])
        cancelled, lost = (source.submit(prompt, SamplingParams()) for _ in range(2))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert [delta.finish_reason async for delta in cancelled] == ["abort"]
        await source._stop()  # as a restart does
        with pytest.raises(EngineDead, match="was closed"):
            await lost.started()
        await source.close()


async def test_the_application_chats_and_shows_the_metrics_in_a_line(server: Running) -> None:
    source = OpenAISource(server.url)
    chats = Chats(source, sampling=Sampling(temperature=0.0, max_tokens=30))
    app = ForeignApp(source, chats, Settings(), system="Answer briefly.", known_questions=[], speaker="model")
    async with app.run_test(size=(120, 36)) as pilot:

        await until(lambda: source.info)
        app.ask_question("What is the KV cache?")
        await until(lambda: app.session.messages and not app.session.busy)
        assert app.session.state == "done", app.session.messages[-1].error
        panel = app.screen.query_one("#rail ServerVitals")
        await until(lambda: "KV in use 0 %" in panel.text and server.url in panel.text)
        await until(lambda: panel.text.count("unknown") <= 2)  # rates come with the second poll
        assert not app.story
        await pilot.resize_terminal(80, 24)
        await until(lambda: "KV in use 0%" in app.story)
        app.action_do("inspect")
        await pilot.pause()
        assert app.current_mode == "chat"
        app.clear_notifications()
        app.action_do("gate")
        await pilot.pause()
        assert ["cannot be controlled" in notice.message for notice in app._notifications] == [True]
        app.action_do("help")
        await until(lambda: app.screen.query(Static))
        help = " ".join(str(row.content) for row in app.screen.query(Static))
        assert "One server answers all chats here" in help and "chips" not in help and "slow motion" not in help


@pytest.mark.parametrize("status", [404, 405, 500, 501])
async def test_a_server_that_does_not_list_its_models_is_used_with_model(status: int) -> None:
    fake = await FakeServer().start()
    fake.models_status = status
    source = OpenAISource(fake.url)
    with pytest.raises(EngineError, match="name the model with --model"):
        await source.start(lambda progress: None)
    await source.close()
    async with started(OpenAISource(fake.url, model="m2")) as named:
        prompt = named.codec.apply_chat_template([{"role": "user", "content": "x"}])
        await drained(named.submit(prompt, SamplingParams()))
    assert fake.asked[-1]["model"] == "m2"
    await fake.kill()


@pytest.mark.parametrize(("body", "said", "field"), [
    ({"error": {"message": "too hot", "type": "BadRequestError", "param": "temperature", "code": 400}},
     "too hot", "temperature"),
    ({"object": "error", "message": "too hot", "type": "BadRequestError", "param": None, "code": 400},
     "too hot", "request"),
    ({"error": "too hot"}, "too hot", "request"),
    ({"detail": "too hot"}, "too hot", "request"),
    ({"detail": [{"loc": ["body", "temperature"], "msg": "too hot", "type": "value_error"}]},
     "temperature: too hot", "temperature"),
    ({"error": {"message": ["odd"]}}, "odd", "request"), ({"error": {}}, "answered 400", "request"),
    ({"detail": [5]}, "None", "request"), ({"detail": 5}, "answered 400", "request"), ([], "answered 400", "request"),
], ids=["OpenAI", "vLLM", "a text", "a detail", "FastAPI", "a list", "empty", "a number in a list", "a number", "none"])
async def test_errors_of_other_servers_are_read(body: Any, said: str, field: str) -> None:
    async with attached(status=400, refusal=body or [1]) as (_, source, _):
        stream = source.submit(source.codec.apply_chat_template([{"role": "user", "content": "x"}]), SamplingParams())
        with pytest.raises(InvalidRequest, match=said) as caught:
            await drained(stream)
        assert caught.value.field == field
