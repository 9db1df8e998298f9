"""Settings of vLLM that Octavo lacks: their harmless values, and the reasons to reject others.

Scripts and commands for vLLM may contain these settings. Values without effect are accepted and
dropped; others are rejected with an alternative. The command line, `LLM(...)` and docs/vllm.md
read this table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.errors import ConfigError

Kind = Literal["value", "list", "bool"]

# Markers for settings of which every value is harmless: flags with one value, with several values,
# and without a value.
ANY: Any = object()
ANY_LIST: Any = object()
EITHER = (True, False)


@dataclass(frozen=True)
class Foreign:
    """Setting that only vLLM has."""

    name: str
    kind: Kind
    """Values of its flag: one, several, or none."""
    harmless: tuple[Any, ...] | None
    """Values without effect, in addition to None and empty ones; None: every value."""
    why: str
    """Reason to reject other values with an alternative, or reason why no value has an effect."""

    @property
    def flag(self) -> str:
        """Command-line flag of the setting."""
        return "--" + self.name.replace("_", "-")


def _group(why: str, **harmless: Any) -> list[Foreign]:
    """Return settings that share a reason; a tuple holds several harmless values."""
    settings: list[Foreign] = []
    for name, value in harmless.items():
        if value is ANY or value is ANY_LIST:
            settings.append(Foreign(name, "list" if value is ANY_LIST else "value", None, why))
            continue
        values = value if isinstance(value, tuple) else (value,)
        first = values[0]
        kind: Kind = "value"
        if isinstance(first, (bool, list)):
            kind = "bool" if isinstance(first, bool) else "list"
        settings.append(Foreign(name, kind, None if value == EITHER else values, why))
    return settings


_ONE_DEVICE = (
    "a model is divided among processes only by tensor_parallel_size and pipeline_parallel_size "
    "so far, on one machine's CPU; to use more devices, start a server for each and a load "
    "balancer"
)

FOREIGN: dict[str, Foreign] = {
    setting.name: setting
    for settings in (
        _group(
            _ONE_DEVICE,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            nnodes=1,
            node_rank=0,
            enable_batch_sharded_sampling=False,
        ),
        _group(
            "each process reads only its own experts, always; leave it out",
            enable_ep_weight_filter=EITHER,
        ),
        _group("a step is one batch, and is never split in two", enable_dbo=False),
        _group("models with hyper-connections are not supported", enable_hc_sp=False),
        _group(
            "the number of engines has no separate maximum; leave it out",
            elastic_ep_max_dp_size=None,
        ),
        _group(
            "the server always replaces engines that die; leave it out",
            enable_fault_tolerance=False,
        ),
        _group(
            "a server has one port for all its engines; start a server for each "
            "(data_parallel_rank), and a load balancer",
            data_parallel_multi_port_external_lb=False,
        ),
        _group(
            "the server and its nodes start the engines; Ray can run workers "
            "(distributed_executor_backend) and whole servers (octavo router)",
            data_parallel_backend="mp",
        ),
        _group(
            "processes do not use torch.distributed",
            master_addr=ANY,
            master_port=ANY,
            distributed_timeout_seconds=ANY,
            cpu_distributed_timeout_seconds=ANY,
        ),
        _group(
            "it tunes context parallelism, which is not supported",
            dcp_comm_backend=ANY,
            dcp_q_replicate=EITHER,
            dcp_kv_cache_interleave_size=ANY,
            cp_kv_cache_interleave_size=ANY,
        ),
        _group(
            "the server itself monitors its engines, without a supervisor that has a port or "
            "probes",
            data_parallel_supervisor_port=ANY,
            dp_supervisor_probe_interval_s=ANY,
            dp_supervisor_probe_timeout_s=ANY,
            dp_supervisor_probe_failure_threshold=ANY,
        ),
        _group(
            "data-parallel engines do not wait for one another",
            dp_sync_interval=ANY,
            disable_nccl_for_dp_synchronization=EITHER,
        ),
        _group(
            "workers sum their parts in shared memory, without NCCL",
            disable_custom_all_reduce=EITHER,
            enable_nccl_comm_suspend=EITHER,
        ),
        _group(
            "workers always receive steps through shared memory", enable_shm_tensor_arena=EITHER
        ),
        _group(
            "one kernel computes experts, and the first process has the first ones; leave it out",
            all2all_backend=ANY,
            expert_placement_strategy=ANY,
        ),
        _group(
            "it tunes enable_dbo, which is not supported",
            ubatch_size=ANY,
            dbo_decode_token_threshold=ANY,
            dbo_prefill_token_threshold=ANY,
        ),
        _group(
            "max_engine_restarts and progress_timeout control the replacement of engines that die",
            fault_tolerance_config=ANY,
        ),
        _group(
            "weights are mapped from their files, so loading needs no copy for each worker",
            max_parallel_loading_workers=ANY,
        ),
        _group(
            "use profiler_dir to record a profile; Nsight is not supported",
            ray_workers_use_nsight=False,
        ),
        _group(
            "the worker and the scheduler cannot be replaced; LLM.collective_rpc can call a "
            "function with the worker",
            worker_cls="auto",
            worker_extension_cls="",
            scheduler_cls=None,
        ),
        _group("choose the device with CUDA_VISIBLE_DEVICES", device_ids=[]),
        _group(
            "name the node with numa_node, and the cores with taskset",
            numa_bind=False,
            numa_bind_nodes=[],
            numa_bind_cpus=[],
        ),
        _group(
            "nothing is compiled at start, so nothing can be tuned; enforce_eager disables "
            "captured steps",
            optimization_level=ANY,
            cudagraph_capture_sizes=ANY_LIST,
            max_cudagraph_capture_size=ANY,
            enable_flashinfer_autotune=EITHER,
            jit_monitor_mode=ANY,
            jit_monitor_verbose=EITHER,
        ),
        _group(
            "nothing is compiled at start; leave it out, and use enforce_eager to run steps "
            "operation by operation",
            compilation_config=({}, 0, 1, 2, 3),
        ),
        _group(
            "Octavo uses its own kernels; leave it out, or choose an attention_backend",
            kernel_config={},
            attention_config={},
            ir_op_priority={},
            linear_backend="auto",
            moe_backend="auto",
            sparse_indexer_topk_backend="auto",
            gdn_prefill_backend="auto",
            kda_prefill_backend="auto",
            kda_decode_backend="auto",
        ),
        _group("use octavo bench tune to find settings for a goal", performance_mode="balanced"),
        _group(
            "adapters change no encoders of pictures or sounds; leave it out",
            enable_tower_connector_lora=False,
        ),
        _group("adapters have the model's type; leave it out, or set dtype", lora_dtype="auto"),
        _group(
            "an adapter's numbers are divided among processes as the model's are, always",
            fully_sharded_loras=EITHER,
        ),
        _group(
            "a step computes the adapters of its requests only, always",
            specialize_active_lora=EITHER,
        ),
        _group(
            "the files of an adapter say in which form its experts are, always",
            enable_mixed_moe_lora_format=EITHER,
            enable_moe_shared_loras=EITHER,
        ),
        _group(
            "heads of classifiers in adapters have the classes of the model's head; leave it out",
            max_lora_cls_labels=ANY,
        ),
        _group(
            "pictures and sounds are read and computed without this setting (docs/images.md)",
            disable_chunked_mm_input=EITHER,
            mm_device_do_normalize=EITHER,
            mm_encoder_attn_backend=ANY,
            mm_encoder_attn_dtype=ANY,
            mm_encoder_fp8_scale_path=ANY,
            mm_encoder_fp8_scale_save_margin=ANY,
            mm_encoder_tp_mode=ANY,
            mm_hasher_algorithm=ANY,
            mm_ipc_gpu_memory_gb=ANY,
            mm_processor_cache_type=ANY,
            mm_processor_device=ANY,
            mm_shm_cache_max_object_size_mb=ANY,
            mm_tensor_ipc=ANY,
            skip_mm_profiling=EITHER,
            trust_request_mm_kwargs=EITHER,
            video_pruning_method=ANY,
            video_pruning_rate=ANY,
            enable_mm_processor_stats=EITHER,
            ec_manager_config=ANY,
        ),
        _group(
            "there is no such setting for pictures and sounds; leave it out",
            interleave_mm_strings=False,
            mm_encoder_only=False,
            mm_encoder_fp8_scale_save_path=None,
            ec_transfer_config={},
        ),
        _group(
            "prompts are texts, token ids or embeddings; plug-ins cannot convert other inputs to "
            "prompts",
            io_processor_plugin=None,
        ),
        _group(
            "recurrent states are in float32, and cached where docs/prefix_caching.md says",
            enable_mamba_cache_stochastic_rounding=EITHER,
            enable_mamba_shared_prefix_checkpoint=EITHER,
            mamba_backend=ANY,
            mamba_block_size=ANY,
            mamba_cache_dtype=ANY,
            mamba_cache_mode=ANY,
            mamba_cache_philox_rounds=ANY,
            mamba_config=ANY,
            mamba_ssm_cache_dtype=ANY,
            mamba_ssu_algorithm=ANY,
            replayssm_buffer_len=ANY,
            use_replayssm=EITHER,
        ),
        _group(
            "scores of token vectors (late interaction) are computed where they are requested",
            enable_flash_late_interaction=EITHER,
        ),
        _group(
            "tool calls are read with every model whose format of calls is known",
            enable_auto_tool_choice=EITHER,
        ),
        _group(
            "the parsers of tool calls are Octavo's own; name one with tool_call_parser, and leave "
            "it out",
            tool_parser_plugin="",
            tool_server=None,
            tool_strict_level="auto",
        ),
        _group(
            "the parsers of reasoning are Octavo's own; name one with reasoning_parser, and leave "
            "it out",
            reasoning_parser_plugin="",
            reasoning_config={},
        ),
        _group(
            "with Anthropic's API, disabled thinking sets enable_thinking of the chat template",
            anthropic_disabled_thinking_effort=ANY,
        ),
        _group(
            "chats of Cohere's API are not supported",
            cohere_format=ANY,
            cohere_is_reasoning_model=EITHER,
        ),
        _group(
            "weights always stay in the device's memory; use a smaller dtype or quantization=int8, "
            "int4 or fp8",
            cpu_offload_gb=0,
            offload_backend="auto",
            offload_group_size=0,
        ),
        _group(
            "use enable_sleep_mode to release memory",
            enable_cumem_allocator=False,
        ),
        _group(
            "it tunes the offloading of weights, which is not supported",
            cpu_offload_params=ANY_LIST,
            offload_num_in_group=ANY,
            offload_prefetch_step=ANY,
            offload_params=ANY_LIST,
        ),
        _group(
            "captured steps stay in memory while an engine sleeps; leave it out",
            sleep_mode_offload_cudagraph=False,
        ),
        _group(
            "after sleep at level=2 an engine that wakes up reads all weights again; use level=1",
            sleep_preserve_parameter_names=[],
        ),
        _group("kv_cache_dtype applies to all layers", kv_cache_dtype_skip_layers=[]),
        _group(
            "models with layers that share a KV cache are not supported",
            kv_sharing_fast_prefill=False,
        ),
        _group(
            "the prefix cache identifies blocks by their SHA-256",
            prefix_caching_hash_algo=("sha256", "sha256_cbor"),
        ),
        _group(
            "cached prefixes stay until other requests need their memory; leave it out",
            prefix_cache_retention_interval=0,
        ),
        _group("a cached prefix ends with a block; set block_size instead", prefix_match_unit=None),
        _group(
            "each kind of layer always has its own block tables",
            disable_hybrid_kv_cache_manager=EITHER,
        ),
        _group(
            "models that cache sliding windows separately (DeepSeek V4.1) are not supported",
            swa_bounded_replay=EITHER,
        ),
        _group("cascade attention is not supported", disable_cascade_attn=EITHER),
        _group(
            "layers attend according to the model's config; set max_model_len instead",
            disable_sliding_window=False,
        ),
        _group("use max_num_batched_tokens", max_num_scheduled_tokens=None),
        _group("use max_num_seqs", max_num_active_seqs=None),
        _group("use max_num_queued_reqs or request_memory_bytes", max_num_queued_tokens=None),
        _group(
            "prompts fill each step up to max_num_batched_tokens; leave it out",
            long_prefill_token_threshold_adaptive=False,
            prefill_schedule_interval=1,
        ),
        _group(
            "no KV-cache blocks are held back when a request starts; leave it out",
            watermark=0,
        ),
        _group(
            "Octavo always checks on arrival if a request fits", scheduler_reserve_full_isl=EITHER
        ),
        _group("tokens are sent as soon as they are generated; leave it out", stream_interval=1),
        _group(
            "load_format names the form of config and weights; config_format=mistral sets it, too",
            config_format=("auto", "hf", "mistral"),
        ),
        _group(
            "a model's folder has its config.json or params.json; change fields with hf_overrides",
            hf_config_path=None,
        ),
        _group(
            "Octavo computes models with its own code; install custom classes as a package "
            "(docs/architecture.md, Recipes)",
            model_class_overrides={},
            model_impl=("auto", "vllm"),
        ),
        _group("models with n-gram embeddings are not supported", engram_config={}),
        _group("diffusion models are not supported", diffusion_config={}),
        _group(
            "sampling defaults are those of the model's generation_config.json; set others in the "
            "request",
            generation_config="auto",
            override_generation_config={},
        ),
        _group(
            "one revision applies to weights, config and tokenizer; use revision, or a separate "
            "folder as tokenizer",
            code_revision=None,
            tokenizer_revision=None,
        ),
        _group("set the environment variable HF_TOKEN", hf_token=None),
        _group(
            "only the files of its load_format are downloaded and read for a model; leave it out",
            ignore_patterns=["original/**/*"],
            model_loader_extra_config={},
            model_weights="",
        ),
        _group(
            "weights are loaded directly to the device; leave it out", pt_load_map_location="cpu"
        ),
        _group(
            "weights do not change while an engine is awake; replace them in the model's folder, "
            "then sleep (level=2) and wake the engine up",
            weight_transfer_config={},
        ),
        _group(
            "it tunes the reading of weights, which are cached in packed form after the first "
            "start",
            safetensors_load_strategy=ANY,
            safetensors_prefetch_block_size=ANY,
            safetensors_prefetch_num_threads=ANY,
        ),
        _group("loading shows its progress only on a terminal", use_tqdm_on_load=EITHER),
        _group("use quantization=int8, int4 or fp8", quantization_config={}),
        _group("Octavo has no deprecated methods", allow_deprecated_quantization=EITHER),
        _group(
            "logprobs are those of the model before any processing; leave it out",
            logprobs_mode="raw_logprobs",
        ),
        _group(
            "answers do not contain the tokens that the sampler had left to choose from; leave it "
            "out",
            return_sampling_mask=False,
        ),
        _group(
            "the sampler has a fixed precision: token weights are whole numbers; leave it out",
            use_fp64_gumbel=False,
        ),
        _group(
            "answers do not list the experts of tokens; leave it out",
            enable_return_routed_experts=False,
        ),
        _group(
            "the tokens of an answer cannot be set beforehand; octavo replay repeats the requests "
            "of a recording (--record)",
            enable_trace_replay=False,
        ),
        _group(
            "answers contain tokens, text and logprobs, and no other output of the model",
            aux_output_config={},
        ),
        _group("answers are not watermarked", watermark_config={}),
        _group(
            "one log line has the statistics of all engines; /metrics has those of each engine",
            aggregate_engine_logging=EITHER,
        ),
        _group(
            "neither prompts nor answers are logged",
            enable_log_outputs=False,
            enable_log_deltas=EITHER,
        ),
        _group("neither prompts nor answers are logged", max_log_len=ANY),
        _group(
            "use log_level and log_format",
            logging_config={},
            log_config_file=None,
            log_error_stack=False,
        ),
        _group(
            "/metrics has all measurements; leave it out",
            cudagraph_metrics=False,
            enable_mfu_metrics=False,
            kv_cache_metrics=False,
            per_request_spec_decode_metrics="none",
        ),
        _group(
            "no metric is hidden in /metrics; leave it out", show_hidden_metrics_for_version=None
        ),
        _group(
            "histograms in /metrics have fixed buckets; leave it out", custom_histogram_buckets={}
        ),
        _group(
            "a profile shows the time of each step; record one with profiler_dir",
            enable_layerwise_nvtx_tracing=False,
            enable_logging_iteration_details=False,
        ),
        _group(
            "traces (otlp_traces_endpoint) have no times of a model's parts; record a profile with "
            "profiler_dir",
            collect_detailed_traces=[],
        ),
        _group("it tunes kv_cache_metrics, which is not supported", kv_cache_metrics_sample=ANY),
        _group(
            "only the operator can set the template; give chat_template when the server starts",
            trust_request_chat_template=False,
            chat_template_content_format="auto",
        ),
        _group("templates are rendered in one separate process", renderer_num_workers=ANY),
        _group("every answer has an X-Request-Id", enable_request_id_headers=EITHER),
        _group(
            "the server always counts unfinished requests; use GET /load",
            enable_server_load_tracking=EITHER,
        ),
        _group(
            "system_fingerprint names Octavo's version and settings; leave it out",
            fingerprint_mode="full",
            fingerprint_value=None,
        ),
        _group(
            "a stream sends nothing until its next token; use a proxy in front of the server that "
            "keeps connections alive",
            sse_keep_alive_interval=0,
        ),
        _group(
            "allowed_origins may use any method and header, without cookies; use a proxy in front "
            "of the server for other CORS rules",
            allow_credentials=False,
            allowed_headers=("*", ["*"]),
            allowed_methods=("*", ["*"]),
        ),
        _group(
            "use ssl_certfile and ssl_keyfile; use a proxy in front of the server for other TLS "
            "options",
            enable_ssl_refresh=False,
            ssl_ca_certs=None,
            ssl_cert_reqs=0,
            ssl_ciphers=None,
        ),
        _group("/docs already needs no other server", enable_offline_docs=EITHER),
        _group("the server always has POST /inference/v1/generate", enable_scale_out=EITHER),
        _group(
            "all routes are always available; use POST /inference/v1/generate", tokens_only=False
        ),
        _group("the API is HTTP with JSON", grpc=False, grpc_port=None),
        _group(
            "a request's head has at most 32 KiB and 100 headers; use a proxy in front of the "
            "server for other limits",
            h11_max_header_count=256,
            h11_max_incomplete_event_size=4194304,
        ),
        _group("unknown VLLM_* variables cause a warning", fail_on_environ_validation=False),
        _group("Octavo has no further settings", additional_config={}),
    )
    for setting in settings
}


RENAMED = {
    "device_memory_utilization": "gpu_memory_utilization",
    "override_pooler_config": "pooler_config",
}
"""Alternative names of Octavo's settings."""

SPECULATIVE = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
"""Settings that are keys of speculative_config."""

OFFLOADING = ("kv_offloading_size", "kv_offloading_backend")
"""Short form of kv_transfer_config: GiB of memory for the OffloadingConnector."""

MTP_METHODS = tuple(
    f"{family}_mtp"
    for family in (
        *("bailing_hybrid", "bailing_hybrid_v3", "deepseek", "dots3_note", "ernie", "exaone4_5"),
        *("exaone_moe", "gemma4", "glm4_moe", "glm4_moe_lite", "glm5_next", "glm_ocr", "hy_v3"),
        *("hy_v4", "inkling", "kimi_k3", "longcat_flash", "mimo", "mimo_v2", "minimax_m3"),
        *("nemotron_h", "pangu_ultra_moe", "qwen3_5", "qwen3_next", "qwen4_exp", "step3p5"),
    )
)
"""Older names of vLLM's method mtp, one for each family of models."""

DRAFT = {
    setting.name: setting
    for setting in [
        *_group(_ONE_DEVICE, draft_tensor_parallel_size=1),
        *_group(
            "no value changes a draft", enforce_eager=EITHER, disable_padded_drafter_batch=EITHER
        ),
        *_group(
            "the drafts of a step are computed one after the other; leave it out",
            parallel_drafting=False,
        ),
        *_group(
            "draft models are loaded unchanged; leave it out, or give a folder as the model",
            quantization=None,
            max_model_len=None,
            revision=None,
            code_revision=None,
        ),
    ]
}
"""Keys of speculative_config that only vLLM has."""

EPLB = {
    setting.name: setting
    for setting in [
        *_group("there is one policy; leave it out", policy="default"),
        *_group("experts always move while steps run", use_async=EITHER),
        *_group("experts always move through shared memory", communicator=ANY),
    ]
}
"""Keys of eplb_config that only vLLM has."""

POOLER = {
    setting.name: setting
    for setting in [
        *_group(
            "a text longer than the model's context is rejected or truncated, never computed in "
            "parts; leave it out",
            enable_chunked_processing=False,
            max_embed_len=None,
        ),
        *_group(
            "scores are the model's; change them where you use them, and leave it out",
            logit_bias=0,
            logit_mean=0,
            logit_sigma=1,
        ),
        *_group("a request names its task; leave it out", task=None),
    ]
}
"""Keys of pooler_config that only vLLM has."""

ACTIVATION_NAMES = {"normalize", "activation", "softmax"}
"""Older names of pooler_config's use_activation."""

SECTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "structured_outputs_config": (
        "backend",
        "guided_decoding_backend",
        {"disable_additional_properties": True},
    ),
    "profiler_config": ("torch_profiler_dir", "profiler_dir", {"profiler": "torch"}),
}
"""Groups of settings with one supported key: the key, Octavo's name, and harmless other keys."""

VALUES: dict[str, dict[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "guided_decoding_backend": {"guidance": "llguidance"},
    "attention_backend": {
        "CPU_ATTN": "cpu",
        "TRITON_ATTN": "triton",
        "FLASHINFER": "flashinfer",
    },
    "tokenizer_mode": {"hf": "auto", "fast": "auto", "slow": "auto"},
}
"""Octavo's names of values by vLLM's names."""

SHORT = {
    "compilation_config": "-cc",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "data_parallel_size_local": "-dpl",
    "data_parallel_rank": "-dpn",
    "data_parallel_start_rank": "-dpr",
    "data_parallel_address": "-dpa",
    "data_parallel_rpc_port": "-dpp",
    "data_parallel_backend": "-dpb",
    "data_parallel_hybrid_lb": "-dph",
    "data_parallel_external_lb": "-dpe",
    "data_parallel_multi_port_external_lb": "-dpm",
    "prefill_context_parallel_size": "-pcp",
    "decode_context_parallel_size": "-dcp",
    "enable_expert_parallel": "-ep",
    "nnodes": "-n",
    "node_rank": "-r",
    "optimization_level": "-O",
    "attention_config": "-ac",
    "diffusion_config": "-dc",
    "api_server_count": "-asc",
    "tensor_parallel_size": "-tp",
    "quantization": "-q",
    "speculative_config": "-sc",
}
"""Short forms of flags, also of settings that Octavo has."""


def check_foreign(name: str, value: Any) -> bool:
    """Return True if a setting is only vLLM's and can be dropped; False if vLLM lacks it.

    Args:
        name: name of the argument, such as "pipeline_parallel_size".
        value: value of an argument of `LLM(...)`, or text from the command line.

    Raises:
        ConfigError: the setting is vLLM's, and Octavo does not support the value.
    """
    setting = FOREIGN.get(name)
    if setting is None:
        return False
    _refuse_unless_harmless(setting, name, value)
    return True


def _refuse_unless_harmless(setting: Foreign, name: str, value: Any) -> None:
    if setting.harmless is None or _is_empty(value) or _typed(value) in setting.harmless:
        return
    # A token must not be shown.
    shown = name if name == "hf_token" else f"{name}={value!r}"
    raise ConfigError(f"{shown} is not supported: {setting.why}.")


def translate(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's settings by Octavo's names, without those that have no effect.

    Args:
        kwargs: flat names, as `LLM(...)` and the command line accept them; unknown names remain.

    Raises:
        ConfigError: Octavo does not support a value, or two settings contradict each other.
    """
    kwargs = dict(kwargs)
    settings = {name: value for name, value in kwargs.items() if not check_foreign(name, value)}
    if kwargs.get("config_format") == "mistral":
        _put(settings, "load_format", "mistral", "config_format=mistral")
    for name, renamed in RENAMED.items():
        if name in settings:
            _put(settings, renamed, settings.pop(name), name)
    parts = {SPECULATIVE[name]: settings.pop(name) for name in SPECULATIVE if name in settings}
    if parts := {name: value for name, value in parts.items() if value is not None}:
        _put(settings, "speculative_config", parts, "spec_method, spec_model and spec_tokens")
    size, backend = (settings.pop(name, None) for name in OFFLOADING)
    if backend not in (None, "native"):
        raise ConfigError(
            f"kv_offloading_backend={backend!r} is not supported; use native, or set another "
            "connector with kv_transfer_config."
        )
    if _typed(size) not in (None, 0):
        _put(settings, "kv_transfer_config", _offloading(size), "kv_offloading_size")
    parts_of = {"speculative_config": DRAFT, "eplb_config": EPLB, "pooler_config": POOLER}
    for setting, foreign in parts_of.items():
        given = _typed(settings.get(setting))
        if isinstance(given, dict):
            for name in given.keys() & foreign.keys():
                _refuse_unless_harmless(foreign[name], f"{setting}.{name}", given[name])
            settings[setting] = {
                name: "mtp" if name == "method" and value in MTP_METHODS else value
                for name, value in given.items()
                if name not in foreign
            }
    pooler = settings.get("pooler_config")
    if isinstance(pooler, dict):
        for name in ACTIVATION_NAMES & pooler.keys():
            _put(pooler, "use_activation", pooler.pop(name), f"pooler_config.{name}")
    for name, (key, target, ignored) in SECTIONS.items():
        section = _typed(settings.pop(name, None))
        if _is_empty(section):
            continue
        if not isinstance(section, dict):
            raise ConfigError(f"{name}={section!r} is not allowed; give a JSON object.")
        for part, value in section.items():
            if part == key:
                _put(settings, target, value, f"{name}.{key}")
            elif value and value != ignored.get(part):
                raise ConfigError(f"{name}.{part}={value!r} is not supported; only {key} is.")
    for name, values in VALUES.items():
        if isinstance(settings.get(name), str):
            settings[name] = values.get(settings[name], settings[name])
    return settings


def _put(settings: dict[str, Any], name: str, value: Any, given_as: str) -> None:
    if settings.get(name, value) != value:
        raise ConfigError(f"{name} and {given_as} contradict each other; give one of them.")
    settings[name] = value


def _offloading(size: Any) -> dict[str, Any]:
    gib = _typed(size)
    if isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 < gib < 2**20:
        raise ConfigError(f"kv_offloading_size={size!r} is not allowed; give GiB, such as 4.")
    extra = {"cpu_bytes_to_use": int(gib * 2**30)}
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", "None") or (value != 0 and not value)


def _typed(value: Any) -> Any:
    """Parse typed text: return a number, JSON, or the unchanged text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
