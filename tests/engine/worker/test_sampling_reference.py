"""The sampler at the edges of its settings, against a reference in plain floats: one row at a time, no tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.request import Request
from engine.kernels.noise import host_gumbel, request_keys
from engine.worker.sampler import MIN_TEMPERATURE
from tests.engine.worker.test_sampling import Batch

VOCAB = 13
TIES = 1e-4  # scores nearer than this may be ordered either way: the sampler has float32


def reference(logits: list[float], request: Request) -> tuple[list[float], set[int]]:
    """The score of each token with its noise (-inf: excluded), and those so near a boundary that both are right."""
    p, scores = request.params, list(logits)
    prompt, reply = request.ids[: request.prompt_len], request.ids[request.prompt_len :]
    for token, bias in (p.logit_bias or {}).items():
        scores[token] += bias
    if len(reply) < p.min_tokens:
        for token in request.stop_ids:
            if 0 <= token < VOCAB:
                scores[token] = -math.inf
    for token in range(VOCAB):
        if token in prompt or token in reply:
            scores[token] = (
                scores[token] / p.repetition_penalty if scores[token] > 0 else (scores[token] * p.repetition_penalty)
            )
        scores[token] -= p.frequency_penalty * reply.count(token) + p.presence_penalty * (token in reply)
    if p.greedy:
        return scores, set()
    scores = [score / max(p.temperature, MIN_TEMPERATURE) for score in scores]
    kept, close = set(range(VOCAB)), set[int]()
    ranked = sorted(kept, key=lambda token: -scores[token])
    if 0 < p.top_k < VOCAB:
        last = scores[ranked[p.top_k - 1]]
        kept = {token for token in kept if scores[token] >= last}
        close |= {token for token in ranked if abs(scores[token] - last) < TIES * max(1, abs(last))}
    if p.top_p < 1:
        weights = {token: math.exp(scores[token] - scores[ranked[0]]) for token in kept}
        total, before, last = sum(weights.values()), 0.0, scores[ranked[0]]
        for token in ranked:
            if token in kept:
                if abs(before - p.top_p) < TIES:
                    close |= {t for t in ranked if abs(scores[t] - scores[token]) < TIES * max(1, abs(scores[token]))}
                if before < p.top_p:
                    last = scores[token]
                before += weights[token] / total
        kept = {token for token in kept if scores[token] >= last}
        close |= {token for token in ranked if abs(scores[token] - last) < TIES * max(1, abs(last))}
    if p.min_p > 0:
        floor = max(scores) + math.log(p.min_p)
        kept = {token for token in kept if scores[token] >= floor}
        close |= {token for token in ranked if abs(scores[token] - floor) < TIES * max(1, abs(floor))}
    keys = np.array([request_keys(request.seed, request.sample_index)], dtype=np.int32)
    noise = host_gumbel(keys, np.array([len(request.ids)]), VOCAB)[0].tolist()
    return [scores[t] + noise[t] if t in kept | close else -math.inf for t in range(VOCAB)], close - {ranked[0]}


token = st.integers(0, VOCAB - 1)
edge = st.sampled_from
settings_of_a_row = st.fixed_dictionaries({
    "temperature": edge([0.0, 5e-324, 1e-30, 1e-5, 0.01, 0.7, 1.0, 3.0, 100.0]),
    "top_k": edge([-1, 0, 1, 2, VOCAB - 1, VOCAB]),
    "top_p": edge([5e-324, 1e-9, 0.1, 0.5, 0.999, 1 - 1e-12, 1.0]),
    "min_p": edge([0.0, 5e-324, 1e-6, 0.2, 0.999, 1.0]),
    "repetition_penalty": edge([1e-3, 0.5, 1.0, 1.3, 100.0]),
    "presence_penalty": edge([-2.0, 0.0, 0.6, 2.0]),
    "frequency_penalty": edge([-2.0, 0.0, 0.3, 2.0]),
    "logit_bias": st.dictionaries(token, edge([-100.0, -1.0, 0.0, 2.5, 100.0]), max_size=4),
    "min_tokens": st.integers(0, 6),
    "max_tokens": st.just(9),
    "stop_token_ids": st.lists(token, max_size=4),
    "seed": edge([-(1 << 63), -1, 0, 1, (1 << 63) - 1]),
    "sample_index": edge([0, 1, 127]),
    "ids": st.lists(token, min_size=2, max_size=12),
    "logprobs": edge([None, 0, 3, 20]),
})
row_logits = st.lists(st.floats(-30, 30, width=32) | edge([0.0, -0.0, 5.0]), min_size=VOCAB, max_size=VOCAB)


@given(rows=st.lists(st.tuples(settings_of_a_row, row_logits), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_draw_is_that_of_the_reference_in_any_company(rows: list[tuple[dict[str, Any], list[float]]]) -> None:
    batch = Batch(VOCAB, 4)
    requests = [
        batch.add(row, prompt=max(1, len(params["ids"]) // 2), **params) for row, (params, _) in enumerate(rows)
    ]
    drawn = batch.sample(torch.tensor([logits for _, logits in rows]), list(range(len(rows))))
    assert not drawn.bad.any()
    for request, (_, logits), found in zip(requests, rows, drawn.ids.tolist(), strict=True):
        scores, close = reference(logits, request)
        best = max(scores)
        allowed = {t for t, score in enumerate(scores) if score >= best - TIES * max(1, abs(best))}
        if allowed & close:  # whether those count is a matter of rounding: the best of the others may win then
            certain = max(score for t, score in enumerate(scores) if t not in close)
            allowed |= {t for t, score in enumerate(scores) if score >= certain - TIES * max(1, abs(certain))}
        assert found in allowed, (found, scores, close)
    if drawn.logprobs is not None:
        which = drawn.logprob_rows.tolist()
        counts = batch.sampler.logprob_counts(drawn.logprob_rows)
        for row, item in zip(which, drawn.logprobs.listed([drawn.ids.tolist()[r] for r in which], counts), strict=True):
            logits = rows[row][1]
            whole = math.log(sum(math.exp(x - max(logits)) for x in logits)) + max(logits)
            own = logits[item.token_id]
            assert abs(item.logprob - (own - whole)) < TIES
            assert sum(x > own + TIES for x in logits) < item.rank <= sum(x > own - TIES for x in logits)
            assert len({t for t, _ in item.top}) == len(item.top) == min(VOCAB, rows[row][0]["logprobs"])
            for (t, logprob), best in zip(item.top, sorted(logits, reverse=True), strict=False):
                assert abs(logits[t] - best) < TIES and abs(logprob - (best - whole)) < TIES
