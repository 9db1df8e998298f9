"""Settings of vLLM that Octavo does not have."""

import json
import re

import pytest

from octavo.compat.settings import FOREIGN, check_foreign, translate
from octavo.config import EngineConfig, SpeculativeConfig
from octavo.errors import ConfigError


def config_of(**settings):
    return EngineConfig.from_kwargs(**translate(settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill_context_parallel_size", 1),
        ("prefill_context_parallel_size", "1"),
        ("compilation_config", "3"),
        ("compilation_config", {}),
        ("cpu_offload_gb", 0.0),
        ("enable_tower_connector_lora", False),
        ("fully_sharded_loras", True),
        ("aggregate_engine_logging", True),
        ("config_format", "hf"),
        ("enable_auto_tool_choice", True),
        ("optimization_level", "0"),
    ],
)
def test_what_asks_for_nothing_is_dropped(name, value):
    assert check_foreign(name, value)
    assert config_of(**{name: value}) == EngineConfig()


def test_parts_of_eplb_config_that_change_nothing_are_dropped():
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}
    ours = {"window_size": 100, "num_redundant_experts": 2}
    theirs = {**ours, "use_async": True, "policy": "default", "communicator": "nixl"}
    meant = config_of(**ranks, eplb_config=ours)
    assert meant.device.redundant_experts == 2
    assert config_of(**ranks, eplb_config=theirs) == meant
    assert config_of(**ranks, eplb_config=json.dumps(theirs)) == meant
    with pytest.raises(ConfigError, match=r"eplb_config\.policy='swift' is not supported"):
        config_of(**ranks, eplb_config={**ours, "policy": "swift"})


def test_parts_of_speculative_config_that_ask_for_nothing_are_dropped():
    ours = {"method": "ngram", "num_speculative_tokens": 3}
    theirs = {**ours, "draft_tensor_parallel_size": 1, "enforce_eager": True, "revision": None}
    meant = config_of(speculative_config=ours)
    assert config_of(speculative_config=theirs) == meant
    assert config_of(speculative_config=json.dumps(theirs)) == meant
    said = r"speculative_config\.draft_tensor_parallel_size=2 is not supported: .*divided among"
    with pytest.raises(ConfigError, match=said):
        config_of(speculative_config={**theirs, "draft_tensor_parallel_size": 2})


@pytest.mark.parametrize("name", ["mtp", "qwen3_next_mtp", "qwen3_5_mtp", "deepseek_mtp"])
def test_older_names_of_the_method_mtp(name):
    config = config_of(speculative_config={"method": name, "num_speculative_tokens": 2})
    assert config.speculation.speculative_config.method == "mtp"
    assert config_of(spec_method=name, spec_tokens=2) == config


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("prefill_context_parallel_size", 2, "load balancer"),
        ("compilation_config", '{"mode": 0}', "enforce_eager"),
        ("cpu_offload_gb", "4", "quantization"),
        ("enable_tower_connector_lora", True, "encoders"),
        ("lora_dtype", "float32", "set dtype"),
        ("tool_parser_plugin", "x.py", "Octavo's own"),
        ("hf_config_path", "x", "config.json"),
        ("max_num_active_seqs", 3, "max_num_seqs"),
        ("numa_bind", True, "numa_node"),
    ],
)
def test_what_asks_for_more_is_refused_with_what_to_use(name, value, advice):
    with pytest.raises(ConfigError, match=advice) as error:
        config_of(**{name: value})
    assert f"{name}={value!r} is not supported" in str(error.value)
    assert "\n" not in str(error.value)


def test_names_of_mistrals_form():
    config = config_of(config_format="mistral", tokenizer_mode="mistral")
    assert (config.load.load_format, config.model.tokenizer_mode) == ("mistral", "mistral")
    assert config_of(config_format="mistral", load_format="mistral").load == config.load
    with pytest.raises(ConfigError, match="load_format and config_format=mistral contradict"):
        config_of(config_format="mistral", load_format="pt")
    assert config_of(tokenizer_mode="slow") == EngineConfig()


def test_one_front_end_has_all_engines():
    with pytest.raises(ConfigError, match="Ray can run workers"):
        config_of(data_parallel_size=2, data_parallel_backend="ray")
    with pytest.raises(ConfigError, match="start a server for each"):
        config_of(data_parallel_multi_port_external_lb=True)


def test_a_token_is_not_shown():
    with pytest.raises(ConfigError, match="HF_TOKEN") as error:
        check_foreign("hf_token", "hf_secret")
    assert "hf_secret" not in str(error.value)


def test_what_nobody_knows_is_unknown():
    assert not check_foreign("frobnicate", 1)
    with pytest.raises(ConfigError, match="no setting called 'frobnicate'"):
        config_of(frobnicate=1)


def test_every_refusal_is_one_sentence_that_names_no_other_program():
    for setting in FOREIGN.values():
        assert not setting.why.endswith(".")
        assert "\n" not in setting.why
        assert setting.why[0].islower() or setting.why[0] in "V/O"


# Words that a reason must have, by a part of the setting's name.
TOPICS = {
    r"anthropic": "Anthropic",
    r"cohere": "Cohere",
    r"aux_output": "no other output",
    r"batch_sharded|^nnodes|^node_rank|^(pre|de).*_context_": "divided among processes",
    r"^(dcp|cp)_": "context parallel",
    r"chat_template": "template",
    r"^renderer": "rendered",
    r"code_revision|tokenizer_revision": "revision",
    r"collect_detailed|otlp": "traces",
    r"compilation|cudagraph_capture|^jit|optimization_level|autotune": "compiled",
    r"^config_format": "load_format",
    r"hf_config": "config.json",
    r"cpu_offload|^offload": "weights",
    r"cumem|^sleep": "sleep|wakes",
    r"data_parallel_backend": "Ray",
    r"supervisor": "supervisor",
    r"multi_port": "one port",
    r"_backend$(?<!offload_backend)(?<!parallel_backend)(?<!all2all_backend)(?<!comm_backend)"
    r"(?<!mamba_backend)|kernel|attention_config|ir_op": "kernels|pictures",
    r"dbo|ubatch": "batch|enable_dbo",
    r"device_ids": "device",
    r"diffusion": "diffusion",
    r"disable_(log_stats)|aggregate_engine_logging": "statistics|interval",
    r"dp_sync|for_dp_sync": "wait for one another",
    r"elastic_ep": "number of engines",
    r"engram": "n-gram",
    r"expert|eplb|all2all|ep_weight": "expert",
    r"environ_validation": "VLLM_",
    r"fault_tolerance": "die",
    r"fingerprint": "fingerprint",
    r"^generation_config|override_generation": "generation_config.json",
    r"grpc": "HTTP",
    r"h11": "headers",
    r"hc_sp": "hyper-connections",
    r"hf_token": "HF_TOKEN",
    r"histogram": "buckets",
    r"hybrid_kv": "block tables",
    r"io_processor": "prompts",
    r"kv_cache_dtype": "kv_cache_dtype",
    r"kv_cache_metrics_sample": "kv_cache_metrics",
    r"_metrics$(?<!hidden_metrics)": "/metrics",
    r"show_hidden": "hidden",
    r"kv_sharing": "share a KV cache",
    r"layerwise|iteration_details|nsight": "profile",
    r"lora(?!_dtype)|lora_dtype": "adapter",
    r"load_tracking": "/load",
    r"^enable_log_|max_log_len": "prompts nor answers",
    r"log(ging)?_(config|error)": "log_level",
    r"logprobs": "logprobs",
    r"mamba|replayssm": "recurrent states",
    r"^master|distributed_timeout": "torch.distributed",
    r"max_num_": "max_num_",
    r"mm_|media|^video|multimodal|language_model_only|^ec_": "picture",
    r"model_class|model_impl": "own code",
    r"model_weights|ignore_patterns|model_loader": "files of its load_format",
    r"nccl_comm|all_reduce": "NCCL",
    r"numa": "numa_node",
    r"offline_docs": "/docs",
    r"parallel_loading": "loading",
    r"performance_mode": "tune",
    r"prefill_(schedule|token)": "prompts fill",
    r"pt_load": "device",
    r"quantization": "quantization|methods",
    r"reasoning(?!_model)": "reasoning",
    r"request_id_headers": "X-Request-Id",
    r"routed_experts": "routed",
    r"late_interaction": "late interaction",
    r"safetensors": "reading of weights",
    r"sampling_mask": "left to choose",
    r"gumbel": "precision",
    r"scale_out|tokens_only": "/inference/v1/generate",
    r"reserve_full": "on arrival",
    r"shm_tensor": "shared memory",
    r"sliding_window": "layers attend",
    r"sse_|stream_interval": "token",
    r"ssl": "TLS",
    r"swa_": "sliding windows",
    r"tool(?!_connector)": "tool calls",
    r"trace_replay": "beforehand",
    r"^watermark$": "held back",
    r"watermark_config": "watermarked",
    r"tqdm": "progress",
    r"weight_transfer": "weights do not change",
    r"worker_cls|worker_ext|scheduler_cls": "worker",
    r"^allow(ed)?_(cred|head|meth)": "CORS",
    r"allow_deprecated": "deprecated",
    r"additional_config": "settings",
    r"cascade": "cascade",
    r"hash_algo": "SHA-256",
    r"retention": "prefixes stay",
    r"match_unit": "block_size",
}


def test_every_reason_speaks_of_its_setting():
    """A setting with another one's reason would lack its word there."""
    for name, setting in FOREIGN.items():
        topics = [words for pattern, words in TOPICS.items() if re.search(pattern, name)]
        assert topics, f"TOPICS has nothing for {name}"
        assert any(re.search(words, setting.why) for words in topics), (name, setting.why)


def test_settings_that_share_a_reason_share_a_topic():
    for why in {setting.why for setting in FOREIGN.values()}:
        names = [name for name, setting in FOREIGN.items() if setting.why == why]
        found = [
            {words for pattern, words in TOPICS.items() if re.search(pattern, name)}
            for name in names
        ]
        assert set.intersection(*found), (why, names)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"device_memory_utilization": 0.5}, {"gpu_memory_utilization": 0.5}),
        (
            {"spec_method": "ngram", "spec_tokens": 3},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ),
        ({"spec_model": None}, {}),
        (
            {"kv_offloading_size": "0.5", "kv_offloading_backend": "native"},
            {
                "kv_transfer_config": {
                    "kv_connector": "OffloadingConnector",
                    "kv_connector_extra_config": {"cpu_bytes_to_use": 2**29},
                }
            },
        ),
        ({"kv_offloading_size": 0}, {}),
        (
            {
                "structured_outputs_config": {
                    "backend": "guidance",
                    "disable_any_whitespace": False,
                    "disable_additional_properties": True,
                }
            },
            {"guided_decoding_backend": "llguidance"},
        ),
        (
            {"profiler_config": '{"profiler": "torch", "torch_profiler_dir": "/p"}'},
            {"profiler_dir": "/p"},
        ),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"attention_backend": "TRITON_ATTN"}, {"attention_backend": "triton"}),
        ({"model": "m", "frobnicate": 1}, {"model": "m", "frobnicate": 1}),
    ],
)
def test_what_octavo_names_otherwise_is_translated(given, meant):
    assert translate(given) == meant


def test_translated_settings_reach_the_config():
    config = config_of(spec_method="suffix", dtype="half")
    assert config.speculation.speculative_config == SpeculativeConfig(method="suffix")
    assert config.model.dtype == "float16"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"gpu_memory_utilization": 0.5, "device_memory_utilization": 0.6},
            "gpu_memory_utilization and device_memory_utilization",
        ),
        ({"kv_offloading_size": -1}, "kv_offloading_size=-1 is not allowed; give GiB"),
        ({"kv_offloading_size": True}, "kv_offloading_size=True is not allowed"),
        ({"kv_offloading_size": 4, "kv_offloading_backend": "lmcache"}, "kv_offloading_backend='l"),
        (
            {"kv_offloading_size": 4, "kv_transfer_config": {"kv_connector": "P2PConnector"}},
            "kv_transfer_config and kv_offloading_size",
        ),
        ({"spec_method": "ngram", "speculative_config": {"method": "suffix"}}, "spec_method"),
        ({"profiler_config": {"profiler": "cuda"}}, "profiler_config.profiler='cuda'"),
        ({"structured_outputs_config": "xgrammar"}, "structured_outputs_config='xgrammar'"),
    ],
)
def test_contradictions_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        translate(given)


def test_parts_of_pooler_config_that_change_nothing_are_dropped():
    ours = {"seq_pooling_type": "MEAN", "use_activation": False}
    theirs = {**ours, "max_embed_len": None, "logit_bias": 0.0, "task": None}
    meant = config_of(pooler_config=ours)
    assert config_of(pooler_config=theirs) == meant
    assert config_of(pooler_config=json.dumps(theirs)) == meant
    assert config_of(override_pooler_config={**theirs, "normalize": False}) == meant
    del theirs["use_activation"]
    assert config_of(pooler_config={**theirs, "softmax": False}) == meant
    with pytest.raises(ConfigError, match=r"pooler_config\.max_embed_len=9 is not supported"):
        config_of(pooler_config={**ours, "max_embed_len": 9})
