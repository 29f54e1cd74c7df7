"""A server's recording, and texts that are hidden in it and in the telemetry."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.metrics.metrics import Metrics
from minitui.server import command
from minitui.server.service import Service
from minitui.server.settings import Role, ServerSettings
from minitui.server.telemetry.broadcast import Broadcast
from minitui.trace.reader import TraceReader
from tests.support.records.traces import final_state
from tests.support.server.serving import serving

KEY = "a-key-of-the-tests"


@pytest.mark.parametrize("hidden", [False, True])
def test_a_server_records_its_engine_without_hidden_texts(tmp_path: Path, hidden: bool) -> None:
    trace = tmp_path / "server.trace"
    with serving(tmp_path, record=trace, hide_text=hidden, keys={KEY: Role.CONTROL}) as server:
        key = {"Authorization": f"Bearer {KEY}"}
        body = {"messages": [{"role": "user", "content": "What is paging?"}], "max_tokens": 40, "temperature": 0}
        assert server.post("/v1/chat/completions", body, headers=key).status_code == 200
        document = server.get("/openapi.json", headers=key).json()
        assert document["security"] == [{"key": []}] and document["paths"]["/health"]["get"]["security"] == []
        snapshot = server.snapshot()
    reader = TraceReader(trace)
    assert reader.info.model == "tutor", "the name of the model in requests, not of its directory"
    state = final_state(reader)
    assert state.step == snapshot["step"]
    assert {id: len(node["ids"]) for id, node in state.snapshot()["nodes"].items()} == {
        id: len(node["ids"]) for id, node in snapshot["nodes"].items()
    }
    ids = [token for node in state.nodes.values() for token in node.ids]
    assert len(ids) >= 32
    assert (len(set(ids)) == 1) == hidden


def test_every_page_is_let_in_only_with_a_key() -> None:
    with pytest.raises(EngineError, match="so a key is needed: set --api-key"):
        ServerSettings(cors_origins=("*",))
    assert ServerSettings(cors_origins=("*",), keys={KEY: Role.CHAT}).cors_origins == ("*",)


def test_an_unwritable_trace_is_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"cannot be written.*--record"):
        Service(EngineConfig(), ServerSettings(record=tmp_path / "no" / "such" / "folder.trace"))


SECRET = "mystery"


def test_no_text_of_a_request_leaves_with_hidden_text(tmp_path: Path) -> None:
    trace = tmp_path / "server.trace"
    with serving(tmp_path, record=trace, hide_text=True) as server:
        function = {"name": SECRET, "description": SECRET, "parameters": {"title": SECRET}}
        tool = {"type": "function", "function": function}
        common = {"user": SECRET, "stop": [SECRET], "max_tokens": 2}
        chat = {"messages": [{"role": "user", "content": SECRET, "name": SECRET}], "metadata": {SECRET: SECRET},
                "safety_identifier": SECRET, "prompt_cache_key": SECRET, "service_tier": SECRET, "tools": [tool],
                "chat_template_kwargs": {SECRET: SECRET}}
        ids = server.post("/tokenize", {"prompt": SECRET}).json()["tokens"]
        params = {"max_tokens": 2, "stop": SECRET}
        with server.http.stream("GET", "/minitui/records") as stream:
            lines = stream.iter_lines()
            assert next(lines) == "event: hello"
            assert server.post("/v1/chat/completions", {**common, **chat}).status_code == 200
            assert server.post("/v1/completions", {**common, "prompt": SECRET}).status_code == 200
            assert server.post("/v1/completions", {**common, "prompt": SECRET, "model": SECRET}).status_code == 404
            assert server.post("/v1/completions", {**common, "prompt": SECRET, "guided_regex": SECRET + "("}
                               ).status_code == 400
            for tag, group in (("a", SECRET), ("b", "0123abcd")):
                sent = {"tag": tag, "ids": ids, "params": params, "group": group}
                assert "finish_reason" in server.post("/minitui/submit", sent).text
            told = ""
            while told.count('"finish"') < 4:
                told += next(lines) + "\n"
        seen = [told, *(server.get(path).text for path in ("/minitui/snapshot", "/metrics", "/health"))]
        assert "0123abcd" in told, "a chat no longer finds its own requests"
    seen.append(str(list(TraceReader(trace).records())))
    assert "0123abcd" in seen[-1]
    for text in seen:
        assert SECRET not in text


def test_sentences_of_errors_are_hidden_with_the_text() -> None:
    records = [
        (1, 0.0, "refuse", "", SECRET), (2, 0.0, "finish", 1, f"error: {SECRET}", 0), (3, 0.0, "fail", 1, SECRET),
        (4, 0.0, "finish", 2, "stop", 5),
    ]
    hidden, told = (Broadcast(Metrics(), mask).encode(records).decode() for mask in (7, None))
    assert SECRET not in hidden and told.count(SECRET) == 3 and '"stop"' in hidden


@pytest.mark.parametrize(("error", "code"), [("", 0), ("a.trace cannot be written: No space left on device", 1)])
def test_a_server_whose_recording_failed_ends_with_a_failure(
    error: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Host:
        url = "http://127.0.0.1:1"
        service = SimpleNamespace(model="m", settings=None, recording=SimpleNamespace(error=error))

        def __init__(self, *arguments: object) -> None:
            self.stop = lambda: None

        async def run(self, ready: object) -> None:
            return None

    monkeypatch.setattr(command, "Host", Host)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
    told = io.StringIO()
    assert command.run_serve(EngineConfig(model="m"), ServerSettings(), None, out=told) == code
    assert told.getvalue().partition("loaded\n")[2] == (
        f"minitui: the recording is not complete: {error}\n" if error else ""
    )
