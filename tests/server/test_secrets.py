"""Keys and tokens, which are never in a log, an answer, or the arguments of a process."""

import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server.test_run import ROOT, Process

SECRETS = {
    "OCTAVO_API_KEY": "sk-from-octavo-variable",
    "VLLM_API_KEY": "sk-from-vllm-variable",
    "HF_TOKEN": "hf_from-variable",
}
FLAGS = ["sk-from-flag-one", "sk-from-flag-two"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_logs_and_answers_hold_no_secret(monkeypatch, log_format):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    flags = ["--api-key", *FLAGS, "--log-level", "debug", "--log-format", log_format]
    server = Process("ready", *flags, "--enable-log-requests")
    answers = []
    try:
        assert server.listening.wait(100), server.lines
        keys = [*FLAGS, SECRETS["OCTAVO_API_KEY"], SECRETS["VLLM_API_KEY"]]
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for key in [*keys, "sk-wrong"]:
                headers = {"Authorization": f"Bearer {key}"}
                for path in ("/v1/models", "/", "/metrics", "/nothing", "/v1/models/x"):
                    answers.append(client.get(path, headers=headers))
                    assert (answers[-1].status_code == 401) == (
                        key == "sk-wrong" and path != "/metrics"
                    )
                for body in ({"prompt": "hi"}, {"prompt": 5}, {"prompt": "hi", "n": 0}):
                    answers.append(client.post("/v1/completions", json=body, headers=headers))
            answers.append(client.get("/v1/models", headers={"Authorization": keys[0]}))
        children = psutil.Process(server.process.pid).children(recursive=True)
        arguments = [" ".join(child.cmdline()) for child in children]
    finally:
        server.process.terminate()
        assert server.wait() == 0
        server.process.stderr.close()
    said = "\n".join([*server.lines, *(a.text + str(a.headers) for a in answers), *arguments])
    # The log does state the sources of the keys.
    assert "--api-key, OCTAVO_API_KEY, VLLM_API_KEY" in said
    for secret in [*FLAGS, *SECRETS.values()]:
        assert secret not in said


@pytest.mark.parametrize(
    "flags",
    [
        ["--api-key", '["sk-secret", 5]'],
        ["--api-key", "[sk-secret]"],
        ["--api-key", "sk-secret", " "],
        ["--api-key", "sk-secret", "--port", "70000"],
        ["--api-key=sk-secret", "--host", "no-such-host.invalid"],
    ],
)
def test_errors_at_the_start_hold_no_secret(flags):
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", *flags],
        cwd=Path(ROOT),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "octavo: error:" in done.stderr
    assert "sk-secret" not in done.stderr + done.stdout
