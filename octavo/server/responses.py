"""/v1/responses: OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import RequestError
from octavo.outputs import CompletionOutput
from octavo.parsers.parts import Text
from octavo.server import answers, explain_answers, response_answers
from octavo.server.background import EventLog, events_dropped, split_events
from octavo.server.body import check_media_type, read_model
from octavo.server.call import unanswered_options
from octavo.server.chat import ChatCompletion, count_prompt_tokens, read_chat
from octavo.server.conversations import append_items, load_conversation
from octavo.server.errors import (
    ClientDisconnectError,
    error_detail,
    error_status,
    log_unexpected,
    show,
)
from octavo.server.generation import EventStream, Reading, stopped_by_guard
from octavo.server.load_report import add_load_report
from octavo.server.middleware import context_of
from octavo.server.response_files import with_files
from octavo.server.response_items import (
    MAX_REFERENCED,
    Item,
    item_id,
    owner_of,
    too_many_owners,
    with_ids,
    with_other_ids,
)
from octavo.server.response_output import Event, OutputItems, write_event
from octavo.server.responses_schema import LOGPROBS, InputTokensBody, ResponseBody, renamed
from octavo.server.resumable_streams import Events
from octavo.server.schema import ChatBody
from octavo.server.state import ServerState, state_of
from octavo.server.stored import (
    StoredConversation,
    StoredResponse,
    has_store,
    item_list,
    items_nbytes,
    load_for,
    new_id,
    not_found,
    save,
    store_of,
)
from octavo.system.offload import offload

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

encode = msgspec.json.encode

_UNFINISHED = ("queued", "in_progress")
_USABLE = ("completed", "incomplete")
"""Statuses of responses that others may continue."""
_STATUSES: Mapping[str, response_answers.ResponseStatus] = {
    "length": "incomplete",
    "abort": "cancelled",
}
"""Statuses by finish reason; others: completed."""
_INTERRUPTED = response_answers.ResponseError(
    code="server_error",
    message="The server was restarted before the response was complete; create it again.",
)
# Microseconds that writing a response with logprobs may take: too long for the event loop.
_LONG = 5_000
# Most digits of the number of an event: parsing very many would take long.
_MAX_DIGITS = 15


async def create_response(request: Request) -> Response:
    """Make a response to text or items: whole, as events, or in the background."""
    state = state_of(request)
    given = await read_model(request, ResponseBody, state.max_chat_bytes)
    given.check()
    await state.find_model(request, given.model)
    if given.store or given.background:
        param = "store" if given.store else "background"
        store_of(state, f"{param}=true", param)
    name = new_id("resp")
    with ExitStack() as held:
        if given.conversation is not None:
            api_key = context_of(request).api_key
            held.enter_context(state.background.hold(api_key, given.conversation.id))
        before, new = await _all_items(request, given, name)
        chat = await _to_chat(request, given, before, new)
        # References may repeat an item, and lists name their items by id.
        count = len(before) + len(new)
        new = await offload(count, with_other_ids, new, before, name, len(before))
        answer = ResponseAnswer(request, given, chat, name, before, new)
        if given.background:
            return await answer.in_background(held)
        if given.stream:
            return _ResponseStream(answer, held.pop_all())
        response = await state.run(request.receive, answer.answer(), answer.deadline)
    add_load_report(request, response, (await state.get_engine()).metrics)
    return response


class _ResponseStream(EventStream):
    """Events of a response that ends with its connection.

    Args:
        answer: the response.
        held: what to release at the end.
    """

    def __init__(self, answer: ResponseAnswer, held: ExitStack) -> None:
        super().__init__(
            answer.state, answer.events(), answer.deadline, last=b"", write_error=answer.failed
        )
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; see `EventStream`."""
        with self._held:
            await super().__call__(scope, receive, send)


async def respond_in_batch(request: Request, given: ResponseBody) -> Response:
    """Make the response of a line of a batch; it is not stored, whatever `store` says.

    Raises:
        RequestError: the body needs stored objects, or another field is wrong.
    """
    given.check()
    for param in ("background", "previous_response_id", "conversation"):
        if getattr(given, param):
            raise RequestError(
                f"{param} is not available in a batch, whose responses are not stored; send the "
                "whole input in each line.",
                param,
            )
    for i, item in enumerate(given.input or ()):
        if item["type"] == "item_reference":
            raise RequestError(
                f"input[{i}].type='item_reference' is not available in a batch; send the item "
                "itself.",
                f"input[{i}].type",
            )
    state = state_of(request)
    await state.find_model(request, given.model)
    given = given.model_copy(update={"store": False})
    digest = hashlib.blake2b(context_of(request).request_id.encode(), digest_size=16)
    name = f"resp_{digest.hexdigest()}"
    new = await offload(2 * len(given.input or ()), with_ids, given.input or (), name, 0)
    chat = await _to_chat(request, given, [], new)
    answer = ResponseAnswer(request, given, chat, name, [], new)
    return await state.run(request.receive, answer.answer(), answer.deadline)


async def count_input_tokens(request: Request) -> Response:
    """Return the number of tokens of the input of a response."""
    state = state_of(request)
    given = await read_model(request, InputTokensBody, state.max_chat_bytes)
    given.check()
    await state.find_model(request, given.model)
    engine = await state.get_engine()
    tokenizer = state.tokenizer(engine, "input")
    before, new = await _all_items(request, given, new_id("resp"))
    chat = await _to_chat(request, given, before, new)
    try:
        options = unanswered_options(state, context_of(request), chat.cache_salt)
        reading = await read_chat(chat, engine, state, 0, options)
        count = await count_prompt_tokens(reading, engine, tokenizer, options)
    except RequestError as error:
        raise renamed(error) from None
    return answers.respond(
        response_answers.ResponseInputTokens(object="response.input_tokens", input_tokens=count)
    )


async def get_response(request: Request) -> Response:
    """Return a stored response; with `stream` the events of a background response."""
    query = request.query_params
    state, _, running = _running(request)
    wants_stream = query.get("stream", "false")
    if wants_stream not in ("true", "false"):
        raise RequestError(
            f"stream={show(wants_stream)} is not allowed; use true or false.", "stream"
        )
    after = query.get("starting_after")
    if wants_stream == "false":
        if after is not None:
            raise RequestError("starting_after needs stream=true.", "starting_after")
        if running is not None:
            return answers.respond(await running.settled())
        stored = await _stored(request)
        # With logprobs it may be long.
        written = await offload(_LONG, encode, stored.response)
        return Response(written, media_type="application/json")
    begin = 0
    if after is not None:
        if not (after.isascii() and after.isdecimal() and len(after) <= _MAX_DIGITS):
            raise RequestError(
                f"starting_after={show(after)} is not allowed; it is the sequence_number of an "
                "event.",
                "starting_after",
            )
        begin = int(after) + 1
    if running is None:
        log = await _finished_log(request)
    else:
        assert running.log is not None
        log = running.log
    log.check(begin, "starting_after")
    return _reading(state, log, begin)


def _reading(state: ServerState, log: EventLog, begin: int) -> Response:
    """Return a response with the events of a log from number `begin` on."""
    number = begin

    async def read() -> Events:
        nonlocal number
        async with aclosing(log.read(begin)) as pieces:
            async for piece in pieces:
                number += len(piece)
                yield piece

    def failed(error: BaseException) -> bytes:
        detail = error_detail(error)
        event = {**detail, "type": "error", "sequence_number": number}
        return b"event: error\ndata: " + encode(event) + b"\n\n"

    return EventStream(state, read(), None, last=b"", write_error=failed)


async def _finished_log(request: Request) -> EventLog:
    """Return the events of a background response that has ended."""
    stored = await _stored(request)
    if not stored.response["background"]:
        raise RequestError(
            "stream=true is for responses with background=true; retrieve this one without stream.",
            "stream",
        )
    if stored.events is None:
        raise events_dropped()
    return await offload(_LONG, EventLog.of, stored.events)


async def delete_response(request: Request) -> Response:
    """Delete a stored response; a background response that still runs is cancelled."""
    state, name, running = _running(request)
    if running is not None:
        await running.cancel()
    else:
        await _stored(request)
    await state.objects.delete(context_of(request).api_key, name)
    return answers.respond(answers.Deleted(id=name, object="response", deleted=True))


async def cancel_response(request: Request) -> Response:
    """Cancel a background response, and return it; one that has ended stays as it is."""
    check_media_type(request)
    _, _, running = _running(request)
    if running is not None:
        await running.cancel()
        return answers.respond(running.snapshot())
    stored = await _stored(request)
    if not stored.response["background"]:
        raise RequestError(
            "Only a response with background=true can be cancelled; this one had no such field.",
            "background",
        )
    return answers.respond(stored.response)


async def list_input_items(request: Request) -> Response:
    """Return a page of the input items of a stored response."""
    _, _, running = _running(request)
    items = (await _stored(request)).items if running is None else running.items
    return item_list(request, items)


def _running(request: Request) -> tuple[ServerState, str, ResponseAnswer | None]:
    """Return the server, the id in the path, and its background response if that still runs."""
    state, name = state_of(request), request.path_params["response_id"]
    store_of(state, "This address")
    return state, name, state.background.running.get((context_of(request).api_key, name))


async def _stored(request: Request) -> StoredResponse:
    """Return the stored response that the path names.

    Raises:
        NotFoundError: the key has no response of this name.
    """
    name = request.path_params["response_id"]
    stored = await _load_response(request, name)
    if stored is None:
        raise not_found("Response", name)
    return stored


async def _load_response(request: Request, name: str) -> StoredResponse | None:
    stored = await load_for(request, name, StoredResponse)
    if stored is not None and stored.response["status"] in _UNFINISHED:
        stored.response |= {"status": "failed", "error": _INTERRUPTED}
    return stored


async def _all_items(
    request: Request, given: InputTokensBody, name: str
) -> tuple[list[Item], list[Item]]:
    """Return the input items of the response `name`: those of earlier responses, and its own.

    Raises:
        RequestError: an earlier response, a conversation or a referenced item is not stored, or
            is not complete.
    """
    state, api_key = state_of(request), context_of(request).api_key
    before: list[Item] = []
    if (previous := given.previous_response_id) is not None:
        store_of(state, "previous_response_id", "previous_response_id")
        stored = None
        running: ResponseAnswer | None = state.background.running.get((api_key, previous))
        if running is None or (await running.settled())["status"] not in _UNFINISHED:
            stored = await _load_response(request, previous)
            if stored is None:
                raise RequestError(
                    f"Previous response with id {show(previous)} not found: it was never stored "
                    "for this API key, was deleted, or its memory was needed; send the whole input "
                    "instead.",
                    "previous_response_id",
                    "previous_response_not_found",
                )
        if stored is None or stored.response["status"] not in _USABLE:
            status = "in_progress" if stored is None else stored.response["status"]
            raise RequestError(
                f"previous_response_id={show(previous)} has the status {status}; name a response "
                "that is completed or incomplete.",
                "previous_response_id",
            )
        before = stored.items + stored.response["output"]
    elif given.conversation is not None:
        store_of(state, "conversation", "conversation")
        conversation = await load_conversation(request, given.conversation.id)
        before = conversation.items
    known = {item["id"]: item for item in before}
    owners: set[str] = set()
    new: list[Item] = []
    for i, item in enumerate(given.input or ()):
        if item["type"] == "item_reference":
            owner = owner_of(item["id"])
            is_known = item["id"] in known or owner in owners
            if owner is not None and not is_known:
                store_of(state, f"input[{i}]: an item_reference", f"input[{i}].id")
                owners.add(owner)
                if len(owners) > MAX_REFERENCED:
                    raise too_many_owners()
                known = await _items_of(request, owner) | known
            found = known.get(item["id"])
            if found is None:
                raise RequestError(
                    f"input[{i}]: item with id {show(item['id'])} not found; send the item itself.",
                    f"input[{i}].id",
                    "item_not_found",
                )
            new.append(found)
        else:
            new.append(item)
    return before, await offload(2 * len(new), with_ids, new, name, len(before))


async def _to_chat(
    request: Request, given: InputTokensBody, before: list[Item], new: list[Item]
) -> ChatBody:
    """Return the chat that a body and the items before it describe.

    Raises:
        RequestError: all items together are too large, or the fields do not fit together.
    """
    limit = state_of(request).max_chat_bytes
    refers = any(item["type"] == "item_reference" for item in given.input or ())

    def convert() -> ChatBody:
        if (before or refers) and (size := items_nbytes(before + new)) > limit:
            raise RequestError(
                f"The input, with the items to which it refers and those before it, has {size} "
                f"bytes, and the limit is {limit} (--max-request-bytes); send less, or begin a new "
                "conversation.",
                "input",
                "request_too_large",
            )
        return given.to_chat(items)

    items = await with_files(request, before + new)
    return await offload(context_of(request).body_bytes // 8 + 20 * len(before), convert)


async def _items_of(request: Request, owner: str) -> dict[str, Item]:
    """Return the items of a stored response or conversation by id."""
    items: list[Item] = []
    if (response := await _load_response(request, f"resp_{owner}")) is not None:
        items = response.items + response.response["output"]
    elif conversation := await load_for(request, f"conv_{owner}", StoredConversation):
        items = conversation.items
    return {item["id"]: item for item in items}


class ResponseAnswer(ChatCompletion):
    """One request of the Responses API.

    Args:
        request: the request.
        given: its body.
        chat: the chat that the body describes.
        name: id of the response.
        before: input items of earlier responses or of the conversation.
        new: further input items.

    Attributes:
        items: all input items.
    """

    prompt_param = "input"
    reports_cache_misses = False

    def __init__(
        self,
        request: Request,
        given: ResponseBody,
        chat: ChatBody,
        name: str,
        before: list[Item],
        new: list[Item],
    ) -> None:
        super().__init__(request, chat)
        self.id = name
        self.items = items = before + new
        self._new = new
        self.log: EventLog | None = None
        """Events of a background response."""
        self._given = given
        self._stores = has_store(self.state) and given.store is not False
        self._created = self.context.created or int(time.time())
        self._completed: int | None = None
        self._status: response_answers.ResponseStatus = (
            "queued" if given.background else "in_progress"
        )
        self._error: response_answers.ResponseError | None = None
        self._sequence = 0
        self._output = OutputItems(
            self._new_item_id, lambda start: self.begin_call(0, start), given.namespaces()
        )
        self._num_items = len(items)
        self._logprobs_ahead: list[Any] = []
        """Logprobs of tokens whose text has not come yet."""
        self._reasoning_tokens = 0
        self._explanation: explain_answers.Explained = {}
        self._temperature, self._top_p = given.temperature, given.top_p
        self._accepted = asyncio.Event()
        """Event that is set when the request has been read for the engine."""
        self._cancelled = asyncio.Event()
        self._ended = asyncio.Event()
        """Event that is set when a background response has been stored."""
        self._refusal: Exception | None = None
        """Error of a background response before it was accepted."""
        self._held = ExitStack()
        """Parts of the server that a background response releases at its end."""
        self._body_bytes = 0
        """Bytes of the body, which a background response keeps after its HTTP request."""

    async def read(self, engine: AsyncLLM) -> Reading:
        """Return the request for the engine; see `Generation.read`."""
        reading = await super().read(engine)
        if self._given.wants_logprobs and self.make_parser is not None:
            raise RequestError(
                f'include=["{LOGPROBS}"] is not available with tools, or with a model whose '
                "reasoning is separated from the text; leave it out, start the server with "
                "--reasoning-parser none, or use /v1/chat/completions.",
                "include",
            )
        params = reading.params
        self._temperature, self._top_p = params.temperature, params.top_p
        self._accepted.set()
        return reading

    def _blamed(self, error: RequestError) -> RequestError:
        """Set the field of the body that caused an error; see `Generation._blamed`."""
        return renamed(super()._blamed(error))

    async def answer(self) -> Response:
        """Return the whole response."""
        completion: CompletionOutput | None = None
        async with aclosing(self._outputs()) as stream:
            async for _, output in stream:
                (completion,) = output.outputs
        assert completion is not None
        self._told(completion)
        await self._end(completion)
        await self._save()
        return answers.respond(self.snapshot())

    async def events(self) -> Events:
        """Yield the server-sent events of the response."""
        completion: CompletionOutput | None = None
        async with aclosing(self._outputs()) as stream:
            async for _, output in stream:
                if completion is None:
                    self._status = "in_progress"
                    begun = ["created", "in_progress"][bool(self.log) :]
                    yield [self._lifecycle(name) for name in begun]
                (completion,) = output.outputs
                if written := self._told(completion):
                    yield written
        assert completion is not None
        made = await self._end(completion)
        last = "completed" if self._status == "completed" else "incomplete"
        if self.log is None:
            await self._save()
        yield [*self._written(made), self._lifecycle(last)]

    async def settled(self) -> response_answers.ResponseObject:
        """Return a background response as it is now; one that is complete has also been stored."""
        if self._status not in _UNFINISHED:
            await self._ended.wait()
        return self.snapshot()

    def failed(self, error: BaseException) -> bytes:
        """Return the last events of a response that failed."""
        status = error_status(error)
        self._error = response_answers.ResponseError(
            code="rate_limit_exceeded"
            if status == 429
            else "invalid_prompt"
            if 400 <= status < 500 and status != 408
            else "server_error",
            message=error_detail(error)["message"],
        )
        return self._cut("failed", "failed")

    def _cut(self, status: response_answers.ResponseStatus, last: str) -> bytes:
        """End the response before its answer is complete; return the last events."""
        events = self._written(self._output.close("incomplete"))
        self._status = status
        return b"".join([*events, self._lifecycle(last)])

    def snapshot(self) -> response_answers.ResponseObject:
        """Return the response as it is now."""
        given = self._given
        text: dict[str, Any] = {"format": {"type": "text"}}
        if given.text is not None:
            text |= given.text.model_dump(by_alias=True, exclude_none=True)
        reasoning = given.reasoning
        conversation = given.conversation
        status = self._status
        cut = response_answers.IncompleteDetails(reason="max_output_tokens")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed,
            "status": status,
            "background": bool(given.background),
            "error": self._error,
            "incomplete_details": cut if status == "incomplete" else None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "max_tool_calls": given.max_tool_calls,
            "model": given.model or self.state.model_names[0],
            "output": self._output.whole(),
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "previous_response_id": given.previous_response_id,
            "conversation": None if conversation is None else {"id": conversation.id},
            "prompt_cache_key": given.prompt_cache_key,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None if reasoning is None else reasoning.summary,
            },
            "safety_identifier": given.safety_identifier,
            "service_tier": "default",
            "store": self._stores,
            "temperature": self._temperature,
            "top_p": self._top_p,
            "text": text,
            "tool_choice": given.tool_choice or "auto",
            "tools": [tool.written() for tool in given.tools or ()],
            "top_logprobs": given.top_logprobs or 0,
            "truncation": "disabled",
            "usage": self._usage() if status in _USABLE else None,
            "user": given.user,
            "metadata": given.metadata or {},
            **self._explanation,
        }

    def _usage(self) -> response_answers.ResponseUsage:
        usage = self.usage.to_dict()
        details = usage["prompt_tokens_details"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": 0 if details is None else details["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    def _new_item_id(self, kind: str) -> str:
        self._num_items += 1
        return item_id(kind, self.id, self._num_items - 1)

    def _told(self, completion: CompletionOutput) -> list[bytes]:
        """Add the new tokens of the answer; return the server-sent events that report them."""
        found = self._logprobs(completion)
        if found is not None:
            self._logprobs_ahead += found["content"]
        written: list[bytes] = []
        for part in self._parse(0, completion):
            template = None if self._logprobs_ahead else self._output.grow(part)
            if template is None:
                written += self._written(self._output.add(part, self._logprobs_ahead))
                self._logprobs_ahead = []
            else:
                written.append(template % (self._sequence, encode(part.text)))
                self._sequence += 1
        return written

    async def _end(self, completion: CompletionOutput) -> list[Event]:
        """End the output; return the events that report it."""
        reason = completion.finish_reason
        # Clients know no other reason than the length for an answer that its guard ended.
        reason = "length" if stopped_by_guard(completion) else reason
        self._status = _STATUSES.get(reason or "", "completed")
        # A line of a batch has the same bytes whenever it runs.
        now = self.context.created or int(time.time())
        self._completed = now if self._status == "completed" else None
        events: list[Event] = []
        if self._logprobs_ahead:  # of tokens without text
            events = self._output.add(Text(""), self._logprobs_ahead)
            self._logprobs_ahead = []
        events += self._output.end("completed" if self._status == "completed" else "incomplete")
        thoughts, tokenizer = self._output.reasoning(), self.tokenizer
        if thoughts and tokenizer is not None:
            # Tokens of the text, so that their number does not depend on how it arrived.
            ids = await offload(sum(map(len, thoughts)), tokenizer.encode_all, thoughts)
            self._reasoning_tokens = min(sum(map(len, ids)), self.usage.completion_tokens)
        self._explanation = await self.explanation()
        return events

    def _written(self, events: Sequence[Event]) -> list[bytes]:
        """Return events with their numbers, as server-sent events."""
        first = self._sequence
        self._sequence += len(events)
        return [write_event(event, number) for number, event in enumerate(events, first)]

    def _lifecycle(self, name: str) -> bytes:
        """Return an event with the response as it is now."""
        event = {"type": f"response.{name}", "response": self.snapshot()}
        (written,) = self._written([event])
        return written

    async def _save(self) -> None:
        """Store the response, and add it to its conversation, even if the client leaves meanwhile.

        The conversation is held until then.
        """
        work = asyncio.create_task(self._store())
        try:
            await asyncio.shield(work)
        finally:
            await asyncio.wait({work})

    async def _store(self) -> None:
        state, api_key = self.state, self.context.api_key
        if self._stores:
            events = None if self.log is None else await offload(_LONG, self.log.joined)
            stored = StoredResponse(dict(self.snapshot()), self.items, events)
            await save(state.objects, api_key, self.id, stored)
        conversation = self._given.conversation
        if conversation is not None and self._status in _USABLE:
            await append_items(state, api_key, conversation.id, [*self._new, *self._output.whole()])

    # In the background

    async def in_background(self, held: ExitStack) -> Response:
        """Begin a background response; return it as it is then, or its events.

        Args:
            held: what to release when the response has ended.
        """
        self.log = EventLog((await self.state.get_engine()).request_memory)
        self._held = held.pop_all()
        self.log.append([self._lifecycle("created"), self._lifecycle("queued")])
        self.state.background.running[self.context.api_key, self.id] = self
        task = self.state.background.start(self._work())
        accepted = asyncio.create_task(self._accepted.wait())
        await asyncio.wait({task, accepted}, return_when=asyncio.FIRST_COMPLETED)
        accepted.cancel()
        if self._refusal is not None:
            raise self._refusal
        if task.done():
            task.result()  # raises an error of the store
        else:  # the body lives until the response is complete
            self._body_bytes, self.context.body_bytes = self.context.body_bytes, 0
        if self._given.stream:
            return _reading(self.state, self.log, 0)
        return answers.respond(self.snapshot())

    async def cancel(self) -> None:
        """Cancel a background response; return when it has ended."""
        self._cancelled.set()
        await self._ended.wait()

    async def _work(self) -> None:
        """Make a background response, and store it at its begin and at its end."""
        state, log = self.state, self.log
        assert log is not None
        state.num_active += 1  # a server that is about to stop waits for it
        try:
            await self._save()
            try:
                await state.run(self._until_cancelled, self._take_in(log), self.deadline)
            except Exception as error:
                if not self._accepted.is_set():
                    self._refusal = error
                    await state.objects.delete(self.context.api_key, self.id)
                    return
                if isinstance(error, ClientDisconnectError):
                    last = self._cut("cancelled", "incomplete")
                else:
                    log_unexpected(error)
                    last = self.failed(error)
                log.append(split_events(last))
            await self._save()
        finally:
            log.end()
            log.release()
            del state.background.running[self.context.api_key, self.id]
            state.num_active -= 1
            state.body_bytes -= self._body_bytes
            self._held.close()
            self._ended.set()

    async def _take_in(self, log: EventLog) -> None:
        async with aclosing(self.events()) as events:
            async for piece in events:
                log.append(piece)

    async def _until_cancelled(self) -> dict[str, Any]:
        await self._cancelled.wait()
        return {"type": "http.disconnect"}
