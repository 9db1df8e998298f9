"""Configurations of families with attention and experts."""

from typing import Any

from tests.models.configs.dense import GEMMA4_VALUES
from tests.models.configs.sizes import (
    FEW,
    GRANITE4,
    LLAMA3,
    LONGROPE,
    QUARTER,
    SIZES,
    WIDE_HEADS,
    YARN,
)

MOE = SIZES | FEW
WIDE_MOE = WIDE_HEADS | FEW
LLAMA4 = WIDE_HEADS | {"num_local_experts": 5, "floor_scale": 20, "intermediate_size": 20}
LLAMA4 |= {"intermediate_size_mlp": 72, "num_hidden_layers": 4}
MIMO_V2 = WIDE_HEADS | {"head_dim": 24, "v_head_dim": 16, "moe_intermediate_size": 20}
MIMO_V2 |= {"num_hidden_layers": 4, "sliding_window": 9}
LAGUNA = WIDE_MOE | {"num_hidden_layers": 3, "sliding_window": 9}
LAGUNA |= {"shared_expert_intermediate_size": 24}
COMMAND_MOE = WIDE_MOE | {"num_hidden_layers": 3, "intermediate_size": 20, "sliding_window": 9}
COMMAND_MOE |= {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 72}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "MixtralForCausalLM",
        SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "phimoe": (
        "PhimoeForCausalLM",
        SIZES
        | {"num_local_experts": 5, "router_jitter_noise": 0.2, "sliding_window": 9}
        | {"attention_bias": True, "lm_head_bias": True},
    ),
    "phimoe-longrope": (
        "PhimoeForCausalLM",
        SIZES
        | {"num_local_experts": 7, "router_jitter_noise": 0.1}
        | {
            "rope_parameters": LONGROPE
            | {"original_max_position_embeddings": 128, "short_mscale": 1.2, "long_mscale": 1.2}
        },
    ),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        SIZES
        | {"num_experts": 6, "num_experts_per_tok": 1, "moe_intermediate_size": 40}
        | {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 2},
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        WIDE_HEADS
        | {"num_experts": 9, "num_experts_per_tok": 8, "moe_intermediate_size": 40}
        | {"norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "olmoe": ("OlmoeForCausalLM", MOE | {"num_experts": 3, "num_experts_per_tok": 1}),
    "gpt-oss": (
        "GptOssForCausalLM",
        WIDE_HEADS
        | {"num_hidden_layers": 2, "num_local_experts": 5, "num_experts_per_tok": 2}
        | {"rope_parameters": YARN | {"truncate": False}, "swiglu_limit": 1.5}
        | {"sliding_window": 9},
    ),
    "granite-moe": (
        "GraniteMoeForCausalLM",
        SIZES | {"num_hidden_layers": 2} | GRANITE4 | {"num_local_experts": 3},
    ),
    "granite-moe-shared": (
        "GraniteMoeSharedForCausalLM",
        MOE | GRANITE4 | {"num_local_experts": 9, "num_experts_per_tok": 8},
    ),
    "glm4-moe": (
        "Glm4MoeForCausalLM",
        WIDE_MOE
        | {"n_routed_experts": 12, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 4}
        | {"n_shared_experts": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True}
        | {"attention_bias": True},
    ),
    "solar-open": (
        "SolarOpenForCausalLM",
        {name: value for name, value in WIDE_MOE.items() if name != "intermediate_size"}
        | {"n_routed_experts": 6, "moe_intermediate_size": 23},
    ),
    "dots1": (
        "Dots1ForCausalLM",
        MOE
        | {"n_routed_experts": 7, "n_shared_experts": 1, "first_k_dense_replace": 1}
        | {"max_window_layers": 1, "sliding_window": 9},
    ),
    "minimax-m2": (
        "MiniMaxM2ForCausalLM",
        WIDE_HEADS
        | {"num_hidden_layers": 2, "num_local_experts": 7, "num_experts_per_tok": 3}
        | {"rotary_dim": 8},
    ),
    "ernie-moe": (
        "Ernie4_5_MoeForCausalLM",
        MOE | {"num_hidden_layers": 3, "moe_num_experts": 7, "moe_k": 3, "moe_layer_end_index": 1},
    ),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", WIDE_MOE | {"moe_topk": [3, 1]}),
    "exaone-moe": (
        "ExaoneMoeForCausalLM",
        MOE | {"num_experts": 6, "n_group": 2, "sliding_window": 9},
    ),
    "gemma4-moe": (
        "Gemma4ForCausalLM",
        GEMMA4_VALUES
        | FEW
        | {"num_hidden_layers": 3, "enable_moe_block": True, "top_k_experts": 2}
        | {"hidden_size_per_layer_input": 0},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        LLAMA4
        | {"moe_layers": [0, 1, 3], "attention_bias": True}
        | {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}},
    ),
    "llama4-plain": (
        "Llama4ForCausalLM",
        LLAMA4
        | {"interleave_moe_layer_step": 2, "num_experts_per_tok": 2, "use_qk_norm": False}
        | {"no_rope_layers": [0, 1, 1, 1], "attn_temperature_tuning": False},
    ),
    "llama4-chunks": (
        "Llama4ForCausalLM",
        LLAMA4 | {"attention_chunk_size": 21, "no_rope_layers": [1, 0, 1, 1]},
    ),
    "afmoe": (
        "AfmoeForCausalLM",
        WIDE_MOE
        | {"sliding_window": 9, "global_attn_every_n_layers": 2, "mup_enabled": True}
        | {"route_scale": 1.3},
    ),
    "hy-v3": ("HYV3ForCausalLM", WIDE_MOE),
    "mimo-v2": (
        "MiMoV2FlashForCausalLM",
        MIMO_V2 | {"num_hidden_layers": 3, "n_routed_experts": 5, "num_experts_per_tok": 2},
    ),
    "mimo-v2-groups": (
        "MiMoV2FlashForCausalLM",
        MIMO_V2
        | {"n_routed_experts": 6, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "attention_bias": True}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "v_head_dim": 7}
        | {"attention_value_scale": None, "norm_topk_prob": False, "routed_scaling_factor": 1.7},
    ),
    "mimo-v2-one": (
        "MiMoV2FlashForCausalLM",
        MIMO_V2
        | {"num_hidden_layers": 2, "n_routed_experts": 7, "num_experts_per_tok": 1}
        | {"num_attention_heads": 6, "num_key_value_heads": 1, "v_head_dim": 24},
    ),
    "laguna": (
        "LagunaForCausalLM",
        LAGUNA
        | {"num_attention_heads_per_layer": [4, 6, 2], "moe_routed_scaling_factor": 1.7}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "laguna-elements": (
        "LagunaForCausalLM",
        LAGUNA
        | {"gating": "per-element", "num_experts_per_tok": 1, "moe_router_logit_softcapping": 1.5}
        | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "num_experts": 6}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"]}
        | {
            "rope_parameters": {
                "full_attention": YARN | {"partial_rotary_factor": 0.5},
                "sliding_attention": QUARTER | {"partial_rotary_factor": 1.0},
            }
        },
    ),
    "laguna-all": (
        "LagunaForCausalLM",
        LAGUNA | {"num_experts_per_tok": 5, "num_attention_heads_per_layer": [2, 4, 6]},
    ),
    "command-moe": (
        "Cohere2MoeForCausalLM",
        COMMAND_MOE | {"sliding_window_pattern": 2, "num_shared_experts": 1},
    ),
    "command-moe-sum": (
        "Cohere2MoeForCausalLM",
        COMMAND_MOE
        | {"prefix_dense_sliding_window_pattern": 2, "num_shared_experts": 2, "rms_norm_eps": 1e-5}
        | {"shared_expert_combination_strategy": "sum", "expert_selection_fn": "sigmoid"},
    ),
}
