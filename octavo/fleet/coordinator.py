"""Owner of the engines of a server with several front ends.

To each front end it looks like an engine core: requests, aborts and calls arrive, outputs leave. It
keeps the tokens of every live request, so that an engine may die without the front ends noticing,
and so that it can abort the requests of a front end that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from octavo.engine import core_messages
from octavo.errors import EngineDeadError, OctavoError
from octavo.fleet.coordinator_client import PAGES
from octavo.fleet.core_client import WatchedClient
from octavo.fleet.live_requests import LiveRequests
from octavo.fleet.supervisor import Recovery
from octavo.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityCall,
    UtilityResult,
)
from octavo.observability.metrics import EngineMetrics, join_pages

logger = logging.getLogger(__name__)

# Interval of publishing engine statistics to front ends without requests.
_PUBLISH_SECONDS = 0.1
# Time for a front end to send its metrics.
_PAGE_SECONDS = 1.0


class FrontEndConnection:
    """Connection of the coordinator to a front end.

    Args:
        number: unique number.
        input_address: address where the coordinator receives its messages.
        output_address: address where the front end receives messages.
    """

    def __init__(self, number: int, input_address: str, output_address: str) -> None:
        self.number = number
        self.input_address, self.output_address = input_address, output_address
        self._context = zmq.asyncio.Context()
        self._input = self._context.socket(zmq.PULL)
        self._output = self._context.socket(zmq.PUSH)
        self._input.bind(input_address)
        self._output.set_hwm(0)  # a front end that does not read is ended before this matters
        self._output.connect(output_address)
        self.page = b""
        """Last page of its metrics."""
        self.shown = asyncio.Event()
        self.told_state = b""
        """State of the engines that was last sent to it."""
        self.told_ready = False
        """True if it was notified that the engines have loaded the model."""

    async def receive(self) -> tuple[bytes, bytes]:
        """Wait for the next message; return its kind and payload."""
        kind, payload = await self._input.recv_multipart()
        return kind, payload

    async def send(self, kind: bytes, payload: bytes) -> None:
        """Send a message; wait until the front end is connected."""
        if not self._context.closed:
            await self._output.send_multipart([kind, payload])

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)


class Coordinator:
    """Dispatcher of messages between several front ends and the engines.

    Args:
        metrics: records the engines' statistics.
        start_client: starts the engines; called with the last two arguments of `start_engines`.
        num_engines: number of engines.
        is_first: False if it replaces a coordinator with engines that could be started: then
            another one will replace it if its engines fail.
    """

    def __init__(
        self,
        metrics: EngineMetrics,
        start_client: Callable[
            [Callable[[], list[EngineCoreRequest]], Callable[[Recovery], None]], WatchedClient
        ],
        num_engines: int,
        *,
        is_first: bool = True,
    ) -> None:
        self._metrics = metrics
        self._is_first = is_first
        self._live_requests: LiveRequests[FrontEndConnection] = LiveRequests()
        self._client = start_client(self._live_requests.unfinished, self._note_recovery)
        for index in range(num_engines):
            of_engine = metrics.for_engine(index)
            of_engine.watch_processes(partial(self._client.family_of, index))
        self._front_ends: dict[FrontEndConnection, asyncio.Task[None]] = {}
        """Live front ends, with the tasks that listen to them."""
        self._past_page = b""
        """Sum of the metrics of ended front ends."""
        self._stats: dict[int, EngineCoreOutputs] = {}
        """Latest statistics of each engine, until they are published."""
        self._calls: set[asyncio.Task[None]] = set()
        self._encoder = msgspec.msgpack.Encoder()
        self._paging = asyncio.Lock()

    async def run(self) -> None:
        """Run until the engines fail for good.

        Raises:
            EngineDeadError: the cause; the front ends are notified of it if it `is_final`.
        """
        publisher = asyncio.create_task(self._publish())
        try:
            while True:
                await self._deliver(await self._client.get_output())
        except EngineDeadError as error:
            publisher.cancel()
            if not self.is_final:
                raise
            self._client.fail_calls(error)
            dead = self._encoder.encode(core_messages.CoreDead(str(error)))
            for front_end in self._front_ends:
                await front_end.send(core_messages.DEAD, dead)
            raise
        finally:
            publisher.cancel()

    @property
    def is_final(self) -> bool:
        """True if no other coordinator will be started when the engines end now."""
        return self._is_first or self._client.ready.done()

    async def shutdown(self) -> None:
        """End the engines and remove the front ends."""
        for front_end in list(self._front_ends):
            await self.remove(front_end)
        for call in self._calls:
            call.cancel()
        await self._client.shutdown()

    def add(self, front_end: FrontEndConnection) -> None:
        """Start to listen to a front end."""
        self._front_ends[front_end] = asyncio.create_task(self._listen(front_end))

    async def remove(self, front_end: FrontEndConnection) -> None:
        """Abort the requests of a front end that has ended."""
        self._front_ends.pop(front_end).cancel()
        front_end.close()
        if front_end.page:
            self._past_page = join_pages([self._past_page, front_end.page])
        await self._client.abort_requests(self._live_requests.remove_owner(front_end))

    async def _listen(self, front_end: FrontEndConnection) -> None:
        decode = msgspec.msgpack.decode
        while True:
            kind, payload = await front_end.receive()
            if kind == core_messages.ADD:
                request = decode(payload, type=EngineCoreRequest)
                # Record it first: replaced engines receive the recorded requests.
                self._live_requests.add(request, payload, front_end)
                await self._client.add_request(request)
            elif kind == core_messages.ABORT:
                answers = decode(payload, type=list[str])
                self._live_requests.remove(answers)
                await self._client.abort_requests(answers)
            elif kind == core_messages.UTILITY:
                call = asyncio.create_task(
                    self._answer(front_end, decode(payload, type=UtilityCall))
                )
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
            elif kind == core_messages.PAGE:
                front_end.page = payload
                front_end.shown.set()

    async def _deliver(self, outputs: EngineCoreOutputs) -> None:
        """Send each front end the outputs of its requests, and all of them the steps' records."""
        parts: dict[FrontEndConnection, list[EngineCoreOutput]] = {}
        for output in outputs.outputs:
            owner = self._live_requests.take(output)
            if owner is not None:
                parts.setdefault(owner, []).append(output)
        if outputs.stats is not None:
            self._metrics.for_engine(outputs.engine_index).record_scheduler_stats(outputs.stats)
        for front_end in list(self._front_ends if outputs.steps else parts):
            outputs.outputs = parts.get(front_end, [])
            await front_end.send(core_messages.OUTPUTS, self._encoder.encode(outputs))
        if outputs.stats is not None:
            outputs.outputs, outputs.steps = [], []
            self._stats[outputs.engine_index] = outputs

    async def _publish(self) -> None:
        """Send all front ends the state of the engines at useful intervals."""
        client = self._client
        while True:
            state = self._encoder.encode(
                core_messages.EnginesState(client.up, client.down, client.missing)
            )
            stats, self._stats = self._stats, {}
            news = [self._encoder.encode(last) for last in stats.values()]
            for front_end in list(self._front_ends):
                if front_end.told_state != state:
                    front_end.told_state = state
                    await front_end.send(core_messages.STATE, state)
                if client.ready.done() and not front_end.told_ready:
                    front_end.told_ready = True
                    # The coordinator records whole requests.
                    ready = msgspec.structs.replace(client.ready.result(), kept_items_nbytes=0)
                    await front_end.send(core_messages.READY, self._encoder.encode(ready))
                for payload in news:
                    await front_end.send(core_messages.OUTPUTS, payload)
            await asyncio.sleep(_PUBLISH_SECONDS)

    async def _answer(self, front_end: FrontEndConnection, call: UtilityCall) -> None:
        """Handle a front end's call."""
        try:
            if call.method == PAGES:
                value: Any = await self._pages()
            elif call.method == "trim_memory" and len(self._live_requests):
                value = None  # another front end is not idle
            else:
                value = await self._client.call_utility(call.method, *call.args)
            result = UtilityResult(call.call_id, value)
        except OctavoError as error:
            result = UtilityResult(call.call_id, error=str(error), error_kind=type(error).__name__)
        except Exception as error:  # worded as by an engine core
            logger.exception("a call has failed")
            result = UtilityResult(call.call_id, error=f"{type(error).__name__}: {error}")
        await front_end.send(core_messages.RESULT, self._encoder.encode(result))

    async def _pages(self) -> list[str]:
        """Collect the metrics pages of all front ends; use the last page of those that time out."""
        async with self._paging:
            front_ends = list(self._front_ends)
            for front_end in front_ends:
                front_end.shown.clear()
                await front_end.send(core_messages.PAGE, b"")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PAGE_SECONDS):
                    await asyncio.gather(*(f.shown.wait() for f in front_ends))
            own = await asyncio.to_thread(self._metrics.render)
            return [page.decode() for page in (own, self._past_page, *(f.page for f in front_ends))]

    def _note_recovery(self, recovery: Recovery) -> None:
        self._metrics.for_engine(recovery.engine_index).record_recovery(
            recovery.num_requests, recovery.seconds
        )
