"""The executor: what the engine core knows of the machines that compute."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from concurrent.futures import Future

from octavo.config import EngineConfig
from octavo.kv_cache.groups import KVCacheConfig
from octavo.messages import ModelRunnerOutput, SchedulerOutput
from octavo.worker.memory import DeviceMemory, Scratch
from octavo.worker.setup import WorkerSetup


class Executor(ABC):
    """Runs steps in the order in which they are handed in.

    A step is two calls, so that grammar bitmasks can be made while the model computes:
    `execute_model` (forward pass) and `sample_tokens`. Both return at once with a future.
    """

    @abstractmethod
    def __init__(self, setup: WorkerSetup) -> None:
        """Starts the workers and loads the weights."""

    @staticmethod
    @abstractmethod
    def measure_scratch(setup: WorkerSetup) -> Scratch:
        """What steps on a CPU will take, before anything is loaded: exactly what will be reserved.

        Raises:
            ConfigError: if the attention backend cannot do the model's heads or the block size, or
                the environment asks for an instruction set that is not there.
        """

    @abstractmethod
    def measure_memory(self) -> DeviceMemory:
        """What the loaded model leaves for the KV cache, by a step of the largest size.

        On a CPU nothing is measured: the plan holds without it.
        """

    @abstractmethod
    def initialize_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        """Allocates the KV cache; afterwards steps can be run."""

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        """Starts a step's forward pass."""

    @abstractmethod
    def sample_tokens(self) -> Future[ModelRunnerOutput]:
        """Samples the tokens of the last step handed to `execute_model`."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers and frees their memory. May be called twice."""


def get_executor_class(config: EngineConfig) -> type[Executor]:
    """The executor for a config. Imports torch."""
    # The import makes some 200,000 objects that stay: looking through them again and again for
    # garbage would take a tenth of its time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        from octavo.executor.uniproc import UniProcExecutor
    finally:
        if collecting:
            gc.enable()
    return UniProcExecutor
