"""Measures what `minitui proxy` adds to a request, in milliseconds.

    python -m minitui.dev.proxy_latency [--requests 400] [--body 20000] [--json]

A server in a process of its own answers each request at once with a stream of CHUNKS pieces. A client with plain
sockets asks it directly and through a proxy in a third process, in turn, so that both meet the same moments of the
machine. "first": from the request to the first byte of the answer; "whole": to its last byte; "cold": the first byte on
a new connection of the client. A line has the medians of both ways and of the differences of the pairs.
"""

from __future__ import annotations

import json as jsonlib
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

CHUNKS = 50
PIECE = b'data: {"choices": [{"delta": {"content": "a token"}}]}\n\n'
END = b"0\r\n\r\n"
ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"%x\r\n%s\r\n" % (len(PIECE), PIECE) * CHUNKS + END
)
SERVER = """
import asyncio, sys
async def serve(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\\r\\n")[0])
            await reader.readexactly(length)
            writer.write(answer)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
answer = sys.stdin.readline().strip().encode("latin-1").decode("unicode_escape").encode("latin-1")
asyncio.run(main())
"""


class Client:
    """One connection. `ask` returns (ms until the first byte, until the last one)."""

    def __init__(self, port: int, body: bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        self._request = head % len(body) + body

    def ask(self) -> tuple[float, float]:
        began = time.perf_counter()
        self._socket.sendall(self._request)
        data = self._socket.recv(1 << 16)
        first = time.perf_counter() - began
        while not data.endswith(END):
            data = self._socket.recv(1 << 16)
        return first * 1e3, (time.perf_counter() - began) * 1e3

    def close(self) -> None:
        self._socket.close()


def measure(direct: int, proxied: int, requests: int, body: bytes) -> dict[str, list[tuple[float, float]]]:
    """Returns the pairs (direct, proxied) of each time."""
    found: dict[str, list[tuple[float, float]]] = {"first": [], "whole": [], "cold": []}
    clients = [Client(port, body) for port in (direct, proxied)]
    for n in range(requests):
        order = (0, 1) if n % 2 else (1, 0)
        warm, cold = {}, {}
        for i in order:
            warm[i] = clients[i].ask()
            once = Client((direct, proxied)[i], body)
            cold[i] = once.ask()[0]
            once.close()
        if n >= requests // 10:  # the first ones warm up
            found["first"].append((warm[0][0], warm[1][0]))
            found["whole"].append((warm[0][1], warm[1][1]))
            found["cold"].append((cold[0], cold[1]))
    for client in clients:
        client.close()
    return found


def main(
    requests: Annotated[int, typer.Option(help="Requests of each way.", min=10)] = 400,
    body: Annotated[int, typer.Option(help="Bytes of a prompt.", min=1)] = 20_000,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what the proxy adds."""
    sent = jsonlib.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * body}]}).encode()
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(ANSWER.decode("latin-1").encode("unicode_escape") + b"\n")
        server.stdin.flush()
        port = int(server.stdout.readline())
        command = [sys.executable, "-m", "minitui", "proxy", "--to", f"http://127.0.0.1:{port}", "--port", "0"]
        passing = subprocess.Popen([*command, "--log", str(Path(folder, "log"))], stdout=subprocess.PIPE)
        assert passing.stdout is not None
        try:
            words = passing.stdout.readline().decode()
            found = measure(port, int(words.split()[0].rpartition(":")[2]), requests, sent)
        finally:
            for process in (passing, server):
                process.terminate()
                process.wait()
    rows = {
        name: {
            "direct": median(a for a, _ in pairs), "proxied": median(b for _, b in pairs),
            "added": median(b - a for a, b in pairs),
        }
        for name, pairs in found.items()
    }
    if json:
        print(jsonlib.dumps(rows))
        return
    for name, row in rows.items():
        print(f"{name:6s}" + "".join(f"{key:>9s} {ms:6.3f} ms" for key, ms in row.items()))


if __name__ == "__main__":
    typer.run(main)
