"""The products of bytes for ARM, run by an emulator: sudo apt-get install qemu-user gcc-aarch64-linux-gnu."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.model.linear import quantise_rows

llvm = pytest.importorskip("llvmlite.binding")
TOOLS = "aarch64-linux-gnu-gcc", "qemu-aarch64"
if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
    pytest.skip(f"{lacking[0]} is not installed", allow_module_level=True)

from llvmlite import ir  # noqa: E402

from engine.kernels.cpu.features import Features  # noqa: E402
from engine.kernels.cpu.product import Before, emit_product, scratch_floats  # noqa: E402

PROGRAM = """
#include <stdio.h>
#include <stdlib.h>
enum {K = %d, N = %d, R = %d};
static signed char weight[N * K]; static float scales[N], x[R * K], bias[N], out[R * N], scratch[%d];
int omp_get_thread_num(void) { return 0; }
int omp_get_num_threads(void) { return 1; }
void int8(long *);
int main(void) {
  if (fread(weight, sizeof weight, 1, stdin) + fread(scales, sizeof scales, 1, stdin) + fread(x, sizeof x, 1, stdin)
      + fread(bias, sizeof bias, 1, stdin) != 4) return 1;
  long call[16] = {(long)weight, (long)scales, (long)x, 0, (long)bias, (long)out, (long)scratch, K, N, R, 0, %d, 0};
  int8(call);
  return fwrite(out, sizeof out, 1, stdout) != 1;
}
"""


@pytest.mark.parametrize("features", ["neon dotprod", "neon"])
def test_a_product_with_8_bits_has_the_same_bits_on_arm(features: str, tmp_path: Path) -> None:
    K, N, R = 192, 23, 7
    module = ir.Module()
    emit_product(module, "int8", "int8", 4, 16, 1e-6, Features(frozenset(features.split()), "", False))
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = target.create_target_machine("generic", ",".join("+" + each for each in features.split()), opt=2)
    (tmp_path / "kernel.o").write_bytes(machine.emit_object(llvm.parse_assembly(str(module))))
    (tmp_path / "main.c").write_text(PROGRAM % (K, N, R, scratch_floats(R, K), Before.NOTHING))
    build = [TOOLS[0], "-O1", "-static", "-o", "program", "main.c", "kernel.o", "-lm"]
    subprocess.run(build, cwd=tmp_path, check=True, timeout=300)
    values, weight_scale, bias = torch.randint(-128, 128, (N, K), dtype=torch.int8), torch.rand(N), torch.randn(N)
    values[0], values[1] = 127, -128
    x = torch.randn(R, K) * torch.logspace(-30, 30, R)[:, None]
    rounded, scale = quantise_rows(x)
    expected = (rounded.double() @ values.double().t()).float() * scale[:, None] * weight_scale + bias
    given = b"".join(each.numpy().tobytes() for each in (values, weight_scale, x, bias))
    ran = subprocess.run([TOOLS[1], "program"], cwd=tmp_path, input=given, capture_output=True, check=True, timeout=300)
    assert torch.equal(torch.from_numpy(np.frombuffer(ran.stdout, np.float32).reshape(R, N).copy()), expected)
