"""/health and its relatives, for load balancers, scripts that wait, and Prometheus."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from minitui import __version__
from minitui.server.settings import Role
from tests.support.server.serving import Running, serving

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


def test_the_endpoints_are_documented_in_a_page_that_loads_nothing(server: Running) -> None:
    page = server.get("/docs")
    assert page.status_code == 200 and "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert not re.search(r"<script|<link|src=|@import|https?://|//cdn", page.text)
    document = server.get("/openapi.json").json()
    assert {"/health", "/ping", "/version", "/server_info", "/metrics"} <= set(document["paths"])
    links, places = set(re.findall(r'href="#([^"]+)"', page.text)), set(re.findall(r'id="([^"]+)"', page.text))
    assert links <= places and set(document["components"]["schemas"]) <= places
    for path, operations in document["paths"].items():
        assert all(f"<code>{method.upper()} {path}</code>" in page.text for method in operations)
    assert "<code>max_tokens</code><td>integer or null" in page.text


@pytest.mark.parametrize("opened", [False, True])
def test_a_browser_gets_in_with_the_key_and_metrics_need_it_unless_the_operator_opens_them(
    tmp_path: Path, opened: bool
) -> None:
    """A browser sends a password with each request, so a page that misuses it must not get the key's whole role."""
    with serving(tmp_path, keys={KEY: Role.CONTROL}, open_metrics=opened) as running:
        asked = running.get("/docs", headers={"Accept": "text/html"})
        assert asked.status_code == 401 and asked.headers["WWW-Authenticate"].startswith("Basic ")
        assert running.get("/docs").headers["WWW-Authenticate"] == "Bearer"  # a program cannot ask its user

        def given(password: str, path: str, **headers: str) -> int:
            word = base64.b64encode(f"me:{password}".encode()).decode()
            return running.get(path, headers={"Authorization": f"Basic {word}", **headers}).status_code

        assert given(KEY, "/docs") == given(KEY, "/openapi.json") == given(KEY, "/metrics") == 200
        assert given("wrong", "/docs") == 401 and given(KEY, "/v1/responses/resp_1") == 403
        assert given(KEY, "/docs", Origin="http://evil.example") == 403
        assert given("wrong", "/docs", **{"x-api-key": KEY}) == 200
        for word in ("=", "%%%", "//79"):  # the last is not UTF-8
            assert running.get("/docs", headers={"Authorization": f"Basic {word}"}).status_code == 401
        assert running.get("/metrics").status_code == (200 if opened else 401)
        for path in ("/health", "/ping", "/version"):
            assert running.get(path).status_code == 200
        for path in ("/server_info", "/docs", "/v1/models", "/minitui/info"):
            assert running.get(path).status_code == 401
        document = running.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
        assert (document["paths"]["/metrics"]["get"].get("security") == []) == opened
