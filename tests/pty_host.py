"""`python -m tests.pty_host [SECONDS A STEP] [--crash | --hang]`: the application over the scripted source.

For the tests that need a real terminal.
"""

from __future__ import annotations

import sys
import time

from minitui.app import MinituiApp
from minitui.launch import show
from minitui.sessions import Chats
from minitui.settings import Settings
from minitui.terminal import TerminalGuard
from tests.fake_client import ByteCodec, FakeSource


class CrashingApp(MinituiApp):
    """Raises as soon as a question is asked."""

    def ask_question(self, text: str) -> None:
        raise RuntimeError("crash on purpose")


class HangingApp(MinituiApp):
    """Its event loop stands still as soon as a question is asked."""

    def ask_question(self, text: str) -> None:
        while True:
            time.sleep(0.05)


def main() -> int:
    speed = next((float(a) for a in sys.argv[1:] if not a.startswith("-")), 0.002)
    source = FakeSource(lambda prompt: "A block table maps positions to blocks. " * 4, speed=speed)
    guard = TerminalGuard()
    kind = CrashingApp if "--crash" in sys.argv else HangingApp if "--hang" in sys.argv else MinituiApp
    app = kind(
        source, Chats(source), Settings(), system="You explain inference engines. " * 3, speaker="tutor",
        known_questions=["What is a block table?", "What is a radix tree?", "What is a KV cache?"],
        load_codec=lambda info: ByteCodec(), guard=guard,
    )  # fmt: skip
    return show(app, guard)


if __name__ == "__main__":
    raise SystemExit(main())
