"""Fixtures of more than one file."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.serving import Running, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all tests that do not need it to be special; they leave it as they found it."""
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(autouse=True)
def pilots_wait_for_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """Textual's pilot waits for its application, not for a processor with nothing to do: see
    tests/support/driving.py."""
    if "textual" in sys.modules:
        from tests.support.driving import settled

        monkeypatch.setattr("textual.pilot.wait_for_idle", settled)
        monkeypatch.setattr("textual.app.wait_for_idle", settled)
