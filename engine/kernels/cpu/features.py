"""Which of the processor's instructions the kernels use. The variable MINITUI_CPU takes some away."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm

X86 = platform.machine() in ("x86_64", "AMD64")
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18  # the system call that asks for tiles
TAKEN = {  # value of MINITUI_CPU -> how the names of the features begin that are taken away
    "": (),
    "vnni": ("avx10", "amx", "avx512bf16", "avx512fp16"),
    "avx512": ("avx10", "amx", "avx512bf16", "avx512fp16", "avx512vnni", "avxvnni"),
    "avxvnni": ("avx10", "amx", "avx512"),
    "avx2": ("avx10", "amx", "avx512", "avxvnni"),
    "none": ("",),
}


@dataclass(frozen=True)
class Features:
    names: frozenset[str]  # LLVM's names
    flags: str  # the same for LLVM: "+" before a feature, "-" before one that the kernels do not use
    x86: bool

    @property
    def lanes(self) -> int:
        """The numbers in the widest float vector."""
        return 16 if "avx512f" in self.names else 8 if "avx2" in self.names else 4

    @property
    def registers(self) -> int:
        """How many vectors fit into registers."""
        return 32 if "avx512vl" in self.names or not self.x86 else 16

    @property
    def dot(self) -> str:
        """The products of bytes: a key of VECTORS (engine/kernels/cpu/byte_products.py)."""
        if self.x86:
            if {"avx512vnni", "avx512vl"} <= self.names:
                return "vnni"
            if {"avx512bw", "avx512vl"} <= self.names:
                return "avx512"
            return "avxvnni" if "avxvnni" in self.names else "avx2"
        return "dotprod" if "dotprod" in self.names else "plain"

    @property
    def tiles(self) -> bool:
        """Whether products of bytes for many rows use tiles (engine/kernels/cpu/tiles.py)."""
        return self.dot == "vnni" and "amx-int8" in self.names

    def lacking(self) -> str:
        """Returns what the processor lacks for every kernel; empty if it lacks nothing."""
        if (chosen := os.environ.get("MINITUI_CPU", "")) not in TAKEN:
            return f"MINITUI_CPU is {chosen!r}: use one of {', '.join(filter(None, TAKEN))}, or unset it"
        if chosen == "none":
            return "MINITUI_CPU is none"
        if self.x86 and not {"avx2", "fma", "f16c"} <= self.names:
            return "the processor has no AVX2 with FMA and F16C"
        return ""


def features() -> Features:
    """Returns the features of this processor without those that MINITUI_CPU takes away."""
    return _without(TAKEN.get(os.environ.get("MINITUI_CPU", ""), ("",)))


@cache
def _without(beginnings: tuple[str, ...]) -> Features:
    beginnings += () if _tiles_allowed() else ("amx",)
    has = {name: on and not name.startswith(beginnings) for name, on in llvm.get_host_cpu_features().items()}
    flags = [("+" if on else "-") + name for name, on in has.items()]
    if X86:
        flags.append("-prefer-256-bit")
    return Features(frozenset(name for name, on in has.items() if on), ",".join(flags), X86)


def _tiles_allowed() -> bool:
    """Asks Linux for the permission to use AMX, for all threads of the process. Without it, tiles end the process."""
    if not X86 or sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0
