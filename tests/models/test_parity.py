"""Greedy tokens and logprobs of every family, equal to those of transformers in float32."""

import copy
import json
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import ModelError
from octavo.kernels.native import NativeOps
from octavo.kernels.torch_tensors import as_torch, from_torch, torch_dtype
from octavo.models.loader import load_model
from tests.models.harness import (
    Runner,
    assert_same_as_hf,
    generate,
    load,
    make_hf,
    make_prompts,
    save_and_load,
    spec_of,
)

LENGTHS = (1, 3, 17, 31, 16, 40, 5, 52)
NUM_TOKENS = 64
VOCAB = 203

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDE_HEADS = SIZES | {"head_dim": 16}
GPT2 = {"vocab_size": VOCAB, "n_positions": 128, "n_embd": 48, "n_layer": 3, "n_head": 2}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 3, "n_head": 6, "seq_length": 128}
MPT = {"vocab_size": VOCAB, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 128}
OPT = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "num_key_value_heads")}
OPT |= {"ffn_dim": 72, "num_attention_heads": 2}
FALCON = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "num_key_value_heads")}
NEOX = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"} | {"num_attention_heads": 3}

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN["original_max_position_embeddings"] = 32
QUARTER = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4}
LONGROPE |= {"short_factor": [1.0 + 0.1 * i for i in range(6)]}
LONGROPE |= {"long_factor": [2.0 + 0.5 * i for i in range(6)]}

GEMMA4 = SIZES | {"head_dim": 16, "global_head_dim": 24, "sliding_window": 9}
GEMMA4 |= {"final_logit_softcapping": 3.0}
GEMMA4_E = GEMMA4 | {"num_hidden_layers": 6, "num_kv_shared_layers": 3}
GEMMA4_E |= {"use_double_wide_mlp": True, "hidden_size_per_layer_input": 8}
GEMMA4_E |= {"layer_types": ["sliding_attention", "full_attention"] * 3}
GEMMA4_E |= {"vocab_size_per_layer_input": VOCAB}
GEMMA4_VALUES = GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_VALUES |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

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
GRANITE4 = {"num_local_experts": 0, "shared_intermediate_size": 40, "logits_scaling": 2.5}
GRANITE4 |= {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
FALCON_H1 = {"mamba_d_ssm": None, "lm_head_multiplier": 0.3, "embedding_multiplier": 2.0}
FALCON_H1 |= {"mlp_multipliers": [0.7, 0.4], "ssm_multipliers": [0.5, 0.7, 1.2, 0.6, 1.5]}
FALCON_H1 |= {"key_multiplier": 0.6, "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.3}
FALCON_H1 |= {"attention_in_multiplier": 1.1, "ssm_out_multiplier": 0.9}
NEMOTRON_H = {k: v for k, v in SIZES.items() if k != "num_hidden_layers"} | {"head_dim": 16}
NEMOTRON_H |= {"layers_block_type": ["linear_attention", "mlp", "full_attention"] * 2}
NEMOTRON_H |= {"mamba_num_heads": 4, "mamba_head_dim": 10, "n_groups": 2, "ssm_state_size": 12}

FEW = {"num_hidden_layers": 2, "num_experts": 5, "num_experts_per_tok": 2}
FEW |= {"moe_intermediate_size": 20}
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

# Heads have odd sizes; the latent is the input of an odd number of them.
LATENT = SIZES | {"num_attention_heads": 3, "num_key_value_heads": 3}
LATENT |= {"q_lora_rank": 20, "kv_lora_rank": 25}
LATENT |= {"qk_nope_head_dim": 11, "qk_rope_head_dim": 6, "v_head_dim": 13}
LATENT_MQ = LATENT | {"q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 32}
DENSE: dict[str, Any] = {"first_k_dense_replace": 3}
KIMI = LATENT | {"q_lora_rank": None, "num_experts": 6, "num_experts_per_tok": 2}
KIMI |= {"moe_intermediate_size": 20, "linear_num_heads": 2, "linear_head_dim": 16}
KIMI |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
# transformers views parts of queries and keys as complex numbers.
EVEN = DENSE | {"qk_nope_head_dim": 12, "kv_lora_rank": 26}
MSCALE = YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16.0}

HYBRIDS = ("lfm2", "qwen3.5", "kimi-linear", "mamba-odd", "mamba2-odd", "rwkv7")
MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "gemma4-moe", "nemotron-h-latent")
MIXTURES += ("laguna-elements",)
LATENTS = ("minicpm3-yarn", "deepseek-v3", "deepseek-v3-queries")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", WIDE_HEADS),
    "llama-mqa-tied-bias": (
        "LlamaForCausalLM",
        WIDE_HEADS
        | {"num_key_value_heads": 1, "tie_word_embeddings": True}
        | {"attention_bias": True, "mlp_bias": True},
    ),
    "llama-heads-of-100": ("LlamaForCausalLM", SIZES | {"head_dim": 100}),
    "llama-partial": (  # transformers does not apply it
        "LlamaForCausalLM",
        SIZES
        | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
        | {"partial_rotary_factor": 0.5},
    ),
    "llama-linear": (
        "LlamaForCausalLM",
        WIDE_HEADS | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama-llama3": ("LlamaForCausalLM", WIDE_HEADS | {"rope_parameters": LLAMA3}),
    "llama-yarn": ("LlamaForCausalLM", WIDE_HEADS | {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        "LlamaForCausalLM",
        WIDE_HEADS
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "mistral": ("MistralForCausalLM", WIDE_HEADS | {"sliding_window": 12}),
    "qwen2": ("Qwen2ForCausalLM", SIZES | {"num_attention_heads": 6, "hidden_size": 48}),
    "qwen2-windows": (
        "Qwen2ForCausalLM",
        SIZES
        | {"num_attention_heads": 6, "use_sliding_window": True}
        | {"sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", SIZES | {"head_dim": 24, "attention_bias": True}),
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
    "gemma": ("GemmaForCausalLM", SIZES | {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2ForCausalLM",
        SIZES
        | {"head_dim": 24, "sliding_window": 7, "query_pre_attn_scalar": 20}
        | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "vaultgemma": (
        "VaultGemmaForCausalLM",
        SIZES
        | {"head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 20}
        | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        SIZES
        | {"head_dim": 16, "sliding_window": 10, "query_pre_attn_scalar": 30}
        | {"sliding_window_pattern": 2}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        WIDE_HEADS
        | {"num_hidden_layers": 5, "num_kv_shared_layers": 2, "sliding_window": 9}
        | {"intermediate_size": [72, 72, 56, 72, 72], "laurel_rank": 8, "altup_active_idx": 1}
        | {"activation_sparsity_pattern": [0.7, 0.9, 0.0, 0.0, 0.5], "altup_num_inputs": 3}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 190}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]},
    ),
    "gemma4": ("Gemma4ForCausalLM", GEMMA4_E),
    "gemma4-values-are-keys": (
        "Gemma4ForCausalLM",
        GEMMA4_VALUES | {"hidden_size_per_layer_input": 0, "tie_word_embeddings": False},
    ),
    "gemma4-unified": ("Gemma4UnifiedForCausalLM", GEMMA4_VALUES),
    "phi3": (
        "Phi3ForCausalLM",
        SIZES
        | {"num_attention_heads": 3, "num_key_value_heads": 1, "sliding_window": 20}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "phi3-partial": (
        "Phi3ForCausalLM",
        SIZES
        | {"num_attention_heads": 3, "num_key_value_heads": 3}
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "qwen1.5": (
        "Qwen2ForCausalLM",
        SIZES
        | {"num_key_value_heads": 4, "use_sliding_window": False}
        | {"sliding_window": 9, "max_window_layers": 1},
    ),
    "ministral": (
        "MinistralForCausalLM",
        WIDE_HEADS
        | {"sliding_window": 9}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        WIDE_HEADS | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}},
    ),
    "internlm3": (  # compared with Llama
        "InternLM3ForCausalLM",
        WIDE_HEADS | {"attention_bias": True, "mlp_bias": True, "qkv_bias": True, "bias": True},
    ),
    "glm": ("GlmForCausalLM", WIDE_HEADS),
    "glm4": ("Glm4ForCausalLM", WIDE_HEADS | {"attention_bias": False}),
    "olmo2": ("Olmo2ForCausalLM", SIZES | {"attention_bias": True}),
    "olmo3": (
        "Olmo3ForCausalLM",
        SIZES
        | {"sliding_window": 9, "num_hidden_layers": 4}
        | {
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "exaone4": (
        "Exaone4ForCausalLM",
        SIZES | {"sliding_window": 9, "sliding_window_pattern": 2},
    ),
    "exaone4-full": (
        "Exaone4ForCausalLM",
        SIZES
        | {"sliding_window": None, "layer_types": ["full_attention"] * 3}
        | {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", WIDE_HEADS),
    "hunyuan-alpha": (
        "HunYuanDenseV1ForCausalLM",
        WIDE_HEADS
        | {"attention_bias": True}
        | {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0}
            | {"alpha": 50.0}
        },
    ),
    "seed-oss": ("SeedOssForCausalLM", WIDE_HEADS | {"attention_out_bias": True}),
    "seed-oss-bias": (
        "SeedOssForCausalLM",
        WIDE_HEADS | {"attention_bias": False, "mlp_bias": True},
    ),
    "ernie": ("Ernie4_5ForCausalLM", WIDE_HEADS),
    "ernie-bias": (
        "Ernie4_5ForCausalLM",
        WIDE_HEADS | {"use_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1},
    ),
    "granite": (
        "GraniteForCausalLM",
        SIZES
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4}
        | {"attention_multiplier": 0.2, "logits_scaling": 2.5},
    ),
    "smollm3": ("SmolLM3ForCausalLM", SIZES | {"no_rope_layer_interval": 2}),
    "smollm3-windows": (
        "SmolLM3ForCausalLM",
        SIZES
        | {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 9}
        | {"attention_bias": True, "tie_word_embeddings": False},
    ),
    "starcoder2": ("Starcoder2ForCausalLM", SIZES | {"sliding_window": 14}),
    "starcoder2-no-bias": (
        "Starcoder2ForCausalLM",
        SIZES | {"use_bias": False, "tie_word_embeddings": False},
    ),
    "phi": ("PhiForCausalLM", SIZES | {"num_key_value_heads": None}),
    "gpt-neox": ("GPTNeoXForCausalLM", NEOX),
    "gpt-neox-sequential": (
        "GPTNeoXForCausalLM",
        NEOX
        | {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 2e4, "factor": 2.0}}
        | {"rotary_pct": 0.5},
    ),
    "gptj": ("GPTJForCausalLM", GPT2 | {"rotary_dim": 6, "n_inner": 72, "n_head": 4}),
    "codegen": ("CodeGenForCausalLM", GPT2 | {"rotary_dim": 4, "n_inner": 72, "n_head": 8}),
    "stablelm": (
        "StableLmForCausalLM",
        SIZES | {"hidden_size": 64, "use_qkv_bias": True, "rope_parameters": QUARTER},
    ),
    "stablelm-parallel": (
        "StableLmForCausalLM",
        SIZES
        | {"hidden_size": 64, "qk_layernorm": True, "use_parallel_residual": True}
        | {"rope_parameters": QUARTER | {"rope_theta": 500.0}},
    ),
    "arcee": ("ArceeForCausalLM", WIDE_HEADS | {"rope_parameters": YARN}),
    "arcee-bias": ("ArceeForCausalLM", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "nemotron": ("NemotronForCausalLM", WIDE_HEADS | {"rope_parameters": QUARTER}),
    "nemotron-bias": (
        "NemotronForCausalLM",
        WIDE_HEADS | {"attention_bias": True, "mlp_bias": True},
    ),
    "olmo": ("OlmoForCausalLM", SIZES | {"clip_qkv": 1.5}),
    "olmo-bias": ("OlmoForCausalLM", SIZES | {"attention_bias": True, "tie_word_embeddings": True}),
    "apertus": ("ApertusForCausalLM", SIZES | {"rope_parameters": LLAMA3}),
    "apertus-bias": ("ApertusForCausalLM", SIZES | {"attention_bias": True}),
    "granite-swa": (
        "GraniteSWAForCausalLM",
        SIZES
        | {"attention_multiplier": 0.2, "sliding_window": 9, "num_hidden_layers": 4}
        | {"layer_rope_theta": [0, 1e4, 500.0, 1e4]},
    ),
    "granite-swa-full": (
        "GraniteSWAForCausalLM",
        SIZES
        | {"attention_multiplier": 0.2, "layer_types": ["full_attention"] * 3}
        | {"tie_word_embeddings": False},
    ),
    "bitnet": ("BitNetForCausalLM", SIZES),
    "bitnet-bias": ("BitNetForCausalLM", SIZES | {"attention_bias": True}),
    "exaone": (  # compared with Llama
        "ExaoneForCausalLM",
        WIDE_HEADS
        | {"num_layers": 3, "layer_norm_epsilon": 1e-6, "activation_function": "silu"}
        | {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    ),
    "jais2": ("Jais2ForCausalLM", WIDE_HEADS),
    "helium": ("HeliumForCausalLM", SIZES | {"head_dim": 12, "attention_bias": True}),
    "cwm": (
        "CwmForCausalLM",
        WIDE_HEADS | {"sliding_window": 9, "num_hidden_layers": 4, "rope_parameters": LLAMA3},
    ),
    "minicpm": (  # compared with Granite
        "MiniCPMForCausalLM",
        WIDE_HEADS
        | {"scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 20}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 1.4 / 3**0.5}
        | {"attention_multiplier": 0.25, "logits_scaling": 2.4, "tie_word_embeddings": False},
    ),
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
    "internlm2": ("InternLM2ForCausalLM", SIZES | {"bias": False}),  # compared with Llama
    "internlm2-tied": (
        "InternLM2ForCausalLM",
        WIDE_HEADS | {"bias": True, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "falcon-7b": ("FalconForCausalLM", FALCON),
    "falcon-40b": (
        "FalconForCausalLM",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "falcon-11b": (
        "FalconForCausalLM",
        FALCON
        | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}
        | {"tie_word_embeddings": False},
    ),
    "falcon-sequential": (
        "FalconForCausalLM",
        FALCON | {"multi_query": False, "parallel_attn": False},
    ),
    "falcon-rw": (  # transformers rounds the bias, but not that of four heads over 256 positions
        "FalconForCausalLM",
        FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "cohere": ("CohereForCausalLM", SIZES | {"logit_scale": 0.5}),
    "cohere-qk-norm": ("CohereForCausalLM", SIZES | {"logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2": (
        "Cohere2ForCausalLM",
        SIZES | {"logit_scale": 0.5, "sliding_window": 9, "sliding_window_pattern": 2},
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
    "opt": ("OPTForCausalLM", OPT),
    "opt-350m": (
        "OPTForCausalLM",
        OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    ),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2-odd-heads": ("GPT2LMHeadModel", GPT2 | {"n_embd": 45, "n_head": 3}),
    "gpt2-untied-scaled": (
        "GPT2LMHeadModel",
        GPT2 | {"tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", GPT2 | {"n_head": 4, "n_inner": 72}),
    "gpt-bigcode-heads": (
        "GPTBigCodeForCausalLM",
        GPT2 | {"n_head": 4, "multi_query": False, "tie_word_embeddings": False},
    ),
    "bloom": ("BloomForCausalLM", BLOOM),
    "mpt": ("MptForCausalLM", MPT),
    "mpt-clip": (
        "MptForCausalLM",
        MPT | {"attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.25}},
    ),
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
TOWER: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
TOWER |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN_TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
}
QWEN_TOWER |= {"out_hidden_size": 48}
MUSE_TOWER: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
MUSE_TOWER |= {"num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4}
MUSE = WIDE_HEADS | {"num_hidden_layers": 6, "sliding_window": 9, "post_norm_eps": 0.01}
MUSE |= {"qk_scale_factor": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 9.0}


def _with_tower(text: dict[str, Any], tower: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"text_config": text, "vision_config": tower, **more}


TEXT_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3-vision": (
        "Gemma3ForConditionalGeneration",
        _with_tower(WIDE_HEADS | {"sliding_window": 10, "_sliding_window_pattern": 2}, TOWER),
    ),
    "gemma4-vision": (
        "Gemma4ForConditionalGeneration",
        _with_tower(GEMMA4_E, TOWER | {"num_key_value_heads": 2, "head_dim": 8}),
    ),
    "gemma4-unified-vision": (
        "Gemma4UnifiedForConditionalGeneration",
        _with_tower(GEMMA4_VALUES, {"mm_embed_dim": 16, "mm_posemb_size": 4, "patch_size": 2}),
    ),
    "mistral-small3": (
        "Mistral3ForConditionalGeneration",
        _with_tower(
            WIDE_HEADS | {"model_type": "mistral", "sliding_window": None},
            TOWER | {"model_type": "pixtral"},
            tie_word_embeddings=False,
        ),
    ),
    "ministral3-vision": (
        "Mistral3ForConditionalGeneration",
        _with_tower(
            WIDE_HEADS
            | {"model_type": "ministral3", "tie_word_embeddings": True}
            | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}},
            TOWER | {"model_type": "pixtral"},
        ),
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLForConditionalGeneration",
        _with_tower(
            SIZES
            | {"rope_scaling": {"type": "mrope", "rope_theta": 1e5, "mrope_section": [2, 2, 2]}},
            QWEN_TOWER | {"fullatt_block_indexes": [0]},
        ),
    ),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        _with_tower(
            WIDE_HEADS
            | {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}
                | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
            },
            QWEN_TOWER | {"deepstack_visual_indexes": [0]},
            tie_word_embeddings=True,
        ),
    ),
    "qwen3.5-vision": (
        "Qwen3_5ForConditionalGeneration",
        _with_tower(
            QWEN3_5 | {"tie_word_embeddings": True},
            QWEN_TOWER | {"num_position_embeddings": 16},
            tie_word_embeddings=True,
        ),
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        _with_tower(
            WIDE_HEADS | {"model_type": "llama"}, TOWER | {"model_type": "clip_vision_model"}
        ),
    ),
    "muse-glimmer": (
        "MuseGlimmerForConditionalGeneration",
        _with_tower(MUSE, MUSE_TOWER, projector_hidden_size=16, out_hidden_size=64),
    ),
}
"""Models of which only the text part is computed."""
CLIP: dict[str, Any] = TOWER | {"model_type": "clip_vision_model"}
SIGLIP: dict[str, Any] = TOWER | {"model_type": "siglip_vision_model"}
LLAMA_TEXT = WIDE_HEADS | {"model_type": "llama"}
QWEN_TEXT = SIZES | {"model_type": "qwen2"}
AYA_TEXT = SIZES | {"model_type": "cohere2", "sliding_window": 9, "sliding_window_pattern": 2}
AYA_TEXT["logit_scale"] = 1.0  # transformers leaves it out of models with pictures
AUDIO: dict[str, Any] = {"num_mel_bins": 8, "max_source_positions": 16}
SAM: dict[str, Any] = {"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 1}
SAM |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 16, "mlp_dim": 16}
SAM |= {"global_attn_indexes": [0], "window_size": 2}
WRAPPERS: dict[str, dict[str, Any]] = {
    "AyaVision": _with_tower(AYA_TEXT, SIGLIP),
    "Cohere2Vision": _with_tower(AYA_TEXT, SIGLIP),
    "Glm4v": _with_tower(
        SIZES
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 1],
            }
        }
        | {"partial_rotary_factor": 0.5},
        QWEN_TOWER | {"image_size": 28, "patch_size": 14},
    ),
    "DeepseekVL": _with_tower(LLAMA_TEXT, SIGLIP),
    "Exaone4_5_": _with_tower(
        SIZES | {"model_type": "exaone4", "sliding_window": 9, "sliding_window_pattern": 2},
        QWEN_TOWER,
    ),
    "GraniteSpeech": {
        "text_config": SIZES | {"model_type": "granite"},
        "encoder_config": {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "input_dim": 8}
        | {"output_dim": 8},
        "projector_config": {"model_type": "blip_2_qformer", "hidden_size": 16}
        | {"num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
        | {"encoder_hidden_size": 16},
    },
    "Mistral3": _with_tower(
        LATENT
        | {"model_type": "mistral4", "n_routed_experts": 6, "moe_intermediate_size": 20}
        | {"qk_rope_head_dim": 12, "tie_word_embeddings": False},
        TOWER | {"model_type": "pixtral"},
        tie_word_embeddings=False,
    ),
    "Qwen3_5Moe": _with_tower(
        QWEN3_5 | FEW | {"num_hidden_layers": 3, "shared_expert_intermediate_size": 24},
        QWEN_TOWER | {"num_position_embeddings": 16},
    ),
    "Qwen3VLMoe": _with_tower(
        WIDE_HEADS
        | FEW
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}
            | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
        },
        QWEN_TOWER | {"deepstack_visual_indexes": [0]},
    ),
    "LlavaNextVideo": _with_tower(LLAMA_TEXT, CLIP),
    "Ovis2": _with_tower(QWEN_TEXT, TOWER | {"vocab_size": 32}, hidden_size=48),
    "VideoLlama3": _with_tower(QWEN_TEXT, TOWER),
    "VideoLlava": _with_tower(LLAMA_TEXT, CLIP),
    "GotOcr2": _with_tower(QWEN_TEXT, SAM),
    "Idefics2": _with_tower(WIDE_HEADS | {"model_type": "mistral"}, TOWER),
    "Idefics3": _with_tower(LLAMA_TEXT, TOWER),
    "InternVL": _with_tower(
        QWEN_TEXT,
        TOWER | {"image_size": [28, 28], "patch_size": [14, 14]},
        tie_word_embeddings=True,
    ),
    "LightOnOcr": _with_tower(SIZES | {"model_type": "qwen3"}, TOWER | {"model_type": "pixtral"}),
    "LlavaNext": _with_tower(LLAMA_TEXT, CLIP),
    "LlavaOnevision": _with_tower(QWEN_TEXT, SIGLIP),
    "PaddleOCRVL": _with_tower(
        WIDE_HEADS
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}
            | {"mrope_section": [2, 3, 3]}
        },
        TOWER | {"image_size": 28, "spatial_merge_size": 1},
    ),
    "Qwen3ASR": {
        "text_config": WIDE_HEADS | {"model_type": "qwen3", "tie_word_embeddings": True},
        "audio_config": AUDIO
        | {"model_type": "qwen3_asr_encoder", "d_model": 16, "encoder_layers": 1}
        | {"encoder_attention_heads": 2, "encoder_ffn_dim": 16, "output_dim": 48}
        | {"downsample_hidden_size": 8},
    },
    "Qwen2Audio": {
        "text_config": QWEN_TEXT,
        "audio_config": AUDIO
        | {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2}
        | {"encoder_ffn_dim": 16},
    },
    "Qwen2VL": _with_tower(
        SIZES | {"rope_scaling": {"type": "mrope", "rope_theta": 1e5, "mrope_section": [2, 2, 2]}},
        {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 48, "mlp_ratio": 1},
    ),
    "SmolVLM": _with_tower(LLAMA_TEXT | {"tie_word_embeddings": True}, TOWER),
    "VipLlava": _with_tower(LLAMA_TEXT, CLIP),
    "Voxtral": {"text_config": LLAMA_TEXT, "audio_config": TOWER | AUDIO},
}
WRAPPERS["Glm46V"] = WRAPPERS["Glm4v"]
"""Models whose text part is a family with cases above; less is tested of them."""
ENLARGING = ("qwen3.5", "qwen3.5-moe", "qwen3-next", "qwen3-next-moe", "kimi-linear")
ENLARGING += ("nemotron", "nemotron-bias", "gemma4", "rwkv7-odd")
ENLARGING += ("olmo-hybrid-rope", "Qwen3_5Moe")
"""Cases that enlarge the errors of float32, see `make_hf`."""


@pytest.mark.parametrize("name", WRAPPERS)
def test_text_part_of_another_family(name: str, tmp_path: Path) -> None:
    factor = 0.6 if name in ENLARGING else 1.0
    hf_model = make_hf(f"{name}ForConditionalGeneration", factor=factor, **WRAPPERS[name])
    model = save_and_load(hf_model, tmp_path)
    assert model.spec.left_out == "pictures and sound"
    prompts = make_prompts(VOCAB, (20, 3))
    assert_same_as_hf(hf_model, prompts, generate(model, prompts, 5))


@pytest.mark.parametrize("case", [*CASES, *TEXT_PARTS])
def test_parity(case: str, tmp_path: Path) -> None:
    architecture, config = (CASES | TEXT_PARTS)[case]
    factor = 0.6 if case in ENLARGING else 1.0
    hf_model = make_hf(architecture, factor=factor, **config)
    model = save_and_load(hf_model, tmp_path)
    prompts = make_prompts(VOCAB, LENGTHS)
    with torch.inference_mode():  # users make prompt_embeds so
        embeds = hf_model.get_input_embeddings()(torch.tensor(prompts[-1]))
    # transformers takes prompt embeddings of Granite before the factor, of Falcon-H1 after it. So
    # does Octavo; and MiniCPM, compared with Granite, takes them after it.
    if case in ("minicpm", "falcon-h1", "falcon-h1-norm"):
        embeds = embeds * hf_model.config.embedding_multiplier
    found = model.embed_input_ids(from_torch(torch.tensor(prompts[-1])))
    if case == "muse-glimmer":  # its norm is rounded otherwise
        torch.testing.assert_close(as_torch(found), embeds)
    else:
        assert torch.equal(as_torch(found), embeds)
    generated = generate(model, prompts, NUM_TOKENS)
    assert_same_as_hf(hf_model, prompts, generated)
    # Greedy tokens that always repeat would prove little.
    assert len({token for tokens in generated.tokens for token in tokens}) > 10
    # The plain torch backend is slow, so it computes fewer tokens, and the prompts in chunks.
    reference = generate(model, prompts, 5, "reference", chunk=23)
    assert_same_as_hf(hf_model, prompts, reference)


@pytest.mark.parametrize("case", ["llama", "gemma2", "gemma4", "opt-350m", "granite", "falcon-40b"])
def test_hidden_states_behind_layers(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    hf_model = make_hf(architecture, **config)
    (prompt,) = make_prompts(VOCAB, (30,))
    with torch.inference_mode():
        expected = hf_model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    runner = Runner(save_and_load(hf_model, tmp_path), 1, 30)
    runner.kept_layers = (0, 1)
    runner.step({0: prompt})
    assert set(runner.kept) == {0, 1}
    for layer, hidden in runner.kept.items():
        torch.testing.assert_close(as_torch(hidden), expected[layer + 1][0], atol=1e-3, rtol=1e-4)


# The types take turns: the tests of the kernels have all of them.
IN_CHUNKS = ("llama", "gemma2", "gemma3n", "gemma4", "bloom", "olmo2", "cohere2", "falcon-40b")
IN_CHUNKS += ("mimo-v2", "laguna", "llama4-chunks", *HYBRIDS, *LATENTS)


@pytest.mark.parametrize(
    ("case", "dtype"), [*zip(IN_CHUNKS, cycle(("float32", "bfloat16")), strict=False)]
)
def test_chunked_prefill_changes_no_bit(case: str, dtype: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    model = save_and_load(make_hf(architecture, **config), tmp_path, dtype)
    prompts = make_prompts(VOCAB, LENGTHS)
    whole = generate(model, prompts, 12)
    for chunk in (1, 7, 16):
        chunked = generate(model, prompts, 12, chunk=chunk)
        assert chunked.tokens == whole.tokens
        for a, b in zip(chunked.logits, whole.logits, strict=True):
            assert torch.equal(a, b)
    alone = generate(model, prompts[3:4], 12, block_size=8)
    assert torch.equal(alone.logits[0], whole.logits[3])


@pytest.mark.parametrize(
    "case",
    [
        "qwen2",
        "gemma3",
        "gemma3n",
        "gemma4",
        "opt",
        "olmo2",
        "granite",
        "cohere",
        "qwen3.5",
        "deepseek-v3",
    ],
)
def test_low_precision_is_near_float32(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    hf_model = make_hf(architecture, **config)
    hf_model.save_pretrained(tmp_path)
    prompts = make_prompts(VOCAB, (9, 30))
    ids = torch.tensor(prompts[0])
    exact = generate(load(tmp_path), prompts, 1).logits
    for dtype in ("bfloat16", "float16"):
        model = load(tmp_path, dtype)
        assert model.dtype == dtype
        embed = copy.deepcopy(hf_model).to(torch_dtype(dtype)).get_input_embeddings()
        assert torch.equal(as_torch(model.embed_input_ids(from_torch(ids))), embed(ids))
        for a, b in zip(generate(model, prompts, 1).logits, exact, strict=True):
            assert a.dtype == torch.float32
            assert torch.nn.functional.cosine_similarity(a, b, dim=-1).min() > 0.98


def test_mpt_with_what_transformers_leaves_out(tmp_path: Path) -> None:
    """It reads expansion_ratio and alibi_bias_max, but computes with 4 and 8."""
    fields = {"expansion_ratio": 2, "attn_config": {"alibi_bias_max": 5}}
    hf_model = make_hf("MptForCausalLM", **MPT | fields)
    decoder, inner = hf_model.transformer, 2 * MPT["d_model"]
    for block in decoder.blocks:
        for linear, name in ((block.ffn.up_proj, "out"), (block.ffn.down_proj, "in")):
            weight = linear.weight.data
            linear.weight.data = weight[:inner] if name == "out" else weight[:, :inner].contiguous()
    decoder.build_mpt_alibi_tensor = partial(decoder.build_mpt_alibi_tensor, alibi_bias_max=5)
    prompts = make_prompts(VOCAB, LENGTHS)
    generated = generate(save_and_load(hf_model, tmp_path), prompts, NUM_TOKENS)
    assert_same_as_hf(hf_model, prompts, generated)


def test_late_gate_of_falcon_h1(tmp_path: Path) -> None:
    """The gate follows the norm."""
    config = SIZES | HYBRID | FALCON_H1 | {"mamba_rms_norm": True, "mamba_proj_bias": True}
    hf_model = make_hf("FalconH1ForCausalLM", **config)
    model = save_and_load(hf_model, tmp_path)
    prompts = make_prompts(VOCAB, (1, 20))
    assert_same_as_hf(hf_model, prompts, generate(model, prompts, 20))


def test_dynamic_ntk(tmp_path: Path) -> None:
    """Within the original context, and beyond it token by token as transformers generates."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = WIDE_HEADS | {"max_position_embeddings": 24, "rope_parameters": rope}
    hf_model = make_hf("LlamaForCausalLM", **config)
    model = save_and_load(hf_model, tmp_path)
    assert model.spec.max_model_len == 96
    prompts = make_prompts(VOCAB, (3, 11, 24))
    assert_same_as_hf(hf_model, prompts[:2], generate(model, prompts[:2], 13))
    prompts, num_tokens = prompts[1:], 32
    generated = generate(model, prompts, num_tokens)
    for prompt, tokens, logits in zip(prompts, generated.tokens, generated.logits, strict=True):
        # A fresh copy: transformers keeps the base of the longest sequence seen.
        out = copy.deepcopy(hf_model).generate(
            torch.tensor([prompt]),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert out.sequences[0, len(prompt) :].tolist() == tokens
        torch.testing.assert_close(
            torch.log_softmax(logits, -1),
            torch.cat(out.logits).log_softmax(-1),
            atol=1e-4,
            rtol=0,
        )


@pytest.mark.parametrize("part", [1.0, 0.75])
def test_longrope(part: float, tmp_path: Path) -> None:
    """The short factors up to the original context, the long ones where the table is longer."""
    config = SIZES | {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48}
    config |= {"original_max_position_embeddings": 32, "pad_token_id": 0}
    pairs = int(8 * part)
    rope = LONGROPE | {"short_factor": [1 + 0.1 * i for i in range(pairs)]}
    rope |= {"long_factor": [2 + 0.5 * i for i in range(pairs)], "partial_rotary_factor": part}
    hf_model = make_hf("Phi3ForCausalLM", **config, rope_parameters=rope)
    long = save_and_load(hf_model, tmp_path)
    assert long.spec.max_model_len == 128
    prompts = make_prompts(VOCAB, (33, 40, 64))
    assert_same_as_hf(hf_model, prompts, generate(long, prompts, NUM_TOKENS))
    short = load(tmp_path, max_model_len=32)
    prompts = make_prompts(VOCAB, (3, 12))
    assert_same_as_hf(hf_model, prompts, generate(short, prompts, 20))


def old_form(folder: Path) -> None:
    """Rewrite config.json as transformers 4 wrote it."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["torch_dtype"] = config.pop("dtype")
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] == "default":
        rope = None
    else:
        rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope
    config.pop("layer_types", None)
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("case", ["llama", "llama-llama3", "llama-yarn", "gemma3", "gemma2"])
def test_old_and_new_config_read_alike(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    make_hf(architecture, **config).save_pretrained(tmp_path)
    new = spec_of(tmp_path)
    old_form(tmp_path)
    if case == "gemma3":
        data = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(data | {"sliding_window_pattern": 2}))
    assert spec_of(tmp_path) == new


@pytest.mark.parametrize("kind", ["gemma", "gemma2"])
def test_paligemma(kind: str, tmp_path: Path) -> None:
    """Without types of tokens, transformers computes causal attention, too."""
    text = CASES[kind][1] | {"model_type": kind, "tie_word_embeddings": True}
    config = _with_tower(text, SIGLIP, projection_dim=48, hidden_size=48)
    hf_model = make_hf("PaliGemmaForConditionalGeneration", **config)
    model = save_and_load(hf_model, tmp_path)
    assert "later tokens" in model.spec.left_out
    prompts = make_prompts(VOCAB, (20, 3))
    assert_same_as_hf(hf_model, prompts, generate(model, prompts, 5))


@pytest.mark.parametrize("tied", [False, True])
def test_internvl_chat(tied: bool, tmp_path: Path) -> None:
    """Its code is no part of transformers: a text model in its form."""
    hf_model = make_hf("Qwen2ForCausalLM", **SIZES, tie_word_embeddings=tied)
    hf_model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state = {f"language_model.{name}": tensor for name, tensor in state.items()}
    state |= {f"{name}.weight": torch.ones(2) for name in ("vision_model.encoder.x", "mlp1.0")}
    save_file(state, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["InternVLChatModel"], "llm_config": text, "dtype": "float32"}
    outer |= {"model_type": "internvl_chat", "auto_map": {"AutoModel": "x.Y"}}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"tie_word_embeddings": False}))
    with pytest.raises(ModelError, match="trust_remote_code"):
        spec_of(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    spec = spec_of(tmp_path, trust_remote_code=True)
    assert spec.left_out == "pictures and sound"
    model = load_model(spec, checkpoint, dtype="float32", ops=NativeOps())
    prompts = make_prompts(VOCAB, (20, 3))
    assert_same_as_hf(hf_model, prompts, generate(model, prompts, 5))
    text["model_type"] = "qwen2_moe"
    (tmp_path / "config.json").write_text(json.dumps(outer | {"llm_config": text}))
    with pytest.raises(ModelError, match=r"llm_config: model_type='qwen2_moe'.*supported: llama"):
        spec_of(tmp_path, trust_remote_code=True)


def test_llama4_with_a_tower(tmp_path: Path) -> None:
    """The whole model of transformers fails without pictures: its text model is compared."""
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower |= {"intermediate_size": 64, "vision_output_dim": 16, "projector_input_dim": 16}
    tower |= {"projector_output_dim": 16, "image_size": 28, "patch_size": 14}
    hf_model = make_hf("Llama4ForConditionalGeneration", **_with_tower(LLAMA4, tower))
    model = save_and_load(hf_model, tmp_path)
    assert model.spec.left_out == "pictures and sound"
    prompts = make_prompts(VOCAB, (20, 3))
    assert_same_as_hf(hf_model.language_model, prompts, generate(model, prompts, 5))


def test_kimi_k25(tmp_path: Path) -> None:
    """transformers renames its layers when it saves a model; published ones keep their names."""
    text = LATENT | {"first_k_dense_replace": 1, "n_routed_experts": 6, "num_experts_per_tok": 2}
    text |= {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 20}
    config = _with_tower(text, MUSE_TOWER, projection_hidden_size=16, tie_word_embeddings=False)
    hf_model = make_hf("Kimi_K25ForConditionalGeneration", **config)
    hf_model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state = {name.replace("model.blocks", "model.layers"): state[name] for name in state}
    save_file(state, tmp_path / "model.safetensors")
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["architectures"] = ["KimiK25ForConditionalGeneration"]
    fields["text_config"]["model_type"] = "kimi_k2"
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = load(tmp_path)
    assert model.spec.left_out == "pictures and sound"
    prompts = make_prompts(VOCAB, (20, 3))
    assert_same_as_hf(hf_model, prompts, generate(model, prompts, 5))


def test_gemma3n_with_towers(tmp_path: Path) -> None:
    """transformers makes its tower of pictures with another package: the text model in its form."""
    architecture, config = CASES["gemma3n"]
    hf_model = make_hf(architecture, **config)
    hf_model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state = {f"model.language_{name}": tensor for name, tensor in state.items()}
    state |= {f"model.{name}.weight": torch.ones(2) for name in ("vision_tower.x", "embed_audio.y")}
    save_file(state, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"dtype": "float32"}))
    model = load(tmp_path)
    assert model.spec.left_out == "pictures and sound"
    prompts = make_prompts(VOCAB, (9, 30))
    assert_same_as_hf(hf_model, prompts, generate(model, prompts, 8))


@pytest.mark.parametrize("name", ["stories260K", "babyllama"])
def test_real_llama(name: str, shared_data: Path) -> None:
    folder = shared_data / "models" / name
    expected = json.loads((folder / "expected_greedy.json").read_text())
    model = load(folder)
    prompt, tokens = expected["prompt_ids"], expected["greedy_ids"]
    assert generate(model, [prompt, prompt[:3]], len(tokens)).tokens[0] == tokens


def test_real_gpt2(shared_data: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = shared_data / "models" / "capp-gpt2"
    hf_model = transformers.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager")
    prompts = make_prompts(53, LENGTHS)
    assert_same_as_hf(hf_model.eval(), prompts, generate(load(folder), prompts, NUM_TOKENS))


def test_dummy_weights_run(shared_data: Path) -> None:
    folder = shared_data / "models" / "stories260K"
    spec = spec_of(folder)
    models = [
        load_model(
            spec,
            open_checkpoint(Path("nowhere"), "dummy", seed),
            dtype="float32",
            ops=NativeOps(),
        )
        for seed in (1, 1, 2)
    ]
    prompts = make_prompts(spec.vocab_size, (4, 9))
    first, again, other = [generate(model, prompts, 3) for model in models]
    assert torch.equal(first.logits[0], again.logits[0])
    assert not torch.equal(first.logits[0], other.logits[0])
