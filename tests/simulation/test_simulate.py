"""`octavo simulate`: its flags, traces and figures; and once against the real engine."""

import json
import subprocess
import sys

import msgspec
import pytest

from octavo import cli
from octavo.simulation import engine_probe
from octavo.simulation.step_times import StepTimes

ENGINE = ["--max-model-len", "512", "--kv-cache-memory-bytes", "16M", "--max-num-seqs", "8"]


@pytest.fixture(scope="module")
def times(tmp_path_factory):
    """Write steps of 10 ms, and 1 ms for each token."""
    path = tmp_path_factory.mktemp("times") / "times.json"
    StepTimes(
        model="octavo/stories",
        cpu="c",
        num_blocks=200,
        max_model_len=512,
        seconds={"step": 0.01} | {f"tokens_from_{2**i // 2}": 0.001 for i in range(15)},
        error=0.0,
    ).save(str(path))
    return str(path)


def simulate(times, tmp_path, *flags):
    """Return the result of the command."""
    path = tmp_path / "result.json"
    words = ["--step-times", times, "--output-json", str(path), "--disable-tqdm"]
    assert cli.main(["simulate", *ENGINE, *words, *map(str, flags)]) == 0
    return json.loads(path.read_text())


def azure(tmp_path, rows):
    path = tmp_path / "azure.csv"
    lines = [f"2023-11-16 18:15:{at:09.6f},{i},{o}" for at, i, o in rows]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    return path


def test_a_trace_of_azure(times, tmp_path, capsys):
    trace = azure(tmp_path, [(0, 100, 3), (30, 50, 1), (40, 600, 9)])
    result = simulate(times, tmp_path, "--trace", trace)
    assert result["num_prompts"] == result["completed"] == 2
    assert result["total_output_tokens"] == 4
    # 110 ms for the prompt, 11 for each token.
    assert result["duration"] == pytest.approx(30.06)
    assert result["median_tpot_ms"] == pytest.approx(11)
    assert result["median_ttft_ms"] == pytest.approx((110 + 60) / 2)
    out = capsys.readouterr().out
    assert "Left out 1 of 3 requests" in out
    assert "30 s simulated in" in out
    faster = simulate(times, tmp_path, "--trace", trace, "--request-rate", 2)
    assert faster["duration"] == pytest.approx(0.56)


def test_a_trace_of_mooncake_shares_its_prefixes(times, tmp_path):
    path = tmp_path / "mooncake.jsonl"
    rows = [{"timestamp": i * 9000, "input_length": 300, "output_length": 2} for i in range(4)]
    path.write_text(
        "\n".join(json.dumps(row | {"hash_ids": [i % 2]}) for i, row in enumerate(rows))
    )
    result = simulate(times, tmp_path, "--trace", path)
    # Prompts 3 and 4 are those of 1 and 2, except the part that is computed in any case.
    assert result["cached_tokens"] == 2 * 288
    assert result["prefix_cache_hit_rate_perc"] == pytest.approx(100 * 288 / 600)


def test_the_rate_decides_when_requests_come(times, tmp_path):
    flags = ["--num-prompts", 40, "--random-input-len", 20, "--random-output-len", 4]
    slow = simulate(times, tmp_path, *flags, "--request-rate", 1)
    assert slow["duration"] == pytest.approx(40, abs=1)
    fast = simulate(times, tmp_path, *flags)
    assert fast["duration"] < 4
    assert fast["median_ttft_ms"] > slow["median_ttft_ms"]
    assert slow == simulate(times, tmp_path, *flags, "--request-rate", 1) | {
        key: slow[key] for key in ("date", "simulation_seconds")
    }


def test_the_highest_rate_within_limits(times, tmp_path, capsys):
    flags = ["--num-prompts", 60, "--random-input-len", 50, "--random-output-len", 4]
    result = simulate(times, tmp_path, *flags, "--slo", "ttft_p90:150")
    rate = result["max_rate"]
    assert 1 < rate < 16
    within = {p["rate"]: p["excess"] <= 0 for p in result["probes"]}
    assert within[rate]
    assert not within["inf"]
    assert f"Highest rate within --slo: {rate:.4g} requests/s" in capsys.readouterr().out
    none = simulate(times, tmp_path, *flags, "--slo", "ttft_p90:1")
    assert none["max_rate"] is None


def test_a_cache_that_is_too_small_for_the_context(times, tmp_path, capsys):
    words = ["--step-times", times, "--num-gpu-blocks-override", "20"]
    assert cli.main(["simulate", "--max-model-len", "512", *words]) == 2
    assert "needs 32 of 20 KV blocks" in capsys.readouterr().err


def test_a_picture(times, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "a.png"):
        flags = ["--num-prompts", 30, "--random-input-len", 50, "--random-output-len", 4]
        simulate(times, tmp_path, *flags, "--request-rate", 5, "--plot", tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    text = (tmp_path / "a.svg").read_text()
    assert text.startswith("<?xml")


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["--request-rate", "0"], 2, "--request-rate 0.0: must be above 0"),
        (["--burstiness", "-1"], 2, "--burstiness -1.0"),
        (["--trace", "a.txt"], 2, "--trace a.txt: must be Azure's .csv or Mooncake's .jsonl"),
        (["--trace", "a.csv", "--dataset-path", "b"], 2, "give one"),
        (["--trace", "/nowhere/a.csv"], 1, "/nowhere/a.csv cannot be read"),
        (["--slo", "speed:1"], 1, "--slo 'speed:1'"),
        (["--step-times", "/nowhere"], 1, "--step-times /nowhere cannot be read"),
        (["--plot", "a.pdf"], 1, "--plot a.pdf"),
        (["--speculative-config.method", "ngram"], 2, "--speculative-config"),
        (["-pp", "2"], 2, "--pipeline-parallel-size=2"),
        (["--random-input-len", "600"], 1, "No request can be served"),
    ],
)
def test_wrong_flags(times, flags, status, said, capsys):
    given = [] if "--step-times" in flags else ["--step-times", times]
    assert cli.main(["simulate", *ENGINE, *given, "--num-prompts", "3", *flags]) == status
    assert said in capsys.readouterr().err


def test_the_times_of_another_model_are_told(times, tmp_path, capsys):
    other = tmp_path / "other.json"
    changed = msgspec.structs.replace(StepTimes.load(times), model="other/model")
    changed.save(str(other))
    simulate(str(other), tmp_path, "--num-prompts", 2, "--input-len", 5, "--output-len", 2)
    assert "are of other/model, not of octavo/stories" in capsys.readouterr().out


def test_nothing_of_it_imports_torch(times):
    flags = ["--num-prompts", "3", "--input-len", "20", "--output-len", "3", "--disable-tqdm"]
    code = (
        "import sys; from octavo import cli; "
        f"status = cli.main({['simulate', *ENGINE, '--step-times', times, *flags]!r}); "
        "sys.exit(status or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_measured_and_checked_on_the_real_engine(tmp_path, monkeypatch, capsys):
    """The error depends on the machine's other load; `--check` prints it."""
    for name, value in (("_CONCURRENCIES", (1, 3)), ("_ROUNDS", 1), ("_OUTPUT_LEN", 12)):
        monkeypatch.setattr(engine_probe, name, value)
    saved, path = tmp_path / "times.json", tmp_path / "result.json"
    flags = ["--num-prompts", "6", "--input-len", "40", "--output-len", "5", "--disable-tqdm"]
    files = ["--save-step-times", str(saved), "--output-json", str(path)]
    argv = ["simulate", *ENGINE, *flags, "--request-rate", "20", "--check", *files]
    assert cli.main(argv) == 0
    check = json.loads(path.read_text())["check"]
    assert set(check) == {"median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms"}
    for figure in check.values():
        assert figure["simulated"] > 0
        assert figure["measured"] > 0
        ratio = figure["simulated"] / figure["measured"]
        assert figure["error"] == pytest.approx(ratio - 1)
    measured = StepTimes.load(str(saved))
    assert measured.model == "octavo/stories"
    assert measured.max_model_len == 512
    assert min(measured.seconds.values()) > 0
    assert 0 < measured.host_seconds + 3 * measured.host_request_seconds < 1
    assert 0 < measured.arrival_seconds + 100 * measured.arrival_token_seconds < 1
    assert measured.spread
    assert "Simulated against measured (ms)" in capsys.readouterr().out
