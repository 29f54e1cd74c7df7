"""The chat file and the settings file."""

from __future__ import annotations

import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.errors import EngineError
from minitui import settings as settings_file
from minitui.chat import transcripts
from minitui.chat.conversation import Message, Sampling, Session
from minitui.chat.store import MIGRATIONS, Store, StoreError
from minitui.settings import ChatSettings, Settings, SettingsError
from tests.support.app.chat_file import open_chats


def chat(id: str = "a", **changes) -> Session:
    fields = {
        "title": "paging",
        "system": "be brief",
        "parent": None,
        "sampling": Sampling(seed=3),
        "created": 1.0,
        "ids_model": "m",
        "ids": [1, 70_000],
        "messages": [],
    }
    return Session(id=id, **(fields | changes))


@pytest.fixture
def store(tmp_path):
    """A chat file with one chat, "a"."""
    store = Store(tmp_path / "chats.sqlite")
    store.save_chat(chat())
    return store


def test_what_is_saved_comes_back(store, tmp_path):
    store.save_message("a", 0, Message("user", "why? ü 🫨", created=2.0))
    store.save_message("a", 1, Message("assistant", "half", "running", created=3.0))
    store.save_message("a", 1, Message("assistant", "whole", "done", metrics={"prompt_tokens": 7}, created=3.0))
    store.close()
    [back] = open_chats(Store(tmp_path / "chats.sqlite"))
    assert (back.title, back.system, back.sampling, back.ids) == ("paging", "be brief", Sampling(seed=3), [1, 70_000])
    assert [(m.role, m.text, m.state, m.metrics) for m in back.messages] == [
        ("user", "why? ü 🫨", "done", {}),
        ("assistant", "whole", "done", {"prompt_tokens": 7}),
    ]


def test_closed_and_empty_chats_are_kept_but_not_restored(tmp_path):
    store = Store(tmp_path / "chats.sqlite")
    for id in ("closed", "empty", "open"):
        store.save_chat(chat(id))
    for id in ("closed", "open"):
        store.save_message(id, 0, Message("user", "x"))
    store.close_chat("closed")
    assert [c.id for c in open_chats(store)] == ["open"]
    store.truncate("open", 0)
    assert open_chats(store) == []


def test_a_file_of_the_first_schema_is_brought_up_to_date_with_its_chats(tmp_path):
    path = tmp_path / "chats.sqlite"
    db = sqlite3.connect(path)
    db.executescript(f"{MIGRATIONS[0]} PRAGMA user_version = 1;")
    db.execute(
        "INSERT INTO chats (id, title, system, parent, settings, created) VALUES ('old', 't', 's', NULL, '{}', 1)"
    )
    db.execute("INSERT INTO messages VALUES ('old', 0, 'user', 'still here?', 'done', '', '{}', 1)")
    db.commit()
    db.close()
    store = Store(path)
    assert store.version == len(MIGRATIONS)
    [old] = open_chats(store)
    assert (old.ids_model, old.ids, old.messages[0].text) == ("", [], "still here?")


def test_a_file_of_a_newer_minitui_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "chats.sqlite"
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreError, match="schema version 99"):
        Store(path)


@pytest.mark.parametrize(
    ("words", "found"),
    [("GRÖSSE", True), ("öSS wie", True), ("%%", False), ("nach", True), ("wie " * 2000, True), ("x" * 60_000, False)],
    ids=lambda value: str(value)[:12],
)
def test_any_words_can_be_searched_for(words, found):
    store = Store(":memory:")
    store.save_chat(Session("id", "Wie groß?", ""))
    store.save_message("id", 0, Message("user", "Die Grösse: 1 \0 danach 100%."))
    assert [one.id for one in store.search(words)] == ["id"] * found


def test_a_file_that_is_no_database_is_refused_with_advice(tmp_path):
    path = tmp_path / "chats.sqlite"
    path.write_text("not a database, but long enough to be taken for one" * 40)
    with pytest.raises(EngineError, match="Move this file away"):
        Store(path)


def test_settings_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "deep" / "settings.toml"
    settings = Settings(
        theme="minitui-light", fps=7, ascii=True, keys={"freeze": "f8"}, chat=ChatSettings(system='say "hi"\n', seed=3)
    )
    settings_file.save(settings, path)
    assert settings_file.load(path) == settings
    assert [p.name for p in path.parent.iterdir()] == ["settings.toml"]  # no temporary file is left


def test_a_theme_has_the_name_of_the_command_line(tmp_path):
    (tmp_path / "settings.toml").write_text("theme = 'light'")
    assert settings_file.load(tmp_path / "settings.toml").theme == "minitui-light"


def test_missing_settings_are_the_defaults(tmp_path):
    assert settings_file.load(tmp_path / "none.toml") == Settings()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("theme = 3", "theme is 3; it must be a text in quotes"),
        ("theme = 'pink'", "no theme 'pink': the themes are dark, light and projector"),
        ("colour = 'red'", r"colour is not a setting; .* the tables \[chat\] and \[keys\]"),
        ("temperature = 0", r"temperature is a setting of the table \[chat\]"),
        ("fps = 0", "fps"),
        ("fps = true", "fps is True; it must be a whole number"),
        ("[chat]\nseed = 'x'", "chat.seed is 'x'; it must be a whole number"),
        ("[keys]\nfreeze = 8", "keys.freeze"),
        ("= 3", "cannot be read"),
        ("a = " + "[" * 5_000, "cannot be read"),
        ("#" * 1_100_000, "cannot be read: it has 1,100,000 bytes, and the limit is 1,048,576"),
    ],
)
def test_wrong_settings_are_refused_by_name(tmp_path, text, named):
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=named):
        settings_file.load(path)


def test_settings_are_only_read_from_a_regular_file(tmp_path):
    fifo = tmp_path / "settings.toml"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero"), tmp_path):
        with pytest.raises(SettingsError, match="it is not a regular file"):
            settings_file.load(path)


def test_a_failed_write_is_reported_and_leaves_no_half_transaction(store, tmp_path):
    other = sqlite3.connect(tmp_path / "chats.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match=r"chats\.sqlite cannot be used: database is locked"):
        store.save_chat(chat(title="other"))
    other.execute("ROLLBACK")
    with pytest.raises(StoreError), store.together():
        store.save_message("a", 0, Message("user", "x"))
        store._db.execute("DROP TABLE messages")
        store.save_message("a", 1, Message("assistant", "y"))
    assert store.load("a").messages == []
    store.save_message("a", 0, Message("user", "x"))
    assert [m.text for m in store.load("a").messages] == ["x"]


def test_two_processes_that_start_at_once_create_one_file(tmp_path):
    def begin(_: int) -> int:
        store = Store(tmp_path / "chats.sqlite")
        try:
            return store.version
        finally:
            store.close()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(begin, range(24))) == {len(MIGRATIONS)}


def test_damaged_columns_do_not_lose_the_messages(store):
    store.save_message("a", 0, Message("user", "why?"))
    store._db.execute("UPDATE chats SET settings = '{oops', ids = x'010203'")
    store._db.execute("UPDATE messages SET metrics = '[1'")
    [back] = open_chats(store)
    assert (back.sampling, back.ids, [(m.text, m.metrics) for m in back.messages]) == (Sampling(), [], [("why?", {})])


@pytest.mark.parametrize("metrics", [
    '{"ttft_ms": "soon"}', '{"prompt_tokens": []}', '{"match": {"stop": 5, "detail": 7}}', '{"match": 5}',
    '{"replica": {"number": 1, "name": "a", "passed": []}}', '{"drafted_tokens": 3}', '{"diverged": {"at": "x"}}',
])
def test_metrics_that_were_edited_by_hand_are_left_out(store, metrics):
    for position, written in enumerate((metrics, '{"prompt_tokens": 7}')):
        store.save_message("a", position, Message("assistant", "because"))
        store._db.execute("UPDATE messages SET metrics = ? WHERE position = ?", (written, position))
    [back] = open_chats(store)
    assert [message.metrics for message in back.messages] == [{}, {"prompt_tokens": 7}]


def test_values_of_another_type_are_read_as_what_the_column_has(store):
    store.save_message("a", 0, Message("user", "why?"))
    for column, value in (("title", b"t"), ("system", 5), ("created", "soon"), ("ids", 7), ("settings", 1.5)):
        store._db.execute(f"UPDATE chats SET {column} = ?", (value,))
    for column, value in (("text", b"why?"), ("error", b""), ("created", 1e300), ("metrics", 3)):
        store._db.execute(f"UPDATE messages SET {column} = ?", (value,))
    [found] = store.search("why")
    back = store.load("a")
    assert back is not None and (found.title, found.created, back.system) == ("t", 0.0, "5")
    assert '"content": "why?"' in transcripts.as_json(back) and "why?" in transcripts.as_markdown(back)


def test_a_data_directory_that_cannot_be_created_is_reported_with_advice(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINITUI_DATA", str(tmp_path / "file" / "data"))
    with pytest.raises(SettingsError, match=r"Not a directory.* MINITUI_DATA"):
        settings_file.data_dir()


@pytest.mark.parametrize(
    ("code", "way_out"),
    [
        (sqlite3.SQLITE_FULL, "Free space on its disk, or set MINITUI_DATA"),
        (sqlite3.SQLITE_IOERR, "Check whether its disk is full or broken, or set MINITUI_DATA"),
        (sqlite3.SQLITE_READONLY, "Make the file and its directory writable, or set MINITUI_DATA"),
        (sqlite3.SQLITE_CANTOPEN | 512, "Make its directory writable, or set MINITUI_DATA"),
        (sqlite3.SQLITE_NOTADB, "Move this file away to start with an empty one"),
    ],
)
def test_the_advice_for_a_chat_file_fits_its_error(tmp_path, monkeypatch, code, way_out):
    def refuse(*arguments, **options):
        error = sqlite3.OperationalError("refused")
        error.sqlite_errorcode = code
        raise error

    monkeypatch.setattr(sqlite3, "connect", refuse)
    with pytest.raises(StoreError, match=f"chats.sqlite cannot be used as a chat file: refused. {way_out}") as told:
        Store(tmp_path / "chats.sqlite")
    assert ("Move this file away" in str(told.value)) == (code == sqlite3.SQLITE_NOTADB)


def test_a_chat_file_in_a_missing_directory_cannot_be_created(tmp_path):
    with pytest.raises(StoreError, match="Make its directory writable, or set MINITUI_DATA to another"):
        Store(tmp_path / "missing" / "chats.sqlite")
