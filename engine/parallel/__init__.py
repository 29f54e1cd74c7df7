"""Tensor parallelism: one model cut over several ranks, each a process with its own device.

    group.py    the ranks and their collectives, and the time spent in them; a group of one, which does nothing
    shards.py   what of a model each rank holds: its configuration, and its slice of every tensor of a checkpoint
    mailbox.py  memory of one GPU that the others write: what small sums go through (engine/kernels/mailbox.py)
    timing.py   what the collectives of a captured step take
    runner.py   the runner of a rank: engine/worker/runner.py on a shard
    graphs.py   the same with CUDA graphs: engine/worker/cuda_graphs.py on a shard
    ranks.py    rank 0's side of the other processes: starts them, sends them plans, notices when one is gone
    worker.py   the process of every other rank

Rank 0 is the process that owns the engine. Its scheduler is the only one: what it plans goes to all ranks as it is.

Measured on H200s joined by NVLink, Qwen3-8B, contexts of 128 to 288 tokens, milliseconds of a decode step; in brackets
what its collectives take by themselves, and the limit, this rank's weights over the bandwidth of its memory:

    ranks   1 stream       64 streams     256 streams    limit
    1       4.10           5.24           9.74           3.82
    2       2.64 (0.23)    3.66 (0.43)    6.43 (1.08)    1.91
    4       1.79 (0.32)    3.55 (1.04)    5.33 (1.95)    0.96
    4       2.39 (0.70)    3.63 (1.12)    5.60 (2.19)    0.96     with NCCL alone

With 4 ranks and one stream the kernels without any collective take 1.61 ms: the shards are so narrow that launching,
and waiting for the first bytes, is two fifths of it. With many streams it is the sums.
"""
