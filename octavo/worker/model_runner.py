"""The model runner: from a scheduler's step to sampled tokens, on one device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from octavo.attention.base import KV_CACHE_DTYPES, get_attention_backend
from octavo.kernels.memory import map_memory
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import get_ops
from octavo.messages import LogprobsLists, ModelRunnerOutput, NewRequestData, SchedulerOutput
from octavo.models.loader import load_model
from octavo.profiler import span
from octavo.sampling.sampler import Sampler, prompt_logprobs
from octavo.sampling.state import SamplingState
from octavo.worker.graphs import CapturedSteps, EagerSteps, StepRunner
from octavo.worker.input_batch import InputBatch, StepInputs
from octavo.worker.setup import WorkerSetup

# Prompt logprobs need logits for every prompt token. They are made for this many tokens at a time,
# or for `max_num_seqs` if that is less: no more than the memory plan has for an ordinary step.
PROMPT_LOGPROBS_ROWS = 64


@dataclass(slots=True)
class _Step:
    """What `execute_model` leaves for `sample_tokens`."""

    inputs: StepInputs
    logits: torch.Tensor
    """float32 [S, vocab] for the S requests that sample."""
    prompt_logprobs: dict[str, LogprobsLists]


class ModelRunner:
    """Holds the model, the KV cache and the rows of the live requests."""

    def __init__(self, setup: WorkerSetup, device: torch.device) -> None:
        self.device = device
        self.spec = setup.spec
        config = setup.config
        dtype: torch.dtype = getattr(torch, setup.dtype)
        self.backend = get_attention_backend(config.device.attention_backend, device)
        self.model = load_model(
            setup.spec,
            setup.model_path,
            dtype=dtype,
            device=device,
            load_format=config.load.load_format,
            seed=config.model.seed,
            max_model_len=setup.max_model_len,
            quantization=config.model.quantization,
        )
        kv = setup.kv_cache
        cache_dtype = KV_CACHE_DTYPES.get(config.cache.kv_cache_dtype, dtype)
        shape = self.backend.kv_cache_shape(
            kv.num_blocks,
            kv.block_size,
            setup.spec.num_key_value_heads,
            setup.spec.head_size,
            cache_dtype,
        )
        self.kv_tensors = [_allocate(shape, cache_dtype, device) for _ in range(kv.group_size)]
        self.kv_caches = [self.kv_tensors[kv.layer_to_tensor[i]] for i in range(kv.num_layers)]
        layer_groups = [kv.layer_to_group[i] for i in range(kv.num_layers)]
        eager = EagerSteps(self.model, self.backend, self.kv_caches, layer_groups)
        max_num_seqs = config.scheduler.max_num_seqs
        self.batch = InputBatch(max_num_seqs, setup.max_model_len, setup.max_num_batched_tokens, kv)
        self.sampling = SamplingState(max_num_seqs, setup.spec.vocab_size, device)
        ops = get_ops(device)
        self.sampler = Sampler(ops)
        self.steps: StepRunner = eager
        if self.backend.name == "cpu" and not config.model.enforce_eager:
            assert isinstance(ops, NativeOps)
            tokens = setup.max_num_batched_tokens
            self.steps = CapturedSteps(
                eager,
                ops,
                self.batch.buffers,
                activation_nbytes=setup.spec.activation_nbytes(tokens, setup.dtype),
            )
        self._prompt_logprobs_rows = min(PROMPT_LOGPROBS_ROWS, max_num_seqs)
        self._prompt_logprobs: dict[str, int] = {}
        """Requests that asked for prompt logprobs, and how many for each position."""
        self._failed: dict[str, str] = {}
        """Requests whose parameters could not be set up, until the step that reports it."""
        self._step: _Step | None = None

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Runs the forward pass of one step and keeps its logits for `sample_tokens`."""
        with span("prepare_inputs"):
            self._update_rows(scheduler_output)
            if not scheduler_output.num_scheduled_tokens:
                self._step = None
                return
            inputs = self.batch.gather(scheduler_output.num_scheduled_tokens)
        with span("forward") as note:
            note(rows=len(inputs.input_ids))
            hidden, logits = self.steps.run(inputs)
        self._step = _Step(inputs, logits, self._compute_prompt_logprobs(inputs, hidden))

    def sample_tokens(self) -> ModelRunnerOutput:
        """Samples one token for each request whose known tokens are all computed."""
        step, self._step = self._step, None
        errors, self._failed = self._failed, {}
        if step is None:
            return ModelRunnerOutput(errors=errors)
        inputs = step.inputs
        rows = inputs.rows[inputs.samples]
        sampled: list[list[int]] = [[] for _ in inputs.req_ids]
        logprobs: dict[str, LogprobsLists] = {}
        if len(rows):
            out = self.sampler.sample(step.logits, self.sampling.metadata(rows))
            indices = np.flatnonzero(inputs.samples)
            tokens = out.token_ids.cpu().numpy()
            good = np.ones(len(rows), np.bool_)
            for i, message in out.errors.items():
                errors[inputs.req_ids[indices[i]]] = message
                good[i] = False
            self.batch.append_tokens(rows[good], tokens[good])
            self.sampling.append_token(rows[good], tokens[good])
            for i, token in zip(indices[good].tolist(), tokens[good].tolist(), strict=True):
                sampled[i] = [token]
            for i, lists in out.logprobs.items():
                logprobs[inputs.req_ids[indices[i]]] = lists
        return ModelRunnerOutput(
            req_ids=inputs.req_ids,
            sampled_token_ids=sampled,
            logprobs=logprobs,
            prompt_logprobs=step.prompt_logprobs,
            errors=errors,
        )

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
            lists = LogprobsLists([], [], [])
            for at in range(0, count, self._prompt_logprobs_rows):
                n = min(self._prompt_logprobs_rows, count - at)
                logits = self.model.compute_logits(hidden[begin + at : begin + at + n])
                targets = self.batch.token_ids[row, first + at + 1 : first + at + 1 + n]
                part = prompt_logprobs(
                    self.sampler.ops,
                    logits,
                    torch.from_numpy(targets.astype(np.int64)).to(self.device),
                    k,
                )
                lists.token_ids += part.token_ids
                lists.logprobs += part.logprobs
                lists.ranks += part.ranks
            result[req_id] = lists
        return result


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zeroed tensor; on a CPU its pages are taken from the system only when first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    numel = math.prod(shape)
    return map_memory(numel * dtype.itemsize).view(dtype).view(shape)
