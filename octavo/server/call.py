"""HTTP request for the engine: its id, its limits of time, and what its engine requests share."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from starlette.requests import Request

from octavo.errors import RequestError
from octavo.messages import RequestOptions
from octavo.server import explain_answers
from octavo.server.auth import flow_of, private_salt
from octavo.server.explain import disabled, explain_story, names_for
from octavo.server.middleware import RequestContext, context_of
from octavo.server.state import ServerState, state_of
from octavo.server.stories import Counts, Story
from octavo.system import clock

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM


def unanswered_options(
    state: ServerState, context: RequestContext, cache_salt: str | None
) -> RequestOptions:
    """Return the envelope of a prompt that is read, but not answered."""
    return RequestOptions(
        clock.now(),
        tenant=state.tenant(context.api_key),
        cache_salt=private_salt(context.api_key, cache_salt),
        flow=flow_of(context.address),
    )


class CallFields(Protocol):
    """Fields of a body that a `Call` reads."""

    model: str | None
    request_id: str | None
    deadline_ms: int | None
    cache_salt: str | None
    explain: bool | None


class Call:
    """HTTP request for the engine.

    Args:
        request: the request.
        body: its body.
        id_prefix: begin of the id of the answer.
        max_ttft_ms: limit of the first token in milliseconds; None: that of the header.

    Raises:
        NotFoundError: the body names an unknown model; see `ServerState.find_model`.
    """

    def __init__(
        self, request: Request, body: CallFields, id_prefix: str, max_ttft_ms: int | None = None
    ) -> None:
        self.state = state_of(request)
        self.context = context_of(request)
        if body.request_id is not None:
            self.context.request_id = body.request_id
        self.id = f"{id_prefix}-{self.context.request_id}"
        self.model_name = body.model or self.state.model_names[0]
        self._adapter = self.state.find_adapter(body.model)
        self.explains = bool(body.explain)
        self._path = request.scope["path"]
        self._parsed = time.monotonic()
        self.tenant = self.state.tenant(self.context.api_key)
        deadline_ms = body.deadline_ms or self.context.deadline_ms
        arrival = self.context.arrival
        # A line of a batch waits for other requests, for which its client sets no limit.
        self.deadline = (
            None if self.context.background else self.state.deadline(arrival, deadline_ms)
        )
        self.salt = private_salt(self.context.api_key, body.cache_salt)
        self._own_deadline = _after(arrival, deadline_ms)
        self._first_token_deadline = _after(arrival, max_ttft_ms or self.context.max_ttft_ms)

    @property
    def adapter_hash(self) -> str | None:
        """Content hash of the request's adapter; None: it has none."""
        ref = None if self._adapter is None else self._adapter.ref
        return None if ref is None else ref.key

    def admit(self, count: int, param: str) -> AbstractContextManager[None]:
        """Hold places for `count` answers; see `ServerState.admit`."""
        # Lines of batches take no places: their number has a limit of its own.
        if self.context.background:
            return nullcontext()
        return self.state.admit(count, param, self.tenant)

    def begin_story(
        self, usage: Counts, num_prompts: int, started: float | None = None
    ) -> Story | None:
        """Record the request for `explain`; None: the server records none.

        Args:
            usage: its token counts, which change while it runs.
            num_prompts: number of its prompts.
            started: second of `time.monotonic` at which it was accepted; None: it is not yet.

        Raises:
            RequestError: the request asks for an explanation, which is not available.
        """
        state, context = self.state, self.context
        if self.explains and context.background:
            raise RequestError(
                "explain=true is not available in a batch, whose answers do not depend on the time;"
                " leave it out, and use /v1/requests/ID/explain.",
                "explain",
            )
        if not state.stories.max_count:
            if self.explains:
                raise RequestError(disabled("explain=true"), "explain", "explain_disabled")
            return None
        times = [context.arrival, context.received or context.arrival, self._parsed]
        if started is not None:
            times.append(started)
        context.story = story = Story(
            context.request_id,
            self.id,
            self.tenant,
            self._path,
            self.model_name,
            usage,
            [clock.from_monotonic(time) for time in times],
            num_prompts,
            is_line=context.background,
        )
        state.stories.add(story)
        return story

    async def explanation(self) -> explain_answers.Explained:
        """Return the explanation of the request up to now, if its body asks for it."""
        if not self.explains:
            return {}
        assert self.context.story is not None
        names = names_for(self.state, self.context)
        return {"explanation": await explain_story(self.state, self.context.story, names)}

    def note_priority(self, engine: AsyncLLM, priority: int) -> None:
        """Report a priority that has no effect."""
        if priority and engine.config.scheduler.scheduling_policy != "priority":
            self.context.ignored_fields.append("priority")
            self.state.warn_of_priority()

    def trace_headers(self, engine: AsyncLLM) -> dict[str, str] | None:
        """Return the headers of the trace that the engine requests continue; None: no traces."""
        if engine.config.observability.otlp_traces_endpoint is None:
            return None
        return self.context.trace_headers | {"x-request-id": self.context.request_id}

    def options(self, turn: int, trace_headers: dict[str, str] | None) -> RequestOptions:
        """Return the envelope of an engine request that is made now.

        Args:
            turn: number of answers before it in this request.
            trace_headers: result of `trace_headers`.
        """
        return RequestOptions(
            clock.now(),
            tenant=self.tenant,
            # The server's default limit does not make a request urgent.
            deadline=self._own_deadline,
            first_token_deadline=self._first_token_deadline,
            turn=turn,
            cache_salt=self.salt,
            flow=flow_of(self.context.address),
            background=self.context.background,
            trace_headers=trace_headers,
            adapter=None if self._adapter is None else self._adapter.ref,
        )


def _after(arrival: float, milliseconds: int | None) -> float | None:
    """Return the `clock` time that is `milliseconds` after a second of `time.monotonic`."""
    return None if milliseconds is None else clock.from_monotonic(arrival + milliseconds / 1000)
