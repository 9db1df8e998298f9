"""Pooling in the worker: results of the requests that return vectors or scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from octavo.kernels.base import Ops
from octavo.layers.pooler import Floats, PooledRow, Pooler
from octavo.messages import PoolingSpec
from octavo.system.tensor import Tensor
from octavo.worker.input_batch import InputBatch, StepInputs

_SLICE = 32
"""Number of tokens at a time that layers before the pooling compute."""


@dataclass(slots=True)
class _Row:
    """Request of a row, and what its chunks so far give."""

    pooler: Pooler
    pooled: PooledRow | None
    """None: each token has a result."""
    bare: bool
    """True if the results are the hidden states."""
    slot: int
    """Slot of its adapter; -1: it has none."""
    tokens: list[Floats] = field(default_factory=list)
    """Results of the tokens so far."""


class PoolingRows:
    """Rows of the requests that return vectors or scores.

    Args:
        ops: the model's table of operations.
        poolers: the model's poolers by task.
    """

    def __init__(self, ops: Ops, poolers: Mapping[str, Pooler]) -> None:
        self._ops, self._poolers = ops, poolers
        self._rows: dict[int, _Row] = {}

    def add_row(self, row: int, spec: PoolingSpec, slot: int) -> None:
        """Begin a request in a row; `slot` is that of its adapter, or -1."""
        pooler = self._poolers[spec.task]
        of_tokens = pooler.pooling[0] == "all"
        pooled = None if of_tokens else PooledRow(pooler.pooling)
        self._rows[row] = _Row(pooler, pooled, spec.bare, slot)

    def remove_row(self, row: int) -> None:
        """Forget the request of a row, if it is here."""
        self._rows.pop(row, None)

    def pool(self, inputs: StepInputs, hidden: Tensor, batch: InputBatch) -> dict[str, bytes]:
        """Take in a step; return the results of the requests that it completes, by request id.

        Args:
            inputs: the step.
            hidden: hidden states [T, hidden_size].
            batch: rows of all requests, before the step counts as computed.
        """
        if not self._rows:
            return {}
        states, starts = self._ops.to_host(hidden), inputs.table.query_start_loc
        done: dict[Pooler, list[tuple[str, int, Floats]]] = {}
        results: dict[str, bytes] = {}
        for i, (req_id, row) in enumerate(zip(inputs.req_ids, inputs.rows.tolist(), strict=True)):
            if (state := self._rows.get(row)) is None:
                continue
            first = int(batch.num_computed_tokens[row])
            chunk = states[int(starts[i]) : int(starts[i + 1])].astype(np.float32)
            length = int(batch.num_prompt_tokens[row])
            ends = first + len(chunk) == length
            if state.pooled is None:
                state.tokens.append(
                    chunk if state.bare else state.pooler.head(chunk, [state.slot] * len(chunk))
                )
                if ends:
                    results[req_id] = np.concatenate(state.tokens).tobytes()
                continue
            # A slice bounds the memory of layers with many outputs.
            size = _SLICE if state.pooler.token_layers else len(chunk)
            for begin in range(0, len(chunk), size):
                tokens = state.pooler.of_tokens(chunk[begin : begin + size], state.slot)
                state.pooled.add(tokens, first + begin)
            if ends:
                text = req_id, state.slot, state.pooled.result(length)
                done.setdefault(state.pooler, []).append(text)
        for pooler, texts in done.items():
            ids, slots, vectors = zip(*texts, strict=True)
            rows = pooler.head(np.stack(vectors), slots)
            results |= {req_id: row.tobytes() for req_id, row in zip(ids, rows, strict=True)}
        return results
