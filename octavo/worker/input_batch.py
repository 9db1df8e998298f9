"""Persistent rows of the live requests, and the inputs of a step gathered from them.

A request keeps its row from its first step to its last, so a step's message contains only
changes. The rows hold all tokens, sampled ones included, so the scheduler can schedule a step
before it knows the tokens of the step before. The rows also count positions: the scheduler's
counts may include rejected drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo import _native
from octavo.kv_cache.groups import KVCacheConfig
from octavo.layers.step_table import STEP_ARRAYS, StepArray, StepLayout, StepSize, StepTable
from octavo.messages import (
    MultiModalFeatureSpec,
    NewRequestData,
    PlaceholderRange,
    PromptEmbeds,
    ScheduledRequest,
)
from octavo.system.tensor import HostTensor, Tensor, from_numpy

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
HostTable = StepTable[npt.NDArray[Any]]

UNKNOWN = -1
"""Id of a sampled token that has not arrived from the device yet."""


class StepBuffers:
    """Arrays of a step on the host, which `InputBatch.gather` fills.

    Args:
        layout: layout of the arrays.
        memory: uint8 [layout.nbytes]; default: new memory.
    """

    def __init__(self, layout: StepLayout, memory: npt.NDArray[np.uint8] | None = None) -> None:
        data = np.zeros(layout.nbytes, np.uint8) if memory is None else memory
        self.table: HostTable = layout.table(
            lambda begin, end, dtype, shape: data[begin:end].view(dtype).reshape(shape)
        )
        size, addresses = layout.size, [array.ctypes.data for array in self.table]
        self.native = _native.StepArrays(
            size.tokens,
            size.requests,
            size.samples,
            dict(zip(STEP_ARRAYS, addresses, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class EmbedRange:
    """Successive tokens of a request whose embeddings rows replace."""

    begin: int
    """Index of the first token."""
    end: int
    """Index after the last one."""
    rows: HostTensor | str
    """[rows, size] in any dtype, or the identifier of the item whose rows an encoder computes."""
    first_row: int = 0
    """Index of the row of the first token."""


@dataclass(slots=True)
class StepInputs:
    """Flattened batch of one step: T tokens from R requests, K of which sample.

    A later step overwrites all arrays except `sampling`.
    """

    req_ids: list[str]
    rows: LongArray
    """[R] row of each request."""
    counts: LongArray
    """[R] tokens of each request in the step."""
    num_samples: LongArray
    """[R] rows of logits of each request; 0: some of its known tokens are not computed yet."""
    sampling: LongArray
    """[K] the requests that sample, as indices into the arrays [R]."""
    size: StepSize
    """Size of the step."""
    table: HostTable
    """Arrays of the step; they may be larger than `size`."""
    embeds: list[tuple[int, Tensor]] = field(default_factory=list)
    """Rows that replace embeddings: the index of their first token in the batch, and [tokens, size]
    in any dtype. The ids of these tokens are placeholders. `size` is that of an embedding, or
    larger: the other columns are for `StepContext.deepstack`."""

    @property
    def sampling_rows(self) -> LongArray:
        """Request row of each row of logits, int64 [S]."""
        if self.size.samples == len(self.sampling):
            return self.rows[self.sampling]
        return np.repeat(self.rows, self.num_samples)


class InputBatch:
    """Rows for up to `max_num_seqs` requests of up to `max_model_len` tokens.

    Args:
        max_num_seqs: number of rows.
        max_model_len: number of tokens of a row.
        kv_cache: shape of the KV cache.
        arrays: arrays of a step that the model's blocks declare.
        encoded: rows of each item in the encoder cache, by identifier; None: no rows replace
            embeddings of items here.
        max_encoder_len: most rows of an encoder that the tokens of a request attend to.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        kv_cache: KVCacheConfig,
        arrays: Sequence[StepArray] = (),
        encoded: Mapping[str, Tensor] | None = None,
        max_encoder_len: int = 0,
    ) -> None:
        self._encoded = encoded
        self._step_arrays = arrays
        self._fillers = {array.name: array.make_filler(max_num_seqs) for array in arrays}
        self.blocks = -(-max(max_model_len, max_encoder_len) // kv_cache.block_size)
        """Number of KV blocks of the longest request, in each group."""
        self._cross = [i for i, group in enumerate(kv_cache.paged_groups) if group.is_cross]
        num_groups = len(kv_cache.paged_groups)
        self.token_ids: IntArray = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens: LongArray = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens: LongArray = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens: LongArray = np.zeros(max_num_seqs, np.int64)
        self.block_tables: IntArray = np.zeros((num_groups, max_num_seqs, self.blocks), np.int32)
        self.num_blocks: LongArray = np.zeros((num_groups, max_num_seqs), np.int64)
        self.row_of: dict[str, int] = {}
        self._embeds: dict[int, list[EmbedRange]] = {}
        """By row, the tokens whose embeddings other rows replace, in order."""
        self.features: dict[str, list[MultiModalFeatureSpec]] = {}
        """Items of the requests that have some, by request id."""
        self.owners: LongArray = np.zeros(max_num_seqs, np.int64)
        """Number of requests that each row has had."""
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        # Values of the requests of the current step.
        self._rows, self._counts, self._num_drafts, self._num_samples = np.zeros(
            (4, max_num_seqs), np.int64
        )
        addresses: dict[str, npt.NDArray[Any]] = {
            "token_ids": self.token_ids,
            "num_tokens": self.num_tokens,
            "num_computed_tokens": self.num_computed_tokens,
            "block_tables": self.block_tables,
            "rows": self._rows,
            "counts": self._counts,
            "num_drafts": self._num_drafts,
            "num_samples": self._num_samples,
        }
        self._gatherer = _native.InputGatherer(
            max_num_seqs,
            max_model_len,
            num_groups,
            self.blocks,
            kv_cache.block_size,
            {name: array.ctypes.data for name, array in addresses.items()},
        )

    def layout(self, size: StepSize) -> StepLayout:
        """Return the layout of the arrays of a step."""
        return StepLayout(size, self.blocks, len(self.block_tables), self._step_arrays)

    def add(self, req_id: str, data: NewRequestData) -> int:
        """Allocate a row without blocks for a request; return the row."""
        row = self._free_rows.pop()
        self.row_of[req_id] = row
        self.owners[row] += 1
        count = len(data.token_ids)
        self.token_ids[row, :count] = data.token_ids
        self.token_ids[row, count : self.num_tokens[row]] = 0  # removes old `UNKNOWN`s
        # A request without an answer never has all its tokens computed, so that none is sampled.
        self.num_tokens[row] = count + (data.pooling is not None)
        self.num_prompt_tokens[row] = data.num_prompt_tokens
        self.num_computed_tokens[row] = data.num_computed_tokens
        self.num_blocks[:, row] = 0
        for filler in self._fillers.values():
            filler.add_row(row, data)
        if data.prompt_embeds is not None:
            rows = _as_tensor(data.prompt_embeds)
            self._embeds[row] = [EmbedRange(0, len(rows), rows)]
        if data.mm_features:
            self.features[req_id] = data.mm_features
            if self._encoded is not None:
                self._embeds[row] = [
                    part
                    for feature in data.mm_features
                    for part in _ranges(feature.mm_position, feature.identifier)
                ]
        return row

    def append_blocks(self, row: int, block_ids: list[list[int]]) -> None:
        """Add KV blocks to a row, one list for each group."""
        for group, ids in enumerate(block_ids):
            if ids:
                start = self.num_blocks[group, row]
                self.block_tables[group, row, start : start + len(ids)] = ids
                self.num_blocks[group, row] = start + len(ids)

    def remove(self, req_id: str) -> int | None:
        """Free a request's row; return the row, or None if the request has no row."""
        row = self.row_of.pop(req_id, None)
        if row is not None:
            self._free_rows.append(row)
            self._embeds.pop(row, None)
            self.features.pop(req_id, None)
        return row

    def append(self, rows: LongArray, tokens: LongArray, counts: LongArray) -> LongArray:
        """Add sampled tokens to rows; drop the tokens that do not fit.

        A row can be full when a step in flight samples after a stop that the scheduler detects
        later. The scheduler drops these tokens, too.

        Args:
            rows: int64 [R], distinct rows.
            tokens: int64 [sum of counts], row by row; `UNKNOWN` for a token that has not arrived
                from the device yet.
            counts: int64 [R], tokens of each row.

        Returns:
            int64 [sum of counts], the position of each token in its row; -1: dropped.
        """
        places = self.num_tokens[rows]
        if len(tokens) != len(rows) or (counts != 1).any():
            before = np.cumsum(counts) - counts
            places = np.repeat(places - before, counts) + np.arange(len(tokens))
            at = np.repeat(rows, counts)
        else:
            at = rows
        fits = places < self.token_ids.shape[1]
        self.token_ids[at[fits], places[fits]] = tokens[fits]
        self.num_tokens[rows] = np.minimum(self.num_tokens[rows] + counts, self.token_ids.shape[1])
        places[~fits] = -1
        return places

    def gather(
        self,
        scheduled: Sequence[ScheduledRequest],
        drafts: Mapping[str, Sequence[int]],
        buffers: StepBuffers,
    ) -> StepInputs:
        """Gather a step's inputs; requests keep their order.

        Args:
            scheduled: the requests.
            drafts: drafts of the requests that have some, at most `num_drafts` each. They are
                written after a row's tokens, and do not count as its tokens.
            buffers: the memory of the inputs.

        Raises:
            IndexError: the tokens exceed a row's end or the buffers.
        """
        num_reqs, row_of = len(scheduled), self.row_of
        self._rows[:num_reqs] = [row_of[request.req_id] for request in scheduled]
        self._counts[:num_reqs] = [r.num_tokens - r.num_drafts for r in scheduled]
        self._num_drafts[:num_reqs] = 0
        if drafts:
            for i, request in enumerate(scheduled):
                if tokens := drafts.get(request.req_id):
                    row = self._rows[i]
                    self.token_ids[row, self.num_tokens[row] + np.arange(len(tokens))] = tokens
                    self._num_drafts[i] = len(tokens)
            self._counts[:num_reqs] += self._num_drafts[:num_reqs]
        num_samples = self._gatherer.run(num_reqs, buffers.native)
        for group in self._cross:  # the native code copies the blocks of the tokens
            rows = self._rows[:num_reqs]
            used = int(self.num_blocks[group, rows].max(initial=0))
            blocks = self.block_tables[group, rows, :used]
            buffers.table.block_tables[group, :num_reqs, :used] = blocks
        size = StepSize(int(buffers.table.query_start_loc[num_reqs]), num_reqs, num_samples)
        if self._fillers:
            rows, counts = self._rows[:num_reqs], self._counts[:num_reqs]
            for row, request in zip(rows.tolist(), scheduled, strict=True):
                for filler in self._fillers.values():
                    filler.schedule(row, request)
            for name, out in buffers.table.first(size).extra.items():
                self.fill(name, out, rows, self.num_computed_tokens[rows], counts)
        return StepInputs(
            req_ids=[request.req_id for request in scheduled],
            rows=self._rows[:num_reqs],
            counts=self._counts[:num_reqs],
            num_samples=self._num_samples[:num_reqs],
            sampling=np.flatnonzero(self._num_samples[:num_reqs]),
            size=size,
            table=buffers.table,
            embeds=self._gather_embeds(num_reqs, buffers.table.query_start_loc)
            if self._embeds
            else [],
        )

    def _rows_of(self, part: EmbedRange) -> Tensor:
        if not isinstance(part.rows, str):
            return part.rows
        assert self._encoded is not None
        return self._encoded[part.rows]

    def fill(
        self,
        name: str,
        out: npt.NDArray[Any],
        rows: LongArray,
        starts: LongArray,
        counts: LongArray,
    ) -> None:
        """Fill an array of a step, given by its name; see `StepFiller.fill`."""
        self._fillers[name].fill(out, rows, starts, counts)

    def _gather_embeds(self, num_reqs: int, starts: IntArray) -> list[tuple[int, Tensor]]:
        found: list[tuple[int, Tensor]] = []
        for i in range(num_reqs):
            row = int(self._rows[i])
            first, parts = int(self.num_computed_tokens[row]), self._embeds.get(row)
            if not parts or parts[-1].end <= first:  # most steps
                continue
            end, offset = first + int(self._counts[i]), int(starts[i]) - first
            for part in parts:
                low, high = max(part.begin, first), min(part.end, end)
                if low < high:
                    rows = self._rows_of(part)
                    skipped = part.first_row - part.begin
                    found.append((low + offset, rows[low + skipped : high + skipped]))
        return found


def _ranges(place: PlaceholderRange, identifier: str) -> Iterator[EmbedRange]:
    """Yield the tokens of an item that its rows replace, as ranges."""
    if place.is_embed is None:
        yield EmbedRange(place.offset, place.end, identifier)
        return
    marks = np.frombuffer(place.is_embed, np.int8)
    edges = np.flatnonzero(np.diff(marks, prepend=0, append=0)).tolist()
    row = 0
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        yield EmbedRange(place.offset + begin, place.offset + end, identifier, row)
        row += end - begin


def _as_tensor(embeds: PromptEmbeds) -> HostTensor:
    """Return a tensor [tokens, embed_size] on the bytes of the message, without a copy."""
    data = from_numpy(np.frombuffer(embeds.data, np.uint8))
    return data.view(embeds.dtype).view(embeds.num_tokens, embeds.size)
