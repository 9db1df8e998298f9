"""Towers in the mmproj files of llama.cpp: their tensors and metadata in Hugging Face's names.

Facts of llama.cpp's converter (`convert_hf_to_gguf.py --mmproj`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.checkpoints.config_json import ConfigJson

MOST_TOKENS = 4096
"""Most rows of a picture of Qwen-VL, as in llama.cpp; the files do not name a limit."""

_ATTENTION = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k"}
_ATTENTION |= {"self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_out"}
_MLP = {"mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
_GATED = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
_SIGLIP = _ATTENTION | _MLP | {"layer_norm1": "ln1", "layer_norm2": "ln2"}
_QWEN = {"attn.qkv": "attn_qkv", "attn.proj": "attn_out", "norm1": "ln1", "norm2": "ln2"}


class Described(Protocol):
    """Part of `VisionFile` that the readers need."""

    @property
    def keys(self) -> ConfigJson:
        """The metadata."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors by their names, rows first."""

    def number(self, key: str, default: int | None = None) -> int:
        """Return a whole number of `clip.vision`."""


Reader = Callable[[Described, dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]
"""Function of the file and of the fields of vision_config that all towers have: the fields of
config.json, with vision_config, and those of preprocessor_config.json."""


@dataclass(frozen=True)
class Projector:
    """A kind of mmproj file (`clip.projector_type`), and the tower that computes it."""

    tower: str
    """Name of the tower."""
    model_type: str
    texts: tuple[str, ...]
    """Architectures of the text part's file; empty: any."""
    read: Reader
    layers: str
    """Prefix of the names of layers."""
    inner: Mapping[str, str]
    """Modules of a layer, and their names in the file; of tensors that are called neither weight
    nor bias, their whole names."""
    names: Mapping[str, str]
    """The same outside of layers."""
    last: str
    """Tensor whose rows, or columns, are the numbers of a row of the decoder."""
    own_keys: tuple[str, ...] = ()
    """Keys of `clip.vision` that only these files have."""
    transposed: bool = False
    """True if they are the columns of `last`."""
    permuted: bool = False
    """True if the converter has reordered the rows of queries and keys for rotations of
    neighbors."""
    shifted: str = ""
    """Tensor to whose weights the converter has added 1."""
    by_channels: Mapping[str, int] = field(default_factory=dict)
    """Tensors whose columns, the numbers of a patch, the converter has ordered by channels, and
    their numbers of dimensions in the file."""
    swapped: str = ""
    """Tensor whose first two dimensions the converter has exchanged."""
    has_layers: bool = True
    sounds: tuple[str, ...] = ()
    """Values of clip.audio.projector_type that the file may have beside the tower."""
    floats: tuple[str, ...] = ()
    """Matrices of `names` that are never blocks."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of tensors that nothing reads."""
    sections: bool = False
    """True if the positions of the text part have sections."""
    text_of: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Tower and model_type by the text part's architecture, where they differ from the others."""


def _qwen(file: Described, vision: dict[str, Any], least: int) -> tuple[dict[str, Any], Any]:
    """Return the parts that all models of Qwen-VL share; `least` is in pixels."""
    size, merge = vision["patch_size"], file.number("spatial_merge_size", 2)
    inner = vision.pop("intermediate_size")
    depth, heads = vision.pop("num_hidden_layers"), vision.pop("num_attention_heads")
    vision |= {"depth": depth, "num_heads": heads, "spatial_merge_size": merge, "in_channels": 3}
    vision |= {"intermediate_size": inner, "temporal_patch_size": 2}
    # The towers of transformers have eps 1e-6; the file repeats the text part's.
    most = MOST_TOKENS * (size * merge) ** 2
    pictures = {"patch_size": size, "merge_size": merge, "temporal_patch_size": 2}
    pictures["size"] = {"shortest_edge": least, "longest_edge": most}
    return vision, pictures


def _qwen2(file: Described, vision: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    vision, pictures = _qwen(file, vision, 56 * 56)
    width, inner = vision["hidden_size"], vision.pop("intermediate_size")
    if inner % width:
        raise file.keys.error("clip.vision.embedding_length", f"it must divide {inner}, the MLP")
    vision |= {"embed_dim": width, "mlp_ratio": inner // width, "hidden_act": "quick_gelu"}
    vision["hidden_size"] = vision.pop("out_hidden_size")
    return {"vision_config": vision}, pictures


def _qwen2_5(file: Described, vision: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    vision, pictures = _qwen(file, vision, 56 * 56)
    pattern = file.keys.integer("clip.vision.n_wa_pattern", least=0)
    # 0: no layer has windows. Otherwise all have them but the last of each `pattern` layers.
    depth = vision["depth"]
    whole = [i for i in range(depth) if not pattern or (i + 1) % pattern == 0]
    vision |= {"fullatt_block_indexes": whole, "hidden_act": "silu"}
    merged = vision["patch_size"] * vision["spatial_merge_size"]
    vision["window_size"] = max(112, merged)
    return {"vision_config": vision}, pictures


def _qwen3(file: Described, vision: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    vision, pictures = _qwen(file, vision, 256 * 256)
    taps = [i for i in range(vision["depth"]) if f"v.deepstack.{i}.fc1.weight" in file.shapes]
    vision |= {"deepstack_visual_indexes": taps, "hidden_act": "gelu_pytorch_tanh"}
    vision["num_position_embeddings"] = file.shapes.get("v.position_embd.weight", (0,))[0]
    return {"vision_config": vision}, pictures


def _idefics3(file: Described, vision: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    side = vision["image_size"]
    longest = file.number("preproc_image_size", 4 * side)
    vision["hidden_act"] = "gelu_pytorch_tanh"
    pictures = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}
    factor = file.number("projector.scale_factor", 2)
    return {"vision_config": vision, "scale_factor": factor}, pictures


def _llava(file: Described, vision: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    keys, side = file.keys, vision["image_size"]
    if "v.class_embd" not in file.shapes:
        raise keys.error(
            "clip.projector_type", "mlp needs the tower of CLIP, and the file lacks v.class_embd"
        )
    keys.refuse("clip.vision.mm_patch_merge_type", "flat", "only flat is supported")
    kinds = {name: name for name in ("pad", "square")}
    aspect = keys.choice("clip.vision.image_aspect_ratio", kinds, "square")
    layers = keys.get("clip.vision.feature_layer")
    count = vision["num_hidden_layers"]
    if layers not in (None, [count]):
        raise keys.error("clip.vision.feature_layer", f"it must be [{count}], the last layer")
    gelu = keys.flag("clip.use_gelu", False)
    vision |= {"model_type": "clip_vision_model", "hidden_act": "gelu" if gelu else "quick_gelu"}
    pictures = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
        "do_pad": aspect == "pad",
    }
    return {"vision_config": vision, "vision_feature_layer": count}, pictures


def _pixtral(file: Described, vision: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    keys = file.keys
    silu, gelu = keys.flag("clip.use_silu", False), keys.flag("clip.use_gelu", False)
    if silu == gelu:
        raise keys.error("clip.use_silu", "either it or clip.use_gelu must be true")
    vision |= {"model_type": "pixtral", "hidden_act": "silu" if silu else "gelu"}
    pictures = {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": vision["image_size"]},
        "patch_size": vision["patch_size"],
    }
    config: dict[str, Any] = {"vision_config": vision, "vision_feature_layer": -1}
    config["multimodal_projector_bias"] = "mm.1.bias" in file.shapes
    if "mm.patch_merger.weight" in file.shapes:
        config |= {"gguf_tower": "Mistral3", "model_type": "mistral3"}
        config["spatial_merge_size"] = file.number("spatial_merge_size", 2)
    return config, pictures


def _internvl(file: Described, vision: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    keys, side = file.keys, vision["image_size"]
    silu = keys.flag("clip.use_silu", False)
    vision |= {"model_type": "internvl_vision", "hidden_act": "silu" if silu else "gelu"}
    vision |= {"attention_bias": "v.blk.0.attn_q.bias" in file.shapes}
    factor = file.number("projector.scale_factor", 2)
    least = file.number("preproc_min_tiles", 1)
    pictures = {
        "size": {"height": side, "width": side},
        "min_patches": least,
        "max_patches": file.number("preproc_max_tiles", 12),
    }
    rows = (side // vision["patch_size"] // factor) ** 2
    config = {"vision_config": vision, "downsample_ratio": 1 / factor, "image_seq_length": rows}
    return config, pictures


def _gemma3(file: Described, vision: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    side, factor = vision["image_size"], file.number("projector.scale_factor", 4)
    patches = side // vision["patch_size"]
    if patches % factor:
        raise file.keys.error(
            "clip.vision.projector.scale_factor", f"it must divide {patches}, the patches of a side"
        )
    vision["hidden_act"] = "gelu_pytorch_tanh"
    pictures = {"size": {"height": side, "width": side}}
    rows = (patches // factor) ** 2
    return {"vision_config": vision, "mm_tokens_per_image": rows}, pictures


def _gemma4(file: Described, vision: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    def size(name: str, axis: int = 0) -> int:
        shape = file.shapes.get(name, ())
        return shape[axis] if len(shape) > axis else 0

    heads = vision["num_attention_heads"]
    head = size("v.blk.0.attn_q_norm.weight") or vision["hidden_size"] // heads
    group = file.number("projector.scale_factor", 3)
    vision |= {
        "rms_norm_eps": vision["layer_norm_eps"],
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": head,
        "num_key_value_heads": size("v.blk.0.attn_k.weight") // head if head else heads,
        "pooling_kernel_size": group,
        "position_embedding_size": size("v.position_embd.weight", 1),
        "use_clipped_linears": "v.blk.0.attn_q.input_min" in file.shapes,
        "standardize": "v.std_bias" in file.shapes,
    }
    pictures = {
        "do_normalize": True,
        "patch_size": vision["patch_size"],
        "pooling_kernel_size": group,
    }
    return {"vision_config": vision}, pictures


def _gemma4_unified(
    file: Described, vision: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    positions = file.shapes.get("v.position_embd.weight", ())
    own = {
        "patch_size": vision["patch_size"],
        "pooling_kernel_size": file.number("projector.scale_factor", 3),
    }
    sizes = {
        "mm_embed_dim": vision["hidden_size"],
        "mm_posemb_size": positions[1] if len(positions) > 1 else 0,
        "rms_norm_eps": vision["layer_norm_eps"],
    }
    return {"vision_config": own | sizes}, {"do_normalize": True, **own}


_QWEN_NAMES = {"visual.patch_embed.proj": "v.patch_embd", "visual.merger.ln_q": "v.post_ln"}
_QWEN_NAMES |= {"visual.merger.mlp.0": "mm.0", "visual.merger.mlp.2": "mm.2"}
_QWEN3_NAMES = {"visual.patch_embed.proj": "v.patch_embd", "visual.pos_embed": "v.position_embd"}
_QWEN3_NAMES |= {"visual.merger.norm": "v.post_ln", "visual.merger.linear_fc1": "mm.0"}
_QWEN3_NAMES |= {"visual.merger.linear_fc2": "mm.2"}
_LLAVA_NAMES = {
    "vision_tower.embeddings.patch_embedding": "v.patch_embd",
    "vision_tower.embeddings.position_embedding": "v.position_embd",
    "vision_tower.embeddings.class_embedding": "v.class_embd",
    "vision_tower.pre_layrnorm": "v.pre_ln",
    "multi_modal_projector.linear_1": "mm.0",
    "multi_modal_projector.linear_2": "mm.2",
}
_IDEFICS3_NAMES = {
    "model.vision_model.embeddings.patch_embedding": "v.patch_embd",
    "model.vision_model.embeddings.position_embedding": "v.position_embd",
    "model.vision_model.post_layernorm": "v.post_ln",
    "model.connector.modality_projection.proj": "mm.model.fc",
}
_PIXTRAL_NAMES = {
    "vision_tower.patch_conv": "v.patch_embd",
    "vision_tower.ln_pre": "v.pre_ln",
    "multi_modal_projector.linear_1": "mm.1",
    "multi_modal_projector.linear_2": "mm.2",
    "multi_modal_projector.norm": "mm.input_norm",
    "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
}
_GEMMA3_NAMES = {
    "vision_tower.embeddings.patch_embedding": "v.patch_embd",
    "vision_tower.embeddings.position_embedding": "v.position_embd",
    "vision_tower.post_layernorm": "v.post_ln",
    "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
    "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
}
_GEMMA4_LINEARS = {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
_GEMMA4_LINEARS |= {"self_attn.o_proj": "attn_out"}
_GEMMA4_LINEARS |= {f"mlp.{module}": name for module, name in _GATED.items()}
"""Modules that may have bounds, and whose weight is that of a submodule `linear`."""
_GEMMA4_INNER = {
    **_GEMMA4_LINEARS,
    **{f"{module}.linear": name for module, name in _GEMMA4_LINEARS.items()},
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
}
_GEMMA4_NAMES = {
    "vision_tower.patch_embedder.input_proj": "v.patch_embd",
    "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
    "vision_tower.std_bias": "v.std_bias",
    "vision_tower.std_scale": "v.std_scale",
    "embed_vision.embedding_projection": "mm.input_projection",
}
_GEMMA4_UNIFIED_NAMES = {
    "vision_embedder.patch_dense": "v.patch_embd",
    "vision_embedder.patch_ln1": "v.patch_norm.1",
    "vision_embedder.patch_ln2": "v.patch_norm.2",
    "vision_embedder.pos_norm": "v.patch_norm.3",
    "vision_embedder.pos_embedding": "v.position_embd.weight",
    "embed_vision.embedding_projection": "mm.input_projection",
}
_INTERNVL_NAMES = {
    "vision_tower.embeddings.patch_embeddings.projection": "v.patch_embd",
    "vision_tower.embeddings.position_embeddings": "v.position_embd.weight",
    "vision_tower.embeddings.cls_token": "v.class_embd",
    "multi_modal_projector.layer_norm": "mm.model.mlp.0",
    "multi_modal_projector.linear_1": "mm.model.mlp.1",
    "multi_modal_projector.linear_2": "mm.model.mlp.3",
}

PROJECTORS: dict[str, Projector] = {
    "gemma3": Projector(
        "Gemma3",
        "gemma3",
        ("gemma3",),
        _gemma3,
        "vision_tower.encoder.layers.",
        _SIGLIP,
        _GEMMA3_NAMES,
        "mm.input_projection.weight",
        ("projector.scale_factor",),
        transposed=True,
        shifted="multi_modal_projector.mm_soft_emb_norm.weight",
        floats=("mm.input_projection.weight",),
    ),
    "gemma4v": Projector(
        "Gemma4",
        "gemma4",
        ("gemma4",),
        _gemma4,
        "vision_tower.encoder.layers.",
        _GEMMA4_INNER,
        _GEMMA4_NAMES,
        "mm.input_projection.weight",
        ("projector.scale_factor",),
        by_channels={"vision_tower.patch_embedder.input_proj.weight": 4},
        sounds=("gemma4a",),
    ),
    "gemma4uv": Projector(
        "Gemma4Unified",
        "gemma4_unified",
        ("gemma4",),
        _gemma4_unified,
        "",
        {},
        _GEMMA4_UNIFIED_NAMES,
        "mm.input_projection.weight",
        ("projector.scale_factor",),
        by_channels={
            "vision_embedder.patch_dense.weight": 2,
            "vision_embedder.patch_ln1.weight": 1,
            "vision_embedder.patch_ln1.bias": 1,
        },
        swapped="vision_embedder.pos_embedding",
        has_layers=False,
        sounds=("gemma4ua",),
    ),
    "qwen2vl_merger": Projector(
        "Qwen2VL",
        "qwen2_vl",
        ("qwen2vl",),
        _qwen2,
        "visual.blocks.",
        _QWEN | _MLP,
        _QWEN_NAMES,
        "mm.2.weight",
        ("spatial_merge_size",),
        sections=True,
    ),
    "qwen2.5vl_merger": Projector(
        "Qwen2_5_VL",
        "qwen2_5_vl",
        ("qwen2vl",),
        _qwen2_5,
        "visual.blocks.",
        _QWEN | {f"mlp.{module}": name for module, name in _GATED.items()},
        _QWEN_NAMES,
        "mm.2.weight",
        ("spatial_merge_size", "n_wa_pattern"),
        sections=True,
    ),
    "qwen3vl_merger": Projector(
        "Qwen3VL",
        "qwen3_vl",
        ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"),
        _qwen3,
        "visual.blocks.",
        _QWEN | {"mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"},
        _QWEN3_NAMES,
        "mm.2.weight",
        ("spatial_merge_size", "is_deepstack_layers"),
        sections=True,
        text_of={
            "qwen3vlmoe": ("Qwen3VLMoe", "qwen3_vl_moe"),
            "qwen35": ("Qwen3_5", "qwen3_5"),
            "qwen35moe": ("Qwen3_5Moe", "qwen3_5_moe"),
        },
    ),
    "idefics3": Projector(
        "Idefics3",
        "idefics3",
        ("llama",),
        _idefics3,
        "model.vision_model.encoder.layers.",
        _SIGLIP,
        _IDEFICS3_NAMES,
        "mm.model.fc.weight",
        ("projector.scale_factor", "preproc_image_size"),
    ),
    "mlp": Projector(
        "Llava",
        "llava",
        (),
        _llava,
        "vision_tower.encoder.layers.",
        _SIGLIP,
        _LLAVA_NAMES,
        "mm.2.weight",
        ("feature_layer", "image_aspect_ratio", "mm_patch_merge_type", "mm_projector_type"),
        ignored=(r"v\.post_ln\..*", r"v\.position_ids"),
    ),
    "pixtral": Projector(
        "Llava",
        "llava",
        ("llama", "mistral3"),
        _pixtral,
        "vision_tower.transformer.layers.",
        {
            "attention.q_proj": "attn_q",
            "attention.k_proj": "attn_k",
            "attention.v_proj": "attn_v",
            "attention.o_proj": "attn_out",
            "attention_norm": "ln1",
            "ffn_norm": "ln2",
        }
        | {f"feed_forward.{module}": name for module, name in _GATED.items()},
        _PIXTRAL_NAMES,
        "mm.2.weight",
        ("spatial_merge_size",),
        permuted=True,
        floats=("mm.patch_merger",),
        ignored=(r"v\.token_embd\.img_break",),  # a row of the text part's embedding
    ),
    "internvl": Projector(
        "InternVL",
        "internvl",
        (),
        _internvl,
        "vision_tower.encoder.layer.",
        {
            "attention.q_proj": "attn_q",
            "attention.k_proj": "attn_k",
            "attention.v_proj": "attn_v",
            "attention.projection_layer": "attn_out",
            "layernorm_before": "ln1",
            "layernorm_after": "ln2",
            "lambda_1": "ls1.weight",
            "lambda_2": "ls2.weight",
        }
        | _MLP,
        _INTERNVL_NAMES,
        "mm.model.mlp.3.weight",
        ("projector.scale_factor", "preproc_min_tiles", "preproc_max_tiles"),
    ),
}
"""Values of clip.projector_type."""
