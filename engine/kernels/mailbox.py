"""Kernels that exchange data between the GPUs of one host: sums over ranks, fused with a norm, and a common draw.

Every rank has a mailbox in memory that its peers can write (engine/parallel/mailbox.py). Each program of a kernel uses
one *lane* of the mailboxes. The program writes its rank's words into this lane of all mailboxes, then waits until the
lane of its rank's mailbox has the words of all ranks. A 64-bit word carries 32 bits of data and the number of the call:
when the receiver reads the number of the current call, the word has arrived. A call takes one trip over the link,
without fences or barriers. This is the LL ("low latency") protocol of NCCL (NVIDIA, 2019). The exchange is one-shot:
every rank receives the words of all ranks and adds them up in the order of the ranks, so all ranks get the same bits.

    mailbox   int64 [2][lanes][ranks][words]

The calls of a lane alternate between the two halves of the mailbox. A rank that has finished call k + 1 has received
the words of all other ranks for call k + 1. So all other ranks have finished call k, and call k + 2 may overwrite the
half that call k used. Every rank must launch the same kernels with the same lanes in the same order.

A waiting program regularly checks a flag in the host's memory. The host sets the flag when a rank is lost. Then the
wait ends, and the results are meaningless.

On two H200s the sum of one row of 4,096 numbers takes 3.1 us; with NCCL it takes 6.7 us (MEASURED.md).
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from engine.kernels.card import after_previous, overlap

ELECTED = 256  # draws that one lane of `elect` exchanges, two words each
SPINS = 1024  # a waiting program checks the mailbox this many times, then the flag once


class Box(Protocol):
    """The fields of a mailbox that the kernels use."""

    rank: int
    size: int
    lanes: int
    words: int
    addresses: torch.Tensor  # int64 [size]  address of each rank's mailbox, as this rank sees it
    calls: torch.Tensor  # int32 [lanes]     number of calls of each lane so far
    abort: torch.Tensor  # int32 [1], the flag in pinned memory of the host: 1 ends all waits


@triton.jit
def _exchange(
    word, i, live, lane, addresses, calls, abort, RANK: tl.constexpr, SIZE: tl.constexpr, SIZE2: tl.constexpr,
    LANES: tl.constexpr, WORDS: tl.constexpr, SPINS: tl.constexpr,
):
    """Send this rank's words (int32 [N]) where `live` is true; return the words of all ranks, int32 [SIZE2, N]. Rows
    from SIZE on are zeros."""
    call = tl.load(calls + lane) + 1
    at = ((call & 1) * LANES + lane) * SIZE * WORDS
    sent = (call.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(SIZE):
        theirs = tl.multiple_of(tl.load(addresses + peer).to(tl.pointer_type(tl.int64)), 16)
        tl.store(theirs + at + RANK * WORDS + i, sent, mask=live)
    rank = tl.arange(0, SIZE2)
    own = tl.multiple_of(tl.load(addresses + RANK).to(tl.pointer_type(tl.int64)), 16)
    own = own + at + rank[:, None] * WORDS + i[None, :]
    wanted = (rank < SIZE)[:, None] & live[None, :]
    got = tl.load(own, mask=wanted, other=0, volatile=True)
    missing = tl.max(tl.max((wanted & ((got >> 32).to(tl.int32) != call)).to(tl.int32), 0), 0)
    spins = 0
    while missing > 0:
        got = tl.load(own, mask=wanted, other=0, volatile=True)
        missing = tl.max(tl.max((wanted & ((got >> 32).to(tl.int32) != call)).to(tl.int32), 0), 0)
        spins += 1
        if spins == SPINS:
            spins = 0
            if tl.load(abort, volatile=True) != 0:
                missing = 0
    tl.debug_barrier()  # all threads must read the number of the call before it changes
    tl.store(calls + lane, call)
    return got.to(tl.int32)


@triton.jit
def _low(word, dtype: tl.constexpr):
    """Returns the first of the two 16-bit floats of an int32, as fp32."""
    return (word & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _high(word, dtype: tl.constexpr):
    """Returns the second of the two 16-bit floats of an int32, as fp32."""
    return (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _word(low, high, dtype: tl.constexpr):
    """Returns two fp32 numbers, rounded to 16 bits each, in one int32."""
    first = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return first | (high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _sum_kernel(
    x, residual, weight, out, stride_part, tokens, count, addresses, calls, abort, HALF: tl.constexpr,
    EPS: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr, EMBED: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr, SIZE2: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr, SPINS: tl.constexpr,
    BLOCK: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr,
):
    lane = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    live = i < HALF
    at = lane.to(tl.int64) * HALF + i
    weights = i
    if NORM:
        weights = tl.load(weight + i, mask=live, other=0)  # does not depend on the previous kernel
    after_previous(PDL)
    if EMBED:  # x has this rank's `count` rows of the embedding table; the token's row may be on another rank
        wanted = tl.load(tokens + lane) - RANK * count
        mine = live & (wanted >= 0) & (wanted < count)
        pair = tl.load(x + wanted * HALF + i, mask=mine, other=0)
    else:
        pair = tl.load(x + at, mask=live, other=0)
    if PARTS > 1:  # each 64-bit element of x is a pair of fp32 numbers
        low = pair.to(tl.int32).to(tl.float32, bitcast=True)
        high = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        for part in tl.static_range(1, PARTS):
            pair = tl.load(x + part * stride_part + at, mask=live, other=0)
            low += pair.to(tl.int32).to(tl.float32, bitcast=True)
            high += (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        word = _word(low, high, DTYPE)
    else:
        word = pair
    got = _exchange(word, i, live, lane, addresses, calls, abort, RANK, SIZE, SIZE2, LANES, WORDS, SPINS)
    word = _word(tl.sum(_low(got, DTYPE), 0), tl.sum(_high(got, DTYPE), 0), DTYPE)
    if NORM:
        before = tl.load(residual + at, mask=live, other=0)
        word = _word(_low(word, DTYPE) + _low(before, DTYPE), _high(word, DTYPE) + _high(before, DTYPE), DTYPE)
        tl.store(residual + at, word, mask=live)
        low, high = _low(word, DTYPE), _high(word, DTYPE)
        scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / (2 * HALF) + EPS)
        word = _word(low * scale, high * scale, DTYPE)
        word = _word(_low(word, DTYPE) * _low(weights, DTYPE), _high(word, DTYPE) * _high(weights, DTYPE), DTYPE)
    tl.store(out + at, word, mask=live)


def sum_ranks(x: torch.Tensor, box: Box, norm: tuple[torch.Tensor, torch.Tensor, float] | None = None) -> torch.Tensor:
    """Returns the sum of x [T, H] over all ranks, added up in fp32 and rounded to 16 bits. T is at most box.lanes. With
    `norm` = (residual [T, H], weight [H], eps): add the sum to the residual in place and return the RMS norm of the
    residual, as engine.kernels.norms.rms_norm does. x may be fp32 [parts, T, H]: then its parts are added up first."""
    hidden = x.shape[-1]
    parts = x.shape[0] if x.dim() == 3 else 1
    tokens = x.shape[-2]
    residual, weight, eps = norm or (x, x, 0.0)
    out = torch.empty(tokens, hidden, dtype=weight.dtype, device=x.device)
    words = x.view(torch.int64) if parts > 1 else x.view(torch.int32)
    return _launch_sum(words, residual, weight, out, box, box.calls, 0, eps, norm is not None, parts, False)


def embed_ranks(tokens: torch.Tensor, table: torch.Tensor, box: Box) -> torch.Tensor:
    """Returns the embedding rows [T, H] of `tokens` (int64 [T]). The embedding table is split evenly over the ranks;
    `table` has this rank's rows."""
    out = torch.empty(len(tokens), table.shape[1], dtype=table.dtype, device=table.device)
    return _launch_sum(table.view(torch.int32), table, table, out, box, tokens, len(table), 0.0, False, 1, True)


def _launch_sum(
    words: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, box: Box,
    tokens: torch.Tensor, count: int, eps: float, norm: bool, parts: int, embed: bool,
) -> torch.Tensor:
    rows, hidden = out.shape
    block = triton.next_power_of_2(hidden // 2)
    _sum_kernel[(rows,)](
        words, residual.view(torch.int32), weight.view(torch.int32), out.view(torch.int32), rows * hidden // 2,
        tokens, count, box.addresses, box.calls, box.abort, HALF=hidden // 2, EPS=eps, NORM=norm, PARTS=parts,
        EMBED=embed, RANK=box.rank, SIZE=box.size, SIZE2=triton.next_power_of_2(box.size), LANES=box.lanes,
        WORDS=box.words, SPINS=SPINS, BLOCK=block, DTYPE=_TRITON_TYPES[out.dtype],
        num_warps=max(1, min(16, block // 128)), **overlap(),
    )
    return out


_TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _elect_kernel(
    scores, outcome, rows, seq_lens, last_token, n, addresses, calls, abort, RANK: tl.constexpr, SIZE: tl.constexpr,
    SIZE2: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr, SPINS: tl.constexpr, BLOCK: tl.constexpr,
):
    lane = tl.program_id(0)
    i = tl.arange(0, 2 * BLOCK)
    entry = lane * BLOCK + i // 2
    live = entry < n
    even = (i & 1) == 0
    score = tl.load(scores + entry, mask=live & even, other=0.0).to(tl.int32, bitcast=True)
    token = tl.load(outcome + entry, mask=live & (i & 1 == 1), other=0).to(tl.int32)
    word = tl.where(even, score, token)
    got = _exchange(word, i, live, lane, addresses, calls, abort, RANK, SIZE, SIZE2, LANES, WORDS, SPINS)
    score_bits, ids = tl.split(tl.reshape(got, (SIZE2, BLOCK, 2)))
    is_rank = (tl.arange(0, SIZE2) < SIZE)[:, None]
    bad = tl.max((is_rank & (ids < 0)).to(tl.int32), 0) > 0
    token = tl.where(ids < 0, -1 - ids, ids)
    score = tl.where(is_rank, score_bits.to(tl.float32, bitcast=True), -float("inf"))
    best = tl.max(score, 0)
    # Among equal scores the lowest id wins, as in argmax. If logits are bad, the best score may be NaN, which equals
    # no score: then the lowest id of all ranks wins.
    token = tl.min(tl.where(is_rank & ((score == best[None, :]) | bad[None, :]), token, 0x7FFFFFFF), 0).to(tl.int64)
    bad = bad | (best == -float("inf"))
    entry = lane * BLOCK + tl.arange(0, BLOCK)
    live = entry < n
    drawn = live & (tl.load(seq_lens + entry, mask=live, other=0) > 0)
    tl.store(outcome + entry, tl.where(bad, -1 - token, token), mask=drawn)
    tl.store(last_token + tl.load(rows + entry, mask=drawn, other=0), token, mask=drawn)


def elect(
    scores: torch.Tensor, outcome: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, last_token: torch.Tensor,
    box: Box,
) -> None:
    """For each draw, find the token with the highest score among the ranks' best tokens; every rank gets the result.

    scores fp32 [n]; outcome int64 [n]: ids, or -1 - id if the logits are bad. Before this call,
    engine.kernels.sample.draw has written both tensors for this rank's piece of the vocabulary. Overwrites outcome and
    last_token[rows]; entries with seq_lens 0 are padding and are not written.
    """
    n = len(outcome)
    _elect_kernel[(triton.cdiv(n, ELECTED),)](
        scores, outcome, rows, seq_lens, last_token, n, box.addresses, box.calls, box.abort, RANK=box.rank,
        SIZE=box.size, SIZE2=triton.next_power_of_2(box.size), LANES=box.lanes, WORDS=box.words, SPINS=SPINS,
        BLOCK=ELECTED, num_warps=4,
    )
