"""Settings of vLLM's that Octavo does not have."""

import json

import pytest

from octavo.config import EngineConfig, SpeculativeConfig
from octavo.errors import ConfigError
from octavo.foreign import FOREIGN, check_foreign, translate


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill_context_parallel_size", 1),
        ("prefill_context_parallel_size", "1"),
        ("compilation_config", "3"),
        ("compilation_config", {}),
        ("cpu_offload_gb", 0.0),
        ("enable_lora", False),
        ("disable_log_stats", True),
        ("disable_log_stats", False),
        ("hf_overrides", "{}"),
        ("tool_call_parser", "None"),
        ("limit_mm_per_prompt", '{"image": 0}'),
        ("optimization_level", "0"),
    ],
)
def test_what_asks_for_nothing_is_dropped(name, value):
    assert check_foreign(name, value)
    assert EngineConfig.from_kwargs(**{name: value}) == EngineConfig()


def test_parts_of_speculative_config_that_ask_for_nothing_are_dropped():
    ours = {"method": "ngram", "num_speculative_tokens": 3}
    theirs = {**ours, "draft_tensor_parallel_size": 1, "enforce_eager": True, "revision": None}
    meant = EngineConfig.from_kwargs(speculative_config=ours)
    assert EngineConfig.from_kwargs(speculative_config=theirs) == meant
    assert EngineConfig.from_kwargs(speculative_config=json.dumps(theirs)) == meant
    said = r"speculative_config\.draft_tensor_parallel_size=2 is not supported: .*divided among"
    with pytest.raises(ConfigError, match=said):
        EngineConfig.from_kwargs(speculative_config={**theirs, "draft_tensor_parallel_size": 2})


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("prefill_context_parallel_size", 2, "load balancer"),
        ("compilation_config", '{"mode": 0}', "enforce_eager"),
        ("cpu_offload_gb", "4", "quantization"),
        ("enable_lora", True, "merge the adapter"),
        ("tool_call_parser", "hermes", "response_format"),
        ("hf_overrides", {"a": 1}, "config.json"),
        ("max_num_active_seqs", 3, "max_num_seqs"),
        ("numa_bind", True, "numa_node"),
    ],
)
def test_what_asks_for_more_is_refused_with_what_to_use(name, value, advice):
    with pytest.raises(ConfigError, match=advice) as error:
        EngineConfig.from_kwargs(**{name: value})
    assert f"{name}={value!r} is not supported" in str(error.value)
    assert "\n" not in str(error.value)


def test_one_front_end_has_all_engines():
    with pytest.raises(ConfigError, match="without Ray"):
        EngineConfig.from_kwargs(data_parallel_size=2, data_parallel_backend="ray")
    with pytest.raises(ConfigError, match="start a server for each"):
        EngineConfig.from_kwargs(data_parallel_multi_port_external_lb=True)


def test_a_token_is_not_shown():
    with pytest.raises(ConfigError, match="HF_TOKEN") as error:
        check_foreign("hf_token", "hf_secret")
    assert "hf_secret" not in str(error.value)


def test_what_nobody_knows_is_unknown():
    assert not check_foreign("frobnicate", 1)
    with pytest.raises(ConfigError, match="no setting called 'frobnicate'"):
        EngineConfig.from_kwargs(frobnicate=1)


def test_every_refusal_is_one_sentence_that_names_no_other_program():
    for setting in FOREIGN.values():
        assert not setting.why.endswith(".")
        assert "\n" not in setting.why
        assert setting.why[0].islower() or setting.why[0] in "V/O"


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
    config = EngineConfig.from_kwargs(spec_method="suffix", dtype="half")
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
