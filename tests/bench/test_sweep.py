"""Sweeps: every combination, nothing lost, nothing measured twice, clear errors."""

import argparse
import contextlib
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

from octavo.bench import serve, sweep
from octavo.bench.process import free_port
from octavo.bench.sweep import Probe, Slos, best_probe, find_max_rate, parse_slos
from octavo.errors import BenchError, ConfigError
from tests.bench.fake_openai import fake_server, good


def parse(*flags):
    parser = argparse.ArgumentParser()
    sweep.add_arguments(parser)
    return parser.parse_args([str(flag) for flag in flags])


def workload(folder, count=4):
    path = folder / "workload.jsonl"
    rows = [{"prompt_token_ids": [i + 1] * 3, "max_tokens": 2 + i} for i in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return ["--dataset-name", "workload", "--dataset-path", path]


def params(folder, name, value):
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def fake_command(*flags):
    command = [sys.executable, "-m", "tests.bench.fake_openai", "--port", free_port(), *flags]
    return shlex.join(map(str, command))


# Service levels


def test_parse_slos():
    slos = parse_slos("ttft_p99.9:2000, tpot:100 itl_mean:7.5,e2el_median:1e3")
    assert slos.limits == {
        "p99.9_ttft_ms": 2000.0,
        "p99_tpot_ms": 100.0,
        "mean_itl_ms": 7.5,
        "median_e2el_ms": 1000.0,
    }
    assert slos.percentiles == ["99.9", "99"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--slo is empty"),
        ("speed:3", "--slo 'speed:3': must be NAME:MS"),
        ("ttft_p101:3", "--slo 'ttft_p101:3': must be"),
        ("ttft_max:3", "must be NAME:MS"),
        ("ttft", "'' is not a number of ms"),
        ("ttft:fast", "'fast' is not a number of ms"),
        ("ttft:0", "'0' is not"),
        ("ttft:inf", "'inf' is not"),
        ("ttft:nan", "'nan' is not"),
        ("ttft:1,ttft_p99:2", "'ttft_p99:2': this level is given twice"),
    ],
)
def test_malformed_slos(text, message):
    with pytest.raises(BenchError, match=message):
        parse_slos(text)


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({}, -0.5),
        ({"p99_ttft_ms": 100.0}, 0.0),
        ({"p99_ttft_ms": 250.0, "p99_tpot_ms": 20.0}, 1.5),
        ({"p99_tpot_ms": 40.0}, 3.0),
        ({"p99_tpot_ms": math.nan}, -0.5),
        ({"p99_tpot_ms": None, "p99_ttft_ms": None}, 0.0),
        ({"failed": 3}, 0.75),
    ],
)
def test_excess(figures, expected):
    result = {"p99_ttft_ms": 50.0, "p99_tpot_ms": 5.0, "failed": 0, "completed": 1} | figures
    slos = Slos({"p99_ttft_ms": 100.0, "p99_tpot_ms": 10.0})
    assert slos.excess(result) == pytest.approx(expected)


# The highest rate


@given(st.floats(1e-3, 1e4), st.floats(0.01, 100.0))
def test_the_highest_rate_is_found(limit, burst_share):
    """The burst's result for the server's speed does not matter."""
    burst = limit * burst_share

    def probe(rate):
        return Probe(rate, rate / limit - 1, min(rate, burst))

    probes = find_max_rate(probe)
    best = best_probe(probes)
    assert len({p.rate for p in probes}) == len(probes) <= 14
    if best is None:
        assert limit <= burst / 32 * 1.01
    else:
        assert best.rate <= limit
        assert best.rate >= min(limit * 0.94, burst * 15.8)


def test_a_rate_that_everything_keeps():
    probes = find_max_rate(lambda rate: Probe(rate, -0.1, 5.0))
    assert probes == [Probe(math.inf, -0.1, 5.0)]
    assert best_probe(probes) == probes[0]


# Parameters


def test_bench_arguments():
    args = parse("--base-url", "http://h", "--num-prompts", 7, "--burstiness", 2)
    plain = sweep._plain_bench(args)
    own = sweep.bench_arguments(
        plain,
        {"request_rate": "inf", "num_prompts": 9, "ignore_eos": True, "goodput": ["ttft:1"]},
    )
    assert (own.request_rate, own.num_prompts, own.burstiness) == (math.inf, 9, 2.0)
    assert own.ignore_eos is True
    assert own.goodput == ["ttft:1"]
    assert plain.num_prompts == 7
    flags = sweep.bench_flags(own)
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    assert parser.parse_args(flags) == own
    own.api_key = "secret"
    assert sweep.bench_flags(own) == flags
    assert sweep.bench_arguments(own, {"ignore_eos": False}).ignore_eos is False


def test_server_flags():
    settings = {"max_num_seqs": 8, "api_key": ["a", "b"], "async_scheduling": False, "x": True}
    expected = "--max-num-seqs 8 --api-key a b --no-async-scheduling --x"
    assert sweep.server_flags(settings, None, "here") == expected.split()


@pytest.mark.parametrize(
    ("flag", "content", "message"),
    [
        ("--serve-params", "[", "is not JSON"),
        ("--serve-params", "{}", "must be a list of objects"),
        ("--bench-params", "[1]", "must be a list of objects"),
        ("--bench-params", "[]", "the list is empty"),
        ("--serve-params", [{"max-num-seq": 1}], "'max_num_seq'; did you mean 'max_num_seqs'"),
        ("--serve-params", [{"max-num-seqs": None}], "max_num_seqs=None is not allowed"),
        ("--serve-params", [{"api_key": []}], r"api_key=\[\] is not allowed"),
        ("--bench-params", [{"request-rat": 1}], "'request_rat'; did you mean 'request_rate'"),
        ("--bench-params", [{"plot": "a.png"}], "unknown name 'plot'"),
        ("--bench-params", [{"x" * 30: 1}], "known are api_key, backend"),
        ("--bench-params", [{"num_prompts": "many"}], "argument --num-prompts: invalid int"),
        ("--bench-params", [{"num_prompts": True}], "num_prompts=True: must be a value"),
        ("--bench-params", [{"ignore_eos": 1}], "ignore_eos=1: must be true or false"),
        ("--bench-params", [{"backend": "x"}], "argument --backend: invalid choice"),
    ],
)
def test_malformed_files(flag, content, message, tmp_path):
    path = params(tmp_path, "params.json", content)
    with pytest.raises(BenchError, match=message) as caught:
        sweep.run(parse("--serve-cmd", "octavo serve m", flag, path))
    assert flag in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(BenchError, match=r"--bench-params .*nowhere: cannot be read"):
        sweep.run(parse("--base-url", "http://h", "--bench-params", tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "No server is named; give its command with --serve-cmd"),
        (("--serve-cmd", "x", "--base-url", "http://h"), "name two servers"),
        (("--serve-cmd", "x 'y"), "--serve-cmd .*No closing quotation"),
        (("--serve-cmd", " "), "--serve-cmd is empty"),
        (("--serve-cmd", "x --port=y"), "--port 'y' is not a port"),
        (("--serve-cmd", "x --port"), "--port '' is not a port"),
        (("--base-url", "http://h", "--serve-params", "f"), "needs the command"),
        (
            ("--base-url", "http://h", "--request-rates", "1", "--bench-params", "f"),
            "write the rates into the file",
        ),
        (("--base-url", "http://h", "--request-rates", "1,x"), "--request-rates '1,x'"),
        (("--base-url", "http://h", "--request-rates", "0"), "--request-rates '0'"),
        (("--base-url", "http://h", "--num-runs", "0"), "--num-runs 0"),
        (("--base-url", "http://h", "--ready-timeout", "nan"), "--ready-timeout nan"),
        (("--base-url", "http://h", "--slo", "ttft:1"), "--slo is for --find-max-rate"),
        (("--base-url", "http://h", "--find-max-rate"), "needs the service levels"),
        (
            ("--base-url", "http://h", "--find-max-rate", "--slo", "ttft:1", "--request-rate", "2"),
            "chooses the rates itself",
        ),
        (("--base-url", "http://h", "--plot", "a.gif"), "--plot a.gif: must end in"),
    ],
)
def test_wrong_flags(flags, message):
    with pytest.raises(BenchError, match=message):
        sweep.run(parse(*flags))


def test_rates_in_a_file_and_a_search(tmp_path):
    path = params(tmp_path, "p.json", [{"request_rate": 3}])
    flags = ("--base-url", "http://h", "--find-max-rate", "--slo", "ttft:1")
    with pytest.raises(BenchError, match="request_rate does not go with --find-max-rate"):
        sweep.run(parse(*flags, "--bench-params", path))


def test_wrong_benchmark_settings_are_told_before_anything_runs(tmp_path):
    path = params(tmp_path, "p.json", [{}, {"burstiness": -1}])
    with pytest.raises(ConfigError, match="--burstiness -1"):
        sweep.run(parse("--serve-cmd", "no-such-program", "--bench-params", path))


# Runs


class Fakes:
    """Stand-ins for servers and benchmarks. `act` runs in place of a benchmark."""

    def __init__(self, monkeypatch):
        self.commands, self.benchmarks = [], []
        self.act = lambda args: None
        self.fail_start = lambda command: False
        monkeypatch.setattr(sweep, "running_server", self.running_server)
        monkeypatch.setattr(serve, "benchmark", self.benchmark)

    @contextlib.contextmanager
    def running_server(self, command, base_url, log, *, timeout):
        if self.fail_start(command):
            raise BenchError("The server ended. Its log ends:\nno memory")
        self.commands.append((command, base_url))
        yield argparse.Namespace(check=lambda grace=0.0: None, seconds=1.5)

    def benchmark(self, args):
        self.benchmarks.append(args)
        return {
            "interrupted": False,
            "request_rate": args.request_rate,
            "failed": 0,
            "completed": 4,
            "request_throughput": min(args.request_rate, 20.0),
            "output_throughput": 10.0 * len(self.benchmarks),
            "median_ttft_ms": 3.0,
            "p99_ttft_ms": 10.0 * min(args.request_rate, 1000.0),
            "notes": [f"{args.request_rate} is noted"],
            "itls": ["not in the summary"],
            **(self.act(args) or {}),
        }


@pytest.fixture
def fakes(monkeypatch):
    return Fakes(monkeypatch)


def files(folder):
    return sorted(name for name in os.listdir(folder) if name != "summary.json")


def test_every_combination(fakes, tmp_path, capsys):
    serve_params = params(tmp_path, "s.json", [{}, {"max-num-seqs": 8}])
    flags = ("--serve-cmd", "octavo serve m --port 99", "--serve-params", serve_params)
    flags += ("--request-rates", "1,4,inf", "--num-runs", 2, "--result-dir", tmp_path / "out")
    result = sweep.run(parse(*flags, "--plot", tmp_path / "a.png", "--num-prompts", 5))
    plain = ["octavo", "serve", "m", "--port", "99"]
    url = "http://127.0.0.1:99"
    assert fakes.commands == [(plain, url)] * 6 + [([*plain, "--max-num-seqs", "8"], url)] * 6
    rates = [1.0, 1.0, 4.0, 4.0, math.inf, math.inf]
    assert [b.request_rate for b in fakes.benchmarks] == rates * 2
    assert {(b.num_prompts, b.base_url, b.plot) for b in fakes.benchmarks} == {(5, url, None)}
    saved = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert saved["runs"] == json.loads(json.dumps(result["runs"]))
    assert saved["interrupted"] is False
    assert [r["run"] for r in saved["runs"]] == [0, 1] * 6
    assert saved["runs"][-1]["request_rate"] == "inf"
    assert saved["runs"][-1]["label"] == "max_num_seqs=8"
    assert saved["runs"][-1]["output_throughput"] == 120.0
    assert "itls" not in saved["runs"][0]
    assert saved["runs"][0]["notes"] == ["1.0 is noted"]
    assert files(tmp_path / "out") == sorted(r["file"] for r in saved["runs"])
    one = json.loads((tmp_path / "out" / saved["runs"][6]["file"]).read_text())
    assert one["serve_params"] == {"max_num_seqs": 8}
    assert one["server_start_seconds"] == 1.5
    assert (tmp_path / "a.png").exists()
    out = capsys.readouterr().out
    assert "95" in out  # the median of 90 and 100
    assert "default at 1.0 req/s: 1.0 is noted (and 11 more runs; see the notes)" in out
    assert "Saved in" in out


def test_resume(fakes, tmp_path):
    def interrupt(args):
        if len(fakes.benchmarks) == 3:
            return {"interrupted": True}
        return None

    fakes.act = interrupt
    flags = ("--serve-cmd", "x", "--request-rates", "1,2,3,4", "--result-dir", tmp_path)
    result = sweep.run(parse(*flags))
    assert result["interrupted"] is True
    assert json.loads((tmp_path / "summary.json").read_text())["interrupted"] is True
    assert len(files(tmp_path)) == 3
    result = sweep.run(parse(*flags, "--resume"))
    assert [b.request_rate for b in fakes.benchmarks] == [1, 2, 3, 3, 4]
    assert result["interrupted"] is False
    assert [r["output_throughput"] for r in result["runs"]] == [10, 20, 40, 50]
    sweep.run(parse(*flags, "--resume"))
    assert len(fakes.benchmarks) == 5
    # Other requests are another measurement; without --resume all are measured again.
    sweep.run(parse(*flags, "--resume", "--num-prompts", 3))
    assert len(fakes.benchmarks) == 9
    sweep.run(parse(*flags))
    assert len(fakes.benchmarks) == 13


def test_resume_with_a_file_that_is_something_else(fakes, tmp_path):
    flags = ("--serve-cmd", "x", "--request-rates", "1,2", "--result-dir", tmp_path)
    sweep.run(parse(*flags))
    for content in ("{", "[]", "{}"):
        (tmp_path / files(tmp_path)[0]).write_text(content)
        with pytest.raises(BenchError, match=r"is not a result of a sweep .*; delete it"):
            sweep.run(parse(*flags, "--resume"))


def test_failures_are_recorded_and_the_others_go_on(fakes, tmp_path, capsys):
    serve_params = params(tmp_path, "s.json", [{"a": 1}, {"a": 2}])
    fakes.fail_start = lambda command: command[-1] == "1"

    def fail(args):
        if args.request_rate == 2:
            raise BenchError("None of the 4 requests succeeded.")

    fakes.act = fail
    flags = ("--serve-cmd", "x", "--serve-params", serve_params, "--request-rates", "1,2,3")
    result = sweep.run(parse(*flags, "--result-dir", tmp_path / "out"))
    errors = [r.get("error") for r in result["runs"]]
    assert errors[:3] == ["The server ended. Its log ends:\nno memory"] * 3
    assert errors[3:] == [None, "None of the 4 requests succeeded.", None]
    assert len(files(tmp_path / "out")) == 2
    out = capsys.readouterr().out
    assert "1 of 1" in out
    assert "a=1: The server ended" in out
    assert "no memory" in out


def test_a_result_that_cannot_be_written_is_told_before_anything_runs(fakes, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BenchError, match=r"cannot be written to .*summary.json: Not a directory"):
        sweep.run(parse("--serve-cmd", "x", "--result-dir", tmp_path / "file"))
    assert not fakes.commands


def test_all_fail(fakes, tmp_path):
    fakes.fail_start = lambda command: True
    with pytest.raises(
        BenchError, match=r"None of the 2 runs succeeded. The first error: The server"
    ):
        sweep.run(parse("--serve-cmd", "x", "--num-runs", 2, "--result-dir", tmp_path))
    assert len(json.loads((tmp_path / "summary.json").read_text())["runs"]) == 2


def test_a_server_that_ends_is_the_cause(monkeypatch):
    class Dead:
        def check(self, grace=0.0):
            raise BenchError("out of memory")

    class Alive:
        def check(self, grace=0.0):
            pass

    def benchmark(args):
        raise BenchError("no answer")

    monkeypatch.setattr(serve, "benchmark", benchmark)
    with pytest.raises(BenchError, match="out of memory"):
        sweep.measure_with(Dead(), None)
    with pytest.raises(BenchError, match="no answer"):
        sweep.measure_with(Alive(), None)


def test_find_max_rate(fakes, tmp_path, capsys):
    serve_params = params(tmp_path, "s.json", [{"a": 1}, {"a": 2}, {"a": 3}])
    fakes.fail_start = lambda command: command[-1] == "2"
    flags = ("--serve-cmd", "x", "--serve-params", serve_params, "--find-max-rate")
    flags += ("--slo", "ttft_p98:130", "--result-dir", tmp_path / "out", "--num-runs", 3)

    def slow(args):
        # The third run of each rate is an outlier.
        outlier = len(fakes.benchmarks) % 3 == 0
        return {"p98_ttft_ms": 10.0 * min(args.request_rate, 1e3) + 1e6 * outlier}

    fakes.act = slow
    result = sweep.run(parse(*flags))
    first, second, third = result["max_rates"]
    assert first["max_rate"] == pytest.approx(13.0, rel=0.06)
    assert first["max_rate"] <= 13.0
    assert first["probes"][0]["rate"] == "inf"
    assert third["max_rate"] == first["max_rate"]
    assert second == second | {"max_rate": None, "probes": []}
    assert {b.metric_percentiles for b in fakes.benchmarks} == {"99,98"}
    assert "Highest rate within" in capsys.readouterr().out
    count = len(fakes.benchmarks)
    again = sweep.run(parse(*flags, "--resume"))
    assert again["max_rates"] == result["max_rates"]
    assert len(fakes.benchmarks) == count


def test_levels_that_everything_keeps_are_said(fakes, tmp_path, capsys):
    flags = ("--serve-cmd", "x", "--find-max-rate", "--slo", "ttft:1e9")
    result = sweep.run(parse(*flags, "--result-dir", tmp_path))
    assert result["max_rates"][0]["max_rate"] == "inf"
    assert "kept even with all requests at once" in capsys.readouterr().out


def test_dry_run(fakes, tmp_path, capsys):
    serve_params = params(tmp_path, "s.json", [{"enable_prefix_caching": False}])
    flags = ("--serve-cmd", "octavo serve m --port=7", "--serve-params", serve_params, "--dry-run")
    sweep.run(parse(*flags, "--request-rates", "1,inf", "--result-dir", tmp_path / "out"))
    assert capsys.readouterr().out.splitlines() == [
        "octavo serve m --port=7 --no-enable-prefix-caching",
        "octavo bench serve --base-url http://127.0.0.1:7 --request-rate 1.0 "
        "--percentile-metrics ttft,tpot",
        "octavo serve m --port=7 --no-enable-prefix-caching",
        "octavo bench serve --base-url http://127.0.0.1:7 --percentile-metrics ttft,tpot",
    ]
    assert fakes.commands == fakes.benchmarks == []
    assert not (tmp_path / "out").exists()


def test_a_setting_takes_the_place_of_the_commands_own(fakes, tmp_path, capsys):
    own = [{"enable_prefix_caching": False, "max_num_seqs": 8, "allowed_origins": ["x"]}]
    serve_params = params(tmp_path, "s.json", own)
    command = "octavo serve m --allowed-origins a b --enable-prefix-caching --port 7"
    command += " --max_num_seqs=4 --seed 3"
    flags = ("--serve-cmd", command, "--serve-params", serve_params, "--dry-run")
    sweep.run(parse(*flags, "--request-rates", "1", "--result-dir", tmp_path / "out"))
    assert capsys.readouterr().out.splitlines()[0] == (
        "octavo serve m --port 7 --seed 3 --no-enable-prefix-caching --max-num-seqs 8"
        " --allowed-origins x"
    )


# With servers


def test_a_running_server(tmp_path, capsys):
    with fake_server(good()) as server:
        flags = ("--base-url", server.url, "--request-rates", "500,inf", *workload(tmp_path))
        result = sweep.run(parse(*flags, "--result-dir", tmp_path / "out"))
        assert server.num_resets == 2
        assert [r["completed"] for r in result["runs"]] == [4, 4]
        assert "prefix cache" not in capsys.readouterr().out
        server.can_reset = False
        sweep.run(parse(*flags, "--result-dir", tmp_path / "out"))
    out = capsys.readouterr().out
    assert out.count("could not be emptied (status 404 of /reset_prefix_cache)") == 1


def test_a_server_that_is_started(tmp_path):
    command = fake_command()
    flags = ("--serve-cmd", command, "--result-dir", tmp_path / "out", *workload(tmp_path))
    result = sweep.run(parse(*flags))
    assert result["runs"][0]["completed"] == 4
    assert result["runs"][0]["server_start_seconds"] > 0


def test_servers_that_fail(tmp_path, capsys):
    modes = [{"fail": "no such model"}, {"die": True}, {}]
    flags = ("--serve-params", params(tmp_path, "s.json", modes), *workload(tmp_path))
    result = sweep.run(
        parse("--serve-cmd", fake_command(), *flags, "--result-dir", tmp_path / "out")
    )
    refused, died, good_one = result["runs"]
    assert "no such model" in refused["error"]
    assert "status -9" in died["error"]
    assert "out of memory" in died["error"]
    assert good_one["completed"] == 4
    assert "no such model" in capsys.readouterr().out


def test_ctrl_c(tmp_path):
    code = (
        "import argparse, sys\nfrom octavo.bench import sweep\n"
        "parser = argparse.ArgumentParser()\nsweep.add_arguments(parser)\n"
        "result = sweep.run(parser.parse_args())\nsys.exit(130 if result['interrupted'] else 0)\n"
    )
    command = fake_command("--step-time", 100)
    flags = ["--serve-cmd", command, "--result-dir", tmp_path / "out", *workload(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, flags)], stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out/*.log")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "Interrupted; --resume continues from here." in out
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["interrupted"] is True
