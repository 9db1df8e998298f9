"""Servers with an external load balancer: each has its engines and their numbers."""

import signal
from functools import partial

from tests.e2e import harness

FLAGS = ["--max-model-len", "256", "--kv-cache-memory-bytes", "8M", "--num-threads", "1"]
BODY = {"prompt": "The dog", "max_tokens": 8, "temperature": 0}


def engines_shown(server, name):
    lines = server.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f"{name}{{")]
    return [line.split('engine="')[1].split('"')[0] for line in found]


def test_external(tmp_path):
    size = ["--data-parallel-size", "8", "--data-parallel-address", "head"]
    with harness.serve(tmp_path, *size, "-dpn", "5", "-dpe", *FLAGS) as server:
        assert server.post("/v1/completions", BODY).status_code == 200
        assert engines_shown(server, "octavo:num_requests_running") == ["5"]
        reasons, deaths = set(), 0

        def look():
            reason = server.get("/health").json()["reason"]
            reasons.update({reason} - {"ok"})
            return reason == "ok" and server.metric("octavo:engine_restarts_total") == deaths

        while not reasons:  # it may start between two looks
            deaths += 1
            assert deaths < 20
            server.engine_process().send_signal(signal.SIGKILL)
            harness.wait_until(look, server.log.read_text)
        assert reasons == {"starting engine 5 again"}
        lines = server.log.read_text().splitlines()
        assert all("engine=5" in line for line in lines if "model loaded" in line)
        assert any("engine=5" in line for line in lines if "another one was ready" in line)


def test_hybrid(tmp_path):
    flags = ["-dp", "4", "-dph", "-dpl", "2", "-dpr", "2", *FLAGS]
    with harness.serve(tmp_path, *flags) as server:
        assert server.post("/v1/completions", BODY).status_code == 200
        shown = partial(engines_shown, server, "octavo:num_requests_running")
        harness.wait_until(lambda: sorted(shown()) == ["2", "3"], shown)
        lines = [line for line in server.log.read_text().splitlines() if "model loaded" in line]
        assert sorted(line.split("engine=")[1][0] for line in lines) == ["2", "3"]
