"""Tensor parallelism: one model cut over several ranks, each a process with its own device.

    group.py    the ranks and their collectives, and the time spent in them; a group of one, which does nothing
    shards.py   what of a model each rank holds: its configuration, and its slice of every tensor of a checkpoint
    runner.py   the runner of a rank: engine/runner.py on a shard
    ranks.py    rank 0's side of the other processes: starts them, sends them plans, notices when one is gone
    worker.py   the process of every other rank

Rank 0 is the process that owns the engine. Its scheduler is the only one: what it plans goes to all ranks as it is.
"""
