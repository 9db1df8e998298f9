"""How a front end reaches an engine core; in another process: `mp_client.py`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from octavo.engine.core import EngineCore
from octavo.errors import SleepError
from octavo.messages import EngineCoreOutputs, EngineCoreRequest

if TYPE_CHECKING:
    from octavo.engine.wire import CoreReady

# Ctrl-C is looked at between two waits.
_WAIT_SECONDS = 0.1


class EngineClient(Protocol):
    """What a front end asks of an engine core, wherever that one is.

    All of it is async. In process nothing ever waits, so that `LLM` needs no event loop for it.
    """

    async def get_output(self) -> EngineCoreOutputs:
        """The next step's outputs.

        Raises:
            EngineDeadError: with the root cause, if the core cannot go on.
        """
        ...

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Hands a request to the core."""
        ...

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests in the core; unknown ids are ignored."""
        ...

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Calls one of the core's `UTILITIES`; returns its result, as plain values.

        Raises:
            OctavoError: what the method raised; of the same class if it is one of Octavo's.
        """
        ...

    async def shutdown(self) -> None:
        """Ends the core. May be called twice."""
        ...


class WatchedClient(EngineClient, Protocol):
    """What a server asks of its engines: that they are watched, and what has become of them."""

    @property
    def ready(self) -> asyncio.Future[CoreReady]:
        """Result once all engines have loaded the model; `EngineDeadError` if one cannot."""
        ...

    def get_output_nowait(self) -> EngineCoreOutputs | None:
        """A further step's outputs if they are there, of one that `get_output` is not asked for.

        A consumer then takes those of several steps at once: whoever is behind catches up.
        """
        ...

    @property
    def up(self) -> bool:
        """Whether there is an engine that takes requests now."""
        ...

    @property
    def missing(self) -> list[int]:
        """The engines for which no node has joined yet."""
        ...

    @property
    def down(self) -> dict[int, str]:
        """The engines that serve nothing now, by number, and what is done about it."""
        ...

    def family_of(self, index: int) -> list[int]:
        """The numbers of an engine's processes that can be watched from here."""
        ...

    def engine_of(self, request_id: str) -> int | None:
        """Where a live core request is; None: nobody knows here."""
        ...

    def fail_calls(self, error: Exception) -> None:
        """Fails everything that waits for an answer of an engine, for good."""
        ...

    def close(self) -> None:
        """`shutdown` for callers without an event loop."""
        ...


class InprocClient:
    """See `EngineClient`: the core is in this process, and computes when outputs are asked for."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    async def get_output(self) -> EngineCoreOutputs:
        """See `EngineClient`: runs a step; where there is only a grammar to wait for, a while."""
        if self.core.is_sleeping() and not self.core.has_work():
            raise SleepError("The engine sleeps, so nothing would ever come; call wake_up() first.")
        self.core.wait(_WAIT_SECONDS)
        return self.core.step()

    async def add_request(self, request: EngineCoreRequest) -> None:
        """See `EngineClient`."""
        self.core.add_request(request)

    async def abort_requests(self, request_ids: list[str]) -> None:
        """See `EngineClient`."""
        self.core.abort_requests(request_ids)

    async def call_utility(self, method: str, *args: Any) -> Any:
        """See `EngineClient`."""
        return self.core.call_utility(method, *args)

    async def shutdown(self) -> None:
        """See `EngineClient`."""
        self.core.shutdown()
