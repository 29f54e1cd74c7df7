"""What the functions of students get: plain facts about requests, and about nodes of the prefix tree."""

from __future__ import annotations

from typing import Any, NamedTuple


class Waiting(NamedTuple):
    """A request in the queue."""

    id: int  # 1 for the request that came first
    prompt: int  # tokens of its prompt
    cached: int  # how many of these tokens are in the prefix cache now
    waited: int  # steps since it came
    overtaken: int  # how many requests that came later were admitted before it


class Running(NamedTuple):
    """A request in the batch."""

    id: int  # 1 for the request that came first
    prompt: int  # tokens of its prompt
    reply: int  # tokens of its reply so far
    blocks: int  # blocks that it uses; others may share some of them
    preemptions: int  # how often it was preempted


class Node(NamedTuple):
    """A text in the prefix tree: some blocks of tokens that follow the text of its parent."""

    id: int
    parent: int  # the id of the node before it in the text; 0: the root
    children: tuple[int, ...]  # the ids of the nodes that continue its text
    users: tuple[int, ...]  # the ids of the requests that use it now
    last_used: int  # a clock that counts up: a larger number was used later
    blocks: tuple[int, ...]  # its blocks in the pool


def read_only(view: object, name: str, value: object) -> None:
    """Raises AttributeError."""
    raise AttributeError(f"`{name}` of a {type(view).__name__} cannot be changed: it is a copy of what the engine has")


def by_number(view: tuple[object, ...], key: Any) -> object:
    """Returns a field by its number, as of every tuple. Raises TypeError for a name."""
    if isinstance(key, str):
        kind = "node" if isinstance(view, Node) else "request"
        raise TypeError(f"write `{kind}.{key}`, not {kind}[{key!r}]")
    return tuple.__getitem__(view, key)


for view in (Waiting, Running, Node):
    view.__setattr__ = read_only  # type: ignore[method-assign]
    view.__getitem__ = by_number  # type: ignore[method-assign, assignment]
