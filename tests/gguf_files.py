"""GGUF files of random models: metadata and tensors as llama.cpp's converter writes them."""

import math
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

Tensors = Mapping[str, tuple[int, Sequence[int], bytes]]
"""Number of the type, shape (rows first) and contents of each tensor."""

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "iq2_xxs": 16}


def quantize(x: NDArray[np.float32], kind: str) -> bytes:
    """Return the contents of a tensor; blocks use the simplest scales.

    Blocks of iq2_xxs are random, with numbers of the size of those of `x`.
    """
    if kind in ("f32", "f16"):
        return x.astype({"f32": "<f4", "f16": "<f2"}[kind]).tobytes()
    if kind == "iq2_xxs":
        blocks = np.random.default_rng(x.size).integers(0, 256, (x.size // 256, 66), np.uint8)
        blocks[:, :2] = np.array([x.std() / 60], np.float16).view(np.uint8)
        return blocks.tobytes()
    groups = x.reshape(-1, 32)
    most = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)
    if kind == "q8_0":
        scales = (np.abs(most) / 127).astype(np.float16)
        codes = np.rint(groups / np.maximum(scales.astype(np.float32), 1e-9))
        packed = np.clip(codes, -127, 127).astype(np.int8).view(np.uint8)
    else:
        scales = (most / -8).astype(np.float16)
        divisor = np.where(scales == 0, np.float32(1), scales.astype(np.float32))
        codes = np.clip(np.rint(groups / divisor) + 8, 0, 15).astype(np.uint8)
        packed = codes[:, :16] | codes[:, 16:] << 4
    return np.concatenate([scales.view(np.uint8), packed], axis=1).tobytes()


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    """Return a value with the number of its type."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if not value:  # as texts
        return struct.pack("<IIQ", 9, 8, 0)
    items = b"".join(_value(item)[4:] for item in value)
    (kind,) = struct.unpack("<I", _value(value[0])[:4])
    return struct.pack("<IIQ", 9, kind, len(value)) + items


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Tensors, align: int = 32) -> None:
    """Write a file of version 3."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    parts += [_text(key) + _value(value) for key, value in metadata.items()]
    data = b""
    for name, (kind, shape, contents) in tensors.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts.append(_text(name) + dims + struct.pack("<IQ", kind, len(data)))
        data += contents + bytes(-len(contents) % align)
    header = b"".join(parts)
    path.write_bytes(header + bytes(-len(header) % align) + data)


VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*map(chr, range(33, 127)), "ab", *(f"<{i}>" for i in range(33))],
    "tokenizer.ggml.token_type": [1] * 95 + [3] * 33,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 127,
    "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
}
"""Metadata of a vocabulary of 128 tokens."""


NAMES = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    # Phi, Starcoder2
    "model.final_layernorm": "output_norm",
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    # Gemma 4
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    # Muse Glimmer, Gemma 3n, BitNet
    "self_attn.gate_proj": "attn_gate",
    "self_attn.g_proj": "attn_gate",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    # HunYuan, Apertus, StableLM, Granite with sliding windows
    "attention_layernorm": "attn_norm",
    "feedforward_layernorm": "ffn_norm",
    "self_attn.q_layernorm.norms": "attn_q_norm",
    "self_attn.k_layernorm.norms": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    # GPT-2, MPT
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "transformer.norm_f": "output_norm",
    "norm_1": "attn_norm",
    "norm_2": "ffn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
    # GPT-NeoX, BLOOM, Falcon
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "transformer.word_embeddings": "token_embd",
    "transformer.word_embeddings_layernorm": "token_embd_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "ln_mlp": "attn_norm",
    "ln_attn": "attn_norm_2",
    # Qwen3.5
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    # LFM2
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "ffn_norm": "ffn_norm",
    # Mamba, Mamba-2 and Nemotron-H
    "backbone.embeddings": "token_embd",
    "backbone.norm_f": "output_norm",
    "model.embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "norm": "attn_norm",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    # Granite 4, Bamba, Falcon-H1, Jamba
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "pre_ff_layernorm": "ffn_norm",
    # Mixtures of experts
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "feed_forward.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "router.proj": "ffn_gate_inp",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.router.gate": "ffn_gate_inp",
    "pre_mlp_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "feed_forward.router": "ffn_gate_inp",
    "mixer.gate": "ffn_gate_inp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
}
for _part in ("gate", "up", "down"):
    for _shared in ("shared_expert", "shared_experts", "shared_mlp"):
        NAMES[f"mlp.{_shared}.{_part}_proj"] = f"ffn_{_part}_shexp"
    NAMES[f"feed_forward.shared_expert.{_part}_proj"] = f"ffn_{_part}_shexp"
NAMES |= {  # Latent attention, Qwen3-Next
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "linear_attn.in_proj_ba": "ssm_ba",
}
_WHOLE = {"e_score_correction_bias": "exp_probs_b.bias", "expert_bias": "exp_probs_b.bias"}
_WHOLE |= {"per_expert_scale": "ffn_down_exps.scale", "sinks": "attn_sinks.weight"}
"""Names of tensors by the last part of their names in Hugging Face's form."""
for _mixer in ("mixer", "mamba"):
    NAMES |= {f"{_mixer}.{part}_proj": f"ssm_{part}" for part in ("in", "x", "dt", "out")}
    NAMES |= {f"{_mixer}.conv1d": "ssm_conv1d", f"{_mixer}.norm": "ssm_norm"}
    NAMES |= {f"{_mixer}.{part}_layernorm": f"ssm_{part}_norm" for part in ("dt", "b", "c")}
STATE_SPACES = ("mamba2", "granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe")
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_SANDWICHES = ("gemma2", "gemma3", "gemma3n", "gemma4", "olmo2", "exaone4", "muse-glimmer")
OTHER_NAMES = dict.fromkeys(_SANDWICHES, SANDWICH)
OTHER_NAMES["qwen35"] = {"post_attention_layernorm": "post_attention_norm"}
for _kind in ("gpt-oss", "qwen35moe", "qwen3next", "glm4moe", "afmoe"):
    OTHER_NAMES[_kind] = OTHER_NAMES["qwen35"]
OTHER_NAMES["seed_oss"] = {"post_attention_layernorm": "post_attention_norm"}
OTHER_NAMES["glm4"] = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
PERMUTED = ("llama", "granite", "granite_swa", "minicpm", "smollm3", "mistral3", "internlm2")
PERMUTED += ("arcee", "olmo", "xverse", "muse-glimmer", "granitehybrid", "nemotron_h")
PERMUTED += ("granitemoe", "nemotron_h_moe")
SHIFTED = dict.fromkeys(("gemma", "gemma2", "gemma3", "nemotron"), "norm.weight")
SHIFTED["muse-glimmer"] = "layernorm.weight"
SHIFTED |= dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), "layernorm.weight")
ROTATED = ("phi2", "gptneox", "chatglm", "glm4", "cohere2", "stablelm", "nemotron")
ROTATED += ("glm4moe", "qwen3next", "cohere2moe", "laguna", "mimo2")
"""Architectures for which the number of rotated elements is written."""
NO_HEAD_SIZE = (
    "phi2",
    "starcoder",
    "starcoder2",
    "gpt2",
    "gptneox",
    "bloom",
    "falcon",
    "mpt",
    "chatglm",
)
MIXTURES = ("llama", "qwen2moe", "qwen3moe", "olmoe", "gpt-oss", "lfm2moe", "qwen35moe")
MIXTURES += ("qwen3next", "granitemoe", "granitehybrid", "gemma4", "glm4moe", "deepseek2")
MIXTURES += ("ernie4_5-moe", "hunyuan-moe", "dots1", "minimax-m2", "llama4", "exaone-moe")
MIXTURES += ("afmoe", "cohere2moe", "nemotron_h_moe", "laguna", "mimo2")
WITHOUT_INNER = ("llama", "granitemoe", "granitehybrid")
NO_HEAD_SIZE += ("stablelm", "granite", "granite_swa", "minicpm", "mamba2", "granitehybrid")
NO_HEAD_SIZE += ("mamba", "jamba", "granitemoe", "deepseek2", "minicpm3")
"""Facts of llama.cpp's converter, stated again so that a mistake in Octavo's tables is found."""


def rope_fields(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of scaled positions."""
    kind = rope.get("rope_type")
    if "mrope_section" in rope:
        return {"rope.dimension_sections": [*rope["mrope_section"], 0]}
    if kind == "longrope":
        return {"rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
    if kind not in ("linear", "yarn"):
        return {}
    names = {"factor": "factor", "original_max_position_embeddings": "original_context_length"}
    names |= {"attention_factor": "yarn_attn_factor", "mscale_all_dim": "yarn_log_multiplier"}
    names |= {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    found = {f"rope.scaling.{key}": rope[name] for name, key in names.items() if name in rope}
    return {"rope.scaling.type": kind} | found


def _fields(config: Any, kind: str, rope: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return the metadata of the architecture."""

    def get(*names: str) -> Any:
        return next((v for name in names if (v := getattr(config, name, None)) is not None), None)

    fields = {
        "context_length": get("max_position_embeddings", "seq_length", "max_seq_len"),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": 4 * config.hidden_size
        if kind in ("gpt2", "starcoder", "bloom", "falcon", "mpt")
        else get("intermediate_size") or 0,
        "attention.head_count": get("num_attention_heads") or 0,
        "attention.head_count_kv": get("num_kv_heads", "num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": config.norm_eps
        if kind in ("lfm2", "lfm2moe")
        else get("rms_norm_eps"),
        "attention.layer_norm_epsilon": get("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
        or {"nemotron": get("norm_eps"), "olmo": 1e-5}.get(kind),
        "rope.scaling.attn_factor": rope.get("attention_factor") if "long_factor" in rope else None,
        "attn_logit_softcapping": get("attn_logit_softcapping"),
        "final_logit_softcapping": get("final_logit_softcapping"),
    } | rope_fields(rope)
    count = get("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if count and kind in MIXTURES:
        used = get("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")
        fields |= {"expert_count": count}
        fields["expert_used_count"] = used[0] if isinstance(used, list) else used
        if kind not in WITHOUT_INNER:
            size_of = get("moe_intermediate_size", "intermediate_size")
            fields["expert_feed_forward_length"] = size_of
        shared = get("shared_expert_intermediate_size", "shared_intermediate_size")
        fields["expert_shared_feed_forward_length"] = shared
    if "rope_theta" in rope and kind not in ("phi2", "gptneox", "falcon", "stablelm"):
        fields["rope.freq_base"] = float(rope["rope_theta"])
    if kind not in NO_HEAD_SIZE:
        fields |= {"attention.key_length": size, "attention.value_length": size}
    if kind in ROTATED:
        fields["rope.dimension_count"] = int(size * rope.get("partial_rotary_factor", 1.0))
    if kind in ("gemma2", "gemma3", "gemma3n", "gemma4", "phi3", "cohere2", "gpt-oss"):
        fields["attention.sliding_window"] = config.sliding_window or 0
    windowed = ("olmo2", "exaone4", "granite_swa", "exaone-moe", "cohere2moe")
    if kind in windowed and get("sliding_window"):
        fields["attention.sliding_window"] = config.sliding_window
        fields["attention.sliding_window_pattern"] = [
            layer == "sliding_attention" for layer in config.layer_types
        ]
    if kind == "granite_swa" and (thetas := get("layer_rope_theta")):
        fields["attention.rope_pattern"] = [theta > 0 for theta in thetas]
    if get("kv_lora_rank"):
        fields |= _latent_attention(config, kind)
    match kind:
        case "glm4moe" | "deepseek2":
            softmax = type(config).__name__ == "DeepseekV2Config"
            if kind == "glm4moe" or softmax:  # of others the bias tells
                fields["expert_gating_func"] = 1 if softmax else 2
            normed = getattr(config, "norm_topk_prob", False)
            fields["expert_weights_norm"] = normed if normed or kind == "glm4moe" else None
            fields["expert_shared_count"] = config.n_shared_experts
            fields["expert_weights_scale"] = config.routed_scaling_factor
            fields["leading_dense_block_count"] = get("first_k_dense_replace") or 1
            fields["expert_group_count"] = config.n_group
            fields["expert_group_used_count"] = config.topk_group
        case "dots1" | "exaone-moe" | "nemotron_h_moe":
            fields["expert_weights_norm"] = config.norm_topk_prob
            fields["expert_weights_scale"] = config.routed_scaling_factor
            fields["expert_group_count"] = config.n_group
            if kind == "nemotron_h_moe":
                size_of = config.moe_shared_expert_intermediate_size
                fields |= {"expert_shared_feed_forward_length": size_of, "expert_shared_count": 1}
                fields["moe_latent_size"] = config.moe_latent_size
                return {
                    f"{kind}.{k}": v
                    for k, v in (fields | _state_spaces(config, kind)).items()
                    if v is not None
                }
            count = get("n_shared_experts", "num_shared_experts")
            fields["expert_group_used_count"] = config.topk_group
            fields["expert_shared_count"] = count
            fields["leading_dense_block_count"] = config.first_k_dense_replace
            if kind == "exaone-moe":
                inner = count * config.moe_intermediate_size
                fields |= {"expert_gating_func": 2, "expert_shared_feed_forward_length": inner}
                fields |= {"nextn_predict_layers": 0, "rope.scaling.type": "none"}
        case "minimax-m2":
            fields |= {"expert_gating_func": 2, "rope.dimension_count": 16}
        case "llama4":
            fields["feed_forward_length"] = config.intermediate_size_mlp
            fields["expert_feed_forward_length"] = config.intermediate_size
            fields["interleave_moe_layer_step"] = config.interleave_moe_layer_step
        case "afmoe":
            fields |= {"expert_gating_func": 2, "expert_weights_norm": True}
            fields["expert_weights_scale"] = config.route_scale
            fields["expert_shared_count"] = config.num_shared_experts
            fields["leading_dense_block_count"] = config.num_dense_layers
            fields["attention.sliding_window"] = config.sliding_window
        case "laguna":
            fields |= {"attention.head_count": config.num_attention_heads_per_layer}
            fields |= {"expert_gating_func": 2, "expert_weights_norm": True}
            fields["expert_weights_scale"] = config.moe_routed_scaling_factor
            fields["leading_dense_block_count"] = config.mlp_layer_types.index("sparse")
            fields["vocab_size"] = config.vocab_size
            # Each fourth layer has none.
            fields["attention.sliding_window"] = config.sliding_window or None
            local_rope = config.rope_parameters["sliding_attention"]
            fields["rope.freq_base_swa"] = float(local_rope["rope_theta"])
            part = local_rope["partial_rotary_factor"]
            fields["rope.dimension_count_swa"] = int(size * part)
        case "mimo2":
            sliding = [layer == "sliding_attention" for layer in config.layer_types]
            of_kinds = config.num_key_value_heads, 2 * config.num_key_value_heads
            # Three layers that predict several tokens follow.
            pattern = [*map(int, sliding), 1, 1, 1]
            fields |= {"block_count": len(pattern), "nextn_predict_layers": 3}
            fields["attention.head_count_kv"] = [of_kinds[one] for one in pattern]
            fields["attention.sliding_window"] = config.sliding_window
            fields["attention.sliding_window_pattern"] = pattern
            fields["attention.value_length"] = config.v_head_dim
            fields["attention.value_scale"] = config.attention_value_scale
            fields |= {"expert_group_count": config.n_group, "expert_gating_func": 2}
            fields["expert_group_used_count"] = config.topk_group
            local_rope = config.rope_parameters["sliding_attention"]
            fields["rope.freq_base_swa"] = float(local_rope["rope_theta"])
        case "cohere2moe":
            fields["logit_scale"] = config.logit_scale
            fields |= {"expert_gating_func": 2, "expert_weights_norm": config.norm_topk_prob}
            fields["expert_shared_count"] = config.num_shared_experts
            inner = config.num_shared_experts * config.intermediate_size
            fields["expert_shared_feed_forward_length"] = inner
            fields["leading_dense_block_count"] = config.mlp_layer_types.index("sparse")
            fields["feed_forward_length"] = config.prefix_dense_intermediate_size
            fields["rope.scaling.type"] = "none"
        case "ernie4_5-moe":
            fields["expert_shared_count"] = config.moe_num_shared_experts
            fields["leading_dense_block_count"] = config.moe_layer_start_index
            fields["interleave_moe_layer_step"] = config.moe_layer_interval
            shared = config.intermediate_size // config.num_key_value_heads
            fields["expert_shared_feed_forward_length"] = shared
        case "hunyuan-moe":
            fields["expert_shared_count"] = 1
            fields["expert_shared_feed_forward_length"] = config.intermediate_size
        case "granite" | "granite_swa" | "granitemoe" | "minicpm":
            if kind != "minicpm":
                fields["attention.scale"] = config.attention_multiplier
            fields["embedding_scale"] = config.embedding_multiplier
            fields["residual_scale"] = config.residual_multiplier
            fields["logit_scale"] = config.logits_scaling
        case "gemma3n":
            fields["attention.sliding_window_pattern"] = [
                layer == "sliding_attention" for layer in config.layer_types
            ]
            fields["attention.shared_kv_layers"] = config.num_kv_shared_layers
            fields["embedding_length_per_layer_input"] = config.hidden_size_per_layer_input
            fields["altup.active_idx"] = config.altup_active_idx
            fields["altup.num_inputs"] = config.altup_num_inputs
            fields["activation_sparsity_scale"] = [
                NormalDist().inv_cdf(share) if share else -math.inf
                for share in config.activation_sparsity_pattern
            ]
            local_rope = config.rope_parameters["sliding_attention"]
            fields["rope.freq_base_swa"] = float(local_rope["rope_theta"])
        case "muse-glimmer":
            fields["attention.sliding_window"] = config.sliding_window
            fields["attention.sliding_window_pattern"] = [
                layer == "sliding_attention" for layer in config.layer_types
            ]
            fields["logit_scale"] = config.output_multiplier
        case "bitnet":
            fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}
        case "qwen35" | "qwen35moe" | "qwen3next":
            linear = [layer == "linear_attention" for layer in config.layer_types]
            rotated = int(size * rope["partial_rotary_factor"])
            if kind != "qwen3next":
                fields["rope.dimension_sections"] = {8: [2, 1, 1, 0]}[rotated]
            fields["rope.dimension_count"] = rotated
            fields["ssm.conv_kernel"] = config.linear_conv_kernel_dim
            fields["ssm.state_size"] = config.linear_key_head_dim
            fields["ssm.group_count"] = config.linear_num_key_heads
            fields["ssm.time_step_rank"] = config.linear_num_value_heads
            heads = config.linear_num_value_heads
            fields["ssm.inner_size"] = heads * config.linear_value_head_dim
            fields["attention.recurrent_layers"] = linear
            fields["full_attention_interval"] = linear.index(False) + 1
        case "lfm2" | "lfm2moe":
            if kind == "lfm2moe":
                fields["leading_dense_block_count"] = config.num_dense_layers
                fields["expert_gating_func"] = 2
            fields["attention.head_count_kv"] = [
                0 if layer == "conv" else config.num_key_value_heads for layer in config.layer_types
            ]
            fields["vocab_size"] = config.vocab_size
            fields["shortconv.l_cache"] = config.conv_L_cache
        case "mamba":
            fields |= {"attention.head_count": 0, "attention.head_count_kv": None}
            fields |= {"context_length": 2**20, "feed_forward_length": 0}
            fields["attention.layer_norm_epsilon"] = None
            fields["attention.layer_norm_rms_epsilon"] = config.layer_norm_epsilon
            fields["ssm.inner_size"] = config.intermediate_size
            fields["ssm.state_size"] = config.state_size
            fields["ssm.conv_kernel"] = config.conv_kernel
            fields["ssm.time_step_rank"] = config.time_step_rank
            fields["ssm.dt_b_c_rms"] = config.model_type == "falcon_mamba"
        case "jamba":
            fields["attention.head_count_kv"] = [
                config.num_key_value_heads if kind == "attention" else 0
                for kind in config.layers_block_type
            ]
            fields["ssm.inner_size"] = config.mamba_expand * config.hidden_size
            fields["ssm.state_size"] = config.mamba_d_state
            fields["ssm.conv_kernel"] = config.mamba_d_conv
            fields["ssm.time_step_rank"] = config.mamba_dt_rank
            fields |= {"expert_count": config.num_experts}
            fields["expert_used_count"] = config.num_experts_per_tok
        case "mamba2" | "granitehybrid" | "falcon-h1" | "nemotron_h":
            fields |= _state_spaces(config, kind)
        case "starcoder":
            fields["attention.head_count_kv"] = 1
        case "qwen2vl" | "qwen3vl" | "paddleocr":
            fields["rope.dimension_sections"] = [*rope["mrope_section"], 0]
            if kind == "qwen3vl":
                fields["n_deepstack_layers"] = 1
        case "gemma4":
            local = [layer == "sliding_attention" for layer in config.layer_types]
            shared, inner = config.num_kv_shared_layers, config.intermediate_size
            fields["attention.sliding_window_pattern"] = local
            fields["attention.shared_kv_layers"] = shared
            per_layer = getattr(config, "hidden_size_per_layer_input", 0)
            fields["embedding_length_per_layer_input"] = per_layer
            full = config.per_layer_config[local.index(False)]
            for part in ("key", "value"):
                fields[f"attention.{part}_length"] = full.head_dim
                fields[f"attention.{part}_length_swa"] = config.head_dim
            fields["rope.dimension_count"] = full.head_dim
            fields["rope.dimension_count_swa"] = config.head_dim
            local_rope = config.rope_parameters["sliding_attention"]
            fields["rope.freq_base_swa"] = float(local_rope["rope_theta"])
            if config.use_double_wide_mlp:
                first = config.num_hidden_layers - shared
                fields["feed_forward_length"] = [inner] * first + [2 * inner] * shared
            heads = config.num_key_value_heads, full.num_key_value_heads
            if heads[0] != heads[1]:
                fields["attention.head_count_kv"] = [heads[not one] for one in local]
        case "olmo":
            fields["attention.clamp_kqv"] = config.clip_qkv
        case "stablelm":
            fields["use_parallel_residual"] = config.use_parallel_residual
        case "command-r" | "cohere2":
            fields["logit_scale"] = config.logit_scale
            fields["rope.scaling.type"] = "none"
        case "gptneox":
            fields["use_parallel_residual"] = config.use_parallel_residual
        case "mpt":
            fields["attention.max_alibi_bias"] = float(config.attn_config.alibi_bias_max)
            fields["attention.clamp_kqv"] = config.attn_config.clip_qkv
        case "mistral3" if "llama_4_scaling_beta" in rope:
            fields["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    return {f"{kind}.{key}": value for key, value in fields.items() if value is not None}


def _latent_attention(config: Any, kind: str) -> dict[str, Any]:
    """Return the metadata of latent attention: new files have one head of keys and values."""
    rope = config.qk_rope_head_dim
    size = config.qk_nope_head_dim + rope
    fields: dict[str, Any] = {
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "rope.dimension_count": rope,
        "attention.key_length": size,
    }
    if _has_old_layout(config):
        value = None if kind == "minicpm3" else config.v_head_dim
        return fields | {"attention.value_length": value}
    mscale = config.rope_parameters.get("mscale_all_dim")
    return fields | {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + rope,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": size,
        "attention.value_length_mla": config.v_head_dim,
        "rope.scaling.yarn_log_multiplier": mscale and 0.1 * mscale,
    }


def _has_old_layout(config: Any) -> bool:
    """Return True for models whose files have kv_b_proj as a whole: those of DeepSeek V2 had."""
    return type(config).__name__ in ("DeepseekV2Config", "MiniCPM3Config")


def _state_spaces(config: Any, kind: str) -> dict[str, Any]:
    """Return the metadata of the families with Mamba-2's mixers."""

    def get(*names: str) -> Any:
        return next(value for name in names if (value := getattr(config, name, None)) is not None)

    heads = get("mamba_n_heads", "mamba_num_heads", "num_heads")
    size = get("mamba_d_head", "mamba_head_dim", "head_dim")
    fields: dict[str, Any] = {
        "ssm.conv_kernel": get("mamba_d_conv", "conv_kernel"),
        "ssm.state_size": get("mamba_d_state", "ssm_state_size", "state_size"),
        "ssm.group_count": get("mamba_n_groups", "n_groups"),
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * size,
        "vocab_size": config.vocab_size,
    }
    if kind == "mamba2":
        eps = config.layer_norm_epsilon
        fields |= {"attention.head_count": 0, "attention.head_count_kv": None}
        return fields | {"context_length": 2**20, "attention.layer_norm_rms_epsilon": eps}
    if kind == "falcon-h1":
        return fields
    is_bamba = type(config).__name__ == "BambaConfig"
    kinds = list(getattr(config, "layers_block_type", None) or config.layer_types)
    kv_heads = config.num_key_value_heads
    fields["attention.head_count_kv"] = [
        kv_heads * (one in ("attention", "full_attention")) for one in kinds
    ]
    fields["rope.scaling.finetuned"] = is_bamba
    fields["rope.dimension_count"] = config.hidden_size // config.num_attention_heads
    if kind in ("nemotron_h", "nemotron_h_moe"):
        own, inner = "mlp", config.intermediate_size
        if kind == "nemotron_h_moe":
            own, inner = "moe", config.moe_intermediate_size
        fields["feed_forward_length"] = [inner * (one == own) for one in kinds]
        fields["rope.dimension_count"] = config.head_dim
    elif is_bamba:
        fields["rope.dimension_count"] = config.hidden_size // config.num_attention_heads // 2
    else:
        fields["expert_shared_feed_forward_length"] = config.shared_intermediate_size
        fields["attention.scale"] = config.attention_multiplier
        fields["embedding_scale"] = config.embedding_multiplier
        fields["residual_scale"] = config.residual_multiplier
        fields["logit_scale"] = config.logits_scaling
    return fields


def _multiplied(x: NDArray[np.float32], name: str, config: Any) -> NDArray[np.float32]:
    """Return a tensor of Falcon-H1 with the factors that belong to it."""
    inner, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    gate, down = config.mlp_multipliers
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    if ".in_proj." in name:
        sizes = [inner, inner, state, state, config.mamba_n_heads]
        rows = np.repeat(np.array(config.ssm_multipliers, np.float32), sizes)
        x = x * np.float32(config.ssm_in_multiplier)
        return x * rows.reshape(-1, *[1] * (x.ndim - 1))
    return x * np.float32(factors.get(name.split(".")[-2], 1.0))


def tiled(x: NDArray[np.float32], name: str, config: Any) -> NDArray[np.float32]:
    """Return a tensor of linear attention with the first head of values of each head of keys, then
    the second ones, and so on."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    rows = keys * config.linear_key_head_dim
    if "in_proj_qkv" in name or "conv1d" in name:
        return np.concatenate([x[: 2 * rows], tiled(x[2 * rows :], "", config)])
    if "out_proj" in name:
        return tiled(x.T, "", config).T
    heads = x.reshape(keys, values // keys, -1, *x.shape[1:])
    return np.concatenate([heads[:, i] for i in range(values // keys)]).reshape(x.shape)


RWKV7 = {
    "model.embeddings": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "attn_norm": "attn_norm",
    "ffn_norm": "attn_norm_2",
    "attn.r_proj": "time_mix_receptance",
    "attn.k_proj": "time_mix_key",
    "attn.v_proj": "time_mix_value",
    "attn.o_proj": "time_mix_output",
    "attn.g_norm": "time_mix_ln",
    "ffn.key": "channel_mix_key",
    "ffn.value": "channel_mix_value",
}


def _rwkv7(model: Any) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Return the metadata and the tensors of RWKV 7; the first layer has a copy of a as v."""
    config, arrays = model.config, {}
    mixes: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for name, tensor in model.state_dict().items():
        x = tensor.float().numpy()
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        layer, inner = (f"blk.{match[1]}.", match[2]) if match else ("", name)
        module, _, suffix = inner.rpartition(".")
        if module == "pre_norm":
            arrays[f"token_embd_norm.{suffix}"] = x
        elif module == "attn" and suffix.startswith("x_"):
            mixes.setdefault(layer, {})[suffix] = x
        elif module in ("attn", "ffn"):
            own = {"x_k": "channel_mix_lerp_k"}.get(suffix, f"time_mix_{suffix}")
            arrays[f"{layer}{own}.weight"] = x.ravel()
        elif "_lora." in module:
            number = {"0.weight": 1, "2.weight": 2, "2.bias": 0}[f"{module[-1]}.{suffix}"]
            kinds = "av" if layer == "blk.0." and module[5] == "a" else module[5]
            arrays |= {f"{layer}time_mix_{kind}{number}.weight": x for kind in kinds}
        else:
            arrays[f"{layer}{RWKV7[module]}.{suffix}"] = x
    for layer, own in mixes.items():
        stacked = np.stack([own[f"x_{kind}"] for kind in "rwkvag"])
        arrays[f"{layer}time_mix_lerp_fused.weight"] = stacked
    fields = {
        "context_length": 1048576,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": 0,
        "attention.layer_norm_epsilon": config.norm_eps,
        "wkv.head_size": config.head_dim,
        "attention.decay_lora_rank": config.decay_low_rank_dim,
        "attention.iclr_lora_rank": config.a_low_rank_dim,
        "attention.value_residual_mix_lora_rank": config.v_low_rank_dim,
        "attention.gate_lora_rank": config.gate_low_rank_dim,
    }
    return {f"rwkv7.{key}": value for key, value in fields.items()}, arrays


def convert(
    model: PreTrainedModel,
    kind: str,
    path: Path,
    types: Mapping[str, str] | None = None,
    *,
    as_published: bool = True,
    vocabulary: Mapping[str, Any] = VOCABULARY,
) -> None:
    """Write a model of transformers.

    Args:
        model: the model.
        kind: its `general.architecture`.
        path: the file.
        types: types of tensors by parts of their names; "" for all others; default: f32.
        vocabulary: metadata of its tokenizer.
        as_published: write tensors in the forms of published checkpoints, too: fused, or unused.
    """
    if kind == "rwkv7":
        fields, arrays = _rwkv7(model)
        metadata = {"general.architecture": kind} | vocabulary | fields
        _write_arrays(path, metadata, arrays, types)
        return
    model.config.allow_global_per_layer_attribute_access = True  # Gemma 4
    config, names = model.config.get_text_config(), NAMES | OTHER_NAMES.get(kind, {})
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    heads = getattr(config, "num_attention_heads", 1)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    metadata = {"general.architecture": kind, **vocabulary, **_fields(config, kind, rope, size)}
    if kind == "lfm2" or (kind == "lfm2moe" and config.num_dense_layers):
        inner = model.model.layers[0].feed_forward.w1.out_features
        metadata[f"{kind}.feed_forward_length"] = inner
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    if rope.get("rope_type") == "llama3":
        plain = rope["rope_theta"] ** -(np.arange(0, size, 2) / size)
        arrays["rope_freqs.weight"] = plain / model.model.rotary_emb.inv_freq.numpy()
    if rope.get("rope_type") == "proportional":
        full_size = metadata[f"{kind}.rope.dimension_count"]
        factors = np.full(full_size // 2, 1e30, np.float32)
        factors[: int(full_size * rope["partial_rotary_factor"] / 2)] = 1
        arrays["rope_freqs.weight"] = factors
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            arrays[f"rope_factors_{length}.weight"] = factors
    tied = getattr(config, "tie_word_embeddings", True)
    for name, tensor in model.state_dict().items():
        if "vision" in name:
            continue
        name = name.replace("model.language_model.", "model.")
        module, _, suffix = name.rpartition(".")
        if module.endswith("act_fn"):  # Apertus
            metadata.setdefault(f"xielu.{suffix}", []).append(tensor.float().item())
            continue
        if module in ("lm_head", "embed_out") and tied:
            continue
        match = re.fullmatch(r".*?\.(?:layers|h|blocks)\.(\d+)\.(.*)", module)
        layer, stored = (f"blk.{match[1]}.", match[2]) if match else ("", module)
        x = tensor.float().numpy()
        if stored == "mlp.shared_expert_gate":
            x = x[0]
        kv_heads = getattr(config, "num_key_value_heads", heads)
        own = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}
        if kind in PERMUTED and stored in own:
            halves = x.reshape(own[stored], 2, size // 2, -1)
            x = halves.swapaxes(1, 2).reshape(x.shape)
        if stored.endswith("query_key_value"):
            groups = getattr(config, "num_kv_heads", heads)
            each = x.reshape(groups, heads // groups + 2, size, -1)
            parts = [each[:, :-2], each[:, -2:-1], each[:, -1:]]
            x = np.concatenate([part.reshape(-1, *x.shape[1:]) for part in parts])
        if kind == "gpt2" and x.ndim == 2 and stored.startswith(("attn.", "mlp.")):
            x = x.T
        if kind in SHIFTED and name.endswith(SHIFTED[kind]):
            x = x + np.float32(1)
        if kind in ("qwen35", "qwen35moe", "qwen3next"):
            if name.endswith(("q_norm.weight", "k_norm.weight", "model.norm.weight")):
                x = x + np.float32(1)
            reordered = "linear_attn." in name and "linear_attn.norm" not in name
            if reordered and kind != "qwen3next":
                x = tiled(x, name, config)
        if x.ndim == 3 and "conv" in stored:
            x = x[:, 0]
        if kind == "falcon-h1":
            x = _multiplied(x, name, config)
        if kind in STATE_SPACES and suffix in ("A_log", "D"):
            x = x[:, None]
        if stored in ("mamba.norm", "mixer.norm"):
            x = x.reshape(metadata[f"{kind}.ssm.group_count"], -1)
        sparse = f"{kind}.expert_count" in metadata and kind != "jamba"
        if stored == "shared_mlp.input_linear":
            for part, half in zip(("gate", "up"), np.split(x, 2), strict=True):
                arrays[f"{layer}ffn_{part}{'_shexp' * sparse}.{suffix}"] = half
        elif stored == "shared_mlp.output_linear":
            arrays[f"{layer}ffn_down{'_shexp' * sparse}.{suffix}"] = x
        elif stored == "self_attn.kv_b_proj" and not _has_old_layout(config):
            key = config.qk_nope_head_dim
            each = x.reshape(heads, key + config.v_head_dim, -1)
            arrays[f"{layer}attn_k_b.{suffix}"] = each[:, :key].swapaxes(1, 2)
            arrays[f"{layer}attn_v_b.{suffix}"] = each[:, key:]
        elif stored == "linear_attn.in_proj_qkvz":
            groups, group = config.linear_num_key_heads, config.linear_num_value_heads
            sizes = [config.linear_key_head_dim] * 2
            sizes += [config.linear_value_head_dim * group // groups] * 2
            each = np.split(x.reshape(groups, sum(sizes), -1), np.cumsum(sizes)[:-1], 1)
            parts = [part.reshape(-1, x.shape[1]) for part in each]
            arrays[f"{layer}attn_qkv.{suffix}"] = np.concatenate(parts[:3])
            arrays[f"{layer}attn_gate.{suffix}"] = parts[3]
        elif suffix in _WHOLE:
            number = re.search(r"layers\.(\d+)\.", name)
            assert number is not None
            arrays[f"blk.{number[1]}.{_WHOLE[suffix]}"] = x.reshape(-1)
        elif stored == "router" and suffix == "scale":
            arrays[f"{layer}ffn_gate_inp.scale"] = x
        elif suffix == "gate_up_proj" and kind in ("gemma4", "qwen3next"):
            arrays[f"{layer}ffn_gate_up_exps.weight"] = x
        elif kind == "gpt-oss" and stored == "mlp.experts":  # rows of gate and up in turn
            x = x if suffix.endswith("_bias") else x.swapaxes(1, 2)
            kind_of = "bias" if suffix.endswith("_bias") else "weight"
            if suffix.startswith("down"):
                arrays[f"{layer}ffn_down_exps.{kind_of}"] = x
            else:
                arrays[f"{layer}ffn_gate_exps.{kind_of}"] = x[:, ::2]
                arrays[f"{layer}ffn_up_exps.{kind_of}"] = x[:, 1::2]
        elif stored.endswith("experts"):  # of gate and up: gate, then up
            if kind == "llama4":
                x = x.swapaxes(1, 2)
            parts = ("gate", "up") if suffix == "gate_up_proj" else (suffix.split("_")[0],)
            for part, rows in zip(parts, np.split(x, len(parts), 1), strict=True):
                arrays[f"{layer}ffn_{part}_exps.weight"] = rows
        elif suffix == "A_log":
            arrays[f"{layer}ssm_a"] = -np.exp(x)
        elif stored == "pre_ff_layernorm" and kind == "falcon-h1":
            arrays[f"{layer}ffn_norm"] = x
        elif suffix == "D":
            arrays[f"{layer}ssm_d"] = x
        elif suffix == "dt_bias":
            arrays[f"{layer}ssm_dt.bias"] = x
        elif suffix == "correct_output_scale":
            number = module.split(".")[-2]
            arrays[f"blk.{number}.altup_correct_scale.weight"] = x
        elif "altup_projections" in name or "altup_unembed" in name:
            name = "altup_proj" if "altup_projections" in name else "altup_unembd_proj"
            stacked = arrays.get(f"{name}.weight", x[:0][None].reshape(0, *x.shape))
            arrays[f"{name}.weight"] = np.concatenate([stacked, x[None]])
        elif suffix == "layer_scalar":
            arrays[f"blk.{module.rpartition('.')[2]}.layer_output_scale.weight"] = x
        elif ".norms." in stored:  # norms of heads, with one tensor for all
            name = f"{layer}{names[stored.rpartition('.')[0]]}.{suffix}"
            arrays[name] = np.concatenate([arrays.get(name, x[:0].reshape(0, size)), x[None]])
        else:
            arrays[f"{layer}{names[stored]}.{suffix}"] = x
    if kind == "gemma4" and as_published:
        # These checkpoints have tensors that nothing reads.
        for i in range(
            config.num_hidden_layers - config.num_kv_shared_layers, config.num_hidden_layers
        ):
            for part in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
                arrays.setdefault(f"blk.{i}.{part}", np.full((2, 32), 7.0))
    if kind == "muse-glimmer":
        for i in range(config.num_hidden_layers):
            scale = np.full(size, config.qk_scale_factor, np.float32)
            arrays[f"blk.{i}.attn_q_norm.weight"] = scale
            arrays[f"blk.{i}.attn_k_norm.weight"] = np.ones(size, np.float32)
    if kind == "chatglm" and as_published:
        # These checkpoints have one tensor for queries, keys and values.
        for name in [name for name in arrays if "attn_q." in name]:
            others = [name.replace("attn_q", other) for other in ("attn_k", "attn_v")]
            fused = [arrays.pop(part) for part in (name, *others)]
            arrays[name.replace("attn_q", "attn_qkv")] = np.concatenate(fused)
    _write_arrays(path, metadata, arrays, types)


def _write_arrays(
    path: Path,
    metadata: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray[Any, Any]],
    types: Mapping[str, str] | None,
) -> None:
    """Write a file; `types` as in `convert`."""
    tensors: dict[str, tuple[int, Sequence[int], bytes]] = {}
    for name, x in arrays.items():
        chosen = next((t for part, t in (types or {"": "f32"}).items() if part in name), "f32")
        in_float32 = r"position|ssm_(conv1d|a$|d$|norm)|shortconv\.conv|time_mix_w[12]"
        is_matrix = x.ndim == 2 or name.endswith(("_exps.weight", "_b.weight"))
        if not is_matrix or re.search(in_float32, name):
            chosen = "f32"
        tensors[name] = TYPES[chosen], x.shape, quantize(np.ascontiguousarray(x), chosen)
    write_gguf(path, metadata, tensors)
