"""Models in Mistral's own form, made of the same models in Hugging Face's form."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
SPECIAL += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]")
SPECIAL += ("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
SPECIAL += ("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[AUDIO]")
SPECIAL += ("[BEGIN_AUDIO]", "[TRANSCRIBE]", "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]")
"""Special tokens, at the ids that Mistral's models have for most of them."""
COUNT = 32
VOCAB = COUNT + 256

_TEXT = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "hidden_dim",
    "rms_norm_eps": "norm_eps",
    "vocab_size": "vocab_size",
}
_VISION = ("hidden_size", "num_channels", "image_size", "patch_size", "intermediate_size")
_VISION += ("num_hidden_layers", "num_attention_heads")
_SOUND = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
_SOUND |= {"intermediate_size": "hidden_dim", "vocab_size": "vocab_size", "head_dim": "head_dim"}
_SOUND |= {"max_source_positions": "max_source_positions"}
_ENCODER = "mm_whisper_embeddings.whisper_encoder."
_NAMES = (
    (r"^model\.(language_model|vision_tower|multi_modal_projector|audio_tower)\.", r"\1."),
    (r"^language_model\.(model\.|lm_head)", r"\1"),
    (r"^language_model\.", "model."),
    (r"^model\.embed_tokens", "tok_embeddings"),
    (r"^lm_head", "output"),
    (r"^model\.(norm|layers)", r"\1"),
    (r"^layers\.(\d+)\.self_attn", r"layers.\1.attention"),
    (r"^layers\.(\d+)\.input_layernorm", r"layers.\1.attention_norm"),
    (r"^layers\.(\d+)\.post_attention_layernorm", r"layers.\1.ffn_norm"),
    (r"^layers\.(\d+)\.(mlp|block_sparse_moe)", r"layers.\1.feed_forward"),
    (r"^vision_tower", "vision_encoder"),
    (r"^multi_modal_projector\.patch_merger", "patch_merger"),
    (r"^multi_modal_projector\.norm", "pre_mm_projector_norm"),
    (r"^audio_tower\.conv1", rf"{_ENCODER}conv_layers.0"),
    (r"^audio_tower\.conv2", rf"{_ENCODER}conv_layers.1"),
    (r"^audio_tower\.layer_norm", rf"{_ENCODER}transformer.norm"),
    (r"^audio_tower\.layers\.(\d+)\.self_attn\.", rf"{_ENCODER}transformer.layers.\1.attention."),
    (r"^audio_tower\.layers\.(\d+)\.fc", rf"{_ENCODER}transformer.layers.\1.feed_forward.w"),
    (
        r"^audio_tower\.layers\.(\d+)\.self_attn_layer_norm",
        rf"{_ENCODER}transformer.layers.\1.attention_norm",
    ),
    (
        r"^audio_tower\.layers\.(\d+)\.final_layer_norm",
        rf"{_ENCODER}transformer.layers.\1.ffn_norm",
    ),
    (r"\.([qkvo])_proj\.", r".w\1."),
    (r"\.out_proj\.", ".wo."),
    (r"\.gate_proj\.", ".w1."),
    (r"\.down_proj\.", ".w2."),
    (r"\.up_proj\.", ".w3."),
    (r"weight_scale$", "qscale_weight"),
    (r"input_scale$", "qscale_act"),
)
"""Replacements that turn a name of Hugging Face's form into Mistral's, one after the other."""


def write_tekken(
    folder: Path, version: str = "v13", *, thinks: bool = True, settings: Any = None
) -> None:
    """Write a tekken.json with a token for each byte; `settings` are those of the model."""
    known = [name for name in SPECIAL if thinks or "THINK" not in name]
    config = {"pattern": r" ?[^\s]+|\s+", "default_vocab_size": VOCAB, "version": version}
    config |= {"default_num_special_tokens": COUNT}
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None}
        for i in range(256)
    ]
    special = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(known)]
    found = {"config": config, "vocab": vocab, "special_tokens": special}
    found |= {} if settings is None else {"model_settings_builder": settings}
    (folder / "tekken.json").write_text(json.dumps(found))


def to_mistral(source: Path, target: Path, **fields: Any) -> Path:
    """Write a model in Mistral's form; return its folder.

    Args:
        source: folder in Hugging Face's form, with model.safetensors.
        target: the new folder.
        fields: fields of params.json that replace others.
    """
    target.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    text = config.get("text_config", config)
    vision = config.get("vision_config", {})
    written = {}
    for name, tensor in tensors.items():
        if name.endswith("embed_positions.weight"):
            continue
        old = name
        for pattern, new in _NAMES:
            name = re.sub(pattern, new, name)
        is_sound = "audio_tower" in old
        projector = ("w_in", "w_out")
        if is_sound or "audio_config" in config:
            projector = tuple(
                f"mm_whisper_embeddings.audio_language_projection.{i}" for i in (0, 2)
            )
        for i, module in enumerate(projector, 1):
            module = module if "." in module else f"vision_language_adapter.{module}"
            name = re.sub(rf"^multi_modal_projector\.linear_{i}", module, name)
        if name.endswith((".wq.weight", ".wk.weight")) and not is_sound:
            heads = vision if name.startswith("vision_encoder") else text
            keys = name.endswith(".wk.weight") and "num_key_value_heads" in heads
            count = heads["num_key_value_heads" if keys else "num_attention_heads"]
            rows = tensor.view(count, 2, -1, tensor.shape[1])
            tensor = rows.transpose(1, 2).reshape(tensor.shape).contiguous()
        if name == "tok_embeddings.weight" and "audio_config" in config:
            name = f"mm_whisper_embeddings.{name}"
        written[name] = tensor
    save_file(written, target / "consolidated.safetensors")
    params = _params(config, text, vision)
    (target / "params.json").write_text(json.dumps(params | fields))
    return target


def _params(config: dict[str, Any], text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {new: text[old] for old, new in _TEXT.items() if old in text}
    params.setdefault("head_dim", text["hidden_size"] // text["num_attention_heads"])
    rope = text.get("rope_parameters") or {}
    params["rope_theta"] = rope.get("rope_theta", text.get("rope_theta"))
    params["max_position_embeddings"] = text["max_position_embeddings"]
    params["sliding_window"] = text.get("sliding_window")
    params["tied_embeddings"] = bool(text.get("tie_word_embeddings"))
    if rope.get("rope_type") == "yarn":
        original = rope["original_max_position_embeddings"]
        params["yarn"] = {"factor": rope["factor"], "original_max_position_embeddings": original}
        params["yarn"] |= {"beta": rope["beta_fast"], "alpha": rope["beta_slow"]}
        params["yarn"]["apply_scale"] = rope.get("attention_factor") != 1.0
        if "llama_4_scaling_beta" in rope:
            beta = rope["llama_4_scaling_beta"]
            length = "original_max_position_embeddings"
            params["llama_4_scaling"] = {length: original, "beta": beta}
    if "num_local_experts" in text:
        params["moe"] = {"num_experts": text["num_local_experts"]}
        params["moe"]["num_experts_per_tok"] = text["num_experts_per_tok"]
    if vision:
        params["vision_encoder"] = {name: vision[name] for name in _VISION}
        params["vision_encoder"] |= {"rope_theta": 10000.0, "image_token_id": 10}
        bias = config.get("multimodal_projector_bias", True)
        params["vision_encoder"]["adapter_bias"] = bias
        if config["model_type"] == "mistral3":
            merge = {"mm_projector_id": "patch_merge", "add_pre_mm_projector_layer_norm": True}
            merge["spatial_merge_size"] = config["spatial_merge_size"]
            params["vision_encoder"] |= merge
    if "audio_config" in config:
        audio = config["audio_config"]
        encoder = {new: audio[old] for old, new in _SOUND.items() if old in audio}
        features = {"num_mel_bins": audio["num_mel_bins"], "window_size": 400, "hop_length": 160}
        features |= {"sampling_rate": 16000, "chunk_length_s": audio["max_source_positions"] / 50}
        encoder["audio_encoding_args"] = features
        factor = audio["intermediate_size"] // audio["hidden_size"]
        sound = {"encoder_args": encoder, "downsample_args": {"downsample_factor": factor}}
        params["multimodal"] = {"whisper_model_args": sound}
    return params


def save_both(
    model: Any, folder: Path, preprocessor: dict[str, Any] | None = None, version: str = "v13"
) -> tuple[Path, Path]:
    """Save transformers' model in both forms with one tokenizer; return the folders."""
    hf = folder / "hf"
    model.save_pretrained(hf)
    if preprocessor is not None:
        (hf / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    own = to_mistral(hf, folder / "mistral")
    for path in (hf, own):
        write_tekken(path, version)
    return hf, own
