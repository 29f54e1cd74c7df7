"""FlashAttention as a backend: the arguments of its calls, and the errors where it cannot run.

The libraries need a GPU. Here a function in torch replaces them: it takes the same arguments, and writes NaN where the
library leaves its result undefined.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from engine.attention.choose import backend_names, choose_attention
from engine.attention.flash_backend import FlashAttention, installed_for
from engine.attention.grouped import TwoBackends
from engine.attention.torch_backend import TorchAttention
from engine.errors import EngineError
from tests.engine.kernels.test_attention import CPU, Case, config, expected, make_case

HALF, CUDA = torch.bfloat16, torch.device("cuda")
MIXED = [(1, 40), (1, 16), (5, 5), (7, 30), (16, 32)]


def attend(q: Any, keys: list[Any], values: list[Any], bounds: list[int], scale: float, window: int | None) -> Any:
    """Causal attention of each sequence's tokens to keys [length, Hkv, D]; all other tokens' output is NaN."""
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    for i, (k, v) in enumerate(zip(keys, values, strict=True)):
        part, group = slice(bounds[i], bounds[i + 1]), q.shape[1] // k.shape[1]
        n, length = part.stop - part.start, len(k)
        last = torch.arange(length - n, length)[:, None]
        seen = torch.arange(length) <= last
        if window is not None:
            seen &= torch.arange(length) >= last - window
        scores = torch.einsum("qhd,khd->hqk", q[part], k.repeat_interleave(group, 1)) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[part] = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))
    return out


def pages(cache: Any, table: Any, lengths: list[int]) -> list[Any]:
    return [cache[row.long()].flatten(0, 1)[:length] for row, length in zip(table, lengths, strict=True)]


def flash_4(
    q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float,
    causal: bool, window_size: Any, seqused_k: Any, page_table: Any,
) -> tuple[Any, None]:
    """flash_attn.cute.flash_attn_varlen_func."""
    assert causal
    bounds = cu_seqlens_q.tolist()
    assert max_seqlen_q >= max(b - a for a, b in pairwise(bounds))
    assert page_table.dtype == seqused_k.dtype == torch.int32
    assert max_seqlen_k >= max(seqused_k.tolist())
    keys, values = (pages(x, page_table, seqused_k.tolist()) for x in (k, v))
    return attend(q, keys, values, bounds, softmax_scale, window_size[0]), None


def flash_2(
    q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, causal: bool, window_size: Any, block_table: Any,
) -> Any:
    """flash_attn.flash_attn_varlen_func; windows of (-1, -1) see everything."""
    assert window_size[0] is not None
    return flash_4(
        q, k, v, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal,
        softmax_scale=softmax_scale, window_size=(None if window_size[0] < 0 else window_size[0], 0),
        seqused_k=cu_seqlens_k.diff(), page_table=block_table,
    )[0]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes believe there is a GPU of this compute capability, with the libraries named installed."""

    def make(capability: tuple[int, int], *libraries: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
        if "2" in libraries:
            package.flash_attn_varlen_func = flash_2  # type: ignore[attr-defined]
        cute.flash_attn_varlen_func = flash_4  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        monkeypatch.setitem(sys.modules, "flash_attn.cute", cute if "4" in libraries else None)

    return make


@pytest.mark.parametrize(("capability", "block_size"), [((9, 0), 16), ((10, 0), 32), ((8, 6), 256)])
@pytest.mark.parametrize("windows", [(0,), (0, 6)])
def test_every_query_attends_exactly_its_own_past(gpu: Any, capability: Any, block_size: int, windows: Any) -> None:
    gpu(capability, "2", "4")
    model = config(4, 2, 8, windows)
    case = make_case(model, MIXED, 2, block_size, 0)
    backend = FlashAttention(model, block_size, HALF, HALF, CUDA)
    backend.plan(case.meta)
    for layer, window in enumerate(windows):
        out = backend.run(layer, case.q, case.k_cache, case.v_cache)
        torch.testing.assert_close(out, expected(case, window))
        chunks = backend.chunks(case.meta, 2, layer, case.q, case.k_cache, case.v_cache)
        torch.testing.assert_close(chunks[2:], expected(case, window)[2:])


@pytest.mark.parametrize("lengths,decodes", [(MIXED, 2), (MIXED[:2], 2), (MIXED[2:], 0)])
def test_two_backends_share_a_step(lengths: list[tuple[int, int]], decodes: int) -> None:
    model = config(4, 2, 8, (0, 6))
    case: Case = make_case(model, lengths, decodes, 16, 2)
    prefill, decode = (TorchAttention(model, 16, torch.float64, CPU) for _ in range(2))
    backend = TwoBackends(prefill, decode)
    backend.plan(case.meta)
    for layer, window in enumerate((0, 6)):
        out = backend.run(layer, case.q, case.k_cache, case.v_cache)
        torch.testing.assert_close(out, expected(case, window))


def test_names_are_for_prefill_and_decode() -> None:
    assert backend_names("auto") == ("auto", "auto")
    assert backend_names("torch") == ("torch", "torch")
    assert backend_names("flash, triton") == ("flash", "triton")
    assert backend_names("flash") == ("flash", "auto")
    for bad in ("flash,", "fast", "flash,triton,torch", "torch,flash2"):
        with pytest.raises(EngineError, match=r"attention_backend is .*, or two of them"):
            backend_names(bad)


@pytest.mark.parametrize(
    ("capability", "libraries", "block_size", "sentence"),
    [
        ((9, 0), "2", 16, r"needs flash_attn, which is not installed: pip install '.\[flash\]' .*\(FlashAtt.*auto"),
        ((9, 0), "4", 128, r"blocks of 64 or more tokens as a whole.*use --block-size 16, or leave"),
        ((8, 9), "", 256, r"needs FlashAttention-2 on this GPU, but it cannot.*pip install flash-attn, or choose auto"),
        ((8, 9), "2", 16, r"blocks of a multiple of 256 tokens, and the block size is 16: add --block-size 256, or"),
        ((7, 5), "2", 256, r"compute capability 8.0 or more, and this GPU has 7.5: choose auto"),
    ],
)
def test_what_is_missing_is_named(gpu: Any, capability: Any, libraries: str, block_size: int, sentence: str) -> None:
    gpu(capability, libraries)
    with pytest.raises(EngineError, match=sentence):
        FlashAttention(config(4, 2, 8), block_size, HALF, HALF, CUDA)


class Broken(Loader):
    """A package that is there, and whose libraries do not load."""

    def create_module(self, spec: Any) -> None:
        raise OSError("libcute.so: undefined symbol")

    def exec_module(self, module: ModuleType) -> None: ...


@pytest.mark.parametrize("state", ["fine", "absent", "other", "broken"])
def test_auto_chooses_it_where_it_measured_faster(gpu: Any, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    gpu((9, 0), "4")
    for name in ("flash_attn", "flash_attn.cute"):
        spec = ModuleSpec(name, None, is_package=True)
        sys.modules[name].__spec__, sys.modules[name].__path__ = spec, []  # type: ignore[attr-defined]
    if state == "absent":
        monkeypatch.setattr("engine.attention.flash_backend.importlib.util.find_spec", lambda name: None)
    if state == "broken":
        finder = SimpleNamespace(find_spec=lambda name, *_: name == "flash_attn.cute" and ModuleSpec(name, Broken()))
        monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
        monkeypatch.delitem(sys.modules, "flash_attn.cute")
        with pytest.raises(EngineError, match=r"its import failed .*undefined symbol.*install it again"):
            FlashAttention(config(4, 2, 128), 16, HALF, HALF, CUDA)
    found = installed_for(config(4, 2, 64 if state == "other" else 128), 16, HALF, HALF, CUDA)
    assert (found is not None) == (state == "fine")


def test_unsupported_settings_are_refused(gpu: Any) -> None:
    gpu((9, 0), "4")
    with pytest.raises(EngineError, match="needs an NVIDIA GPU, and the device is cpu: choose auto"):
        choose_attention("flash", config(4, 2, 8), 16, HALF, CPU, 8)
    with pytest.raises(EngineError, match="the KV cache is fp8: choose --attention-backend triton"):
        choose_attention("flash,torch", config(4, 2, 8), 16, HALF, CPU, 8, kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(EngineError, match="this model runs in float32: choose triton or torch"):
        choose_attention("flash,torch", config(4, 2, 8), 16, torch.float32, CPU, 8)
