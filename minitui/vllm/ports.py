"""Where the recorder's telemetry is: on the port after vLLM's own. Data parallel rank r adds r."""

from __future__ import annotations

from engine.errors import EngineError

VLLM_PORT = 8000  # of `vllm serve` without --port


def api_port(arguments: list[str]) -> int:
    """Returns the port of vLLM's server from its command line. vLLM's engine process has the same command line."""
    port = VLLM_PORT
    for name, value in zip(arguments, [*arguments[1:], ""], strict=True):
        text = value if name == "--port" else name.removeprefix("--port=") if name.startswith("--port=") else ""
        port = int(text) if text.isdecimal() else port
    return port


def telemetry_port(chosen: str | None, api: int, rank: int) -> int:
    """Returns the port of the telemetry. `chosen`: MINITUI_TELEMETRY_PORT. Raises EngineError with a sentence."""
    text = str(api + 1) if chosen is None else chosen
    if not text.isdecimal() or not 1 <= int(text) + rank <= 65535:
        raise EngineError(f"MINITUI_TELEMETRY_PORT is {text!r}: it must be a port, 1 to {65535 - rank}")
    return int(text) + rank
