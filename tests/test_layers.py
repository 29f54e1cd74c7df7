"""Who may import whom: the engine no product, what lies below the screens no Textual, the application no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRODUCT = ("minitui", "textual", "rich", "typer", "fastapi", "uvicorn")


def loaded_by(statement: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter holds after `statement`."""
    code = f"{statement}\nimport sys; print(' '.join(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "module",
    ["engine", "engine.client", "engine.engine", "engine.build", "engine.llm", "engine.runner", "engine.process"],
)
def test_the_engine_knows_no_product(module):
    assert not loaded_by(f"import {module}").intersection(PRODUCT)


@pytest.mark.parametrize(
    "module",
    ["source", "sessions", "store", "settings", "feed", "view", "markdown", "demo", "ask", "models", "actions"],
)
def test_below_the_screens_nothing_knows_textual(module):
    assert not loaded_by(f"import minitui.{module}").intersection({"textual", "torch"})


@pytest.mark.parametrize(
    "module", ["minitui.app", "minitui.cli", "minitui.launch", "engine.client", "engine.tokenizer"]
)
def test_the_process_that_draws_never_loads_torch(module):
    assert "torch" not in loaded_by(f"import {module}")


def test_the_command_line_loads_no_application_before_it_is_asked_for():
    assert not loaded_by("import minitui.cli").intersection({"textual", "torch", "tokenizers", "jinja2"})
