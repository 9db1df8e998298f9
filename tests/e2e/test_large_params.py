"""Parameters as large as a body allows: rejected, or served without delays for others."""

import concurrent.futures

import psutil
import pytest

from tests.e2e import harness
from tests.e2e.harness import serve

MIB = 2**20
SMALL = {"model": "octavo/stories", "prompt": "The", "max_tokens": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ["--max-model-len", "512", "--kv-cache-memory-bytes", "24M"]
    with serve(tmp_path_factory.mktemp("params"), *flags) as server:
        yield server


def ask(server, **fields):
    response = server.post("/v1/completions", {**SMALL, **fields})
    return response.status_code, response.json()


HARMLESS = {
    "the same token often": {"allowed_token_ids": [5] * 200_000, "n": 64},
    "every token": {"allowed_token_ids": list(range(4096)) * 100, "n": 256},
    "stop texts": {"stop": ["x" * 200] * 64, "n": 256},
    "bad words": {"bad_words": [f"{i} is bad" for i in range(512)], "n": 64},
}
REFUSED = {
    "tokens": ("allowed_token_ids", [5] * 2_600_000),
    "a stop text": ("stop", ["x" * 7_000_000]),
    "stop texts": ("stop", ["x"] * 1_000_000),
    "a bad word": ("bad_words", ["x" * 7_000_000]),
    "bad words": ("bad_words", ["x"] * 1_000_000),
    "stop tokens": ("stop_token_ids", [5] * 2_600_000),
    "a bias": ("logit_bias", {str(i): 1 for i in range(300_000)}),
    "a salt": ("cache_salt", "x" * 7_000_000),
    "an argument of a plug-in": ("vllm_xargs", {"a": "x" * 7_000_000}),
    "arguments of plug-ins": ("vllm_xargs", {"a": [5] * 400_000}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_too_large_is_refused(server, name):
    param, value = REFUSED[name]
    status, answer = ask(server, **{param: value}, n=256)
    assert status == 400
    error = answer["error"]
    # Parameters too large for any body are not even parsed.
    assert error["code"] == "too_many_values" or error["param"].startswith(param)
    assert len(answer["error"]["message"]) < 1000
    assert ask(server)[0] == 200


def cpu_seconds(server):
    """Return the processor's time of the server and its engine."""
    front = psutil.Process(server.process.pid)
    times = [process.cpu_times() for process in (front, server.engine_process())]
    return sum(time.user + time.system for time in times)


def test_large_parameters_hold_up_nobody(server):
    """Small requests are answered repeatedly while each large one is served.

    The wait is measured in the server's own work, which another process does not make longer.
    """
    ask(server)
    before = server.resident_bytes()
    for fields in HARMLESS.values():
        waits = []
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            large = pool.submit(ask, server, **fields)
            while not large.done():
                started = cpu_seconds(server)
                assert ask(server)[0] == 200
                waits.append(cpu_seconds(server) - started)
        assert large.result()[0] == 200
        # A faulty version took 16 s, and minutes, for one of them.
        assert max(waits) < 5
    assert server.resident_bytes() - before < 200 * MIB
    harness.wait_until(lambda: not server.metric("octavo:num_requests_running"))
