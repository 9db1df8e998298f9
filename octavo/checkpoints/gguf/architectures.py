"""Architectures of GGUF files: their tensors and metadata in Hugging Face's names.

Facts of llama.cpp's converter (convert_hf_to_gguf.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_NAMES = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Modules of Llama, and their names in GGUF; those of layers without their prefixes."""


def _experts(router: str, prefix: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Return the names of a router and of all experts' projections; * is an expert's index."""
    stored = {gate: "ffn_gate_exps", up: "ffn_up_exps", down: "ffn_down_exps"}
    return {router: "ffn_gate_inp"} | {f"{prefix}.*.{own}": name for own, name in stored.items()}


_EXPERTS = _experts("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
_MIXTRAL = _experts("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
_PARTS = ("gate", "up", "down")


def _shared(prefix: str) -> dict[str, str]:
    """Return the names of the block that all tokens use."""
    return {f"{prefix}.{part}_proj": f"ffn_{part}_shexp" for part in _PARTS}


_SHARED_EXPERT = _shared("mlp.shared_expert") | {"mlp.shared_expert_gate": "ffn_gate_inp_shexp"}
_GROUPED_EXPERTS = {  # DeepSeek and GLM
    **_EXPERTS,
    **_shared("mlp.shared_experts"),
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
_GRANITE_EXPERTS = {
    **_experts(
        "block_sparse_moe.router.layer",
        "block_sparse_moe.experts",
        *(f"{part}_proj" for part in _PARTS),
    ),
    **_shared("shared_mlp"),
    "shared_mlp.output_linear": "ffn_down_shexp",
}
_EXPERT_FIELDS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_GROUPED_FIELDS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_SHARED_SIZE = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_LATENT = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
}
_LATENT_FIELDS = {
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_OUT_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_SANDWICH = _OUT_NORMS | {"pre_feedforward_layernorm": "ffn_norm"}
_LAYER_INPUTS = {  # Gemma 3n and 4
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_STREAMS = {  # Gemma 3n; its projections are slices of one tensor
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}
_STREAMS |= {f"model.altup_projections.{i}": "altup_proj" for i in range(63)}
_STREAMS |= {f"model.altup_unembed_projections.{i}": "altup_unembd_proj" for i in range(63)}
_GPT2 = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
}
_GPT2_FIELDS = {"n_inner": "feed_forward_length", "n_positions": "context_length"}
_FUSED_UP = {"mlp.gate_up_proj": "ffn_up"}
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_OLD_LAYERS = {  # GPT-NeoX, BLOOM and Falcon
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_SELF_ATTENTION = {
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
}

_LINEAR_ATTENTION = {  # Qwen3-Next and Qwen3.5
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_LFM2 = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}

_LFM2_FIELDS = {
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "conv_L_cache": "shortconv.l_cache",
}
_QWEN_HYBRID = {
    **_NAMES,
    **_HEAD_NORMS,
    **_LINEAR_ATTENTION,
    "post_attention_layernorm": "post_attention_norm",
}
_QWEN_HYBRID_FIELDS = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
}
_QWEN_HYBRID_NORMS = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")

_RWKV7 = {
    "model.embeddings": "token_embd",
    "model.pre_norm": "token_embd_norm",
    "model.norm": "output_norm",
    "lm_head": "output",
    "attn_norm": "attn_norm",
    "ffn_norm": "attn_norm_2",
    "attn.r_proj": "time_mix_receptance",
    "attn.k_proj": "time_mix_key",
    "attn.v_proj": "time_mix_value",
    "attn.o_proj": "time_mix_output",
    "attn.g_norm": "time_mix_ln",
    "ffn.x_k": "channel_mix_lerp_k.weight",
    "ffn.key": "channel_mix_key",
    "ffn.value": "channel_mix_value",
}
_RWKV7 |= {f"attn.x_{name}": "time_mix_lerp_fused.weight" for name in "rwkvag"}
_RWKV7 |= {f"attn.{name}": f"time_mix_{name}.weight" for name in ("k_k", "k_a", "r_k")}
for _name in "wavg":  # low-rank projections
    _RWKV7 |= {f"attn.{_name}_lora.lora.{i}": f"time_mix_{_name}{i or 1}" for i in (0, 2)}
    _RWKV7[f"attn.{_name}_lora.lora.2.bias"] = f"time_mix_{_name}0.weight"


def _mixer(module: str) -> dict[str, str]:
    """Return the names of the parts of Mamba's mixers, of both versions."""
    parts = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "out_proj": "ssm_out"}
    parts |= {"norm": "ssm_norm", "A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}
    parts |= {"x_proj": "ssm_x", "dt_proj": "ssm_dt"}
    parts |= {f"{name}_layernorm": f"ssm_{name}_norm" for name in ("dt", "b", "c")}
    return {f"{module}.{part}": stored for part, stored in parts.items()}


_MIXERS = {"norm": "attn_norm", "lm_head": "output", **_mixer("mixer")}
_MAMBA = {**_MIXERS, "backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm"}
_GRANITE_HYBRID = {
    **_NAMES,
    **_mixer("mamba"),
    "shared_mlp.gate_proj": "ffn_gate",
    "shared_mlp.up_proj": "ffn_up",
    "shared_mlp.output_linear": "ffn_down",
}
_JAMBA = {
    **_NAMES,
    **_mixer("mamba"),
    "model.final_layernorm": "output_norm",
    "pre_ff_layernorm": "ffn_norm",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}
_FALCON_H1 = _JAMBA | {"pre_ff_layernorm.weight": "ffn_norm"}
_NEMOTRON_H = {
    **_MIXERS,
    "model.embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
}
_MAMBA2_FIELDS = {  # Granite 4, Bamba and Falcon-H1
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
}
_FACTORS = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
"""Factors of Falcon-H1, which are parts of the weights in GGUF."""

FUSED = "attn_qkv"
"""Tensor with the rows of queries, keys and values; some files have it in place of the three."""
FUSED_MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""Modules whose tensors may be parts of `FUSED`, in its order."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF, and the Hugging Face architecture that computes it."""

    name: str
    names: Mapping[str, str] = field(default_factory=lambda: _NAMES)
    """Names of modules in GGUF, see `_NAMES`; of tensors that are called neither weight nor bias,
    their whole names."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields of the config, and the keys of their values, without the architecture's prefix."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config that the file need not name."""
    layers: str = "model.layers."
    """Prefix of the names of layers."""
    windowed: bool = False
    """True if the model has sliding windows, where the file names their size."""
    window_by_layer: bool = False
    """True if the file may name the layers that have a sliding window."""
    windowed_name: str = ""
    """Hugging Face architecture of files with a sliding window, if it is another one."""
    unwindowed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config if the file names no sliding window."""
    varying: tuple[str, ...] = ()
    """Keys whose numbers may differ between layers."""
    permuted: bool = False
    """True if the converter has reordered the rows of queries and keys for rotations of
    neighbors."""
    norm_shift: float = 0.0
    """Number that the converter has added to the weights of norms."""
    shifted: str | tuple[str, ...] = "norm.weight"
    """End of the names of these weights, or several ends."""
    predicts: bool = False
    """True if files may have layers that predict several tokens at once, after all others. They are
    not read."""
    tiled: bool = False
    """True if the converter has reordered the heads of values of linear attention: the first one of
    each head of keys, then the second ones, and so on."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the router's logits; see `SCORES`."""
    constants: Mapping[str, str] = field(default_factory=dict)
    """Fields of the config that are not in the metadata, and the layers' tensors that repeat their
    number; an empty field: 1."""


SCORES = {"softmax": 1, "sigmoid": 2}
"""Values of expert_gating_func."""
FUSED_EXPERTS = "ffn_gate_up_exps"
"""Tensor with the rows of gate and up of each expert; some files have it in place of the two."""
EXPERT = re.compile(r"(?<=experts)\.(\d+)\.")
"""Index of an expert in the name of a module."""


def stored_name(name: str, names: Mapping[str, str], layers: str) -> str | None:
    """Return the name of a tensor in GGUF, or None.

    Args:
        name: the tensor's name in Hugging Face's form.
        names: names of modules, as in `Architecture.names`.
        layers: prefix of the names of layers.
    """
    module, _, kind = name.rpartition(".")
    layer, _, inner = module.removeprefix(layers).partition(".")
    inner = EXPERT.sub(".*.", inner)
    if not module.startswith(layers) or not layer.isdecimal():
        return f"{names[module]}.{kind}" if module in names else None
    whole = names.get(f"{inner}.{kind}".removeprefix("."))
    inner = inner.partition(".norms.")[0] + ".norms" if ".norms." in inner else inner
    if whole is None and inner not in names:
        return None
    return f"blk.{layer}.{whole or f'{names[inner]}.{kind}'}"


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", permuted=True),
    "mistral3": Architecture(
        "MistralForCausalLM",
        windowed=True,
        unwindowed={"sliding_window": None},
        permuted=True,
    ),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2vl": Architecture("Qwen2_5_VLForConditionalGeneration"),
    "qwen3": Architecture("Qwen3ForCausalLM", _NAMES | _HEAD_NORMS),
    "llama with experts": Architecture(
        "MixtralForCausalLM",
        _NAMES | _MIXTRAL,
        {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        {"sliding_window": None},
        permuted=True,
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        _NAMES | _EXPERTS | _SHARED_EXPERT,
        _EXPERT_FIELDS | _SHARED_SIZE,
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        _NAMES | _HEAD_NORMS | _EXPERTS,
        _EXPERT_FIELDS,
        {"norm_topk_prob": True},
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        _NAMES | _HEAD_NORMS | _EXPERTS,
        _EXPERT_FIELDS,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        _NAMES
        | _experts("mlp.router", "mlp.experts", "gate_proj", "up_proj", "down_proj")
        | {"post_attention_layernorm": "post_attention_norm"}
        | {"self_attn.sinks": "attn_sinks.weight"},
        {
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        {"split_experts": True},
        windowed=True,
    ),
    "qwen3vl": Architecture("Qwen3VLForConditionalGeneration", _NAMES | _HEAD_NORMS),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM",
        _QWEN_HYBRID,
        _QWEN_HYBRID_FIELDS,
        norm_shift=1.0,
        shifted=_QWEN_HYBRID_NORMS,
        predicts=True,
        tiled=True,
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        _QWEN_HYBRID | _EXPERTS | _SHARED_EXPERT,
        _QWEN_HYBRID_FIELDS | _EXPERT_FIELDS | _SHARED_SIZE,
        norm_shift=1.0,
        shifted=_QWEN_HYBRID_NORMS,
        predicts=True,
        tiled=True,
    ),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM",
        _QWEN_HYBRID | _EXPERTS | _SHARED_EXPERT,
        _QWEN_HYBRID_FIELDS | _EXPERT_FIELDS | _SHARED_SIZE,
        norm_shift=1.0,
        shifted=_QWEN_HYBRID_NORMS,
        predicts=True,
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        _NAMES
        | _HEAD_NORMS
        | _GROUPED_EXPERTS
        | {"post_attention_layernorm": "post_attention_norm"},
        _GROUPED_FIELDS,
        predicts=True,
        scores="sigmoid",
    ),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM",
        _NAMES | _LATENT | _GROUPED_EXPERTS,
        _LATENT_FIELDS | _GROUPED_FIELDS,
        {"q_lora_rank": None},
        predicts=True,
    ),
    "minicpm3": Architecture(
        "MiniCPM3ForCausalLM",
        _NAMES | _LATENT,
        _LATENT_FIELDS,
        # llama.cpp has the factors of the published model.
        {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        _LFM2,
        _LFM2_FIELDS,
        {"block_auto_adjust_ff_dim": False},
        varying=("attention.head_count_kv",),
    ),
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM",
        _LFM2
        | _experts("feed_forward.gate", "feed_forward.experts", "w1", "w3", "w2")
        | {"feed_forward.expert_bias": "exp_probs_b.bias"},
        _LFM2_FIELDS | _EXPERT_FIELDS | {"num_dense_layers": "leading_dense_block_count"},
        {"norm_topk_prob": True},
        varying=("attention.head_count_kv",),
        scores="sigmoid",
    ),
    "rwkv7": Architecture(
        "RWKV7ForCausalLM",
        _RWKV7,
        {
            "head_dim": "wkv.head_size",
            "decay_low_rank_dim": "attention.decay_lora_rank",
            "a_low_rank_dim": "attention.iclr_lora_rank",
            "v_low_rank_dim": "attention.value_residual_mix_lora_rank",
            "gate_low_rank_dim": "attention.gate_lora_rank",
            "norm_eps": "attention.layer_norm_epsilon",
        },
    ),
    "mamba": Architecture(
        "MambaForCausalLM",
        _MAMBA,
        {
            "intermediate_size": "ssm.inner_size",
            "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
            "state_size": "ssm.state_size",
            "conv_kernel": "ssm.conv_kernel",
            "time_step_rank": "ssm.time_step_rank",
        },
        layers="backbone.layers.",
    ),
    "jamba": Architecture(
        "JambaForCausalLM",
        _JAMBA,
        {
            "num_experts": "expert_count",
            "mamba_d_state": "ssm.state_size",
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_dt_rank": "ssm.time_step_rank",
        },
        varying=("attention.head_count_kv",),
    ),
    "mamba2": Architecture(
        "Mamba2ForCausalLM",
        _MAMBA,
        {
            "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
            "num_heads": "ssm.time_step_rank",
            "n_groups": "ssm.group_count",
            "state_size": "ssm.state_size",
            "conv_kernel": "ssm.conv_kernel",
        },
        layers="backbone.layers.",
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        _GRANITE_HYBRID,
        _GRANITE
        | _MAMBA2_FIELDS
        | {"shared_intermediate_size": "expert_shared_feed_forward_length"},
        {"num_local_experts": 0, "split_shared_mlp": True},
        varying=("attention.head_count_kv",),
        permuted=True,
    ),
    "granitehybrid with experts": Architecture(
        "GraniteMoeHybridForCausalLM",
        _GRANITE_HYBRID | _GRANITE_EXPERTS,
        _GRANITE
        | _MAMBA2_FIELDS
        | {"shared_intermediate_size": "expert_shared_feed_forward_length"}
        | {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        {"split_experts": True},
        varying=("attention.head_count_kv",),
        permuted=True,
    ),
    "granitemoe": Architecture(
        "GraniteMoeSharedForCausalLM",
        _NAMES | _GRANITE_EXPERTS,
        _GRANITE
        | {"shared_intermediate_size": "expert_shared_feed_forward_length"}
        | {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        {"split_experts": True},
        permuted=True,
    ),
    "falcon-h1": Architecture(
        "FalconH1ForCausalLM",
        _FALCON_H1,
        _MAMBA2_FIELDS | {"mamba_d_ssm": "ssm.inner_size"},
        dict.fromkeys((f"{name}_multiplier" for name in _FACTORS), 1.0)
        | {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}
        | {"mamba_norm_before_gate": False},
    ),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM",
        _NEMOTRON_H,
        {
            "mamba_num_heads": "ssm.time_step_rank",
            "n_groups": "ssm.group_count",
            "ssm_state_size": "ssm.state_size",
            "conv_kernel": "ssm.conv_kernel",
        },
        varying=("attention.head_count_kv", "feed_forward_length"),
        permuted=True,
    ),
    "gemma": Architecture("GemmaForCausalLM", norm_shift=1.0),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        _NAMES | _SANDWICH,
        {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        windowed=True,
        window_by_layer=True,
        norm_shift=1.0,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        _NAMES | _SANDWICH | _HEAD_NORMS,
        {
            "final_logit_softcapping": "final_logit_softcapping",
            "rope_local_base_freq": "rope.freq_base_swa",
        },
        {"rope_local_base_freq": 10000.0},
        windowed=True,
        window_by_layer=True,
        unwindowed={"sliding_window_pattern": 1},
        norm_shift=1.0,
    ),
    "gemma3n": Architecture(
        "Gemma3nForCausalLM",
        _NAMES | _SANDWICH | _HEAD_NORMS | _LAYER_INPUTS | _STREAMS,
        {
            "final_logit_softcapping": "final_logit_softcapping",
            "rope_local_base_freq": "rope.freq_base_swa",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "altup_active_idx": "altup.active_idx",
            "altup_num_inputs": "altup.num_inputs",
        },
        {"rope_local_base_freq": 10000.0},
        windowed=True,
        window_by_layer=True,
        varying=("feed_forward_length",),
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        _NAMES
        | _SANDWICH
        | _HEAD_NORMS
        | _LAYER_INPUTS
        | {"layer_scalar": "layer_output_scale.weight"},
        {
            "final_logit_softcapping": "final_logit_softcapping",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "num_kv_shared_layers": "attention.shared_kv_layers",
        },
        {"final_logit_softcapping": None, "hidden_size_per_layer_input": 0},
        windowed=True,
        window_by_layer=True,
        varying=("feed_forward_length", "attention.head_count_kv"),
    ),
    "gemma4 with experts": Architecture(
        "Gemma4ForCausalLM",
        _NAMES
        | _SANDWICH
        | _HEAD_NORMS
        | _LAYER_INPUTS
        | {
            "layer_scalar": "layer_output_scale.weight",
            "router.proj": "ffn_gate_inp",
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            "experts.gate_up_proj": f"{FUSED_EXPERTS}.weight",
            "experts.down_proj": "ffn_down_exps.weight",
            "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "post_feedforward_layernorm_1": "post_ffw_norm_1",
            "post_feedforward_layernorm_2": "post_ffw_norm_2",
        },
        {
            "final_logit_softcapping": "final_logit_softcapping",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        {"final_logit_softcapping": None, "hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True},
        windowed=True,
        window_by_layer=True,
        varying=("feed_forward_length", "attention.head_count_kv"),
    ),
    "muse-glimmer": Architecture(
        "MuseGlimmerForConditionalGeneration",
        _NAMES | _SANDWICH | {"self_attn.gate_proj": "attn_gate"},
        {"final_logit_softcapping": "final_logit_softcapping", "output_multiplier": "logit_scale"},
        {"post_norm_eps": 1e-8},
        windowed=True,
        window_by_layer=True,
        permuted=True,
        norm_shift=1.0,
        shifted="layernorm.weight",
        constants={"qk_scale_factor": "attn_q_norm", "": "attn_k_norm"},
    ),
    "granite": Architecture("GraniteForCausalLM", fields=_GRANITE, permuted=True),
    "granite_swa": Architecture(
        "GraniteSWAForCausalLM",
        _NAMES | {"self_attn.sinks": "attn_sinks.weight"},
        _GRANITE,
        windowed=True,
        window_by_layer=True,
        permuted=True,
    ),
    "minicpm": Architecture("GraniteForCausalLM", fields=_GRANITE, permuted=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", permuted=True),
    "olmo": Architecture(
        "OlmoForCausalLM", fields={"clip_qkv": "attention.clamp_kqv"}, permuted=True
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        _NAMES | _OUT_NORMS | _HEAD_NORMS,
        windowed=True,
        window_by_layer=True,
        windowed_name="Olmo3ForCausalLM",
    ),
    "arcee": Architecture("ArceeForCausalLM", permuted=True),
    "jais2": Architecture("Jais2ForCausalLM"),
    "xverse": Architecture("LlamaForCausalLM", permuted=True),
    "bitnet": Architecture(
        "BitNetForCausalLM",
        _NAMES | {"self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm"},
    ),
    "apertus": Architecture(
        "ApertusForCausalLM",
        _NAMES
        | _HEAD_NORMS
        | {
            "attention_layernorm": "attn_norm",
            "feedforward_layernorm": "ffn_norm",
            "mlp.act_fn.alpha_p": "xielu.alpha_p",
            "mlp.act_fn.alpha_n": "xielu.alpha_n",
        },
    ),
    "nemotron": Architecture(
        "NemotronForCausalLM", fields={"norm_eps": "attention.layer_norm_epsilon"}, norm_shift=1.0
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        _NAMES
        | {
            "self_attn.q_layernorm.norms": "attn_q_norm",
            "self_attn.k_layernorm.norms": "attn_k_norm",
        },
    ),
    "phi2": Architecture(
        "PhiForCausalLM",
        _NAMES
        | {
            "model.final_layernorm": "output_norm",
            "self_attn.dense": "attn_output",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
        },
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        _NAMES | _FUSED_UP | {"self_attn.qkv_proj": FUSED},
        windowed=True,
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", _NAMES | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
    ),
    "command-r": Architecture(
        "CohereForCausalLM", _NAMES | _HEAD_NORMS, {"logit_scale": "logit_scale"}
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        fields={"logit_scale": "logit_scale"},
        windowed=True,
        window_by_layer=True,
    ),
    "chatglm": Architecture("GlmForCausalLM", _NAMES | _FUSED_UP),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        _NAMES
        | _FUSED_UP
        | {
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
    ),
    "exaone": Architecture("LlamaForCausalLM"),
    "exaone4": Architecture(
        "Exaone4ForCausalLM",
        _NAMES | _OUT_NORMS | _HEAD_NORMS,
        windowed=True,
        window_by_layer=True,
        unwindowed={"sliding_window": None},
    ),
    "seed_oss": Architecture(
        "SeedOssForCausalLM", _NAMES | {"post_attention_layernorm": "post_attention_norm"}
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        _NAMES
        | _EXPERTS
        | _shared("mlp.shared_experts")
        | {"mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
        {
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
    ),
    "paddleocr": Architecture("PaddleOCRVLForConditionalGeneration"),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1ForCausalLM",
        _NAMES
        | {
            "self_attn.query_layernorm": "attn_q_norm",
            "self_attn.key_layernorm": "attn_k_norm",
        },
    ),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1ForCausalLM",
        _NAMES
        | _EXPERTS
        | _shared("mlp.shared_mlp")
        | {
            "mlp.gate.wg": "ffn_gate_inp",
            "self_attn.query_layernorm": "attn_q_norm",
            "self_attn.key_layernorm": "attn_k_norm",
        },
        {
            "num_experts": "expert_count",
            "moe_topk": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
    ),
    "internlm2": Architecture("LlamaForCausalLM", permuted=True),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        _GPT2,
        _GPT2_FIELDS,
        layers="transformer.h.",
    ),
    "starcoder": Architecture(
        "GPTBigCodeForCausalLM", _GPT2, _GPT2_FIELDS, layers="transformer.h."
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        _OLD_LAYERS
        | {
            "gpt_neox.embed_in": "token_embd",
            "gpt_neox.final_layer_norm": "output_norm",
            "embed_out": "output",
            "attention.query_key_value": FUSED,
            "attention.dense": "attn_output",
        },
        {"rotary_emb_base": "rope.freq_base"},
        layers="gpt_neox.layers.",
    ),
    "bloom": Architecture(
        "BloomForCausalLM",
        _OLD_LAYERS
        | _SELF_ATTENTION
        | {
            "transformer.word_embeddings": "token_embd",
            "transformer.word_embeddings_layernorm": "token_embd_norm",
            "transformer.ln_f": "output_norm",
            "lm_head": "output",
        },
        {"seq_length": "context_length"},
        layers="transformer.h.",
    ),
    "falcon": Architecture(
        "FalconForCausalLM",
        _OLD_LAYERS
        | _SELF_ATTENTION
        | {
            "transformer.word_embeddings": "token_embd",
            "transformer.ln_f": "output_norm",
            "lm_head": "output",
            "ln_mlp": "attn_norm",
            "ln_attn": "attn_norm_2",
        },
        {
            "ffn_hidden_size": "feed_forward_length",
            "num_kv_heads": "attention.head_count_kv",
        },
        {"new_decoder_architecture": True},
        layers="transformer.h.",
    ),
    "mpt": Architecture(
        "MPTForCausalLM",
        {
            "transformer.wte": "token_embd",
            "transformer.norm_f": "output_norm",
            "lm_head": "output",
            "attn.Wqkv": FUSED,
            "attn.out_proj": "attn_output",
            "ffn.up_proj": "ffn_up",
            "ffn.down_proj": "ffn_down",
            "norm_1": "attn_norm",
            "norm_2": "ffn_norm",
        },
        {"max_seq_len": "context_length"},
        layers="transformer.blocks.",
    ),
}
"""Architectures by `general.architecture`."""
