"""The recordings that come along are whole, travel well, and are found by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minitui.cli.recordings import run_export, run_list
from minitui.cli.tail import tail_trace
from minitui.sources.replay import ReplaySource
from minitui.trace import bundled as recordings
from minitui.trace.bundled import bundled, describe, find_trace, is_bundled, watching_speed
from minitui.trace.reader import TraceError, TraceReader
from minitui.tui.apps.replay_app import replay_app
from tests.support.app.driving import text_of
from tests.support.records.golden import GOLDEN, random_trace

LARGEST = 1_500_000  # bytes: every installation has the file


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of recordings with one in it: requests of random tokens, their text not kept."""
    random_trace(tmp_path / "gpu-run.trace")
    monkeypatch.setattr(recordings, "HERE", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", bundled())
def test_what_comes_along_is_whole_and_says_what_it_is(name: str) -> None:
    path = bundled()[name]
    reader = TraceReader(path)
    assert reader.complete and reader.bookmarks and path.stat().st_size < LARGEST
    told = describe(reader)
    assert str(reader.info.model) in told and f"{reader.info.num_blocks:,} blocks" in told
    assert ("random" in told) == reader.header["random_text"] and len(told) < 200
    assert reader.header["random_text"] or reader.words, "a text that means something is kept"
    texts = _texts(reader.header | {"info": reader.info.to_json()})
    assert not [value for value in texts if value.startswith("/")], "no path of another machine"
    assert {record[4] for record in reader.records() if record[2] == "submit"} <= set(reader.names)


def _texts(value: object) -> list[str]:
    return [part for part in json.dumps(value).split('"') if part]


async def test_its_chats_have_their_names() -> None:
    app = replay_app(str(bundled()["small-pool"]), speed=0.1)
    async with app.run_test(size=(120, 36)) as pilot:
        while not (app.feed.live and app.view.history.steps.last > 3):
            await pilot.pause(0.05)
        await pilot.pause(0.2)
        assert app.view.texts.group_names == app.replay.trace.names
        assert "4 continuous batching" in text_of(app)


def test_they_are_listed_and_found_by_name(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_list()
    listed = capsys.readouterr().out
    assert "minitui replay gpu-run" in listed and "random and not shown" in listed and "--record" in listed
    assert find_trace("gpu-run") == shelf / "gpu-run.trace" and is_bundled(find_trace("gpu-run"))
    assert find_trace(str(GOLDEN)) == GOLDEN and not is_bundled(GOLDEN)
    with pytest.raises(TraceError, match=r"no file 'gpu-rum' and no bundled recording.*: gpu-run"):
        find_trace("gpu-rum")
    assert not TraceReader(shelf / "gpu-run.trace").info.model_dir, "a path of the machine that recorded"
    lines: list[str] = []
    assert tail_trace(find_trace("gpu-run"), lines.append) == 0 and len(lines) > 50


def test_a_short_run_is_played_slowly(shelf: Path) -> None:
    reader = TraceReader(shelf / "gpu-run.trace")
    assert 55 < reader.seconds / watching_speed(reader) < 160
    reader.seconds = 3600.0
    assert watching_speed(reader) == 1.0


async def test_nothing_is_written_to_what_comes_along(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = shelf / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    before = (shelf / "gpu-run.trace").read_bytes()
    source = ReplaySource(find_trace("gpu-run"))
    await source.start(lambda progress: None)
    source.bookmark(source.step, "look here")
    assert (source.step, "look here") in source.trace.bookmarks
    assert run_export("gpu-run", "md", None, None, "120x36", None).resolve() == elsewhere / "gpu-run.md"
    assert (shelf / "gpu-run.trace").read_bytes() == before
    assert sorted(path.name for path in shelf.iterdir()) == ["elsewhere", "gpu-run.trace"]
