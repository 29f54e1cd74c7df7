"""`minitui replay --what-if` and `--sweep`, and `minitui advise`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.errors import EngineError
from engine.trace.side_pool import SideGroup
from minitui.cli.main import app
from minitui.export import charts, png
from tests.whatif.test_play import BASE, real


def output(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_another_setting_beside_the_recording(tmp_path):
    path = tmp_path / "run.trace"
    real(path, BASE, 1, closed=True)
    asked = ("replay", path, "--what-if", "budget=16,blocks=90", "--arrivals", "closed", "--json")
    data = json.loads(output(*asked))
    assert [len(run["requests"]) for run in json.loads(output(*asked, "--requests"))["runs"]] == [42, 42]
    recorded, played = (run["figures"] for run in data["runs"])
    assert played["requests"] == recorded["requests"] == 42
    assert played["reply_tokens"] == recorded["reply_tokens"]
    assert played["steps"] > recorded["steps"]
    assert [run["settings"]["max_num_batched_tokens"] for run in data["runs"]] == [64, 16]
    again = data["what_if"]["recorded_setting_played"]
    for key in ("steps", "prompt_tokens_cached", "preemptions"):
        assert again[key]["recorded"] == again[key]["played"], key
    assert data["what_if"]["fit"]["steps"] == recorded["steps"]
    text = output("replay", path, "--what-if", "budget=16", "--arrivals", "closed")
    assert "The engines differ in: token budget of a step 64 and 16." in text
    assert "The recorded setting, played in the same way: " in text and "steps the same" in text


def test_what_is_not_played_is_no_effect_of_the_setting(tmp_path):
    """Of a model with recurrent states, the run beside is the recorded setting, played."""
    path = tmp_path / "run.trace"
    real(path, BASE, 1, closed=True, groups=(SideGroup("state", "state", 30),))
    asked = ("replay", path, "--what-if", f"budget={BASE.budget}", "--arrivals", "closed", "--json")
    for data in (json.loads(output(*asked)), json.loads(output(*asked, "--requests"))):
        first, second = data["runs"]
        assert first["name"] == "recorded setting" and first["figures"] == second["figures"]
        cached = data["what_if"]["recorded_setting_played"]["prompt_tokens_cached"]
        assert cached["recorded"] < cached["played"] == first["figures"]["prompt_tokens_cached"]
        assert any("windows and recurrent states are not played" in note.lower() for note in data["notes"])


def test_a_bundled_recording_of_vllm():
    data = json.loads(output("replay", "vllm-8b", "--what-if", "blocks=2400", "--json", "--requests"))
    first, second = ([one["request"] for one in run["requests"]] for run in data["runs"])
    assert first[0] == 1084 and sorted(first) == sorted(second), "a request has the same number in both runs"
    recorded, played = (run["figures"] for run in data["runs"])
    assert recorded["preemptions"] == 20 and played["preemptions"] == 0
    assert played["prompt_tokens"] == recorded["prompt_tokens"]
    again = data["what_if"]["recorded_setting_played"]
    # The server was at its limit: its times to first token hang on a few steps more or less.
    for key, off in {"time_ms": 0.1, "first_token_p99_ms": 0.3, "gap_p50_ms": 0.1, "prompt_tokens_cached": 0.1}.items():
        assert again[key]["played"] == pytest.approx(again[key]["recorded"], rel=off), key
    said = "\n".join(data["notes"])
    assert "Recorded from vLLM" in said and "60 requests had begun before the recording" in said


def test_a_sweep_writes_its_figures_and_a_picture(tmp_path, monkeypatch):
    path, drawn = tmp_path / "run.trace", []
    real(path, BASE, 1)
    monkeypatch.setattr(charts, "write_png", lambda svg, out: drawn.append(svg) or out)
    text = output("replay", path, "--sweep", "budget=16..256")
    assert [line.split()[0] for line in text.splitlines()[1:6]] == ["16", "32", "64", "128*", "256*"]
    assert "budget=256: extrapolated: " in text
    data = json.loads((tmp_path / "run.budget.json").read_text())
    steps = [point["figures"]["steps"] for point in data["points"]]
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]
    assert data["recorded_value"] == 64
    assert all(len(str(value)) < 16 for point in data["points"] for value in point["figures"].values()), "rounded"
    assert ">run.trace: budget</text>" in drawn[0] and ">○ extrapolated</text>" in drawn[0], "the title runs into it"
    assert "first token p99" in drawn[0] and drawn[0].count("<circle") == 6 * 5


def test_a_sweep_without_a_browser_still_answers(tmp_path, monkeypatch):
    real(tmp_path / "run.trace", BASE, 1)
    monkeypatch.setattr(png, "find_browser", lambda: None)
    assert "cache" in output("replay", tmp_path / "run.trace", "--sweep", "cache=on|off", "-o", tmp_path / "mine")
    assert Path(tmp_path / "mine.json").is_file()


def test_advice_names_the_setting_with_the_best_goodput(tmp_path):
    path = tmp_path / "run.trace"
    real(path, BASE, 1)
    data = json.loads(output("advise", path, "--goal", "first=100000,gap=100000", "--json"))
    assert data["best"]["within_goals"] == data["recorded"]["within_goals"] == 14
    rates = [point["goodput_per_second"] for point in data["tried"]]
    assert rates == sorted(rates, reverse=True)
    assert data["best"]["goodput_per_second"] >= data["recorded"]["goodput_per_second"]
    text = output("advise", path, "--goal", "first=1")
    assert text.startswith("Goal: first token within 1.00 ms. Best: ") and "The recording cannot tell" in text
    assert "* " in text and "\n* extrapolated: some steps" in text, "what the mark of a setting says"


@pytest.mark.parametrize(("arguments", "why"), [
    (("replay", "--what-if", "budget=2"), "need a recording"),
    (("replay", "vllm-8b", "--what-if", "policy=priority"), "do not have the priorities"),
    (("replay", "vllm-8b", "--what-if", "pool=2"), "no setting 'pool'"),
    (("replay", "vllm-8b", "--what-if", "seqs=2", "--arrivals", "later"), "recorded or closed"),
    (("replay", "vllm-8b", "--json"), "belong to --what-if"),
    (("replay", "vllm-8b", "--what-if", "seqs=2", "--requests"), "belongs to --what-if with --json"),
    (("advise", "vllm-8b", "--goal", "fast=1"), "not a list of goals"),
])
def test_errors_are_sentences(arguments, why):
    with pytest.raises(EngineError, match=why):
        output(*arguments)
