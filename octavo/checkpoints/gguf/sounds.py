"""Encoders of sounds in the mmproj files of llama.cpp, beside towers of pictures.

Facts of llama.cpp's converter (`convert_hf_to_gguf.py --mmproj`) and of its runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.checkpoints.config_json import MOST_LAYERS

if TYPE_CHECKING:
    from octavo.checkpoints.gguf.projectors import Described

COMMON_KEYS: tuple[str, ...] = (
    "projector_type",
    "projection_dim",
    "embedding_length",
    "feed_forward_length",
    "block_count",
    "num_mel_bins",
    "attention.head_count",
    "attention.layer_norm_epsilon",
)
"""Keys of `clip.audio` that the files have."""


@dataclass(frozen=True)
class SoundEncoder:
    """A kind of encoder of sounds (`clip.audio.projector_type`)."""

    read: Callable[[Described], tuple[dict[str, Any], dict[str, Any]]]
    """Function of the file: the fields of audio_config, and those of the feature extractor."""
    layers: str
    """Prefix of the names of layers."""
    inner: Mapping[str, str]
    """Modules of a layer, and their names in the file."""
    names: Mapping[str, str]
    """The same outside of layers."""
    last: str
    """Tensor whose rows are the numbers of a row of the decoder."""
    linears: frozenset[str]
    """Modules of `inner` and of `names` whose weights may be blocks."""
    softplus: str = ""
    """Module of a layer whose tensor the converter has replaced with its softplus; empty: none."""


def _read_gemma4(file: Described) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read `gemma4a`. The other sizes are transformers' defaults, which llama.cpp has fixed."""
    keys, shapes = file.keys, file.shapes

    def rows(name: str) -> int:
        return (shapes.get(name) or (0,))[0]

    channels = [rows(f"a.conv1d.{i}.weight") for i in (0, 1)]
    bands = keys.integer("clip.audio.num_mel_bins", most=1024)
    if bands != channels[0]:
        raise keys.error(
            "clip.audio.num_mel_bins",
            f"it must be {channels[0]}, the channels of a.conv1d.0.weight",
        )
    audio = {
        "hidden_size": keys.integer("clip.audio.embedding_length", most=2**20),
        "num_hidden_layers": keys.integer("clip.audio.block_count", most=MOST_LAYERS),
        "num_attention_heads": keys.integer("clip.audio.attention.head_count", most=2**20),
        "subsampling_conv_channels": channels,
        "conv_kernel_size": (shapes.get("a.blk.0.conv_dw.weight") or (0,))[-1],
        "output_proj_dims": rows("a.pre_encode.out.weight"),
        "use_clipped_linears": "a.blk.0.attn_q.input_min" in shapes,
    }  # Old files have a wrong attention.layer_norm_epsilon; llama.cpp does not read it either.
    return audio, {"feature_size": bands}


_GEMMA4_LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.post": "attn_out",
    "feed_forward1.ffw_layer_1": "ffn_up",
    "feed_forward1.ffw_layer_2": "ffn_down",
    "feed_forward2.ffw_layer_1": "ffn_up_1",
    "feed_forward2.ffw_layer_2": "ffn_down_1",
    "lconv1d.linear_start": "conv_pw1",
    "lconv1d.linear_end": "conv_pw2",
}
"""Modules with bounds, whose weight is that of a submodule `linear`."""
_GEMMA4_INNER = {
    **_GEMMA4_LINEARS,
    **{f"{module}.linear": name for module, name in _GEMMA4_LINEARS.items()},
    "self_attn.relative_k_proj": "attn_k_rel",
    "self_attn.per_dim_scale": "per_dim_scale.weight",
    "norm_pre_attn": "attn_pre_norm",
    "norm_post_attn": "attn_post_norm",
    "norm_out": "ln2",
    "feed_forward1.pre_layer_norm": "ffn_norm",
    "feed_forward1.post_layer_norm": "ffn_post_norm",
    "feed_forward2.pre_layer_norm": "ffn_norm_1",
    "feed_forward2.post_layer_norm": "ffn_post_norm_1",
    "lconv1d.depthwise_conv1d": "conv_dw",
    # The names of these two are exchanged in the files.
    "lconv1d.pre_layer_norm": "conv_norm",
    "lconv1d.conv_norm": "norm_conv",
}
_GEMMA4_NAMES = {
    "audio_tower.subsample_conv_projection.layer0.conv": "a.conv1d.0",
    "audio_tower.subsample_conv_projection.layer0.norm": "a.conv1d.0.norm",
    "audio_tower.subsample_conv_projection.layer1.conv": "a.conv1d.1",
    "audio_tower.subsample_conv_projection.layer1.norm": "a.conv1d.1.norm",
    "audio_tower.subsample_conv_projection.input_proj_linear": "a.input_projection",
    "audio_tower.output_proj": "a.pre_encode.out",
    "embed_audio.embedding_projection": "mm.a.input_projection",
}


def _read_gemma4_unified(file: Described) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read `gemma4ua`, whose number of mel bands has no meaning."""
    shape = file.shapes.get("mm.a.input_projection.weight", ())
    size = shape[1] if len(shape) == 2 else 0
    features = {"feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor"}
    return {"audio_embed_dim": size}, {**features, "audio_samples_per_token": size}


SOUND_ENCODERS: dict[str, SoundEncoder] = {
    "gemma4a": SoundEncoder(
        _read_gemma4,
        "audio_tower.layers.",
        _GEMMA4_INNER,
        _GEMMA4_NAMES,
        "mm.a.input_projection.weight",
        frozenset(
            {
                *(f"{module}.linear" for module in _GEMMA4_LINEARS),
                "self_attn.relative_k_proj",
                "audio_tower.subsample_conv_projection.input_proj_linear",
                "audio_tower.output_proj",
                "embed_audio.embedding_projection",
            }
        ),
        "self_attn.per_dim_scale",
    ),
    "gemma4ua": SoundEncoder(
        _read_gemma4_unified,
        "",
        {},
        {"embed_audio.embedding_projection": "mm.a.input_projection"},
        "mm.a.input_projection.weight",
        frozenset({"embed_audio.embedding_projection"}),
    ),
}
"""Values of clip.audio.projector_type."""
