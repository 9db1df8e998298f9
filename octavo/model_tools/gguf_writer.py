"""Writer of GGUF files: metadata, names, order of rows and types as llama.cpp's converter has them.

The architectures are those of Octavo's reader, which reads the description back before a tensor is
converted: it must describe the same model, with the same tokens for the same texts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source, Tensors
from octavo.checkpoints.gguf.architectures import (
    ARCHITECTURES,
    EXPERT,
    Architecture,
    stored_name,
)
from octavo.checkpoints.gguf.config import NOT_ROTATED, SAMPLING
from octavo.checkpoints.gguf.file import Heads, tiled_order
from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import ConfigError, ModelError
from octavo.layers.rope_spec import RopeSpec
from octavo.layers.rotary import build_cos_sin_cache
from octavo.model_tools.block_quantizers import quantize
from octavo.model_tools.gguf_metadata import (
    attention_blocks,
    first_rope,
    linear_blocks,
    model_metadata,
)
from octavo.model_tools.gguf_tokenizer import PROBES, tokenizer_metadata
from octavo.model_tools.source_tensors import as_bytes, read_rows, require_float16, row_ranges
from octavo.model_tools.unfinished import Piece, TensorFile
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
_NOT_WRITTEN = frozenset({"bitnet", "exaone", "internlm2", "muse-glimmer", "paddleocr", "qwen2vl"})
_NOT_WRITTEN |= {"qwen3vl", "xverse", "mamba", "mamba2", "jamba", "granitehybrid", "falcon-h1"}
_NOT_WRITTEN |= {"nemotron_h", "rwkv7"}
_NOT_WRITTEN |= {
    kind for kind in ARCHITECTURES if "expert_count" in ARCHITECTURES[kind].fields.values()
} - {"qwen2moe", "qwen3moe", "olmoe"}
_NOT_WRITTEN |= {"minicpm3"}
"""Architectures that Octavo reads, but does not write. llama.cpp computes another activation
(bitnet); or the models have state spaces, RWKV's mixers, latent attention or experts of other
kinds; or they are parts of models; or their tensors in Hugging Face's form lack Llama's names."""
WRITTEN: tuple[str, ...] = tuple(kind for kind in ARCHITECTURES if kind not in _NOT_WRITTEN)
"""Architectures that are written, by `general.architecture`."""
_OTHER_KINDS = {
    "MistralForCausalLM": "llama",  # llama.cpp computes it as Llama
    "Ministral3ForCausalLM": "mistral3",
    "MiniCPMForCausalLM": "minicpm",
    "MptForCausalLM": "mpt",
}
"""Kinds of architectures that are not those of their names in `ARCHITECTURES`."""
_FLOATS = ("altup", "laurel", "per_layer_model_proj")
"""Beginnings of the names of matrices that are not quantized."""
_FLOATS32 = (
    "ffn_gate_inp",
    "position_embd",
    "altup_correct_coef",
    "altup_predict_coef",
    "ssm_conv1d",
    "conv",
)
"""Matrices that are in float32."""
_BETTER = ("attn_v", "ffn_down")
"""Beginnings of the names of matrices that may have the better type of a mix."""
_COMPARED = ("vocab_size", "hidden_size", "max_model_len", "embed", "layers", "head", "streams")
"""Parts of a model that the file must describe."""
_NOT_COMPARED = ("form", "forms", "scale_given", "tiled")
"""Fields of these parts without effect on answers to tokens."""
_SMALLER = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""Types of rows that blocks of 256 numbers do not divide."""


@dataclass(frozen=True)
class Mix:
    """Types of a file's matrices."""

    number: int
    """Number of the mix, `general.file_type`."""
    base: str
    """Type of all matrices except those of the fields below."""
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
    described |= model_metadata(spec, kind, architecture)
    described |= _xielu(spec, tensors, architecture)
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
            stream.write(file.head)
            for piece in file.pieces[: len(_rope_factors(spec))]:  # the reader needs their numbers
                stream.write(piece.make())
            stream.truncate(file.nbytes)
        checkpoint = open_checkpoint(path)
        found = read_spec(checkpoint)
        checkpoint.open(found.expected)
        if (inputs := spec.embed.layer_inputs) is not None:  # the file has a row for each token
            inputs = replace(inputs, rows=inputs.vocab_size)
            spec = replace(spec, embed=replace(spec.embed, layer_inputs=inputs))
        for field in _COMPARED:
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
    other = _OTHER_KINDS.get(spec.architecture)
    if other is not None:
        return other, ARCHITECTURES[other]
    known = [*_OTHER_KINDS]
    for kind in WRITTEN:
        architecture = ARCHITECTURES[kind]
        names = [architecture.name, *filter(None, [architecture.windowed_name])]
        if spec.architecture in names:
            return kind, architecture
        known += names
    raise ConfigError(
        f"{spec.architecture} cannot be written to GGUF; supported: "
        f"{', '.join(sorted(set(known)))}."
    )


# Metadata


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
        names = [f.name for f in fields(one) if f.name not in _NOT_COMPARED]
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


@dataclass(frozen=True)
class _Part:
    """Tensor of the checkpoint, and how its rows become those of the file."""

    source: Source
    shape: tuple[int, ...]
    order: NDArray[np.int64] | None
    """Row of the checkpoint at each place; None: the rows keep their order."""
    turned: bool
    """True if the checkpoint has columns in place of rows."""
    shift: float
    """Number that is added."""
    columns: NDArray[np.int64] | None = None
    """Column of the checkpoint at each place; None: they keep their order."""
    decays: bool = False
    """True if A_log becomes -exp(A_log)."""


def _tensors(
    spec: ModelSpec, tensors: Tensors, architecture: Architecture, mix: Mix
) -> Iterator[_Tensor]:
    """Yield all tensors; those with factors of positions come first."""
    yield from _rope_factors(spec)
    for name, sources in _by_stored_name(spec, architecture).items():
        if ".xielu." in name:
            continue  # metadata
        parts = [_part(source, spec, architecture) for source in sources]
        shape = parts[0].shape
        if len(parts) > 1 or ".norms." in sources[0].name or EXPERT.search(sources[0].name):
            shape = (len(parts), *shape)
        elif name.endswith("ffn_gate_inp_shexp.weight"):  # one row, as a vector
            shape = shape[1:]
        yield _converted(name, _type_in(spec, mix, name, shape), shape, parts, tensors)
    if architecture is ARCHITECTURES["gemma3n"]:
        yield from _unused_tensors(spec, mix)


def _by_stored_name(spec: ModelSpec, architecture: Architecture) -> dict[str, list[Source]]:
    """Return the checkpoint's tensors by their names in the file, of which they may be slices.

    Raises:
        ConfigError: GGUF has no name for one.
    """
    parts: dict[str, list[Source]] = {}
    for source in {s.name: s for w in spec.weights() for s in w.sources}.values():
        name = stored_name(source.name, architecture.names, architecture.layers)
        if name is None or source.transform not in ("none", "transpose", "by_group"):
            raise ConfigError(f"GGUF has no name for {source.name} of {spec.architecture}.")
        parts.setdefault(name, []).append(source)
    return parts


def _part(source: Source, spec: ModelSpec, architecture: Architecture) -> _Part:
    turned, order = source.transform == "transpose", None
    shape = source.shape[::-1] if turned else source.shape
    attention, module = attention_blocks(spec)[0], source.name.split(".")[-2]
    heads = {"q_proj": attention.num_heads, "k_proj": attention.num_kv_heads}
    inputs, columns = spec.embed.layer_inputs, None
    if len(shape) == 3:  # a convolution
        shape = (shape[0], shape[2])
    if source.transform == "by_group":
        order = source.row_order(shape[0])
    elif architecture.permuted and module in heads:
        rows = np.arange(shape[0]).reshape(heads[module], 2, -1)
        order = rows.swapaxes(1, 2).ravel()  # rotations of neighbors
    elif inputs is not None and source.name == f"{inputs.module}.weight":
        # Tokens without a row have that of token 0.
        order = np.arange(inputs.vocab_size)
        order[inputs.rows :] = 0
        shape = (inputs.vocab_size, *shape[1:])
    elif architecture.tiled and (heads_of_values := _linear_heads(spec)) is not None:
        orders = tiled_order(source.name, shape, heads_of_values)
        order, columns = (None if one is None else np.argsort(one) for one in orders)
    shift = architecture.norm_shift if source.name.endswith(architecture.shifted) else 0.0
    decays = source.name.endswith("A_log")
    return _Part(source, shape, order, turned, shift, columns, decays)


def _linear_heads(spec: ModelSpec) -> Heads | None:
    """Return the heads of linear attention; None: there are as many of keys as of values."""
    delta = next((b for b in linear_blocks(spec) if b.num_heads > b.num_key_heads), None)
    if delta is None:
        return None
    return Heads(0, 0, delta.num_key_heads, delta.num_heads, delta.value_size)


def _unused_tensors(spec: ModelSpec, mix: Mix) -> Iterator[_Tensor]:
    """Yield zeros for the keys and values of Gemma 3n's layers that read those of others.

    llama.cpp requires these tensors, and reads none of them.
    """
    for layer, attention in enumerate(attention_blocks(spec)):
        if attention.source is None:
            continue
        keys = attention.num_kv_heads * attention.head_size, spec.hidden_size
        for stored, shape in (
            ("attn_k", keys),
            ("attn_v", keys),
            ("attn_k_norm", (attention.head_size,)),
        ):
            name = f"blk.{layer}.{stored}.weight"
            kind = _type_in(spec, mix, name, shape)
            rows = shape[0] if len(shape) == 2 else 1
            yield _padded(name, kind, shape, bytes(rows * _row_nbytes(kind, (rows, shape[-1]))))


def _xielu(spec: ModelSpec, tensors: Tensors, architecture: Architecture) -> dict[str, Any]:
    """Return the parameters of the activation xIELU of each layer, if the model has it."""
    values: dict[str, list[float]] = {}
    for name, (source, *_) in _by_stored_name(spec, architecture).items():
        if ".xielu." in name:
            number = float(read_rows(tensors, source, 0, 1)[0])
            values.setdefault(name.partition(".xielu.")[2], []).append(number)
    if values:
        values |= {"beta": [0.5] * len(spec.layers), "eps": [-1e-6] * len(spec.layers)}
    return {f"xielu.{key}": value for key, value in values.items()}


def _type_in(spec: ModelSpec, mix: Mix, name: str, shape: tuple[int, ...]) -> str:
    """Return the type of a tensor by its name in the file."""
    words = name.split(".")
    layer = int(words[1]) if words[0] == "blk" else None
    return _type_of(mix, words[-2], layer, len(spec.layers), shape, tied=spec.tied)


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
    if len(shape) < 2 or stored.endswith("norm") or stored in _FLOATS32:
        return "float32"
    kind = mix.base
    if stored.startswith(_FLOATS):
        return "float16" if kind in BLOCK_TYPES else kind
    if stored == "output" or (stored in ("token_embd", "per_layer_token_embd") and tied):
        kind = mix.head
    elif stored == "attn_qkv" and mix.fused is not None:
        kind = mix.fused
    elif mix.better is not None and layer is not None and stored.startswith(_BETTER):
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
    name: str, kind: str, shape: tuple[int, ...], parts: list[_Part], tensors: Tensors
) -> _Tensor:
    def make(part: _Part, begin: int, end: int, padding: int) -> bytes:
        source = part.source
        x = read_rows(tensors, source, begin, end, part.order, turned=part.turned)
        if part.columns is not None:
            x = x[:, part.columns]
        x = -np.exp(x) if part.decays else x + np.float32(part.shift)
        if kind in BLOCK_TYPES:
            require_float16(x, source.name)
            return quantize(x, kind).tobytes() + bytes(padding)
        return as_bytes(x, kind, source.name) + bytes(padding)

    pieces = []
    for index, part in enumerate(parts):
        row = _row_nbytes(kind, part.shape)
        for begin, end in row_ranges(part.shape):
            is_last = index + 1 == len(parts) and end == part.shape[0]
            padding = -len(parts) * part.shape[0] * row % _ALIGNMENT if is_last else 0
            nbytes = (end - begin) * row + padding
            pieces.append(Piece(nbytes, partial(make, part, begin, end, padding)))
    return _Tensor(name, kind, shape, tuple(pieces))


def _padded(name: str, kind: str, shape: tuple[int, ...], data: bytes) -> _Tensor:
    data += bytes(-len(data) % _ALIGNMENT)
    return _Tensor(name, kind, shape, (Piece(len(data), lambda: data),))


def _row_nbytes(kind: str, shape: tuple[int, ...]) -> int:
    columns = int(np.prod(shape[1:]))
    if kind in BLOCK_TYPES:
        size = BLOCK_TYPES[kind]
        return columns // size.numbers * size.nbytes
    return columns * DTYPE_NBYTES[kind]


def _rope_factors(spec: ModelSpec) -> list[_Tensor]:
    """Return the tensors with factors of the wavelengths of rotary positions."""
    rope, factors = first_rope(spec), dict[str, Sequence[float] | NDArray[Any]]()
    if rope is None:
        return []
    match rope.rope_type:
        case "llama3":
            factors["rope_freqs"] = _llama3_factors(rope)
        case "longrope":
            factors["rope_factors_long"] = rope.long_factor
            factors["rope_factors_short"] = rope.short_factor
        case "proportional":
            half = rope.rotary_dim // 2
            factors["rope_freqs"] = np.where(np.arange(half) < rope.turning_pairs, 1, NOT_ROTATED)
    return [
        _padded(f"{name}.weight", "float32", (len(x),), np.asarray(x, "<f4").tobytes())
        for name, x in factors.items()
    ]


def _llama3_factors(rope: RopeSpec) -> NDArray[np.float32]:
    """Return the factors of the wavelengths of Llama 3."""
    half = rope.rotary_dim // 2
    wavelengths = 2 * np.pi * np.float64(rope.theta) ** (np.arange(half) / half)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    width = max(high - low, 1e-30)
    smooth = np.clip((rope.original_max_position / wavelengths - low) / width, 0, 1)
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
