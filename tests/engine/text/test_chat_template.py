"""A chat template is a program from elsewhere: limits of time, memory and output hold whatever it does."""

from __future__ import annotations

import array
import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from engine.errors import CheckpointError, InvalidRequest
from engine.info import EngineInfo
from engine.text import chat_template, limited_process
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from minitui import tutor
from minitui.chat.sessions import Chats
from tests.support.waiting import until, wait_until

LOOP = "{% for a in range(99999) %}"
ENDLESS = LOOP * 3 + "{% endfor %}" * 3
PATIENCE = 90.0  # seconds, for a busy machine
VALUES = {"messages": [{"role": "user", "content": "x"}], "n": 10**9}

# What each would take without the limits: hours, or more memory than there is.
ATTACKS = {
    "a loop without output": ENDLESS,
    "a loop in a macro, whose output is gathered": (
        "{% macro f() %}" + LOOP * 3 + "xxxxxxxx" + "{% endfor %}" * 3 + "{% endmacro %}{{ f() }}"
    ),
    "macros that call each other without end": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a constant, folded at compilation": "{{ 'a' * 10**10 }}",
    "a text": "{{ ('a' * n * 10) | length }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "join": "{{ range(99999) | join('a' * 10**6) }}",
    "tojson": "{{ ([[0] * 1000] * 1000) | tojson(indent=10**6) }}",
    "one call of C that counts": "{{ (3 ** n) % 7 }}",
    "doubling": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "an error's message": "{{ raise_exception('x' * 10 * n) }}",
    "17 MiB": "{{ 'a' * n17 }}",
}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second instead of five."""
    monkeypatch.setattr(chat_template, "SECONDS", 0.5)


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for this: what ends, was stopped."""
    monkeypatch.setattr(chat_template, "SECONDS", 10 * PATIENCE)


@pytest.fixture
def made() -> Iterator[Callable[[str], ChatTemplate]]:
    templates: list[ChatTemplate] = []

    def make(source: str) -> ChatTemplate:
        templates.append(ChatTemplate(source, Path("model")))
        return templates[-1]

    yield make
    for template in templates:
        template.stop()


def renderers(of: int) -> list[psutil.Process]:
    """The processes of a process in which templates run."""
    found = []
    for child in psutil.Process(of).children(recursive=True):
        try:
            if "template_process.py" in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def computing(of: int) -> bool:
    """Is a template being rendered, after the start of its process?"""
    try:
        return any(child.cpu_times().user > 0.5 for child in renderers(of))
    except psutil.NoSuchProcess:
        return False


# ---- limits


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_template_takes_more_than_its_limits(attack: str, made: Any, short: None) -> None:
    template = made(ATTACKS[attack])
    before = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"a template may take 0\.5 seconds and 1,024 MiB of memory") as caught:
        template.render(VALUES | {"n17": 17 << 20})
    assert time.monotonic() - before < PATIENCE
    assert caught.value.field == "messages"


def test_the_memory_of_one_rendering_is_not_kept_for_the_next(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 10 * PATIENCE)  # a busy machine takes seconds to supply the memory
    template = made("{{ ('a' * n) | length }}")
    for _ in range(4):
        assert template.render({"n": 600 << 20}) == str(600 << 20)
    with pytest.raises(InvalidRequest, match="needs more than 1,024 MiB of memory"):
        template.render({"n": 2 << 30})
    assert template.render({"n": 5}) == "5"


def test_values_that_json_cannot_say_or_that_are_too_many_are_refused(made: Any) -> None:
    template = made("{{ messages }}")
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    for value in (object(), nested, {(1, 2): 3}):
        with pytest.raises(InvalidRequest, match="takes JSON values only"):
            template.render({"messages": value})
    with pytest.raises(InvalidRequest, match="have 64 MiB; a chat template takes at most 64 MiB"):
        template.render({"messages": "x" * (64 << 20)})


def test_a_rendering_is_what_the_template_says_to_the_last_character(made: Any) -> None:
    text = "a\r\nb\0é\u2028𝔘\ud800\ue000</s>"
    assert made("{{ messages[0].content }}\n").render({"messages": [{"content": text}]}) == text
    assert made("{{ a is none }}{{ b }}{{ c }}").render({"a": None, "b": True, "c": 1.5}) == "TrueTrue1.5"


# ---- what a template may be


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "not " * 100_000 + "1 }}",
        "{% debug %}",
        "{{",
    ],
    ids=["parentheses", "blocks", "loops", "operators", "an unknown tag", "an open tag"],
)
def test_a_template_that_cannot_be_compiled_is_named(source: str, made: Any) -> None:
    with pytest.raises(CheckpointError, match=r"the chat template of model is broken: ."):
        made(source).render(VALUES)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{{ range(10**9) | list }}", "OverflowError: Range too big. The sandbox blocks ranges larger than"),
        ("{{ range(0, 10, 0) }}", "ValueError: range"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ strftime_now(5) }}", "TypeError: .*each needs a role and a content"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
def test_any_exception_of_a_template_is_a_sentence(source: str, sentence: str, made: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"cannot render these messages .*{sentence}"):
        made(source).render(VALUES)


@pytest.mark.parametrize(
    "source",
    [
        "''.__class__.__mro__",
        "tojson.__globals__.keys()",
        "lipsum.__globals__['os']",
        "namespace.__init__.__globals__",
        "messages.append(1)",
        "(''|attr('__class__')).__mro__",
        "'{0.__class__.__mro__}'.format(1) or x.y",
        "'{x.__class__}'.format_map({'x': 1}) or x.y",
        "(messages | map(attribute='__class__') | first).__mro__",
    ],
)
def test_a_template_cannot_reach_python(source: str, made: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"template refuses these messages: .*(unsafe|undefined|no attribute)"):
        made("{{ " + source + " }}").render(VALUES)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"chat_template": 5}, "is int; it must be a string"),
        ({"chat_template": {"default": ["x"]}}, "is list; it must be a string"),
        ({"chat_template": [{"name": "default", "template": 7}]}, "is int; it must be a string"),
        ({"chat_template": "x" * ((1 << 20) + 1)}, "is 1,048,577 characters; it must be a string of at most 1,048,576"),
        ({"bos_token": {"text": "x"}}, "has bos_token = .*: it must be a string"),
        ({"bos_token": [1]}, "has bos_token = .*: it must be a string"),
    ],
    ids=["a number", "a list", "a list of numbers", "too long", "a token without content", "a list as a token"],
)
def test_a_template_of_a_wrong_type_or_size_is_named(config: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    shutil.copy(tutor.model_dir() / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=sentence):
        Tokenizer(tmp_path)


def test_a_template_file_that_is_too_long_or_no_text_is_named(tmp_path: Path) -> None:
    shutil.copy(tutor.model_dir() / "tokenizer.json", tmp_path)
    with (tmp_path / "chat_template.jinja").open("wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(CheckpointError, match=r"jinja has 104,857,600 bytes, and the limit is 1,048,576"):
        Tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read as UTF-8 .* download it again"):
        Tokenizer(tmp_path)


def test_a_chat_longer_than_the_context_is_refused_before_all_of_it_is_encoded(monkeypatch: Any) -> None:
    tokenizer = Tokenizer(tutor.model_dir())
    tokenizer.chat_template, tokenizer.context = "{{ 'hello world ' * 10**6 }}", 1000
    encoded = []
    fake = lambda _, text, add: encoded.append(len(text)) or [0] * len(text)  # noqa: E731
    monkeypatch.setattr("engine.text.tokenizer.encode", fake)
    for content in ("x", "<|im_end|>"):
        with pytest.raises(InvalidRequest, match="more than 1,000 tokens, the size of the context: shorten it"):
            tokenizer.apply_chat_template([{"role": "user", "content": content}])
    assert encoded == [8000, 8000]


def test_a_chat_that_fits_the_context_is_never_refused_for_its_length() -> None:
    tokenizer = Tokenizer(tutor.model_dir())
    chat = [{"role": "user", "content": " ".join(str(i) for i in range(20_000))}]
    ids = tokenizer.apply_chat_template(chat)
    tokenizer.context = len(ids)
    assert tokenizer.apply_chat_template(chat) == ids


# ---- one process, which nobody waits for


def test_a_process_serves_all_renderings_and_takes_over_after_one_that_died(made: Any) -> None:
    template = made("{{ messages[0].content }}")
    before = {process.pid for process in renderers(os.getpid())}
    assert template.render(VALUES) == "x"
    [process] = [one for one in renderers(os.getpid()) if one.pid not in before]
    assert [template.render(VALUES) for _ in range(3)] == ["x"] * 3
    assert process.is_running()
    process.kill()
    wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert template.render(VALUES) == "x"


def test_renderings_of_many_threads_do_not_mix(made: Any) -> None:
    template, wrong = made("{{ messages }}"), []

    def render(number: int) -> None:
        for i in range(20):
            text = f"{number} {i} " * (1 + 50 * number)
            if template.render({"messages": text}) != text:
                wrong.append(text)

    threads = [threading.Thread(target=render, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not wrong


def test_a_rendering_can_be_stopped_and_so_can_those_that_wait_for_it(made: Any, long: None) -> None:
    template, errors = made("{% if messages %}" + ENDLESS + "{% endif %}ok"), []

    def render() -> None:
        try:
            template.render(VALUES)
        except InvalidRequest as error:
            errors.append(str(error))

    threads = [threading.Thread(target=render) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: computing(os.getpid()))
    template.stop()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(errors) == 3
    assert all("chat template was stopped" in error for error in errors)
    assert template.render({"messages": []}) == "ok"


def test_a_template_that_is_forgotten_leaves_no_process() -> None:
    before = {process.pid for process in renderers(os.getpid())}
    template = ChatTemplate("ok", Path("model"))
    assert template.render({}) == "ok"
    [process] = [one for one in renderers(os.getpid()) if one.pid not in before]
    del template
    wait_until(lambda: not process.is_running())


@pytest.mark.skipif(sys.platform != "linux", reason="a socket of other systems does not hold the whole answer")
def test_a_long_answer_that_arrived_while_this_process_was_paused_counts(tmp_path: Path, monkeypatch: Any) -> None:
    """As with ctrl+z: when it runs again, the deadline has passed, and the answer, of three pieces, is there."""
    script, long = tmp_path / "echo.py", bytes(2 * limited_process.PIECE + 1000)
    script.write_text(
        "from engine.text.limited_child import TEXT, serve\n"
        "serve(lambda setup: lambda request, longest: (TEXT, request))\n"
    )
    process = limited_process.LimitedProcess(
        str(script), "echoes", lambda: b"setup", limited_process.Limits(60, 1 << 32, len(long))
    )
    assert process.ask(b"short") == (b"=", b"short")
    unread, times = array.array("i", [0]), [0.0]

    def arrived() -> bool:
        fcntl.ioctl(process._process._socket, termios.FIONREAD, unread)
        return unread[0] > len(long)

    def monotonic() -> float:
        """The first call, which sets the deadline, returns when the answer is there; the later ones, far too late."""
        if times:
            wait_until(arrived)
        return times.pop() if times else 1e9

    with monkeypatch.context() as paused:
        paused.setattr(limited_process, "time", SimpleNamespace(monotonic=monotonic))
        assert process.ask(long) == (b"=", long)
    process.end()


def test_a_slow_answer_is_left_to_the_next_request(tmp_path: Path, monkeypatch: Any) -> None:
    """With patience, the process is asked at once or not at all; what it has begun is not done twice."""
    monkeypatch.setattr(limited_process, "RESTS_S", 0.0)
    script, go = tmp_path / "slow.py", tmp_path / "go"
    script.write_text(
        "import itertools, pathlib, time\nfrom engine.text.limited_child import TEXT, serve\n"
        "def answer(request, longest):\n"
        f"    while request[:4] == b'slow' and not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        "    return TEXT, b'%d %b' % (next(number), request)\n"
        "number = itertools.count(1)\n"
        "serve(lambda setup: answer)\n"
    )
    process = limited_process.LimitedProcess(
        str(script), "answers", lambda: b"setup", limited_process.Limits(60, 1 << 32, 100)
    )

    def at_once(request: bytes, seconds: float = 0.01) -> bytes | None:
        token = limited_process.patience.set(seconds)
        try:
            return process.ask(request)[1]
        except limited_process.TakesLonger:
            return None
        finally:
            limited_process.patience.reset(token)

    assert at_once(b"early") is None, "it does not run yet"
    assert process.ask(b"first")[1] == b"1 first" and at_once(b"quick", 60) == b"2 quick"
    assert at_once(b"slow") is None and at_once(b"meanwhile", 60) is None
    go.touch()
    assert process.ask(b"slow")[1] == b"3 slow" and at_once(b"again", 60) == b"4 again"
    go.unlink()
    assert at_once(b"slower") is None
    go.touch()
    assert process.ask(b"other")[1] == b"6 other"
    monkeypatch.setattr(limited_process, "RESTS_S", 1000.0)
    go.unlink()
    assert at_once(b"slowest") is None
    go.touch()
    assert process.ask(b"slowest")[1] == b"7 slowest" and at_once(b"quick", 60) is None, "it rests"
    process.end()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "rendering"])
def test_the_process_ends_with_its_parent_however_that_ends(busy: bool) -> None:
    source = ENDLESS if busy else "ok"
    code = (
        "import sys, time; from pathlib import Path; from engine.text import chat_template as c\n"
        f"c.SECONDS = {10 * PATIENCE}; t = c.ChatTemplate({source!r}, Path('m')); t.start()\n"
        "import threading; threading.Thread(target=t.render, args=({},), daemon=True).start(); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        [process] = wait_until(lambda: renderers(parent.pid))
        if busy:
            wait_until(lambda: computing(parent.pid) or not process.is_running())
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


# ---- in the product


def hostile_model(directory: Path, template: str) -> Path:
    shutil.copytree(tutor.model_dir(), directory, dirs_exist_ok=True)
    (directory / "chat_template.jinja").write_text(template)
    return directory


async def test_the_event_loop_goes_on_while_a_template_is_rendered_and_quitting_ends_it(
    tmp_path: Path, long: None
) -> None:
    async def ready() -> None:
        return None

    source: Any = SimpleNamespace(info=EngineInfo(), ready=ready)
    chats = Chats(source)
    chats.use(Tokenizer(hostile_model(tmp_path, ENDLESS)))
    session = chats.new("")
    chats.send(session, "hello")
    await until(lambda: computing(os.getpid()))
    assert session.busy
    chats.cancel_all()
    assert session.state == "cancelled"
    await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), PATIENCE)


MAIN = "from engine.text import chat_template as c; c.SECONDS = {}; from minitui.cli.main import main; main()"


def test_ctrl_c_ends_ask_while_its_template_is_rendered(tmp_path: Path) -> None:
    model = hostile_model(tmp_path, ENDLESS)
    command = [sys.executable, "-c", MAIN.format(10 * PATIENCE), "ask", "hello", "--model", str(model)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job of a shell ignores ctrl+c
    )
    try:
        wait_until(lambda: process.poll() is not None or computing(process.pid))
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, told
    assert "Traceback" not in told
