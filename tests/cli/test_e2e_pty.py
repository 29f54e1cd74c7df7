"""The installed `minitui`, the bundled model and the real engine in a real pseudo-terminal, as a newcomer uses them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.app.terminal import Terminal, python
from tests.support.waiting import wait_until

SCRIPT = Path(sys.executable).with_name("minitui")
MINITUI = [str(SCRIPT)] if SCRIPT.exists() else python("-m", "minitui")
FACTS = {"What is the KV cache?": "key and value", "What is prefill?": "prompt"}  # what an answer must contain


def loaded(screen: str) -> bool:
    """The top bar names the type of the weights."""
    return "float32" in screen or "bf16" in screen


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal([*MINITUI, "chat"], tmp_path, columns=120, rows=40)
    yield terminal
    terminal.close()


def left(screen: str) -> str:
    """The chat's part of the screen as one line of text: the rail cut off."""
    return " ".join(" ".join(line[:78] for line in screen.splitlines()).split())


def answered(screen: str) -> bool:
    return "prompt tokens from cache" in left(screen)


def test_a_newcomers_first_minutes_and_how_they_come_back(chat: Terminal, tmp_path: Path):
    assert not loaded(chat.until("welcome")), "the first picture waited for the engine"
    chat.until(loaded)

    # A question, its answer on the screen, its figures under it.
    chat.type("what is the kv c")
    chat.until("tab")
    chat.type("\t")
    chat.until("What is the KV cache?")
    chat.type("\r")
    screen = left(chat.until(answered))
    assert FACTS["What is the KV cache?"] in screen
    assert re.search(r"0 of \d+ prompt tokens from cache", screen)

    # A second chat with the same system prompt: tokens from the cache.
    chat.type("/new\r")
    chat.until("2 new chat")
    chat.type("What is prefill?\r")
    screen = left(chat.until(lambda s: "What is prefill?" in left(s) and answered(s)))
    assert FACTS["What is prefill?"] in screen
    found = re.search(r"(\d+) of (\d+) prompt tokens from cache", screen)
    assert found
    assert int(found[1]) >= 48  # the default system prompt is longer than three blocks

    # The tree shows the sharing.
    chat.type("/inspect\r")
    screen = chat.until(lambda s: "Radix tree" in s and "You are the" in s)
    assert "KV blocks" in screen
    chat.type("1")
    chat.until("2 prefill")

    # One key replays the system prompt.
    chat.until(" KEYS ")
    chat.type("r")
    screen = left(chat.until(lambda s: "replayed:" in left(s) and "computed" in left(s)))
    assert re.search(r"replayed: \d+ of \d+ prompt tokens came from the cache", screen)
    chat.type("q")
    assert chat.ended() == 0
    assert chat.left_on() == []

    # The chats come back: the replay is the last one.
    again = Terminal([*MINITUI, "chat", "--resume"], tmp_path, columns=120, rows=40)
    screen = left(again.until(answered))
    again.close()
    assert "What is prefill?" in screen and FACTS["What is prefill?"] in screen


def engines(chat: Terminal) -> list[int]:
    """Ids of the application's engine processes that run."""
    children = subprocess.run(
        ["ps", "-o", "pid=,stat=,args=", "--ppid", str(chat.process.pid)], capture_output=True, text=True
    )
    told = [line.split(maxsplit=2) for line in children.stdout.splitlines()]
    alive = (line for line in told if not line[1].startswith("Z"))
    return [int(pid) for pid, _, command in alive if "engine.process.server" in command]


def test_a_killed_engine_is_told_at_once_and_starts_again(chat: Terminal):
    chat.until(loaded)
    chat.type("/slow 200\r")
    chat.until("slow motion")
    chat.type("What is the KV cache?\r")
    chat.until(lambda s: "tutor    " in s and "queued…" not in s)
    [engine] = engines(chat)
    os.kill(engine, signal.SIGKILL)
    chat.until("The engine has ended")
    chat.type("r")
    chat.until(lambda s: "The engine has ended" not in s and "starting" not in s)
    chat.type("/retry\r")
    assert "key and value" in left(chat.until(lambda s: "cache · nothing" in left(s) or answered(s)))
    [engine] = engines(chat)
    os.kill(chat.process.pid, signal.SIGTERM)
    assert chat.ended() == 128 + signal.SIGTERM
    wait_until(lambda: not Path(f"/proc/{engine}").exists(), "the engine outlived the application")


def run(*arguments: str, home: Path, **options) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "MINITUI_DATA": str(home),
        "MINITUI_CONFIG": str(home / "settings.toml"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run([*MINITUI, *arguments], capture_output=True, text=True, timeout=120, env=env, **options)


def test_ask_reads_a_pipe_and_speaks_json(tmp_path: Path):
    done = run("ask", "--json", "--max-tokens", "5", home=tmp_path, input="What is prefill?\n")
    answer = json.loads(done.stdout)
    assert answer["metrics"]["output_tokens"] == 5
    assert answer["metrics"]["finish"] == "length"
    assert answer["answer"]
