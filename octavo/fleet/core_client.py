"""Interface of a front end to an engine core, and the in-process client; see `mp_client.py`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from octavo.errors import SleepError
from octavo.messages import EngineCoreOutputs, EngineCoreRequest

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore
    from octavo.engine.core_messages import CoreReady

# Interval of checks for Ctrl-C.
_WAIT_SECONDS = 0.1


class EngineClient(Protocol):
    """Interface of a front end to an engine core, in this or another process.

    All methods are async. In process they never wait, so that `LLM` needs no event loop for them.
    """

    async def get_output(self) -> EngineCoreOutputs:
        """Return the next step's outputs.

        Raises:
            EngineDeadError: the core cannot continue; the message contains the root cause.
        """
        ...

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to the core."""
        ...

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Abort requests in the core; ignore unknown ids."""
        ...

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Call one of the core's `UTILITIES`; return its result, as plain values.

        Raises:
            OctavoError: the method failed; the class is kept if it is one of Octavo's.
        """
        ...

    async def shutdown(self) -> None:
        """End the core. May be called twice."""
        ...


class ElasticClient(Protocol):
    """Interface to change the number of engines."""

    @property
    def scaling(self) -> bool:
        """True while engines are being added or ended."""
        ...

    async def scale(self, size: int) -> None:
        """Change the number of engines while requests continue.

        Raises:
            ScalingError: it cannot be changed, or not now (`ScalingBusyError`); then nothing has
                changed.
        """
        ...


class WatchedClient(EngineClient, Protocol):
    """Interface of a server to its supervised engines, with their state."""

    @property
    def ready(self) -> asyncio.Future[CoreReady]:
        """Future that resolves once all engines are loaded; `EngineDeadError` if one fails."""
        ...

    def get_output_nowait(self) -> EngineCoreOutputs | None:
        """Return another step's outputs if they have arrived; do not call during `get_output`.

        A slow consumer can thus process several steps at once and catch up.
        """
        ...

    @property
    def up(self) -> bool:
        """True if an engine accepts requests now."""
        ...

    @property
    def missing(self) -> list[int]:
        """Indices of the engines without a node so far."""
        ...

    @property
    def down(self) -> dict[int, str]:
        """Engines that are not serving, by index, with their state."""
        ...

    @property
    def elastic(self) -> ElasticClient | None:
        """Interface to change the number of engines; None if the number is fixed."""
        ...

    async def pages(self) -> list[bytes]:
        """Return the metrics pages of all front ends and of their coordinator; none if there is
        no other front end."""
        ...

    def family_of(self, index: int) -> list[int]:
        """Return the ids of an engine's processes that can be watched from here."""
        ...

    def engine_of(self, request_id: str) -> int | None:
        """Return the engine of a live core request; None if it is unknown here."""
        ...

    def holder_of(self, request_id: str) -> tuple[int, int] | None:
        """Return another engine that likely had more of a live core request's prompt in its cache
        when the request was placed, and the number of tokens; None if there was none."""
        ...

    def fail_calls(self, error: Exception) -> None:
        """Fail all pending and future calls."""
        ...

    def close(self) -> None:
        """Shut down without an event loop."""
        ...


class InprocClient:
    """Client of a core in this process, which computes during `get_output`."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    async def get_output(self) -> EngineCoreOutputs:
        """Run a step; if only a grammar is pending, wait briefly for it."""
        if self.core.is_sleeping() and not self.core.has_work():
            raise SleepError("The engine sleeps, so no output would arrive; call wake_up() first.")
        self.core.wait(_WAIT_SECONDS)
        return self.core.step()

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Implement `EngineClient`."""
        self.core.add_request(request)

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Implement `EngineClient`."""
        self.core.abort_requests(request_ids)

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Implement `EngineClient`."""
        return self.core.call_utility(method, *args)

    async def shutdown(self) -> None:
        """Implement `EngineClient`."""
        self.core.shutdown()
