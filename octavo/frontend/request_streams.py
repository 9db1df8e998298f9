"""Streams of the outputs of requests, with the requests' deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import re
from collections.abc import AsyncGenerator, Iterable

import msgspec

from octavo.errors import DeadlineError, FirstTokenError
from octavo.fleet.core_client import WatchedClient
from octavo.frontend.output_processor import OutputProcessor, RequestOutputCollector
from octavo.frontend.time_line import Stages
from octavo.messages import EngineCoreRequest
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.system import clock

_LIKE_A_CHILD = re.compile(r"_*\d+_")


class RequestStreams:
    """Maker of the streams of a front end: it sends requests to the engines, and aborts them.

    Args:
        client: client of the engines.
        output_processor: the front end's records of its requests.
        front_end: number of this front end among several with one coordinator; None: there is one.
    """

    def __init__(
        self,
        client: WatchedClient,
        output_processor: OutputProcessor,
        front_end: int | None,
    ) -> None:
        self._client, self._output_processor = client, output_processor
        self._front_end = front_end
        self._numbers = itertools.count()
        """Numbers of core requests."""

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests within one step; ignore unknown ids."""
        await self._client.abort_requests(self._output_processor.abort_requests(request_ids))

    async def stream(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        text: str | None = None,
        stages: Stages | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of a request; closing the stream aborts it.

        Args:
            request: the result of `InputProcessor.process`.
            params: the parameters of the answer.
            text: the text of the prompt, if it has one.
            stages: gets the stages of the request before the engine.

        Raises:
            RequestError: the request fails, or its id is in use.
            DeadlineError, FirstTokenError: a deadline has passed.
            EngineDeadError: the engine has ended.
        """
        queue = RequestOutputCollector(params.output_kind)
        name = request.request_id
        # Late outputs of an earlier request with the same id must not reach this one.
        number = str(next(self._numbers))
        if self._front_end is not None:
            number = f"{self._front_end}.{number}"
        # An id that begins with a number and "_" is that of one of several answers.
        escaped = f"_{name}" if _LIKE_A_CHILD.match(name) else name
        request = msgspec.structs.replace(request, request_id=f"{escaped}#{number}")
        self._output_processor.add_request(request, params, text, queue, name)
        finished, timed = False, request.options.due < math.inf
        try:
            await self._client.add_request(request)
            if stages is not None:
                stages.end("to_engine")
                stages.holder = self._client.holder_of(request.child_ids[0])
            while not finished:
                output = queue.get_nowait()
                if output is None:
                    output = await (self._wait(request, name, queue) if timed else queue.get())
                finished = output.finished
                yield output
        finally:
            # Its id may belong to another request by now.
            if not finished and self._output_processor.is_live(name, queue):
                await self.abort([name])

    async def _wait(
        self, request: EngineCoreRequest, name: str, queue: RequestOutputCollector
    ) -> RequestOutput:
        """Return the next output of a request; enforce its deadlines even without an engine.

        Raises:
            DeadlineError: one of the deadlines has passed.
        """
        options = request.options
        while True:
            due: float | None = options.due
            if self._output_processor.has_first_tokens(name):
                due = options.deadline
            if due is None:
                return await queue.get()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - clock.now())):
                    return await queue.get()
            if options.deadline is not None and options.deadline <= clock.now():
                raise DeadlineError("The deadline passed.")
            if not self._output_processor.has_first_tokens(name):
                raise FirstTokenError("The first token did not arrive in time.")
