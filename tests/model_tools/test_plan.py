"""`octavo plan`: its figures are those of the engine."""

import json

import pytest
import transformers

from octavo import cli
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig, ServerConfig
from octavo.engine.assemble import make_engine_core
from octavo.kv_cache.sessions import SessionShape
from octavo.model_tools.plan import plan
from octavo.models.hub import local_folder
from octavo.models.registry import read_spec

STORIES = local_folder("octavo/stories")


def test_the_memory_plan_is_the_engines():
    kwargs = {"model": "octavo/stories", "max_num_seqs": 4, "max_model_len": 128}
    kwargs["kv_cache_dtype"] = "int8"
    found = plan(kwargs)
    config = EngineConfig.from_kwargs(**kwargs)
    spec = read_spec(open_checkpoint(STORIES), config.model)
    core, planned = make_engine_core(
        config,
        spec,
        STORIES,
        default_batched_tokens=512,
        request_memory=ServerConfig().request_memory_bytes,
        warm_spare=None,
    )
    core.shutdown()
    assert found["num_blocks"] == planned.num_blocks
    assert found["kv_cache_nbytes_per_token"] == planned.block_nbytes / planned.block_size
    assert found["items"] == {item.name: item.nbytes for item in planned.items}
    assert found["max_model_len"] == 128


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Describe an LFM2 with six layers of convolutions and two of attention, without weights."""
    folder = tmp_path_factory.mktemp("hybrid")
    transformers.Lfm2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        full_attn_idxs=[2, 5],
        architectures=["Lfm2ForCausalLM"],
    ).save_pretrained(folder)
    return folder


def test_hits_of_chat_sessions(hybrid, caplog):
    """The log at the start has the same figures."""
    kwargs = {"model": str(hybrid), "load_format": "dummy", "max_num_seqs": 4, "seed": 0}
    kwargs |= {"kv_cache_memory_bytes": 2**22, "max_model_len": 6000}
    kwargs["skip_tokenizer_init"] = True
    found = plan(kwargs)["prefix_cache"]
    assert found["state_nbytes"] == 6 * 2 * 64 * 4  # two inputs of a convolution
    assert found["most_snapshots"] == 4 * 33 - 1
    assert 0.1 < found["hit_rate"] < found["best_hit_rate"]
    assert found["best_hit_rate"] == pytest.approx(0.896, abs=0.001)
    with caplog.at_level("INFO"):
        core, planned = make_engine_core(
            config := EngineConfig.from_kwargs(**kwargs),
            read_spec(open_checkpoint(hybrid, "dummy"), config.model),
            hybrid,
            default_batched_tokens=512,
            request_memory=ServerConfig().request_memory_bytes,
            warm_spare=None,
        )
    core.shutdown()
    assert planned.num_states == 4 * 33
    assert "snapshot of a recurrent state: 0.00 MiB; room for 131 of them" in caplog.text
    assert f"prefix cache: {found['description']}" in caplog.text
    shape = SessionShape(sessions=1, turns=2, system_tokens=9000)
    assert "first turn" in plan(kwargs, shape)["prefix_cache"]["problem"]
    off = plan(kwargs | {"enable_prefix_caching": False})["prefix_cache"]
    assert off == {"problem": "enable_prefix_caching=False"}


def test_flags_of_chat_sessions(hybrid, capsys):
    argv = [str(hybrid), "--load-format", "dummy", "--sessions", "3", "--turns", "40"]
    assert cli.main(["plan", *argv, "--max-model-len", "4096"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "3 sessions of 6 turns" in text
    assert "without 34 turns that exceed the context" in text
    assert cli.main(["plan", *argv, "--answer-tokens", "0"]) == 2
    assert "--answer-tokens=0: must be at least 1" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_is_an_error(capsys):
    tight = ["octavo/stories", "--kv-cache-memory-bytes", "1M", "--max-model-len", "2048"]
    assert cli.main(["plan", *tight]) == 2
    assert "--max-model-len=" in capsys.readouterr().err


def test_the_command_prints_text_and_json(capsys):
    assert cli.main(["plan", "octavo/stories", "--json", "--dtype", "float32"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["total"] > result["items"]["weights"] >= 5475584 * 4
    assert cli.main(["plan", "octavo/stories"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for words in ("weights", "3,072 bytes each", "requests of 2,048 tokens", "16 sessions"):
        assert words in shown.out
    assert cli.main(["plan"]) == 2
    assert "MODEL is missing" in capsys.readouterr().err
