"""Machine code of the CPU kernels: compiled once, then kept in files, so that the next start only links it.

The code of a file is executed, so the cache is private (engine/disk_cache.py).
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from engine.disk_cache import COMPILED, Damaged

OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")  # functions of torch's library for threads
CODE = "code"  # the file of an entry
# The kernels are emitted by this folder, and one table of another module.
SOURCES = [*sorted(Path(__file__).parent.glob("*.py")), Path(__file__).parents[1] / "four_bit_rounding.py"]


def link(emit: Callable[[], ir.Module], features: str, *contents: object) -> llvm.ExecutionEngine:
    """Returns the functions of a module as machine code in memory, from a file or compiled. `emit`: makes the module;
    `contents`: all that it depends on, besides SOURCES; features: LLVM's flags."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    process = ctypes.CDLL(None)
    for name in OPENMP:
        llvm.add_symbol(name, ctypes.cast(getattr(process, name), ctypes.c_void_p).value)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(features))
    engine.add_object_file(llvm.ObjectFileRef.from_data(_machine_code(emit, features, *contents)))
    engine.finalize_object()
    return engine


def _machine_code(emit: Callable[[], ir.Module], features: str, *contents: object) -> bytes:
    """Returns the object file of a module."""
    # Not a hash of the module: to make it and to write it as text takes 0.1 s.
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()
    versions = (llvmlite.__version__, llvm.llvm_version_info, sources)
    processor = llvm.get_process_triple(), llvm.get_host_cpu_name(), features
    name = COMPILED.entry_name("kernels", *contents, *processor, *versions)
    with suppress(OSError, Damaged):  # not read any more, or removed
        if (entry := COMPILED.find(name)) is not None:
            return (entry / CODE).read_bytes()
    module = emit()
    module.triple = llvm.get_process_triple()
    code = _compile(str(module), features)
    with suppress(OSError):  # the next start compiles again
        COMPILED.keep(name, lambda place: (place / CODE).write_bytes(code), len(code))
    return code


def _compile(text: str, features: str) -> bytes:
    machine, module = _machine(features), llvm.parse_assembly(text)
    module.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    return machine.emit_object(module)


def _machine(features: str) -> llvm.TargetMachine:
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(llvm.get_host_cpu_name(), features, opt=3)
