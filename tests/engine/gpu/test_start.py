"""An engine answers before its CUDA graphs are captured, and capturing them between its steps changes no reply."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.build import Built, build_engine
from engine.config import EngineConfig
from tests.engine.gpu.test_engine import OPTIONS, SHAPE, TOLERANCE, family, greedy, prompts, reference
from tests.support.parity import below_best

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
__all__ = ["SHAPE", "reference"]  # for fixtures


def replies(built: Built, asked: list[list[int]], *, every: int = 0) -> list[list[int]]:
    """The greedy replies. `every`: the number of steps between two captures; 0: none."""
    added = [built.engine.add_request(prompt, greedy(24)) for prompt in asked]
    step = 0
    while built.engine.has_work:
        built.engine.step()
        step += 1
        if every and step % every == 0:
            built.prepare(step % 2 == 0)
    built.engine.check()
    return [list(request.output_ids) for request in added]


@pytest.mark.parametrize("more", [{}, {"speculation": "prompt-lookup"}, {"overlap": "off"}], ids=str)
def test_replies_are_the_reference_s_own_before_while_and_after_graphs_are_captured(
    model: str, reference: Any, more: dict[str, Any]
) -> None:
    built = build_engine(EngineConfig(model, **OPTIONS, **more), later=True)
    graphs: Any = built.engine.runner.executors[0]  # type: ignore[attr-defined]
    assert not any(part.graphs for part in graphs.parts)
    asked = prompts(4, 24, 400)
    if more.get("speculation"):
        asked = [prompt[:20] * 5 for prompt in asked]  # drafts are found
    runs = [replies(built, asked)]
    while not any(part.graphs for part in graphs.parts):
        built.prepare(False)
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved()
    runs += [replies(built, asked, every=1) for _ in range(2)]
    while built.prepare(False) is not None:
        pass
    assert sum(len(part.graphs) for part in graphs.parts) == graphs.num_graphs > 20
    assert torch.cuda.memory_reserved() - taken < 16 << 20, "the memory of the graphs was not reserved before"
    runs.append(replies(built, asked))
    for run in runs:
        short = np.array(below_best(reference, asked, run))
        assert short.max() < TOLERANCE and np.mean(short > 0) < 0.1
    built.close()


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_text"])
def test_experts_and_states_are_untouched_by_captures_between_steps(kind: str, tmp_path: Path) -> None:
    directory = str(family(kind, tmp_path))
    built = build_engine(EngineConfig(directory, **OPTIONS), later=True)
    asked = prompts(6, 16, 300)
    runs = [replies(built, asked, every=1) for _ in range(2)]
    while built.prepare(False) is not None:
        pass
    runs.append(replies(built, asked))
    for run in runs[:2]:
        same = np.mean([mine == theirs for mine, theirs in zip(run, runs[2], strict=True)])
        assert same > 0.5, "of replies in half precision, few differ by their rounding"
    built.close()


@pytest.fixture
def compiler() -> Iterator[Any]:
    from engine.kernels.compile_ahead import CompileAhead

    found = CompileAhead()
    yield found
    found.close()


@triton.jit
def _double(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, 2 * tl.load(x + i))


def test_kernels_are_compiled_before_they_are_launched_and_damaged_files_are_replaced(
    compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.arange(64, device="cuda", dtype=torch.float32)
    for damage in ("", "*.cubin", "*.json"):
        y = torch.zeros_like(x)
        if damage:
            files = list(tmp_path.rglob(damage))
            assert files
            for file in files:
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        _double.device_caches.clear()
        compiler.future_kernels.clear()
        compiler.gather(lambda y=y: _double[(1,)](x, y, N=64))
        while (counts := compiler.progress(0.1))[0] < counts[1]:
            time.sleep(0.01)
        assert not y.any(), "gathered kernels are not launched"
        _double[(1,)](x, y, N=64)
        assert torch.equal(y, 2 * x)
        assert ("compiled again" in caplog.text) == bool(damage)
