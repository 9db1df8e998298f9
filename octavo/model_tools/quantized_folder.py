"""Writer of quantized checkpoints in folders: int8, int4 and fp8.

The layers' linear modules are quantized. Embedding, LM head, norms and biases stay as they are.

- int8: compressed-tensors W8A8. One scale for each output; activations have 8 bits, with a scale
  for each token.
- int4: compressed-tensors W4A16. One scale for each output and group of inputs; eight codes in an
  int32, the first one lowest, each 8 more than its number.
- fp8: numbers of type float8_e4m3fn in blocks of 128 outputs and 128 inputs, which share a scale;
  the largest number of a block becomes 448. The form of DeepSeek's and Qwen's checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source, Tensors
from octavo.errors import ConfigError
from octavo.model_tools.block_quantizers import fit_symmetric
from octavo.model_tools.source_tensors import as_bytes, read_rows, require_float16, row_ranges
from octavo.model_tools.unfinished import Piece, TensorFile
from octavo.models.spec import ModelSpec
from octavo.models.weights import Weight
from octavo.system.dtypes import DTYPE_NBYTES
from octavo.system.tensor import numpy_dtype

# Numpy's operators have the type Any.
# mypy: disable-error-code="no-any-return"

Target = Literal["int8", "int4", "fp8"]
FILE_NAME = "model.safetensors"
_GROUP_SIZES = (128, 64, 32)
"""Sizes of groups, the best first; all groups of a model have one size."""
_PER_WORD = 8
_BLOCK = 128
_LARGEST_FP8 = np.float32(448)
_ORDER = ("I64", "F32", "I32", "F16", "BF16", "I8", "F8_E4M3")
"""Order of the types in the file, so that each tensor is aligned."""
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class _Tensor:
    """Tensor of the file: its header, and its data in successive pieces."""

    name: str
    dtype: str
    """Name of the type in safetensors."""
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class QuantizedModel:
    """Checkpoint to write: the file of tensors, and quantization_config."""

    file: TensorFile
    quantization: dict[str, Any]


def make_quantized(spec: ModelSpec, tensors: Tensors, target: Target, dtype: str) -> QuantizedModel:
    """Return the checkpoint of a model.

    Args:
        spec: the model, with plain weights.
        tensors: its tensors.
        target: form of the layers' linear modules.
        dtype: type of the other weights, and of the scales of integers.

    Raises:
        ConfigError: the model's linear modules are not stored as [outputs, inputs], or no group
            size divides their inputs.
    """
    linear = _layers_weights(spec)
    inputs = {weight.shape[1] for weight in linear}
    # Modules that the smallest groups do not divide stay plain.
    sizes = (g for g in _GROUP_SIZES if all(n % g == 0 for n in inputs))
    size = next(sizes, _GROUP_SIZES[-1])
    chosen = {
        source.name
        for weight in linear
        for source in weight.sources
        if target != "int4" or source.shape[1] % size == 0
    }
    if not chosen:
        raise ConfigError(
            f"--to int4: groups of {size} do not divide the inputs of any module of "
            f"{spec.architecture}; use --to int8."
        )
    found: list[_Tensor] = []
    left_out: list[str] = []
    for weight in _distinct(spec):
        for source in weight.sources:
            if source.name not in chosen:
                found.append(_plain(source, tensors, dtype))
                if weight.kind == "linear":
                    left_out.append(source.name.removesuffix(".weight"))
            elif target == "fp8":
                found += _fp8(source, tensors)
            else:
                found += _integers(source, tensors, target, size, dtype)
    # The LM head of a tied model is a module without weights of its own.
    left_out = list(dict.fromkeys([*left_out, "lm_head"]))
    found.sort(key=lambda tensor: _ORDER.index(tensor.dtype))
    if target == "fp8":
        config = _fp8_config(left_out)
    else:
        config = _integers_config(target, size, left_out)
    pieces = tuple(piece for tensor in found for piece in tensor.pieces)
    return QuantizedModel(TensorFile(FILE_NAME, _header(found), pieces), config)


def _layers_weights(spec: ModelSpec) -> list[Weight]:
    """Return the linear weights of the layers.

    Raises:
        ConfigError: a module is stored in another way than `torch.nn.Linear`.
    """
    linear = [w for w in spec.weights() if w.kind == "linear" and w.name.startswith("layers.")]
    for weight in linear:
        if any(source.transform == "transpose" for source in weight.sources):
            raise ConfigError(
                f"{spec.architecture} stores its weights as [inputs, outputs], which "
                "the format of the output does not describe; quantize it while it loads, with "
                "--quantization int8 or int4."
            )
    return linear


def _distinct(spec: ModelSpec) -> list[Weight]:
    """Return the weights without a second copy of a tied table."""
    by_sources = {tuple(s.name for s in weight.sources): weight for weight in spec.weights()}
    return list(by_sources.values())


def _plain(source: Source, tensors: Tensors, dtype: str) -> _Tensor:
    columns = int(np.prod(source.shape[1:]))

    def make(begin: int, end: int) -> bytes:
        return as_bytes(read_rows(tensors, source, begin, end), dtype, source.name)

    pieces = tuple(
        Piece((end - begin) * columns * DTYPE_NBYTES[dtype], partial(make, begin, end))
        for begin, end in row_ranges(source.shape)
    )
    return _Tensor(source.name, _TYPES[dtype], source.shape, pieces)


def _integers(
    source: Source,
    tensors: Tensors,
    target: Literal["int8", "int4"],
    group_size: int,
    dtype: str,
) -> list[_Tensor]:
    """Return codes, scales and shape of a module.

    Codes and scales are computed twice, once for each of the two tensors, so that the file can be
    written in order without a whole tensor in memory.
    """
    bits = 8 if target == "int8" else 4
    rows, columns = source.shape
    groups = 1 if bits == 8 else columns // group_size
    name = source.name.removesuffix(".weight")

    def rows_of(begin: int, end: int) -> NDArray[np.float32]:
        x = read_rows(tensors, source, begin, end)
        require_float16(x, source.name)
        return x

    def codes(begin: int, end: int) -> bytes:
        x = rows_of(begin, end)
        if bits == 8:
            return _codes(x, _row_scales(x, dtype), 127).astype(np.int8).tobytes()
        parts = x.reshape(-1, group_size)
        unsigned = (_codes(parts, _group_scales(parts, dtype), 7) + 8).astype(np.uint32)
        words = unsigned.reshape(-1, _PER_WORD) << (4 * np.arange(_PER_WORD, dtype=np.uint32))
        return words.sum(1, dtype=np.uint32).tobytes()

    def scales(begin: int, end: int) -> bytes:
        x = rows_of(begin, end)
        found = _row_scales(x, dtype)
        if bits == 4:
            found = _group_scales(x.reshape(-1, group_size), dtype)
        return as_bytes(found, dtype, name)

    ranges = list(row_ranges(source.shape))
    code_pieces = [Piece((e - b) * columns * bits // 8, partial(codes, b, e)) for b, e in ranges]
    scale_nbytes = groups * DTYPE_NBYTES[dtype]
    scale_pieces = [Piece((e - b) * scale_nbytes, partial(scales, b, e)) for b, e in ranges]
    scale = _Tensor(f"{name}.weight_scale", _TYPES[dtype], (rows, groups), tuple(scale_pieces))
    if bits == 8:
        return [_Tensor(f"{name}.weight", "I8", source.shape, tuple(code_pieces)), scale]
    packed = (rows, columns // _PER_WORD)
    shape = np.array(source.shape, "<i8").tobytes()
    return [
        _Tensor(f"{name}.weight_packed", "I32", packed, tuple(code_pieces)),
        scale,
        _Tensor(f"{name}.weight_shape", "I64", (2,), (Piece(16, lambda: shape),)),
    ]


def _row_scales(x: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    kept: NDArray[np.float32] = (np.abs(x).max(1) / 127).astype(numpy_dtype(dtype))
    return kept.astype(np.float32)


def _group_scales(parts: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Return the nearest scales that both float16 and the model's type hold exactly."""
    half = fit_symmetric(parts, 8).astype(np.float16)
    kept: NDArray[np.float32] = half.astype(numpy_dtype(dtype)).astype(np.float32)
    return kept


def _codes(x: NDArray[np.float32], scales: NDArray[np.float32], most: int) -> NDArray[np.float32]:
    """Return the codes, from -most - 1 to most; 8-bit codes are symmetric."""
    divisors = np.where(scales == 0, np.float32(1), scales)[:, None]
    codes = np.rint(x / divisors)
    codes[scales == 0] = 0
    return np.clip(codes, -127 if most == 127 else -most - 1, most)


def _header(found: list[_Tensor]) -> bytes:
    """Return the beginning of a safetensors file."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in found:
        begin, end = end, end + tensor.nbytes
        described[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _fp8(source: Source, tensors: Tensors) -> list[_Tensor]:
    """Return numbers and scales of a module; see `_integers`."""
    rows, columns = source.shape
    name = source.name.removesuffix(".weight")
    across = -(-columns // _BLOCK)

    def blocks(begin: int, end: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return rows, and the scales [blocks of rows, blocks of columns]."""
        x = read_rows(tensors, source, begin, end)
        padded = np.pad(np.abs(x), ((0, -len(x) % _BLOCK), (0, -columns % _BLOCK)))
        largest = padded.reshape(-1, _BLOCK, across, _BLOCK).max((1, 3))
        return x, (largest / _LARGEST_FP8).astype(np.float32)

    def numbers(begin: int, end: int) -> bytes:
        x, shared = blocks(begin, end)
        each = np.repeat(np.repeat(shared, _BLOCK, 0)[: len(x)], _BLOCK, 1)[:, :columns]
        divided = np.clip(x / np.where(each == 0, np.float32(1), each), -_LARGEST_FP8, _LARGEST_FP8)
        return divided.astype(numpy_dtype("float8_e4m3fn")).tobytes()

    def scales(begin: int, end: int) -> bytes:
        return blocks(begin, end)[1].tobytes()

    ranges = list(row_ranges(source.shape, multiple=_BLOCK))
    number_pieces = [Piece((e - b) * columns, partial(numbers, b, e)) for b, e in ranges]
    scale_pieces = [
        Piece(-(-(e - b) // _BLOCK) * across * 4, partial(scales, b, e)) for b, e in ranges
    ]
    shape = -(-rows // _BLOCK), across
    return [
        _Tensor(f"{name}.weight", "F8_E4M3", source.shape, tuple(number_pieces)),
        _Tensor(f"{name}.weight_scale_inv", "F32", shape, tuple(scale_pieces)),
    ]


def _fp8_config(left_out: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [_BLOCK, _BLOCK],
        "modules_to_not_convert": left_out,
    }


def _integers_config(
    target: Literal["int8", "int4"], group_size: int, left_out: list[str]
) -> dict[str, Any]:
    def arguments(bits: int, strategy: str, *, group_size: int | None, dynamic: bool) -> Any:
        return {
            "num_bits": bits,
            "type": "int",
            "symmetric": True,
            "strategy": strategy,
            "group_size": group_size,
            "dynamic": dynamic,
            "actorder": None,
            "block_structure": None,
            "observer": None if dynamic else "mse",
            "observer_kwargs": {},
        }

    if target == "int8":
        weights = arguments(8, "channel", group_size=None, dynamic=False)
        activations = arguments(8, "token", group_size=None, dynamic=True)
    else:
        weights = arguments(4, "group", group_size=group_size, dynamic=False)
        activations = None
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if target == "int8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations,
                "output_activations": None,
            }
        },
        "ignore": left_out,
        "kv_cache_scheme": None,
    }


def write_description(folder: Path, config: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    """Write config.json and the other small files of a checkpoint.

    Raises:
        OSError: a file cannot be written.
    """
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, "utf-8")
