"""/health and its relatives, for load balancers, scripts that wait, and Prometheus."""

from __future__ import annotations

from pathlib import Path

import pytest

from minitui import __version__
from minitui.server.settings import Role
from tests.support.serving import Running, serving

KEY = "a-key-of-the-tests"


def test_a_server_that_loads_is_not_healthy_yet(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts wait for /health to be 200 and then send their first request."""
    monkeypatch.setattr(server.service, "state", "loading")
    for method in (server.http.get, server.http.post):
        answer = method("/ping")
        assert answer.status_code == 503 and answer.headers["retry-after"]
    loading = server.get("/health")
    assert loading.status_code == 503 and loading.json()["status"] == "loading" and loading.json()["progress"]
    assert server.get("/ready").status_code == 503
    monkeypatch.undo()
    assert server.get("/health").status_code == server.get("/ping").status_code == 200
    assert server.post("/ping", {}).json() == server.get("/health").json()


def test_version_and_server_info_describe_the_server(server: Running) -> None:
    assert server.get("/version").json() == {"version": __version__}
    info = server.get("/server_info").json()
    assert info["model"] == "tutor" and info["served_names"] == ["tutor"] and info["max_model_len"] == 4096
    assert info["limits"]["max_waiting"] == server.service.settings.max_waiting
    assert "/" not in str(info.get("model_dir", "")) and "log_file" not in info and str(Path.cwd()) not in str(info)


def test_the_endpoints_are_documented_in_a_page(server: Running) -> None:
    page = server.get("/docs")
    assert page.status_code == 200 and "/openapi.json" in page.text
    paths = server.get("/openapi.json").json()["paths"]
    assert {"/health", "/ping", "/version", "/server_info", "/metrics"} <= set(paths)


@pytest.mark.parametrize("opened", [False, True])
def test_metrics_need_a_key_unless_the_operator_opens_them(tmp_path: Path, opened: bool) -> None:
    with serving(tmp_path, keys={KEY: Role.CONTROL}, open_metrics=opened) as running:
        assert running.get("/metrics").status_code == (200 if opened else 401)
        for path in ("/health", "/ping", "/version"):
            assert running.get(path).status_code == 200
        for path in ("/server_info", "/docs", "/v1/models", "/minitui/info"):
            assert running.get(path).status_code == 401
        document = running.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
        assert (document["paths"]["/metrics"]["get"].get("security") == []) == opened
