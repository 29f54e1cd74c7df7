"""Run sheets: what is wrong is refused with its line and field, before anything opens."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import EngineError
from minitui.teaching.class_file import ClassFile
from minitui.teaching.class_told import told_scenes
from minitui.teaching.run_sheet import BUNDLED, KINDS, read_run_sheet
from minitui.trace.bundled import bundled
from minitui.tui.apps.class_app import about

GOOD = '''title = "A class"

[[scene]]
title = "First"
minutes = 2
demo = "cache"
notes = """
lesson = 3
[[scene]]
"""

[[scene]]
title = "Second"
minutes = 1.5
lesson = 3
page = 2
'''


def sheet(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_bundled_run_sheet_has_fifty_minutes_and_every_kind_of_scene() -> None:
    run = read_run_sheet()
    assert run.minutes == 50 and {scene.kind for scene in run.scenes} == set(KINDS)
    assert all(scene.notes for scene in run.scenes)
    assert run.begins(len(run.scenes)) == 50 and run.begins(0) == 0
    assert f"{len(run.scenes)} scenes, 50 minutes" in about(run)


def test_a_run_sheet_is_read(tmp_path: Path) -> None:
    first, second = read_run_sheet(sheet(tmp_path, GOOD)).scenes
    assert (first.kind, first.what, first.notes) == ("demo", "cache", "lesson = 3\n[[scene]]\n")
    assert (second.kind, second.what, second.at, second.minutes) == ("lesson", 3, 1, 1.5)
    assert second.options == second.lesson.options


@pytest.mark.parametrize(("old", "new", "said"), [
    ('demo = "cache"', 'demo = "cash"', "line 6: scene 1, demo: 'cash' is not one of shared-prefix"),
    ('demo = "cache"', "demo = 3", "line 6: scene 1, demo: it must be a text"),
    ('demo = "cache"', "", "line 3: scene 1, scene: a scene is exactly one of demo, compare, lesson, recording"),
    ("page = 2", "page = 99", "line 16: scene 2, page: lesson 3 has the pages 1 to 7, not 99"),
    ("page = 2", "page = true", "line 16: scene 2, page: it must be a whole number"),
    ("page = 2", "step = 2", "line 16: scene 2, step: a scene with lesson has no such field: it has lesson, title"),
    ("page = 2", 'chat = true', "line 12: scene 2, scene: a scene is exactly one of .*, and it has lesson and chat"),
    ("lesson = 3\npage = 2", "lesson = 77", "line 15: scene 2, lesson: there is no lesson 77"),
    ("lesson = 3\npage = 2", 'recording = "small-pool"\nstep = 100000', "line 16: scene 2, step: the recording's last"),
    ("lesson = 3\npage = 2", 'recording = "none"', "line 15: scene 2, recording: there is no file 'none'"),
    ("lesson = 3\npage = 2", 'chat = true\nscreen = "tree"', "line 16: scene 2, screen: it must be one of chat"),
    ("lesson = 3\npage = 2", "chat = true\nslow = 0.5", "line 16: scene 2, slow: 0.5 is not 1 to 200"),
    ("lesson = 3\npage = 2", "chat = true\nsteps = 101", "line 16: scene 2, steps: 101 is not 0 to 100"),
    ("minutes = 1.5", "minutes = 0", "line 14: scene 2, minutes: 0 is not above 0"),
    ("minutes = 1.5", "minutes = nan", "line 14: scene 2, minutes: nan is not above 0"),
    ("minutes = 1.5", "", "line 12: scene 2, minutes: it is missing"),
    ('title = "Second"', f'title = "{"x" * 81}"', "line 13: scene 2, title: it has 81 characters"),
    ('title = "A class"', 'titel = "A class"', "line 1: titel: there is no such field"),
    ('title = "A class"', "title = A class", "Invalid value .at line 1"),
    (GOOD, 'title = "x"', "scene: there are 0: a run sheet has 1 to 100"),
    (GOOD, "x" * (65 << 10), "larger than 64 KiB"),
])
def test_a_bad_run_sheet_is_refused_with_its_line_and_field(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(EngineError, match=said):
        read_run_sheet(sheet(tmp_path, GOOD.replace(old, new)))


def test_a_file_that_is_no_text_or_is_missing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"title = 'a'\nnotes = '\xff'")
    with pytest.raises(EngineError, match="line 2: a run sheet must be UTF-8"):
        read_run_sheet(tmp_path / "x")
    with pytest.raises(EngineError, match="cannot be read"):
        read_run_sheet(tmp_path / "none")
    assert BUNDLED.is_file()


def test_the_link_of_a_class_lasts_as_long_as_its_file(tmp_path: Path) -> None:
    file = ClassFile(tmp_path, "paging")
    assert ClassFile(tmp_path, "paging").link == file.link and file.path.stat().st_mode & 0o077 == 0
    file.path.unlink()
    assert ClassFile(tmp_path, "paging").link != file.link
    for name in ("../x", "", "A", "a b", "x" * 33):
        with pytest.raises(EngineError, match="class link"):
            ClassFile(tmp_path, name)
    file.path.write_text("[]", encoding="utf-8")
    with pytest.raises(EngineError, match="is not the file of a class"):
        ClassFile(tmp_path, "paging")


def test_answers_are_exported_and_steps_are_told_until_the_next_scene(tmp_path: Path) -> None:
    file = ClassFile(tmp_path, "paging")
    path = str(bundled()["small-pool"])
    asked = {"question": "=1+1", "choices": ["r1", "r2"], "counts": [3, 40], "phones": 60}
    for number, step in ((1, -1), (2, 20)):
        file.scenes.append({"number": number, "title": f"T{number}", "began_s": 0, "recording": path, "step": step,
                            "answers": [asked] if number == 1 else []})
    more = str(bundled()["vllm-8b"])
    file.scenes.append({"number": 3, "title": "T3", "began_s": 9, "recording": "", "step": -1, "answers": []})
    file.scenes.append({"number": 4, "title": "T4", "began_s": 9, "recording": "", "step": -1, "more": [path, more],
                        "answers": []})
    file.save()
    again = ClassFile(tmp_path, "paging")
    assert again.as_csv().splitlines()[1:] == ["1,T1,'=1+1,a,r1,3,60", "1,T1,'=1+1,b,r2,40,60"]
    first, second, third, fourth = told_scenes(again, 300)
    steps = [[int(line.split()[1].rstrip(":")) for line in scene["told"]] for scene in (first, second)]
    assert steps[0] and steps[1] and max(steps[0]) <= 20 < min(steps[1]) and third["told"] == []
    whole = [f"Engine 2, s{line[1:]}" for line in first["told"] + second["told"]]
    assert fourth["told"][: len(whole)] == whole
    assert fourth["told"][len(whole)].startswith("Engine 3, step"), "both recordings are told, each as its engine's"
    assert [path.name for path in again.recordings] == ["small-pool.trace", "vllm-8b.trace"]
