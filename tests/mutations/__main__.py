"""Apply each patch beside this file to a copy of the project and run the tests it names: they must fail.

    python -m tests.mutations              all of them
    python -m tests.mutations radix mask   those whose name contains one of the words

A patch begins with lines of prose, of which "Red: tests/test_x.py [-k expression]" says what to run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def patches() -> list[Path]:
    return sorted(HERE.glob("*.patch"))


def arguments_of(patch: Path) -> list[str]:
    """The pytest arguments of the patch's "Red:" line."""
    for line in patch.read_text(encoding="utf-8").splitlines():
        if line.startswith("Red:"):
            return shlex.split(line.removeprefix("Red:"))
    raise ValueError(f"{patch.name} has no line that begins with 'Red:'")


def copy_project(to: Path) -> None:
    """With what was compiled already: modules that the patch does not touch keep their times, and that with them."""
    for name in ("engine", "minitui", "tests"):
        shutil.copytree(ROOT / name, to / name)
    shutil.copy(ROOT / "pyproject.toml", to)


def apply(patch: Path, to: Path, *options: str) -> None:
    subprocess.run(["git", "apply", *options, "--directory", "", str(patch)], cwd=to, check=True, capture_output=True)


def survives(patch: Path) -> bool:
    """True if every test passes in spite of the bug."""
    with tempfile.TemporaryDirectory() as name:
        to = Path(name)
        copy_project(to)
        apply(patch, to)
        # Only the plugins that the tests use: the others take longer to load than most of these tests to run.
        plugins = ["-o", "addopts=", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", *plugins, *arguments_of(patch)],
            cwd=to,
            env={
                **{key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"},
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                "PYTHONPATH": name,
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            capture_output=True,
            text=True,
        )
        if run.returncode not in (0, 1):
            raise RuntimeError(f"{patch.name}: pytest could not run:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
        return run.returncode == 0


def main(words: list[str]) -> int:
    chosen = [patch for patch in patches() if not words or any(word in patch.name for word in words)]
    survivors = []
    for patch in chosen:
        started = time.perf_counter()
        alive = survives(patch)
        survivors += [patch.stem] if alive else []
        print(f"{'SURVIVED' if alive else 'caught':8} {patch.stem} ({time.perf_counter() - started:.1f} s)", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations turn a test red")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
