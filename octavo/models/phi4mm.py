"""Phi-4 multimodal as Microsoft publishes it, with custom code: its config, and its names.

Source: the conversion script of transformers (`convert_phi4_multimodal_weights_to_hf.py`).
"""

from __future__ import annotations

from typing import Any

from octavo.checkpoints.config_json import ConfigJson

_AUDIO = {
    "attention_dim": "hidden_size",
    "attention_heads": "num_attention_heads",
    "linear_units": "intermediate_size",
    "depthwise_seperable_out_channel": "depthwise_separable_out_channel",
}
"""Fields of the encoder of sounds -> those of transformers."""
_SAME: tuple[str, ...] = (
    "activation",
    "chunk_size",
    "conv_activation",
    "conv_glu_type",
    "depthwise_multiplier",
)
_SAME += ("ext_pw_out_channel", "input_size", "kernel_size", "num_blocks", "time_reduction")
_IMAGE, _SOUND = (f"model.embed_tokens_extend.{kind}_embed." for kind in ("image", "audio"))
IMAGE_PREFIXES = (
    (f"{_IMAGE}img_projection_up.", f"{_IMAGE}img_projection.0."),
    (f"{_IMAGE}img_projection_down.", f"{_IMAGE}img_projection.2."),
    (f"{_IMAGE}sub_img_feature_extensor", f"{_IMAGE}sub_GN"),
    (f"{_IMAGE}global_img_feature_extensor", f"{_IMAGE}glb_GN"),
)
"""Pairs (own, stored) of beginnings of names of the tower; see `EncoderSpec.prefixes`."""
_OF_LAYER = [(f"self_attn.{name}_proj.", f"self_attn.linear_{name}.") for name in "qkv"]
_OF_LAYER += [("self_attn.o_proj.", "self_attn.linear_out.")]
for _half in ("feed_forward_in", "feed_forward_out"):
    _OF_LAYER += [(f"{_half}.gate_up_proj.", f"{_half}.net.0.linear.")]
    _OF_LAYER += [(f"{_half}.down_proj.", f"{_half}.net.2.")]


def sound_prefixes(num_layers: int) -> tuple[tuple[str, str], ...]:
    """Return pairs as `IMAGE_PREFIXES`, for the encoder of sounds."""
    modes = (("speech", "speech"), ("vision_speech", "vision"))
    projections = [
        (f"{_SOUND}{name}_proj_for_{own}.", f"{_SOUND}audio_projection.{stored}.{i}.")
        for own, stored in modes
        for name, i in (("up", 0), ("down", 2))
    ]
    layers = [f"{_SOUND}encoder.encoders.{i}." for i in range(num_layers)]
    of_layers = [(layer + own, layer + stored) for layer in layers for own, stored in _OF_LAYER]
    return (*projections, *of_layers)


def with_sections(config: ConfigJson) -> ConfigJson:
    """Return the config with the vision_config and the audio_config of transformers.

    Raises:
        ModelError: a field has an unsupported value.
    """
    config.refuse("img_processor", None, "only the tower of the published model is supported")
    embed = config.section("embd_layer")
    image, sound = embed.section("image_embd_layer"), embed.section("audio_embd_layer")
    for section, name, only in (
        (image, "use_hd_transform", True),
        (image, "with_learnable_separator", True),
        (image, "hd_transform_order", "sub_glb"),
        (image, "image_token_compression_cls", "avg_pool_2d"),
        (sound, "use_qformer", False),
        (sound, "use_conv_downsample", False),
    ):
        section.refuse(name, only, f"only {only} is supported")
    given = config.section("audio_processor").section("config")
    audio: dict[str, Any] = {name: given.get(name) for name in _SAME if given.has(name)}
    audio |= {new: given.get(old) for old, new in _AUDIO.items() if given.has(old)}
    for section, old, new in (
        (given.section("nemo_conv_settings"), "conv_channels", "nemo_conv_channels"),
        (
            given.section("relative_attention_bias_args"),
            "t5_bias_max_distance",
            "bias_max_distance",
        ),
        (sound, "downsample_rate", "downsample_rate"),
    ):
        if section.has(old):
            audio[new] = section.get(old)
    vision = {"crop_size": image.get("crop_size")} if image.has("crop_size") else {}
    return config.filled({"vision_config": vision}).replaced("audio_config", audio)
