"""Decompresses request bodies piece by piece: neither memory nor the event loop is held by a small, dense body."""

from __future__ import annotations

import zlib

from starlette.datastructures import Headers

from minitui.server.errors import ApiError

WINDOW = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's number for the format


class Inflater:
    """Turns the pieces of a body as sent into its bytes. Without Content-Encoding, they are the same."""

    def __init__(self, headers: Headers) -> None:
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding not in (*WINDOW, "identity", ""):
            raise ApiError(
                415, f"the body's encoding {coding[:64]!r} is not supported: use gzip, deflate or none",
                code="unsupported_encoding",
            )  # fmt: skip
        self.coding = coding if coding in WINDOW else ""
        self._stream = zlib.decompressobj(WINDOW[coding]) if self.coding else None

    def push(self, piece: bytes, most: int) -> bytes:
        """Returns the next bytes of the body, at most `most` of them."""
        if self._stream is None:
            return piece[:most]
        try:
            found = self._stream.decompress(piece, most)
        except zlib.error as error:
            raise self._damaged(str(error)) from error
        if self._stream.unused_data:
            raise self._damaged("there are bytes after its end")
        return found

    def end(self) -> None:
        """Raises ApiError if the body ended too early."""
        if self._stream is not None and not self._stream.eof:
            raise self._damaged("its end is missing")

    def _damaged(self, reason: str) -> ApiError:
        return ApiError(400, f"the body is not valid {self.coding}: {reason}", code="bad_encoding")
