"""Fixtures of more than one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import Running, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all tests that do not need it to be special; they leave it as they found it."""
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running
