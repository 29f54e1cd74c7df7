"""Keys of config.json that change the computation, and that this engine does not implement.

They belong to other model families, but a derived checkpoint may contain them and still name a supported architecture.
A value is accepted only if it is null or neutral. A key that only adds, removes or reshapes tensors needs no entry
here: weights are checked by name and shape (engine/model/weights.py).
"""

from __future__ import annotations

import math
from typing import Any

OFF: tuple[Any, ...] = (False, "", [], {})  # 0 is accepted too: it equals False

# Neutral: null, false, 0 or empty.
SWITCHES = """
    attn_logit_softcapping final_logit_softcapping logit_softcapping logits_soft_cap output_logit_soft_cap
    moe_router_logit_softcapping mlp_gate_softcap mlp_up_softcap clip_qkv qk_l2_clip_threshold swiglu_limit
    activation_sparsity_pattern
    use_qk_norm qk_norm qk_layernorm use_sandwich_norm use_post_norm use_attention_gate gating gated_norm_rank
    attn_output_gate apply_residual_connection_post_layernorm use_parallel_residual parallel_residual parallel_attn
    new_decoder_architecture add_out_norm
    use_bidirectional_attention bidirectional prefix_lm is_encoder_decoder add_cross_attention
    attention_chunk_size dual_chunk_attention_config use_dual_chunk_attention sliding_window_pattern
    sliding_window_size global_attn_every_n_layers local_attention local_layer_ids attention_window_size window_size
    keep_window_size attention_types full_attn_idxs attn_layer_indices layers_block_type block_types block_configs
    num_kv_shared_layers attention_k_eq_v hidden_size_per_layer_input enable_moe_block use_double_wide_mlp
    add_swa_attention_sink_bias add_full_attention_sink_bias learnable_sink_init
    swa_num_attention_heads swa_num_key_value_heads swa_head_dim num_attention_heads_per_layer per_layer_config
    alibi use_alibi learned_pos_emb sinusoidal_embeddings rope_interleave rope_interleaved use_mrope mrope_section
    no_rope_layer_interval nope_layer_interval layer_rope_theta rope_local_base_freq compress_rope_theta
    use_logn_attn use_dynamic_ntk attn_temperature_tuning log_scaling_n_floor scale_attn_by_inverse_layer_idx
    llama_4_scaling
    scale_embedding embedding_scale mup_enabled use_mup logits_mup_width_multiplier mlp_multipliers ssm_multipliers
    H_cycles L_cycles hc_mult hc_count altup_num_inputs laurel_rank
    n_group topk_group first_k_dense_replace moe_apply_router_weight_on_input moe_layers zero_expert_num
    quantization
"""

# Neutral: null or 1.
FACTORS = """
    residual_multiplier embedding_multiplier logits_scaling logit_scale lm_head_multiplier key_multiplier
    attention_in_multiplier attention_out_multiplier attention_value_scale width_multiplier scale_emb
    routed_scaling_factor route_scale router_scaling_factor moe_routed_scaling_factor moe_layer_freq
    partial_rotary_factor rotary_pct rotary_percent rope_ratio full_attn_alpha_factor full_attn_beta_factor
    mlp_alpha_factor mlp_beta_factor
"""

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")

# Neutral: null or one of the listed values.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(ACTIVATIONS, ("silu", "swish")),
    "scoring_func": ("softmax",),
    "expert_selection_fn": ("softmax",),
    "topk_method": ("greedy",),
    "norm_type": ("rmsnorm", "rms_norm", "rms"),
    "position_embedding_type": ("rope", "rotary"),
    "is_causal": (True,),
    "causal": (True,),
    "use_rope": (True,),
    "scale_attn_weights": (True,),
}


def neutral_values(hidden: int, head_dim: int, layers: int) -> dict[str, tuple[Any, ...]]:
    """Returns the neutral values of each foreign key, besides null, for a model of this size."""
    return {
        **dict.fromkeys(SWITCHES.split(), OFF),
        **dict.fromkeys(FACTORS.split(), (1,)),
        **ACCEPTED,
        "query_pre_attn_scalar": (head_dim,),
        "attention_multiplier": (head_dim**-0.5, 1 / math.sqrt(head_dim)),
        "rotary_dim": (head_dim,),
        "dim_model_base": (hidden,),
        "scale_depth": (math.sqrt(layers),),
        "no_rope_layers": ([], [1] * layers),
        "layer_types": (["full_attention"] * layers,),
        "use_sliding_window": (False,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    }
