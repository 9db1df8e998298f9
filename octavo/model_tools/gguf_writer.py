"""Writer of GGUF files: metadata, names, order of rows and types as llama.cpp's converter has them.

The architectures are those of Octavo's reader, which reads the description back before a tensor is
converted: it must describe the same model, with the same tokens for the same texts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source, Tensors
from octavo.checkpoints.gguf.architectures import ARCHITECTURES, Architecture
from octavo.checkpoints.gguf.config import SAMPLING
from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import ConfigError, ModelError
from octavo.layers.rope_spec import RopeSpec
from octavo.layers.rotary import build_cos_sin_cache
from octavo.model_tools.block_quantizers import quantize
from octavo.model_tools.gguf_tokenizer import PROBES, tokenizer_metadata
from octavo.model_tools.source_tensors import as_bytes, read_rows, require_float16, row_ranges
from octavo.model_tools.unfinished import Piece, TensorFile
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.mlp import MLPSpec
from octavo.models.blocks.norm import RMSNormSpec
from octavo.models.registry import read_spec
from octavo.models.spec import ModelSpec
from octavo.system.block_types import BLOCK_TYPES
from octavo.system.dtypes import DTYPE_NBYTES
from octavo.text.tokenizer import Tokenizer

FILE_NAME = "model.gguf"
_ALIGNMENT = 32
_NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 30, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7}
_NUMBERS |= {"q8_0": 8, "q4_k": 12, "q5_k": 13, "q6_k": 14}
"""Types of tensors, by ggml's numbers."""
WRITTEN: tuple[str, ...] = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "granite",
    "smollm3",
    "olmo2",
)
WRITTEN += ("phi3", "exaone4", "seed_oss", "ernie4_5", "hunyuan-dense")
"""Architectures that are written, by `general.architecture`."""
_PATTERNS = ("olmo2", "exaone4")
"""Architectures whose files name the layers with sliding windows."""
_SMALLER = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""Types of rows that blocks of 256 numbers do not divide."""


@dataclass(frozen=True)
class Mix:
    """Types of a file's matrices."""

    number: int
    """Number of the mix, `general.file_type`."""
    base: str
    """Type of all but these:"""
    head: str
    """Type of the LM head, and of a table that is shared with it."""
    better: str | None = None
    """Type of values and of projections down in some layers: see `_needs_more_bits`."""
    fused: str | None = None
    """Type of fused projections to queries, keys and values."""
    first_only: bool = False
    """True if only the first layers have the better type."""


MIXES = {
    "F32": Mix(0, "float32", "float32"),
    "F16": Mix(1, "float16", "float16"),
    "BF16": Mix(32, "bfloat16", "bfloat16"),
    "Q8_0": Mix(7, "q8_0", "q8_0"),
    "Q4_0": Mix(2, "q4_0", "q6_k"),
    "Q4_1": Mix(3, "q4_1", "q6_k"),
    "Q5_0": Mix(8, "q5_0", "q6_k"),
    "Q5_1": Mix(9, "q5_1", "q6_k"),
    "Q4_K_S": Mix(14, "q4_k", "q6_k", "q5_k", first_only=True),
    "Q4_K_M": Mix(15, "q4_k", "q6_k", "q6_k", "q5_k"),
    "Q5_K_S": Mix(16, "q5_k", "q6_k"),
    "Q5_K_M": Mix(17, "q5_k", "q6_k", "q6_k", "q6_k"),
    "Q6_K": Mix(18, "q6_k", "q6_k"),
}
"""Mixes of types by llama.cpp's names."""


@dataclass(frozen=True)
class _Tensor:
    """Tensor of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Size in the file, with padding."""
        return sum(piece.nbytes for piece in self.pieces)


def make_gguf(
    spec: ModelSpec,
    tensors: Tensors,
    mix_name: str,
    name: str,
    tokenizer: Tokenizer,
    tokenizer_json: str,
) -> TensorFile:
    """Return the file of a model.

    Args:
        spec: the model, with plain weights.
        tensors: its tensors.
        mix_name: a key of `MIXES`.
        name: the model's name.
        tokenizer: its tokenizer.
        tokenizer_json: contents of tokenizer.json.

    Raises:
        ConfigError: GGUF, as far as Octavo reads it, has no such architecture or parameters.
        ModelError: GGUF has no such tokenizer.
    """
    kind, architecture = _find_architecture(spec)
    mix = MIXES[mix_name]
    described: dict[str, Any] = {"general.architecture": kind, "general.name": name}
    described |= {"general.file_type": mix.number, "general.quantization_version": 2}
    for field, key in SAMPLING.items():
        value = spec.generation_config.get(field)
        if value is not None and (field != "top_k" or value > 0):
            described[f"general.sampling.{key}"] = value
    described |= _metadata(spec, kind, architecture)
    described |= tokenizer_metadata(
        tokenizer_json, tokenizer, spec.vocab_size, spec.eos_token_ids, spec.bos_token_id
    )
    found = list(_tensors(spec, tensors, architecture, mix))
    names = [tensor.name for tensor in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"GGUF has no names for the tensors of {spec.architecture}.")
    pieces = tuple(piece for tensor in found for piece in tensor.pieces)
    return TensorFile(FILE_NAME, _header(described, found), pieces)


def check_description(
    file: TensorFile, spec: ModelSpec, tokenizer: Tokenizer, folder: Path
) -> None:
    """Read the description of a file back, and compare it with the model.

    Args:
        file: the file.
        spec: the model.
        tokenizer: its tokenizer.
        folder: folder for an empty file of the same size, which takes no space.

    Raises:
        ConfigError: Octavo would read another model.
        ModelError: the tokenizer would make other tokens.
    """
    path = folder / "description.gguf"
    try:
        with path.open("wb") as stream:
            stream.write(file.head + file.pieces[0].make())  # factors of wavelengths, if any
            stream.truncate(file.nbytes)
        checkpoint = open_checkpoint(path)
        found = read_spec(checkpoint)
        checkpoint.open(found.expected)
        for field in ("vocab_size", "hidden_size", "max_model_len", "embed", "layers", "head"):
            if not _same(getattr(spec, field), getattr(found, field)):
                raise ConfigError(
                    f"{spec.architecture} with this config.json cannot be written to GGUF: its "
                    f"{field} would be read as another one."
                )
        read = Tokenizer.from_folder(path)
        for probe in (*PROBES, *tokenizer.all_special_tokens):
            if tokenizer.encode(probe) != read.encode(probe):
                raise ModelError(
                    f"The tokenizer cannot be written to GGUF: {probe[:60]!r} would have other "
                    "tokens; convert to int8 or int4 instead."
                )
    finally:
        path.unlink(missing_ok=True)


def _find_architecture(spec: ModelSpec) -> tuple[str, Architecture]:
    name = spec.architecture
    if name == "MistralForCausalLM":  # llama.cpp computes it as Llama
        name = "LlamaForCausalLM"
    known = []
    for kind in WRITTEN:
        architecture = ARCHITECTURES[kind]
        names = [architecture.name, *filter(None, [architecture.windowed_name])]
        if name in names:
            return kind, architecture
        known += names
    raise ConfigError(
        f"{spec.architecture} cannot be written to GGUF; supported: {', '.join(sorted(known))}."
    )


# Metadata


def _metadata(spec: ModelSpec, kind: str, architecture: Architecture) -> dict[str, Any]:
    """Return the parameters of the model."""
    attentions = [b for layer in spec.layers for b in layer.blocks if isinstance(b, AttentionSpec)]
    mlps = [b for layer in spec.layers for b in layer.blocks if isinstance(b, MLPSpec)]
    norm = spec.head.norm
    if not attentions or not mlps or not isinstance(norm, RMSNormSpec):
        raise ConfigError(f"{spec.architecture} cannot be written to GGUF: its blocks differ.")
    whole = next((a for a in attentions if a.sliding_window is None), attentions[0])
    rotary = [a.positions for a in (whole, *attentions) if isinstance(a.positions, RopeSpec)]
    if not rotary:
        raise ConfigError(f"{spec.architecture} cannot be written to GGUF: it has no positions.")
    rope = rotary[0]
    window = next((a.sliding_window for a in attentions if a.sliding_window), 0)
    values: dict[str, Any] = {
        "context_length": spec.max_model_len,
        "embedding_length": spec.hidden_size,
        "block_count": len(spec.layers),
        "feed_forward_length": mlps[0].down.inputs,
        "attention.head_count": whole.num_heads,
        "attention.head_count_kv": whole.num_kv_heads,
        "attention.key_length": whole.head_size,
        "attention.value_length": whole.head_size,
        "attention.layer_norm_rms_epsilon": float(norm.eps),
        "rope.freq_base": float(rope.theta),
        "rope.dimension_count": rope.rotary_dim,
        "vocab_size": spec.vocab_size,
    }
    if architecture.windowed and (window or kind not in _PATTERNS):
        values["attention.sliding_window"] = window
        if kind in _PATTERNS:
            pattern = [a.sliding_window is not None for a in attentions]
            values["attention.sliding_window_pattern"] = pattern
    optional = {
        "attn_logit_softcapping": whole.soft_cap,
        "final_logit_softcapping": spec.head.soft_cap,
        "attention.scale": whole.scale,
        "embedding_scale": spec.embed.scale,
        "residual_scale": spec.layers[0].residual_multiplier,
        "logit_scale": None if spec.head.scale is None else 1 / spec.head.scale,
    }
    known = set(architecture.fields.values())
    values |= {k: float(v) for k, v in optional.items() if k in known and v is not None}
    match rope.rope_type:
        case "linear":
            values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.factor)}
            values["context_length"] = round(spec.max_model_len / rope.factor)
        case "yarn":
            values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope.factor)}
            values["rope.scaling.original_context_length"] = rope.original_max_position
    return {f"{kind}.{key}": value for key, value in values.items()}


def _same(one: Any, other: Any) -> bool:
    """Return True if two parts of specs compute the same, whatever the forms of their weights."""
    if isinstance(one, RopeSpec) and isinstance(other, RopeSpec):
        if (one.rotary_dim, one.is_neox) != (other.rotary_dim, other.is_neox):
            return False
        rows = max(one.original_max_position, other.original_max_position, 4096)
        rows = min(rows + 64, 2**15)
        table, other_table = (build_cos_sin_cache(rope, rows).numpy() for rope in (one, other))
        return bool(np.allclose(table, other_table, atol=3e-3))
    if is_dataclass(one) and not isinstance(one, type):
        if type(one) is not type(other):
            return False
        names = [f.name for f in fields(one) if f.name not in ("form", "forms")]
        return all(_same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, tuple) and isinstance(other, tuple):
        seen: set[tuple[int, int]] = set()
        for pair in zip(one, other, strict=False):  # layers share their objects
            key = id(pair[0]), id(pair[1])
            if key not in seen and not _same(*pair):
                return False
            seen.add(key)
        return len(one) == len(other)
    if isinstance(one, float) and isinstance(other, (float, int)):
        return bool(np.isclose(one, other, rtol=1e-6))
    return bool(one == other)


# Tensors


def _tensors(
    spec: ModelSpec, tensors: Tensors, architecture: Architecture, mix: Mix
) -> Iterator[_Tensor]:
    attention = next(b for b in spec.layers[0].blocks if isinstance(b, AttentionSpec))
    heads = {"q_proj": attention.num_heads, "k_proj": attention.num_kv_heads}
    rope = attention.positions
    if isinstance(rope, RopeSpec) and rope.rope_type == "llama3":
        factors = _llama3_factors(rope).tobytes()
        yield _padded("rope_freqs.weight", "float32", (rope.rotary_dim // 2,), factors)
    places = {spec.layer_names.format(i): i for i in range(len(spec.layers))}
    by_name = {source.name: source for w in spec.weights() for source in w.sources}
    for source in by_name.values():
        prefix = next((p for p in places if source.name.startswith(p)), None)
        layer = None if prefix is None else places[prefix]
        module, _, suffix = source.name.removeprefix(prefix or "").rpartition(".")
        stored = architecture.names.get(module)
        if stored is None or source.transform != "none":
            raise ConfigError(f"GGUF has no name for {source.name} of {spec.architecture}.")
        name = f"{stored}.{suffix}" if layer is None else f"blk.{layer}.{stored}.{suffix}"
        order = None
        if architecture.permuted and module.rpartition(".")[2] in heads:
            number = heads[module.rpartition(".")[2]]
            rows = np.arange(source.shape[0]).reshape(number, 2, -1)
            order = rows.swapaxes(1, 2).ravel()  # rotations of neighbors
        shift = architecture.norm_shift if module.endswith("norm") else 0.0
        kind = _type_of(mix, stored, layer, len(spec.layers), source.shape, tied=spec.tied)
        yield _converted(name, kind, source, tensors, order, shift)


def _type_of(
    mix: Mix,
    stored: str,
    layer: int | None,
    num_layers: int,
    shape: tuple[int, ...],
    *,
    tied: bool,
) -> str:
    """Return the type of a tensor; these are the choices of llama.cpp's quantizer."""
    if len(shape) < 2:
        return "float32"
    kind = mix.base
    if stored == "output" or (stored == "token_embd" and tied):
        kind = mix.head
    elif stored == "attn_qkv" and mix.fused is not None:
        kind = mix.fused
    elif mix.better is not None and layer is not None and stored in ("attn_v", "ffn_down"):
        first = 4 if stored == "attn_v" else num_layers // 8
        wanted = layer < first if mix.first_only else _needs_more_bits(layer, num_layers)
        kind = mix.better if wanted else kind
    if kind in _SMALLER and shape[-1] % BLOCK_TYPES[kind].numbers:
        kind = _SMALLER[kind]
    if kind in BLOCK_TYPES and shape[-1] % BLOCK_TYPES[kind].numbers:
        kind = "float16"
    return kind


def _needs_more_bits(layer: int, num_layers: int) -> bool:
    """Return True for the first and last eighth of the layers, and for a third of the others."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _converted(
    name: str,
    kind: str,
    source: Source,
    tensors: Tensors,
    order: NDArray[np.int64] | None,
    shift: float,
) -> _Tensor:
    def make(begin: int, end: int, padding: int) -> bytes:
        x = read_rows(tensors, source, begin, end, order) + np.float32(shift)
        if kind in BLOCK_TYPES:
            require_float16(x, source.name)
            return quantize(x, kind).tobytes() + bytes(padding)
        return as_bytes(x, kind, source.name) + bytes(padding)

    row = _row_nbytes(kind, source.shape)
    pieces = []
    for begin, end in row_ranges(source.shape):
        padding = -source.shape[0] * row % _ALIGNMENT if end == source.shape[0] else 0
        nbytes = (end - begin) * row + padding
        pieces.append(Piece(nbytes, partial(make, begin, end, padding)))
    return _Tensor(name, kind, source.shape, tuple(pieces))


def _padded(name: str, kind: str, shape: tuple[int, ...], data: bytes) -> _Tensor:
    data += bytes(-len(data) % _ALIGNMENT)
    return _Tensor(name, kind, shape, (Piece(len(data), lambda: data),))


def _row_nbytes(kind: str, shape: tuple[int, ...]) -> int:
    columns = int(np.prod(shape[1:]))
    if kind in BLOCK_TYPES:
        size = BLOCK_TYPES[kind]
        return columns // size.numbers * size.nbytes
    return columns * DTYPE_NBYTES[kind]


def _llama3_factors(rope: RopeSpec) -> NDArray[np.float32]:
    """Return the factors of the wavelengths of Llama 3."""
    half = rope.rotary_dim // 2
    wavelengths = 2 * np.pi * np.float64(rope.theta) ** (np.arange(half) / half)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = np.clip((rope.original_max_position / wavelengths - low) / (high - low), 0, 1)
    factors: NDArray[np.float32] = (1 / ((1 - smooth) / rope.factor + smooth)).astype("<f4")
    return factors


# File


def _header(metadata: Mapping[str, Any], tensors: list[_Tensor]) -> bytes:
    """Return the beginning of a file of version 3, up to the first tensor."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    parts += [_text(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        shape = tensor.shape[::-1]
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        parts.append(_text(tensor.name) + dims)
        parts.append(struct.pack("<IQ", _NUMBERS[tensor.type], offset))
        offset += tensor.nbytes
    head = b"".join(parts)
    return head + bytes(-len(head) % _ALIGNMENT)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Return the type and the bytes of a value."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
    head = struct.pack("<I", 9)
    if not value or isinstance(value[0], str):
        return head + struct.pack("<IQ", 8, len(value)) + b"".join(map(_text, value))
    code, kind = {float: ("<f4", 6), bool: ("?", 7), int: ("<i4", 5)}[type(value[0])]
    return head + struct.pack("<IQ", kind, len(value)) + np.array(value, code).tobytes()
