"""Text that attacks the terminal, what it must never become, and the application full of it. `python -m
tests.support.app.hostile app` runs the application over a model, a server and a chat file that all speak hostile text;
`python -m tests.support.app.hostile COMMAND …` is the command line with such a model."""

from __future__ import annotations

import base64
import re
import sys
from dataclasses import replace
from typing import Any

from minitui.chat.model_choice import Choice
from minitui.chat.sessions import Chats
from minitui.cli import ask, launch, tail
from minitui.cli import main as cli
from minitui.settings import Settings
from minitui.tui.apps.app import MinituiApp
from minitui.tui.terminal.guard import TerminalGuard
from tests.support.app.fake_client import ByteCodec, FakeSource

EVIL = (
    "E\x1b[31;9mVIL\x1b]0;title\x07\x1b]52;c;T1dORUQ=\x07\x1bPq\x1b\\\x1b[2J\x9b2J\x9d0;title\x9c\x08\x0c\x0e\x7f\x85"
    "\u2028\u202edesrever\u2066[@click=app.quit]button[/][link=http://x.example]here[/link]\ufffe\uffff OWNED"
)
EVIL_FILE = EVIL.replace("/", "-")[:60]  # as a name of a file
SURROGATE = "\ud800 half \udc80"
CODE = f"```{EVIL}\n{EVIL}\n```"
TABLE = f"| {EVIL} |\n|---|\n| {EVIL} |"
MARKDOWN = f"{EVIL}\n\n# {EVIL}\n\n{CODE}\n\n&#8238;{EVIL}&#x2067;\n\n{TABLE}\n\nEND"

# What Textual's driver writes; it erases by neither J nor K.
OURS = re.compile(r"\x1b\[[0-9;:?<>=]*\$?[A-ILMP-Za-z@]|\x1b\]22;[a-z-]+\x07")
COPIED = re.compile(r"\x1b\]52;c;([A-Za-z0-9+/=]*)\x07")
BAD = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u206f\ufffe\uffff]")


def assert_plain(raw: bytes, status: bool = False) -> list[str]:
    """No byte of foreign origin controls the terminal. Returns what was copied. `status`: with a status line."""
    text = raw.decode()  # strictly: a lone surrogate is no UTF-8
    copied = [base64.b64decode(data).decode() for data in COPIED.findall(text)]
    assert "T1dORUQ=" not in COPIED.findall(text), "the clipboard was written by foreign text"
    assert "\x1b[31;9m" not in text, "foreign text set a colour"
    assert "\x1b]8;" not in text, "foreign text made a link"
    rest = OURS.sub("", COPIED.sub("", text))
    if status:
        rest = rest.replace("\x1b[2K", "")
    assert not (found := BAD.search(rest)), ascii(rest[max(0, found.start() - 80) : found.end() + 40])
    for one in copied:
        assert not BAD.search(one) and "\r" not in one, ascii(one)
    return copied


class HostileSource(FakeSource):
    """A model whose name, device, progress and answers are hostile."""

    def __init__(self, **options: Any) -> None:
        super().__init__(lambda prompt: MARKDOWN, **options)

    async def start(self, on_progress: Any) -> None:
        on_progress({"stage": EVIL, "done": 1, "total": 4, "text": EVIL})
        await super().start(on_progress)
        self.info = replace(self.info, model=EVIL, device=EVIL, dtype=EVIL)


async def _dress(app: MinituiApp) -> None:
    """Hostile text through the doors that no key opens."""
    app.session.note = app.story = app.chats.new(EVIL, EVIL).title = EVIL
    app.say(EVIL + SURROGATE, error=True)


def hostile_app(guard: TerminalGuard | None = None) -> MinituiApp:
    """Whatever an application takes from elsewhere is hostile."""
    source = HostileSource(speed=0.001)
    return MinituiApp(
        source, Chats(source), Settings(), system=EVIL, speaker=EVIL, known_questions=[EVIL] * 3,
        load_codec=lambda info: ByteCodec(), guard=guard, script=_dress,
    )


def main() -> None:
    """As the module says. The text of an error is that of MINITUI's model that cannot start."""
    if sys.argv[1:2] == ["app"]:
        guard = TerminalGuard()
        raise SystemExit(launch.show(hostile_app(guard), guard))
    error = EVIL + SURROGATE if "--fail" in sys.argv else ""
    sys.argv = [argument for argument in sys.argv if argument != "--fail"]
    for command in (ask, tail):
        command.choose_model = lambda *_: Choice("", "", EVIL, "model")  # type: ignore[attr-defined]
        command.live_source = lambda *_: HostileSource(start_error=error)  # type: ignore[attr-defined]
    ask.ask_source.__defaults__ = (lambda info: ByteCodec(),)
    tail.tail_live.__defaults__ = (lambda info: ByteCodec(),)
    cli.main()


if __name__ == "__main__":
    main()
