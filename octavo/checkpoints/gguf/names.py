"""Names of the tensors of GGUF files and of keys of their metadata, in Hugging Face's names."""

from __future__ import annotations

NAMES = {
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


def experts(router: str, prefix: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Return the names of a router and of all experts' projections; * is an expert's index."""
    stored = {gate: "ffn_gate_exps", up: "ffn_up_exps", down: "ffn_down_exps"}
    return {router: "ffn_gate_inp"} | {f"{prefix}.*.{own}": name for own, name in stored.items()}


EXPERTS = experts("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
MIXTRAL = experts("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
PARTS = ("gate", "up", "down")


def shared(prefix: str) -> dict[str, str]:
    """Return the names of the block that all tokens use."""
    return {f"{prefix}.{part}_proj": f"ffn_{part}_shexp" for part in PARTS}


SHARED_EXPERT = shared("mlp.shared_expert") | {"mlp.shared_expert_gate": "ffn_gate_inp_shexp"}
GROUPED_EXPERTS = {  # DeepSeek and GLM
    **EXPERTS,
    **shared("mlp.shared_experts"),
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
GRANITE_EXPERTS = {
    **experts(
        "block_sparse_moe.router.layer",
        "block_sparse_moe.experts",
        *(f"{part}_proj" for part in PARTS),
    ),
    **shared("shared_mlp"),
    "shared_mlp.output_linear": "ffn_down_shexp",
}
EXPERT_FIELDS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
GROUPED_FIELDS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
SHARED_SIZE = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
LATENT = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
}
LATENT_FIELDS = {
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
OUT_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SANDWICH = OUT_NORMS | {"pre_feedforward_layernorm": "ffn_norm"}
LAYER_INPUTS = {  # Gemma 3n and 4
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
STREAMS = {  # Gemma 3n; its projections are slices of one tensor
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}
STREAMS |= {f"model.altup_projections.{i}": "altup_proj" for i in range(63)}
STREAMS |= {f"model.altup_unembed_projections.{i}": "altup_unembd_proj" for i in range(63)}
BERT = {
    "bert.embeddings.word_embeddings": "token_embd",
    "bert.embeddings.token_type_embeddings": "token_types",
    "bert.embeddings.position_embeddings": "position_embd",
    "bert.embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
CLASSIFIER = {name: name for name in ("cls", "cls.norm", "cls.output")}
"""Layers of a head that scores classes, which have no other names."""
JINA_BERT = {
    **BERT,
    "mlp.gated_layers": "ffn_up",
    "mlp.gated_layers_w": "ffn_gate",
    "mlp.gated_layers_v": "ffn_up",
    "mlp.wo": "ffn_down",
    "mlp.layernorm": "layer_output_norm",
}
NOMIC_BERT = {
    "nomic_bert.embeddings.word_embeddings": "token_embd",
    "nomic_bert.embeddings.token_type_embeddings": "token_types",
    "nomic_bert.emb_ln": "token_embd_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "norm1": "attn_output_norm",
    "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate",
    "mlp.fc2": "ffn_down",
    "norm2": "layer_output_norm",
}
JINA_V3 = {
    "roberta.embeddings.word_embeddings": "token_embd",
    "roberta.embeddings.token_type_embeddings": "token_types",
    "roberta.emb_ln": "token_embd_norm",
    "mixer.Wqkv": "attn_qkv",
    "mixer.out_proj": "attn_output",
    "norm1": "attn_output_norm",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "norm2": "layer_output_norm",
}
MODERN_BERT = {
    "model.embeddings.tok_embeddings": "token_embd",
    "model.embeddings.norm": "token_embd_norm",
    "model.final_norm": "output_norm",
    "attn_norm": "attn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
}
DENSE = {f"{i}_Dense/linear": f"dense_{i}" for i in (2, 3)}
"""Layers after the pooling (EmbeddingGemma)."""
GPT2 = {
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
GPT2_FIELDS = {"n_inner": "feed_forward_length", "n_positions": "context_length"}
FUSED_UP = {"mlp.gate_up_proj": "ffn_up"}
GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
OLD_LAYERS = {  # GPT-NeoX, BLOOM and Falcon
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
SELF_ATTENTION = {
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
}

LINEAR_ATTENTION = {  # Qwen3-Next and Qwen3.5
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
LFM2 = {
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

LFM2_FIELDS = {
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "conv_L_cache": "shortconv.l_cache",
}
QWEN_HYBRID = {
    **NAMES,
    **HEAD_NORMS,
    **LINEAR_ATTENTION,
    "post_attention_layernorm": "post_attention_norm",
}
QWEN_HYBRID_FIELDS = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
}
QWEN_HYBRID_NORMS = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")

RWKV7 = {
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
RWKV7 |= {f"attn.x_{name}": "time_mix_lerp_fused.weight" for name in "rwkvag"}
RWKV7 |= {f"attn.{name}": f"time_mix_{name}.weight" for name in ("k_k", "k_a", "r_k")}
for _name in "wavg":  # low-rank projections
    RWKV7 |= {f"attn.{_name}_lora.lora.{i}": f"time_mix_{_name}{i or 1}" for i in (0, 2)}
    RWKV7[f"attn.{_name}_lora.lora.2.bias"] = f"time_mix_{_name}0.weight"


def mixer(module: str) -> dict[str, str]:
    """Return the names of the parts of Mamba's mixers, of both versions."""
    parts = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "out_proj": "ssm_out"}
    parts |= {"norm": "ssm_norm", "A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}
    parts |= {"x_proj": "ssm_x", "dt_proj": "ssm_dt"}
    parts |= {f"{name}_layernorm": f"ssm_{name}_norm" for name in ("dt", "b", "c")}
    return {f"{module}.{part}": stored for part, stored in parts.items()}


MIXERS = {"norm": "attn_norm", "lm_head": "output", **mixer("mixer")}
MAMBA = {**MIXERS, "backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm"}
GRANITE_HYBRID = {
    **NAMES,
    **mixer("mamba"),
    "shared_mlp.gate_proj": "ffn_gate",
    "shared_mlp.up_proj": "ffn_up",
    "shared_mlp.output_linear": "ffn_down",
}
JAMBA = {
    **NAMES,
    **mixer("mamba"),
    "model.final_layernorm": "output_norm",
    "pre_ff_layernorm": "ffn_norm",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}
JAMBA |= experts("feed_forward.router", "feed_forward.experts", *(f"{part}_proj" for part in PARTS))
FALCON_H1 = JAMBA | {"pre_ff_layernorm.weight": "ffn_norm"}
NEMOTRON_H = {
    **MIXERS,
    "model.embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
}
NEMOTRON_H_EXPERTS = {  # without gates
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.*.up_proj": "ffn_up_exps",
    "mixer.experts.*.down_proj": "ffn_down_exps",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
NEMOTRON_H_FIELDS = {
    "mamba_num_heads": "ssm.time_step_rank",
    "n_groups": "ssm.group_count",
    "ssm_state_size": "ssm.state_size",
    "conv_kernel": "ssm.conv_kernel",
}
MAMBA2_FIELDS = {  # Granite 4, Bamba and Falcon-H1
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
}
FACTORS = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
"""Factors of Falcon-H1, which are parts of the weights in GGUF."""
