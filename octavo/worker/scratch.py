"""Memory of a step besides weights and KV cache, computed before anything is loaded.

The functions record the largest step of a model without memory. Recording reads and computes
nothing, and places buffers as recording the loaded model will: the result is exact.
"""

from __future__ import annotations

from typing import Any

from octavo import _native
from octavo.attention.base import AttentionBackend
from octavo.attention.cpu import CPUAttention
from octavo.kernels.memory import Arena, placeholder
from octavo.kernels.native import NativeOps
from octavo.kernels.weights import PackedWeight, QuantizedWeight
from octavo.kv_cache.groups import KVCacheConfig
from octavo.layers.adapter import Adapters
from octavo.layers.step import Handed
from octavo.layers.step_table import StepLayout
from octavo.models.adaptable_model import AdaptableModel, targeted_layers
from octavo.models.blocks.base import LargestStep, Parts
from octavo.models.cache import CacheSpec
from octavo.models.decoder import DecoderModel
from octavo.models.loader import build_model
from octavo.models.open_model import find_merged
from octavo.models.spec import ModelSpec
from octavo.models.weight_norms import norms_nbytes
from octavo.models.weights import Weight
from octavo.plan.memory import Scratch
from octavo.plan.setup import WorkerSetup
from octavo.sampling.sizes import kernel_nbytes
from octavo.system.device import num_cpus
from octavo.system.dtypes import DTYPE_NBYTES
from octavo.system.tensor import Tensor
from octavo.worker.expert_group import make_exchange
from octavo.worker.graphs import CapturedSteps, EagerSteps
from octavo.worker.group import make_buffers
from octavo.worker.input_batch import StepBuffers


class _RecordedAttention(CPUAttention):
    """CPU attention that is recorded only, and so supports heads of any size."""

    def kv_cache_shape(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: str | None = None,
    ) -> tuple[int, ...]:
        """Implement `CPUAttention`."""
        return (num_blocks, 2, num_kv_heads, block_size, head_size)

    def latent_cache_shape(
        self, num_blocks: int, block_size: int, latent_size: int, dtype: str | None = None
    ) -> tuple[int, ...]:
        """Implement `CPUAttention`."""
        return (num_blocks, block_size, latent_size)


def measure_scratch(setup: WorkerSetup, asked: AttentionBackend, expert_slots: int = 0) -> Scratch:
    """Return the exact memory that steps on a CPU will reserve, before anything is loaded.

    Args:
        setup: the worker's setup.
        asked: the configured attention backend.
        expert_slots: number of experts in memory; 0: all are.

    Raises:
        ConfigError: the backend does not support the model's heads or the block size.
    """
    config, spec, dtype = setup.config, setup.part, setup.dtype
    tokens, threads = setup.max_num_batched_tokens, config.device.num_threads or num_cpus()
    largest = LargestStep(tokens, setup.max_model_len, threads)
    kernels = max(
        block.scratch_nbytes(asked, largest)
        for layer in spec.distinct_layers
        for block in layer.blocks
    )
    ops, backend = NativeOps(), _RecordedAttention()  # other backends use the same buffers
    check_caches(setup, asked)
    caches = [_view(cache, 16, setup.dtype, backend) for cache in spec.caches]
    weights = spec.weights()
    lora, adapters = config.lora, None
    if lora.enable_lora:
        adapters = Adapters(
            ops,
            lora.num_in_memory,
            lora.max_lora_rank,
            lora.lora_modules_to_save,
            adapts_experts=config.adapts_experts,
            targets=targeted_layers(spec, lora),
            moves_experts=config.device.enable_eplb,
        )
    parts = Parts(
        {weight.name: _weight(weight, dtype) for weight in weights},
        ops,
        dtype=dtype,
        max_model_len=1,
        shared=(buffers := make_buffers(setup)),
        expert_slots=expert_slots,
        exchange=(exchange := make_exchange(setup)),
        adapters=adapters,
    )
    kv = KVCacheConfig(1, config.cache.block_size, setup.kv_cache_groups)
    layout = StepLayout(setup.largest_step, 1, len(kv.groups), setup.step_arrays)
    activations, logits = Arena(), Arena()
    model = build_model(spec, parts)
    if spec.model_class != ModelSpec.model_class:  # the heads of a draft model, for example
        from octavo.models.eagle import EagleModel

        if isinstance(model, EagleModel):
            model.inputs = placeholder(*model.input_shape(tokens), dtype=dtype)
    CapturedSteps(
        EagerSteps(
            model,
            ops,
            backend,
            caches,
            [group.cache for group in kv.groups],
            kv.layer_to_group,
            StepBuffers(layout, placeholder(layout.nbytes, dtype="uint8").numpy()),
            setup.kept_layers,
            None if setup.rank.is_first else _received(setup, dtype),
            adapters=adapters,
        ),
        ops,
        activations=activations,
        logits=logits,
        prompt_embeds=setup.has_embeds,
    )
    if spec.has_head:
        kernels += kernel_nbytes(threads, spec.vocab_size)
    arena = encoders = 0
    if spec.encoders:
        from octavo.worker.encoder_runner import runner_nbytes  # few models have encoders

        assert isinstance(model, DecoderModel)
        for encoder in model.encoders:
            own = runner_nbytes(encoder, ops, backend)
            arena, encoders = max(arena, own[0]), encoders + own[1]
            kernels = max(kernels, encoder.spec.scratch_nbytes(asked, threads))
        encoders += spec.deepstack * tokens * spec.hidden_size * DTYPE_NBYTES[dtype]
        if spec.is_encoder_decoder:
            from octavo.worker.cross_attention import rows_nbytes

            encoders += rows_nbytes(spec, dtype, tokens)
        tokens = max(tokens, *(encoder.max_num_tokens for encoder in spec.encoders))
    inputs = max(weight.shape[1] for weight in weights if weight.kind == "linear")
    rows = max(tokens, setup.largest_step.samples)
    kernels += _native.linear_scratch(rows, inputs, threads)
    adapter = norms = 0
    if adapters is not None:
        kernels += adapters.scratch_nbytes(threads)
        modules, targets = lora.lora_modules_to_save, lora.lora_target_modules
        adaptable = AdaptableModel(spec, adapters.layers, modules, targets)
        adapter = adaptable.slot_nbytes(adapters, dtype)
        copies = config.load.load_format == "sharded_state"
        weights = setup.spec.weights()
        norms = norms_nbytes(weights, adapters.layers, lora.max_lora_rank, copies=copies)
        if (merged := find_merged(config)) is not None:
            from octavo.models.merge import merge_nbytes

            norms += merge_nbytes(merged, dtype)
    shared = 0 if buffers is None else buffers.nbytes
    exchanged = 0 if exchange is None else exchange.nbytes
    if exchange is not None and setup.balance_layout is not None:
        exchanged += setup.balance_layout.nbytes
    return Scratch(
        activations.peak,
        logits.peak,
        kernels,
        shared,
        exchanged,
        adapter,
        norms,
        arena,
        encoders,
    )


def check_caches(setup: WorkerSetup, backend: AttentionBackend) -> None:
    """Check that an attention backend supports the caches of the worker's layers.

    Raises:
        ConfigError: it does not support the model's heads, the block size or the cache's type.
    """
    for cache in set(setup.part.caches):
        _view(cache, setup.config.cache.block_size, setup.kv_cache_dtype, backend)


def _view(cache: CacheSpec, block_size: int, dtype: str, backend: AttentionBackend) -> Any:
    """Return a cache of one block without memory."""
    memory = placeholder(1, cache.block_nbytes(block_size, dtype), dtype="uint8")
    return cache.view(memory, block_size, dtype, backend)


def _received(setup: WorkerSetup, dtype: str) -> Handed:
    tokens, spec = setup.max_num_batched_tokens, setup.spec
    x, inputs = placeholder(tokens, spec.stream_size, dtype=dtype), setup.part.layer_inputs
    of_layers = None if inputs is None else placeholder(tokens, *inputs, dtype=dtype)
    return x, x if spec.hands_residual else None, of_layers


def _weight(weight: Weight, dtype: str) -> Tensor | PackedWeight | QuantizedWeight:
    """Return a weight without data; packed weights also represent quantized ones."""
    if weight.kind != "linear":
        return placeholder(*weight.shape, dtype=weight.dtype or dtype)
    n, k = weight.shape
    return PackedWeight(placeholder(0, dtype="uint8"), n, k, dtype, _native.panel())
