"""The kept mutations still fit the code, and one of them is tried in every run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, Mutation
from tests.support.paths import ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_fits_the_code_and_names_its_test(mutation: Mutation, tmp_path: Path) -> None:
    (tmp_path / mutation.file).parent.mkdir(parents=True)
    shutil.copy(ROOT / mutation.file, tmp_path / mutation.file)
    mutation.apply(tmp_path)
    compile((tmp_path / mutation.file).read_text(encoding="utf-8"), mutation.file, "exec")
    assert (ROOT / mutation.red.split("::")[0].split()[0]).exists()


def test_a_mutation_turns_a_test_red() -> None:
    (mutation,) = (each for each in MUTATIONS if each.name == "scheduler-preempts-the-eldest")
    assert not mutation.survives()
