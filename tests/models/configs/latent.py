"""Configurations of families with latent attention, with and without experts."""

from typing import Any

from tests.models.configs.sizes import LONGROPE, MSCALE, SIZES

# Heads have odd sizes; the latent is the input of an odd number of them.
LATENT = SIZES | {"num_attention_heads": 3, "num_key_value_heads": 3}
LATENT |= {"q_lora_rank": 20, "kv_lora_rank": 25}
LATENT |= {"qk_nope_head_dim": 11, "qk_rope_head_dim": 6, "v_head_dim": 13}
LATENT_MQ = LATENT | {"q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 32}
DENSE: dict[str, Any] = {"first_k_dense_replace": 3}
# transformers views parts of queries and keys as complex numbers.
EVEN = DENSE | {"qk_nope_head_dim": 12, "kv_lora_rank": 26}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "minicpm3": ("MiniCPM3ForCausalLM", LATENT | {"v_head_dim": None, "scale_emb": 3.0}),
    "minicpm3-yarn": (
        "MiniCPM3ForCausalLM",
        LATENT_MQ | {"rope_parameters": MSCALE, "tie_word_embeddings": False, "mlp_bias": True},
    ),
    "minicpm3-longrope": (
        "MiniCPM3ForCausalLM",
        LATENT
        | {"attention_bias": True, "scale_depth": None, "dim_model_base": None}
        | {"qk_rope_head_dim": 12, "rope_parameters": LONGROPE, "scale_emb": 2.0}
        | {"original_max_position_embeddings": 128, "tie_word_embeddings": False},
    ),
    "deepseek-v2": ("DeepseekV2ForCausalLM", LATENT | EVEN | {"mlp_bias": True}),
    "deepseek-v2-queries": (
        "DeepseekV2ForCausalLM",
        LATENT_MQ
        | EVEN
        | {"tie_word_embeddings": True, "num_attention_heads": 4}
        | {"num_key_value_heads": 4},
    ),
    "deepseek-v2-yarn": (
        "DeepseekV2ForCausalLM",
        LATENT | EVEN | {"rope_parameters": MSCALE, "attention_bias": True},
    ),
    "deepseek-v3": ("DeepseekV3ForCausalLM", LATENT | DENSE | {"rope_parameters": MSCALE}),
    "deepseek-v3-queries": ("DeepseekV3ForCausalLM", LATENT_MQ | DENSE),
    "deepseek-v3-halves": (
        "DeepseekV3ForCausalLM",
        LATENT | DENSE | {"rope_interleave": False, "attention_bias": True, "v_head_dim": 33},
    ),
    "deepseek-v3-moe": (
        "DeepseekV3ForCausalLM",
        LATENT
        | EVEN
        | {"first_k_dense_replace": 1, "n_routed_experts": 12, "num_experts_per_tok": 3}
        | {"n_group": 3, "topk_group": 2, "moe_intermediate_size": 20, "n_shared_experts": 2},
    ),
    "mistral4": (
        "Mistral4ForCausalLM",
        LATENT
        | EVEN
        | {"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3}
        | {"n_group": 2, "moe_intermediate_size": 20, "routed_scaling_factor": 1.7}
        | {"rope_parameters": MSCALE | {"llama_4_scaling_beta": 0.3}},
    ),
    "deepseek-v2-moe": (
        "DeepseekV2ForCausalLM",
        LATENT
        | EVEN
        | {"first_k_dense_replace": 1, "n_routed_experts": 9, "num_experts_per_tok": 2}
        | {"n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy"}
        | {"moe_intermediate_size": 20, "n_shared_experts": 1, "routed_scaling_factor": 1.7},
    ),
    "deepseek-v2-greedy": (
        "DeepseekV2ForCausalLM",
        LATENT
        | EVEN
        | {"first_k_dense_replace": 0, "n_routed_experts": 5, "num_experts_per_tok": 4}
        | {"moe_intermediate_size": 20, "n_shared_experts": 1},
    ),
    "glm-lite": (
        "Glm4MoeLiteForCausalLM",
        LATENT
        | EVEN
        | {"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    ),
}
