"""Runners of a step's forward pass: layer by layer from Python, or as a captured plan.

The captured plan is the same forward pass, recorded once: a list of kernel calls with fixed
addresses that the native code runs without Python. One plan serves steps of every size: a call
fixes all shapes except the number of rows, and the inputs of every step are gathered into the
same buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.attention.base import AttentionBackend
from octavo.kernels.base import Ops
from octavo.kernels.memory import Arena
from octavo.kernels.native import NativeOps
from octavo.layers.adapter import Adapters
from octavo.layers.adapter_table import ADAPTER_SLOTS
from octavo.layers.encoder_lens import ENCODER_LENS
from octavo.layers.mrope import MROPE
from octavo.layers.step import Handed, StepContext, StepRotary
from octavo.layers.step_table import StepTable
from octavo.models.base import Model
from octavo.models.cache import CacheSpec
from octavo.models.decoder import DecoderModel
from octavo.system.tensor import Tensor, empty, zeros
from octavo.worker.embeds import EmbedWriter
from octavo.worker.input_batch import StepBuffers, StepInputs

_NO_LOGITS = empty(0, 0, dtype="float32")


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of decode rows to capture: 1, 2, 4, multiples of 8 to 256, then of 32.

    The last number is `max_num_seqs`.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_num_seqs, 32)]
    return [n for n in sizes if n < max_num_seqs] + [max_num_seqs]


@dataclass(slots=True)
class StepResult:
    """Result of a step's forward pass; the next step may overwrite it."""

    hidden: Tensor
    """Hidden states [T, hidden_size]."""
    logits: Tensor
    """Logits, float32 [S, vocab]."""
    kept: dict[int, Tensor]
    """Hidden states [T, hidden_size] after each layer in `kept_layers`."""
    tokens: Tensor | None = None
    """Tokens, int64 [S], if the runner has already chosen them."""
    handed: Handed | None = None
    """Output of a stage for the next one, instead of logits: see `StepContext`. It may have extra
    rows at its end that belong to no token."""


def longest_context(table: StepTable[Any]) -> int:
    """Return the longest context of a step's requests, also of those of cross attention.

    Args:
        table: the step's arrays on the host, of exactly its size.
    """
    longest = int(table.seq_lens.max())
    lens = table.extra.get(ENCODER_LENS.name)
    return longest if lens is None else max(longest, int(lens.max()))


class StepRunner(Protocol):
    """Runner of the model on a step's inputs."""

    def buffers(self, num_tokens: int, num_reqs: int) -> StepBuffers:
        """Return the buffers for the inputs of the next step, of the given size."""
        ...

    def run(self, inputs: StepInputs, params: NDArray[np.void] | None) -> StepResult:
        """Run a step.

        Args:
            inputs: gathered into the buffers that `buffers` returned last.
            params: `SAMPLING_ROW` [S], if tokens may be chosen from the logits as they are.
        """
        ...

    def put_tokens(self, tokens: Tensor) -> None:
        """Store tokens int64 [S] that the sampler has chosen for the last step."""
        ...


class ExpertSteps(StepRunner, Protocol):
    """Runner of a model whose experts several engines divide."""

    def serve(self) -> None:
        """Compute this engine's experts in a step of other engines."""
        ...


class EagerSteps:
    """Runner that calls the layers one after the other from Python.

    Args:
        model: the model to run.
        ops: the model's table of operations.
        backend: computes attention.
        caches: the model's caches, as its blocks use them.
        kinds: the kind of cache of each KV-cache group.
        groups: index of the KV-cache group of each cache.
        buffers: inputs of a step of the largest size.
        kept_layers: layers with hidden states to return.
        received: input of a stage other than the first one.
        progress: see `StepContext`.
        adapters: the model's adapters; None: it has none.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        backend: AttentionBackend,
        caches: Sequence[Any],
        kinds: Sequence[CacheSpec],
        groups: Sequence[int],
        buffers: StepBuffers,
        kept_layers: tuple[int, ...] = (),
        received: Handed | None = None,
        progress: _native.StepProgress | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._buffers = buffers
        self.adapters = adapters
        self.model = model
        self._ops = ops
        self.backend = backend
        self.caches = caches
        self._kinds, self._groups = kinds, groups
        self.kept_layers = kept_layers
        self._received, self._progress = received, progress
        spec, tokens = model.spec, len(buffers.table.input_ids)
        deepstack = [
            ops.to_device(zeros(tokens, spec.hidden_size, dtype=model.dtype))
            for _ in range(spec.deepstack)
        ]
        self.embeds = EmbedWriter(ops, spec.embed_size, model.dtype, deepstack)
        self._rows: Tensor | None = None
        """int64 [tokens], index of each token; None: the model has no sections of positions."""
        if MROPE in buffers.table.extra:
            self._rows = ops.to_device(np.arange(tokens))

    def buffers(self, num_tokens: int, num_reqs: int) -> StepBuffers:
        """Implement `StepRunner`."""
        return self._buffers

    def put_tokens(self, tokens: Tensor) -> None:
        """Do nothing: the next step's inputs contain the tokens."""

    def serve(self) -> None:
        """Implement `ExpertSteps`."""
        assert isinstance(self.model, DecoderModel)
        none: StepTable[Tensor] = self._buffers.table.map(self._ops.to_device)
        in_group = self.adapters is not None and self.adapters.in_group
        with self.use_adapters(none) if in_group else nullcontext():
            self.model.serve_experts()

    def context(
        self,
        table: StepTable[Tensor],
        max_query_len: int,
        max_seq_len: int,
    ) -> StepContext:
        """Return the context of a step for the model's blocks.

        Args:
            table: the step's arrays, of exactly its size.
            max_query_len: most tokens of a request in the step.
            max_seq_len: longest context.
        """
        metadata = {
            group: self._kinds[group].metadata(table, group, max_query_len, max_seq_len)
            for group in set(self._groups)  # a stage may have no layer of a group
        }
        received = self._received
        if received is not None:
            rows, (x, *others) = len(table.input_ids), received
            residual, inputs = (None if tensor is None else tensor[:rows] for tensor in others)
            received = x[:rows], residual, inputs
        tokens, rotary = len(table.input_ids), None
        if self._rows is not None:
            rotary = StepRotary(self._rows[:tokens], table.extra[MROPE])
        return StepContext(
            positions=table.positions,
            caches=self.caches,
            metadata=[metadata[group] for group in self._groups],
            backend=self.backend,
            kept_layers=self.kept_layers,
            received=received,
            progress=self._progress,
            arrays=table.extra,
            rotary=rotary,
            deepstack=[level[:tokens] for level in self.embeds.deepstack],
        )

    def write_embeds(
        self, step: StepContext, input_ids: Tensor, embeds: Sequence[tuple[int, Tensor]]
    ) -> None:
        """Look a step's tokens up, and write `StepInputs.embeds` over the rows of their tokens."""
        assert isinstance(self.model, DecoderModel)
        step.embeds = self.model.embed_input_ids(input_ids)
        self.embeds.write(step.embeds, embeds)

    def use_adapters(self, table: StepTable[Tensor]) -> AbstractContextManager[None]:
        """Return the context in which the layers compute with the adapters of a step's tokens."""
        assert self.adapters is not None
        return self.adapters.use(table.extra[ADAPTER_SLOTS.name])

    def needs_adapters(self, inputs: StepInputs) -> bool:
        """Return True if a token of a step has an adapter, in any engine that divides experts."""
        return has_adapters(inputs) or (self.adapters is not None and self.adapters.in_group)

    def run(self, inputs: StepInputs, params: NDArray[np.void] | None) -> StepResult:
        """Implement `StepRunner`."""
        table = inputs.table.first(inputs.size)
        tensors: StepTable[Tensor] = table.map(self._ops.to_device)
        with self.use_adapters(tensors) if self.needs_adapters(inputs) else nullcontext():
            return self._run(inputs, tensors, longest_context(table))

    def _run(self, inputs: StepInputs, tensors: StepTable[Tensor], max_seq_len: int) -> StepResult:
        step = self.context(tensors, int(inputs.counts.max()), max_seq_len)
        if (inputs.embeds or step.deepstack) and self.model.spec.has_embed:
            self.write_embeds(step, tensors.input_ids, inputs.embeds)
        hidden = self.model.forward(tensors.input_ids, step)
        if step.handed is not None:
            return StepResult(hidden, _NO_LOGITS, step.kept, handed=step.handed)
        if not self.model.spec.generates:
            return StepResult(hidden, _NO_LOGITS, step.kept)
        return StepResult(hidden, self.model.head(hidden, tensors.logits_indices), step.kept)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Recorded forward pass, and the places of its results; see `StepResult`."""

    look_up: _native.Plan
    """Look-up of the embedding table, if it is a separate plan."""
    embeds: Tensor | None
    """Result of `look_up`; None: `plan` looks up."""
    plan: _native.Plan
    hidden: Tensor
    logits: Tensor
    kept: dict[int, Tensor]
    handed: Handed | None


class CapturedSteps:
    """Runner of a recorded forward pass: a plan of native kernel calls.

    A model with adapters has a second plan, for steps in which some tokens have adapters.

    Args:
        eager: the runner to record. Its model and backend must be the native ones.
        ops: the model's table of operations.
        activations: memory of the forward pass's intermediate results.
        logits: memory of the logits and of the intermediate results of the head.
        prompt_embeds: True if prompts may contain embeddings: the model must be a `DecoderModel`.
            Then the embedding table's look-up is a separate plan, and the runner writes the
            embeddings between the two plans.
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
        self._write_embeds = eager.embeds.write
        self._eager = eager
        self._owners = activations, logits  # keeps the memory that the plans refer to
        table: StepTable[Tensor] = buffers.table.map(ops.to_device)

        def record() -> _Recorded:
            plan, look_up = _native.Plan(), _native.Plan()
            step_logits: Tensor = _NO_LOGITS
            step = eager.context(table, len(table.input_ids), 0)
            if prompt_embeds and eager.model.spec.has_embed:
                assert isinstance(eager.model, DecoderModel)
                with ops.record(look_up, activations):
                    step.embeds = eager.model.embed_input_ids(table.input_ids)
            embeds = step.embeds
            with ops.record(plan, activations):
                hidden = eager.model.forward(table.input_ids, step)
            if step.handed is None and eager.model.spec.generates:
                plan.bind("samples")
                with ops.record(plan, logits):
                    step_logits = eager.model.head(hidden, table.logits_indices)
            return _Recorded(look_up, embeds, plan, hidden, step_logits, step.kept, step.handed)

        self._plain = record()
        self._adapted: _Recorded | None = None
        """Step with adapters; None: the model has none."""
        if eager.adapters is not None:
            with eager.use_adapters(table):
                self._adapted = record()
        self._service, self._adapted_service = _native.Plan(), _native.Plan()
        if isinstance(eager.model, DecoderModel) and eager.model.exchanges:
            with ops.record(self._service, activations):
                eager.model.serve_experts()
            if eager.adapters is not None:
                with eager.use_adapters(table), ops.record(self._adapted_service, activations):
                    eager.model.serve_experts()

    def buffers(self, num_tokens: int, num_reqs: int) -> StepBuffers:
        """Implement `StepRunner`."""
        return self._buffers

    def put_tokens(self, tokens: Tensor) -> None:
        """Do nothing: the next step's inputs contain the tokens."""

    def serve(self) -> None:
        """Implement `ExpertSteps`."""
        adapters = self._eager.adapters
        in_group = adapters is not None and adapters.in_group
        service = self._adapted_service if in_group else self._service
        service.run(1, 0, 0)  # no call reads the number of rows; calls without rows are left out

    def run(self, inputs: StepInputs, params: NDArray[np.void] | None) -> StepResult:
        """Implement `StepRunner`."""
        size = inputs.size
        step = self._plain
        if self._adapted is not None and self._eager.needs_adapters(inputs):
            step = self._adapted
        if step.embeds is not None:
            step.look_up.run(size.tokens, size.requests, size.samples)
            self._write_embeds(step.embeds, inputs.embeds)
        step.plan.run(size.tokens, size.requests, size.samples)
        kept = {layer: hidden[: size.tokens] for layer, hidden in step.kept.items()}
        hidden, logits = step.hidden[: size.tokens], step.logits[: size.samples]
        return StepResult(hidden, logits, kept, handed=step.handed)


def has_adapters(inputs: StepInputs) -> bool:
    """Return True if some tokens of a step have adapters."""
    slots = inputs.table.extra.get(ADAPTER_SLOTS.name)
    return slots is not None and bool((slots[: inputs.size.tokens] >= 0).any())
