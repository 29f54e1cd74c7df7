"""The command line. Only typer is imported here; each command imports what it needs when it runs.

Errors are one sentence on stderr: exit code 1 for what went wrong, 2 for what was asked wrongly.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.errors import EngineError
from minitui import __version__
from minitui.cli.options import Device, DType, KvBlocks, chosen_options, engine_config, engine_options
from minitui.visible import json_text, plain_output

app = typer.Typer(
    name="minitui",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="""See how LLM inference works: an engine with paged KV memory, continuous batching and a radix tree of shared
prefixes, and a terminal application that shows all of it live.

\b
  minitui chat                          chat with the bundled model, on whatever this machine has
  minitui chat --model Qwen/Qwen3-0.6B  with a checkpoint from disk, the local cache or the hub
  minitui ask "What is a KV cache?"     one answer on stdout
  minitui demo shared-prefix            watch a system prompt being shared, told step by step
  minitui serve                         over HTTP, with OpenAI's endpoints
  minitui doctor                        what this machine can run""",
)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # reasons for a write to fail that are nobody's bug
Model = Annotated[
    str | None,
    typer.Option(
        help="Directory, name in the local Hugging Face cache, or name on the hub. Default: the bundled model.",
        rich_help_panel="Model",
    ),
]


def _text(value: str | None) -> str | None:
    """An argument whose bytes are no UTF-8 holds halves of characters, which no tokenizer takes."""
    return value and value.encode("utf-8", "replace").decode()


System = Annotated[str | None, typer.Option(help="System prompt; '' for none.", callback=_text)]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy. Default: as the checkpoint says.")]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling: the smallest set of tokens with this probability.")]
TopK = Annotated[int | None, typer.Option(help="Sample among the k most likely tokens.")]
MaxTokens = Annotated[int | None, typer.Option(help="Longest answer. Default: what context and pool allow.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer, whatever else is in the batch.")]
Record = Annotated[Path | None, typer.Option(help="Write everything the engine does to a trace, for minitui replay.")]


@app.command()
@engine_options
def chat(
    engine: dict[str, Any],
    model: Model = None,
    system: System = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    resume: Annotated[bool, typer.Option("--resume", help="Bring back the chats that were open last.")] = False,
    fps: Annotated[int | None, typer.Option(min=1, max=60, help="Frames a second; lower it on a slow line.")] = None,
    theme: Annotated[str | None, typer.Option(help="dark, light or projector.")] = None,
    ascii: Annotated[bool | None, typer.Option("--ascii/--unicode", help="Draw with ASCII only.")] = None,
    record: Record = None,
    connect: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of a server: minitui serve, or any with OpenAI's endpoints. Several (again, or with commas "
            "between) are replicas: a table of them, and each chat on the one whose cache holds its beginning."
        ),
    ] = None,
    key: Annotated[str, typer.Option(help="The server's API key; better as MINITUI_KEY.", envvar="MINITUI_KEY")] = "",
    web: Annotated[bool, typer.Option("--web", help="In a browser; every tab on the one engine.")] = False,
    mirror: Annotated[
        bool, typer.Option("--mirror", help="With --web: one application, yours; all other tabs watch and cannot type.")
    ] = False,
    web_port: Annotated[int, typer.Option(min=1, max=65535, help="Port for --web.")] = 8001,
    web_host: Annotated[
        str, typer.Option(help="Address for --web; with --mirror also one that others can reach, as 0.0.0.0.")
    ] = "127.0.0.1",
) -> None:
    """Chat, several at once, with everything the engine does beside it.

    \b
      minitui chat
      minitui chat --connect http://desk:8000     the engine of a server elsewhere (minitui serve)
      minitui chat --connect http://a:8000 --connect http://b:8000     replicas: each chat on one, or pinned (/pin)
      minitui chat --web                          in a browser, at the address that it prints
      minitui chat --web --mirror --web-host 0.0.0.0     a class watches in its browsers what you do in yours
      minitui chat --kv-blocks 64                 a pool so small that it fills: evictions, preemptions
      minitui chat --model ./Qwen3-8B --device cuda
      minitui chat --model Qwen/Qwen3-8B --dummy-weights    the shape without the download of weights
    """
    from minitui.cli.launch import run_chat

    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "max_tokens": max_tokens, "seed": seed}
    looks = {"fps": fps, "theme": theme, "ascii": ascii}
    urls = [url for text in connect or () for url in text.split(",") if url.strip()]
    if connect is not None and not urls:
        raise typer.BadParameter("--connect needs an address, as in http://host:8000")
    if urls and (own := chosen_options(engine)):
        raise typer.BadParameter(f"{', '.join(own)}: an engine is set up where it begins; --connect finds it running")
    if web:
        from minitui.cli.launch import run_in_browser
        from minitui.web.serve import WebSettings

        if record is not None:
            raise typer.BadParameter("--record is for one terminal; minitui serve --record keeps what all of them ask")
        if resume and not mirror:
            raise typer.BadParameter("--resume goes with --mirror: otherwise every tab would bring back the same chats")
        settings = WebSettings(web_host, web_port, tuple(urls), mirror=mirror)
        told = {"system": system, **sampling, **looks, "resume": resume or None}
        raise typer.Exit(run_in_browser(model, engine, settings, key, told))
    if mirror:
        raise typer.BadParameter("--mirror goes with --web: it is for browsers")
    if connect is not None:
        from minitui.cli.launch import run_connected

        raise typer.Exit(run_connected(urls, key, model, system, sampling, looks, resume, record))
    raise typer.Exit(run_chat(model, system, engine, sampling, looks, resume, record))


@app.command()
@engine_options
def ask(
    engine: dict[str, Any],
    question: Annotated[
        str, typer.Argument(help="What to ask; '-' or nothing reads it from a pipe.", callback=_text)
    ] = "-",
    model: Model = None,
    system: System = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object with the answer and its metrics.")] = False,
    record: Record = None,
) -> None:
    """Ask one question; the answer streams to stdout, its figures go to stderr.

    \b
      minitui ask "What is a radix tree?"
      echo "Why is decode slow?" | minitui ask
      minitui ask --json --temperature 0 "What is paging?" | jq .metrics
    """
    from minitui.cli.launch import run_ask

    if question == "-":
        if sys.stdin.isatty():
            raise typer.BadParameter('ask something: minitui ask "What is a KV cache?", or pipe the question in')
        question = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
    if not question.strip():
        raise typer.BadParameter("the question is empty")
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "max_tokens": max_tokens, "seed": seed}
    raise typer.Exit(run_ask(question, model, system, engine, sampling, json, record))


@app.command()
def chats(
    words: Annotated[list[str] | None, typer.Argument(help="Words that must occur in the chat.")] = None,
    show: Annotated[str | None, typer.Option(help="Print the chat with this id as Markdown.", callback=_text)] = None,
    export: Annotated[
        Path | None, typer.Option(help="With --show: write it to this file; as JSON if its name ends in .json.")
    ] = None,
) -> None:
    """The chats that were kept: list them, search in them, print or export one.

    \b
      minitui chats                          all of them, the newest first
      minitui chats radix tree               those in which both words occur
      minitui chats --show 3f2a
      minitui chats --show 3f2a --export paging.json
    """
    from minitui.cli.launch import run_chats

    raise typer.Exit(run_chats(" ".join(words or []), show, export))


def _columns(rows: list[tuple[str, str]]) -> str:
    """Two columns; the second is broken between words, to the width of the terminal."""
    widest = max(len(name) for name, _ in rows) + 3
    room = max(24, shutil.get_terminal_size().columns - widest)
    return "\n".join(
        f"{name:<{widest}}" + ("\n" + " " * widest).join(textwrap.wrap(words, room)) for name, words in rows
    )


@app.command()
def demo(
    name: Annotated[str | None, typer.Argument(help="Which; without it they are listed.")] = None,
    plain: Annotated[
        bool,
        typer.Option("--plain", "--headless", help="Tell it as lines of text; the default where there is no terminal."),
    ] = False,
    beat: Annotated[
        float | None,
        typer.Option(min=0, max=10, help="Scales the pauses for reading: 0 for none. Default: 1, and 0 with --plain."),
    ] = None,
    kv_blocks: KvBlocks = None,
    record: Record = None,
) -> None:
    """Watch a scenario in a small engine of its own, told step by step.

    \b
      minitui demo shared-prefix     four chats, one system prompt: computed once, held four times
      minitui demo cache             the same six arrivals with the cache off and on
      minitui demo chunked-prefill   a long paste while others write, at once and in chunks
      minitui demo eviction          a full pool: predict whose blocks go
      minitui demo preemption        a pool too small for all: predict who gives way
      minitui demo fork              one conversation, four continuations
      minitui demo batching          static against continuous batching
      minitui demo speculation       tokens guessed from the text, several checked in a step
      minitui demo cache --plain     the same story as text
    """
    from minitui.cli.launch import run_demo
    from minitui.teaching.scenarios import DEMOS
    from minitui.tui.terminal import has_terminal

    if name is None:
        print(_columns([(f"minitui demo {name}", one.title) for name, one in DEMOS.items()]))
        return
    text = plain or not has_terminal()
    raise typer.Exit(
        run_demo(name, {"kv_blocks": kv_blocks}, text, (0.0 if text else 1.0) if beat is None else beat, record)
    )


@app.command()
def lesson(
    number: Annotated[str | None, typer.Argument(help="0 to 9; without it they are listed.")] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            "--headless",
            help="As lines of text, every experiment run; the default where there is no terminal.",
        ),
    ] = False,
) -> None:
    """A lesson with experiments on the bundled model: text, a panel beside it, a question to predict, the code.

    \b
      minitui lesson              what there is
      minitui lesson 8            the radix cache
      minitui lesson 8 --plain    the same as text
    """
    from minitui.cli.launch import run_lesson
    from minitui.teaching.lessons import LESSONS
    from minitui.tui.terminal import has_terminal

    if number is None:
        print(_columns([(f"minitui lesson {one.number}   {one.title}", one.question) for one in LESSONS]))
        return
    raise typer.Exit(run_lesson(number, plain or not has_terminal()))


@app.command()
def replay(
    trace: Annotated[
        str | None,
        typer.Argument(
            help="A file written with --record, or a recording that comes along; without it, those are listed.",
            metavar="[FILE|NAME]",
        ),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(
            help="1 is the engine's own speed, 0.1 ten times slower. Default: 1; what comes along lasts about a minute."
        ),
    ] = None,
    export: Annotated[
        str | None, typer.Option(help="perfetto, json, md, svg or png: write a file instead of playing.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write; default: beside the trace.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="The step that a picture shows; default: the last.")] = None,
    size: Annotated[str, typer.Option(help="Columns x rows of a picture.")] = "120x36",
    fps: Annotated[int | None, typer.Option(min=1, max=60, help="Frames a second.")] = None,
    theme: Annotated[str | None, typer.Option(help="dark, light or projector.")] = None,
    ascii: Annotated[bool | None, typer.Option("--ascii/--unicode", help="Draw with ASCII only.")] = None,
) -> None:
    """Play a recording in the same application, or export it.

    \b
      minitui replay                                 the recordings that come along
      minitui chat --record class.trace
      minitui replay class.trace                     space freezes, p pauses, n steps, ( ) jump, { } bookmarks
      minitui replay class.trace --export perfetto   opens at ui.perfetto.dev
      minitui replay class.trace --export svg --step 40 --size 160x48
      minitui replay class.trace --export png --theme light    drawn by an installed Chromium
    """
    from minitui.cli import launch

    looks = {"fps": fps, "theme": theme, "ascii": ascii}
    if trace is None:
        raise typer.Exit(launch.run_list())
    if export is None:
        raise typer.Exit(launch.run_replay(trace, speed, looks))
    print(launch.run_export(trace, export, out, step, size, theme))


@app.command()
def tail(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A recording, or the URL of a minitui server. Without it, questions come from stdin, one a line."
        ),
    ] = None,
    kv_blocks: KvBlocks = None,
) -> None:
    """The engine's story as plain lines: for screen readers, logs and pipes.

    \b
      minitui tail class.trace
      minitui tail http://localhost:8000
      echo "What is a KV cache?" | minitui tail
    """
    from minitui.cli import launch

    raise typer.Exit(launch.run_tail(source, kv_blocks))


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False) -> None:
    """What this machine can run, and what to install for more."""
    from minitui.cli.doctor import examine, report

    found = examine()
    print(json_text(found, indent=2) if json else "\n".join(report(found)))


@app.command()
@engine_options
def serve(
    engine: dict[str, Any],
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on; all but the loopback need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[list[str] | None, typer.Option(help="Allows everything; better as MINITUI_API_KEY.")] = None,
    chat_key: Annotated[list[str] | None, typer.Option(help="Allows to ask and watch; or MINITUI_CHAT_KEY.")] = None,
    watch_key: Annotated[list[str] | None, typer.Option(help="Allows to watch; or MINITUI_WATCH_KEY.")] = None,
    record: Record = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A web page elsewhere that may use this server: https://example.org.")
    ] = None,
    hide_text: Annotated[bool, typer.Option("--hide-text", help="Keep what people ask out of the telemetry.")] = False,
    served_model_name: Annotated[str, typer.Option(help="The model's name in requests and answers.")] = "",
    max_waiting: Annotated[int, typer.Option(min=0, help="Sequences that may wait; beyond, 429.")] = 128,
    max_body_mib: Annotated[int, typer.Option(min=1, help="Largest body of a request, in MiB.")] = 4,
    request_timeout: Annotated[float, typer.Option(min=0.1, help="Longest time for a reply, in seconds.")] = 600.0,
    drain_seconds: Annotated[float, typer.Option(min=0.0, help="Time for replies under way after SIGTERM.")] = 3.0,
) -> None:
    """Serve over HTTP: POST /generate, OpenAI's endpoints, Prometheus metrics, and the telemetry for chat --connect.

    \b
      minitui serve
      minitui serve --model Qwen/Qwen3-0.6B --port 9000
      MINITUI_API_KEY=$(openssl rand -hex 16) minitui serve --host 0.0.0.0
      curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "What is a KV cache?"}]}'
    """
    from minitui.chat.model_choice import choose_model
    from minitui.cli.launch import log_path
    from minitui.server.command import gather_keys, run_serve
    from minitui.server.settings import ServerSettings

    choice = choose_model(model)
    config = engine_config(choice.name, **engine)
    settings = ServerSettings(
        host=host,
        port=port,
        keys=gather_keys(api_key or [], chat_key or [], watch_key or []),
        record=record,
        cors_origins=tuple(cors_origin or ()),
        hide_text=hide_text,
        served_name=served_model_name or choice.label,
        max_waiting=max_waiting,
        max_body=max_body_mib << 20,
        request_s=request_timeout,
        drain_s=drain_seconds,
    )
    raise typer.Exit(run_serve(config, settings, log_path()))


PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}  # bench has options of its own


@app.command(context_settings=PASS_ON)
def bench(context: typer.Context) -> None:
    """Speed against the machine's own limits, measured in the same run (minitui bench --help)."""
    if any(argument == "--url" or argument.startswith("--url=") for argument in context.args):
        from minitui.bench.load import main as load

        raise typer.Exit(load(context.args))
    from minitui.bench.main import main as run

    raise typer.Exit(run(context.args))


@app.command()
def verify(
    model: Annotated[str | None, typer.Argument(help="As --model of chat. Default: the bundled model.")] = None,
    dtype: DType = "auto",
    device: Device = "auto",
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Compare a checkpoint token for token with transformers (needs the extra "verify").

    \b
      minitui verify Qwen/Qwen3-0.6B
      minitui verify ./Qwen3-8B --device cuda --dtype bfloat16
    """
    from minitui import tutor
    from minitui.cli.verify import verify as run

    raise typer.Exit(run(model or str(tutor.model_dir()), dtype, device, json))


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False) -> None:
    """Options of minitui itself."""
    if version:
        print(f"minitui {__version__}")
        raise typer.Exit


def main() -> None:
    """The entry point: whatever the commands write, plain text reaches the terminal (minitui/visible.py)."""
    from minitui.lifeline import end_with_parent

    _open_closed_streams()
    end_with_parent()
    with plain_output():
        run()


def run() -> None:
    """Run the command: every failure is one sentence, its traceback in the log file if it was not foreseen."""
    try:
        app()
    except EngineError as error:
        from minitui.tui.terminal import NoTerminal

        _fail(str(error), 2 if isinstance(error, NoTerminal) else 1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`): that is no error of ours.
        sys.stderr.close()
        raise SystemExit(0) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            _fail(f"what should be written cannot be: {error.strerror}")
        _fail(f"{type(error).__name__}: {error} (this is a bug; its traceback is {_log_crash()})")


def _open_closed_streams() -> None:
    """Put /dev/null in the place of standard streams that are closed (`>&-`); Python has None there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in order: each takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


def _fail(sentence: str, code: int = 1) -> None:
    print(f"minitui: {sentence}", file=sys.stderr)
    raise SystemExit(code)


def _log_crash() -> str:
    """Keep the traceback of the exception being handled; where it is."""
    import traceback

    from minitui.settings import data_dir

    try:
        path = data_dir() / "crash.log"
        with path.open("a", encoding="utf-8") as file:
            file.write(traceback.format_exc() + "\n")
    except (OSError, EngineError):
        traceback.print_exc()
        return "above: no log could be written"
    return f"in {path}"
