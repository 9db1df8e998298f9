"""Interface of the operations on adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from octavo.kernels.lora import LoraTable, LoraWeight
from octavo.kernels.replaced import ReplacedTable, ReplacedWeight
from octavo.system.tensor import HostTensor, Tensor


class LoraOps(Protocol):
    """Operations on adapters; see `Ops`."""

    def pack_lora(
        self,
        a: HostTensor,
        b: HostTensor,
        scale: float,
        dtype: str,
        out: Tensor | None = None,
        affine: HostTensor | None = None,
    ) -> LoraWeight:
        """Pack an adapter's matrices A [rank, K] and B [N, rank] for `add_lora`.

        Args:
            a: A.
            b: B.
            scale: factor of the product.
            dtype: type of the result.
            out: memory for the result: uint8 [`kernels.sizes.lora_nbytes`].
            affine: gains and offsets of the outputs, float32 [2, N]; None: none.
        """
        ...

    def put_adapter_tables(self, tables: Sequence[LoraTable | ReplacedTable]) -> None:
        """Copy all tables of a model to the device, after the steps that were launched before.

        The operations of adapters read the copies. On a CPU nothing is copied.
        """
        ...

    def add_lora(self, out: Tensor, x: Tensor, slots: Tensor, table: LoraTable) -> None:
        """Add each row's scale * (x A^T) B^T to the results of a linear layer: out [T, N].

        With gains and offsets, the sum y becomes gain * y + offset (Liu et al., "DoRA:
        Weight-Decomposed Low-Rank Adaptation").
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models"; Chen et al., "Punica:
        Multi-Tenant LoRA Serving". The product is a float32 number, and the sum is rounded once.
        Rows without an adapter keep their bits.

        Args:
            out: results of the type of x or float32, in rows of any stride; changed in place.
            x: inputs [T, K].
            slots: int32 [T], the slot of each row's adapter; -1: none.
            table: the adapters.
        """
        ...

    def add_lora_embedding(self, out: Tensor, ids: Tensor, slots: Tensor, table: LoraTable) -> None:
        """Add each row's scale * A^T[id] B^T to rows of an embedding: out [T, N].

        The product is a float32 number, and the sum is rounded once. Rows without an adapter, and
        those whose id is outside of the table, keep their bits.

        Args:
            out: embeddings of the model's type, in rows of any stride; changed in place.
            ids: int64 [T], tokens.
            slots: int32 [T], the slot of each row's adapter; -1: none.
            table: the adapters, of one module with a token for each input.
        """
        ...

    def pack_replaced(
        self,
        weight: HostTensor,
        bias: HostTensor | None,
        dtype: str,
        table: ReplacedTable,
        out: Tensor | None = None,
    ) -> ReplacedWeight:
        """Pack an adapter's layer for `replace_linear` or `replace_embedding`.

        Args:
            weight: weight, of the table's shape.
            bias: bias, if the layer has one.
            dtype: type of the result.
            table: the layer that is replaced.
            out: memory for the result: uint8 [`table.nbytes`].
        """
        ...

    def replace_linear(self, out: Tensor, x: Tensor, slots: Tensor, table: ReplacedTable) -> None:
        """Set rows of a linear layer's results to x W^T + b of each row's adapter: out [T, N].

        The products are added in float32, in the order of the inputs. Other rows keep their bits.

        Args:
            out: results of the type of x or float32, in rows of any stride; changed in place.
            x: inputs [T, K].
            slots: int32 [T], the slot of each row's adapter; -1: none.
            table: the adapters' layers.
        """
        ...

    def replace_embedding(
        self, out: Tensor, ids: Tensor, slots: Tensor, table: ReplacedTable
    ) -> None:
        """Set rows of an embedding to those of each row's adapter: out [T, N].

        Rows of other adapters, and those whose id is outside of the table, keep their bits.

        Args:
            out: embeddings of the model's type, in rows of any stride; changed in place.
            ids: int64 [T], tokens.
            slots: int32 [T], the slot of each row's adapter; -1: none.
            table: the adapters' tables.
        """
        ...
