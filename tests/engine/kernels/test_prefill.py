"""Attention of prefill chunks without a GPU: the kernel in Triton's interpreter, and what a launch asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels import prefill_attention as prefill
from tests.support.kernels.interpreted import interpreted


class Kernel:
    """Notes the grid and the arguments of the launch."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Kernel:
        self.grid = grid
        return self

    def __call__(self, *args: Any, **options: Any) -> None:
        self.options = options


@pytest.mark.parametrize("kv_heads,group", [(1, 1), (1, 128), (2, 71), (8, 4), (16, 3)])
@pytest.mark.parametrize("tokens", [1, 16, 50, 500])
@pytest.mark.parametrize("splits", [None, 32])
def test_the_parts_of_split_keys_fit_into_the_scratch_memory(
    splits: int | None, tokens: int, kv_heads: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, meta = Kernel(), torch.device("meta")
    monkeypatch.setattr(prefill, "_prefill_kernel", kernel)
    workspace = prefill.PrefillWorkspace(kv_heads, 16, meta)
    q, cache = (torch.empty(shape, device=meta) for shape in ((tokens, kv_heads * group, 16), (4, 16, kv_heads, 16)))
    ints = torch.empty(9, dtype=torch.int32, device=meta)
    prefill.prefill_attention(
        q, cache, cache, q.flatten(1), workspace, ints[:8].view(8, 1), ints[:8], ints, 1.0, max_seq_len=9000,
        splits=splits,
    )
    heads, tiles, parts = kernel.grid
    if parts > 1:
        assert heads * tiles * parts * kernel.options["BLOCK_M"] * 16 <= len(workspace.partial)
        assert heads * tiles <= len(workspace.counters)


def test_the_kernel_computes_attention_with_any_number_of_splits() -> None:
    wrong = {case: error for case, error in interpreted("prefill").items() if not error < 1e-6}
    assert not wrong
