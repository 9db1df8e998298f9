"""Engines here and on a node, which divide the experts of a model: the answers of one process.

The tests are in order: each begins with the engines that the one before has left.
"""

import signal
import time

import psutil
import pytest

from tests.e2e import harness
from tests.e2e.test_elastic_experts import Load, ask, expected, model
from tests.e2e.test_nodes import Cluster

__all__ = ["expected", "model"]  # fixtures

FLAGS = ["--enable-expert-parallel", "--max-model-len", "256"]
FLAGS += ["--kv-cache-memory-bytes", "4M", "--num-threads", "1"]


def engines(process):
    """Return the engine processes of a machine, the oldest first."""
    children = psutil.Process(process.pid).children()
    found = [c for c in children if "octavo.engine.core_process" in c.cmdline()]
    return sorted(found, key=psutil.Process.create_time)


def wait_for(server, reason):
    end = time.monotonic() + 60
    while server.get("/health").json()["reason"] != reason:
        assert time.monotonic() < end, server.log.read_text()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    return Cluster(tmp_path_factory.mktemp("cluster"), 2, 1, FLAGS, model)


@pytest.fixture(scope="module")
def server(cluster):
    with (
        cluster.node() as (node, log),
        harness.serve(cluster.folder, *cluster.flags(), model=cluster.model) as made,
    ):
        made.node, made.node_log = node, log
        yield made


def test_the_answers_are_those_of_one_process(server, expected):
    with Load(server, expected) as load:
        while load.num_answers < 2 * len(expected):
            time.sleep(0.01)
    assert ask(server, 0) == expected[0]
