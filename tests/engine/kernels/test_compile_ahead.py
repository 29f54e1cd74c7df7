"""Files that Triton kept: kernels that end too early never reach the driver, and each kernel has its own launcher."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from engine.kernels.compile_ahead import _compiled, load_alone  # noqa: E402


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


LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher_of_a_test", 0, -1, methods};
PyMODINIT_FUNC PyInit_launcher_of_a_test(void) { return PyModule_Create(&module); }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_modules_of_one_name_keep_their_own_functions(tmp_path: Path) -> None:
    """As Triton's launchers. What one thread loaded is unchanged after the others have loaded theirs."""
    (tmp_path / "launcher.c").write_text(LAUNCHER)
    for number in (1, 2):
        include = f"-I{sysconfig.get_paths()['include']}"
        target = ["-o", str(tmp_path / f"{number}.so"), str(tmp_path / "launcher.c")]
        subprocess.run(["cc", "-shared", "-fPIC", include, f"-DNUMBER={number}", *target], check=True)
    loaded = [(number, load_alone("launcher_of_a_test", str(tmp_path / f"{number}.so"))) for number in (1, 2, 1, 2, 1)]
    assert [each.launch() for _, each in loaded] == [number for number, _ in loaded]
