"""Row buffers of a group: each rank fills its own columns, then all read whole rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from octavo import _native
from octavo.kernels.memory import placeholder
from octavo.system.distributed import GroupMemory, Rank
from octavo.system.tensor import Tensor, from_numpy, itemsize

_ALIGNMENT = 64  # a cache line

BufferRows = Literal["tokens", "samples", "prompt_logprobs", "encoder"]
"""Dimension of a step, or of an encoder's run, that limits the rows of a buffer."""


@dataclass(slots=True)
class Columns:
    """Columns of one rank in one of the buffers.

    All ranks fill their columns, wait at a barrier, then read. The barrier before reading a buffer
    must differ from the one before filling it again, so successive blocks have different buffers
    (`SharedBuffers.columns`).
    """

    buffers: SharedBuffers
    name: str
    size: int
    """Number of columns of all ranks."""
    begin: int
    end: int

    def empty(self, rows: int, dtype: str) -> tuple[Tensor, Tensor]:
        """Return a dense tensor [rows, size], and the rank's columns of it."""
        whole = self.buffers.rows(self.name, rows, self.size, dtype)
        return whole, whole[:, self.begin : self.end]

    @property
    def leads(self) -> bool:
        """True if this rank samples."""
        return self.buffers.rank.index == 0

    @property
    def splits_rows(self) -> bool:
        """True if the ranks split rows: see `Rank`."""
        return self.buffers.rank.splits_rows

    @contextmanager
    def own_rows(self) -> Iterator[slice]:
        """Restrict computation within the context to this rank's rows, and yield their slice."""
        index, size = self.buffers.rank.index, self.buffers.rank.size
        _native.share_rows(index, size)
        try:
            yield slice(index, None, size)
        finally:
            _native.share_rows(0, 1)

    def join(self) -> None:
        """Wait until all ranks have filled their columns or rows."""
        self.buffers.barrier()


class SharedBuffers:
    """Buffers of a model in the memory of a group, at the same offsets for all ranks.

    The blocks reserve them when they are built, so their sizes follow from the model alone.

    Args:
        rank: rank of this process.
        most_rows: rows of the largest step, by kind.
        dtype: type of activations.
    """

    def __init__(self, rank: Rank, most_rows: Mapping[BufferRows, int], dtype: str) -> None:
        self.rank = rank
        self.dtype = dtype
        self._rows_of_kind = most_rows
        self._most_rows: dict[str, int] = {}
        self._row_nbytes: dict[str, int] = {}
        self._last = ""
        """Name of the buffer that the last block with columns uses."""
        self._memory: GroupMemory | None = None
        self._begin = 0

    def columns(
        self,
        name: str,
        size: int,
        part: tuple[int, int],
        dtype: str,
        rows: BufferRows = "tokens",
    ) -> Columns:
        """Reserve a buffer, or make it large enough; see `Parts.columns`.

        Blocks are built in the order of their use. If two with the same name follow each other
        (single-mixer layers), the second one has another buffer.
        """
        assert self._memory is None, "buffers are reserved before they are attached"
        if part != (0, size):  # not split rows
            if name == self._last:
                name += "2"
            self._last = name
        self._most_rows[name] = self._rows_of_kind[rows]
        nbytes = size * itemsize(dtype)
        self._row_nbytes[name] = max(self._row_nbytes.get(name, 0), nbytes)
        return Columns(self, name, size, *part)

    @property
    def nbytes(self) -> int:
        """Bytes of all reserved buffers."""
        return sum(map(self._nbytes_of, self._most_rows))

    def _nbytes_of(self, name: str) -> int:
        nbytes = self._most_rows[name] * self._row_nbytes[name]
        return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def attach(self, memory: GroupMemory, begin: int) -> None:
        """Place the buffers in a group's memory, from byte `begin` on."""
        assert begin % _ALIGNMENT == 0
        assert begin + self.nbytes <= len(memory.data), "the group's memory is too small"
        self._memory, self._begin = memory, begin

    def rows(self, name: str, rows: int, size: int, dtype: str) -> Tensor:
        """Return the first rows of a buffer; placeholders if a recording only measures memory."""
        if self._memory is None:
            return placeholder(rows, size, dtype=dtype)
        assert rows <= self._most_rows[name]
        begin = self._begin
        for other in self._most_rows:
            if other == name:
                break
            begin += self._nbytes_of(other)
        nbytes = rows * size * itemsize(dtype)
        data = from_numpy(self._memory.data[begin : begin + nbytes])
        return data.view(dtype).view(rows, size)

    def barrier(self) -> None:
        """Call `GroupMemory.barrier`; without memory, do not wait."""
        if self._memory is not None:
            self._memory.barrier()
