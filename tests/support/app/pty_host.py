"""The application over the scripted source, for the tests that need a real terminal. `python -m
tests.support.app.pty_host [SECONDS A STEP] [--crash | --hang | --slow-mount]`"""

from __future__ import annotations

import sys
import time

from minitui.chat.sessions import Chats
from minitui.cli.launch import show
from minitui.settings import Settings
from minitui.tui.apps.app import MinituiApp
from minitui.tui.terminal.guard import TerminalGuard
from tests.support.app.fake_client import ByteCodec, FakeSource


class CrashingApp(MinituiApp):
    """Raises as soon as a question is asked."""

    def ask_question(self, text: str) -> None:
        raise RuntimeError("crash on purpose")


class HangingApp(MinituiApp):
    """Its event loop stands still as soon as a question is asked."""

    def ask_question(self, text: str) -> None:
        while True:
            time.sleep(0.05)


class SlowApp(MinituiApp):
    """Takes its time before the guard knows it."""

    def on_mount(self) -> None:
        time.sleep(2.0)
        super().on_mount()


def main() -> int:
    speed = next((float(a) for a in sys.argv[1:] if not a.startswith("-")), 0.002)
    source = FakeSource(lambda prompt: "A block table maps positions to blocks. " * 4, speed=speed)
    guard = TerminalGuard()
    kinds = {"--crash": CrashingApp, "--hang": HangingApp, "--slow-mount": SlowApp}
    kind = next((kinds[a] for a in sys.argv if a in kinds), MinituiApp)
    app = kind(
        source, Chats(source), Settings(), system="You explain inference engines. " * 3, speaker="tutor",
        known_questions=["What is a block table?", "What is a radix tree?", "What is a KV cache?"],
        load_codec=lambda info: ByteCodec(), guard=guard,
    )
    return show(app, guard)


if __name__ == "__main__":
    raise SystemExit(main())
