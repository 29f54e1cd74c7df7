"""python -m minitui.bench: the same command where only the engine's dependencies are installed."""

from minitui.bench.main import run

run()
