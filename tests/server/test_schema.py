"""schemathesis against the server's own OpenAPI document: whatever is sent, the answer is one that is documented."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from minitui.server.settings import Role
from tests.support.server.serving import Running, serving

# Other tests cover these: /minitui/records never ends, and /minitui/control may close the gate for all tests.
EXAMPLES = 2
KEY = "a-key-of-the-tests"  # with one, every operation is also asked without it, and with a wrong one
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
SKIPPED = ["/minitui/records", "/minitui/control"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    # A short context: whatever max_tokens a case asks for, its reply ends soon.
    engine = {"max_model_len": 48, "max_num_seqs": 16}
    with serving(tmp_path_factory.mktemp("server"), engine=engine, keys={KEY: Role.CONTROL}) as running:
        running.http.headers.update(AUTHORIZED)
        yield running


def test_every_answer_is_a_documented_one(server: Running) -> None:
    api = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=AUTHORIZED).exclude(path=SKIPPED)
    checks = schemathesis.checks
    excluded = [checks.positive_data_acceptance]  # an unknown model or a prompt that is too long is refused, rightly
    tried = 0
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    for operation in (found.ok() for found in api.get_all_operations()):
        for mode in modes:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, phases=[Phase.generate],
                      suppress_health_check=list(HealthCheck), database=None)
            def answers(case: Any) -> None:
                nonlocal tried
                tried += 1
                sent: dict[str, Any] = {"timeout": 60, "headers": AUTHORIZED}
                answer = case.call(**sent)
                if answer.status_code != 413:  # a list with more items than the schema allows may be too large to read
                    case.validate_response(answer, excluded_checks=excluded, headers=AUTHORIZED, transport_kwargs=sent)

            try:
                answers()
            except Unsatisfiable:
                assert mode is modes[1], operation.label  # an endpoint without parameters has no invalid requests
    assert tried > 40
    print(f"{tried} cases")


def test_afterwards_the_server_is_whole(server: Running) -> None:
    server.wait_idle()
    server.call(server.service.client.control("check"))
    assert server.get("/health").json() == {"status": "ok", "open": 0}
