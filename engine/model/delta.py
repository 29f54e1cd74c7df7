"""The gated delta rule and its causal convolution in plain torch: the specification of engine/kernels/delta.py.

A head keeps a state S [Dk, Dv], a map from keys to values. A token with key k, query q, value v, log decay g <= 0 and
rate b in (0, 1) lets S decay, corrects what S has for k towards v, and reads S:

    S = exp(g) S;   S = S + k (b (v - S^T k))^T;   o = S^T q

Prompts run in chunks (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
and "Gated Delta Networks"). A chunk ends where its segment ends (StateMeta in engine/attention/base.py), so a sequence
that begins at a checkpoint computes the same numbers as one that passed it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.attention.base import StateMeta

CHUNK = 64  # tokens
EPS = 1e-6  # of the norms of queries and keys


def causal_conv(x: torch.Tensor, weight: torch.Tensor, conv: torch.Tensor, states: StateMeta) -> torch.Tensor:
    """Returns silu of each channel's causal convolution: x [T, C] with weight [C, K] -> [T, C]. conv [slots, C, K - 1]:
    the last inputs of a sequence, read from the source of each segment and written to its target. The sum is computed
    in fp32 (float64 for float64) and rounded before silu."""
    taps = weight.shape[1]
    weights = _wide(weight).unbind(1)

    def run(window: torch.Tensor) -> torch.Tensor:
        """[..., K - 1 + L, C] -> [..., L, C]"""
        length = window.shape[-2] - taps + 1
        window = _wide(window)
        total = window[..., :length, :] * weights[0]
        for tap in range(1, taps):
            total = total + window[..., tap : tap + length, :] * weights[tap]
        return F.silu(total.to(x.dtype))

    out, n = torch.zeros_like(x), states.num_decodes
    if n:
        sources, targets = states.segments[:n, 2], states.segments[:n, 3]
        window = torch.cat((conv[sources].transpose(1, 2), x[:n, None]), 1)
        out[:n] = run(window)[:, 0]
        _write(conv, targets, window[:, 1:].transpose(1, 2))
    for first, end, source, target in _rows(states)[n:]:
        window = torch.cat((conv[source].T, x[first:end]))
        out[first:end] = run(window)
        if target:
            conv[target] = window[end - first :].T
    return out


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, recurrent: torch.Tensor,
    states: StateMeta,
) -> torch.Tensor:
    """Returns the output [T, Hv, Dv] of the gated delta rule, in the dtype of v.

    q, k       [T, Hk, Dk], before their normalisation to length 1; each serves Hv / Hk value heads in succession
    v          [T, Hv, Dv]
    g, beta    fp32 [T, Hv] (float64 for float64): log decays and rates
    recurrent  fp32 [slots, Hv, Dk, Dv] (or float64): read from the source of each segment, written to its target
    """
    repeats = v.shape[1] // q.shape[1]
    q, k = (_unit(_wide(each)).repeat_interleave(repeats, 1) for each in (q, k))
    q, values = q * q.shape[-1] ** -0.5, _wide(v)
    out, n = torch.zeros_like(values), states.num_decodes
    if n:
        sources, targets = states.segments[:n, 2], states.segments[:n, 3]
        out[:n], state = _step(q[:n], k[:n], values[:n], g[:n], beta[:n], recurrent[sources])
        _write(recurrent, targets, state)
    for first, end, source, target in _rows(states)[n:]:
        state = recurrent[source]
        for begin in range(first, end, CHUNK):
            part = slice(begin, min(begin + CHUNK, end))
            out[part], state = _chunk(q[part], k[part], values[part], g[part], beta[part], state)
        if target:
            recurrent[target] = state
    return out.to(v.dtype)


def _step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the outputs [n, H, Dv] and the new states [n, H, Dk, Dv] of one token each of n sequences."""
    state = state * g.exp()[..., None, None]
    change = (v - (k[..., None, :] @ state)[..., 0, :]) * beta[..., None]
    state = state + k[..., :, None] * change[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :], state


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the outputs [L, H, Dv] and the new state [H, Dk, Dv] of L successive tokens of one sequence.

    With G the sum of g from the first token to token i, the changes d = b (v - S^T k) solve a triangular system:

        (I + A) d = b (v - exp(G) k S);   A[i, j] = b[i] exp(G[i] - G[j]) k[i].k[j] for j < i
    """
    q, k, v, g, beta = (each.transpose(0, 1) for each in (q, k, v, g, beta))  # [H, L, ...]
    sums = g.cumsum(-1)
    between = (sums[:, :, None] - sums[:, None, :]).tril().exp().tril()  # exp(G[i] - G[j]) for j <= i
    decay, rate = sums.exp()[..., None], beta[..., None]
    system = k @ k.transpose(1, 2) * between * rate  # the solver ignores its diagonal
    wanted = rate * (v - decay * (k @ state))
    change = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = decay * (q @ state) + (q @ k.transpose(1, 2) * between) @ change
    left = (sums[:, -1:] - sums).exp()[..., None]
    return out.transpose(0, 1), decay[:, -1:] * state + (left * k).transpose(1, 2) @ change


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def _rows(states: StateMeta) -> list[tuple[int, int, int, int]]:
    return list(map(tuple, states.segments.tolist())) if states.host is None else states.host


def _write(pool: torch.Tensor, targets: torch.Tensor, values: torch.Tensor) -> None:
    """Write values[i] to pool[targets[i]], unless the target is the null slot."""
    live = targets > 0
    pool[targets[live]] = values[live]
