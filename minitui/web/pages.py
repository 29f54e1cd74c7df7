"""The pages of `--web` and of a class. Their texts are in templates/.

The page with the application is textual-serve's, with minitui's font, sizes, title and touch keys. The application
tells the page its title and the keys of its screen (minitui/tui/widgets/bars.py). Where the pointer is a finger, the
page has a button for each key, and a swipe turns the wheel of the mouse.

xterm takes the pixels of its canvas from a ResizeObserver, whose device-pixel-content-box does not know of an emulated
device pixel ratio (DevTools, Emulation.setDeviceMetricsOverride): there the terminal is two or three times too large.
Devices are right; to try a ratio, start Chromium with --force-device-scale-factor=3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from textual_serve import server as textual_serve

FOLDERS = Path(__file__).parent / "templates", Path(textual_serve.__file__).parent / "templates"
PAGES = Environment(loader=FileSystemLoader(FOLDERS), autoescape=True)
STATIC = FOLDERS[1].parent / "static"


def filled(name: str, **values: Any) -> str:
    """Returns one of the files in templates/, with these values."""
    return PAGES.get_template(name).render(values)


def page(socket_path: str, more: str) -> str:
    """Returns textual-serve's page for the websocket at `socket_path`; `more` is added to its head."""
    text = filled(
        "app_index.html", config={"static": {"url": "/static/"}}, application={"name": "minitui"}, font_size=16,
        app_websocket_url="",
    )
    text = text.replace("https://fonts.googleapis.com/css?family=Roboto%20Mono", "/static/css/xterm.css")
    return text.replace("</head>", filled("head.html", socket_path=socket_path) + more + "</head>", 1)
