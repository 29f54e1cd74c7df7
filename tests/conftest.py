"""Fixtures of more than one file, and how many processes run the tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.support.server.serving import Running, serving

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the other cores have workers of their own

for name in ("COLUMNS", "LINES"):  # readline sets them in pytest's main process; no terminal of a test has that size
    os.environ.pop(name, None)

MOST_WORKERS = 8  # more wait for the longest files
WORKER_BYTES = 5 << 29  # the largest worker was seen with 2.2 GiB; its tests start engine processes, too


@pytest.hookimpl(optionalhook=True)  # tests/mutations run without pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The whole suite runs on all cores, as far as the memory lasts; chosen files run in this process."""
    if config.args_source != pytest.Config.ArgsSource.TESTPATHS or config.option.keyword or config.option.collectonly:
        return 0
    import psutil

    usable = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count() or 1
    workers = min(usable, psutil.virtual_memory().available // WORKER_BYTES, MOST_WORKERS)
    return workers if workers > 1 else 0


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all tests that do not need it to be special; they leave it as they found it."""
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(autouse=True)
def pilots_wait_for_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """Textual's pilot waits for its application, not for a processor with nothing to do: see
    tests/support/app/driving.py."""
    if "textual" in sys.modules:
        from tests.support.app.driving import settled

        monkeypatch.setattr("textual.pilot.wait_for_idle", settled)
        monkeypatch.setattr("textual.app.wait_for_idle", settled)
    if insides := sys.modules.get("minitui.tui.terminal.textual_insides"):
        monkeypatch.setattr(insides, "NOTICE_S", 60.0)  # a slow machine draws two frames in more than two seconds


@pytest.fixture(scope="module", autouse=True)
def collections_skip_what_stays() -> None:
    """Garbage collections visit the objects of this file's tests, not a million of modules that were imported before:
    a fifth of the whole time. Applications collect at their start and after each slice of records."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_application_changes_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """An application has a process to itself: it collects all garbage and exempts what is left from collections, makes
    these rare and changes the allocator. Here others follow, and an application that has ended would stay: a gigabyte
    for fifty tests."""
    if "minitui.tui.apps.app_base" in sys.modules:
        nothing = SimpleNamespace(collect=lambda: None, freeze=lambda: None)
        monkeypatch.setattr("minitui.tui.apps.app_base.gc", nothing)
        monkeypatch.setattr("minitui.tui.apps.app_base.set_thresholds", lambda: None)
    if "minitui.tui.apps.app" in sys.modules:
        monkeypatch.setattr("minitui.tui.apps.app.fix_thresholds", lambda: None)
