"""Settings in the form of vLLM's scripts."""

import argparse
import dataclasses
import logging

import pytest
import torch

from octavo.config import BUILTIN_MODEL, EngineConfig, config_fields, optional_type
from octavo.config.engine_args import AsyncEngineArgs, EngineArgs
from octavo.config.engine_settings import engine_settings
from octavo.errors import ConfigError
from octavo.frontend.environment import apply_environment


def test_defaults_are_those_of_the_config():
    assert EngineArgs().create_engine_config() == EngineConfig()
    assert AsyncEngineArgs(enable_log_requests=True).create_engine_config() == EngineConfig()
    assert EngineArgs("some/model").model == "some/model"
    assert EngineArgs().pipeline_parallel_size == 1
    assert EngineArgs(seed=3) != EngineArgs()
    assert EngineArgs().hf_overrides is not EngineArgs().hf_overrides


def test_settings_go_through():
    args = EngineArgs(
        max_model_len=128,
        dtype="half",
        spec_method="ngram",
        spec_tokens=3,
        structured_outputs_config={"backend": "guidance"},
    )
    config = args.create_engine_config()
    assert (config.model.max_model_len, config.model.dtype) == (128, "float16")
    assert config.model.guided_decoding_backend == "llguidance"
    assert config.speculation.speculative_config.num_speculative_tokens == 3
    assert EngineArgs(**dataclasses.asdict(args)).create_engine_config() == config
    with pytest.raises(TypeError, match="no_such"):
        EngineArgs(no_such=1)
    with pytest.raises(ConfigError, match="prefill_context_parallel_size=2"):
        EngineArgs(prefill_context_parallel_size=2).create_engine_config()


def test_none_is_the_default_where_it_is_no_value():
    given = {"seed": None, "max_num_seqs": None, "max_model_len": None, "served_model_name": None}
    assert engine_settings(given) == {}
    assert all(f.default is None for f in config_fields() if optional_type(f.type)[1])
    assert engine_settings({"tensor_parallel_size": True}) == {"tensor_parallel_size": True}
    assert engine_settings({"dtype": torch.float16}) == {"dtype": "float16"}
    assert engine_settings({"swap_space": 4, "task": "generate"}) == {"runner": "generate"}
    assert engine_settings({"task": "embed"}) == {"runner": "pooling", "convert": "embed"}
    with pytest.raises(ConfigError, match=r"task='draft'.*choose one of auto, generate"):
        engine_settings({"task": "draft"})
    assert engine_settings({"no_such": None}) == {"no_such": None}  # the config rejects it


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_from_a_command_line(kind):
    parser = kind.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--own", default=5)
    args = parser.parse_args([])
    assert (args.model, args.own, args.max_num_seqs) == (BUILTIN_MODEL, 5, 256)
    assert kind.from_cli_args(args).create_engine_config() == EngineConfig()
    words = ["--model", "a/b", "--max-model-len", "64", "--enforce-eager"]
    made = kind.from_cli_args(parser.parse_args([*words, "--served-model-name", "x", "y"]))
    assert (made.model, made.max_model_len, made.enforce_eager) == ("a/b", 64, True)
    assert made.served_model_name == ["x", "y"]
    assert type(made) is kind
    plain = vars(kind.add_cli_args(argparse.ArgumentParser()).parse_args(words))
    plain.pop("enable_log_requests", None)
    assert EngineConfig.from_kwargs(**engine_settings(plain)).model.max_model_len == 64


def test_the_environment_says_what_is_not_given(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("OCTAVO_LOGGING_LEVEL", "debug")  # no setting of an engine
    assert engine_settings({}) == {"kv_cache_memory_bytes": 2**30}
    assert engine_settings({"kv_cache_memory_bytes": None}) == {"kv_cache_memory_bytes": 2**30}
    assert engine_settings({"kv_cache_memory_bytes": "1M"}) == {"kv_cache_memory_bytes": "1M"}
    assert EngineArgs().create_engine_config().cache.kv_cache_memory_bytes == 2**30
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "perhaps")
    with pytest.raises(ConfigError, match="VLLM_BATCH_INVARIANT='perhaps'"):
        engine_settings({})


def test_variables_without_meaning_are_named_once(monkeypatch, caplog):
    monkeypatch.setenv("VLLM_FROBNICATE", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    with caplog.at_level("WARNING", logger="octavo"):
        assert [apply_environment(), apply_environment()] == ["error", "error"]
    # A record may occur twice if an earlier test has left a handler.
    records = {id(record): record.message for record in caplog.records}
    assert list(records.values()) == [
        "ignored environment variables (see docs/vllm.md): VLLM_FROBNICATE"
    ]
