"""`minitui serve`: serves an engine over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from engine.process import early_process
from minitui.chat.model_choice import choose_model
from minitui.cli.launch import log_path
from minitui.cli.options import AllowedHost, Model, Record, engine_config, with_options
from minitui.progress import Phases

NAMES = "--served-model-name"


class ServeCommand(TyperCommand):
    """Accepts several names after one --served-model-name, as vLLM does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        naming = False
        for argument in args:
            naming = argument == NAMES or (naming and not argument.startswith("-"))
            if naming and argument != NAMES and spread[-1] != NAMES:
                spread.append(NAMES)
            spread.append(argument)
        return super().parse_args(ctx, spread)


@with_options("engine")
def serve(
    engine: dict[str, Any],
    model: Model = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; all but loopback addresses require an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free port.")] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key with all rights. The environment variable MINITUI_API_KEY is safer.")
    ] = None,
    chat_key: Annotated[
        list[str] | None, typer.Option(help="A key for sending requests and watching; or set MINITUI_CHAT_KEY.")
    ] = None,
    watch_key: Annotated[
        list[str] | None, typer.Option(help="A key for watching only; or set MINITUI_WATCH_KEY.")
    ] = None,
    metrics_without_key: Annotated[
        bool, typer.Option("--metrics-without-key", help="Serve /metrics without a key, for Prometheus.")
    ] = False,
    record: Record = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin of web pages that may use this server, as in https://example.org.")
    ] = None,
    allowed_host: AllowedHost = None,
    hide_text: Annotated[
        bool, typer.Option("--hide-text", help="Hide the text of prompts and answers in the telemetry.")
    ] = False,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME...", help="Names of the model in requests and answers; the first is the main name."),
    ] = None,
    trust_request_chat_template: Annotated[
        bool, typer.Option("--trust-request-chat-template", help="Let requests replace the model's chat template.")
    ] = False,
    ignore_unknown_fields: Annotated[
        bool, typer.Option("--ignore-unknown-fields", help="Ignore unknown fields of requests, instead of an error.")
    ] = False,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Maximum number of waiting sequences; further requests are refused (429).")
    ] = 128,
    stored_responses: Annotated[
        int, typer.Option(min=0, help="Maximum number of responses that /v1/responses keeps for each API key; 0: none.")
    ] = 1024,
    max_body_mib: Annotated[int, typer.Option(min=1, help="Maximum size of a request body, in MiB.")] = 4,
    request_timeout: Annotated[float, typer.Option(min=0.1, help="Time limit of an answer, in seconds.")] = 600.0,
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, help="Time for running answers to finish after SIGTERM, in seconds.")
    ] = 3.0,
    profile_start: Annotated[
        bool, typer.Option("--profile-start", help="When ready, print how long each phase of the start took.")
    ] = False,
) -> None:
    """Serve a model over HTTP.

    The server has POST /generate, OpenAI's endpoints (chat, completions, responses), Anthropic's messages, Prometheus
    metrics, and telemetry for minitui chat --connect.

    \b
      minitui serve
      minitui serve --model Qwen/Qwen3-0.6B --port 9000
      MINITUI_API_KEY=$(openssl rand -hex 16) minitui serve --host 0.0.0.0
      curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "What is a KV cache?"}]}'
    """
    choice = choose_model(model)
    config, log_file = engine_config(choice.name, **engine), log_path()
    early_process.begin(log_file)
    phases = Phases("Python, imports of the command line")
    phases.begin("imports of the server")
    from minitui.server.command import gather_keys, run_serve
    from minitui.server.settings import ServerSettings

    settings = ServerSettings(
        host=host, port=port, keys=gather_keys(api_key or [], chat_key or [], watch_key or []), record=record,
        cors_origins=tuple(cors_origin or ()), allowed_hosts=tuple(allowed_host or ()),
        open_metrics=metrics_without_key, ignore_unknown_fields=ignore_unknown_fields, hide_text=hide_text,
        served_names=tuple(dict.fromkeys(served_model_name or [choice.label])),
        trust_request_template=trust_request_chat_template, max_waiting=max_waiting, stored_responses=stored_responses,
        max_body=max_body_mib << 20, request_s=request_timeout, drain_s=drain_seconds,
    )
    raise typer.Exit(run_serve(config, settings, log_file, phases if profile_start else None))
