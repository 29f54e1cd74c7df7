"""Which cores the engine computes on: physical ones, all but one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.worker.cpu import cores


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """The cores of this machine are not those of the tests."""
    cores.physical_cores.cache_clear()
    yield
    cores.physical_cores.cache_clear()


def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: list[tuple[int, int]], usable: set[int]) -> None:
    """Sets up a machine whose processor i belongs to core places[i][1] of package places[i][0]."""
    for processor, (package, core) in enumerate(places):
        folder = tmp_path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    monkeypatch.setattr(cores, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable, raising=False)


@pytest.mark.parametrize("places,usable,threads", [
    ([(0, 0)], {0}, 1),
    ([(0, 0), (0, 1)], {0, 1}, 1),
    ([(0, 0), (0, 1), (0, 0), (0, 1)], {0, 1, 2, 3}, 1),  # two threads of each core
    ([(0, 0), (0, 1), (1, 0), (1, 1)], {0, 1, 2, 3}, 3),  # two packages
    ([(0, i) for i in range(8)], {2, 3, 4}, 2),  # a container with three of eight
])
def test_one_thread_for_each_core_and_one_core_for_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: list[tuple[int, int]], usable: set[int], threads: int
) -> None:
    machine(tmp_path, monkeypatch, places, usable)
    assert cores.default_threads() == threads


def test_without_a_description_each_processor_is_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, monkeypatch, [], {0, 1, 2, 3})
    assert cores.default_threads() == 3


def test_all_threads_leave_the_last_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, set[int]] = {}
    machine(tmp_path, monkeypatch, [(0, 0), (0, 1), (0, 2), (0, 0), (0, 1), (0, 2)], set(range(6)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda task, allowed: asked.update({task: allowed}), raising=False)
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        if not Path("/proc/self/task").is_dir():
            pytest.skip("this system has no list of threads")
        cores.leave_a_core()
        assert {threading.main_thread().native_id, other.native_id} <= asked.keys()
        assert all(allowed == {0, 1, 3, 4} for allowed in asked.values()), "both processors of core 2 are left"
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 3, 4})
        assert cores.default_threads() == 2, "a second engine of this process has as many threads"
    finally:
        stop.set()
        other.join()


def test_two_cores_are_not_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, monkeypatch, [(0, 0), (0, 1)], {0, 1})
    asked: list[object] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda *given: asked.append(given), raising=False)
    cores.leave_a_core()
    assert not asked, "the engine may move between two cores"
