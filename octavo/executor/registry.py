"""Which executor a config means. The classes, some of which bring torch, are imported here only."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.executor.base import Executor


def get_executor_class(config: EngineConfig) -> type[Any]:
    """The class of the executor, a subclass of `Executor`; made from a setup and a platform.

    Raises:
        ConfigError: nobody knows it, it does not work here, or not with another setting.
    """
    backend = config.executor_backend
    match backend:
        case "uni":
            if config.world_size > 1:
                raise ConfigError(
                    f"distributed_executor_backend=uni has one worker, and tensor_parallel_size="
                    f"{config.world_size} needs more; set distributed_executor_backend=mp."
                )
            from octavo.executor.uniproc import UniProcExecutor

            return UniProcExecutor
        case "mp":
            _check_processes(config)
            from octavo.executor.multiproc import MultiprocExecutor

            return MultiprocExecutor
        case "ray":
            raise ConfigError(
                "distributed_executor_backend=ray is not supported: there is no Ray here; use mp, "
                "which starts the workers on this machine, or uni."
            )
    if "." not in backend:
        raise ConfigError(
            f"distributed_executor_backend={backend!r} is unknown; choose uni or mp, or give module"
            " and name, with a dot between, of an Executor of your own."
        )
    try:
        found = import_class(backend)
    except Exception as error:
        raise ConfigError(
            f"distributed_executor_backend={backend!r} cannot be imported "
            f"({type(error).__name__}: {error}); choose uni or mp, or mend it."
        ) from error
    if not (isinstance(found, type) and issubclass(found, Executor)):
        raise ConfigError(
            f"distributed_executor_backend={backend!r} is not a subclass of "
            "octavo.executor.base.Executor."
        )
    return found


def import_class(path: str) -> Any:
    """What a module has under a name, the two with a dot between."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _check_processes(config: EngineConfig) -> None:
    """Refuses what needs the workers in the engine's process."""
    if sys.platform != "linux":
        raise ConfigError(
            "distributed_executor_backend=mp works on Linux only; use uni, in one process."
        )
    if config.observability.profiler_dir is not None:
        raise ConfigError(
            f"profiler_dir={config.observability.profiler_dir!r} records one process, and with "
            "distributed_executor_backend=mp the workers are in others; leave one of them out."
        )
