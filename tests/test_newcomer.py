"""The changes that README's table "Where to change what" describes, made in a copy of the repository as it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

Edit = tuple[str, str, str]  # a file, a text in it, and what replaces the text

EVICTION: list[Edit] = [
    (
        "engine/trace/eviction.py",
        "EVICTION_POLICIES = {\n",
        'EVICTION_POLICIES = {\n    "mru": EvictionPolicy("most recently used", lambda node: -node.last_used),\n',
    )
]
FIELD: list[Edit] = [
    ("engine/trace/kinds.py", "    row: Count\n    reason: Text\n", "    row: Count\n    reason: Text\n    place: Count = 0\n"),
    ("engine/core/scheduler.py", '"resumed" if resumed else "new")', '"resumed" if resumed else "new", 7)'),
]
STATE_FIELDS: list[Edit] = [
    ("engine/trace/views.py", "    base: int = 0", "    place: Annotated[int, later(count)] = 0\n    base: int = 0"),
    (
        "engine/trace/views.py",
        "    last_used: Sequence\n",
        "    last_used: Sequence\n    hits: Annotated[int, later(count)] = 0\n",
    ),
    ("engine/trace/views.py", "BLOCKS: dict[str, Bound] = {", 'BLOCKS: dict[str, Bound] = {\n    "tiers": later(count),'),
    ("engine/trace/state.py", "        self.counts = [", "        self.tiers: dict[int, int] = {}\n        self.counts = ["),
    ("engine/core/engine.py", '"row": r.row,', '"row": r.row, "place": 0,'),
    ("engine/core/engine.py", '"users": n.users,', '"users": n.users, "hits": 0,'),
]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, without pictures and tests that nothing here runs."""
    copy = tmp_path_factory.mktemp("newcomer")
    for folder in ("engine", "minitui", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "snapshots", "*.png"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    return copy


def change(repository: Path, row: str, edits: list[Edit]) -> None:
    """Make the edits; README's row must name each file, or its folder's last part."""
    rows = re.findall(rf"^\| {re.escape(row)} \|(.*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert len(rows) == 1, f"README has {len(rows)} rows about {row!r}"
    files = {name for name, _, _ in edits}
    assert len(files) <= 3
    for name, before, after in edits:
        path = repository / name
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{name} has {text.count(before)} times {before!r}"
        path.write_text(text.replace(before, after), encoding="utf-8")
    assert [name for name in files if name in rows[0]], f"README's row does not name any of {sorted(files)}"


def run(repository: Path, *arguments: str) -> str:
    """Run a command in the copy; its code is imported from there."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=repository, env=os.environ | {"PYTHONPATH": str(repository)},
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def run_tests(repository: Path, *tests: str) -> None:
    run(repository, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests)


def test_an_eviction_policy_is_one_row(repository: Path) -> None:
    change(repository, "another order of eviction", EVICTION)
    whole = "tests/viewmodel/test_eviction.py::test_the_whole_order_is_that_in_which_the_engine_evicts"
    run_tests(repository, whole)
    assert "most recently used" in run(repository, "-c", OF_POLICY)


OF_POLICY = """
from engine.config import EngineConfig
from minitui.viewmodel.history.events import Event, describe
from engine.trace.eviction import EVICTION_POLICIES
EngineConfig(eviction_policy="mru")
event = Event(1, 0, "evict", -1, 3, (1, 0.0, "evict", 3, 2, "r1 needs 2"))
print(describe(event, None, order=EVICTION_POLICIES["mru"].words))
"""


def test_a_field_of_a_record_is_a_line_and_older_recordings_open(repository: Path) -> None:
    change(repository, "a record, or a field of a record", FIELD)
    run(repository, "-c", OF_FIELD)


OF_FIELD = """
from engine.trace.kind import kind_of, named
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
older = [named(r).place for r in TraceReader(bundled()["small-pool"]).records() if kind_of(r) == "admit"]
assert older and not any(older), older

from tests.engine.test_scheduler_simulation import Load
load = Load(3, 0)
records = []
load.engine.log.watch = records.append
load.run(check_every=50)
newer = [named(r).place for r in records if kind_of(r) == "admit"]
assert newer and set(newer) == {7}, newer

from minitui.trace import check
row = list(next(r for r in records if kind_of(r) == "admit"))
assert check.record(row[0], row[1:]) == tuple(row)
try:
    check.record(row[0], [*row[1:-1], -1])
except ValueError as error:
    assert "'place'" in str(error), error
else:
    raise AssertionError("a place of -1 is accepted")
"""


def test_fields_of_requests_nodes_and_blocks_are_lines_and_older_recordings_open(repository: Path) -> None:
    change(repository, "a field of a request, a node or a block", STATE_FIELDS)
    run(repository, "-c", OF_STATE)


OF_STATE = """
from engine.trace.state import State
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
state = TraceReader(bundled()["small-pool"]).part(0).state
assert all(request.place == 0 for request in state.requests.values())
assert all(node.hits == 0 for node in state.nodes.values()) and state.tiers == {}

from tests.engine.test_scheduler_simulation import Load
load = Load(3, 0)
state = State.from_snapshot(load.engine.snapshot())
load.engine.log.watch = state.apply
load.run(check_every=50)
assert state.snapshot() == load.engine.snapshot()
state.tiers[1] = 2
assert State.from_snapshot(state.copy().snapshot()).tiers == {1: 2}
"""
