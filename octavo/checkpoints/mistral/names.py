"""Names of tensors in Mistral's form, and those of Hugging Face's form.

Names: mistral-inference, and vLLM (`models/mistral.py`, `models/pixtral.py`, `models/voxtral.py`).
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Kind = Literal["queries", "keys", "picture heads", ""]

_LAYER = r"layers\.(\d+)\."
_PARTS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
_MLP = {"1": "gate_proj", "2": "down_proj", "3": "up_proj"}
_SOUND_MLP = {"1": "fc1", "2": "fc2"}
_ENDS = {"weight": "weight", "bias": "bias"}
_ENDS |= {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}
_END = rf"\.({'|'.join(_ENDS)})"
_ENCODER = r"mm_whisper_embeddings\.whisper_encoder\."
_FIXED = {
    r"tok_embeddings": "model.embed_tokens",
    r"norm": "model.norm",
    r"output": "lm_head",
    rf"{_LAYER}attention_norm": r"model.layers.\1.input_layernorm",
    rf"{_LAYER}ffn_norm": r"model.layers.\1.post_attention_layernorm",
    rf"{_LAYER}feed_forward\.gate": r"model.layers.\1.block_sparse_moe.gate",
    rf"{_LAYER}feed_forward\.(experts\.\d+\.w[123])": r"model.layers.\1.block_sparse_moe.\2",
    r"vision_encoder\.(patch_conv|ln_pre|transformer\.layers\.\d+\.(?:attention|ffn)_norm)": (
        r"vision_tower.\1"
    ),
    r"vision_language_adapter\.w_in": "multi_modal_projector.linear_1",
    r"vision_language_adapter\.w_out": "multi_modal_projector.linear_2",
    r"patch_merger\.merging_layer": "multi_modal_projector.patch_merger.merging_layer",
    r"pre_mm_projector_norm": "multi_modal_projector.norm",
    r"mm_whisper_embeddings\.tok_embeddings": "model.embed_tokens",
    r"mm_whisper_embeddings\.audio_language_projection\.0": "multi_modal_projector.linear_1",
    r"mm_whisper_embeddings\.audio_language_projection\.2": "multi_modal_projector.linear_2",
    rf"{_ENCODER}conv_layers\.0(?:\.conv)?": "audio_tower.conv1",
    rf"{_ENCODER}conv_layers\.1(?:\.conv)?": "audio_tower.conv2",
    rf"{_ENCODER}transformer\.norm": "audio_tower.layer_norm",
    rf"{_ENCODER}transformer\.{_LAYER}attention_norm": (
        r"audio_tower.layers.\1.self_attn_layer_norm"
    ),
    rf"{_ENCODER}transformer\.{_LAYER}ffn_norm": r"audio_tower.layers.\1.final_layer_norm",
    rf"{_ENCODER}transformer\.{_LAYER}attention\.wo": r"audio_tower.layers.\1.self_attn.out_proj",
    **{
        rf"{_LAYER}attention\.w{old}": rf"model.layers.\1.self_attn.{new}"
        for old, new in _PARTS.items()
    },
    **{rf"{_LAYER}feed_forward\.w{old}": rf"model.layers.\1.mlp.{new}" for old, new in _MLP.items()},
    **{
        rf"vision_encoder\.(transformer\.layers\.\d+)\.attention\.w{old}": (
            rf"vision_tower.\1.attention.{new}"
        )
        for old, new in _PARTS.items()
    },
    **{
        rf"vision_encoder\.(transformer\.layers\.\d+)\.feed_forward\.w{old}": (
            rf"vision_tower.\1.feed_forward.{new}"
        )
        for old, new in _MLP.items()
    },
    **{
        rf"{_ENCODER}transformer\.{_LAYER}attention\.w{old}": (
            rf"audio_tower.layers.\1.self_attn.{new}"
        )
        for old, new in _PARTS.items()
        if old != "o"
    },
    **{
        rf"{_ENCODER}transformer\.{_LAYER}feed_forward\.w{old}": rf"audio_tower.layers.\1.{new}"
        for old, new in _SOUND_MLP.items()
    },
}
"""Patterns of modules -> templates of their names in Hugging Face's form."""
_RULES = [(re.compile(pattern + _END), template) for pattern, template in _FIXED.items()]
_CACHE_SCALES = re.compile(r"layers\.\d+\.attention\.(kv|q|k|v)_fake_quantizer\.qscale_act")


class Renamed(NamedTuple):
    """A tensor in Hugging Face's form."""

    name: str
    heads: Kind
    """Heads whose rows the two forms have in another order: those of queries, of keys, or both of
    the tower of pictures; empty: the order is the same."""


def rename(name: str) -> Renamed | None:
    """Return the name and the order of a tensor in Hugging Face's form.

    None: the tensor is a scale of an FP8 KV cache, which is not used. A name that Mistral's form
    does not have is returned unchanged: the comparison with the expected names reports it.
    """
    if _CACHE_SCALES.fullmatch(name):
        return None
    for pattern, template in _RULES:
        if (match := pattern.fullmatch(name)) is not None:
            end = match[match.re.groups]
            return Renamed(f"{match.expand(template)}.{_ENDS[end]}", _heads(name, end))
    return Renamed(name, "")


def _heads(name: str, end: str) -> Kind:
    module = name.removesuffix(f".{end}").rpartition(".")[2]
    if module not in ("wq", "wk") or end == "qscale_act" or name.startswith("mm_whisper"):
        return ""
    if name.startswith("vision_encoder."):
        return "picture heads"
    return "queries" if module == "wq" else "keys"
