"""Tensor parallelism: one model split over several ranks, each a process with its own device.

    group.py      the ranks, their collectives, and what these take in a captured step
    shards.py     the part of a model that each rank holds: its configuration, its slice of every tensor
    mailbox.py    memory on each GPU that the other GPUs can write, for small sums (engine/kernels/mailbox.py)
    processes.py  starts and watches the processes of the other ranks, for rank 0

The runners are in engine/worker/rank_runner.py. Each rank other than 0 runs engine/process/rank.py.
Rank 0 is the process that owns the engine. Only rank 0 has a scheduler; all ranks run the same plans.
"""
