"""The Triton kernels of the gated delta rule without a GPU: in Triton's interpreter, against the torch reference."""

from __future__ import annotations

import pytest

from tests.support.kernels.interpreted import interpreted

pytest.importorskip("triton")


def test_the_kernels_compute_what_the_reference_does() -> None:
    """Decodes, drafts, prompts, checkpoints, and the captured steps, whose numbers include padding."""
    results = interpreted("delta")
    assert {"everything", "extend 16", "verify 8"} <= results.keys()
    for name, result in results.items():
        wrong = result.pop("wrong")
        assert not wrong and max(result.values()) < 1e-5, (name, wrong, result)


def test_a_captured_prompt_never_has_as_many_segments_as_tokens() -> None:
    """With one segment for each token, engine/kernels/delta.py computes every entry token by token."""
    from engine.worker.graphs.extend_graphs import extend_sizes

    for rows in (8, 12, 48, 512):
        sizes = extend_sizes(4096, rows)
        assert sizes and all(0 < size.segments < size.tokens for size in sizes)
