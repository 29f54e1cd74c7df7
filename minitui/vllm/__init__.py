"""Watches vLLM: a scheduler class for vLLM that records its decisions, and a process that serves the records.

    vllm serve MODEL --scheduler-cls minitui.vllm.RecordingScheduler

    scheduler.py, recorder.py        run inside vLLM: write down each step's decisions
    worker.py                        runs in vLLM's worker process: the time of each step on the device (--worker-cls)
    facts.py, ports.py, pipe.py      run there, too: facts about the engine and its ports; messages without ever waiting
    watcher.py                       runs in a process beside vLLM: the telemetry endpoint, the recording
    translate.py, blocks.py, side_groups.py      turn what vLLM did into minitui's records

Without the class, for a server that cannot be restarted (`minitui inspect --kv-events`):

    zmtp.py, kv_messages.py          read the KV events that a server publishes
    cached_tree.py, kv_source.py     the tree of cached texts; the connection, replays and the server's figures

`minitui chat --connect http://host:8000` (vLLM's address) finds the telemetry; minitui/sources/vllm.py is its client.

This module imports vLLM only when vLLM asks for one of its OPTIONS.
"""

from __future__ import annotations

from typing import Any

OPTIONS = {"RecordingScheduler": "--scheduler-cls", "RecordingWorker": "--worker-cls"}


def __getattr__(name: str) -> Any:
    if name in OPTIONS:
        try:
            if name == "RecordingWorker":
                from minitui.vllm.worker import RecordingWorker

                return RecordingWorker
            from minitui.vllm.scheduler import recording_scheduler

            return recording_scheduler
        except ImportError as error:
            raise ImportError(
                f"minitui was tried with vLLM 0.33.0 and does not fit this version ({error}): start vLLM without "
                f"{OPTIONS[name]}"
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
