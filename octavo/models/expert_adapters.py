"""Adapters of fused experts: one tensor of a checkpoint has the weights of all experts of a layer.

PEFT trains them as `target_parameters`. The factors of all experts are then those of the module
that has the tensors: A [experts * rank, inputs], expert by expert, and B [outputs, rank * experts],
in which the columns of one expert are `experts` apart. If the module has two such tensors, the
factors of one of them have `.base_layer` in their name:
https://huggingface.co/docs/peft/package_reference/lora (ParamWrapper)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from octavo.checkpoints.adapter import AdapterFile, Factors
from octavo.checkpoints.base import Source, shorten_names
from octavo.checkpoints.model_files import printable
from octavo.errors import AdapterError
from octavo.models.weights import Weight

_INNER = ".base_layer"
_EXPERT = re.compile(r"(.+)\.\d+\.[^.]+\.weight")


@dataclass(frozen=True)
class FusedPart:
    """Module of one expert, and its part of the fused weight."""

    module: str
    expert: int
    begin: int
    end: int


@dataclass
class FusedExperts:
    """One product of all experts of a mixture, as newer transformers have it: one tensor."""

    name: str
    """Name of the tensor, such as model.layers.0.mlp.experts.gate_up_proj."""
    experts: int
    inputs: int
    turned: bool
    """True if the tensor is [experts, inputs, outputs]."""
    outputs: int = 0
    parts: list[FusedPart] = field(default_factory=list)
    """Modules of the experts that the rank computes."""

    def is_swapped(self, file: AdapterFile) -> bool:
        """Return True if the factors are usually those of the transposed weights."""
        return file.swaps_experts and not self.turned

    def orientations(self, factors: Factors) -> list[bool]:
        """Return in which ways the factors fit: False for B A, True for its transpose."""
        if factors.rank % self.experts:
            return []
        shape, found = (self.outputs, self.inputs), (factors.b.shape[0], factors.a.shape[1])
        return [turn for turn, fits in ((False, shape), (True, shape[::-1])) if found == fits]


@dataclass(frozen=True)
class FusedMatch:
    """Fused experts that an adapter changes."""

    stored: str
    """Module in the adapter's file."""
    fused: FusedExperts | None = None
    """The experts; None: they belong to another stage, which checks the factors."""
    swapped: bool = False
    """True if the change is the transpose of B A."""

    def split(
        self, a: NDArray[Any], b: NDArray[Any]
    ) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
        """Yield each module of the rank's experts, with its A [rank, inputs] and B [outputs, rank].

        Args:
            a: A of the file.
            b: B of the file.
        """
        if self.fused is None:
            return
        experts, columns = self.fused.experts, b.T
        rank = len(a) // experts
        for part in self.fused.parts:
            own = a[part.expert * rank : (part.expert + 1) * rank]
            others = columns[part.expert :: experts]
            first, second = (others, own) if self.swapped else (own, others)
            yield part.module, first, second.T[part.begin : part.end]


class AllFusedExperts:
    """The fused experts of a model."""

    def __init__(self) -> None:
        self._by_block: dict[tuple[str, str], FusedExperts] = {}
        self._by_module: dict[str, list[FusedExperts]] = {}

    def add(self, source: Source, weight: Weight, module: str, outputs: int, inputs: int) -> None:
        """Add the next module of an expert's weight.

        Args:
            source: the module in the checkpoint.
            weight: the expert's weight.
            module: the expert's name of the module.
            outputs: outputs of the module, of all ranks.
            inputs: inputs of the module, of all ranks.
        """
        assert weight.expert is not None
        expert, up = weight.expert, weight.name.endswith(".up.weight")
        key = expert.block, "up" if up else "down"
        if key not in self._by_block:
            container = container_of(source.name)
            turned = source.transform in ("transpose", "swap")
            name = f"{container}.{key[1]}_proj"
            fused = FusedExperts(name, expert.count, inputs, turned)
            self._by_block[key] = fused
            self._by_module.setdefault(container, []).append(fused)
            first = self._by_block[expert.block, "up"]
            if not up and first.outputs == 2 * inputs:
                first.name = f"{container}.gate_up_proj"
        fused = self._by_block[key]
        begin = 0
        if fused.parts and fused.parts[-1].expert == expert.index:
            begin = fused.parts[-1].end
        fused.parts.append(FusedPart(module, expert.index, begin, begin + outputs))
        fused.outputs = begin + outputs

    @property
    def containers(self) -> list[str]:
        """Modules that have fused experts."""
        return list(self._by_module)

    @property
    def modules(self) -> set[str]:
        """Modules of single experts that are parts of fused ones."""
        return {part.module for fused in self._by_block.values() for part in fused.parts}

    def match(self, module: str, stored: str, file: AdapterFile, max_rank: int) -> FusedMatch:
        """Return the fused experts that a module in an adapter's file changes.

        Args:
            module: the module.
            stored: its name in the file.
            file: the adapter.
            max_rank: largest rank that an adapter may have for an expert.

        Raises:
            AdapterError: the shapes are not those of the model, or those of both products; or the
                rank is too large.
        """
        factors, found = file.factors[stored], self._by_module.get(module)
        if found is None:
            return FusedMatch(stored)
        fits = [(fused, turn) for fused in found for turn in fused.orientations(factors)]
        usual = [(fused, turn) for fused, turn in fits if turn == fused.is_swapped(file)]
        fits = usual or fits
        if not fits:
            each = ", ".join(
                f"{it.name} has {it.experts} experts [{it.outputs}, {it.inputs}]" for it in found
            )
            raise AdapterError(
                f"{file.file}: the factors of {printable(stored)} are A {list(factors.a.shape)} "
                f"and B {list(factors.b.shape)}, and {each}. Load an adapter of this model."
            )
        if len({fused.name for fused, _ in fits}) > 1:
            raise AdapterError(
                f"{file.file}: the factors of {printable(stored)} fit both products of the "
                "experts, which have one shape; train the adapter with the names of each expert's "
                "modules."
            )
        fused, swapped = fits[0]
        if factors.rank // fused.experts > max_rank:
            raise AdapterError(
                f"{file.file}: {printable(stored)} has rank {factors.rank // fused.experts} for "
                f"each expert, and max_lora_rank={max_rank}; raise max_lora_rank."
            )
        return FusedMatch(stored, fused, swapped)


def bare_module(stored: str) -> tuple[str, str]:
    """Return the name of a module in an adapter's file, and the rest: PEFT's `.base_layer`."""
    bare = stored
    while bare.endswith(_INNER):
        bare = bare.removesuffix(_INNER)
    return bare, stored[len(bare) :]


def container_of(tensor: str) -> str:
    """Return the module with fused experts whose part a tensor of a checkpoint may be."""
    match = _EXPERT.fullmatch(tensor)
    if match is not None:
        return match[1]
    container = tensor.removesuffix(".weight").rpartition(".")[0]
    return container if container.endswith("experts") else f"{container}.experts"


def check_single(file: AdapterFile, matches: Mapping[str, FusedMatch], modules: set[str]) -> None:
    """Check that nothing changes an expert twice.

    Raises:
        AdapterError: two modules in the file change one expert.
    """
    seen = set(modules)
    for match in matches.values():
        own = {part.module for part in match.fused.parts} if match.fused else set()
        if own & seen:
            raise AdapterError(
                f"{file.file} changes {shorten_names(sorted(own & seen))} twice, also with "
                f"{printable(match.stored)}; save the adapter again."
            )
        seen |= own
