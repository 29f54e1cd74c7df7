"""The persistent state of the batch's rows, on the host and on the device."""

from __future__ import annotations

import numpy as np
import torch

from engine.core.step import StepPlan
from engine.worker.inputs import Layout
from engine.worker.sampler import Sampler
from engine.worker.upload import Uploader


class Batch:
    """The block table, the last drawn token and the sampling settings of every row.

    On a CPU, host and device share one block table. On a GPU, the device has a copy, which is updated in stream order.
    """

    def __init__(
        self, max_rows: int, max_model_len: int, block_size: int, vocab_size: int, device: torch.device,
        processed_logprobs: bool = False,
    ) -> None:  # fmt: skip
        self.max_rows = max_rows
        self.block_size = block_size
        self.device = device
        self.upload = Uploader(device)
        self.host_table = np.zeros((max_rows, -(-max_model_len // block_size)), dtype=np.int32)
        self.table = torch.from_numpy(self.host_table).to(device)
        self.indices = np.arange(max_rows + 1)
        self.bounds = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.sampler = Sampler(max_rows, vocab_size, device, self.upload, processed_logprobs)

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's changes to the rows."""
        self.join(plan)
        self.change_table(plan)

    def join(self, plan: StepPlan) -> None:
        """Set up sampling for the rows that new requests take."""
        for settings in plan.joins:
            self.sampler.set_row(settings)

    def change_host_table(self, plan: StepPlan) -> None:
        """Change only the host's block table. The caller must send the changes to the device."""
        self.host_table[plan.table_rows, plan.table_columns] = plan.table_blocks

    def change_table(self, plan: StepPlan) -> None:
        """Change the block table, on the host and on the device."""
        if not len(plan.table_rows):
            return
        self.change_host_table(plan)
        if self.device.type != "cpu":
            changes = np.stack((plan.table_rows, plan.table_columns, plan.table_blocks)).astype(np.int64)
            rows, columns, blocks = self.upload(changes)
            self.table[rows, columns] = blocks.to(torch.int32)

    def layout(self, plan: StepPlan) -> Layout:
        """Returns the plan's Layout. The plan's changes to the host's block table must be made first."""
        n, tokens = len(plan.rows), plan.num_tokens
        seq_lens = plan.starts + plan.q_lens
        if tokens == n:  # one token per entry
            ends, rows, positions = self.indices[1 : n + 1], plan.rows, plan.starts
        else:
            ends = np.cumsum(plan.q_lens)
            rows = np.repeat(plan.rows, plan.q_lens)
            positions = np.arange(tokens) - np.repeat(ends - seq_lens, plan.q_lens)
        blocks, offsets = np.divmod(positions, self.block_size)
        slots = self.host_table[rows, blocks] * np.int64(self.block_size) + offsets
        return Layout(ends, seq_lens, rows, positions, slots)

    def upload_together(self, *parts: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Returns all parts as int64 tensors, uploaded in one copy."""
        return self.upload(np.concatenate(parts, dtype=np.int64)).split([len(part) for part in parts])
