"""Answers that a thread writes in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.state import ServerState


class LargeAnswer(Response):
    """Response that a thread writes, a part at a time, as fast as the client reads it.

    Args:
        state: the server.
        parts: the body. As JSON, logprobs occupy twenty times the memory of the numbers.
        held: context in which the answer is sent.
        deadline: the time at which sending ends, on the event loop's clock; None: never.
        media_type: type of the body.
        nbytes: size of the body; None: not known.
    """

    def __init__(
        self,
        state: ServerState,
        parts: Iterator[bytes],
        held: AbstractContextManager[object],
        deadline: float | None,
        media_type: str = "application/json",
        nbytes: int | None = None,
    ) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        if nbytes is not None:
            self.headers["content-length"] = str(nbytes)
        self._state = state
        self._parts = parts
        self._held = held
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts until they end or the client disconnects."""

        async def pump() -> None:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            while (part := await asyncio.to_thread(next, self._parts, None)) is not None:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        with self._held:
            await self._state.run(receive, pump(), self._deadline)
