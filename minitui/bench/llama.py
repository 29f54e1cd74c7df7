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
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from engine.errors import EngineError
from engine.model.config import ModelConfig

ARCHITECTURES = {  # those whose tensors the writer knows
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
TYPES = {"none": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}  # kind of weights -> the nearest type in GGUF
BITS = {"F32": 32.0, "BF16": 16.0, "Q8_0": 8.5, "Q4_0": 4.5}  # of a weight, with its share of the scale
DIFFERENT_ROWS = 64  # the random rows that a matrix repeats
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
                                             stderr=subprocess.DEVNULL, text=True, bufsize=1)
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


def family(config: ModelConfig) -> str | None:
    """Returns the model's architecture in GGUF; None if the writer does not know it."""
    return None if config.experts or config.packing else ARCHITECTURES.get(config.architecture)


def file_bytes(config: ModelConfig, type_name: str) -> int:
    """Returns about how large the file becomes."""
    return round(config.num_parameters * BITS[type_name] / 8)


def write_gguf(config: ModelConfig, type_name: str, path: Path) -> None:
    """Writes the file. `type_name`: of all matrices, a value of TYPES. Needs the package gguf."""
    import gguf
    from gguf.quants import quantize

    kind, name = gguf.GGMLQuantizationType[type_name], family(config)
    assert name is not None
    writer: Any = gguf.GGUFWriter(str(path), name)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    rng = np.random.default_rng(0)

    @cache  # the matrices of all layers are the same, so the file needs little memory and time
    def random(rows: int, columns: int) -> np.ndarray:
        values = rng.standard_normal((min(rows, DIFFERENT_ROWS), columns), dtype=np.float32) * np.float32(0.02)
        few = quantize(values, kind)
        return np.resize(few, (rows, few.shape[1]))

    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", random(rows, columns), raw_dtype=kind)

    def vector(name: str, size: int, value: float = 1.0) -> None:
        writer.add_tensor(name, np.full(size, value, dtype=np.float32))

    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrix("token_embd", config.vocab_size, hidden)
    if not config.tie_word_embeddings:
        matrix("output", config.vocab_size, hidden)
    vector("output_norm.weight", hidden)
    for layer in range(config.num_layers):
        block = f"blk.{layer}"
        for part, rows in ("q", query), ("k", key), ("v", key):
            matrix(f"{block}.attn_{part}", rows, hidden)
            if config.qkv_bias:
                vector(f"{block}.attn_{part}.bias", rows, 0.0)
        matrix(f"{block}.attn_output", hidden, query)
        matrix(f"{block}.ffn_gate", inner, hidden)
        matrix(f"{block}.ffn_up", inner, hidden)
        matrix(f"{block}.ffn_down", hidden, inner)
        for part in "attn_norm", "ffn_norm":
            vector(f"{block}.{part}.weight", hidden)
        if config.qk_norm:
            for part in "attn_q_norm", "attn_k_norm":
                vector(f"{block}.{part}.weight", config.head_dim)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
