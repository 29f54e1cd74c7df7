"""Counter-based sampling noise: Gumbel variates that are a pure function of (seed, sample index, position, token id).

There is no generator state, so a draw does not depend on other requests in the batch, on chunks, preemptions or the
cache. All arithmetic is on 32-bit words that wrap around, so numpy, torch and Triton compute the same words.

When a request is added, its seed and sample index become two 32-bit keys. At each position, the keys give the start and
the odd increment of a Weyl sequence over the token ids. `mix` scrambles this sequence. This is SplitMix with a separate
increment ("gamma") for each draw.
"""

from __future__ import annotations

import numpy as np
import torch

WORD = 0xFFFFFFFF
# MIX_1 and MIX_2 are from "lowbias32" (Wellons, hash prospector), GOLDEN from the golden ratio, MURMUR from murmur3.
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B
GOLDEN, MURMUR = 0x9E3779B1, 0x85EBCA6B


def mix_int(x: int) -> int:
    """Returns the lowest 32 bits of a Python integer, scrambled by the hash finaliser lowbias32."""
    x &= WORD
    x = ((x ^ (x >> 16)) * MIX_1) & WORD
    x = ((x ^ (x >> 15)) * MIX_2) & WORD
    return x ^ (x >> 16)


def request_keys(seed: int, sample_index: int) -> tuple[int, int]:
    """Returns the two signed 32-bit keys of a request, from all 64 bits of its seed and from its sample index."""
    low = mix_int((seed & WORD) + mix_int(sample_index * GOLDEN))
    high = mix_int(((seed >> 32) & WORD) ^ low)
    return signed(mix_int(low + high * MURMUR)), signed(mix_int(high ^ GOLDEN))


def signed(word: int) -> int:
    """Returns a 32-bit word as a signed integer."""
    return word - (1 << 32) if word >= 1 << 31 else word


def mix(x: torch.Tensor) -> torch.Tensor:
    """Scrambles an int32 tensor in place, as `mix_int` does; returns it. A right shift in torch repeats the sign bit;
    the masks clear these copies."""
    x ^= (x >> 16) & 0xFFFF
    x *= signed(MIX_1)
    x ^= (x >> 15) & 0x1FFFF
    x *= signed(MIX_2)
    x ^= (x >> 16) & 0xFFFF
    return x


def hashes(keys: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns random int32 [s, vocab_size] for draws at `positions` [s] of requests with `keys` int32 [s, 2]."""
    start = mix(keys[:, 0] + positions.to(torch.int32) * signed(GOLDEN))
    step = ((start * signed(MURMUR)) ^ keys[:, 1]) | 1
    ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    return mix(ids * step[:, None] + start[:, None])


def gumbel(keys: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns standard Gumbel noise, fp32 [s, vocab_size], all finite: −log(E), with E = −log(1 − u) exponential. u has
    31 bits. Large noise decides which token is drawn. Large noise comes from u near 0, and fp32 distinguishes all
    values of u near 0."""
    return _gumbel((hashes(keys, positions, vocab_size) & 0x7FFFFFFF).to(torch.float32))


def host_gumbel(keys: np.ndarray, positions: np.ndarray, vocab_size: int) -> torch.Tensor:
    """Returns the noise of `gumbel` on a CPU, from arrays. numpy takes a third of torch's time, because it has unsigned
    words and cheaper calls."""
    start = _host_mix(keys[:, 0].view(np.uint32) + positions.astype(np.uint32) * np.uint32(GOLDEN))
    step = ((start * np.uint32(MURMUR)) ^ keys[:, 1].view(np.uint32)) | np.uint32(1)
    words = _host_mix(np.arange(vocab_size, dtype=np.uint32) * step[:, None] + start[:, None])
    words &= np.uint32(0x7FFFFFFF)
    return _gumbel(torch.from_numpy(words.view(np.int32).astype(np.float32)))


def _host_mix(x: np.ndarray) -> np.ndarray:
    """Scrambles a uint32 array in place, as `mix` does; returns it."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(MIX_1)
    x ^= x >> np.uint32(15)
    x *= np.uint32(MIX_2)
    x ^= x >> np.uint32(16)
    return x


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Returns Gumbel noise from 31 random bits per value, given as fp32; overwrites `bits`."""
    bits.add_(0.5).mul_(-(2.0**-31)).clamp_min_(-1 + 2.0**-24)
    return bits.log1p_().neg_().log_().neg_()
