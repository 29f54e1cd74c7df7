"""Which of several replicas answers: the rule alone, over addresses and loads.

1. A chat stays with the replica that wrote its last answer: the whole conversation lies in that cache.
2. A chat without an answer goes by its prefix, which is its system prompt, or without one its first question: every
   replica is given a weight, the hash of its address and the prefix, and the highest weight is the chat's home. So
   chats that begin alike land in the same cache, whoever asks and whenever, without a table that anybody keeps; and
   when a replica goes, only the chats that were at home there move, each to the second in its own order. (Rendezvous
   hashing: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM ToN 1998.)
3. A replica that is full is passed over for the next in that order. Full means more than its share: SLACK times the
   mean number of requests, running and waiting, over those replicas that can answer, but never fewer than FEW, for a
   batch of so many costs hardly more than one. As a share is more than the mean, somebody always has room.
   ("Consistent hashing with bounded loads": Mirrokni, Thorup and Zadimoghaddam, 2016, with rendezvous order in the
   ring's place. SGLang's router trades cache against load in the same spirit: by prefix, until the loads differ too
   much.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

SLACK = 1.25
FEW = 4  # requests


def rank(prefix: str, names: Iterable[str]) -> list[str]:
    """The names in the order of their weights for this prefix, the highest first."""

    def weight(name: str) -> bytes:
        return hashlib.blake2b(f"{name}\0{prefix}".encode("utf-8", "surrogatepass"), digest_size=8).digest()

    return sorted(names, key=lambda name: (weight(name), name), reverse=True)


def capacity(loads: Iterable[float]) -> int:
    """How many requests one of several replicas may have, when one more is to be placed."""
    told = list(loads)
    return max(FEW, math.ceil(SLACK * (sum(told) + 1) / max(1, len(told))))


def order(prefix: str, loads: Mapping[str, float], last: str = "") -> list[str]:
    """The replicas that can answer, in the order in which they should be asked.

    `loads`: the requests that each has now; `last`: the one that wrote this chat's last answer, if it is known.
    """
    ranked = rank(prefix, loads)
    ranked.sort(key=lambda name: name != last)  # stable: the others keep their order
    most = capacity(loads.values())
    ranked.sort(key=lambda name: loads[name] >= most)
    return ranked
