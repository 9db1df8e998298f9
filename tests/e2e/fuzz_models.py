"""Random legal models and settings: each starts and answers; some are compared with transformers.

    python -m tests.e2e.fuzz_models --count 2000

A model is made of one number, which failures name: `--first N --count 1` repeats it. No assertion
may fail, and every rejection must be an `OctavoError`.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import random
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from octavo import LLM, SamplingParams
from octavo.errors import OctavoError
from octavo.pooling_params import PoolingParams
from tests.models.harness import make_hf, save_config

COMPARED = 4
"""One of this number of models is compared with transformers, or with the plain torch backend."""
_SIZES = (8, 64, 97, 160, 256, 331, 458, 768, 1280)
_GEMMA = ("Gemma", "Gemma2", "Gemma3", "VaultGemma")
_BIAS = ("Llama", "Qwen3", *_GEMMA, "Glm", "Glm4", "Olmo2", "Granite", "SmolLM3")
_BIAS = (*_BIAS, "Cohere", "Cohere2", "Olmo3", "SeedOss", "HunYuanDenseV1")
_BIAS = (*_BIAS, "Arcee", "Nemotron", "Olmo", "Apertus", "GraniteSWA", "BitNet")
"""Families whose attention may have a bias."""
_ROPE = (*_BIAS, "Mistral", "Ministral", "Ministral3", "Qwen2", "Phi3", "Phi", "Starcoder2")
_ROPE = (*_ROPE, "InternLM3", "Exaone4", "Ernie4_5", "StableLm")
_DELTA = ("Qwen3_5", "Qwen3Next", "OlmoHybrid")
"""Families with linear attention."""
_ROPE = (*_ROPE, *_DELTA)
_PLAIN = ("OPT", "Bloom", "Mpt", "Falcon", "GPTNeoX", "GPTJ", "CodeGen", "GPTBigCode")
_STATES = ("Lfm2", "Mamba2", "Bamba", "GraniteMoeHybrid", "FalconH1", "NemotronH", "RWKV7")
_STATES = (*_STATES, "Mamba", "FalconMamba", "Jamba")
"""Families with recurrent states."""
STATEFUL = (*_DELTA, *_STATES, "KimiLinear")
_MIXED = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GptOss", "GraniteMoe", "GraniteMoeShared")
_MIXED = (*_MIXED, "Glm4Moe", "SolarOpen", "Dots1", "MiniMaxM2", "Ernie4_5_Moe", "HunYuanMoEV1")
_MIXED = (*_MIXED, "ExaoneMoe", "Llama4", "Afmoe", "HYV3", "Cohere2Moe")
"""Families with mixtures of experts."""
_ROPE = (*_ROPE, *_MIXED)
_LATENT = ("MiniCPM3", "DeepseekV2", "DeepseekV3", "Mistral4", "KimiLinear")
"""Families with latent attention."""
_NAMES = {"GPT2": "GPT2LMHeadModel"}
_NAMES |= {name: f"{name}ForCausalLM" for name in (*_ROPE, *_PLAIN, *_STATES, *_LATENT)}
# Families with heads that transformers fits into the hidden size, or that may have any size.
_FITTED = ("Phi3", "Phi", "Olmo2", "Granite", "SmolLM3", "Starcoder2", "Cohere", "Cohere2")
_FITTED = (*_FITTED, "Olmo3", "Exaone4", "Olmo", "StableLm", "Apertus", "GraniteSWA", "BitNet")
_FITTED = (*_FITTED, "OlmoHybrid", "Olmoe", "GraniteMoe", "GraniteMoeShared")
_EITHER = ("Llama", "Qwen2", "InternLM3")
# Families whose context transformers can scale.
_SCALED = ("Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "Granite", "InternLM3", "Olmo2")
_SCALED = (*_SCALED, "Gemma", "Gemma2", "Ministral3", "Exaone4", "SeedOss", "Ernie4_5")
_SCALED = (*_SCALED, "HunYuanDenseV1", "Arcee", "Olmo")


def draw_model(rng: random.Random, family: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return an architecture, of any family or the given one, and its config for transformers."""
    family = family or rng.choice(sorted(_NAMES))
    kv_heads, head = rng.choice((1, 1, 2, 3, 4)), rng.choice((2, 4, 8, 10, 12, 16, 20, 32, 64, 100))
    heads = kv_heads * rng.choice((1, 1, 2, 3, 7))
    positions = rng.choice((16, 50, 128, 600))
    layers, vocab_size = rng.randint(1, 4), rng.choice((*_SIZES, rng.randint(5, 3000)))
    hidden = rng.choice((*_SIZES, 960, rng.randint(1, 300)))
    inner = rng.choice((*_SIZES, 2000, rng.randint(1, 500)))
    ids = {"vocab_size": vocab_size, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    tied = {"tie_word_embeddings": rng.random() < 0.5}
    quarters = ("Glm", "Glm4", "Phi", "Nemotron", "StableLm", "Glm4Moe", "Qwen3_5", "Qwen3Next")
    if family in quarters:
        head = max(8, head // 8 * 8)  # a half or a quarter of it is rotated, in pairs
    if family == "CodeGen":
        heads = 4 * kv_heads  # of four parts
    if family in ("Falcon", "GPTNeoX", "GPTJ", "CodeGen"):
        head += head % 2
        hidden = heads * head
    elif family not in _ROPE:
        head = rng.choice((head, rng.randint(1, 40)))  # odd ones, too
        hidden = heads * head
    if family in _STATES:
        heads, head = 2 * kv_heads, max(4, head // 4 * 4)
        config = _state_model(rng, family, layers, head * heads)
        config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        config |= {"max_position_embeddings": positions, "intermediate_size": inner}
    elif family in _LATENT:
        config = _latent_model(rng, family, heads, layers)
        config |= {"hidden_size": hidden, "intermediate_size": inner}
        config |= {"max_position_embeddings": positions}
    elif family == "GPT2":
        config = {"n_positions": positions, "n_embd": hidden, "n_layer": layers, "n_head": heads}
        config |= {"n_inner": rng.choice((None, inner))}
        config |= {"scale_attn_by_inverse_layer_idx": rng.random() < 0.3}
    elif family == "GPTBigCode":
        config = {"n_positions": positions, "n_embd": hidden, "n_layer": layers, "n_head": heads}
        config |= {"n_inner": rng.choice((None, inner)), "multi_query": rng.random() < 0.7}
    elif family in ("GPTJ", "CodeGen"):
        config = {"n_positions": positions, "n_embd": hidden, "n_layer": layers, "n_head": heads}
        config |= {
            "n_inner": rng.choice((None, inner)),
            "rotary_dim": 2 * rng.randint(1, head // 2),
        }
        tied = {}
    elif family == "OPT":
        config = {"hidden_size": hidden, "ffn_dim": inner, "num_hidden_layers": layers}
        config |= {"num_attention_heads": heads, "max_position_embeddings": positions}
        config |= {"do_layer_norm_before": rng.random() < 0.5, "enable_bias": rng.random() < 0.7}
        config |= {"word_embed_proj_dim": rng.choice((hidden, rng.randint(1, 300)))}
    elif family == "Falcon":
        config = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
        config |= {"max_position_embeddings": positions, "ffn_hidden_size": inner}
        config |= {"bias": rng.random() < 0.5, "multi_query": rng.random() < 0.5}
        if rng.random() < 0.5:
            config |= {"new_decoder_architecture": True, "num_kv_heads": kv_heads}
            config |= {"num_ln_in_parallel_attn": rng.choice((None, 1, 2))}
        else:
            config |= {"parallel_attn": rng.random() < 0.5}
        # transformers rounds the bias of other numbers of heads.
        config |= {"alibi": heads in (1, 2, 4, 8) and rng.random() < 0.5}
    elif family == "GPTNeoX":
        config = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
        config |= {"max_position_embeddings": positions, "intermediate_size": inner}
        config |= {"use_parallel_residual": rng.random() < 0.5, "rotary_pct": 1.0}
        config |= {"attention_bias": rng.random() < 0.5}
    elif family == "Bloom":
        config = {"hidden_size": hidden, "n_layer": layers, "n_head": heads}
        config |= {"seq_length": positions}
    elif family == "Mpt":
        attention = {"clip_qkv": rng.choice((None, 1.5)), "softmax_scale": rng.choice((None, 0.3))}
        config = {"d_model": hidden, "n_layers": layers, "n_heads": heads, "max_seq_len": positions}
        config |= {"attn_config": attention}  # transformers supports one expansion_ratio only
        tied = {}
    else:
        config = _rope_model(rng, family, head, heads, positions)
        config |= {"num_hidden_layers": layers, "num_attention_heads": heads}
        config |= {"num_key_value_heads": kv_heads, "intermediate_size": inner}
        # transformers needs whole heads in some families even with head_dim.
        config.setdefault("hidden_size", -(-hidden // heads) * heads)
    return _NAMES[family], ids | tied | config


def _state_model(rng: random.Random, family: str, layers: int, hidden: int) -> dict[str, Any]:
    """Return the config of a family with recurrent states; 4 divides the hidden size."""
    config: dict[str, Any] = {"hidden_size": hidden, "num_hidden_layers": layers}
    attention = [i for i in range(layers) if rng.random() < 0.4]
    kinds = ["full_attention" if i in attention else "linear_attention" for i in range(layers)]
    heads, groups = rng.choice((1, 2, 4)), rng.choice((1, 2))
    heads, rows, taps = heads * groups, rng.choice((1, 8, 16, 50, 128)), rng.randint(2, 4)
    while 2 * hidden % heads:
        heads //= 2
    sizes = {"mamba_n_heads": heads, "mamba_n_groups": min(groups, heads), "mamba_d_state": rows}
    sizes |= {"mamba_d_conv": taps, "mamba_conv_bias": rng.random() < 0.7}
    sizes |= {"mamba_proj_bias": rng.random() < 0.3}
    match family:
        case "Lfm2":
            config |= {"full_attn_idxs": attention, "conv_L_cache": taps, "block_multiple_of": 8}
            config |= {"conv_bias": rng.random() < 0.3}
        case "Mamba" | "FalconMamba":
            config |= {"state_size": rows, "conv_kernel": taps, "expand": rng.choice((1, 2, 3))}
            config |= {"use_bias": rng.random() < 0.3, "use_conv_bias": rng.random() < 0.7}
            config["time_step_rank"] = rng.choice(("auto", 1, 7, 40))
        case "Jamba":
            period = rng.randint(1, 4)
            config |= sizes | {"num_experts": 1, "mamba_dt_rank": rng.choice(("auto", 1, 7, 40))}
            config |= {"attn_layer_period": period, "attn_layer_offset": rng.randrange(period)}
        case "Mamba2":
            config |= {"num_heads": heads, "head_dim": 2 * hidden // heads, "conv_kernel": taps}
            config |= {"n_groups": min(groups, heads), "state_size": rows}
        case "Bamba":
            config |= sizes | {"attn_layer_indices": attention}
        case "GraniteMoeHybrid":
            config |= sizes | {"layer_types": kinds, "num_local_experts": 0}
            config |= {"position_embedding_type": rng.choice(("rope", None))}
        case "FalconH1":
            config |= sizes | {"mamba_d_ssm": None, "mamba_rms_norm": rng.random() < 0.5}
            config |= {"mamba_norm_before_gate": rng.random() < 0.5}
            config |= {"mlp_multipliers": [0.7, 1.2], "ssm_multipliers": [0.5, 1.0, 2.0, 1.0, 1.5]}
        case "NemotronH":
            config = {"hidden_size": hidden, "head_dim": 8}
            config |= {"layers_block_type": [rng.choice((kind, "mlp")) for kind in kinds]}
            config |= {"mamba_num_heads": heads, "mamba_head_dim": 12, "ssm_state_size": rows}
            config |= {"n_groups": min(groups, heads), "conv_kernel": taps}
            config |= {"tie_word_embeddings": False}  # transformers does not tie them
        case "RWKV7":
            config |= {"head_dim": rng.choice((2, 4, hidden)), "norm_bias": rng.random() < 0.7}
            ranks = ("decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim")
            config |= {name: rng.choice((1, 8, 20, 64)) for name in ranks}
    return config


def _experts(rng: random.Random, family: str, window: int) -> dict[str, Any]:
    """Return the fields of a family with experts; each family reads those that it knows."""
    groups, size = rng.choice((1, 1, 2, 3)), rng.randint(2, 6)
    kept, inner = rng.randint(1, groups), rng.choice((8, 20, 64, 97))
    fields = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    config: dict[str, Any] = dict.fromkeys(fields, groups * size)
    top_k = rng.randint(1, min(8, kept * size))
    config |= dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), top_k)
    config |= {"n_group": groups, "topk_group": kept, "moe_intermediate_size": inner}
    config |= {"shared_expert_intermediate_size": 2 * inner, "shared_intermediate_size": inner}
    fields = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    config |= dict.fromkeys(fields, rng.randint(1, 2))
    config |= {"norm_topk_prob": rng.random() < 0.5, "first_k_dense_replace": rng.randint(0, 2)}
    config |= {"mlp_only_layers": [1], "decoder_sparse_step": rng.randint(1, 2)}
    config |= {"sliding_window": window, "use_qk_norm": rng.random() < 0.5}
    config |= {"swiglu_limit": rng.choice((0.5, 7.0)), "intermediate_size_mlp": 40}
    config |= {"floor_scale": 20, "interleave_moe_layer_step": rng.randint(1, 2)}
    config |= {"num_dense_layers": rng.randint(0, 1), "mup_enabled": rng.random() < 0.5}
    config |= {"expert_selection_fn": rng.choice(("softmax", "sigmoid"))}
    config |= {"shared_expert_combination_strategy": rng.choice(("sum", "average"))}
    if family in ("Mixtral", "MiniMaxM2", "SolarOpen", "HYV3"):
        del config["sliding_window"]
    return config


def _latent_model(rng: random.Random, family: str, heads: int, layers: int) -> dict[str, Any]:
    """Return the config of a family with latent attention, without the sizes that all have."""
    config: dict[str, Any] = {"num_hidden_layers": layers, "num_attention_heads": heads}
    config |= {"q_lora_rank": rng.choice((None, rng.randint(1, 90)))}
    config |= {"kv_lora_rank": rng.choice((32, 128, 256, rng.randint(1, 150)))}
    config |= {"qk_nope_head_dim": rng.randint(1, 80), "v_head_dim": rng.randint(1, 80)}
    config |= {"qk_rope_head_dim": rng.choice((2, 6, 32, 64))}
    config |= {"attention_bias": config["q_lora_rank"] is not None and rng.random() < 0.3}
    config |= {"num_key_value_heads": heads, "mlp_bias": rng.random() < 0.3}
    if family != "MiniCPM3":
        config |= {"first_k_dense_replace": layers}
    if family in ("DeepseekV3", "Mistral4"):
        config |= {"rope_interleave": rng.random() < 0.5, "mlp_bias": False}
    if family == "KimiLinear":
        kinds = "linear_attention", "full_attention"
        config |= {"layer_types": [rng.choice(kinds) for _ in range(layers)]}
        config |= {"mlp_layer_types": [rng.choice(("dense", "sparse")) for _ in range(layers)]}
        config |= {"linear_head_dim": rng.randint(1, 40), "linear_num_heads": rng.randint(1, 4)}
        config |= {"linear_conv_kernel_dim": rng.randint(2, 5), "num_experts": 5}
        config |= {"num_experts_per_tok": rng.randint(1, 5), "moe_intermediate_size": 20}
        config |= {"tie_word_embeddings": False}  # transformers does not tie them
    return config


def _rope_model(
    rng: random.Random, family: str, head: int, heads: int, positions: int
) -> dict[str, Any]:
    config: dict[str, Any] = {"max_position_embeddings": positions}
    if family in _FITTED or (family in _EITHER and rng.random() < 0.5):
        config["hidden_size"] = heads * head
    else:
        config["head_dim"] = head
    window = rng.choice((1, 7, 20, 64))
    if family in _DELTA:
        key_heads, key_size = rng.randint(1, 4), rng.randint(1, 40)
        group = rng.choice((1, 1, 2, 3))
        # transformers saves convolutions of queries, keys and values in equal parts.
        size = key_size if family == "OlmoHybrid" else rng.randint(1, 70)
        group = 1 if family == "OlmoHybrid" else group
        config |= {"linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * group}
        config |= {"linear_key_head_dim": key_size, "linear_value_head_dim": size}
        config |= {"linear_conv_kernel_dim": rng.randint(2, 5)}
        config |= {"attention_bias": rng.random() < 0.3, "num_experts": 0}
    if family in _MIXED:
        config |= _experts(rng, family, window)
    if family in ("Mistral", "Ministral3", "Phi3", "Starcoder2"):
        config["sliding_window"] = rng.choice((None, window))
    if family == "Ministral":
        config["sliding_window"] = window  # transformers fails without
    if family in ("Qwen2", "Qwen3"):
        config |= {"use_sliding_window": rng.random() < 0.5, "sliding_window": window}
        config["max_window_layers"] = rng.randint(0, 4)
    if family in _BIAS:
        config["attention_bias"] = rng.random() < 0.3
    if family in ("Llama", "Granite", "SmolLM3", "SeedOss", "Arcee", "Nemotron"):
        config["mlp_bias"] = rng.random() < 0.3
    if family == "InternLM3":
        config |= dict.fromkeys(("attention_bias", "mlp_bias"), rng.random() < 0.5)
    if family in ("Granite", "GraniteSWA"):
        for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
            config[name] = rng.choice((0.3, 1.0, 6.0))
        config["attention_multiplier"] = rng.choice((0.1, 0.5))
    if family == "GraniteSWA":
        config |= {"sliding_window": window, "mlp_bias": rng.random() < 0.3}
    if family == "SmolLM3":
        config |= {"no_rope_layer_interval": rng.randint(1, 4), "sliding_window": window}
        config["use_sliding_window"] = rng.random() < 0.5
    if family == "SeedOss":
        config["attention_out_bias"] = rng.random() < 0.5
    if family in ("Olmo3", "Exaone4"):
        config["sliding_window"] = window
    if family == "Exaone4":
        config["sliding_window_pattern"] = rng.randint(1, 4)
    if family in ("Starcoder2", "Ernie4_5"):
        config["use_bias"] = rng.random() < 0.5
    if family in ("Cohere", "Cohere2"):
        config["logit_scale"] = rng.choice((0.0625, 1.0))
    if family == "Olmo":
        config["clip_qkv"] = rng.choice((None, 1.5))
    if family == "StableLm":
        for name in ("use_qkv_bias", "qk_layernorm", "use_parallel_residual"):
            config[name] = rng.random() < 0.5
    if family == "Cohere":
        config["use_qk_norm"] = rng.random() < 0.5
    if family == "Cohere2":
        config |= {"sliding_window": window, "sliding_window_pattern": rng.randint(1, 3)}
    if family == "Phi":
        config["tie_word_embeddings"] = False
    if family in ("Gemma2", "Gemma3", "VaultGemma"):
        config |= {"sliding_window": window, "query_pre_attn_scalar": rng.choice((16, 100))}
        config["final_logit_softcapping"] = rng.choice((None, 30.0))
    if family in ("Gemma2", "VaultGemma"):
        config["attn_logit_softcapping"] = rng.choice((None, 50.0))
    if family == "Gemma3":
        config["sliding_window_pattern"] = rng.randint(1, 3)
    separate = ("Gemma3", "Glm", "Glm4", "Phi", "Olmo3", "Nemotron", "StableLm", "Apertus")
    if family in (*separate, "Glm4Moe", "GptOss"):
        return config  # their positions have separate defaults
    kinds = (
        ("default", "longrope")
        if family == "Phi3"
        else ("default", "linear", "dynamic", "yarn", "llama3")
        if family in _SCALED
        else ("default",)
    )
    kind, original = rng.choice(kinds), positions // 2
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice((1e4, 5e5))}
    if kind not in ("default", "longrope"):
        rope["factor"] = 2.0
    if kind == "dynamic" and head == 2:
        rope = {"rope_type": "default", "rope_theta": 1e4}
    if kind in ("yarn", "llama3") or family == "Ministral3":
        rope["original_max_position_embeddings"] = original
    if family == "Ministral3":
        rope["llama_4_scaling_beta"] = rng.choice((0.1, 0.5))
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0 + 0.1 * i for i in range(head // 2)]}
        rope |= {"long_factor": [2.0 + 0.5 * i for i in range(head // 2)]}
        config["original_max_position_embeddings"] = original
    if family == "Phi3" and kind == "default" and head % 4 == 0:
        rope["partial_rotary_factor"] = rng.choice((0.5, 1.0))
    return config | {"rope_parameters": rope}


def draw_settings(rng: random.Random) -> dict[str, Any]:
    """Return settings of the engine."""
    budget = rng.choice((1, 2, 3, 5, 7, 9, 15, 31, int(2 ** rng.uniform(0, 13)), 8192))
    return {
        "max_num_batched_tokens": budget,
        "max_num_seqs": rng.randint(1, min(budget, 9)),
        "block_size": rng.choice((8, 16, 32, 64, 128)),
        "dtype": rng.choice(("float32", "bfloat16", "float16")),
        "quantization": rng.choice((None, None, "int8", "int4")),
        "kv_cache_dtype": rng.choice(("auto", "auto", "fp8", "fp8_e5m2", "int8")),
        "attention_backend": rng.choice(("auto", "auto", "auto", "cpu", "reference")),
        "enforce_eager": rng.random() < 0.2,
        "enable_prefix_caching": rng.random() < 0.5,
        "async_scheduling": rng.random() < 0.5,
    }


def check_model(seed: int, folder: Path) -> str:
    """Start the model of a number and send it requests; raise an error if a result is wrong.

    Args:
        seed: the number.
        folder: an empty folder.

    Returns:
        The finding: "answered", "equals transformers", "equals reference", or "refused: why".
    """
    rng = random.Random(seed)
    architecture, config = draw_model(rng)
    settings = draw_settings(rng)
    compared = rng.randrange(COMPARED) == 0
    if compared:
        settings |= {"dtype": "float32", "quantization": None, "kv_cache_dtype": "auto"}
        settings["attention_backend"] = "auto"
    hf_model = None
    if compared:
        if architecture == "DeepseekV2ForCausalLM":  # transformers rotates views of pairs
            for name in ("kv_lora_rank", "qk_nope_head_dim"):
                config[name] += config[name] % 2
        hf_model = make_hf(architecture, seed=seed, **config)
        with torch.no_grad():  # otherwise large models would amplify each rounding
            for weight in hf_model.parameters():
                if weight.dim() > 1:
                    weight.mul_(min(1.0, 48 / max(weight.shape[-2:])) ** 0.5)
        hf_model.save_pretrained(folder)
    else:
        settings["load_format"] = "dummy"
        save_config(folder, architecture, config)
    settings |= {"model": str(folder), "skip_tokenizer_init": True, "num_threads": 1}
    most = config.get("max_position_embeddings") or next(
        config[name] for name in ("n_positions", "seq_length", "max_seq_len") if name in config
    )
    lengths = [rng.randint(1, min(most - 1, 80)) for _ in range(3)]
    prompts = [[rng.randrange(config["vocab_size"]) for _ in range(n)] for n in lengths]
    try:
        answers = _ask(prompts, settings)
    except OctavoError as error:
        return f"refused: {type(error).__name__}: {str(error).replace(str(folder), 'MODEL')}"
    if hf_model is None:
        return "answered"
    rope = config.get("rope_parameters", {}).get("rope_type")
    if rope in ("dynamic", "longrope"):  # transformers then depends on the length of a sequence
        _assert_close(answers, _ask(prompts, settings | {"attention_backend": "reference"}))
        return "equals reference"
    expected = [_by_transformers(hf_model, tokens, len(own)) for tokens, own in answers]
    _assert_close(answers, expected)
    return "equals transformers"


ENCODERS = ("Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert", "Electra", "MPNet")
ENCODERS = (*ENCODERS, "Albert", "ModernBert", "EuroBert", "Gte", "NomicBert", "JinaEmbeddingsV3")
ENCODERS = (*ENCODERS, "DebertaV2", "Deberta")


def draw_encoder(rng: random.Random, family: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return an architecture of an encoder, of any family or the given one, and its config."""
    family = family or rng.choice(ENCODERS)
    head, heads = rng.choice((2, 4, 8, 10, 16, 20, 32, 64, 100)), rng.choice((1, 2, 3, 4, 6, 7))
    rotary = family in ("ModernBert", "EuroBert", "Gte", "NomicBert", "JinaEmbeddingsV3")
    head += 0 if rotary else rng.choice((0, 0, 1))
    layers, inner = rng.randint(1, 4), rng.choice((*_SIZES, rng.randint(1, 500)))
    positions = rng.choice((16, 50, 128, 300))
    config: dict[str, Any] = {"vocab_size": rng.choice((*_SIZES, rng.randint(5, 3000)))}
    config |= {"max_position_embeddings": positions, "num_labels": rng.randint(1, 5)}
    config |= {f"{name}_token_id": 1 for name in ("pad", "bos", "eos")}
    if family == "DistilBert":
        config |= {"dim": head * heads, "hidden_dim": inner, "n_layers": layers, "n_heads": heads}
    else:
        config |= {"hidden_size": head * heads, "intermediate_size": inner}
        config |= {"num_hidden_layers": layers, "num_attention_heads": heads}
    if family in ("Electra", "Albert"):
        config["embedding_size"] = rng.choice((head * heads, rng.randint(1, 300)))
    if family in ("Gte", "Bert", "Roberta"):
        config["type_vocab_size"] = rng.choice((1, 2))
    if family == "Albert":
        config["num_hidden_groups"] = rng.randint(1, layers)
    if family == "ModernBert":
        config |= {"cls_token_id": 1, "sep_token_id": 1, "local_attention": rng.randint(1, 40)}
        names = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
        config |= {name: rng.random() < 0.5 for name in names}
        config["classifier_pooling"] = rng.choice(("cls", "mean"))
    if family == "EuroBert":
        config |= {"mask_token_id": 1, "num_key_value_heads": rng.choice((1, heads))}
        config |= {"classifier_pooling": rng.choice(("bos", "mean", "late"))}
    if family in ("Deberta", "DebertaV2"):
        kinds = ("c2p|p2c", "c2p", ["p2c"], None)
        config |= {"relative_attention": rng.random() < 0.8, "pos_att_type": rng.choice(kinds)}
        config |= {"max_relative_positions": rng.choice((-1, 40))}
        config |= {name: rng.random() < 0.5 for name in ("share_att_key", "position_biased_input")}
        config |= {"type_vocab_size": rng.choice((0, 2))}
    if family == "DebertaV2":
        config |= {"position_buckets": rng.choice((-1, 4, 12))}
        config |= {"norm_rel_ebd": rng.choice(("none", "layer_norm"))}
        config |= {"conv_kernel_size": rng.choice((0, 0, 3, 5)), "conv_act": "gelu"}
    kind = rng.choice(("Model", "ForSequenceClassification", "ForTokenClassification"))
    return f"{family}{kind}", config


def check_encoder(seed: int, folder: Path) -> str:
    """Start the encoder of a number and send it texts; raise an error if a result is wrong.

    Args:
        seed: the number.
        folder: an empty folder.

    Returns:
        The finding, as for `check_model`.
    """
    rng = random.Random(seed)
    architecture, config = draw_encoder(rng)
    settings = draw_settings(rng)
    if compared := rng.random() < 0.5:
        settings |= {"dtype": "float32", "quantization": None, "kv_cache_dtype": "auto"}
    hf_model = make_hf(architecture, seed=seed, **config)
    hf_model.save_pretrained(folder)
    settings |= {"model": str(folder), "skip_tokenizer_init": True, "num_threads": 1}
    most = min(config["max_position_embeddings"] - 2, 80)
    settings["max_num_batched_tokens"] = max(settings["max_num_batched_tokens"], most)
    # Without the padding token, which RoBERTa would give no position.
    texts = [
        [rng.randrange(2, config["vocab_size"]) for _ in range(rng.randint(1, most))]
        for _ in range(3)
    ]
    params = PoolingParams(use_activation=False)
    try:
        with LLM(**settings) as llm:
            outputs = llm.encode(
                [{"prompt_token_ids": text} for text in texts], params, use_tqdm=False
            )
    except OctavoError as error:
        return f"refused: {type(error).__name__}: {str(error).replace(str(folder), 'MODEL')}"
    if not compared:
        return "answered"
    for text, output in zip(texts, outputs, strict=True):
        with torch.inference_mode():
            out = hf_model(torch.tensor([text]))
        expected = out.logits[0] if "logits" in out else out.last_hidden_state[0, 0]
        found = torch.tensor(output.outputs.data)
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
    return "equals transformers"


_Answer = tuple[list[int], list[float]]
"""Tokens of prompt and answer, and the logprobs of the answer's tokens."""


def _ask(prompts: list[list[int]], settings: dict[str, Any]) -> list[_Answer]:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    with LLM(**settings) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        more = SamplingParams(
            max_tokens=1, seed=0, presence_penalty=0.5, logprobs=3, prompt_logprobs=2
        )
        llm.generate({"prompt_token_ids": prompts[0]}, more, use_tqdm=False)
    answers = []
    for prompt, output in zip(prompts, outputs, strict=True):
        (completion,) = output.outputs
        tokens = list(completion.token_ids)
        assert tokens, "no answer"
        assert completion.logprobs is not None
        logprobs = [
            at[token].logprob for token, at in zip(tokens, completion.logprobs, strict=True)
        ]
        answers.append((prompt + tokens, logprobs))
    return answers


def _by_transformers(hf_model: Any, tokens: list[int], count: int) -> _Answer:
    """Return transformers' result for the last `count` tokens."""
    with torch.inference_mode():
        out = hf_model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0, -count:]
    logprobs = out.float().log_softmax(-1)
    ids = torch.tensor(tokens[-count:])
    return tokens, logprobs.gather(1, ids[:, None])[:, 0].tolist()


def _assert_close(got: list[_Answer], expected: list[_Answer]) -> None:
    for (_, ours), (_, theirs) in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=2e-3, rtol=1e-3)


def main() -> None:
    """Check some models and count the findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--encoders", action="store_true", help="check encoders")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    found: collections.Counter[str] = collections.Counter()
    started = time.monotonic()
    for seed in range(args.first, args.first + args.count):
        with tempfile.TemporaryDirectory() as folder:
            try:
                check = check_encoder if args.encoders else check_model
                what = check(seed, Path(folder))
            except Exception:
                what = "WRONG"
                print(f"--- {seed}: {draw_model(random.Random(seed))}", flush=True)
                traceback.print_exc(limit=-4)
        found[what.split(":")[0]] += 1
        if what.startswith("refused"):
            print(seed, what, flush=True)
        if (seed + 1) % 100 == 0:
            print(seed + 1, dict(found), f"{time.monotonic() - started:.0f} s", flush=True)
    print(json.dumps(found))
    raise SystemExit("WRONG" in found)


if __name__ == "__main__":
    main()
