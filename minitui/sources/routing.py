"""Chooses which of several replicas answers a chat. Only the chat, and the replicas' addresses and loads, decide.

1. A chat stays with the replica that wrote its last answer: the cache of that replica holds the whole conversation.
2. A chat without an answer is routed by its prefix: its system prompt, or else its first question. The hash of prefix
   and replica is the replica's weight, and the replica with the highest weight gets the chat. So chats that begin alike
   use the same cache, and no table is needed. When a replica leaves, only its own chats move, each to the replica with
   the next highest weight. (Rendezvous hashing: Thaler and Ravishankar, "Using name-based mappings to increase hit
   rates", IEEE/ACM ToN 1998.)
3. A full replica is asked last. A replica is full when its requests, running and waiting, reach a limit: SLACK times
   the mean number of requests over the usable replicas, but at least FEW. (A batch of FEW requests takes hardly longer
   than one request.) The limit is above the mean, so at least one replica always has room. ("Consistent hashing with
   bounded loads": Mirrokni, Thorup and Zadimoghaddam, 2016, with rendezvous order instead of the ring. SGLang's router
   makes a similar trade-off: it routes by prefix until the loads differ too much.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SLACK = 1.25  # times the mean number of requests
FEW = 4  # requests


@dataclass(frozen=True)
class Opening:
    """The data that route a chat: the text it begins with, and the address of the replica that answered last."""

    text: str = ""
    last: str = ""


def rank(prefix: str, names: Iterable[str]) -> list[str]:
    """Returns the names in the order of their weights for this prefix, the highest weight first."""

    def weight(name: str) -> bytes:
        return hashlib.blake2b(f"{name}\0{prefix}".encode("utf-8", "surrogatepass"), digest_size=8).digest()

    return sorted(names, key=lambda name: (weight(name), name), reverse=True)


def capacity(loads: Iterable[float]) -> int:
    """Returns the number of requests at which a replica is full. The request to be placed is part of the mean."""
    counts = list(loads)
    return max(FEW, math.ceil(SLACK * (sum(counts) + 1) / max(1, len(counts))))


def order(prefix: str, loads: Mapping[str, float], last: str = "") -> list[str]:
    """Returns the usable replicas in the order in which they should be asked. `loads`: the current requests of each
    replica. `last`: the replica that wrote this chat's last answer, if known."""
    ranked = rank(prefix, loads)
    ranked.sort(key=lambda name: name != last)  # the sort is stable: the others keep their order
    most = capacity(loads.values())
    ranked.sort(key=lambda name: loads[name] >= most)
    return ranked
