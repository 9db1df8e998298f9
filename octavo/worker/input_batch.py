"""Persistent rows of the live requests, and the inputs of a step gathered from them.

A request keeps its row from its first step to its last, so a step's message holds only what
changed; the token history lives here, sampled tokens included, so that a step can be scheduled
before the tokens of the one before it are known to the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.kv_cache.groups import KVCacheConfig
from octavo.messages import NewRequestData

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """One step's flattened batch of T tokens from R requests."""

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
    """[R, blocks] for each KV-cache group."""
    samples: npt.NDArray[np.bool_]
    """[R] whether the request's last token is known, so that the next one is sampled."""

    @property
    def last_tokens(self) -> LongArray:
        """[S] the last token of each request that samples, as an index into the batch."""
        return self.query_start_loc[1:][self.samples].astype(np.int64) - 1


class InputBatch:
    """Rows for up to `max_num_seqs` requests of up to `max_model_len` tokens."""

    def __init__(self, max_num_seqs: int, max_model_len: int, kv_cache: KVCacheConfig) -> None:
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

    @staticmethod
    def nbytes(max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int) -> int:
        """Bytes of the rows, for the memory plan."""
        blocks = -(-max_model_len // block_size)
        return max_num_seqs * 4 * (max_model_len + blocks * num_groups)

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
        req_ids = list(num_scheduled_tokens)
        num_reqs = len(req_ids)
        rows = np.fromiter((self.row_of[r] for r in req_ids), np.int64, num_reqs)
        counts = np.fromiter(num_scheduled_tokens.values(), np.int64, num_reqs)
        query_start_loc = np.zeros(num_reqs + 1, np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        computed = self.num_computed_tokens[rows]
        seq_lens = computed + counts

        token_rows = np.repeat(rows, counts)
        positions = np.arange(query_start_loc[-1], dtype=np.int64)
        positions += np.repeat(computed - query_start_loc[:-1], counts)
        input_ids = self.token_ids[token_rows, positions].astype(np.int64)

        max_blocks = -(-int(seq_lens.max(initial=0)) // self.block_size)
        token_blocks, offsets = np.divmod(positions, self.block_size)
        slot_mappings, block_tables = [], []
        for table in self.block_tables:
            slot_mappings.append(
                table[token_rows, token_blocks].astype(np.int64) * self.block_size + offsets
            )
            block_tables.append(table[rows, :max_blocks])
        return StepInputs(
            req_ids=req_ids,
            rows=rows,
            input_ids=input_ids,
            positions=positions,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens.astype(np.int32),
            slot_mappings=slot_mappings,
            block_tables=block_tables,
            samples=seq_lens == self.num_tokens[rows],
        )
