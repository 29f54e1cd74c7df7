"""LLM: the engine in-process, under the names vLLM's users know."""

from __future__ import annotations

import pytest

from engine import LLM, EngineError, InvalidRequest, SamplingParams
from engine.process.server import MAX_WAITING
from minitui.tutor import model_dir


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(model_dir()), device="cpu", num_blocks=256)


def test_prompts_as_text_and_as_ids_give_outputs_in_order(llm: LLM) -> None:
    texts = ["What is paging?", "What is a token?"]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    assert llm.tokenizer is not None
    by_text = llm.generate(texts, params, use_tqdm=False)
    by_ids = llm.generate([llm.tokenizer.encode(text) for text in texts], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in by_text] == [o.outputs[0].token_ids for o in by_ids]
    assert [o.prompt for o in by_text] == texts and by_ids[0].prompt is None
    assert llm.generate(texts[0], params, use_tqdm=False)[0].outputs[0].text == by_text[0].outputs[0].text


def test_a_chat_is_answered_and_stops_by_itself(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is a KV cache?"}]
    reply = llm.chat(question, SamplingParams(temperature=0, max_tokens=200))[0].outputs[0]
    assert reply.finish_reason == "stop" and "cache" in reply.text.lower()
    assert "<|" not in reply.text and reply.token_ids[-1] in llm.info["eos_ids"]


def test_n_samples_and_a_parameter_per_prompt(llm: LLM) -> None:
    outputs = llm.generate(
        ["Hello", "Hello"],
        [SamplingParams(n=3, temperature=1.5, seed=1, max_tokens=8, ignore_eos=True), SamplingParams(max_tokens=2)],
        use_tqdm=False,
    )
    assert [sample.index for sample in outputs[0].outputs] == [0, 1, 2] and len(outputs[1].outputs) == 1
    assert len({tuple(sample.token_ids) for sample in outputs[0].outputs}) > 1


def test_a_stop_string_ends_a_reply_and_is_not_in_it(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is a KV cache?"}]
    whole = llm.chat(messages, SamplingParams(temperature=0, max_tokens=60))[0].outputs[0].text
    word = whole.split()[5]
    cut = llm.chat(messages, SamplingParams(temperature=0, max_tokens=60, stop=(word,)))[0].outputs[0]
    assert cut.text == whole[: whole.index(word)] and cut.finish_reason == "stop"


def test_one_bad_prompt_refuses_the_batch_and_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate([[5, 6], []], SamplingParams(max_tokens=4), use_tqdm=False)
    assert not llm.engine.has_work
    with pytest.raises(InvalidRequest, match="2 prompts and 1 sampling_params"):
        llm.generate(["a", "b"], [SamplingParams()])


@pytest.mark.parametrize("n", [0, -1, 129, True, "2", 1.0, None])
def test_a_number_of_samples_that_cannot_be_is_refused(llm: LLM, n: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^n is "):
        llm.generate(["a"], SamplingParams(n=n))  # type: ignore[arg-type]


def test_there_may_be_more_prompts_than_a_server_would_let_wait(llm: LLM) -> None:
    requests = [llm.engine.add_request([5, 6], SamplingParams(max_tokens=1)) for _ in range(MAX_WAITING + 1)]
    assert all(llm.engine.abort(request.id) for request in requests) and not llm.engine.has_work


def test_logprobs_come_with_the_reply_and_with_the_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    output = llm.generate(["What is a token?"], params, use_tqdm=False)[0]
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) - 1
    assert [entry.token_id for entry in output.prompt_logprobs] == output.prompt_token_ids[1:]
    for entry, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True):
        assert entry.token_id == token and entry.rank == 1 and len(entry.top) == 3
        assert entry.top[0] == (token, pytest.approx(entry.logprob))


def test_progress_is_drawn_on_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["Hello"], SamplingParams(max_tokens=3), use_tqdm=True)
    assert "1/1 replies" in capsys.readouterr().err


def test_an_unknown_option_names_the_known_ones() -> None:
    with pytest.raises(EngineError, match="num_blocks"):
        LLM(str(model_dir()), nonsense=1)
