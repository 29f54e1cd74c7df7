"""llama.cpp beside the engine: a process that computes the same steps of a model with the same shape.

`python -m minitui.bench.llama FILE THREADS` is this process. It reads one request per line, as JSON, and answers each
with the seconds that the request took. llama.cpp is in a process of its own because its threads and the engine's
threads would use two OpenMP libraries in one process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from engine.errors import EngineError
from engine.model.config import ModelConfig
from minitui.bench.llama_shape import TYPES, family, file_bytes, write_gguf

PACKAGES = {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}
WARM_UP = 5  # decode steps that are not measured, as in rows.decode_steps
MOST_TOKENS, CONTEXT = 512, 2048  # of a batch; of all sequences together


class NotMeasured(EngineError):
    """llama.cpp cannot run here. The message says why, and what to do."""


class LlamaCpp:
    """llama.cpp with random weights. Use it as a context manager."""

    def __init__(self, config: ModelConfig, kind: str, threads: int) -> None:
        """Writes the model and starts the process. `kind`: of the engine's weights. Raises NotMeasured."""
        if missing := [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]:
            raise NotMeasured(f"to measure llama.cpp beside minitui: pip install {' '.join(missing)}")
        if family(config) is None or kind not in TYPES:
            raise NotMeasured(f"llama.cpp is not measured: no GGUF file is written for {config.architecture} in {kind}")
        self._folder = tempfile.TemporaryDirectory(prefix="minitui-bench-")
        size, free = file_bytes(config, TYPES[kind]), shutil.disk_usage(self._folder.name).free
        try:
            if size > free:
                raise NotMeasured(
                    f"llama.cpp is not measured: its file takes {size / 1e9:.1f} GB, and {self._folder.name} has "
                    f"{free / 1e9:.1f} GB free: set TMPDIR to a larger folder"
                )
            path = Path(self._folder.name) / "model.gguf"
            write_gguf(config, TYPES[kind], path)
            command = [sys.executable, "-m", "minitui.bench.llama", str(path), str(threads)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             stderr=subprocess.DEVNULL, text=True, bufsize=1)  # fmt: skip
            self.name = f"llama.cpp (llama-cpp-python {version('llama-cpp-python')}), {TYPES[kind]} weights"
            self.decode(1, 8, WARM_UP + 1)  # raises if the file cannot be loaded
        except BaseException:
            self.close()
            raise

    def decode(self, rows: int, prompt: int, steps: int) -> float:
        """Returns the median milliseconds of a greedy decode step of several sequences, each with its prompt."""
        return self._ask("decode", rows, prompt, steps)[0] * 1e3

    def first_tokens(self, prompt: int, rest: int) -> tuple[float, float]:
        """Returns the milliseconds until the first token of a prompt, and of one that adds `rest` tokens to it."""
        cold, cached = self._ask("first_tokens", prompt, rest)
        return cold * 1e3, cached * 1e3

    def close(self) -> None:
        if process := getattr(self, "_process", None):
            process.stdin.close()  # ends the process
            process.wait()
        self._folder.cleanup()

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, what: str, *arguments: int) -> list[float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([what, *arguments]) + "\n")
            answer = json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            status = self._process.wait()
            raise NotMeasured(
                f"llama.cpp is not measured: its process ended with status {status}. This needs the C interface of "
                "llama-cpp-python 0.3.10 or newer: pip install -U llama-cpp-python"
            ) from None
        return [float(each) for each in answer]


class _Model:
    """llama.cpp's C interface, in its own process."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp

        self._c: Any = llama_cpp
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(path.encode(), options)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = CONTEXT, MOST_TOKENS, MOST_TOKENS, 16
        settings.n_threads = settings.n_threads_batch = threads
        settings.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(model, settings)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(MOST_TOKENS, 0, 1)
        self._rng = np.random.default_rng(0)

    def decode(self, rows: int, prompt: int, steps: int) -> list[float]:
        self._c.llama_memory_clear(self._memory, True)
        start = self._rng.integers(0, self._vocab, (rows, prompt))
        cells = [(int(start[row, at]), at, row, at == prompt - 1) for row in range(rows) for at in range(prompt)]
        for first in range(0, len(cells), MOST_TOKENS):
            self._step(cells[first : first + MOST_TOKENS])
        tokens, times = [0] * rows, []
        for step in range(steps):
            began = time.perf_counter()
            tokens = self._step([(token, prompt + step, row, True) for row, token in enumerate(tokens)])
            times.append(time.perf_counter() - began)
        return [median(times[WARM_UP:])]

    def first_tokens(self, prompt: int, rest: int) -> list[float]:
        self._c.llama_memory_clear(self._memory, True)
        times, done = [], 0
        for count in prompt, rest:
            tokens = self._rng.integers(0, self._vocab, count).tolist()
            began = time.perf_counter()
            self._step([(token, done + i, 0, i == count - 1) for i, token in enumerate(tokens)])
            times.append(time.perf_counter() - began)
            done += count
        return times

    def _step(self, cells: list[tuple[int, int, int, bool]]) -> list[int]:
        """Computes tokens, each as (id, position, sequence, if it draws). Returns the most likely next tokens."""
        batch = self._batch
        batch.n_tokens = len(cells)
        for i, (token, position, sequence, draws) in enumerate(cells):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, draws
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if self._c.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        found = []
        for i, (*_, draws) in enumerate(cells):
            if draws:
                logits = self._c.llama_get_logits_ith(self._context, i)
                found.append(int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax()))
        return found


def main() -> None:
    """Answers requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what llama.cpp prints must not be read as an answer
    model = _Model(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        print(json.dumps(getattr(model, what)(*arguments)), file=answers)


if __name__ == "__main__":
    main()
