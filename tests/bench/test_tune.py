"""Tuning: the search as a pure function, and around servers."""

import argparse
import contextlib
import itertools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench import serve, tune
from octavo.bench.tune import Trial, halving_budgets, sample_configs, successive_halving
from octavo.config import EngineConfig, environment_without_keys
from octavo.errors import BenchError, ConfigError, DatasetError
from octavo.system import device


def parse(*flags):
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    return parser.parse_args([str(flag) for flag in flags])


def workload(folder, max_tokens=3):
    path = folder / "workload.jsonl"
    rows = [{"prompt_token_ids": [i + 1] * 3, "max_tokens": max_tokens} for i in range(9)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return ["--dataset-name", "workload", "--dataset-path", path]


# The search

SCORES = st.lists(st.floats(-1e6, 1e6) | st.just(-math.inf), min_size=1, max_size=60)
ETAS = st.integers(2, 5)


def search(scores, max_budget, eta):
    spent = []

    def evaluate(config, budget):
        spent.append((config["i"], budget))
        return Trial(config, budget, scores[config["i"]])

    configs = [{"i": i} for i in range(len(scores))]
    return successive_halving(configs, evaluate, max_budget=max_budget, eta=eta), spent


@given(SCORES, st.integers(1, 1000), ETAS)
def test_without_noise_the_best_wins(scores, max_budget, eta):
    last, _ = search(scores, max_budget, eta)
    assert last[0].score == max(scores)
    assert last[0].config["i"] == scores.index(max(scores))  # the first of equal ones
    assert [t.score for t in last] == sorted((t.score for t in last), reverse=True)
    assert {t.budget for t in last} == {max_budget}
    assert len(last) < eta


@given(SCORES, st.integers(1, 1000), ETAS)
def test_the_budget_is_bounded(scores, max_budget, eta):
    _, spent = search(scores, max_budget, eta)
    rungs = halving_budgets(len(scores), max_budget, eta)
    assert sum(budget for _, budget in spent) == sum(n * b for n, b in rungs)
    assert len(rungs) <= math.log(len(scores), eta) + 1 + 1e-9
    for count, budget in rungs:
        # No rung costs more than its share, plus a request each.
        assert count * budget <= eta * max_budget + count
    counts = [n for n, _ in rungs]
    assert counts[0] == len(scores)
    assert all(a // eta == b for a, b in itertools.pairwise(counts))


@given(SCORES, st.integers(1, 1000), ETAS)
def test_the_search_is_deterministic(scores, max_budget, eta):
    assert search(scores, max_budget, eta) == search(scores, max_budget, eta)


def test_each_rung_keeps_the_best():
    _, spent = search([1, 9, 2, 8, 3, 7, 4, 6, 5], 90, 3)
    assert spent == [*((i, 10) for i in range(9)), (1, 30), (3, 30), (5, 30), (1, 90)]


SPACE = {"a": (1, 2, 3), "b": ("x", "y"), "c": (None, 0, 1, 2)}


@given(st.integers(0, 40), st.integers(0, 9))
def test_sampling(count, seed):
    def is_valid(config):
        return (config["a"], config["b"]) != (1, "x")

    drawn = sample_configs(SPACE, count, seed, is_valid)
    assert drawn == sample_configs(SPACE, count, seed, is_valid)
    assert len(drawn) == min(count, 20)
    assert all(is_valid(c) and list(c) == list(SPACE) for c in drawn)
    assert all(drawn.count(c) == 1 for c in drawn)


def test_sampling_covers_each_setting():
    # Twelve rows have every value equally often; collisions are few.
    for seed in range(5):
        drawn = sample_configs(SPACE, 12, seed)
        for name, values in SPACE.items():
            found = [c[name] for c in drawn]
            assert all(found.count(v) >= 1 for v in values)
    assert sample_configs(SPACE, 12, 0) != sample_configs(SPACE, 12, 1)


def test_every_candidate_can_be_served_and_is_not_the_default():
    candidates = sample_configs(tune.SPACE, 1_000, 0, tune._is_valid)
    given_ = [tune._given(c) for c in candidates]
    assert len(given_) > 50
    assert {} not in given_
    assert all(given_.count(c) == 1 for c in given_)
    for config in given_:
        EngineConfig.from_kwargs(**{"max_num_batched_tokens": 2048} | config)


# Trials


class Fakes:
    """Stand-ins for servers and benchmarks; `act` returns figures for a server's settings."""

    def __init__(self, monkeypatch):
        self.commands, self.benchmarks = [], []
        self.act = lambda settings, args: {}
        monkeypatch.setattr(tune, "running_server", self.running_server)
        monkeypatch.setattr(tune, "empty_prefix_cache", lambda url, key: None)
        monkeypatch.setattr(serve, "benchmark", self.benchmark)

    @contextlib.contextmanager
    def running_server(self, command, base_url, log, *, timeout, environment):
        assert environment == environment_without_keys()
        self.commands.append(command)
        yield argparse.Namespace(check=lambda grace=0.0: None)

    @property
    def settings(self):
        words = self.commands[-1]
        return {w: words[i + 1] for i, w in enumerate(words) if w.startswith("--")}

    def benchmark(self, args):
        self.benchmarks.append(args)
        return {
            "interrupted": False,
            "failed": 0,
            "completed": args.num_prompts,
            "request_throughput": 1.0,
            "output_throughput": 10.0,
            "p99_e2el_ms": 100.0,
            "notes": [],
            **self.act(self.settings, args),
        }


@pytest.fixture
def fakes(monkeypatch):
    return Fakes(monkeypatch)


def saved(folder):
    return json.loads((folder / "tune.json").read_text())


CLOSED = ("--max-concurrency", 256, "--slo", "e2el_p99:500")


def test_the_best_is_found_and_its_command_printed(fakes, tmp_path, capsys):
    def few_are_better(settings, args):
        seqs = int(settings.get("--max-num-seqs", 256))
        return {"output_throughput": 1000.0 / seqs}

    fakes.act = few_are_better
    flags = ("--num-configs", 20, "--num-prompts", 90, "--serve-args", "--max-model-len 64")
    result = tune.run(parse("some/model", *CLOSED, *flags, "--result-dir", tmp_path))
    assert result["winner"]["config"]["max_num_seqs"] == 4
    assert result["winner"]["score"] == 250.0
    assert result["default"]["config"] == {}
    assert result["default"]["budget"] == result["winner"]["budget"] == 90
    assert result["keeps_slos"] is True
    assert result["interrupted"] is False
    assert json.loads(json.dumps(result)) == saved(tmp_path)
    assert [t["budget"] for t in result["trials"]] == [10] * 20 + [30] * 6 + [90] * 3
    assert result["trials"][0]["config"] == {}
    assert {(b.max_concurrency, b.metric_percentiles) for b in fakes.benchmarks} == {(256, "99")}
    assert [b.num_prompts for b in fakes.benchmarks] == [t["budget"] for t in result["trials"]]
    words = fakes.commands[0]
    assert words[:5] == [sys.executable, "-m", "octavo", "serve", "--enable-admin"]
    assert words[5:8] == ["some/model", "--max-model-len", "64"]
    out = capsys.readouterr().out
    command = next(line for line in out.splitlines() if line.startswith("octavo serve"))
    assert shlex.split(command) == result["command"]
    assert command.startswith("octavo serve some/model --max-model-len 64 --")
    assert "--max-num-seqs 4" in command
    assert "Best / default: 64.000" in out
    assert "Default: 3.91 output_throughput" in out


def test_it_says_how_long_it_takes_and_how_far_it_is(fakes, tmp_path, capsys, monkeypatch):
    fakes.act = lambda settings, args: {"p99_e2el_ms": 900.0 if settings else 100.0}
    seconds = iter(range(0, 10_000, 60))
    monkeypatch.setattr(tune, "time", argparse.Namespace(monotonic=lambda: next(seconds)))
    flags = ("--num-configs", 6, "--num-prompts", 90, "--result-dir", tmp_path)
    tune.run(parse("m", *CLOSED, *flags, "--plot", tmp_path / "a.png"))
    out, err = capsys.readouterr()
    assert "8 trials, each of a separate server that receives 30 to 90 requests." in out
    first, *_, last = err.splitlines()
    assert first.startswith("trial 1 of about 8, default: ")
    assert first.endswith("; 60 s so far, at most 11 min left")  # 360 requests, 30 a minute
    assert last.startswith("trial 8 of about 8, ")
    assert last.endswith("; 8 min so far, at most 0 s left")
    assert (tmp_path / "a.png").exists()


def test_no_more_rows_than_requests(fakes, tmp_path):
    """Settings that differ only above the load's concurrency are not tried."""
    flags = ("--max-concurrency", 9, "--slo", "ttft:1", "--num-configs", 30, "--num-prompts", 9)
    fakes.act = lambda settings, args: {"p99_ttft_ms": 0.5}
    result = tune.run(parse("m", *flags, "--result-dir", tmp_path))
    assert {t["config"].get("max_num_seqs") for t in result["trials"]} == {None, 4, 8}


def test_the_seed_decides_what_is_tried(fakes, tmp_path):
    def tried(seed):
        flags = ("--num-configs", 9, "--num-prompts", 9, "--seed", seed, "--result-dir", tmp_path)
        return [t["config"] for t in tune.run(parse("m", *CLOSED, *flags))["trials"]]

    assert tried(1) == tried(1)
    assert tried(1) != tried(2)


def test_the_default_wins_if_nothing_is_better(fakes, tmp_path, capsys):
    result = tune.run(parse("m", *CLOSED, "--num-prompts", 9, "--result-dir", tmp_path))
    assert result["winner"] == result["default"]
    assert result["command"] == ["octavo", "serve", "m"]
    assert "Best: default: 10 output_throughput" in capsys.readouterr().out


def test_levels_that_nothing_keeps(fakes, tmp_path, capsys):
    """The search prefers levels that break them least, however fast others are."""

    def slow(settings, args):
        budget = int(settings.get("--max-num-batched-tokens", 2048))
        return {"p99_e2el_ms": 500.0 + budget, "output_throughput": float(budget)}

    fakes.act = slow
    flags = ("--num-configs", 30, "--num-prompts", 9, "--result-dir", tmp_path)
    result = tune.run(parse("m", *CLOSED, *flags))
    assert result["keeps_slos"] is False
    assert result["winner"]["config"]["max_num_batched_tokens"] == 128
    assert result["winner"]["score"] == pytest.approx(-128 / 500)
    out = capsys.readouterr().out
    assert "No configuration meets e2el_p99:500. The nearest one misses it by 26%" in out
    assert "Default: 2048 output_throughput, breaking the SLOs by 410%" in out
    assert "Best / default" not in out


def test_keeping_the_levels_beats_any_throughput(fakes, tmp_path):
    def trade(settings, args):
        seqs = int(settings.get("--max-num-seqs", 256))
        return {"p99_e2el_ms": 10.0 * seqs, "output_throughput": float(seqs)}

    fakes.act = trade
    flags = ("--num-configs", 40, "--num-prompts", 9, "--result-dir", tmp_path)
    result = tune.run(parse("m", *CLOSED, *flags))
    assert result["winner"]["config"]["max_num_seqs"] == 32


def test_the_highest_rate(fakes, tmp_path):
    def queue(settings, args):
        limit = 4096.0 / int(settings.get("--max-num-seqs", 256))
        rate = min(args.request_rate, 10 * limit)
        return {"p99_e2el_ms": 500.0 * rate / limit, "request_throughput": rate}

    fakes.act = queue
    flags = ("--num-configs", 9, "--num-prompts", 90, "--slo", "e2el_p99:500")
    result = tune.run(parse("m", *flags, "--result-dir", tmp_path))
    assert result["objective"] == "request_throughput"
    seqs = result["winner"]["config"]["max_num_seqs"]
    assert seqs == min(t["config"].get("max_num_seqs", 256) for t in result["trials"])
    assert 0.9 * 4096 / seqs <= result["winner"]["score"] <= 4096 / seqs
    assert result["default"]["score"] == pytest.approx(16, rel=0.1)


def test_failures_are_the_worst(fakes, tmp_path, capsys):
    def only_small(settings, args):
        if int(settings.get("--max-num-seqs", 256)) > 8:
            raise BenchError("out of memory")
        return {"p99_e2el_ms": 1e5}

    fakes.act = only_small
    flags = ("--num-configs", 20, "--num-prompts", 9, "--result-dir", tmp_path)
    result = tune.run(parse("m", *CLOSED, *flags))
    assert result["winner"]["config"]["max_num_seqs"] <= 8
    assert result["default"]["error"] == "out of memory"
    assert result["default"]["score"] is None
    out = capsys.readouterr().out
    assert out.count("out of memory") == 1
    assert "Default: failed" in out


def test_all_fail(fakes, tmp_path):
    def fail(settings, args):
        raise BenchError("out of memory")

    fakes.act = fail
    with pytest.raises(BenchError, match=r"None of the \d+ trials succeeded.*out of memory"):
        tune.run(parse("m", *CLOSED, "--num-prompts", 9, "--result-dir", tmp_path))
    assert saved(tmp_path)["winner"] is None


@pytest.mark.parametrize("error", [ConfigError, DatasetError])
def test_a_wrong_load_ends_the_search(error, fakes, tmp_path):
    def fail(settings, args):
        raise error("no such file")

    fakes.act = fail
    with pytest.raises(error, match="no such file"):
        tune.run(parse("m", *CLOSED, "--result-dir", tmp_path))
    assert len(fakes.benchmarks) == 1


def test_interrupted(fakes, tmp_path, capsys):
    fakes.act = lambda settings, args: {"interrupted": len(fakes.benchmarks) == 4}
    result = tune.run(parse("m", *CLOSED, "--num-prompts", 90, "--result-dir", tmp_path))
    assert result["interrupted"] is saved(tmp_path)["interrupted"] is True
    assert len(result["trials"]) == 3
    assert result["winner"]["budget"] == 10
    assert "Interrupted: the search is not complete." in capsys.readouterr().out


def test_interrupted_before_the_first_trial_ends(fakes, tmp_path):
    fakes.act = lambda settings, args: {"interrupted": True}
    result = tune.run(parse("m", *CLOSED, "--result-dir", tmp_path))
    assert (result["trials"], result["winner"], result["command"]) == ([], None, None)


def test_quantization_only_if_allowed(fakes, tmp_path):
    def tried(*flags):
        fakes.commands.clear()
        flags = ("--num-configs", 12, "--num-prompts", 9, *flags)
        tune.run(parse("m", *CLOSED, *flags, "--result-dir", tmp_path))
        return {c[i + 1] for c in fakes.commands for i, w in enumerate(c) if w == "--quantization"}

    assert tried() == set()
    assert tried("--allow-quantization", "int8,fp8") == {"int8", "fp8"}
    assert tried("--allow-quantization", "int4") == {"int4"}


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        (("--slo", "speed:1"), BenchError, "--slo 'speed:1'"),
        (("--num-configs", 0), BenchError, "--num-configs 0: must be at least 1"),
        (("--eta", 1), BenchError, "--eta 1: must be at least 2"),
        (("--num-prompts", 0), BenchError, "--num-prompts 0"),
        (("--ready-timeout", 0), BenchError, "--ready-timeout 0"),
        (("--allow-quantization", "fp3"), BenchError, "'fp3': must be of int8, int4"),
        (("--serve-args", "--max-num-seqs 3"), BenchError, "'--max-num-seqs': tune sets this"),
        (("--serve-args=--port=3",), BenchError, "'--port=3': tune sets this"),
        (("--serve-args", "'"), BenchError, "--serve-args .*No closing quotation"),
        (("--request-rate", 0), ConfigError, "--request-rate 0"),
        (("--max-concurrency", 0), ConfigError, "--max-concurrency 0"),
    ],
)
def test_wrong_flags(flags, error, message, fakes, tmp_path):
    with pytest.raises(error, match=message):
        tune.run(parse("m", "--slo", "ttft:1", *flags, "--result-dir", tmp_path))
    assert fakes.commands == []
    assert os.listdir(tmp_path) == []


# With servers


@pytest.fixture
def fake_command(monkeypatch):
    monkeypatch.setattr(tune, "_SERVE", (sys.executable, "-m", "tests.bench.fake_openai"))


@pytest.mark.parametrize("load", [("--max-concurrency", 2), ()])
def test_servers(load, fake_command, tmp_path):
    flags = ("--slo", "e2el_p99:60000", "--num-configs", 2, *load, *workload(tmp_path))
    result = tune.run(parse("m", *flags, "--num-prompts", 4, "--result-dir", tmp_path))
    assert [t["error"] for t in result["trials"]] == [None, None]
    assert [t["figures"]["completed"] for t in result["trials"]] == [4, 4]
    assert result["keeps_slos"] is True
    assert set(os.listdir(tmp_path)) == {"tune.json", "tune.log", "workload.jsonl"}


def test_servers_that_fail(fake_command, tmp_path):
    flags = (*CLOSED, *workload(tmp_path), "--num-configs", 2, "--serve-args", "--fail no-model")
    with pytest.raises(BenchError, match=r"(?s)None of the 2 trials succeeded.*no-model"):
        tune.run(parse("m", *flags, "--result-dir", tmp_path))


def test_ctrl_c(tmp_path):
    code = (
        "import argparse, sys\nfrom octavo.bench import tune\n"
        "tune._SERVE = (sys.executable, '-m', 'tests.bench.fake_openai', '--step-time', '100')\n"
        "parser = argparse.ArgumentParser()\ntune.add_arguments(parser)\n"
        "result = tune.run(parser.parse_args())\nsys.exit(130 if result['interrupted'] else 0)\n"
    )
    flags = ["m", *CLOSED, "--result-dir", tmp_path, *workload(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, flags)], stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "tune.log").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "Interrupted" in out
    assert saved(tmp_path)["interrupted"] is True


@pytest.mark.parametrize("flag", ["--device cpu", "--device=cpu"])
def test_a_server_on_the_cpu_of_a_machine_with_a_gpu_is_refused(flag, monkeypatch):
    """Its defaults are not those of the other servers there."""
    assert tune._serve_args(flag, tune.SPACE) == flag.split()
    monkeypatch.setattr(device, "num_cuda_devices", lambda: 1)
    with pytest.raises(BenchError, match="CUDA_VISIBLE_DEVICES="):
        tune._serve_args(flag, tune.SPACE)
    assert tune._serve_args("--device cuda", tune.SPACE) == ["--device", "cuda"]
