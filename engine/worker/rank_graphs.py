"""The runners of ranks with GPUs: engine/worker/cuda_graphs.py on a shard, its collectives captured with the rest.

Everything is there already: what a rank does differently is in engine/worker/rank_runner.py, what a graph does in
engine/worker/cuda_graphs.py, and Python's order of base classes puts the one before the other.
"""

from __future__ import annotations

from engine.worker.cuda_graphs import GraphRunner
from engine.worker.rank_runner import FollowRunner, LeadRunner


class LeadGraphRunner(LeadRunner, GraphRunner):  # type: ignore[misc]
    """Rank 0's."""


class FollowGraphRunner(FollowRunner, GraphRunner):
    """The runner of ranks 1 and on."""
