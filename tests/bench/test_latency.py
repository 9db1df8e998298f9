"""`octavo bench latency` on the built-in model."""

import argparse
import json

import pytest

from octavo.bench import latency
from octavo.bench import machine as machine_module
from octavo.bench.machine import Machine
from octavo.config import config_fields
from octavo.errors import BenchError, ConfigError, OctavoError
from octavo.llm import LLM
from octavo.system import device

SMALL = [
    "--input-len",
    "6",
    "--output-len",
    "4",
    "--batch-size",
    "2",
    "--num-iters-warmup",
    "1",
    "--num-iters",
    "3",
]
ENGINE = ["--max-model-len", "64", "--kv-cache-memory-bytes", "16M", "--max-num-seqs", "8"]


def parse(*flags):
    parser = argparse.ArgumentParser()
    latency.add_arguments(parser)
    return parser.parse_args([*SMALL, *ENGINE, *map(str, flags)])


@pytest.fixture
def batches(monkeypatch):
    """Return prompts and parameters of each `generate`; Ctrl-C interrupts the batch `stop`."""
    seen = argparse.Namespace(calls=[], stop=None)
    generate = LLM.generate

    def watched(self, prompts, params, **kwargs):
        if len(seen.calls) == seen.stop:
            raise KeyboardInterrupt
        seen.calls.append((prompts, params))
        return generate(self, prompts, params, **kwargs)

    monkeypatch.setattr(LLM, "generate", watched)
    return seen


def test_vllms_figures(batches, tmp_path, capsys):
    path = tmp_path / "new" / "result.json"
    result = latency.run(parse("--output-json", path, "--seed", 5))
    assert len(result["latencies"]) == result["num_iters"] == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == sorted(result["latencies"])[1]
    assert 0 < result["mean_ttft_ms"] < result["avg_latency"] * 1000
    assert 0 < result["mean_tpot_ms"] < result["avg_latency"] * 1000 / 3
    assert result["output_throughput"] == pytest.approx(8 / result["avg_latency"])
    assert not result["interrupted"]
    saved = json.loads(path.read_text())
    assert saved["percentiles"] == result["percentiles"]
    assert saved["arguments"]["max_model_len"] == 64
    out = capsys.readouterr().out
    assert f"Avg latency: {result['avg_latency']} seconds" in out
    assert f"99% percentile latency: {result['percentiles']['99']} seconds" in out
    assert "TTFT (ms): mean " in out

    assert len(batches.calls) == 4  # one to warm up
    prompts, params = batches.calls[0]
    assert [len(p) for p in prompts] == [6, 6]
    assert all(call == (prompts, params) for call in batches.calls)
    assert (params.max_tokens, params.ignore_eos, params.n) == (4, True, 1)
    latency.run(parse("--seed", 5))
    assert batches.calls[-1][0] == prompts
    latency.run(parse("--seed", 6))
    assert batches.calls[-1][0] != prompts


def test_several_answers(batches):
    result = latency.run(parse("--n", 3))
    assert result["output_throughput"] == pytest.approx(24 / result["avg_latency"])
    assert "mean_tpot_ms" not in result


def test_ctrl_c_keeps_what_there_is(batches, tmp_path, capsys):
    batches.stop = 2  # the warm-up and one batch are done
    path = tmp_path / "result.json"
    result = latency.run(parse("--output-json", path, "--breakdown"))
    assert result["interrupted"]
    assert json.loads(path.read_text())["num_iters"] == 1
    assert "breakdown" not in result
    assert "Interrupted" in capsys.readouterr().out


def test_ctrl_c_before_the_first_batch_leaves_nothing(batches, tmp_path):
    batches.stop = 1
    with pytest.raises(KeyboardInterrupt):
        latency.run(parse("--output-json", tmp_path / "result.json"))
    assert not list(tmp_path.iterdir())


def test_a_failed_batch_counts_for_nothing(monkeypatch, tmp_path):
    generate = LLM.generate

    def failing(self, *args, **kwargs):
        outputs = generate(self, *args, **kwargs)
        for output in outputs:
            output.outputs[0].finish_reason, output.outputs[0].stop_reason = "error", "it broke"
        return outputs

    monkeypatch.setattr(LLM, "generate", failing)
    with pytest.raises(BenchError, match="A batch failed: it broke"):
        latency.run(parse("--output-json", tmp_path / "result.json"))
    assert not list(tmp_path.iterdir())


def test_a_breakdown_of_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(device, "num_cuda_devices", lambda: 1)
    with pytest.raises(ConfigError, match="gpu_check"):
        latency.run(parse("--breakdown"))


def test_breakdown(monkeypatch, capsys):
    machine = Machine(4e10, 8e11, "float32", bandwidth_by="read t1", peak_by="torch")
    monkeypatch.setattr(machine_module, "measure_machine", lambda dtype, quantization: machine)
    result = latency.run(parse("--breakdown", "--num-iters", 2))
    breakdown = result["breakdown"]
    assert breakdown["machine"]["bandwidth"] == 4e10
    assert breakdown["prefill"]["num_steps"] == 2
    assert breakdown["prefill"]["tokens_per_step"] == 12
    assert breakdown["decode"]["num_steps"] == 6
    assert breakdown["decode"]["tokens_per_step"] == 2
    out = capsys.readouterr().out
    assert "40.0 GB/s read bandwidth (read t1), 800 GFLOP/s float32 peak (torch's product)" in out
    assert "decode: mean of 6 steps of 2 tokens" in out


def test_plot(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("octavo.bench.plots")
    machine = Machine(4e10, 8e11, "float32", bandwidth_by="read t1", peak_by="torch")
    monkeypatch.setattr(machine_module, "measure_machine", lambda dtype, quantization: machine)
    path = tmp_path / "roofline.svg"
    latency.run(parse("--breakdown", "--plot", path, "--num-iters", 1))
    text = path.read_text()
    assert "prefill: linear" in text
    assert "decode: linear" in text


def test_plot_needs_the_breakdown(batches, tmp_path):
    with pytest.raises(ConfigError, match="add --breakdown"):
        latency.run(parse("--plot", tmp_path / "roofline.svg"))
    assert not batches.calls


def test_ctrl_c_during_the_breakdown_keeps_the_figures(batches, capsys):
    batches.stop = 4  # the breakdown's first
    result = latency.run(parse("--breakdown"))
    assert result["interrupted"]
    assert len(result["latencies"]) == 3
    assert "breakdown" not in result


@pytest.mark.skipif(
    all(field.name != "profiler_dir" for field in config_fields()),
    reason="the engine has no profiler",
)
def test_profile(batches, tmp_path, capsys):
    result = latency.run(parse("--profile", tmp_path / "traces"))
    (trace,) = (tmp_path / "traces").iterdir()
    assert result["profile"] == str(trace)
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert any(name.startswith("linear") for name in names)
    assert len(batches.calls) == 5
    assert f"Profile in {trace}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--input-len", 0], "--input-len 0: must be at least 1"),
        (["--num-iters", 0], "--num-iters 0: must be at least 1"),
        (["--num-iters-warmup", -1], "--num-iters-warmup -1"),
        (["--n", 0], "--n 0"),
        (["--input-len", 61], "--input-len 61 and --output-len 4 are more than"),
        (["--num-threads", 10_000], "num_threads=10000 is more than"),
        (["--model", "/nowhere"], "There is no folder /nowhere"),
    ],
)
def test_wrong_flags(flags, said, tmp_path):
    with pytest.raises(OctavoError, match=said):
        latency.run(parse(*flags, "--output-json", tmp_path / "result.json"))
    assert not list(tmp_path.iterdir())


def test_an_unwritable_result_is_told_first(batches, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "result.json"):
        with pytest.raises(BenchError, match="cannot be written"):
            latency.run(parse("--output-json", path))
    assert not batches.calls
