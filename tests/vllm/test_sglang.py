"""SGLang's KV events and /metrics: messages of its own cache, and where it publishes them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import lzma
from typing import Any

import pytest

from minitui.sources.server_metrics import read_page
from tests.support.fake_openai import FakeSglang
from tests.support.paths import ROOT
from tests.vllm.test_recorded import free_ports

pytest.importorskip("zmq", reason="the extra 'vllm' is not installed")
pytest.importorskip("msgpack", reason="the extra 'vllm' is not installed")

import zmq
import zmq.asyncio

from minitui.vllm.cached_tree import CachedTree
from minitui.vllm.kv_messages import read
from minitui.vllm.kv_sockets import find_events
from minitui.vllm.kv_source import pool_of

# SGLang 0.5.23, Rust cache: pages of 1 and 16 tokens, and of 16 with EAGLE; each message with the tree's pages
# and texts after it
RECORDED = ROOT / "tests" / "vllm" / "sglang_events.xz"
# lines that the collectors of SGLang 0.5.23 wrote with --enable-priority-scheduling
PRIORITIES = """sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="0"} 3.0
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="1",tp_rank="0"} 1.0
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="2",tp_rank="0"} 2.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="0"} 2.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",priority="1",tp_rank="0"} 2.0
sglang:gen_throughput{engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="0"} 77.0
sglang:cache_hit_rate{engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="0"} 0.01
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="0"} 0.28
sglang:page_size{engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="0"} 16.0
sglang:num_pages{engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="0"} 3744.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="true",model_name="m",priority="1"} 700.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="false",model_name="m",priority="2"} 300.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="true",model_name="m",priority="1"} 30.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="false",model_name="m",priority="2"} 10.0
sglang:cached_tokens_total{cache_source="device",engine_type="unified",model_name="m",priority="1"} 150.0
sglang:cached_tokens_total{cache_source="host",engine_type="unified",model_name="m",priority="1"} 50.0
sglang:cached_tokens_total{cache_source="device",engine_type="unified",model_name="m",priority="2"} 50.0
sglang:time_to_first_token_seconds_count{engine_type="unified",is_streaming="true",model_name="m",priority="1"} 1.0
sglang:time_to_first_token_seconds_sum{engine_type="unified",is_streaming="true",model_name="m",priority="1"} 0.2
"""


def digest(tree: CachedTree) -> str:
    """Returns a short name of the texts that end in a leaf."""
    ends = [node.id for node in tree.state.nodes.values() if node.id and not node.children]
    paths = [reversed(list(tree.state.path(end))) for end in ends]
    texts = sorted(tuple(token for view in path for token in view.ids) for path in paths)
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


@pytest.mark.parametrize("run", range(3))
def test_recorded_messages_of_sglang_give_its_tree(run: int) -> None:
    recorded = json.loads(lzma.decompress(RECORDED.read_bytes()))[run]
    tree, copies = CachedTree(1 << 12, recorded["page"]), 0
    for payload, pages, texts in recorded["messages"]:
        tree.take(0.0, list(read(base64.b64decode(payload))[1]))
        assert (len(tree), digest(tree)) == (pages, texts)
        copies = max(copies, tree.copies)
    assert tree.stored > 150 and tree.removed > 50 and copies and not tree.left_out


def test_totals_are_added_over_priorities_and_repeated_counts_are_not() -> None:
    metrics = read_page(PRIORITIES)
    assert (metrics.running, metrics.waiting, metrics.cache_use, metrics.tokens_per_s) == (3, 2, 0.28, 77)
    assert (metrics.prompt_tokens, metrics.output_tokens) == (1000, 40)
    assert (metrics.hit_rate, metrics.ttft_mean_s) == (0.25, 0.2)
    assert pool_of(PRIORITIES) == (3744, 16)


async def test_sglang_says_where_it_publishes() -> None:
    """After the ports of its ranks comes one for its load: it is not a rank."""
    context, port = zmq.asyncio.Context.instance(), free_ports(4)
    api = FakeSglang()
    api.told = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": port, "topic": "", "block_size": 16,
                "dp_size": 1, "load_endpoint_port_base": port + 1, "replay_endpoint_port_base": port + 3}
    async with api:
        with contextlib.ExitStack() as held:
            for kind, place in ((zmq.PUB, 0), (zmq.PUB, 1), (zmq.ROUTER, 3)):
                held.enter_context(context.socket(kind)).bind(f"tcp://127.0.0.1:{port + place}")
            found = await find_events(api.url, "secret")
            assert (found.events, found.ranks) == (f"tcp://127.0.0.1:{port},{port + 3}", 1)
            assert api.heads[-1]["authorization"] == "bearer secret"
            del api.told["replay_endpoint_port_base"]
            found = await find_events(api.url)
            assert (found.events, found.ranks) == (f"tcp://127.0.0.1:{port}", 1)
            assert found.tried == "SGLang has no replay endpoint"


@pytest.mark.parametrize("told", [None, 7, {}, {"endpoint_port_base": "x"}, {"endpoint_port_base": 1 << 20}])
async def test_what_is_not_an_address_is_not_taken_from_the_server(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports(2)
    monkeypatch.setattr("minitui.vllm.kv_sockets.FIRST_PORT", port)
    monkeypatch.setattr("minitui.vllm.kv_sockets.FIND_S", 0.3)
    api = FakeSglang()
    api.told = told
    async with api:
        found = await find_events(api.url)
        assert (found.events, found.tried) == ("", f"no KV events are published at tcp://127.0.0.1:{port}")
