"""Machine code of the CPU kernels: compiled once, then kept in files, so that the next start only links it.

The code of a file is executed. So files are read and written only if their folder belongs to this user and no other
user may write to it. A file's name is a hash of everything that its code depends on. A file begins with a hash of the
code; a damaged file is written again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

X86 = platform.machine() in ("x86_64", "AMD64")
OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")  # functions of torch's library for threads
MOST_FILES = 64  # of about 50 KB; the files that were used longest ago are removed
SUFFIX = ".code"
DIGEST = hashlib.sha256().digest_size
WRITABLE_BY_OTHERS = 0o022


def directory() -> Path:
    """Returns the directory of the files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minitui" / "kernels"


def link(module: ir.Module) -> llvm.ExecutionEngine:
    """Returns the functions of a module as machine code in memory, from a file or compiled."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    process = ctypes.CDLL(None)
    for name in OPENMP:
        llvm.add_symbol(name, ctypes.cast(getattr(process, name), ctypes.c_void_p).value)
    module.triple = llvm.get_process_triple()
    features = llvm.get_host_cpu_features().flatten()
    if X86:
        features += ",-prefer-256-bit"
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(features))
    engine.add_object_file(llvm.ObjectFileRef.from_data(_machine_code(str(module), features)))
    engine.finalize_object()
    return engine


def _machine_code(text: str, features: str) -> bytes:
    """Returns the object file of a module."""
    versions = (llvmlite.__version__, llvm.llvm_version_info)
    key = repr((text, llvm.get_process_triple(), llvm.get_host_cpu_name(), features, versions))
    name = hashlib.sha256(key.encode()).hexdigest()[:40] + SUFFIX
    with suppress(OSError, RuntimeError):  # no such file, or this user has no home
        if _only_ours(directory()) and (code := _read(directory() / name)):
            return code
    code = _compile(text, features)
    with suppress(OSError, RuntimeError):  # the next start compiles again
        directory().mkdir(mode=0o700, parents=True, exist_ok=True)
        if _only_ours(directory()):
            _keep(directory() / name, code)
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


def _only_ours(folder: Path) -> bool:
    """Returns True if only this user can make or change files in the folder."""
    status = folder.lstat()  # a link could lead to a folder of another user
    others = status.st_mode & WRITABLE_BY_OTHERS
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not others


def _read(path: Path) -> bytes:
    """Returns the code of a file; empty if the file is damaged. Raises OSError."""
    contents = path.read_bytes()
    digest, code = contents[:DIGEST], contents[DIGEST:]
    if hashlib.sha256(code).digest() != digest:
        return b""
    os.utime(path)
    return code


def _keep(path: Path, code: bytes) -> None:
    """Write a file, and remove those that were used longest ago. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(hashlib.sha256(code).digest() + code)
    Path(file.name).replace(path)
    files = sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime)
    for each in files[:-MOST_FILES]:
        each.unlink(missing_ok=True)
