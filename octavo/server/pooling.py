"""Base of the requests for vectors and scores: running texts, counting tokens, writing results."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.frontend.prompts import Prompt
from octavo.frontend.time_line import Stages
from octavo.outputs import PoolingOutput, PoolingRequestOutput
from octavo.pooling_params import PoolingParams
from octavo.server import generation_answers
from octavo.server.body import read_model
from octavo.server.call import Call
from octavo.server.chat import render_messages
from octavo.server.large_answers import LargeAnswer
from octavo.server.load_report import add_load_report
from octavo.server.pooling_schema import InputBody, PooledBody
from octavo.server.state import state_of
from octavo.system.offload import offload

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=PooledBody)
N = TypeVar("N", bound=InputBody)
T = TypeVar("T")
Floats = NDArray[np.float32]
Encoding = Literal["float", "base64"]

# Texts in the engine at a time, as a multiple of the most that a step computes: the next step's
# texts wait there.
_STEPS_AHEAD = 2
# Number of texts that are started before the event loop may do other work.
_TEXTS_AT_ONCE = 4
# Bytes of an answer that is written while it is sent, and of a piece of it.
_LARGE = 2**20
_PIECE = 2**18
# Number of texts whose records have the size of a prompt's record.
_TEXTS_OF_A_PROMPT = 4
# Bytes of a result besides its JSON.
_RESULT = 256

encode = msgspec.json.encode


class NotFiniteError(RequestError):
    """Result that is no number: the model's weights or activations overflow."""

    status = 500
    type = "server_error"

    def __init__(self, where: str) -> None:
        super().__init__(
            f"The result of {where} is not finite (NaN or infinite); serve the model with "
            "--dtype float32.",
            None,
            "result_not_finite",
        )


class Input(NamedTuple):
    """Text for the engine."""

    prompt: Prompt | Callable[[], Awaitable[str]]
    """The text, or a function that makes it when the engine has room for it."""
    where: str
    """Its place in the body, such as input[3]."""
    prompt_name: str | None = None
    """Prompt, or role, of this text; None: the request's."""


@dataclass(slots=True)
class Counts:
    """Token counts of a request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class PoolingCall(Call, ABC, Generic[B]):
    """HTTP request for vectors or scores, from its checked body to the bytes of the answer."""

    id_prefix: str
    param: str
    """Field that holds the texts."""

    def __init__(self, request: Request, body: B) -> None:
        super().__init__(request, body, self.id_prefix)
        self.body = body
        self._request = request
        self.counts = Counts()
        self._started = self.context.arrival

    @classmethod
    async def read(cls, request: Request, kind: type[B]) -> Response:
        """Read the body of a request, which is of class `kind`, and answer it."""
        limit = state_of(request).config.max_request_bytes
        return await cls.serve(request, await read_model(request, kind, limit))

    @classmethod
    async def serve(cls, request: Request, body: B) -> Response:
        """Check a body and answer it."""
        body.check()
        await state_of(request).find_model(request, body.model, body.deadline_ms)
        return await cls(request, body).respond()

    async def respond(self) -> Response:
        """Answer the body while the client waits; its disconnection ends all texts."""
        response = await self.state.run(self._request.receive, self._answer(), self.deadline)
        engine = await self.state.get_engine()
        add_load_report(self._request, response, engine.metrics)
        return response

    async def _answer(self) -> Response:
        await self.state.get_engine()
        self._started = time.monotonic()
        return await self.answer()

    @abstractmethod
    async def answer(self) -> Response:
        """Return the answer.

        Raises:
            RequestError: the model cannot do it, or a text is wrong.
        """

    async def results(
        self,
        engine: AsyncLLM,
        inputs: Sequence[Input],
        params: PoolingParams,
        convert: Callable[[int, Floats], T],
        *,
        add_special_tokens: bool = True,
    ) -> list[T]:
        """Run all texts; return their results in the order of the texts.

        Args:
            engine: the engine.
            inputs: the texts.
            params: parameters of each.
            convert: makes the result of a text from its number and its numbers.
            add_special_tokens: True if the tokenizer adds its special tokens.

        Raises:
            RequestError, NotFiniteError: as for `made`.
        """
        return await self.made(
            engine,
            inputs,
            params,
            lambda index, output: convert(index, output.outputs.data),
            add_special_tokens=add_special_tokens,
        )

    async def made(
        self,
        engine: AsyncLLM,
        inputs: Sequence[Input],
        params: PoolingParams,
        make: Callable[[int, PoolingRequestOutput[PoolingOutput]], T],
        *,
        add_special_tokens: bool = True,
    ) -> list[T]:
        """Run all texts; return their results in the order of the texts.

        The first error ends all of them, and so does a cancellation. The engine has a limited
        number of them at a time.

        Args:
            engine: the engine.
            inputs: the texts.
            params: parameters of each.
            make: makes the result of a text from its number and its output.
            add_special_tokens: True if the tokenizer adds its special tokens.

        Raises:
            RequestError: a text is wrong; `param` has its place.
            NotFiniteError: a result is not finite.
        """
        # The stages of the first text alone are recorded.
        story = self.begin_story(self.counts, 1 + len(inputs) // _TEXTS_OF_A_PROMPT, self._started)
        if story is not None:
            story.mark()
            story.is_one = True
        stages = None if story is None else Stages()
        priority = self.body.priority or 0
        self.note_priority(engine, priority)
        if self.state.config.enable_log_requests:
            # Texts are not logged: others than their author keep and read logs.
            logged = {"texts": len(inputs), "params": encode(params).decode()}
            logger.info("request", extra=logged)
        trace_headers = self.trace_headers(engine)
        found: dict[int, T] = {}
        waiting = iter(enumerate(inputs))

        async def work(add: Callable[[int], None]) -> None:
            for index, text in waiting:
                options = msgspec.structs.replace(
                    self.options(index, trace_headers), priority=priority
                )
                its = params
                if text.prompt_name is not None:
                    its = msgspec.structs.replace(params, prompt_name=text.prompt_name)
                try:
                    number = self.state.next_id()
                    if story is not None and stages is not None:
                        story.prompts[number] = stages
                    prompt = await text.prompt() if callable(text.prompt) else text.prompt
                    output = await engine.serve_pooling(
                        prompt,
                        its,
                        f"{self.id}-{index}-{number}",
                        options,
                        add_special_tokens=add_special_tokens,
                        stages=stages if index == 0 else None,
                    )
                except RequestError as error:
                    raise _blamed(error, text.where, self.body.own_names()) from None
                x = output.outputs.data
                add(_RESULT + x.nbytes)
                if not np.isfinite(x).all():
                    raise NotFiniteError(text.where)
                found[index] = result = await offload(x.size // 10, make, index, output)
                add(max(0, _nbytes(result) - x.nbytes))
                self._count(output)

        most = _STEPS_AHEAD * engine.num_engines * engine.config.scheduler.max_num_seqs
        places = self.state.places(min(len(inputs), most))
        with (
            nullcontext() if story is None else story.at_work(),
            self.admit(places, self.param),
            engine.request_memory.collect() as add,
        ):
            tasks: list[asyncio.Task[None]] = []
            try:
                for i in range(places):
                    if i and i % _TEXTS_AT_ONCE == 0:
                        await asyncio.sleep(0)
                    tasks.append(asyncio.create_task(work(add)))
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return [found[i] for i in range(len(inputs))]

    def _count(self, output: PoolingRequestOutput[PoolingOutput]) -> None:
        self.counts.prompt_tokens += len(output.prompt_token_ids)
        self.counts.cached_tokens += output.num_cached_tokens
        self.context.prompt_tokens, self.context.completion_tokens = self.counts.prompt_tokens, 0

    def usage(self) -> generation_answers.Usage:
        """Return OpenAI's `usage`."""
        details: generation_answers.PromptTokensDetails | None = None
        if self.state.config.enable_prompt_tokens_details and not self.context.background:
            details = {"cached_tokens": self.counts.cached_tokens}
        return {
            "prompt_tokens": self.counts.prompt_tokens,
            "completion_tokens": 0,
            "total_tokens": self.counts.prompt_tokens,
            "prompt_tokens_details": details,
        }

    def envelope(self) -> dict[str, object]:
        """Return the fields that all answers in OpenAI's form have, besides `data` and `usage`."""
        return {
            "id": self.id,
            "object": "list",
            "created": self.context.created or int(time.time()),
            "model": self.model_name,
        }

    async def write(self, head: bytes, rows: Sequence[bytes], tail: bytes) -> Response:
        """Return an answer with a list of results; a long one is joined while it is sent."""
        return await self.write_lists([(head, rows)], tail)

    async def write_lists(
        self, lists: Sequence[tuple[bytes, Sequence[bytes]]], tail: bytes
    ) -> Response:
        """Return an answer with several lists of results, each after a head; see `write`."""
        length = sum(len(row) + 1 for _, rows in lists for row in rows)
        pieces = _pieces(lists, tail)
        if length <= _LARGE:
            return Response(b"".join(pieces), media_type="application/json")
        memory = (await self.state.get_engine()).request_memory
        return LargeAnswer(self.state, pieces, memory.hold(length), self.deadline)

    async def write_list(self, rows: Sequence[bytes]) -> Response:
        """Return an answer in OpenAI's form, from the JSON of its `data`."""
        head = encode(self.envelope())[:-1] + b',"data":['
        tail = {"usage": self.usage(), **await self.explanation()}
        return await self.write(head, rows, b"]," + encode(tail)[1:])


class InputCall(PoolingCall[N]):
    """Request with texts, or with a chat."""

    param = "input"

    async def run(
        self,
        engine: AsyncLLM,
        task: str,
        convert: Callable[[int, Floats], bytes],
    ) -> Response:
        """Return the answer in OpenAI's form, from the JSON of each result."""
        inputs, special = await self._read(engine)
        params = self.body.pooling_params(task)
        rows = await self.results(engine, inputs, params, convert, add_special_tokens=special)
        return await self.write_list(rows)

    async def _read(self, engine: AsyncLLM) -> tuple[list[Input], bool]:
        """Return the texts, and True if the tokenizer adds its special tokens."""
        body = self.body
        if body.messages is None:
            return text_inputs(body.input, "input"), body.add_special_tokens is not False
        template = await self.state.chat_template(self.state.tokenizer(engine, "messages"))
        if not template.available:
            raise RequestError(
                "This model has no chat template; send input instead of messages, or start the "
                "server with --chat-template.",
                "messages",
            )
        rendered = await render_messages(
            template,
            body.messages,
            bool(body.add_generation_prompt),
            body.continue_final_message,
            self.state.template_kwargs(body.chat_template_kwargs),
            None,
            body.documents,
        )
        # The template writes the special tokens itself.
        return [Input(rendered.text, "messages")], bool(body.add_special_tokens)


def numbers_json(x: Floats, encoding: Encoding = "float") -> bytes:
    """Return the JSON of numbers: a list, or a list of lists; or base64 of float32."""
    if encoding == "base64":
        return b'"' + base64.b64encode(x.astype("<f4").tobytes()) + b'"'
    return encode(x.tolist())


def text_inputs(value: Any, param: str) -> list[Input]:
    """Return the texts of a field: a text, token ids, or a list of either."""
    if isinstance(value, str) or isinstance(value[0], int):
        return [Input(value, param)]
    return [Input(text, f"{param}[{i}]") for i, text in enumerate(value)]


def _pieces(lists: Iterable[tuple[bytes, Iterable[bytes]]], tail: bytes) -> Iterator[bytes]:
    """Yield an answer in pieces of at least `_PIECE` bytes, except the last one."""
    piece = bytearray()
    for head, rows in lists:
        piece += head
        for i, row in enumerate(rows):
            piece += (b"," if i else b"") + row
            if len(piece) >= _PIECE:
                yield bytes(piece)
                piece.clear()
    yield bytes(piece + tail)


def _blamed(error: RequestError, where: str, names: Mapping[str, str]) -> RequestError:
    """Return an engine's error with the place of the text, and the body's names of its fields."""
    if error.param == "prompt":
        said = error.message.removeprefix("prompt ")
        joined = f"{where} {said}" if said != error.message else f"{where}: {said}"
        error.param, error.message = where, joined
    for name, own in names.items():
        error.message = error.message.replace(name, own)
        error.param = own if error.param == name else error.param
    return error


def _nbytes(result: object) -> int:
    """Return the bytes of the JSON of a result; 0: it is none."""
    if isinstance(result, tuple):
        return sum(map(len, result))
    return len(result) if isinstance(result, bytes) else 0
