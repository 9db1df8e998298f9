"""Mistral's params.json as the config.json of the same model in Hugging Face's form.

Field names: mistral-inference (`args.py`) and vLLM (`transformers_utils/configs/mistral.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoints.config_json import MOST_LAYERS, ConfigJson
from octavo.checkpoints.mistral.files import PARAMS
from octavo.errors import ModelError

_TEXT = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""Fields that each model has, and their names in config.json."""
_REST: tuple[str, ...] = (
    "rope_theta",
    "max_position_embeddings",
    "max_seq_len",
    "sliding_window",
    "yarn",
)
_REST += ("llama_4_scaling", "tied_embeddings", "moe", "quantization", "dtype")
_REST += ("vision_encoder", "multimodal")
"""Other fields that are read."""
_NEUTRAL: dict[str, Any] = {
    "activation": "silu",
    "causal": True,
    "model_type": "transformer",
    "use_biases": False,
}
"""Fields of which only one value is supported."""
_UNUSED = ("max_batch_size", "use_cache", "ragged_attention")
"""Fields without an effect on the numbers."""
_YARN = {"factor": "factor", "original_max_position_embeddings": "original_max_position_embeddings"}
_YARN |= {"beta": "beta_fast", "alpha": "beta_slow"}
_VISION: tuple[str, ...] = ("hidden_size", "num_channels", "image_size", "patch_size", "rope_theta")
_VISION += ("intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Fields of vision_encoder with the same name in config.json."""
_VISION_REST: tuple[str, ...] = (
    "max_image_size",
    "image_token_id",
    "image_break_token_id",
    "image_end_token_id",
)
_VISION_REST += ("adapter_bias", "mm_projector_id", "spatial_merge_size")
_VISION_REST += ("add_pre_mm_projector_layer_norm",)
_MERGER_EPS = 1e-5
"""Term of the norm before the merger, whatever the text part's is."""
_SOUND = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
_SOUND_NEUTRAL = {"causal": False, "use_biases": True, "pos_embed": "sinusoidal"}
_FEATURES = {"num_mel_bins": "feature_size", "window_size": "n_fft", "hop_length": "hop_length"}
_FEATURES |= {"sampling_rate": "sampling_rate", "chunk_length_s": "chunk_length"}
"""Fields of audio_encoding_args, and their names in preprocessor_config.json."""
_MOST_POSITIONS = 2**14
"""Most positions of sounds, whose vectors are made."""
_AUDIO_TOKEN, _IMAGE_TOKEN = 24, 10
_TOWERS = ["vision_tower", "multi_modal_projector", "audio_tower"]
"""Modules that are never quantized."""


def read_params(path: Path) -> ConfigJson:
    """Return the config.json that describes the model of a params.json.

    Raises:
        ModelError: the file is missing or damaged, or has a field or a value that is not supported.
    """
    if not path.exists():
        raise ModelError(
            f"{path} is missing: load_format=mistral reads {PARAMS} and consolidated*.safetensors; "
            "leave it out for a model in another form."
        )
    params = ConfigJson.load(path)
    _check_fields(params, (*_TEXT, *_REST, *_UNUSED), _NEUTRAL)
    text = _text_part(params)
    fields: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
    fields["tie_word_embeddings"] = params.flag("tied_embeddings", False)
    if params.has("dtype"):
        fields["dtype"] = params.get("dtype")
    if params.has("quantization"):
        fields["quantization_config"] = _quantization(params.section("quantization"))
    vision, sound = _vision_of(params), _sound_of(params)
    if vision is not None and sound is not None:
        raise params.error("multimodal", "only pictures or sounds are, not both")
    if vision is not None:
        tower = _vision_part(vision, text)
    elif sound is not None:
        tower = _sound_part(sound, text)
    else:
        return ConfigJson(text | fields, params.where)
    tied = {"tie_word_embeddings": fields["tie_word_embeddings"]}
    return ConfigJson({**tower, **fields, "text_config": text | tied}, params.where)


def read_preprocessor(path: Path) -> dict[str, Any] | None:
    """Return the content of the preprocessor_config.json of a model; None: it reads only texts.

    Raises:
        ModelError: as for `read_params`.
    """
    params = ConfigJson.load(path)
    vision, sound = _vision_of(params), _sound_of(params)
    if vision is not None:
        longest = vision.integer("max_image_size", "image_size", default=1024)
        return {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": longest},
            "patch_size": vision.integer("patch_size"),
        }
    if sound is None:
        return None
    features = sound.section("encoder_args").section("audio_encoding_args")
    _check_fields(features, tuple(_FEATURES), {"global_log_mel_max": None})
    found = {new: features.integer(old) for old, new in _FEATURES.items() if features.has(old)}
    return {"feature_extractor_type": "WhisperFeatureExtractor", **found}


def _check_fields(config: ConfigJson, known: tuple[str, ...], neutral: Mapping[str, Any]) -> None:
    """Refuse fields that may change the numbers in an unknown way; null counts as absent."""
    for name in config.names():
        if name in neutral:
            config.refuse(name, neutral[name], f"only {neutral[name]!r} is")
        elif name not in known and config.has(name):
            raise config.error(name, "Octavo does not know this field of Mistral's form")


def _text_part(params: ConfigJson) -> dict[str, Any]:
    """Return the config.json of the text part."""
    text = {new: params.get(old) for old, new in _TEXT.items() if params.has(old)}
    for old in _TEXT:  # the errors of later readers would name other fields
        if old == "norm_eps":
            params.number(old)
        elif old == "n_layers":
            params.integer(old, most=MOST_LAYERS)
        elif old != "n_kv_heads" or params.has(old):
            params.integer(old)
    text["rope_theta"] = params.number("rope_theta", default=1e4)
    text["max_position_embeddings"] = params.integer(
        "max_position_embeddings", "max_seq_len", default=128_000
    )
    text.setdefault("num_key_value_heads", text["num_attention_heads"])
    text |= {"hidden_act": "silu", "sliding_window": None}
    kind, architecture = "mistral", "MistralForCausalLM"
    text |= _windows(params)
    if params.has("yarn") or params.has("llama_4_scaling"):
        text["rope_parameters"] = _positions(params, text.pop("rope_theta"))
    if params.has("llama_4_scaling"):
        kind, architecture = "ministral3", "Ministral3ForCausalLM"
    if params.has("moe"):
        moe = params.section("moe")
        _check_fields(moe, ("num_experts", "num_experts_per_tok"), {})
        text["num_local_experts"] = moe.integer("num_experts")
        text["num_experts_per_tok"] = moe.integer("num_experts_per_tok")
        if kind != "mistral":
            raise params.error("moe", "experts are not, together with llama_4_scaling")
        kind, architecture = "mixtral", "MixtralForCausalLM"
    return {"model_type": kind, "architectures": [architecture], **text}


def _windows(params: ConfigJson) -> dict[str, Any]:
    """Return the window of all layers, or of those of a repeated pattern."""
    windows = params.get("sliding_window")
    if not isinstance(windows, list):
        return {"sliding_window": params.optional_integer("sliding_window", least=1)}
    layers = params.integer("n_layers")
    sizes = [size for size in windows if size is not None]
    if not windows or layers % len(windows) or any(size != sizes[0] for size in sizes):
        raise params.error(
            "sliding_window", "a list must divide the layers, and have one window beside null"
        )
    window = params.replaced("sliding_window", sizes[0] if sizes else None).optional_integer(
        "sliding_window", least=1
    )
    kinds = ["full_attention" if size is None else "sliding_attention" for size in windows]
    return {"sliding_window": window, "layer_types": kinds * (layers // len(kinds))}


def _positions(params: ConfigJson, theta: float) -> dict[str, Any]:
    """Return rope_parameters."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if params.has("yarn"):
        yarn = params.section("yarn")
        _check_fields(yarn, (*_YARN, "apply_scale"), {})
        found |= {new: yarn.number(old) for old, new in _YARN.items() if yarn.has(old)}
        found |= {"rope_type": "yarn"}
        if not yarn.flag("apply_scale", True):
            found["attention_factor"] = 1.0
    if params.has("llama_4_scaling"):
        scaling = params.section("llama_4_scaling")
        length = "original_max_position_embeddings"
        _check_fields(scaling, (length, "beta"), {})
        original = scaling.integer(length)
        if found.setdefault(length, original) != original:
            raise scaling.error(length, "it must be that of yarn")
        found["llama_4_scaling_beta"] = scaling.number("beta")
    return found


def _quantization(quantization: ConfigJson) -> dict[str, Any]:
    """Return quantization_config."""
    _check_fields(quantization, ("qformat_weight", "qscheme_act"), {})
    quantization.choice("qformat_weight", {"fp8_e4m3": "fp8"})
    schemes = {"TENSOR": "static", "NO_SCALES": "dynamic"}
    scheme = quantization.choice("qscheme_act", schemes, "TENSOR")
    return {
        "quant_method": "fp8",
        "activation_scheme": scheme,
        "modules_to_not_convert": _TOWERS,
    }


def _vision_of(params: ConfigJson) -> ConfigJson | None:
    """Return the description of a tower of pictures; None: the model has none."""
    if params.has("vision_encoder"):
        return params.section("vision_encoder")
    section = params.section("multimodal")
    return section.section("vision_encoder_args") if section.has("vision_encoder_args") else None


def _sound_of(params: ConfigJson) -> ConfigJson | None:
    """Return the description of a tower of sounds; None: the model has none."""
    section = params.section("multimodal")
    _check_fields(section, ("vision_encoder_args", "whisper_model_args"), {})
    return section.section("whisper_model_args") if section.has("whisper_model_args") else None


def _vision_part(vision: ConfigJson, text: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model of pictures, without its text_config."""
    _check_fields(vision, (*_VISION, *_VISION_REST), {})
    tower = {"model_type": "pixtral", "hidden_act": "silu"}
    tower |= {name: vision.get(name) for name in _VISION if vision.has(name)}
    for name in _VISION:
        vision.positive(name)
    merges = vision.get("mm_projector_id") == "patch_merge"
    if not merges:
        vision.refuse("mm_projector_id", "", "only 'patch_merge' is, or none")
        vision.refuse("spatial_merge_size", 1, "patches are merged only with patch_merge")
    normed = vision.flag("add_pre_mm_projector_layer_norm", False)
    if normed != merges:
        raise vision.error(
            "add_pre_mm_projector_layer_norm", "it must be true with patch_merge, and only then"
        )
    found: dict[str, Any] = {
        "vision_config": tower,
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": vision.flag("adapter_bias", True),
        "image_token_index": vision.integer("image_token_id", default=_IMAGE_TOKEN, least=0),
    }
    if not merges:
        llava = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
        return llava | found | {"vision_feature_select_strategy": "full"}
    if text["rms_norm_eps"] != _MERGER_EPS:
        raise ModelError(
            f"{vision.where}: patch_merge with norm_eps={text['rms_norm_eps']} is not supported; "
            f"only {_MERGER_EPS} is."
        )
    found["spatial_merge_size"] = vision.integer("spatial_merge_size")
    kind = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"]}
    return kind | found


def _sound_part(sound: ConfigJson, text: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model of sounds, without its text_config."""
    _check_fields(sound, ("encoder_args", "downsample_args"), {})
    encoder, joined = sound.section("encoder_args"), sound.section("downsample_args")
    known = (*_SOUND, "head_dim", "audio_encoding_args", "max_source_positions")
    _check_fields(encoder, known, _SOUND_NEUTRAL)
    _check_fields(joined, ("downsample_factor",), {})
    tower: dict[str, Any] = {new: encoder.integer(old) for old, new in _SOUND.items()}
    if tower["hidden_size"] % 2 or tower["hidden_size"] < 4:
        raise encoder.error("dim", "it must be an even number >= 4")
    size = tower["hidden_size"] // tower["num_attention_heads"]
    if encoder.integer("head_dim", default=size) != size:
        raise encoder.error("head_dim", f"it must be {size}, dim divided by n_heads")
    if joined.integer("downsample_factor") * tower["hidden_size"] != tower["intermediate_size"]:
        raise joined.error("downsample_factor", "it must be hidden_dim divided by dim")
    if text["model_type"] != "mistral":
        raise ModelError(f"{sound.where}: a text part of {text['model_type']} is not supported.")
    features = encoder.section("audio_encoding_args")
    tower |= {
        "model_type": "voxtral_encoder",
        "activation_function": "gelu",
        "num_mel_bins": features.integer("num_mel_bins"),
        "max_source_positions": encoder.integer(
            "max_source_positions", default=1500, most=_MOST_POSITIONS
        ),
    }
    return {
        "model_type": "voxtral",
        "architectures": ["VoxtralForConditionalGeneration"],
        "audio_config": tower,
        "audio_token_id": _AUDIO_TOKEN,
        "hidden_size": text["hidden_size"],
        "projector_hidden_act": "gelu",
    }
