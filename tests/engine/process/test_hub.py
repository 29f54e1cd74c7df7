"""Where models are found, and what is downloaded of them: from a hub on this machine (tests/fake_hub.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from engine.errors import CheckpointError
from engine.hub.cache import cached_snapshots, snapshots_of
from engine.hub.resolve import pace, resolve_model
from minitui import tutor
from minitui.cli import doctor
from tests.support.server.fake_hub import REVISION, FakeHub
from tests.support.waiting import wait_until

NAME = "Org/Model-1B"
INDEX = "model.safetensors.index.json"
SHARDS = {f"model-0000{n}-of-00003.safetensors": bytes([n]) * 1000 * n for n in (1, 2, 3)}
FIRST, SECOND, THIRD = SHARDS
NOT_READ = (
    "consolidated.safetensors", "pytorch_model.bin", "original/consolidated.00.pth", "model.gguf", "onnx/model.onnx",
    "model.fp16.safetensors", "onnx/config.json", "vocab.json", "README.md",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with one model of three shards, which this process asks."""
    fake = FakeHub()
    fake.repositories[NAME] = description() | shards()
    monkeypatch.setattr(constants, "ENDPOINT", fake.url)
    template = fake.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with fake.running():
        yield fake


def description() -> dict[str, bytes]:
    """config.json, the tokenizer and so on of the bundled model."""
    return {
        path.name: path.read_bytes()
        for path in tutor.model_dir().iterdir()
        if path.name.startswith(("config", "generation", "tokenizer", "chat_template"))
    }


def shards() -> dict[str, bytes]:
    return {**SHARDS, INDEX: json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(SHARDS)}}).encode()}


def weights_asked(hub: FakeHub) -> list[str]:
    return sorted(name for name in hub.asked if name.endswith(".safetensors"))


def interrupt(hub: FakeHub) -> None:
    """The first start: the second shard breaks off in its middle, and cannot be had from then on."""
    hub.cut = {SECOND}
    with pytest.raises(CheckpointError, match=r"reports an internal error \(503\).*are kept"):
        resolve_model(NAME)
    hub.cut, hub.asked = set(), []


# ---- directories and the cache


def find_cached(name: str) -> Path | None:
    """The newest complete snapshot of a model."""
    return next((snapshot.path for snapshot in snapshots_of(name) if snapshot.complete()), None)


def make_cached(cache: Path, repository: str, files: dict[str, bytes], revision: str = "abc") -> Path:
    snapshot = cache / f"models--{repository.replace('/', '--')}" / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for name, data in {"config.json": b"{}", **files}.items():
        (snapshot / name).write_bytes(data)
    return snapshot


def test_a_name_is_found_in_the_local_cache(cache: Path) -> None:
    snapshot = make_cached(cache, "Qwen/Qwen3-0.6B", {"model.safetensors": b""})
    sharded = make_cached(cache, "Org/Name--2", shards())
    make_cached(cache, "Qwen/Qwen3-4B", {})
    make_cached(cache, "Qwen/Qwen3-8B", {"consolidated.safetensors": b""})
    assert resolve_model("Qwen/Qwen3-0.6B") == resolve_model("Qwen3-0.6B") == snapshot
    assert resolve_model("Org/Name--2") == sharded
    assert cached_snapshots("models--Org--Name--2")[0].repository == "Org/Name--2"
    assert find_cached("Qwen/Qwen3-4B") is None, "a snapshot without weights is not a model"
    assert find_cached("Qwen/Qwen3-8B") is None, "these weights are not read"
    assert find_cached("Qwen3-0.6") is None


def test_a_snapshot_that_lacks_a_file_of_its_index_is_not_found(cache: Path) -> None:
    old = make_cached(cache, NAME, shards(), "old")
    new = make_cached(cache, NAME, shards(), "new")
    os.utime(old / "config.json", (1, 1))
    assert find_cached(NAME) == new
    (new / SECOND).unlink()
    (new / SECOND).symlink_to("../../blobs/gone")
    assert find_cached(NAME) == old, "an older whole one is as good as any"
    (old / INDEX).write_bytes(b"{")
    assert find_cached(NAME) is None
    assert [snapshot.missing for snapshot in cached_snapshots()] == [(SECOND,), (INDEX,)]


# ---- names


@pytest.mark.parametrize(
    "name",
    [
        "", "a/b/c", "../none", "./nothing", "/no/such/dir", "~no-such-user/x", "a/" * 3000, "x" * 5000, "Q" * 97, "*",
        "Org/*", "nul\0", "two words", "https://a.example/Org/Model", "C:\\models\\x", "Org/..", "\udcff/x", "Org/ü",
    ],
)
def test_what_is_neither_a_directory_nor_a_name_is_refused(name: str, hub: FakeHub) -> None:
    with pytest.raises(CheckpointError, match="not a directory") as caught:
        resolve_model(name)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["Org/Model-1B-GGUF:Q4_K_M", "Org/Model-1B:Q4_K_M", "Model-1B.gguf:latest"])
def test_a_name_of_a_quantised_file_says_what_to_name_instead(name: str, hub: FakeHub) -> None:
    with pytest.raises(CheckpointError, match=r"downloads no GGUF files: .* as in (Org/)?Model-1B$"):
        resolve_model(name)


def test_a_bare_name_of_unknown_origin_asks_for_the_full_one(cache: Path) -> None:
    with pytest.raises(CheckpointError, match="full name on the hub"):
        resolve_model("Unheard-7B")


# ---- what is downloaded


def test_only_what_is_read_is_downloaded(hub: FakeHub) -> None:
    hub.repositories[NAME] |= {**dict.fromkeys(NOT_READ, b"{}"), "LICENSE": b"as you like"}
    directory = resolve_model(NAME)
    wanted = {*description(), *SHARDS, INDEX, "LICENSE"}
    assert {path.name for path in directory.iterdir()} == wanted == set(hub.asked)
    assert all((directory / name).read_bytes() == data for name, data in SHARDS.items())
    assert (directory.parents[1] / "refs" / "main").read_text() == REVISION, "other tools find it too"
    hub.refusal, hub.asked = (500, ""), []
    assert resolve_model(NAME) == resolve_model("Model-1B") == directory
    assert hub.asked == []


def test_of_a_single_file_and_shards_the_single_file_is_downloaded(hub: FakeHub) -> None:
    hub.repositories[NAME]["model.safetensors"] = b"all"
    resolve_model(NAME)
    assert weights_asked(hub) == ["model.safetensors"]


def config(**changes: Any) -> bytes:
    return json.dumps(json.loads(description()["config.json"]) | changes).encode()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": config(architectures=["GPT9"], model_type="gpt9")}, "names GPT9: supported are"),
        ({"config.json": config(quantization_config={"quant_method": "aqlm"})}, "has quant_method .aqlm. in its"),
        ({"config.json": b"<html>"}, "cannot be read"),
        (
            {"config.json": None, **dict.fromkeys(SHARDS), "model-Q4.gguf": b""},
            r"no config.json, only .*model-Q4.gguf.*download a GGUF file and give its path",
        ),
        (
            {INDEX: None, **dict.fromkeys(SHARDS), "pytorch_model.bin": b""},
            r"no model.safetensors or .*, only .*pytorch_model.bin",
        ),
        ({INDEX: b'{"weight_map": {"a": "../../x.safetensors"}}'}, "not a safetensors file in its directory"),
        ({THIRD: None}, f"lacks {THIRD}, which its {INDEX} names"),
        ({"tokenizer.json": None, "tokenizer.model": b""}, "tokenizer.json"),
        ({"tokenizer.json": b"{}"}, "tokenizer.json"),
        ({"generation_config.json": b'{"eos_token_id": "x"}'}, "eos_token_id"),
    ],
)
def test_what_is_not_supported_is_refused_before_any_weight_is_asked_for(
    files: dict[str, bytes | None], message: str, hub: FakeHub
) -> None:
    kept = hub.repositories[NAME] | files
    hub.repositories[NAME] = {name: data for name, data in kept.items() if data is not None}
    with pytest.raises(CheckpointError, match=message):
        resolve_model(NAME)
    assert weights_asked(hub) == []


def test_random_weights_need_no_weights(hub: FakeHub) -> None:
    directory = resolve_model(NAME, weights=False)
    assert weights_asked(hub) == []
    hub.refusal = (500, "")
    assert resolve_model(NAME, weights=False) == directory
    hub.refusal = None
    assert resolve_model(NAME) == directory
    assert weights_asked(hub) == sorted(SHARDS)


def test_a_model_without_a_tokenizer_is_downloaded_where_none_is_needed(hub: FakeHub) -> None:
    del hub.repositories[NAME]["tokenizer.json"]
    assert (resolve_model(NAME, tokenizer=False) / THIRD).is_file()


def test_a_disk_without_room_is_told_before_any_weight_is_asked_for(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr("engine.hub.resolve.disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 5999))
    with pytest.raises(CheckpointError, match=r"needs 0.00 GB more .*delete files"):
        resolve_model(NAME)
    assert weights_asked(hub) == []
    monkeypatch.setattr("engine.hub.resolve.disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 6000))
    resolve_model(NAME)


# ---- interrupted downloads


def test_a_download_that_breaks_off_is_resumed_by_the_next_start(hub: FakeHub) -> None:
    interrupt(hub)
    assert find_cached(NAME) is None
    have = {path.name for path in cached_snapshots()[0].path.iterdir()}
    assert SECOND not in have
    assert (resolve_model(NAME) / SECOND).read_bytes() == SHARDS[SECOND]
    assert sorted(hub.asked) == sorted(SHARDS.keys() - have), "only what was missing"


def test_a_killed_download_is_resumed_by_the_next_start(hub: FakeHub, cache: Path) -> None:
    hub.held = {SECOND}
    child = subprocess.Popen(
        [sys.executable, "-c", f"from engine.hub.resolve import resolve_model; resolve_model({NAME!r})"],
        env={**os.environ, "HF_ENDPOINT": hub.url, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert hub.half_sent.wait(60)
        wait_until(lambda: set(cached_snapshots()[0].missing) == {SECOND})
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    hub.release.set()
    hub.asked = []
    assert find_cached(NAME) is None
    assert (resolve_model(NAME) / SECOND).read_bytes() == SHARDS[SECOND]
    assert hub.asked == [SECOND]


def test_without_a_network_an_interrupted_download_is_told_as_such(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    expected = r"in the cache .*did not finish \(missing: .*model-00002.*the rest must be downloaded.*HF_HUB_OFFLINE"
    with pytest.raises(CheckpointError, match=expected):
        resolve_model(NAME)


def test_doctor_tells_incomplete_downloads_from_whole_ones(hub: FakeHub, cache: Path) -> None:
    interrupt(hub)
    make_cached(cache, "Org/Whole", {"model.safetensors": b""})
    make_cached(cache, "Org/Torch", {"pytorch_model.bin": b""})
    file = cache / "models--Org--File-GGUF" / "snapshots" / ("0" * 40) / "file.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF")
    found = doctor.examine()
    assert found["models"] == ["Org/File-GGUF", "Org/Whole"]
    assert found["incomplete_models"].keys() == {NAME, "Org/Torch"}
    text = "\n".join(doctor.report(found))
    assert "Models in the local Hugging Face cache (see minitui models): Org/File-GGUF, Org/Whole\n" in text
    heading = "Incomplete checkpoints in this cache (--model NAME downloads the missing files):"
    assert f"{heading}\n  {NAME}: missing" in text


def test_a_download_reports_its_progress_and_counts_what_was_there(hub: FakeHub) -> None:
    interrupt(hub)
    whole = sum(len(SHARDS[name]) for name in SHARDS.keys() - set(cached_snapshots()[0].missing))
    total = sum(map(len, SHARDS.values()))
    told: list[dict[str, Any]] = []

    def tell(news: dict[str, Any]) -> None:
        told.append(news)
        if news["done"] == total - len(SHARDS[SECOND]):  # the others are whole
            hub.release.set()

    hub.held = {SECOND}
    resolve_model(NAME, tell)
    done = [news["done"] for news in told if news["stage"] == "download"]
    assert done == sorted(done)
    assert done[0] >= whole
    assert {(news["stage"], news["total"]) for news in told} == {("download", total), ("check", 0)}


def test_the_speed_is_that_of_the_last_seconds_and_gives_the_time_left() -> None:
    assert pace([(0.0, 0), (10.0, 450_000_000)], 900_000_000) == ", 45.0 MB/s, 10 s left"
    assert pace([(5.0, 100), (15.0, 50_000_100)], 3_050_000_100) == ", 5.0 MB/s, 10 min left"
    assert pace([(0.0, 0), (10.0, 10_000_000)], 16_000_000_000) == ", 1.0 MB/s, 4.4 h left"
    assert pace([(0.0, 7)], 9) == pace([(0.0, 7), (4.0, 7)], 9) == ""


# ---- revisions, mirrors, tokens, and a hub that lies


def test_a_revision_is_downloaded_by_its_name_and_found_again_by_its_commit(hub: FakeHub) -> None:
    commit = "7" * 40
    hub.branches["fast"] = (commit, description() | {"model.safetensors": b"fast"})
    fast = resolve_model(f"{NAME}@fast")
    main = resolve_model(NAME)
    assert ((fast / "model.safetensors").read_bytes(), (main / FIRST).read_bytes()) == (b"fast", SHARDS[FIRST])
    hub.refusal, hub.asked = (500, ""), []
    assert {resolve_model(f"{NAME}@{revision}") for revision in ("fast", commit, commit[:7])} == {fast}
    assert resolve_model(f"{NAME}@main") == main
    os.utime(fast / "config.json", (2e9, 2e9))
    assert resolve_model(NAME) == main, "the branch main, not the newest"
    assert hub.asked == []


def test_a_revision_that_the_hub_has_not_says_so(hub: FakeHub) -> None:
    with pytest.raises(CheckpointError, match="the hub has no revision v9 of it: name another one, or leave out @v9"):
        resolve_model(f"{NAME}@v9")


@pytest.mark.parametrize("revision", ["", "a b", "../x", "x" * 101, "-x", "a@b"])
def test_what_cannot_be_a_revision_is_refused(revision: str, hub: FakeHub) -> None:
    with pytest.raises(CheckpointError, match="names no valid revision"):
        resolve_model(f"{NAME}@{revision}")


def test_a_connection_that_breaks_off_is_resumed_where_it_ended(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    hub.cut_once = {THIRD}
    assert (resolve_model(NAME) / THIRD).read_bytes() == SHARDS[THIRD]
    assert hub.ranges == [(THIRD, len(SHARDS[THIRD]) // 2)]


def test_a_file_that_arrives_damaged_is_deleted_and_downloaded_again(hub: FakeHub) -> None:
    hub.damaged = {SECOND}
    expected = rf"{SECOND} of {NAME} arrived damaged: it has SHA-256 \w{{12}}…, and .*deleted: start again"
    with pytest.raises(CheckpointError, match=expected):
        resolve_model(NAME)
    assert find_cached(NAME) is None
    hub.damaged, hub.asked = set(), []
    assert (resolve_model(NAME) / SECOND).read_bytes() == SHARDS[SECOND]
    assert hub.asked == [SECOND]


@pytest.mark.parametrize("size", [7, 10**6])
def test_a_file_of_another_size_than_announced_is_refused(size: int, hub: FakeHub) -> None:
    hub.sizes = {SECOND: size}
    with pytest.raises(CheckpointError, match=f"it has 2,000 bytes, and the hub announced {size:,}. It was deleted"):
        resolve_model(NAME)
    assert find_cached(NAME) is None


def test_the_usual_token_opens_a_private_model_of_a_mirror(hub: FakeHub) -> None:
    """In a process of its own, because huggingface_hub reads these variables when it is imported."""
    hub.token = "hf_secret"
    code = f"from engine.hub.resolve import resolve_model; print(resolve_model({NAME!r}))"

    def start(**environment: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "HF_ENDPOINT": hub.url, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
        return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=60)

    assert "log in with `hf auth login`" in start(HF_TOKEN="").stderr
    assert (Path(start(HF_TOKEN="hf_secret").stdout.strip()) / THIRD).read_bytes() == SHARDS[THIRD]


# ---- a hub that refuses, and none


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, "", "denies access to it .*hf auth login"),
        (401, "GatedRepo", "accept the model's terms.*hf auth login"),
        (403, "", "accept the model's terms.*hf auth login"),
        (403, "GatedRepo", "accept the model's terms.*hf auth login"),
        (404, "RepoNotFound", "check the name"),
        (404, "", "check the name"),
        (429, "", "refuses more requests for now"),
        (500, "", r"reports an internal error \(500\): try again later"),
        (503, "", r"reports an internal error \(503\): try again later"),
    ],
)
def test_each_refusal_of_the_hub_is_a_sentence_with_a_way_out(
    status: int, code: str, message: str, hub: FakeHub
) -> None:
    hub.refusal = (status, code)
    with pytest.raises(CheckpointError, match=f"neither a directory nor in the cache .*{message}"):
        resolve_model(NAME)


def test_without_a_network_the_message_says_where_was_looked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route to host\n" + "x" * 10_000)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", offline)
    expected = r"Qwen/Qwen3-9B is neither a directory nor in the cache .*could not be reached .*no route to host"
    with pytest.raises(CheckpointError, match=expected) as caught:
        resolve_model("Qwen3-9B")
    assert len(str(caught.value)) < 1000


def test_a_name_that_nobody_has_is_one_sentence_in_a_fresh_process(tmp_path: Path) -> None:
    """In a process of its own: what other tests have imported of the hub's library must not help."""
    code = "from engine.hub.resolve import resolve_model; resolve_model('no-such/model')"
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "CheckpointError: no-such/model is neither a directory" in done.stderr
    assert "HF_HUB_OFFLINE is set" in done.stderr
    assert "AttributeError" not in done.stderr
