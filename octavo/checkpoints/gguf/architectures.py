"""Architectures of GGUF files: their tensors and metadata in Hugging Face's names.

Facts of llama.cpp's converter (convert_hf_to_gguf.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.checkpoints.gguf.names import (
    BERT,
    CLASSIFIER,
    DENSE,
    EXPERT_FIELDS,
    EXPERTS,
    FACTORS,
    FALCON_H1,
    FUSED_UP,
    GPT2,
    GPT2_FIELDS,
    GRANITE,
    GRANITE_EXPERTS,
    GRANITE_HYBRID,
    GROUPED_EXPERTS,
    GROUPED_FIELDS,
    HEAD_NORMS,
    JAMBA,
    JINA_BERT,
    JINA_V3,
    LATENT,
    LATENT_FIELDS,
    LAYER_INPUTS,
    LFM2,
    LFM2_FIELDS,
    MAMBA,
    MAMBA2_FIELDS,
    MIXTRAL,
    MODERN_BERT,
    NAMES,
    NEMOTRON_H,
    NEMOTRON_H_EXPERTS,
    NEMOTRON_H_FIELDS,
    NOMIC_BERT,
    OLD_LAYERS,
    OUT_NORMS,
    PARTS,
    QWEN_HYBRID,
    QWEN_HYBRID_FIELDS,
    QWEN_HYBRID_NORMS,
    RWKV7,
    SANDWICH,
    SELF_ATTENTION,
    SHARED_EXPERT,
    SHARED_SIZE,
    STREAMS,
    experts,
    shared,
)

FUSED = "attn_qkv"
"""Tensor with the rows of queries, keys and values; some files have it in place of the three."""
FUSED_MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""Modules whose tensors may be parts of `FUSED`, in its order."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF, and the Hugging Face architecture that computes it."""

    name: str
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    """Names of modules in GGUF, see `NAMES`; of tensors that are called neither weight nor bias,
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
    "qwen2": Architecture("Qwen2ForCausalLM", NAMES | CLASSIFIER),
    "qwen2vl": Architecture("Qwen2_5_VLForConditionalGeneration"),
    "qwen3": Architecture("Qwen3ForCausalLM", NAMES | HEAD_NORMS | CLASSIFIER),
    "llama with experts": Architecture(
        "MixtralForCausalLM",
        NAMES | MIXTRAL,
        {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        {"sliding_window": None},
        permuted=True,
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        NAMES | EXPERTS | SHARED_EXPERT,
        EXPERT_FIELDS | SHARED_SIZE,
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        NAMES | HEAD_NORMS | EXPERTS,
        EXPERT_FIELDS,
        {"norm_topk_prob": True},
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        NAMES | HEAD_NORMS | EXPERTS,
        EXPERT_FIELDS,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        NAMES
        | experts("mlp.router", "mlp.experts", "gate_proj", "up_proj", "down_proj")
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
    "qwen3vl": Architecture("Qwen3VLForConditionalGeneration", NAMES | HEAD_NORMS),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM",
        QWEN_HYBRID,
        QWEN_HYBRID_FIELDS,
        norm_shift=1.0,
        shifted=QWEN_HYBRID_NORMS,
        predicts=True,
        tiled=True,
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        QWEN_HYBRID | EXPERTS | SHARED_EXPERT,
        QWEN_HYBRID_FIELDS | EXPERT_FIELDS | SHARED_SIZE,
        norm_shift=1.0,
        shifted=QWEN_HYBRID_NORMS,
        predicts=True,
        tiled=True,
    ),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM",
        QWEN_HYBRID | EXPERTS | SHARED_EXPERT,
        QWEN_HYBRID_FIELDS | EXPERT_FIELDS | SHARED_SIZE,
        norm_shift=1.0,
        shifted=QWEN_HYBRID_NORMS,
        predicts=True,
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        NAMES | HEAD_NORMS | GROUPED_EXPERTS | {"post_attention_layernorm": "post_attention_norm"},
        GROUPED_FIELDS,
        predicts=True,
        scores="sigmoid",
    ),
    "dots1": Architecture(
        "Dots1ForCausalLM",
        NAMES | HEAD_NORMS | GROUPED_EXPERTS,
        GROUPED_FIELDS,
        {"n_group": 1, "topk_group": 1, "sliding_window": None},
        scores="sigmoid",
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        NAMES
        | HEAD_NORMS
        | MIXTRAL
        | {"block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias"},
        {
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
            "rotary_dim": "rope.dimension_count",
        },
        scores="sigmoid",
    ),
    "llama4": Architecture(
        "Llama4ForCausalLM",
        NAMES
        | experts(
            "feed_forward.router", "feed_forward.experts", *(f"{part}_proj" for part in PARTS)
        )
        | shared("feed_forward.shared_expert")
        | {f"feed_forward.{part}_proj": f"ffn_{part}" for part in PARTS},
        {
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
            "intermediate_size_mlp": "feed_forward_length",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        {"split_experts": True},
        scores="sigmoid",
    ),
    "exaone-moe": Architecture(
        "ExaoneMoeForCausalLM",
        NAMES
        | HEAD_NORMS
        | EXPERTS
        | shared("mlp.shared_experts")
        | {"mlp.e_score_correction_bias": "exp_probs_b.bias"},
        {name: key for name, key in GROUPED_FIELDS.items() if name[2:] != "routed_experts"}
        | {"num_experts": "expert_count", "num_shared_experts": "expert_shared_count"},
        windowed=True,
        window_by_layer=True,
        predicts=True,
        scores="sigmoid",
    ),
    "afmoe": Architecture(
        "AfmoeForCausalLM",
        NAMES
        | HEAD_NORMS
        | EXPERTS
        | shared("mlp.shared_experts")
        | {
            "mlp.router.gate": "ffn_gate_inp",
            "mlp.expert_bias": "exp_probs_b.bias",
            "self_attn.gate_proj": "attn_gate",
            "post_attention_layernorm": "post_attention_norm",
            "pre_mlp_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
        EXPERT_FIELDS
        | {
            "num_shared_experts": "expert_shared_count",
            "num_dense_layers": "leading_dense_block_count",
            "route_scale": "expert_weights_scale",
        },
        {"mup_enabled": True},
        windowed=True,
        window_by_layer=True,
        scores="sigmoid",
    ),
    "laguna": Architecture(
        "LagunaForCausalLM",
        NAMES
        | HEAD_NORMS
        | EXPERTS
        | shared("mlp.shared_expert")
        | {
            "self_attn.g_proj": "attn_gate",
            "mlp.experts.e_score_correction_bias": "exp_probs_b.bias",
        },
        EXPERT_FIELDS | SHARED_SIZE | {"moe_routed_scaling_factor": "expert_weights_scale"},
        windowed=True,
        window_by_layer=True,
        varying=("attention.head_count",),
        scores="sigmoid",
    ),
    "mimo2": Architecture(
        "MiMoV2FlashForCausalLM",
        NAMES | GROUPED_EXPERTS | {"self_attn.attention_sink_bias": "attn_sinks.weight"},
        {
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "routed_scaling_factor": "expert_weights_scale",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
            "v_head_dim": "attention.value_length",
            "attention_value_scale": "attention.value_scale",
        },
        {"attention_value_scale": None},
        windowed=True,
        window_by_layer=True,
        varying=("attention.head_count_kv",),
        predicts=True,
        scores="sigmoid",
    ),
    "cohere2moe": Architecture(
        "Cohere2MoeForCausalLM",
        NAMES | EXPERTS | shared("mlp.shared_experts"),
        {
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
            "prefix_dense_intermediate_size": "feed_forward_length",
            "num_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
            "logit_scale": "logit_scale",
        },
        windowed=True,
        window_by_layer=True,
        predicts=True,
        scores="sigmoid",
    ),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM",
        NAMES | LATENT | GROUPED_EXPERTS,
        LATENT_FIELDS | GROUPED_FIELDS,
        {"q_lora_rank": None},
        predicts=True,
    ),
    "minicpm3": Architecture(
        "MiniCPM3ForCausalLM",
        NAMES | LATENT,
        LATENT_FIELDS,
        # llama.cpp has the factors of the published model.
        {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        LFM2,
        LFM2_FIELDS,
        {"block_auto_adjust_ff_dim": False},
        varying=("attention.head_count_kv",),
    ),
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM",
        LFM2
        | experts("feed_forward.gate", "feed_forward.experts", "w1", "w3", "w2")
        | {"feed_forward.expert_bias": "exp_probs_b.bias"},
        LFM2_FIELDS | EXPERT_FIELDS | {"num_dense_layers": "leading_dense_block_count"},
        {"norm_topk_prob": True},
        varying=("attention.head_count_kv",),
        scores="sigmoid",
    ),
    "rwkv7": Architecture(
        "RWKV7ForCausalLM",
        RWKV7,
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
        MAMBA,
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
        JAMBA,
        {
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "mamba_d_state": "ssm.state_size",
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_dt_rank": "ssm.time_step_rank",
        },
        varying=("attention.head_count_kv",),
    ),
    "mamba2": Architecture(
        "Mamba2ForCausalLM",
        MAMBA,
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
        GRANITE_HYBRID,
        GRANITE | MAMBA2_FIELDS | {"shared_intermediate_size": "expert_shared_feed_forward_length"},
        {"num_local_experts": 0, "split_shared_mlp": True},
        varying=("attention.head_count_kv",),
        permuted=True,
    ),
    "granitehybrid with experts": Architecture(
        "GraniteMoeHybridForCausalLM",
        GRANITE_HYBRID | GRANITE_EXPERTS,
        GRANITE
        | MAMBA2_FIELDS
        | {"shared_intermediate_size": "expert_shared_feed_forward_length"}
        | {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        {"split_experts": True},
        varying=("attention.head_count_kv",),
        permuted=True,
    ),
    "granitemoe": Architecture(
        "GraniteMoeSharedForCausalLM",
        NAMES | GRANITE_EXPERTS,
        GRANITE
        | {"shared_intermediate_size": "expert_shared_feed_forward_length"}
        | {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        {"split_experts": True},
        permuted=True,
    ),
    "falcon-h1": Architecture(
        "FalconH1ForCausalLM",
        FALCON_H1,
        MAMBA2_FIELDS | {"mamba_d_ssm": "ssm.inner_size"},
        dict.fromkeys((f"{name}_multiplier" for name in FACTORS), 1.0)
        | {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}
        | {"mamba_norm_before_gate": False},
    ),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM",
        NEMOTRON_H,
        NEMOTRON_H_FIELDS,
        varying=("attention.head_count_kv", "feed_forward_length"),
        permuted=True,
    ),
    "nemotron_h_moe": Architecture(
        "NemotronHForCausalLM",
        NEMOTRON_H | NEMOTRON_H_EXPERTS,
        NEMOTRON_H_FIELDS
        | GROUPED_FIELDS
        | {"moe_latent_size": "moe_latent_size"}
        | {"moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        varying=("attention.head_count_kv", "feed_forward_length"),
        permuted=True,
        predicts=True,
        scores="sigmoid",
    ),
    "gemma": Architecture("GemmaForCausalLM", norm_shift=1.0),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        NAMES | SANDWICH,
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
        NAMES | SANDWICH | HEAD_NORMS,
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
    "gemma-embedding": Architecture(
        "Gemma3TextModel",
        NAMES | SANDWICH | HEAD_NORMS | DENSE,
        {"rope_local_base_freq": "rope.freq_base_swa"},
        {"rope_local_base_freq": 10000.0, "use_bidirectional_attention": True},
        windowed=True,
        window_by_layer=True,
        unwindowed={"sliding_window_pattern": 1},
        norm_shift=1.0,
    ),
    "bert": Architecture("BertModel", BERT | CLASSIFIER, layers="bert.encoder.layer."),
    "jina-bert-v2": Architecture(
        "JinaBertModel",
        JINA_BERT | CLASSIFIER,
        defaults={"position_embedding_type": "alibi", "feed_forward_type": "geglu"},
        layers="bert.encoder.layer.",
    ),
    "jina-bert-v3": Architecture(
        "JinaEmbeddingsV3Model", JINA_V3 | CLASSIFIER, layers="roberta.encoder.layers."
    ),
    "nomic-bert": Architecture(
        "NomicBertModel", NOMIC_BERT | CLASSIFIER, layers="nomic_bert.encoder.layers."
    ),
    "modern-bert": Architecture(
        "ModernBertModel",
        MODERN_BERT | CLASSIFIER,
        {"norm_eps": "attention.layer_norm_epsilon"},
        windowed=True,
    ),
    "eurobert": Architecture("EuroBertModel", NAMES | CLASSIFIER),
    "gemma3n": Architecture(
        "Gemma3nForCausalLM",
        NAMES | SANDWICH | HEAD_NORMS | LAYER_INPUTS | STREAMS,
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
        NAMES
        | SANDWICH
        | HEAD_NORMS
        | LAYER_INPUTS
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
        NAMES
        | SANDWICH
        | HEAD_NORMS
        | LAYER_INPUTS
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
        NAMES | SANDWICH | {"self_attn.gate_proj": "attn_gate"},
        {"final_logit_softcapping": "final_logit_softcapping", "output_multiplier": "logit_scale"},
        {"post_norm_eps": 1e-8},
        windowed=True,
        window_by_layer=True,
        permuted=True,
        norm_shift=1.0,
        shifted="layernorm.weight",
        constants={"qk_scale_factor": "attn_q_norm", "": "attn_k_norm"},
    ),
    "granite": Architecture("GraniteForCausalLM", fields=GRANITE, permuted=True),
    "granite_swa": Architecture(
        "GraniteSWAForCausalLM",
        NAMES | {"self_attn.sinks": "attn_sinks.weight"},
        GRANITE,
        windowed=True,
        window_by_layer=True,
        permuted=True,
    ),
    "minicpm": Architecture("GraniteForCausalLM", fields=GRANITE, permuted=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", permuted=True),
    "olmo": Architecture(
        "OlmoForCausalLM", fields={"clip_qkv": "attention.clamp_kqv"}, permuted=True
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        NAMES | OUT_NORMS | HEAD_NORMS,
        windowed=True,
        window_by_layer=True,
        windowed_name="Olmo3ForCausalLM",
    ),
    "arcee": Architecture("ArceeForCausalLM", permuted=True),
    "jais2": Architecture("Jais2ForCausalLM"),
    "xverse": Architecture("LlamaForCausalLM", permuted=True),
    "bitnet": Architecture(
        "BitNetForCausalLM",
        NAMES | {"self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm"},
    ),
    "apertus": Architecture(
        "ApertusForCausalLM",
        NAMES
        | HEAD_NORMS
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
        NAMES
        | {
            "self_attn.q_layernorm.norms": "attn_q_norm",
            "self_attn.k_layernorm.norms": "attn_k_norm",
        },
    ),
    "phi2": Architecture(
        "PhiForCausalLM",
        NAMES
        | {
            "model.final_layernorm": "output_norm",
            "self_attn.dense": "attn_output",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
        },
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        NAMES | FUSED_UP | {"self_attn.qkv_proj": FUSED},
        windowed=True,
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", NAMES | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
    ),
    "command-r": Architecture(
        "CohereForCausalLM", NAMES | HEAD_NORMS, {"logit_scale": "logit_scale"}
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        fields={"logit_scale": "logit_scale"},
        windowed=True,
        window_by_layer=True,
    ),
    "chatglm": Architecture("GlmForCausalLM", NAMES | FUSED_UP),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        NAMES
        | FUSED_UP
        | {
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
    ),
    "exaone": Architecture("LlamaForCausalLM"),
    "exaone4": Architecture(
        "Exaone4ForCausalLM",
        NAMES | OUT_NORMS | HEAD_NORMS,
        windowed=True,
        window_by_layer=True,
        unwindowed={"sliding_window": None},
    ),
    "seed_oss": Architecture(
        "SeedOssForCausalLM", NAMES | {"post_attention_layernorm": "post_attention_norm"}
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        NAMES
        | EXPERTS
        | shared("mlp.shared_experts")
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
        NAMES
        | {
            "self_attn.query_layernorm": "attn_q_norm",
            "self_attn.key_layernorm": "attn_k_norm",
        },
    ),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1ForCausalLM",
        NAMES
        | EXPERTS
        | shared("mlp.shared_mlp")
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
        GPT2,
        GPT2_FIELDS,
        layers="transformer.h.",
    ),
    "starcoder": Architecture("GPTBigCodeForCausalLM", GPT2, GPT2_FIELDS, layers="transformer.h."),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        OLD_LAYERS
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
        OLD_LAYERS
        | SELF_ATTENTION
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
        OLD_LAYERS
        | SELF_ATTENTION
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
