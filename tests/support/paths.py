"""Where the tests find what is not code."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the repository
SNAPSHOTS = ROOT / "tests" / "snapshots"
QWEN3 = ROOT.parent / "shared" / "qwen3"  # tokenizer and configs of real models; tests skip where it is absent
