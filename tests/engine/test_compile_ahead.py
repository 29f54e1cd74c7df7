"""Files of kernels that Triton kept: those that end too early never reach the driver, which would crash."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from engine.kernels.compile_ahead import _compiled  # noqa: E402


@triton.jit
def _double(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, 2 * tl.load(x + i))


@pytest.mark.parametrize("kept", [0, 10, 0.5, -1, None])
def test_a_kernel_whose_file_ends_too_early_is_compiled_again(
    kept: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    source = ASTSource(_double, {"x": "*fp32", "y": "*fp32", "N": "constexpr"}, {"N": 64})
    whole = triton.compile(source, target=GPUTarget("cuda", 90, 32)).kernel
    damaged = whole[: int(kept * len(whole)) if kept == 0.5 else kept]
    found = iter([damaged, whole])
    loaded = _compiled("a kernel of this test", lambda: SimpleNamespace(kernel=next(found), run=None))
    assert loaded.kernel == whole
    assert ("compiled again" in caplog.text) == (kept is not None)
