"""The log-probabilities of tokens: picked on the device, copied to the host, listed for a reply."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.core.step import TokenLogprobs
from engine.worker.upload import to_host


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of l tokens: before grammar, bias, penalties and temperature change the logits, or after all
    changes and cuts (`logprobs_mode` of EngineConfig)."""

    token: torch.Tensor  # [l]  the log-probability of each token
    rank: torch.Tensor  # int64 [l]  the rank of each token; 1: the most likely token
    top: torch.Tensor  # [l, n]  the log-probabilities of the n most likely tokens at the same position
    top_ids: torch.Tensor  # int64 [l, n]  the ids of these n tokens

    @staticmethod
    def joined(parts: list[Logprobs]) -> Logprobs:
        names = ("token", "rank", "top", "top_ids")
        return Logprobs(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def fetched(self) -> Logprobs:
        """Start copies to pinned memory on the host, and return them."""
        return Logprobs(*map(to_host, (self.token, self.rank, self.top, self.top_ids)))

    def listed(self, tokens: list[int], counts: list[int]) -> list[TokenLogprobs]:
        """Returns a TokenLogprobs for each of `tokens`; entry i lists the counts[i] most likely tokens. Call this only
        after the copies of `fetched` have arrived on the host."""
        own, rank, top, ids = self.token.tolist(), self.rank.tolist(), self.top.tolist(), self.top_ids.tolist()
        return [
            TokenLogprobs(token, own[i], rank[i], list(zip(ids[i][:n], top[i][:n], strict=True)))
            for i, (token, n) in enumerate(zip(tokens, counts, strict=True))
        ]


def pick_logprobs(logprobs: torch.Tensor, tokens: torch.Tensor, top: int) -> Logprobs:
    """Returns the Logprobs of `tokens` (int64 [l]) from logprobs [l, V], with the `top` most likely tokens."""
    own = logprobs.gather(1, tokens[:, None])
    rank = (logprobs > own).sum(-1) + 1
    best = logprobs.topk(min(top, logprobs.shape[-1]), -1)
    return Logprobs(own[:, 0], rank, best.values, best.indices)
