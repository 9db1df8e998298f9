"""`octavo bench serve` against fake servers, and against a real one around a fake engine."""

import argparse
import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from octavo.bench import serve
from octavo.bench.client import Client
from octavo.bench.datasets import BenchRequest
from octavo.errors import BenchError, ConfigError
from tests.bench.fake_openai import (
    HEADERS,
    fake_server,
    fixed,
    good,
    plain,
    silent,
    token,
)
from tests.server.fake_engine import make_tokenizer
from tests.small_tokenizers import byte_level, save


def parse(*flags):
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args([str(flag) for flag in flags])


def workload(folder, count=4, length=3, **fields):
    path = folder / "workload.jsonl"
    rows = [
        {"prompt_token_ids": [i + 1] * length, "max_tokens": 2 + i, **fields} for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return ["--dataset-name", "workload", "--dataset-path", path]


def requests(count=4):
    return [BenchRequest([1, 2], None, 2) for _ in range(count)]


# Arrivals


def test_all_at_once():
    assert serve.arrival_times(requests(3), math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_arrivals(burstiness):
    times = serve.arrival_times(requests(4000), 5.0, burstiness, 3)
    assert times == serve.arrival_times(requests(4000), 5.0, burstiness, 3)
    assert times != serve.arrival_times(requests(4000), 5.0, burstiness, 4)
    gaps = np.diff([0.0, *times])
    assert times[-1] == pytest.approx(4000 / 5.0)
    assert gaps.min() >= 0
    # The coefficient of variation of a gamma distribution is 1 / sqrt(shape).
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)


def test_recorded_arrivals_are_kept():
    timed = [BenchRequest([1], None, 1, arrival=a) for a in (0.0, 0.5, 0.7)]
    assert serve.arrival_times(timed, 3.0, 1.0, 0) == [0.0, 0.5, 0.7]


# run_serve


def serve_all(script, wanted, **settings):
    async def scenario(url):
        return await serve.run_serve(wanted, Client(url, "fake"), **settings)

    with fake_server(script) as server:
        return asyncio.run(scenario(server.url)), server


def test_records_come_in_the_order_of_the_requests():
    wanted = [BenchRequest([1] * i, None, 5 - i) for i in (1, 2, 3)]
    seen = {}
    records, _ = serve_all(good(0.005), wanted, on_record=seen.__setitem__)
    assert [r.num_prompt_tokens for r in records] == [1, 2, 3]
    assert [r.num_output_tokens for r in records] == [4, 3, 2]
    assert seen == dict(enumerate(records))


def test_open_loop_sends_on_time_and_not_before():
    timed = [BenchRequest([1], None, 1, arrival=i * 0.05) for i in range(4)]
    lag = serve.ClientLag()
    records, server = serve_all(good(0.1), timed, lag=lag)
    assert [r.scheduled_time for r in records] == [r.arrival for r in timed]
    assert all(r.start_time >= r.scheduled_time for r in records)
    assert server.most_open >= 2
    assert len(lag.late) == 3
    assert min(lag.late) >= 0
    assert lag.beats
    assert lag.cpu > 0


def test_closed_loop():
    records, server = serve_all(good(0.005), requests(12), max_concurrency=3)
    assert server.most_open == 3
    assert all(r.error is None for r in records)


def test_failures_do_not_stop_the_others():
    async def mixed(body):
        parts = good()(body) if len(body["prompt"]) > 1 else fixed(HEADERS, token("a"))(body)
        async for part in parts:
            yield part

    wanted = [BenchRequest([1] * n, None, 2) for n in (1, 2, 1, 3)]
    records, _ = serve_all(mixed, wanted)
    assert [r.error is None for r in records] == [False, True, False, True]


# The client's lag


def test_a_client_that_keeps_up():
    lag = serve.ClientLag([0.001] * 10, [0.0005] * 100, cpu=0.2)
    summary = lag.summary(2.0, 10.0)
    assert summary["client_lag_p99_ms"] == pytest.approx(1.0)
    assert summary["client_cpu_perc"] == pytest.approx(10)
    assert not summary["client_bottleneck"]


@pytest.mark.parametrize(
    ("lag", "expected"),
    [
        (serve.ClientLag([], [0.02] * 100), True),
        (serve.ClientLag([0.02] * 10, []), True),
        (serve.ClientLag([], [], cpu=1.9), True),
        (serve.ClientLag([], [0.02] + [0.0] * 999), False),  # one hiccup in a thousand
        (serve.ClientLag(), False),
    ],
)
def test_bottleneck(lag, expected):
    assert lag.summary(2.0, 50.0)["client_bottleneck"] is expected


def test_lag_is_compared_with_the_time_between_tokens():
    lag = serve.ClientLag([], [0.02] * 100)
    assert lag.summary(2.0, 100.0)["client_bottleneck"]
    assert not lag.summary(2.0, 1000.0)["client_bottleneck"]
    assert lag.summary(2.0, math.nan)["client_bottleneck"]


def test_a_blocked_loop_is_seen():
    async def scenario():
        lag = serve.ClientLag()
        async with lag.watch():
            await asyncio.sleep(0.03)
            time.sleep(0.1)
            await asyncio.sleep(0.03)
        return lag

    lag = asyncio.run(scenario())
    assert max(lag.beats) > 0.05


# run


def test_run_prints_and_saves(tmp_path, capsys):
    with fake_server(good()) as server:
        args = parse(
            *("--base-url", server.url, *workload(tmp_path), "--ignore-eos"),
            *("--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,99.9"),
            *("--goodput", "ttft:60000", "--save-detailed", "--result-dir", tmp_path / "out"),
            *("--result-filename", "result.json", "--api-key", "secret", "--num-warmups", 2),
            *("--top-k", 5, "--temperature", 0.5),
        )
        result = serve.run(args)
    text = (tmp_path / "out" / "result.json").read_text()
    assert "secret" not in text
    saved = json.loads(text)
    assert saved == json.loads(json.dumps(result).replace("NaN", "null"))
    assert saved["completed"] == saved["num_prompts"] == 4
    assert saved["request_goodput"] == saved["request_throughput"] > 0
    assert saved["total_output_tokens"] == 2 + 3 + 4 + 5
    assert saved["cached_tokens"] == 4
    assert (saved["model_id"], saved["request_rate"]) == ("fake", "inf")
    assert saved["interrupted"] is False
    assert saved["output_lens"] == [2, 3, 4, 5]
    assert [len(itls) for itls in saved["itls"]] == [1, 2, 3, 4]
    assert saved["errors"] == [None] * 4
    assert saved["generated_texts"][0] == "t0 t1 "
    out = capsys.readouterr().out
    assert "P99.9 E2EL (ms):" in out
    assert "TPOT" not in out
    assert "Saved in" in out
    # A check of one token, two warm-ups that are no prefix of the requests, then the requests.
    check, *_ = server.bodies
    assert (check["prompt"], check["max_tokens"]) == ([1], 1)
    assert len(server.bodies) == 7
    assert all(
        (b["temperature"], b["top_k"], b["ignore_eos"]) == (0.5, 5, True) for b in server.bodies
    )
    assert "top_p" not in check


def test_warmups_share_no_prefix():
    warm = serve._warmup(BenchRequest([1, 2, 3], "abc", 7))
    assert (warm.prompt_token_ids, warm.prompt, warm.max_tokens) == ([3, 2, 1], "cba", 7)


def test_names_of_files():
    result = {"backend": "vllm", "request_rate": 2.0, "max_concurrency": 8, "model_id": "org/toy"}
    assert serve._filename(result).startswith("vllm-2.0qps-concurrency8-toy-2")


METRICS = """\
# HELP octavo:kv_cache_usage_perc Share of the KV cache in use; 1 is all of it.
# TYPE octavo:kv_cache_usage_perc gauge
octavo:kv_cache_usage_perc{{model_name="a"}} {usage}
# TYPE octavo:prefix_cache_queries_total counter
octavo:prefix_cache_queries_total{{model_name="a"}} {queries}
octavo:prefix_cache_hits_total{{model_name="a"}} {hits}
octavo:num_preemptions_total{{model_name="a"}} {preemptions}
"""
SPECULATION = """\
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {tokens}
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
"""


def figures(before, after):
    async def scenario(url):
        server = serve.ServerFigures(url)
        await server.begin()
        await server.end()
        return server.summary()

    with fake_server(good()) as fake:
        fake.metrics = [before, after]
        return asyncio.run(scenario(fake.url))


def test_figures_of_the_server():
    before = METRICS.format(usage=0.5, queries=100, hits=90, preemptions=1)
    after = METRICS.format(usage=0.25, queries=300, hits=140, preemptions=3)
    assert figures(before, after) == {
        "kv_cache_usage_max_perc": 50.0,
        "prefix_cache_hit_rate_perc": 25.0,
        "num_preemptions": 2,
    }


def test_speculation():
    before = SPECULATION.format(drafts=10, tokens=30, accepted=5)
    after = SPECULATION.format(drafts=20, tokens=60, accepted=20)
    assert figures(before, after) == {
        "spec_decode_acceptance_rate_perc": 50.0,
        "spec_decode_acceptance_length": 2.5,
    }


@pytest.mark.parametrize("text", ["", "octavo:kv_cache_usage_perc{oops\n", "<html>"])
def test_a_page_without_figures(text):
    assert figures(text, text) == {}


def test_no_page_at_all():
    async def scenario(url):
        server = serve.ServerFigures(url)
        await server.begin()
        await server.end()
        return server.summary()

    with fake_server(good()) as fake:
        assert asyncio.run(scenario(fake.url)) == {}


def test_requests_that_cannot_fit_are_left_out_and_said(tmp_path, capsys):
    path = tmp_path / "long.jsonl"
    rows = [{"prompt_token_ids": [1] * n, "max_tokens": 4} for n in (60, 61, 5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    with fake_server(good()) as server:
        flags = ("--base-url", server.url, "--dataset-name", "workload", "--dataset-path", path)
        result = serve.run(parse(*flags))
    assert result["num_prompts"] == result["completed"] == 2
    assert "Left out 1 of 3 requests" in capsys.readouterr().out


def test_text_for_chats(tmp_path):
    save(byte_level(), tmp_path)

    async def chat(body):
        delta = {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}
        yield HEADERS + b"%x\r\n" % (len(json.dumps(delta)) + 8)
        yield b"data: " + json.dumps(delta).encode() + b"\n\n\r\n0\r\n\r\n"

    with fake_server(chat) as server:
        flags = ("--base-url", server.url, "--backend", "openai-chat", "--tokenizer", tmp_path)
        serve.run(parse(*flags, "--num-prompts", 2, "--input-len", 8, "--output-len", 1))
    assert all(len(b["messages"][0]["content"]) >= 1 for b in server.bodies)
    assert all("prompt" not in b for b in server.bodies)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--request-rate", 0), "--request-rate 0.0"),
        (("--request-rate", "nan"), "--request-rate nan"),
        (("--burstiness", -1), "--burstiness -1.0"),
        (("--max-concurrency", 0), "--max-concurrency 0"),
        (("--num-warmups", -1), "--num-warmups -1"),
        (("--goodput", "speed:3"), "--goodput 'speed:3'"),
        (("--percentile-metrics", "ttft,latency"), "--percentile-metrics 'latency'"),
        (("--metric-percentiles", "50,x"), "--metric-percentiles '50,x'"),
        (("--metric-percentiles", "101"), "--metric-percentiles '101'"),
    ],
)
def test_wrong_flags_are_told_before_a_server_is_asked(flags, message):
    with pytest.raises(ConfigError, match=message):
        serve.run(parse("--port", 1, *flags))


@pytest.mark.parametrize("flags", [("--save-result", "--result-dir"), ("--plot",)])
def test_a_result_that_cannot_be_written_is_told_before_a_server_is_asked(flags, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BenchError, match=r"cannot be written to .*: Not a directory"):
        serve.run(parse("--port", 1, *flags, tmp_path / "file" / "a.png"))


def test_an_address_as_openais_clients_have_it(tmp_path):
    with fake_server(good()) as server:
        result = serve.run(parse("--base-url", f"{server.url}/v1/", *workload(tmp_path)))
    assert (result["base_url"], result["completed"]) == (server.url, 4)


def test_no_server(tmp_path):
    with pytest.raises(
        BenchError, match=r"No answer from http://127.0.0.1:1/v1/models: .*octavo serve"
    ):
        serve.run(parse("--port", 1, *workload(tmp_path)))


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (plain(b"<html>"), "status 200 and b'<html>': not OpenAI's list"),
        (plain({"data": []}), "not OpenAI's list"),
        (plain({"data": [{"name": "a"}]}), "not OpenAI's list"),
        (plain(b"", "500 Oops"), "status 500"),
        (plain(b"", "401 No"), "rejects the API key"),
        (b"what?", "No answer from"),
    ],
)
def test_a_server_that_is_something_else(models, message, tmp_path):
    with fake_server(good()) as server:
        server.models = models
        with pytest.raises(BenchError, match=message):
            serve.run(parse("--base-url", server.url, *workload(tmp_path)))


@pytest.mark.parametrize(
    ("script", "seconds", "message"),
    [
        (fixed(), 60, "closed the connection"),
        (
            fixed(plain({"error": {"message": "no model"}}, "404 Not Found")),
            60,
            "HTTP 404: no model",
        ),
        (silent, 0.1, "No answer within 0.1 s"),
    ],
)
def test_a_server_that_answers_no_request(script, seconds, message, tmp_path):
    with fake_server(script) as server:
        flags = ("--base-url", server.url, "--ready-check-timeout-sec", seconds, "--save-result")
        with pytest.raises(BenchError, match=f"first, short request. .*{message}"):
            serve.run(parse(*flags, "--result-dir", tmp_path / "out", *workload(tmp_path)))
    assert not (tmp_path / "out").exists()


def test_no_request_succeeds(tmp_path):
    async def only_the_check(body):
        async for part in good()(body) if len(body["prompt"]) == 1 else fixed()(body):
            yield part

    with fake_server(only_the_check) as server, pytest.raises(BenchError, match="None of the 4"):
        serve.run(parse("--base-url", server.url, *workload(tmp_path)))


def test_plot(tmp_path, capsys):
    path = tmp_path / "picture.svg"
    with fake_server(good()) as server:
        flags = ("--base-url", server.url, *workload(tmp_path))
        with pytest.raises(BenchError, match=r"--plot picture.gif: must end in"):
            serve.run(parse(*flags, "--plot", "picture.gif"))
        assert server.bodies == []
        result = serve.run(parse(*flags, "--plot", path))
    assert len(result["ttfts"]) == 4
    assert path.read_text().startswith("<?xml")
    assert f"Plot saved in {path}" in capsys.readouterr().out


def test_some_fail(tmp_path, capsys):
    async def mixed(body):
        async for part in good()(body) if body["max_tokens"] != 3 else fixed(HEADERS)(body):
            yield part

    with fake_server(mixed) as server:
        result = serve.run(parse("--base-url", server.url, *workload(tmp_path)))
    assert (result["completed"], result["failed"]) == (3, 1)
    assert "1 request failed. The first error: The server closed" in capsys.readouterr().out


def test_answers_that_are_too_short_are_said(tmp_path):
    async def short(body):
        async for part in good()(body | {"max_tokens": min(body["max_tokens"], 2)}):
            yield part

    with fake_server(short) as server:
        result = serve.benchmark(
            parse("--base-url", server.url, "--ignore-eos", *workload(tmp_path))
        )
    assert any("3 answers came out shorter than requested" in note for note in result["notes"])


def test_a_model_without_a_tokenizer():
    with fake_server(good()) as server, pytest.raises(ConfigError, match="--tokenizer"):
        serve.run(parse("--base-url", server.url, "--model", "./nowhere"))


def test_a_server_without_a_list_of_models(tmp_path):
    with fake_server(good()) as server:
        server.models = plain(b"", "404 Not Found")
        result = serve.benchmark(
            parse("--base-url", server.url, "--model", "x", *workload(tmp_path))
        )
    assert result["model_id"] == "x"
    assert {b["model"] for b in server.bodies} == {"x"}


def test_ctrl_c_saves_what_there_is(tmp_path):
    code = (
        "import argparse, sys\nfrom octavo.bench import serve\n"
        "parser = argparse.ArgumentParser()\nserve.add_arguments(parser)\n"
        "result = serve.run(parser.parse_args())\nsys.exit(130 if result['interrupted'] else 0)\n"
    )
    rows = [{"prompt_token_ids": [1, 2], "max_tokens": n} for n in (1, 1, 50, 50)]
    path = tmp_path / "w.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))

    async def slow_if_long(body):
        async for part in good(0.0 if body["max_tokens"] == 1 else 1.0)(body):
            yield part

    with fake_server(slow_if_long) as server:
        flags = ["--base-url", server.url, "--dataset-name", "workload", "--dataset-path", path]
        flags += ["--save-result", "--result-dir", tmp_path, "--result-filename", "r.json"]
        flags += ["--max-concurrency", "2"]  # the long ones begin after the end of the short ones
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, flags)], stdout=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 60
        while len(server.bodies) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=100)
    assert process.returncode == 130
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["interrupted"] is True
    assert (saved["completed"], saved["failed"], saved["num_prompts"]) == (2, 0, 4)
    assert "Interrupted: the figures cover 2 of 4 requests" in out


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_our_own_server(backend, tmp_path):
    """The real server, with an engine that invents tokens."""
    command = [sys.executable, "-m", "tests.server.fake_serve", "ready"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stderr.readline, "")
        url = next(line.split()[-1] for line in lines if "listening on" in line)
        save(make_tokenizer(), tmp_path)
        args = parse(
            *("--base-url", url, "--backend", backend, "--tokenizer", tmp_path, "--ignore-eos"),
            *("--num-prompts", 20, "--input-len", 12, "--output-len", 16, "--request-rate", 200),
        )
        result = serve.benchmark(args)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=100)
    assert (result["completed"], result["failed"]) == (20, 0)
    assert result["total_output_tokens"] == 320
    assert result["num_preemptions"] == 0
    if backend == "openai":
        assert result["total_input_tokens"] == 240
