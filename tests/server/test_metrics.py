"""/metrics: the names that vLLM's dashboards query, with values that match the requests."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from tests.support.serving import Running

# The queries of vLLM's Grafana dashboards, without those for hardware and for features that minitui lacks
# (transfers between machines, offloading, LoRA, mixture-of-experts balancing, block residency samples).
DASHBOARDS = """
    vllm:cache_config_info vllm:engine_sleep_state vllm:num_requests_running vllm:num_requests_waiting
    vllm:num_requests_waiting_by_reason vllm:kv_cache_usage_perc vllm:num_preemptions_total
    vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total
    vllm:prompt_tokens_total vllm:prompt_tokens_cached_total vllm:prompt_tokens_by_source_total
    vllm:generation_tokens_total vllm:request_success_total
    vllm:spec_decode_num_drafts_total vllm:spec_decode_num_draft_tokens_total
    vllm:spec_decode_num_accepted_tokens_total
    vllm:time_to_first_token_seconds_bucket vllm:inter_token_latency_seconds_bucket
    vllm:time_per_output_token_seconds_bucket vllm:request_time_per_output_token_seconds_bucket
    vllm:e2e_request_latency_seconds_bucket vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum
    vllm:request_decode_time_seconds_sum vllm:request_inference_time_seconds_sum
    vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
    vllm:request_max_num_generation_tokens_sum vllm:request_prefill_kv_computed_tokens_sum
    vllm:request_params_n_sum vllm:request_params_max_tokens_sum vllm:iteration_tokens_total_bucket
"""
SAMPLE = re.compile(r'^[a-z0-9_:]+\{model_name="tutor",engine="0"(,[a-z_]+="[^"]*")*\} (\d+(\.\d+)?(e[+-]\d+)?)$')


def test_every_name_that_dashboards_ask_for_is_on_the_page(server: Running) -> None:
    page = server.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = page.text.splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert all(SAMPLE.match(line) for line in samples), [line for line in samples if not SAMPLE.match(line)]
    names = {line.partition("{")[0] for line in samples}
    assert not [name for name in DASHBOARDS.split() if name not in names]
    declared = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(declared) == len(set(declared)), "a metric is declared twice"


def figures(server: Running, *names: str) -> dict[str, float]:
    return {name: server.metric(f"vllm:{name}") for name in names}


def test_the_values_match_the_requests(server: Running) -> None:
    server.wait_idle()
    names = (
        "prompt_tokens_total", "prompt_tokens_cached_total", "prompt_tokens_by_source_total", "request_success_total",
        "generation_tokens_total", "request_params_n_sum", "request_params_n_count", "request_params_max_tokens_sum",
        "request_max_num_generation_tokens_sum", "request_prefill_kv_computed_tokens_sum",
        "request_inference_time_seconds_count", "request_prompt_tokens_sum",
    )  # fmt: skip
    before = figures(server, *names)
    prompt = "Figures of a page that says what was computed and what was found. " * 3
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 6, "ignore_eos": True}
    usages = [server.post("/v1/completions", {**body, "n": n}).json()["usage"] for n in (1, 3)]
    drawn = sum(usage["completion_tokens"] for usage in usages)
    assert drawn == 24 and usages[1]["prompt_tokens_details"]["cached_tokens"] > 0
    server.wait_until(lambda: figures(server, *names)["request_success_total"] == before["request_success_total"] + 4)
    got = {name: value - before[name] for name, value in figures(server, *names).items()}
    length = usages[0]["prompt_tokens"]
    assert got["generation_tokens_total"] == drawn
    assert got["prompt_tokens_total"] == got["request_prompt_tokens_sum"] == 4 * length, "every sample has its prompt"
    assert got["prompt_tokens_by_source_total"] == got["prompt_tokens_total"]
    computed = got["prompt_tokens_total"] - got["prompt_tokens_cached_total"]
    assert got["request_prefill_kv_computed_tokens_sum"] == computed and length <= computed < 2 * length
    assert (got["request_params_n_sum"], got["request_params_n_count"]) == (4, 2)
    assert got["request_params_max_tokens_sum"] == got["request_max_num_generation_tokens_sum"] == 12
    assert got["request_inference_time_seconds_count"] == 4


@pytest.mark.parametrize("held", [True, False])
def test_waiting_requests_are_counted_by_reason(server: Running, held: bool) -> None:
    from minitui.server.metrics import Metrics

    state = server.state()
    state.gate, state.queue = ("closed" if held else "open"), [1, 2]
    state.requests = dict(itertools.zip_longest(state.queue, ()))
    metrics = Metrics()
    metrics.read(state)
    page = metrics.page("m")
    assert f'reason="capacity"}} {0 if held else 2}\n' in page and f'reason="deferred"}} {2 if held else 0}\n' in page
    assert 'sleep_state="awake"} 1\n' in page
    metrics.read(None)
    page = metrics.page("m")
    assert "sleep_state=" not in page and "reason=" not in page.replace("finished_reason=", "")
