"""The inputs of a step: the tokens of all entries, concatenated, and the draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.base import ForwardMeta
from engine.core.step import StepPlan


class Layout(NamedTuple):
    """The row, position and cache slots of each token of a plan: the T tokens of its n entries, concatenated."""

    ends: np.ndarray  # int64 [n]  entry i has the tokens ends[i - 1] to ends[i] - 1
    seq_lens: np.ndarray  # int32 [n]  number of keys of each entry, including the keys of this step
    rows: np.ndarray  # int32 [T]
    positions: np.ndarray  # [T]
    slots: list[np.ndarray]  # int64 [T] each: in the KV cache of each group with pages


@dataclass(slots=True)
class Draws:
    """The s draws of a step, on the host and on the device. The sampler gets them together with the logits."""

    entries: np.ndarray  # int64 [s]  the entry of each draw; an entry with drafts draws once for each of its tokens
    rows: np.ndarray  # int64 [s]
    positions: np.ndarray  # int64 [s]  the position of the token drawn
    device_rows: torch.Tensor  # int64 [s]
    device_positions: torch.Tensor  # int64 [s]


@dataclass(slots=True)
class Inputs:
    """The input of the model (T tokens), and the draws from the model's output."""

    token_ids: torch.Tensor  # int64 [T]
    meta: ForwardMeta
    draws: Draws
    sampled_hidden: np.ndarray | None  # int64 [s]  index of each draw's hidden state; None: draw i has index i
    prompt_hidden: dict[int, int]  # entry with prompt targets -> index of the first of its q_len hidden states


def drawing_tokens(plan: StepPlan, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (entry of each draw, index of the token whose logits it uses), for a plan with drafts. An entry with
    drafts draws once for each of its tokens."""
    counts = plan.samples.astype(np.int64)
    counts[plan.num_decodes : plan.num_decoding] = plan.q_lens[plan.num_decodes : plan.num_decoding]
    samples, last = np.repeat(np.arange(len(counts)), counts), np.cumsum(counts)
    return samples, np.repeat(ends - last, counts) + np.arange(len(samples))


def logit_rows(
    plan: StepPlan, ends: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None, dict[int, int]]:
    """Returns three values. `last`: for each draw, the index of the token whose logits it uses. 1. The indices of all
    tokens whose logits are needed. 2. The position of each draw's token in value 1; None if value 1 is `last`. 3.
    {entry with prompt targets: the position of its first token in value 1}."""
    firsts = {entry: int(ends[entry] - plan.q_lens[entry]) for entry in plan.prompt_targets}
    if not firsts:
        return last, None, {}
    wanted = np.unique(np.concatenate([last, *(np.arange(first, ends[entry]) for entry, first in firsts.items())]))
    begins = {entry: int(np.searchsorted(wanted, first)) for entry, first in firsts.items()}
    return wanted, np.searchsorted(wanted, last), begins
