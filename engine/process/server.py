"""The engine process: it receives commands, runs steps, and sends text, records and answers.

The engine has its own process: in the process of a user interface, garbage collections would delay steps, and steps
would delay the interface. A socket connects this process to the client. When the client closes the socket, this process
ends.

    reader thread   blocks on the socket and queues commands; ends the process when the client has ended
    main thread     owns the engine: runs commands and steps, and detokenizes (engine/process/loop.py). If a command
                    raises an exception, the client gets a refusal (a sentence) and the engine continues, unless the
                    device is lost
    heartbeat       sends the main thread's task and its duration every second (engine/process/heartbeat.py)
    writer thread   packs and sends messages (engine/process/writer.py)
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from engine.core.host_pauses import watch_stops
from engine.errors import EngineError, loses_device
from engine.process.commands import Command
from engine.process.heartbeat import Heart
from engine.process.loop import EngineLoop, check_config
from engine.process.startup import fewer_collections, hash_triton, import_torch, log_to_stderr, open_gpu
from engine.process.writer import EXIT_GRACE_S, Writer
from engine.worker.cpu.cores import leave_a_core

logger = logging.getLogger("engine")

MAX_WAITING = 4096  # requests in the queue; more requests are refused


def _read(connection: Connection, commands: queue.SimpleQueue[Command]) -> None:
    """Queue the client's commands; runs in the reader thread. When the client has ended, ask the main thread to end,
    then end the process."""
    try:
        while True:
            commands.put(Command.read(connection.recv_bytes()))
    except (EOFError, OSError):
        logger.info("the client has ended")
    except BaseException:  # after a damaged message, the beginning of the next message is unknown
        logger.exception("the client's messages can no longer be read")
    commands.put(Command("close", 0))
    time.sleep(EXIT_GRACE_S)
    os._exit(0)


def main(fd: int) -> int:
    """Serve the client at the other end of socket `fd`; its first command is "start". Returns the exit status."""
    log_to_stderr()
    fewer_collections()
    watch_stops()
    connection = Connection(fd)
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    writer = Writer(connection)
    heart = Heart(writer.send_beat)
    threading.Thread(target=_read, args=(connection, commands), name="reader", daemon=True).start()
    importing = threading.Thread(target=import_torch, name="import torch", daemon=True)
    importing.start()  # while the client gets ready
    threading.Thread(target=hash_triton, name="hash triton", daemon=True).start()
    command: Command | None = commands.get()
    status = 0
    while command is not None and command.kind == "start" and not status:
        heart.begin("load")
        status, command = _serve(command, commands, writer, heart, importing.join)
    writer.close()
    return status


def _serve(
    command: Command, commands: queue.SimpleQueue[Command], writer: Writer, heart: Heart,
    before_torch: Callable[[], None],
) -> tuple[int, Command | None]:
    """Build an engine and serve it; return the exit status and the command that asks for another engine, if any."""
    from engine.build import as_engine_error, build_engine

    try:
        if command.problem is not None:
            raise command.problem
        check_config(*command.arguments)
        threading.Thread(target=open_gpu, args=(command.arguments[0].device,), name="open GPU", daemon=True).start()
        built = build_engine(
            command.arguments[0], on_progress=lambda progress: writer.send("progress", progress),
            on_lost=lambda sentence: _lost(sentence, commands, writer), before_torch=before_torch,
            max_waiting=MAX_WAITING, later=True,
        )
    except Exception as error:
        if not isinstance(error, EngineError):
            logger.exception("the engine could not start")
        writer.send("failed", str(as_engine_error(error)))
        return 1, None
    if built.info.device.startswith("CPU") and command.arguments[0].cpu_threads is None:
        leave_a_core()
    heart.preparing = "capturing CUDA graphs" * bool(built.info.graphs)  # until the loop knows more
    heart.beat()  # before "ready": a client that waits for graphs must not take it for their end
    writer.send("ready", built.info)
    try:
        return 0, EngineLoop(built, commands, writer, heart).run()
    except Exception as error:
        logger.exception("the engine stopped")
        writer.send("died", str(error) if loses_device(error) else f"{type(error).__name__}: {error}")
        return 1, None
    finally:
        built.close()


def _lost(sentence: str, commands: queue.SimpleQueue[Command], writer: Writer) -> None:
    """End the engine, because a rank has ended: ask the main thread to end it. If the main thread hangs, end the
    process."""
    commands.put(Command("lost", 0, (sentence,)))
    time.sleep(EXIT_GRACE_S)
    writer.send("failed", sentence)
    writer.send("died", sentence)
    writer.close()
    os._exit(1)


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(status)  # do not wait for torch's threads
