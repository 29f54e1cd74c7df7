"""With MINITUI_CARD="RTX 3090", the tests here run the kernels as they are compiled for that card.

tests/support/kernels/cards.py does that. Tests of what the engine refuses on that card are skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
import torch

if (name := os.environ.get("MINITUI_CARD")) and torch.cuda.is_available():
    from tests.support.kernels.cards import pretend

    pretend(name, pytest.MonkeyPatch())


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the module's SHAPE as config.json; the weights are random."""
    directory = tmp_path_factory.mktemp("gpu-model")
    (directory / "config.json").write_text(json.dumps(request.module.SHAPE))
    return str(directory)


REFUSED = "compute capability", "fp8e4nv not supported"


def _skip_what_is_refused() -> Iterator[None]:
    try:
        return (yield)
    except Exception as error:
        whole: BaseException | None = error
        while name and whole is not None:
            if any(sign in str(whole) for sign in REFUSED):
                pytest.skip(f"{name} does not have it: {whole}"[:200])
            whole = whole.__cause__ or whole.__context__
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    return (yield from _skip_what_is_refused())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    return (yield from _skip_what_is_refused())
