"""What ends a request, what ends a step, what ends the process: and what is said."""

from __future__ import annotations

import logging

import pytest
import torch

from engine.build import as_engine_error
from engine.core.engine import Engine
from engine.errors import CheckpointError, DeviceLost
from engine.params import SamplingParams
from tests.engine.core.test_scheduler_simulation import make_engine
from tests.support.simulation import alone, run

ILLEGAL = "CUDA error: an illegal memory access was encountered"


def fail_once(engine: Engine, error: Exception, when: str) -> None:
    """The next step raises, as it is launched or as it is waited for."""

    def hook(plan: object) -> None:
        setattr(engine.runner, when, None)
        raise error

    setattr(engine.runner, when, hook)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("when", ["on_launch", "on_wait"])
def test_an_exception_in_a_step_is_logged_with_its_traceback_and_the_engine_goes_on(
    when: str, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(overlap=overlap)
    first = engine.add_request([1, 2, 3], SamplingParams(max_tokens=5, seed=0))
    fail_once(engine, RuntimeError("no kernel for that"), when)
    with caplog.at_level(logging.ERROR, "engine"):
        run(engine)
    assert first.finish_reason == "error: RuntimeError: no kernel for that"
    assert [record.exc_info is not None for record in caplog.records] == [True]
    second = engine.add_request([1, 2, 3], SamplingParams(max_tokens=5, seed=0))
    run(engine)
    engine.check()
    assert second.output_ids == alone([1, 2, 3], 0, 5, stop=frozenset({49}))


@pytest.mark.parametrize("when", ["on_launch", "on_wait"])
def test_a_failed_step_of_two_prompts_that_share_their_beginning_ends_only_these(when: str) -> None:
    """When the first ends, its node is joined with that of the other, which holds all of it. What earlier steps wrote
    stays cached."""
    engine = make_engine()
    engine.add_request([1] * 9, SamplingParams(max_tokens=1))
    run(engine)
    both = [engine.add_request([1] * length, SamplingParams(max_tokens=5)) for length in (18, 30)]
    fail_once(engine, RuntimeError("no kernel for that"), when)
    run(engine, check=True)
    assert {request.finish_reason for request in both} == {"error: RuntimeError: no kernel for that"}
    again = engine.add_request([1] * 30, SamplingParams(max_tokens=5, ignore_eos=True))
    run(engine, check=True)
    assert again.finish_reason == "length" and again.cached_tokens == 8


@pytest.mark.parametrize("when", ["on_launch", "on_wait"])
@pytest.mark.parametrize("error", [RuntimeError(ILLEGAL), type("AcceleratorError", (RuntimeError,), {})("driver")])
def test_after_a_cuda_error_nothing_goes_on(when: str, error: Exception) -> None:
    engine = make_engine()
    request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=5))
    fail_once(engine, error, when)
    with pytest.raises(DeviceLost, match=str(error)):
        run(engine)
    assert request.finish_reason.startswith("error")


def test_no_memory_at_the_start_is_a_sentence_with_ways_out() -> None:
    found = as_engine_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert str(found).startswith("there is not enough memory for this model (CUDA out of memory. Tried")
    assert "--kv-blocks" in str(found) and "--gpu-memory-utilization" in str(found)
    assert str(as_engine_error(KeyError("x"))) == "the engine could not start: KeyError: 'x'"
    known = CheckpointError("config.json lacks hidden_size")
    assert as_engine_error(known) is known


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", range(6))
def test_an_abort_inside_a_prompt_gives_everything_back(steps: int, overlap: bool) -> None:
    """Five chunks of 8: before the first, between two, with one in flight, with the first token in flight."""
    engine = make_engine(blocks=32, block_size=4, budget=8, overlap=overlap)
    request = engine.add_request(list(range(40)), SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    assert engine.abort(request.id) and not engine.abort(request.id)
    run(engine)
    engine.check()
    assert engine.cache.allocator.num_active == engine.cache.allocator.num_shared == 0


@pytest.mark.parametrize("longer_first", [False, True])
@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_a_prompt_that_is_the_beginning_of_another_shares_what_it_can(length: int, longer_first: bool) -> None:
    engine = make_engine(blocks=64, block_size=16)
    whole = [i % 40 for i in range(40)]
    prompts = [whole[:length], whole]
    requests = [engine.add_request(ids, SamplingParams(max_tokens=6)) for ids in prompts[:: -1 if longer_first else 1]]
    run(engine)
    engine.check()
    for request in requests:
        ids = request.ids[: request.prompt_len]
        assert request.output_ids == alone(ids, request.seed, 6, stop=frozenset({49}))
    later = requests[1]
    wanted = (min(request.prompt_len for request in requests) - (later.prompt_len == length)) // 16 * 16
    assert later.cached_tokens == wanted


@pytest.mark.parametrize("overlap", [False, True])
def test_a_leader_preempted_inside_its_prompt_strands_no_follower(overlap: bool) -> None:
    """A reply that grows takes the blocks of a prompt whose beginning another one shares."""
    engine = make_engine(blocks=12, block_size=4, budget=6, watermark=0.0, overlap=overlap)
    grower = engine.add_request([7] * 12, SamplingParams(max_tokens=30, ignore_eos=True, seed=1))
    for _ in range(4):
        engine.step()
    prefix = [i % 40 for i in range(24)]
    pair = [engine.add_request([*prefix, i], SamplingParams(max_tokens=3, seed=i, ignore_eos=True)) for i in range(2)]
    run(engine, check=True)
    assert pair[0].preemptions > 0 and grower.preemptions == 0
    assert grower.output_ids == alone([7] * 12, 1, 30)
    for i, request in enumerate(pair):
        assert request.output_ids == alone([*prefix, i], i, 3)
