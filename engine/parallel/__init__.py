"""Tensor parallelism: one model split over several ranks, each a process with its own device.

    group.py      the ranks, their collectives, and what these take in a captured step
    shards.py     the part of a model that each rank holds: its configuration, its slice of every tensor
    mailbox.py    memory on each GPU that the other GPUs can write, for small sums (engine/kernels/mailbox.py)
    processes.py  starts and watches the processes of the other ranks, for rank 0

The runners are in engine/worker/rank_runner.py. Each rank other than 0 runs engine/process/rank.py.
Rank 0 is the process that owns the engine. Only rank 0 has a scheduler; all ranks run the same plans.

The table gives the milliseconds of a decode step of Qwen3-8B on H200s connected by NVLink, with contexts of 128 to 288
tokens. In brackets: the time of the step's collectives alone. Limit: the bytes of a rank's weights divided by the
memory bandwidth of its GPU. Last row: all sums use NCCL, none use mailboxes.

    ranks   1 stream       64 streams     256 streams    limit
    1       4.10           5.24           9.74           3.82
    2       2.64 (0.23)    3.66 (0.43)    6.43 (1.08)    1.91
    4       1.79 (0.32)    3.55 (1.04)    5.33 (1.95)    0.96
    4       2.39 (0.70)    3.63 (1.12)    5.60 (2.19)    0.96     NCCL only

With 4 ranks and one stream, the kernels without collectives take 1.61 ms. The shards are so narrow that kernel launches
and the latency of each kernel's first memory reads take two fifths of this time. With 4 ranks and many streams, the
collectives take about a third of a step.
"""
