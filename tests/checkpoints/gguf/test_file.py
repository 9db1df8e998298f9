"""GGUF files: whole models, types mixed in one file, split files, and damaged headers."""

import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.checkpoints.gguf.config import Description
from octavo.checkpoints.gguf.file import GGUFFile
from octavo.checkpoints.gguf.header import GGUFHeader
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import ModelConfig
from octavo.errors import ConfigError, ModelError, OctavoError
from octavo.kernels.native import NativeOps
from octavo.models.loader import load_model
from octavo.models.registry import read_mtp_spec, read_spec
from tests.gguf_files import VOCABULARY, convert, write_gguf
from tests.models.harness import Runner, load, make_hf

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GLM = {"pad_token_id": 0, "head_dim": 16, "partial_rotary_factor": 0.5}
SECTIONS = {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [6, 5, 5]}
GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 8}
QWEN35 = {"head_dim": 32, "num_hidden_layers": 3, "linear_num_key_heads": 2}
QWEN35 |= {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
QWEN35["layer_types"] = ["linear_attention", "full_attention", "linear_attention"]
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24}
FALCON_H1 = MAMBA | {"head_dim": 16, "mamba_d_ssm": 128, "mamba_norm_before_gate": False}
FEW = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 80}
GROUPS: dict[str, Any] = {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 3}
GROUPS |= {"topk_group": 2, "moe_intermediate_size": 32, "n_shared_experts": 2}
GROUPS |= {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
LAGUNA: dict[str, Any] = FEW | {"head_dim": 16, "num_hidden_layers": 5, "sliding_window": 4}
LAGUNA |= {"shared_expert_intermediate_size": 64}
LAGUNA_ROPES = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 16.0}
    | {"original_max_position_embeddings": 64, "partial_rotary_factor": 0.5},
    "sliding_attention": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.25,
    },
}
GRANITE = {"logits_scaling": 2.0, "attention_multiplier": 0.3, "embedding_multiplier": 3.0}
GRANITE |= {"residual_multiplier": 0.5}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 24}
LATENT |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
MSCALE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 16.0}
MSCALE |= {"original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.7}
FACTORS = {
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.6,
    "mlp_multipliers": [0.8, 1.3],
    "ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.8],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen2vl": ("Qwen2ForCausalLM", {"rope_parameters": SECTIONS}),
    "qwen3vl": ("Qwen3ForCausalLM", {"head_dim": 32, "rope_parameters": SECTIONS}),
    "paddleocr": ("LlamaForCausalLM", {"head_dim": 32, "rope_parameters": SECTIONS}),
    "gemma": ("GemmaForCausalLM", {"head_dim": 32}),
    "gemma2": ("Gemma2ForCausalLM", GEMMA),
    "gemma3": ("Gemma3ForCausalLM", GEMMA | {"num_hidden_layers": 7}),
    "gemma3n": (
        "Gemma3nForCausalLM",
        {"head_dim": 16, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "sliding_window": 8}
        | {"intermediate_size": [96, 96, 64, 96, 96], "laurel_rank": 8, "altup_active_idx": 1}
        | {"activation_sparsity_pattern": [0.7, 0.95, 0.0, 0.0, 0.0], "altup_num_inputs": 4}
        | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 128}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]},
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        GEMMA4
        | {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
        | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 128}
        | {"layer_types": ["sliding_attention", "full_attention"] * 3},
    ),
    "gemma4 keys": (
        "Gemma4ForCausalLM",
        GEMMA4
        | {"num_hidden_layers": 4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"hidden_size_per_layer_input": 0, "tie_word_embeddings": False},
    ),
    "muse-glimmer": (
        "MuseGlimmerForConditionalGeneration",
        {
            "text_config": SIZES
            | {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 4, "post_norm_eps": 1e-8}
            | {"qk_scale_factor": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 9.0},
            "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
            | {"num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4},
            "projector_hidden_size": 16,
            "out_hidden_size": 64,
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            "logits_scaling": 2.0,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
        },
    ),
    "granite_swa": (
        "GraniteSWAForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": 4, "attention_multiplier": 0.3}
        | {"layer_rope_theta": [0, 1e4, 1e4, 1e4]},
    ),
    "minicpm": (
        "GraniteForCausalLM",
        {
            "logits_scaling": 2.0,
            "attention_multiplier": 0.25,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
        },
    ),
    "arcee": ("ArceeForCausalLM", {"head_dim": 32}),
    "jais2": ("Jais2ForCausalLM", {"head_dim": 32}),
    "xverse": ("LlamaForCausalLM", {}),
    "bitnet": ("BitNetForCausalLM", {"tie_word_embeddings": True}),
    "bitnet silu": (
        "BitNetForCausalLM",
        {"hidden_act": "silu", "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "apertus": ("ApertusForCausalLM", {"head_dim": 32, "pad_token_id": 0}),
    "nemotron": ("NemotronForCausalLM", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "stablelm": ("StableLmForCausalLM", {"use_qkv_bias": True, "partial_rotary_factor": 0.25}),
    "stablelm norms": (
        "StableLmForCausalLM",
        {"use_parallel_residual": True, "qk_layernorm": True},
    ),
    "olmo": ("OlmoForCausalLM", {"clip_qkv": 0.8, "pad_token_id": 0}),
    "smollm3": ("SmolLM3ForCausalLM", {"num_hidden_layers": 4, "pad_token_id": 0}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo2 window": (
        "Olmo3ForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": 4} | {"layer_types": ["full_attention"] * 4},
    ),
    "phi2": ("PhiForCausalLM", {"pad_token_id": 0, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0}),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": None}),
    "command-r": ("CohereForCausalLM", {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": (
        "Cohere2ForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": 4, "logit_scale": 0.5},
    ),
    "chatglm": ("GlmForCausalLM", GLM | {"attention_bias": True}),
    "glm4": ("Glm4ForCausalLM", GLM | {"attention_bias": False}),
    "exaone": ("LlamaForCausalLM", {}),
    "exaone4": ("Exaone4ForCausalLM", {"num_hidden_layers": 4, "sliding_window": 4}),
    "exaone4 full": (
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "seed_oss": ("SeedOssForCausalLM", {"head_dim": 32, "attention_out_bias": True}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {"head_dim": 32, "use_bias": True, "pad_token_id": 0}),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", {"head_dim": 32, "pad_token_id": 0}),
    "internlm2": ("LlamaForCausalLM", {}),
    "mistral3": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 32}),
    "mistral3 long": (
        "Ministral3ForCausalLM",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "llama_4_scaling_beta": 0.3,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
            },
        },
    ),
    "qwen35": ("Qwen3_5ForCausalLM", QWEN35),
    "qwen35 three": (
        "Qwen3_5ForCausalLM",
        QWEN35
        | {"linear_num_value_heads": 6, "linear_key_head_dim": 24, "tie_word_embeddings": True},
    ),
    "qwen35 equal": (
        "Qwen3_5ForCausalLM",
        QWEN35 | {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3},
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    "lfm2 untied": (
        "Lfm2ForCausalLM",
        {"num_key_value_heads": 1, "layer_types": ["full_attention", "conv"]}
        | {"tie_word_embeddings": False, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    ),
    "rwkv7": (
        "RWKV7ForCausalLM",
        {"head_dim": 32, "decay_low_rank_dim": 32, "a_low_rank_dim": 8, "v_low_rank_dim": 16},
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24, "conv_kernel": 4},
    ),
    "mamba2 biases": (
        "Mamba2ForCausalLM",
        {"num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 16, "conv_kernel": 3}
        | {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
    ),
    "granitehybrid": (
        "GraniteMoeHybridForCausalLM",
        MAMBA
        | {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3}
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 80}
        | {"logits_scaling": 2.0, "attention_multiplier": 0.3, "embedding_multiplier": 3.0}
        | {"residual_multiplier": 0.5, "position_embedding_type": "nope"},
    ),
    "granitehybrid bamba": (
        "BambaForCausalLM",
        MAMBA | {"attn_layer_indices": [1], "num_hidden_layers": 3},
    ),
    "falcon-h1": ("FalconH1ForCausalLM", FALCON_H1 | FACTORS | {"mamba_rms_norm": False}),
    "falcon-h1 norm": (
        "FalconH1ForCausalLM",
        FALCON_H1 | {"mamba_rms_norm": True, "projectors_bias": True, "mamba_conv_bias": False},
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {"layers_block_type": ["mamba", "mlp", "attention", "mamba"], "num_hidden_layers": 4}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24}
        | {"conv_kernel": 4, "head_dim": 24},
    ),
    "mamba": ("MambaForCausalLM", {"intermediate_size": 128, "conv_kernel": 3}),
    "mamba falcon": (
        "FalconMambaForCausalLM",
        {"intermediate_size": 128, "use_conv_bias": False, "tie_word_embeddings": False}
        | {"time_step_rank": 7, "state_size": 5, "use_bias": True},
    ),
    "jamba": (
        "JambaForCausalLM",
        {"num_hidden_layers": 5, "num_experts": 1, "mamba_expand": 3}
        | {"attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "jamba one": (
        "JambaForCausalLM",
        {"num_experts": 1, "attn_layer_offset": 1, "mamba_conv_bias": False},
    ),
    "gpt2": ("GPT2LMHeadModel", {}),
    "starcoder": ("GPTBigCodeForCausalLM", {}),
    "gptneox": ("GPTNeoXForCausalLM", {"rotary_pct": 0.25, "use_parallel_residual": False}),
    "bloom": ("BloomForCausalLM", {"seq_length": 256}),
    "falcon": ("FalconForCausalLM", {"num_kv_heads": 1, "multi_query": True, "bias": False}),
    "falcon new": ("FalconForCausalLM", {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "mpt": (
        "MptForCausalLM",
        {"max_seq_len": 256, "attn_config": {"clip_qkv": 0.4}},
    ),
    "phi3 window": ("Phi3ForCausalLM", {"pad_token_id": 0, "sliding_window": 4}),
    "llama llama3": (
        "LlamaForCausalLM",
        {
            "max_position_embeddings": 131072,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama other context": (
        "LlamaForCausalLM",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64, "factor": 3.5}},
    ),
    "phi3 longrope": (
        "Phi3ForCausalLM",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 8,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 8,
                "attention_factor": 1.2,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 3.0, 5.0, 9.0],
            },
        },
    ),
    "qwen2 linear": (
        "Qwen2ForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "qwen2 yarn": (
        "Qwen2ForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.3,
            },
        },
    ),
    "lfm2moe": (
        "Lfm2MoeForCausalLM",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
        | FEW
        | {"num_dense_layers": 1},
    ),
    "glm4moe": (
        "Glm4MoeForCausalLM",
        GLM | GROUPS | {"use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 0},
    ),
    "glm4moe plain": (
        "Glm4MoeForCausalLM",
        GLM | GROUPS | {"norm_topk_prob": False, "num_nextn_predict_layers": 0},
    ),
    "qwen35moe": (
        "Qwen3_5MoeForCausalLM",
        QWEN35 | FEW | {"shared_expert_intermediate_size": 64},
    ),
    "qwen3next": (
        "Qwen3NextForCausalLM",
        QWEN35
        | FEW
        | {"shared_expert_intermediate_size": 64, "pad_token_id": 0}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "granitemoe": ("GraniteMoeSharedForCausalLM", GRANITE | LOCAL),
    "granitehybrid experts": (
        "GraniteMoeHybridForCausalLM",
        MAMBA
        | GRANITE
        | LOCAL
        | {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3}
        | {"position_embedding_type": "nope"},
    ),
    "gemma4 experts": (
        "Gemma4ForCausalLM",
        GEMMA4
        | FEW
        | {"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "deepseek2": ("DeepseekV3ForCausalLM", LATENT | GROUPS | {"rope_parameters": MSCALE}),
    "deepseek2 softmax": (
        "DeepseekV2ForCausalLM",
        LATENT
        | GROUPS
        | {"q_lora_rank": None, "topk_method": "group_limited_greedy"}
        | {"norm_topk_prob": False},
    ),
    "deepseek2 glm": (
        "Glm4MoeLiteForCausalLM",
        LATENT | GROUPS | {"num_nextn_predict_layers": 0, "pad_token_id": 0},
    ),
    "minicpm3": (
        "MiniCPM3ForCausalLM",
        LATENT | {"v_head_dim": 16, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    ),
    "dots1": (
        "Dots1ForCausalLM",
        GROUPS | {"sliding_window": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    ),
    "minimax-m2": (
        "MiniMaxM2ForCausalLM",
        {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2}
        | {"scoring_func": "sigmoid"},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {"num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 5, "intermediate_size": 32}
        | {"intermediate_size_mlp": 96, "interleave_moe_layer_step": 2},
    ),
    "exaone-moe": (
        "ExaoneMoeForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": 4, "num_experts": 6, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2}
        | {"topk_group": 1, "scoring_func": "sigmoid", "num_nextn_predict_layers": 0},
    ),
    "afmoe": (
        "AfmoeForCausalLM",
        FEW
        | {"num_hidden_layers": 4, "sliding_window": 4, "num_dense_layers": 1, "head_dim": 16}
        | {"mup_enabled": True, "route_scale": 1.3, "route_norm": True, "score_func": "sigmoid"},
    ),
    "laguna": (
        "LagunaForCausalLM",
        LAGUNA
        | {"num_attention_heads_per_layer": [4, 6, 2, 4, 2], "moe_routed_scaling_factor": 1.7}
        | {"layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"]},
    ),
    "laguna elements": (
        "LagunaForCausalLM",
        LAGUNA
        | {"gating": "per-element", "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3}
        | {"rope_parameters": LAGUNA_ROPES}
        | {"layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"]},
    ),
    "laguna full": (
        "LagunaForCausalLM",
        LAGUNA | {"gating": "per-element", "sliding_window": 0},
    ),
    "mimo2": (
        "MiMoV2FlashForCausalLM",
        GROUPS
        | {"head_dim": 24, "v_head_dim": 16, "num_hidden_layers": 7, "sliding_window": 4}
        | {"routed_scaling_factor": None, "attention_value_scale": 0.6},
    ),
    "mimo2 plain": (
        "MiMoV2FlashForCausalLM",
        GROUPS
        | {"head_dim": 24, "v_head_dim": 24, "num_hidden_layers": 2, "sliding_window": 4}
        | {"routed_scaling_factor": None, "attention_value_scale": None, "attention_bias": True},
    ),
    "cohere2moe": (
        "Cohere2MoeForCausalLM",
        {"num_hidden_layers": 5, "sliding_window": 4, "logit_scale": 0.5, "head_dim": 16}
        | {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32}
        | {"prefix_dense_intermediate_size": 96, "first_k_dense_replace": 1}
        | {"num_shared_experts": 2, "expert_selection_fn": "sigmoid", "norm_topk_prob": True},
    ),
    "nemotron_h_moe": (
        "NemotronHForCausalLM",
        {"layers_block_type": ["mamba", "moe", "attention", "moe"], "num_hidden_layers": 4}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24}
        | {"conv_kernel": 4, "head_dim": 24, "n_routed_experts": 6, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64}
        | {"routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1},
    ),
    "nemotron_h_moe latent": (
        "NemotronHForCausalLM",
        {"layers_block_type": ["mamba", "moe", "attention"], "num_hidden_layers": 3}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24}
        | {"conv_kernel": 4, "head_dim": 24, "n_routed_experts": 5, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64}
        | {"n_group": 1, "topk_group": 1, "moe_latent_size": 32, "norm_topk_prob": False},
    ),
    "jamba experts": (
        "JambaForCausalLM",
        {"num_hidden_layers": 5, "num_experts": 5, "num_experts_per_tok": 2, "mamba_expand": 2}
        | {"attn_layer_period": 2, "attn_layer_offset": 1}
        | {"expert_layer_period": 3, "expert_layer_offset": 1},
    ),
    "ernie4_5-moe": (
        "Ernie4_5_MoeForCausalLM",
        {"num_hidden_layers": 3, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32}
        | {"moe_num_shared_experts": 2, "pad_token_id": 0},
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1ForCausalLM",
        {"head_dim": 32, "num_experts": 5, "moe_topk": [2, 2], "pad_token_id": 0},
    ),
    "llama experts": (
        "MixtralForCausalLM",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2moe": (
        "Qwen2MoeForCausalLM",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 64},
    ),
    "qwen3moe": (
        "Qwen3MoeForCausalLM",
        {"head_dim": 32, "num_experts": 9, "num_experts_per_tok": 8, "moe_intermediate_size": 32}
        | {"norm_topk_prob": True},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {"head_dim": 32, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8}
        | {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
            | {"original_max_position_embeddings": 64, "truncate": False}
        },
    ),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 1}),
}
"""Models by `general.architecture` and a variant."""
PROMPT = [5, 9, 33, 2, 77, 40, 41, 42, 8, 101, 64, 3]


def make(kind: str, path: Path, types: dict[str, str] | None = None) -> Any:
    name, fields = MODELS[kind]
    torch.manual_seed(0)
    sizes = {} if "text_config" in fields else SIZES
    model = make_hf(name, **sizes | fields).float().eval()
    convert(model, kind.split()[0], path, types)
    return model


def start(path: Path, **settings: Any) -> LLM:
    return LLM(
        str(path), max_model_len=128, kv_cache_memory_bytes="16M", max_num_seqs=8, **settings
    )


def logprobs(llm: LLM) -> np.ndarray[Any, Any]:
    """Return the logprobs of the prompt's tokens."""
    params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    rows = zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    return np.array([row[token].logprob for row, token in rows])


@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    model = make(kind, tmp_path / "m.gguf")
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    runner = Runner(load(tmp_path / "m.gguf", max_model_len=128), 1, 128)
    found = runner.step({0: PROMPT})[0].log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


MIXED = {"attn_v": "q8_0", "ffn_down": "f16", "token_embd": "q8_0", "": "q4_0"}


def test_mixed_types(tmp_path: Path) -> None:
    """Blocks are a little off the float model, by their own bits and by 8-bit activations."""
    file = tmp_path / "m.gguf"
    make("qwen2", tmp_path / "float.gguf")
    make("qwen2", file, MIXED)
    spec = read_spec(open_checkpoint(file))
    names = {weight.name: weight.form.name for weight in spec.weights() if weight.kind == "linear"}
    assert names["layers.0.qkv_proj.weight.0"] == "gguf-q4_0"
    assert names["layers.0.qkv_proj.weight.1"] == names["lm_head.weight"] == "gguf-q8_0"
    assert names["layers.0.down_proj.weight"] == "plain"
    assert "embed.weight" not in names, "the tied table is in memory once"
    with start(tmp_path / "float.gguf", dtype="float32") as llm:
        expected = logprobs(llm)
    with start(file, dtype="float32") as llm:
        alone = logprobs(llm)
        prompts = [{"prompt_token_ids": PROMPT[i:]} for i in range(8)]
        params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0, ignore_eos=True)
        together = llm.generate(prompts, params, use_tqdm=False)[0]
        rows = zip(together.prompt_logprobs[1:], PROMPT[1:], strict=True)
        assert [row[token].logprob for row, token in rows] == list(alone)
    assert 0 < np.abs(alone - expected).max() < 0.4
    with start(file, dtype="float32", tensor_parallel_size=2) as llm:
        np.testing.assert_allclose(logprobs(llm), alone, atol=1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        *("gpt2", "chatglm", "falcon new", "internlm2", "gemma4"),
        *("gemma4 experts", "qwen3next", "deepseek2"),
    ],
)
def test_blocks_of_other_layouts(kind: str, tmp_path: Path) -> None:
    """Blocks of tensors that are transposed, fused, grouped, permuted or of all experts have the
    same order; tables of inputs of layers may have blocks."""
    found = []
    for name, types in (("float", None), ("blocks", {"": "q8_0"})):
        make(kind, tmp_path / f"{name}.gguf", types)
        runner = Runner(load(tmp_path / f"{name}.gguf", max_model_len=128), 1, 128)
        found.append(runner.step({0: PROMPT})[0].log_softmax(-1))
    assert 0 < (found[0] - found[1]).abs().mean() < 0.25


HYBRID_PARTS = ("ssm_out", "ssm_in", "shortconv", "time_mix_output", "channel_mix")


@pytest.mark.parametrize(
    "kind", ["qwen35", "qwen35 three", "lfm2", "mamba", "mamba2", "falcon-h1", "rwkv7"]
)
def test_blocks_of_hybrid_models(kind: str, tmp_path: Path) -> None:
    """A block may have inputs of several heads, whose order the converter has changed."""
    types = dict.fromkeys(HYBRID_PARTS, "q8_0")
    floats = make(kind, tmp_path / "m.gguf", types)
    with torch.no_grad():
        expected = floats(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    for dequantize in (False, True):
        checkpoint = open_checkpoint(tmp_path / "m.gguf")
        spec = read_spec(checkpoint, ModelConfig(dequantize=dequantize))
        model = load_model(spec, checkpoint, dtype="float32", ops=NativeOps())
        found = Runner(model, 1, 128).step({0: PROMPT})[0].log_softmax(-1)
        assert 0 < (found - expected).abs().mean() < 0.08


def test_layers_that_predict_several_tokens(tmp_path: Path) -> None:
    """They follow the others, and are not read."""
    make("qwen35", tmp_path / "m.gguf")
    header, data = GGUFHeader(tmp_path / "m.gguf"), (tmp_path / "m.gguf").read_bytes()
    tensors: dict[str, tuple[int, Any, bytes]] = {
        name: (0, t.shape, data[t.begin : t.begin + t.nbytes]) for name, t in header.tensors.items()
    }
    more = {name: x for name, x in tensors.items() if name.startswith("blk.1.")}
    more["blk.1.nextn.eh_proj.weight"] = (0, (64, 128), bytes(4 * 64 * 128))
    more = {name.replace("blk.1.", "blk.3."): x for name, x in more.items()}
    metadata: dict[str, Any] = {
        key: value
        for key, value in header.metadata.items()
        if key.startswith("qwen35.") and not isinstance(value, np.ndarray)
    }
    metadata |= {"general.architecture": "qwen35", "qwen35.block_count": 4} | VOCABULARY
    recurrent = [True, False, True, False]
    metadata |= {"qwen35.attention.recurrent_layers": recurrent, "qwen35.nextn_predict_layers": 1}
    write_gguf(tmp_path / "mtp.gguf", metadata, tensors | more)
    logits = [
        Runner(load(tmp_path / f"{name}.gguf", max_model_len=128), 1, 128).step({0: PROMPT})[0]
        for name in ("m", "mtp")
    ]
    assert torch.equal(*logits)
    assert read_mtp_spec(open_checkpoint(tmp_path / "mtp.gguf"), ModelConfig()) is None
    for count in (2**31, True, 0.5, "x"):
        wrong = metadata | {"qwen35.nextn_predict_layers": count}
        write_gguf(tmp_path / "m.gguf", wrong, tensors)
        with pytest.raises(ModelError, match=r"m\.gguf.*(nextn_predict_|num_hidden_)layers"):
            load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("qwen35", {"ssm.inner_size": 65}, "inner_size=65 is no multiple of ssm.time_step_rank=4"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 1]}, "head_count_kv has several numbers other"),
        (
            "jamba",
            {"attention.head_count_kv": [0, 2, 2, 0, 2]},
            "head_count_kv does not choose each n-th of 5 layers",
        ),
        ("jamba", {"block_count": 6}, "not a whole number for each of 6 layers"),
        (
            "jamba",
            {"block_count": 2**31, "attention.head_count_kv": 2},
            "block_count=2147483648 is not supported",
        ),
        ("jamba", {"ssm.inner_size": 0}, "lacks ssm.inner_size"),
        ("lfm2", {"attention.sliding_window": 8}, "attention.sliding_window is not supported"),
        (
            "mamba2",
            {"ssm.inner_size": 100},
            "inner_size=100 is no multiple of ssm.time_st",
        ),
        ("granitehybrid", {"attention.head_count_kv": [0, 2]}, "a whole number for each of 3"),
        ("nemotron_h", {"attention.head_count_kv": [0, 1, 2, 0]}, "has several numbers other"),
    ],
)
def test_rejected_hybrid_models(
    kind: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make(kind, tmp_path / "m.gguf")
    metadata = dict(GGUFHeader(tmp_path / "m.gguf").metadata)
    for key, value in change.items():
        metadata[f"{kind}.{key}"] = np.array(value) if isinstance(value, list) else value
    with pytest.raises(ModelError, match=message):
        Description(tmp_path / "m.gguf", metadata).config(128, True, {}, {})


def test_decays_that_are_not_below_0(tmp_path: Path) -> None:
    make("qwen35", tmp_path / "m.gguf")
    header, data = GGUFHeader(tmp_path / "m.gguf"), bytearray((tmp_path / "m.gguf").read_bytes())
    begin = header.tensors["blk.2.ssm_a"].begin
    data[begin : begin + 4] = struct.pack("<f", 0.5)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=r"m\.gguf: blk\.2\.ssm_a has numbers that are"):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", ["qwen35", "mamba", "rwkv7", "qwen3moe"])
def test_matrices_in_float32_do_not_choose_the_type(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path / "m.gguf", {"ffn_gate_inp": "f32", "": "f16"})
    assert GGUFFile(tmp_path / "m.gguf").dtype == "float16"


def test_constants_in_tensors(tmp_path: Path) -> None:
    """Muse Glimmer's files have norms of queries that only repeat a factor."""
    make("muse-glimmer", tmp_path / "m.gguf")
    header, data = GGUFHeader(tmp_path / "m.gguf"), (tmp_path / "m.gguf").read_bytes()
    assert GGUFFile(tmp_path / "m.gguf").config.get("qk_scale_factor") == 2.0
    for name, number in (("attn_q_norm", 2.5), ("attn_k_norm", 2.0)):
        changed = bytearray(data)
        begin = header.tensors[f"blk.3.{name}.weight"].begin + 4
        changed[begin : begin + 4] = struct.pack("<f", number)
        (tmp_path / "x.gguf").write_bytes(changed)
        with pytest.raises(ModelError, match=rf"x\.gguf: the tensors {name}.weight do not all"):
            read_spec(open_checkpoint(tmp_path / "x.gguf"))


def test_fused_projections(tmp_path: Path) -> None:
    """The converter's option --fuse-qkv writes one tensor for queries, keys and values."""
    make("llama", tmp_path / "m.gguf")
    header = GGUFHeader(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    tensors = {
        name: (0, t.shape, data[t.begin : t.begin + t.nbytes]) for name, t in header.tensors.items()
    }
    for name in [name for name in tensors if "attn_q." in name]:
        parts = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        shape = (sum(part[1][0] for part in parts), *parts[0][1][1:])
        contents = b"".join(part[2] for part in parts)
        tensors[name.replace("attn_q", "attn_qkv")] = (0, shape, contents)
    metadata = {key: value for key, value in header.metadata.items() if key.startswith("llama.")}
    write_gguf(tmp_path / "fused.gguf", LLAMA | VOCABULARY | metadata, tensors)
    logits = [
        Runner(load(tmp_path / f"{name}.gguf", max_model_len=128), 1, 128).step({0: PROMPT})[0]
        for name in ("m", "fused")
    ]
    assert torch.equal(*logits)


def nvfp4(numbers: int) -> tuple[bytes, np.ndarray[Any, Any]]:
    """Return random blocks of NVFP4, and their numbers."""
    rng = np.random.default_rng(numbers)
    scales = rng.integers(0x18, 0x38, (numbers // 64, 4), np.uint8)
    codes = rng.integers(0, 16, (numbers // 64, 4, 16), np.uint8)
    packed = codes[:, :, :8] | codes[:, :, 8:] << 4
    blocks = np.concatenate([scales, packed.reshape(-1, 32)], axis=1)
    values = torch.from_numpy(scales).view(torch.float8_e4m3fn).float().numpy()
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = np.concatenate([levels, -levels]).astype(np.float32)
    return blocks.tobytes(), levels[codes] * values[..., None]


def test_nvfp4_with_a_factor_of_the_tensor(tmp_path: Path) -> None:
    make("llama", tmp_path / "m.gguf")
    header, data = GGUFHeader(tmp_path / "m.gguf"), (tmp_path / "m.gguf").read_bytes()
    metadata = {key: value for key, value in header.metadata.items() if key.startswith("llama.")}
    floats: dict[str, tuple[int, Any, bytes]] = {
        name: (0, t.shape, data[t.begin : t.begin + t.nbytes]) for name, t in header.tensors.items()
    }
    blocks = dict(floats)
    for name, tensor in header.tensors.items():
        if tensor.shape[-1] == 64 and len(tensor.shape) == 2 and "blk." in name:
            stored, numbers = nvfp4(tensor.nbytes // 4)
            factor = np.float32(1) if "ffn_up" in name else np.float32(0.37)
            floats[name] = (0, tensor.shape, (numbers * factor).tobytes())
            blocks[name] = (40, tensor.shape, stored)
            if factor != 1:
                blocks[name.replace("weight", "scale")] = (0, (1,), factor.tobytes())
            blocks[name.replace("weight", "input_scale")] = (0, (1,), factor.tobytes())
    logits = []
    for name, tensors in (("floats", floats), ("blocks", blocks)):
        write_gguf(tmp_path / f"{name}.gguf", LLAMA | VOCABULARY | metadata, tensors)
        model = load(tmp_path / f"{name}.gguf", max_model_len=128)
        logits.append(Runner(model, 1, 128).step({0: PROMPT})[0])
    forms = {weight.form.name for weight in model.spec.weights() if weight.kind == "linear"}
    assert "gguf-nvfp4" in forms
    # Activations have 8 bits.
    assert torch.nn.functional.cosine_similarity(*logits).min() > 0.998
    blocks["blk.0.attn_q.scale"] = (0, (2,), bytes(np.ones(2, np.float32)))
    write_gguf(tmp_path / "m.gguf", LLAMA | VOCABULARY | metadata, blocks)
    with pytest.raises(ModelError, match=r"m\.gguf: blk\.0\.attn_q\.scale is not one number"):
        load(tmp_path / "m.gguf")
    blocks["blk.0.attn_q.weight"] = floats["blk.0.attn_q.weight"]
    write_gguf(tmp_path / "m.gguf", LLAMA | VOCABULARY | metadata, blocks)
    with pytest.raises(ModelError, match=r"holds 2 tensors .*: blk\.0\.attn_q\.(input_)?scale"):
        load(tmp_path / "m.gguf")


def test_blocks_that_ranks_would_divide(tmp_path: Path) -> None:
    make("llama", tmp_path / "m.gguf", {"": "q4_0"})
    with pytest.raises(OctavoError, match=r"divides the inputs of a weight at .*48.*, inside"):
        start(tmp_path / "m.gguf", tensor_parallel_size=2, tensor_parallel_mode="reduce")


def test_config_and_tokenizer(tmp_path: Path) -> None:
    make("gemma3", tmp_path / "m.gguf", MIXED)
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.dtype == "bfloat16"
    assert file.config.get("rms_norm_eps") == 1e-6
    assert file.generation_config is not None
    assert file.generation_config.get("eos_token_id") == [127]
    keys = {"temp": 0.699999988, "top_k": 20, "penalty_repeat": 1.0, "penalty_last_n": 64}
    keys = {f"general.sampling.{key}": value for key, value in keys.items()}
    sampling = Description(
        tmp_path / "m.gguf", {"general.architecture": "llama", **keys}
    ).sampling()
    assert sampling == {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.0}
    with start(tmp_path / "m.gguf") as llm:
        assert llm.get_tokenizer().encode("ab<5>") == [94, 100]
        llm.chat([{"role": "user", "content": "ab"}], SamplingParams(max_tokens=2), use_tqdm=False)


def split(path: Path, folder: Path) -> list[Path]:
    """Write the tensors of a file to two parts."""
    header = GGUFHeader(path)
    data = path.read_bytes()
    tensors = {
        name: (0, t.shape, data[t.begin : t.begin + t.nbytes]) for name, t in header.tensors.items()
    }
    names = list(tensors)
    metadata = {"general.architecture": "llama"} | VOCABULARY
    metadata |= {key: value for key, value in header.metadata.items() if key.startswith("llama.")}
    parts = []
    for index, own in enumerate((names[:5], names[5:])):
        part = folder / f"m-{index + 1:05}-of-00002.gguf"
        keys = {"split.no": index, "split.count": 2}
        write_gguf(part, (metadata | keys) if index == 0 else keys, {n: tensors[n] for n in own})
        parts.append(part)
    return parts


def test_split_files(tmp_path: Path) -> None:
    make("llama", tmp_path / "whole.gguf")
    (tmp_path / "parts").mkdir()
    first, second = split(tmp_path / "whole.gguf", tmp_path / "parts")
    with start(tmp_path / "whole.gguf") as llm:
        expected = logprobs(llm)
    with start(tmp_path / "parts") as llm:
        assert np.array_equal(logprobs(llm), expected)
    with pytest.raises(ModelError, match=r"name the first, m-00001-of-00002\.gguf"):
        start(second)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match=r"part 0 \(from 0\) of 2, and its name says 0 of 1"):
        start(alone)
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match=r"says that it is part 0 \(from 0\) of 2, and its name"):
        start(first)
    second.unlink()
    with pytest.raises(ModelError, match=r"are missing: m-00002-of-00002\.gguf"):
        start(first)


HUGE = 2**60
LLAMA = {"general.architecture": "llama"}
YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
BLOCK = (2, (2, 32), bytes(36))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read"),
        (b"GGML" + bytes(20), "is not a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "is big-endian"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "has version 1; supported: 2 and 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "the number of tensors is 1152921504606846976"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "the number of metadata entries is"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE), "the length of a metadata key is"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "k has a value of type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**22), "is damaged at k"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "k has a value of type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQQ", 3, 0, 1, 1, b"k", 9, 8, 1, HUGE), "text 0 of k ends"),
    ],
)
def test_damaged_headers(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=message):
        GGUFHeader(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"general.alignment": 7}, {}, "general.alignment=7; it must be a multiple of 8"),
        ({}, {"a": (9, (2, 256), bytes(640))}, "tensor a of type Q8_1, .* supported: FLOAT32"),
        ({}, {"a": (40, (2, 96), bytes(108))}, r"96 columns, which blocks of 64 numbers \(NVFP4"),
        (
            {},
            {"a": (16, (2, 64), bytes(132))},
            r"64 columns, which blocks of 256 numbers \(IQ2_XXS",
        ),
        ({}, {"a": (99, (2, 256), b"")}, "the tensor a of type number 99"),
        ({}, {"a": (2, (2, 33), bytes(36))}, "33 columns, which blocks of 32 numbers"),
        ({}, {"a": (2, (HUGE, HUGE, 32), b"")}, r"the tensor a \[1152921504606846976, .* bytes"),
        ({}, {"a": (0, (0,), b"")}, "is damaged: the tensor a"),
        ({}, {"a": (0, (16,), bytes(32)), "b": BLOCK}, "is damaged: a and b overlap"),
    ],
)
def test_damaged_tensors(
    metadata: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", LLAMA | metadata, tensors)
    with pytest.raises(ModelError, match=message):
        GGUFHeader(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"general.architecture": "neo-bert"},
            "architecture='neo-bert' is not supported: it is an encoder.*; supported: llama",
        ),
        ({"llama.rope.scaling.type": "own"}, "rope.scaling.type='own' is not supported"),
        ({"llama.rope.scaling.attn_factor": 1.2}, "rope.scaling.attn_factor=1.2 is not supported"),
        ({"llama.rope.scaling.attn_factor": 0.0}, "rope.scaling.attn_factor=0.0 is not supported"),
        ({"llama.rope.scaling.yarn_ext_factor": 1.0}, "yarn_ext_factor=1.0 is not supported"),
        (YARN | {"llama.rope.scaling.yarn_ext_factor": 0.0}, "yarn_ext_factor=0.0 is not"),
        (YARN | {"llama.rope.scaling.yarn_log_multiplier": 1.0}, "yarn_log_multiplier=1.0 is not"),
        ({"llama.rope.scaling.type": "longrope"}, "type=longrope does not match the tensors"),
        (
            {"llama.attention.key_length": 16, "llama.attention.value_length": 8},
            "value_length=8 differs from key_length=16",
        ),
        (
            {"general.architecture": "qwen2", "qwen2.expert_count": 8},
            "qwen2.expert_count=8 is not supported",
        ),
        ({"llama.new_key": 1}, "keys that are not supported .*: llama.new_key; use the model's"),
        ({"llama.attention.sliding_window": 8}, "attention.sliding_window is not supported"),
        ({"llama.embedding_length": "x"}, "embedding_length='x' is not a finite number"),
        ({"llama.rope.freq_base": float("nan")}, "freq_base='nan' is not a finite number"),
        ({"llama.embedding_length": 48}, "m.gguf: embedding_length=48, but .* has 32 numbers"),
        ({"llama.feed_forward_length": [32, 64]}, "feed_forward_length differs between layers"),
        ({}, "hidden_size"),
    ],
)
def test_rejected_metadata(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    sizes = {"block_count": 1, "attention.head_count": 3, "feed_forward_length": 64}
    sizes |= {"attention.layer_norm_rms_epsilon": 1e-5}
    sizes = {} if not metadata else {f"llama.{key}": value for key, value in sizes.items()}
    write_gguf(tmp_path / "m.gguf", LLAMA | sizes | metadata, {"token_embd.weight": BLOCK})
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=message):
        checkpoint.open(read_spec(checkpoint).expected)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (np.array([1, 0, 2], "<f4"), "rope_freqs.weight has factors that are not above 0"),
        (np.array([1, np.nan], "<f4"), "rope_freqs.weight has factors that are not above 0"),
        (
            np.ones((2, 2), "<f4"),
            r"rope_freqs.weight \[2, 2\] has type FLOAT32; it must be F32 and",
        ),
        (np.ones(2**17, "<f4"), "it must be F32 and one row of at most 65536"),
        (np.ones(3, "<f4"), "short_factor.* a list of 16 finite numbers"),
    ],
)
def test_rejected_factors(factors: Any, message: str, tmp_path: Path) -> None:
    fields = {"block_count": 1, "attention.head_count": 1, "feed_forward_length": 64}
    fields |= {"embedding_length": 32, "context_length": 64}
    fields |= {"attention.layer_norm_rms_epsilon": 1e-5}
    tensors = {"rope_freqs.weight": (0, factors.shape, factors.tobytes())}
    metadata = {f"llama.{key}": value for key, value in fields.items()}
    write_gguf(tmp_path / "m.gguf", LLAMA | metadata, {"token_embd.weight": BLOCK} | tensors)
    with pytest.raises(ModelError, match=message):
        read_spec(open_checkpoint(tmp_path / "m.gguf"))


def test_kernels_without_blocks(tmp_path: Path) -> None:
    make("llama", tmp_path / "m.gguf", {"": "q8_0"})
    with pytest.raises(ConfigError, match=r"m\.gguf has weights .*, which only the CPU's own"):
        start(tmp_path / "m.gguf", attention_backend="triton")


def test_description_by_another_program(tmp_path: Path) -> None:
    model = make("llama", tmp_path / "m.gguf")
    for types in (None, ["q4_0"], {"lm_head": "q9"}, {"lm_head": 3}):
        model.config.quantization_config = {"quant_method": "gguf", "types": types}
        model.save_pretrained(tmp_path / "folder")
        with pytest.raises(ModelError, match=r"types.*it must map modules to block types"):
            read_spec(open_checkpoint(tmp_path / "folder"))


def test_mutations(tmp_path: Path) -> None:
    """Random changes of the header end in a model or in an error that names the file.

    OCTAVO_MUTATIONS sets another number of files.
    """
    make("qwen2", tmp_path / "m.gguf", MIXED)
    data = (tmp_path / "m.gguf").read_bytes()
    header = min(tensor.begin for tensor in GGUFHeader(tmp_path / "m.gguf").tensors.values())
    random_numbers, file = random.Random(0), tmp_path / "x.gguf"
    named: list[bool] = []
    for _ in range(int(os.environ.get("OCTAVO_MUTATIONS", "60"))):
        changed = bytearray(data)
        for _ in range(random_numbers.choice((1, 1, 2, 8))):
            changed[random_numbers.randrange(header)] = random_numbers.randrange(256)
        if random_numbers.random() < 0.1:
            changed = changed[: random_numbers.randrange(len(changed))]
        file.write_bytes(changed)
        try:
            checkpoint = open_checkpoint(file)
            spec = read_spec(checkpoint)
            tensors = checkpoint.open(spec.expected)
            for source in spec.expected.sources:
                tensors.read(source)
            checkpoint.read_text("tokenizer.json")
        except ModelError as error:
            named.append(str(file) in str(error))
    assert named
    assert all(named)
