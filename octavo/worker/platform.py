"""Interface of platforms, the kinds of devices; all processes use it."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError
from octavo.plan.memory import MemoryBudget
from octavo.plan.setup import WorkerSetup

if TYPE_CHECKING:
    from octavo.attention.base import AttentionBackend
    from octavo.config import DeviceConfig
    from octavo.kernels.base import Ops
    from octavo.system.tensor import Tensor
    from octavo.worker.graphs import EagerSteps, StepRunner
    from octavo.worker.input_batch import InputBatch


class Platform(ABC):
    """Kind of device: its operations, attention backends, memory and step runners.

    It has no state: each process creates its own. The methods up to `estimate_memory` are called
    before anything is loaded. The worker calls the methods from `open_device` on, on the thread
    that computes.
    """

    name: str
    """Name in the settings: device=name."""
    server_batched_tokens: int
    """Default token budget of a server's step."""
    records_kernels = False
    """True if profiles contain the calls of single kernels."""
    shared = False
    """True if several engines may compute on it, each with a part of its memory."""

    @abstractmethod
    def is_available(self) -> bool:
        """Return True if this machine has the device. Quick: called before anything is started."""

    @abstractmethod
    def check_available(self) -> None:
        """Raise `ConfigError` unless `is_available`.

        Raises:
            ConfigError: this machine does not have the device.
        """

    def check_settings(self, config: DeviceConfig) -> None:
        """Check that the settings fit the machine. Quick: called before anything is loaded.

        Raises:
            ConfigError: the settings do not fit the machine.
        """
        return

    def is_native(self, config: DeviceConfig) -> bool:
        """Return True if Octavo's own CPU kernels compute; some features need them. Quick."""
        return False

    def estimate_memory(self, setup: WorkerSetup) -> MemoryBudget | None:
        """Return the available and the needed memory before loading; None: measure it instead.

        Raises:
            ConfigError: the settings do not fit the device or the model.
        """
        return None

    @abstractmethod
    def open_device(self, setup: WorkerSetup) -> Any:
        """Prepare the device, and make the calling thread the one that computes.

        Returns:
            The device, for the other methods.

        Raises:
            ConfigError: the device cannot be used, or the settings or the model do not fit it.
        """

    @abstractmethod
    def make_ops(self, config: DeviceConfig, device: Any) -> Ops:
        """Return the table of operations.

        Raises:
            ConfigError: a package that the operations need is not installed.
        """

    @abstractmethod
    def make_attention_backend(self, setup: WorkerSetup, device: Any) -> AttentionBackend:
        """Return the configured attention backend; for "auto", the best one.

        Raises:
            ConfigError: the backend does not support this platform or the model, or its package is
                not installed.
        """

    @abstractmethod
    def allocate_cache(self, num_blocks: int, block_nbytes: int, ops: Ops) -> Tensor:
        """Return zeros for blocks of a cache: uint8 [num_blocks, block_nbytes]."""

    @abstractmethod
    def make_steps(
        self,
        setup: WorkerSetup,
        ops: Ops,
        eager: EagerSteps,
        batch: InputBatch,
        *,
        capture: bool,
    ) -> StepRunner:
        """Return the runner of steps.

        Args:
            setup: the worker's setup.
            ops: the result of `make_ops`.
            eager: runner of the layers from Python; the result may be this runner or capture it.
            batch: the rows of the live requests.
            capture: True if steps may be captured now.
        """

    def computing(self, what: str) -> AbstractContextManager[None]:
        """Return a context in which the thread computes.

        Args:
            what: description of the computation, for error messages.

        Raises:
            ConfigError: the device's memory is too small.
        """
        return nullcontext()

    def beside_steps(self, device: Any) -> AbstractContextManager[None]:
        """Return a context for work on the device beside the steps, on another thread than theirs.

        The work begins after the steps that have been launched. At the end of the context it is
        complete.
        """
        return nullcontext()

    def allocated_nbytes(self, device: Any) -> int:
        """Return the bytes that this process has on the device; 0 if it does not measure them."""
        return 0

    def measure_memory(
        self,
        setup: WorkerSetup,
        device: Any,
        run_largest_step: Callable[[], int],
        allocated_before: int,
        adapter_nbytes: int,
    ) -> MemoryBudget:
        """Return the available and the needed memory, with the model loaded.

        Args:
            setup: the worker's setup.
            device: the model's device.
            run_largest_step: runs a step of the largest size on a temporary KV cache; returns the
                bytes of that cache.
            allocated_before: `allocated_nbytes` before the model was loaded.
            adapter_nbytes: bytes of the memory of adapters, which has been allocated since.
        """
        raise NotImplementedError(f"{self.name} estimates its memory")

    def cause(self, device: Any, error: BaseException) -> BaseException:
        """Return the cause of a step's failure: `EngineDeadError` if the device is lost."""
        return error


def require_package(setting: str, package: str, install: str) -> None:
    """Check that a package is installed.

    Raises:
        ConfigError: the package is not installed; the message names the setting that needs it and
            the command that installs it.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{setting} needs the package {package}, which is not installed: pip install {install}."
        )
