"""GGUF files of random models: metadata and tensors as llama.cpp's converter writes them."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

Tensors = Mapping[str, tuple[int, Sequence[int], bytes]]
"""Number of the type, shape (rows first) and contents of each tensor."""

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}


def quantize(x: NDArray[np.float32], kind: str) -> bytes:
    """Return the contents of a tensor; blocks use the simplest scales."""
    if kind in ("f32", "f16"):
        return x.astype({"f32": "<f4", "f16": "<f2"}[kind]).tobytes()
    groups = x.reshape(-1, 32)
    most = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)
    if kind == "q8_0":
        scales = (np.abs(most) / 127).astype(np.float16)
        codes = np.rint(groups / np.maximum(scales.astype(np.float32), 1e-9))
        packed = np.clip(codes, -127, 127).astype(np.int8).view(np.uint8)
    else:
        scales = (most / -8).astype(np.float16)
        divisor = np.where(scales == 0, np.float32(1), scales.astype(np.float32))
        codes = np.clip(np.rint(groups / divisor) + 8, 0, 15).astype(np.uint8)
        packed = codes[:, :16] | codes[:, 16:] << 4
    return np.concatenate([scales.view(np.uint8), packed], axis=1).tobytes()


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    """Return a value with the number of its type."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    items = b"".join(_value(item)[4:] for item in value)
    (kind,) = struct.unpack("<I", _value(value[0])[:4])
    return struct.pack("<IIQ", 9, kind, len(value)) + items


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Tensors, align: int = 32) -> None:
    """Write a file of version 3."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    parts += [_text(key) + _value(value) for key, value in metadata.items()]
    data = b""
    for name, (kind, shape, contents) in tensors.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts.append(_text(name) + dims + struct.pack("<IQ", kind, len(data)))
        data += contents + bytes(-len(contents) % align)
    header = b"".join(parts)
    path.write_bytes(header + bytes(-len(header) % align) + data)


VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*map(chr, range(33, 127)), "ab", *(f"<{i}>" for i in range(33))],
    "tokenizer.ggml.token_type": [1] * 95 + [3] * 33,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 127,
    "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
}
"""Metadata of a vocabulary of 128 tokens."""


NAMES = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SANDWICHES, PERMUTED = ("gemma2", "gemma3", "olmo2"), ("llama", "granite", "smollm3")
SHIFTED = ("gemma", "gemma2", "gemma3")
"""Facts of llama.cpp's converter, stated again so that a mistake in Octavo's tables is found."""


def rope_fields(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of scaled positions."""
    kind = rope.get("rope_type")
    if kind not in ("linear", "yarn"):
        return {}
    names = {"factor": "factor", "original_max_position_embeddings": "original_context_length"}
    names |= {"attention_factor": "yarn_attn_factor"}
    found = {f"rope.scaling.{key}": rope[name] for name, key in names.items() if name in rope}
    return {"rope.scaling.type": kind} | found


def convert(
    model: PreTrainedModel, kind: str, path: Path, types: Mapping[str, str] | None = None
) -> None:
    """Write a model of transformers.

    Args:
        model: the model, with a vocabulary of 128 tokens.
        kind: its `general.architecture`.
        path: the file.
        types: types of tensors by parts of their names; "" for all others; default: f32.
    """
    config, names = model.config, NAMES | (SANDWICH if kind in SANDWICHES else {})
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    metadata = {"general.architecture": kind} | VOCABULARY
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
    } | rope_fields(rope)
    if kind in ("gemma2", "gemma3", "phi3"):
        fields["attention.sliding_window"] = config.sliding_window or 0
    if kind == "granite":
        fields["attention.scale"] = config.attention_multiplier
        fields["embedding_scale"] = config.embedding_multiplier
        fields["residual_scale"] = config.residual_multiplier
        fields["logit_scale"] = config.logits_scaling
    metadata |= {f"{kind}.{key}": value for key, value in fields.items() if value is not None}
    tensors: dict[str, tuple[int, Sequence[int], bytes]] = {}
    if rope.get("rope_type") == "llama3":
        plain = rope["rope_theta"] ** -(np.arange(0, size, 2) / size)
        factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
        tensors["rope_freqs.weight"] = TYPES["f32"], factors.shape, quantize(factors, "f32")
    for name, tensor in model.state_dict().items():
        module, _, suffix = name.rpartition(".")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer, stored = "", module
        if module.startswith("model.layers."):
            _, _, index, stored = module.split(".", 3)
            layer = f"blk.{index}."
        x = tensor.float().numpy()
        heads = {"self_attn.q_proj": config.num_attention_heads}
        heads["self_attn.k_proj"] = config.num_key_value_heads
        if kind in PERMUTED and stored in heads:
            halves = x.reshape(heads[stored], 2, size // 2, -1)
            x = halves.swapaxes(1, 2).reshape(x.shape)
        if module.endswith("norm") and kind in SHIFTED:
            x = x + np.float32(1)
        full = f"{layer}{names[stored]}.{suffix}"
        chosen = next((t for part, t in (types or {"": "f32"}).items() if part in full), "f32")
        chosen = chosen if x.ndim == 2 else "f32"
        tensors[full] = TYPES[chosen], x.shape, quantize(np.ascontiguousarray(x), chosen)
    write_gguf(path, metadata, tensors)
