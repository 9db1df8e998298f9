"""What an engine must know of a kind of device. Imports no torch, so that all processes can ask."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.plan.memory import MemoryBudget
from octavo.plan.setup import WorkerSetup

if TYPE_CHECKING:
    import torch

    from octavo.attention.base import AttentionBackend
    from octavo.config import DeviceConfig
    from octavo.kernels.base import Ops
    from octavo.worker.graphs import EagerSteps, StepRunner
    from octavo.worker.input_batch import InputBatch


class Platform(ABC):
    """A kind of device: which operations, attention backends, memory and step runners there are.

    Has no state: each process makes its own. The methods up to `estimate_memory` are asked before
    anything is loaded; those from `open_device` on by the worker, on the thread that computes.
    """

    name: str
    """As settings call it: device=name."""
    server_batched_tokens: int
    """A server's token budget of a step where the config sets none."""
    records_kernels = False
    """Whether profiles have the calls of single kernels."""
    shared = False
    """Whether several engines may compute on it, each with a part of its memory."""

    @abstractmethod
    def is_available(self) -> bool:
        """Whether this machine has such a device. Quick: asked before anything is started."""

    @abstractmethod
    def check_available(self) -> None:
        """Raises what `is_available` says.

        Raises:
            ConfigError: if this machine has no such device.
        """

    def check_settings(self, config: DeviceConfig) -> None:
        """Looks whether the settings fit the machine. Quick: asked before anything is loaded.

        Raises:
            ConfigError: if they do not.
        """
        return

    def is_native(self, config: DeviceConfig) -> bool:
        """Whether Octavo's own kernels for a CPU compute, which some features need. Quick."""
        return False

    def estimate_memory(self, setup: WorkerSetup) -> MemoryBudget | None:
        """What there is and what will be taken, before loading; None: that is to be measured.

        Raises:
            ConfigError: if the settings do not fit the device or the model.
        """
        return None

    @abstractmethod
    def open_device(self, setup: WorkerSetup) -> torch.device:
        """Makes the device ready, and the calling thread the one that computes.

        Raises:
            ConfigError: if the device cannot be used, or the settings or the model do not fit it.
        """

    @abstractmethod
    def make_ops(self, config: DeviceConfig) -> Ops:
        """The table of operations.

        Raises:
            ConfigError: if a package that they need is not there.
        """

    @abstractmethod
    def make_attention_backend(self, setup: WorkerSetup, device: torch.device) -> AttentionBackend:
        """The attention backend that the settings ask for; "auto" takes the best.

        Raises:
            ConfigError: if it does not work on this platform or with the model, or its package is
                not there.
        """

    @abstractmethod
    def allocate_cache(
        self, num_blocks: int, block_nbytes: int, device: torch.device
    ) -> torch.Tensor:
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
        """How steps are run.

        Args:
            setup: what the worker is built from.
            ops: what `make_ops` made.
            eager: runs the layers from Python: it may be used as it is, or captured.
            batch: the rows of the live requests.
            capture: whether steps may be captured now.
        """

    def allocated_nbytes(self, device: torch.device) -> int:
        """Bytes that this process has on the device; where nothing is measured, 0."""
        return 0

    def measure_memory(
        self,
        setup: WorkerSetup,
        device: torch.device,
        run_largest_step: Callable[[], int],
        allocated_before: int,
    ) -> MemoryBudget:
        """What there is and what is taken, with the model loaded; see `estimate_memory`.

        Args:
            setup: what the worker is built from.
            device: where the model is.
            run_largest_step: runs a step of the largest size on a KV cache made for it; returns
                that one's bytes.
            allocated_before: `allocated_nbytes` before the model was loaded.
        """
        raise NotImplementedError(f"{self.name} estimates its memory")

    def cause(self, device: torch.device, error: BaseException) -> BaseException:
        """What the failure of a step means: `EngineDeadError` if the device is lost."""
        return error


def require_package(setting: str, package: str, install: str) -> None:
    """Checks that a package is installed.

    Raises:
        ConfigError: if it is not; names the setting that needs it, and how to install it.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{setting} needs the package {package}, which is not installed: pip install {install}."
        )
