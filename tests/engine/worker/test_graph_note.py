"""What a start with CUDA graphs says at its end."""

import time
from types import SimpleNamespace

import pytest

from engine.worker.graphs.cuda_graphs import CudaGraphs


def test_the_time_of_a_start_includes_the_warm_ups_after_the_last_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.freeze", lambda: None)
    notes: list[str] = []
    loaded = SimpleNamespace(
        compiler=None, group=SimpleNamespace(take_time=lambda: None), memory=SimpleNamespace(notes=notes)
    )
    began = time.perf_counter() - 60
    CudaGraphs._finish(SimpleNamespace(  # type: ignore[arg-type]
        _loaded=loaded, _captures=SimpleNamespace(reserved=3e6), num_graphs=7, _began=began
    ))
    assert notes[0].startswith("7 CUDA graphs captured, with 3 MB reserved. With them and the warm-ups, ")
