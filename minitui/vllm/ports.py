"""Where vLLM's server and the recorder's telemetry are, and which keys they have, from vLLM's command line.

The telemetry is on the port after vLLM's own; each further data parallel rank on this machine takes the next port. With
--data-parallel-multi-port-external-lb, each rank has a server of its own, and the telemetry follows after all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from minitui.protocol import MOST_RANKS

VLLM_PORT = 8000  # of `vllm serve` without --port
SHORT = {
    "-dp": "--data-parallel-size", "-dpl": "--data-parallel-size-local", "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank", "-dpe": "--data-parallel-external-lb", "-n": "--nnodes",
    "-dpm": "--data-parallel-multi-port-external-lb",
}


@dataclass(frozen=True)
class Ports:
    """`api`: of vLLM's server; `telemetry`: of this engine; `all`: the telemetry of all engines of this server here."""

    api: int
    telemetry: int
    all: tuple[int, ...]


def ports_of(arguments: list[str], chosen: str | None = None, rank: int = 0, local_rank: int = 0) -> Ports:
    """Returns the ports. Raises EngineError if they are not ports. `arguments`: the command line of vLLM's server; its
    engine processes have it, too. `chosen`: MINITUI_TELEMETRY_PORT. `rank` and `local_rank`: of the engine, among all
    ranks and among those of this machine."""
    options = options_of(arguments)
    api, ranks = _number(options, "--port", VLLM_PORT), _local_ranks(options)
    first = api + 1
    if "--data-parallel-multi-port-external-lb" in options:
        local_rank = max(0, rank - _number(options, "--data-parallel-start-rank", 0))
        first, api = api + ranks, api + local_rank
    elif "--data-parallel-external-lb" in options or "--data-parallel-rank" in options:
        ranks = 1
    ranks = min(max(ranks, local_rank + 1), MOST_RANKS)
    if chosen is not None:
        first = int(chosen) if chosen.isdecimal() else 0
        if not 1 <= first <= 65536 - ranks:
            raise EngineError(f"MINITUI_TELEMETRY_PORT is {chosen!r}: it must be a port, 1 to {65536 - ranks}")
    if first + local_rank > 65535:
        raise EngineError(f"there is no port {first + local_rank}: choose one with MINITUI_TELEMETRY_PORT")
    ports = tuple(range(first, first + ranks))
    if "--data-parallel-multi-port-external-lb" in options:
        return Ports(api, first + local_rank, (first + local_rank,))
    return Ports(api, first + local_rank, ports)


def _local_ranks(options: dict[str, list[str]]) -> int:
    """Returns the number of data parallel ranks on this machine."""
    ranks = _number(options, "--data-parallel-size", 1) // max(1, _number(options, "--nnodes", 1))
    return max(1, _number(options, "--data-parallel-size-local", ranks))


def key_variables(arguments: list[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns vLLM's own API keys as variables of the watcher; nothing if the operator chose other keys, or none.
    `arguments`: the command line of vLLM's server; `environment`: its variables."""
    if any(environment.get(f"MINITUI_{kind}_KEY") for kind in ("API", "CHAT", "WATCH")):
        return {}
    keys = options_of(arguments).get("--api-key") or environment.get("VLLM_API_KEY", "").split()
    return {"MINITUI_API_KEY": " ".join(keys)} if keys else {}


def _number(options: dict[str, list[str]], name: str, default: int) -> int:
    text = "".join(options.get(name, [])[:1])
    return int(text) if text.isdecimal() and len(text) < 6 else default


def options_of(arguments: list[str]) -> dict[str, list[str]]:
    """Returns the options with the words that follow them. Like vLLM, reads NAME VALUE, NAME=VALUE, underscores and
    --config FILE."""
    options: dict[str, list[str]] = {}
    words: list[str] = []
    for word in arguments:
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            words = []
            options[SHORT.get(name, name.replace("_", "-"))] = [value] if equals else words
        else:
            words.append(word)
    values: Any = None
    if options.get("--config"):
        with suppress(Exception):  # vLLM says what is wrong with its file
            import yaml

            values = yaml.safe_load(Path(options["--config"][0]).read_text())
    if isinstance(values, dict):
        given = {name: value for name, value in values.items() if value is not None and value is not False}
        options = {
            f"--{str(name).replace('_', '-')}": [str(v) for v in (value if isinstance(value, list) else [value])]
            for name, value in given.items()
        } | options
    return options
