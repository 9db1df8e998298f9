"""Descriptions of the parts of vLLM that Octavo lacks: one sentence for any name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

VLLM_VERSION = "0.33"
"""Version of vLLM of the described names."""

_OWN_CODE = "write it for Octavo's own interface (docs/architecture.md, Recipes), or leave it out"
_POOLING = "use LLM.encode, LLM.embed, LLM.classify and LLM.score (docs/pooling_http.md)"
_MEDIA = "give pictures as multi_modal_data (docs/images.md)"
_PARSERS = "parse the text of the answer yourself, or request JSON with structured outputs"
_KV_CONNECTORS = (
    "Octavo's own KV connectors are set with kv_transfer_config (docs/kv_connectors.md)"
)

_PARTS: dict[str, tuple[str, str]] = {
    "ModelRegistry": ("vLLM's registry of model classes", _OWN_CODE),
    "_C": ("vLLM's compiled kernels", _OWN_CODE),
    "_aiter_ops": ("vLLM's kernels for AMD GPUs", _OWN_CODE),
    "_custom_ops": ("vLLM's kernels", _OWN_CODE),
    "_xpu_ops": ("vLLM's kernels for Intel GPUs", _OWN_CODE),
    "assets": ("vLLM's sample pictures, sounds and videos", _MEDIA),
    "benchmarks": ("vLLM's own benchmarks", "use octavo bench"),
    "collect_env": ("vLLM's report of the machine", "use octavo collect-env"),
    "compilation": ("vLLM's compiler passes", "nothing is compiled here; leave it out"),
    "config": (
        "vLLM's settings as its engine holds them",
        "give settings as arguments of LLM(...)",
    ),
    "config.CompilationConfig": (
        "the settings of vLLM's compiler",
        "nothing is compiled here; leave it out",
    ),
    "config.PoolerConfig": ("the settings of pooling models", _POOLING),
    "config.WeightTransferConfig": (
        "the settings with which a trainer sends new weights to a running engine",
        "put them into the model's folder, then sleep (level=2) and wake the engine up",
    ),
    "config.pooler": ("the settings of pooling models", _POOLING),
    "connections": ("vLLM's HTTP client for media", _MEDIA),
    "cute_utils": ("vLLM's helpers for CuTe kernels", _OWN_CODE),
    "device_allocator": (
        "vLLM's allocator of GPU memory",
        "use enable_sleep_mode to release memory",
    ),
    "distributed": (
        "vLLM's communication between devices",
        "set tensor_parallel_size, pipeline_parallel_size or data_parallel_size; Octavo connects "
        "its processes itself",
    ),
    "distributed.ec_transfer": ("the transfer of encoders' outputs between servers", _MEDIA),
    "distributed.kv_events": (
        "vLLM's publisher of KV events",
        "set kv_events_config; subscribers are the same",
    ),
    "distributed.kv_transfer": ("vLLM's interface of KV connectors", _KV_CONNECTORS),
    "distributed.weight_transfer": (
        "the transfer of new weights from a trainer to a running engine",
        "put them into the model's folder, then sleep (level=2) and wake the engine up",
    ),
    "engine": ("vLLM's internal engine", "use LLM, LLMEngine or AsyncLLM"),
    "entrypoints": ("vLLM's internal server", "start octavo serve, or build on AsyncLLM"),
    "entrypoints.pooling": ("vLLM's server of pooling models", "use octavo serve"),
    "env_override": ("vLLM's changes of environment variables", "leave it out"),
    "exceptions": ("vLLM's errors", "Octavo's errors are in octavo.errors"),
    "forward_context": ("the state of a step in vLLM's models", _OWN_CODE),
    "inputs": ("a form of prompt that Octavo does not accept", _MEDIA),
    "ir": ("vLLM's intermediate representation of operations", _OWN_CODE),
    "kernels": ("vLLM's kernels", _OWN_CODE),
    "logging_utils": ("vLLM's log formats", "use log_level and log_format"),
    "lora": ("vLLM's layers of adapters", "use LoRARequest of vllm.lora.request (docs/lora.md)"),
    "model_executor": ("vLLM's code of models, layers and loaders", _OWN_CODE),
    "model_executor.determinism": (
        "vLLM's batch-invariant kernels",
        "Octavo is always batch-invariant on a CPU, and with batch_invariant on CUDA",
    ),
    "model_executor.models": ("vLLM's code of models", _OWN_CODE),
    "model_executor.layers": ("vLLM's code of layers", _OWN_CODE),
    "model_executor.model_loader": (
        "vLLM's loaders of weights",
        "Octavo reads safetensors files and packs them once; see load_format in docs/settings.md",
    ),
    "model_inspection": ("vLLM's functions that print models", _OWN_CODE),
    "models": ("vLLM's code of models", _OWN_CODE),
    "multimodal": ("vLLM's support for pictures, sounds and videos", _MEDIA),
    "parser": ("vLLM's parsers of tool calls and reasoning", _PARSERS),
    "platforms": (
        "vLLM's interface of devices",
        "define a subclass of octavo.worker.platform.Platform (docs/architecture.md, Recipes)",
    ),
    "plugins": (
        "vLLM's loader of plug-ins",
        "Octavo finds plug-ins by entry points (docs/architecture.md, Recipes)",
    ),
    "profiler": ("vLLM's profilers of layers", "use profiler_dir"),
    "ray": ("vLLM's set-up of Ray", "use distributed_executor_backend=ray"),
    "reasoning": ("vLLM's parsers of reasoning", _PARSERS),
    "renderers": ("vLLM's renderers of chats and prompts", "use LLM.chat and LLM.render_chat"),
    "scalar_type": ("vLLM's types of quantized numbers", _OWN_CODE),
    "snapshot": ("vLLM's snapshots of a loaded engine", "Octavo itself caches packed weights"),
    "tasks": ("vLLM's list of model tasks", _POOLING),
    "third_party": ("third-party code in vLLM", "install the original packages"),
    "tokenizers": ("vLLM's tokenizers", "use LLM.get_tokenizer()"),
    "tool_parsers": ("vLLM's parsers of tool calls", _PARSERS),
    "tracing": ("vLLM's functions for OpenTelemetry", "use otlp_traces_endpoint"),
    "transformers_utils": (
        "vLLM's helpers for the library transformers",
        "use that library directly",
    ),
    "tilelang_utils": ("vLLM's helpers for TileLang kernels", _OWN_CODE),
    "triton_utils": ("vLLM's helpers for Triton", _OWN_CODE),
    "usage": ("vLLM's usage reports", "Octavo sends no reports; leave it out"),
    "utils": ("vLLM's helper functions", "write your own function instead"),
    "utils.serial_utils": ("vLLM's encodings of embeddings", _POOLING),
    "v1": ("vLLM's internal engine", "use LLM, LLMEngine or AsyncLLM"),
    "v1.attention": ("vLLM's attention backends", _OWN_CODE),
    "v1.core": ("vLLM's internal scheduler and KV cache", _OWN_CODE),
    "v1.executor": ("vLLM's executors", "use distributed_executor_backend"),
    "v1.kv_cache_interface": ("vLLM's description of KV caches", _KV_CONNECTORS),
    "v1.kv_offload": ("vLLM's offloading of the KV cache", _KV_CONNECTORS),
    "v1.metrics": (
        "vLLM's loggers of statistics",
        "read LLM.get_metrics(), AsyncLLM.stats or /metrics",
    ),
    "v1.pool": ("vLLM's internal pooling models", _POOLING),
    "v1.sample": ("vLLM's internal sampler", _OWN_CODE),
    "v1.spec_decode": ("vLLM's drafting methods", _OWN_CODE),
    "v1.structured_output": (
        "vLLM's grammar backends",
        "use structured outputs (docs/structured_output.md)",
    ),
    "v1.watermarking": ("vLLM's watermarks", "answers are not watermarked; leave it out"),
    "v1.worker": ("vLLM's workers and model runners", _OWN_CODE),
    "v1.worker.gpu.sample.logits_processor": (
        "the interface for logits processors of vLLM's second model runner, which uses that "
        "runner's buffers",
        "Octavo runs those of vllm.v1.sample.logits_processor",
    ),
    "vllm_flash_attn": ("vLLM's attention kernels", _OWN_CODE),
}
"""Descriptions and alternatives by vLLM's path, without the leading `vllm.`."""


def sentence(path: str, present: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a sentence that describes a name of vLLM's that Octavo lacks.

    Args:
        path: path such as "vllm.lora.request".
        present: names that Octavo has, by module.
    """
    module, _, name = path.rpartition(".")
    elsewhere = [other for other, names in present.items() if name in names]
    if elsewhere:
        return f"Octavo's {name} is in {' and '.join(elsewhere)}, not in {module}."
    parts = path.removeprefix("vllm.").split(".")
    for length in range(len(parts), 0, -1):
        found = _PARTS.get(".".join(parts[:length]))
        if found is not None:
            what, instead = found
            part = "vllm." + ".".join(parts[:length])
            whole = "" if part == path else f"part of {part}, "
            return f"Octavo does not have {path} ({whole}{what}): {instead}."
    known = {*present, *(f"{m}.{n}" for m, names in present.items() for n in names)}
    known |= {f"vllm.{part}" for part in _PARTS}
    close = difflib.get_close_matches(path, sorted(known), 1, cutoff=0.75)
    hint = f"; did you mean {close[0]}?" if close else "; check the spelling."
    return f"Octavo knows no name {path} of vLLM {VLLM_VERSION}{hint}"
