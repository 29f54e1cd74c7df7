"""Counter-based sampling noise: Gumbel variates that are a pure function of (seed, sample index, position, token id).

There is no generator state, so a draw does not depend on its batch, on chunks, preemptions or the cache. All arithmetic
is on 32-bit words that wrap around, and therefore the same in numpy, torch and Triton.

When a request joins, its seed and sample index become two 32-bit keys. At each position the keys give the start and the
(odd) increment of a Weyl sequence over the token ids, which `mix` scrambles: splitmix with a gamma per draw.
"""

from __future__ import annotations

import numpy as np
import torch

WORD = 0xFFFFFFFF
# Constants of "lowbias32" (Wellons, hash prospector) and odd increments from the golden ratio and murmur3.
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B
GOLDEN, MURMUR = 0x9E3779B1, 0x85EBCA6B


def mix_int(x: int) -> int:
    """The finaliser of a hash, for one 32-bit Python integer."""
    x &= WORD
    x = ((x ^ (x >> 16)) * MIX_1) & WORD
    x = ((x ^ (x >> 15)) * MIX_2) & WORD
    return x ^ (x >> 16)


def request_keys(seed: int, sample_index: int) -> tuple[int, int]:
    """Two signed 32-bit keys of a request, from all 64 bits of its seed and from its sample index."""
    low = mix_int((seed & WORD) + mix_int(sample_index * GOLDEN))
    high = mix_int(((seed >> 32) & WORD) ^ low)
    return signed(mix_int(low + high * MURMUR)), signed(mix_int(high ^ GOLDEN))


def signed(word: int) -> int:
    """A 32-bit word as a signed integer."""
    return word - (1 << 32) if word >= 1 << 31 else word


def mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser for an int32 tensor, which it overwrites. Right shifts are arithmetic in torch, hence the masks."""
    x ^= (x >> 16) & 0xFFFF
    x *= signed(MIX_1)
    x ^= (x >> 15) & 0x1FFFF
    x *= signed(MIX_2)
    x ^= (x >> 16) & 0xFFFF
    return x


def hashes(keys: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Random int32 [s, vocab_size] for the draws at `positions` [s] of requests with `keys` int32 [s, 2]."""
    start = mix(keys[:, 0] + positions.to(torch.int32) * signed(GOLDEN))
    step = ((start * signed(MURMUR)) ^ keys[:, 1]) | 1
    ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    return mix(ids * step[:, None] + start[:, None])


def gumbel(keys: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise, fp32 [s, vocab_size], all finite: −log(E) with E = −log(1 − u) exponential.

    u has 31 bits. Small values of u decide the draw, and floating point distinguishes all values near 0.
    """
    return _gumbel((hashes(keys, positions, vocab_size) & 0x7FFFFFFF).to(torch.float32))


def host_gumbel(keys: np.ndarray, positions: np.ndarray, vocab_size: int) -> torch.Tensor:
    """The same on a CPU, from arrays: numpy takes a third of the time, with unsigned words and cheaper calls."""
    start = _host_mix(keys[:, 0].view(np.uint32) + positions.astype(np.uint32) * np.uint32(GOLDEN))
    step = ((start * np.uint32(MURMUR)) ^ keys[:, 1].view(np.uint32)) | np.uint32(1)
    words = _host_mix(np.arange(vocab_size, dtype=np.uint32) * step[:, None] + start[:, None])
    words &= np.uint32(0x7FFFFFFF)
    return _gumbel(torch.from_numpy(words.view(np.int32).astype(np.float32)))


def _host_mix(x: np.ndarray) -> np.ndarray:
    """`mix` for a uint32 array, in place."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(MIX_1)
    x ^= x >> np.uint32(15)
    x *= np.uint32(MIX_2)
    x ^= x >> np.uint32(16)
    return x


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Gumbel noise from 31 random bits each, given as fp32; overwrites them."""
    bits.add_(0.5).mul_(-(2.0**-31)).clamp_min_(-1 + 2.0**-24)
    return bits.log1p_().neg_().log_().neg_()
