"""Scripts in the shapes of vLLM's offline examples run with another import.

Each function is a script: its imports are vLLM's with `engine` in place of the module's name.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from minitui.tutor import model_dir

PROMPTS = ["Hello, my name is", "The capital of France is", "The future of AI is"]
TALK = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a block?"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
SCRIPTS: list[Callable[[str], Any]] = []


def script(function: Callable[[str], Any]) -> Callable[[str], Any]:
    SCRIPTS.append(function)
    return function


@script
def generate_with_arguments_of_the_command_line(model: str) -> None:
    from engine import LLM, EngineArgs, FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    group = parser.add_argument_group("Engine arguments")
    EngineArgs.add_cli_args(group)
    group.set_defaults(model=model)
    parser.add_argument("--max-tokens", type=int)
    args = vars(parser.parse_args(["--max-tokens", "5", "--max_model_len", "200", "--trust-remote-code"]))
    max_tokens = args.pop("max_tokens")
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = max_tokens
    sampling_params.top_k = -1
    sampling_params.ignore_eos = True
    assert len(llm.generate(PROMPTS, sampling_params)[0].outputs[0].token_ids) == 5


@script
def chat_with_arguments_of_the_command_line(model: str) -> None:
    from engine import LLM, EngineArgs, SamplingParams

    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.set_defaults(model=model)
    args = parser.parse_args(["--enforce-eager"])
    llm = LLM(**vars(args))
    params = SamplingParams(max_tokens=5)
    assert len(llm.chat(TALK, params, use_tqdm=False)) == 1
    assert len(llm.chat([TALK] * 10, params, use_tqdm=True)) == 10
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert llm.chat([TALK], params, chat_template=template)[0].prompt == "Be short.What is a block?"


@script
def chat_with_tools(model: str) -> None:
    from engine import LLM
    from engine.sampling_params import SamplingParams

    llm = LLM(model=model, tokenizer_mode="mistral", config_format="mistral", load_format="mistral")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What time is it?"}]
    params = SamplingParams(max_tokens=16, temperature=0.0)
    messages.append({"role": "assistant", "content": llm.chat(messages, params, tools=[TOOL])[0].outputs[0].text})
    messages.append({"role": "tool", "content": "noon", "tool_call_id": "123456789"})
    assert "now" in (llm.chat(messages, params, tools=[TOOL])[0].prompt or "")


@script
def structured_outputs(model: str) -> None:
    pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")
    from engine import LLM, SamplingParams
    from engine.sampling_params import StructuredOutputsParams

    llm = LLM(model=model, max_model_len=100)
    schema = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]}
    grammar = 'root ::= "SELECT " column\ncolumn ::= "col_1 " | "col_2 "'
    for given in ({"choice": ["yes", "no"]}, {"regex": r"\w+@\w+\.com\n"}, {"json": schema}, {"grammar": grammar}):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**given), stop=["\n"])
        assert llm.generate(prompts="Classify this.", sampling_params=params)[0].outputs[0].text


@script
def prefix_caching(model: str) -> None:
    from engine import LLM, SamplingParams, cleanup_dist_env_and_memory

    prefix = "You are an expert school principal who writes clear questions for teachers. " * 4
    prompts, params = [prefix + prompt for prompt in PROMPTS], SamplingParams(temperature=0.0)
    regular = LLM(model=model, gpu_memory_utilization=0.4)
    expected = [output.outputs[0].text for output in regular.generate(prompts, params)]
    del regular
    cleanup_dist_env_and_memory()
    cached = LLM(model=model, enable_prefix_caching=True, gpu_memory_utilization=0.4)
    cached.generate(prompts[0], params)
    outputs = cached.generate(prompts, params)
    assert [output.outputs[0].text for output in outputs] == expected and outputs[1].num_cached_tokens
    assert cached.reset_prefix_cache()


@script
def an_engine_step_by_step(model: str) -> None:
    from engine import EngineArgs, LLMEngine, RequestOutput, SamplingParams

    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(["--model", model])))
    waiting = [
        (PROMPTS[0], SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        (PROMPTS[1], SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        (PROMPTS[2], SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]
    number, finished = 0, list[RequestOutput]()
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params = waiting.pop(0)
            engine.add_request(str(number), prompt, params)
            number += 1
        finished += [output for output in engine.step() if output.finished]
    assert sorted(len(output.outputs) for output in finished) == [1, 1, 2]


@script
def the_cache_is_reset_while_requests_run(model: str) -> None:
    from engine import LLMEngine, SamplingParams

    text = "A robot may not injure a human being " * 20
    replies = list[list[int]]()
    for reset in (False, True):
        engine = LLMEngine(model)
        for number in range(2):
            engine.add_request(str(number), text, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
        for step in range(200):
            if step == 5:
                assert engine.reset_prefix_cache(reset_running_requests=reset)
                running = engine.engine.scheduler.running
                assert len(running) == (0 if reset else 2) and (engine.engine.cache.allocator.num_cached == 0)
            outputs = engine.step()
            replies += [output.outputs[0].token_ids for output in outputs if output.finished]
        engine.engine.check()
    assert len(replies) == 4 and all(reply == replies[0] for reply in replies)


@script
def a_longer_context(model: str) -> None:
    from engine import LLM, SamplingParams

    rope = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
    llm = LLM(model=model, hf_overrides={"rope_parameters": rope, "max_model_len": 8192}, num_blocks=600)
    assert llm.info.max_model_len == 8192
    assert llm.chat(TALK, SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids


@script
def metrics(model: str) -> None:
    from engine import LLM, Counter, Gauge, Histogram, SamplingParams, Vector

    config = {"method": "ngram", "num_speculative_tokens": 3}
    llm = LLM(model=model, disable_log_stats=False, speculative_config=config)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    tokens = sum(len(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params))
    values = dict[str, Any]()
    for metric in llm.get_metrics():
        if isinstance(metric, (Counter, Gauge)):
            values[metric.name] = metric.value
        elif isinstance(metric, Vector):
            values[metric.name] = metric.values
        elif isinstance(metric, Histogram):
            assert list(metric.buckets.values())[-1] == metric.count
            values[metric.name] = metric.count
    accepted = values["vllm:spec_decode_num_accepted_tokens"]
    assert values["vllm:generation_tokens"] == tokens == 120
    assert values["vllm:spec_decode_num_drafts"] > 0 and accepted > 0
    assert sum(values["vllm:spec_decode_num_accepted_tokens_per_pos"]) == accepted
    assert values["vllm:time_to_first_token_seconds"] == values["vllm:request_generation_tokens"] == 3
    assert values["vllm:num_requests_running"] == 0 and "vllm:kv_cache_usage_perc" in values


@script
def profiling(model: str) -> None:
    from engine import LLM, ProfilerConfig, SamplingParams

    with tempfile.TemporaryDirectory() as directory:
        llm = LLM(model=model, profiler_config=ProfilerConfig(torch_profiler_dir=directory, max_iterations=2))
        llm.start_profile()
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=5, ignore_eos=True))
        llm.stop_profile()
        [trace] = Path(directory).iterdir()
        assert len(gzip.decompress(trace.read_bytes())) > 1000


@script
def a_stream_of_the_asynchronous_engine_that_is_paused(model: str) -> None:
    from engine import AsyncEngineArgs, AsyncLLM
    from engine.sampling_params import RequestOutputKind, SamplingParams

    async def main() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, enforce_eager=True))
        tokens: list[int] = []

        async def read() -> Any:
            kind = RequestOutputKind.DELTA
            params = SamplingParams(max_tokens=2000, seed=42, ignore_eos=True, output_kind=kind)
            async for output in engine.generate(request_id="one", prompt=PROMPTS[0], sampling_params=params):
                for completion in output.outputs:
                    tokens.extend(completion.token_ids)
            return output

        try:
            reading = asyncio.create_task(read())
            while len(tokens) < 5:
                await asyncio.sleep(0.001)
            await engine.pause_generation(mode="keep")
            paused_at = len(tokens)
            client = await engine.start()
            before = await client.snapshot()
            await asyncio.sleep(0.05)
            assert len(before["requests"]) == 1 and (await client.snapshot())["step"] == before["step"]
            assert len(tokens) == paused_at and not reading.done()
            await engine.resume_generation()
            assert (await reading).finished and len(tokens) == 2000
        finally:
            engine.shutdown()

    asyncio.run(main())


@script
def speculative_decoding(model: str) -> None:
    from engine import LLM, SamplingParams, TokensPrompt

    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
    llm = LLM(
        model=model, trust_remote_code=True, tensor_parallel_size=1, enable_chunked_prefill=True, enforce_eager=False,
        gpu_memory_utilization=0.8, speculative_config=config, disable_log_stats=False, max_model_len=512,
        max_num_seqs=None, limit_mm_per_prompt={"image": 5}, disable_chunked_mm_input=True, quantization=None,
        enable_expert_parallel=True, distributed_executor_backend="mp", compilation_config={"level": 3},
    )
    ids = [llm.get_tokenizer().encode(text, add_special_tokens=False) for text in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=each) for each in ids], sampling_params=params)
    assert sum(output.outputs[0].metrics["accepted_tokens"] for output in outputs) > 0
    assert llm.info.speculation == {"method": "prompt-lookup", "tokens": 3}


@script
def a_chat_rendered_by_the_tokenizer(model: str) -> None:
    from engine import LLM, SamplingParams

    llm = LLM(model)
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(TALK, add_generation_prompt=True)
    params = SamplingParams(max_tokens=5, temperature=0, detokenize=True)
    outputs = [llm.generate(text, params), llm.generate({"prompt_token_ids": ids}, params), llm.chat(TALK, params)]
    assert outputs[0][0].prompt_token_ids == ids
    assert len({tuple(output.outputs[0].token_ids) for [output] in outputs}) == 1


@script
def a_known_reply_is_replayed(model: str) -> None:
    from engine import LLM, SamplingParams

    llm = LLM(model=model, enable_trace_replay=True)
    (free,) = llm.generate(["What is a block?"], SamplingParams(temperature=0, max_tokens=6, logprobs=1))
    known = [*free.outputs[0].token_ids[:3], 7, 9, min(llm.get_tokenizer().eos_ids), 11]
    replay = SamplingParams(trace_decode_token_ids=known, logprobs=5, stop="a", temperature=2.0)
    outputs = llm.generate(["What is a block?", PROMPTS[0]], replay)
    for output in outputs:
        assert list(output.outputs[0].token_ids) == known
        assert all(known[i] in logprobs for i, logprobs in enumerate(output.outputs[0].logprobs))
    first = free.outputs[0].logprobs[0][known[0]], outputs[0].outputs[0].logprobs[0][known[0]]
    assert abs(first[0].logprob - first[1].logprob) < 1e-4, "the model's own distribution, not that of the replay"
    assert outputs[0].outputs[0].logprobs[known.index(7)][7].rank > 1


@script
def options_as_a_dict(model: str) -> None:
    from engine import LLM, EngineArgs, SamplingParams

    engine_args = EngineArgs(model=model, max_model_len=128, max_num_seqs=2, limit_mm_per_prompt={"image": 1})
    engine_args.max_num_seqs = 3
    llm = LLM(**(asdict(engine_args) | {"seed": 7}))
    assert llm.info.max_num_seqs == 3
    params = [SamplingParams(max_tokens=length) for length in (2, 3, 4)]
    outputs = llm.generate([{"prompt": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 3, 4]


@pytest.mark.filterwarnings("ignore:.* has no effect:UserWarning")
@pytest.mark.parametrize("run", SCRIPTS, ids=lambda run: run.__name__)
def test_a_script_for_vllm_runs(run: Callable[[str], Any]) -> None:
    run(str(model_dir()))


@pytest.mark.parametrize("given, words", [
    ({"hf_overrides": {"rope_parameters": {"rope_type": "spiral"}}}, "'spiral'.*rope_parameters from hf_overrides"),
    ({"hf_overrides": "yarn"}, "hf_overrides is 'yarn': it must be a dict"),
    ({"profiler_config": {"torch_dir": "x"}}, "its fields are profiler, torch_profiler_dir"),
    ({"profiler_config": {"profiler": "cuda", "torch_profiler_dir": "x"}}, 'needs profiler="torch"'),
])
def test_a_wrong_option_is_a_sentence(given: dict[str, Any], words: str) -> None:
    from engine import LLM, EngineError

    with pytest.raises(EngineError, match=words):
        LLM(str(model_dir()), **given)
