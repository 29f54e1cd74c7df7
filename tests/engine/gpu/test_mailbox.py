"""Sums and draws over ranks inside kernels: here four ranks share one GPU, each on a stream of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from engine.kernels.mailbox import elect, sum_ranks  # noqa: E402
from engine.kernels.row_settings import NOISE, NUM_SETTINGS, TEMPERATURE  # noqa: E402
from engine.kernels.sample import SampleWorkspace, draw  # noqa: E402
from engine.parallel.mailbox import Mailbox, cells  # noqa: E402

DEVICE = torch.device("cuda")
SIZE, LANES = 4, 16


class FakeRanks:
    """Four ranks on one GPU."""

    def __init__(self, words: int) -> None:
        memory = [torch.zeros(cells(LANES, SIZE, words), dtype=torch.int64, device=DEVICE) for _ in range(SIZE)]
        addresses = torch.tensor([part.data_ptr() for part in memory], dtype=torch.int64, device=DEVICE)
        self.abort = torch.zeros(1, dtype=torch.int32).pin_memory()
        self.boxes = [
            Mailbox(
                rank, SIZE, LANES, words, addresses, torch.zeros(LANES, dtype=torch.int32, device=DEVICE), self.abort,
                memory,
            )
            for rank in range(SIZE)
        ]
        self._streams = [torch.cuda.Stream() for _ in range(SIZE)]

    def __call__(self, run: Callable[[int, Mailbox], None]) -> None:
        """Run all ranks at once. First run them one by one, without waiting: loading a kernel or allocating memory may
        wait for running kernels, which would wait for this rank."""
        for alone in (1, 0):
            self.abort.fill_(alone)
            for rank, (box, stream) in enumerate(zip(self.boxes, self._streams, strict=True)):
                with torch.cuda.stream(stream):
                    run(rank, box)
                if alone:
                    torch.cuda.synchronize()
            torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "hidden", "parts"), [(1, 4096, 1), (5, 2048, 4), (16, 1536, 2), (3, 200, 1)])
def test_sums_over_ranks_with_and_without_a_norm(dtype: torch.dtype, tokens: int, hidden: int, parts: int) -> None:
    ranks = FakeRanks(hidden // 2)
    for repeat in range(3):  # both halves of the mailboxes, and the first again
        torch.manual_seed(repeat)
        pieces = torch.randn(SIZE, parts, tokens, hidden, device=DEVICE)
        if parts == 1:
            pieces = pieces.to(dtype).float()
        given = [piece if parts > 1 else piece[0].to(dtype) for piece in pieces]
        total = pieces.double().sum(1).to(dtype).double().sum(0)
        residual, weight = torch.randn(tokens, hidden, device=DEVICE).to(dtype), torch.rand(hidden, device=DEVICE)
        sums: list[torch.Tensor] = [torch.empty(0)] * SIZE
        norms, residuals = list(sums), list(sums)

        def run(rank: int, box: Mailbox) -> None:
            sums[rank] = sum_ranks(given[rank], box) if parts == 1 else torch.zeros(0, device=DEVICE)  # noqa: B023
            residuals[rank] = residual.clone()  # noqa: B023
            norm = residuals[rank], weight.to(dtype), 1e-6  # noqa: B023
            norms[rank] = sum_ranks(given[rank], box, norm)  # noqa: B023

        ranks(run)
        bound = 6e-3 if dtype == torch.bfloat16 else 8e-4
        added = residual.double() + total
        normed = added * torch.rsqrt(added.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.to(dtype).double()
        for rank in range(SIZE):
            assert ((residuals[rank].double() - added).norm() / added.norm()).item() < bound
            assert ((norms[rank].double() - normed).norm() / normed.norm()).item() < bound
            assert torch.equal(norms[rank], norms[0]) and torch.equal(residuals[rank], residuals[0])
            if parts == 1:
                assert ((sums[rank].double() - total).norm() / total.norm()).item() < bound


@pytest.mark.parametrize("noisy", [False, True])
def test_the_best_of_all_pieces_is_the_best_of_the_whole_vocabulary(noisy: bool) -> None:
    rows, vocab = 11, 20_011
    width = -(-vocab // SIZE)
    torch.manual_seed(3)
    logits = torch.randn(rows, vocab, device=DEVICE).bfloat16()
    logits[1, 7] = logits[1, 15_007] = 30.0  # a tie over ranks: the lower id
    logits[2, 9_000] = float("nan")
    settings = torch.zeros(rows, NUM_SETTINGS, device=DEVICE)
    settings[:, TEMPERATURE], settings[:, NOISE] = 0.8, torch.arange(rows, device=DEVICE) % 2
    keys = torch.randint(-(1 << 31), 1 << 31, (rows, 2), device=DEVICE).int()
    top_k = torch.full((rows,), vocab, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(rows, device=DEVICE).int()
    lengths = torch.arange(rows, dtype=torch.int32, device=DEVICE)  # the first is padding

    def outcome() -> list[torch.Tensor]:
        return [torch.full((rows,), -99, dtype=torch.int64, device=DEVICE) for _ in range(2)]

    wanted, wanted_last = outcome()
    whole = SampleWorkspace(rows, vocab, DEVICE)
    draw(logits, order, lengths, settings, top_k, keys, wanted, wanted_last, whole, noisy=noisy, truncated=False)
    found = [outcome() for _ in range(SIZE)]
    pieces = [logits[:, rank * width : (rank + 1) * width].contiguous() for rank in range(SIZE)]
    spaces = [SampleWorkspace(rows, width, DEVICE) for _ in range(SIZE)]
    scores = [torch.zeros(rows, device=DEVICE) for _ in range(SIZE)]

    def run(rank: int, box: Mailbox) -> None:
        ids, last = found[rank]
        draw(
            pieces[rank], order, lengths, settings, top_k, keys, ids, last, spaces[rank], noisy=noisy, truncated=False,
            piece=(rank * width, scores[rank]),
        )
        elect(scores[rank], ids, order, lengths, last, box)

    FakeRanks(512)(run)
    bad = wanted < 0
    assert bad.tolist() == [True, False, True] + [False] * (rows - 3)  # the first is padding, and as it was
    for ids, last in found:
        assert torch.equal(ids[~bad], wanted[~bad]) and ids[0] == -99 and ids[2] < 0
        kept = order[~bad].long()
        assert torch.equal(last[kept], wanted_last[kept]) and last[order[0].long()] == -99


def test_an_abort_ends_the_wait_of_a_rank() -> None:
    ranks = FakeRanks(512)
    x = torch.ones(2, 1024, device=DEVICE, dtype=torch.bfloat16)
    threading.Timer(0.3, lambda: ranks.abort.fill_(1)).start()
    began = time.monotonic()
    sum_ranks(x, ranks.boxes[0])
    torch.cuda.synchronize()
    assert 0.2 < time.monotonic() - began < 5
