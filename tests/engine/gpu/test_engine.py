"""The paths of a GPU (graphs, kernel by kernel, with and without overlap) give the same replies, and the reference's.

The reference is the same weights under the torch backend. Replies are compared as the numerical policy has it: greedy
tokens must be the reference's own wherever its two best are further apart than rounding reaches.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.build import without_graphs
from engine.config import EngineConfig
from engine.llm import LLM
from engine.model.hf.config import read_model_config
from engine.model.traits import lacking
from engine.params import SamplingParams
from engine.trace.kind import FIELDS
from engine.trace.state import State
from tests.support.families import FAMILIES, random_config
from tests.support.parity import below_best

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

TOLERANCE = 0.08  # of a log-probability in bfloat16; about four times what was seen
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 5003, "hidden_size": 512,
    "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim":
    64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
OPTIONS: dict[str, Any] = {
    "dummy_weights": True, "load_tokenizer": False, "max_model_len": 2048, "max_num_batched_tokens": 512,
    "max_num_seqs": 48, "num_blocks": 1200,
}
PATHS: dict[str, dict[str, Any]] = {
    "graphs": {}, "graphs without overlap": {"overlap": "off"}, "kernel by kernel": {"enforce_eager": True},
}


@pytest.fixture(scope="module")
def reference(model: str) -> Iterator[LLM]:
    yield LLM(model, attention_backend="torch", **OPTIONS)
    gc.collect()
    torch.cuda.empty_cache()


def prompts(seed: int, count: int, longest: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    found = [rng.integers(0, 5000, int(rng.integers(1, longest))).tolist() for _ in range(count)]
    shared = rng.integers(0, 5000, 300).tolist()
    return found + [shared + prompt[:40] for prompt in found[:6]]


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **more)


def ids_of(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def check_replies(llm: LLM, reference: LLM, count: int, longest: int, ties: float = 0.0) -> None:
    """`ties`: the share of tokens that may be further below the reference's best than rounding reaches."""
    asked = prompts(count, count, longest)
    replies = ids_of(llm.generate(asked, greedy(24), use_tqdm=False))
    llm.engine.check()
    short = np.array(below_best(reference, asked, replies))
    assert np.mean(short >= TOLERANCE) <= ties, f"a token was {max(short):.3f} below the reference's best"
    assert np.mean(short > 0) < 0.1, "ties aside, the tokens should be the reference's own"


@pytest.mark.parametrize("path", list(PATHS))
@pytest.mark.parametrize("count,longest", [(1, 900), (7, 200), (40, 700)])
def test_greedy_replies_are_the_reference_s_own(
    model: str, reference: LLM, path: str, count: int, longest: int
) -> None:
    check_replies(LLM(model, **OPTIONS, **PATHS[path]), reference, count, longest)


def family(kind: str, directory: Path, **fields: Any) -> Path:
    """Write a config.json of the family, in the shape of this file's models; return its directory."""
    sizes = {key: SHAPE[key] for key in SHAPE if key not in ("architectures", "model_type", "rope_theta")}
    raw = {**random_config(kind, 0), **sizes, "intermediate_size": 1024}
    raw |= {"num_experts" if "num_experts" in raw else "num_local_experts": 8, **fields}
    for name in ("layer_types", "no_rope_layers"):  # one entry per layer
        if name in raw:
            raw[name] = (raw[name] * 2)[: raw["num_hidden_layers"]]
    if "vocab_size_per_layer_input" in raw:
        raw["vocab_size_per_layer_input"] = raw["vocab_size"]
    if "linear_key_head_dim" in raw:
        raw |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}  # the kernels need powers of two
        if "full_attention_interval" in raw:
            raw["full_attention_interval"] = 3  # of 3 layers
    if kind == "phi3":
        raw.pop("rope_scaling", None)  # its lists have the length of another head_dim
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


PLAIN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")  # the kinds of the other tests


@pytest.mark.parametrize("path", ["graphs", "kernel by kernel"])
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in PLAIN])
def test_every_family_computes_what_the_reference_does(kind: str, path: str, tmp_path: Path) -> None:
    """Windows, soft caps, sinks, other norms and activations: on graphs, or with the reason why there are none. In a
    mixture with random weights, 1 % of the choices of an expert are ties, and a token whose tie is decided otherwise
    has another half of its MLP. The next test has no choices."""
    directory = str(family(kind, tmp_path))
    config = read_model_config(tmp_path)
    llm = LLM(directory, **OPTIONS, **PATHS[path])
    why_not = without_graphs(config, EngineConfig(model=directory, **OPTIONS))
    assert bool(why_not) == bool(lacking(config, "graphs")), why_not
    ties = 0.0 if config.experts is None else 0.03
    check_replies(llm, LLM(directory, attention_backend="torch", **OPTIONS), 20, 300, ties)


@pytest.mark.parametrize(
    ("kind", "more"),
    [("qwen3_5_text", {}), ("gemma3_text", {}), ("qwen3_5_text", {"speculation": "prompt-lookup"})],
    ids=["states", "windows", "states with drafts"],
)
def test_several_kinds_of_memory_change_no_reply(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Requests alone, in one batch, and again from the cache, with a pool that is too small for all of them: the
    reference's tokens."""
    if kind == "qwen3_5_text":
        layers, fields = "linear_attention", {}
    else:
        layers, fields = "sliding_attention", {"sliding_window": 64}
    directory = str(family(kind, tmp_path, layer_types=[layers, layers, "full_attention"], **fields))
    reference = LLM(directory, attention_backend="torch", **OPTIONS)
    asked = prompts(2, 14, 500)
    if more:
        asked = [prompt[:20] * 6 for prompt in asked]  # drafts are found
    llm = LLM(directory, **{**OPTIONS, "num_blocks": 240, **more})
    one_by_one = [llm.generate([prompt], greedy(24), use_tqdm=False) for prompt in asked[:3]]
    runs = [ids_of(llm.generate(asked, greedy(24), use_tqdm=False)) for _ in range(2)]
    llm.engine.check()
    for prompts_, replies in ((asked[:3], [ids_of(found)[0] for found in one_by_one]), *((asked, run) for run in runs)):
        short = np.array(below_best(reference, prompts_, replies))
        assert short.max() < TOLERANCE and np.mean(short > 0) < 0.1


@pytest.mark.parametrize("path", ["graphs", "kernel by kernel"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_a_mixture_that_uses_all_its_experts_computes_what_the_reference_does(
    kind: str, path: str, tmp_path: Path
) -> None:
    directory = str(family(kind, tmp_path, num_experts_per_tok=8))
    llm = LLM(directory, **OPTIONS, **PATHS[path])
    check_replies(llm, LLM(directory, attention_backend="torch", **OPTIONS), 20, 300)


@pytest.mark.parametrize("path", ["graphs", "kernel by kernel"])
def test_an_8_bit_cache_holds_what_the_reference_s_does(model: str, path: str) -> None:
    small = {**OPTIONS, "kv_cache_dtype": "fp8"}
    check_replies(LLM(model, **small, **PATHS[path]), LLM(model, attention_backend="torch", **small), 20, 700)


def test_overlap_changes_no_token(model: str) -> None:
    asked = prompts(3, 30, 400)
    settings = [
        SamplingParams(
            temperature=(0.0, 0.8, 1.2)[i % 3], top_k=(0, 20)[i % 2], top_p=(1.0, 0.9, 0.5)[i // 3 % 3], seed=i,
            max_tokens=30, ignore_eos=True, repetition_penalty=1.1 if i % 7 == 0 else 1.0,
        )
        for i in range(len(asked))
    ]
    replies = [
        ids_of(LLM(model, **OPTIONS, overlap=overlap).generate(asked, settings, use_tqdm=False))
        for overlap in ("on", "off")
    ]
    assert replies[0] == replies[1]


def test_logprobs_of_a_decode_graph_are_the_reference_s(model: str, reference: LLM) -> None:
    llm = LLM(model, **OPTIONS)
    asked = prompts(5, 4, 300)
    outputs = llm.generate(asked, greedy(12, logprobs=3), use_tqdm=False)
    again = [p + o.outputs[0].token_ids for p, o in zip(asked, outputs, strict=True)]
    judged = reference.generate(again, greedy(1, prompt_logprobs=0), use_tqdm=False)
    for prompt, output, judge in zip(asked, outputs, judged, strict=True):
        reply, listed = output.outputs[0].token_ids, judge.prompt_logprobs[len(prompt) :]
        mine = [found[token].logprob for token, found in zip(reply, output.outputs[0].logprobs, strict=True)]
        theirs = [found[token].logprob for token, found in zip(reply, listed, strict=True)]
        assert np.abs(np.array(mine) - np.array(theirs)).max() < TOLERANCE


def test_a_seeded_reply_does_not_depend_on_its_neighbours_settings(model: str) -> None:
    llm = LLM(model, **OPTIONS)
    asked = prompts(9, 1, 50)[0]
    mine = SamplingParams(temperature=0.9, top_p=0.8, seed=5, max_tokens=20, ignore_eos=True)
    neighbours = [greedy(20), SamplingParams(top_k=1, max_tokens=20)]
    first, second = (
        ids_of(llm.generate([asked, asked], [mine, neighbour], use_tqdm=False))[0] for neighbour in neighbours
    )
    assert first == second


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_prompts_that_arrive_while_many_decode_are_computed_with_them_in_one_graph(kind: str, tmp_path: Path) -> None:
    raw = SHAPE if kind == "qwen3" else {
        **SHAPE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True, "decoder_sparse_step": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    llm, rng = LLM(str(tmp_path), **OPTIONS), np.random.default_rng(0)
    runner: Any = llm.engine.runner
    extend = next(part for part in runner.executors[0].parts if part.form == "extend")
    used: Counter[Any] = Counter()
    replay = extend._replay
    extend._replay = lambda size, tokens: (used.update([size]), replay(size, tokens))
    asked = prompts(7, 34, 300)
    added, steps = [], 0
    while llm.engine.has_work or len(added) < len(asked):
        if steps % 2 == 0:
            for prompt in asked[len(added) : len(added) + int(rng.integers(1, 4))]:
                more: dict[str, Any] = {"logit_bias": {9: 0.0}} if len(added) % 9 == 8 else {}
                added.append(llm.engine.add_request(prompt, greedy(40, **more)))
        llm.engine.step()
        steps += 1
    llm.engine.check()
    replies = [list(request.output_ids) for request in added]
    assert {size.decodes for size in used} >= {0, 16, 32}, used
    assert used.total() > 15
    reference = LLM(str(tmp_path), attention_backend="torch", **OPTIONS)
    short = below_best(reference, asked, replies)
    if kind == "qwen3":
        assert max(short) < TOLERANCE
    assert np.mean([s > 0 for s in short]) < 0.1


@pytest.mark.parametrize("more", [{}, {"speculation": "prompt-lookup"}], ids=["plain", "with drafts"])
def test_a_bias_is_set_whichever_path_the_first_step_takes(model: str, more: dict[str, Any]) -> None:
    """A prompt too long for any graph first, then short ones: the lines of what was biased are made and made larger."""
    llm = LLM(model, **OPTIONS, **more)
    for lengths in ((700,), (20,), (30, 500, 5, 6, 7, 8), (9, 9, 9, 9, 9, 9, 9, 9, 9, 9), (12,)):
        params = [greedy(6, logit_bias={7 + i: 100.0}) for i in range(len(lengths))]
        replies = ids_of(llm.generate([[3] * length for length in lengths], params, use_tqdm=False))
        assert replies == [[7 + i] * 6 for i in range(len(lengths))]


def test_records_and_state_agree_after_full_load(model: str) -> None:
    """A pool far too small for what is asked: preemptions, evictions, aborts in flight; state = snapshot + records."""
    llm = LLM(model, **{**OPTIONS, "num_blocks": 300})
    engine, rng = llm.engine, np.random.default_rng(1)
    state = State.from_snapshot(engine.snapshot())
    engine.log.drain()
    started = state.seq
    live: set[int] = set()
    for request in range(160):
        shared = prompts(request % 5, 1, 100)[0]
        ids = shared + rng.integers(0, 5000, int(rng.integers(1, 200))).tolist()
        live.add(engine.add_request(ids, greedy(int(rng.integers(1, 120)))).id)
    kinds: set[str] = set()
    steps = 0
    while engine.has_work:
        live -= {item.request.id for item in engine.step() if item.request.finish_reason}
        steps += 1
        if steps % 23 == 0 and live:
            engine.abort(int(rng.choice(sorted(live))))
        engine.check()
        for record in engine.log.drain():
            assert record[0] == (started := started + 1), "a record is missing"
            assert record[2] in FIELDS
            kinds.add(record[2])
            state.apply(record)
    assert state.snapshot() == State.from_snapshot(engine.snapshot()).snapshot()
    assert {"preempt", "evict", "finish", "match"} <= kinds
    assert steps > 100


def test_the_pool_is_sized_from_a_measured_warm_up(model: str) -> None:
    options = {k: v for k, v in OPTIONS.items() if k != "num_blocks"}
    small, large = (LLM(model, **options, gpu_memory_utilization=share) for share in (0.2, 0.4))
    one, other = small.engine.runner.loaded, large.engine.runner.loaded  # type: ignore[attr-defined]
    total = torch.cuda.get_device_properties(0).total_memory
    for loaded, share in ((one, 0.2), (other, 0.4)):
        assert loaded.memory.kv_cache + loaded.memory.weights < share * total
    assert other.num_blocks > one.num_blocks
    assert any("CUDA graphs captured" in note for note in one.memory.notes)


def test_enforce_eager_captures_nothing(model: str) -> None:
    runner: Any = LLM(model, **OPTIONS, enforce_eager=True).engine.runner
    assert runner.executors[0].num_graphs == 0 and not runner.loaded.memory.notes


def test_a_directory_with_only_a_config_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "num_attention_heads": 14, "head_dim": 64}))
    llm = LLM(str(tmp_path), **OPTIONS)  # seven query heads per key head: no power of two
    assert len(llm.generate([[1, 2, 3]] * 3, greedy(5), use_tqdm=False)[0].outputs[0].token_ids) == 5
