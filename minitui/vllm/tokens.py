"""The tokens of a request of vLLM's, and a hash of each of its full blocks. vLLM hashes a full block: its tokens, the
hash of the block before it, and what else its keys and values depend on. The watcher does the same with a hash of its
own, so vLLM's process need not send its hashes."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from hashlib import blake2b


def checksum(tokens: Sequence[int]) -> int:
    """Returns a number that is another one for other tokens."""
    return zlib.crc32(array("i", tokens))


class Tokens:
    """The tokens of one request. `ids`: the prompt of `prompt` tokens, and what was generated so far."""

    def __init__(
        self, prompt: list[int], size: int, more: tuple[list[bytes], bytes] | None = None, unit: int = 0
    ) -> None:
        """`size`: tokens of a block. `more`: vLLM's hashes of the prompt's units, and a name for what is hashed beside
        tokens (an adapter, an image, a salt), where that is so. `unit`: tokens of one hash; 0: of a block."""
        self.ids = list(prompt)
        self.prompt = len(prompt)
        self._unit = unit or size
        self._step = size // self._unit
        self._hashes: list[bytes] = list(more[0]) if more else []
        self._root = more[1] if more else b""

    @property
    def output(self) -> int:
        """The number of tokens that were generated."""
        return len(self.ids) - self.prompt

    def at(self, end: int) -> bytes:
        """Returns the hash of the first `end` tokens, a multiple of the unit."""
        self._hash(end // self._unit)
        return self._hashes[end // self._unit - 1]

    def hashes(self, end: int) -> list[bytes]:
        """Returns the hashes of the first `end` blocks."""
        self._hash(end * self._step)
        return self._hashes[self._step - 1 : end * self._step : self._step]

    def _hash(self, end: int) -> None:
        for i in range(len(self._hashes), end):
            before = self._hashes[-1] if i else self._root
            block = array("i", self.ids[i * self._unit : (i + 1) * self._unit])
            self._hashes.append(blake2b(before + block.tobytes(), digest_size=16).digest())
