"""Tiny random checkpoints, made by transformers itself, and plans to run them with."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from engine import build
from engine.config import EngineConfig
from engine.core.request import Request
from engine.core.step import PromptTargets, RowSettings, StepPlan, TableChanges
from engine.model import ops
from engine.model.checkpoint import checkpoint_slots
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.hf.config import read_model_config
from engine.model.weights import load_weights
from engine.params import SamplingParams
from engine.worker.eager import Eager
from engine.worker.runner import Parts, Runner

VOCAB = 199  # odd, and no multiple of anything

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / heads
    "max_position_embeddings": 256,
    "initializer_range": 0.08,  # wide enough that logits differ clearly
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SMALL_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def reference(kind: str, seed: int = 0, **overrides: Any) -> Any:
    """A randomly initialised transformers model in fp32: kind is "qwen3", "qwen2", "llama", "mistral" or "qwen3_moe".
    Norms and biases are randomised too: transformers leaves them at 1 and 0, where mistakes do not show."""
    import transformers

    names = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "mistral": "Mistral", "qwen3_moe": "Qwen3Moe"}
    name, experts = names[kind], SMALL_EXPERTS if kind == "qwen3_moe" else {}
    fields = {**SMALL, **experts, "tie_word_embeddings": False, **overrides}
    config = getattr(transformers, f"{name}Config")(**fields)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "bias" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save(
    model: Any, directory: Path, shards: bool = False, edit: dict[str, Any] | None = None, stacked: bool = False
) -> Path:
    """Write a checkpoint (in two or more files if `shards`), with changes to its config.json (None: remove). `stacked`:
    a layer's experts as one tensor, as transformers 5 holds them; else each by itself, as it publishes them."""
    model.save_pretrained(directory, max_shard_size="150KB" if shards else "5GB", save_original_format=not stacked)
    if edit:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        for key, value in edit.items():
            config.pop(key, None)
            if value is not None:
                config[key] = value
        path.write_text(json.dumps(config))
    return directory


def rewrite(directory: Path, change: Any) -> None:
    """Change the tensors of a one-file checkpoint."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def load_decoder(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    """A decoder on the CPU with the checkpoint's weights; a value that is not loaded is NaN."""
    config = read_model_config(directory)
    model = Decoder(config, dtype, torch.device("cpu"), 16)
    for slot in model.slots():
        slot.view.fill_(torch.nan)
    slots = checkpoint_slots(model.slots(), config, dtype)
    load_weights(slots, directory, config.tie_word_embeddings, packing=config.packing, **options)
    return model


def prompt(seed: int = 0, length: int = 20) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_runner(directory: Path, dtype: str = "float32", **options: Any) -> Any:
    """A Runner or LeadRunner on the CPU over a checkpoint; by default its pool has 64 blocks of 4 tokens."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": dtype,
        "block_size": 4,
        "num_blocks": 64,
        "max_num_seqs": 8,
        "cpu_threads": 1,
        **options,
    }
    settings.setdefault("window_blocks", settings["num_blocks"])  # a Driver never drops a page
    config = EngineConfig(model=str(directory), **settings)
    return build.make_runner(read_model_config(directory), config, directory)


def plain_runner(model: ModelConfig, config: EngineConfig, directory: Path | None = None) -> Runner:
    """A runner that runs every step kernel by kernel, with the operations of torch."""
    return Runner(model, config, Parts(ops, (Eager,)), directory)


def eager(runner: Any) -> Eager:
    """The executor that runs any step, of a runner or of rank 0 of several."""
    last = getattr(runner, "runner", runner).executors[-1]
    assert isinstance(last, Eager)
    return last


def make_request(ids: list[int], row: int, seed: int = 0, **params: Any) -> Request:
    """A running request in `row`."""
    params.setdefault("temperature", 0.0)
    sampling = SamplingParams(**params)
    return Request(
        row, list(ids), sampling, seed, 1 << 20, frozenset({2, *sampling.stop_token_ids}), prompt_len=len(ids), row=row
    )


class Driver:
    """Makes plans for a runner in place of a scheduler: blocks are given out in order, and none is freed. A group of
    windows has the blocks in the opposite order. Each row has a slot for recurrent states."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.step = 0
        self._next_block = 1
        self._joined: set[int] = set()
        self._dealt: list[tuple[int, int, int]] = []
        self.planned: list[Request] = []  # of the last plan, by entry

    def reserve(self, request: Request, tokens: int) -> None:
        """Blocks for the first `tokens` tokens of the request."""
        while len(request.table) * self.runner.block_size < tokens:
            self._dealt.append((request.row, len(request.table), self._next_block))
            request.table.append(self._next_block)
            self._next_block += 1

    def share(self, request: Request, leader: Request, blocks: int) -> None:
        """The request's first blocks are the leader's, as after a prefix hit."""
        for column, block in enumerate(leader.table[:blocks]):
            self._dealt.append((request.row, column, block))
            request.table.append(block)
        request.planned = blocks * self.runner.block_size

    def plan(self, entries: list[tuple[Request, int, bool]], unknown: bool = False) -> StepPlan:
        """One step of (request, tokens, samples); those with one token known to sample are the decodes, and come first.
        `unknown`: decodes take the token their row drew last, as if the host had not seen it yet."""
        entries = sorted(entries, key=lambda entry: not _decodes(entry[0], entry[1]))
        joins = [request for request, _, _ in entries if request.id not in self._joined]
        self._joined.update(request.id for request in joins)
        tokens: list[int] = []
        for request, count, _ in entries:
            self.reserve(request, request.planned + count)
            if unknown and _decodes(request, count):
                tokens.append(-1)
            else:
                tokens += request.ids[request.planned : request.planned + count]
        dealt, self._dealt = np.array(self._dealt, dtype=np.int32).reshape(-1, 3), []
        plan = StepPlan(
            step=self.step,
            rows=np.array([request.row for request, _, _ in entries], dtype=np.int32),
            starts=np.array([request.planned for request, _, _ in entries], dtype=np.int32),
            q_lens=np.array([count for _, count, _ in entries], dtype=np.int32),
            samples=np.array([samples for _, _, samples in entries], dtype=bool),
            token_ids=np.array(tokens, dtype=np.int32),
            num_decodes=sum(_decodes(request, count) for request, count, _ in entries),
            tables=[
                TableChanges(dealt[:, 0], dealt[:, 1], dealt[:, 2]),
                *(TableChanges(dealt[:, 0], dealt[:, 1], side.num_blocks - dealt[:, 2])
                  for side in self.runner.groups if side.kind == "window"),
            ],
            joins=[RowSettings.of(request) for request in joins],
            prompt_targets={
                i: PromptTargets(
                    request.ids[request.planned + 1 : min(request.planned + count + 1, request.prompt_len)],
                    request.params.prompt_logprobs,
                )
                for i, (request, count, _) in enumerate(entries)
                if request.params.prompt_logprobs is not None and not _decodes(request, count)
            },
        )
        if any(side.kind == "state" for side in self.runner.groups):
            ends = np.cumsum(plan.q_lens)
            slots = plan.rows + 1
            plan.segments = np.stack((ends - plan.q_lens, ends, np.where(plan.starts > 0, slots, 0), slots), 1)
            plan.segments, plan.cu_segments = plan.segments.astype(np.int32), np.arange(len(ends) + 1, dtype=np.int32)
        for request, count, _ in entries:
            request.planned += count
        self.step += 1
        self.planned = [request for request, _, _ in entries]
        return plan

    def run(self, entries: list[tuple[Request, int, bool]], unknown: bool = False) -> list[int]:
        """Plan, launch, wait and append what was drawn; the drawn ids, in the order of `entries`."""
        plan = self.plan(entries, unknown)
        grammars = {i: request.grammar for i, request in enumerate(self.planned) if request.grammar is not None}
        result = self.runner.launch(plan, grammars).wait()
        drawn = {}
        for request, token in zip(self.planned, result.ids, strict=True):
            drawn[request.id] = token
            if token >= 0:
                request.ids.append(token)
        self.result = result
        return [drawn[request.id] for request, _, _ in entries]

    def generate(self, request: Request, tokens: int, chunk: int = 1 << 30) -> list[int]:
        """Prefill in chunks, then decode alone."""
        known = len(request.ids)
        while request.planned < known:
            left = known - request.planned
            self.run([(request, min(chunk, left), left <= chunk)])
        for _ in range(tokens - 1):
            self.run([(request, 1, True)])
        return request.output_ids


def _decodes(request: Request, count: int) -> bool:
    return count == 1 and request.planned >= request.prompt_len


def held() -> tuple[int, int]:
    """What this process holds: objects that can hold others, tensors among them, and bytes of resident memory."""
    import psutil

    gc.collect()
    return len(gc.get_objects()), psutil.Process().memory_info().rss
