"""What a step takes beside weights and KV cache, found out before anything is loaded.

The largest step of a model without memory is recorded. Recording reads and computes nothing, and
puts buffers where recording the loaded model will put them: what comes out is what will be taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import _native
from octavo.attention.base import KV_CACHE_DTYPES, LargestStep, get_attention_backend
from octavo.attention.cpu import CPUAttention
from octavo.device import check_isa, num_cpus
from octavo.kernels.base import PackedWeight, QuantizedWeight
from octavo.kernels.memory import Arena, placeholder
from octavo.kernels.native import NativeOps
from octavo.kv_cache.groups import make_kv_cache_groups
from octavo.models.decoder import DecoderModel
from octavo.models.weights import Weight, model_weights
from octavo.sampling.sizes import kernel_nbytes
from octavo.worker.graphs import CapturedSteps, EagerSteps
from octavo.worker.input_batch import StepBuffers, StepLayout
from octavo.worker.memory import Scratch
from octavo.worker.setup import WorkerSetup


def measure_scratch(setup: WorkerSetup) -> Scratch:
    """See `Executor.measure_scratch`."""
    check_isa()
    config, spec, device = setup.config, setup.spec, torch.device("cpu")
    dtype: torch.dtype = getattr(torch, setup.dtype)
    cache_dtype = KV_CACHE_DTYPES.get(config.cache.kv_cache_dtype, dtype)
    head = spec.num_key_value_heads, spec.head_size
    asked = get_attention_backend(config.device.attention_backend, device, setup.max_model_len)
    asked.kv_cache_shape(
        1, config.cache.block_size, *head, cache_dtype
    )  # refuses what it cannot do
    threads = config.device.num_threads or num_cpus()
    tokens, length = setup.max_num_batched_tokens, setup.max_model_len
    kernels = asked.scratch_nbytes(
        LargestStep(tokens, length, spec.num_attention_heads, *head, threads)
    )

    ops, backend = NativeOps(), CPUAttention()  # others compute in the same buffers
    quantized = config.model.quantization is not None
    weights = {w.name: _weight(w, dtype) for w in model_weights(spec, quantized=quantized)}
    groups, _ = make_kv_cache_groups(spec.layer_windows)
    layer_groups = {layer: g for g, group in enumerate(groups) for layer in group.layer_indices}
    layout = StepLayout(setup.max_num_batched_tokens, config.scheduler.max_num_seqs, 1, len(groups))
    activations, logits = Arena(), Arena()
    kv_cache = placeholder(1, 2, spec.num_key_value_heads, 16, spec.head_size, dtype=dtype)
    with torch.inference_mode():
        CapturedSteps(
            EagerSteps(
                DecoderModel(spec, weights, ops, device=device, max_model_len=1),
                backend,
                [kv_cache] * spec.num_layers,
                [layer_groups[i] for i in range(spec.num_layers)],
                StepBuffers(layout, placeholder(layout.nbytes, dtype=torch.uint8).numpy()),
            ),
            ops,
            activations=activations,
            logits=logits,
        )
    kernels += kernel_nbytes(threads, spec.vocab_size)
    inputs = max(w.shape[1] for w in model_weights(spec, quantized=quantized) if w.kind == "linear")
    rows = max(setup.max_num_batched_tokens, config.scheduler.max_num_seqs)
    kernels += _native.linear_scratch(rows, inputs, threads)
    return Scratch(activations.peak, logits.peak, kernels)


def _weight(weight: Weight, dtype: torch.dtype) -> Tensor | PackedWeight | QuantizedWeight:
    """A weight without numbers. Quantized ones have the same inputs and outputs as packed ones."""
    if weight.kind != "linear":
        return placeholder(*weight.shape, dtype=dtype)
    n, k = weight.shape
    return PackedWeight(placeholder(0, dtype=torch.uint8), n, k, dtype, _native.panel())
