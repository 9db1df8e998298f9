"""Engine here and one on a node that joins, is killed and joins again."""

import asyncio
import contextlib
import signal
import subprocess
import sys

import psutil
import pytest

from tests.e2e import harness
from tests.e2e.test_data_parallel import ask_all, expected, of_engines

__all__ = ["expected"]  # a fixture

FLAGS = ["--max-model-len", "256", "--kv-cache-memory-bytes", "8M", "--num-threads", "1"]


class Cluster:
    """Common settings of a cluster's machines: a head and nodes, each with `local` engines."""

    def __init__(self, folder, size=2, local=1, settings=FLAGS, model=""):
        self.folder = folder
        self.key = self.make_key("key", "k" * 40)
        self.port = harness.free_port(2)  # one for experts, too
        self.logs = []
        self.size, self.local, self.settings, self.model = size, local, settings, model

    def make_key(self, name, text):
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o600)
        return path

    def flags(self, key=None):
        return [
            *("-dp", str(self.size), "--data-parallel-size-local", str(self.local)),
            *self.settings,
            *("--data-parallel-address", "127.0.0.1"),
            *("--data-parallel-rpc-port", str(self.port)),
            *("--cluster-key-file", str(key or self.key)),
        ]

    @contextlib.contextmanager
    def node(self, *flags, key=None):
        """Start a node's process; yield it and its log."""
        command = [sys.executable, "-m", "octavo", "serve", *([self.model] if self.model else [])]
        command += ["--headless", "--data-parallel-start-rank", str(self.local)]
        command += [*self.flags(key), *flags]
        log = self.folder / f"node-{len(self.logs)}.log"
        self.logs.append(log)
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield process, log
        finally:
            process.kill()
            process.wait()


async def until(condition, log):
    for _ in range(2400):
        if condition():
            return
        await asyncio.sleep(0.05)
    pytest.fail(log.read_text())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    return Cluster(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def server(cluster):
    # The node starts before its head, and waits for it.
    with (
        cluster.node() as (node, _),
        harness.serve(cluster.folder, *cluster.flags(), spare=True) as made,
    ):
        made.node = node
        yield made


def test_the_answers_are_those_of_one_engine(server, expected):
    assert asyncio.run(ask_all(server)) == expected
    counts = of_engines(server, "octavo:generation_tokens_total")
    assert min(counts) > 0


def test_a_node_without_the_key_or_for_a_taken_engine_is_turned_away(cluster, server):
    other = cluster.make_key("other", "j" * 40)
    with cluster.node(key=other) as (node, log):
        asyncio.run(until(lambda: "without the cluster's key" in server.log.read_text(), log))
        assert node.wait(120) == 1
        assert "rejects this node: the cluster_key_file must be the same" in log.read_text()
    with cluster.node() as (node, log):
        assert node.wait(120) == 2
        assert "rejects this node: engine 1 is another node's already" in log.read_text()


def test_an_engine_and_then_its_node_are_killed_and_come_back(cluster, server, expected):
    def reason():
        return server.get("/health").json()["reason"]

    def storm(kill, at):
        chunks = 0

        def on_chunk():
            nonlocal chunks
            chunks += 1
            if chunks == at:
                kill()

        assert asyncio.run(ask_all(server, on_chunk)) == expected
        assert chunks > at

    [engine] = [
        c
        for c in psutil.Process(server.node.pid).children()
        if c.cmdline()[-1] == "octavo.engine.core_process"
    ]
    # Early, but perhaps noticed late: an engine may have finished before the client has read it.
    storm(lambda: engine.send_signal(signal.SIGKILL), 40)
    asyncio.run(until(lambda: "was killed by SIGKILL" in server.log.read_text(), server.log))
    asyncio.run(until(lambda: reason() == "ok", server.log))
    storm(server.node.kill, 40)
    asyncio.run(until(lambda: reason() != "ok", server.log))
    with cluster.node() as (node, log):
        asyncio.run(until(lambda: reason() == "ok", log))
        assert asyncio.run(ask_all(server)) == expected
        family = psutil.Process(node.pid).children(recursive=True)
        node.send_signal(signal.SIGTERM)
        assert node.wait(60) == 0
        _, left = psutil.wait_procs(family, timeout=60)
        assert left == []
    asyncio.run(until(lambda: "was stopped" in server.log.read_text(), server.log))
    assert asyncio.run(ask_all(server)) == expected


def test_a_node_goes_home_with_its_head(cluster, server):
    """The last test of this file: it ends the server."""
    with cluster.node() as (node, log):
        asyncio.run(until(lambda: "has welcomed" in log.read_text(), log))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert node.wait(60) == 0
