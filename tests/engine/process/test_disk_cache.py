"""The cache on disk never gives what was not written: damaged entries are made again, whoever else writes there."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engine import disk_cache
from engine.disk_cache import ENTRY, Cache, Damaged
from engine.errors import EngineError

CACHE = Cache("things", 1.0, "THINGS_GB")
CODE = Cache("code", 0.001, private=True)
NEEDED = Cache("needed", 0.001, needed=True)
NAME = "thing-1"
CONTENTS = bytes(range(256)) * 64


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(disk_cache, "PIECE", 4096)  # of four pieces
    return tmp_path / "cache" / "minitui" / "things"


def write(place: Path) -> None:
    (place / "a").write_bytes(CONTENTS)
    (place / "b").write_bytes(b"b")


def keep(name: str = NAME, cache: Cache = CACHE, size: int = len(CONTENTS), age: float = 0) -> Path:
    entry = cache.keep(name, write, size)
    if age:
        os.utime(entry, (entry.stat().st_mtime - age,) * 2)
    return entry


def flip(entry: Path) -> None:
    data = bytearray(CONTENTS)
    data[5000] ^= 1
    (entry / "a").write_bytes(data)


def swap_words(entry: Path) -> None:
    (entry / "a").write_bytes(CONTENTS[8:16] + CONTENTS[:8] + CONTENTS[16:])


def other_file(entry: Path) -> None:
    (entry / "c").write_bytes(b"")


def of_another_name(entry: Path) -> None:
    path = entry / ENTRY
    path.write_text(path.read_text().replace(NAME, "thing-2"))


DAMAGES: list[Callable[[Path], Any]] = [
    flip, swap_words, other_file, of_another_name,
    lambda entry: os.truncate(entry / "a", 100),
    lambda entry: (entry / "b").unlink(),
    lambda entry: (entry / ENTRY).unlink(),
    lambda entry: (entry / ENTRY).write_text('{"name": [], "files": 3}'),
    lambda entry: (entry / "b").unlink() or (entry / "b").symlink_to(entry / "a"),
]


@pytest.mark.parametrize("small", [0, disk_cache.SMALL], ids=["large files", "small files"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_removed_and_can_be_kept_again(
    damage: Callable[[Path], Any], small: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large files too, which are read for their digest only if their stamp has changed."""
    monkeypatch.setattr(disk_cache, "SMALL", small)
    damage(keep())
    with pytest.raises(Damaged, match=f"{folder / NAME} is damaged"):
        CACHE.find(NAME)
    assert CACHE.find(NAME) is None and not list(folder.iterdir())
    assert keep() == CACHE.find(NAME)


def test_large_files_are_read_only_if_their_stamp_has_changed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(disk_cache, "SMALL", 0)
    entry = keep()
    read: list[Path] = []
    digest = disk_cache.digest
    monkeypatch.setattr(disk_cache, "digest", lambda path: read.append(path) or digest(path))
    assert CACHE.find(NAME) and not read
    shutil.copytree(entry, folder / "copy")
    shutil.rmtree(entry)
    (folder / "copy").rename(entry)  # a restored cache: other inodes, the same contents
    assert CACHE.find(NAME) and len(read) == 2
    assert CACHE.find(NAME) and len(read) == 2, "the new stamps were not written"


def test_entries_used_longest_ago_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINGS_GB", str(3.8 * len(CONTENTS) / 1e9))  # three entries with ENTRY
    keep("old", age=300), keep("used", age=400), keep("young", age=100)
    assert CACHE.find("used")
    folder.joinpath("file of an older version").write_bytes(b"x")
    os.utime(folder / "file of an older version", (0, 0))
    keep()
    assert [entry.name for entry in CACHE.entries()] == ["young", "used", NAME]
    monkeypatch.setenv("THINGS_GB", str(0.5 * len(CONTENTS) / 1e9))
    with pytest.raises(OSError, match=r"it takes 0\.0 GB, and THINGS_GB allows"):
        keep("large")
    monkeypatch.setenv("THINGS_GB", "lots")
    with pytest.raises(EngineError, match="THINGS_GB is 'lots': it must be a number of gigabytes"):
        keep("large")
    assert CACHE.remove_all() == 3 and not list(folder.iterdir())


def test_what_an_engine_needs_is_kept_beyond_the_limit_and_while_it_starts(folder: Path) -> None:
    size = 2_000_000
    keep("old", NEEDED, age=5_000), keep("young", NEEDED, age=5)
    keep(NAME, NEEDED, size)
    assert {entry.name for entry in NEEDED.entries()} == {"young", NAME}


def test_abandoned_folders_are_removed(folder: Path) -> None:
    for name, age in ("begun", 5_000), ("being written", 5):
        place = folder / f"{disk_cache.UNFINISHED}{name}"
        place.mkdir(parents=True)
        write(place)
        for path in (*place.iterdir(), place):
            os.utime(path, (path.stat().st_mtime - age,) * 2)
    keep()
    assert {path.name for path in folder.iterdir()} == {NAME, f"{disk_cache.UNFINISHED}being written"}


def test_a_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(place: Path) -> None:
        write(place)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        CACHE.keep(NAME, fill, 10)
    assert not list(folder.iterdir()) and CACHE.find(NAME) is None
    keep("old", age=10)
    usage = shutil.disk_usage(folder)._replace(free=500_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"it takes 0.8 GB, and 0.5 GB are free there, of which half stays free"):
        keep(size=800_000_000)


def test_files_are_on_the_disk_before_the_entry_has_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss of power, an entry is whole or not there."""
    synced: set[int] = set()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino) or fsync(descriptor))
    replace = Path.replace

    def checked(path: Path, target: Path) -> Path:
        assert {path.stat().st_ino, *(each.stat().st_ino for each in path.rglob("*"))} <= synced
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", checked)
    entry = keep()
    assert entry.parent.stat().st_ino in synced


def test_several_writers_at_once_while_entries_are_removed(folder: Path) -> None:
    """No one gets another's half, or an error; who reads may only find that an entry was removed."""
    start, whole = threading.Barrier(4), []

    def use(_: int) -> None:
        start.wait(60)
        for _ in range(20):
            entry = CACHE.find(NAME) or keep()
            with suppress(FileNotFoundError):
                whole.append((entry / "a").read_bytes() == CONTENTS)

    def remove() -> None:
        start.wait(60)
        for _ in range(10):
            CACHE.remove_all()

    with ThreadPoolExecutor(4) as threads:
        removing = threads.submit(remove)
        for using in [threads.submit(use, i) for i in range(3)]:
            using.result(60)
        removing.result(60)
    assert whole and all(whole) and {path.name for path in folder.iterdir()} <= {NAME}


@pytest.mark.parametrize("way", ["others may write", "another user", "behind a link"])
def test_a_private_cache_uses_nothing_that_another_user_could_have_written(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = keep(cache=CODE)
    assert CODE.find(NAME) == entry and entry.parent.stat().st_mode & 0o777 == 0o700
    if way == "others may write":
        entry.parent.chmod(0o722)
    elif way == "another user":
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
    else:
        elsewhere = entry.parent.with_name("elsewhere")
        entry.parent.rename(elsewhere)
        entry.parent.symlink_to(elsewhere)
    assert CODE.find(NAME) is None
    with pytest.raises(OSError, match="other users may write to it"):
        keep("thing-2", CODE)
    assert [path.name for path in entry.parent.iterdir()] == [NAME]


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", no_home)
    assert CACHE.find(NAME) is None and CACHE.entries() == []
    with pytest.raises(OSError, match="Could not determine home"):
        keep()
