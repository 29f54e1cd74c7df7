"""Numbers for each token of the vocabulary, for the few rows of the batch that need them."""

from __future__ import annotations

import numpy as np
import torch


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
