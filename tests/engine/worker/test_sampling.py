"""Each sampling option alone and together: exact on the logits, statistical on the draw."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine.core.request import Request
from engine.core.step import RowSettings
from engine.kernels.noise import (
    GOLDEN,
    MIX_1,
    MIX_2,
    MURMUR,
    WORD,
    gumbel,
    hashes,
    host_gumbel,
    mix_int,
    request_keys,
    signed,
)
from engine.params import SamplingParams
from engine.worker import sampler as sampling
from engine.worker.sampler import Drawn, Sampler
from engine.worker.upload import Uploader

CPU = torch.device("cpu")
VOCAB = 50


class Batch:
    """A sampler and the requests in its rows."""

    def __init__(self, vocab: int = VOCAB, rows: int = 8, processed_logprobs: bool = False) -> None:
        self.vocab = vocab
        self.sampler = Sampler(rows, vocab, CPU, Uploader(CPU), processed_logprobs)
        self.requests: dict[int, Request] = {}

    def add(self, row: int, ids: list[int] | None = None, prompt: int | None = None, **params: Any) -> Request:
        ids = [1, 2, 3] if ids is None else ids
        extra = {key: params.pop(key) for key in ("grammar", "sample_index") if key in params}
        seed = params.pop("seed", row)
        sampling = SamplingParams(**params)
        sampling.validate(self.vocab)
        stops = frozenset({0, *sampling.stop_token_ids})
        length = len(ids) if prompt is None else prompt
        request = Request(row, ids, sampling, seed, 1000, stops, prompt_len=length, row=row, **extra)
        self.requests[row] = request
        self.sampler.set_row(RowSettings.of(request))
        return request

    def sample(self, logits: torch.Tensor, rows: list[int], positions: list[int] | None = None) -> Drawn:
        where = positions or [len(self.requests[row].ids) for row in rows]
        with torch.inference_mode():
            return self.sampler.sample(
                logits.clone(), np.array(rows), np.array(where), torch.tensor(rows), torch.tensor(where),
                {i: grammar for i, row in enumerate(rows) if (grammar := self.requests[row].grammar) is not None},
            )

    def draw(self, logits: torch.Tensor, rows: list[int], positions: list[int] | None = None) -> list[int]:
        return self.sample(logits, rows, positions).ids.tolist()


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draws(logits: torch.Tensor, count: int, **params: Any) -> np.ndarray:
    """How often each token is drawn from one row of logits at `count` positions."""
    batch = Batch(len(logits), 1)
    batch.add(0, **params)
    rows, positions = np.zeros(count, dtype=np.int64), np.arange(count)
    with torch.inference_mode():
        drawn = batch.sampler.sample(
            logits.expand(count, -1).clone(), rows, positions, torch.from_numpy(rows), torch.from_numpy(positions)
        )
    return np.bincount(drawn.ids.numpy(), minlength=len(logits))


def assert_drawn_from(probabilities: torch.Tensor, counts: np.ndarray) -> None:
    """Chi-square: p above 1e-4, and nothing impossible drawn."""
    expected = probabilities.double().numpy() * counts.sum()
    assert counts[expected == 0].sum() == 0
    likely = expected >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], max(expected[~likely].sum(), 1e-9))
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    # Wilson and Hilferty's approximation: the cube root of chi-square is all but normal
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 3.72, f"chi-square {statistic:.1f} at {freedom} degrees of freedom"


# ---- the draw


def test_draws_follow_the_softmax_exactly() -> None:
    logits = random_logits(1)[0]
    assert_drawn_from(logits.softmax(-1), draws(logits, 100_000, temperature=1.0))


def test_a_flat_distribution_over_a_large_vocabulary_is_drawn_flat() -> None:
    """Noise of few bits would favour low ids, which win ties."""
    vocab, count = 5000, 500
    counts = sum(draws(torch.zeros(vocab), count, seed=seed, temperature=1.0) for seed in range(8))
    buckets = counts.reshape(20, -1).sum(1)
    assert_drawn_from(torch.full((20,), 1 / 20), buckets)


def test_draws_of_different_positions_seeds_and_samples_are_independent() -> None:
    logits = torch.zeros(10)
    first = {}
    for name, params in {
        "one seed": {"seed": 1},
        "next seed": {"seed": 2},
        "high bits": {"seed": 1 + (1 << 40)},
        "negative": {"seed": -2},
        "next sample": {"seed": 1, "sample_index": 1},
    }.items():
        batch = Batch(10, 1)
        batch.add(0, temperature=1.0, **params)
        positions = list(range(2000))
        first[name] = np.array(batch.draw(logits.expand(2000, -1), [0] * 2000, positions))
        pairs = first[name][:-1] * 10 + first[name][1:]  # a position and the next
        assert_drawn_from(torch.full((100,), 0.01), np.bincount(pairs, minlength=100))
    names = list(first)
    for i, name in enumerate(names):
        for other in names[i + 1 :]:
            assert_drawn_from(torch.full((100,), 0.01), np.bincount(first[name] * 10 + first[other], minlength=100))


def test_noise_is_the_documented_hash() -> None:
    """Against Python's integers: what a kernel must reproduce to the bit."""
    seed, sample, vocab = -123456789012345, 3, 1000
    keys = request_keys(seed, sample)
    found = hashes(torch.tensor([keys] * 3, dtype=torch.int32), torch.tensor([0, 7, 2**31 - 1]), vocab)
    for row, position in enumerate((0, 7, 2**31 - 1)):
        start = mix_int(keys[0] + position * GOLDEN)
        step = (((start * MURMUR) & WORD) ^ (keys[1] & WORD)) | 1
        assert found[row].tolist() == [signed(mix_int(start + token * step)) for token in range(vocab)]
    assert MIX_1 % 2 == MIX_2 % 2 == 1


def test_noise_made_on_the_host_is_the_same() -> None:
    keys = np.array([request_keys(seed, seed % 3) for seed in range(-4, 5)], dtype=np.int32)
    positions = np.array([0, 1, 2, 1000, 2**31 - 1, 5, 5, 5, 5])
    noise = host_gumbel(keys, positions, 3000)
    assert torch.equal(noise, gumbel(torch.from_numpy(keys), torch.from_numpy(positions), 3000))


def test_noise_is_finite_and_gumbel() -> None:
    noise = gumbel(torch.tensor([request_keys(5, 0)], dtype=torch.int32), torch.tensor([3]), 1_000_000)[0]
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772) < 0.005  # Euler's constant
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    assert float(noise.max()) > 12  # the tail is there


# ---- truncation


def kept(logits: torch.Tensor, **params: Any) -> set[int]:
    """Tokens that can be drawn: with a temperature at which all that is allowed is drawn soon."""
    return set(np.flatnonzero(draws(logits, 4000, **params)).tolist())


def test_top_p_keeps_the_token_that_crosses_the_boundary() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert kept(logits, top_p=0.4) == {0}
    assert kept(logits, top_p=0.6) == {0, 1}
    assert kept(logits, top_p=0.79) == {0, 1}
    assert kept(logits, top_p=0.81) == {0, 1, 2}
    assert kept(logits, top_p=1e-6) == {0}
    assert_drawn_from(torch.tensor([5 / 8, 3 / 8, 0, 0]), draws(logits, 20_000, temperature=1.0, top_p=0.7))


def test_truncation_equals_that_of_transformers() -> None:
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    for seed in range(5):
        logits = random_logits(1, 10 + seed)
        scores = logits
        warpers = (TemperatureLogitsWarper(0.8), TopKLogitsWarper(12), TopPLogitsWarper(0.9), MinPLogitsWarper(0.1))
        for warper in warpers:
            scores = warper(torch.zeros(1, 0, dtype=torch.long), scores)
        counts = draws(logits[0], 20_000, temperature=0.8, top_k=12, top_p=0.9, min_p=0.1)
        assert_drawn_from(scores[0].softmax(-1), counts)


def test_a_tiny_temperature_is_argmax_without_nan_and_zero_is_exact() -> None:
    logits = random_logits(3, 3) * 20
    batch = Batch()
    for row, temperature in enumerate((1e-3, 1e-30, 0.0)):
        batch.add(row, temperature=temperature, top_p=0.9)
    drawn = batch.sample(logits, [0, 1, 2])
    assert drawn.ids.tolist() == logits.argmax(-1).tolist()
    assert not drawn.bad.any()


@pytest.mark.parametrize("vocab", [300, sampling.SMALL_VOCABULARY + 1])
def test_every_way_to_sort_gives_the_largest_first(vocab: int) -> None:
    values = random_logits(3, 1, vocab)
    for width in (1, 7, vocab - 1, vocab):
        assert torch.equal(sampling.descending(values, width), values.sort(descending=True).values[:, :width])


def test_the_sampler_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the calls that copy a value to the host, with everything asked for at once. (Tensor.numpy is not among
    them: it does not exist for a tensor on a device.)"""
    batch = Batch()
    for row in range(6):
        add_everything(batch, row)
    batch.add(6)
    batch.add(7, temperature=0.0)
    for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__"):

        def refuse(*args: Any, name: str = name, **kwargs: Any) -> None:
            raise AssertionError(f"Tensor.{name} waits for the device")

        monkeypatch.setattr(torch.Tensor, name, refuse)
    batch.sample(random_logits(8), list(range(8)), [6] * 8)


# ---- penalties, biases, minimum length


def add_everything(batch: Batch, row: int, **changes: Any) -> Request:
    settings: dict[str, Any] = {
        "ids": [5 + row, 6, 7, 8, 8, 9],
        "prompt": 3,
        "temperature": 0.5 + 0.2 * row,
        "top_k": 10 + row,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1 + 0.1 * row,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1 * row,
        "logit_bias": {row: 2.0, 20: -100.0},
        "min_tokens": 9,
        "stop_token_ids": [row + 30],
        "logprobs": row % 3,
    }
    return batch.add(row, **(settings | changes))


def test_repetition_penalty_equals_that_of_transformers() -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits, ids = random_logits(1, 4), [3, 9, 9, 14, 22, 40]
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([ids]), logits.clone())[0].softmax(-1)
    assert_drawn_from(theirs, draws(logits[0], 30_000, ids=ids, prompt=3, repetition_penalty=1.3, temperature=1.0))


def test_penalties_follow_the_tokens_as_they_are_drawn() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.8, 0.7]])
    batch = Batch(4)
    batch.add(0, ids=[3], temperature=0.0, presence_penalty=0.5)
    assert [batch.draw(logits, [0], [position])[0] for position in range(1, 5)] == [0, 1, 2, 3]


def test_penalties_are_rebuilt_after_a_preemption() -> None:
    """A row that another request has used meanwhile, and a request that returns to a different row."""
    logits = random_logits(1, 5)
    settings = {"temperature": 0.8, "repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    alone, disturbed = Batch(), Batch()
    expected: list[int] = [4, 5]
    alone.add(0, ids=expected, prompt=2, **settings)
    for position in range(2, 12):
        expected.append(alone.draw(logits, [0], [position])[0])
    ids = [4, 5]
    disturbed.add(0, ids=ids, prompt=2, **settings)
    for position in range(2, 7):
        ids.append(disturbed.draw(logits, [0], [position])[0])
    disturbed.add(0, ids=[7, 8, 9], **settings)
    disturbed.draw(logits, [0], [3])
    disturbed.add(3, ids=ids, prompt=2, seed=0, **settings)
    for position in range(7, 12):
        ids.append(disturbed.draw(logits, [3], [position])[0])
    assert ids == expected


# ---- rows


def test_a_seed_fixes_a_requests_tokens_whatever_else_is_in_the_batch() -> None:
    logits = random_logits(1, 7)
    alone, crowded = Batch(), Batch()
    alone.add(0, seed=99, temperature=1.0)
    crowded.add(5, seed=99, temperature=1.0)
    crowded.add(2, seed=1, temperature=0.3, top_k=2)
    expected = [alone.draw(logits, [0], [position])[0] for position in range(30)]
    both = logits.expand(2, -1)
    assert [crowded.draw(both, [2, 5], [0, position])[1] for position in range(30)] == expected
    assert len(set(expected)) > 5


def test_greedy_rows_are_exact_argmax_whatever_their_neighbours_do() -> None:
    logits = random_logits(4, 8)
    logits[1, 7] = logits[1, 30] = logits[1].max() + 1e-6  # the lower id wins a tie
    batch = Batch()
    batch.add(0, temperature=2.0, top_p=0.5)
    batch.add(1, temperature=0.0)
    batch.add(2, temperature=1.0, presence_penalty=1.0)
    batch.add(3, temperature=0.0, top_p=0.1)
    ids = batch.draw(logits, [0, 1, 2, 3])
    assert (ids[1], ids[3]) == (7, int(logits[3].argmax()))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_bad_logits_end_their_row_alone(poison: float) -> None:
    logits = random_logits(4, 9)
    for everything in (False, True):
        clean, dirty = Batch(), Batch()
        for batch in (clean, dirty):
            for row in range(4):
                if everything:
                    add_everything(batch, row)
                else:
                    batch.add(row, temperature=0.0)
        poisoned = logits.clone()
        poisoned[2, 11] = poison
        expected, found = clean.sample(logits, [0, 1, 2, 3], [6] * 4), dirty.sample(poisoned, [0, 1, 2, 3], [6] * 4)
        assert found.bad.tolist() == [False, False, True, False]
        assert not expected.bad.any()
        assert (found.ids == expected.ids)[[0, 1, 3]].all()
        assert 0 <= int(found.ids[2]) < VOCAB


def test_a_mask_that_allows_nothing_is_reported() -> None:
    batch = Batch(4)
    batch.add(0, temperature=0.0, logit_bias={0: 1.0}, min_tokens=5, stop_token_ids=[1, 2, 3])
    batch.add(1, temperature=0.0)
    assert batch.sample(torch.zeros(2, 4), [0, 1]).bad.tolist() == [True, False]


def test_a_warm_up_changes_no_draw() -> None:
    batch, logits = Batch(), random_logits(4) / 4
    batch.add(0)
    batch.add(1, top_k=3)
    batch.add(2, top_p=0.6)
    batch.add(3, min_p=0.2)
    rows = [*range(4)]
    before = [batch.draw(logits, rows, [at] * 4) for at in range(200)]
    with torch.inference_mode():
        batch.sampler.warm_up(torch.full((20, VOCAB), torch.nan))
    assert [batch.draw(logits, rows, [at] * 4) for at in range(200)] == before


def test_a_row_keeps_nothing_of_the_request_before() -> None:
    logits = random_logits(1, 10)
    used, fresh = Batch(), Batch()
    add_everything(used, 3)
    used.draw(logits, [3], [6])
    used.add(3, temperature=0.9, seed=4)
    fresh.add(3, temperature=0.9, seed=4)
    assert [used.draw(logits, [3], [p]) for p in range(20)] == [fresh.draw(logits, [3], [p]) for p in range(20)]


# ---- logprobs


def test_logprobs_are_of_the_models_own_distribution() -> None:
    """Before biases, penalties and temperature; the sampled token's, its rank, and the most likely."""
    logits = random_logits(3, 11)
    batch = Batch()
    batch.add(0, temperature=0.0)
    add_everything(batch, 1, logprobs=4)
    batch.add(2, temperature=0.0, logprobs=2)
    drawn = batch.sample(logits, [0, 1, 2], [3, 6, 3])
    assert drawn.logprob_rows.tolist() == [1, 2]
    assert drawn.logprobs is not None
    ids = drawn.ids.tolist()
    listed = drawn.logprobs.listed(ids[1:], batch.sampler.logprob_counts(np.array([1, 2])))
    for row, found in zip((1, 2), listed, strict=True):
        exact = logits[row].log_softmax(-1)
        assert found.token_id == ids[row]
        assert found.logprob == pytest.approx(float(exact[ids[row]]), abs=1e-6)
        assert found.rank == int((exact > exact[ids[row]]).sum()) + 1
        best = exact.topk(4 if row == 1 else 2)
        assert [token for token, _ in found.top] == best.indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert listed[1].rank == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.5}, {"temperature": 1.6, "top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.6, "logit_bias": {3: 2.0, 4: -100.0}, "top_k": 12},
    ],
    ids=str,
)
def test_processed_logprobs_are_of_the_distribution_that_is_drawn_from(settings: dict[str, Any]) -> None:
    vocab = 16
    logits = random_logits(1, 21, vocab)
    batch = Batch(vocab, processed_logprobs=True)
    batch.add(0, [1, 2, 2, 3], 1, logprobs=vocab, **settings)
    drawn = batch.sample(logits, [0])
    assert drawn.logprobs is not None
    [listed] = drawn.logprobs.listed(drawn.ids.tolist(), [vocab])
    found = torch.zeros(vocab)
    for token, logprob in listed.top:
        found[token] = math.exp(logprob)
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-5)
    assert int((found == 0).sum()) >= vocab - settings.get("top_k", vocab) and found[listed.token_id] > 0
    assert_drawn_from(found, draws(logits[0], 20_000, ids=[1, 2, 2, 3], prompt=1, **settings))


def test_processed_logprobs_of_a_greedy_row_leave_out_temperature_and_cuts() -> None:
    logits = random_logits(2, 22)
    batch = Batch(processed_logprobs=True)
    batch.add(0, temperature=0.0, top_k=2, logprobs=3, logit_bias={7: 50.0})
    batch.add(1, temperature=2.0)
    drawn = batch.sample(logits, [0, 1])
    assert drawn.logprobs is not None
    biased = logits[0].clone()
    biased[7] += 50.0
    assert drawn.logprobs.top[0].tolist() == pytest.approx(biased.log_softmax(-1).topk(3).values.tolist(), abs=1e-5)


# ---- grammars


class EvenOnly:
    """A grammar of even ids."""

    def mask(self) -> np.ndarray:
        return np.full(-(-VOCAB // 32), 0x55555555, dtype=np.int32)


def test_a_grammar_mask_is_applied_before_everything_and_to_its_row_only() -> None:
    logits = random_logits(3, 12)
    logits[:, 3] = 50.0
    batch = Batch()
    batch.add(0, temperature=0.0)
    batch.add(1, temperature=0.0, grammar=EvenOnly(), logprobs=1)
    batch.add(2, temperature=1.0, grammar=EvenOnly(), top_k=1)
    drawn = batch.sample(logits, [0, 1, 2])
    even = [max(range(0, VOCAB, 2), key=lambda token: float(logits[row, token])) for row in range(3)]
    assert drawn.ids.tolist() == [3, even[1], even[2]]
    assert drawn.logprobs is not None
    assert drawn.logprobs.top_ids.tolist() == [[3]]  # logprobs do not know of the mask
