"""The command line: registers the commands, and turns each error into a sentence and an exit code. The sentence is
printed on stderr. Exit code 2: wrong usage; 1: any other failure."""

from __future__ import annotations

import errno
import sys
from typing import Annotated

import typer

from engine.errors import EngineError
from minitui import __version__
from minitui.bench.main import bench
from minitui.cli.ask import ask
from minitui.cli.chat import chat
from minitui.cli.chats import chats
from minitui.cli.compare import compare
from minitui.cli.doctor import doctor
from minitui.cli.exercise import exercise
from minitui.cli.inspect import inspect
from minitui.cli.lecture import lecture
from minitui.cli.models import models
from minitui.cli.prefix import proxy
from minitui.cli.recordings import replay
from minitui.cli.serve import ServeCommand, serve
from minitui.cli.tail import tail
from minitui.cli.teaching import demo, lesson
from minitui.cli.verify import verify
from minitui.cli.whatif import advise
from minitui.lifeline import end_with_parent
from minitui.settings import data_dir
from minitui.tui.terminal.guard import NoTerminal
from minitui.visible import plain_output

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Settings of the command bench, which parses its own options.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    name="minitui",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="""See how LLM inference works.

An engine with paged KV memory, continuous batching and a radix tree of shared prefixes, and a terminal application
that shows all of it live.

\b
  minitui chat                          chat with the bundled model
  minitui chat --model Qwen/Qwen3-0.6B  chat with a checkpoint from disk, the local cache or the hub
  minitui inspect --connect URL         watch a server: minitui serve, or vLLM
  minitui ask "What is a KV cache?"     one answer on stdout
  minitui demo shared-prefix            watch four chats share a system prompt
  minitui compare batching              two settings side by side on one clock
  minitui class                         a lecture of 50 minutes, from a run sheet
  minitui exercise evict                write a decision of the scheduler yourself
  minitui serve                         serve over HTTP, with OpenAI's and Anthropic's endpoints
  minitui doctor                        list what this machine can run
  minitui models                        list the models in the local cache""",
)
for command in (
    chat, inspect, ask, chats, demo, lesson, exercise, compare, replay, advise, tail, proxy, doctor, models, verify,
):
    app.command()(command)
app.command("class")(lecture)
app.command(cls=ServeCommand)(serve)
app.command(context_settings=PASS_ON)(bench)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False) -> None:
    """Handle the options of minitui itself."""
    if version:
        print(f"minitui {__version__}")
        raise typer.Exit


def main() -> None:
    """Runs the command line. All output is filtered by plain_output (minitui/visible.py)."""
    end_with_parent()
    with plain_output():
        run()


def run() -> None:
    """Runs the command. Prints every failure as one sentence; logs the traceback of an unexpected error to a file."""
    try:
        app()
    except EngineError as error:
        _fail(str(error), 2 if isinstance(error, NoTerminal) else 1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # the program that reads our output has ended (`| head`)
        sys.stderr.close()
        raise SystemExit(0) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            _fail(f"cannot write: {error.strerror}")
        _fail(f"{type(error).__name__}: {error} (this is a bug; its traceback is {_log_crash()})")


def _fail(sentence: str, code: int = 1) -> None:
    print(f"minitui: {sentence}", file=sys.stderr)
    raise SystemExit(code)


def _log_crash() -> str:
    """Writes the traceback of the current exception to a file; returns its place for the error message."""
    import traceback

    try:
        path = data_dir() / "crash.log"
        with path.open("a", encoding="utf-8") as file:
            file.write(traceback.format_exc() + "\n")
    except (OSError, EngineError):
        traceback.print_exc()
        return "above: no log could be written"
    return f"in {path}"
