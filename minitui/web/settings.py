"""The settings of `--web`."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

LEGIBLE = "abcdefghjkmnpqrstuvwxyz23456789"  # easy to read: viewers may copy their address from a blackboard
TOKEN = 10  # characters; trying all tokens takes 2,600 years at 10,000 guesses a second

TABS = 32  # each tab has a process, which takes 100 MB …
TABS_WITH_ENGINES = 4  # … and half a gigabyte more if it has an engine of its own


def new_token() -> str:
    """Returns the token of an address that people may copy by hand."""
    return "".join(secrets.choice(LEGIBLE) for _ in range(TOKEN))


@dataclass(frozen=True)
class WebSettings:
    """`words`: the command of each application, without "minitui". `names`: names of this server besides the usual ones
    (--allowed-host). `tabs`: the most applications, without `mirror`. `link`, `token`: the phones of a class and the
    viewers have the address /LINK-TOKEN."""

    host: str = "127.0.0.1"
    port: int = 8001
    words: tuple[str, ...] = ()
    mirror: bool = False
    names: tuple[str, ...] = ()
    tabs: int = TABS
    link: str = "class"
    token: str = field(default_factory=new_token)
