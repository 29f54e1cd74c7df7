"""Drafts checked by CUDA graphs: the same replies as without, exactly in float32, up to rounding in bfloat16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from engine.core.request import Grammar
from engine.core.step import StepPlan
from engine.llm import LLM
from engine.params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from engine.worker.graphs.verify_graphs import VerifyGraphs  # noqa: E402
from engine.worker.launch import LaunchedStep  # noqa: E402
from tests.engine.gpu.test_engine import OPTIONS, SHAPE, TOLERANCE, ids_of  # noqa: E402
from tests.support.parity import below_best  # noqa: E402

__all__ = ["SHAPE"]  # for the fixture of a model
SPECULATION: dict[str, Any] = {"speculation": "prompt-lookup", "speculative_tokens": 6}


def wordy(count: int, greedy: bool = False, **more: Any) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of few words; some replies are biased towards them, so that drafts are made, and many are right."""
    rng = np.random.default_rng(count)
    prompts, params = [], []
    for i in range(count):
        words = rng.integers(0, 5000, 4)
        prompts.append(rng.choice(words, int(rng.integers(20, 400))).tolist())
        settings: dict[str, Any] = {"temperature": 0.0 if greedy else (0.0, 0.3, 0.8)[i % 3], "top_k": (0, 20)[i % 2]}
        bias = dict.fromkeys(words.tolist(), 8.0) if i % 4 else None
        params.append(SamplingParams(seed=i, max_tokens=40, ignore_eos=True, logit_bias=bias, **settings, **more))
    return prompts, params


def drafts(llm: LLM) -> Counter[str]:
    """What the records say of drafts since they were last read."""
    found: Counter[str] = Counter()
    for record in llm.engine.log.drain():
        if record[2] == "accept":
            for _, drafted, accepted in record[4]:
                found.update(drafted=drafted, accepted=accepted)
    return found


def test_in_float32_every_token_is_the_one_drawn_without_drafts(model: str) -> None:
    asked = wordy(24)
    plain, drafting = (LLM(model, dtype="float32", **OPTIONS, **options) for options in ({}, SPECULATION))
    replies = [ids_of(llm.generate(*asked, use_tqdm=False)) for llm in (plain, drafting)]
    told = drafts(drafting)
    assert 100 < told["accepted"] < told["drafted"]
    assert replies[0] == replies[1]


@pytest.mark.parametrize("count", [1, 5, 30, 48])
def test_graphs_draw_the_reference_s_own_tokens(model: str, count: int) -> None:
    """Greedy, no bias."""
    llm, reference = LLM(model, **OPTIONS, **SPECULATION), LLM(model, attention_backend="torch", **OPTIONS)
    buckets: Counter[str] = Counter()
    runner: Any = llm.engine.runner
    verify = runner.executors[0].parts[0]
    assert isinstance(verify, VerifyGraphs)
    launch = verify.launch

    def spy(plan: StepPlan, grammars: Mapping[int, Grammar]) -> LaunchedStep | None:
        launched = launch(plan, grammars)
        buckets.update(["graph"] if launched is not None else [])
        return launched

    verify.launch = spy  # type: ignore[method-assign]
    prompts, _ = wordy(count, greedy=True)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = [prompt[:200] * 2 for prompt in prompts]  # so that there is something to draft from the start
    outputs = ids_of(llm.generate(prompts, params, False))
    llm.engine.check()
    assert buckets, "no step with drafts went through a graph: the test says nothing"
    short = below_best(reference, prompts, outputs)
    assert max(short) < TOLERANCE, f"a token was {max(short):.3f} below the reference's best"
    assert np.mean([s > 0 for s in short]) < 0.1, "ties aside, the tokens should be the reference's own"


def test_sampled_replies_differ_only_where_rounding_decides(model: str) -> None:
    """In bfloat16 two words may be nearer than two kernels round: few replies may part, the others are the same."""
    asked = wordy(40)
    plain, drafting = (LLM(model, **OPTIONS, **options) for options in ({}, SPECULATION))
    drafting.engine.log.drain()
    mine, theirs = (ids_of(llm.generate(*asked, use_tqdm=False)) for llm in (drafting, plain))
    assert drafts(drafting)["accepted"] > 100
    same = np.mean([a == b for a, b in zip(mine, theirs, strict=True)])
    assert same > 0.8, f"only {same:.0%} of the replies are the same"


def test_rows_with_penalties_and_logprobs_are_drawn_from_the_graph_s_logits(model: str) -> None:
    prompts, params = wordy(6, logprobs=2)
    params[1] = SamplingParams(seed=1, max_tokens=40, ignore_eos=True, frequency_penalty=0.4, logprobs=0)
    plain, drafting = (LLM(model, **OPTIONS, **options) for options in ({}, SPECULATION))
    found = []
    for llm in (plain, drafting):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(o.outputs[0].logprobs) == 40 for o in outputs)
        replies = [output.outputs[0] for output in outputs]
        found.append([[(t, e[t].logprob) for t, e in zip(r.token_ids, r.logprobs, strict=True)] for r in replies])
    assert drafts(drafting)["accepted"] > 0
    for mine, theirs in zip(*found, strict=True):
        for (token, logprob), (other, theirs_logprob) in zip(mine, theirs, strict=True):
            if token != other:
                break  # from here on they are different texts
            assert abs(logprob - theirs_logprob) < 2 * TOLERANCE
