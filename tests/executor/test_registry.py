"""Executor that a config means."""

import sys

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.executor.multiproc import MultiprocExecutor
from octavo.executor.registry import get_executor_class
from octavo.executor.uniproc import UniProcExecutor
from tests.fakes import FakeExecutor


def find(backend):
    return get_executor_class(EngineConfig.from_kwargs(distributed_executor_backend=backend))


def test_known_ones_and_one_s_own():
    assert find(None) is find("uni") is UniProcExecutor
    assert find("mp") is MultiprocExecutor
    assert find("tests.fakes.FakeExecutor") is FakeExecutor
    config = EngineConfig.from_kwargs(distributed_executor_backend="mp")
    assert (config.world_size, config.num_worker_processes) == (1, 1)
    assert EngineConfig().num_worker_processes == 0


@pytest.mark.parametrize(
    "backend", ["no.such_module", "tests.fakes.NoSuch", "tests.fakes.FakeWorker", "os.getpid"]
)
def test_what_is_no_executor_is_refused(backend):
    with pytest.raises(ConfigError, match=f"distributed_executor_backend='{backend}'"):
        find(backend)


def test_processes_are_linux_s(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    for backend in ("mp", "ray"):
        with pytest.raises(ConfigError, match=f"={backend} works on Linux only"):
            find(backend)
