"""`octavo bench throughput` on the built-in model."""

import argparse
import json
import signal

import pytest

from octavo.bench import throughput
from octavo.bench.offline import ObservedLLM
from octavo.errors import BenchError, ConfigError, DatasetError, OctavoError
from octavo.llm import LLM
from octavo.scheduler.speculation import DraftLengths

ENGINE = ["--max-model-len", "128", "--kv-cache-memory-bytes", "16M", "--max-num-seqs", "4"]


def parse(*flags):
    parser = argparse.ArgumentParser()
    throughput.add_arguments(parser)
    return parser.parse_args([*ENGINE, *map(str, flags)])


def workload(folder, rows):
    path = folder / "workload.jsonl"
    lines = [json.dumps({"prompt_token_ids": ids, "max_tokens": count}) for ids, count in rows]
    path.write_text("\n".join(lines))
    return ["--dataset-name", "workload", "--dataset-path", path]


def test_a_workload(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(DraftLengths, "choose", lambda lengths, num_reqs: lengths.most)
    prefix = list(range(1, 65))
    rows = [([*prefix, i + 100], 3 + i) for i in range(8)]
    path, picture = tmp_path / "result.json", tmp_path / "a.png"
    plot = ["--plot", picture]
    drafts = ["--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}']
    result = throughput.run(parse(*workload(tmp_path, rows), "--output-json", path, *drafts, *plot))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result["num_requests"] == result["completed"] == 8
    assert 0 <= result["spec_decode_acceptance_rate_perc"] <= 100
    assert 1 <= result["spec_decode_acceptance_length"] <= 6
    assert result["total_input_tokens"] == 8 * 65
    assert result["total_output_tokens"] == sum(range(3, 11))
    assert result["total_num_tokens"] == 8 * 65 + sum(range(3, 11))
    elapsed = result["elapsed_time"]
    assert result["requests_per_second"] == pytest.approx(8 / elapsed)
    assert result["tokens_per_second"] == pytest.approx(result["total_num_tokens"] / elapsed)
    # Only 4 run at once: the others find the 4 full blocks of the prefix.
    assert result["prefix_cache_hit_rate_perc"] >= 4 * 64 / (8 * 65) * 100
    assert 0 < result["kv_cache_usage_max_perc"] <= 100
    assert result["num_preemptions"] == 0
    assert not any("itl" in key for key in result)
    saved = json.loads(path.read_text())
    assert saved["output_lens"] == list(range(3, 11))  # in the order of the requests
    assert saved["input_lens"] == [65] * 8
    for start, ttft, e2el in zip(
        *(saved[k] for k in ("start_times", "ttfts", "e2els")), strict=True
    ):
        assert start >= 0
        assert 0 < ttft < e2el <= elapsed
    out = capsys.readouterr().out
    assert f"Throughput: {8 / elapsed:.2f} requests/s, " in out
    assert "Total num prompt tokens:  520" in out
    assert "Prefix cache hit rate (%):" in out


def test_random_prompts_and_several_answers():
    flags = ["--num-prompts", "3", "--input-len", "10", "--output-len", "4", "--n", "2"]
    result = throughput.benchmark(parse(*flags))
    assert result["input_lens"] == [10] * 3
    assert result["output_lens"] == [8] * 3
    assert result["total_input_tokens"] == 30
    assert "mean_tpot_ms" not in result
    assert result["mean_ttft_ms"] > 0


def test_what_does_not_fit_is_left_out(tmp_path, capsys):
    rows = [([1] * 100, 29), ([1] * 100, 2)]
    result = throughput.run(parse(*workload(tmp_path, rows)))
    assert result["num_requests"] == 1
    assert "Left out 1 of 2 requests" in capsys.readouterr().out
    with pytest.raises(BenchError, match="No request can be sent"):
        throughput.run(parse(*workload(tmp_path, rows[:1])))


def test_ctrl_c_keeps_what_there_is(tmp_path, monkeypatch, capsys):
    """The signal arrives when the third answer is complete."""
    observed, answers = ObservedLLM._step, []

    def step(self):
        before = len(answers)
        request_ids = observed(self)
        answers.extend(request_ids)
        if before < 3 <= len(answers):
            signal.raise_signal(signal.SIGINT)
        return request_ids

    monkeypatch.setattr(ObservedLLM, "_step", step)
    rows = [([i + 1] * 5, 4 * i + 1) for i in range(6)]
    path = tmp_path / "result.json"
    result = throughput.run(parse(*workload(tmp_path, rows), "--output-json", path))
    assert result["interrupted"]
    saved = json.loads(path.read_text())
    assert saved["output_lens"] == [1, 5, 9]
    assert saved["num_requests"] == 6
    assert "3 of 6 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "kind", "said"),
    [
        (["--n", 0], ConfigError, "--n 0"),
        (["--num-prompts", 0], ConfigError, "--num-prompts 0"),
        (["--dataset-name", "sharegpt"], ConfigError, "--dataset-path"),
        (["--dataset-name", "workload", "--dataset-path", "EMPTY"], DatasetError, "no usable"),
        (["--max-num-batched-tokens", 0], ConfigError, "max_num_batched_tokens=0"),
        (["--model", "/nowhere"], OctavoError, "no folder /nowhere"),
    ],
)
def test_wrong_flags(flags, kind, said, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    flags = [tmp_path / "empty.jsonl" if flag == "EMPTY" else flag for flag in flags]
    with pytest.raises(kind, match=said):
        throughput.run(parse(*flags, "--output-json", tmp_path / "result.json"))
    assert not (tmp_path / "result.json").exists()


def test_an_unwritable_result_is_told_first(tmp_path, monkeypatch):
    monkeypatch.setattr(LLM, "__init__", lambda *args, **kwargs: pytest.fail("it was loaded"))
    with pytest.raises(BenchError, match="cannot be written"):
        throughput.run(parse(*workload(tmp_path, [([1], 1)]), "--output-json", tmp_path))


def test_a_token_out_of_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(OctavoError, match=str(2**40)):
        throughput.run(parse(*workload(tmp_path, [([2**40], 1)])))
