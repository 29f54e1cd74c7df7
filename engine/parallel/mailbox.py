"""Memory of one rank that the others can write: what the kernels of engine/kernels/mailbox.py exchange words through.

Between GPUs it is symmetric memory of torch: every rank allocates as much, and maps what the others have allocated into
its own address space, over NVLink or PCIe. Multicast, by which a switch could add up, is left alone: it is not to be
had everywhere.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any

import torch

LANES = 256  # at most as many rows are summed at once
SMALLEST_WORDS = 512


@dataclass(slots=True)
class Mailbox:
    """See engine.kernels.mailbox.Box. `memory` keeps alive what the addresses point to."""

    rank: int
    size: int
    lanes: int
    words: int
    addresses: torch.Tensor
    calls: torch.Tensor
    abort: torch.Tensor
    memory: Any

    def holds(self, x: torch.Tensor) -> bool:
        """Can x [rows, hidden] be summed through it?"""
        rows, hidden = x.shape
        return x.dtype.itemsize == 2 and rows <= self.lanes and hidden % 2 == 0 and hidden // 2 <= self.words


def cells(lanes: int, size: int, words: int) -> int:
    """64-bit words in a mailbox."""
    return 2 * lanes * size * words


def connect(store: Any, rank: int, size: int, hidden: int, device: torch.device, lanes: int = LANES) -> Mailbox:
    """Every rank of the default group calls it, with a torch.distributed store that is theirs alone. Raises
    ImportError, AttributeError, TypeError or RuntimeError, whatever stands against symmetric memory here.

    Nobody may use the mailbox until all ranks are known to have returned.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed as dist
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

    if rank == 0:
        store.set("mailboxes", secrets.token_hex(8))
    # A name of its own: torch remembers groups by their names as long as a process lives.
    name: Any = f"mailboxes {store.get('mailboxes').decode()}"
    _register_process_group(name, dist.distributed_c10d._get_default_group())
    _SymmetricMemory.set_group_info(name, rank, size, store)
    words = max(SMALLEST_WORDS, hidden // 2)
    count = cells(lanes, size, words)
    memory = _SymmetricMemory.empty_strided_p2p((count,), (1,), torch.int64, device)
    handle = _SymmetricMemory.rendezvous(memory, name)
    addresses = [handle.get_buffer(peer, (count,), torch.int64).data_ptr() for peer in range(size)]
    if addresses[rank] != memory.data_ptr():
        raise RuntimeError("symmetric memory is not where torch says that it is")
    memory.zero_()  # no call has this number
    torch.cuda.synchronize(device)
    return Mailbox(
        rank, size, lanes, words, torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.zeros(lanes, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32).pin_memory(),
        (memory, handle),
    )  # fmt: skip
