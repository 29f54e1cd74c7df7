"""What a step needs on the device: its tokens laid end to end, and which of them draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.base import ForwardMeta
from engine.core.step import StepPlan


class Layout(NamedTuple):
    """Where the T tokens of a plan's n entries, laid end to end, belong."""

    ends: np.ndarray  # int64 [n]  entry i has the tokens before ends[i], back to ends[i - 1]
    seq_lens: np.ndarray  # int32 [n]  keys of each, this step's included
    rows: np.ndarray  # int32 [T]
    positions: np.ndarray  # [T]
    slots: np.ndarray  # int64 [T]  in the KV cache


@dataclass(slots=True)
class Inputs:
    """A step's plan on the device, and what of it the host still needs. T tokens, n entries, s of them sample."""

    token_ids: torch.Tensor  # int64 [T]
    meta: ForwardMeta | None  # None where a runner has a way of its own to the logits
    samples: np.ndarray  # int64 [s]  the entries that sample; one with drafts stands here once for each of its tokens
    rows: np.ndarray  # int64 [s]  their rows
    positions: np.ndarray  # int64 [s]  where the token drawn will stand
    device_rows: torch.Tensor  # int64 [s]
    device_positions: torch.Tensor  # int64 [s]
    sampled_hidden: np.ndarray | None  # int64 [s]  which of the hidden states are theirs; None: all, in order
    prompt_hidden: dict[int, int]  # entries that want prompt logprobs -> the first of their q_len hidden states


def drawing_tokens(plan: StepPlan, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of a plan with drafts: the entries that draw, one with drafts once for each of its tokens, and those tokens."""
    counts = plan.samples.astype(np.int64)
    counts[plan.num_decodes : plan.num_decoding] = plan.q_lens[plan.num_decodes : plan.num_decoding]
    samples, last = np.repeat(np.arange(len(counts)), counts), np.cumsum(counts)
    return samples, np.repeat(ends - last, counts) + np.arange(len(samples))


def logit_rows(
    plan: StepPlan, ends: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None, dict[int, int]]:
    """Which tokens' logits are wanted, those `last` that draw among them; which of them draw (None: all); and for each
    entry that wants logprobs of its prompt, where among them its own begin."""
    firsts = {entry: int(ends[entry] - plan.q_lens[entry]) for entry in plan.prompt_targets}
    if not firsts:
        return last, None, {}
    wanted = np.unique(np.concatenate([last, *(np.arange(first, ends[entry]) for entry, first in firsts.items())]))
    begins = {entry: int(np.searchsorted(wanted, first)) for entry, first in firsts.items()}
    return wanted, np.searchsorted(wanted, last), begins
