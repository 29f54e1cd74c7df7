"""Which path the steps of a configuration take: every combination of options has a path or is refused.

The GPU is simulated: the tests check the choice and run nothing on it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from engine import build
from engine.attention.choose import choose_attention
from engine.attention.grouped import GroupedAttention
from engine.config import EngineConfig
from engine.core.request import Request
from engine.core.step import PromptTargets, RowSettings, StepPlan, TableChanges
from engine.errors import EngineError
from engine.groups import group_of_layers, paged_groups
from engine.model.config import DeltaConfig, ExpertsConfig, ModelConfig, Packing, RopeConfig
from engine.model.group import ALONE
from engine.params import SamplingParams
from engine.worker.batch import Batch
from engine.worker.limits import resolve
from engine.worker.loaded import MemoryReport
from engine.worker.runner import Runner
from engine.worker.sampler import Sampler

DENSE = ModelConfig("Qwen3ForCausalLM", 512, 256, 512, 2, 8, 2, 64, 4096)
MODELS = {
    "dense": DENSE,
    "experts": replace(DENSE, experts=ExpertsConfig(16, 4, 96, True, (True, True))),
    "odd experts": replace(DENSE, experts=ExpertsConfig(16, 4, 36, True, (True, True))),
    "head of 128": replace(DENSE, head_dim=128),
    "windows": replace(DENSE, windows=(128, 0)),
    "head of 96": replace(DENSE, head_dim=96),
    "Gemma 2": replace(DENSE, softcap=50.0, logit_softcap=30.0, windows=(128, 0), post_norms=True, wide_norms=True),
    "gpt-oss": replace(DENSE, sinks=True, experts=ExpertsConfig(16, 4, 96, True, (True, True), True, 7.0, 1.7)),
    "OLMo 2": replace(DENSE, architecture="Olmo2ForCausalLM", pre_norms=False, post_norms=True, full_qk_norm=True),
    "delta": replace(DENSE, delta=DeltaConfig((True, False), 2, 4, 64, 64, 4)),
    "odd delta": replace(DENSE, delta=DeltaConfig((True, False), 2, 4, 96, 64, 4)),
    "queries by position": replace(DENSE, rope=RopeConfig(query_beta=0.1, original_max_position=64), head_dim=128),
}
HOPPER, ADA, AMPERE, TURING = (9, 0), (8, 9), (8, 6), (7, 5)


def stand_in(name: str) -> type:
    return type(name, (), {"__init__": lambda self, *args: None, "name": name})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Four GPUs of a compute capability, with triton and FlashAttention installed; runners and kernels by name."""
    triton_backend = ModuleType("engine.attention.triton_backend")
    triton_backend.TritonAttention = type(  # type: ignore[attr-defined]
        "TritonAttention", (), {"__init__": lambda self, *args: setattr(self, "name", "flash + triton" if args[4] else
        "triton")}
    )
    modules = {
        "engine.worker.graphs.fused_ops": [], "engine.worker.graphs.cuda_graphs": ["CudaGraphs"],
        "engine.kernels.compile_ahead": ["compiler"],
        "flash_attn": ["flash_attn_varlen_func"], "flash_attn.cute": ["flash_attn_varlen_func"],
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update({content: stand_in(content) for content in contents})
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("engine.attention.torch_backend.TorchAttention", stand_in("torch"))
    monkeypatch.setattr("engine.worker.weights.quantised.importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30))

    def believe(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        with imported("engine.attention.triton_backend") as real:  # what it can run is its own to say
            triton_backend.why_unsupported = real.why_unsupported  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "engine.attention.triton_backend", triton_backend)

    return believe


@contextmanager
def imported(name: str) -> Iterator[Any]:
    """A module that needs triton, whether or not it is installed: its functions can be called, not its kernels."""
    ours = ("triton", "engine.kernels", "engine.attention.triton_backend", "engine.worker.graphs")

    def forget() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(ours)}

    kept = forget()
    below = ("", ".language", ".language.extra", ".language.extra.cuda", ".tools", ".tools.tensor_descriptor")
    sys.modules.update({f"triton{part}": MagicMock() for part in below})
    try:
        yield importlib.import_module(name)
    finally:
        forget()
        sys.modules.update(kept)
        for path, module in kept.items():  # a package has its modules as attributes, too
            package, _, leaf = path.rpartition(".")
            if package in sys.modules:
                setattr(sys.modules[package], leaf, module)


def way(model: ModelConfig, **options: Any) -> str:
    """The executors and the attention that are chosen, or the sentence of the refusal."""
    try:
        config = EngineConfig(**{"device": "cuda", "dtype": "bfloat16", **options})
        limits = resolve(config, model)
        parts = build.choose_parts(model, config)
        attention = choose_attention(
            config.attention_backend, model, config.block_size, limits.dtype, limits.device, 8, 4096, limits.kv_dtype
        )
    except EngineError as error:
        return f"refused: {error}"
    return f"{' + '.join(make.__name__ for make in parts.executors)}, {attention.name}"  # type: ignore[attr-defined]


FP8, DRAFTS, TWO = {"quantization": "fp8"}, {"speculation": "prompt-lookup"}, {"tensor_parallel_size": 2}
SMALL_CACHE, FLASH = {"kv_cache_dtype": "fp8"}, {"attention_backend": "flash"}
EAGER, EIGHT = {"enforce_eager": True}, {"block_size": 8}
TABLE: list[tuple[str, dict[str, Any], tuple[int, int], str]] = [
    ("dense", {}, HOPPER, "CudaGraphs + Eager, triton"),
    ("head of 128", {}, HOPPER, "CudaGraphs + Eager, flash + triton"),
    ("head of 128", EAGER | DRAFTS, HOPPER, "CudaGraphs + Eager, flash + triton"),
    ("head of 128", SMALL_CACHE, HOPPER, "CudaGraphs + Eager, triton"),
    ("head of 128", {"block_size": 64}, HOPPER, "CudaGraphs + Eager, triton"),
    ("head of 128", {"attention_backend": "triton"}, HOPPER, "CudaGraphs + Eager, triton"),
    ("head of 128", {"dtype": "float32"}, HOPPER, "Eager, torch"),
    ("head of 128", {}, ADA, "CudaGraphs + Eager, triton"),
    ("head of 128", {}, AMPERE, "CudaGraphs + Eager, triton"),
    ("head of 128", SMALL_CACHE, ADA, "CudaGraphs + Eager, triton"),
    ("head of 128", SMALL_CACHE, AMPERE, "Eager, torch"),
    ("head of 128", {}, TURING, "Eager, torch"),
    ("dense", SMALL_CACHE | EAGER | EIGHT, HOPPER, "CudaGraphs + Eager, triton"),
    ("dense", SMALL_CACHE | DRAFTS | FP8, HOPPER, "CudaGraphs + Eager, triton"),
    ("dense", SMALL_CACHE | TWO, HOPPER, "CudaGraphs + Eager, triton"),
    ("dense", TWO | DRAFTS | SMALL_CACHE, HOPPER, "Eager, triton"),
    ("dense", FLASH | FP8, HOPPER, "CudaGraphs + Eager, flash + triton"),
    ("dense", FLASH | DRAFTS, HOPPER, "CudaGraphs + Eager, flash + triton"),
    ("dense", FLASH | TWO, HOPPER, "CudaGraphs + Eager, flash + triton"),
    ("dense", {"attention_backend": "flash,torch"}, HOPPER, "Eager, flash + torch"),
    ("dense", {"attention_backend": "torch"} | FP8 | SMALL_CACHE, HOPPER, "Eager, torch"),
    ("dense", FLASH | SMALL_CACHE, HOPPER, "refused: attention_backend flash reads keys and values of the model's"),
    ("dense", FLASH | {"block_size": 64}, HOPPER, "refused: FlashAttention-4 reads blocks of 64 or more tokens as a"),
    ("dense", FP8 | TWO, HOPPER, "refused: fp8 weights support only one rank, but tensor_parallel_size is 2: use 1"),
    ("experts", FP8, HOPPER, "refused: fp8 weights need the inner size of an expert to be a multiple of"),
    ("experts", SMALL_CACHE | DRAFTS, HOPPER, "CudaGraphs + Eager, triton"),
    ("experts", SMALL_CACHE | TWO | EAGER, HOPPER, "CudaGraphs + Eager, triton"),
    ("experts", {"tensor_parallel_size": 8}, HOPPER, "Eager, triton"),
    ("odd experts", {}, HOPPER, "Eager, triton"),
    ("windows", SMALL_CACHE | DRAFTS, HOPPER, "CudaGraphs + Eager, triton"),
    ("windows", FLASH, HOPPER, "CudaGraphs + Eager, flash + triton"),
    ("Gemma 2", {}, HOPPER, "CudaGraphs + Eager, triton"),
    ("Gemma 2", FLASH, HOPPER, "refused: attention_backend flash lacks soft caps, which this model has"),
    ("Gemma 2", {}, TURING, "Eager, torch"),
    ("gpt-oss", {}, HOPPER, "CudaGraphs + Eager, triton"),
    ("gpt-oss", TWO, HOPPER, "CudaGraphs + Eager, triton"),
    ("OLMo 2", {}, HOPPER, "CudaGraphs + Eager, triton"),
    ("OLMo 2", SMALL_CACHE, HOPPER, "refused: kv_cache_dtype is fp8, but this Olmo2ForCausalLM has no norms before"),
    ("queries by position", {}, HOPPER, "Eager, flash + triton"),
    ("head of 96", TWO, HOPPER, "Eager, torch"),
    ("head of 96", {"attention_backend": "triton"}, HOPPER, "refused: attention_backend triton cannot be used: the"),
    ("dense", {"dtype": "float32"} | SMALL_CACHE, HOPPER, "Eager, torch"),
    ("dense", {"dtype": "float32"} | FP8, HOPPER, "refused: fp8 weights need bfloat16 activations"),
    ("dense", {"quantization": "int8"}, HOPPER, "refused: int8 weights run on a CPU only, but the device is cuda"),
    ("dense", {}, TURING, "Eager, torch"),
    ("dense", SMALL_CACHE | DRAFTS | TWO, TURING, "Eager, torch"),
    ("dense", {"attention_backend": "triton"}, TURING, "refused: attention_backend triton cannot be used: our Triton"),
    ("dense", FP8, ADA, "CudaGraphs + Eager, triton"),
    ("dense", FP8, AMPERE, "refused: fp8 weights need a GPU of compute capability 8.9 or more, but Some GPU has 8.6"),
    ("dense", FLASH, ADA, "refused: FlashAttention-2, the version for this GPU, needs blocks of a multiple of"),
    ("dense", FLASH | {"block_size": 256}, ADA, "CudaGraphs + Eager, flash + triton"),
]


@pytest.mark.parametrize("model,options,capability,wanted", TABLE)
def test_a_combination_takes_its_path_or_is_refused(
    gpus: Any, model: str, options: dict[str, Any], capability: tuple[int, int], wanted: str
) -> None:
    gpus(capability)
    assert way(MODELS[model], **options).startswith(wanted)


def test_every_combination_has_a_path_or_a_refusal_with_advice(gpus: Any) -> None:
    choices: list[list[dict[str, Any]]] = [
        [{}, FP8], [{}, SMALL_CACHE], [{}, DRAFTS], [{}, TWO], [{}, EIGHT, {"block_size": 256}],
        [{}, FLASH, {"attention_backend": "triton"}, {"attention_backend": "torch,triton"}],
    ]
    ways: dict[str, int] = {}
    few = [MODELS["dense"], MODELS["delta"]]
    for capability, models in ((HOPPER, [*MODELS.values()]), (TURING, few)):
        gpus(capability)
        for model, picks in itertools.product(models, itertools.product(*choices)):
            options = {name: value for pick in picks for name, value in pick.items()}
            found = way(model, **options)
            if found.startswith("refused"):
                assert ": " in found.removeprefix("refused: "), f"{options} is refused without a way out: {found}"
                found = "refused"
            else:
                why_not = build.without_graphs(model, EngineConfig(device="cuda", dtype="bfloat16", **options))
                assert (why_not == "") == ("CudaGraphs" in found), (options, found, why_not)
            ways[found] = ways.get(found, 0) + 1
    assert sum(ways.values()) == (len(MODELS) + len(few)) * 16 * 3 * 4
    assert {"CudaGraphs + Eager, flash + triton", "CudaGraphs + Eager, triton", "Eager, torch", "refused"} <= set(ways)


BLOCKS = Packing("fp8", floats=True, strategy="block", block=(128, 128))
ROWS, AWQ = Packing("compressed-tensors", floats=True, strategy="channel"), Packing("awq", 4, 128)
OTHER_ORDER = Packing("gptq", 4, 128, in_order=False)


@pytest.mark.parametrize(
    ("packing", "options", "capability", "free", "kind", "sentence"),
    [
        (BLOCKS, {}, HOPPER, 80, "checkpoint", ""),
        (ROWS, TWO, HOPPER, 80, "checkpoint", ""),
        (ROWS, {"quantization": "none"}, HOPPER, 80, "none", "weights are expanded to bfloat16; --quantization fp8"),
        (ROWS, {"quantization": "none"}, AMPERE, 80, "none", "weights are expanded to bfloat16$"),
        (ROWS, {}, ADA, 80, "checkpoint", ""),
        (ROWS, {}, AMPERE, 80, "none", "expanded to bfloat16: .* capability 8.9 or more, but Some GPU has 8.6"),
        (replace(BLOCKS, block=(64, 64)), {}, HOPPER, 80, "none", "a scale per 128 x 128 block, not per 64 x 64"),
        (replace(ROWS, floats=False), {}, AMPERE, 80, "checkpoint", ""),
        (Packing("gptq", 8, 128), {}, HOPPER, 80, "none", "our kernels for integers .* not packed integers"),
        (AWQ, {}, HOPPER, 80, "int4", "the checkpoint's awq weights are computed in 4 bits"),
        (AWQ, {}, ADA, 1, "int4", "the checkpoint's awq weights are computed in 4 bits"),
        (AWQ, TWO, HOPPER, 1, "none", "int4 weights on 2 GPUs need key/value heads .* of 256, but it is 128"),
        (AWQ, {}, TURING, 80, "none", "expanded to bfloat16: int4 weights need .* 8.0 or more, but Some GPU has 7.5"),
        (OTHER_ORDER, {}, HOPPER, 80, "none", "the checkpoint's gptq weights are expanded to bfloat16: our kernels"),
        (OTHER_ORDER, {}, HOPPER, 1, "fp8", "expanded, then rounded to e4m3 .* would take 0.0 GB, and 0.9 GB are free"),
        (OTHER_ORDER, TWO, HOPPER, 1, "none", "expanded to bfloat16"),
        (AWQ, {"quantization": "checkpoint"}, HOPPER, 80, "", "our kernels for integers support 8 bits"),
        (None, {"quantization": "checkpoint"}, HOPPER, 80, "", "the checkpoint is not quantised"),
    ],
)
def test_a_quantised_checkpoint_is_computed_as_stored_or_expanded_with_the_reason(
    packing: Packing | None, options: dict[str, Any], capability: tuple[int, int], free: int, kind: str, sentence: str,
    gpus: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free * 10**9, 80 * 10**9))
    config = EngineConfig(**{"device": "cuda", "dtype": "bfloat16", **options})
    if not kind:
        with pytest.raises(EngineError, match=sentence):
            resolve(config, replace(DENSE, packing=packing))
        return
    limits = resolve(config, replace(DENSE, packing=packing))
    assert limits.quantization == kind
    notes = [note for note in limits.notes if "ranks" not in note]
    assert re.search(sentence, " ".join(notes)) if sentence else not notes


@pytest.mark.parametrize(
    ("packing", "quantization", "dtype"),
    [(None, "auto", "float16"), (None, "fp8", "bfloat16"), (AWQ, "auto", "bfloat16")],
)
def test_weights_of_8_bits_change_the_type_of_a_float16_checkpoint(
    packing: Packing | None, quantization: str, dtype: str, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(HOPPER)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (80 * 10**9, 80 * 10**9))
    model = replace(DENSE, packing=packing, dtype="float16")
    assert resolve(EngineConfig(device="cuda", quantization=quantization), model).dtype == getattr(torch, dtype)


def test_the_reason_for_no_graphs_is_reported(gpus: Any) -> None:
    gpus(TURING)
    slow = EngineConfig(device="cuda", dtype="bfloat16")
    assert build.without_graphs(DENSE, slow) == (
        "our Triton kernels are for GPUs of compute capability 8.0 (Ampere) and later, and Some GPU has 7.5"
    )
    gpus(HOPPER)
    assert build.without_graphs(DENSE, slow) == ""
    assert "256 by 36" in build.without_graphs(MODELS["odd experts"], slow)
    assert "tensor_parallel_size is 2" in build.without_graphs(DENSE, replace(slow, **DRAFTS, **TWO))
    assert "attention_backend is torch" in build.without_graphs(DENSE, replace(slow, attention_backend="torch"))


# ---- the graphs


class HostStaging:
    """In the place of engine.worker.upload.Staging: nothing is copied."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.target = torch.zeros(size, dtype=dtype)

    def array(self) -> np.ndarray:
        return self.target.numpy()

    def send(self, size: int) -> None:
        assert size <= len(self.target)


class Stage:
    """A runner with graphs, on the host: `went` lists the replayed graphs, and the draws and steps without a graph."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, speculation: str, model: ModelConfig = DENSE, prepared: bool = True
    ) -> None:
        with imported("engine.worker.graphs.cuda_graphs") as graphs:
            self.divided = sys.modules["engine.worker.graphs.step_graphs"].divided
            verify_graphs = sys.modules["engine.worker.graphs.verify_graphs"]
            extend_graphs = sys.modules["engine.worker.graphs.extend_graphs"]
        self.went: list[str] = []
        self.captured: list[str] = []
        for module in (graphs, verify_graphs, extend_graphs):
            monkeypatch.setattr(module, "Staging", HostStaging)
        monkeypatch.setattr(verify_graphs, "SIZES", (8, 16))
        monkeypatch.setattr(graphs, "Captures", lambda *_: SimpleNamespace(capture=self._capture, reserved=0))
        monkeypatch.setattr(graphs.torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(graphs, "launch_seconds", lambda _: 1e-4)
        monkeypatch.setattr(graphs, "matmul_rate", lambda _: 5e14)
        monkeypatch.setattr(graphs.gc, "freeze", lambda: None)
        monkeypatch.setattr(graphs.SamplingGraphs, "__init__", buffers)
        monkeypatch.setattr(graphs.SamplingGraphs, "draw", lambda *given: self._draw(*given))
        backends = [object.__new__(graphs.TritonAttention) for _ in paged_groups(model)]
        for backend in backends:
            backend.warm_up = backend.warm_up_flash = lambda *_: None
            backend.kv_heads, backend.workspace = 2, SimpleNamespace(longest=256)
        attention = backends[0] if len(backends) == 1 else GroupedAttention(backends, group_of_layers(model))
        cpu, windows = torch.device("cpu"), tuple(group.window for group in paged_groups(model)[1:])
        self.loaded: Any = SimpleNamespace(
            config=EngineConfig(speculation=speculation, speculative_tokens=8), model_config=model, shard=model,
            batch=Batch(16, 256, 16, model.vocab_size, cpu, windows=windows), device=cpu, dtype=torch.bfloat16,
            quantization="none", group=ALONE, pool=None,
            model=SimpleNamespace(nbytes_per_token=1 << 20, layers=[], config=model), attention=attention,
            first_layers=contextlib.nullcontext, max_num_batched_tokens=64, max_model_len=256,
            warm_up=lambda tokens, pool: torch.zeros(min(tokens, 16), model.vocab_size),
            mark=lambda: None,
            sample=lambda *_: self.went.append("sampled eagerly"), launched=lambda *_: "launched",
            compiler=SimpleNamespace(progress=lambda patience: (3, 3), close=lambda: None),
            compile_ahead=lambda run: 1, memory=MemoryReport(0, 0),
        )
        eager = SimpleNamespace(launch=lambda *_: self.went.append("eager") or "launched", prepare=lambda wanted: None)
        with torch.inference_mode():
            self.graphs = graphs.CudaGraphs(self.loaded, None)
        self.runner: Any = SimpleNamespace(executors=[self.graphs, eager])
        while prepared and Runner.prepare(self.runner) is not None:
            pass

    def _capture(self, run: Any) -> Any:
        """A graph of `run`, which is StepGraphs._run or SamplingGraphs._run with its size."""
        name = " ".join(map(str, (getattr(run.func.__self__, "form", "sample"), run.args[0])))
        self.captured.append(name)
        return SimpleNamespace(replay=lambda: self.went.append(name))

    def _draw(self, sampling: Any, plan: StepPlan, asked: int, bucket: int, num_draws: int, *_: Any) -> str:
        self.went.append(f"draw {num_draws} of {bucket}")
        return "launched"


def buffers(sampling: Any, loaded: Any, most_draws: int) -> None:
    """In the place of SamplingGraphs.__init__, without pinned memory."""
    sampling._graphs = {}
    sampling.rows = sampling.lengths = torch.zeros(most_draws, dtype=torch.int32)
    sampling.logits = torch.zeros(most_draws, 4)


@pytest.mark.parametrize("speculation", ["off", "prompt-lookup"])
def test_graphs_are_captured_in_the_order_of_their_use_and_tried_in_one_order(
    monkeypatch: pytest.MonkeyPatch, speculation: str
) -> None:
    """One request needs its draws, a decode of one row and short prompts; large batches come last."""
    stage = Stage(monkeypatch, speculation)
    drafts = speculation != "off"
    names = [name for i, name in enumerate(stage.captured) if name != stage.captured[i - 1]]  # three forms of draws
    assert names == [
        "sample 1", "decode 1", "sample 8", *(["verify 8", "sample 16", "verify 16"] if drafts else []), "extend 16",
        "extend 32", "extend 64", "sample 2", "decode 2", "sample 4", "decode 4", "decode 8",
        *([] if drafts else ["sample 16"]), "decode 16", "extend 32 with 16", "extend 64 with 16",
    ]
    assert stage.graphs.num_graphs == len([name for name in stage.captured if not name.startswith("sample")])
    layers = stage.loaded.model_config.num_layers
    assert stage.loaded.graphs == {
        "rows": [1, 2, 4, 8, 16], "decodes": [16], "tokens": 64, "prompts": 8, "launch_ms": pytest.approx(layers * 0.1),
        "splits": [32] * 5, "programs": 512,
    }
    tried = [type(part).__name__ for part in stage.graphs.parts]
    assert tried == [*(["VerifyGraphs"] if drafts else []), "DecodeGraphs", "ExtendGraphs"]
    stage.graphs.close()
    assert not any(part.graphs for part in stage.graphs.parts)


def test_a_step_without_its_graph_runs_eagerly_and_its_graph_is_captured_next(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, "off", prepared=False)
    step, longer = plan([1] * 8 + [50], 8), plan([1, 1, 60], 2)
    while (first := Runner.prepare(stage.runner))["stage"] == "kernels":  # type: ignore[index]
        assert first["text"] == "compiling kernels: 3/3" and not stage.captured  # type: ignore[index]
    assert stage.captured == ["sample 1"] * 3 + ["decode 1"]
    assert first is not None and first["text"] == f"capturing CUDA graphs: 1/{stage.graphs.num_graphs}"
    assert Runner.prepare(stage.runner, wanted=True) == first, "no step was run yet"
    Runner.launch(stage.runner, step, {})
    extend, dirty = stage.graphs.parts[1], []
    capture = stage._capture

    def watched(run: Any) -> Any:
        dirty.append(bool(extend._input.target.any()) or bool(stage.graphs._sampling.lengths.any()))
        return capture(run)

    with torch.inference_mode():  # what the last step left: a capture would write its keys and values again
        extend._input.target.fill_(7)
        stage.graphs._sampling.lengths.fill_(7)
    assert stage.graphs._captures is not None
    stage.graphs._captures.capture = watched
    left = Runner.prepare(stage.runner, wanted=True)
    assert left is not None and left["done"] == 2
    assert stage.went == ["eager"] and dirty == [False] * 4
    assert [str(size) for size in stage.graphs.parts[1].graphs] == ["64 with 16"]
    Runner.launch(stage.runner, longer, {})
    assert stage.went == ["eager", "eager"]


# ---- a step


def plan(q_lens: list[int], decodes: int, drafted: int = 0, **params: Any) -> StepPlan:
    n, none = len(q_lens), np.empty(0, np.int32)
    requests = [Request(i, [1] * 50, SamplingParams(**params), 0, 99, row=i) for i in range(n)]
    return StepPlan(
        step=1, rows=np.arange(n, dtype=np.int32), starts=np.full(n, 20, np.int32), q_lens=np.array(q_lens, np.int32),
        samples=np.ones(n, bool), token_ids=np.zeros(sum(q_lens), np.int32), num_decodes=decodes, num_drafted=drafted,
        tables=[TableChanges(none, none, none)], joins=[RowSettings.of(request) for request in requests],
        prompt_targets={
            i: PromptTargets([1], scored) for i in range(decodes + drafted, n)
            if (scored := requests[i].params.prompt_logprobs) is not None
        },
    )


@pytest.mark.parametrize(
    ("step", "wanted"),
    [
        (plan([1, 1, 1], 3), ["decode 4", "draw 3 of 4"]),
        (plan([1] * 8, 8, temperature=0.5, top_p=0.9), ["decode 8", "draw 8 of 8"]),
        (plan([1] * 8, 8, presence_penalty=1.0), ["decode 8", "sampled eagerly"]),
        (plan([1, 1, 60], 2), ["extend 64", "draw 3 of 8"]),
        (plan([1], 0), ["extend 16", "draw 1 of 8"]),
        (plan([1, 1, 63], 2), ["eager"]),  # more tokens than the largest graph
        (plan([2] * 9, 0), ["eager"]),  # more chunks than any graph
        (plan([1] * 9 + [20], 9), ["extend 32 with 16", "draw 10 of 16"]),
        (plan([1] * 8 + [50], 8), ["extend 64 with 16", "draw 9 of 16"]),
        (plan([1] * 8 + [8], 8), ["extend 32 with 16", "draw 9 of 16"]),  # one size has more tokens than decodes
        (plan([1, 40], 1, logit_bias={3: 1.0}), ["extend 64", "sampled eagerly"]),
        (plan([1, 40], 1, prompt_logprobs=0), ["eager"]),
        (plan([1, 4], 1, 1), ["verify 8", "draw 5 of 8"]),
        (plan([1, 4, 7], 1, 1), ["verify 16", "draw 12 of 16"]),
        (plan([1, 4], 1, 1, logprobs=1), ["verify 8", "sampled eagerly"]),
        (plan([9] * 2, 0, 2), ["eager"]),  # more tokens than the largest graph for drafts
        (plan([1, 4, 7], 1, 1, prompt_logprobs=0), ["eager"]),
    ],
)
def test_a_step_uses_the_smallest_graph_that_fits(
    monkeypatch: pytest.MonkeyPatch, step: StepPlan, wanted: list[str]
) -> None:
    """In each case the rows' settings are set in inference mode: tensors made in it can be changed in it only."""
    stage = Stage(monkeypatch, "prompt-lookup" if step.num_drafted else "off")
    set_row = Sampler.set_row

    def checked(sampler: Sampler, asked: RowSettings) -> None:
        assert torch.is_inference_mode_enabled()
        set_row(sampler, asked)

    monkeypatch.setattr(Sampler, "set_row", checked)
    assert Runner.launch(stage.runner, step, {}) == "launched"
    assert stage.went == wanted


def tables(step: StepPlan, sides: int) -> StepPlan:
    """The plan with blocks for all its tokens: in group g, column c of row r is 100 g + 10 r + c."""
    cells = [(row, column) for row, end in zip(step.rows, step.starts + step.q_lens, strict=True) for column in
             range(-(-int(end) // 16))]
    rows, columns = np.array(cells, np.int32).T
    changes = [TableChanges(rows, columns, 100 * group + 10 * rows + columns) for group in range(1 + sides)]
    return replace(step, tables=changes)


@pytest.mark.parametrize(
    ("step", "form"), [(plan([1, 1, 60], 2), "extend"), (plan([1, 4], 1, 1), "verify"), (plan([1, 1, 1], 3), "decode")],
    ids=["extend", "verify", "decode"],
)
def test_a_graph_gets_the_slots_of_every_group(monkeypatch: pytest.MonkeyPatch, step: StepPlan, form: str) -> None:
    step = tables(step, 1)
    stage = Stage(monkeypatch, "prompt-lookup" if step.num_drafted else "off", MODELS["windows"])
    assert Runner.launch(stage.runner, step, {}) == "launched" and stage.went[0].startswith(form)
    part: Any = next(part for part in stage.graphs.parts if part.form == form)
    batch, n, m = stage.loaded.batch, len(step.rows), len(step.tables[0].rows)
    if form == "decode":  # the kernel that prepares the step changes the tables
        changes = part._input.target.numpy()[16 + 3 * batch.max_rows :]
        rows, columns, blocks = (changes[i * 1024 :][: 2 * m].tolist() for i in range(3))
        own = step.tables[0]
        assert rows == [*own.rows, *(own.rows + batch.max_rows)] and columns == 2 * [*own.columns]
        assert blocks == [*own.blocks, *(own.blocks + 100)]
        return
    size = next(size for size in part.sizes if f"{form} {size}" == stage.went[0])
    by_token = stage.divided(part._input.target, part._shapes(size))[0]
    expected = [
        [(100 * group + 10 * row + position // 16) * 16 + position % 16 for row in range(n) for position in
         range(step.starts[row], step.starts[row] + step.q_lens[row])] for group in range(2)
    ]
    assert by_token[-2:, : step.num_tokens].tolist() == expected
    assert not by_token[:, step.num_tokens :].any(), "padding writes to the null block"


SEGMENTS = {"extend": [1, 1, 32, 28], "verify": [1] * 5, "decode": [1] * 3}  # tokens of each, in the order of the plan


@pytest.mark.parametrize(
    ("step", "form", "bounds"),
    [
        (plan([1, 1, 60], 2), "extend", [0, 1, 2, 4]), (plan([1, 4], 1, 1), "verify", [0, 1, 5]),
        (plan([1, 1, 1], 3), "decode", [0, 1, 2, 3]),
    ], ids=["extend", "verify", "decode"],
)
def test_a_graph_gets_the_segments_of_recurrent_states(
    monkeypatch: pytest.MonkeyPatch, step: StepPlan, form: str, bounds: list[int]
) -> None:
    ends = np.cumsum(SEGMENTS[form])
    segments = np.stack((ends - SEGMENTS[form], ends, ends + 50, ends + 70), 1).astype(np.int32)
    step = replace(tables(step, 0), segments=segments, cu_segments=np.array(bounds, np.int32))
    stage = Stage(monkeypatch, "prompt-lookup" if step.num_drafted else "off", MODELS["delta"])
    assert Runner.launch(stage.runner, step, {}) == "launched" and stage.went[0].startswith(form)
    part: Any = next(part for part in stage.graphs.parts if part.form == form)
    n, m, rows = len(step.rows), len(segments), stage.loaded.batch.max_rows
    if form == "decode":  # one segment for each row of the graph
        sent = part._input.target.numpy()[16 + 3 * rows :][: 4 * rows].reshape(rows, 4)
        padding = [[i, i + 1, 0, 0] for i in range(n, rows)]
    else:
        size = next(size for size in part.sizes if f"{form} {size}" == stage.went[0])
        *_, sent, found = stage.divided(part._input.target, part._shapes(size))
        assert found.tolist() == bounds + [m] * (len(found) - n - 1)
        padding = [[step.num_tokens, step.num_tokens, 0, 0]] * (len(sent) - m)
    assert sent.tolist() == segments.tolist() + padding, "padding writes no state"


def test_steps_that_a_graph_has_no_segments_for_run_kernel_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts beside a chunk, whose kernels such a graph lacks; more checkpoints than the graph has rows for."""
    for step, count in ((plan([1, 4, 7], 1, 1), 3), (plan([60], 0), 60)):
        stage = Stage(monkeypatch, "prompt-lookup" if step.num_drafted else "off", MODELS["delta"])
        segments = np.zeros((count, 4), np.int32)
        step = replace(step, segments=segments, cu_segments=np.zeros(len(step.rows) + 1, np.int32))
        assert Runner.launch(stage.runner, step, {}) == "launched"
        assert stage.went == ["eager"]
