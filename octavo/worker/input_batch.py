"""Persistent rows of the live requests, and the inputs of a step gathered from them.

A request keeps its row from its first step to its last, so a step's message holds only what
changed; the token history lives here, sampled tokens included, so that a step can be scheduled
before the tokens of the one before it are known to the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo import _native
from octavo.kv_cache.groups import KVCacheConfig
from octavo.messages import NewRequestData

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """One step's flattened batch of T tokens from R requests.

    The arrays are views of buffers that the next step overwrites.
    """

    req_ids: list[str]
    rows: LongArray
    """[R] row of each request."""
    input_ids: LongArray
    """[T] token ids."""
    positions: LongArray
    """[T] position of each token in its request."""
    query_start_loc: IntArray
    """[R + 1] where each request's tokens begin."""
    seq_lens: IntArray
    """[R] tokens of each request up to and including this step's."""
    slot_mappings: list[LongArray]
    """[T] for each KV-cache group: block * block_size + offset."""
    block_tables: list[IntArray]
    """[R, blocks] for each KV-cache group; what is behind a request's last block is not set."""
    samples: npt.NDArray[np.bool_]
    """[R] whether the request's last token is known, so that the next one is sampled."""
    last_tokens: LongArray
    """[S] the last token of each request that samples, as an index into the batch."""


class StepBuffers:
    """Memory of `StepInputs` for steps of up to T tokens from up to R requests: see there."""

    def __init__(
        self, max_num_tokens: int, max_num_reqs: int, max_num_blocks: int, num_groups: int
    ) -> None:
        self.input_ids: LongArray = np.zeros(max_num_tokens, np.int64)
        self.positions: LongArray = np.zeros(max_num_tokens, np.int64)
        self.query_start_loc: IntArray = np.zeros(max_num_reqs + 1, np.int32)
        self.seq_lens: IntArray = np.zeros(max_num_reqs, np.int32)
        self.samples: npt.NDArray[np.bool_] = np.zeros(max_num_reqs, np.bool_)
        self.last_tokens: LongArray = np.zeros(max_num_reqs, np.int64)
        self.slot_mappings: list[LongArray] = [
            np.zeros(max_num_tokens, np.int64) for _ in range(num_groups)
        ]
        self.block_tables: list[IntArray] = [
            np.zeros((max_num_reqs, max_num_blocks), np.int32) for _ in range(num_groups)
        ]


class InputBatch:
    """Rows for up to `max_num_seqs` requests of up to `max_model_len` tokens."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        kv_cache: KVCacheConfig,
    ) -> None:
        self.block_size = kv_cache.block_size
        blocks = -(-max_model_len // kv_cache.block_size)
        self.token_ids: IntArray = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens: LongArray = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens: LongArray = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens: LongArray = np.zeros(max_num_seqs, np.int64)
        self.block_tables: list[IntArray] = [
            np.zeros((max_num_seqs, blocks), np.int32) for _ in kv_cache.groups
        ]
        self.num_blocks: LongArray = np.zeros((len(kv_cache.groups), max_num_seqs), np.int64)
        self.row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.buffers = StepBuffers(
            max_num_batched_tokens, max_num_seqs, blocks, len(kv_cache.groups)
        )
        self._rows: LongArray = np.zeros(max_num_seqs, np.int64)
        self._counts: LongArray = np.zeros(max_num_seqs, np.int64)
        step = self.buffers
        self._gatherer = _native.InputGatherer(
            self.token_ids.ctypes.data,
            max_model_len,
            self.num_tokens.ctypes.data,
            self.num_computed_tokens.ctypes.data,
            [
                (by_row.ctypes.data, by_request.ctypes.data, slots.ctypes.data)
                for by_row, by_request, slots in zip(
                    self.block_tables, step.block_tables, step.slot_mappings, strict=True
                )
            ],
            blocks,
            kv_cache.block_size,
            self._rows.ctypes.data,
            self._counts.ctypes.data,
            step.query_start_loc.ctypes.data,
            step.seq_lens.ctypes.data,
            step.samples.ctypes.data,
            step.last_tokens.ctypes.data,
            step.input_ids.ctypes.data,
            step.positions.ctypes.data,
        )

    @staticmethod
    def nbytes(
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        block_size: int,
        num_groups: int,
    ) -> int:
        """Bytes of the rows and of a step's inputs, for the memory plan."""
        blocks = -(-max_model_len // block_size)
        rows = max_num_seqs * 4 * (max_model_len + 2 * blocks * num_groups)
        return rows + max_num_batched_tokens * 8 * (2 + num_groups)

    def add(self, data: NewRequestData) -> int:
        """Gives a request a row; returns it."""
        row = self._free_rows.pop()
        self.row_of[data.req_id] = row
        count = len(data.token_ids)
        self.token_ids[row, :count] = data.token_ids
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = data.num_prompt_tokens
        self.num_computed_tokens[row] = data.num_computed_tokens
        self.num_blocks[:, row] = 0
        self.append_blocks(row, data.block_ids)
        return row

    def append_blocks(self, row: int, block_ids: list[list[int]]) -> None:
        """Adds KV blocks to a row, one list for each group."""
        for group, ids in enumerate(block_ids):
            if ids:
                start = self.num_blocks[group, row]
                self.block_tables[group][row, start : start + len(ids)] = ids
                self.num_blocks[group, row] = start + len(ids)

    def remove(self, req_id: str) -> int | None:
        """Frees a request's row; returns it, or None if the request has none."""
        row = self.row_of.pop(req_id, None)
        if row is not None:
            self._free_rows.append(row)
        return row

    def append_tokens(self, rows: LongArray, tokens: LongArray) -> None:
        """Adds one sampled token to each of `rows`; a row that is full keeps what it has.

        A row can be full when a step in flight samples beyond a stop that the scheduler learned
        of later; that token is dropped there.
        """
        fits = self.num_tokens[rows] < self.token_ids.shape[1]
        rows, tokens = rows[fits], tokens[fits]
        self.token_ids[rows, self.num_tokens[rows]] = tokens
        self.num_tokens[rows] += 1

    def gather(self, num_scheduled_tokens: dict[str, int]) -> StepInputs:
        """Puts together a step's inputs; requests keep the order of `num_scheduled_tokens`."""
        req_ids, row_of = list(num_scheduled_tokens), self.row_of
        num_reqs = len(req_ids)
        rows = self._rows[:num_reqs]
        rows[:] = [row_of[r] for r in req_ids]
        self._counts[:num_reqs] = list(num_scheduled_tokens.values())
        step = self.buffers
        num_logits = self._gatherer.run(num_reqs)
        num_tokens = int(step.query_start_loc[num_reqs])
        return StepInputs(
            req_ids=req_ids,
            rows=rows,
            input_ids=step.input_ids[:num_tokens],
            positions=step.positions[:num_tokens],
            query_start_loc=step.query_start_loc[: num_reqs + 1],
            seq_lens=step.seq_lens[:num_reqs],
            slot_mappings=[slots[:num_tokens] for slots in step.slot_mappings],
            block_tables=[table[:num_reqs] for table in step.block_tables],
            samples=step.samples[:num_reqs],
            last_tokens=step.last_tokens[:num_logits],
        )
