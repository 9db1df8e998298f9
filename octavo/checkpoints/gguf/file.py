"""Checkpoint in a GGUF file, or in its split parts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Set
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.checkpoints.base import FLOATS, Expected, LoadFormat, Source, shorten_names
from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.gguf.architectures import (
    EXPERT,
    FUSED,
    FUSED_EXPERTS,
    FUSED_MODULES,
    Architecture,
    stored_name,
)
from octavo.checkpoints.gguf.config import Description
from octavo.checkpoints.gguf.folder import PART
from octavo.checkpoints.gguf.header import STORED_BLOCKS, GGUFHeader, GGUFTensor
from octavo.checkpoints.gguf.kept_texts import kept_texts
from octavo.checkpoints.gguf.repack import REPACKED, repack
from octavo.checkpoints.gguf.tokenizer import tokenizer_texts
from octavo.errors import ModelError
from octavo.system.block_types import BLOCK_TYPES
from octavo.system.dtypes import DTYPE_NBYTES
from octavo.system.tensor import HostTensor, from_numpy

_ROPE_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Tensors of the factors of wavelengths: of all contexts, of long ones, of short ones."""
_VALUES = ("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")
"""Ends of the names of tensors with rows for the heads of values of linear attention."""
_QUERIES_KEYS_VALUES = ("in_proj_qkv.weight", "conv1d.weight")
"""Ends of the names of tensors with rows for queries, then keys, then the heads of values."""
_OUTPUTS = "linear_attn.out_proj"
"""End of the name of a module whose inputs are the results of the heads of values."""
GROUPED = ("in_proj_qkvz.weight", "in_proj_ba.weight")
"""Ends of the names of tensors whose rows are in the order of groups of heads, as in the model."""
_MOST_PARTS = 1000
_MOST_EXPERTS = 4096
_MOST_FACTORS = 2**16


class Heads(NamedTuple):
    """Numbers of heads of a model."""

    queries: int
    keys: int
    linear_keys: int = 1
    """Heads of queries and keys of linear attention."""
    linear_values: int = 1
    """Heads of values of linear attention."""
    value_size: int = 0
    """Size of a head of values of linear attention."""
    tiled_inputs: bool = False
    """True if the inputs of `_OUTPUTS` keep the file's order."""


class Place(NamedTuple):
    """Place of a tensor of the model: some rows of a stored tensor."""

    tensor: GGUFTensor
    begin: int
    """Position of its first byte in the file."""
    nbytes: int
    shape: tuple[int, ...]
    """Shape that `GGUFTensors.read` gives it, before it is transposed."""
    dtype: str


class GGUFFile:
    """`Checkpoint` in a GGUF file.

    Args:
        path: the file; of split files the first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.load_format: LoadFormat = "gguf"

    @property
    def config_file(self) -> Path:
        """Implement `Checkpoint`."""
        return self.path

    @cached_property
    def weight_files(self) -> list[Path]:
        """Implement `Checkpoint`."""
        match = PART.match(self.path.name)
        if match is None:
            return [self.path]
        stem, index, count = match[1], int(match[2]), int(match[3])
        if index != 1 or not 1 <= count <= _MOST_PARTS:
            first = f"{stem}-00001-of-{count:05}.gguf"
            raise ModelError(f"{self.path} is a part of a split model; name the first, {first}.")
        names = [f"{stem}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
        missing = [name for name in names if not (self.path.parent / name).is_file()]
        if missing:
            raise ModelError(
                f"{self.path} is the first of {count} parts, and these are missing: "
                f"{shorten_names(missing)}. Download the model again."
            )
        return [self.path.parent / name for name in names]

    @cached_property
    def _headers(self) -> list[GGUFHeader]:
        headers = [GGUFHeader(file) for file in self.weight_files]
        for index, header in enumerate(headers):
            split = [header.metadata.get(f"split.{name}", 0) for name in ("no", "count")]
            if split != [index, len(headers)] and (len(headers) > 1 or split[1] not in (0, 1)):
                raise ModelError(
                    f"{header.file} says that it is part {split[0]} (from 0) of {split[1]}, and "
                    f"its name says {index} of {len(headers)}; download the model again."
                )
        return headers

    @cached_property
    def _tensors(self) -> dict[str, GGUFTensor]:
        tensors: dict[str, GGUFTensor] = {}
        for header in self._headers:
            twice = tensors.keys() & header.tensors.keys()
            if twice:
                raise ModelError(
                    f"{header.file} has tensors that an earlier part has, too: "
                    f"{shorten_names(sorted(twice))}. Download the model again."
                )
            tensors |= header.tensors
        return tensors | _layer_numbers(self._headers[0])

    @cached_property
    def _described(self) -> Description:
        return Description(self.path, self._headers[0].metadata)

    @property
    def kind(self) -> object:
        """Value of general.architecture."""
        return self._described.kind

    def sections(self) -> list[int]:
        """Return the numbers of pairs of a head for time, height and width.

        Raises:
            ModelError: the file does not have them.
        """
        return self._described.sections()

    @cached_property
    def config(self) -> ConfigJson:
        """Return the config in the form of Hugging Face's config.json; see `Checkpoint`."""
        tensors = self._tensors
        embedding = tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelError(f"{self.path} lacks the tensor token_embd.weight of two dimensions.")
        tied = "output.weight" not in tensors
        factors = {name: self._factors(tensors[f"{name}.weight"]) for name in self._rope_factors}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        config = self._described.config(embedding.shape[0], tied, shapes, factors)
        config |= self._constants
        hidden = config.get("hidden_size", embedding.shape[1])
        if hidden != embedding.shape[1]:
            raise ModelError(
                f"{self.path}: embedding_length={hidden}, but token_embd.weight has "
                f"{embedding.shape[1]} numbers for each token. Download the model again."
            )
        config["dtype"] = self.dtype
        types = self._block_types()
        if self._described.architecture.tiled and any(m.endswith(_OUTPUTS) for m in types):
            # A block may have inputs of several heads, so these keep the file's order.
            config["linear_tiled_values"] = True
        if types:
            config["quantization_config"] = {"quant_method": "gguf", "types": types}
        return ConfigJson(config, str(self.path))

    @cached_property
    def _constants(self) -> dict[str, float]:
        """Fields of the config whose numbers are in tensors; see `Architecture.constants`."""
        found: dict[str, float] = {}
        for field, stored in self._described.architecture.constants.items():
            numbers = {
                number
                for name, tensor in self._tensors.items()
                if name.startswith("blk.") and name.endswith(f".{stored}.weight")
                for number in self._factors(tensor)
            }
            if len(numbers) != 1 or (not field and numbers != {1.0}):
                raise ModelError(
                    f"{self.path}: the tensors {stored}.weight do not all have one number, "
                    f"{field or 1}."
                )
            found |= {field: numbers.pop()} if field else {}
        return found

    @property
    def generation_config(self) -> ConfigJson | None:
        """Ids of the tokens that end an answer, and default sampling parameters."""
        fields: dict[str, Any] = self._described.sampling()
        if ids := self._described.end_tokens():
            fields["eos_token_id"] = ids
        return ConfigJson(fields, str(self.path)) if fields else None

    @cached_property
    def dtype(self) -> str:
        """Type of most numbers if all are floats; else bfloat16.

        llama.cpp's converter writes vectors, routers and small matrices in float32 in every file.
        """
        counts: Counter[str] = Counter()
        for tensor in self._tensors.values():
            counts[tensor.type] += math.prod(tensor.shape)
        if counts.keys() & STORED_BLOCKS.keys():
            return "bfloat16"
        if counts.keys() >= {"float16", "bfloat16"}:
            return "float32"
        return max(FLOATS, key=lambda kind: counts[kind])

    def read_text(self, name: str) -> str | None:
        """Return a text that is made from the metadata; see `Checkpoint`."""
        return (self._texts if name.startswith("tokenizer") else self._pooling).get(name)

    @cached_property
    def _pooling(self) -> dict[str, str]:
        return self._described.modules({name: it.shape for name, it in self._tensors.items()})

    @cached_property
    def _texts(self) -> dict[str, str]:
        header = self._headers[0]
        try:
            return kept_texts(header.bytes, lambda: tokenizer_texts(header.metadata))
        except ModelError as error:
            raise ModelError(f"{self.path}: {error}") from None

    def file_names(self, pattern: str) -> list[str]:
        """Return no names: the file has no other files."""
        return []

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """Names of modules in this file; see `Architecture.names`."""
        names = self._described.architecture.names
        if f"blk.0.{FUSED}.weight" in self._tensors and FUSED not in names.values():
            names = {**names, **dict.fromkeys(FUSED_MODULES, FUSED)}
        if any(name.endswith(f".{FUSED_EXPERTS}.weight") for name in self._tensors):
            separate = ("ffn_gate_exps", "ffn_up_exps")
            names = {m: FUSED_EXPERTS if name in separate else name for m, name in names.items()}
        return names

    def _stored_name(self, name: str) -> str:
        """Return the name in the file of a tensor; its own name if the file has none."""
        return stored_name(name, self._names, self._described.architecture.layers) or name

    def open(self, expected: Expected) -> GGUFTensors:
        """Compare the tensors with `expected`; see `Checkpoint`."""
        sources: dict[str, dict[str, Source]] = {}
        for source in expected.sources:
            sources.setdefault(self._stored_name(source.name), {})[source.name] = source
        missing = [name for name in sources if name not in self._tensors]
        if missing:
            raise ModelError(
                f"{self.path} lacks {len(missing)} tensors of {expected.architecture}: "
                f"{shorten_names(missing)}. Download the model again."
            )
        used = sources.keys() | {f"{name}.weight" for name in self._rope_factors}
        used |= {self._stored_name(name) for name in expected.elsewhere}
        constants = self._described.architecture.constants.values()
        used |= {
            name
            for name in self._tensors
            if name.startswith("blk.") and name.split(".")[-2] in constants
        }
        factors = self._nvfp4_factors(used & self._tensors.keys())
        # Scales of activations are not used.
        used |= {f"{name}.{kind}" for name in factors for kind in ("scale", "input_scale")}
        extra = [
            name
            for name in self._tensors
            if name not in used
            and not self._predicts(name)
            and not any(
                re.fullmatch(pattern, own)
                for own in self._own_names(name)
                for pattern in expected.ignored
            )
        ]
        if extra:
            raise ModelError(
                f"{self.path} holds {len(extra)} tensors that {expected.architecture} with this "
                f"metadata does not have: {shorten_names(extra)}."
            )
        elsewhere = Counter(map(self._stored_name, expected.elsewhere))
        places: dict[str, Place] = {}
        for stored, parts in sources.items():
            tensor, those = self._tensors[stored], list(parts.values())
            if EXPERT.search(those[0].name):
                places |= _expert_places(tensor, those, len(those) + elsewhere[stored])
            else:
                places |= _places(tensor, those)
        config, architecture = self.config, self._described.architecture
        queries = config.integer("num_attention_heads", default=1)
        heads = Heads(queries, config.integer("num_key_value_heads", default=queries))
        if architecture.tiled:
            names = ("num_key_heads", "num_value_heads", "value_head_dim")
            keys, values, size = (config.integer(f"linear_{name}") for name in names)
            tiled = config.flag("linear_tiled_values", False)
            heads = heads._replace(
                linear_keys=keys, linear_values=values, value_size=size, tiled_inputs=tiled
            )
        return GGUFTensors(self._headers, places, architecture, heads, factors)

    def _predicts(self, name: str) -> bool:
        """Return True for a tensor of a layer that predicts several tokens at once."""
        count, layer = self._described.num_predicting, re.match(r"blk\.(\d+)\.", name)
        layers = self.config.integer("num_hidden_layers")
        return layer is not None and layers <= int(layer[1]) < layers + count

    @cached_property
    def _modules(self) -> dict[str, list[str]]:
        """Modules of each name in the file."""
        modules: dict[str, list[str]] = {}
        for module, stored in self._names.items():
            modules.setdefault(stored, []).append(module)
        return modules

    def _own_names(self, name: str) -> list[str]:
        """Return the names in Hugging Face's form of a tensor of the file."""
        stored, _, kind = name.rpartition(".")
        prefix, match = "", re.fullmatch(r"blk\.(\d+)\.([\w.]+)", stored)
        if match is not None:
            prefix = f"{self._described.architecture.layers}{match[1]}."
            stored = match[2]
        own = [f"{module}.{kind}" for module in self._modules.get(stored, [])]
        return [prefix + name for name in own + self._modules.get(f"{stored}.{kind}", [])]

    def _block_types(self) -> dict[str, str]:
        """Return the block types of modules by their names in Hugging Face's form."""
        return {
            own.removesuffix(".weight"): block_type(tensor)
            for tensor in self._tensors.values()
            if tensor.type in STORED_BLOCKS and tensor.name.endswith(".weight")
            for name in self._own_names(tensor.name)
            for own in _names_of_experts(name, tensor)
        }

    def _nvfp4_factors(self, names: Set[str]) -> dict[str, float]:
        """Return the factor of each NVFP4 tensor among `names`, by names without .weight."""
        factors: dict[str, float] = {}
        for name in names:
            if self._tensors[name].type == "nvfp4":
                module = name.removesuffix(".weight")
                scale = self._tensors.get(f"{module}.scale")
                found = [1.0] if scale is None else self._factors(scale)
                if len(found) != 1:
                    raise ModelError(f"{self.path}: {module}.scale is not one number.")
                factors[module] = found[0]
        return factors

    @property
    def _rope_factors(self) -> list[str]:
        return [name for name in _ROPE_FACTORS if f"{name}.weight" in self._tensors]

    def _factors(self, tensor: GGUFTensor) -> list[float]:
        """Return the factors of wavelengths of a tensor.

        Raises:
            ModelError: they are not float32 numbers above 0 in one dimension.
        """
        header = next(header for header in self._headers if header.file == tensor.file)
        if tensor.type != "float32" or len(tensor.shape) != 1 or tensor.shape[0] > _MOST_FACTORS:
            raise ModelError(
                f"{tensor.file}: {tensor.name} {list(tensor.shape)} has type "
                f"{tensor.type.upper()}; it must be F32 and one row of at most {_MOST_FACTORS}."
            )
        found = np.frombuffer(header.data, np.float32, tensor.nbytes // 4, tensor.begin)
        if not (np.isfinite(found) & (found > 0)).all():
            raise ModelError(f"{tensor.file}: {tensor.name} has factors that are not above 0.")
        factors: list[float] = found.astype(np.float64).tolist()
        return factors


def is_factors(tensor: GGUFTensor) -> bool:
    """Return True if a tensor's numbers are a part of the description of the model."""
    of_rope = tensor.name.removesuffix(".weight") in _ROPE_FACTORS
    is_named = of_rope or tensor.name.endswith(".scale")
    return is_named and tensor.type == "float32" and tensor.nbytes <= 4 * _MOST_FACTORS


def _layer_numbers(header: GGUFHeader) -> dict[str, GGUFTensor]:
    """Return tensors with the numbers that the metadata has for each layer: those of xIELU."""
    tensors: dict[str, GGUFTensor] = {}
    start = np.frombuffer(header.data, np.uint8).ctypes.data
    for key in ("xielu.alpha_p", "xielu.alpha_n"):
        numbers = header.metadata.get(key)
        if isinstance(numbers, np.ndarray) and numbers.dtype == np.float32:
            begin = numbers.ctypes.data - start
            for layer in range(len(numbers)):
                name = f"blk.{layer}.{key}"
                at = begin + 4 * layer
                tensors[name] = GGUFTensor(header.file, name, "float32", (1,), at, 4)
    return tensors


def _names_of_experts(name: str, tensor: GGUFTensor) -> list[str]:
    """Return the names of all experts' tensors; those of another tensor are its own name."""
    if "*" not in name:
        return [name]
    return [name.replace("*", str(expert)) for expert in range(min(tensor.shape[0], _MOST_EXPERTS))]


def _places(tensor: GGUFTensor, sources: list[Source]) -> dict[str, Place]:
    """Return the rows of a stored tensor that belong to each of some tensors, in their order.

    Raises:
        ModelError: the shape or type does not match.
    """
    shape, dtype = stored_form(tensor)
    shapes = [s.shape[::-1] if s.transform == "transpose" else s.shape for s in sources]
    rows = [shape[0] for shape in shapes]
    required = (sum(rows), *shapes[0][1:])
    if len(shape) != len(required) and math.prod(shape) == math.prod(required):
        shape = required  # several tensors, one after the other, or other dimensions of size 1
    if shape != required:
        raise ModelError(
            f"{tensor.file}: {tensor.name} has shape {list(shape)}, but the metadata requires "
            f"{list(required)}."
        )
    places: dict[str, Place] = {}
    begin, row = tensor.begin, tensor.nbytes // sum(rows)
    for source, own in zip(sources, shapes, strict=True):
        if dtype not in source.dtypes:
            raise ModelError(
                f"{tensor.file}: {tensor.name} has type {tensor.type.upper()}; supported here: "
                f"{', '.join(source.dtypes)}."
            )
        places[source.name] = Place(tensor, begin, own[0] * row, own, dtype)
        begin += own[0] * row
    return places


def _expert_places(tensor: GGUFTensor, sources: list[Source], count: int) -> dict[str, Place]:
    """Return the part of a stored tensor that belongs to each of some experts.

    Args:
        tensor: the tensor of all experts.
        sources: tensors of single experts.
        count: number of the tensors of all experts.

    Raises:
        ModelError: the shape or type does not match.
    """
    shape, dtype = stored_form(tensor)
    ends = list(dict.fromkeys(EXPERT.split(source.name)[-1] for source in sources))
    count //= len(ends)  # gate and up may be one tensor
    required = count, len(ends) * sources[0].shape[0], *sources[0].shape[1:]
    if shape != required:
        raise ModelError(
            f"{tensor.file}: {tensor.name} has shape {list(shape)}, but the metadata requires "
            f"{list(required)}."
        )
    if dtype not in sources[0].dtypes:
        raise ModelError(
            f"{tensor.file}: {tensor.name} has type {tensor.type.upper()}; supported here: "
            f"{', '.join(sources[0].dtypes)}."
        )
    size, places = tensor.nbytes // count // len(ends), {}
    for source in sources:
        found = EXPERT.search(source.name)
        assert found is not None
        end = ends.index(source.name[found.end() :])
        begin = tensor.begin + (int(found[1]) * len(ends) + end) * size
        places[source.name] = Place(tensor, begin, size, source.shape, dtype)
    return places


class GGUFTensors:
    """`Tensors` of GGUF files, with the converter's changes undone.

    Args:
        headers: the files.
        places: places of tensors by their names in Hugging Face's form.
        architecture: the architecture.
        heads: numbers of heads.
        factors: factors of the NVFP4 tensors, by their names without .weight.
    """

    def __init__(
        self,
        headers: list[GGUFHeader],
        places: Mapping[str, Place],
        architecture: Architecture,
        heads: Heads,
        factors: Mapping[str, float],
    ) -> None:
        self._data = {header.file: header.data for header in headers}
        self._places, self._architecture = places, architecture
        self._heads, self._permuted = heads, {"q_proj": heads.queries, "k_proj": heads.keys}
        self._nvfp4_factors = factors

    def read(self, source: Source) -> HostTensor:
        """Return a view of the mapped file, or a changed copy."""
        stored, begin, nbytes, shape, dtype = self._places[source.name]
        data = np.frombuffer(self._data[stored.file], np.uint8, nbytes, begin)
        architecture = self._architecture
        module = source.name.split(".")[-2]
        if architecture.permuted and module in self._permuted:
            rows, heads = shape[0], self._permuted[module]
            if rows % (2 * heads):
                raise ModelError(f"{stored.file}: {stored.name} has {rows} rows for {heads} heads.")
            halves = data.reshape(heads, rows // heads // 2, 2, -1)
            data = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(-1)
        if source.transform == "by_group" and not source.name.endswith(GROUPED):
            data = _by_group(data.reshape(shape[0], -1), source).reshape(-1)
        if self._heads.linear_values > self._heads.linear_keys:
            data = self._by_key_head(source.name, data, shape, dtype)
        if source.index is not None:
            data, shape = data.reshape(shape[0], -1)[source.index], shape[1:]
        if stored.type in REPACKED:
            data = repack(data, stored.type)
        factor = self._nvfp4_factors.get(stored.name.removesuffix(".weight"))
        if factor is not None:
            blocks = data.reshape(-1, BLOCK_TYPES["nvfp4"].nbytes)
            blocks[:, :4] = np.array([factor], np.float32).view(np.uint8)
        if architecture.norm_shift and source.name.endswith(architecture.shifted):
            floats = from_numpy(data).view(dtype).numpy().astype(np.float32)
            return from_numpy((floats - architecture.norm_shift).reshape(shape))
        if source.name.endswith("A_log"):  # the file has -exp(A_log)
            floats = from_numpy(data).view(dtype).numpy().astype(np.float32)
            if not (floats < 0).all():
                raise ModelError(f"{stored.file}: {stored.name} has numbers that are not below 0.")
            return from_numpy(np.log(-floats).reshape(shape))
        tensor: HostTensor = from_numpy(data).view(dtype).view(shape)
        return tensor.T if source.transform == "transpose" else tensor

    def _by_key_head(
        self, name: str, data: NDArray[np.uint8], shape: tuple[int, ...], dtype: str
    ) -> NDArray[np.uint8]:
        """Return the bytes of a tensor with the heads of values of each head of keys in turn."""
        rows, columns = tiled_order(name, shape, self._heads)
        if rows is not None:
            data = data.reshape(shape[0], -1)[rows].reshape(-1)
        elif columns is not None and not self._heads.tiled_inputs:
            data = data.reshape(*shape, DTYPE_NBYTES[dtype])[:, columns].reshape(-1)
        return data

    def done(self, tensor: HostTensor) -> None:
        """Let the system drop the tensor's pages of the mapped file."""
        for data in self._data.values():
            release(data, tensor)


def release(data: memoryview, tensor: HostTensor) -> None:
    """Let the system drop the pages of a mapped file that a tensor views; others stay."""
    whole = np.frombuffer(data, np.uint8)
    if 0 <= tensor.data_ptr() - whole.ctypes.data < whole.nbytes:
        _native.release_pages(tensor.data_ptr(), tensor.nbytes)


def tiled_order(
    name: str, shape: tuple[int, ...], heads: Heads
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Return the file's rows, and its columns, in the order of the model; see `Architecture.tiled`.

    Args:
        name: the tensor's name in Hugging Face's form.
        shape: its shape.
        heads: numbers of heads.

    Returns:
        Row and column of the file at each place of the model; None: the order is the same.
    """

    def order(begin: int, end: int) -> NDArray[np.int64]:
        groups = heads.linear_values // heads.linear_keys, heads.linear_keys
        return np.arange(begin, end).reshape(*groups, -1).swapaxes(0, 1).ravel()

    if name.endswith(_VALUES):
        return order(0, shape[0]), None
    if name.endswith(_QUERIES_KEYS_VALUES):
        first = shape[0] - heads.linear_values * heads.value_size
        return np.concatenate([np.arange(first), order(first, shape[0])]), None
    if name.endswith(f"{_OUTPUTS}.weight"):
        return None, order(0, shape[1])
    return None, None


def _by_group(rows: NDArray[np.uint8], source: Source) -> NDArray[np.uint8]:
    """Return the rows in the order of groups of heads; the file has all queries first."""
    grouped = np.empty_like(rows)
    grouped[source.row_order(len(rows))] = rows
    return grouped


def block_type(tensor: GGUFTensor) -> str:
    """Return the type of the blocks that `GGUFTensors.read` returns."""
    repacked = REPACKED.get(tensor.type)
    return tensor.type if repacked is None else repacked.block_type


def stored_form(tensor: GGUFTensor) -> tuple[tuple[int, ...], str]:
    """Return the shape and the type that `GGUFTensors.read` gives a tensor."""
    size = BLOCK_TYPES.get(block_type(tensor))
    if size is None:
        return tensor.shape, tensor.type
    return (*tensor.shape[:-1], tensor.shape[-1] // size.numbers * size.nbytes), "uint8"
