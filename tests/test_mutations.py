"""The kept mutations still fit the code, and the quickest of them are tried in every run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mutations.__main__ import ROOT, apply, arguments_of, patches, survives

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patches")


def test_there_are_at_least_twenty() -> None:
    assert len(patches()) >= 20


@pytest.mark.parametrize("patch", patches(), ids=lambda patch: patch.stem)
def test_a_mutation_fits_the_code_and_names_its_test(patch: Path, tmp_path: Path) -> None:
    changed = [line.split()[1] for line in patch.read_text().splitlines() if line.startswith("+++")]
    for name in {path.removeprefix("b/") for path in changed}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    try:
        apply(patch, tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.fail(f"{patch.name} no longer applies: make it anew. {error.stderr.decode()}")
    assert (ROOT / arguments_of(patch)[0].split("::")[0]).exists()


@pytest.mark.parametrize("name", ["tree-match-covers-the-last-token", "scheduler-preempts-the-eldest"])
def test_a_mutation_turns_a_test_red(name: str) -> None:
    assert not survives(next(patch for patch in patches() if patch.stem == name))
