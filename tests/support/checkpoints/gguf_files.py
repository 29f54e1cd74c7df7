"""Writes a checkpoint of transformers as a GGUF file, with the gguf package and the rules of llama.cpp's converter."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from engine.text.tokenizer import Tokenizer

PERMUTED = ("llama", "granite", "smollm3", "mistral3")  # rotated as pairs of neighbours
# Fields of the random configs that the format cannot hold; ... removes a field.
HELD: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": False, "sliding_window": None, "layer_types": ...},
    "qwen3": {"use_sliding_window": False, "sliding_window": None, "layer_types": ...},
    "qwen3_moe": {
        "norm_topk_prob": True, "decoder_sparse_step": 1, "use_sliding_window": False, "sliding_window": None,
    },
    "granite": {"rope_scaling": None, "rope_parameters": None},
    "smollm3": {"no_rope_layers": ..., "no_rope_layer_interval": ..., "use_sliding_window": False,
                "num_hidden_layers": 5, "sliding_window": None},
    "ministral3": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "olmo2": {"attention_bias": False},
    "olmo3": {"attention_bias": False},
    "gemma2": {"attention_bias": False, "query_pre_attn_scalar": 32, "layer_types": ..., "attn_logit_softcapping": 5.0,
               "final_logit_softcapping": 3.0, "tie_word_embeddings": True},
    "gemma3_text": {"query_pre_attn_scalar": 32, "layer_types": ..., "sliding_window_pattern": 6,
                    "num_hidden_layers": 7},
    "starcoder2": {"sliding_window": None},
    "gpt_oss": {"swiglu_limit": 7.0, "layer_types": ...},
    "qwen3_5_text": {"linear_num_key_heads": 2, "linear_num_value_heads": 6},
    "qwen3_5_moe_text": {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "qwen3_next": {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "mlp_only_layers": [],
                   "norm_topk_prob": True},
    "gemma4_text": {"attention_bias": False, "rope_parameters": ..., "sliding_window": 9},
    "gemma4_unified_text": {"attention_bias": False, "rope_parameters": ..., "sliding_window": 9},
}
ARCHITECTURES = {
    "llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "ministral3": "mistral3", "granite": "granite", "seed_oss": "seed_oss", "smollm3": "smollm3", "phi3": "phi3",
    "olmo2": "olmo2", "olmo3": "olmo2", "glm4": "glm4", "gemma2": "gemma2", "gemma3_text": "gemma3",
    "stablelm": "stablelm", "starcoder2": "starcoder2", "gpt_oss": "gpt-oss",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next",
    "gemma4_text": "gemma4", "gemma4_unified_text": "gemma4",
}


def add_sizes(writer: Any, fields: dict[str, Any]) -> None:
    """Write the sizes of a model. `fields`: its config.json."""
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])


def finish(writer: Any) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Converter:
    """Writes one file. `fields`: the config.json, completed by transformers. `fused`: gates and ups of experts are one
    tensor. `next_layers`: of the head that predicts the token after the next."""

    def __init__(self, path: Path, fields: dict[str, Any], fused: bool = False, next_layers: int = 0) -> None:
        import gguf

        self.fused, self.next_layers = fused, next_layers

        self.gguf, self.fields, self.kind = gguf, fields, fields["model_type"]
        self.arch = ARCHITECTURES[self.kind]
        self.writer = gguf.GGUFWriter(str(path), self.arch)
        number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.arch)
        self.names = gguf.get_tensor_name_map(number, fields["num_hidden_layers"])

    def metadata(self) -> None:
        writer, fields = self.writer, self.fields
        heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        head_dim = fields.get("head_dim") or hidden // heads
        add_sizes(writer, fields | {"num_hidden_layers": fields["num_hidden_layers"] + self.next_layers})
        if self.next_layers:
            writer.add_nextn_predict_layers(self.next_layers)
        if "rms_norm_eps" in fields:
            writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
        else:
            writer.add_layer_norm_eps(fields.get("layer_norm_eps") or fields["norm_epsilon"])
        if self.kind not in ("granite", "phi3") and self.arch != "gemma4" and fields.get("head_dim"):
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
        experts = fields.get("num_local_experts") or fields.get("num_experts")
        if experts and (self.arch != "gemma4" or fields.get("enable_moe_block")):
            writer.add_expert_count(experts)
            writer.add_expert_used_count(fields.get("num_experts_per_tok") or fields["top_k_experts"])
        if "linear_num_key_heads" in fields:
            values = fields["linear_num_value_heads"]
            writer.add_ssm_conv_kernel(fields["linear_conv_kernel_dim"])
            writer.add_ssm_state_size(fields["linear_key_head_dim"])
            writer.add_ssm_group_count(fields["linear_num_key_heads"])
            writer.add_ssm_time_step_rank(values)
            writer.add_ssm_inner_size(values * fields["linear_value_head_dim"])
        if self.kind in ("qwen3_5_moe_text", "qwen3_next"):
            writer.add_expert_shared_feed_forward_length(fields["shared_expert_intermediate_size"])
        if self.kind in ("qwen3_moe", "gpt_oss", "qwen3_5_moe_text", "qwen3_next"):
            writer.add_expert_feed_forward_length(fields.get("moe_intermediate_size") or fields["intermediate_size"])
        if self.kind == "granite":
            writer.add_attention_scale(fields["attention_multiplier"])
            writer.add_embedding_scale(fields["embedding_multiplier"])
            writer.add_residual_scale(fields["residual_multiplier"])
            writer.add_logit_scale(fields["logits_scaling"])
        if self.kind == "stablelm":
            writer.add_parallel_residual(fields["use_parallel_residual"])
        if self.kind == "gemma2":
            writer.add_attn_logit_softcapping(fields["attn_logit_softcapping"])
            writer.add_final_logit_softcapping(fields["final_logit_softcapping"])
        if self.kind in ("gemma2", "gemma3_text", "olmo3", "gpt_oss", "phi3"):
            writer.add_sliding_window(fields["sliding_window"] or 0)
        if self.kind == "olmo3":
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in fields["layer_types"]])
        if self.arch == "gemma4":
            self._of_gemma4()
        self._rope(head_dim)

    def _of_gemma4(self) -> None:
        writer, fields, layers = self.writer, self.fields, self.fields["num_hidden_layers"]
        local = [kind == "sliding_attention" for kind in fields["layer_types"]]
        writer.add_sliding_window(fields["sliding_window"])
        writer.add_sliding_window_pattern(local)
        shared = fields.get("num_kv_shared_layers") or 0
        writer.add_shared_kv_layers(shared)
        writer.add_embedding_length_per_layer_input(fields.get("hidden_size_per_layer_input") or 0)
        writer.add_key_length(fields["global_head_dim"])
        writer.add_value_length(fields["global_head_dim"])
        writer.add_key_length_swa(fields["head_dim"])
        writer.add_value_length_swa(fields["head_dim"])
        if fields.get("final_logit_softcapping") is not None:
            writer.add_final_logit_softcapping(fields["final_logit_softcapping"])
        if fields.get("use_double_wide_mlp"):
            first, size = layers - shared, fields["intermediate_size"]
            writer.add_feed_forward_length([size if layer < first else 2 * size for layer in range(layers)])
        whole = fields.get("num_global_key_value_heads")
        if whole is not None and fields.get("attention_k_eq_v"):
            writer.add_head_count_kv([fields["num_key_value_heads"] if each else whole for each in local])
        if fields.get("enable_moe_block"):
            writer.add_expert_feed_forward_length(fields["moe_intermediate_size"])
        writer.add_rope_dimension_count(fields["global_head_dim"])
        writer.add_rope_dimension_count_swa(fields["head_dim"])
        half = fields["global_head_dim"] // 2
        turning = int(fields["rope_parameters"]["full_attention"]["partial_rotary_factor"] * half)
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * turning + [1e30] * (half - turning), np.float32))

    def _rope(self, head_dim: int) -> None:
        writer, table = self.writer, dict(self.fields["rope_parameters"])
        if isinstance(local := table.get("sliding_attention"), dict):
            writer.add_rope_freq_base_swa(local["rope_theta"])
            table = table["full_attention"]
        share = table.get("partial_rotary_factor") or self.fields.get("partial_rotary_factor")
        if self.arch in PERMUTED:
            writer.add_rope_dimension_count(head_dim)
        elif self.kind in ("phi3", "glm4", "stablelm", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"):
            writer.add_rope_dimension_count(int((1.0 if share is None else share) * head_dim))
        writer.add_rope_freq_base(table["rope_theta"])
        kinds = self.gguf.RopeScalingType
        if table["rope_type"] == "linear":
            writer.add_rope_scaling_type(kinds.LINEAR)
            writer.add_rope_scaling_factor(table["factor"])
        elif table["rope_type"] == "yarn":
            writer.add_rope_scaling_type(kinds.YARN)
            writer.add_rope_scaling_factor(table["factor"])
            writer.add_rope_scaling_orig_ctx_len(table["original_max_position_embeddings"])
            if "beta_fast" in table:
                writer.add_rope_scaling_yarn_beta_fast(table["beta_fast"])
                writer.add_rope_scaling_yarn_beta_slow(table["beta_slow"])
        elif table["rope_type"] == "longrope":
            original = self.fields["original_max_position_embeddings"]
            scale = self.fields["max_position_embeddings"] / original
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
            for length in ("long", "short"):
                writer.add_tensor(f"rope_factors_{length}.weight", np.array(table[f"{length}_factor"], np.float32))
        elif table["rope_type"] == "llama3":
            plain = 1 / table["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
            low, high = table["low_freq_factor"], table["high_freq_factor"]
            length = table["original_max_position_embeddings"]
            smooth = np.clip((length * plain / (2 * np.pi) - low) / (high - low), 0, 1)
            writer.add_tensor("rope_freqs.weight", (1 / ((1 - smooth) / table["factor"] + smooth)).astype(np.float32))
        if self.kind == "ministral3":
            writer.add_rope_scaling_yarn_log_mul(table["mscale_all_dim"])
            writer.add_attn_temperature_scale(table["llama_4_scaling_beta"])

    def tensors(self, tensors: dict[str, torch.Tensor], kind: str) -> None:
        """`kind`: the type of the matrices."""
        experts: dict[str, dict[int, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if self.kind == "gemma2" and name == "lm_head.weight":
                continue
            if self.arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
                tensor = tensor + 1
            if self.arch.startswith("qwen35") and ".experts." not in name:
                self._of_qwen35(name, tensor, kind)
                continue
            if self.arch == "qwen3next" and ".experts." not in name:
                self._of_qwen3next(name, tensor, kind)
                continue
            if self.arch == "gemma4":
                self._tensor_of_gemma4(name, tensor, kind)
                continue
            if self.arch in PERMUTED and ("q_proj." in name or "k_proj." in name):
                heads = self.fields["num_attention_heads" if "q_proj." in name else "num_key_value_heads"]
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
            if self.kind == "gpt_oss" and ".experts." in name:
                self._experts_of_gpt_oss(name, tensor, kind)
            elif ".experts." in name:
                before, _, after = name.partition(".experts.")
                number, _, rest = after.partition(".")
                experts.setdefault(f"{before}.experts.{rest}", {})[int(number)] = tensor
            else:
                self._add(f"{name}.weight" if name.endswith("sinks") else name, tensor, kind)
        for i in range(self.next_layers):
            layer = self.fields["num_hidden_layers"] + i
            for part in ("attn_norm", "attn_q", "ffn_gate_exps", "nextn.eh_proj", "nextn.enorm"):
                self.writer.add_tensor(f"blk.{layer}.{part}.weight", np.ones((2, 32), np.float32))
        for name in [each for each in experts if self.fused and each.endswith("gate_proj.weight")]:
            gates, ups = experts.pop(name), experts.pop(name.replace("gate_proj", "up_proj"))
            joined = {number: torch.cat((gates[number], ups[number])) for number in gates}
            experts[name.replace("gate_proj", "gate_up_proj")] = joined
        for name, parts in experts.items():
            if self.kind == "mixtral":
                name = name.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
            self._add(name, torch.stack([parts[number] for number in sorted(parts)]), kind)

    def _of_qwen35(self, name: str, tensor: torch.Tensor, kind: str) -> None:
        """The value heads in turns, one of each key head; -exp(A_log); 1 more in the other norms."""
        keys, values = self.fields["linear_num_key_heads"], self.fields["linear_num_value_heads"]

        def turns(rows: torch.Tensor) -> torch.Tensor:
            return rows.unflatten(0, (keys, values // keys, -1)).transpose(0, 1).flatten(0, 2)

        first = 2 * keys * self.fields["linear_key_head_dim"]
        if "in_proj_qkv." in name or "conv1d" in name:
            tensor = tensor.flatten(1)
            tensor = torch.cat((tensor[:first], turns(tensor[first:])))
        elif any(part in name for part in ("in_proj_z.", "in_proj_a.", "in_proj_b.", "A_log", "dt_bias")):
            tensor = turns(tensor)
        elif "linear_attn.out_proj." in name:
            tensor = turns(tensor.T).T
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor + 1
        if name.endswith("A_log"):
            tensor = -tensor.exp()
        self._add(name.replace(".dt_bias", ".dt_proj.bias"), tensor.squeeze(), kind)

    def _of_qwen3next(self, name: str, tensor: torch.Tensor, kind: str) -> None:
        """q, k, v and z of all heads instead of those of each key head; -exp(A_log); 1 more in the other norms."""
        if "in_proj_qkvz." in name:
            keys, each = self.fields["linear_num_key_heads"], self.fields["linear_num_value_heads"]
            inner = each // keys * self.fields["linear_value_head_dim"]
            sizes = [self.fields["linear_key_head_dim"]] * 2 + [inner] * 2
            *qkv, z = (part.flatten(0, 1) for part in tensor.unflatten(0, (keys, -1)).split(sizes, 1))
            self._add(name.replace("qkvz", "qkv"), torch.cat(qkv), kind)
            self._add(name.replace("qkvz", "z"), z, "F32" if kind == "BF16" else kind)  # types may differ
            return
        if name.endswith("A_log"):
            tensor = -tensor.exp()
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor + 1
        self._add(name.replace(".dt_bias", ".dt_proj.bias"), tensor.squeeze(), kind)

    def _tensor_of_gemma4(self, name: str, tensor: torch.Tensor, kind: str) -> None:
        if name.endswith(("router.scale", "per_expert_scale")):
            module = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
            self.writer.add_tensor(f"blk.{name.split('.')[2]}.{module}.scale", tensor.float().numpy())
        else:
            self._add(name if name.endswith((".weight", ".bias")) else f"{name}.weight", tensor, kind)

    def _experts_of_gpt_oss(self, name: str, tensor: torch.Tensor, kind: str) -> None:
        is_bias, stem = name.endswith("_bias"), name.removesuffix("_bias")
        leaf = "bias" if is_bias else "weight"
        tensor = tensor if is_bias else tensor.transpose(1, 2)
        if stem.endswith("gate_up_proj"):
            for part, first in (("gate_proj", 0), ("up_proj", 1)):
                self._add(f"{stem.replace('gate_up_proj', part)}.{leaf}", tensor[:, first::2], kind)
        else:
            self._add(f"{stem}.{leaf}", tensor, kind)

    def _add(self, name: str, tensor: torch.Tensor, kind: str) -> None:
        found = self.names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, f"{self.arch} has no {name}"
        values, types = tensor.contiguous().float().numpy(), self.gguf.GGMLQuantizationType
        if values.ndim < 2 or kind == "F32" or "ffn_gate_inp" in found or "exps.bias" in found:
            self.writer.add_tensor(found, values)
        elif values.shape[-1] % self.gguf.GGML_QUANT_SIZES[types[kind]][0]:
            self.writer.add_tensor(found, values.astype(np.float16))
        else:
            self.writer.add_tensor(found, self.gguf.quants.quantize(values, types[kind]), raw_dtype=types[kind])



def write_gguf(directory: Path, path: Path, kind: str = "F32", tokenizer: Any = None, **options: Any) -> Path:
    """Write the checkpoint in a directory as a GGUF file. `tokenizer`: adds its metadata to a writer. `options`: of
    Converter."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory)
    fields = config.to_dict()
    if fields["model_type"].startswith("gemma4"):  # transformers turns the fields of both kinds of layers into others
        fields |= json.loads((directory / "config.json").read_text())
    converter = Converter(path, fields, **options)
    converter.metadata()
    (tokenizer or no_tokenizer)(converter.writer)
    converter.tensors(load_file(directory / "model.safetensors"), kind)
    finish(converter.writer)
    return path


def add_tokenizer(writer: Any, directory: Path, pre: str) -> None:
    """The tokenizer of a directory, as of GPT-2's kind."""
    found = json.loads((directory / "tokenizer.json").read_text())
    tokens = {i: token for token, i in found["model"]["vocab"].items()}
    added = {token["id"]: token for token in found["added_tokens"]}
    tokens |= {i: token["content"] for i, token in added.items()}
    kinds = [(3 if added[i]["special"] else 4) if i in added else 1 for i in range(len(tokens))]
    merges = found["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([tokens[i] for i in range(len(tokens))])
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(Tokenizer(directory).eos_ids[0])
    writer.add_chat_template(Tokenizer(directory).chat_template)


def no_tokenizer(writer: Any) -> None:
    """As many tokens as SMALL has, in the manner of GPT-2."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["t", "0", "t0", *(f"x{i}" for i in range(196))])
    writer.add_token_types([1] * 199)
    writer.add_token_merges(["t 0"])
