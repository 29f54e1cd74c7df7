"""Where vLLM's server and the recorder's telemetry are, according to vLLM's command line.

The telemetry is on the port after vLLM's own; each further data parallel rank on this machine takes the next port. With
--data-parallel-multi-port-external-lb, each rank has a server of its own, and the telemetry follows after all of them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import EngineError

VLLM_PORT = 8000  # of `vllm serve` without --port
MOST_RANKS = 64  # on one machine
SHORT = {
    "-dp": "--data-parallel-size", "-dpl": "--data-parallel-size-local", "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank", "-dpe": "--data-parallel-external-lb", "-n": "--nnodes",
    "-dpm": "--data-parallel-multi-port-external-lb",
}  # fmt: skip


@dataclass(frozen=True)
class Ports:
    """`api`: of vLLM's server; `telemetry`: of this engine; `all`: the telemetry of all engines of this server here."""

    api: int
    telemetry: int
    all: tuple[int, ...]


def ports_of(arguments: list[str], chosen: str | None = None, rank: int = 0, local_rank: int = 0) -> Ports:
    """Returns the ports. Raises EngineError if they are not ports.

    `arguments`: the command line of vLLM's server; its engine processes have it, too. `chosen`:
    MINITUI_TELEMETRY_PORT. `rank` and `local_rank`: of the engine, among all ranks and among those of this machine.
    """
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


def _local_ranks(options: dict[str, str]) -> int:
    """Returns the number of data parallel ranks on this machine."""
    ranks = _number(options, "--data-parallel-size", 1) // max(1, _number(options, "--nnodes", 1))
    return max(1, _number(options, "--data-parallel-size-local", ranks))


def _number(options: dict[str, str], name: str, default: int) -> int:
    text = options.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 6 else default


def options_of(arguments: list[str]) -> dict[str, str]:
    """Returns the options by their names. Like vLLM, reads NAME VALUE, NAME=VALUE, underscores and --config FILE."""
    options = {}
    for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            options[SHORT.get(name, name.replace("_", "-"))] = value if equals else following
    values: Any = None
    if "--config" in options:
        with suppress(Exception):  # vLLM says what is wrong with its file
            import yaml  # type: ignore[import-untyped]

            values = yaml.safe_load(Path(options["--config"]).read_text())
    if isinstance(values, dict):
        given = {name: value for name, value in values.items() if value is not None and value is not False}
        options = {f"--{str(name).replace('_', '-')}": str(value) for name, value in given.items()} | options
    return options
