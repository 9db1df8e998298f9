"""The executor: what the engine core knows of the machines that compute."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from octavo.errors import UnsupportedError
from octavo.kv_cache.groups import KVCacheConfig
from octavo.messages import (
    GrammarOutput,
    KVConnectorOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from octavo.plan.memory import MemoryBudget

T = TypeVar("T")


class StepHandle(Protocol):
    """A step that an executor was given."""

    def drafts(self) -> dict[str, list[int]]:
        """The drafts of its requests; waits until the step begins.

        Raises:
            Exception: what made the step fail before.
        """
        ...

    def sample(self, grammar: GrammarOutput | None = None) -> Future[ModelRunnerOutput]:
        """Has the step's tokens sampled. To be called once for each step, in their order.

        The future has the step's result, or what made its forward pass or its sampling fail.

        Args:
            grammar: which tokens the step's requests with a grammar may get; made while the model
                computes.
        """
        ...


class Executor(ABC):
    """Runs steps in the order in which they are handed in."""

    max_in_flight: int
    """Steps that may be handed in before the first one's result is there."""

    @abstractmethod
    def measure_memory(self) -> MemoryBudget:
        """What the loaded model leaves for the KV cache, by a step of the largest size.

        For platforms that cannot tell it before.
        """

    @abstractmethod
    def initialize_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        """Allocates the KV cache; afterwards steps can be run."""

    @abstractmethod
    def execute(self, work: SchedulerOutput) -> StepHandle:
        """Starts a step's forward pass, and returns at once."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., T],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[T]:
        """Calls a method of each worker, between two steps; returns what each call returned.

        Args:
            method: its name; or a function, which gets the worker before the other arguments.
            timeout: seconds to wait; None: no limit.
            args: what the method gets.
            kwargs: likewise, by name.

        Raises:
            TimeoutError: it took longer than `timeout`.
            UnsupportedError: workers have no such method, or something cannot travel to them or
                back.
        """

    @property
    def pids(self) -> list[int]:
        """The workers' processes, where they have some of their own, by rank."""
        return []

    def register_failure_callback(self, callback: Callable[[Exception], object]) -> None:
        """Has somebody told, on any thread, if workers die or stop while nothing waits for them.

        Workers in this process do not.
        """
        return

    def register_transfer_callback(self, callback: Callable[[KVConnectorOutput], object]) -> None:
        """Has somebody told, on any thread, what each worker's half of a KV connector finishes.

        Raises:
            UnsupportedError: this executor's workers have none.
        """
        raise UnsupportedError(
            f"{type(self).__name__} does not support kv_transfer_config; use "
            "distributed_executor_backend=uni or mp.",
            "kv_transfer_config",
        )

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers and frees their memory. May be called twice."""


def find_method(worker: object, name: str) -> Callable[..., Any]:
    """A worker's method by its name.

    Raises:
        UnsupportedError: it has none of that name that others may call.
    """
    found = None if name.startswith("_") else getattr(worker, name, None)
    if not callable(found):
        raise UnsupportedError(f"Workers have no method {name!r}.")
    method: Callable[..., Any] = found
    return method


def import_class(path: str) -> Any:
    """What a module has under a name, the two with a dot between."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
