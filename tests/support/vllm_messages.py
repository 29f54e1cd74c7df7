"""Messages of vLLM's real scheduler with its own counts, kept in tests/vllm/messages.json.xz for machines without vLLM.

    python -m tests.support.vllm_messages        writes the file again; needs vLLM
"""

from __future__ import annotations

import json
import lzma
import os
import tempfile
from array import array
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "vllm" / "messages.json.xz"
STEPS = 300
EVENTS = {"schedule": 4, "update": 4, "events": 2}  # their place in a message
RUNS: dict[str, dict[str, Any]] = {
    "asynchronous": {"asynchronous": True, "blocks": 90, "rows": 12},
    "synchronous with drafts": {"drafts": 3},
    "priorities": {"policy": "priority", "asynchronous": True},
    "without prefix cache": {"caching": False, "asynchronous": True},
}


def recorded() -> dict[str, list[list[Any]]]:
    """Returns the messages of each run."""
    runs = json.loads(lzma.decompress(FILE.read_bytes()))
    for message in chain.from_iterable(runs.values()):
        for event in message[EVENTS[message[0]]] if message[0] in EVENTS else ():
            if event[0] == "c":
                event[4] = array("i", event[4]).tobytes()  # as marshal reads it
    return runs


class Kept:
    """Stands for the pipe to the watcher, and keeps the messages."""

    lost = False

    def __init__(self, *_: Any) -> None:
        self.messages: list[Any] = []

    def send(self, message: tuple[Any, ...]) -> None:
        self.messages.append(json.loads(json.dumps(message, default=_in_json)))

    def flush(self) -> None:
        pass

    def recover(self) -> bool:
        return False

    asked = recover

    def close(self) -> None:
        pass


def _in_json(value: bytes | array[int]) -> Any:
    return value[:6].hex() if isinstance(value, bytes) else value.tolist()


def _run(options: dict[str, Any]) -> Iterator[Any]:
    import minitui.vllm.recorder as recording
    from tests.support.vllm_driver import Load, make_scheduler

    recording.Pipe = Kept  # type: ignore[assignment, misc]
    with tempfile.TemporaryDirectory() as directory:
        scheduler = make_scheduler(Path(directory), **options)
        load = Load(scheduler, 7, 2 if options.get("asynchronous") else 1, drafts=options.get("drafts", 0))
        for _ in range(3):  # the last block of a prompt is always computed: equal prompts give copies of this block
            load.add([1] * 64, 5)
        load.run(STEPS)
        load.finish()
        messages = scheduler._recorder.pipe.messages
    messages[0][2] |= {"model": "m", "tokenizer": "none"}
    return messages


def main() -> None:
    """Write the file."""
    os.environ["MINITUI_VLLM_CHECK"] = "1"
    text = json.dumps({name: list(_run(options)) for name, options in RUNS.items()}, separators=(",", ":"))
    FILE.write_bytes(lzma.compress(text.encode(), preset=9))
    print(f"{FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
