"""Configurations of models with towers, of which only the text part is compared."""

from typing import Any

from tests.models.configs.dense import GEMMA4_E, GEMMA4_VALUES
from tests.models.configs.latent import LATENT
from tests.models.configs.recurrent import QWEN3_5
from tests.models.configs.sizes import FEW, SIZES, WIDE_HEADS, YARN

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


def with_tower(text: dict[str, Any], tower: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"text_config": text, "vision_config": tower, **more}


TEXT_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3-vision": (
        "Gemma3ForConditionalGeneration",
        with_tower(WIDE_HEADS | {"sliding_window": 10, "_sliding_window_pattern": 2}, TOWER),
    ),
    "gemma4-vision": (
        "Gemma4ForConditionalGeneration",
        with_tower(GEMMA4_E, TOWER | {"num_key_value_heads": 2, "head_dim": 8}),
    ),
    "gemma4-unified-vision": (
        "Gemma4UnifiedForConditionalGeneration",
        with_tower(GEMMA4_VALUES, {"mm_embed_dim": 16, "mm_posemb_size": 4, "patch_size": 2}),
    ),
    "mistral-small3": (
        "Mistral3ForConditionalGeneration",
        with_tower(
            WIDE_HEADS | {"model_type": "mistral", "sliding_window": None},
            TOWER | {"model_type": "pixtral"},
            tie_word_embeddings=False,
        ),
    ),
    "ministral3-vision": (
        "Mistral3ForConditionalGeneration",
        with_tower(
            WIDE_HEADS
            | {"model_type": "ministral3", "tie_word_embeddings": True}
            | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}},
            TOWER | {"model_type": "pixtral"},
        ),
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLForConditionalGeneration",
        with_tower(
            SIZES
            | {"rope_scaling": {"type": "mrope", "rope_theta": 1e5, "mrope_section": [2, 2, 2]}},
            QWEN_TOWER | {"fullatt_block_indexes": [0]},
        ),
    ),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        with_tower(
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
        with_tower(
            QWEN3_5 | {"tie_word_embeddings": True},
            QWEN_TOWER | {"num_position_embeddings": 16},
            tie_word_embeddings=True,
        ),
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        with_tower(
            WIDE_HEADS | {"model_type": "llama"}, TOWER | {"model_type": "clip_vision_model"}
        ),
    ),
    "muse-glimmer": (
        "MuseGlimmerForConditionalGeneration",
        with_tower(MUSE, MUSE_TOWER, projector_hidden_size=16, out_hidden_size=64),
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
    "AyaVision": with_tower(AYA_TEXT, SIGLIP),
    "Cohere2Vision": with_tower(AYA_TEXT, SIGLIP),
    "Glm4v": with_tower(
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
    "DeepseekVL": with_tower(LLAMA_TEXT, SIGLIP),
    "Exaone4_5_": with_tower(
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
    "Mistral3": with_tower(
        LATENT
        | {"model_type": "mistral4", "n_routed_experts": 6, "moe_intermediate_size": 20}
        | {"qk_rope_head_dim": 12, "tie_word_embeddings": False},
        TOWER | {"model_type": "pixtral"},
        tie_word_embeddings=False,
    ),
    "Qwen3_5Moe": with_tower(
        QWEN3_5 | FEW | {"num_hidden_layers": 3, "shared_expert_intermediate_size": 24},
        QWEN_TOWER | {"num_position_embeddings": 16},
    ),
    "Qwen3VLMoe": with_tower(
        WIDE_HEADS
        | FEW
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}
            | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
        },
        QWEN_TOWER | {"deepstack_visual_indexes": [0]},
    ),
    "LlavaNextVideo": with_tower(LLAMA_TEXT, CLIP),
    "Ovis2": with_tower(QWEN_TEXT, TOWER | {"vocab_size": 32}, hidden_size=48),
    "VideoLlama3": with_tower(QWEN_TEXT, TOWER),
    "VideoLlava": with_tower(LLAMA_TEXT, CLIP),
    "GotOcr2": with_tower(QWEN_TEXT, SAM),
    "Idefics2": with_tower(WIDE_HEADS | {"model_type": "mistral"}, TOWER),
    "Idefics3": with_tower(LLAMA_TEXT, TOWER),
    "InternVL": with_tower(
        QWEN_TEXT,
        TOWER | {"image_size": [28, 28], "patch_size": [14, 14]},
        tie_word_embeddings=True,
    ),
    "LightOnOcr": with_tower(SIZES | {"model_type": "qwen3"}, TOWER | {"model_type": "pixtral"}),
    "LlavaNext": with_tower(LLAMA_TEXT, CLIP),
    "LlavaOnevision": with_tower(QWEN_TEXT, SIGLIP),
    "PaddleOCRVL": with_tower(
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
    "Qwen2VL": with_tower(
        SIZES | {"rope_scaling": {"type": "mrope", "rope_theta": 1e5, "mrope_section": [2, 2, 2]}},
        {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 48, "mlp_ratio": 1},
    ),
    "SmolVLM": with_tower(LLAMA_TEXT | {"tie_word_embeddings": True}, TOWER),
    "VipLlava": with_tower(LLAMA_TEXT, CLIP),
    "Voxtral": {"text_config": LLAMA_TEXT, "audio_config": TOWER | AUDIO},
}
WRAPPERS["Glm46V"] = WRAPPERS["Glm4v"]
"""Models whose text part is a family with cases above; less is tested of them."""
