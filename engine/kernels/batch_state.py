"""The first kernel of a captured decode step: makes the model's inputs from the numbers that the host sends.

The host sends one int32 buffer, in one copy from pinned memory before the graph runs:

    [0] n, the number of decoding requests   [1] m, the number of changes to the block table
    [HEADER …] row, start and token of the requests: three lists of length `capacity`
               (token -1: use the row's last token, which only the device knows)
    [then …]   what other kernels read: `others` numbers
    [then …]   row, column and block of the changes: three lists of length `changes`

Only this kernel and the sampler write the persistent state (block table, last token), both on the compute stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HEADER = 16  # int32 numbers before the lists, so that the lists are aligned


@triton.jit(do_not_specialize=["size"])
def _prepare_kernel(
    sent, block_table, last_token, tokens, rows, seq_lens, stride_table, size, ENTRIES: tl.constexpr,
    OTHERS: tl.constexpr, CHANGES: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
):
    n = tl.load(sent)
    m = tl.load(sent + 1)
    i = tl.arange(0, BLOCK)
    change = sent + HEAD + 3 * ENTRIES + OTHERS
    for j in range(0, m, BLOCK):
        c = j + i
        row = tl.load(change + c, mask=c < m, other=0).to(tl.int64)
        column = tl.load(change + CHANGES + c, mask=c < m, other=0)
        block = tl.load(change + 2 * CHANGES + c, mask=c < m, other=0)
        tl.store(block_table + row * stride_table + column, block, mask=c < m)
    live = i < n
    row = tl.load(sent + HEAD + i, mask=live, other=0)
    start = tl.load(sent + HEAD + ENTRIES + i, mask=live, other=-1)
    token = tl.load(sent + HEAD + 2 * ENTRIES + i, mask=live, other=0).to(tl.int64)
    drawn = tl.load(last_token + row, mask=live & (token < 0), other=0)
    batch = i < size
    tl.store(tokens + i, tl.where(token < 0, drawn, token), mask=batch)
    tl.store(rows + i, row, mask=batch)
    tl.store(seq_lens + i, start + 1, mask=batch)  # 0 for padding


def prepare(
    sent: torch.Tensor, block_table: torch.Tensor, last_token: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor,
    seq_lens: torch.Tensor, batch: int, capacity: int, changes: int, others: int = 0,
) -> None:
    """Fill tokens int64, rows int32, seq_lens int32 [batch]; apply the changes to the block table."""
    _prepare_kernel[(1,)](
        sent, block_table, last_token, tokens, rows, seq_lens, block_table.stride(0), batch, ENTRIES=capacity,
        OTHERS=others, CHANGES=changes, HEAD=HEADER, BLOCK=max(32, triton.next_power_of_2(capacity)), num_warps=4,
    )
