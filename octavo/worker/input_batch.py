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

_ALIGNMENT = 16
SAMPLING_ROW_WORDS = 4
"""A `SAMPLING_ROW` as int64."""

UNKNOWN = -1
"""Id of a token that has been sampled, but has not come from the device yet."""


@dataclass(slots=True)
class StepInputs:
    """One step's flattened batch of T tokens from R requests, S of which sample.

    The arrays are views of buffers that a later step overwrites.
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


class StepLayout:
    """Where a step's arrays are in one piece of memory, on the host and on a device alike.

    Args:
        num_tokens: of the step (T).
        num_reqs: of the step (R).
        blocks: of the longest request, in each KV-cache group.
        num_groups: KV-cache groups (G).
    """

    def __init__(self, num_tokens: int, num_reqs: int, blocks: int, num_groups: int) -> None:
        self.num_tokens, self.num_reqs, self.num_groups = num_tokens, num_reqs, num_groups
        self.nbytes = 0
        self.arrays = {
            "query_start_loc": self._place("int32", num_reqs + 1),
            "seq_lens": self._place("int32", num_reqs),
            "samples": self._place("bool", num_reqs),
            "last_tokens": self._place("int64", num_reqs),
            "sampling_rows": self._place("int64", num_reqs),
            "sampling_params": self._place("int64", num_reqs, SAMPLING_ROW_WORDS),
            "input_ids": self._place("int64", num_tokens),
            "positions": self._place("int64", num_tokens),
            **{f"slot_mapping_{g}": self._place("int64", num_tokens) for g in range(num_groups)},
            **{
                f"block_table_{g}": self._place("int32", num_reqs, blocks)
                for g in range(num_groups)
            },
        }
        """Name -> (where it begins, its bytes, dtype, shape)."""

    def _place(self, dtype: str, *shape: int) -> tuple[int, int, str, tuple[int, ...]]:
        begin = self.nbytes
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return begin, nbytes, dtype, shape


class StepBuffers:
    """A step's arrays on the host: what `InputBatch.gather` writes and `StepInputs` has views of.

    Args:
        layout: where they are.
        memory: uint8 [layout.nbytes]; default: new memory.
    """

    def __init__(self, layout: StepLayout, memory: npt.NDArray[np.uint8] | None = None) -> None:
        memory = np.zeros(layout.nbytes, np.uint8) if memory is None else memory
        arrays = {
            name: memory[begin : begin + nbytes].view(dtype).reshape(shape)
            for name, (begin, nbytes, dtype, shape) in layout.arrays.items()
        }
        groups = range(layout.num_groups)
        self.query_start_loc: IntArray = arrays["query_start_loc"]
        self.seq_lens: IntArray = arrays["seq_lens"]
        self.samples: npt.NDArray[np.bool_] = arrays["samples"]
        self.last_tokens: LongArray = arrays["last_tokens"]
        self.sampling_rows: LongArray = arrays["sampling_rows"]
        self.sampling_params: LongArray = arrays["sampling_params"]
        self.input_ids: LongArray = arrays["input_ids"]
        self.positions: LongArray = arrays["positions"]
        self.slot_mappings: list[LongArray] = [arrays[f"slot_mapping_{g}"] for g in groups]
        self.block_tables: list[IntArray] = [arrays[f"block_table_{g}"] for g in groups]
        self.native = _native.StepArrays(
            layout.num_reqs,
            layout.num_tokens,
            self.query_start_loc.ctypes.data,
            self.seq_lens.ctypes.data,
            self.samples.ctypes.data,
            self.last_tokens.ctypes.data,
            [table.ctypes.data for table in self.block_tables],
            self.input_ids.ctypes.data,
            self.positions.ctypes.data,
            [slots.ctypes.data for slots in self.slot_mappings],
        )


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
        self.owners: LongArray = np.zeros(max_num_seqs, np.int64)
        """How many requests each row has had."""
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._rows: LongArray = np.zeros(max_num_seqs, np.int64)
        self._counts: LongArray = np.zeros(max_num_seqs, np.int64)
        self._gatherer = _native.InputGatherer(
            self.token_ids.ctypes.data,
            max_num_seqs,
            max_model_len,
            self.num_tokens.ctypes.data,
            self.num_computed_tokens.ctypes.data,
            [table.ctypes.data for table in self.block_tables],
            blocks,
            kv_cache.block_size,
        )

    def layout(self, num_tokens: int, num_reqs: int) -> StepLayout:
        """Where the arrays of a step of that size are."""
        return StepLayout(
            num_tokens, num_reqs, self.block_tables[0].shape[1], len(self.block_tables)
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
        rows = max_num_seqs * 4 * (max_model_len + blocks * num_groups)
        return rows + StepLayout(max_num_batched_tokens, max_num_seqs, blocks, num_groups).nbytes

    def add(self, data: NewRequestData) -> int:
        """Gives a request a row; returns it."""
        row = self._free_rows.pop()
        self.row_of[data.req_id] = row
        self.owners[row] += 1
        count = len(data.token_ids)
        self.token_ids[row, :count] = data.token_ids
        self.token_ids[row, count : self.num_tokens[row]] = 0  # no `UNKNOWN` that nobody collects
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

    def append_tokens(self, rows: LongArray, tokens: LongArray) -> LongArray:
        """Adds one sampled token to each of `rows`; a row that is full keeps what it has.

        A row can be full when a step in flight samples beyond a stop that the scheduler learned
        of later; that token is dropped there.

        Args:
            rows: int64 [S], no row twice.
            tokens: int64 [S]; `UNKNOWN` for a token that is still on its way from the device.

        Returns:
            int64 [S], where in its row each token went; -1: nowhere.
        """
        fits = self.num_tokens[rows] < self.token_ids.shape[1]
        places = np.where(fits, self.num_tokens[rows], -1)
        rows, tokens = rows[fits], tokens[fits]
        self.token_ids[rows, self.num_tokens[rows]] = tokens
        self.num_tokens[rows] += 1
        return places

    def gather(self, num_scheduled_tokens: dict[str, int], buffers: StepBuffers) -> StepInputs:
        """Puts together a step's inputs; requests keep the order of `num_scheduled_tokens`.

        Raises:
            IndexError: if tokens lie beyond a row's end, or do not fit the buffers.
        """
        req_ids, row_of = list(num_scheduled_tokens), self.row_of
        num_reqs = len(req_ids)
        rows = self._rows[:num_reqs]
        rows[:] = [row_of[r] for r in req_ids]
        self._counts[:num_reqs] = list(num_scheduled_tokens.values())
        num_logits = self._gatherer.run(
            num_reqs, self._rows.ctypes.data, self._counts.ctypes.data, buffers.native
        )
        num_tokens = int(buffers.query_start_loc[num_reqs])
        return StepInputs(
            req_ids=req_ids,
            rows=rows.copy(),
            input_ids=buffers.input_ids[:num_tokens],
            positions=buffers.positions[:num_tokens],
            query_start_loc=buffers.query_start_loc[: num_reqs + 1],
            seq_lens=buffers.seq_lens[:num_reqs],
            slot_mappings=[slots[:num_tokens] for slots in buffers.slot_mappings],
            block_tables=[table[:num_reqs] for table in buffers.block_tables],
            samples=buffers.samples[:num_reqs],
            last_tokens=buffers.last_tokens[:num_logits],
        )
