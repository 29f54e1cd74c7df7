"""The pieces of Textual that minitui replaces or relies on are those for which it was written."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
from functools import cache

import textual

from minitui.tui.terminal.textual_insides import TEXTUAL
from tests.support.paths import ROOT

ALLOWED = {"minitui/tui/terminal/textual_insides.py", "minitui/web/mirror_driver.py", "minitui/tui/terminal/guard.py"}
# The beginnings of their digests. They include what these pieces call, if minitui relies on that, too.
PIECES = {
    "rich.segment:Segment._split_cells": "9e6f70da9b4f",
    "textual.strip:Strip.divide": "708bd67448d8",
    "textual.strip:Strip.crop_extend": "9be2932ef7fc",
    "textual.strip:Strip.adjust_cell_length": "9dc440667acd",
    "textual.strip:Strip.render_style": "1c9d39eec679",
    "textual._xterm_parser:XTermParser._sequence_to_key_events": "fd21105b54cc",
    "textual._compositor:Compositor._regions_to_spans": "f12ef9bf9300",
    "textual._compositor:Compositor.render_update": "0ad323b75181",
    "textual._compositor:Compositor.render_partial_update": "b61a8d739101",
    "textual._compositor:Compositor.layers_visible": "e9f9f8ec016a",
    "textual._compositor:Compositor.cuts": "0a850ec685fb",
    "textual._compositor:CompositorUpdate": "5f4931f9afa7",
    "textual.app:App._display": "a28efe0d48ef",
    "textual.app:App.on_event": "4f6086b413d1",
    "textual.app:App._unnotify": "a32f27b3a400",
    "textual.app:App._handle_exception": "ebf01bf0d7ba",
    "textual.app:App._update_mouse_over": "3e4a4c4525f1",
    "textual.driver:Driver.send_message": "39e4661e0edf",
    "textual.drivers.linux_driver:LinuxDriver": "e12f854c4884",
    "textual.screen:Screen._screen_resized": "5225534965f9",
    "textual.screen:Screen._compositor_refresh": "30c01d22baee",
    "textual.screen:Screen._on_timer_update": "b429ac023000",
    "textual.widget:Widget.refresh": "9224b76d276f",
    "textual.widget:Widget.render_lines": "d3a6999d1182",
    "textual.widget:Widget._exchange_repaint_regions": "316d14a94979",
}


@cache
def parsed(module: str) -> tuple[str, ast.AST]:
    source = inspect.getsource(importlib.import_module(module))
    return source, ast.parse(source)


def digest_of(name: str) -> str:
    """Of the source in Textual's file: an application in this process may have replaced the method itself."""
    module, _, path = name.partition(":")
    source, node = parsed(module)
    for part in path.split("."):
        inner = [n for n in getattr(node, "body", ()) if getattr(n, "name", "") == part]
        assert inner, f"{name} is gone"
        node = inner[-1]
    return hashlib.sha256((ast.get_source_segment(source, node) or "").encode()).hexdigest()[:12]


def test_textual_is_the_one_for_which_its_changes_were_written() -> None:
    assert textual.__version__.startswith(f"{TEXTUAL}."), "read textual_insides.py with the new Textual beside it"
    changed = {name: now for name, then in PIECES.items() if (now := digest_of(name)) != then}
    assert not changed, f"these have changed: read them, mend textual_insides.py, and note their new digests: {changed}"


def test_no_other_file_uses_what_textual_keeps_for_itself() -> None:
    users = set()
    for path in (ROOT / "minitui").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.startswith(("textual._", "textual.drivers")) for name in names):
                users.add(path.relative_to(ROOT).as_posix())
    assert users <= ALLOWED
