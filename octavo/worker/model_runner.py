"""Model runner: computes a scheduler's step on one device, up to the sampled tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.checkpoints.base import Checkpoint, Tensors
from octavo.errors import RequestError
from octavo.kernels.base import HostCopy
from octavo.kernels.memory import release_memory
from octavo.kv_cache.groups import KVCacheConfig
from octavo.layers.adapter_table import ADAPTER_SLOTS
from octavo.messages import (
    AlignmentSpec,
    CoreSamplingParams,
    ExpertLoad,
    GrammarOutput,
    LogprobsLists,
    Modality,
    ModelRunnerOutput,
    NewRequestData,
    PoolingSpec,
    ScheduledRequest,
    SchedulerOutput,
)
from octavo.models.decoder import DecoderModel
from octavo.models.expert_cache import ExpertCache
from octavo.models.loader import ExpertReader, LoadedWeights, load_model
from octavo.models.open_model import open_model
from octavo.models.weight_cache import WeightCache
from octavo.observability.profiler import span
from octavo.plan.setup import WorkerSetup
from octavo.sampling.acceptance import ACCEPT, RECOVER, Drafted
from octavo.sampling.logits_processors.builtin import GrammarBitmask
from octavo.sampling.metadata import SamplingMetadata
from octavo.sampling.plugins import load_named, load_plugins
from octavo.sampling.sampler import NOT_FINITE, Sampler, prompt_logprobs
from octavo.sampling.state import SamplingState
from octavo.sampling.vllm_config import VllmConfig
from octavo.sampling.vllm_logits_processors import make_processor
from octavo.system.device import cpu_memory
from octavo.system.tensor import Tensor
from octavo.worker.adapters import make_adapters
from octavo.worker.encoder_cache import EncoderCache
from octavo.worker.expert_balancer import BalancedSteps, ExpertBalancer
from octavo.worker.expert_group import ExpertGroup, make_exchange, reason_of_end
from octavo.worker.expert_loads import ExpertLoads
from octavo.worker.expert_relay import ExpertRelay
from octavo.worker.graphs import EagerSteps, ExpertSteps, StepResult, StepRunner, has_adapters
from octavo.worker.group import Group, make_buffers, make_received
from octavo.worker.input_batch import (
    UNKNOWN,
    InputBatch,
    IntArray,
    LongArray,
    StepBuffers,
    StepInputs,
)
from octavo.worker.loading_bar import loading_bar
from octavo.worker.platform import Platform
from octavo.worker.pooling import PoolingRows
from octavo.worker.spec_decode.base import Proposer, Target

if TYPE_CHECKING:
    from octavo.worker.alignment import AlignmentRows
    from octavo.worker.cross_attention import CrossAttentionRows

logger = logging.getLogger(__name__)

_EXPERT_FAILED = (
    "an expert of the model that it needs cannot be read from the file of packed weights; the log "
    "has the reason"
)
_NO_DRAFT = -2  # no token, nor `UNKNOWN`

Drafts = dict[str, list[int]]
"""Drafts by request id, for the requests that have drafts."""
MakeProposer = Callable[[Target], Proposer | None]


@dataclass(slots=True)
class _ComputedStep:
    """State of a computed step that `execute_model` passes to `sample_tokens`."""

    inputs: StepInputs
    result: StepResult
    metadata: SamplingMetadata | None
    """Sampling metadata of the rows of logits; None if the step has drafts or grammars."""
    prompt_logprobs: dict[str, LogprobsLists]
    pooled: dict[str, bytes]
    drafts: Drafts


@dataclass(slots=True)
class RunnerState:
    """State of a model runner, without the model: the live requests and the step runner."""

    kv_tensors: list[Tensor]
    """The physical tensors of the KV cache: those of blocks, then those of recurrent states."""
    num_paged: int
    """Number of tensors of blocks."""
    batch: InputBatch
    cross: CrossAttentionRows | None
    """Writer of the rows of encoders; None: the model is no encoder-decoder."""
    alignment: AlignmentRows | None
    """Weights of cross attention of the requests that return them; None: as for `cross`."""
    sampling: SamplingState
    steps: StepRunner
    serve: Callable[[], object] | None
    """Computes the experts of other engines' tokens; None: no engines divide the experts."""
    proposer: Proposer | None


class PendingOutput:
    """Result of a step; its tokens may not have arrived from the device yet."""

    def __init__(
        self, output: ModelRunnerOutput, indices: LongArray, tokens: HostCopy | None
    ) -> None:
        self._output = output  # all but the tokens
        self._indices = indices  # the requests of the tokens
        self._tokens = tokens

    def ready(self) -> bool:
        """Return True if `get` does not wait."""
        return self._tokens is None or self._tokens.ready()

    def get(self) -> ModelRunnerOutput:
        """Return the result; wait for the tokens. Call it once, on any thread."""
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
    """Tokens that are still missing in the host's rows."""

    rows: LongArray
    owners: LongArray
    places: LongArray
    tokens: HostCopy


class ModelRunner:
    """Owner of the model and, after `initialize_kv_cache`, of the KV cache and live requests."""

    def __init__(
        self,
        setup: WorkerSetup,
        platform: Platform,
        device: Any,
        make_proposer: MakeProposer = lambda target: None,
    ) -> None:
        self.device = device
        self._make_proposer = make_proposer
        self.spec = setup.spec
        self.setup = setup
        self.platform = platform
        self.ops = platform.make_ops(setup.config.device, device)
        self.backend = platform.make_attention_backend(setup, device)
        config = setup.config
        self._weights: list[LoadedWeights] = []
        self._caches: list[Tensor] = []
        """KV caches of all models; a sleeping engine releases them."""
        self._released = False
        # Make the caches with one block before the weights are loaded, so that errors in the
        # settings are reported at once.
        groups = setup.kv_cache_groups
        self._make_caches(KVCacheConfig(1, config.cache.block_size, groups, num_states=1))
        vocab_size, rows = setup.spec.vocab_size, config.scheduler.max_num_seqs
        vllm_config = VllmConfig(config, vocab_size, setup.max_model_len)
        self._plugins = [
            *(load_plugins(rows, vocab_size) if setup.spec.generates else []),
            *load_named(
                config.model.logits_processors,
                rows,
                vocab_size,
                lambda kind: make_processor(kind, vllm_config, device),
            ),
        ]
        self.adapters = make_adapters(setup, self.ops)
        """Adapters in the model's linear layers; None: they are off."""
        buffers, exchange = make_buffers(setup), make_exchange(setup)
        self._exchange = exchange
        with loading_bar(config.model.model, shown=setup.rank.number == 0) as progress:
            checkpoint = open_model(config, setup.model_path, setup.dtype)
            self.model = load_model(
                setup.part,
                checkpoint,
                dtype=setup.dtype,
                max_model_len=setup.max_model_len,
                ops=self.ops,
                progress=progress,
                cache=WeightCache.from_config(config),
                keep=self._weights,
                shared=buffers,
                expert_slots=setup.expert_slots,
                exchange=exchange,
                adapters=self.adapters,
            )
        self._encoders = self._make_encoders()
        self.group = Group(setup, buffers) if setup.rank.world_size > 1 else None
        """Memory shared with other ranks; None for one rank."""
        self._experts = self._weights[0].experts
        if self._experts is not None and self.group is not None:
            self._experts.count_in(self.group.expert_counts[setup.rank.number, :6])
        self._num_failed_experts = 0
        self.balancer = self._make_balancer(checkpoint)
        """Balancer of the loads of the experts; None: experts stay where they are."""
        self.expert_group: ExpertGroup | None = None
        """Engines that divide the experts; None: this one has all."""
        self.expert_relay: ExpertRelay | None = None
        """Connection of this machine's engines with those of others; None: another one has it."""
        if exchange is not None:
            self.expert_group = ExpertGroup(
                setup.expert_memory[setup.rank.stage],
                exchange,
                self.balancer,
                None if self.group is None else self.group.memory,
                lost=reason_of_end(setup),
            )
            if setup.machine is not None and setup.meeting_rank.index == 0:
                self.expert_relay = ExpertRelay(setup.machine, setup.expert_memory[0], exchange)
        elif self.balancer is not None:
            assert self.group is not None
            self.balancer.attach(self.group.memory, self.group.balancing)
        self.expert_loads = ExpertLoads.of(self.model, self.ops, setup.stage_layers[0])
        """Numbers of tokens by expert; None: the model has none, or they are not counted."""
        self._num_steps = 0
        """Number of the steps that computed tokens."""
        self.sampler = Sampler(self.ops)
        self._state: RunnerState | None = None
        self._prompt_logprobs: dict[str, int] = {}
        """Number of prompt logprobs for each position, by id of the requests that need them."""
        self._pooling: PoolingRows | None = None
        """Rows of the requests that return vectors or scores; None: the model has no poolers."""
        if setup.part.has_head and setup.part.poolers:
            assert isinstance(self.model, DecoderModel)
            self._pooling = PoolingRows(self.ops, self.model.poolers)
        self._failed: dict[str, str] = {}
        """Error messages by request id, reported by the next step: of sampling parameters and of
        items that cannot be used."""
        self._unknown: list[_Unknown] = []
        self._forced: dict[str, tuple[int, list[int]]] = {}
        """By request id, for grammars with a single continuation: the number of tokens in the row
        at that time, and the tokens that must follow."""
        self.progress: _native.StepProgress | None = None
        """Progress of the current step, for a KV connector."""
        if config.cache.kv_transfer_config is not None:
            self.progress = _native.StepProgress()
        self._step: _ComputedStep | None = None
        self._draft_probs: NDArray[np.float32] | None = None
        """Probabilities of the current step's drafts; see `Proposal`."""
        speculative = config.speculation.speculative_config
        self._acceptance = "exact" if speculative is None else speculative.acceptance

    @property
    def state(self) -> RunnerState:
        """State that `initialize_kv_cache` created."""
        assert self._state is not None, "call initialize_kv_cache first"
        return self._state

    def _make_encoders(self) -> EncoderCache:
        """Return the runners of the model's encoders, with an empty cache.

        Those whose rows cross attention reads have no cache; see `_make_cross`.
        """
        setup = self.setup
        if not setup.part.encoders or setup.spec.is_encoder_decoder:
            return EncoderCache({})
        from octavo.worker.encoder_runner import EncoderRunner, encoder_arena

        assert isinstance(self.model, DecoderModel)
        arena = None if setup.scratch is None else encoder_arena(setup.scratch.encoder_arena)
        runners: dict[Modality, EncoderRunner] = {}
        for encoder in self.model.encoders:
            runner = EncoderRunner(encoder, self.ops, self.backend, arena)
            runners |= dict.fromkeys((encoder.spec.modality, *encoder.spec.modalities), runner)
        return EncoderCache(runners)

    def _make_balancer(self, checkpoint: Checkpoint) -> ExpertBalancer | None:
        setup, config = self.setup, self.setup.config.device.eplb
        layout = setup.balance_layout
        if layout is None or config is None:
            return None
        assert isinstance(self.model, DecoderModel)
        return ExpertBalancer(
            [mixture for _, mixture in self.model.mixtures],
            layout,
            setup.rank if setup.expert_rank.size == 1 else setup.expert_rank,
            config,
            ExpertReader(setup.whole_layers, checkpoint, setup.dtype, self.ops, self._weights[0]),
        )

    def initialize_kv_cache(self, kv: KVCacheConfig) -> None:
        """Allocate the KV cache and the buffers of steps; capture steps.

        `kv` describes all ranks; this rank allocates the cache of its layers.
        """
        kv = replace(kv, groups=self.setup.kv_cache_groups)
        self._state = self._make_state(kv, capture=True)
        self._caches += self._state.kv_tensors

    def sleep(self) -> None:
        """Release the memory of weights and KV cache; no step may run until they are reloaded."""
        for weights in self._weights:
            weights.release()
        for cache in self._caches:
            release_memory(cache)
        self._released = True

    def memory_to_reload(self) -> tuple[int, int]:
        """Implement `Worker.memory_to_reload`."""
        free = cpu_memory(self.setup.config.device.numa_node)[1]
        if not self._released:
            return 0, free
        needed = sum(weights.nbytes for weights in self._weights)
        return needed + sum(cache.nbytes for cache in self._caches), free

    def reload_weights(self, *, same: bool) -> None:
        """Read all weights again, into the same memory; see `Worker.reload_weights`."""
        setup = self.setup
        with loading_bar(setup.config.model.model, shown=setup.rank.number == 0) as progress:
            for weights in self._weights:
                weights.reload(progress, same=same)
        if self.balancer is not None:
            self.balancer.reset()
        self._released = False

    def open_checkpoint(self) -> Tensors:
        """Open the checkpoint again that the model's weights come from; see `LoadedWeights`."""
        return self._weights[0].open()

    def _make_caches(self, kv: KVCacheConfig) -> tuple[list[Tensor], list[Any]]:
        """Return the physical tensors of the KV cache, and each layer's view of them.

        Raises:
            ConfigError: the attention backend does not support a cache.
        """
        dtype, caches = self.setup.kv_cache_dtype, self.setup.part.caches
        tensors = [
            self.platform.allocate_cache(count, nbytes, self.ops)
            for count, nbytes in kv.tensor_sizes(dtype)
        ]
        places = zip(kv.layer_to_tensor, caches, strict=True)
        views = [
            cache.view(tensors[slot], kv.block_size, dtype, self.backend) for slot, cache in places
        ]
        return tensors, views

    def _make_state(self, kv: KVCacheConfig, *, capture: bool) -> RunnerState:
        setup = self.setup
        kv_tensors, kv_caches = self._make_caches(kv)
        max_num_seqs = setup.largest_step.requests
        batch = InputBatch(
            max_num_seqs,
            setup.max_model_len,
            kv,
            setup.step_arrays,
            self._encoders.rows if setup.part.encoders else None,
            setup.max_encoder_len,
            setup.spec.embed.item_token,
        )
        received = make_received(setup, self.model.dtype)
        alignment = self._make_alignment(kv, kv_caches)
        eager = EagerSteps(
            self.model,
            self.ops,
            self.backend,
            kv_caches,
            [group.cache for group in kv.groups],
            kv.layer_to_group,
            StepBuffers(batch.layout(setup.largest_step)),
            setup.kept_layers,
            received,
            self.progress,
            self.adapters,
        )
        steps = self.platform.make_steps(setup, self.ops, eager, batch, capture=capture)
        serve = None if self.expert_group is None else cast("ExpertSteps", steps).serve
        if self.balancer is not None and self.expert_group is None:
            steps = BalancedSteps(steps, self.balancer)
        if self.group is not None:
            steps = self.group.connect(steps, received)
        sampling = SamplingState(max_num_seqs, setup.spec.vocab_size, self._plugins)
        return RunnerState(
            kv_tensors,
            kv.num_paged_tensors,
            batch,
            self._make_cross(kv, kv_caches),
            alignment,
            sampling,
            steps,
            serve,
            self._make_proposer(
                Target(
                    *(setup, self.model, batch, sampling),
                    *(kv, self.platform, self.ops, self.backend),
                    *(self._weights, self._caches),
                )
            ),
        )

    def _make_cross(self, kv: KVCacheConfig, kv_caches: list[Any]) -> CrossAttentionRows | None:
        if not self.spec.is_encoder_decoder:
            return None
        from octavo.worker.cross_attention import CrossAttentionRows  # few models have it
        from octavo.worker.encoder_runner import EncoderRunner, encoder_arena

        assert isinstance(self.model, DecoderModel)
        (encoder,) = self.model.encoders
        scratch = self.setup.scratch
        arena = None if scratch is None else encoder_arena(scratch.encoder_arena)
        runner = EncoderRunner(encoder, self.ops, self.backend, arena)
        layers = self.model.cross_attention
        return CrossAttentionRows(runner, layers, kv_caches, kv, self.ops, self.backend)

    def _make_alignment(self, kv: KVCacheConfig, kv_caches: list[Any]) -> AlignmentRows | None:
        if not self.spec.is_encoder_decoder:
            return None
        from octavo.worker.alignment import AlignmentRows  # few models have it

        assert isinstance(self.model, DecoderModel)
        layers = self.model.cross_attention
        return AlignmentRows(layers, kv_caches, kv, self.ops, self.backend, self.setup.rank)

    def run_largest_step(self) -> int:
        """Run a step of the largest size on a temporary KV cache.

        Returns:
            Size of that cache in bytes.
        """
        setup = self.setup
        scheduler, cache = setup.config.scheduler, setup.config.cache
        tokens = setup.max_num_batched_tokens
        num_reqs = min(scheduler.max_num_seqs, tokens)
        count = min(setup.max_model_len, tokens // num_reqs)
        blocks = -(-count // cache.block_size)
        groups = setup.kv_cache_groups
        kv = KVCacheConfig(blocks + 1, cache.block_size, groups, num_states=1)
        self._state = self._make_state(kv, capture=False)
        self._encoders.run_largest()
        if self.state.cross is not None:
            self.state.cross.run_largest(tokens)
        # The parameters that need most memory: changed logits next to a copy of them, and
        # candidates, for which logits are sorted.
        params = CoreSamplingParams(
            temperature=1.0,
            top_p=0.9,
            logprobs=1,
            logit_bias=(np.int32(0).tobytes(), np.float32(1).tobytes()),
        )
        # All requests write to the same blocks: their results are not used.
        block_ids = [list(range(1, blocks + 1)) for _ in kv.paged_groups]
        pooling = None
        if not self.spec.generates:
            pooling = PoolingSpec(self.spec.poolers[0].task, whole=self.spec.sees_all)
        new = NewRequestData([0] * count, count, params, 0, state_slots=[0], pooling=pooling)
        if self.adapters is not None:
            new.adapter_slot = 0
        self.execute_model(
            SchedulerOutput(
                scheduled_reqs=[
                    ScheduledRequest(str(i), count, block_ids, new=new) for i in range(num_reqs)
                ],
                total_num_scheduled_tokens=num_reqs * count,
            )
        )
        self.sample_tokens().get()
        nbytes = sum(tensor.nbytes for tensor in self.state.kv_tensors)
        self._state = None
        self._unknown.clear()
        return nbytes

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        announce: Callable[[Drafts], None] = lambda drafts: None,
    ) -> None:
        """Launch the forward pass of one step and keep its logits for `sample_tokens`.

        Args:
            scheduler_output: the step.
            announce: called with the step's drafts before the forward pass.
        """
        scheduled = scheduler_output.scheduled_reqs
        with span("prepare_inputs"):
            self._update_rows(scheduler_output)
            if not scheduled:
                announce({})
                self._step = None
                self._serve(scheduler_output)
                return
            self._num_steps += 1
            state, drafts = self.state, self._find_drafts(scheduled)
            announce(drafts)
            # Reserved places without drafts are not tokens.
            tokens = sum(r.num_tokens - r.num_drafts for r in scheduled)
            tokens += sum(map(len, drafts.values()))
            buffers = state.steps.buffers(tokens, len(scheduled))
            inputs = state.batch.gather(scheduled, drafts, buffers)
            metadata = params = None
            if inputs.size.samples and not (drafts or any(r.has_grammar for r in scheduled)):
                rows = inputs.sampling_rows
                self._collect_tokens(wait=state.sampling.needs_tokens(rows))
                metadata = state.sampling.metadata(rows)
                params = metadata.params if metadata.plain else None
        if state.alignment is not None:
            state.alignment.begin(inputs)
        with span("forward") as note:
            note(rows=inputs.size.tokens)
            result = self._run(inputs, params)
        prompt_logprobs = self._compute_prompt_logprobs(inputs, result.hidden)
        pooled: dict[str, bytes] = {}
        if self._pooling is not None:
            pooled = self._pooling.pool(inputs, result.hidden, state.batch)
        if state.alignment is not None:
            pooled |= state.alignment.align(inputs, state.batch)
        self._step = _ComputedStep(inputs, result, metadata, prompt_logprobs, pooled, drafts)

    def _run(self, inputs: StepInputs, params: NDArray[np.void] | None) -> StepResult:
        """Run a step, together with the engines that divide the experts, if any.

        Of several stages, it notes the errors of earlier ones.
        """
        if self.group is not None:
            self.group.errors = self._failed
        if self.expert_group is None:
            return self.state.steps.run(inputs, params)

        def step() -> StepResult:
            self._agree(has_adapters(inputs))
            return self.state.steps.run(inputs, params)

        return self.expert_group.run(step, repeats=not self.setup.has_states)

    def _serve(self, scheduler_output: SchedulerOutput) -> None:
        """Take part in a step of other engines without tokens, if a step without requests does."""
        if scheduler_output.serves:
            assert self.expert_group is not None
            serve = self.state.serve
            assert serve is not None

            def step() -> None:
                self._agree(False)
                serve()

            self.expert_group.serve(step)

    def _agree(self, has_adapters: bool) -> None:
        """Agree with the other engines whether tokens of the step have adapters."""
        if self.adapters is not None and self._exchange is not None and self._exchange.adapts:
            self.adapters.in_group = self._exchange.agree(has_adapters)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> PendingOutput:
        """Sample the next token of each request with all known tokens computed.

        For a request with drafts, sample also the token after each draft, up to the first draft
        that differs from the sampled token.

        Args:
            grammar: the tokens that grammars allow.
        """
        begin = time.perf_counter()
        step, self._step = self._step, None
        errors, self._failed = self._failed, {}
        if step is None:
            return PendingOutput(ModelRunnerOutput(errors=errors), np.empty(0, np.int64), None)
        inputs, state = step.inputs, self.state
        output = ModelRunnerOutput(
            req_ids=inputs.req_ids,
            sampled_token_ids=[[] for _ in inputs.req_ids],
            prompt_logprobs=step.prompt_logprobs,
            num_draft_tokens={req_id: len(tokens) for req_id, tokens in step.drafts.items()},
            errors=errors,
            expert_load=self._expert_load(),
            pooled=step.pooled,
        )
        pending = self._sample(step, grammar, output)
        if state.proposer is not None:
            state.proposer.observe(inputs, step.result)
        if self.setup.config.load.expert_cache is not None:
            self._note_experts(output)
        output.sample_seconds = time.perf_counter() - begin
        return pending

    def _expert_load(self) -> ExpertLoad | None:
        """Return the loads of the experts, and their balance; None: they are not counted."""
        if self.expert_loads is None:
            return None
        load = self.expert_loads.summary()
        if self.balancer is not None:
            load.num_rearrangements = self.balancer.num_switches
            load.process_tokens = self.balancer.process_tokens
        return load

    def _note_experts(self, output: ModelRunnerOutput) -> None:
        """Add the counts of all ranks' expert caches, and explain failures that they caused."""
        if self.group is not None:
            counts = self.group.expert_counts.sum(0)
        else:
            assert self._experts is not None
            counts = self._experts.counts
        hits, misses, nbytes, failed, ahead, ahead_used = counts[:6].tolist()
        output.expert_counts = hits, misses, nbytes, ahead, ahead_used
        if self._experts is not None:
            self._log_experts(self._experts)
        if not failed:
            return
        for req_id, message in output.errors.items():
            if message == NOT_FINITE:
                output.errors[req_id] = _EXPERT_FAILED
        # A request that failed may have computed several steps since the experts could not be read.
        output.forget_prefixes = (
            failed > self._num_failed_experts or _EXPERT_FAILED in output.errors.values()
        )
        self._num_failed_experts = failed

    @staticmethod
    def _log_experts(experts: ExpertCache) -> None:
        if (error := experts.take_error()) is not None:
            logger.error("%s", error)

    def _sample(
        self, step: _ComputedStep, grammar: GrammarOutput | None, output: ModelRunnerOutput
    ) -> PendingOutput:
        """Sample, and update the rows."""
        inputs, state, errors = step.inputs, self.state, output.errors
        state.batch.num_computed_tokens[inputs.rows] += inputs.counts
        indices = inputs.sampling
        if not len(indices):
            return PendingOutput(output, indices, None)
        bitmask = None
        if grammar is not None:
            bitmask = _find_bitmask(grammar, inputs, self.spec.vocab_size)
            self._note_forced(grammar)
        if inputs.size.samples > len(indices):
            self._verify_drafts(step, bitmask, output)
            return PendingOutput(output, indices, None)
        rows, tokens = inputs.rows[indices], step.result.tokens
        if tokens is None:
            metadata = step.metadata
            if metadata is None:
                self._collect_tokens(wait=state.sampling.needs_tokens(rows))
                metadata = state.sampling.metadata(rows, None, bitmask)
            sampled = self.sampler.sample(step.result.logits, metadata)
            tokens = sampled.token_ids
            state.steps.put_tokens(tokens)
            for i, message in sampled.errors.items():
                errors.setdefault(inputs.req_ids[indices[i]], message)
            for i, lists in sampled.logprobs.items():
                output.logprobs[inputs.req_ids[indices[i]]] = lists
        on_their_way, ones = self.ops.copy_to_host(tokens), inputs.num_samples[indices]
        if on_their_way.ready() and not self._unknown:
            known = np.maximum(on_their_way.numpy(), 0)  # any token: a failed row is not used
            state.batch.append(rows, known, ones)
            state.sampling.append(rows, known, ones)
            if self.group is not None:
                self.group.broadcast.post_tokens(self._num_steps, known, ones)
        else:
            places = state.batch.append(rows, np.full(len(rows), UNKNOWN), ones)
            state.sampling.advance(rows, ones)
            self._unknown.append(_Unknown(rows, state.batch.owners[rows], places, on_their_way))
        return PendingOutput(output, indices, on_their_way)

    def _verify_drafts(
        self, step: _ComputedStep, bitmask: GrammarBitmask | None, output: ModelRunnerOutput
    ) -> None:
        """Sample a step in which requests have drafts.

        Each position is sampled with its own random number, as if there were no drafts. A draft is
        kept if it equals the sampled token. So tokens, logprobs and failures are the same as with
        one step for each token.
        """
        inputs, state = step.inputs, self.state
        counts, rows = inputs.num_samples[inputs.sampling], inputs.rows[inputs.sampling]
        first = np.cumsum(counts) - counts  # each request's first row of logits
        all_rows, num_rows = inputs.sampling_rows, inputs.size.samples
        offsets = np.arange(num_rows) - np.repeat(first, counts)
        indices = inputs.table.logits_indices[:num_rows]
        drafts = inputs.table.input_ids[np.minimum(indices + 1, inputs.size.tokens - 1)]
        drafts[first + counts - 1] = _NO_DRAFT
        tokens: LongArray = np.full(num_rows, UNKNOWN)  # not sampled yet, or failed
        logprobs: dict[int, LogprobsLists] = {}
        errors: dict[int, str] = {}

        def sample(at: LongArray, ahead: LongArray) -> None:
            """Sample rows of logits, `ahead` tokens after the last token in the sampling state."""
            logits = step.result.logits
            if len(at) < num_rows:
                logits = self.ops.embedding(logits, self.ops.to_device(at))
            allowed = None if bitmask is None else _select(bitmask, at)
            metadata = state.sampling.metadata(all_rows[at], ahead, allowed)
            if self._acceptance != "exact":
                metadata = replace(metadata, drafted=self._drafted(drafts, at, all_rows, ahead))
            sampled = self.sampler.sample(logits, metadata)
            tokens[at] = self.ops.to_host(sampled.token_ids)
            logprobs.update((int(at[i]), lists) for i, lists in sampled.logprobs.items())
            for i, message in sampled.errors.items():
                tokens[at[i]], errors[int(at[i])] = UNKNOWN, message

        # Sample one position at a time where a token depends on the tokens before it.
        one_by_one = np.array(
            [n > 1 and state.sampling.needs_tokens(rows[i : i + 1]) for i, n in enumerate(counts)]
        )
        at = np.flatnonzero(~np.repeat(one_by_one, counts) | (offsets == 0))
        sample(at, offsets[at])
        known = np.zeros_like(counts)  # tokens of each request that the sampling state has
        racing, at = np.flatnonzero(one_by_one), first[one_by_one]
        while (right := tokens[at] == drafts[at]).any():
            racing, at = racing[right], at[right]
            ones = np.ones_like(at)
            state.sampling.append(rows[racing], tokens[at], ones)
            known[racing] += 1
            at = at + 1
            sample(at, np.zeros_like(at))

        wrong = np.flatnonzero(tokens != drafts)  # at least the last row of each request
        kept = wrong[np.searchsorted(wrong, first)] - first + 1
        # The next step computes a position again that fails after a draft, and reports it.
        kept -= (tokens[first + kept - 1] < 0) & (kept > 1)
        new = np.maximum(tokens, 0)  # any token: a failed row is not used
        state.batch.append(rows, new[_ranges(first, kept)], kept)
        if self.group is not None:
            self.group.broadcast.post_tokens(self._num_steps, new[_ranges(first, kept)], kept)
        state.sampling.append(rows, new[_ranges(first + known, kept - known)], kept - known)
        state.batch.num_computed_tokens[rows] -= counts - kept
        for i, begin, count in zip(
            inputs.sampling.tolist(), first.tolist(), kept.tolist(), strict=True
        ):
            req_id = inputs.req_ids[i]
            if begin in errors:
                output.errors.setdefault(req_id, errors[begin])
            if req_id in output.errors:
                continue
            output.sampled_token_ids[i] = tokens[begin : begin + count].tolist()
            if begin in logprobs:
                parts = [logprobs[at] for at in range(begin, begin + count)]
                output.logprobs[req_id] = LogprobsLists.join(parts)

    def _drafted(
        self, drafts: LongArray, at: LongArray, all_rows: LongArray, ahead: LongArray
    ) -> Drafted:
        """Return the drafts for rows of logits `at`, and the random numbers to accept them."""
        has_draft = drafts >= 0
        of_probs = np.cumsum(has_draft) - 1  # each draft's row of its probabilities
        own = has_draft[at]
        some, probs, sampling = at[own], self._draft_probs, self.state.sampling
        return Drafted(
            self._acceptance == "typical",
            np.flatnonzero(own),
            drafts[some],
            None if probs is None else probs[of_probs[some]],
            accept=sampling.uniforms(all_rows[some], ahead[own], ACCEPT),
            recover=sampling.uniforms(all_rows[some], ahead[own], RECOVER),
        )

    def _collect_tokens(self, *, wait: bool) -> None:
        """Write the tokens that have arrived from the device into the rows of live requests."""
        batch = self.state.batch
        while self._unknown and (wait or self._unknown[0].tokens.ready()):
            step = self._unknown.pop(0)
            tokens = np.maximum(step.tokens.numpy(), 0)
            same = step.owners == batch.owners[step.rows]
            placed = same & (step.places >= 0)
            batch.token_ids[step.rows[placed], step.places[placed]] = tokens[placed]
            rows = step.rows[same]
            self.state.sampling.record(rows, tokens[same], np.ones_like(rows))

    def _find_drafts(self, scheduled: Sequence[ScheduledRequest]) -> Drafts:
        """Return the drafts of the next step; one rank proposes them for all ranks."""
        if self.group is None:
            return self._propose(scheduled)
        if not any(request.num_drafts for request in scheduled):
            return {}
        broadcast, req_ids = self.group.broadcast, [request.req_id for request in scheduled]
        if not self.setup.rank.drafts:
            return broadcast.read_drafts(self._num_steps, req_ids)
        drafts = self._propose(scheduled)
        broadcast.post_drafts(self._num_steps, req_ids, drafts)
        return drafts

    def _note_forced(self, grammar: GrammarOutput) -> None:
        """Store the tokens that grammars force after the current tokens of rows."""
        batch = self.state.batch
        for req_id, forced in grammar.forced.items():
            self._forced[req_id] = int(batch.num_tokens[batch.row_of[req_id]]), forced

    def _propose(self, scheduled: Sequence[ScheduledRequest]) -> Drafts:
        """Return drafts for the places that a step reserves for them."""
        state = self.state
        asking = [request for request in scheduled if request.num_drafts]
        if not asking:
            return {}
        self._collect_tokens(wait=True)
        drafts: Drafts = {}
        if self._forced:
            for request in asking:
                if tokens := self._take_forced(request):
                    drafts[request.req_id] = tokens
            asking = [request for request in asking if request.req_id not in drafts]
        if state.proposer is None or not asking:
            return drafts
        rows = np.array([state.batch.row_of[request.req_id] for request in asking])
        most = self.setup.num_speculative_tokens
        counts = np.array([min(request.num_drafts, most) for request in asking])
        proposal = state.proposer.propose(rows, counts)
        self._draft_probs = proposal.probs
        for request, proposed in zip(asking, proposal.token_ids, strict=True):
            if proposed:
                drafts[request.req_id] = list(proposed)
        return drafts

    def _take_forced(self, request: ScheduledRequest) -> list[int]:
        """Return the tokens that a grammar forces next; empty if the tokens since then differ."""
        start, forced = self._forced.pop(request.req_id, (0, []))
        if self._acceptance != "exact":  # another rule keeps a draft by its probability
            return []
        batch = self.state.batch
        row = batch.row_of[request.req_id]
        since = batch.token_ids[row, start : batch.num_tokens[row]].tolist()
        if forced[: len(since)] != since:
            return []
        return forced[len(since) :][: request.num_drafts]

    def _update_rows(self, scheduler_output: SchedulerOutput) -> None:
        """Update the persistent rows and the encoder cache with the scheduler's changes."""
        state = self.state
        batch = state.batch
        for req_id in scheduler_output.finished_req_ids:
            row = batch.remove(req_id)
            if row is not None:
                if state.proposer is not None:
                    state.proposer.remove_row(row)
                self._remove_sampling(row)
                if self._pooling is not None:
                    self._pooling.remove_row(row)
                if state.alignment is not None:
                    state.alignment.remove_row(row)
                self._prompt_logprobs.pop(req_id, None)
                self._forced.pop(req_id, None)
        if scheduler_output.blocks_to_copy:
            self.ops.copy_blocks(
                state.kv_tensors[: state.num_paged], scheduler_output.blocks_to_copy
            )
            if state.proposer is not None:
                state.proposer.copy_blocks(scheduler_output.blocks_to_copy)
        if scheduler_output.loaded_block_ids and state.proposer is not None:
            state.proposer.forget_blocks(scheduler_output.loaded_block_ids)
        for request in scheduler_output.scheduled_reqs:
            if request.new is not None:
                self._add_row(request.req_id, request.new)
            if request.new_block_ids is not None:
                batch.append_blocks(batch.row_of[request.req_id], request.new_block_ids)
        if state.cross is not None:
            state.cross.compute(scheduler_output, batch)
            failed = state.cross.failed
        else:
            self._encoders.update(scheduler_output, batch.features)
            failed = self._encoders.failed
        if failed:
            self._note_failed_items(scheduler_output.scheduled_reqs, failed)

    def _note_failed_items(
        self, scheduled: Sequence[ScheduledRequest], failed: dict[str, str]
    ) -> None:
        """Note an error for each request with an item whose encoder failed.

        Args:
            scheduled: the requests of the step.
            failed: errors by the identifier of the item.
        """
        for request in scheduled:
            for index, item in enumerate(self.state.batch.features.get(request.req_id, ()), 1):
                if item.identifier in failed:
                    self._failed[request.req_id] = (
                        f"the encoder of its item {index} ({item.modality}) failed: "
                        f"{failed[item.identifier]}"
                    )

    def _add_row(self, req_id: str, data: NewRequestData) -> None:
        row = self.state.batch.add(req_id, data)
        self._add_sampling(req_id, row, data)
        if data.pooling is not None and data.pooling.alignment is not None:
            self._add_alignment(req_id, row, data.pooling.alignment)
        elif data.pooling is not None and self._pooling is not None:
            self._pooling.add_row(row, data.pooling, data.adapter_slot)
        if self.state.proposer is not None:
            self.state.proposer.add_row(row, data)
        if data.sampling_params.prompt_logprobs is not None:
            self._prompt_logprobs[req_id] = data.sampling_params.prompt_logprobs

    def _add_alignment(self, req_id: str, row: int, spec: AlignmentSpec) -> None:
        alignment = self.state.alignment
        assert alignment is not None, "only encoder-decoders have such requests"
        try:
            alignment.add_row(row, spec)
        except RequestError as error:
            self._failed[req_id] = error.message

    def _remove_sampling(self, row: int) -> None:
        self.state.sampling.remove_row(row)

    def _add_sampling(self, req_id: str, row: int, data: NewRequestData) -> None:
        params = data.sampling_params
        # Penalties and similar processors do not see the positions of prompt embeddings.
        first = 0 if data.prompt_embeds is None else data.prompt_embeds.num_tokens
        try:
            self.state.sampling.add_row(
                row, params, data.token_ids[first:], data.num_prompt_tokens - first
            )
        except Exception as error:  # a request's failure must not affect other requests
            # The row stays without sampling state: greedy and plain.
            self._failed[req_id] = f"its sampling parameters cannot be used: {error}"

    def _compute_prompt_logprobs(
        self, inputs: StepInputs, hidden: Tensor
    ) -> dict[str, LogprobsLists]:
        """Return the logprobs of this step's prompt tokens, for the requests that need them."""
        result: dict[str, LogprobsLists] = {}
        if not self._prompt_logprobs:
            return result
        batch, starts = self.state.batch, inputs.table.query_start_loc
        for i, req_id in enumerate(inputs.req_ids):
            k = self._prompt_logprobs.get(req_id)
            if k is None:
                continue
            row, begin = inputs.rows[i], int(starts[i])
            first = int(batch.num_computed_tokens[row])
            # The logits at position p are those of token p + 1, which must be a prompt token.
            count = min(int(inputs.counts[i]), int(batch.num_prompt_tokens[row]) - 1 - first)
            if count <= 0:
                continue
            parts: list[LogprobsLists] = []
            for at in range(0, count, self.setup.prompt_logprobs_rows):
                n = min(self.setup.prompt_logprobs_rows, count - at)
                tokens = slice(begin + at, begin + at + n)
                with self._use_adapters(inputs, tokens):
                    logits = self.model.head(hidden[tokens])
                targets = batch.token_ids[row, first + at + 1 : first + at + 1 + n]
                parts.append(self._prompt_lists(logits, targets, k))
                if self.group is not None:  # the next logits overwrite these
                    self.group.memory.barrier()
            result[req_id] = LogprobsLists.join(parts)
        return result

    def _use_adapters(self, inputs: StepInputs, tokens: slice) -> AbstractContextManager[None]:
        """Return the context in which layers compute with the adapters of some tokens of a step."""
        if self.adapters is None or not has_adapters(inputs):
            return nullcontext()
        slots = inputs.table.extra[ADAPTER_SLOTS.name][tokens]
        return self.adapters.use(self.ops.to_device(slots))

    def _prompt_lists(self, logits: Tensor, targets: IntArray, k: int) -> LogprobsLists:
        return prompt_logprobs(self.ops, logits, targets.astype(np.int64), k)


def _ranges(starts: LongArray, counts: LongArray) -> LongArray:
    """Return int64 [sum of counts]: `counts[i]` consecutive numbers from each `starts[i]`."""
    before = np.cumsum(counts) - counts
    result: LongArray = np.repeat(starts - before, counts) + np.arange(counts.sum())
    return result


def _find_bitmask(grammar: GrammarOutput, inputs: StepInputs, vocab_size: int) -> GrammarBitmask:
    """Return the bitmask of a step, with the row of logits of each of its rows."""
    index = {req_id: i for i, req_id in enumerate(inputs.req_ids)}
    asked = np.array([index[req_id] for req_id in grammar.req_ids], np.int64)
    counts = inputs.num_samples[asked]
    at = _ranges((np.cumsum(inputs.num_samples) - inputs.num_samples)[asked], counts)
    words = np.frombuffer(grammar.bitmask, np.int32)
    return GrammarBitmask(at, words.reshape(len(at), -(-vocab_size // 32)))


def _select(bitmask: GrammarBitmask, at: LongArray) -> GrammarBitmask:
    """Return the part of a bitmask for the rows of logits `at`, with indices into `at`."""
    _, place, index = np.intersect1d(at, bitmask.at, assume_unique=True, return_indices=True)
    return GrammarBitmask(place, bitmask.words[index])
