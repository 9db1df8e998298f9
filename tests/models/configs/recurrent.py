"""Configurations of families with states: linear attention, convolutions, Mamba and RWKV."""

from typing import Any

from tests.models.configs.latent import LATENT
from tests.models.configs.sizes import FEW, GRANITE4, SIZES, VOCAB, WIDE_HEADS, YARN

MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MROPE |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 12, "linear_value_head_dim": 20}
QWEN3_5 = WIDE_HEADS | DELTA | {"rope_parameters": MROPE}
QWEN3_5 |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
# transformers saves convolutions of queries, keys and values in equal parts.
OLMO_HYBRID = SIZES | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
OLMO_HYBRID |= {"linear_key_head_dim": 10, "linear_value_head_dim": 5}
OLMO_HYBRID |= {"layer_types": ["linear_attention"] * 2 + ["full_attention"]}
LFM2 = {"block_multiple_of": 10, "block_ffn_dim_multiplier": 1.3}
MAMBA2 = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_heads": 6}
MAMBA2 |= {"head_dim": 16, "n_groups": 1, "state_size": 16, "bos_token_id": 1, "eos_token_id": 2}
MAMBA2 |= {"pad_token_id": 0}
RWKV7 = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "head_dim": 16}
RWKV7 |= {"decay_low_rank_dim": 8, "gate_low_rank_dim": 12, "a_low_rank_dim": 6}
RWKV7 |= {"v_low_rank_dim": 5, "intermediate_size": 96, "bos_token_id": 1, "eos_token_id": 2}
MAMBA = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
MAMBA |= {"bos_token_id": 1, "eos_token_id": 2}
JAMBA = SIZES | {"num_experts": 1, "attn_layer_period": 3, "attn_layer_offset": 1}
HYBRID = {"mamba_n_heads": 6, "mamba_d_state": 12}
FALCON_H1 = {"mamba_d_ssm": None, "lm_head_multiplier": 0.3, "embedding_multiplier": 2.0}
FALCON_H1 |= {"mlp_multipliers": [0.7, 0.4], "ssm_multipliers": [0.5, 0.7, 1.2, 0.6, 1.5]}
FALCON_H1 |= {"key_multiplier": 0.6, "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.3}
FALCON_H1 |= {"attention_in_multiplier": 1.1, "ssm_out_multiplier": 0.9}
NEMOTRON_H = {k: v for k, v in SIZES.items() if k != "num_hidden_layers"} | {"head_dim": 16}
NEMOTRON_H |= {"layers_block_type": ["linear_attention", "mlp", "full_attention"] * 2}
NEMOTRON_H |= {"mamba_num_heads": 4, "mamba_head_dim": 10, "n_groups": 2, "ssm_state_size": 12}
KIMI = LATENT | {"q_lora_rank": None, "num_experts": 6, "num_experts_per_tok": 2}
KIMI |= {"moe_intermediate_size": 20, "linear_num_heads": 2, "linear_head_dim": 16}
KIMI |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5ForCausalLM", QWEN3_5),
    "qwen3.5-tied": (
        "Qwen3_5ForCausalLM",
        QWEN3_5
        | {"linear_num_value_heads": 2, "linear_key_head_dim": 40, "linear_value_head_dim": 7}
        | {"linear_conv_kernel_dim": 2, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        WIDE_HEADS
        | DELTA
        | {"num_experts": 0, "linear_num_value_heads": 6, "head_dim": 32}
        | {"linear_key_head_dim": 16, "num_hidden_layers": 3}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "olmo-hybrid": (
        "OlmoHybridForCausalLM",
        OLMO_HYBRID | {"linear_conv_kernel_dim": 3, "rope_parameters": {"rope_theta": None}},
    ),
    "olmo-hybrid-rope": (
        "OlmoHybridForCausalLM",
        OLMO_HYBRID | {"linear_allow_neg_eigval": False, "rope_parameters": YARN},
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        SIZES | LFM2 | {"layer_types": ["conv", "full_attention", "conv"]},
    ),
    "lfm2-bias": (
        "Lfm2ForCausalLM",
        SIZES
        | LFM2
        | {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}
        | {"full_attn_idxs": [2], "tie_word_embeddings": False},
    ),
    "lfm2-convolutions": (
        "Lfm2ForCausalLM",
        SIZES | LFM2 | {"hidden_size": 24, "layer_types": ["conv"] * 3, "conv_L_cache": 5},
    ),
    "mamba2": ("Mamba2ForCausalLM", MAMBA2),
    "mamba2-groups": (
        "Mamba2ForCausalLM",
        MAMBA2
        | {"num_heads": 4, "head_dim": 36, "n_groups": 2, "expand": 3, "use_bias": True}
        | {"conv_kernel": 3, "time_step_limit": (0.1, 2.0), "tie_word_embeddings": True},
    ),
    "mamba2-odd": (
        "Mamba2ForCausalLM",
        MAMBA2
        | {"hidden_size": 35, "num_heads": 5, "head_dim": 7, "expand": 1, "state_size": 11}
        | {"use_conv_bias": False, "chunk_size": 16},
    ),
    "rwkv7": ("RWKV7ForCausalLM", RWKV7),
    "rwkv7-ratio": (
        "RWKV7ForCausalLM",
        RWKV7
        | {"hidden_size": 36, "head_dim": None, "num_heads": 4, "hidden_ratio": 2.5}
        | {"intermediate_size": None, "norm_bias": False, "tie_word_embeddings": True},
    ),
    "rwkv7-odd": (
        "RWKV7ForCausalLM",
        RWKV7
        | {"hidden_size": 74, "head_dim": 37, "intermediate_size": 41, "num_hidden_layers": 4}
        | {"a_low_rank_dim": 1, "norm_eps": 1e-3},
    ),
    "mamba": ("MambaForCausalLM", MAMBA),
    "mamba-bias": (
        "MambaForCausalLM",
        MAMBA
        | {"expand": 16, "intermediate_size": 70, "use_bias": True, "use_conv_bias": False}
        | {"conv_kernel": 3, "time_step_rank": 7, "tie_word_embeddings": False},
    ),
    "mamba-odd": (
        "MambaForCausalLM",
        MAMBA | {"hidden_size": 35, "expand": 1, "state_size": 11, "conv_kernel": 2},
    ),
    "falcon-mamba": ("FalconMambaForCausalLM", MAMBA),
    "falcon-mamba-bias": (
        "FalconMambaForCausalLM",
        MAMBA
        | {"expand": 3, "use_bias": True, "time_step_rank": 1, "mixer_rms_eps": 0.1}
        | {"tie_word_embeddings": False},
    ),
    "falcon-mamba-odd": (
        "FalconMambaForCausalLM",
        MAMBA | {"hidden_size": 21, "state_size": 5, "use_conv_bias": False, "conv_kernel": 3},
    ),
    "jamba": ("JambaForCausalLM", JAMBA),
    "jamba-bias": (
        "JambaForCausalLM",
        JAMBA
        | {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_dt_rank": 5}
        | {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "jamba-no-expert-layer": (
        "JambaForCausalLM",
        JAMBA
        | {"num_experts": 4, "expert_layer_period": 9, "expert_layer_offset": 8}
        | {"mamba_d_state": 6, "mamba_d_conv": 2, "mamba_expand": 1, "attn_layer_offset": 0},
    ),
    "bamba": (
        "BambaForCausalLM",
        SIZES | HYBRID | {"attn_layer_indices": [1], "mamba_n_groups": 3},
    ),
    "bamba-bias": (
        "BambaForCausalLM",
        SIZES
        | HYBRID
        | {"attn_layer_indices": [2], "attention_bias": True, "mlp_bias": True}
        | {"mamba_proj_bias": True, "mamba_conv_bias": False, "time_step_limit": (0.2, 1.0)},
    ),
    "granite-hybrid": (
        "GraniteMoeHybridForCausalLM",
        SIZES | HYBRID | GRANITE4 | {"layer_types": ["mamba", "attention", "mamba"]},
    ),
    "granite-hybrid-rope": (
        "GraniteMoeHybridForCausalLM",
        SIZES
        | HYBRID
        | GRANITE4
        | {"layer_types": ["attention", "mamba", "attention"], "attention_bias": True}
        | {"position_embedding_type": "rope", "tie_word_embeddings": True, "mamba_n_groups": 2},
    ),
    "falcon-h1": ("FalconH1ForCausalLM", WIDE_HEADS | HYBRID | FALCON_H1),
    "falcon-h1-norm": (
        "FalconH1ForCausalLM",
        SIZES
        | HYBRID
        | FALCON_H1
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2}
        | {"mamba_d_ssm": 60, "projectors_bias": True, "attention_bias": True},
    ),
    "nemotron-h": ("NemotronHForCausalLM", NEMOTRON_H),
    "nemotron-h-bias": (
        "NemotronHForCausalLM",
        NEMOTRON_H
        | {"layers_block_type": ["mlp", "full_attention", "linear_attention"]}
        | {"use_bias": True, "mlp_bias": True, "n_groups": 1},
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeForCausalLM",
        QWEN3_5
        | FEW
        | {"num_hidden_layers": 3, "shared_expert_intermediate_size": 24, "num_experts": 7},
    ),
    "qwen3-next-moe": (
        "Qwen3NextForCausalLM",
        WIDE_HEADS
        | DELTA
        | FEW
        | {"linear_num_value_heads": 6, "head_dim": 32, "linear_key_head_dim": 16}
        | {"num_hidden_layers": 3, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0, 1]}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "lfm2-moe": (
        "Lfm2MoeForCausalLM",
        SIZES
        | FEW
        | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
        | {"num_dense_layers": 1, "routed_scaling_factor": 1.5},
    ),
    "granite-hybrid-moe": (
        "GraniteMoeHybridForCausalLM",
        SIZES
        | HYBRID
        | GRANITE4
        | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 7}
        | {"num_experts_per_tok": 3},
    ),
    "jamba-moe": (
        "JambaForCausalLM",
        JAMBA | {"num_experts": 5, "num_experts_per_tok": 2},
    ),
    "nemotron-h-moe": (
        "NemotronHForCausalLM",
        NEMOTRON_H
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"]}
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
        | {"moe_shared_expert_intermediate_size": 28, "n_group": 2, "routed_scaling_factor": 2.5},
    ),
    "kimi-linear": ("KimiLinearForCausalLM", KIMI),
    "kimi-linear-groups": (
        "KimiLinearForCausalLM",
        KIMI
        | {"q_lora_rank": 20, "attention_bias": True, "n_group": 3, "topk_group": 2}
        | {"linear_num_heads": 3, "linear_head_dim": 10, "linear_conv_kernel_dim": 3}
        | {"norm_topk_prob": False, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "nemotron-h-latent": (
        "NemotronHForCausalLM",
        NEMOTRON_H
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}
        | {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
        | {"moe_shared_expert_intermediate_size": 28, "moe_latent_size": 13},
    ),
}
