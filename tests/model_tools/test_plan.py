"""`octavo plan`: its figures are those of the engine."""

import json
from dataclasses import replace

import pytest
import transformers

from octavo import cli
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig, ServerConfig
from octavo.engine.assemble import make_engine_core
from octavo.kv_cache.sessions import SessionShape
from octavo.model_tools import plan as plan_module
from octavo.model_tools.plan import Expectation, plan
from octavo.model_tools.plan_times import MachineProbe
from octavo.models.hub import local_folder
from octavo.models.registry import read_spec
from octavo.plan.step_cost import KernelCost, Load, Machine, StepCost

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
    off = plan(kwargs | {"enable_prefix_caching": False})
    assert off["prefix_cache"] == {"problem": "enable_prefix_caching=False"}
    assert off["items"]["states"] == 4 * found["state_nbytes"]  # no snapshots


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
    for words in ("expected times: ", "GB/s read", "a prompt of 512", "--quantization int8"):
        assert words in shown.out
    assert cli.main(["plan"]) == 2
    assert "MODEL is missing" in capsys.readouterr().err


class FixedProbe:
    """Probe of a machine that reads 1,000 bytes per second, and computes a token in 0.01 s.

    A step reads 100 bytes, half of that if weights are quantized, and 1 byte of each context token.
    Products do not hide half of the smaller one of computing and reading.
    """

    cores = 2

    def __init__(self):
        self.tried, self.in_memory = [], []

    def bandwidth(self, nbytes):
        return 1000.0

    def host(self, num_reqs):
        return 0.001

    def trial(self, setup, load):
        self.setup, self.load = setup, load
        return self

    def memory_trial(self, setup, load):
        self.in_memory.append(setup.config.model.quantization)
        return MemoryTrial(self)

    def run(self, batch, samples=1):
        self.tried.append(batch)
        weights = 50.0 if self.setup.config.model.quantization else 100.0
        context = sum(done + count for done, count in batch)
        tokens = sum(count for _, count in batch)
        kernels = (
            KernelCost("linear 8x8", 0.01 * tokens, weights),
            KernelCost("attention", 0.0, context),
        )
        return StepCost(kernels)


class MemoryTrial:
    """Trial of a `FixedProbe` in memory."""

    def __init__(self, computing):
        self.computing = computing

    def run(self, batch):
        kernels = self.computing.run(batch).kernels
        shares = {"linear 8x8": 0.5, "attention": 0.0}
        machine = Machine(1000.0)
        return StepCost(
            tuple(
                replace(kernel, seconds=replace(kernel, exposed=shares[kernel.name]).time(machine))
                for kernel in kernels
            )
        )


def expect(*, model="octavo/stories", expected=None, **kwargs):
    probe = FixedProbe()
    given = {"input_len": 100, "output_len": 20, "batch_size": 4} | (expected or {})
    return plan({"model": model, **kwargs}, None, Expectation(**given, probe=probe)), probe


def test_expected_times():
    result, probe = expect(max_num_batched_tokens=200, max_num_seqs=8)
    times = result["times"]
    assert probe.load == Load(100, 20, 4)
    assert probe.in_memory == [None, "int8", "int4"]  # other settings read the same weights
    assert times["problem"] is None
    assert (times["cores"], times["bandwidth"]) == (2, 1000.0)
    assert times["tpot_ms"] == pytest.approx(105 + 111 + 1)
    assert times["batch_tpot_ms"] == pytest.approx(120 + 4 * 111 + 1)
    assert times["output_throughput"] == pytest.approx(4 / 0.565)
    assert times["ttft_ms"] == pytest.approx(1050 + 100 + 1)
    # Two prompts in a step of 2 s; their mean is that of both steps.
    step = 2050 + 200 + 1
    assert times["longest_step_ms"] == pytest.approx(step)
    assert times["batch_ttft_ms"] == pytest.approx(1.5 * step)
    assert times["parts_ms"]["one answer"] == pytest.approx(
        {"products": 105, "attention": 111, "host": 1}
    )


def test_times_on_another_machine():
    other = {"cores": 8, "bandwidth": 4000.0}
    result, _ = expect(expected=other, max_num_batched_tokens=200, max_num_seqs=8)
    times = result["times"]
    assert (times["cores"], times["bandwidth"]) == (8, 4000.0)
    assert times["tpot_ms"] == pytest.approx((105 + 111) / 4 + 1)
    assert times["ttft_ms"] == pytest.approx(1050 / 4 + 100 / 4 + 1)
    assert result["limit"] is None
    assert result["total"] < 2**34
    limited, _ = expect(expected=other | {"memory": 2**32})
    assert limited["limit"] == int(2**32 * 0.92)
    # Each thread has memory of its own.
    one, many = (expect(expected={"cores": cores})[0]["items"] for cores in (1, 64))
    assert many["activations"] > one["activations"]


def test_what_each_setting_buys():
    result, _ = expect(max_num_batched_tokens=200, max_num_seqs=8, kv_cache_memory_bytes=2**24)
    base, *others = result["settings"]
    rows = {(name, str(value)): row for row in others for name, value in row["setting"].items()}
    assert base["setting"] == {}
    assert base["room"] == 8
    assert base["tpot_ms"] == result["times"]["tpot_ms"]
    int8 = rows["quantization", "int8"]
    assert int8["tpot_ms"] == pytest.approx(55 + 111 + 1)
    assert int8["total"] < base["total"]
    # Half of the bytes and a scale for each head
    assert 1.7 < rows["kv_cache_dtype", "int8"]["kv_tokens"] / base["kv_tokens"] < 2
    assert rows["max_num_batched_tokens", "100"]["longest_step_ms"] == pytest.approx(
        1000 + 50 + 100 + 1
    )
    assert rows["max_num_seqs", "16"]["room"] == 16
    assert rows["max_num_seqs", "4"]["room"] == 4


def test_what_the_prefix_cache_and_speculation_buy():
    result, _ = expect(max_num_batched_tokens=200, max_num_seqs=8)
    hits = result["prefix_cache"]["hit_rate"]
    assert 0.5 < hits < 1
    by_name = {name: row for row in result["settings"] for name in row["setting"]}
    prefix, drafts = by_name["enable_prefix_caching"], by_name["speculative_config"]
    tokens = 100 - int(hits * 100)
    assert prefix["ttft_ms"] == pytest.approx(10 * tokens + 50 + 100 + 1)
    assert prefix["tpot_ms"] == result["times"]["tpot_ms"]
    assert prefix["note"] == f"{hits:.0%} of a prompt cached"
    # Five tokens of a step, of which 1 + 1/2 + 1/4 + 1/8 + 1/16 are accepted
    assert drafts["tpot_ms"] == pytest.approx((100 + 0.5 * 50 + 115 + 1) / 1.9375)
    assert drafts["ttft_ms"] == result["times"]["ttft_ms"]
    assert "4 drafts, each accepted with 50%" in drafts["note"]
    off, _ = expect(enable_prefix_caching=False)
    assert "enable_prefix_caching" not in {n for row in off["settings"] for n in row["setting"]}


def test_settings_without_time_are_named(monkeypatch, capsys):
    monkeypatch.setattr(plan_module, "_PROBE_SECONDS", 0.0)
    result, _ = expect(max_num_seqs=8)
    assert [row["setting"] for row in result["settings"]] == [{}]
    assert {"kv_cache_dtype": "fp8"} in result["settings_left_out"]
    plan_module._print(result)
    assert "--kv-cache-dtype fp8, --max-num-batched-tokens" in " ".join(
        capsys.readouterr().out.split()
    )


def test_settings_with_errors_are_left_out(hybrid):
    """A model that is quantized already, and seats for fewer requests than there are."""
    kwargs = {"load_format": "dummy", "max_num_seqs": 4, "quantization": "int8"}
    result, _ = expect(model=str(hybrid), **kwargs)
    names = [name for row in result["settings"] for name in row["setting"].items()]
    assert result["settings_left_out"] == []
    assert ("quantization", "int8") not in names
    assert ("quantization", "int4") in names
    assert ("max_num_seqs", 2) not in names
    assert ("max_num_seqs", 8) in names


@pytest.mark.parametrize(
    "setting",
    [
        {"pipeline_parallel_size": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"runner": "pooling"},
    ],
)
def test_times_that_are_not_known(setting):
    result, probe = expect(**setting)
    name = "LlamaForCausalLM" if "runner" in setting else next(iter(setting))
    assert result["times"]["problem"] == f"not known with {name}"
    assert result["settings"] == []
    assert probe.tried == []


def test_ranks_share_the_machine():
    whole, _ = expect()
    divided, probe = expect(tensor_parallel_size=2)
    assert probe.setup.rank.size == 1
    assert divided["times"]["tpot_ms"] == whole["times"]["tpot_ms"]


def test_requests_must_fit(capsys):
    argv = ["plan", "octavo/stories", "--max-num-seqs", "4"]
    assert cli.main([*argv, "--batch-size", "5"]) == 2
    assert "--batch-size 5: 4 requests of 640 tokens" in capsys.readouterr().err
    assert cli.main([*argv, "--input-len", "4000"]) == 2
    assert "more than the context of 2,048 tokens" in capsys.readouterr().err
    assert cli.main([*argv, "--bandwidth", "-1"]) == 2
    assert "--bandwidth -1 must be greater than 0" in capsys.readouterr().err


def test_the_probe_of_this_machine():
    probe = MachineProbe(1)
    requests = {"input_len": 64, "output_len": 16, "batch_size": 2}
    result = plan({"model": "octavo/stories"}, None, Expectation(**requests, probe=probe))
    times = result["times"]
    assert times["cores"] == 1
    assert 1e8 < times["bandwidth"] < 1e13
    assert 0 < times["tpot_ms"] < times["ttft_ms"] < 60_000
    assert times["parts_ms"]["prompt"].keys() >= {"products", "attention", "host"}
    assert all(ms >= 0 for parts in times["parts_ms"].values() for ms in parts.values())


def test_this_machine_is_probed_for_one_with_more_cores():
    requests = {"input_len": 64, "output_len": 16, "batch_size": 2}
    expected = Expectation(**requests, cores=1000, bandwidth=3e11)
    times = plan({"model": "octavo/stories"}, None, expected, compare_settings=False)["times"]
    assert (times["cores"], times["bandwidth"]) == (1000, 3e11)
    assert 0 < times["tpot_ms"] < times["ttft_ms"]
