"""Memory of one rank that the other ranks can write to, for the kernels of engine/kernels/mailbox.py.

It is torch's symmetric memory: every rank allocates the same number of bytes, and maps the memory of the other ranks
into its own address space, over NVLink or PCIe. Multicast (sums in the NVLink switch) is not used,
because it is not available everywhere.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any

import torch

LANES = 256  # the largest number of rows that one call can sum
SMALLEST_WORDS = 512  # the smallest number of words for each rank in a lane; engine.kernels.mailbox.elect needs it

# Rank 0 of this process has connected a mailbox. torch numbers the exchanges of symmetric memory from the start of the
# process. So a second engine's rank 0 and its new rank processes would wait for different keys of the store, forever.
_connected = False
SECOND = "second engine"  # what rank 0 tells the other ranks in this case


@dataclass(slots=True)
class Mailbox:
    """One rank's mailbox. engine.kernels.mailbox.Box describes the fields; `memory` owns the mailbox's memory."""

    rank: int
    size: int
    lanes: int
    words: int
    addresses: torch.Tensor
    calls: torch.Tensor
    abort: torch.Tensor
    memory: Any

    def holds(self, x: torch.Tensor) -> bool:
        """Returns True if the mailbox can sum x [rows, hidden]."""
        rows, hidden = x.shape
        return x.dtype.itemsize == 2 and rows <= self.lanes and hidden % 2 == 0 and hidden // 2 <= self.words


def cells(lanes: int, size: int, words: int) -> int:
    """Returns the number of 64-bit words in a mailbox."""
    return 2 * lanes * size * words


def connect(store: Any, rank: int, size: int, hidden: int, device: torch.device, lanes: int = LANES) -> Mailbox:
    """Returns this rank's mailbox. Every rank of the default group must call this. No other code may use `store`.

    Raises ImportError, AttributeError, TypeError or RuntimeError if symmetric memory does not work on this machine, and
    RuntimeError on all ranks if rank 0's process has connected a mailbox before.
    No rank may use its mailbox before this function has returned on all ranks.
    """
    global _connected
    if rank == 0:
        store.set("mailboxes", SECOND if _connected else secrets.token_hex(8))
        _connected = True
    token = store.get("mailboxes").decode()
    if token == SECOND:
        raise RuntimeError("an earlier engine of this process has used the mailboxes")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed as dist
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory
    # The name is new each time, because torch remembers group names until the process ends.
    name: Any = f"mailboxes {token}"
    _register_process_group(name, dist.distributed_c10d._get_default_group())
    _SymmetricMemory.set_group_info(name, rank, size, store)
    words = max(SMALLEST_WORDS, hidden // 2)
    count = cells(lanes, size, words)
    memory = _SymmetricMemory.empty_strided_p2p((count,), (1,), torch.int64, device)
    handle = _SymmetricMemory.rendezvous(memory, name)
    addresses = [handle.get_buffer(peer, (count,), torch.int64).data_ptr() for peer in range(size)]
    if addresses[rank] != memory.data_ptr():
        raise RuntimeError("torch reports a wrong address for the symmetric memory")
    memory.zero_()  # each word carries the number of its call; the first call is 1, so zeros belong to no call
    torch.cuda.synchronize(device)
    return Mailbox(
        rank, size, lanes, words, torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.zeros(lanes, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32).pin_memory(),
        (memory, handle),
    )
