"""Configurations of families with attention and dense MLPs."""

from typing import Any

from tests.models.configs.sizes import LLAMA3, QUARTER, SIZES, VOCAB, WIDE_HEADS, YARN

GPT2 = {"vocab_size": VOCAB, "n_positions": 128, "n_embd": 48, "n_layer": 3, "n_head": 2}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 3, "n_head": 6, "seq_length": 128}
MPT = {"vocab_size": VOCAB, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 128}
OPT = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "num_key_value_heads")}
OPT |= {"ffn_dim": 72, "num_attention_heads": 2}
FALCON = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "num_key_value_heads")}
NEOX = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"} | {"num_attention_heads": 3}
GEMMA4 = SIZES | {"head_dim": 16, "global_head_dim": 24, "sliding_window": 9}
GEMMA4 |= {"final_logit_softcapping": 3.0}
GEMMA4_E = GEMMA4 | {"num_hidden_layers": 6, "num_kv_shared_layers": 3}
GEMMA4_E |= {"use_double_wide_mlp": True, "hidden_size_per_layer_input": 8}
GEMMA4_E |= {"layer_types": ["sliding_attention", "full_attention"] * 3}
GEMMA4_E |= {"vocab_size_per_layer_input": VOCAB}
GEMMA4_VALUES = GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_VALUES |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

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
    "phi4-multimodal": (
        "Phi4MultimodalForCausalLM",
        SIZES
        | {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True}
        | {
            "vision_config": {"hidden_size": 24, "intermediate_size": 8, "num_hidden_layers": 2}
            | {"num_attention_heads": 3, "image_size": 8, "crop_size": 8, "patch_size": 4},
            "audio_config": {"hidden_size": 8, "intermediate_size": 8, "num_blocks": 1}
            | {"num_attention_heads": 2, "input_size": 8, "nemo_conv_channels": 2}
            | {"ext_pw_out_channel": 8, "depthwise_separable_out_channel": 8},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}
            | {"partial_rotary_factor": 0.5},
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
}
