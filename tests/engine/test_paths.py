"""Which way the steps of a configuration go, and what is refused: every combination of options does one or the other.

The GPU is believed in, not there: what is chosen is looked at, not run.
"""

from __future__ import annotations

import importlib
import itertools
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
from engine.config import EngineConfig
from engine.core.request import Request
from engine.core.step import PromptTargets, RowSettings, StepPlan
from engine.errors import EngineError
from engine.model.config import ExpertsConfig, ModelConfig
from engine.params import SamplingParams
from engine.worker.limits import resolve

DENSE = ModelConfig("Qwen3ForCausalLM", 512, 256, 512, 2, 8, 2, 64, 4096)
MODELS = {
    "dense": DENSE,
    "experts": replace(DENSE, experts=ExpertsConfig(16, 4, 96, True, (True, True))),
    "odd experts": replace(DENSE, experts=ExpertsConfig(16, 4, 36, True, (True, True))),
    "head of 128": replace(DENSE, head_dim=128),
    "windows": replace(DENSE, windows=(128, 0)),
    "head of 96": replace(DENSE, head_dim=96),
}
HOPPER, ADA = (9, 0), (8, 9)


def stand_in(name: str) -> type:
    return type(name, (), {"__init__": lambda self, *args: None, "name": name})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Four GPUs of a compute capability, with triton and FlashAttention installed; runners and kernels by name."""
    triton_backend = ModuleType("engine.attention.triton_backend")
    triton_backend.TritonAttention = type(  # type: ignore[attr-defined]
        "TritonAttention", (), {"__init__": lambda self, *args: setattr(self, "name", "flash + triton" if args[4] else
        "triton")}
    )  # fmt: skip
    modules = {
        "engine.worker.cuda_graphs": ["GraphRunner"], "engine.worker.verify_graphs": ["SpeculativeGraphRunner"],
        "engine.worker.rank_graphs": ["LeadGraphRunner", "FollowGraphRunner"], "flash_attn": ["flash_attn_varlen_func"],
        "flash_attn.cute": ["flash_attn_varlen_func"],
    }  # fmt: skip
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update({content: stand_in(content) for content in contents})
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("engine.attention.torch_backend.TorchAttention", stand_in("torch"))
    monkeypatch.setattr("engine.worker.runner.Runner", stand_in("Runner"))
    monkeypatch.setattr("engine.worker.rank_runner.LeadRunner", stand_in("LeadRunner"))
    monkeypatch.setattr("engine.worker.rank_runner.FollowRunner", stand_in("FollowRunner"))
    monkeypatch.setattr("engine.worker.quantised.importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("engine.worker.memory._device_bytes", lambda limits: 1 << 37)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    memory = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: memory)

    def believe(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        with imported("engine.attention.triton_backend") as real:  # what it can run is its own to say
            triton_backend.supports = real.supports  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "engine.attention.triton_backend", triton_backend)

    return believe


@contextmanager
def imported(name: str) -> Iterator[Any]:
    """A module that needs triton, whether or not it is installed: its functions can be called, not its kernels."""
    ours = (
        "triton", "engine.kernels", "engine.attention.triton_backend", "engine.worker.cuda_graphs",
        "engine.worker.verify_graphs",
    )  # fmt: skip

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


def way(model: ModelConfig, **options: Any) -> str:
    """The runner and the attention that are chosen, or the sentence of the refusal."""
    try:
        config = EngineConfig(**{"device": "cuda", "dtype": "bfloat16", **options})
        limits = resolve(config, model)
        runner = build.make_runner(model, config)
        attention = choose_attention(
            config.attention_backend, model, config.block_size, limits.dtype, limits.device, 8, 4096, limits.kv_dtype
        )
    except EngineError as error:
        return f"refused: {error}"
    return f"{type(runner).__name__}, {attention.name}"


FP8, DRAFTS, TWO = {"quantization": "fp8"}, {"speculation": "prompt-lookup"}, {"tensor_parallel_size": 2}
SMALL_CACHE, FLASH = {"kv_cache_dtype": "fp8"}, {"attention_backend": "flash"}
EAGER, EIGHT = {"enforce_eager": True}, {"block_size": 8}
TABLE: list[tuple[str, dict[str, Any], tuple[int, int], str]] = [
    ("dense", {}, HOPPER, "GraphRunner, triton"),
    ("head of 128", {}, HOPPER, "GraphRunner, flash + triton"),
    ("head of 128", EAGER | DRAFTS, HOPPER, "SpeculativeGraphRunner, flash + triton"),
    ("head of 128", SMALL_CACHE, HOPPER, "GraphRunner, triton"),
    ("head of 128", {"block_size": 64}, HOPPER, "GraphRunner, triton"),
    ("head of 128", {"attention_backend": "triton"}, HOPPER, "GraphRunner, triton"),
    ("head of 128", {"dtype": "float32"}, HOPPER, "Runner, torch"),
    ("head of 128", {}, ADA, "Runner, torch"),
    ("dense", SMALL_CACHE | EAGER | EIGHT, HOPPER, "GraphRunner, triton"),
    ("dense", SMALL_CACHE | DRAFTS | FP8, HOPPER, "SpeculativeGraphRunner, triton"),
    ("dense", SMALL_CACHE | TWO, HOPPER, "LeadGraphRunner, triton"),
    ("dense", TWO | DRAFTS | SMALL_CACHE, HOPPER, "LeadRunner, triton"),
    ("dense", FLASH | FP8, HOPPER, "GraphRunner, flash + triton"),
    ("dense", FLASH | DRAFTS, HOPPER, "SpeculativeGraphRunner, flash + triton"),
    ("dense", FLASH | TWO, HOPPER, "LeadGraphRunner, flash + triton"),
    ("dense", {"attention_backend": "flash,torch"}, HOPPER, "Runner, flash + torch"),
    ("dense", {"attention_backend": "torch"} | FP8 | SMALL_CACHE, HOPPER, "Runner, torch"),
    ("dense", FLASH | SMALL_CACHE, HOPPER, "refused: attention_backend flash reads keys and values of the model's own"),
    ("dense", FLASH | {"block_size": 64}, HOPPER, "refused: FlashAttention-4 reads blocks of 64 tokens and more whole"),
    ("dense", FP8 | TWO, HOPPER, "refused: fp8 weights are for one rank, and tensor_parallel_size is 2: use 1"),
    ("experts", FP8, HOPPER, "refused: fp8 weights are for dense models, and Qwen3ForCausalLM has experts: use none"),
    ("experts", SMALL_CACHE | DRAFTS, HOPPER, "SpeculativeGraphRunner, triton"),
    ("experts", SMALL_CACHE | TWO | EAGER, HOPPER, "LeadGraphRunner, triton"),
    ("experts", {"tensor_parallel_size": 8}, HOPPER, "LeadRunner, triton"),
    ("odd experts", {}, HOPPER, "Runner, triton"),
    ("windows", SMALL_CACHE | DRAFTS, HOPPER, "Runner, torch"),
    ("head of 96", TWO, HOPPER, "LeadRunner, torch"),
    ("head of 96", {"attention_backend": "triton"}, HOPPER, "refused: attention_backend triton cannot be used: the"),
    ("dense", {"dtype": "float32"} | SMALL_CACHE, HOPPER, "Runner, torch"),
    ("dense", {"dtype": "float32"} | FP8, HOPPER, "refused: fp8 weights come with bfloat16 activations"),
    ("dense", {"quantization": "int8"}, HOPPER, "refused: int8 weights run on a CPU only, and the device is cuda"),
    ("dense", {}, ADA, "Runner, torch"),
    ("dense", SMALL_CACHE | DRAFTS | TWO, ADA, "LeadRunner, torch"),
    ("dense", {"attention_backend": "triton"}, ADA, "refused: attention_backend triton cannot be used: our Triton"),
    ("dense", FP8, ADA, "refused: fp8 weights need a GPU of compute capability 9.0, and Some GPU has 8.9"),
    ("dense", FLASH, ADA, "refused: FlashAttention-2, the version for this GPU, needs blocks of a multiple of"),
    ("dense", FLASH | {"block_size": 256}, ADA, "Runner, flash + torch"),
]  # fmt: skip


@pytest.mark.parametrize("model,options,capability,wanted", TABLE)
def test_a_combination_goes_its_way_or_is_refused(
    gpus: Any, model: str, options: dict[str, Any], capability: tuple[int, int], wanted: str
) -> None:
    gpus(capability)
    assert way(MODELS[model], **options).startswith(wanted)


def test_every_combination_goes_some_way_or_is_refused_with_a_way_out(gpus: Any) -> None:
    choices: list[list[dict[str, Any]]] = [
        [{}, FP8], [{}, SMALL_CACHE], [{}, DRAFTS], [{}, TWO], [{}, EAGER], [{}, EIGHT, {"block_size": 256}],
        [{}, FLASH, {"attention_backend": "triton"}, {"attention_backend": "torch,triton"}],
    ]  # fmt: skip
    ways: dict[str, int] = {}
    for capability in (HOPPER, ADA):
        gpus(capability)
        for model, picks in itertools.product(MODELS.values(), itertools.product(*choices)):
            options = {name: value for pick in picks for name, value in pick.items()}
            found = way(model, **options)
            if found.startswith("refused"):
                assert ": " in found.removeprefix("refused: "), f"{options} is refused without a way out: {found}"
                found = "refused"
            else:
                why_not = build.without_graphs(model, EngineConfig(device="cuda", dtype="bfloat16", **options))
                assert (why_not == "") == ("Graph" in found), (options, found, why_not)
            ways[found] = ways.get(found, 0) + 1
    assert sum(ways.values()) == 2 * len(MODELS) * 32 * 3 * 4
    assert {"GraphRunner, flash + triton", "SpeculativeGraphRunner, triton", "Runner, torch", "refused"} <= set(ways)


def test_whoever_gets_no_graphs_is_told_why(gpus: Any) -> None:
    gpus(ADA)
    slow = EngineConfig(device="cuda", dtype="bfloat16")
    assert build.without_graphs(DENSE, slow) == (
        "our Triton kernels are for GPUs of compute capability 9.0 (Hopper) and later, and Some GPU has 8.9"
    )
    gpus(HOPPER)
    assert build.without_graphs(DENSE, slow) == ""
    assert "256 by 36" in build.without_graphs(MODELS["odd experts"], slow)
    assert "tensor_parallel_size is 2" in build.without_graphs(DENSE, replace(slow, **DRAFTS, **TWO))
    assert "attention_backend is torch" in build.without_graphs(DENSE, replace(slow, attention_backend="torch"))


# ---- a step


def plan(q_lens: list[int], decodes: int, drafted: int = 0, **params: Any) -> StepPlan:
    n, none = len(q_lens), np.empty(0, np.int32)
    requests = [Request(i, [1] * 50, SamplingParams(**params), 0, 99, row=i) for i in range(n)]
    return StepPlan(
        step=1, rows=np.arange(n, dtype=np.int32), starts=np.full(n, 20, np.int32), q_lens=np.array(q_lens, np.int32),
        samples=np.ones(n, bool), token_ids=np.zeros(sum(q_lens), np.int32), num_decodes=decodes, num_drafted=drafted,
        table_rows=none, table_columns=none, table_blocks=none,
        joins=[RowSettings.of(request) for request in requests[decodes + drafted :]],
        prompt_targets={
            i: PromptTargets([1], scored) for i in range(decodes + drafted, n)
            if (scored := requests[i].params.prompt_logprobs) is not None
        },
    )  # fmt: skip


@pytest.mark.parametrize(
    ("step", "wanted"),
    [
        (plan([1, 1, 1], 3), "decode"),
        (plan([1] * 8, 8, presence_penalty=1.0), "decode"),
        (plan([1, 1, 60], 2), "extend"),
        (plan([1], 0), "extend"),
        (plan([1, 1, 63], 2), "eager"),  # more tokens than the largest graph
        (plan([2] * 9, 0), "eager"),  # more sequences than any
        (plan([1, 40], 1, logit_bias={3: 1.0}), "eager"),  # not what the sampling kernels know
        (plan([1, 40], 1, prompt_logprobs=0), "eager"),
        (plan([1, 4], 1, 1), "verify 8"),
        (plan([1, 4, 7], 1, 1), "verify 16"),
        (plan([9] * 2, 0, 2), "eager"),  # more tokens than the largest graph for drafts
        (plan([1, 4, 7], 1, 1, prompt_logprobs=0), "eager"),
    ],
)
def test_a_step_goes_by_the_graph_that_is_large_enough(
    monkeypatch: pytest.MonkeyPatch, step: StepPlan, wanted: str
) -> None:
    """Whichever way it goes, what belongs to the rows is set where tensors that inference has made may be changed."""
    with imported("engine.worker.verify_graphs") as verify_graphs:
        monkeypatch.setattr(verify_graphs, "SIZES", (8, 16))
    went: list[str] = []

    kind = verify_graphs.SpeculativeGraphRunner if step.num_drafted else verify_graphs.GraphRunner

    class Runner(kind):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            self._decode, self._extend, self._extend_sizes = {8: None}, {64: None}, [16, 64]
            self._verify, self.max_rows, self.config = {8: None}, 8, SimpleNamespace(speculative_tokens=8)
            self._joined = -1
            self.sampler: Any = SimpleNamespace(set_row=self._set, asked=self._asked)

        def _set(self, settings: RowSettings) -> None:
            assert torch.is_inference_mode_enabled()

        def _asked(self, rows: np.ndarray) -> int:
            biased = any(settings.params.logit_bias for settings in step.joins)
            return verify_graphs.DRAWABLE + 1 << 4 if biased else 0

    monkeypatch.setattr(Runner, "_launch_decode", lambda self, plan, _: self._join(plan) or went.append("decode"))
    monkeypatch.setattr(Runner, "_launch_extend", lambda self, plan: self._join(plan) or went.append("extend"))
    eager = "engine.worker.runner.Runner.launch"
    monkeypatch.setattr(eager, lambda self, plan, _: self._join(plan) or went.append("eager"))
    runner = Runner()
    runner._launch_verify = lambda plan, _, bucket: runner._join(plan) or went.append(f"verify {bucket}")
    runner.launch(step, {})
    assert went == [wanted]
