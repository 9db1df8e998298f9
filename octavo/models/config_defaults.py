"""Defaults of config.json: the values that transformers assumes for absent fields.

Sizes of the model have no default: a config without one is broken. Only those of text parts have
one (`TEXT_PARTS`).
"""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6}
_PHI4 = _LLAMA | {"vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192}
_PHI4 |= {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
_MISTRAL = _LLAMA | {"num_key_value_heads": 8, "sliding_window": 4096}
_MISTRAL |= {"max_position_embeddings": 131072}
_MIXTRAL = _LLAMA | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8}
_MIXTRAL |= {"max_position_embeddings": 131072, "num_experts_per_tok": 2}
_MIXTRAL["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
_VOXTRAL = _LLAMA | {"rms_norm_eps": 1e-5, "num_hidden_layers": 30, "num_key_value_heads": 8}
_VOXTRAL |= {"intermediate_size": 8192, "head_dim": 128, "max_position_embeddings": 131072}
_VOXTRAL["rope_theta"] = 1e8
_QWEN = _LLAMA | {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_QWEN |= {"sliding_window": 4096}
_QWEN2_VL = _QWEN | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80}
_GEMMA = _LLAMA | {"hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "num_key_value_heads": 4}
_GEMMA2 = _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA2 |= {"max_position_embeddings": 8192}
_MAMBA = {"hidden_act": "silu", "state_size": 16, "conv_kernel": 4, "time_step_rank": "auto"}
_MAMBA2 = _LLAMA | {"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1}
_MAMBA2 |= {"mamba_d_state": 256, "mamba_d_conv": 4}
_GLM = _LLAMA | {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7}
_GLM |= {"max_position_embeddings": 131072}
_GLM_V = _LLAMA | {"num_key_value_heads": 2, "rms_norm_eps": 1e-5}
_GLM_V |= {"max_position_embeddings": 32768}
_COHERE = {"hidden_act": "silu", "layer_norm_eps": 1e-5, "max_position_embeddings": 8192}
_MINISTRAL3 = _MISTRAL | {"rms_norm_eps": 1e-5, "max_position_embeddings": 262144}
_MINISTRAL3 |= {"head_dim": 128, "sliding_window": None}
_MINISTRAL3["rope_parameters"] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MISTRAL4_ROPE = _MINISTRAL3["rope_parameters"] | {"rope_theta": 1e4, "factor": 128.0}
_MISTRAL4_ROPE |= {"original_max_position_embeddings": 8192}
_T5: dict[str, Any] = {"layer_norm_epsilon": 1e-6, "relative_attention_num_buckets": 32}
_T5 |= {"relative_attention_max_distance": 128, "n_positions": 512, "eos_token_id": 1}
_T5 |= {"decoder_start_token_id": 0}
_BART: dict[str, Any] = {"activation_function": "gelu", "max_position_embeddings": 1024}
_GEMMA4: dict[str, Any] = {"rms_norm_eps": 1e-6, "head_dim": 256, "num_key_value_heads": 4}
_GEMMA4 |= {"max_position_embeddings": 131072, "sliding_window": 512, "global_head_dim": 512}
_GEMMA4["bos_token_id"] = 2
_GEMMA4["rope_parameters"] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}
_GEMMA4_UNIFIED = _GEMMA4 | {"max_position_embeddings": 262144, "sliding_window": 1024}
_GEMMA4_UNIFIED |= {"use_bidirectional_attention": "vision"}
_GEMMA4_LAYERS = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
_GEMMA3N = {"rms_norm_eps": 1e-6, "head_dim": 256, "num_key_value_heads": 2}
_GEMMA3N |= {"max_position_embeddings": 32768, "sliding_window": 512, "laurel_rank": 64}
_GEMMA3N |= {"final_logit_softcapping": 30.0, "num_kv_shared_layers": 15}
_GEMMA3N |= {"altup_num_inputs": 4, "altup_active_idx": 0} | _GEMMA4_LAYERS
_MUSE = {"hidden_activation": "silu", "rms_norm_eps": 1e-5, "num_key_value_heads": 2}
_MUSE |= {"head_dim": 128, "max_position_embeddings": 131072, "sliding_window": 2048}
_MUSE |= {"final_logit_softcapping": 20.0, "qk_scale_factor": 3.87, "post_norm_eps": 1e-8}
_MUSE |= {"output_multiplier": 0.19611613513818404}
_QWEN3_5 = _LLAMA | {"head_dim": 256, "num_key_value_heads": 4}
_QWEN3_5 |= {"max_position_embeddings": 32768, "linear_conv_kernel_dim": 4}
_QWEN3_5 |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
_QWEN3_5 |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_PHIMOE = _LLAMA | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_local_experts": 16}
_PHIMOE |= {"num_experts_per_tok": 2, "max_position_embeddings": 131072}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
_GPT_OSS_ROPE |= {"truncate": False, "original_max_position_embeddings": 4096}
_GLM_MOE = _LLAMA | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "n_routed_experts": 128}
_GLM_MOE |= {"num_experts_per_tok": 8, "n_shared_experts": 1, "max_position_embeddings": 131072}
_LLAMA4 = _LLAMA | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128}
_LLAMA4 |= {"intermediate_size_mlp": 16384, "max_position_embeddings": 131072}
_LLAMA4 |= {"num_local_experts": 16, "num_experts_per_tok": 1, "attention_chunk_size": 8192}

_QWEN3_5_MOE = {"num_key_value_heads": 2, "num_experts_per_tok": 8}
_QWEN3_5_MOE |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_MIMO_V2 = _LLAMA | {"rms_norm_eps": 1e-5, "num_key_value_heads": 4, "head_dim": 192}
_MIMO_V2 |= {"v_head_dim": 128, "max_position_embeddings": 131072, "moe_intermediate_size": 2048}
_MIMO_V2 |= {"num_experts_per_tok": 8, "n_routed_experts": 256, "sliding_window": 129}
_MIMO_V2 |= {"attention_value_scale": 0.707}
_LAGUNA = _LLAMA | {"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128}
_LAGUNA |= {"max_position_embeddings": 131072, "num_experts": 256, "num_experts_per_tok": 8}
_LAGUNA |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_LAGUNA |= {"sliding_window": 512, "gating": True}
_LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
_LATENT |= {"qk_rope_head_dim": 64, "v_head_dim": 128}
_DEEPSEEK_V3 = _LLAMA | _LATENT | {"first_k_dense_replace": 3, "n_shared_experts": 1}
_DEEPSEEK_V3 |= {"max_position_embeddings": 4096, "num_nextn_predict_layers": 1}
_DEEPSEEK_V3 |= {"moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4}
_DEEPSEEK_V3 |= {"num_experts_per_tok": 8, "routed_scaling_factor": 2.5}

_BERT: dict[str, Any] = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2}
_BERT |= {"max_position_embeddings": 512}
_GTE = _BERT | {"type_vocab_size": 1, "max_position_embeddings": 8192}
_FLASH = _GTE | {"layer_norm_eps": 1e-5, "max_position_embeddings": 8194}
_DEBERTA = _BERT | {"layer_norm_eps": 1e-7, "type_vocab_size": 0}
_MODERNBERT = {"hidden_activation": "gelu", "norm_eps": 1e-5, "max_position_embeddings": 8192}
_MODERNBERT |= {"local_attention": 128, "classifier_pooling": "cls"}
_MODERNBERT |= {"classifier_activation": "gelu"}


def _encoder(name: str, model_type: str, defaults: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the defaults of an encoder with all heads, and at last without one."""
    heads = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "Model")
    return {f"{name}{head}": {"model_type": model_type} | defaults for head in heads}


DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama"} | _LLAMA,
    "InternLM3ForCausalLM": {"model_type": "internlm3"} | _LLAMA,
    "MistralForCausalLM": {"model_type": "mistral"} | _MISTRAL,
    "MinistralForCausalLM": {"model_type": "ministral"} | _MISTRAL,
    "MixtralForCausalLM": {"model_type": "mixtral"} | _MIXTRAL,
    "Qwen2ForCausalLM": {"model_type": "qwen2"} | _QWEN,
    "Qwen2MoeForCausalLM": {"model_type": "qwen2_moe"}
    | _QWEN
    | {"num_key_value_heads": 16, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    "Qwen3MoeForCausalLM": {"model_type": "qwen3_moe"}
    | _QWEN
    | {"num_key_value_heads": 4, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 768},
    "Qwen3ForCausalLM": {"model_type": "qwen3"} | _QWEN | {"head_dim": 128},
    "GemmaForCausalLM": {"model_type": "gemma"}
    | _GEMMA
    | {"num_key_value_heads": 16, "max_position_embeddings": 8192},
    "Gemma2ForCausalLM": {"model_type": "gemma2"} | _GEMMA2,
    "VaultGemmaForCausalLM": {"model_type": "vaultgemma"} | _GEMMA2,
    "Gemma3ForCausalLM": {"model_type": "gemma3_text"}
    | _GEMMA
    | {"max_position_embeddings": 131072},
    "Gemma3ForConditionalGeneration": {"model_type": "gemma3"}
    | _GEMMA
    | {"max_position_embeddings": 131072, "num_attention_heads": 8, "vocab_size": 262208}
    | {"bos_token_id": 2},
    "Gemma3nForCausalLM": {"model_type": "gemma3n_text"} | _GEMMA3N,
    "Gemma3nForConditionalGeneration": {"model_type": "gemma3n"} | _GEMMA3N,
    "Gemma4ForCausalLM": {"model_type": "gemma4_text"} | _GEMMA4 | _GEMMA4_LAYERS,
    "Gemma4ForConditionalGeneration": {"model_type": "gemma4"} | _GEMMA4 | _GEMMA4_LAYERS,
    "Gemma4UnifiedForCausalLM": {"model_type": "gemma4_unified_text"} | _GEMMA4_UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": {"model_type": "gemma4_unified"} | _GEMMA4_UNIFIED,
    "Ministral3ForCausalLM": {"model_type": "ministral3"} | _MINISTRAL3,
    "Mistral3ForConditionalGeneration": {"model_type": "mistral3"},
    "MiMoV2FlashForCausalLM": {"model_type": "mimo_v2_flash"} | _MIMO_V2,
    "LagunaForCausalLM": {"model_type": "laguna"} | _LAGUNA,
    "Mistral4ForCausalLM": {"model_type": "mistral4", "num_key_value_heads": 32}
    | _LLAMA
    | _LATENT
    | {"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "n_routed_experts": 128}
    | {"n_shared_experts": 1, "moe_intermediate_size": 2048, "num_experts_per_tok": 4}
    | {"max_position_embeddings": 1048576, "rope_parameters": _MISTRAL4_ROPE},
    "Qwen2_5_VLForConditionalGeneration": {"model_type": "qwen2_5_vl"} | _QWEN2_VL,
    "Qwen3VLForConditionalGeneration": {"model_type": "qwen3_vl"}
    | _QWEN
    | {"head_dim": 128, "max_position_embeddings": 128000},
    "Qwen3VLMoeForConditionalGeneration": {"model_type": "qwen3_vl_moe"}
    | _QWEN
    | {"num_key_value_heads": 16, "max_position_embeddings": 128000}
    | {"num_experts_per_tok": 4, "moe_intermediate_size": 1408},
    "Qwen2VLForConditionalGeneration": {"model_type": "qwen2_vl"} | _QWEN2_VL,
    "Glm4vForConditionalGeneration": {"model_type": "glm4v"} | _GLM_V,
    "Glm46VForConditionalGeneration": {"model_type": "glm46v"} | _GLM_V,
    "AyaVisionForConditionalGeneration": {"model_type": "aya_vision"},
    "Cohere2VisionForConditionalGeneration": {"model_type": "cohere2_vision"},
    "GotOcr2ForConditionalGeneration": {"model_type": "got_ocr2"},
    "Idefics2ForConditionalGeneration": {"model_type": "idefics2"},
    "Idefics3ForConditionalGeneration": {"model_type": "idefics3"},
    "DeepseekVLForConditionalGeneration": {"model_type": "deepseek_vl"},
    "Exaone4_5_ForConditionalGeneration": {"model_type": "exaone4_5"},
    "GraniteSpeechForConditionalGeneration": {"model_type": "granite_speech"},
    "LlavaNextVideoForConditionalGeneration": {"model_type": "llava_next_video"},
    "Ovis2ForConditionalGeneration": {"model_type": "ovis2"},
    "VideoLlama3ForConditionalGeneration": {"model_type": "video_llama_3"},
    "VideoLlavaForConditionalGeneration": {"model_type": "video_llava"},
    "InternVLForConditionalGeneration": {"model_type": "internvl"},
    "InternVLChatModel": {"model_type": "internvl_chat"},
    "LightOnOcrForConditionalGeneration": {"model_type": "lighton_ocr"},
    "LlavaForConditionalGeneration": {"model_type": "llava"},
    "LlavaNextForConditionalGeneration": {"model_type": "llava_next"},
    "LlavaOnevisionForConditionalGeneration": {"model_type": "llava_onevision"},
    "PaliGemmaForConditionalGeneration": {"model_type": "paligemma"}
    | {"num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 257152},
    "Qwen2AudioForConditionalGeneration": {"model_type": "qwen2_audio"},
    "Qwen3ASRForConditionalGeneration": {"model_type": "qwen3_asr", "num_key_value_heads": 8}
    | {"max_position_embeddings": 65536, "tie_word_embeddings": True},
    "SmolVLMForConditionalGeneration": {"model_type": "smolvlm"},
    "VipLlavaForConditionalGeneration": {"model_type": "vipllava"},
    "VoxtralForConditionalGeneration": {"model_type": "voxtral"} | _VOXTRAL,
    "MuseGlimmerForConditionalGeneration": {"model_type": "muse_glimmer"} | _MUSE,
    "Qwen3_5ForCausalLM": {"model_type": "qwen3_5_text"} | _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": {"model_type": "qwen3_5"} | _QWEN3_5,
    "Qwen3_5MoeForCausalLM": {"model_type": "qwen3_5_moe_text"} | _QWEN3_5 | _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": {"model_type": "qwen3_5_moe"} | _QWEN3_5 | _QWEN3_5_MOE,
    "Qwen3NextForCausalLM": {"model_type": "qwen3_next"}
    | _QWEN3_5
    | {"num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10}
    | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "OlmoHybridForCausalLM": {"model_type": "olmo_hybrid"}
    | _LLAMA
    | {"max_position_embeddings": 65536, "linear_conv_kernel_dim": 4},
    "Lfm2ForCausalLM": {"model_type": "lfm2", "num_key_value_heads": 8, "conv_L_cache": 3}
    | {"block_ffn_dim_multiplier": 1.0, "max_position_embeddings": 128000},
    "Lfm2MoeForCausalLM": {"model_type": "lfm2_moe", "num_key_value_heads": 8, "conv_L_cache": 3}
    | {"max_position_embeddings": 128000, "num_experts_per_tok": 4, "moe_intermediate_size": 1792}
    | {"num_dense_layers": 2},
    "MambaForCausalLM": {"model_type": "mamba"} | _MAMBA,
    "FalconMambaForCausalLM": {"model_type": "falcon_mamba"} | _MAMBA,
    "JambaForCausalLM": {"model_type": "jamba", "num_key_value_heads": 8, "num_experts": 16}
    | _LLAMA
    | {"max_position_embeddings": 262144, "mamba_d_state": 16, "mamba_d_conv": 4}
    | {"mamba_dt_rank": "auto", "attn_layer_period": 8, "attn_layer_offset": 4}
    | {"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts_per_tok": 2},
    "Mamba2ForCausalLM": {"model_type": "mamba2", "num_heads": 128, "head_dim": 64}
    | {"state_size": 128, "n_groups": 8, "conv_kernel": 4},
    "RWKV7ForCausalLM": {"model_type": "rwkv7", "head_dim": 64, "norm_eps": 1e-5}
    | {"decay_low_rank_dim": 64, "gate_low_rank_dim": 128, "a_low_rank_dim": 64}
    | {"v_low_rank_dim": 16, "hidden_act": "sqrelu"},
    "BambaForCausalLM": {"model_type": "bamba"}
    | _MAMBA2
    | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144},
    "GraniteMoeHybridForCausalLM": {"model_type": "granitemoehybrid", "num_local_experts": 8}
    | _MAMBA2
    | {"shared_intermediate_size": 1024, "num_experts_per_tok": 2},
    "FalconH1ForCausalLM": {"model_type": "falcon_h1"}
    | _MAMBA2
    | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
    | {"mamba_d_ssm": 1024},
    "NemotronHForCausalLM": {"model_type": "nemotron_h", "num_key_value_heads": 8}
    | {"head_dim": 128, "max_position_embeddings": 4096, "ssm_state_size": 128}
    | {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4}
    | {"hybrid_override_pattern": "ME*-", "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688},
    "GlmForCausalLM": {"model_type": "glm"} | _GLM,
    "Glm4ForCausalLM": {"model_type": "glm4"} | _GLM,
    "Phi3ForCausalLM": {"model_type": "phi3"}
    | _LLAMA
    | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "Phi4MMForCausalLM": {"model_type": "phi4mm"} | _PHI4,
    "Phi4MultimodalForCausalLM": {"model_type": "phi4_multimodal"} | _PHI4,
    "Olmo2ForCausalLM": {"model_type": "olmo2"} | _LLAMA | {"rms_norm_eps": 1e-5},
    "Olmo3ForCausalLM": {"model_type": "olmo3"}
    | _LLAMA
    | {"rms_norm_eps": 1e-5, "sliding_window": 4096},
    "Exaone4ForCausalLM": {"model_type": "exaone4"}
    | _LLAMA
    | {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096}
    | {"sliding_window_pattern": 4},
    "HunYuanDenseV1ForCausalLM": {"model_type": "hunyuan_v1_dense"}
    | _LLAMA
    | {"rms_norm_eps": 1e-5},
    "SeedOssForCausalLM": {"model_type": "seed_oss"}
    | _LLAMA
    | {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288},
    "Ernie4_5ForCausalLM": {"model_type": "ernie4_5"}
    | _LLAMA
    | {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5}
    | {"max_position_embeddings": 131072},
    "PaddleOCRVLForConditionalGeneration": {"model_type": "paddleocr_vl"}
    | _LLAMA
    | {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5}
    | {"max_position_embeddings": 131072},
    "GraniteForCausalLM": {"model_type": "granite"} | _LLAMA,
    "GraniteSWAForCausalLM": {"model_type": "granite_swa"}
    | _LLAMA
    | {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "sliding_window": 128}
    | {"max_position_embeddings": 8192},
    "OlmoeForCausalLM": {"model_type": "olmoe", "num_experts": 64, "num_experts_per_tok": 8}
    | {"hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "PhiMoEForCausalLM": {"model_type": "phimoe"} | _PHIMOE,
    "PhimoeForCausalLM": {"model_type": "phimoe"} | _PHIMOE,
    "GptOssForCausalLM": {"model_type": "gpt_oss", "rms_norm_eps": 1e-5, "head_dim": 64}
    | {"num_key_value_heads": 8, "num_local_experts": 128, "num_experts_per_tok": 4}
    | {"sliding_window": 128, "max_position_embeddings": 131072}
    | {"rope_parameters": _GPT_OSS_ROPE, "hidden_act": "silu"},
    "GraniteMoeForCausalLM": {"model_type": "granitemoe", "num_local_experts": 8}
    | _LLAMA
    | {"num_experts_per_tok": 2},
    "GraniteMoeSharedForCausalLM": {"model_type": "granitemoeshared", "num_local_experts": 8}
    | _LLAMA
    | {"num_experts_per_tok": 2},
    "Glm4MoeForCausalLM": {"model_type": "glm4_moe", "first_k_dense_replace": 1}
    | _GLM_MOE
    | {"moe_intermediate_size": 1408},
    "Glm4MoeLiteForCausalLM": {"model_type": "glm4_moe_lite", "q_lora_rank": 768}
    | _LLAMA
    | {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
    | {"rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 1536, "routed_scaling_factor": 1.8, "n_shared_experts": 1},
    "SolarOpenForCausalLM": {"model_type": "solar_open", "head_dim": 128}
    | _GLM_MOE
    | {"moe_intermediate_size": 1280},
    "Dots1ForCausalLM": {"model_type": "dots1", "num_key_value_heads": 32}
    | _LLAMA
    | {"norm_topk_prob": False, "moe_intermediate_size": 1408, "sliding_window": 4096}
    | {"max_position_embeddings": 2048},
    "MiniMaxM2ForCausalLM": {"model_type": "minimax_m2", "num_key_value_heads": 8}
    | _LLAMA
    | {"head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8}
    | {"max_position_embeddings": 196608},
    "Ernie4_5_MoeForCausalLM": {"model_type": "ernie4_5_moe", "num_key_value_heads": 4}
    | _LLAMA
    | {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "moe_k": 6}
    | {"moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_intermediate_size": 1536},
    "HunYuanMoEV1ForCausalLM": {"model_type": "hunyuan_v1_moe", "num_experts": 1, "moe_topk": 1}
    | _LLAMA
    | {"rms_norm_eps": 1e-5},
    "ExaoneMoeForCausalLM": {"model_type": "exaone_moe", "num_key_value_heads": 32}
    | _LLAMA
    | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}
    | {"first_k_dense_replace": 1, "moe_intermediate_size": 1024, "num_experts": 64}
    | {"num_experts_per_tok": 8, "num_shared_experts": 1, "routed_scaling_factor": 2.5},
    "AfmoeForCausalLM": {"model_type": "afmoe", "head_dim": 128, "num_experts": 64}
    | _LLAMA
    | {"num_experts_per_tok": 6, "num_shared_experts": 2, "moe_intermediate_size": 1408}
    | {"rms_norm_eps": 1e-5, "sliding_window": 1024, "max_position_embeddings": 16384},
    "HYV3ForCausalLM": {"model_type": "hy_v3", "num_key_value_heads": 8, "head_dim": 128}
    | _LLAMA
    | {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_experts": 192}
    | {"num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536}
    | {"router_scaling_factor": 2.826},
    "Llama4ForCausalLM": {"model_type": "llama4_text"} | _LLAMA4,
    "Llama4ForConditionalGeneration": {"model_type": "llama4"} | _LLAMA4,
    "Cohere2MoeForCausalLM": {"model_type": "cohere2_moe", "head_dim": 128, "num_experts": 8}
    | _COHERE
    | {"num_experts_per_tok": 2},
    "ApertusForCausalLM": {"model_type": "apertus", "hidden_act": "xielu"}
    | {"rms_norm_eps": 1e-5, "max_position_embeddings": 65536},
    "BitNetForCausalLM": {"model_type": "bitnet", "hidden_act": "relu2", "rms_norm_eps": 1e-5}
    | {"num_key_value_heads": 5},
    "ExaoneForCausalLM": {"model_type": "exaone"},
    "Jais2ForCausalLM": {"model_type": "jais2", "hidden_act": "relu2", "layer_norm_eps": 1e-5}
    | {"max_position_embeddings": 8192},
    "HeliumForCausalLM": {"model_type": "helium", "hidden_act": "silu", "rms_norm_eps": 1e-8}
    | {"num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096},
    "CwmForCausalLM": {"model_type": "cwm", "hidden_act": "silu", "rms_norm_eps": 1e-5}
    | {"num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192}
    | {"max_position_embeddings": 131072},
    "MiniCPMForCausalLM": {"model_type": "minicpm"} | _LLAMA,
    "MiniCPM3ForCausalLM": {"model_type": "minicpm3", "hidden_act": "silu", "rms_norm_eps": 1e-5}
    | {"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
    | {"max_position_embeddings": 32768},
    "DeepseekV2ForCausalLM": {"model_type": "deepseek_v2", "first_k_dense_replace": 0}
    | _LLAMA
    | _LATENT
    | {"moe_intermediate_size": 1407, "n_shared_experts": 2},
    "DeepseekV3ForCausalLM": {"model_type": "deepseek_v3"} | _DEEPSEEK_V3,
    "KimiK25ForConditionalGeneration": {"model_type": "kimi_k25"} | _DEEPSEEK_V3,
    "Kimi_K25ForConditionalGeneration": {"model_type": "kimi_k25"} | _DEEPSEEK_V3,
    "KimiLinearForCausalLM": {"model_type": "kimi_linear", "num_key_value_heads": 32}
    | _LLAMA
    | _LATENT
    | {"q_lora_rank": None, "rms_norm_eps": 1e-5, "model_max_length": 1048576}
    | {"moe_intermediate_size": 1024, "num_experts": 256, "num_experts_per_token": 8}
    | {"num_shared_experts": 1, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1}
    | {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4},
    "InternLM2ForCausalLM": {"model_type": "internlm2"} | _LLAMA,
    "SmolLM3ForCausalLM": {"model_type": "smollm3"}
    | _LLAMA
    | {"num_key_value_heads": 4, "max_position_embeddings": 32768},
    "Starcoder2ForCausalLM": {"model_type": "starcoder2"}
    | {"num_key_value_heads": 2, "max_position_embeddings": 4096},
    "CohereForCausalLM": {"model_type": "cohere"} | _COHERE,
    "Cohere2ForCausalLM": {"model_type": "cohere2"} | _COHERE,
    "PhiForCausalLM": {"model_type": "phi"},
    "GPTNeoXForCausalLM": {"model_type": "gpt_neox"},
    "GPTJForCausalLM": {"model_type": "gptj", "n_positions": 2048, "rotary_dim": 64},
    "CodeGenForCausalLM": {"model_type": "codegen", "n_positions": 2048, "rotary_dim": 64},
    "StableLmForCausalLM": {"model_type": "stablelm"}
    | {"hidden_act": "silu", "layer_norm_eps": 1e-5}
    | {"num_key_value_heads": 32, "max_position_embeddings": 4096},
    "ArceeForCausalLM": {"model_type": "arcee"}
    | {"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "NemotronForCausalLM": {"model_type": "nemotron"}
    | {"hidden_act": "relu2", "max_position_embeddings": 4096},
    "OlmoForCausalLM": {"model_type": "olmo", "hidden_act": "silu"},
    "OPTForCausalLM": {"model_type": "opt", "max_position_embeddings": 2048},
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_positions": 1024},
    "GPTBigCodeForCausalLM": {"model_type": "gpt_bigcode", "n_positions": 1024},
    "BloomForCausalLM": {"model_type": "bloom"},
    "MptForCausalLM": {"model_type": "mpt"},
    "FalconForCausalLM": {"model_type": "falcon"},
    **_encoder(
        "JinaBert",
        "bert",
        _BERT | {"feed_forward_type": "original", "position_embedding_type": "absolute"},
    ),
    "BertSpladeSparseEmbeddingModel": {"model_type": "bert"} | _BERT,
    "HF_ColBERT": {"model_type": "bert"} | _BERT,
    "ColBERTModernBertModel": {"model_type": "modernbert"} | _MODERNBERT,
    "ColBERTJinaRobertaModel": {"model_type": "xlm-roberta"} | _FLASH,
    **_encoder("Bert", "bert", _BERT),
    **_encoder("Roberta", "roberta", _BERT),
    "BgeM3EmbeddingModel": {"model_type": "xlm-roberta"} | _BERT,
    **_encoder("XLMRoberta", "xlm-roberta", _BERT),
    **_encoder("Camembert", "camembert", _BERT),
    **_encoder(
        "DistilBert",
        "distilbert",
        {"activation": "gelu", "layer_norm_eps": 1e-12, "max_position_embeddings": 512},
    ),
    **_encoder("Electra", "electra", _BERT | {"embedding_size": 128}),
    **_encoder("MPNet", "mpnet", _BERT | {"relative_attention_num_buckets": 32}),
    **_encoder(
        "Albert",
        "albert",
        _BERT | {"hidden_act": "gelu_new", "embedding_size": 128, "num_hidden_groups": 1},
    ),
    **_encoder("ModernBert", "modernbert", _MODERNBERT),
    **_encoder(
        "EuroBert",
        "eurobert",
        _LLAMA
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "classifier_pooling": "late"},
    ),
    **_encoder("Deberta", "deberta", _DEBERTA),
    **_encoder("DebertaV2", "deberta-v2", _DEBERTA | {"conv_act": "tanh"}),
    **_encoder("New", "new", _GTE | {"max_position_embeddings": 2048}),
    **_encoder("Gte", "gte", _GTE),
    **_encoder(
        "NomicBert", "nomic_bert", _BERT | {"hidden_act": "silu", "max_position_embeddings": 2048}
    ),
    **_encoder("JinaEmbeddingsV3", "jina_embeddings_v3", _FLASH),
    "T5ForConditionalGeneration": {"model_type": "t5", "feed_forward_proj": "relu"} | _T5,
    "MT5ForConditionalGeneration": {"model_type": "mt5", "feed_forward_proj": "gated-gelu"} | _T5,
    "UMT5ForConditionalGeneration": {"model_type": "umt5", "feed_forward_proj": "gated-gelu"} | _T5,
    "T5GemmaForConditionalGeneration": {"model_type": "t5gemma", "bos_token_id": 2}
    | _GEMMA
    | {"max_position_embeddings": 8192, "eos_token_id": 1, "attn_logit_softcapping": 50.0}
    | {"final_logit_softcapping": 30.0},
    "BartForConditionalGeneration": {"model_type": "bart", "decoder_start_token_id": 2}
    | _BART
    | {"eos_token_id": 2},
    "M2M100ForConditionalGeneration": {"model_type": "m2m_100", "decoder_start_token_id": 2}
    | _BART
    | {"activation_function": "relu", "scale_embedding": True, "eos_token_id": 2}
    | {"pad_token_id": 1},
    "MBartForConditionalGeneration": {"model_type": "mbart", "eos_token_id": 2} | _BART,
    "MarianMTModel": {"model_type": "marian", "decoder_start_token_id": 58100, "eos_token_id": 0}
    | _BART,
    "PegasusForConditionalGeneration": {"model_type": "pegasus", "decoder_start_token_id": 0}
    | _BART
    | {"eos_token_id": 1},
    "MoonshineForConditionalGeneration": {"model_type": "moonshine", "decoder_start_token_id": 1}
    | {"encoder_hidden_act": "gelu", "decoder_hidden_act": "silu", "eos_token_id": 2}
    | {"max_position_embeddings": 512, "bos_token_id": 1},
    "WhisperForConditionalGeneration": {"model_type": "whisper", "activation_function": "gelu"}
    | {"num_mel_bins": 80, "max_source_positions": 1500, "max_target_positions": 448},
}
"""Defaults by the name of the architecture."""

_SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_LLAMA_TEXT = _SIZES | {"vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2}
TEXT_PARTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_TEXT | {"intermediate_size": 11008},
    "mistral": _LLAMA_TEXT | {"intermediate_size": 14336},
    "qwen2": _SIZES | {"vocab_size": 151936, "intermediate_size": 22016},
}
"""Further defaults of text_config, by its model_type: published models of pictures and sounds leave
out the sizes that are those of transformers' class."""

ARCHITECTURES = {defaults["model_type"]: name for name, defaults in DEFAULTS.items()}
"""Name of the architecture by model_type."""
