"""Adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them.

Format: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-adapter.cpp
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.adapter import MERGE, Factors, finite_scale, identity_of, pair_factors
from octavo.checkpoints.base import FLOATS, Expected, Source
from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.gguf.architectures import ARCHITECTURES, EXPERT, stored_name
from octavo.checkpoints.gguf.file import GROUPED
from octavo.checkpoints.gguf.header import GGUFHeader
from octavo.checkpoints.mapped_file import StoredTensor
from octavo.checkpoints.model_files import printable
from octavo.errors import AdapterError
from octavo.system.tensor import itemsize

_FACTOR = re.compile(r"(.+)\.weight\.lora_([ab])")
_EMBEDDING = "token_embd"
_EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps")
"""Modules whose factors are those of all experts of a layer."""
_MOST_EXPERTS = 4096
_MOST_FACTORS = 2**18
"""Most factors of a file, of which one tensor may have those of many experts."""
_TOKENS = "adapter.alora.invocation_tokens"


def is_gguf_adapter(path: Path) -> bool:
    """Return True for a GGUF file that says that it is an adapter.

    Raises:
        ModelError: it is a damaged GGUF file.
    """
    if path.suffix != ".gguf" or not path.is_file():
        return False
    return GGUFHeader(path).metadata.get("general.type") == "adapter"


class GGUFAdapter:
    """`AdapterFile` in GGUF.

    Args:
        path: the file.

    Raises:
        AdapterError: the adapter is of a kind that is not supported.
        ModelError: the file is damaged.
    """

    trained: Mapping[str, Mapping[str, StoredTensor]] = MappingProxyType({})
    copies: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    settings = ""
    swaps_experts = False

    def __init__(self, path: Path) -> None:
        self.path = self.file = path
        self.identity = identity_of(path)
        header = GGUFHeader(path, is_mapped=False)
        metadata = header.metadata
        for key, required in (("general.type", "adapter"), ("adapter.type", "lora")):
            if metadata.get(key) != required:
                raise AdapterError(
                    f"{path}: {key}={printable(str(metadata.get(key)))}; it must be {required}. "
                    "Name the GGUF file of a LoRA."
                )
        tokens = metadata.get(_TOKENS)
        listed = {_TOKENS: tokens.tolist() if isinstance(tokens, np.ndarray) else tokens}
        self.invocation_tokens = ConfigJson(listed, str(path)).token_ids(_TOKENS)
        self.kind = "activated LoRA" if self.invocation_tokens else "LoRA"
        architecture = metadata.get("general.architecture")
        known = ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
        if any("_exps." in name or "ffn_gate_inp." in name for name in header.tensors):
            known = ARCHITECTURES.get(f"{architecture} with experts", known)
        if known is None or known.tiled:
            raise AdapterError(
                f"{path}: general.architecture={printable(str(architecture))} is not supported for "
                "adapters in GGUF; use the adapter's folder in PEFT's form."
            )
        self._architecture = known
        self.naming = f"GGUF {architecture}"
        alpha = metadata.get("adapter.lora.alpha", 0.0)
        if type(alpha) not in (int, float) or not np.isfinite(alpha):
            raise AdapterError(
                f"{path}: adapter.lora.alpha={printable(str(alpha))} is not a finite number."
            )
        self._alpha = float(alpha)
        base = metadata.get("general.base_model.0.repo_url") or metadata.get(
            "general.base_model.0.name"
        )
        self.base = base if isinstance(base, str) and base else None
        self.factors: Mapping[str, Factors] = self._read_factors(header)

    def _read_factors(self, header: GGUFHeader) -> dict[str, Factors]:
        found: dict[str, dict[str, StoredTensor]] = {}
        count = 0
        for name, tensor in header.tensors.items():
            match = _FACTOR.fullmatch(name)
            if match is None:
                raise AdapterError(
                    f"{self.path}: {printable(name)} is not a factor of LoRA. Trained modules are "
                    f"not supported: {MERGE}."
                )
            if tensor.type not in FLOATS:
                raise AdapterError(
                    f"{self.path}: {printable(name)} has type {tensor.type.upper()}, and factors "
                    "must be floats; convert the adapter with --outtype f16."
                )
            stored = StoredTensor(self.path, tensor.shape, tensor.type, tensor.begin)
            if match[1] == _EMBEDDING and match[2] == "a" and len(tensor.shape) == 2:
                stored = stored.transposed  # [tokens, rank], as llama.cpp gathers rows
            for module, part in self._parts(match[1], stored):
                if (count := count + 1) > _MOST_FACTORS:
                    raise AdapterError(
                        f"{self.path} has more than {_MOST_FACTORS} factors; download the adapter "
                        "again."
                    )
                found.setdefault(module, {})[match[2].upper()] = part
        if not found:
            raise AdapterError(f"{self.path} has no tensors; convert the adapter again.")
        return pair_factors(self.path, found, {_EMBEDDING})

    def _parts(self, module: str, stored: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
        """Yield a module with its factor, or each expert of a module with its own.

        A of all experts is [experts, rank, inputs], and B is [experts, outputs, rank].

        Raises:
            AdapterError: the factor does not have as many dimensions as such a module.
        """
        experts = _EXPERTS.fullmatch(module) is not None
        if len(stored.shape) != 2 + experts or (experts and stored.shape[0] > _MOST_EXPERTS):
            wanted = f"3 dimensions, at most {_MOST_EXPERTS} experts" if experts else "2 dimensions"
            raise AdapterError(
                f"{self.path}: a factor of {printable(module)} is {list(stored.shape)}, and it "
                f"must have {wanted}; use the adapter's folder in PEFT's form."
            )
        if not experts:
            yield module, stored
            return
        shape = stored.shape[1:]
        nbytes = math.prod(shape) * itemsize(stored.dtype)
        for expert in range(stored.shape[0]):
            begin = stored.begin + expert * nbytes
            yield f"{module}.{expert}", replace(stored, shape=shape, begin=begin)

    def scale(self, module: str, parameter: str | None = None, experts: int = 1) -> float:
        """Implement `AdapterFile`, as llama.cpp computes it: without alpha, the factor is 1."""
        scale = self._alpha / self.factors[module].rank if self._alpha else 1.0
        return finite_scale(scale, self.path)

    def names(self, module: str, expected: Expected) -> list[str]:
        """Implement `AdapterFile`."""
        known = self._architecture
        name = stored_name(f"{module}.weight", known.names, known.layers)
        if name is None:
            return []
        stored, expert = name.removesuffix(".weight"), EXPERT.search(module)
        return [stored if expert is None else f"{stored}.{expert[1]}"]

    def row_order(self, source: Source, rows: int, head_size: int) -> NDArray[np.int64] | None:
        """Implement `AdapterFile`: undo the converter's changes, as `GGUFTensors.read` does."""
        permutes = source.name.endswith(("q_proj.weight", "k_proj.weight"))
        if self._architecture.permuted and permutes:
            if head_size == 0 or rows % head_size or head_size % 2:
                raise AdapterError(
                    f"{self.path}: {source.name} has {rows} rows for heads of {head_size}; the "
                    "adapter belongs to another model."
                )
            pairs = np.arange(rows).reshape(rows // head_size, head_size // 2, 2)
            return pairs.swapaxes(1, 2).ravel()
        if source.transform == "by_group" and not source.name.endswith(GROUPED):
            return np.argsort(source.row_order(rows))
        return None
