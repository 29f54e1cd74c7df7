"""Each test begins with Unicode glyphs."""

from collections.abc import Iterator

import pytest

from minitui.tui.glyphs import use_ascii


@pytest.fixture(autouse=True)
def unicode_again() -> Iterator[None]:
    yield
    use_ascii(False)
