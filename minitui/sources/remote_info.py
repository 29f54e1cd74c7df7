"""Fetches a minitui server's description of itself (/minitui/info), and the files of its tokenizer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from pathlib import Path

from engine.errors import EngineDead, EngineError
from minitui.protocol import TOKENIZER_FILES, ServerInfo
from minitui.sources import remote_checks
from minitui.sources.bounds import LARGE
from minitui.sources.http import check, httpx, load_json, normalise, open_client, unreachable
from minitui.sources.remote_checks import Refused


def probe(url: str, key: str = "") -> ServerInfo | None:
    """Returns a server's /minitui/info; None if it is not a minitui server, an empty one if it is not ready yet (503).

    Blocks: call it before the event loop runs. Raises EngineError if the server cannot be reached or refuses the key.
    """
    return asyncio.run(probe_async(normalise(url), key))


def probe_all(urls: list[str], key: str = "") -> list[ServerInfo | EngineError | None]:
    """Probe several servers at once; returns for each server the result of `probe` or the raised EngineError.

    Raises InvalidRequest if one of `urls` is not an address.
    """
    addresses = [normalise(url) for url in urls]

    async def ask(url: str) -> ServerInfo | EngineError | None:
        try:
            return await probe_async(url, key)
        except EngineError as error:
            return error

    async def ask_all() -> list[ServerInfo | EngineError | None]:
        return await asyncio.gather(*(ask(url) for url in addresses))

    return asyncio.run(ask_all())


async def probe_async(url: str, key: str = "") -> ServerInfo | None:
    """Does the same as `probe`, on the running event loop."""
    async with open_client(url, key) as client:
        try:
            response = await client.get("/minitui/info")
            if response.status_code in (404, 405):
                return None
            return read_info(url, (await check(response)).content)
        except EngineDead:
            return ServerInfo()
        except (httpx.HTTPError, OSError) as error:
            raise unreachable(url, error) from error


def read_info(url: str, text: bytes) -> ServerInfo:
    """Returns the checked answer of /minitui/info. Raises EngineError if it is not valid."""
    try:
        return remote_checks.info(load_json(text))
    except Refused as error:
        raise EngineError(f"{url} is not a minitui server of this version: {error}") from error


async def load_tokenizer(http: httpx.AsyncClient, url: str, files: dict[str, str], cache: Path) -> Path:
    """Returns the directory in `cache` with a server's tokenizer, after downloading the missing files.

    `files`: the SHA-256 of each file by name, from /minitui/info.
    """
    if not set(files) <= set(TOKENIZER_FILES):
        unknown = sorted(set(files) - set(TOKENIZER_FILES))
        raise EngineError(f"{url} offers files that do not belong to a tokenizer: {', '.join(unknown)}")
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    directory = cache / digest[:24]
    directory.mkdir(parents=True, exist_ok=True)
    for name, wanted in files.items():
        path = directory / name
        if path.is_file():
            continue
        response = await http.get(f"/minitui/tokenizer/{name}", extensions=LARGE.extension())
        content = (await check(response)).content
        if hashlib.sha256(content).hexdigest() != wanted:
            raise EngineError(f"{url} sent a {name} that does not match its announced checksum: connect again")
        partial = directory / f"{name}.{uuid.uuid4().hex[:8]}"
        partial.write_bytes(content)
        partial.replace(path)
    return directory
