"""python -m minitui.bench: the same command where only the engine's dependencies are installed."""

from minitui.bench.command import run

run()
