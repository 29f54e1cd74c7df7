"""Damaged and forged traces are refused with one sentence that names the line, within limits of memory."""

from __future__ import annotations

import copy
import errno
import gzip
import io
import json
import os
import random
import subprocess
import sys
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.trace.state import State
from engine.trace.views import NodeView
from minitui.cli.tail import tail_trace
from minitui.export import export
from minitui.sources.replay import ReplaySource
from minitui.trace.bundled import bundled, describe
from minitui.trace.lines import LineFile
from minitui.trace.reader import TraceError, TraceReader
from minitui.viewmodel.state.tree import Tree
from minitui.viewmodel.view import View
from tests.support.records.golden import GOLDEN
from tests.trace.test_trace import record_golden

REAL = [GOLDEN, *bundled().values()]
WRONG = (
    None, True, "x", "", -1, 1 << 40, 1 << 80, 10**400, 1.5, float("nan"), float("inf"), 1e300, [], [[]], {}, {"a": 1},
    [None], ["x"], [-1], [1 << 70],
)
Lines = list[Any]


def lines_of(path: Path) -> Lines:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def write(path: Path, lines: Lines) -> Path:
    """Each keyframe in a member of its own, as a recorder writes."""
    data, member = b"", b""
    for line in lines:
        if isinstance(line, list) and line[:1] == ["k"]:
            data, member = data + gzip.compress(member, 1), b""
        member += (line if isinstance(line, bytes) else json.dumps(line, separators=(",", ":")).encode()) + b"\n"
    path.write_bytes(data + gzip.compress(member, 1))
    return path


async def read_all(path: Path, folder: Path) -> None:
    """Everything that reads a trace, on this one: it works, or there is a TraceError."""
    describe(TraceReader(path))
    for kind in ("perfetto", "json", "md"):
        export(path, kind, folder / "out")
    tail_trace(path, lambda line: None)
    source = ReplaySource(path, 1000.0, clock=iter(range(10**9)).__next__)
    await source.start(lambda progress: None)
    view = View()
    view.texts.ids_to_text, view.texts.group_names = source.trace.decode, source.trace.names
    view.reset(await source.snapshot())
    while not source.ended:
        view.fold(source.drain_records())
        if view.history.gap:
            view.reset(await source.snapshot())
        view.frame(0.0)
        view.travel(-3)
        view.frame(0.0)
        view.moment.present()
    for step in (-5, 0, 7, source.trace.last_step):
        source.seek(step)
        view.reset(await source.snapshot())
        view.fold(source.drain_records())
        view.frame(0.0)


async def outcome(path: Path, folder: Path) -> str:
    """ "" if it can be read, else the sentence."""
    try:
        await read_all(path, folder)
    except TraceError as error:
        sentence = str(error)
        assert path.name in sentence and "\n" not in sentence and len(sentence) < 400
        return sentence
    return ""


def places(value: Any, path: tuple[Any, ...] = (), depth: int = 6) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a line, the first few items of every list."""
    if path:
        yield path
    if depth:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for i, (key, item) in enumerate(items):
            if i < 12:
                yield from places(item, (*path, key), depth - 1)


def swapped(line: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    line = copy.deepcopy(line)
    inner = line
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = wrong
    return line


def small_trace() -> Lines:
    """The beginning of a real trace with one record of each kind that has none there, in lines of one record."""
    head, *lines = lines_of(bundled()["small-pool"])
    keyframe = next(line for line in lines if line[0] == "k")
    rows = [row for line in lines if line[0] == "r" for row in line[2]][:150]
    t = rows[-1][0]
    step = max(row[2] for row in rows if row[1] == "step")
    rows += [
        [t, "comm", step, 2, 0.5], [t, "experts", step, [[0, [1, 2]], [1, [3, 4]]]], [t, "order", []],
        [t, "refuse", "chat", "too long"], [t, "withdraw", step, []], [t, "pace", 2.0], [t, "gate", "open", ""],
        [t, "draft", step + 1, []], [t, "accept", step, []], [t, "fail", step, "error"],
    ]
    first = keyframe[1] + 1
    small = [line for line in lines if line[0] in "wnbe"]
    return [head, keyframe, *small, *(["r", first + i, [row]] for i, row in enumerate(rows)), ["n", {"a": "b"}]]


async def test_a_value_of_a_wrong_type_anywhere_is_a_sentence(tmp_path: Path) -> None:
    lines = small_trace()
    assert await outcome(write(tmp_path / "right.trace", lines), tmp_path) == ""
    rng = random.Random(1)
    kinds: dict[str, int] = {}
    refused = 0
    for number, line in enumerate(lines):
        kind = line[2][0][1] if isinstance(line, list) and line[0] == "r" else str(line)[:4]
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] > 1:
            continue
        for path in places(line):
            wrong = rng.choice(WRONG)
            changed = [*lines[:number], swapped(line, path, wrong), *lines[number + 1 :]]
            refused += bool(await outcome(write(tmp_path / "wrong.trace", changed), tmp_path))
    assert refused > 80


@pytest.mark.parametrize("real", REAL, ids=lambda path: path.stem)
async def test_lines_and_records_left_out_doubled_or_out_of_order_are_a_sentence(real: Path, tmp_path: Path) -> None:
    lines = lines_of(real)
    lines = lines[: {"h200-8b": 60, "vllm-8b": 12}.get(real.stem)]
    rng = random.Random(2)
    refused = 0
    for _ in range(6):
        changed = copy.deepcopy(lines)
        held: Any = changed
        if rng.random() < 0.6:  # among the records of a line, its number kept
            held = rng.choice([line for line in changed[1:] if line[0] == "r"])[2]
        i, j = rng.randrange(len(held)), rng.randrange(len(held))
        how = rng.choice(("left out", "doubled", "out of order"))
        if how == "left out":
            del held[i]
        elif how == "doubled":
            held.insert(i, held[j])
        else:
            held[i], held[j] = held[j], held[i]
        refused += bool(await outcome(write(tmp_path / "changed.trace", changed), tmp_path))
    assert refused


async def test_bytes_changed_or_cut_anywhere_are_a_sentence(tmp_path: Path) -> None:
    data, path = GOLDEN.read_bytes(), tmp_path / "bytes.trace"
    rng = random.Random(3)
    for _ in range(8):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 3, 30))):
            changed[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(changed[: rng.choice((len(data), rng.randrange(len(data))))])
        await outcome(path, tmp_path)


def bomb(size: int, unit: bytes, begin: bytes = b"", end: bytes = b"\n") -> bytes:
    return gzip.compress(begin + unit * (size // len(unit)) + end, 1)


HEAD = gzip.compress(json.dumps(lines_of(GOLDEN)[0]).encode() + b"\n")
KEYFRAME = json.dumps(lines_of(GOLDEN)[1], separators=(",", ":")).encode() + b"\n"
KEYFRAMES: dict[str, Callable[[dict[str, Any]], object]] = {
    "many blocks": lambda snapshot: snapshot.update(num_blocks=1 << 30),
    "a long queue": lambda snapshot: snapshot.update(queue=list(range(100_000))),
    "its own ancestor": lambda snapshot: snapshot["nodes"].update(
        {"1": {"parent": 2, "ids": [1] * 4, "blocks": [1], "users": 0, "last_used": 1},
         "2": {"parent": 1, "ids": [1] * 4, "blocks": [2], "users": 0, "last_used": 1}}),
    "more free blocks than the pool has": lambda snapshot: snapshot.update(free=[[1, 2_000_000_000]]),
    "a run of three numbers": lambda snapshot: snapshot.update(free=[[1, 2, 3]]),
    "a block that is free twice": lambda snapshot: snapshot.update(free=[1, *range(1, snapshot["num_blocks"] - 1)]),
}


BOMBS: dict[str, Callable[[], bytes]] = {  # made by the test that needs them: each takes tenths of a second
    "lines": lambda: bomb(200 << 20, b"\n" * 4096),
    "a line": lambda: HEAD + bomb(200 << 20, b" " * 4096),
    "nested": lambda: HEAD + bomb(40 << 20, b"[" * 4096, b'["n",'),
    "nested less": lambda: HEAD + bomb(100_000, b"[", b'["n",'),
    "values": lambda: HEAD + bomb(30 << 20, b"[]," * 4096, b'["n",[', b"[]]]\n"),
    "members": lambda: HEAD + gzip.compress(KEYFRAME) + bomb(8 << 20, b" " * 4096) * 40,
    "a record": lambda: HEAD + gzip.compress(KEYFRAME + b'["r",1,[[0,"order",[' + b"0," * (24 << 19) + b"0]]]]\n", 1),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_what_unpacks_to_much_more_than_the_file_takes_little_memory(kind: str, tmp_path: Path) -> None:
    path, data = tmp_path / "bomb.trace", BOMBS[kind]()
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match=r"bomb\.trace") as caught:
            TraceReader(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 400 << 20, f"{peak >> 20} MiB of {len(data):,} bytes"
    assert "line" in str(caught.value) or "trace" in str(caught.value)


@pytest.mark.parametrize("change", KEYFRAMES.values(), ids=KEYFRAMES)
def test_a_keyframe_that_contradicts_itself_is_a_sentence(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    head, keyframe, *_ = lines_of(GOLDEN)
    change(keyframe[4])
    with pytest.raises(TraceError, match="line 2"):
        TraceReader(write(tmp_path / "keyframe.trace", [head, keyframe]))


def test_a_keyframe_that_is_not_what_the_records_lead_to_is_a_sentence(tmp_path: Path) -> None:
    lines = lines_of(GOLDEN)
    second = [line for line in lines[1:] if line[0] == "k"][1]
    second[4]["budget"] += 1
    with pytest.raises(TraceError, match="differs from the state"):
        list(TraceReader(write(tmp_path / "other.trace", lines)).records())


def test_a_recording_that_no_reader_would_take_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minitui.trace.recorder.LONGEST_LINE", 4000)
    with pytest.raises(TraceError, match="the recording ends here"):  # by the next call after the thread failed
        record_golden(tmp_path / "large.trace")


def test_a_part_with_many_token_ids_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minitui.trace.recorder.MOST_IDS", 500)
    record_golden(tmp_path / "ids.trace")
    assert len(TraceReader(tmp_path / "ids.trace").keyframes) > 2


def test_a_tree_deeper_than_python_recurses_is_shown() -> None:
    state = State(3001, 1, 1, 1)
    for id in range(1, 3000):
        state.nodes[id] = NodeView(id, id - 1, array("i", [id]), [id], 0, 0)
        state.nodes[id - 1].children.append(id)
    role, _ = Tree().text(state, state.nodes[2999], lambda ids: "<|im_start|>user\n" if 1 in ids else "x" * len(ids))
    assert role == "usr"


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_disk_that_fails_while_a_trace_is_read_is_a_sentence(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(io.BytesIO):
        reads = 0

        def read(self, size: int | None = -1) -> bytes:
            Failing.reads += 1
            if Failing.reads > at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(size)

    def opened(file: LineFile, path: Path, line: int = 0) -> None:
        init(file, path, line)
        file._raw.close()
        file._raw = Failing(path.read_bytes())

    init = LineFile.__init__
    monkeypatch.setattr(LineFile, "__init__", opened)
    with pytest.raises(TraceError, match=f"cannot be read beyond line .*{os.strerror(errno.EIO)}"):
        tail_trace(GOLDEN, lambda line: None)
    assert Failing.reads == at + 1


@pytest.mark.parametrize("command", [["tail"], ["replay", "--export", "md"], ["replay", "--export", "svg"]])
def test_the_commands_say_the_sentence_and_fail(command: list[str], tmp_path: Path) -> None:
    lines = lines_of(GOLDEN)
    second = [i for i, line in enumerate(lines[1:], 1) if line[0] == "k"][1]
    row = next(line for line in lines[second:] if line[0] == "r")[2][30]
    row[0] = "x"
    path = write(tmp_path / "wrong.trace", lines)
    run = [sys.executable, "-m", "minitui", command[0], str(path), *command[1:]]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1
    said = done.stderr.strip()
    assert said.startswith("minitui: ") and "line" in said and "record 431 is 'x'" in said
    assert len(said.splitlines()) == 1
