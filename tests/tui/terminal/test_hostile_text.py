"""Text of others never controls the terminal: hostile text through every door, and the bytes that arrive."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.content import Content
from textual.widgets import Input, Static

import minitui
from engine.params import SamplingParams
from minitui.chat import transcripts
from minitui.chat.conversation import Message, Session
from minitui.chat.store import Store
from minitui.cli import doctor, main, verify
from minitui.trace.recorder import Recorder
from minitui.tui import markdown
from minitui.tui.terminal.line_filters import VisibleLines
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, cells, cut, plain
from minitui.visible import json_text, visible, visible_line
from tests.support.app.chat_file import open_chats
from tests.support.app.driving import lines
from tests.support.app.hostile import EVIL, EVIL_FILE, MARKDOWN, SURROGATE, assert_plain, hostile_app
from tests.support.app.terminal import Terminal, python
from tests.support.records.golden import INFO, make_engine


def test_what_controls_a_terminal_becomes_a_sign_and_all_else_stays():
    assert visible("a\x1b[2Jb\x07\x7f\x9b\u202e\ud800\r\nc\td\r") == "a␛[2Jb␇␡\ufffd\ufffd\ufffd\nc\td␍"
    assert visible_line("a\r\nb\tc") == "a␍␊b␉c"
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    shown = visible(everything)
    shown.encode()  # without surrogates
    for code in (*range(9), *range(11, 32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)):
        assert chr(code) not in shown
    for kept in ("héllo\nwörld\t日本語 👩‍👩‍👧 \u200f\xa0\xad", "שלום", "\n\t"):
        assert visible(kept) == kept


def test_json_is_plain_and_exact():
    text = json_text({"said": EVIL + SURROGATE})
    assert visible_line(text) == text and json.loads(text) == {"said": EVIL + SURROGATE}
    assert "日本" in json_text("日本") and "\\u007f" in json_text("\x7f", ensure_ascii=True)


@pytest.mark.parametrize("text", [EVIL, "\x9b\u202e" * 30, "日\x1b本\x1b語" * 9, "a\nb\tc"])
def test_lines_keep_their_width_whatever_they_hold(text: str):
    line = [Segment("ok "), Segment(text), Segment(" end")]
    shown = VisibleLines().apply(line, Color(0, 0, 0))
    assert visible_line("".join(one.text for one in shown)) == "".join(one.text for one in shown)
    assert sum(cell_len(one.text) for one in shown) == sum(cell_len(one.text) for one in line)
    for width in (1, 7, 40, 400):
        row = plain(Row("x ").add(text).done(width))
        assert cell_len(visible_line(row)) == cells(row) == width
        assert cell_len(visible_line(cut(text, width))) == width


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_streamed_markdown_is_plain_and_loses_nothing(chunk: int):
    text = MARKDOWN.replace("\n", "\r\n") + "\n\npara\x0bgraph\x1c one\x85\n\npara\u2028two\r\n\n* a\x1e\n* b\n\nlast"
    streamed = markdown.Streamed(60)
    for end in range(0, len(text) + chunk, chunk):
        for line in streamed.update(text[:end]):
            for shown, _ in line:
                assert visible_line(shown) == shown
    seen = "".join(shown for line in streamed.update(text) for shown, _ in line)
    whole = "".join(shown for line in streamed.finish(text) for shown, _ in line)
    assert "".join(seen.split()) == "".join(whole.split())


def test_a_tab_in_a_paragraph_takes_one_cell():
    [line] = markdown.render("a\tb `c\td`", 60)
    assert "".join(shown for shown, _ in line) == "a b c d"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINITUI_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("MINITUI_CONFIG", str(tmp_path / "settings.toml"))
    (tmp_path / "data").mkdir()
    return tmp_path


def test_the_application_shows_hostile_text_as_signs(home: Path):
    terminal = Terminal(python("-m", "tests.support.app.hostile", "app"), home)
    terminal.until("Ask, or / for commands")
    terminal.until("no request")
    terminal.type("\x1b[200~pasted \u202ereversed\x1b[201~")
    terminal.until("reversed")
    terminal.type("\r")
    terminal.until("END")
    terminal.until("tok/s")
    terminal.type("/copy\r")
    terminal.until("is copied")
    terminal.type("/copy code\r")
    terminal.until("last code block is copied")
    terminal.type("\x1b")
    terminal.until(" KEYS ")
    for key, title in (("Y", "Copy ·"), ("?", "─ Help ─")):
        terminal.type(key)
        terminal.until(title)
        terminal.type("\x1b")
        terminal.until(lambda screen, title=title: title not in screen)
    terminal.type("2")
    terminal.until("Radix tree")
    terminal.type("q")
    assert terminal.ended() == 0
    answer, code = assert_plain(terminal.raw)
    assert answer == visible(MARKDOWN) and code == visible(EVIL)
    assert "␛[31;9mVIL␛]0;title␇".encode() in terminal.raw
    terminal.close()


async def test_a_widget_that_does_not_care_is_plain_too():
    class Careless(LinePanel):
        def picture(self, view: object, width: int, height: int) -> Picture:
            return Picture([((EVIL[:8], "ink"),), ((EVIL + SURROGATE, "ink"),)])

    app = hostile_app()
    async with app.run_test(size=(200, 30)) as pilot:
        await app.screen.mount(Static(EVIL, markup=False), Careless(id="careless"), Input(EVIL + SURROGATE))
        app.screen.query_one(Careless).styles.height = 4
        app.screen.query_one(Careless).paint(app.view)
        app.screen.query_one(Static).border_title = Content(EVIL)
        app.notify(EVIL + SURROGATE, title=EVIL, markup=False)
        await pilot.pause()
        shown = lines(app)
        assert sum("E␛[31;9m" in line for line in shown) >= 4
        for line in shown:
            assert visible_line(line) == line
        svg = app.export_screenshot()
        assert visible(svg) == svg
        ElementTree.fromstring(svg)


def test_no_text_of_others_is_taken_for_markup():
    """Textual reads a plain str as markup: `[@click=app.quit]` would be a button. Only literals may be plain."""

    def safe(value: ast.expr, call: ast.Call | None = None) -> bool:
        off = call and any(k.arg == "markup" and getattr(k.value, "value", 1) is False for k in call.keywords)
        made = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[0] in ("Content", "text")
        return bool(off) or made or isinstance(value, ast.Constant) or ast.unparse(value) == "PROMPT_HELP"

    wrong = []
    for path in Path(minitui.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func).removeprefix("typer.Option") if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and called.split(".")[-1] in MARKED and node.args:
                found = not safe(node.args[0], node)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).split(".")[-1] in TITLES:
                found = not safe(node.value)
            else:
                continue
            if found:
                wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong


MARKED = ("Static", "Label", "Button", "Option", "notify")
TITLES = ("border_title", "border_subtitle", "tooltip")


@pytest.mark.parametrize(("arguments", "expected"), [("ask x --fail", 1), ("ask x --json", 0), ("tail", 0)])
def test_a_command_with_a_hostile_model_writes_plain_bytes(home: Path, arguments: str, expected: int):
    terminal = Terminal(python("-m", "tests.support.app.hostile", *arguments.split()), home)
    if arguments == "tail":
        terminal.until("Type a question")
        terminal.type("why?\n\x04")
    assert terminal.ended() == expected
    assert_plain(terminal.raw, status=True)
    if "--json" in arguments:
        [line] = re.findall(rb'\{"answer.*\}', terminal.raw)
        assert json.loads(line)["answer"] == MARKDOWN
    else:
        assert "␛[2J".encode() in terminal.raw
    terminal.close()


@pytest.fixture
def command(home: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]):
    """Runs the command line here; the bytes that it wrote."""

    def run(*arguments: str) -> bytes:
        monkeypatch.setattr(sys, "argv", ["minitui", *arguments])
        with pytest.raises(SystemExit):
            main.main()
        told = capfdbinary.readouterr()
        assert_plain(told.out + told.err)
        return told.out + told.err

    return run


Command = Callable[..., bytes]


def test_kept_chats_are_listed_shown_and_exported_as_plain_text(home: Path, command: Command):
    store = Store(home / "data" / "chats.sqlite")
    store.save_chat(Session("abc", EVIL, EVIL))
    store.save_message("abc", 0, Message("user", EVIL))
    store.save_message("abc", 1, Message("assistant", MARKDOWN, "error", EVIL))
    store.close()
    assert "E␛[31;9mVIL".encode() in command("chats")
    assert "E␛[31;9mVIL".encode() in command("chats", "--show", "abc")
    command("chats", "--show", EVIL)
    for name in ("chat.md", "chat.json"):
        command("chats", "--show", "abc", "--export", str(home / f"{EVIL_FILE}{name}"))
        assert_plain((home / f"{EVIL_FILE}{name}").read_bytes())
    chat = json.loads((home / f"{EVIL_FILE}chat.json").read_text())
    assert (chat["title"], chat["messages"][1]["content"]) == (EVIL, MARKDOWN)  # JSON stays exact


@pytest.fixture
def trace(home: Path) -> Path:
    engine = make_engine()
    recorder = Recorder(home / f"{EVIL_FILE}.trace", lambda token: EVIL.encode("utf-8", "replace"))
    recorder.begin(replace(INFO, model=EVIL, device=EVIL), engine.snapshot())
    engine.add_request([5, 6, 7, 8, 9], SamplingParams(max_tokens=6), group="g")
    engine.step()
    recorder.feed(engine.log.drain())
    recorder.name({"g": EVIL})
    recorder.bookmark(EVIL + SURROGATE)
    while engine.has_work:
        engine.step()
    recorder.feed(engine.log.drain())
    recorder.close()
    return recorder.path


def test_a_hostile_trace_is_told_and_exported_as_plain_text(trace: Path, command: Command):
    told = command("tail", str(trace))
    assert "E␛[31;9mVIL".encode() in told
    for line in told.decode().splitlines():
        assert re.match(r" *[0-9.]+ s  |\(", line), f"a line that foreign text began: {line!r}"
    for kind in ("md", "json", "perfetto", "svg"):
        out = trace.with_name(f"out.{kind}")
        command("replay", str(trace), "--export", kind, "--out", str(out))
        assert_plain(out.read_bytes())
        assert "VIL" in out.read_text()
        if kind == "svg":
            ElementTree.parse(out)
        elif kind != "md":
            json.loads(out.read_text())


def test_a_hostile_server_is_told_in_plain_text(command: Command):
    class Hostile(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(500, "evil \x9b2J")
            body = json.dumps({"error": {"message": EVIL}}).encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hostile)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert b"minitui: " in command("tail", f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()


def test_hostile_names_of_files_and_models_are_told_in_plain_text(home: Path, command: Command):
    (home / EVIL_FILE).mkdir()
    (home / EVIL_FILE / "config.json").write_text(json.dumps({"architectures": [EVIL], "model_type": EVIL}))
    assert "␛[31;9m".encode() in command("ask", "x", "--model", str(home / EVIL_FILE))
    assert "␛[31;9m".encode() in command("tail", str(home / "none" / EVIL_FILE))
    os.environ["MINITUI_CONFIG"] = str(home / EVIL_FILE)  # the fixture puts it back
    assert "␛[31;9m".encode() in command("ask", "x")


def test_doctor_and_verify_write_plain_text(home: Path, command: Command, monkeypatch: pytest.MonkeyPatch):
    found = doctor.examine()
    found |= {"models": [EVIL], "files": {EVIL: EVIL}, "minitui": EVIL}
    monkeypatch.setattr(doctor, "examine", lambda card: found)
    assert "␛[31;9m".encode() in command("doctor")
    assert json.loads(command("doctor", "--json"))["models"] == [EVIL]

    def checked(model: str, dtype: str, device: str, as_json: bool) -> int:
        verify._report(EVIL, [verify.Check(EVIL, False, EVIL)], as_json)
        return 1

    monkeypatch.setattr(verify, "run_verify", checked)
    assert "␛[31;9m".encode() in command("verify")
    assert json.loads(command("verify", "--json"))["model"] == EVIL


def test_a_transcript_with_lone_surrogates_can_be_written(home: Path):
    class Chat:
        id, title, system, parent, created, messages = "a", SURROGATE, SURROGATE, None, 0.0, ()

    for name in ("a.md", "a.json"):
        transcripts.write(Chat(), home / name)
        assert_plain((home / name).read_bytes())


def test_a_chat_with_lone_surrogates_can_be_kept(home: Path):
    store = Store(home / "data" / "chats.sqlite")
    store.save_chat(Session("abc", SURROGATE, SURROGATE))
    store.save_message("abc", 0, Message("user", SURROGATE, "error", SURROGATE))
    [kept] = open_chats(store)
    store.close()
    assert kept.title == kept.messages[0].error == "? half ?"
