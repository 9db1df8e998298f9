"""Persistent rows of the live requests, and the inputs of a step gathered from them.

A request keeps its row from its first step to its last, so a step's message holds only what
changed; the token history lives here, sampled tokens included, so that a step can be scheduled
before the tokens of the one before it are known to the scheduler. Positions are the rows' own: the
scheduler may count drafts that turned out wrong until it learns of that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo import _native
from octavo.kv_cache.groups import KVCacheConfig
from octavo.layers.step_table import STEP_ARRAYS, StepArray, StepLayout, StepSize, StepTable
from octavo.messages import NewRequestData, PromptEmbeds, ScheduledRequest

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
HostTable = StepTable[npt.NDArray[Any]]

UNKNOWN = -1
"""Id of a token that has been sampled, but has not come from the device yet."""


class StepBuffers:
    """A step's arrays on the host, which `InputBatch.gather` fills.

    Args:
        layout: where they are.
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


@dataclass(slots=True)
class StepInputs:
    """One step's flattened batch of T tokens from R requests, K of which sample.

    The arrays of the table, and those of all requests, are overwritten by a later step.
    """

    req_ids: list[str]
    rows: LongArray
    """[R] row of each request."""
    counts: LongArray
    """[R] tokens of each request in the step."""
    num_samples: LongArray
    """[R] rows of logits of each request; 0: its known tokens are not all computed yet."""
    sampling: LongArray
    """[K] the requests that sample, as indices into the others."""
    size: StepSize
    """Of the step."""
    table: HostTable
    """The arrays, with room for more than that."""
    embeds: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """Embeddings that came with prompts: the first of the tokens whose they are, as an index into
    the batch, and [tokens, embed_size] in any dtype. What stands in for their ids means nothing."""

    @property
    def sampling_rows(self) -> LongArray:
        """int64 [S], the row of each row of logits."""
        if self.size.samples == len(self.sampling):
            return self.rows[self.sampling]
        return np.repeat(self.rows, self.num_samples)


class InputBatch:
    """Rows for up to `max_num_seqs` requests of up to `max_model_len` tokens.

    Args:
        max_num_seqs: rows.
        max_model_len: tokens of a row.
        kv_cache: shape of the KV cache.
        arrays: arrays of a step that the model's blocks declare.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        kv_cache: KVCacheConfig,
        arrays: Sequence[StepArray] = (),
    ) -> None:
        self._step_arrays = arrays
        self._fillers = {array.name: array.make_filler(max_num_seqs) for array in arrays}
        self.blocks = -(-max_model_len // kv_cache.block_size)
        """KV blocks of the longest request, in each group."""
        num_groups = len(kv_cache.groups)
        self.token_ids: IntArray = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens: LongArray = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens: LongArray = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens: LongArray = np.zeros(max_num_seqs, np.int64)
        self.block_tables: IntArray = np.zeros((num_groups, max_num_seqs, self.blocks), np.int32)
        self.num_blocks: LongArray = np.zeros((num_groups, max_num_seqs), np.int64)
        self.row_of: dict[str, int] = {}
        self.embeds: dict[int, torch.Tensor] = {}
        """[tokens, embed_size] by row: what comes with a prompt instead of its first tokens."""
        self.owners: LongArray = np.zeros(max_num_seqs, np.int64)
        """How many requests each row has had."""
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        # Of the requests of the step that is gathered.
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
        """Where the arrays of a step of that size are."""
        return StepLayout(size, self.blocks, len(self.block_tables), self._step_arrays)

    def add(self, req_id: str, data: NewRequestData) -> int:
        """Gives a request a row, without blocks yet; returns it."""
        row = self._free_rows.pop()
        self.row_of[req_id] = row
        self.owners[row] += 1
        count = len(data.token_ids)
        self.token_ids[row, :count] = data.token_ids
        self.token_ids[row, count : self.num_tokens[row]] = 0  # no `UNKNOWN` that nobody collects
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = data.num_prompt_tokens
        self.num_computed_tokens[row] = data.num_computed_tokens
        self.num_blocks[:, row] = 0
        for filler in self._fillers.values():
            filler.add_row(row, data)
        if data.prompt_embeds is not None:
            self.embeds[row] = _as_tensor(data.prompt_embeds)
        return row

    def append_blocks(self, row: int, block_ids: list[list[int]]) -> None:
        """Adds KV blocks to a row, one list for each group."""
        for group, ids in enumerate(block_ids):
            if ids:
                start = self.num_blocks[group, row]
                self.block_tables[group, row, start : start + len(ids)] = ids
                self.num_blocks[group, row] = start + len(ids)

    def remove(self, req_id: str) -> int | None:
        """Frees a request's row; returns it, or None if the request has none."""
        row = self.row_of.pop(req_id, None)
        if row is not None:
            self._free_rows.append(row)
            self.embeds.pop(row, None)
        return row

    def append(self, rows: LongArray, tokens: LongArray, counts: LongArray) -> LongArray:
        """Adds sampled tokens to rows; a row that is full keeps what it has.

        A row can be full when a step in flight samples beyond a stop that the scheduler learned
        of later; such tokens are dropped there.

        Args:
            rows: int64 [R], no row twice.
            tokens: int64 [sum of counts], those of a row one after the other; `UNKNOWN` for a token
                that is still on its way from the device.
            counts: int64 [R], tokens of each row.

        Returns:
            int64 [sum of counts], where in its row each token went; -1: nowhere.
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
        """Puts together a step's inputs; requests keep their order.

        Args:
            scheduled: the requests.
            drafts: of those that have some, at most `num_drafts`. They come behind a row's tokens,
                and do not count among these.
            buffers: where the inputs go.

        Raises:
            IndexError: if tokens lie beyond a row's end, or do not fit the buffers.
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
        size = StepSize(int(buffers.table.query_start_loc[num_reqs]), num_reqs, num_samples)
        if self._fillers:
            rows, counts = self._rows[:num_reqs], self._counts[:num_reqs]
            for name, out in buffers.table.first(size).extra.items():
                self._fillers[name].fill(out, rows, self.num_computed_tokens[rows], counts)
        return StepInputs(
            req_ids=[request.req_id for request in scheduled],
            rows=self._rows[:num_reqs],
            counts=self._counts[:num_reqs],
            num_samples=self._num_samples[:num_reqs],
            sampling=np.flatnonzero(self._num_samples[:num_reqs]),
            size=size,
            table=buffers.table,
            embeds=self._gather_embeds(num_reqs, buffers.table.query_start_loc)
            if self.embeds
            else [],
        )

    def _gather_embeds(self, num_reqs: int, starts: IntArray) -> list[tuple[int, torch.Tensor]]:
        found = []
        for i in range(num_reqs):
            row = int(self._rows[i])
            if (embeds := self.embeds.get(row)) is not None:
                first = int(self.num_computed_tokens[row])
                if len(rows := embeds[first : first + int(self._counts[i])]):
                    found.append((int(starts[i]), rows))
        return found


def _as_tensor(embeds: PromptEmbeds) -> torch.Tensor:
    """[tokens, embed_size] on the bytes of the message, which nobody changes."""
    data = embeds.data
    # torch warns of memory that must not be written, once it is told.
    buffer = (ctypes.c_char * len(data)).from_address(np.frombuffer(data, np.uint8).ctypes.data)
    buffer.owner = data  # type: ignore[attr-defined]  # keeps it
    flat = torch.frombuffer(buffer, dtype=getattr(torch, embeds.dtype))
    return flat.view(embeds.num_tokens, embeds.size)
