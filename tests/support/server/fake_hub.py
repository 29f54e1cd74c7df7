"""A hub on this machine, with as much of its protocol as huggingface_hub needs, and with the faults of a real one."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REVISION = "5" * 40


class FakeHub:
    """Repositories are dictionaries of files. `asked`: the files whose contents were asked for, in order."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []
        self.refusal: tuple[int, str] | None = None  # (status, X-Error-Code) of every answer
        self.cut: set[str] = set()  # files of which a half is sent, and then only errors
        self.cut_once: set[str] = set()  # files of which a half is sent once; the rest can then be asked for
        self.damaged: set[str] = set()  # files whose first byte arrives changed
        self.sizes: dict[str, int] = {}  # sizes that are announced but wrong
        self.token = ""  # if set, every request must carry it
        self.branches: dict[str, tuple[str, dict[str, bytes]]] = {}  # other revisions: (commit, files)
        self.ranges: list[tuple[str, int]] = []  # (file, first byte) of each request that resumes a file
        self.held: set[str] = set()  # files of which a half is sent, and the rest after `release`
        self.half_sent = threading.Event()
        self.release = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.release.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        parts = path.strip("/").split("/")
        if self.refusal is not None:
            status, code = self.refusal
            return _send(request, status, b"{}", {"X-Error-Code": code} if code else {})
        if self.token and parts[0] != "cdn" and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _send(request, 401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if parts[:2] == ["api", "models"]:
            return self._tell(request, "/".join(parts[2:4]), parts[4:])
        repository = "/".join(parts[-5:-3] if parts[0] == "cdn" else parts[:2])
        name, revision = parts[-1], parts[-2]
        commit, files = self._files(repository, revision)
        if name not in files or "resolve" not in parts:
            return _send(request, 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        data = files[name]
        if name.endswith(".safetensors") and parts[0] != "cdn":  # as for every file in LFS
            size = str(self.sizes.get(name, len(data)))
            linked = {"X-Linked-Etag": f'"{_etag(data)}"', "X-Linked-Size": size, "Location": "/cdn" + path}
            return _send(request, 302, b"", {"X-Repo-Commit": commit, **linked})
        if body:
            if name in self.cut and name in self.asked:
                return _send(request, 503, b"")
            self.asked.append(name)
        return self._send_file(request, name, data, commit, body)

    def _files(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]]:
        """The commit and the files of a revision."""
        for name, (commit, files) in self.branches.items():
            if revision in (name, commit):
                return commit, files
        return REVISION, self.repositories.get(repository, {})

    def _tell(self, request: BaseHTTPRequestHandler, repository: str, what: list[str]) -> None:
        revision = what[1] if len(what) > 1 else "main"
        if repository not in self.repositories:
            return _send(request, 404, b"", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", REVISION, *self.branches, *(commit for commit, _ in self.branches.values())):
            return _send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        commit, files = self._files(repository, revision)
        sizes = {name: self.sizes.get(name, len(data)) for name, data in files.items()}
        if what[:1] == ["tree"]:
            tree = [{"type": "file", "path": n, "size": s, "oid": _etag(files[n])[:40]} for n, s in sizes.items()]
            return _send(request, 200, json.dumps(tree).encode())
        siblings: list[dict[str, Any]] = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        for file in siblings:
            name = file["rfilename"]
            if name.endswith(".safetensors"):
                file["lfs"] = {"size": sizes[name], "sha256": _etag(files[name]), "pointerSize": 130}
        info = {"id": repository, "modelId": repository, "sha": commit, "siblings": siblings, "tags": []}
        return _send(request, 200, json.dumps({**info, "downloads": 1, "likes": 0, "private": False}).encode())

    def _send_file(self, request: BaseHTTPRequestHandler, name: str, data: bytes, commit: str, body: bool) -> None:
        etag, whole = _etag(data), len(data)
        if name in self.damaged:
            data = bytes([data[0] ^ 1]) + data[1:]
        begin = int((request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        if begin:
            self.ranges.append((name, begin))
        data = data[begin:]
        half = len(data) // 2
        request.send_response(206 if begin else 200)
        headers = {"Content-Length": len(data), "ETag": f'"{etag}"', "X-Repo-Commit": commit}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{whole - 1}/{whole}"
        for key, value in headers.items():
            request.send_header(key, str(value))
        request.end_headers()
        if not body:
            return
        try:
            request.wfile.write(data[:half])
            request.wfile.flush()
            if name in self.held:
                self.half_sent.set()
                self.release.wait(60)
            if name in self.cut or name in self.cut_once:
                self.cut_once.discard(name)
                request.close_connection = True
                return
            request.wfile.write(data[half:])
        except OSError:  # the client is gone
            pass


def _send(request: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
    request.send_response(status)
    for key, value in {"Content-Length": str(len(data)), "Content-Type": "application/json", **(headers or {})}.items():
        request.send_header(key, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(data)


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
