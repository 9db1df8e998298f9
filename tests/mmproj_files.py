"""GGUF files of random models of pictures: text part and tower (mmproj), as llama.cpp has them."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.gguf_files import TYPES, convert, quantize, write_gguf
from tests.pictures import CASES, ID, MORE_CASES, VOCAB

TEXTS = {"smolvlm": "llama", "idefics3": "llama", "llava": "llama", "qwen2_vl": "qwen2vl"}
TEXTS |= {"qwen2_5_vl": "qwen2vl", "qwen3_vl": "qwen3vl", "qwen3_5": "qwen35"}
TEXTS |= {"mistral3": "llama", "internvl": "qwen2", "gemma3": "gemma3"}
TEXTS |= {"gemma4": "gemma4", "gemma4_e": "gemma4", "gemma4_unified": "gemma4"}
"""Cases of tests/pictures.py, and `general.architecture` of their text parts."""

KINDS = {"smolvlm": "idefics3", "idefics3": "idefics3", "llava": "mlp", "mistral3": "pixtral"}
KINDS |= {"qwen2_vl": "qwen2vl_merger", "qwen2_5_vl": "qwen2.5vl_merger", "internvl": "internvl"}
KINDS |= {"qwen3_vl": "qwen3vl_merger", "qwen3_5": "qwen3vl_merger", "gemma3": "gemma3"}
KINDS |= {"gemma4": "gemma4v", "gemma4_e": "gemma4v", "gemma4_unified": "gemma4uv"}

_CHARS = sorted(chr(c) for c in range(33, 127)) + [chr(c) for c in range(161, 173)]
_CHARS += [chr(c) for c in range(174, 256)] + [chr(c) for c in range(256, 324)]


def vocabulary_of(ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the metadata of a vocabulary of bytes and special tokens."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*_CHARS, *ids],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(ids),
        "tokenizer.ggml.bos_token_id": ids["<s>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


VOCABULARY = vocabulary_of(ID)
"""Metadata of the vocabulary of tests/pictures.py."""

_LAYER = re.compile(r"(?:encoder\.layers?|blocks|transformer\.layers)\.(\d+)\.(.*)")
_INNER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_out",
    "attention.projection_layer": "attn_out",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "norm1": "ln1",
    "norm2": "ln2",
    "attention_norm": "ln1",
    "ffn_norm": "ln2",
    "layernorm_before": "ln1",
    "layernorm_after": "ln2",
    "lambda_1": "ls1.weight",
    "lambda_2": "ls2.weight",
}
_INNER |= {
    f"{mlp}.{part}_proj": f"ffn_{part}"
    for mlp in ("mlp", "feed_forward")
    for part in ("gate", "up", "down")
}
_OUTER = {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.patch_embeddings.projection": "v.patch_embd",
    "patch_embed.proj": "v.patch_embd",
    "patch_conv": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "embeddings.position_embeddings": "v.position_embd.weight",
    "pos_embed": "v.position_embd",
    "embeddings.class_embedding": "v.class_embd",
    "embeddings.cls_token": "v.class_embd",
    "pre_layrnorm": "v.pre_ln",
    "ln_pre": "v.pre_ln",
    "post_layernorm": "v.post_ln",
    "merger.ln_q": "v.post_ln",
    "merger.norm": "v.post_ln",
    "merger.mlp.0": "mm.0",
    "merger.mlp.2": "mm.2",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
    "connector.modality_projection.proj": "mm.model.fc",
}
_PROJECTORS = {
    "llava": {"linear_1": "mm.0", "linear_2": "mm.2"},
    "mistral3": {
        "linear_1": "mm.1",
        "linear_2": "mm.2",
        "norm": "mm.input_norm",
        "patch_merger.merging_layer": "mm.patch_merger",
    },
    "gemma3": {"mm_soft_emb_norm": "mm.soft_emb_norm"},
    "internvl": {
        "layer_norm": "mm.model.mlp.0",
        "linear_1": "mm.model.mlp.1",
        "linear_2": "mm.model.mlp.3",
    },
}

FIXED_SOUNDS: dict[str, Any] = {"attention_chunk_size": 12, "attention_context_left": 13}
FIXED_SOUNDS |= {"attention_logit_cap": 50.0}
FIXED_SOUNDS |= {"output_proj_dims": 32, "subsampling_conv_channels": [16, 8]}
"""Fields of audio_config that the files do not name, and sizes that blocks divide."""

_GEMMA4 = {
    "vision_tower.patch_embedder.input_proj": "v.patch_embd",
    "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
    "vision_tower.std_bias": "v.std_bias",
    "vision_tower.std_scale": "v.std_scale",
    "embed_vision.embedding_projection": "mm.input_projection",
    "embed_audio.embedding_projection": "mm.a.input_projection",
    "audio_tower.output_proj": "a.pre_encode.out",
    "audio_tower.subsample_conv_projection.input_proj_linear": "a.input_projection",
}
for _i in (0, 1):
    _conv = f"audio_tower.subsample_conv_projection.layer{_i}"
    _GEMMA4 |= {f"{_conv}.conv": f"a.conv1d.{_i}", f"{_conv}.norm": f"a.conv1d.{_i}.norm"}
_GEMMA4_INNER = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.post": "attn_out",
    "self_attn.relative_k_proj": "attn_k_rel",
    "norm_pre_attn": "attn_pre_norm",
    "norm_post_attn": "attn_post_norm",
    "norm_out": "ln2",
    "lconv1d.linear_start": "conv_pw1",
    "lconv1d.linear_end": "conv_pw2",
    "lconv1d.depthwise_conv1d": "conv_dw",
    "lconv1d.pre_layer_norm": "conv_norm",
    "lconv1d.conv_norm": "norm_conv",
}
for _i, _suffix in ((1, ""), (2, "_1")):
    _GEMMA4_INNER |= {
        f"feed_forward{_i}.pre_layer_norm": f"ffn_norm{_suffix}",
        f"feed_forward{_i}.post_layer_norm": f"ffn_post_norm{_suffix}",
        f"feed_forward{_i}.ffw_layer_1": f"ffn_up{_suffix}",
        f"feed_forward{_i}.ffw_layer_2": f"ffn_down{_suffix}",
    }

_UNIFIED = {
    "embed_vision.patch_dense": "v.patch_embd",
    "embed_vision.patch_ln1": "v.patch_norm.1",
    "embed_vision.patch_ln2": "v.patch_norm.2",
    "embed_vision.pos_norm": "v.patch_norm.3",
    "embed_vision.multimodal_embedder.embedding_projection": "mm.input_projection",
    "embed_audio.embedding_projection": "mm.a.input_projection",
}


def save_pair(
    model: Any, name: str, folder: Path, kind: str = "f32", **changes: Any
) -> tuple[Path, Path]:
    """Write the text part and the tower of a model of tests/pictures.py.

    Args:
        model: transformers' model.
        name: its case.
        folder: the folder of the files.
        kind: type of the matrices of the tower.
        changes: other values of keys of `clip`, with dots as `__`; None: the file lacks the key.

    Returns:
        The two files.
    """
    text, tower = folder / "model-F32.gguf", folder / f"mmproj-model-{kind.upper()}.gguf"
    _save_text(model, name, text)
    metadata = metadata_of(model, name)
    for key, value in changes.items():
        metadata[f"clip.{key.replace('__', '.')}"] = value
    metadata = {key: value for key, value in metadata.items() if value is not None}
    save_tower(tower, metadata, arrays_of(model, name), kind)
    return text, tower


def save_tower(
    path: Path, metadata: Mapping[str, Any], arrays: Mapping[str, Any], kind: str = "f32"
) -> None:
    """Write an mmproj file; matrices whose rows are no multiples of blocks stay float16."""
    tensors = {}
    for name, x in arrays.items():
        own = kind if x.ndim == 2 and not re.search("position|patch_merger", name) else "f32"
        if own == "q8_0" and (x.shape[-1] % 32 or "input_projection" in name):
            own = "f16"
        tensors[name] = TYPES[own], x.shape, quantize(np.ascontiguousarray(x), own)
    write_gguf(path, metadata, tensors)


def _save_text(model: Any, name: str, path: Path) -> None:
    state = {}
    for own, tensor in model.state_dict().items():
        parts = own.removeprefix("model.").split(".", 1)
        if own == "lm_head.weight":
            state[own] = tensor
        elif parts[0] in ("language_model", "text_model"):
            state[f"model.{parts[1]}"] = tensor
    config = model.config.get_text_config()
    config.tie_word_embeddings = model.config.tie_word_embeddings
    part = SimpleNamespace(config=config, state_dict=lambda: state)
    convert(part, TEXTS[name], path, vocabulary=VOCABULARY)  # type: ignore[arg-type]


def metadata_of(model: Any, name: str) -> dict[str, Any]:
    """Return the metadata of the tower."""
    config, vision = model.config, model.config.vision_config
    if KINDS[name] == "gemma4uv":
        return _metadata_of_unified(config)

    def get(*names: str) -> Any:
        return next(v for n in names if (v := getattr(vision, n, None)) is not None)

    def side(*names: str) -> int:
        value = get(*names)
        return int(value[0] if isinstance(value, list | tuple) else value)

    embed, kind = getattr(vision, "embed_dim", None), KINDS[name]
    is_qwen, halves = name.startswith("qwen"), kind in ("idefics3", "gemma3")
    known = (CASES | MORE_CASES).get(name)
    given = known.preprocessor if known else {}
    mean = [0.5] * 3 if halves else [0.48145466, 0.4578275, 0.40821073]
    std = [0.5] * 3 if halves else [0.26862954, 0.26130258, 0.27577711]
    fields = {
        "image_size": {"gemma4v": 224}.get(kind) or (560 if is_qwen else side("image_size")),
        "patch_size": side("patch_size"),
        "embedding_length": embed or vision.hidden_size,
        "feed_forward_length": vision.hidden_size if embed else vision.intermediate_size,
        "block_count": get("depth", "num_hidden_layers"),
        "attention.head_count": get("num_heads", "num_attention_heads"),
        "attention.layer_norm_epsilon": float(getattr(vision, "layer_norm_eps", 1e-6)),
        "projection_dim": config.get_text_config().hidden_size,
        "image_mean": given.get("image_mean", mean),
        "image_std": given.get("image_std", std),
    }
    metadata: dict[str, Any] = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind,
    }
    match kind:
        case "qwen2.5vl_merger":
            metadata["clip.use_silu"] = True
            fields["n_wa_pattern"] = vision.fullatt_block_indexes[0] + 1
        case "qwen3vl_merger":
            metadata["clip.use_gelu"] = True
            taps = getattr(vision, "deepstack_visual_indexes", [])
            fields["is_deepstack_layers"] = [i in taps for i in range(vision.depth)]
            fields["spatial_merge_size"] = vision.spatial_merge_size
        case "idefics3":
            metadata["clip.use_gelu"] = True
            fields |= {"projector.scale_factor": config.scale_factor, "preproc_image_size": 48}
        case "gemma3":
            metadata["clip.use_gelu"] = True
            side = vision.image_size // vision.patch_size
            fields["projector.scale_factor"] = side // int(config.mm_tokens_per_image**0.5)
        case "gemma4v":
            fields["projector.scale_factor"] = vision.pooling_kernel_size
            fields |= {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
            if config.audio_config is not None:
                metadata |= _metadata_of_sounds(config)
        case "mlp":
            fields["block_count"] -= 1
        case "pixtral":
            metadata[f"clip.use_{vision.hidden_act}"] = True
            fields["spatial_merge_size"] = config.spatial_merge_size
            fields["image_size"] = 40
        case "internvl":
            metadata["clip.use_gelu"] = True
            fields["projector.scale_factor"] = int(1 / config.downsample_ratio)
            fields |= {"preproc_min_tiles": 1, "preproc_max_tiles": 4}
    metadata |= {f"clip.vision.{key}": value for key, value in fields.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def _metadata_of_sounds(config: Any) -> dict[str, Any]:
    audio = config.audio_config
    return {
        "clip.has_audio_encoder": True,
        "clip.projector_type": None,
        "clip.vision.projector_type": "gemma4v",
        "clip.audio.projector_type": "gemma4a",
        "clip.audio.projection_dim": config.text_config.hidden_size,
        "clip.audio.embedding_length": audio.hidden_size,
        "clip.audio.feed_forward_length": 4 * audio.hidden_size,
        "clip.audio.block_count": audio.num_hidden_layers,
        "clip.audio.attention.head_count": audio.num_attention_heads,
        "clip.audio.attention.layer_norm_epsilon": 1e-5,  # wrong in old files
        "clip.audio.num_mel_bins": audio.subsampling_conv_channels[0],
    }


def _metadata_of_unified(config: Any) -> dict[str, Any]:
    """Return the metadata of Gemma 4 12B, in which the sizes of layers are 0."""
    vision: dict[str, Any] = {"projector_type": "gemma4uv", "image_size": 224}
    vision |= {"patch_size": config.vision_config.patch_size}
    vision |= {"projector.scale_factor": config.vision_config.pooling_kernel_size}
    vision |= {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    audio = {"projector_type": "gemma4ua", "num_mel_bins": 128}
    metadata = {"general.architecture": "clip", "general.type": "mmproj"}
    metadata |= {f"clip.has_{kind}_encoder": True for kind in ("vision", "audio")}
    for kind, fields, size in (
        ("vision", vision, config.vision_config.mm_embed_dim),
        ("audio", audio, config.audio_config.audio_embed_dim),
    ):
        fields |= {"embedding_length": size, "projection_dim": config.text_config.hidden_size}
        fields |= {"feed_forward_length": 0, "block_count": 0, "attention.head_count": 0}
        fields["attention.layer_norm_epsilon"] = 1e-6
        metadata |= {f"clip.{kind}.{key}": value for key, value in fields.items()}
    return metadata


def _arrays_of_unified(model: Any) -> dict[str, Any]:
    """Return the tensors of Gemma 4 12B: numbers of patches are ordered by channels."""
    arrays: dict[str, Any] = {}
    for own, tensor in model.state_dict().items():
        x, short = tensor.float().numpy(), own.removeprefix("model.")
        if short.startswith(("language_model.", "lm_head")):
            continue
        module, _, kind = short.rpartition(".")
        if own.endswith("pos_embedding"):
            arrays["v.position_embd.weight"] = x.swapaxes(0, 1)
            continue
        if module.endswith("patch_ln1") or short.endswith("patch_dense.weight"):
            x = x.reshape(-1, x.shape[-1] // 3, 3).swapaxes(1, 2).reshape(x.shape)
        arrays[f"{_UNIFIED[module]}.{kind}"] = x
    return arrays


def _arrays_of_gemma4(model: Any) -> dict[str, Any]:
    """Return the tensors of the towers of pictures and of sounds."""
    arrays: dict[str, Any] = {}
    for own, tensor in model.state_dict().items():
        x, short = tensor.float().numpy(), own.removeprefix("model.")
        if short.startswith(("language_model.", "lm_head")):
            continue
        x = x.reshape(x.shape or 1)
        module, _, kind = short.rpartition(".")
        if layer := re.fullmatch(r"(vision|audio)_tower\.(?:encoder\.)?layers\.(\d+)\.(.*)", short):
            module, _, kind = layer[3].rpartition(".")
            prefix = f"{layer[1][0]}.blk.{layer[2]}."
            if kind == "per_dim_scale":
                arrays[f"{prefix}per_dim_scale.weight"] = np.log1p(np.exp(x))
                continue
            if module == "lconv1d.depthwise_conv1d":
                x = x[:, 0]
            arrays[f"{prefix}{_GEMMA4_INNER[module.removesuffix('.linear')]}.{kind}"] = x
        elif short in _GEMMA4:
            arrays[_GEMMA4[short]] = x
        else:
            if module.endswith("patch_embedder.input_proj"):
                side = model.config.vision_config.patch_size
                x = x.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
            arrays[f"{_GEMMA4[module]}.{kind}"] = x
    return arrays


def arrays_of(model: Any, name: str) -> dict[str, Any]:
    """Return the tensors of the tower."""
    if KINDS[name] == "gemma4v":
        return _arrays_of_gemma4(model)
    if KINDS[name] == "gemma4uv":
        return _arrays_of_unified(model)
    arrays: dict[str, Any] = {}
    vision = model.config.vision_config
    for own, tensor in model.state_dict().items():
        x = tensor.float().numpy()
        short = own.removeprefix("model.")
        if short.startswith(("language_model.", "text_model.", "lm_head")):
            continue
        part, _, rest = short.partition(".")
        rest = rest.removeprefix("vision_model.")
        module, _, kind = rest.rpartition(".")
        if layer := _LAYER.fullmatch(rest):
            prefix, inner = f"v.blk.{layer[1]}.", layer[2]
            module, _, kind = inner.rpartition(".")
            if inner in _INNER:
                arrays[prefix + _INNER[inner]] = x
            elif module == "attn.qkv" and name in ("qwen2_vl", "qwen2_5_vl"):
                for which, rows in zip("qkv", np.split(x, 3), strict=True):
                    arrays[f"{prefix}attn_{which}.{kind}"] = rows
            else:
                if name == "mistral3" and module in ("attention.q_proj", "attention.k_proj"):
                    heads = vision.num_attention_heads
                    halves = x.reshape(heads, 2, len(x) // heads // 2, -1)
                    x = halves.swapaxes(1, 2).reshape(x.shape)
                arrays[f"{prefix}{_INNER[module]}.{kind}"] = x
        elif match := re.fullmatch(r"deepstack_merger_list\.(\d+)\.(\w+)\.(\w+)", rest):
            index = vision.deepstack_visual_indexes[int(match[1])]
            arrays[f"v.deepstack.{index}.{match[2].removeprefix('linear_')}.{match[3]}"] = x
        elif rest.startswith("head."):  # SigLIP's pooler, which converters leave out
            continue
        elif part == "connector":
            arrays[f"{_OUTER[f'connector.{module}']}.{kind}"] = x
        elif rest == "mm_input_projection_weight":
            arrays["mm.input_projection.weight"] = x
        elif part == "multi_modal_projector":
            x = x + 1 if module == "mm_soft_emb_norm" else x
            arrays[f"{_PROJECTORS[name][module]}.{kind}"] = x
        elif rest in _OUTER:
            arrays[_OUTER[rest]] = x
        elif _OUTER[module] == "v.patch_embd" and x.ndim == 5:
            arrays["v.patch_embd.weight"] = x[:, :, 0]
            arrays["v.patch_embd.weight.1"] = x[:, :, 1]
        elif not (name == "llava" and module == "post_layernorm"):
            arrays[f"{_OUTER[module]}.{kind}"] = x
    if name == "mistral3":
        embedding = model.get_input_embeddings().weight.detach().numpy()
        arrays["v.token_embd.img_break"] = embedding[ID["[IMG_BREAK]"]]
    assert len(VOCABULARY["tokenizer.ggml.tokens"]) == VOCAB
    return arrays
