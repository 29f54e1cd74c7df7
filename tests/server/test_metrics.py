"""/metrics: the names that vLLM's dashboards query, with values that match the requests."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.metrics.metrics import Metrics
from engine.trace.views import RequestView, Waste
from tests.support.server.serving import Running
from tests.support.waiting import wait_until

# The queries of vLLM's and Ray's Grafana dashboards, without those for hardware and for features that minitui lacks
# (transfers between machines, offloading, LoRA, mixture-of-experts balancing).
DASHBOARDS = """
    vllm:cache_config_info vllm:engine_sleep_state vllm:num_requests_running vllm:num_requests_waiting
    vllm:num_requests_waiting_by_reason vllm:kv_cache_usage_perc vllm:num_preemptions_total
    vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total
    vllm:kv_block_lifetime_seconds_bucket vllm:kv_block_idle_before_evict_seconds_bucket
    vllm:kv_block_reuse_gap_seconds_bucket
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
    vllm:gpu_cache_usage_perc vllm:gpu_prefix_cache_queries_total vllm:gpu_prefix_cache_hits_total
    vllm:num_requests_swapped vllm:lora_requests_info
"""
SAMPLE = re.compile(r'^[a-z0-9_:]+\{model_name="tutor",engine="0"(,[a-z_]+="[^"]*")*\} (\d+(\.\d+)?(e[+-]\d+)?)$')


def test_every_name_that_dashboards_ask_for_is_on_the_page(server: Running) -> None:
    page = server.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = page.text.splitlines()
    own = [line for line in lines if not re.match(r"(process|python|http)_", line)]
    samples = [line for line in own if not line.startswith("#")]
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
        "request_inference_time_seconds_count", "request_prompt_tokens_sum", "prefix_cache_hits_total",
        "gpu_prefix_cache_hits_total", "prefix_cache_queries_total", "gpu_prefix_cache_queries_total",
    )
    before = figures(server, *names)
    prompt = "Figures of a page that says what was computed and what was found. " * 3
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 6, "ignore_eos": True}
    usages = [server.post("/v1/completions", {**body, "n": n}).json()["usage"] for n in (1, 3)]
    drawn = sum(usage["completion_tokens"] for usage in usages)
    assert drawn == 24 and usages[1]["prompt_tokens_details"]["cached_tokens"] > 0
    wait_until(lambda: figures(server, *names)["request_success_total"] == before["request_success_total"] + 4)
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
    assert got["gpu_prefix_cache_hits_total"] == got["prefix_cache_hits_total"] > 0
    assert got["gpu_prefix_cache_queries_total"] == got["prefix_cache_queries_total"] == 4 * length


@pytest.mark.parametrize("held", [True, False])
def test_waiting_requests_are_counted_by_reason(server: Running, held: bool) -> None:
    state = server.state()
    state.gate, state.queue = ("closed" if held else "open"), [1, 2]
    state.requests = {id: RequestView(id, "", 4, 8) for id in state.queue}
    metrics = Metrics()
    metrics.measure(state)
    page = metrics.page("m")
    assert f'reason="capacity"}} {0 if held else 2}\n' in page and f'reason="deferred"}} {2 if held else 0}\n' in page
    assert 'sleep_state="awake"} 1\n' in page
    metrics.measure(None)
    page = metrics.page("m")
    assert "sleep_state=" not in page and "reason=" not in page.replace("finished_reason=", "")


def test_the_waste_of_the_pool_is_measured(server: Running) -> None:
    state = server.state()
    state.requests = {1: RequestView(1, "", 20, 40, "running", table=[1, 2], base=20)}
    state.waste = Waste(evicted=32, preempted=5, duplicate=16)
    metrics = Metrics()
    metrics.measure(state)
    page = metrics.page("m")
    assert f"kv_cache_unused_slots{{model_name=\"m\",engine=\"0\"}} {2 * state.block_size - 20}\n" in page
    for cause, tokens in (("evicted", 32), ("preempted", 5), ("duplicate", 16)):
        assert f'tokens_computed_again{{model_name="m",engine="0",cause="{cause}"}} {tokens}\n' in page
    metrics.measure(None)
    assert "tokens_computed_again{" not in metrics.page("m")


def test_the_process_and_its_http_requests_are_measured(server: Running) -> None:

    def value(line: str) -> float:
        found = [row for row in server.get("/metrics").text.splitlines() if row.startswith(line + " ")]
        return float(found[0].split()[-1]) if found else 0.0

    labels = '{handler="/tokenize",method="POST",status="%s"}'
    fine, wrong = (value("http_requests_total" + labels % status) for status in ("2xx", "4xx"))
    server.post("/tokenize", {"prompt": "x"})
    server.post("/tokenize", {"prompt": 5})
    for number in range(3):
        server.http.request("PROPFIND", f"/nowhere/{number}")
    assert value("http_requests_total" + labels % "2xx") == fine + 1
    assert value("http_requests_total" + labels % "4xx") == wrong + 1
    assert value('http_requests_total{handler="none",method="other",status="4xx"}') >= 3
    assert value('http_request_duration_seconds_count{handler="/tokenize",method="POST"}') == fine + wrong + 2
    text = server.get("/metrics").text
    assert "nowhere" not in text and "PROPFIND" not in text, "a caller can add labels"
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) and "python_info" in names
    if sys.platform == "linux":
        assert value("process_resident_memory_bytes") > 10e6 and value("process_open_fds") > 3


# The rules of `promtool check metrics` for the name, the type, the help text and the labels of a metric.
TYPES = ("gauge", "counter", "summary", "histogram", "untyped", "info")
NOT_BASE = re.compile("(pico|nano|micro|milli|centi|kilo|kibi|mega|mebi|giga|gibi|tera)(seconds|bytes|joules)|"
                      "minutes|hours|days|weeks|bits|perc|percent")
ABBREVIATIONS = {"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d"}


def lint(name: str, kind: str, about: str, labels: set[str]) -> list[str]:
    """Returns the broken rules."""
    parts = name.split("_")
    rules = {
        "no help text": not about,
        "a counter ends in _total, nothing else does": (kind == "counter") != name.endswith("_total"),
        "only histograms and summaries have _bucket, _count and _sum": name.endswith(("_bucket", "_count", "_sum")),
        "only histograms have the label le, only summaries quantile": bool({"le", "quantile"} & labels),
        "the type is in the name": bool(set(parts) & set(TYPES)) and kind in parts,
        "a colon is for recording rules": ":" in name,
        "snake_case": any(re.search("[a-z][A-Z]", each) for each in (name, *labels)),
        "a base unit": any(map(NOT_BASE.fullmatch, parts)),
        "an abbreviated unit": bool(set(parts) & ABBREVIATIONS),
    }
    return [rule for rule, broken in rules.items() if broken]


def test_our_own_names_follow_prometheus_rules(server: Running) -> None:
    families = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        name = f"{family.name}_total" if family.type == "counter" else family.name  # the parser takes the suffix off
        labels = {key for sample in family.samples for key in sample.labels}
        own = labels - ({"le"} if family.type == "histogram" else {"quantile"} if family.type == "summary" else set())
        families[name] = (family.type, family.documentation, own)
    ours = {name: facts for name, facts in families.items() if not name.startswith("vllm:")}
    assert {"minitui_requests_refused_total", "http_requests_total", "minitui_kv_cache_cached_ratio"} <= set(ours)
    assert {name: found for name, facts in ours.items() if (found := lint(name, *facts))} == {}
    assert lint("minitui:x_perc", "gauge", "", {"le"}) and lint("x_counter_ms", "counter", "x", {"aB"})
