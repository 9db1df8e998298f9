"""Changes of the state of all engines of a front end: their sleep, and their number."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from octavo.errors import ScalingBusyError, ScalingError
from octavo.fleet.core_client import ElasticClient
from octavo.frontend.engines import EngineRecords
from octavo.messages import PauseMode

# Seconds between two checks whether the last requests have finished before a sleep.
_SLEEP_POLL = 0.02


class EngineStates:
    """State of all engines; one change is made at a time.

    Args:
        call: calls a method of all engines; raises `EngineDeadError` once they have ended.
        elastic: changes the number of engines; None: it is fixed.
        engines: records of the engines.
        scales_experts: True if a change of their number replaces all engines.
    """

    def __init__(
        self,
        call: Callable[..., Awaitable[Any]],
        elastic: ElasticClient | None,
        engines: EngineRecords,
        scales_experts: bool,
    ) -> None:
        self._call, self._elastic, self._engines = call, elastic, engines
        self._scales_experts = scales_experts
        self._lock = asyncio.Lock()
        self._level: int | None = None
        """Level at which the engines sleep; None: they are awake."""
        self.cache_emptied_at: float | None = None
        """Second of `time.monotonic` at which an engine's prefix cache was emptied last."""
        # References to tasks that no caller may wait for.
        self._falling_asleep: asyncio.Task[None] | None = None
        self._change_of_size: asyncio.Task[None] | None = None

    @property
    def asleep(self) -> bool:
        """True if the engines sleep, at any level."""
        return self._level is not None

    @property
    def scaling(self) -> bool:
        """True while engines are being added or ended."""
        return self._elastic is not None and self._elastic.scaling

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Let the engines sleep; see `LLMEngine.sleep`."""
        async with self._lock:
            while not await self._call("sleep", level, mode):
                try:
                    await asyncio.sleep(_SLEEP_POLL)
                except asyncio.CancelledError:  # no other call will follow
                    await self._call("wake_up", None)
                    raise
            self._level = level
            if level:
                self.note_cache_emptied()
            self._engines.record_sleep_state(level)

    async def wake_up(self, tags: list[str] | None) -> bool:
        """Wake the engines; return True if they are awake. See `LLMEngine.wake_up`."""
        async with self._lock:
            awake = bool(await self._call("wake_up", tags))
            if awake:
                self._level = None
                self._engines.record_sleep_state(None)
            return awake

    async def scale(self, size: int) -> None:
        """Change the number of engines; the change continues even if the caller is cancelled.

        Raises:
            ScalingError: the number cannot be changed, or not now; nothing has changed.
        """
        if self._elastic is None:
            raise ScalingError(
                "The number of engines is fixed; start the server with --enable-elastic-ep."
            )
        if self._elastic.scaling:
            raise ScalingBusyError
        self._change_of_size = asyncio.create_task(self._scale(self._elastic, size))
        await asyncio.shield(self._change_of_size)

    async def _scale(self, elastic: ElasticClient, size: int) -> None:
        async with self._lock:  # new engines are awake
            if self.asleep:
                raise ScalingError("The engines sleep; wake them up first.")
            await self._engines.scale(elastic, size)
        if self._scales_experts:  # all engines are new
            self.note_cache_emptied()

    def note_cache_emptied(self) -> None:
        """Note that an engine's prefix cache is empty now."""
        self.cache_emptied_at = time.monotonic()

    def note_recovery(self) -> None:
        """Note that an engine has been replaced; let the new one sleep if the others do."""
        self.note_cache_emptied()
        if self._level is not None:  # its memory must stay free
            self._falling_asleep = asyncio.create_task(self.sleep(self._level, "keep"))
