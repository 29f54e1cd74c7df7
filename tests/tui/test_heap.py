"""Large buffers do not enter the heap of the application."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes
from minitui.tui.heap import fix_thresholds

fields = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in fields]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Counts

def mapped():  # bytes of buffers with a mapping of their own
    return libc.mallinfo2().hblkhd

if {fixed}:
    fix_thresholds()
buffer = bytearray(4 << 20)
del buffer  # glibc raises its thresholds to this size, unless they are fixed
before = mapped()
buffer = bytearray(1 << 20)
print(mapped() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="it needs glibc 2.33")
@pytest.mark.parametrize("fixed", [True, False])
def test_a_large_buffer_has_a_mapping_of_its_own_after_a_larger_one_was_freed(fixed: bool) -> None:
    script = SCRIPT.replace("{fixed}", str(fixed))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (int(done.stdout) >= 1 << 20) == fixed
