"""Plans a run, sends its requests and prints the report."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from engine.errors import EngineError, InvalidRequest
from minitui.bench.load.options import LoadOptions
from minitui.bench.load.plan import poisson, replay
from minitui.bench.load.report import Limits, report, summarise
from minitui.bench.load.sending import run_load
from minitui.visible import json_text


async def measure(options: LoadOptions) -> dict[str, Any]:
    """Plans and sends the requests; returns the figures. Raises EngineError if the run cannot start."""
    from minitui.sources.http import normalise

    url = normalise(options.url)
    model = options.model or await first_model(url, options.key)
    if options.trace is not None:
        try:
            lines = options.trace.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may contain U+2028
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{options.trace} cannot be read: {error}", "trace") from error
        plan = replay(lines, options, model)
    else:
        plan = poisson(options, model)
    outcomes = await run_load(url, options.key, plan, options.timeout, None if options.json else sys.stderr)
    limits = Limits(options.ttft_ms, options.tpot_ms, options.e2e_ms)
    return {"url": url, "model": model, "rate": options.rate, **summarise(outcomes, limits)}


async def first_model(url: str, key: str) -> str:
    """Returns the first model that the server lists."""
    from minitui.sources.http import check, httpx, load_json, open_client, unreachable

    async with open_client(url, key) as client:
        try:
            listed = load_json((await check(await client.get("/v1/models"))).content)
            return str(listed["data"][0]["id"])
        except (httpx.HTTPError, OSError) as error:
            raise unreachable(url, error) from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"{url}/v1/models lists no model: choose one with --model") from error


def load(options: LoadOptions) -> None:
    """Sends the requests and prints the report."""
    for name in ("rate", "speed", "timeout"):
        if not getattr(options, name) > 0:
            raise InvalidRequest(f"--{name} is {getattr(options, name)}: it must be above 0", name)
    figures = asyncio.run(measure(options))
    if options.json:
        print(json_text({**figures, "rate": str(figures["rate"])}, indent=2))
    else:
        print("\n".join(report(figures)))
