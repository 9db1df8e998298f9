"""Blocks of GGUF: codes, scales and minima as the file has them; 8-bit activations.

Activations have one scale for each token and 32 inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from octavo.checkpoints.base import Source
from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ConfigError, ModelError
from octavo.quantization.base import IntArray, Part, WeightForm, select_rows
from octavo.quantization.packed import PackedBlocks
from octavo.system.block_types import BLOCK_TYPES

if TYPE_CHECKING:
    from octavo.system.tensor import HostTensor


@dataclass(frozen=True)
class Blocks(PackedBlocks):
    """Weights in blocks of one type, a key of `BLOCK_TYPES`."""

    block_type: str

    num_tensors: ClassVar[int] = 1
    max_inputs: ClassVar[int | None] = None

    @property
    def name(self) -> str:
        """Implement `WeightForm`."""
        return f"gguf-{self.block_type}"

    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        """Return the tensor of raw blocks: uint8 [rows, bytes of a row].

        Raises:
            ModelError: blocks do not divide the inputs.
        """
        size = BLOCK_TYPES[self.block_type]
        if inputs % size.numbers:
            raise ModelError(
                f"{module}.weight has {inputs} inputs, which blocks of {size.numbers} numbers "
                f"({self.block_type.upper()}) do not divide. Download the model again."
            )
        shape = rows, inputs // size.numbers * size.nbytes
        return (Source(f"{module}.weight", shape, dtypes=("uint8",)),)

    def cut(
        self,
        tensors: Sequence[HostTensor],
        rows: Sequence[slice | IntArray],
        columns: tuple[int, int] | None,
    ) -> list[Part]:
        """Implement `WeightForm`.

        Raises:
            ConfigError: the columns divide a block.
        """
        (tensor,) = tensors
        if columns is not None:
            size = BLOCK_TYPES[self.block_type]
            if any(column % size.numbers for column in columns):
                raise ConfigError(
                    f"tensor_parallel_size divides the inputs of a weight at {columns[0]} and "
                    f"{columns[1]}, inside its blocks of {size.numbers} numbers "
                    f"({self.block_type}); lower it, or choose a file with smaller blocks (Q8_0)."
                )
            begin, end = (column // size.numbers * size.nbytes for column in columns)
            tensor = tensor[:, begin:end]
        return select_rows(tensor, rows)


def read_gguf(config: ConfigJson) -> Mapping[str, WeightForm]:
    """Return the forms of the modules of a GGUF file.

    Args:
        config: the description that `checkpoints/gguf` makes: `types` maps the modules whose
            weights are blocks to their block types.

    Raises:
        ModelError: another program has written the description.
    """
    forms = {block_type: Blocks(block_type) for block_type in BLOCK_TYPES}
    types = config.get("types")
    if not isinstance(types, dict) or not set(map(str, types.values())) <= forms.keys():
        raise config.error("types", "it must map modules to block types, as GGUF files do")
    return {name: forms[str(block_type)] for name, block_type in types.items()}
