"""Rows that the ranks of a group fill together, each its own columns, and then read whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from octavo import _native
from octavo.kernels.memory import placeholder
from octavo.system.distributed import GroupMemory, Rank

_ALIGNMENT = 64  # a cache line

BufferRows = Literal["tokens", "samples", "prompt_logprobs"]
"""The numbers of a step that bound the rows of a buffer."""


@dataclass(slots=True)
class Columns:
    """The columns of one rank in one of the buffers.

    All ranks fill theirs, then meet, then read. A buffer is filled again only behind another
    barrier than the one behind which it is read; a layer has four, one for each of its buffers.
    """

    buffers: SharedBuffers
    name: str
    size: int
    """Columns of all ranks."""
    begin: int
    end: int

    def empty(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[rows, size], dense, and the rank's columns of it."""
        whole = self.buffers.rows(self.name, rows, self.size, dtype)
        return whole, whole[:, self.begin : self.end]

    @property
    def leads(self) -> bool:
        """Whether this rank samples."""
        return self.buffers.rank.index == 0

    @property
    def splits_rows(self) -> bool:
        """See `Rank`."""
        return self.buffers.rank.splits_rows

    @contextmanager
    def own_rows(self) -> Iterator[slice]:
        """While this lasts, what is computed is of this rank's rows; which they are."""
        index, size = self.buffers.rank.index, self.buffers.rank.size
        _native.share_rows(index, size)
        try:
            yield slice(index, None, size)
        finally:
            _native.share_rows(0, 1)

    def join(self) -> None:
        """Waits until all ranks have filled their columns, or rows."""
        self.buffers.barrier()


class SharedBuffers:
    """The buffers of a model, which lie in the memory of a group at the same places for all.

    The blocks reserve them when they are built, so their sizes follow from the model alone.

    Args:
        rank: of this process.
        most_rows: rows of the largest step, by kind.
        dtype: of activations.
    """

    def __init__(self, rank: Rank, most_rows: Mapping[BufferRows, int], dtype: torch.dtype) -> None:
        self.rank = rank
        self.dtype = dtype
        self._rows_of_kind = most_rows
        self._most_rows: dict[str, int] = {}
        self._row_nbytes: dict[str, int] = {}
        self._memory: GroupMemory | None = None
        self._begin = 0

    def columns(
        self,
        name: str,
        size: int,
        part: tuple[int, int],
        dtype: torch.dtype,
        rows: BufferRows = "tokens",
    ) -> Columns:
        """Reserve a buffer, or make it large enough; see `Parts.columns`."""
        assert self._memory is None, "buffers are reserved before they are attached"
        self._most_rows[name] = self._rows_of_kind[rows]
        nbytes = size * dtype.itemsize
        self._row_nbytes[name] = max(self._row_nbytes.get(name, 0), nbytes)
        return Columns(self, name, size, *part)

    @property
    def nbytes(self) -> int:
        """What all that has been reserved takes."""
        return sum(map(self._nbytes_of, self._most_rows))

    def _nbytes_of(self, name: str) -> int:
        nbytes = self._most_rows[name] * self._row_nbytes[name]
        return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def attach(self, memory: GroupMemory, begin: int) -> None:
        """Puts the buffers into a group's memory, from that byte on."""
        assert begin % _ALIGNMENT == 0
        assert begin + self.nbytes <= len(memory.data), "the group's memory is too small"
        self._memory, self._begin = memory, begin

    def rows(self, name: str, rows: int, size: int, dtype: torch.dtype) -> Tensor:
        """The first rows of a buffer; without memory, for what is recorded only to be measured."""
        if self._memory is None:
            return placeholder(rows, size, dtype=dtype)
        assert rows <= self._most_rows[name]
        begin = self._begin
        for other in self._most_rows:
            if other == name:
                break
            begin += self._nbytes_of(other)
        nbytes = math.prod((rows, size)) * dtype.itemsize
        data = torch.from_numpy(self._memory.data[begin : begin + nbytes])
        return data.view(dtype).view(rows, size)

    def barrier(self) -> None:
        """See `GroupMemory.barrier`; without memory nobody is there to wait for."""
        if self._memory is not None:
            self._memory.barrier()
