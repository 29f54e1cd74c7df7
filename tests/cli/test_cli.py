"""The command line: help that teaches, errors that are sentences."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.worker.loaded import expected_tokens
from minitui import __version__
from minitui.chat.conversation import Sampling
from minitui.cli import early, launch
from minitui.cli.ask import ask_source
from minitui.cli.compare import run_names
from minitui.cli.doctor import EXTRAS, _files, _fits_gpu, _shapes, report
from minitui.cli.launch import make_sampling, settings_with
from minitui.cli.main import app, main
from minitui.progress import Phases, process_age_s
from minitui.settings import ChatSettings, Settings, data_dir
from minitui.teaching.class_file import ClassFile
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
from minitui.tui.terminal.guard import has_terminal
from tests.support.app.fake_client import ByteCodec, FakeSource

COMMANDS = ("chat", "ask", "demo", "exercise", "compare", "doctor", "bench", "verify")


def minitui(*arguments: str, home: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MINITUI_DATA": str(home), "MINITUI_CONFIG": str(home / "settings.toml")}
    return subprocess.run(
        [sys.executable, "-m", "minitui", *arguments], capture_output=True, text=True, timeout=60, env=env, **options
    )


def test_help_names_every_command_and_gives_examples():
    text = CliRunner().invoke(app, ["--help"]).output
    for command in COMMANDS:
        assert f"  {command} " in text
    assert not re.search(r"\w\.\.\.", text), "a sentence is cut"
    assert 'minitui ask "What is a KV cache?"' in text


@pytest.mark.parametrize("command", ["chat", "ask", "demo", "exercise", "compare", "verify"])
def test_the_help_of_a_command_has_examples_that_stand_one_to_a_line(command):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"\n    minitui {command}" in result.output or f"| minitui {command}" in result.output


def test_the_version():
    assert CliRunner().invoke(app, ["--version"]).output == f"minitui {__version__}\n"


class Here:
    """The command line in this process: what a process of its own would say and exit with."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        monkeypatch.setenv("MINITUI_DATA", str(home))
        monkeypatch.setenv("MINITUI_CONFIG", str(home / "settings.toml"))
        monkeypatch.setattr(sys, "stdin", io.StringIO())

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        self.monkeypatch.setattr(sys, "argv", ["minitui", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        told = self.capsys.readouterr()
        return subprocess.CompletedProcess(sys.argv, int(ended.value.code or 0), told.out, told.err)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("ask", "x", "--temperature", "-1"), 1, "temperature is -1.0"),
        (("ask", "x", "--kv-blocks", "0"), 2, "--kv-blocks"),
        (("ask", "x", "--dtype", "int3"), 1, "dtype is 'int3'"),
        (("ask", "  "), 2, "empty"),
        (("ask", "x", "--top-k", "many"), 2, "--top-k"),
        (("demo", "nothing"), 1, "no demo 'nothing'"),
        (("chat",), 2, "minitui chat needs a terminal"),
        (("chat", "--connect", "http://127.0.0.1:9"), 2, "minitui ask"),
        (("replay", "any.trace"), 2, "minitui replay needs a terminal"),
        (("class",), 2, "minitui class needs a terminal"),
        (("class", "none.toml"), 1, "none.toml cannot be read: No such file"),
        (("class", "--csv"), 2, "need --class-link NAME"),
        (("class", "--class-link", "A/B", "--json"), 1, "'A/B' is not valid: use 1 to 32 lower-case letters"),
        (("class", "--class-link", "pagin", "--json"), 1, "no class 'pagin': there is none yet"),
        (("chat", "--theme", "pink"), 1, "dark, light and projector"),
        (("dance",), 2, "dance"),
        (("compare", "nothing"), 1, "no comparison 'nothing': the comparisons are cache, batching"),
        (("compare", "cache", "--pools", "24,64"), 1, "--pools belongs to `minitui compare pool`"),
        (("compare", "pool", "--pools", "24"), 1, "as in 24,64"),
        (("compare", "small-pool", "h200-8b", "--device", "cpu"), 1, "belong to a new run"),
        (("compare", "a.trace", "b.trace", "c.trace"), 1, "3 recordings were given"),
        (("compare", "small-pool", "no-such-file"), 1, "no bundled recording of that name"),
    ],
)
def test_what_is_asked_wrongly_is_told_in_a_sentence(here, arguments, code, words):
    told(here(*arguments), code, words)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("ask", "x", "--model", "/nowhere/at/all"), 1, "/nowhere/at/all"),
        (("ask", "x", "--top-k", "many"), 2, "--top-k"),
    ],
)
def test_so_it_is_by_the_process_itself(tmp_path, arguments, code, words):
    told(minitui(*arguments, home=tmp_path), code, words)


def told(done: subprocess.CompletedProcess[str], code: int, words: str) -> None:
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_one_stream_that_is_no_terminal_is_enough(name, monkeypatch):
    class Stream:
        def __init__(self, terminal: bool) -> None:
            self.isatty = lambda: terminal

    monkeypatch.delenv("TEXTUAL_DRIVER", raising=False)
    for stream in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, stream, Stream(True))
    assert has_terminal()
    monkeypatch.setattr(sys, name, Stream(False))
    assert not has_terminal()
    monkeypatch.setenv("TEXTUAL_DRIVER", "textual.drivers.web_driver:WebDriver")  # as textual-serve does
    assert has_terminal()


def test_a_demo_and_a_lesson_without_a_terminal_are_told_as_text(tmp_path):
    told = minitui("lesson", "4", home=tmp_path, stdin=subprocess.DEVNULL)
    assert told.returncode == 0, told.stderr
    assert "\x1b" not in told.stdout + told.stderr
    assert len(told.stdout.splitlines()) > 20


def test_the_list_of_lessons_says_how_to_open_one(tmp_path):
    listed = minitui("lesson", home=tmp_path, stdin=subprocess.DEVNULL)
    assert listed.returncode == 0 and "Open a lesson with its number: `minitui lesson 0`" in listed.stdout


def test_two_recordings_are_compared_as_text_and_as_json(here):
    text = here("compare", "small-pool", "h200-8b", "--plain")
    assert text.returncode == 0 and "\x1b" not in text.stdout
    assert "longest token gap" in text.stdout and "KV blocks 24 and " in text.stdout
    data = json.loads(here("compare", "small-pool", "h200-8b", "--json").stdout)
    kinds = [[record[2] for record in TraceReader(bundled()[name]).records()] for name in ("small-pool", "h200-8b")]
    assert [run["figures"]["steps"] for run in data["runs"]] == [kind.count("step") for kind in kinds]
    assert [len(run["requests"]) for run in data["runs"]] == [kind.count("submit") for kind in kinds]
    assert data["differences"]["steps"]["better"] is None, "the runs did not do the same work"
    for name, change in data["differences"].items():  # the same numbers, rounded alike
        figures = [run["figures"] | {"longest_gap_ms": run["figures"]["longest_gap"]["ms"]} for run in data["runs"]]
        assert [change["first"], change["second"]] == [each[name] for each in figures]
    assert data["sentence"] in text.stdout and data["unlike"] in text.stdout
    assert "minitui compare batching" in here("compare").stdout


def test_saved_runs_have_the_names_of_their_settings():
    assert run_names("mine.cache-off", "mine.cache-on") == ("cache off", "cache on")
    assert run_names("a", "b") == ("a", "b")
    assert run_names("run", "run.2") == ("run", "run.2")
    assert run_names("run", "run") == ("run (1)", "run (2)")


def test_broken_settings_are_told_by_name(tmp_path, here):
    (tmp_path / "settings.toml").write_text("fps = 'fast'")
    told(here("ask", "x"), 1, "fps is 'fast'")


def test_the_command_line_comes_before_the_settings_and_those_before_the_checkpoint(tmp_path, monkeypatch):
    sampling = make_sampling(
        {"temperature": 0.5, "max_tokens": None, "seed": None}, ChatSettings(temperature=0.1, seed=7)
    )
    assert (sampling.temperature, sampling.max_tokens, sampling.seed) == (0.5, None, 7)
    (tmp_path / "settings.toml").write_text("fps = 20")
    monkeypatch.setenv("MINITUI_CONFIG", str(tmp_path / "settings.toml"))
    settings = settings_with({"theme": "light", "fps": None, "ascii": True})
    assert (settings.theme, settings.fps, settings.ascii) == ("minitui-light", 20, True)


async def test_ask_streams_and_closes_the_engine(capsys):
    source = FakeSource(notes=["torch computes the steps"])
    assert await ask_source(source, "why?", "Be brief.", Sampling(), False, load=lambda info: ByteCodec()) == 0
    told = capsys.readouterr()
    assert told.out == "A **block table** maps positions to blocks.\n"
    assert told.err.startswith("torch computes the steps\n")
    assert source.closed


async def test_ask_as_json_has_the_metrics(capsys):
    await ask_source(FakeSource(), "why?", "", Sampling(seed=3), True, load=lambda info: ByteCodec())
    told = json.loads(capsys.readouterr().out)
    assert told["answer"].startswith("A **block")
    assert told["sampling"]["seed"] == 3
    assert told["metrics"]["prompt_tokens"] > 0


async def test_ask_that_is_refused_raises_the_sentence_and_closes_the_engine():
    source = FakeSource(num_blocks=5)
    with pytest.raises(EngineError, match="64"):
        await ask_source(source, "w" * 900, "", Sampling(), False, load=lambda info: ByteCodec())
    assert source.closed


def test_old_logs_are_tidied_away(tmp_path, monkeypatch):
    monkeypatch.setenv("MINITUI_DATA", str(tmp_path))
    (tmp_path / "logs").mkdir()
    for number in range(30):
        (tmp_path / "logs" / f"engine-{number}.log").touch()
    path = launch.log_path()
    assert path.parent == tmp_path / "logs"
    assert len(list((tmp_path / "logs").iterdir())) == 10


def test_only_a_command_that_needs_an_engine_starts_its_process_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINITUI_DATA", str(tmp_path))
    begun: list[Path] = []
    monkeypatch.setattr(early.early_process, "begin", begun.append)
    for words in "", "doctor", "chat --help", "chat --connect=http://localhost", "ask -h", "chat --web":
        early.begin(words.split())
    assert not begun
    early.begin(["chat", "--model", "Qwen/Qwen3-0.6B"])
    assert begun == [early.log_path()], "live_source takes the process with this log"


def test_the_phases_of_a_start_begin_with_the_process_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minitui.progress.process_age_s", lambda: 0.5)
    times = iter([100.0, 100.2, 101.0, 103.0, 103.5])
    phases = Phases("Python", lambda: next(times))
    phases.begin("imports")
    for text in ("w.safetensors: 1 of 9 MB", "w.safetensors: 2 of 9 MB", "graphs: decode 8", "graphs: decode 4"):
        phases({"text": text})
    found = [line.split(maxsplit=2) for line in phases.report()]
    assert [(int(ms.replace(",", "")), name) for ms, _, name in found] == [
        (700, "Python"), (800, "imports"), (2000, "w.safetensors"), (500, "graphs: decode"), (4000, "all")
    ]
    assert 0 < process_age_s() < 86400 * 365


def test_doctor_says_what_runs_here_and_what_to_install():
    found = {
        "minitui": "0.1.0", "python": "3.11", "torch": "2.13", "platform": "Linux", "cpu_cores": 2, "memory_gib": 8.0,
        "gpus": [], "weights": "bf16", "fits": {"Qwen3-0.6B": {"float32": 80.4, "int8": 20.1}, "Qwen3-8B": {}},
        "read_gb_per_s": 30.0, "models": ["Qwen/Qwen3-0.6B"],
        "incomplete_models": {"Qwen/Qwen3-4B": ["model.safetensors"]},
        "modules": {**dict.fromkeys(EXTRAS), "llguidance": "1.0"},
        "terminal": {"columns": 70, "rows": 20, "colours": "256", "utf8": False}, "files": {"Settings": "x"},
    }
    text = "\n".join(report(found))
    assert "models run on the CPU, in float32; weights of bfloat16 checkpoints are in bf16 where compiled" in text
    assert "bf16" not in "\n".join(report({**found, "weights": "none"}))
    assert "Qwen3-0.6B     float32 80 ms, int8 20 ms" in text
    assert "memory is read at 30 GB/s" in text
    assert "Qwen3-8B       no" in text
    for extra in ("flash", "serve", "web", "verify"):
        assert f"pip install '.[{extra}]'" in text
    assert "[structured]" not in text
    assert "make it 80×24 or more" in text
    assert "use --ascii" in text
    assert "Qwen/Qwen3-4B: missing model.safetensors" in text
    gpu = {"name": "A", "memory_gib": 80.0, "free_gib": 79.0, "compute": "9.0"}
    found |= {"gpus": [gpu] * 4, "ranks": ["nccl"], "fits": {"Qwen3-8B": {"int4": (6_432, 12_880)}}}
    text = "\n".join(report(found))
    assert "--tensor-parallel-size 2 to 4" in text and "Qwen3-8B       int4 6,432 / 12,880\n" in text


@pytest.mark.parametrize(("package", "extra", "use"), [
    ("uvicorn", "serve", "import minitui.server.command"),
    ("httpx", "serve", "import minitui.sources.http"),
    ("textual_serve", "web,serve", "from minitui.web.serve import *; run_web(WebSettings(port=0))"),
    ("transformers", "verify", "from minitui.cli.verify import run_verify; run_verify('')"),
])
def test_a_missing_extra_is_one_sentence_with_the_command_that_installs_it(package, extra, use):
    # In a process of its own: here another test may have imported a module that uses the package.
    hidden = f"import sys; sys.modules[{package!r}] = sys.modules['{package}.server'] = None"
    attempt = f"from engine.errors import EngineError\ntry:\n    {use}\nexcept EngineError as error:\n    print(error)"
    said = subprocess.run([sys.executable, "-c", f"{hidden}\n{attempt}"], capture_output=True, text=True, timeout=120)
    command = f"pip install '.[{extra}]' in the folder of minitui"
    assert f" needs {package}, which is not installed: {command}" in said.stdout, said.stderr


def test_doctor_measures_the_phases_of_a_start(here):
    lines = here("doctor", "--profile-start").stdout.splitlines()
    found = [re.fullmatch(r" *([\d,]+) ms  (.+)", line) for line in lines]
    times = [int(each[1].replace(",", "")) for each in found]
    names = [each[2] for each in found]
    assert "importing torch" in names and names[-2:] == ["a first prompt of 16 tokens, to its first token", "all"]
    assert min(times[-2:]) > 0 and abs(sum(times[:-1]) - times[-1]) < len(times)


def test_doctor_names_wrong_settings(monkeypatch, tmp_path):
    monkeypatch.setenv("MINITUI_CONFIG", str(tmp_path / "settings.toml"))
    assert [*_files()] == ["Settings", "Chats and logs"]
    (tmp_path / "settings.toml").write_text("fps = 500")
    assert _files()["The settings cannot be used"].endswith("fps is 500; it must be from 1 to 60")


def test_doctor_as_json(here):
    found = json.loads(here("doctor", "--json").stdout)
    assert found["device"] in ("cpu", "cuda")
    assert found["memory_gib"] > 0.5
    if found["device"] == "cpu":
        reads = found["fits"]["Qwen3-0.6B"]["int8"] * found["read_gb_per_s"]
        assert reads == pytest.approx(600, rel=0.01), "0.6 GB: milliseconds times GB/s"


def test_doctor_estimates_the_cache_of_a_card_as_the_engine_sizes_it():
    """Qwen3-8B on an H200: the bundled recording has what the engine measured there."""
    fits = _fits_gpu({"memory_gib": 139.8, "free_gib": 138.8, "compute": "9.0"})
    info = TraceReader(bundled()["h200-8b"]).info
    tokens = expected_tokens(
        _shapes()["Qwen3-8B"], EngineConfig("", quantization="none"), round(139.8 * 2**30), 1 << 30
    )
    assert tokens == pytest.approx(info.num_blocks * info.block_size, rel=0.01)
    wide, small = fits["Qwen3-8B"]["int4"]
    assert small == pytest.approx(2 * wide, rel=0.01) and wide > fits["Qwen3-8B"]["bfloat16"][0] > tokens
    laptop = _fits_gpu({"memory_gib": 8, "free_gib": 7, "compute": "8.9"})
    assert list(laptop["Qwen3-8B"]) == ["int4"] and 8_000 < laptop["Qwen3-8B"]["int4"][1] < 20_000
    assert laptop["Qwen3-32B"] == {}


def test_doctor_names_the_cards_that_it_knows(here):
    lines = here("doctor", "--gpu", "RTX 4060").stdout
    assert "GPU RTX 4060: 7 of 8 GiB free" in lines and re.search("Qwen3-8B +int4 [0-9,]+ / [0-9,]+\n", lines)
    assert "must be one of RTX 3060, " in here("doctor", "--gpu", "RTX").stderr


@pytest.fixture
def shown_in_browsers(monkeypatch):
    """For each application that would be shown in browsers: its settings, and whether it has an engine of its own."""
    pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
    import minitui.web.serve

    seen = []
    monkeypatch.setattr(minitui.web.serve, "run_web", lambda web, *own: seen.append((web, bool(own))) or 0)
    return seen


@pytest.mark.parametrize(("words", "applications", "engine", "tabs"), [
    ("chat --web --system Be\\ terse --temperature 0 --top-k 9 --unicode --fps 5 --kv-blocks 9 --ignore-eos",
     "chat --ignore-eos --top-k=9 --system=Be\\ terse --temperature=0.0 --unicode --fps=5", True, 32),
    ("chat --web --mirror --resume --connect a:1,b:1 --model m --record my\\ class.trace --no-ignore-eos",
     "chat --model=m --resume --connect=a:1,b:1 --no-ignore-eos --record=my\\ class.trace", False, 32),
    ("inspect --connect a:1 --web --web-port 9", "inspect --connect=a:1", False, 32),
    ("demo cache --web --beat 2", "demo --beat=2.0 -- cache", False, 4),
    ("lesson 3 --web --mirror --record l.trace --theme light", "lesson --theme=light --record=l.trace -- 3", False, 4),
    ("compare pool --pools 24,64 --web", "compare --pools=24,64 -- pool", False, 4),
    ("compare small-pool h200-8b --web", "compare -- small-pool h200-8b", False, 32),
    ("class --web --mirror --class-link paging --record c.trace", "class --class-link=paging --record=c.trace", False,
     4),
    ("replay small-pool --web --speed 2 --allowed-host a.example", "replay --speed=2.0 -- small-pool", False, 32),
])
def test_an_application_in_a_browser_gets_the_options_as_they_are_typed(
    words, applications, engine, tabs, here, shown_in_browsers
):
    assert here(*shlex.split(words)).returncode == 0
    [(web, own)] = shown_in_browsers
    assert sorted(web.words) == sorted(shlex.split(applications)) and web.words[0] == words.split()[0]
    assert (own, web.tabs, web.mirror) == (engine, tabs, "--mirror" in words)
    assert web.link == ("paging" if "paging" in words else "class") and len(web.token) == 10
    assert web.names == (("a.example",) if "--allowed-host" in words else ())


def test_a_key_does_not_become_a_word_of_the_processes_of_a_browser(here, monkeypatch, shown_in_browsers):
    monkeypatch.setenv("MINITUI_KEY", "")
    assert here("chat", "--web", "--connect", "a:1", "--key", "open-sesame-now").returncode == 0
    [(web, _)] = shown_in_browsers
    assert [*web.words] == ["chat", "--connect=a:1"] and os.environ["MINITUI_KEY"] == "open-sesame-now"


@pytest.mark.parametrize(("words", "said"), [
    ("chat --connect a:1 --kv-blocks 64 --enforce-eager", "--kv-blocks, --enforce-eager: engine options"),
    ("chat --web --connect a:1 --device cpu", "--device: engine options belong to the server"),
    ("chat --web --record f", "--record needs --mirror, or every tab would write the same file"),
    ("chat --web --resume", "--resume needs --mirror"),
    ("chat --connect ,", "needs an address"),
    ("chat --mirror", "--mirror needs --web"),
    ("demo cache --web-port 9000", "--web-port needs --web"),
    ("lesson 0 --web-host 0.0.0.0", "--web-host needs --web"),
    ("replay small-pool --allowed-host a.example", "--allowed-host needs --web"),
    ("demo cache --web --plain", "--web opens the application, and --plain does not"),
    ("compare cache --web --save x", "--save needs --mirror"),
    ("compare cache --web --json", "--json does not"),
])
def test_an_option_that_would_do_nothing_is_refused(words, said):
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 2 and said in " ".join(result.output.replace("│", " ").split())


def test_a_run_sheet_is_listed_and_the_answers_of_a_class_are_printed(here):
    assert "50 minutes" in here("class", "--check").stdout
    ClassFile(data_dir() / "classes", "paging")
    assert json.loads(here("class", "--class-link", "paging", "--json").stdout)["scenes"] == []
    told(here("class", "--class-link", "pagin", "--csv"), 1, "no class 'pagin': the classes are paging")
    assert here("class", "--class-link", "paging", "--csv").stdout == "scene,title,question,choice,text,count,phones\n"


def test_a_recording_of_a_replay_is_a_copy_that_keeps_bookmarks(tmp_path, monkeypatch):
    from minitui.cli.recordings import copy_trace
    from minitui.trace.reader import TraceError, TraceReader

    copied = TraceReader(copy_trace("small-pool", tmp_path / "mine.trace"))
    copied.add_bookmark(7, "here")
    assert (7, "here") in TraceReader(tmp_path / "mine.trace").bookmarks
    with pytest.raises(TraceError, match="is the recording itself"):
        copy_trace(str(tmp_path / "mine.trace"), tmp_path / "mine.trace")
    with pytest.raises(TraceError, match="cannot be written: Is a directory"):
        copy_trace("small-pool", tmp_path)


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")


@needs_full
@pytest.mark.parametrize("command", [("ask", "hi", "--max-tokens", "3"), ("demo", "cache", "--plain")])
def test_a_recording_that_finds_no_room_is_a_failure(command, tmp_path):
    done = minitui(*command, "--record", "/dev/full", home=tmp_path)
    assert done.returncode == 1
    assert done.stdout.strip()
    assert done.stderr.count("/dev/full cannot be written: No space left on device") == 1
    assert done.stderr.endswith("the recording is not complete: /dev/full cannot be written: No space left on device\n")


async def test_chat_says_that_its_recording_or_its_chats_were_not_kept_and_fails(monkeypatch, capsys):
    monkeypatch.setattr(launch, "show", lambda app, guard: 0)
    for error, code in (("", 0), ("x.trace cannot be written", 1)):
        source = FakeSource()
        source.recording_error = error
        assert launch.run_app(None, source, Settings()) == code
        said = capsys.readouterr().err
        assert said == (f"minitui: the recording is not complete: {error}\n" if error else "")
    assert launch.report_recording(source, 130) == 130

    def unsaved(app, guard):
        app.chats.saver.unsaved["a"] = app.chats.new("")
        return 0

    monkeypatch.setattr(launch, "show", unsaved)
    assert launch.run_app(None, FakeSource(), Settings()) == 1
    assert "1 chats could not be saved" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ask", "x", "--record", "FIFO"), "cannot be written: No such device or address; name another"),
        (("replay", "FIFO", "--export", "md"), "is a device or a pipe"),
        (("replay", "/dev/zero", "--export", "md"), "is a device or a pipe"),
        (("tail", "FIFO"), "is a device or a pipe"),
        (("replay", "small-pool", "--export", "svg", "--size", "99999999x99999999"), "from 40x12 to 1000x500"),
        (("replay", "small-pool", "--export", "svg", "--size", "٤٠x٤٠"), "from 40x12 to 1000x500"),
        (("replay", "small-pool", "--export", "svg", "--step", "-5"), "has no step -5: it has steps 0 to 158"),
        (("replay", "h200-8b", "--export", "svg", "--step", "3"), "has no step 3: it has steps 4 to 746"),
        (("replay", "small-pool", "--export", "svg", "--step", "9" * 20), "it has steps 0 to 158"),
        (("replay", "small-pool", "--export", "svg", "--theme", "pink"), "dark, light and projector"),
        (("tail", "http://[::1"), "is not a server"),
        (("tail", "http://a\udcffb:80"), "is not a server"),
        (("chats", "--show", "\udcff"), "'?' must be the beginning of exactly one"),
    ],
)
def test_hostile_arguments_are_told_in_a_sentence(here, tmp_path, arguments, words):
    os.mkfifo(tmp_path / "fifo")
    told(here(*(str(tmp_path / "fifo") if one == "FIFO" else one for one in arguments)), 1, words)


@pytest.mark.parametrize(("command", "code"), [("doctor", 0), ("ask", 2), ("tail", 0)])
def test_closed_standard_streams_are_no_bug(command, code, tmp_path):
    env = {**os.environ, "MINITUI_DATA": str(tmp_path)}
    line = f'exec "{sys.executable}" -m minitui {command} <&- >&-'
    done = subprocess.run(["/bin/sh", "-c", line], stderr=subprocess.PIPE, text=True, timeout=90, env=env)
    assert done.returncode == code, done.stderr
    assert "bug" not in done.stderr


def test_an_export_goes_to_stdout_and_stdout_gets_the_nearest_characters_of_its_encoding(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["replay", "small-pool", "--export", "json", "-o", "-"])
    assert len(json.loads(result.stdout)["records"]) > 100 and not list(tmp_path.iterdir())
    env = {**os.environ, "MINITUI_DATA": str(tmp_path), "PYTHONIOENCODING": "ascii"}
    line = [sys.executable, "-m", "minitui", "tail", "small-pool"]
    said = subprocess.run(line, capture_output=True, timeout=60, env=env).stdout
    assert b'evicted next: 1. "...paged attention? Paged..." (112 tokens)' in said and b" - last 159 " in said


@needs_full
def test_an_export_that_fails_leaves_no_half_file(here, tmp_path, monkeypatch):
    def half(reader, path):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("minitui.export.WRITERS", {"md": (".md", half)})
    out = tmp_path / "story.md"
    told(here("replay", "small-pool", "--export", "md", "--out", str(out)), 1, "No space left on device; name another")
    assert not out.exists()
    told(here("replay", "small-pool", "--export", "svg", "--out", "/dev/full"), 1, "No space left on device")
    assert Path("/dev/full").exists()


@pytest.mark.parametrize(("arguments", "names"), [
    ([], ("tutor",)),
    (["--served-model-name", "one"], ("one",)),
    (["--served-model-name", "one", "two", "--port", "0"], ("one", "two")),
    (["--port", "0", "--served-model-name", "one", "--served-model-name", "two", "one"], ("one", "two")),
])
def test_a_served_model_has_one_name_or_several(monkeypatch, arguments, names):
    import minitui.server.command

    served = []
    monkeypatch.setattr("engine.process.early_process.begin", lambda log_file: None)
    monkeypatch.setattr(minitui.server.command, "run_serve", lambda config, settings, *_: served.append(settings) or 0)
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 0, result.output
    assert served[0].served_names == names


def test_doctor_breaks_its_lines_between_words_in_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    long = "  llvmlite      0.50.0  (compiled kernels for few tokens on a CPU; used if installed)"
    monkeypatch.setattr("minitui.cli.doctor.report", lambda found: [long])
    app(["doctor"], standalone_mode=False)
    assert capsys.readouterr().out == long.replace(" a CPU", "\n    a CPU") + "\n"
