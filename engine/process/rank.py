"""The process of a rank other than 0. It loads its shard, then runs every plan that rank 0 sends.

reader thread   queues the plans; ends this process when rank 0 has ended, even during a step
main thread     owns the runner and runs the plans
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from engine.core.step import StepPlan
from engine.process.startup import import_torch, log_to_stderr

logger = logging.getLogger("engine")


def main(fd: int) -> int:
    """Serve rank 0 at the other end of socket `fd`; return the exit status. The first message contains the model, the
    configuration and the number of this rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl+C and ends this process
    log_to_stderr()
    connection = Connection(fd)
    model, config, directory, rank, port = pickle.loads(connection.recv_bytes())
    plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, plans), name="reader", daemon=True).start()

    def tell(kind: str, sentence: str = "") -> None:
        with contextlib.suppress(OSError):
            connection.send_bytes(pickle.dumps((kind, sentence)))

    import_torch()
    from engine.build import as_engine_error, choose_parts

    ready = False
    try:
        from torch.distributed import TCPStore

        from engine.worker.rank_runner import make_group
        from engine.worker.runner import Runner

        def meet() -> Any:
            tell("loaded")
            return TCPStore("127.0.0.1", port, config.tensor_parallel_size, is_master=False)

        group = make_group(model, config, rank, meet)
        runner = Runner(model, config, choose_parts(model, config), directory, group=group)
        tell("ready")
        ready = True
        while (plan := plans.get()) is not None:
            runner.launch(plan, {})  # only rank 0 applies grammars
        if runner.loaded.device.type == "cpu":  # on GPUs the group ends with the process
            runner.close()
    except Exception as error:
        logger.exception("rank %d failed", rank)
        sentence = f"rank {rank} of {config.tensor_parallel_size} failed: {type(error).__name__}: {error}"
        tell("failed", sentence if ready else str(as_engine_error(error)))
        return 1
    return 0


def _read(connection: Connection, plans: queue.SimpleQueue[StepPlan | None]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            plans.put(pickle.loads(connection.recv_bytes()))
    os._exit(0)


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(status)
