"""Settings: defaults, checks, contradictions, and the flags made of them."""

import argparse
import math
import os
import typing

import msgspec
import pytest
from huggingface_hub import constants

from octavo.config import (
    BUILTIN_MODEL,
    ENVIRONMENT,
    EngineConfig,
    EplbConfig,
    LoadConfig,
    LoRAConfig,
    LoRAModule,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    admin_keys_from_environment,
    api_keys_from_environment,
    build_section,
    config_fields,
    environment_without_keys,
    hub_offline,
    optional_type,
    parse_size,
    section_fields,
    server_api_key_from_environment,
    settings_from_environment,
    traces_from_environment,
    unknown_variables,
)
from octavo.config.arguments import add_settings, given_settings
from octavo.errors import ConfigError

HUGE = 2**20_000  # more digits than Python turns into text
NAN = math.nan


def refused(**kwargs):
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_kwargs(**kwargs)
    return str(error.value)


def test_defaults():
    config = EngineConfig.from_kwargs()
    assert config == EngineConfig()
    assert config.model.model == BUILTIN_MODEL
    assert (config.cache.block_size, config.scheduler.max_num_seqs) == (16, 256)
    assert config.scheduler.enable_chunked_prefill
    assert config.cache.enable_prefix_caching
    assert not config.model.trust_remote_code


def test_flat_names_find_their_sections():
    config = EngineConfig.from_kwargs(
        model="m", dtype="float32", block_size=32, max_num_seqs=4, load_format="dummy", device="cpu"
    )
    assert config.model == ModelConfig(model="m", dtype="float32")
    assert config.cache.block_size == 32
    assert config.scheduler == SchedulerConfig(max_num_seqs=4)
    assert config.load == LoadConfig(load_format="dummy")
    assert config.device.device == "cpu"


def test_only_what_was_set_is_shown():
    assert repr(EngineConfig()) == "EngineConfig()"
    config = EngineConfig.from_kwargs(model="m", block_size=32)
    shown = "EngineConfig(model=ModelConfig(model='m'), cache=CacheConfig(block_size=32))"
    assert repr(config) == shown


def test_adapters_of_a_server():
    lora = EngineConfig.from_kwargs(
        enable_lora=True,
        max_loras=2,
        lora_modules=[
            "a=/x=y",
            '{"name": "b", "path": "c", "base_model_name": "d"}',
            '{"name": "e", "path": "f", "draft_path": "g"}',
        ],
    ).lora
    assert lora.modules == [
        LoRAModule(name="a", path="/x=y"),
        LoRAModule(name="b", path="c", base_model_name="d"),
        LoRAModule(name="e", path="f", draft_path="g"),
    ]
    assert lora.num_in_memory == 2
    assert LoRAConfig().num_in_memory == 0
    assert LoRAConfig(enable_lora=True, max_cpu_loras=7).num_in_memory == 7


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_loras": 3, "max_cpu_loras": 2}, "max_cpu_loras=2 is less than max_loras=3"),
        ({"lora_modules": ["a=b", "a=c"]}, "names 'a' twice"),
        ({"lora_modules": ["a=b\udcff"]}, "its bytes are not UTF-8"),
        ({"lora_modules": ["m=b"]}, "'m' is the name of the model"),
        ({"lora_modules": ["a=b"], "enable_lora": False}, "lora_modules=['a=b'] needs adapters"),
        ({"lora_root": "/x", "enable_lora": False}, "lora_root='/x' needs adapters"),
        ({"lora_hub_repos": ["a/*"], "enable_lora": False}, "lora_hub_repos=['a/*'] needs"),
        ({"lora_hub_repos": ["a"]}, "lora_hub_repos='a' is not allowed; write org/name, or org/*"),
        ({"lora_resolvers": ["folder"]}, "lora_resolvers: folder needs lora_root"),
        ({"lora_resolvers": ["hub"]}, "lora_resolvers: hub needs lora_hub_repos"),
        (
            {"lora_modules_to_save": ["lm_head"], "enable_lora": False},
            "lora_modules_to_save=['lm_head'] needs adapters",
        ),
        (
            {"lora_target_modules": ["q_proj"], "enable_lora": False},
            "lora_target_modules=['q_proj'] needs adapters",
        ),
    ],
)
def test_contradictory_settings_of_adapters(settings, said):
    assert said in refused(**{"served_model_name": ["m"], "enable_lora": True, **settings})


def test_sections_are_frozen():
    with pytest.raises(AttributeError):
        EngineConfig().model.model = "x"


BAD = {
    "model": ["", None, 5, ["m"]],
    "tokenizer": [5, ["t"]],
    "skip_tokenizer_init": [1, "yes", None],
    "trust_remote_code": ["true", 0],
    "dtype": ["float64", "FLOAT32", 32, None],
    "quantization": ["int3", "INT8", 8, ""],
    "dequantize": ["yes", 1],
    "seed": [-1, 1.0, True, None, 2**63, HUGE],
    "max_model_len": [-2, 0, 1.5, "4096", True, 2**70],
    "revision": [5],
    "served_model_name": [5, [5], [None], None],
    "logits_processors": [5, [5], [None], None],
    "hf_overrides": [5, "x", "[1]", None],
    "runner": ["draft", "", None, 1],
    "convert": ["reward", "", None, 1],
    "pooler_config": [
        *("text", 5, [], {"pooling_type": "last"}, {"pooling": "LAST"}, {"dimensions": 0}),
        *({"use_activation": 1}, {"step_tag_id": -1}, {"returned_token_ids": [-1]}),
        *({"pooling_type": "STEP"}, {"pooling_type": "LAST", "seq_pooling_type": "MEAN"}),
        *({"pooling_type": "ALL", "tok_pooling_type": "STEP", "step_tag_id": 5},),
        *({"max_embed_len": 9}, {"enable_chunked_processing": True}, {"logit_bias": 2}),
        {"normalize": True, "use_activation": False},
    ],
    "max_logprobs": [-2, None, 1.0],
    "guided_decoding_backend": ["outlines", "", None],
    "allow_additional_properties": ["yes", 1, None],
    "enable_sleep_mode": [1, "yes", None],
    "enforce_eager": ["no", 1],
    "enable_prompt_embeds": ["no", 1],
    "enable_mm_embeds": ["no", 1],
    "allowed_media_domains": [5, [5], None],
    "allowed_local_media_path": [5, None, ["/"]],
    "language_model_only": ["no", 1, None],
    "mm_processor_cache_gb": [-1, "x", None, float("inf"), float("nan")],
    "limit_mm_per_prompt": [5, "x", {"image": -1}, {"image": "1"}, {"image": {"count": 1}}, None],
    "mm_processor_kwargs": [5, "x", [1], None],
    "media_io_kwargs": [5, {"video": 4}, None],
    "enable_lora": ["yes", 1, None],
    "max_loras": [0, -1, 1.5, None, "1"],
    "max_lora_rank": [0, 513, 1.5, None],
    "max_cpu_loras": [0, -1, 1.5],
    "lora_modules": [
        5,
        [5],
        [None],
        None,
        ["a"],
        ["=a"],
        ["a="],
        ['{"name": "a"}'],
        ["{"],
        ['{"name": "a", "path": "b", "draft_path": ""}'],
    ],
    "lora_modules_to_save": [5, [5], ["norm"], "lm_head"],
    "lora_target_modules": [5, [5], [None], "q_proj"],
    "lora_root": [5, ["a"]],
    "default_mm_loras": [5, "a", ["a"], {"text": "a"}, {"image": ""}, {"image": 5}],
    "lora_merge": [5, "", ["a"]],
    "lora_hub_repos": [5, [5], ["a"], ["a/b/c"], ["*/a"], ["a/b*"]],
    "lora_resolvers": [5, [5], None],
    "load_format": ["npz", None],
    "tokenizer_mode": ["spm", None],
    "download_dir": [5],
    "mmproj": [1, ""],
    "weight_cache": [1, ""],
    "weight_cache_bytes": [0, "much"],
    "expert_cache": [0, -1, "much"],
    "block_size": [0, 15, -16, "16", None, 16.5, True],
    "gpu_memory_utilization": [0, 1.01, -0.5, NAN, math.inf, "0.9", None, True],
    "kv_cache_memory_bytes": [0, -1, 1.5, "", "many", "4X", "-4G", "0G", "9" * 400, True, HUGE],
    "num_gpu_blocks_override": [0, -1, 1.5, True],
    "enable_prefix_caching": [None, 1],
    "kv_cache_dtype": ["int3", "int4", "fp16", "FP8", 8, None],
    "max_num_batched_tokens": [0, -1, 1.5, "8k"],
    "max_num_seqs": [0, -1, 4097, 1.5, None, True, HUGE],
    "scheduling_policy": ["random", 0],
    "enable_chunked_prefill": [None, "on"],
    "long_prefill_token_threshold": [-1, None, 0.5],
    "async_scheduling": [None],
    "device": [5, None],
    "attention_backend": ["fast"],
    "batch_invariant": [1, "yes", None],
    "num_threads": [0, -1, 1.5],
    "tensor_parallel_size": [0, -1, 1.5, "2", None],
    "tensor_parallel_mode": ["fast", None, 1],
    "enable_sequence_parallel": ["yes", 1, None],
    "enable_expert_parallel": ["yes", 1, None],
    "enable_eplb": ["yes", 1, None],
    "eplb_config": [
        *("text", 5, [], {}, {"window": 5}, {"window_size": 0}, {"window_size": 1.5}),
        *({"step_interval": 0}, {"num_redundant_experts": -1}, {"log_balancedness": 1}),
        *({"log_balancedness_interval": 0}, {"policy": "swift"}),
    ],
    "pipeline_parallel_size": [0, -1, 1.5, "2", None],
    "pipeline_layers": ["", "0,3", "1,,2", "a", 3, "2,"],
    "data_parallel_size": [0, -1, 1.5, "2", None],
    "enable_elastic_ep": ["yes", 1],
    "distributed_executor_backend": ["", "processes", "executor.", ".mp", 2],
    "data_parallel_size_local": [0, -1, 1.5],
    "data_parallel_start_rank": [-1, 1.5, None],
    "data_parallel_rank": [-1, 1.5, "0"],
    "data_parallel_external_lb": ["yes", 1],
    "data_parallel_hybrid_lb": ["yes", 1],
    "data_parallel_address": [5],
    "data_parallel_rpc_port": [-1, 65536, None],
    "cluster_key_file": [5],
    "numa_node": [-1, 0.5, "auto"],
    "disable_log_stats": ["yes", 1],
    "profiler_dir": [5],
    "otlp_traces_endpoint": [
        *(5, "", "collector:4318", "grpc://collector:4317", "http://", "http://collector:port"),
        "https://user:password@collector:4318",
    ],
    "kv_events_config": [
        *("zmq", 5),
        {"enable_kv_cache_event": True},
        {"endpoint": "127.0.0.1:5557"},
        {"endpoint": "tcp://127.0.0.1"},
        {"replay_endpoint": ""},
        {"publisher": "kafka"},
        {"buffer_steps": 0},
    ],
    "kv_transfer_config": [
        *("OffloadingConnector", 5, {}),
        {"kv_connector": ""},
        {"kv_connector": "OffloadingConnector", "kv_role": "producer"},
        {"kv_connector": "OffloadingConnector", "kv_load_failure_policy": "ignore"},
        {"kv_connector": "OffloadingConnector", "kv_rank": 0},
    ],
    "preemption_mode": ["swop", None, 1],
    "speculative_config": [
        *(5, "ngram", "{", [], {}, {"method": "magic"}, {"method": "ngram", "mode": 1}),
        *({"method": "ngram", "num_speculative_tokens": k} for k in (0, 33, 1000, 1.5)),
        {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3},
        {"method": "suffix", "prompt_lookup_min": 0},
        {"method": "ngram", "model": "m"},
        {"method": "ngram", "acceptance": "maybe"},
        *({"method": method} for method in ("eagle", "medusa", "draft_model")),
        {"model": "m", "prompt_lookup_max": 3},
        {"method": "mtp", "model": "m"},
        {"method": "mtp", "prompt_lookup_max": 3},
        {"method": "toy_mtp"},
    ],
}


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        (None, None),
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://[::1]:4318/v1/traces", "https://[::1]:4318/v1/traces"),
        ("https://collector/api/otel", "https://collector/api/otel"),
        ("http://collector?tenant=a", "http://collector/v1/traces?tenant=a"),
    ],
)
def test_url_of_traces(endpoint, url):
    config = EngineConfig.from_kwargs(otlp_traces_endpoint=endpoint)
    assert config.observability.traces_url == url


def test_traces_need_http_and_show_no_password():
    assert "http://host:4318" in refused(otlp_traces_endpoint="grpc://collector:4317")
    message = refused(otlp_traces_endpoint="http://user:hunter2@collector")
    assert "OTEL_EXPORTER_OTLP_HEADERS" in message
    assert "hunter2" not in message


def test_environment_of_traces(monkeypatch):
    for name in ("HEADERS", "TRACES_HEADERS"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "")
    assert traces_from_environment() == ("octavo", {})
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Basic%20a=, x-a = 1,,")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-a=2")
    assert traces_from_environment() == ("mine", {"authorization": "Basic a=", "x-a": "2"})
    for bad in ("hunter2", "a b=hunter2", "=hunter2", "a=hunter2%0A", "a=hunter2%C3%A4"):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", bad)
        with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as error:
            traces_from_environment()
        assert "hunter2" not in str(error.value)


def test_profiles_are_of_one_process():
    message = refused(profiler_dir="p", distributed_executor_backend="mp")
    assert "profiler_dir" in message
    assert "distributed_executor_backend=mp" in message


def test_rows_of_one_process_are_not_divided():
    message = refused(enable_sequence_parallel=True)
    assert "enable_sequence_parallel" in message
    assert "tensor_parallel_size, and that is 1; set it to 2" in message
    message = refused(enable_expert_parallel=True)
    assert "tensor_parallel_size or among the engines of data_parallel_size, and both" in message


@pytest.mark.parametrize(
    "setting",
    [
        {"tensor_parallel_size": 2, "enable_elastic_ep": True},
        {"pipeline_parallel_size": 2, "enable_elastic_ep": True},
        {"distributed_executor_backend": "ray"},
        {"kv_events_config": {"enable_kv_cache_events": True}, "enable_elastic_ep": True},
        {"data_parallel_rank": 1},
        {"data_parallel_hybrid_lb": True},
        {"data_parallel_size_local": 1, "enable_eplb": True},
        {"data_parallel_size_local": 1, "pipeline_parallel_size": 2},
        {"attention_backend": "triton"},
        {"expert_cache": "1G"},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_engines_that_divide_experts_are_on_one_cpu(setting):
    message = refused(enable_expert_parallel=True, data_parallel_size=2, **setting)
    assert message.startswith("enable_expert_parallel with data_parallel_size=2 divides")
    assert next(iter(setting)) in message


def test_another_number_of_engines_that_divide_experts():
    settings = {"enable_expert_parallel": True, "enable_elastic_ep": True, "enable_eplb": True}
    config = EngineConfig.from_kwargs(**settings)
    assert config.scales_experts
    two = config.resized(2)
    assert two.divides_experts
    assert two.device.eplb == EplbConfig()
    one = two.resized(1)
    assert not one.divides_experts
    assert one.device.eplb is None
    assert EngineConfig.from_kwargs(**settings, data_parallel_size_local=1).resized(3) == (
        config.resized(3)
    )
    # Each engine divides its experts among its own processes.
    assert not EngineConfig.from_kwargs(**settings, tensor_parallel_size=2).scales_experts
    assert not EngineConfig.from_kwargs(enable_elastic_ep=True).scales_experts


def test_experts_move_between_processes_only():
    message = refused(enable_eplb=True)
    assert "add enable_expert_parallel" in message
    message = refused(eplb_config={"num_redundant_experts": 2})
    assert "eplb_config has no effect without enable_eplb" in message
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}
    message = refused(expert_cache="1G", **ranks)
    assert "enable_eplb is not supported with expert_cache" in message
    config = EngineConfig.from_kwargs(**ranks)
    assert config.device.eplb == EplbConfig()
    assert config.device.redundant_experts == 0


def cases(table):
    """Return a test for each value; values may be too long for a test's name."""
    return pytest.mark.parametrize(
        ("name", "value"),
        [
            pytest.param(n, v, id=f"{n}-{i}")
            for n, values in table.items()
            for i, v in enumerate(values)
        ],
    )


@cases(BAD)
def test_refuses_and_names_the_setting(name, value):
    message = refused(**{name: value})
    assert name in message
    assert len(message) < 600


def test_every_setting_is_tested():
    assert {f.name for f in config_fields()} == set(BAD)


BAD_SERVER = {
    "host": [None, 5],
    "port": [-1, 65536, "8000", None],
    "api_key": [5, [None]],
    "api_key_file": [5],
    "admin_key": [5, [None]],
    "allowed_origins": [5],
    "allowed_hosts": [5, [b"x"]],
    "enable_admin": ["yes", 1],
    "strict_fields": ["yes", 1],
    "ssl_keyfile": [5],
    "ssl_certfile": [5],
    "chat_template": [5],
    "tool_call_parser": [5],
    "reasoning_parser": [5],
    "strip_client_noise": ["yes", 1],
    "response_role": [None],
    "exclude_tools_when_tool_choice_none": ["yes", 1],
    "max_num_queued_reqs": [-1, 1.5],
    "request_memory_bytes": ["1", 0],
    "api_server_count": [0, 257],
    "max_request_bytes": [0, 1023, "1K!", "1B"],
    "max_media_request_bytes": [0, 1023, "x"],
    "max_file_bytes": [0, 1.5, None],
    "max_connections_per_client": [-1, 1.5],
    "request_timeout": [-1, NAN, "5s"],
    "resume_grace": [-1, NAN, 86401],
    "state_dir": [5],
    "explain_requests": [-1, "5"],
    "explain_prompts": ["yes", 1],
    "ui": ["yes", None],
    "repetition_guard": ["on", True, None],
    "shutdown_timeout": [-1, NAN, None],
    "progress_timeout": [0, -1, NAN],
    "headless": ["yes", 1],
    "max_engine_restarts": [-1, 1.5, None],
    "warm_spare": ["yes", 1],
    "record": [5],
    "record_prompts": ["none", None],
    "record_max_bytes": ["1", 0, 2**20 - 1],
    "log_level": ["INFO", "trace"],
    "log_format": ["xml"],
    "log_stats_interval": [0, -1, NAN, "5s"],
    "metrics_prefix": ["vllm:", ""],
    "enable_log_requests": [1],
    "enable_tokenizer_info_endpoint": [1],
    "root_path": ["llm", "/llm/", "/", None],
    "uds": [5],
    "middleware": [5, [None]],
    "enable_force_include_usage": ["yes"],
    "enable_prompt_tokens_details": ["yes"],
    "enable_per_request_metrics": ["yes"],
    "return_tokens_as_token_ids": ["yes"],
    "disable_fastapi_docs": [1],
    "uvicorn_log_level": ["INFO", None],
    "default_chat_template_kwargs": [5, "x", "[]", None],
    "disable_uvicorn_access_log": [1],
    "disable_access_log_for_endpoints": [5],
}


@cases(BAD_SERVER)
def test_server_refuses_and_names_the_setting(name, value):
    with pytest.raises(ConfigError, match=name):
        build_section(ServerConfig, {name: value})


def test_every_server_setting_is_tested():
    assert {f.name for f in section_fields(ServerConfig)} == set(BAD_SERVER)


def test_a_grammar_backend_that_is_not_installed_is_refused(monkeypatch):
    EngineConfig.from_kwargs(guided_decoding_backend="xgrammar")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = refused(guided_decoding_backend="llguidance")
    assert "guided_decoding_backend='llguidance' needs the package llguidance" in message
    assert "pip install 'octavo[xgrammar]'" in refused(guided_decoding_backend="xgrammar")


def test_choices_are_named():
    assert "float32, float16, bfloat16" in refused(dtype="float64")
    assert "8, 16, 32, 64, 128" in refused(block_size=17)


@pytest.mark.parametrize(
    ("name", "near"),
    [("max_modle_len", "max_model_len"), ("dtypes", "dtype"), ("max_num_seq", "max_num_seqs")],
)
def test_unknown_name_suggests_the_nearest(name, near):
    assert f"did you mean {near}?" in refused(**{name: 1})


def test_unknown_name_without_a_near_one():
    message = refused(zzzzzz=1)
    assert "zzzzzz" in message
    assert "did you mean" not in message
    with pytest.raises(ConfigError, match="did you mean port"):
        build_section(ServerConfig, {"prot": 1})


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_num_batched_tokens": 100, "max_num_seqs": 101},
        {
            "max_num_batched_tokens": 512,
            "max_num_seqs": 8,
            "max_model_len": 513,
            "enable_chunked_prefill": False,
        },
        {"kv_cache_memory_bytes": "1G", "num_gpu_blocks_override": 100},
        {"skip_tokenizer_init": True, "tokenizer": "t"},
    ],
)
def test_contradictions_name_both_settings(kwargs):
    message = refused(**kwargs)
    contradicting = [n for n in kwargs if n not in ("max_num_seqs", "enable_chunked_prefill")]
    assert all(name in message for name in contradicting)


def test_what_does_not_contradict():
    EngineConfig.from_kwargs(max_num_batched_tokens=100, max_num_seqs=100)
    EngineConfig.from_kwargs(max_num_batched_tokens=512, max_model_len=513)
    EngineConfig.from_kwargs(
        max_num_batched_tokens=512, max_model_len=512, enable_chunked_prefill=False
    )
    EngineConfig.from_kwargs(max_model_len=-1, enable_chunked_prefill=False)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("512M", 512 * 2**20),
        ("4G", 4 * 2**30),
        ("4g", 4 * 10**9),
        ("1.5g", 1_500_000_000),
        ("4k", 4000),
        ("32K", 32768),
        ("4gib", 4 * 2**30),
        ("1.5GiB", 3 * 2**29),
        (" 2 KB ", 2048),
        ("1T", 2**40),
        ("10B", 10),
    ],
)
def test_sizes(text, size):
    assert parse_size("x", text) == size
    if size > 10**6:
        assert EngineConfig.from_kwargs(kv_cache_memory_bytes=text).cache.kv_cache_memory_bytes == (
            size
        )


def test_server_size():
    assert build_section(ServerConfig, {"max_request_bytes": "1M"}).max_request_bytes == 2**20


@pytest.mark.parametrize("text", ["", "G", "4 4G", "4GG", "-1G", "1e9", "0x10", "4P", "9" * 30])
def test_no_sizes(text):
    with pytest.raises(ConfigError, match="x="):
        parse_size("x", text)


def test_one_name_is_a_list_of_one():
    assert EngineConfig.from_kwargs(served_model_name="a").model.served_model_name == ["a"]
    assert build_section(ServerConfig, {"api_key": "k"}).api_key == ["k"]


LIST_FIELDS = [
    field
    for field in config_fields() + list(section_fields(ServerConfig))
    if field.type == list[str]
]


@pytest.mark.parametrize("field", LIST_FIELDS, ids=lambda f: f.name)
@pytest.mark.parametrize(
    "words",
    [
        ["a", "b", "c"],
        ['["a", "b", "c"]'],
        ["a", '["b","c"]'],
        ['["a"]', "b", "FLAG", "c"],
        ["FLAG=a", "FLAG", '["b", "c"]'],
    ],
)
def test_a_list_is_several_words_or_json_or_the_flag_again(field, words):
    parser = argparse.ArgumentParser()
    add_settings(parser, "x", [field])
    argv = [word.replace("FLAG", field.flag) for word in words]
    if not argv[0].startswith("--"):
        argv.insert(0, field.flag)
    given = given_settings(parser.parse_args(argv), [field])
    section = {"": ServerConfig, "model": ModelConfig, "lora": LoRAConfig}[field.section]
    assert getattr(build_section(section, given), field.name) == ["a", "b", "c"]


@pytest.mark.parametrize("word", ["[*]", "[", "[a]", '["a"', "[1]", "[null]", '[["a"]]', "[a:b"])
def test_what_begins_like_a_json_list_is_one(word):
    with pytest.raises(ConfigError, match=r"allowed_origins=.*JSON list"):
        build_section(ServerConfig, {"allowed_origins": [word]})


def test_an_ipv6_address_is_no_json_list():
    hosts = ["[::1]", "[::1]:80", '["a"]', "[::ffff:1.2.3.4]"]
    made = build_section(ServerConfig, {"allowed_hosts": hosts})
    assert made.allowed_hosts == ["[::1]", "[::1]:80", "a", "[::ffff:1.2.3.4]"]


def test_secrets_are_not_shown():
    made = build_section(ServerConfig, {"api_key": ["sk-secret"], "port": 1})
    assert repr(made) == "ServerConfig(port=1, api_key=(hidden))"
    assert "sk-secret" not in str(made) + f"{made}"
    for bad in (
        ["sk-secret", 5],
        "[sk-secret",
        ["sk-secret", '["x'],
        {"sk-secret": 1},
        b"sk-secret",
    ):
        with pytest.raises(ConfigError, match="api_key") as caught:
            build_section(ServerConfig, {"api_key": bad})
        assert "sk-secret" not in str(caught.value)


def test_round_trip():
    config = EngineConfig.from_kwargs(
        model="m",
        kv_cache_memory_bytes="1.5G",
        served_model_name=["a", "b"],
        gpu_memory_utilization=0.5,
        max_model_len=-1,
        num_threads=2,
    )
    data = msgspec.msgpack.encode(config)
    assert msgspec.msgpack.decode(data, type=EngineConfig) == config
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"modell": {}}), type=EngineConfig)


def test_fields_are_fit_for_flags():
    fields = config_fields() + list(section_fields(ServerConfig))
    assert len({f.flag for f in fields}) == len(fields)
    for field in fields:
        assert field.doc.endswith(".")
        assert field.flag.startswith("--")
        kind, optional = optional_type(field.type)
        plain = kind in (int, float, str, bool, list[str])
        assert plain or field.is_json or typing.get_origin(kind) is typing.Literal, field
        assert optional == (field.default is None)
    by_name = {f.name: f for f in fields}
    assert by_name["max_model_len"].flag == "--max-model-len"
    assert optional_type(by_name["max_model_len"].type) == (int, True)
    assert optional_type(by_name["tokenizer"].type) == (str, True)
    assert by_name["block_size"].choices == (8, 16, 32, 64, 128)
    assert by_name["model"].choices is None
    assert by_name["max_num_seqs"].section == "scheduler"


def test_what_is_looked_up():
    def lengths(**config):
        made = EngineConfig.from_kwargs(speculative_config={"method": "ngram", **config})
        return made.speculation.speculative_config.lookup_lengths

    assert lengths() == (5, 5)
    assert lengths(prompt_lookup_max=7) == (7, 7)
    assert lengths(prompt_lookup_min=2) == (2, 2)
    assert lengths(prompt_lookup_min=2, prompt_lookup_max=7) == (2, 7)


def test_json_as_text():
    text = '{"method": "ngram", "num_speculative_tokens": 3}'
    config = EngineConfig.from_kwargs(speculative_config=text)
    assert config == EngineConfig.from_kwargs(speculative_config=msgspec.json.decode(text))


def test_environment(monkeypatch):
    secrets = ("OCTAVO_API_KEY", "VLLM_API_KEY", "OCTAVO_ADMIN_KEY", "OCTAVO_SERVER_API_KEY")
    for name in ("HF_HUB_OFFLINE", *secrets):
        monkeypatch.delenv(name, raising=False)
    assert not hub_offline()
    assert api_keys_from_environment() == {}
    assert admin_keys_from_environment() == []
    assert server_api_key_from_environment() == {}
    monkeypatch.setenv("HF_HUB_OFFLINE", "true")
    monkeypatch.setenv("OCTAVO_API_KEY", "k")
    assert hub_offline()
    assert api_keys_from_environment() == {"OCTAVO_API_KEY": "k"}
    monkeypatch.setenv("VLLM_API_KEY", "v")
    assert list(api_keys_from_environment().values()) == ["k", "v"]
    for name in secrets:
        monkeypatch.setenv(name, name)
    assert admin_keys_from_environment() == ["OCTAVO_ADMIN_KEY"]
    assert server_api_key_from_environment() == {"server_api_key": "OCTAVO_SERVER_API_KEY"}
    environment = environment_without_keys()
    assert environment["HF_HUB_OFFLINE"] == "true"
    assert not environment.keys() & set(secrets)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert not hub_offline()


def test_settings_from_the_environment(monkeypatch):
    for name in ("OCTAVO", "VLLM"):
        for variable in ENVIRONMENT:
            monkeypatch.delenv(f"{name}_{variable}", raising=False)
    assert settings_from_environment() == {}
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1.5")
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "2.5")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    monkeypatch.setenv("OCTAVO_LOGGING_LEVEL", "debug")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    assert settings_from_environment() == {
        "kv_cache_memory_bytes": 3 * 2**29,
        "log_level": "debug",
        "log_stats_interval": 2.5,
        "batch_invariant": True,
        "enable_admin": True,
    }
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0")
    assert "kv_cache_memory_bytes" not in settings_from_environment()
    for wrong in ("much", "-1", "inf", "nan", "1e300"):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", wrong)
        with pytest.raises(ConfigError, match=rf"VLLM_CPU_KVCACHE_SPACE='{wrong}'.*GiB"):
            settings_from_environment()


@pytest.mark.parametrize(("text", "level"), [("CRITICAL", "error"), ("Warn", "warning")])
def test_levels_of_the_log_in_the_environment(monkeypatch, text, level):
    monkeypatch.setenv("OCTAVO_LOGGING_LEVEL", text)
    assert settings_from_environment()["log_level"] == level
    monkeypatch.setenv("OCTAVO_LOGGING_LEVEL", text + "G")
    with pytest.raises(ConfigError, match=rf"OCTAVO_LOGGING_LEVEL='{text}G'.*give debug, info, "):
        settings_from_environment()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"methd": "ngram"}, " has no key 'methd'; did you mean method?"),
        ({"method": "ngram", "zzz": 1}, " has no key 'zzz'; its keys are method, model, "),
        ({"method": "moe"}, ": method='moe' is not allowed; choose one of ngram, suffix, "),
        ({"method": "ngram", "acceptance": []}, ": acceptance=[] is not allowed; choose one of"),
    ],
)
def test_parts_of_a_json_object_that_are_wrong_are_named(value, said):
    with pytest.raises(ConfigError) as raised:
        EngineConfig.from_kwargs(speculative_config=value)
    assert str(raised.value).startswith(f"speculative_config{said}")


def test_variables_without_meaning_are_named(monkeypatch):
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    for name in ("VLLM_API_KEY", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "1")
    assert unknown_variables() == []
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    monkeypatch.setenv("VLLM_FROBNICATE", "1")
    assert unknown_variables() == ["VLLM_FROBNICATE", "VLLM_USE_DEEP_GEMM"]


BALANCED = [
    ({"data_parallel_external_lb": True}, False, "needs data_parallel_rank"),
    ({"data_parallel_rank": 4}, False, "data_parallel_rank=4 is not below data_parallel_size=4"),
    ({"data_parallel_rank": 1, "data_parallel_size_local": 2}, False, "size_local=2 is not supp"),
    ({"data_parallel_rank": 1, "data_parallel_start_rank": 1}, False, "start_rank=1 is not supp"),
    ({"data_parallel_rank": 1, "data_parallel_hybrid_lb": True}, False, "leave out one of them"),
    ({"data_parallel_rank": 1}, True, "headless: a node has no server"),
    ({"data_parallel_rank": 1, "enable_elastic_ep": True}, False, "enable_elastic_ep is not supp"),
    ({"data_parallel_hybrid_lb": True}, False, "needs data_parallel_size_local"),
    (
        {
            "data_parallel_hybrid_lb": True,
            "data_parallel_start_rank": 3,
            "data_parallel_size_local": 2,
        },
        False,
        "are more than data_parallel_size=4",
    ),
]


@pytest.mark.parametrize(("settings", "headless", "why"), BALANCED)
def test_a_server_behind_a_load_balancer_whose_settings_contradict(settings, headless, why):
    parallel = EngineConfig.from_kwargs(data_parallel_size=4, **settings).parallel
    with pytest.raises(ConfigError, match=why):
        parallel.check(headless=headless)


def test_what_a_server_behind_a_load_balancer_has():
    def of_server(**settings):
        parallel = EngineConfig.from_kwargs(**settings).parallel
        parallel.check(headless=False)
        own = parallel.of_server()
        return own.data_parallel_size, own.first_engine, own.numbered

    assert of_server() == (1, 0, False)
    assert of_server(data_parallel_size=2) == (2, 0, True)
    assert of_server(data_parallel_size=4, data_parallel_rank=3) == (1, 3, True)
    assert of_server(data_parallel_size=4, data_parallel_rank=0) == (1, 0, True)
    hybrid = {"data_parallel_size": 4, "data_parallel_hybrid_lb": True}
    hybrid |= {"data_parallel_size_local": 2, "data_parallel_address": "head"}
    assert of_server(**hybrid) == (2, 0, True)
    assert of_server(**hybrid, data_parallel_start_rank=2) == (2, 2, True)


@pytest.mark.parametrize(
    ("page", "model", "revision"),
    [
        ("/org/name", "org/name", None),
        ("/org/name/", "org/name", None),
        ("/org/name/tree/v1.0", "org/name", "v1.0"),
        ("/org/na.me-2/blob/main/config.json", "org/na.me-2", "main"),
        ("/org/name?library=x#usage", "org/name", None),
    ],
)
def test_the_address_of_a_model_on_the_hub(page, model, revision):
    for hub in (constants.ENDPOINT, constants.ENDPOINT.partition("://")[2]):
        config = EngineConfig.from_kwargs(model=hub + page).model
        assert (config.model, config.revision) == (model, revision)


def test_other_addresses_are_refused():
    for address in (
        "https://hub.invalid/org/name",
        constants.ENDPOINT,
        constants.ENDPOINT + "/datasets/name",
    ):
        with pytest.raises(ConfigError, match="not the address of a model"):
            EngineConfig.from_kwargs(model=address)
    with pytest.raises(ConfigError, match="two revisions"):
        EngineConfig.from_kwargs(model=constants.ENDPOINT + "/a/b/tree/v1", revision="v2")
    for name in ("org/name", "v1.5/of/folder", "./a.b/c/d", "C:/x"):
        assert EngineConfig.from_kwargs(model=name).model.model == name


def test_adapters_change_experts_of_one_machine():
    def adapts(**settings):
        return EngineConfig.from_kwargs(**settings).adapts_experts

    together = {"enable_expert_parallel": True, "tensor_parallel_size": 2}
    assert adapts()
    assert adapts(**together)
    assert adapts(**together, enable_eplb=True)
    divided = {"enable_expert_parallel": True, "data_parallel_size": 2}
    assert adapts(**divided)
    assert not adapts(**divided, data_parallel_size_local=1)
