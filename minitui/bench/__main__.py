"""`python -m minitui.bench`: `minitui bench` for machines with only the engine's dependencies, rich and typer."""

from minitui.bench.main import run_alone

run_alone()
