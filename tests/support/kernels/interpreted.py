"""Runs kernels without a GPU, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def interpreted(name: str) -> dict[str, Any]:
    """Returns what `python -m tests.support.kernels.interpreted_NAME` prints as JSON. In a process of its own: Triton
    decides when it is imported whether kernels are compiled or interpreted."""
    found = subprocess.run(
        [sys.executable, "-m", f"tests.support.kernels.interpreted_{name}"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    result: dict[str, Any] = json.loads(found.stdout)
    return result
