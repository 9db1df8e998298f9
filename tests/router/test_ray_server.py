"""Router with its own servers, run by actors on a Ray cluster that it starts."""

import secrets
import tempfile

import psutil
import pytest

from tests.e2e import harness
from tests.e2e.test_router import PROMPTS, SIZE, answers, num_remote, wait_for_servers

ray = pytest.importorskip("ray", reason="Ray is not installed (pip install ray)")


def servers(key):
    """Return the processes of servers that have a key, of any parent."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "serve" in words and str(key) in words:
            config = words[words.index("--kv-transfer-config") + 1]
            found["decode" if "kv_consumer" in config else "prefill"] = process
    return found


@pytest.fixture
def ray_folder(monkeypatch):
    """Return a folder without another cluster; names of sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="o-", dir="/tmp") as path:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setenv("RAY_TMPDIR", path)
        yield


@pytest.mark.usefixtures("ray_folder")
def test_prefill_and_decode_in_actors(tmp_path):
    (key := tmp_path / "key").write_text(secrets.token_hex(32))
    key.chmod(0o600)
    flags = [*SIZE, "--prefill", "1", "--decode", "1", "--backend", "ray", "--no-warm-spare"]
    flags += ["--cluster-key-file", str(key), "--health-check-interval", "0.2"]
    flags += ["--failover-timeout", "240", "--health-check-timeout", "60"]
    with harness.serve(tmp_path, *flags, what="router") as router:
        wait_for_servers(router, 2)
        before = servers(key)
        assert len(before) == 2
        expected = answers(router.url, PROMPTS[:2])
        assert num_remote(router) == 2
        kill = before["decode"].kill
        assert answers(router.url, PROMPTS[:2], at=20, then=kill) == expected
        router.wait_for_metric("octavo:router_server_restarts_total", 1)
        wait_for_servers(router, 2)
        after = servers(key)
        assert after["prefill"] == before["prefill"]
        router.process.terminate()
        _, alive = psutil.wait_procs(after.values(), timeout=60)
        assert not alive
        assert router.process.wait(60) == 0
