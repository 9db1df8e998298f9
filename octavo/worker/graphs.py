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

from octavo import _native
from octavo.attention.base import AttentionBackend, AttentionMetadata
from octavo.kernels.memory import Arena
from octavo.kernels.native import NativeOps
from octavo.models.decoder import DecoderModel
from octavo.worker.input_batch import StepBuffers, StepInputs


class StepRunner(Protocol):
    """Runs the model on a step's inputs."""

    def run(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [T, hidden_size] and float32 logits [S, vocab] of the S sampling rows.

        Both may be overwritten by the next step.
        """
        ...


class EagerSteps:
    """Runs the layers one after the other from Python."""

    def __init__(
        self,
        model: DecoderModel,
        backend: AttentionBackend,
        kv_caches: Sequence[torch.Tensor],
        layer_groups: Sequence[int],
    ) -> None:
        self.model = model
        self.backend = backend
        self.kv_caches = kv_caches
        self.layer_groups = layer_groups

    def run(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StepRunner`."""
        device = self.model.device

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

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
        hidden = self.model.forward(
            tensor(inputs.input_ids),
            tensor(inputs.positions),
            self.kv_caches,
            [groups[g] for g in self.layer_groups],
            self.backend,
        )
        return hidden, self.model.compute_logits(hidden, tensor(inputs.last_tokens))


class CapturedSteps:
    """Runs the plan of native kernel calls that the forward pass was recorded as.

    Args:
        eager: what to record. Its model and backend must be the native ones.
        ops: the model's table of operations.
        buffers: where the inputs of every step are.
        activation_nbytes: what the memory plan has for intermediate results.
    """

    def __init__(
        self,
        eager: EagerSteps,
        ops: NativeOps,
        buffers: StepBuffers,
        *,
        activation_nbytes: int,
    ) -> None:
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
        self._owner = eager  # weights and KV cache, which the plans hold addresses of
        self._arena = Arena(2 * activation_nbytes)
        self._forward, self._logits = _native.Plan(), _native.Plan()
        with ops.record(self._forward, self._arena):
            self.hidden = eager.model.forward(
                torch.from_numpy(buffers.input_ids),
                torch.from_numpy(buffers.positions),
                eager.kv_caches,
                [groups[g] for g in eager.layer_groups],
                eager.backend,
            )
        head = Arena(2 * len(buffers.seq_lens) * (eager.model.spec.vocab_size + 64) * 4)
        with ops.record(self._logits, head):
            self.logits = eager.model.compute_logits(
                self.hidden, torch.from_numpy(buffers.last_tokens)
            )
        assert self._arena.peak <= activation_nbytes, "activations exceed their plan"

    def run(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StepRunner`."""
        num_tokens, num_reqs = len(inputs.input_ids), len(inputs.req_ids)
        num_logits = len(inputs.last_tokens)
        self._forward.run(num_tokens, num_reqs)
        if num_logits:
            self._logits.run(num_logits, num_reqs)
        return self.hidden[:num_tokens], self.logits[:num_logits]
