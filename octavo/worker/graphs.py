"""How a step's forward pass is run: layer by layer from Python, or as a captured plan.

The captured plan is the same forward pass, recorded once: a list of kernel calls with fixed
addresses that the native side runs by itself. One plan serves steps of every size, since a call
knows its shapes but for the number of rows, and every step's inputs are gathered into the same
buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from octavo import _native
from octavo.attention.base import AttentionBackend, AttentionMetadata
from octavo.kernels.memory import Arena
from octavo.kernels.native import NativeOps
from octavo.layers.step import StepContext
from octavo.models.base import Model
from octavo.worker.input_batch import StepBuffers, StepInputs


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of decode rows to capture: 1, 2, 4, then multiples of 8 up to 256, then of 32.

    The last one is `max_num_seqs`.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_num_seqs, 32)]
    return [n for n in sizes if n < max_num_seqs] + [max_num_seqs]


class StepRunner(Protocol):
    """Runs the model on a step's inputs."""

    def buffers(self, num_tokens: int, num_reqs: int) -> StepBuffers:
        """Where the inputs of the next step, of that size, are to be gathered."""
        ...

    def run(
        self, inputs: StepInputs, buffers: StepBuffers, params: NDArray[np.void] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Runs a step. What it returns may be overwritten by the next one.

        Args:
            inputs: gathered into `buffers`.
            buffers: what `buffers` returned.
            params: `SAMPLING_ROW` [S], if tokens may be chosen from the logits as they are.

        Returns:
            Hidden states [T, hidden_size]; float32 logits [S, vocab] of the S requests that sample;
            their tokens, int64 [S], if they have been chosen already.
        """
        ...

    def put_tokens(self, tokens: torch.Tensor) -> None:
        """Takes note of tokens int64 [S] that were chosen outside for the step run last."""
        ...


class EagerSteps:
    """Runs the layers one after the other from Python."""

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        kv_caches: Sequence[torch.Tensor],
        layer_groups: Sequence[int],
        buffers: StepBuffers,
    ) -> None:
        self._buffers = buffers
        self.model = model
        self.backend = backend
        self.kv_caches = kv_caches
        self.layer_groups = layer_groups

    def buffers(self, num_tokens: int, num_reqs: int) -> StepBuffers:
        """See `StepRunner`."""
        return self._buffers

    def put_tokens(self, tokens: torch.Tensor) -> None:
        """See `StepRunner`; the next step's inputs have them."""

    def run(
        self, inputs: StepInputs, buffers: StepBuffers, params: NDArray[np.void] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See `StepRunner`."""
        tensor = torch.from_numpy
        query_start_loc, seq_lens = tensor(inputs.query_start_loc), tensor(inputs.seq_lens)
        groups = [
            AttentionMetadata(
                num_reqs=len(inputs.req_ids),
                num_tokens=len(inputs.input_ids),
                max_query_len=int(np.diff(inputs.query_start_loc).max()),
                max_seq_len=int(inputs.seq_lens.max()),
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_table=tensor(table),
                slot_mapping=tensor(slots),
            )
            for table, slots in zip(inputs.block_tables, inputs.slot_mappings, strict=True)
        ]
        step = StepContext(
            tensor(inputs.positions),
            self.kv_caches,
            [groups[g] for g in self.layer_groups],
            self.backend,
        )
        hidden = self.model.forward(tensor(inputs.input_ids), step)
        return hidden, self.model.head(hidden, tensor(inputs.last_tokens)), None


class CapturedSteps:
    """Runs the plan of native kernel calls that the forward pass was recorded as.

    Args:
        eager: what to record. Its model and backend must be the native ones.
        ops: the model's table of operations.
        activations: where the forward pass has its intermediate results.
        logits: where the logits are, and what they are made from.
    """

    def __init__(
        self, eager: EagerSteps, ops: NativeOps, *, activations: Arena, logits: Arena
    ) -> None:
        buffers = eager.buffers(0, 0)
        groups = [
            AttentionMetadata(
                num_reqs=len(buffers.seq_lens),
                num_tokens=len(buffers.input_ids),
                max_query_len=len(buffers.input_ids),
                max_seq_len=0,
                query_start_loc=torch.from_numpy(buffers.query_start_loc),
                seq_lens=torch.from_numpy(buffers.seq_lens),
                block_table=torch.from_numpy(table),
                slot_mapping=torch.from_numpy(slots),
            )
            for table, slots in zip(buffers.block_tables, buffers.slot_mappings, strict=True)
        ]
        self._buffers = buffers
        self._owners = eager, activations, logits  # of the memory that the plans have addresses of
        self._forward, self._logits = _native.Plan(), _native.Plan()
        with ops.record(self._forward, activations):
            step = StepContext(
                torch.from_numpy(buffers.positions),
                eager.kv_caches,
                [groups[g] for g in eager.layer_groups],
                eager.backend,
            )
            self.hidden = eager.model.forward(torch.from_numpy(buffers.input_ids), step)
        with ops.record(self._logits, logits):
            self.logits = eager.model.head(self.hidden, torch.from_numpy(buffers.last_tokens))

    def buffers(self, num_tokens: int, num_reqs: int) -> StepBuffers:
        """See `StepRunner`."""
        return self._buffers

    def put_tokens(self, tokens: torch.Tensor) -> None:
        """See `StepRunner`; the next step's inputs have them."""

    def run(
        self, inputs: StepInputs, buffers: StepBuffers, params: NDArray[np.void] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See `StepRunner`."""
        num_tokens, num_reqs = len(inputs.input_ids), len(inputs.req_ids)
        num_logits = len(inputs.last_tokens)
        self._forward.run(num_tokens, num_reqs)
        if num_logits:
            self._logits.run(num_logits, num_reqs)
        return self.hidden[:num_tokens], self.logits[:num_logits], None
