"""How a step's forward pass is run: layer by layer from Python, or as a captured plan.

The captured plan is the same forward pass, recorded once: a list of kernel calls with fixed
addresses that the native side runs by itself. One plan serves steps of every size, since a call
knows its shapes but for the number of rows, and every step's inputs are gathered into the same
buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo import _native
from octavo.attention.base import AttentionBackend
from octavo.kernels.memory import Arena
from octavo.kernels.native import NativeOps
from octavo.layers.step import StepContext
from octavo.layers.step_table import StepTable
from octavo.models.base import Model
from octavo.models.cache import CacheSpec
from octavo.models.decoder import DecoderModel
from octavo.worker.input_batch import StepBuffers, StepInputs

_NO_LOGITS = torch.empty(0, 0)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of decode rows to capture: 1, 2, 4, then multiples of 8 up to 256, then of 32.

    The last one is `max_num_seqs`.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_num_seqs, 32)]
    return [n for n in sizes if n < max_num_seqs] + [max_num_seqs]


@dataclass(slots=True)
class StepResult:
    """What a step's forward pass brought; the next one may overwrite it."""

    hidden: Tensor
    """[T, hidden_size]"""
    logits: Tensor
    """float32 [S, vocab]."""
    kept: dict[int, Tensor]
    """[T, hidden_size] behind each of the layers that were asked for."""
    tokens: Tensor | None = None
    """int64 [S], if they have been chosen already."""
    handed: tuple[Tensor, Tensor | None] | None = None
    """What a stage hands on to the next one instead of logits: see `StepContext`; some rows more
    may belong to no token."""


class StepRunner(Protocol):
    """Runs the model on a step's inputs."""

    def buffers(self, num_tokens: int, num_reqs: int) -> StepBuffers:
        """Where the inputs of the next step, of that size, are to be gathered."""
        ...

    def run(self, inputs: StepInputs, params: NDArray[np.void] | None) -> StepResult:
        """Runs a step.

        Args:
            inputs: gathered into what `buffers` returned last.
            params: `SAMPLING_ROW` [S], if tokens may be chosen from the logits as they are.
        """
        ...

    def put_tokens(self, tokens: Tensor) -> None:
        """Takes note of tokens int64 [S] that were chosen outside for the step run last."""
        ...


class EagerSteps:
    """Runs the layers one after the other from Python.

    Args:
        model: what to run.
        backend: computes attention.
        caches: the model's caches, as its blocks use them.
        kinds: the kind of cache of each KV-cache group.
        groups: for each of the caches the index of its KV-cache group.
        buffers: for a step of the largest size.
        kept_layers: layers whose hidden states are returned.
        received: where the input of a stage is that is not the first one.
        progress: see `StepContext`.
    """

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        caches: Sequence[Any],
        kinds: Sequence[CacheSpec],
        groups: Sequence[int],
        buffers: StepBuffers,
        kept_layers: tuple[int, ...] = (),
        received: tuple[Tensor, Tensor | None] | None = None,
        progress: _native.StepProgress | None = None,
    ) -> None:
        self._buffers = buffers
        self.model = model
        self.backend = backend
        self.caches = caches
        self._kinds, self._groups = kinds, groups
        self.kept_layers = kept_layers
        self._received, self._progress = received, progress

    def buffers(self, num_tokens: int, num_reqs: int) -> StepBuffers:
        """See `StepRunner`."""
        return self._buffers

    def put_tokens(self, tokens: Tensor) -> None:
        """See `StepRunner`; the next step's inputs have them."""

    def context(
        self, table: StepTable[Tensor], max_query_len: int, max_seq_len: int
    ) -> StepContext:
        """What the model's blocks are told of a step.

        Args:
            table: its arrays, no larger than it is.
            max_query_len: most tokens of a request in it.
            max_seq_len: longest context.
        """
        metadata = [
            kind.metadata(table, group, max_query_len, max_seq_len)
            for group, kind in enumerate(self._kinds)
        ]
        received = self._received
        if received is not None:
            rows, (x, residual) = len(table.input_ids), received
            received = x[:rows], None if residual is None else residual[:rows]
        return StepContext(
            positions=table.positions,
            caches=self.caches,
            metadata=[metadata[group] for group in self._groups],
            backend=self.backend,
            kept_layers=self.kept_layers,
            received=received,
            progress=self._progress,
            arrays=table.extra,
        )

    def run(self, inputs: StepInputs, params: NDArray[np.void] | None) -> StepResult:
        """See `StepRunner`."""
        table = inputs.table.first(inputs.size)
        max_seq_len = int(table.seq_lens.max())
        tensors = table.map(torch.from_numpy)
        step = self.context(tensors, int(inputs.counts.max()), max_seq_len)
        if inputs.embeds and self.model.spec.has_embed:
            assert isinstance(self.model, DecoderModel)
            step.embeds = self.model.embed_input_ids(tensors.input_ids)
            _put_embeds(step.embeds, inputs.embeds)
        hidden = self.model.forward(tensors.input_ids, step)
        if step.handed is not None:
            return StepResult(hidden, _NO_LOGITS, step.kept, handed=step.handed)
        return StepResult(hidden, self.model.head(hidden, tensors.logits_indices), step.kept)


class CapturedSteps:
    """Runs the plan of native kernel calls that the forward pass was recorded as.

    Args:
        eager: what to record. Its model and backend must be the native ones.
        ops: the model's table of operations.
        activations: where the forward pass has its intermediate results.
        logits: where the logits are, and what they are made from.
        prompt_embeds: whether embeddings may come with prompts: the model must be a `DecoderModel`.
            They are put in between two plans, of the look-up in the table and of all that follows.
    """

    def __init__(
        self,
        eager: EagerSteps,
        ops: NativeOps,
        *,
        activations: Arena,
        logits: Arena,
        prompt_embeds: bool = False,
    ) -> None:
        self._buffers = buffers = eager.buffers(0, 0)
        self._owners = eager, activations, logits  # of the memory that the plan has addresses of
        self._plan = _native.Plan()
        table = buffers.table.map(torch.from_numpy)
        step = eager.context(table, len(table.input_ids), 0)
        self._look_up, self._embeds = _native.Plan(), None
        if prompt_embeds and eager.model.spec.has_embed:
            assert isinstance(eager.model, DecoderModel)
            with ops.record(self._look_up, activations):
                self._embeds = step.embeds = eager.model.embed_input_ids(table.input_ids)
        with ops.record(self._plan, activations):
            self._hidden = eager.model.forward(table.input_ids, step)
        self._logits, self._handed = _NO_LOGITS, step.handed
        if step.handed is None:
            self._plan.bind("samples")
            with ops.record(self._plan, logits):
                self._logits = eager.model.head(self._hidden, table.logits_indices)
        self._kept = step.kept

    def buffers(self, num_tokens: int, num_reqs: int) -> StepBuffers:
        """See `StepRunner`."""
        return self._buffers

    def put_tokens(self, tokens: Tensor) -> None:
        """See `StepRunner`; the next step's inputs have them."""

    def run(self, inputs: StepInputs, params: NDArray[np.void] | None) -> StepResult:
        """See `StepRunner`."""
        size = inputs.size
        if self._embeds is not None:
            self._look_up.run(size.tokens, size.requests, size.samples)
            _put_embeds(self._embeds, inputs.embeds)
        self._plan.run(size.tokens, size.requests, size.samples)
        kept = {layer: hidden[: size.tokens] for layer, hidden in self._kept.items()}
        hidden, logits = self._hidden[: size.tokens], self._logits[: size.samples]
        return StepResult(hidden, logits, kept, handed=self._handed)


def _put_embeds(x: Tensor, embeds: Sequence[tuple[int, Tensor]]) -> None:
    """Puts embeddings that came with prompts in their places of [T, embed_size], in its dtype."""
    for begin, rows in embeds:
        x[begin : begin + len(rows)] = rows
