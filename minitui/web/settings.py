"""The settings of `--web`."""

from __future__ import annotations

from dataclasses import dataclass

TABS = 32  # each tab has a process, which takes 100 MB …
TABS_WITH_ENGINES = 4  # … and half a gigabyte more if it has an engine of its own


@dataclass(frozen=True)
class WebSettings:
    """`words`: the command of each application, without "minitui". `names`: names of this server besides the usual ones
    (--allowed-host). `tabs`: the most applications, without `mirror`."""

    host: str = "127.0.0.1"
    port: int = 8001
    words: tuple[str, ...] = ()
    mirror: bool = False
    names: tuple[str, ...] = ()
    tabs: int = TABS
