"""The native operations of LoRA adapters, see csrc/lora.h."""

from __future__ import annotations

from collections.abc import Sequence

from octavo._native import kernels
from octavo.kernels.lora import LANES, PANEL, LoraTable, LoraWeight
from octavo.kernels.native_base import DTYPE_CODES, NativeMemory, check_rows
from octavo.kernels.sizes import lora_nbytes, lora_panels
from octavo.system.tensor import HostTensor, Tensor, empty


class NativeLoraOps(NativeMemory):
    """The operations of `Ops` with LoRA adapters."""

    def pack_lora(
        self, a: HostTensor, b: HostTensor, scale: float, dtype: str, out: Tensor | None = None
    ) -> LoraWeight:
        """Pack both matrices in panels of rows."""
        (rank, k), n = a.shape, b.shape[0]
        assert b.shape == (n, rank)
        nbytes = lora_nbytes(rank, n, k, dtype)
        data = empty(nbytes, dtype="uint8") if out is None else out
        assert data.nbytes == nbytes
        assert data.data_ptr() % 64 == 0
        size_a, _ = lora_panels(rank, n, k, dtype)
        parts = data[:size_a], data[size_a:]
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
        return LoraWeight(*parts, rank, n, k, scale)

    def put_lora_tables(self, tables: Sequence[LoraTable]) -> None:
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
