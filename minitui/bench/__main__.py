"""`python -m minitui.bench` runs `minitui bench` on machines with only the engine's dependencies, rich and typer."""

from minitui.bench.main import run_alone

run_alone()
