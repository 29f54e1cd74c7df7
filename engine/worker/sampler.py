"""Stage 5: draws tokens from logits. Each row has its own settings.

The operations run in the order of SamplingParams: grammar mask and logit bias, min_tokens, penalties, temperature,
top-k, top-p, min-p. Then Gumbel-max draws: the argmax of logits plus noise is exactly a draw from the softmax of the
logits. An operation is skipped if no row of the step asks for it. The host keeps the settings of all rows, so it
decides this without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from engine.core.request import Grammar
from engine.core.step import RowSettings
from engine.kernels.noise import gumbel, host_gumbel, request_keys
from engine.kernels.row_settings import (
    FREQUENCY,
    LOG_MIN_P,
    NOISE,
    NUM_SETTINGS,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_P,
)
from engine.worker.logprobs import Logprobs, pick_logprobs

Upload = Callable[[np.ndarray], torch.Tensor]

MIN_TEMPERATURE = 1e-5  # a lower temperature would make scaled logits overflow; at 1e-5 a draw already equals an argmax
SMALLEST = float(np.finfo(np.float32).tiny)  # lower limit of settings that must not be rounded to 0
IN_PROMPT = 1 << 30  # flag in a token's count: the prompt contains the token; the lower bits: its count in the reply
INT_KEYS = 2  # int32 numbers in a row's noise key
WARM_UP_TOP_K = 20
SMALL_VOCABULARY = 1 << 14  # on a CPU, sorting a row of at most this many logits is faster than topk


class Wants:
    """The operations that a row asks for beyond argmax, as bits (plain integers are faster than an enum here)."""

    NOISE = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    PENALTIES = 16
    BIAS = 32
    MIN_TOKENS = 64
    GRAMMAR = 128
    LOGPROBS = 256
    TRUNCATION = TOP_K | TOP_P | MIN_P


@dataclass(slots=True)
class Drawn:
    """The s draws of a step, on the device."""

    ids: torch.Tensor  # int64 [s], always valid token ids
    bad: torch.Tensor  # bool [s]: the logits were not finite, or the masks allowed no token: the id is meaningless
    logprob_rows: np.ndarray  # indices of the draws that asked for logprobs
    logprobs: Logprobs | None


class Sampler:
    """Keeps the sampling settings of every row of the batch, and draws tokens. Call `set_row` when a request takes a
    row, also after a preemption: `set_row` counts the tokens for penalties again. Call `sample` once per step. A row's
    counts and biases are kept until the next request takes the row."""

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device, upload: Upload, processed_logprobs: bool = False
    ) -> None:
        """`processed_logprobs`: logprobs are those of the distribution that a token is drawn from."""
        self.vocab_size = vocab_size
        self._processed = processed_logprobs
        self._device = device
        self._upload = upload
        self._wants = np.zeros(max_rows, dtype=np.int32)
        self._settings = np.zeros((max_rows, NUM_SETTINGS), dtype=np.float32)
        self._keys = np.zeros((max_rows, INT_KEYS), dtype=np.int32)
        self._top_k = np.zeros(max_rows, dtype=np.int64)
        self._logprobs = np.zeros(max_rows, dtype=np.int64)
        self._min_until = np.zeros(max_rows, dtype=np.int64)  # no stop id is drawn at positions below this
        self._stop_ids: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * max_rows
        self._device_settings = torch.zeros(0)
        self._device_keys = torch.zeros(0)
        self.version = 0  # every change of the settings on the host increases it
        self._sent_version = -1
        self._counts = VocabularyRows(max_rows, vocab_size, torch.int32, device)
        self._bias = VocabularyRows(max_rows, vocab_size, torch.float32, device)

    def set_row(self, new: RowSettings) -> None:
        """Set up a row for the request that takes it."""
        row, params = new.row, new.params
        self._counts.release(row)
        self._bias.release(row)
        wants = 0
        if not params.greedy:
            wants |= Wants.NOISE
            if 0 < params.top_k < self.vocab_size:
                wants |= Wants.TOP_K
            if params.top_p < 1.0:
                wants |= Wants.TOP_P
            if params.min_p > 0.0:
                wants |= Wants.MIN_P
        if params.has_penalties:
            wants |= Wants.PENALTIES
            self._count(new)
        if params.logit_bias:
            wants |= Wants.BIAS
            ids = self._upload(np.fromiter(params.logit_bias.keys(), np.int64))
            self._bias.claim(row)[ids] = self._upload(np.fromiter(params.logit_bias.values(), np.float32))
        # An id outside the vocabulary would address another row of the logits.
        stop_ids = [token for token in sorted(new.stop_ids) if 0 <= token < self.vocab_size]
        if params.min_tokens > 0 and stop_ids:
            wants |= Wants.MIN_TOKENS
            self._min_until[row] = new.prompt_len + params.min_tokens
            self._stop_ids[row] = np.array(stop_ids, dtype=np.int64)
        if new.constrained:
            wants |= Wants.GRAMMAR
        if params.logprobs is not None:
            wants |= Wants.LOGPROBS
            self._logprobs[row] = params.logprobs
        self._wants[row] = wants
        self._top_k[row] = params.top_k if wants & Wants.TOP_K else self.vocab_size
        self._keys[row] = request_keys(new.seed, new.sample_index)
        settings = self._settings[row]
        settings[TEMPERATURE] = 1.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE)
        settings[NOISE] = 0.0 if params.greedy else 1.0
        settings[TOP_P] = max(params.top_p, SMALLEST)
        settings[LOG_MIN_P] = np.log(params.min_p) if wants & Wants.MIN_P else -np.inf
        settings[REPETITION] = max(params.repetition_penalty, SMALLEST)
        settings[PRESENCE] = params.presence_penalty
        settings[FREQUENCY] = params.frequency_penalty
        self.version += 1

    def asked(self, rows: np.ndarray) -> int:
        """Returns the operations that at least one of these rows asks for, as bits of Wants."""
        return int(np.bitwise_or.reduce(self._wants[rows], initial=0))

    def host_settings(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns all rows' settings fp32 [max_rows, NUM_SETTINGS], keys int32 [max_rows, 2], top_k [max_rows]."""
        return self._settings, self._keys, self._top_k

    def sample(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, device_rows: torch.Tensor,
        device_positions: torch.Tensor, grammars: Mapping[int, Grammar] | None = None,
    ) -> Drawn:
        """Draw one token for each of s rows.

        logits           [s, V], may be overwritten
        rows, positions  [s] on the host: rows of the batch, and the positions of the new tokens
        device_rows, device_positions   the same, int64 on the device
        grammars         {draw (0 to s - 1): its grammar}; a draw without a grammar is absent
        """
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        total = logits.sum(-1)
        bad = total - total != 0  # NaN minus NaN and inf minus inf are not 0
        wants = self._wants[rows]
        asked = int(np.bitwise_or.reduce(wants))
        if not asked:
            return Drawn(logits.argmax(-1), bad, wants[:0], None)
        logprob_rows = np.flatnonzero(wants & Wants.LOGPROBS)
        logprob_where = self._upload(logprob_rows) if len(logprob_rows) else None
        listed = None if logprob_where is None or self._processed else logits[logprob_where].log_softmax(-1)
        if grammars:
            self._apply_grammars(logits, grammars)
        if asked & Wants.BIAS:
            self._apply_bias(logits, rows, np.flatnonzero(wants & Wants.BIAS))
        if asked & Wants.MIN_TOKENS:
            early = (wants & Wants.MIN_TOKENS > 0) & (positions < self._min_until[rows])
            self._forbid_stops(logits, rows, np.flatnonzero(early))
        self._refresh()
        settings = self._device_settings.index_select(0, device_rows)
        penalised = np.flatnonzero(wants & Wants.PENALTIES)
        if len(penalised):
            self._apply_penalties(logits, settings, rows, penalised)
        if asked & Wants.NOISE:
            logits.div_(settings[:, TEMPERATURE, None])
            if asked & Wants.TRUNCATION:
                self._truncate(logits, settings, rows, wants)
        if logprob_where is not None and self._processed:
            listed = logits[logprob_where].log_softmax(-1)
        if asked & Wants.NOISE:
            if self._device.type == "cpu":
                noise = host_gumbel(self._keys[rows], positions, self.vocab_size)
            else:
                noise = gumbel(self._device_keys.index_select(0, device_rows), device_positions, self.vocab_size)
            if (wants & Wants.NOISE).all():
                logits.add_(noise)
            else:
                logits.addcmul_(noise, settings[:, NOISE, None])
        ids = logits.argmax(-1)
        if asked & (Wants.GRAMMAR | Wants.MIN_TOKENS):
            bad |= logits.gather(1, ids[:, None])[:, 0] == -torch.inf  # the masks allow no token
        if len(penalised):
            lines = self._upload(self._counts.of(rows[penalised]) * self.vocab_size)
            drawn = ids.index_select(0, self._upload(penalised)) + lines
            self._counts.lines.view(-1).index_add_(0, drawn, torch.ones_like(drawn, dtype=torch.int32))
        logprobs = None
        if listed is not None and logprob_where is not None:
            most = int(self._logprobs[rows[logprob_rows]].max())
            logprobs = pick_logprobs(listed, ids.index_select(0, logprob_where), most)
        return Drawn(ids, bad, logprob_rows, logprobs)

    def warm_up(self, logits: torch.Tensor) -> None:
        """Draw from logits [s, V], which are overwritten, in the usual ways; forget the draws. Loads their kernels."""
        rows = np.arange(min(len(logits), len(self._wants)))
        device_rows = self._upload(rows)
        before = self._wants[rows], self._top_k[rows]
        self._top_k[rows] = min(WARM_UP_TOP_K, self.vocab_size)
        for wants in (0, Wants.NOISE, Wants.NOISE | Wants.TRUNCATION):
            self._wants[rows] = wants
            self.sample(logits[: len(rows)], rows, rows, device_rows, device_rows)
        self._wants[rows], self._top_k[rows] = before

    def logprob_counts(self, rows: np.ndarray) -> list[int]:
        """Returns how many of the most likely tokens each row asked for."""
        return self._logprobs[rows].tolist()

    def _refresh(self) -> None:
        """Copy the settings to the device if they have changed."""
        if self._sent_version != self.version:
            self._device_settings, self._device_keys = self._upload(self._settings), self._upload(self._keys)
            self._sent_version = self.version

    def _count(self, new: RowSettings) -> None:
        line = self._counts.claim(new.row)
        prompt, reply = np.split(new.counted_ids, [new.prompt_len])
        line[self._upload(prompt)] = IN_PROMPT
        counted = self._upload(reply)
        line.index_add_(0, counted, torch.ones_like(counted, dtype=torch.int32))

    def _apply_grammars(self, logits: torch.Tensor, grammars: Mapping[int, Grammar]) -> None:
        masks = np.stack([grammar.mask() for grammar in grammars.values()])  # int32 [g, ceil(V / 32)]
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = (self._upload(masks)[:, :, None] >> bits & 1).flatten(1)[:, : self.vocab_size]
        where = self._upload(np.array(list(grammars), dtype=np.int64))
        logits[where] = logits.index_select(0, where).masked_fill_(allowed == 0, -torch.inf)

    def _apply_bias(self, logits: torch.Tensor, rows: np.ndarray, entries: np.ndarray) -> None:
        lines = self._bias.lines.index_select(0, self._upload(self._bias.of(rows[entries])))
        logits.index_add_(0, self._upload(entries), lines.to(logits.dtype))

    def _forbid_stops(self, logits: torch.Tensor, rows: np.ndarray, entries: np.ndarray) -> None:
        if not len(entries):
            return
        stops = [self._stop_ids[row] for row in rows[entries]]
        cells = np.concatenate([i * self.vocab_size + ids for i, ids in zip(entries, stops, strict=True)])
        logits.view(-1).index_fill_(0, self._upload(cells), -torch.inf)

    def _apply_penalties(
        self, logits: torch.Tensor, settings: torch.Tensor, rows: np.ndarray, entries: np.ndarray
    ) -> None:
        where = self._upload(entries)
        counts = self._counts.lines.index_select(0, self._upload(self._counts.of(rows[entries])))
        own, picked = settings.index_select(0, where), logits.index_select(0, where)
        repetition = own[:, REPETITION, None]
        punished = torch.where(picked > 0, picked / repetition, picked * repetition)
        picked = torch.where(counts > 0, punished, picked)
        in_reply = counts & (IN_PROMPT - 1)
        picked -= own[:, FREQUENCY, None] * in_reply
        picked -= own[:, PRESENCE, None] * (in_reply > 0)
        logits.index_copy_(0, where, picked.to(logits.dtype))

    def _truncate(self, scores: torch.Tensor, settings: torch.Tensor, rows: np.ndarray, wants: np.ndarray) -> None:
        """Set the scores that top-k, top-p and min-p exclude to −inf. Scores equal to the last kept score are kept."""
        floor = torch.full_like(scores[:, 0], -torch.inf)
        entries = np.flatnonzero(wants & (Wants.TOP_K | Wants.TOP_P))
        if len(entries):
            where = self._upload(entries)
            kth = self._top_k[rows[entries]]
            picked = scores.index_select(0, where)
            width = int(kth.max())  # the whole vocabulary only if a row has top_p without top_k
            best = descending(picked, width)
            last = best.gather(1, self._upload(kth - 1)[:, None])
            if (wants & Wants.TOP_P).any():
                probabilities = best.masked_fill(best < last, -torch.inf).softmax(-1)
                before = probabilities.cumsum(-1) - probabilities
                kept = (before < settings.index_select(0, where)[:, TOP_P, None]).sum(-1, keepdim=True)
                boundary = best.gather(1, (kept - 1).clamp_min_(0))  # a row of NaN has kept = 0
                last = torch.maximum(last, boundary)
            floor.index_copy_(0, where, last[:, 0])
        if (wants & Wants.MIN_P).any():
            floor = torch.maximum(floor, scores.amax(-1) + settings[:, LOG_MIN_P].to(scores.dtype))
        scores.masked_fill_(scores < floor[:, None], -torch.inf)


def descending(values: torch.Tensor, width: int) -> torch.Tensor:
    """Returns the `width` largest values of each row of values [s, V], largest first. NaN counts as the largest."""
    full = width == values.shape[1]
    if values.device.type == "cpu" and (full or values.shape[1] <= SMALL_VOCABULARY):
        ascending = np.sort(values.numpy(), axis=-1)  # vectorised: 20 times as fast as torch's sort on a CPU
        return torch.from_numpy(ascending[:, : -width - 1 : -1].copy())
    return values.sort(descending=True).values if full else values.topk(width).values


class VocabularyRows:
    """A tensor with a line [vocab_size] for each batch row that needs it. The tensor doubles when no line is free."""

    def __init__(self, max_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.lines = torch.zeros((0, vocab_size), dtype=dtype, device=device)
        self._line_of = np.full(max_rows, -1, dtype=np.int64)
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.lines) - len(self._free)

    def claim(self, row: int) -> torch.Tensor:
        """Returns the line of `row`, filled with zeros, as a view [vocab_size]."""
        line = int(self._line_of[row])
        if line < 0:
            if not self._free:
                old, width = self.lines.shape
                more = max(old, 4)
                self.lines = torch.cat((self.lines, self.lines.new_zeros((more, width))))
                self._free = list(range(old + more - 1, old - 1, -1))
            line = self._line_of[row] = self._free.pop()
        return self.lines[line].zero_()

    def release(self, row: int) -> None:
        if self._line_of[row] >= 0:
            self._free.append(int(self._line_of[row]))
            self._line_of[row] = -1

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Returns the index of each row's line, as int64."""
        return self._line_of[rows]
