"""Choice of the executor class. Only this module imports the classes, some of which need torch."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.executor.base import Executor, import_class


def get_executor_class(config: EngineConfig) -> type[Any]:
    """Return the executor class, a subclass of `Executor` constructed from a setup and a platform.

    Raises:
        ConfigError: the executor does not work on this system, Ray is missing, or a custom class
            cannot be imported or is not an executor.
    """
    backend = config.executor_backend
    if backend == "uni":
        from octavo.executor.uniproc import UniProcExecutor

        return UniProcExecutor
    if backend in ("mp", "ray") and sys.platform != "linux":
        raise ConfigError(
            f"distributed_executor_backend={backend} works on Linux only; use uni, in one process."
        )
    if backend == "mp":
        from octavo.executor.multiproc import MultiprocExecutor

        return MultiprocExecutor
    if backend == "ray":
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "distributed_executor_backend=ray needs Ray: pip install ray; or use mp, "
                "which starts the workers on this machine."
            )
        from octavo.executor.ray import RayExecutor

        return RayExecutor
    try:
        found = import_class(backend)
    except Exception as error:
        raise ConfigError(
            f"distributed_executor_backend={backend!r} cannot be imported "
            f"({type(error).__name__}: {error}); choose uni, mp or ray, or fix it."
        ) from error
    if not (isinstance(found, type) and issubclass(found, Executor)):
        raise ConfigError(
            f"distributed_executor_backend={backend!r} is not a subclass of "
            "octavo.executor.base.Executor."
        )
    return found
