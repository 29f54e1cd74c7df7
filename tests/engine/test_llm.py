"""LLM and LLMEngine: the engine in-process, under the names that vLLM's users know."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from engine import LLM, AsyncLLM, EngineError, InvalidRequest, SamplingParams, StructuredOutputsParams
from engine.options import engine_config
from engine.params import RequestOutputKind
from minitui.tutor import model_dir

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
ASKED = [{"role": "user", "content": "What is a KV cache?"}]


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


def test_n_samples_and_a_parameter_per_prompt(llm: LLM) -> None:
    outputs = llm.generate(
        ["Hello", "Hello"],
        [SamplingParams(n=3, temperature=1.5, seed=1, max_tokens=8, ignore_eos=True), SamplingParams(max_tokens=2)],
        use_tqdm=False,
    )
    assert [sample.index for sample in outputs[0].outputs] == [0, 1, 2] and len(outputs[1].outputs) == 1
    assert len({tuple(sample.token_ids) for sample in outputs[0].outputs}) > 1


def test_an_end_token_or_a_stop_string_ends_a_reply_and_is_not_in_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=200)
    whole = llm.chat(ASKED, params)[0].outputs[0]
    assert whole.finish_reason == "stop" and whole.token_ids[-1] in llm.info.eos_ids and "<|" not in whole.text
    word = whole.text.split()[5]
    cut = llm.chat(ASKED, params.clone(stop=word))[0].outputs[0]
    assert cut.text == whole.text[: whole.text.index(word)] and cut.finish_reason == "stop"


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


def test_logprobs_come_with_the_reply_and_with_the_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    output = llm.generate(["What is a token?"], params, use_tqdm=False)[0]
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    for listed, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True):
        assert listed and next(iter(listed)) == token and {1, 2} <= {each.rank for each in listed.values()}
        assert len(listed) == (2 if (listed[token].rank or 0) <= 2 else 3)
    sample = output.outputs[0]
    assert sample.logprobs is not None
    for listed, token in zip(sample.logprobs, sample.token_ids, strict=True):
        assert [each.rank for each in listed.values()] == [1, 2, 3] and next(iter(listed)) == token
        assert listed[token].decoded_token == llm.get_tokenizer().decode([token], skip_special_tokens=False)
    drawn = [listed[token].logprob for listed, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert sample.cumulative_logprob == pytest.approx(sum(drawn))
    without = llm.generate(["What is a token?"], GREEDY)[0]
    assert without.prompt_logprobs is None
    assert without.outputs[0].logprobs is None and without.outputs[0].cumulative_logprob is None


def test_an_unknown_option_names_the_known_ones() -> None:
    with pytest.raises(EngineError, match="num_blocks"):
        LLM(str(model_dir()), nonsense=1)


# ---- what a user of vLLM types


def ids_of(llm: LLM, prompts: Any, **more: Any) -> list[list[int]]:
    return [output.prompt_token_ids for output in llm.generate(prompts, SamplingParams(max_tokens=1), False, **more)]


@pytest.mark.parametrize("form", [
    [5, 6], (5, 6), np.array([5, 6]), torch.tensor([5, 6]), [np.int32(5), np.int64(6)], list(torch.tensor([5, 6])),
    {"prompt_token_ids": [5, 6]}, {"prompt_token_ids": np.array([5, 6])}, {"prompt_token_ids": torch.tensor([5, 6])},
], ids=repr)
def test_ids_may_have_every_form_alone_and_in_a_list(llm: LLM, form: Any) -> None:
    assert ids_of(llm, form) == [[5, 6]]
    assert ids_of(llm, [form, "Hello", form])[::2] == [[5, 6]] * 2


def test_a_dict_may_have_a_text_or_a_text_with_its_ids(llm: LLM) -> None:
    [by_text] = llm.generate({"prompt": "Hello"}, GREEDY)
    assert by_text.prompt == "Hello" and by_text.prompt_token_ids == llm.get_tokenizer().encode("Hello")
    [both] = llm.generate([{"prompt": "Hello", "prompt_token_ids": [5]}], GREEDY)
    assert (both.prompt, both.prompt_token_ids) == ("Hello", [5])


@pytest.mark.parametrize(("prompt", "sentence"), [
    ({"prompt_embeds": [1.0]}, "prompt_embeds"), ({"prompt": "a", "multi_modal_data": {}}, "only text"),
    ({}, "needs the key"), ({"prompt": 5}, "needs the key"), (5, "type int"), (None, "type NoneType"),
    (b"text", "type bytes"), ([None], "type NoneType"), ([1.5, 2], "token 0"), ([[5], 6], "type int"),
    ([5, "six"], "token 1"), (np.array([0.5]), "token 0"), ([True], "token 0"),
    ({"prompt": "a", "cache_salt": 5}, "cache_salt"),
], ids=repr)
def test_other_prompts_are_refused(llm: LLM, prompt: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):  # InvalidRequest is a ValueError
        llm.generate(prompt, GREEDY)
    assert not llm.engine.has_work


def test_the_tokens_around_a_text_are_added_unless_the_caller_adds_them(tmp_path: Path) -> None:
    shutil.copytree(model_dir(), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    around = tokenizers.processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.post_processor = around
    tokenizer.save(str(path))
    with LLM(str(tmp_path), device="cpu", num_blocks=16, load_format="dummy") as llm:
        [bare] = ids_of(llm, "Hello", add_special_tokens=False)
        assert bare and ids_of(llm, ["Hello", {"prompt": "Hello"}]) == [[0, *bare]] * 2
        assert ids_of(llm, {"prompt_token_ids": bare}) == [bare]
        assert llm.chat(ASKED, GREEDY)[0].prompt_token_ids[0] != 0  # the template adds its own


def test_a_chat_takes_a_template_its_variables_and_a_message_to_continue(llm: LLM) -> None:
    template = "{{ mood }}:{{ messages[0].content }}{% if add_generation_prompt %}!{% endif %}"
    given = {"chat_template": template, "chat_template_kwargs": {"mood": "calm"}}
    assert llm.chat(ASKED, GREEDY, **given)[0].prompt == "calm:What is a KV cache?!"
    assert llm.chat(ASKED, GREEDY, add_generation_prompt=False, **given)[0].prompt == "calm:What is a KV cache?"
    begun = [
        *ASKED,
        {"role": "assistant", "content": [{"type": "text", "text": "A KV"}, {"type": "text", "text": " c"}]},
    ]
    assert (llm.chat(begun, GREEDY, continue_final_message=True)[0].prompt or "").endswith("assistant\nA KV c")
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    answered = [*ASKED, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "five"}]
    prompt = llm.chat(answered, GREEDY, tools=[{"type": "function", "function": {"name": "look"}}])[0].prompt or ""
    assert '"name": "look", "arguments": {"at": 1}' in prompt and "five" in prompt and "# Tools" in prompt


@pytest.mark.parametrize(("messages", "sentence"), [
    ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url: only text"), ("hi", "type str"),
    ([{"content": "hi"}], '"role"'), ([{"role": "user", "content": 5}], "content"),
    ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], "tool_calls"),
], ids=repr)
def test_messages_that_cannot_be_used_are_refused(llm: LLM, messages: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        llm.chat(messages, GREEDY)


def test_unknown_names_are_errors_and_vllms_name_the_equivalent(llm: LLM) -> None:
    with pytest.raises(TypeError, match="nonsense"):
        llm.generate("a", GREEDY, nonsense=1)
    with pytest.raises(TypeError, match="merge the adapter"):
        llm.generate("a", GREEDY, lora_request=object())
    with pytest.raises(TypeError, match="chat_template_kwargs"):
        llm.chat(ASKED, GREEDY, enable_thinking=True)
    with pytest.raises(InvalidRequest, match="tokenize=False"):
        llm.get_tokenizer().apply_chat_template(ASKED, return_tensors="pt")
    assert llm.generate("a", GREEDY, lora_request=None)


def test_metrics_and_profiles_must_be_asked_for(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="disable_log_stats=False"):
        llm.get_metrics()
    with pytest.raises(InvalidRequest, match="profiler_config="):
        llm.start_profile()
    llm.stop_profile()


def test_an_output_has_vllms_fields(llm: LLM) -> None:
    llm.reset_prefix_cache()
    ids = list(range(10, 50))
    first, again = (llm.generate(ids, GREEDY.clone(ignore_eos=True), False)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32) and first.finished
    assert llm.reset_prefix_cache() and llm.generate(ids, GREEDY)[0].num_cached_tokens == 0
    assert int(again.request_id) == int(first.request_id) + 1
    times = first.metrics
    assert times is not None and times.num_generation_tokens == 8 and times.first_token_latency > 0
    assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts < times.last_token_ts
    text = llm.chat(ASKED, GREEDY)[0].outputs[0]
    assert text.finish_reason == "length" and text.stop_reason is None
    word = text.text.split()[-1]
    assert llm.chat(ASKED, GREEDY.clone(stop=word))[0].outputs[0].stop_reason == word
    by_id = llm.chat(ASKED, GREEDY.clone(stop_token_ids=text.token_ids[3:4]))[0].outputs[0]
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", text.token_ids[3])


def test_without_parameters_the_checkpoints_own_are_used(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    assert params == SamplingParams(temperature=0.0)
    assert (
        llm.chat(ASKED)[0].outputs[0].token_ids
        == llm.chat(ASKED, SamplingParams(temperature=0))[0].outputs[0].token_ids
    )
    params.max_tokens, params.stop = 3, "nothing"  # type: ignore[assignment]
    assert len(llm.chat(ASKED, params)[0].outputs[0].token_ids) == 3 and params.stop == "nothing"
    assert llm.get_default_sampling_params().max_tokens == 16


def test_vllms_options_are_accepted_or_refused_with_the_equivalent() -> None:
    options = {
        "quantization": None, "dtype": "half", "load_format": "dummy", "max_num_seqs": 7, "trust_remote_code": False,
        "tokenizer": None, "seed": None, "enable_prefix_caching": None, "num_gpu_blocks_override": 20,
    }
    with LLM(model=str(model_dir()), device="cpu", **options) as llm:
        assert llm.info.dtype == "float16" and llm.info.max_num_seqs == 7 and llm.info.dummy_weights
        assert llm.info.quantization == "none" and llm.info.prefix_caching and llm.info.num_blocks == 20
    for name, value, sentence in (
        ("load_format", "gguf", "safetensors"),
        ("speculative_config", {"method": "eagle", "model": "x"}, "only ngram"),
        ("tokenizer", "another", "model's directory"),
    ):
        with pytest.raises(EngineError, match=sentence):
            engine_config(str(model_dir()), {name: value})
    assert engine_config("org/name", {"revision": "v2"}).model == "org/name@v2"
    assert engine_config(str(model_dir()), {"revision": "v2"}).model == str(model_dir())


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_an_engine_is_driven_step_by_step(llm: LLM, kind: RequestOutputKind) -> None:
    engine, params = llm.llm_engine, GREEDY.clone(n=2, logprobs=0, output_kind=kind)
    whole = llm.generate("What is a token?", params)[0]
    engine.add_request("a", "What is a token?", params)
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add_request("a", [5], params)
    engine.add_request("gone", [5, 6], params.clone(max_tokens=1000))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.request_id == "a"]
        engine.abort_request("gone")
    assert not llm.engine.has_work and outputs[-1].finished and engine.get_num_unfinished_requests() == 0
    assert (len(outputs) == 1) == (kind is RequestOutputKind.FINAL_ONLY)
    for index, sample in enumerate(whole.outputs):
        parts = [output.outputs[index] for output in outputs]
        if kind is not RequestOutputKind.DELTA:
            assert (parts[-1].text, parts[-1].token_ids) == (sample.text, sample.token_ids)
        else:
            assert "".join(part.text for part in parts) == sample.text
            assert [token for part in parts for token in part.token_ids] == sample.token_ids
            assert [each for part in parts for each in part.logprobs or ()] == sample.logprobs


def test_a_seed_of_minus_one_is_random(llm: LLM) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=12, seed=-1, ignore_eos=True)
    assert len({tuple(output.outputs[0].token_ids) for output in llm.generate(["Hello"] * 4, params)}) == 4


def test_sampling_params_take_vllms_arguments(llm: LLM) -> None:
    params = SamplingParams(temperature=0, allowed_token_ids=np.array([9, 11]), stop_token_ids=torch.tensor([12]))
    assert params.allowed_token_ids == (9, 11) and params.stop_token_ids == (12,)
    assert params.clone() == params and params.clone(seed=3).seed == 3
    assert set(llm.generate("Hello", params)[0].outputs[0].token_ids) <= {9, 11}
    for given in (StructuredOutputsParams(choice=["yes", "no"]), {"choice": ["yes", "no"]}):
        chosen = SamplingParams(temperature=0, structured_outputs=given)
        assert chosen.choice == chosen.clone().choice == ("yes", "no")
        assert llm.chat(ASKED, chosen)[0].outputs[0].text in ("yes", "no")
    assert SamplingParams(structured_outputs={"json_object": True}).json_schema == {"type": "object"}
    for wrong, sentence in (
        ({"structured_outputs": {}}, "0 constraints"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "2"),
        ({"structured_outputs": {"xml": 1}}, "its fields are"),
        ({"structured_outputs": 5}, "type int"),
        ({"structured_outputs": {"regex": "a"}, "choice": ["b"]}, "two ways"),
        ({"logits_processors": [print]}, "logit_bias"),
        ({"guided_decoding": {}}, "structured_outputs"),
    ):
        with pytest.raises(ValueError, match=sentence):
            SamplingParams(**wrong)  # type: ignore[arg-type]


async def test_the_asynchronous_engine_yields_the_reply_so_far(llm: LLM) -> None:
    params = GREEDY.clone(logprobs=1, ignore_eos=True)
    expected = llm.generate("What is a token?", params, False)[0]
    async with AsyncLLM(str(model_dir()), device="cpu", num_blocks=256) as engine:
        outputs = [output async for output in engine.generate("What is a token?", params, "mine")]
        texts = [output.outputs[0].text for output in outputs]
        assert len(outputs) > 2 and all(b.startswith(a) for a, b in pairwise(texts))
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        last = outputs[-1].outputs[0]
        assert last.token_ids == expected.outputs[0].token_ids and texts[-1] == expected.outputs[0].text
        assert outputs[-1].request_id == "mine" and len(last.logprobs or ()) == len(last.token_ids)
        assert (await engine.get_tokenizer()).encode("a") == llm.get_tokenizer().encode("a")
        assert await engine.get_default_sampling_params() == llm.get_default_sampling_params()
        assert await engine.reset_prefix_cache()

        several = GREEDY.clone(n=3, temperature=1.5, seed=5, ignore_eos=True)
        samples = [output async for output in engine.generate([5, 6], several)][-1].outputs
        together = llm.generate([5, 6], several)[0]
        assert [s.token_ids for s in samples] == [s.token_ids for s in together.outputs]

        endless = SamplingParams(max_tokens=3000, ignore_eos=True)
        running = engine.generate([5, 6], endless, "endless")
        await anext(running)
        with pytest.raises(InvalidRequest, match="in use"):
            await anext(engine.generate([5], GREEDY, "endless"))
        await engine.abort("endless")
        assert [output async for output in running][-1].outputs[0].finish_reason == "abort"
        for wrong in ([10**9], {"prompt": 5}):
            with pytest.raises(InvalidRequest):
                await anext(engine.generate(wrong, GREEDY))
        with pytest.raises(TypeError, match="nonsense"):
            await anext(engine.generate([5], GREEDY, nonsense=1))
        left = engine.generate([5, 6], endless)
        await anext(left)
        await left.aclose()
        assert [output async for output in engine.generate([5, 6], GREEDY)][-1].finished
