"""The persistent state of the batch's rows, on the host and on the device."""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.base import PagedGroup, StateMeta
from engine.core.step import StepPlan, TableChanges
from engine.worker.inputs import Layout
from engine.worker.sampler import Sampler
from engine.worker.upload import Uploader


class Batch:
    """The block tables, the last drawn token and the sampling settings of every row. One table holds those of all cache
    groups with pages (engine/groups.py): of group g, row r is g * max_rows + r. On a CPU, host and device share it. On
    a GPU, the device has a copy, which is updated in stream order."""

    def __init__(
        self, max_rows: int, max_model_len: int, block_size: int, vocab_size: int, device: torch.device,
        processed_logprobs: bool = False, windows: tuple[int, ...] = (),
    ) -> None:
        """`windows`: of the cache groups with pages after group 0."""
        self.max_rows = max_rows
        self.windows = windows
        self.block_size = block_size
        self.device = device
        self.upload = Uploader(device)
        rows = (1 + len(windows)) * max_rows
        self.host_table = np.zeros((rows, -(-max_model_len // block_size)), dtype=np.int32)
        self.host_tables = np.split(self.host_table, 1 + len(windows))  # the host's table of each group
        self.table = torch.from_numpy(self.host_table).to(device)
        self.tables = self.table.split(max_rows)  # the table of each group
        self.indices = np.arange(max_rows + 1)
        self.bounds = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.sampler = Sampler(max_rows, vocab_size, device, self.upload, processed_logprobs)

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's changes to the rows."""
        self.join(plan)
        self.change_table(self.changes(plan))

    def join(self, plan: StepPlan) -> None:
        """Set up sampling for the rows that new requests take."""
        for settings in plan.joins:
            self.sampler.set_row(settings)

    def changes(self, plan: StepPlan) -> TableChanges:
        """Returns the plan's changes to the table, those of all groups."""
        own, *others = plan.tables
        if not others:
            return own
        moved = (each._replace(rows=each.rows + np.int32(i * self.max_rows)) for i, each in enumerate(others, 1))
        return TableChanges(*(np.concatenate(parts) for parts in zip(own, *moved, strict=True)))

    def change_host_table(self, changes: TableChanges) -> None:
        """Change only the host's table. The caller must send the changes to the device."""
        self.host_table[changes.rows, changes.columns] = changes.blocks

    def change_table(self, changes: TableChanges) -> None:
        """Change the table, on the host and on the device."""
        if not len(changes.rows):
            return
        self.change_host_table(changes)
        if self.device.type != "cpu":
            rows, columns, blocks = self.upload(np.stack(changes).astype(np.int64))
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
        return Layout(ends, seq_lens, rows, positions, self.slots(rows, positions))

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
        """Returns the cache slots, int64 [T], of the tokens at `positions` [T] in `rows` [T]; for each cache group."""
        blocks, offsets = np.divmod(positions, self.block_size)
        return [table[rows, blocks] * np.int64(self.block_size) + offsets for table in self.host_tables]

    def window_groups(self, plan: StepPlan, slots: list[np.ndarray], columns: int) -> tuple[PagedGroup, ...]:
        """Returns what attention needs of the groups with windows. `slots`: of all groups, as in Layout."""
        column, groups = np.arange(columns), []
        for group, (window, own) in enumerate(zip(self.windows, slots[1:], strict=True), 1):
            table = self.host_tables[group][plan.rows, :columns]
            # The blocks behind the window were released, so the table may name blocks of other requests there.
            table[column < (np.maximum(plan.starts + 1 - window, 0) // self.block_size)[:, None]] = 0
            groups.append(PagedGroup(self.upload(own), self.upload(table)))
        return tuple(groups)

    def states(self, plan: StepPlan) -> StateMeta | None:
        """Returns the segments of the recurrent states; None if the model has no such states."""
        if plan.segments is None or plan.cu_segments is None:
            return None
        rows = list(map(tuple, plan.segments.tolist()))
        return StateMeta(self.upload(plan.segments), self.upload(plan.cu_segments), rows, plan.num_decodes)

    def upload_together(self, *parts: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Returns all parts as int64 tensors, uploaded in one copy."""
        return self.upload(np.concatenate(parts, dtype=np.int64)).split([len(part) for part in parts])
