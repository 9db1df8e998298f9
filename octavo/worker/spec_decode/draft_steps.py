"""Steps of a draft model, over the target's requests and block tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.checkpoints.registry import open_checkpoint
from octavo.kernels.sampling_weights import sampling_probs
from octavo.kv_cache.groups import find_full_attention
from octavo.layers.adapter import Adapters
from octavo.layers.adapter_table import ADAPTER_SLOTS
from octavo.layers.step_table import StepLayout, StepSize
from octavo.models.base import Model
from octavo.models.eagle import LMHead
from octavo.models.heads import LMHeadSpec
from octavo.models.loader import load_model
from octavo.models.spec import ModelSpec
from octavo.models.weight_cache import WeightCache
from octavo.plan.setup import WorkerSetup
from octavo.sampling.acceptance import DRAFT
from octavo.sampling.sizes import rows_per_chunk
from octavo.system.tensor import Tensor
from octavo.worker.graphs import EagerSteps, StepResult
from octavo.worker.input_batch import StepBuffers, StepInputs
from octavo.worker.spec_decode.base import LongArray, Proposal, Target


def load_draft(target: Target, adapters: Adapters | None = None) -> Model:
    """Load the draft model in the same way as the target.

    Args:
        target: the model that needs drafts.
        adapters: changes of adapters to the draft model's layers; None: adapters are off.

    Raises:
        ModelError: see `load_model`.
    """
    setup = target.setup.draft
    assert setup is not None
    return _load(target, setup, setup.spec, adapters)


def load_lm_head(target: Target, spec: LMHeadSpec) -> LMHead:
    """Load the target's whole LM head.

    Raises:
        ModelError: see `load_model`.
    """
    model = _load(target, target.setup, spec)
    assert isinstance(model, LMHead)
    return model


def _load(
    target: Target, setup: WorkerSetup, spec: ModelSpec, adapters: Adapters | None = None
) -> Model:
    config = setup.config
    return load_model(
        spec,
        open_checkpoint(setup.model_path, config.load.load_format, config.model.seed),
        dtype=setup.dtype,
        max_model_len=setup.max_model_len,
        ops=target.ops,
        cache=WeightCache.from_config(config),
        keep=target.weights,
        adapters=adapters,
    )


class DraftSteps:
    """Runner of a model on tokens of the target's rows.

    The model's cache uses the same block numbers as the target's cache, so every change to the
    target's blocks applies to the model's blocks, too.

    Args:
        target: provides the rows, and the block tables of its first group with full attention.
        model: the model.
        shift: the model reads at position p the token of position p + `shift`.
        adapters: the model's adapters; None: it has none.
    """

    def __init__(
        self, target: Target, model: Model, shift: int = 0, adapters: Adapters | None = None
    ) -> None:
        setup, batch, kv = target.setup.draft, target.batch, target.kv
        group = find_full_attention(kv.groups)
        assert setup is not None
        assert group is not None
        self.setup: WorkerSetup = setup
        self.group = group
        """Group with the block tables that it uses."""
        self._target, self._adapters = target, adapters
        dtype, caches = setup.kv_cache_dtype, setup.spec.caches
        memory = [
            target.platform.allocate_cache(
                kv.num_blocks, cache.block_nbytes(kv.block_size, dtype), target.ops
            )
            for cache in caches
        ]
        target.caches.extend(memory)
        self._memory = memory
        self._caches = [
            cache.view(tensor, kv.block_size, dtype, target.backend)
            for cache, tensor in zip(caches, memory, strict=True)
        ]
        layout = StepLayout(setup.largest_step, batch.blocks, 1, setup.adapter_arrays)
        eager = EagerSteps(
            *(model, target.ops, target.backend, self._caches, caches[:1], [0] * len(caches)),
            StepBuffers(layout),
            setup.kept_layers,
            adapters=adapters,
        )
        self._steps = target.platform.make_steps(setup, target.ops, eager, batch, capture=True)
        max_num_seqs, max_model_len = batch.token_ids.shape
        # By row: the start of a step's tokens, and their end if it needs logits.
        self._starts, self._ends = np.zeros((2, max_num_seqs), np.int64)
        self._rows, self._counts, self._no_drafts, self._num_samples = np.zeros(
            (4, max_num_seqs), np.int64
        )
        addresses: dict[str, NDArray[Any]] = {
            "num_tokens": self._ends,
            "num_computed_tokens": self._starts,
            "block_tables": batch.block_tables[group],
            "rows": self._rows,
            "counts": self._counts,
            "num_drafts": self._no_drafts,
            "num_samples": self._num_samples,
        }
        self._gatherer = _native.InputGatherer(
            *(max_num_seqs, max_model_len, 1, batch.blocks, kv.block_size),
            {name: array.ctypes.data for name, array in addresses.items()}
            | {"token_ids": batch.token_ids.ctypes.data + shift * batch.token_ids.itemsize},
        )

    def gather(
        self, rows: LongArray, starts: LongArray, counts: LongArray, wanted: NDArray[np.bool_]
    ) -> StepInputs:
        """Gather the inputs of a step.

        Args:
            rows: int64 [R], distinct rows.
            starts: int64 [R], positions of their first tokens.
            counts: int64 [R], more than 0.
            wanted: bool [R], True for rows that need the logits of their last token.
        """
        num_reqs = len(rows)
        self._rows[:num_reqs] = rows
        self._counts[:num_reqs] = counts
        self._starts[rows] = starts
        self._ends[rows] = np.where(wanted, starts + counts, -1)
        buffers = self._steps.buffers(int(counts.sum()), num_reqs)
        num_samples = self._gatherer.run(num_reqs, buffers.native)
        size = StepSize(int(buffers.table.query_start_loc[num_reqs]), num_reqs, num_samples)
        if self._adapters is not None:
            slots = buffers.table.first(size).extra[ADAPTER_SLOTS.name]
            self._target.batch.fill(ADAPTER_SLOTS.name, slots, rows, starts, counts)
            slots[~np.isin(slots, self._adapters.used)] = -1
        return StepInputs(
            req_ids=[],
            rows=self._rows[:num_reqs],
            counts=self._counts[:num_reqs],
            num_samples=self._num_samples[:num_reqs],
            sampling=np.flatnonzero(wanted),
            size=size,
            table=buffers.table,
        )

    def run(self, inputs: StepInputs) -> StepResult:
        """Run the step that was gathered last."""
        return self._steps.run(inputs, None)

    def copy_blocks(self, src_dst_pairs: Sequence[tuple[int, int]]) -> None:
        """Implement `Proposer`."""
        self._target.ops.copy_blocks(self._memory, src_dst_pairs)


class DraftSampler:
    """Sampler of the drafts of one proposal, position by position.

    A draft that must equal the target's sample is drawn by the same rule with the same random
    numbers. Rejection sampling needs separate random numbers and the drafts' distributions.

    Args:
        target: the requests.
        rows: int64 [R].
        counts: int64 [R], drafts for each.
    """

    def __init__(self, target: Target, rows: LongArray, counts: LongArray) -> None:
        speculative = target.setup.config.speculation.speculative_config
        assert speculative is not None
        self._rejection = speculative.acceptance == "rejection"
        self._target, self._rows, self._counts = target, rows, counts
        self._drafts: list[list[int]] = [[] for _ in rows]
        self._probs: list[list[NDArray[np.float32]]] = [[] for _ in rows]

    def sample(self, at: LongArray, logits: Tensor) -> tuple[LongArray, LongArray]:
        """Draw one more draft for requests that have equal numbers of drafts.

        Args:
            at: int64 [A], indices of the requests.
            logits: float32 [A, V].

        Returns:
            The requests that need another draft, as indices into `at`, and their new drafts.
        """
        num_drafts = len(self._drafts[at[0]])
        ops, rows = self._target.ops, self._rows[at]
        sampling, ahead = self._target.sampling, np.full(len(rows), num_drafts)
        params = sampling.params(rows, ahead)
        if self._rejection:
            params["stream"] = DRAFT
        tokens: LongArray = ops.to_host(ops.sample(logits, params))
        good = tokens >= 0  # else the logits are not finite: drafts end there
        for i in np.flatnonzero(good).tolist():
            self._drafts[at[i]].append(int(tokens[i]))
        if self._rejection:
            step = rows_per_chunk(logits.shape[1])
            for begin in range(0, len(at), step):
                some = slice(begin, begin + step)
                probs = sampling_probs(ops, logits[some], params[some]).astype(np.float32)
                for i in np.flatnonzero(good[some]).tolist():
                    self._probs[at[begin + i]].append(probs[i])
        more = np.flatnonzero(good & (self._counts[at] > num_drafts + 1))
        return more, tokens[more]

    def proposal(self) -> Proposal:
        """Return all drafts."""
        probs = [row for rows in self._probs for row in rows]
        return Proposal(self._drafts, np.stack(probs) if probs else None)
