"""Heaviest legal load against the memory plan of both processes, and loads beyond it."""

import concurrent.futures
import re
import time

import pytest

from octavo.system import device
from tests.e2e.harness import serve, wait_until

MIB = 2**20
BUDGET = 48 * MIB
# Each entry a number and a logprob for 20 tokens, for every token of prompt and answers.
HEAVY = {
    "model": "octavo/stories",
    "prompt": list(range(100, 1900)),
    "n": 32,
    "max_tokens": 40,
    "logprobs": 20,
    "prompt_logprobs": 20,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ["--kv-cache-memory-bytes", "64M", "--request-memory-bytes", str(BUDGET)]
    flags += ["--max-num-seqs", "64"]
    with serve(tmp_path_factory.mktemp("memory"), *flags, spare=True) as server:
        yield server


@pytest.mark.skipif(device.resident_memory() is None, reason="the system does not tell the size")
def test_both_processes_keep_to_the_plan(server):
    found = re.search(r"memory plan: ([\d,]+) MiB of", server.log.read_text())
    assert found is not None
    planned = int(found[1].replace(",", "")) * MIB
    assert "requests" in server.log.read_text()
    most, answered, refused = 0, 0, 0
    engine = server.engine_process()
    engine.suspend()  # so that no request ends before the others come
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(server.post, "/v1/completions", HEAVY) for _ in range(8)]
        try:
            wait_until(lambda: any(call.done() for call in calls), server.log.read_text)
        finally:
            engine.resume()
        while not all(call.done() for call in calls):
            most = max(most, server.resident_bytes())
            time.sleep(0.05)
    for call in calls:
        response = call.result()
        if response.status_code == 429:
            refused += 1
            assert int(response.headers["retry-after"]) >= 1
            assert "--request-memory-bytes" in response.json()["error"]["message"]
        else:
            assert response.status_code == 200
            answered += 1
            choices = response.json()["choices"]
            assert len(choices) == 32
            assert len(choices[5]["logprobs"]["top_logprobs"]) == 40
            assert len(choices[5]["prompt_logprobs"]) == 1800
    assert answered > 0
    assert refused > 0
    assert most <= planned


def test_what_could_never_fit_is_refused(server):
    response = server.post("/v1/completions", {**HEAVY, "n": 1000, "max_tokens": 148})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "max_tokens"
    assert error["code"] == "request_too_large"


def test_memory_is_given_back(server):
    small = {"model": "octavo/stories", "prompt": "The", "max_tokens": 2}
    assert server.post("/v1/completions", small).status_code == 200
    time.sleep(2)
    before = server.resident_bytes()
    streams = {**HEAVY, "prompt": "The", "prompt_logprobs": None, "max_tokens": 300, "n": 8}
    assert server.post("/v1/completions", streams).status_code == 200
    wait_until(lambda: server.resident_bytes() <= before + 40 * MIB)
