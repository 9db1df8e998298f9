"""The model runner: from a scheduler's step to sampled tokens, on one device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.attention.base import KV_CACHE_DTYPES
from octavo.kernels.memory import to_device
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.messages import (
    CoreSamplingParams,
    GrammarOutput,
    LogprobsLists,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from octavo.models.cache import AttentionCache
from octavo.models.loader import load_model
from octavo.models.weight_cache import WeightCache
from octavo.platforms.base import Platform
from octavo.profiler import span
from octavo.sampling.metadata import SamplingMetadata
from octavo.sampling.plugins import load_plugins
from octavo.sampling.sampler import FEW_CANDIDATES, NOT_FINITE, Sampler, prompt_logprobs
from octavo.sampling.state import SamplingState
from octavo.worker.graphs import EagerSteps
from octavo.worker.input_batch import UNKNOWN, InputBatch, LongArray, StepBuffers, StepInputs
from octavo.worker.setup import WorkerSetup

# Prompt logprobs need logits for every prompt token. They are made for this many tokens at a time,
# or for `max_num_seqs` if that is less: no more than the memory plan has for an ordinary step.
PROMPT_LOGPROBS_ROWS = 64


@dataclass(slots=True)
class _Step:
    """What `execute_model` leaves for `sample_tokens`."""

    inputs: StepInputs
    metadata: SamplingMetadata | None
    """Of the S requests that sample; None: there are none."""
    logits: torch.Tensor
    """float32 [S, vocab]."""
    tokens: torch.Tensor | None
    """int64 [S], if they have been chosen already."""
    prompt_logprobs: dict[str, LogprobsLists]


class SampledTokens:
    """Tokens int64 [S] on their way to the host; on a CPU they are there."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tokens = tokens
        if tokens.is_cuda:
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def ready(self) -> bool:
        """Whether `numpy` returns at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def numpy(self) -> LongArray:
        """int64 [S]; waits for them. -1: the row's logits were not finite."""
        if self._event is not None:
            self._event.synchronize()
        array: LongArray = self._tokens.numpy()
        return array


class PendingOutput:
    """A step's result, whose tokens may still be on their way from the device."""

    def __init__(
        self, output: ModelRunnerOutput, indices: LongArray, tokens: SampledTokens | None
    ) -> None:
        self._output = output  # all but the tokens
        self._indices = indices  # of the requests that they belong to
        self._tokens = tokens

    def ready(self) -> bool:
        """Whether `get` returns at once."""
        return self._tokens is None or self._tokens.ready()

    def get(self) -> ModelRunnerOutput:
        """The result; waits for the tokens. From any thread, once."""
        output = self._output
        if self._tokens is not None:
            for i, token in zip(self._indices.tolist(), self._tokens.numpy().tolist(), strict=True):
                req_id = output.req_ids[i]
                if token < 0:
                    output.errors.setdefault(req_id, NOT_FINITE)
                if req_id not in output.errors:
                    output.sampled_token_ids[i] = [token]
        return output


@dataclass(slots=True)
class _Unknown:
    """Tokens that the host's rows do not have yet."""

    rows: LongArray
    owners: LongArray
    places: LongArray
    tokens: SampledTokens


class ModelRunner:
    """Holds the model and, once `initialize_kv_cache` was called, KV cache and live requests."""

    def __init__(self, setup: WorkerSetup, platform: Platform, device: torch.device) -> None:
        self.device = device
        self.spec = setup.spec
        config = setup.config
        dtype: torch.dtype = getattr(torch, setup.dtype)
        ops = platform.make_ops(config.device)
        self.backend = platform.make_attention_backend(setup, device)
        # Before the weights: what is wrong with them is to be known at once.
        self._plugins = load_plugins(config.scheduler.max_num_seqs, setup.spec.vocab_size)
        self.model = load_model(
            setup.spec,
            setup.model_path,
            dtype=dtype,
            device=device,
            load_format=config.load.load_format,
            seed=config.model.seed,
            max_model_len=setup.max_model_len,
            quantization=config.model.quantization,
            ops=ops,
            cache=WeightCache.from_config(config),
        )
        self.ops, self.setup, self.platform = ops, setup, platform
        self.sampler = Sampler(ops)
        self._prompt_logprobs_rows = min(PROMPT_LOGPROBS_ROWS, config.scheduler.max_num_seqs)
        self._prompt_logprobs: dict[str, int] = {}
        """Requests that asked for prompt logprobs, and how many for each position."""
        self._failed: dict[str, str] = {}
        """Requests whose parameters could not be set up, until the step that reports it."""
        self._unknown: list[_Unknown] = []
        self._step: _Step | None = None

    def initialize_kv_cache(self, kv: KVCacheConfig, *, capture: bool = True) -> None:
        """Allocates the KV cache and all that steps need; captures steps."""
        setup, device, ops = self.setup, self.device, self.ops
        config, dtype = setup.config, self.model.dtype
        cache_dtype = KV_CACHE_DTYPES.get(config.cache.kv_cache_dtype, dtype)
        shapes = []
        for cache in setup.spec.caches:
            assert isinstance(cache, AttentionCache)
            heads = cache.num_kv_heads, cache.head_size
            shapes.append(
                self.backend.kv_cache_shape(kv.num_blocks, kv.block_size, *heads, cache_dtype)
            )
        self.kv_tensors = [
            self.platform.allocate_cache(shapes[0], cache_dtype, device)
            for _ in range(kv.group_size)
        ]
        self.kv_caches = [
            self.kv_tensors[tensor].view(shape)
            for tensor, shape in zip(kv.layer_to_tensor, shapes, strict=True)
        ]
        tokens, max_num_seqs = setup.max_num_batched_tokens, config.scheduler.max_num_seqs
        self.batch = InputBatch(max_num_seqs, setup.max_model_len, kv)
        self.sampling = SamplingState(max_num_seqs, setup.spec.vocab_size, self._plugins)
        buffers = StepBuffers(self.batch.layout(tokens, max_num_seqs))
        eager = EagerSteps(self.model, self.backend, self.kv_caches, kv.layer_to_group, buffers)
        self.steps = self.platform.make_steps(setup, ops, eager, self.batch, capture=capture)

    def run_largest_step(self) -> int:
        """Runs a step of the largest size on a KV cache that is made for it and let go again.

        Returns:
            Bytes of that cache.
        """
        setup = self.setup
        scheduler, cache = setup.config.scheduler, setup.config.cache
        tokens = setup.max_num_batched_tokens
        num_reqs = min(scheduler.max_num_seqs, tokens)
        count = min(setup.max_model_len, tokens // num_reqs)
        blocks = -(-count // cache.block_size)
        groups = make_kv_cache_groups(setup.spec.caches)
        kv = KVCacheConfig(blocks + 1, cache.block_size, groups)
        self.initialize_kv_cache(kv, capture=False)
        # What takes most: logits that are changed beside a copy of them, and more candidates than
        # can be found without sorting.
        params = CoreSamplingParams(
            temperature=1.0,
            top_p=0.9,
            logprobs=min(FEW_CANDIDATES + 1, setup.spec.vocab_size),
            logit_bias=(np.int32(0).tobytes(), np.float32(1).tobytes()),
        )
        # All requests write to the same blocks: what they compute means nothing.
        block_ids = [list(range(1, blocks + 1)) for _ in groups]
        requests = [
            NewRequestData(str(i), [0] * count, count, params, block_ids, 0)
            for i in range(num_reqs)
        ]
        self.execute_model(
            SchedulerOutput(
                scheduled_new_reqs=requests,
                num_scheduled_tokens={request.req_id: count for request in requests},
                total_num_scheduled_tokens=num_reqs * count,
            )
        )
        self.sample_tokens().get()
        nbytes = sum(tensor.nbytes for tensor in self.kv_tensors)
        del self.kv_tensors, self.kv_caches, self.steps, self.batch, self.sampling
        self._unknown.clear()
        return nbytes

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Launches the forward pass of one step and keeps its logits for `sample_tokens`."""
        scheduled = scheduler_output.num_scheduled_tokens
        with span("prepare_inputs"):
            self._update_rows(scheduler_output)
            if not scheduled:
                self._step = None
                return
            buffers = self.steps.buffers(
                scheduler_output.total_num_scheduled_tokens, len(scheduled)
            )
            inputs = self.batch.gather(scheduled, buffers)
            metadata = params = None
            if len(inputs.last_tokens):
                rows = inputs.rows[inputs.samples]
                self._collect_tokens(wait=self.sampling.needs_tokens(rows))
                metadata = self.sampling.metadata(rows)
                params = metadata.params if metadata.plain else None
        with span("forward") as note:
            note(rows=len(inputs.input_ids))
            hidden, logits, tokens = self.steps.run(inputs, buffers, params)
        prompt_logprobs = self._compute_prompt_logprobs(inputs, hidden)
        self._step = _Step(inputs, metadata, logits, tokens, prompt_logprobs)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> PendingOutput:
        """Samples one token for each request whose known tokens are all computed."""
        assert grammar is None, "no request has a grammar yet"
        step, self._step = self._step, None
        errors, self._failed = self._failed, {}
        if step is None:
            return PendingOutput(ModelRunnerOutput(errors=errors), np.empty(0, np.int64), None)
        inputs = step.inputs
        output = ModelRunnerOutput(
            req_ids=inputs.req_ids,
            sampled_token_ids=[[] for _ in inputs.req_ids],
            prompt_logprobs=step.prompt_logprobs,
            errors=errors,
        )
        indices = np.flatnonzero(inputs.samples)
        if step.metadata is None:
            return PendingOutput(output, indices, None)
        rows, tokens = inputs.rows[indices], step.tokens
        if tokens is None:
            sampled = self.sampler.sample(step.logits, step.metadata)
            tokens = sampled.token_ids
            self.steps.put_tokens(tokens)
            for i, message in sampled.errors.items():
                errors[inputs.req_ids[indices[i]]] = message
            for i, lists in sampled.logprobs.items():
                output.logprobs[inputs.req_ids[indices[i]]] = lists
        on_their_way = SampledTokens(tokens)
        if on_their_way.ready() and not self._unknown:
            known = np.maximum(on_their_way.numpy(), 0)  # a row that failed computes on in vain
            self.batch.append_tokens(rows, known)
            self.sampling.append(rows, known, np.ones_like(rows))
        else:
            places = self.batch.append_tokens(rows, np.full(len(rows), UNKNOWN))
            self.sampling.advance(rows, np.ones_like(rows))
            self._unknown.append(_Unknown(rows, self.batch.owners[rows], places, on_their_way))
        return PendingOutput(output, indices, on_their_way)

    def _collect_tokens(self, *, wait: bool) -> None:
        """Takes the tokens that have come from the device into the rows that still want them."""
        while self._unknown and (wait or self._unknown[0].tokens.ready()):
            step = self._unknown.pop(0)
            tokens = np.maximum(step.tokens.numpy(), 0)
            same = step.owners == self.batch.owners[step.rows]
            placed = same & (step.places >= 0)
            self.batch.token_ids[step.rows[placed], step.places[placed]] = tokens[placed]
            rows = step.rows[same]
            self.sampling.record(rows, tokens[same], np.ones_like(rows))

    def _update_rows(self, scheduler_output: SchedulerOutput) -> None:
        """Brings the persistent rows up to date with the scheduler."""
        for req_id in scheduler_output.finished_req_ids:
            row = self.batch.remove(req_id)
            if row is not None:
                self.sampling.remove_row(row)
                self._prompt_logprobs.pop(req_id, None)
        if scheduler_output.blocks_to_copy:
            self.backend.copy_blocks(self.kv_tensors, scheduler_output.blocks_to_copy)
        for data in scheduler_output.scheduled_new_reqs:
            self._add_row(data)
        cached = scheduler_output.scheduled_cached_reqs
        if cached.req_ids:
            row_of = self.batch.row_of
            rows = np.fromiter((row_of[r] for r in cached.req_ids), np.int64, len(cached.req_ids))
            self.batch.num_computed_tokens[rows] = cached.num_computed_tokens
            for row, block_ids in zip(rows.tolist(), cached.new_block_ids, strict=True):
                if block_ids is not None:
                    self.batch.append_blocks(row, block_ids)

    def _add_row(self, data: NewRequestData) -> None:
        row = self.batch.add(data)
        params = data.sampling_params
        try:
            self.sampling.add_row(row, params, data.token_ids, data.num_prompt_tokens)
        except Exception as error:  # whatever one request makes fail, fails that request only
            # The row stays without sampling state: greedy and plain.
            self._failed[data.req_id] = f"its sampling parameters cannot be used: {error}"
        if params.prompt_logprobs is not None:
            self._prompt_logprobs[data.req_id] = params.prompt_logprobs

    def _compute_prompt_logprobs(
        self, inputs: StepInputs, hidden: torch.Tensor
    ) -> dict[str, LogprobsLists]:
        """Logprobs of this step's prompt tokens, for the requests that asked for them."""
        result: dict[str, LogprobsLists] = {}
        if not self._prompt_logprobs:
            return result
        for i, req_id in enumerate(inputs.req_ids):
            k = self._prompt_logprobs.get(req_id)
            row = inputs.rows[i]
            begin, end = int(inputs.query_start_loc[i]), int(inputs.query_start_loc[i + 1])
            first = int(self.batch.num_computed_tokens[row])
            # The logits at position p tell of token p + 1, as long as that is a prompt token.
            count = min(end - begin, int(self.batch.num_prompt_tokens[row]) - 1 - first)
            if k is None or count <= 0:
                continue
            parts: list[LogprobsLists] = []
            for at in range(0, count, self._prompt_logprobs_rows):
                n = min(self._prompt_logprobs_rows, count - at)
                logits = self.model.head(hidden[begin + at : begin + at + n])
                targets = self.batch.token_ids[row, first + at + 1 : first + at + 1 + n]
                ids = to_device(targets.astype(np.int64), self.device)
                parts.append(prompt_logprobs(self.sampler.ops, logits, ids, k))
            result[req_id] = LogprobsLists.join(parts)
        return result
