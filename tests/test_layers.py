"""Who may import whom: the engine no product, what lies below the screens no Textual, the application no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

PRODUCT = ("minitui", "textual", "rich", "typer", "fastapi", "uvicorn")


ENGINE = ("engine", "engine.process.client", "engine.core.engine", "engine.build", "engine.process.server")
ENGINE_WITH_TORCH = ("engine.llm", "engine.worker.runner")
BELOW = ("source", "sessions", "store", "settings", "feed", "view", "markdown", "demo", "ask", "models", "actions")
DRAWING = ("minitui.tui.app", "minitui.cli.main", "minitui.cli.launch", "engine.process.client", "engine.text.tokenizer")


def check(*statements: str) -> dict[str, set[str]]:
    """Top-level names of the modules that a fresh interpreter holds after each of the statements, in their order."""
    code = "import sys\nfor s in sys.argv[1:]:\n exec(s)\n print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", code, *statements], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return dict(zip(statements, map(set, map(str.split, run.stdout.splitlines())), strict=True))


def imports(modules: Iterable[str]) -> list[str]:
    return [f"import {module}" for module in modules]


def test_the_engine_knows_no_product():
    torch = "from engine.process.startup import import_torch; import_torch()"
    rests = "import gc; assert gc.isenabled() and gc.get_freeze_count() > 10_000"  # what torch is made of is passed by
    for statement, held in check(*imports(ENGINE), torch, rests, *imports(ENGINE_WITH_TORCH)).items():
        assert not held.intersection(PRODUCT), statement


def test_below_the_screens_nothing_knows_textual():
    for statement, held in check(*imports(f"minitui.{module}" for module in BELOW)).items():
        assert not held.intersection({"textual", "torch"}), statement


def test_the_process_that_draws_never_loads_torch():
    for statement, held in check(*imports(DRAWING)).items():
        assert "torch" not in held, statement


def test_the_command_line_loads_no_application_before_it_is_asked_for():
    [held] = check("import minitui.cli.main").values()
    assert not held.intersection({"textual", "torch", "tokenizers", "jinja2"})
