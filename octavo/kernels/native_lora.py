"""The native operations of LoRA adapters, see csrc/lora.h."""

from __future__ import annotations

from collections.abc import Sequence

from octavo._native import kernels
from octavo.kernels.lora import LANES, LINE, PANEL, LoraTable, LoraWeight, affine_panels
from octavo.kernels.native_base import DTYPE_CODES, NativeMemory, check_rows
from octavo.kernels.replaced import ReplacedTable, ReplacedWeight
from octavo.kernels.sizes import MAX_LORA_RANK, lora_nbytes, lora_panels
from octavo.system.tensor import HostTensor, Tensor, dense, empty


class NativeLoraOps(NativeMemory):
    """The operations of `Ops` with LoRA adapters."""

    def pack_lora(
        self,
        a: HostTensor,
        b: HostTensor,
        scale: float,
        dtype: str,
        out: Tensor | None = None,
        affine: HostTensor | None = None,
    ) -> LoraWeight:
        """Pack both matrices in panels of rows."""
        (rank, k), n = a.shape, b.shape[0]
        assert b.shape == (n, rank)
        nbytes = lora_nbytes(rank, n, k, dtype, affine=affine is not None)
        data = empty(nbytes, dtype="uint8") if out is None else out
        assert data.nbytes == nbytes
        assert data.data_ptr() % 64 == 0
        size_a, size_b = lora_panels(rank, n, k, dtype)
        parts = data[:size_a], data[size_a : size_a + size_b]
        for matrix, packed, panel in ((a, parts[0], LANES), (b, parts[1], PANEL)):
            check_rows(matrix)
            kernels.pack_lora(
                src=matrix.data_ptr(),
                src_stride=matrix.stride(0),
                dst=packed.data_ptr(),
                rows=matrix.shape[0],
                cols=matrix.shape[1],
                panel=panel,
                src_dtype=DTYPE_CODES[matrix.dtype],
                dtype=DTYPE_CODES[dtype],
            )
        if affine is None:
            return LoraWeight(*parts, rank, n, k, scale)
        panels = affine_panels(affine.numpy())
        packed_affine = data[size_a + size_b :].view("float32").view(panels.shape)
        packed_affine.numpy()[...] = panels
        return LoraWeight(*parts, rank, n, k, scale, packed_affine)

    def lora_norms(self, w: HostTensor, a: HostTensor, b: HostTensor, out: HostTensor) -> None:
        """Compute the norms of the rows of w + b a, for DoRA: float32 [rows].

        A norm does not depend on the other rows. The calling thread works alone.

        Args:
            w: rows of a weight: float32, float16 or bfloat16 [rows, K].
            a: A: float32 [rank, K].
            b: rows of B, times the scale: float32 [rows, rank].
            out: receives the norms.
        """
        (rows, k), rank = w.shape, a.shape[0]
        check_rows(w)
        assert a.dtype == b.dtype == out.dtype == "float32"
        assert (a.shape, b.shape, out.shape) == ((rank, k), (rows, rank), (rows,))
        assert a.is_contiguous()
        assert b.is_contiguous()
        assert out.is_contiguous()
        kernels.lora_norms(
            w=w.data_ptr(),
            w_stride=w.stride(0),
            a=a.data_ptr(),
            b=b.data_ptr(),
            out=out.data_ptr(),
            rows=rows,
            k=k,
            rank=rank,
            dtype=DTYPE_CODES[w.dtype],
        )

    def put_adapter_tables(self, tables: Sequence[LoraTable | ReplacedTable]) -> None:
        """Do nothing: the kernel reads the tables themselves."""

    def add_lora(self, out: Tensor, x: Tensor, slots: Tensor, table: LoraTable) -> None:
        """Read the table when the kernel runs."""
        check_rows(x)
        check_rows(out)
        rows = x.shape[0]
        assert x.shape[1] == table.inputs
        assert out.shape == (rows, table.bounds[-1])
        assert out.dtype in (x.dtype, "float32")
        assert slots.dtype == "int32"
        assert slots.shape == (rows,)
        assert slots.is_contiguous()
        kernels.add_lora(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            slots=slots.data_ptr(),
            slices=table.slices.ctypes.data,
            bounds=table.bounds.ctypes.data,
            rows=rows,
            k=table.inputs,
            num_slices=table.slices.shape[1],
            max_rank=table.max_rank,
            dtype=DTYPE_CODES[x.dtype],
            out_dtype=DTYPE_CODES[out.dtype],
        )

    def add_lora_embedding(self, out: Tensor, ids: Tensor, slots: Tensor, table: LoraTable) -> None:
        """Read the table when the kernel runs."""
        check_rows(out)
        (rows,) = ids.shape
        assert table.max_rank <= MAX_LORA_RANK
        assert out.shape == (rows, table.bounds[-1])
        assert ids.dtype == "int64"
        assert slots.dtype == "int32"
        assert slots.shape == (rows,)
        assert ids.is_contiguous()
        assert slots.is_contiguous()
        kernels.add_lora_embedding(
            ids=ids.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            slots=slots.data_ptr(),
            slices=table.slices.ctypes.data,
            rows=rows,
            vocab=table.inputs,
            n=out.shape[1],
            max_rank=table.max_rank,
            dtype=DTYPE_CODES[out.dtype],
        )

    def pack_replaced(
        self,
        weight: HostTensor,
        bias: HostTensor | None,
        dtype: str,
        table: ReplacedTable,
        out: Tensor | None = None,
    ) -> ReplacedWeight:
        """Pack a linear layer's weight in panels of rows."""
        assert weight.shape == table.shape
        assert (bias is not None) == table.has_bias
        nbytes, of_bias = table.sizes(dtype)
        data = empty(table.nbytes(dtype), dtype="uint8") if out is None else out
        assert data.nbytes == table.nbytes(dtype)
        assert data.data_ptr() % 64 == 0
        packed, own = data[:nbytes], None
        if bias is not None:
            begin = -(-nbytes // LINE) * LINE
            own = data[begin : begin + of_bias].view(dtype)
            _copy(own, bias)
        if table.is_embedding:
            rows = packed.view(dtype).view(*table.shape)
            _copy(rows, weight)
            return ReplacedWeight(rows, own)
        check_rows(weight)
        kernels.pack_lora(
            src=weight.data_ptr(),
            src_stride=weight.stride(0),
            dst=packed.data_ptr(),
            rows=weight.shape[0],
            cols=weight.shape[1],
            panel=PANEL,
            src_dtype=DTYPE_CODES[weight.dtype],
            dtype=DTYPE_CODES[dtype],
        )
        return ReplacedWeight(packed, own)

    def replace_linear(self, out: Tensor, x: Tensor, slots: Tensor, table: ReplacedTable) -> None:
        """Read the table when the kernel runs."""
        check_rows(x)
        check_rows(out)
        rows, (n, k) = x.shape[0], table.shape
        assert x.shape[1] == k
        assert out.shape == (rows, n)
        assert out.dtype in (x.dtype, "float32")
        assert slots.dtype == "int32"
        assert slots.shape == (rows,)
        assert slots.is_contiguous()
        kernels.replace_linear(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            slots=slots.data_ptr(),
            layers=table.addresses.ctypes.data,
            rows=rows,
            k=k,
            n=n,
            dtype=DTYPE_CODES[x.dtype],
            out_dtype=DTYPE_CODES[out.dtype],
        )

    def replace_embedding(
        self, out: Tensor, ids: Tensor, slots: Tensor, table: ReplacedTable
    ) -> None:
        """Read the table when the kernel runs."""
        check_rows(out)
        (rows,), (vocab, size) = ids.shape, table.shape
        assert out.shape == (rows, size)
        assert ids.dtype == "int64"
        assert slots.dtype == "int32"
        assert slots.shape == (rows,)
        assert ids.is_contiguous()
        assert slots.is_contiguous()
        kernels.replace_embedding(
            ids=ids.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            slots=slots.data_ptr(),
            layers=table.addresses.ctypes.data,
            rows=rows,
            vocab=vocab,
            n=size,
            dtype=DTYPE_CODES[out.dtype],
        )


def _copy(out: Tensor, numbers: HostTensor) -> None:
    """Copy numbers of any type to a dense tensor of the same shape."""
    same = dense(numbers, out.dtype)
    out.view("uint8").numpy()[:] = same.view("uint8").numpy()
