"""The exercises: planted faults have sentences of their own, good solutions pass, and no code harms the app."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from minitui.exercises.attempt import Attempts, begin, read
from minitui.exercises.student import PRINTED, Broken, Student
from minitui.exercises.table import EXERCISES
from minitui.exercises.trial import Trial
from minitui.trace.reader import TraceReader
from tests.cli.test_cli import Here
from tests.exercises.planted import GOOD, PLANTED, source
from tests.support.paths import ROOT

EVERY = [(exercise, fault) for exercise, faults in PLANTED.items() for fault in faults]


@cache
def reference(exercise: str) -> Trial:
    return EXERCISES[exercise].play(None)


def attempt(exercise: str, text: str) -> Trial:
    one = EXERCISES[exercise]
    trial = one.play(Student(text, exercise))
    one.judge(trial, reference(exercise))
    return trial


def sentence_of(exercise: str, fault: str) -> str:
    broken = attempt(exercise, source(exercise, PLANTED[exercise][fault][0])).broken
    assert broken is not None, f"{exercise}, {fault}: no rule is broken"
    return str(broken)


def test_there_are_at_least_four_planted_faults_for_each_exercise():
    assert PLANTED.keys() == EXERCISES.keys() and len(EVERY) >= 20
    assert all(len(faults) >= 4 for faults in PLANTED.values())


@pytest.mark.parametrize(("exercise", "fault"), EVERY)
def test_a_planted_fault_is_told_by_its_sentence_and_by_no_other(exercise, fault):
    sentence = sentence_of(exercise, fault)
    telling = [name for name, (_, words) in PLANTED[exercise].items() if re.search(words, sentence)]
    assert telling == [fault], sentence


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_file_to_begin_with_runs_and_breaks_a_rule_and_the_reference_breaks_none(exercise):
    assert reference(exercise).broken is None
    broken = attempt(exercise, EXERCISES[exercise].start).broken
    assert broken is not None and broken.step is not None, "a student sees at once what a rule is"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_file_to_begin_with_fits_into_a_pane_of_80_columns(exercise):
    assert max(map(len, EXERCISES[exercise].start.splitlines())) <= 69


def test_admit_is_never_called_with_an_empty_queue():
    assert attempt("admit", source("admit", "assert waiting\n    " + GOOD["admit"])).broken is None


@pytest.mark.parametrize("exercise", EXERCISES)
def test_a_good_solution_keeps_all_rules(exercise):
    one, trial = EXERCISES[exercise], attempt(exercise, source(exercise, GOOD[exercise]))
    assert trial.broken is None
    score = one.score(one.of(trial), one.of(reference(exercise)))
    assert score >= 80 if exercise == "sample" else score >= 100, score
    if exercise in ("admit", "chunk"):
        assert score > 105, "there is something to gain"
    if exercise == "sample":
        assert one.text(one.of(trial)) == "at most 5 % (chance)"
    if exercise == "evict":
        assert trial.records and len(trial.records) == len(reference(exercise).records), "LRU is the reference"


def test_lru_needs_no_test_of_children_as_its_file_says():
    assert attempt("evict", source("evict", GOOD["evict"].replace(" and not n.children", ""))).broken is None


def test_an_order_that_tells_chats_from_texts_that_are_asked_once_beats_lru():
    body = GOOD["evict"].replace("n.last_used)", "(n.parent != 0, n.last_used))")
    one, trial = EXERCISES["evict"], attempt("evict", source("evict", body))
    score = one.score(one.of(trial), one.of(reference("evict")))
    assert trial.broken is None and score > 103


def test_whole_numbers_of_numpy_are_whole_numbers():
    chunk, sample = "numpy.int64(min(left, budget))", "numpy.int32(draw(logits, temperature, seed, position))"
    for exercise, value in (("chunk", chunk), ("sample", sample)):
        assert attempt(exercise, source(exercise, f"import numpy; return {value}")).broken is None


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attempts]:
    with Attempts(EXERCISES["evict"], tmp_path_factory.mktemp("runs"), cpu=0.4) as running:
        yield running


def run(attempts: Attempts, tmp_path: Path, text: str):
    path = tmp_path / "mine.py"
    path.write_text(text, encoding="utf-8")
    return attempts.run(path)


def test_an_attempt_has_both_runs_and_opens_at_the_step_of_the_fault(attempts, tmp_path):
    path = tmp_path / "evict.py"
    assert begin(EXERCISES["evict"], path)
    path.write_text(source("evict", PLANTED["evict"]["in use"][0]), encoding="utf-8")
    assert not begin(EXERCISES["evict"], path), "what the student wrote stays"
    found = attempts.run(path)
    assert not found.passed and found.score is None
    assert found.words.startswith(f"Not yet: at step {found.step}, `evict` ")
    ours = TraceReader(found.runs[1])
    ours.check()
    assert (found.step, f"{found.broken}") in ours.bookmarks and ours.last_step == found.step
    whole = TraceReader(found.runs[0])
    assert whole.complete and whole.last_step > ours.last_step
    found = run(attempts, tmp_path, source("evict", "print('seen', len(nodes))\n    " + GOOD["evict"]))
    assert found.passed and found.score == 100 and "All rules are kept. Score 100" in found.words
    assert "seen" in found.printed and found.data["passed"] and found.data["broken"] is None
    found = run(attempts, tmp_path, source("evict", "raise ValueError('No.')"))
    assert found.words.endswith("ValueError in line 5: No."), "one full stop"


TRIES = """
    import os, socket, subprocess
    for tried in (
        os.fork, lambda: open(FILE, "w"), lambda: subprocess.run(["true"]), lambda: os.kill(os.getppid(), 9), input,
        lambda: socket.create_connection(("127.0.0.1", 9)), lambda: os.remove(FILE),
    ):
        try:
            tried()
        except BaseException as error:
            print(type(error).__name__, error)
    raise SystemExit
"""
HARM = {
    "ends never": ("while True: pass", "did not end: a run may take 0.4 s of processor time; it was in line 5"),
    "catches everything": ("while True:\n        try:\n            while True: pass\n"
                           "        except BaseException: pass", "did not end"),
    "keeps all memory": ("kept = []\n    while True: kept.append(bytes(1 << 22))", "an exercise may use (256 MiB)"),
    "kills its process": ("import os\n    os._exit(0)", "the code ended its process (exit code 0)"),
    "crashes": ("import ctypes\n    ctypes.string_at(0)", "the code ended its process (Segmentation fault"),
    "tries all it may not do": (TRIES, "`evict` called exit in line"),
}


@pytest.mark.parametrize("harm", HARM)
def test_code_harms_only_its_own_process(attempts, tmp_path, harm):
    body, words = HARM[harm]
    found = run(attempts, tmp_path, source("evict", body).replace("FILE", repr(str(tmp_path / "mine.py"))))
    assert words in found.broken, found.broken
    assert (tmp_path / "mine.py").read_text(encoding="utf-8").endswith(source("evict", body)[-12:])
    if body is TRIES:
        assert [line.split()[0] for line in found.printed.splitlines()] == [
            "Forbidden", "Forbidden", "Forbidden", "Forbidden", "EOFError", "Forbidden", "Forbidden",
        ]


def test_what_is_printed_is_kept_by_step_and_without_the_draws_that_only_count():
    lines = "print(seed, position, logits[0])\n    return draw(logits, temperature, seed, position)"
    student = Student(source("sample", lines), "sample")
    trial = EXERCISES["sample"].play(student)
    assert trial.broken is None and student.printed.step == trial.step and " 0.0\n" not in student.printed.text
    assert student.printed.text.endswith(student.printed.latest) and len(student.printed.latest) < PRINTED


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(source("evict", GOOD["evict"]), encoding="utf-8-sig")
    assert read(path) == source("evict", GOOD["evict"])


def test_a_file_without_the_function_says_so():
    with pytest.raises(Broken, match="the file has no function 'evict'"):
        Student("def evikt(nodes): pass", "evict")
    with pytest.raises(Broken, match=r"line 2: '\(' was never closed"):
        Student("def evict(nodes):\n    return (", "evict")


def test_the_command_prints_the_result_and_saves_both_runs(tmp_path, monkeypatch, capsys) -> None:
    here = Here(tmp_path, monkeypatch, capsys)
    monkeypatch.chdir(tmp_path)
    first = here("exercise", "chunk", "--plain")
    assert first.returncode == 1 and "exercise_chunk.py is new" in first.stdout
    assert "Not yet: at step 12, `chunk` returned" in first.stdout
    Path("exercise_chunk.py").write_text(source("chunk", GOOD["chunk"]), encoding="utf-8")
    found = here("exercise", "chunk", "--json", "--save", "run")
    data = json.loads(found.stdout)
    assert found.returncode == 0 and data["passed"] and data["score"] > 105 and data["yours"] < data["reference"]
    assert len(str(data["reference"])) < 12, "rounded"
    compared = json.loads(here("compare", *data["recordings"], "--json").stdout)
    assert compared["differences"]["gap_p99_ms"]["better"] is True and [run["name"] for run in compared["runs"]] == [
        "reference", "yours",
    ]
    plain = here("compare", *data["recordings"], "--plain").stdout.splitlines()
    assert "The score is of: reference: 99th percentile of the token gaps" in plain[0] and "; yours: 99th" in plain[0]
    Path("exercise_chunk.py").write_text(EXERCISES["chunk"].start, encoding="utf-8")
    data = json.loads(here("exercise", "chunk", "--json", "--save", "run").stdout)
    plain = here("compare", *data["recordings"], "--plain").stdout
    assert plain.startswith("yours stopped at step 12: a rule was broken: `chunk` returned 1477")
    assert "better" not in plain and "worse" not in plain and "In return" not in plain
    compared = json.loads(here("compare", *data["recordings"], "--json").stdout)
    assert compared["sentence"].startswith("yours stopped at step 12")
    assert {one["better"] for one in compared["differences"].values()} == {None}
    listed = here("exercise").stdout
    assert all(f"minitui exercise {name}" in listed and one.teaches in listed for name, one in EXERCISES.items())
    assert "there is no exercise 'evikt'" in here("exercise", "evikt").stderr


def test_readme_has_a_row_for_each_exercise():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (\d+) \| (.+) \|$", text, re.M)
    known = [(one.name, one.teaches, str(one.lesson), one.figure) for one in EXERCISES.values()]
    assert [row for row in rows if row[0] in EXERCISES] == known
