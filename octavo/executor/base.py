"""Executor interface: the engine core's view of the workers."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from octavo.errors import UnsupportedError
from octavo.kv_cache.groups import KVCacheConfig
from octavo.messages import (
    AdapterLoaded,
    GrammarOutput,
    KVConnectorOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from octavo.plan.memory import MemoryBudget

T = TypeVar("T")


class StepHandle(Protocol):
    """Step that an executor has accepted."""

    def drafts(self) -> dict[str, list[int]]:
        """Return the drafts of the step's requests; wait until the step begins.

        Raises:
            Exception: the step failed before; this is the cause.
        """
        ...

    def sample(self, grammar: GrammarOutput | None = None) -> Future[ModelRunnerOutput]:
        """Sample the step's tokens. Call this once for each step, in order.

        The future contains the step's result, or the exception of its forward pass or sampling.

        Args:
            grammar: tokens allowed for requests with a grammar; made while the model computes.
        """
        ...


class Wave(Protocol):
    """Steps that this engine must take part in, since other engines need its experts.

    A step without requests takes part without tokens.
    """

    @property
    def wanted(self) -> bool:
        """True if others wait for this engine."""
        ...

    def watch(self, wake: Callable[[], object]) -> None:
        """Call `wake`, on a thread, when others want this engine after a call of `sleep`."""
        ...

    def sleep(self) -> None:
        """Note that this engine has nothing to do, and must be woken."""
        ...


class Executor(ABC):
    """Interface that runs steps in the order of submission."""

    max_in_flight: int
    """Number of steps that may be submitted before the first one has a result."""

    @abstractmethod
    def measure_memory(self) -> MemoryBudget:
        """Measure the memory left for the KV cache by a step of the largest size.

        Only for platforms that cannot predict it.
        """

    @abstractmethod
    def initialize_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        """Allocate the KV cache; afterwards steps can run."""

    @abstractmethod
    def execute(self, work: SchedulerOutput) -> StepHandle:
        """Start a step's forward pass, and return at once."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., T],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[T]:
        """Call a method of each worker between two steps; return the results.

        Args:
            method: name of the method; or a function, with the worker as its first argument.
            timeout: seconds to wait; None: no limit.
            args: positional arguments of the method.
            kwargs: keyword arguments of the method.

        Raises:
            TimeoutError: the calls exceeded `timeout`.
            UnsupportedError: workers have no such method, or an argument or result cannot be
                transferred between processes.
        """

    @property
    def wave(self) -> Wave | None:
        """Steps of the engines that divide the experts with this one; None: there are none."""
        return None

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by rank; empty if they run in this process."""
        return []

    def register_failure_callback(self, callback: Callable[[Exception], object]) -> None:
        """Register a callback for workers that die or stop while idle; any thread may call it.

        Workers in this process never do.
        """
        return

    def register_transfer_callback(self, callback: Callable[[KVConnectorOutput], object]) -> None:
        """Register a callback for results of the workers' KV connectors; any thread may call it.

        Raises:
            UnsupportedError: this executor's workers have no KV connectors.
        """
        raise UnsupportedError(
            f"{type(self).__name__} does not support kv_transfer_config; use "
            "distributed_executor_backend=uni or mp.",
            "kv_transfer_config",
        )

    def register_adapter_callback(self, callback: Callable[[AdapterLoaded], object]) -> None:
        """Register a callback for adapters that a worker has read; any thread may call it.

        Raises:
            UnsupportedError: this executor's workers have no adapters.
        """
        raise UnsupportedError(
            f"{type(self).__name__} does not support enable_lora; use "
            "distributed_executor_backend=uni or mp.",
            "enable_lora",
        )

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers and free their memory. May be called twice."""


def find_method(worker: object, name: str) -> Callable[..., Any]:
    """Return a worker's method by its name.

    Raises:
        UnsupportedError: the worker has no public method of this name.
    """
    found = None if name.startswith("_") else getattr(worker, name, None)
    if not callable(found):
        raise UnsupportedError(f"Workers have no method {name!r}.")
    method: Callable[..., Any] = found
    return method


def import_class(path: str) -> Any:
    """Import a name given as module.name."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
