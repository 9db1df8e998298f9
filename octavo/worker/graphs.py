"""How a step's forward pass is run: layer by layer from Python, or as a captured plan.

The captured plan is the same forward pass, recorded once: a list of kernel calls with fixed
addresses that the native side runs by itself. One plan serves steps of every size, since a call
knows its shapes but for the number of rows; inputs are copied into fixed buffers first.
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
from octavo.worker.input_batch import StepInputs


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
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

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
        max_num_tokens: of a step (T).
        max_num_reqs: of a step (R).
        max_num_blocks: KV blocks of one request, in each KV-cache group.
        activation_nbytes: what the memory plan has for intermediate results.
    """

    def __init__(
        self,
        eager: EagerSteps,
        ops: NativeOps,
        *,
        max_num_tokens: int,
        max_num_reqs: int,
        max_num_blocks: int,
        activation_nbytes: int,
    ) -> None:
        num_groups = max(eager.layer_groups) + 1
        self.input_ids = torch.zeros(max_num_tokens, dtype=torch.int64)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int64)
        self.last_tokens = torch.zeros(max_num_reqs, dtype=torch.int64)
        query_start_loc = torch.zeros(max_num_reqs + 1, dtype=torch.int32)
        seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32)
        self.groups = [
            AttentionMetadata(
                num_reqs=max_num_reqs,
                num_tokens=max_num_tokens,
                max_query_len=max_num_tokens,
                max_seq_len=0,
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_table=torch.zeros(max_num_reqs, max_num_blocks, dtype=torch.int32),
                slot_mapping=torch.zeros(max_num_tokens, dtype=torch.int64),
            )
            for _ in range(num_groups)
        ]
        self._arrays = _Arrays(self)
        self._owner = eager  # weights and KV cache, which the plans hold addresses of
        self._arena = Arena(2 * activation_nbytes)
        self._forward, self._logits = _native.Plan(), _native.Plan()
        with ops.record(self._forward, self._arena):
            self.hidden = eager.model.forward(
                self.input_ids,
                self.positions,
                eager.kv_caches,
                [self.groups[g] for g in eager.layer_groups],
                eager.backend,
            )
        head = Arena(2 * max_num_reqs * (eager.model.spec.vocab_size + 64) * 4)
        with ops.record(self._logits, head):
            self.logits = eager.model.compute_logits(self.hidden, self.last_tokens)
        assert self._arena.peak <= activation_nbytes, "activations exceed their plan"

    def run(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StepRunner`."""
        num_tokens, num_reqs = len(inputs.input_ids), len(inputs.req_ids)
        num_logits = len(inputs.last_tokens)
        arrays = self._arrays
        arrays.input_ids[:num_tokens] = inputs.input_ids
        arrays.positions[:num_tokens] = inputs.positions
        arrays.last_tokens[:num_logits] = inputs.last_tokens
        arrays.query_start_loc[: num_reqs + 1] = inputs.query_start_loc
        arrays.seq_lens[:num_reqs] = inputs.seq_lens
        for to, table in zip(arrays.block_tables, inputs.block_tables, strict=True):
            to[:num_reqs, : table.shape[1]] = table
        for to, slots in zip(arrays.slot_mappings, inputs.slot_mappings, strict=True):
            to[:num_tokens] = slots
        self._forward.run(num_tokens, num_reqs)
        if num_logits:
            self._logits.run(num_logits, num_reqs)
        return self.hidden[:num_tokens], self.logits[:num_logits]


class _Arrays:
    """The input buffers as numpy sees them."""

    def __init__(self, steps: CapturedSteps) -> None:
        self.input_ids = steps.input_ids.numpy()
        self.positions = steps.positions.numpy()
        self.last_tokens = steps.last_tokens.numpy()
        self.query_start_loc = steps.groups[0].query_start_loc.numpy()
        self.seq_lens = steps.groups[0].seq_lens.numpy()
        self.block_tables = [group.block_table.numpy() for group in steps.groups]
        self.slot_mappings = [group.slot_mapping.numpy() for group in steps.groups]
