"""Draws the next token of every row from the logits, in one or two kernel launches and without the host.

The order of operations and the noise are the same as in engine/worker/sampler.py. The kernels apply temperature, top-k,
top-p and min-p, add Gumbel noise (the integer hash of engine/kernels/noise.py), find the argmax over the vocabulary,
check for NaN and infinity, and update last_token. Greedy rows get the exact argmax.

    floors   one program per row: finds the floor, the lowest score that top-k, top-p and min-p keep. The kernel uses
             bisection over the 16-bit patterns of the logits instead of a sort, and keeps scores equal to the floor.
             Launched only if a row uses top-k, top-p or min-p
    draw     grid (n, chunks of the vocabulary): each program finds the best score of one chunk. The program that
             finishes last in a row compares the best scores of all chunks of the row

Shapes: logits [n, V] in bfloat16 or float16; rows, seq_lens int32 [n]. The tables have one entry for each row of the
batch: settings fp32 [max_rows, NUM_SETTINGS], top_k int32 [max_rows] (V: no top-k), keys int32 [max_rows, 2].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from engine.kernels import noise
from engine.kernels import row_settings as column

CHUNK = 4096  # tokens of the vocabulary in one program of `draw`
LOWEST, HIGHEST = tl.constexpr(-(1 << 15)), tl.constexpr((1 << 15) - 1)  # the bounds of `_pattern`
# Constants of other modules, in the form in which kernels can read them.
TEMPERATURE, NOISE, TOP_P, LOG_MIN_P, SETTINGS = map(
    tl.constexpr, (column.TEMPERATURE, column.NOISE, column.TOP_P, column.LOG_MIN_P, column.NUM_SETTINGS)
)
MIX_1, MIX_2, GOLDEN, MURMUR = (
    tl.constexpr(noise.signed(word)) for word in (noise.MIX_1, noise.MIX_2, noise.GOLDEN, noise.MURMUR)
)


@triton.jit
def _mix(x):
    """Returns noise.mix(x) for int32 x."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * MIX_1
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * MIX_2
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def _pattern(x):
    """Returns an integer for each 16-bit float; the integers have the same order as the floats."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFF, bits)


@triton.jit
def _value(pattern, dtype: tl.constexpr):
    """Returns the float with this pattern, as float32."""
    bits = tl.where(pattern < 0, pattern ^ 0x7FFF, pattern)
    return bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _floors_kernel(logits, stride, rows, settings, top_k, floors, V, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    row = tl.load(rows + i)
    temperature = tl.load(settings + row * SETTINGS + TEMPERATURE)
    top_p = tl.load(settings + row * SETTINGS + TOP_P)
    log_min_p = tl.load(settings + row * SETTINGS + LOG_MIN_P)
    k = tl.load(top_k + row)
    if (k >= V) & (top_p >= 1.0) & (log_min_p == -float("inf")):
        tl.store(floors + i, -float("inf"))
        return
    base = logits + i.to(tl.int64) * stride
    b = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    for j in range(0, V, BLOCK):
        best = tl.maximum(best, tl.load(base + j + b, mask=j + b < V, other=-float("inf")).to(tl.float32))
    top = tl.max(best, 0)
    low = LOWEST
    if k < V:  # find the highest pattern that at least k logits reach
        high = HIGHEST
        while low < high:
            middle = (low + high + 1) >> 1
            count = tl.zeros([BLOCK], tl.int32)
            for j in range(0, V, BLOCK):
                x = tl.load(base + j + b, mask=j + b < V, other=-float("inf"))
                count += ((_pattern(x) >= middle) & (j + b < V)).to(tl.int32)
            if tl.sum(count, 0) >= k:
                low = middle
            else:
                high = middle - 1
    if top_p < 1.0:  # find the lowest pattern for which the logits above it have less than top_p of the mass
        total = tl.zeros([BLOCK], tl.float32)
        for j in range(0, V, BLOCK):
            x = tl.load(base + j + b, mask=j + b < V, other=-float("inf"))
            weight = tl.exp((x.to(tl.float32) - top) / temperature)
            total += tl.where(_pattern(x) >= low, weight, 0.0)
        mass = tl.sum(total, 0) * top_p
        high = HIGHEST
        while low < high:
            middle = (low + high) >> 1
            above = tl.zeros([BLOCK], tl.float32)
            for j in range(0, V, BLOCK):
                x = tl.load(base + j + b, mask=j + b < V, other=-float("inf"))
                weight = tl.exp((x.to(tl.float32) - top) / temperature)
                above += tl.where(_pattern(x) > middle, weight, 0.0)
            if tl.sum(above, 0) < mass:
                high = middle
            else:
                low = middle + 1
    floor = -float("inf")
    if low > LOWEST:
        floor = tl.div_rn(_value(low, logits.dtype.element_ty), temperature)
    tl.store(floors + i, tl.maximum(floor, tl.div_rn(top, temperature) + log_min_p))


@triton.jit
def _draw_kernel(
    logits, stride, rows, seq_lens, settings, keys, floors, best_scores, best_ids, bad_parts, counters, outcome,
    last_token, scores, V, first, NOISY: tl.constexpr, TRUNCATED: tl.constexpr, PIECE: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):
    i = tl.program_id(0)
    chunk = tl.program_id(1)
    length = tl.load(seq_lens + i)
    if length == 0:
        return
    row = tl.load(rows + i)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = ids < V
    x = tl.load(logits + i.to(tl.int64) * stride + ids, mask=inside, other=-float("inf")).to(tl.float32)
    bad = tl.max((inside & ((x != x) | (tl.abs(x) == float("inf")))).to(tl.int32), 0)
    noise_wanted = 0.0
    if NOISY:
        noise_wanted = tl.load(settings + row * SETTINGS + NOISE)
    if noise_wanted > 0.0:
        x = tl.div_rn(x, tl.load(settings + row * SETTINGS + TEMPERATURE))
        if TRUNCATED:
            x = tl.where(x < tl.load(floors + i), -float("inf"), x)
        key0 = tl.load(keys + row * 2)
        key1 = tl.load(keys + row * 2 + 1)
        start = _mix(key0 + length * GOLDEN)
        step = ((start * MURMUR) ^ key1) | 1
        u = (_mix((first + ids) * step + start) & 0x7FFFFFFF).to(tl.float32)
        u = tl.maximum((u + 0.5) * -(2.0**-31), -1.0 + 2.0**-24)
        x += -libdevice.log(-libdevice.log1p(u))
    score, at = tl.max(x, 0, return_indices=True)
    tl.store(best_scores + i * CHUNKS + chunk, score)
    tl.store(best_ids + i * CHUNKS + chunk, chunk * BLOCK + at)
    tl.store(bad_parts + i * CHUNKS + chunk, bad)
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + i, 1, sem="acq_rel")
    if arrived == CHUNKS - 1:
        tl.debug_barrier()
        tl.store(counters + i, 0)
        c = tl.arange(0, BLOCK_CHUNKS)
        live = c < CHUNKS
        score, at = tl.max(
            tl.load(best_scores + i * CHUNKS + c, mask=live, other=-float("inf"), volatile=True), 0, return_indices=True
        )
        token = tl.sum(tl.where(c == at, tl.load(best_ids + i * CHUNKS + c, mask=live, other=0, volatile=True), 0), 0)
        bad = tl.max(tl.load(bad_parts + i * CHUNKS + c, mask=live, other=0, volatile=True), 0)
        bad = bad | (score == -float("inf")).to(tl.int32)
        token += first
        if PIECE:
            tl.store(scores + i, score)
        else:
            tl.store(last_token + row, token.to(tl.int64))
        tl.store(outcome + i, tl.where(bad > 0, -1 - token, token).to(tl.int64))


class SampleWorkspace:
    """Scratch memory of the two kernels, for up to max_rows rows. `counters` are 0 before and after each launch."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        cells = max_rows * triton.cdiv(vocab_size, CHUNK)
        self.scores = torch.empty(cells, dtype=torch.float32, device=device)
        self.ids = torch.empty(cells, dtype=torch.int32, device=device)
        self.bad = torch.empty(cells, dtype=torch.int32, device=device)
        self.floors = torch.empty(max_rows, dtype=torch.float32, device=device)
        self.counters = torch.zeros(max_rows, dtype=torch.int32, device=device)


def draw(
    logits: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, settings: torch.Tensor, top_k: torch.Tensor,
    keys: torch.Tensor, outcome: torch.Tensor, last_token: torch.Tensor, workspace: SampleWorkspace, *, noisy: bool,
    truncated: bool, piece: tuple[int, torch.Tensor] | None = None,
) -> None:
    """Write the drawn ids to `outcome` int64 [n] and to last_token[rows].

    A row whose logits contain NaN or infinity gets -1 - id in `outcome`. The token drawn for row i has position
    seq_lens[i]; entries with seq_lens 0 are padding, and nothing is written for them.

    `piece` = (first id, scores fp32 [n]): the logits cover only one piece of the vocabulary. Then the best score of
    each row is written to `scores`, and last_token is not written, because the pieces must be compared first.
    `truncated` must then be False.
    """
    n, vocab = logits.shape
    first, scores = piece or (0, workspace.floors)
    if truncated:
        _floors_kernel[(n,)](
            logits, logits.stride(0), rows, settings, top_k, workspace.floors, vocab, BLOCK=8192, num_warps=16
        )
    chunks = triton.cdiv(vocab, CHUNK)
    _draw_kernel[(n, chunks)](
        logits, logits.stride(0), rows, seq_lens, settings, keys, workspace.floors, workspace.scores, workspace.ids,
        workspace.bad, workspace.counters, outcome, last_token, scores, vocab, first, NOISY=noisy, TRUNCATED=truncated,
        PIECE=piece is not None, BLOCK=CHUNK, CHUNKS=chunks, BLOCK_CHUNKS=triton.next_power_of_2(chunks), num_warps=4,
    )
