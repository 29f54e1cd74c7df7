"""`python -m minitui.bench` runs `minitui bench` and needs only rich, typer and the engine's dependencies."""

from minitui.bench.main import run_alone

run_alone()
