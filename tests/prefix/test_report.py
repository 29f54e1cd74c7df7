"""`minitui doctor --prefix` on a log of the proxy, and on recordings."""

from __future__ import annotations

import json
from dataclasses import replace

from typer.testing import CliRunner

from minitui.cli.main import app
from minitui.prefix.diagnose import Finding
from minitui.prefix.recorded import findings_in
from minitui.prefix.report import lines
from minitui.prefix.session import FORMAT
from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from tests.prefix.test_diagnose import PLANTED, Session
from tests.whatif.test_play import BASE, real


def logged(path, cause: str):
    s = Session(3, "openai", False)
    for turn in range(6):
        if turn == 3:
            PLANTED[cause](s)
        s.ask()
    path.write_text("\n".join([json.dumps({"format": FORMAT}), *(turn.to_json() for turn in s.turns)]))


def doctor(*arguments: object):
    return CliRunner().invoke(app, ["doctor", "--prefix", *map(str, arguments)])


def test_the_summary_and_the_exit_code(tmp_path):
    logged(tmp_path / "log", "tools reordered")
    text = doctor(tmp_path / "log").stdout
    assert "\nr3: tools reordered (client): " in text and "What cost most:\n  tools reordered: " in text
    assert "Change: send the tools in the same order each time." in text
    data = json.loads(doctor(tmp_path / "log", "--json").stdout)
    assert [one["cause"] for one in data["requests"]] == ["first", "none", "none", "tools reordered", "none", "none"]
    summary = data["summary"]
    assert 0 < summary["cached"] < summary["could"] < 1
    assert summary["causes"][0]["seconds"] > 0
    kept = summary["kept"]
    assert doctor(tmp_path / "log", "--fail-below", kept - 0.01).exit_code == 0
    assert doctor(tmp_path / "log", "--fail-below", kept + 0.01).exit_code == 1
    assert "| tools reordered | client | 1 |" in doctor(tmp_path / "log", "--markdown").stdout


def test_a_short_time_is_not_told_as_zero():
    [line] = [line for line in lines([Finding(4, 53, 16, 0, 16, "checkpoint", 3, seconds=0.0029)], "x") if "r4" in line]
    assert line == "r4: checkpoint (server): 16 tokens lost, 2.90 ms"


def test_what_is_missing_without_a_cause_is_not_denied(tmp_path):
    """Prompts of 12 tokens fill no block: the server had none of them, and no request is at fault."""
    session = Session(3, "openai", False)
    session.ask()
    turns = [replace(session.turns[0], number=n, prompt=12, cached=0) for n in range(3)]
    (tmp_path / "log").write_text("\n".join([json.dumps({"format": FORMAT}), *(turn.to_json() for turn in turns)]))
    text = doctor(tmp_path / "log").stdout
    assert "could have been cached: 67%    was cached: 0%" in text
    assert "No request lost more of its prefix than what may fill no block: 256 tokens, or 5% of it." in text


def test_an_eviction_in_a_recording_is_named_and_nothing_is_invented(tmp_path):
    real(tmp_path / "roomy.trace", replace(BASE, blocks=2000), 1, closed=True, salts=False)
    assert {one.cause for one in findings_in(TraceReader(tmp_path / "roomy.trace"))} <= {"first", "none"}
    real(tmp_path / "small.trace", replace(BASE, blocks=70), 1, closed=True, salts=False)
    small = findings_in(TraceReader(tmp_path / "small.trace"))
    evicted = [one for one in small if one.cause == "eviction"]
    assert len(evicted) > 5 and all("evicted at step" in one.where for one in evicted)
    assert len(small) == 42


def test_a_text_that_is_not_shown_has_no_change():
    """The bundled recordings have random texts; each prompt has the same text in place of its own."""
    assert {one.cause for one in findings_in(TraceReader(find_trace("h200-8b")))} <= {"first", "none"}


def test_a_salt_in_a_recording_is_named(tmp_path):
    real(tmp_path / "run.trace", replace(BASE, blocks=2000), 1)
    causes = [one.cause for one in findings_in(TraceReader(tmp_path / "run.trace"))]
    assert "salt" in causes and set(causes) <= {"first", "none", "salt"}


def test_a_recording_that_was_cut_off_is_told_as_such(tmp_path):
    whole = find_trace("h200-8b").read_bytes()
    (tmp_path / "cut.trace").write_bytes(whole[: len(whole) // 2])
    told = doctor(tmp_path / "cut.trace")
    assert told.exit_code == 0 and "cut.trace is not complete: it was cut off." in told.stderr
    assert "cut off" not in doctor("h200-8b").stderr
