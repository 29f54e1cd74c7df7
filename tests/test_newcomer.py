"""The changes that README's table "Where to change what" describes, made in a copy of the repository as it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minitui.tui.panels import Panel, table
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.inspect.vitals import Vitals
from minitui.tui.widgets.inspect.waterfall import Waterfall
from minitui.viewmodel.view import View
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
    ("engine/trace/kinds.py", "    row: kind.Count\n    reason: kind.Text\n",
     "    row: kind.Count\n    reason: kind.Text\n    place: kind.Count = 0\n"),
    ("engine/core/scheduler.py", '"resumed" if resumed else "new")', '"resumed" if resumed else "new", 7)'),
]
STATE_FIELDS: list[Edit] = [
    ("engine/trace/views.py", "    base: int = 0",
     "    place: Annotated[int, kind.later(kind.count)] = 0\n    base: int = 0"),
    (
        "engine/trace/views.py",
        "    last_used: kind.Sequence\n",
        "    last_used: kind.Sequence\n    hits: Annotated[int, kind.later(kind.count)] = 0\n",
    ),
    ("engine/trace/views.py", "BLOCKS: dict[str, kind.Bound] = {",
     'BLOCKS: dict[str, kind.Bound] = {\n    "tiers": kind.later(kind.count),'),
    ("engine/trace/state.py", "        self.counts = [",
     "        self.tiers: dict[int, int] = {}\n        self.counts = ["),
    ("engine/core/engine.py", '"row": r.row,', '"row": r.row, "place": 0,'),
    ("engine/core/engine.py", '"users": n.users,', '"users": n.users, "hits": 0,'),
]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources and of what Python has compiled of them, without pictures."""
    copy = tmp_path_factory.mktemp("newcomer")
    unused = shutil.ignore_patterns("snapshots", "*.png")
    for folder in ("engine", "minitui", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=unused)
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
    named = [name for name in files if name.removeprefix("minitui/") in rows[0]]
    assert named, f"README's row does not name any of {sorted(files)}"


def run(repository: Path, *arguments: str) -> str:
    """Run a command in the copy; its code is imported from there."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=repository, env=os.environ | {"PYTHONPATH": str(repository)},
        capture_output=True, text=True, timeout=150, check=False,
    )
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

from tests.engine.core.test_scheduler_simulation import Load
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
from tests.support.records.golden import GOLDEN
state = TraceReader(bundled()["small-pool"]).part(0).state
assert all(request.place == 0 for request in state.requests.values())
assert all(node.hits == 0 for node in state.nodes.values()) and state.tiers == {}
golden = TraceReader(GOLDEN)
assert len(golden.keyframes) > 1 and list(golden.records())  # keyframes equal the state after the records before

from tests.engine.core.test_scheduler_simulation import Load
load = Load(3, 0)
state = State.from_snapshot(load.engine.snapshot())
load.engine.log.watch = state.apply
load.run(check_every=50)
assert state.snapshot() == load.engine.snapshot()
state.tiers[1] = 2
assert State.from_snapshot(state.copy().snapshot()).tiers == {1: 2}
"""


PARAMETER: list[Edit] = [
    (
        "engine/params.py",
        "    repetition_penalty: Annotated[",
        "    top_a: Annotated[float, Number(\n"
        '        0, 1, chat=True, recommended=True, servers=("llamacpp",),\n'
        '        help="Exclude tokens below this number times the square of the highest probability.",\n'
        "    )] = 0.0\n"
        "    repetition_penalty: Annotated[",
    ),
    ("engine/kernels/row_settings.py", "LOG_MIN_P, ", "LOG_MIN_P, LOG_TOP_A, "),
    ("engine/kernels/row_settings.py", "range(8)", "range(9)"),
    ("engine/worker/sampler.py", "    LOG_MIN_P,\n", "    LOG_MIN_P,\n    LOG_TOP_A,\n"),
    ("engine/worker/sampler.py", "    TRUNCATION = TOP_K", "    TOP_A = 512\n    TRUNCATION = TOP_A | TOP_K"),
    (
        "engine/worker/sampler.py",
        "        settings[REPETITION] =",
        "        if params.top_a > 0.0 and not params.greedy:\n"
        "            self._wants[row] |= Wants.TOP_A\n"
        "        settings[LOG_TOP_A] = np.log(max(params.top_a, SMALLEST))\n"
        "        settings[REPETITION] =",
    ),
    (
        "engine/worker/sampler.py",
        "        scores.masked_fill_(scores < floor",
        "        if (wants & Wants.TOP_A).any():\n"
        "            least = settings[:, LOG_TOP_A] + 2 * scores.amax(-1) - scores.logsumexp(-1)\n"
        "            asked = torch.from_numpy(wants & Wants.TOP_A > 0)\n"
        "            floor = torch.where(asked, torch.maximum(floor, least), floor)\n"
        "        scores.masked_fill_(scores < floor",
    ),
]


def test_a_sampling_parameter_is_a_row_and_its_use_in_the_sampler(repository: Path) -> None:
    change(repository, "a sampling parameter", PARAMETER)
    run(repository, "-c", OF_PARAMETER)


OF_PARAMETER = """
from pathlib import Path

import pytest
import torch

from engine.errors import CheckpointError, InvalidRequest
from engine.params import SamplingParams
from engine.text.tokenizer import TokenizerConfig
from minitui import settings
from minitui.cli import options
from minitui.sampling import Sampling
from tests.engine.worker.test_sampling import kept

likely = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
assert kept(likely, top_a=0.9) == {0, 1, 2}  # 0.9 * 0.4 ** 2 = 0.144
with pytest.raises(InvalidRequest, match="top_a is 2: it must be at least 0 and at most 1"):
    SamplingParams(top_a=2).validate(50)

chat = Sampling()
assert chat.set("top_a", "0.5") == "top_a is 0.5, from the next message on" and chat.params({}).top_a == 0.5
assert Sampling().params({"top_a": 0.25}).top_a == 0.25
[option] = [option for option in options.GROUPS["sampling"] if option.name == "top_a"]
assert "square" in option.annotation.__metadata__[0].help

Path("settings.toml").write_text("[chat]\\ntop_a = 0.5")
assert settings.load(Path("settings.toml")).chat.top_a == 0.5
Path("generation_config.json").write_text('{"top_a": 0.5}')
assert TokenizerConfig(Path()).generation(50) == {"top_a": 0.5}
Path("generation_config.json").write_text('{"top_a": 7}')
with pytest.raises(CheckpointError, match="top_a is 7"):
    TokenizerConfig(Path()).generation(50)

pytest.importorskip("fastapi")
from minitui.server.openai.chat_schema import ChatRequest
from minitui.server.telemetry.endpoints import Params
from minitui.server.openai.text_schema import CompletionRequest, GenerateRequest
from minitui.sources.openai import OpenAISource
from minitui.sources.remote import RemoteSource

for model in (ChatRequest, CompletionRequest, GenerateRequest, Params):
    field = model.model_json_schema()["properties"]["top_a"]
    assert field["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 1} and "square" in field["description"]
body = CompletionRequest.model_validate({"prompt": "x", "top_a": 0.5})
assert body.params(5, {}).top_a == 0.5 and GenerateRequest(prompt="x", top_a=0.5).params().top_a == 0.5
assert RemoteSource.sent(RemoteSource("http://a"), chat.params({}))["top_a"] == 0.5
other = OpenAISource("http://a")
for other.kind in ("openai", "vllm", "sglang"):
    with pytest.raises(InvalidRequest, match="cannot use top_a"):
        other.sent(chat.params({}))
other.kind = "llamacpp"
assert other.sent(chat.params({}))["top_a"] == 0.5
"""


WIDGET = '''
"""The number of the last step."""
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import wrapped


class Odometer(LinePanel):
    TITLE = "Odometer"

    def picture(self, view, width, height):
        return Picture(wrapped(f"step {view.moment.horizon:,}", "ink", width))
'''
PANEL: list[Edit] = [
    ("minitui/tui/panels.py", "PANELS = table((\n",
     "PANELS = table((\n"
     '    Panel(name="odometer", widget=Odometer, column="alone", every=3, turn=1, key="8",\n'
     '        does="Show the number of the last step.", help="the number of the last step"),\n'),
    ("minitui/tui/panels.py", "\nCOLUMNS = ",
     "from minitui.tui.widgets.inspect.odometer import Odometer\n\nCOLUMNS = "),
    ("minitui/tui/help.md", "# Panels\n", "# Panels\n\n## Odometer\n\nThe number of the last step.\n"),
]
TEST = """
from minitui.tui import actions
from minitui.tui.apps import openai_app
from minitui.tui.screens.help import about
from tests.support.app.driving import press, until
from tests.tui.keys.test_keys import recording


async def test_the_panel_is_reached_painted_and_named_wherever_the_others_are():
    assert "Odometer       (8) the number of the last step" in about("inspect")
    assert "odometer" in openai_app.need_records("there is no engine")
    async with recording((120, 40)) as (app, pilot):
        await press(pilot, "8")
        panel = app.screen._panels["odometer"]
        await until(pilot, lambda: "step 70" in panel.text)
        assert app.screen.current == "odometer" and panel.size.width == 120
        await press(pilot, "p")
        await until(pilot, lambda: not app.view.moment.still)
        seen = {panel.text}
        await until(pilot, lambda: seen.add(panel.text) or app.view.moment.still or len(seen) > 4)
        assert len(seen) > 4
        await press(pilot, "8")
        assert not panel.display and app.screen.current != "odometer"
        assert actions.BY_ID["odometer"] in app.actions
        app.commands.run_slash("/odometer")
        assert panel.display
"""


def test_a_panel_is_its_class_and_one_row(repository: Path) -> None:
    (repository / "minitui/tui/widgets/inspect/odometer.py").write_text(WIDGET, encoding="utf-8")
    (repository / "tests/tui/test_odometer.py").write_text(TEST, encoding="utf-8")
    change(repository, "a panel of Inspect", PANEL)
    rows = "tests/tui/panels/test_widgets.py::test_every_row_has_exactly_the_width_of_the_panel[Odometer]"
    run_tests(repository, rows, "tests/tui/test_odometer.py")


class Unfinished(LinePanel):
    TITLE = "Unfinished"


class NoHelp(Unfinished):
    def picture(self, view: View, width: int, height: int) -> Picture:
        return Picture([])


WHOLE = {"name": "new", "widget": Waterfall, "column": "left", "every": 2, "help": "what it shows"}


@pytest.mark.parametrize(
    ("wrong", "lacks"),
    [
        ({"name": ""}, "lacks a `name`"),
        ({"widget": Unfinished}, "Unfinished inherits LinePanel.picture"),
        ({"widget": NoHelp}, "write a section 'Unfinished' into"),
        ({"column": "middle"}, "one of top, left, right, alone"),
        ({"every": 0}, "lacks a rate"),
        ({"turn": 2}, "lacks a rate"),
        ({"help": ""}, "lacks a line of `help`"),
        ({"column": "alone"}, "lacks `key` and `does`"),
        ({"key": "8", "does": "Show it."}, 'the column "alone"'),
    ],
)
def test_a_row_that_lacks_something_is_refused_with_a_sentence(wrong: dict, lacks: str) -> None:
    Panel(**WHOLE)
    with pytest.raises(TypeError, match=r"in minitui/tui/panels\.py lacks") as refused:
        Panel(**WHOLE | wrong)
    assert lacks in str(refused.value)


def test_two_panels_of_one_name_are_refused() -> None:
    with pytest.raises(TypeError, match=r"two panels in minitui/tui/panels\.py are named 'new'"):
        table((Panel(**WHOLE), Panel(**WHOLE | {"widget": Vitals, "column": "top"})))
    with pytest.raises(TypeError, match="there is no such panel"):
        table((Panel(**WHOLE | {"part_of": "old"}),))
