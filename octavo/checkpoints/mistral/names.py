"""Names of tensors in Mistral's form, and those of Hugging Face's form.

Names: mistral-inference, and vLLM (`models/mistral.py`, `models/pixtral.py`, `models/voxtral.py`).
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Kind = Literal["queries", "keys", "picture heads", ""]

_PARTS = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
_PARTS |= {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_TEXT_PARTS = _PARTS | {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_SOUND_PARTS = {"wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj"}
_SOUND_PARTS |= {"wo": "self_attn.out_proj", "w1": "fc1", "w2": "fc2"}
_SOUND_PARTS |= {"attention_norm": "self_attn_layer_norm", "ffn_norm": "final_layer_norm"}
_PROJECTOR = {"w_in": "linear_1", "w_out": "linear_2", "0": "linear_1", "2": "linear_2"}
_PROJECTOR |= {"pre_mm_projector_norm": "norm"}
_WHOLE = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_ENDS = {"weight": "weight", "bias": "bias"}
_ENDS |= {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}
_SOUND = r"mm_whisper_embeddings\."
_ENCODER = rf"{_SOUND}whisper_encoder\."
_RULES: tuple[tuple[str, str, dict[str, str]], ...] = (
    (rf"(?:{_SOUND})?()(tok_embeddings)", "{}{}", _WHOLE),
    (r"()(norm|output)", "{}{}", _WHOLE),
    (r"(layers\.\d+)\.attention\.(w[qkvo])", "model.{}.self_attn.{}", _TEXT_PARTS),
    (r"(layers\.\d+)\.feed_forward\.(w[123])", "model.{}.mlp.{}", _TEXT_PARTS),
    (r"(layers\.\d+)\.(attention_norm|ffn_norm)", "model.{}.{}", _TEXT_PARTS),
    (
        r"(layers\.\d+)\.feed_forward\.(gate|experts\.\d+\.w[123])",
        "model.{}.block_sparse_moe.{}",
        {},
    ),
    (
        r"vision_encoder\.(transformer\.layers\.\d+\.(?:attention|feed_forward))\.(w[qkvo123])",
        "vision_tower.{}.{}",
        _PARTS,
    ),
    (
        r"vision_encoder\.()(patch_conv|ln_pre|transformer\.layers\.\d+\.(?:attention|ffn)_norm)",
        "vision_tower.{}{}",
        {},
    ),
    (r"()(patch_merger\.merging_layer)", "multi_modal_projector.{}{}", {}),
    (r"()(pre_mm_projector_norm)", "multi_modal_projector.{}{}", _PROJECTOR),
    (r"vision_language_adapter\.()(w_in|w_out)", "multi_modal_projector.{}{}", _PROJECTOR),
    (rf"{_SOUND}audio_language_projection\.()([02])", "multi_modal_projector.{}{}", _PROJECTOR),
    (
        rf"{_ENCODER}()conv_layers\.([01])(?:\.conv)?",
        "audio_tower.{}{}",
        {"0": "conv1", "1": "conv2"},
    ),
    (rf"{_ENCODER}transformer\.()(norm)", "audio_tower.{}{}", {"norm": "layer_norm"}),
    (
        rf"{_ENCODER}transformer\.(layers\.\d+)\.(?:attention\.|feed_forward\.)?"
        r"(w[qkvo12]|attention_norm|ffn_norm)",
        "audio_tower.{}.{}",
        _SOUND_PARTS,
    ),
)
"""Patterns of modules, templates of their names in Hugging Face's form, and other names of the
second group."""
_COMPILED = [
    (re.compile(rf"{pattern}\.({'|'.join(_ENDS)})"), template, parts)
    for pattern, template, parts in _RULES
]
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
    for pattern, template, parts in _COMPILED:
        if (match := pattern.fullmatch(name)) is not None:
            layer, part, end = match.groups()
            module = template.format(layer, parts.get(part, part))
            return Renamed(f"{module}.{_ENDS[end]}", _heads(name, end))
    return Renamed(name, "")


def _heads(name: str, end: str) -> Kind:
    module = name.removesuffix(f".{end}").rpartition(".")[2]
    if module not in ("wq", "wk") or end == "qscale_act" or name.startswith("mm_whisper"):
        return ""
    if name.startswith("vision_encoder."):
        return "picture heads"
    return "queries" if module == "wq" else "keys"
