"""Base of completions and chat completions: running prompts, counting tokens, streaming."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import RequestError
from octavo.frontend.encoder_prompt import encoder_token_ids
from octavo.frontend.prompts import EmbedsPrompt
from octavo.frontend.request_memory import logprobs_nbytes
from octavo.messages import MultiModalFeatureSpec
from octavo.outputs import (
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
)
from octavo.parsers.parts import Parser, Part, Text
from octavo.sampling_params import SamplingParams
from octavo.server import explain_answers, generation_answers
from octavo.server.abilities import check_generates
from octavo.server.call import Call
from octavo.server.errors import ClientDisconnectError, error_event, log_unexpected
from octavo.server.http_state import HttpState
from octavo.server.large_answers import LargeAnswer
from octavo.server.load_report import add_load_report
from octavo.server.parts import Delta
from octavo.server.prompt_difference import find_difference
from octavo.server.recent_prompts import LONG, Found, Recorded, explain, to_bytes
from octavo.server.resumable_streams import DONE, Events, Stream
from octavo.server.schema import GenerationBody
from octavo.server.state import ServerState, state_of
from octavo.server.stories import Story
from octavo.system import clock
from octavo.system.offload import offload
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=GenerationBody)
T = TypeVar("T")

Prompt = str | list[int] | EmbedsPrompt | dict[str, Any]
IndexedOutput = tuple[int, RequestOutput]

REPETITION = "repetition"
"""Reason of the end, and `stop_reason`, of an answer that repeated itself."""

# OpenAI's value for "impossible"; JSON has no infinity.
MIN_LOGPROB = -9999.0
# Number of prompts that are started before the event loop may do other work.
_PROMPTS_AT_ONCE = 4
# Number of logprob candidates from which an answer is written while it is sent.
_MANY_CANDIDATES = 2000

encode = msgspec.json.encode


def prompt_text(prompt: Prompt) -> str | None:
    """Return the text of a prompt; None: it has none."""
    if isinstance(prompt, str):
        return prompt
    return prompt.get("prompt") if isinstance(prompt, dict) else None


class Reading(NamedTuple):
    """Request for the engine, converted from a body."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    add_special_tokens: bool


class Rendered(NamedTuple):
    """Prompt as the engine receives it."""

    text: str | None
    """None: the client sent token ids."""
    token_ids: list[int]
    params: SamplingParams
    media: list[MultiModalFeatureSpec]
    """Pictures and sounds in order of their places."""


class Generation(Call, ABC, Generic[B]):
    """HTTP request for text, from its checked body to the bytes of the answer.

    Each `RequestOutput` of the engine becomes a delta for each choice: its new tokens and parts. A
    subclass writes a delta as the JSON of the choice, in a chunk or in the whole answer.
    """

    id_prefix: str
    object_name: str
    chunk_object_name: str
    prompt_param: str
    """Field that holds the prompt."""
    make_parser: Callable[[int], Parser] | None = None
    """Maker of the parser of a choice, from the number of its prompt; None: an answer is text."""
    reports_cache_misses = True
    """True if the usage explains missed prefixes; the usage of other APIs has no place for that."""
    text_chunk: bytes | None = None
    """Template of a choice with only text, faster than `write`; None: use `write`."""

    def __init__(self, request: Request, body: B) -> None:
        super().__init__(request, body, self.id_prefix, body.max_ttft_ms)
        self.body = body
        self.n = 1 if body.n is None else body.n
        self.usage = Usage(self.reports_cached_tokens)
        self._times: RequestMetrics | None = None
        """Times of the request, if they are reported."""
        self.tokenizer: Tokenizer | None = None
        self._parsers: dict[int, Parser] = {}
        """Parsers of the choices that have started."""
        self._tokens_as_ids = body.return_tokens_as_token_ids
        if self._tokens_as_ids is None:
            self._tokens_as_ids = self.state.config.return_tokens_as_token_ids
        self._envelope: dict[str, object] = {
            "id": self.id,
            "object": self.chunk_object_name if body.stream else self.object_name,
            "created": self.context.created or int(time.time()),
            "model": self.model_name,
            "system_fingerprint": self.state.system_fingerprint,
        }

    @classmethod
    async def respond(cls, request: Request, body: B) -> Response:
        """Answer a body, as a stream or at once."""
        state = state_of(request)
        body.check()
        await state.find_model(request, body.model, body.deadline_ms, body.max_ttft_ms)
        generation = cls(request, body)
        if body.stream:
            return generation.stream()
        response = await state.run(request.receive, generation.answer(), generation.deadline)
        add_load_report(request, response, (await state.get_engine()).metrics)
        return response

    def stream(self) -> Response:
        """Return the answer as a stream; with --resume-grace it outlives its connection."""
        state, context = self.state, self.context
        events = self.events()
        stream = state.streams.open(self.id, context.api_key, events, self.deadline)
        if stream is None:
            return EventStream(state, events, self.deadline)
        # The body lives until the stream is complete, which may outlast this connection.
        nbytes, context.body_bytes = context.body_bytes, 0

        def let_go(_: object) -> None:
            state.body_bytes -= nbytes

        stream.task.add_done_callback(let_go)
        return reading(state, stream, 0)

    @property
    def reports_cached_tokens(self) -> bool:
        """True if the usage has details. Those of a batch's lines would differ from run to run."""
        return self.state.config.enable_prompt_tokens_details and not self.context.background

    @property
    @abstractmethod
    def num_prompts(self) -> int:
        """Number of prompts in this request."""

    @property
    def num_answers(self) -> int:
        """Number of answers made to each prompt."""
        return self.n

    @abstractmethod
    async def read(self, engine: AsyncLLM) -> Reading:
        """Return the request for the engine.

        Raises:
            RequestError: the body cannot be turned into a request for this engine.
        """

    @abstractmethod
    def write(self, delta: Delta) -> Mapping[str, object] | None:
        """Return the choice of a chunk, or of the answer without a stream; None: no choice."""

    def opening(self, prompt: int) -> list[list[Part]]:
        """Return the parts before the first token of each answer to a prompt, by delta."""
        return []

    def prompt_fields(self, outputs: list[RequestOutput]) -> dict[str, object]:
        """Return the fields about the prompts: of the answer, or of the first chunk."""
        return {}

    def ready(self, prompt: int, output: RequestOutput) -> list[RequestOutput]:
        """Return the outputs of a prompt to write now; `output` is the newest one."""
        return [output]

    def choices(self, outputs: list[RequestOutput]) -> Iterator[Mapping[str, object] | None]:
        """Yield the choices of the answer, from the last output of each prompt."""
        for prompt, last in enumerate(outputs):
            opening = [part for parts in self.opening(prompt) for part in parts]
            for output in self.ready(prompt, last):
                for completion in sorted(output.outputs, key=lambda c: c.index):
                    index = prompt * self.n + completion.index
                    parts = opening + self._parse(index, completion)
                    yield self._write(Delta(index, prompt, parts, completion, output))

    def chunks(self, prompt: int, newest: RequestOutput) -> list[bytes]:
        """Return the JSON of the choices of the next chunks."""
        template = self.text_chunk
        chunks = []
        for output in self.ready(prompt, newest):
            for completion in output.outputs:
                index = prompt * self.n + completion.index
                parts = self._parse(index, completion)
                if template is not None and completion.finish_reason is None:
                    if not parts:
                        continue
                    if len(parts) == 1 and type(parts[0]) is Text:
                        chunks.append(template % (index, encode(parts[0].text)))
                        continue
                choice = self._write(Delta(index, prompt, parts, completion, output))
                if choice is not None:
                    chunks.append(encode(choice))
        return chunks

    def _write(self, delta: Delta) -> Mapping[str, object] | None:
        """Return `write`, at the end with the repetition that the guard found."""
        choice, completion = self.write(delta), delta.completion
        period = completion.repetition_period
        if choice is None or period is None or completion.finish_reason is None:
            return choice
        return {**choice, "repetition_period": period}

    def _parse(self, index: int, completion: CompletionOutput) -> list[Part]:
        if self.make_parser is None:
            return [Text(completion.text)] if completion.text else []
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self.make_parser(index // self.n)
        parts = parser.feed(completion.text)
        return parts if completion.finish_reason is None else parts + parser.end()

    def token_text(self, token_id: int, entry: Logprob | None) -> str:
        """Return the name of a candidate token in the logprobs: its text, or its ID."""
        if self._tokens_as_ids:
            return f"token_id:{token_id}"
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        if self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id)

    async def answer(self) -> Response:
        """Return the whole answer; one with many logprobs is written while it is sent."""
        outputs: dict[int, RequestOutput] = {}
        async with aclosing(self._outputs()) as stream:
            async for index, output in stream:
                outputs[index] = output
        in_order = [outputs[i] for i in sorted(outputs)]
        choices = self.choices(in_order)
        explanation = await self.explanation()

        def others() -> dict[str, object]:
            fields: dict[str, object] = {"usage": self.usage.to_dict()}
            fields |= self.prompt_fields(in_order)
            if self._times is not None:
                fields["metrics"] = self._metrics(self._times)
            params = [output.kv_transfer_params for output in in_order]
            if params[0] is not None:  # the request has one prompt then
                fields["kv_transfer_params"] = params[0]
            return {**fields, **explanation}

        candidates = [_num_candidates(output) for output in in_order]
        if sum(candidates) > _MANY_CANDIDATES:
            engine = await self.state.get_engine()
            held = engine.request_memory.hold(
                logprobs_nbytes(sum(candidates), max(map(_num_written, in_order)))
            )
            parts = _join_parts(self._envelope, map(encode, choices), others)
            return LargeAnswer(self.state, parts, held, self.deadline)

        def whole() -> bytes:
            return encode({**self._envelope, "choices": list(choices), **others()})

        written = await offload(sum(map(_writing_time, in_order)), whole)
        return Response(written, media_type="application/json")

    async def events(self) -> Events:
        """Yield the server-sent events of the answer, without the last one ([DONE])."""
        options = self.body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        always = with_usage and options is not None and bool(options.continuous_usage_stats)
        if self.state.config.enable_force_include_usage:
            with_usage = always = True
        head = b"data: " + encode(self._envelope)[:-1] + b',"choices":['
        tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        opened = False
        begun: set[int] = set()
        async with aclosing(self._outputs()) as stream:
            async for index, output in stream:
                if not output.outputs:  # the prompt is still being computed
                    yield [self._progress(output, output.num_computed_tokens)]
                    continue
                if not opened:
                    opened = True
                    if self.body.return_progress:
                        yield [self._progress(output, len(output.prompt_token_ids))]
                    for fields in self._opening(output):
                        if with_usage:
                            fields["usage"] = self.usage.to_dict(0) if always else None
                        yield [b"data: " + encode(self._envelope | fields) + b"\n\n"]
                # The first chunk may contain the prompt.
                length = _num_candidates(output) if index in begun else _writing_time(output)
                begun.add(index)
                chunks = await offload(length, self.chunks, index, output)
                if not chunks:
                    continue
                if always:
                    tail = b'],"usage":' + encode(self.usage.to_dict()) + b"}\n\n"
                yield [head + choice + tail for choice in chunks]
        explanation = await self.explanation()
        if with_usage or explanation or (self.body.return_metrics and self._times is not None):
            last = b"]"
            if with_usage:
                last += b',"usage":' + encode(self.usage.to_dict())
            if self._times is not None:
                metrics = self._metrics(self._times)
                # A chunk omits unknown times, as vLLM does.
                last += b',"metrics":' + encode({k: v for k, v in metrics.items() if v is not None})
            if explanation:
                last += b"," + encode(explanation)[1:-1]
            yield [head + last + b"}\n\n"]

    def _metrics(self, times: RequestMetrics) -> generation_answers.PerRequestMetrics:
        """Return `metrics` of the answer: vLLM's fields, and all of them on request."""
        found = metrics_json(times, self.usage.completion_tokens)
        if not self.body.return_metrics:
            return found
        return {
            **found,
            "num_cached_tokens": self.usage.cached_tokens,
            "num_preemptions": times.num_preemptions,
            "num_draft_tokens": times.num_draft_tokens,
            "num_accepted_tokens": times.num_accepted_tokens,
        }

    def _progress(self, output: RequestOutput, processed: int) -> bytes:
        """Return the chunk that tells the number of the prompt's tokens computed so far."""
        scheduled = output.metrics.first_scheduled_time
        progress: generation_answers.PromptProgress = {
            "total": len(output.prompt_token_ids),
            "cache": output.num_cached_tokens,
            "processed": processed,
            "time_ms": 0.0 if scheduled is None else (time.monotonic() - scheduled) * 1000,
        }
        chunk = {**self._envelope, "choices": [], "prompt_progress": progress}
        return b"data: " + encode(chunk) + b"\n\n"

    def _opening(self, output: RequestOutput) -> list[dict[str, object]]:
        """Return the fields of the chunks before the first token, which `output` brings."""
        chunks: list[dict[str, object]] = []
        for index in range(self.n):
            for parts in self.opening(0):  # several chats are not streamed
                delta = Delta(index, 0, parts, CompletionOutput(index, "", []), output)
                chunks.append({"choices": [self.write(delta)]})
        fields = self.prompt_fields([output])
        if fields:
            chunks = chunks or [{"choices": []}]
            chunks[0] |= fields
        return chunks

    async def _last_output(self) -> RequestOutput:
        """Return the whole output of the only prompt."""
        last: RequestOutput | None = None
        async with aclosing(self._outputs()) as stream:
            async for _, output in stream:
                last = output
        assert last is not None
        return last

    async def _outputs(self) -> AsyncGenerator[IndexedOutput, None]:
        """Yield the outputs of all prompts, as they arrive."""
        count = self.num_prompts * max(1, self.num_answers)
        blamed = "n" if self.num_answers > self.num_prompts else self.prompt_param
        with self._with_story() as story, self.admit(count, blamed):
            engine = await self.state.get_engine()
            check_generates(engine.spec)
            if story is not None:
                story.mark()
            self.tokenizer = engine.tokenizer
            try:
                prompts, params, add_special_tokens = await self.read(engine)
            except RequestError as error:
                raise self._blamed(error) from None
            await self._complete_guard(engine, params)
            if self.body.kv_transfer_params is not None and len(prompts) > 1:
                raise RequestError(
                    f"kv_transfer_params goes with one prompt, and there are {len(prompts)}; send "
                    "each by itself.",
                    "kv_transfer_params",
                )
            if self.body.return_progress and len(prompts) > 1:
                raise RequestError(
                    f"return_progress goes with one prompt, and there are {len(prompts)}; send each"
                    " by itself.",
                    "return_progress",
                )
            if self.body.return_metrics and count > 1:
                raise RequestError(
                    f"return_metrics goes with one answer to one prompt, and here are {count}; "
                    "leave it out.",
                    "return_metrics",
                )
            self.note_priority(engine, params.priority)
            if self.state.config.enable_log_requests:
                # Prompts are not logged: others than their author keep and read logs. Schemas
                # are not either, as they may be long.
                logged = msgspec.structs.replace(params, structured_outputs=None)
                wanted = params.structured_outputs
                logger.info(
                    "request",
                    extra={
                        "prompts": len(prompts),
                        "params": encode(logged).decode(),
                        "structured_outputs": None if wanted is None else wanted.kind,
                    },
                )
            if story is not None:
                story.mark()
            trace_headers = self.trace_headers(engine)

            async def one(index: int) -> AsyncGenerator[IndexedOutput, None]:
                prompt = prompts[index]
                number = self.state.next_id()
                request_id = f"{self.id}-{index}-{number}"
                stages = None if story is None else story.begin_prompt(number)
                options = msgspec.structs.replace(
                    self.options(index * params.n, trace_headers),
                    reports_progress=bool(self.body.return_progress),
                )
                if self.body.use_beam_search:
                    beams = self.body.beam_params(params.max_tokens, engine.spec.beams)
                    yield (
                        index,
                        await engine.serve_beams(
                            prompt,
                            beams,
                            request_id,
                            options,
                            add_special_tokens=add_special_tokens,
                            stages=stages,
                        ),
                    )
                    return
                stream = engine.serve(
                    prompt,
                    params,
                    request_id,
                    options,
                    add_special_tokens=add_special_tokens,
                    stages=stages,
                )
                async with aclosing(stream):  # closing aborts unfinished requests
                    async for output in stream:
                        yield index, output

            # Times of a request with several answers are not defined.
            asked = self.body.return_metrics or self.state.config.enable_per_request_metrics
            times_one = asked and count == 1 and not self.context.background
            watched: _WatchedPrompt | None = None
            reports = self.reports_cache_misses and self.reports_cached_tokens
            if (
                count == 1
                and (reports or (story is not None and not self.context.background))
                and self._may_find_misses(prompts[0], params, engine)
            ):
                watched = _WatchedPrompt(self, self.salt, reports)
            streams = [one(i) for i in range(len(prompts))]
            merged = streams[0] if len(streams) == 1 else _merge(streams)
            try:
                async with aclosing(merged):
                    async for index, output in merged:
                        self.usage.add(index, output)
                        if story is not None and story.first is None:
                            first = output.metrics.first_token_time
                            story.first = None if first is None else clock.from_monotonic(first)
                        if watched is not None:
                            await watched.take(output)
                        for completion in output.outputs:
                            if completion.finish_reason == "abort":
                                self.context.is_aborted = True
                            if completion.finish_reason == REPETITION:
                                # Clients know only OpenAI's reasons.
                                completion.finish_reason = "stop"
                                completion.stop_reason = REPETITION
                        if times_one:
                            self._times = output.metrics
                        self.context.prompt_tokens = self.usage.prompt_tokens
                        self.context.completion_tokens = self.usage.completion_tokens
                        yield index, output
            except RequestError as error:
                raise self._blamed(error) from None

    @contextmanager
    def _with_story(self) -> Iterator[Story | None]:
        """Record the request for `explain` while its outputs are made.

        Raises:
            RequestError: the request asks for an explanation, which is not available.
        """
        story = self.begin_story(self.usage, self.num_prompts)
        if story is None:
            yield None
            return
        story.is_one = bool(self.body.use_beam_search)
        with story.at_work():
            yield story

    def _may_find_misses(self, prompt: Prompt, params: SamplingParams, engine: AsyncLLM) -> bool:
        """Return True if a prompt might find a prefix in the cache."""
        return (
            engine.config.cache.enable_prefix_caching
            and params.prompt_logprobs is None  # such a prompt is computed completely
            and not self.body.use_beam_search
            and not isinstance(prompt, dict)  # embeddings, or media
        )

    def message_at(self, text: str, position: int) -> int | None:
        """Return the index of the message at a character of the prompt; None without messages."""
        return None

    async def render(self) -> list[Rendered]:
        """Return the requests that the engine would receive, in the order of the prompts.

        Raises:
            RequestError: the request is wrong.
        """
        engine = await self.state.get_engine()
        self.tokenizer = engine.tokenizer
        options = self.options(0, None)
        try:
            prompts, params, special = await self.read(engine)
            found = []
            for prompt in prompts:
                request, text = await engine.process(prompt, params, self.id, options, special)
                token_ids = encoder_token_ids(request.mm_features)
                media = [] if token_ids else request.mm_features
                ids = token_ids or request.prompt_token_ids
                found.append(Rendered(text, ids, params, media))
            return found
        except RequestError as error:
            raise self._blamed(error) from None

    async def _complete_guard(self, engine: AsyncLLM, params: SamplingParams) -> None:
        """Add what the limits of reasoning and repetition need to a request's parameters."""
        if params.repetition_guard is None:
            params.repetition_guard = self.state.config.repetition_guard
        ends_thoughts = params.repetition_guard == "close_thinking"
        if engine.tokenizer is not None and (
            ends_thoughts or params.thinking_token_budget is not None
        ):
            found = await self.state.answer_format(engine.tokenizer)
            params.reasoning_markers = None if found is None else found.thoughts

    def _blamed(self, error: RequestError) -> RequestError:
        """Set the field of the body that caused an engine's error; return the error."""
        if error.param in ("prompt", "multi_modal_data"):
            error.param = self.prompt_param
        elif error.param == "structured_outputs" and (found := self.body.constraint()):
            error.param = found[0]
        return error


def stopped_by_guard(completion: CompletionOutput) -> bool:
    """Return True if an answer ended because it repeated itself."""
    return completion.repetition_period is not None and completion.stop_reason == REPETITION


def metrics_json(times: RequestMetrics, num_tokens: int) -> generation_answers.PerRequestMetrics:
    """Return vLLM's `metrics` of an answer; unknown values are None.

    Args:
        times: times of the request.
        num_tokens: number of tokens of its answer.
    """
    scheduled, first, last = (
        times.first_scheduled_time,
        times.first_token_time,
        times.last_token_time,
    )

    def milliseconds(begin: float | None, end: float | None) -> float | None:
        return None if begin is None or end is None else (end - begin) * 1000

    decode, inference = milliseconds(first, last), milliseconds(scheduled, last)
    return {
        "time_to_first_token_ms": milliseconds(scheduled, first),
        "generation_time_ms": decode,
        "queue_time_ms": milliseconds(times.arrival_time, scheduled),
        "mean_itl_ms": decode / (num_tokens - 1) if decode is not None and num_tokens > 1 else None,
        "tokens_per_second": num_tokens / inference * 1000 if inference else None,
    }


async def make_sampling_params(
    body: GenerationBody,
    num_bytes: int,
    defaults: Mapping[str, Any],
    **overrides: object,
) -> SamplingParams:
    """Return `GenerationBody.sampling_params` of a body of `num_bytes` bytes."""
    lists = (body.stop_token_ids, body.allowed_token_ids, body.logit_bias, body.bad_words)
    work = sum(len(entries) for entries in lists if entries is not None)
    if body.constraint() is not None:
        work += num_bytes // 16  # a schema may be most of it
    return await offload(work, body.sampling_params, defaults, **overrides)


class Usage:
    """Token counts of one request."""

    def __init__(self, with_details: bool, *, count_completions: bool = True) -> None:
        self._with_details = with_details
        self._count_completions = count_completions
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._cached_tokens: dict[int, int] = {}
        """Cached tokens of each prompt; only the first of n answers reports them."""
        self.cache_miss: explain_answers.CacheMiss | None = None

    def add(self, index: int, output: RequestOutput) -> None:
        """Count the new tokens of an output, and its prompt at the first output."""
        if index not in self._cached_tokens:
            self.prompt_tokens += len(output.prompt_token_ids)
            self.prompt_tokens += len(output.encoder_prompt_token_ids or ())
        self._cached_tokens[index] = output.num_cached_tokens
        if self._count_completions:
            self.completion_tokens += sum(len(c.token_ids) for c in output.outputs)

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that were in the cache."""
        return sum(self._cached_tokens.values())

    def to_dict(self, completion_tokens: int | None = None) -> generation_answers.Usage:
        """Return OpenAI's `usage` object.

        Args:
            completion_tokens: number of tokens that have been sent; None: all.
        """
        if completion_tokens is None:
            completion_tokens = self.completion_tokens
        details: generation_answers.PromptTokensDetails | None = None
        if self._with_details:
            details = {"cached_tokens": self.cached_tokens}
            if self.cache_miss is not None:
                details["cache_miss"] = self.cache_miss
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": details,
        }


class _WatchedPrompt:
    """Prompt of a request that is recorded, and compared if much of it was not in the cache.

    Args:
        generation: the request.
        scope: scope of its cached prefixes.
        reports: True if the usage has the result.
    """

    def __init__(self, generation: Generation[Any], scope: str | None, reports: bool) -> None:
        self._generation = generation
        self._reports = reports
        self._scope = scope
        self._recorded: Recorded | None = None
        self._answer: list[int] = []
        self._begun = False

    async def take(self, output: RequestOutput) -> None:
        """Take in an output of the request."""
        if not self._begun and any(completion.token_ids for completion in output.outputs):
            self._begun = True
            if len(output.prompt_token_ids) >= LONG:
                await self._begin(output)
        if self._recorded is not None:
            (completion,) = output.outputs
            self._answer += completion.token_ids
            if output.finished:
                self._generation.state.recent_prompts.add_answer(self._recorded, self._answer)

    async def _begin(self, output: RequestOutput) -> None:
        """Explain the missed prefix, and record the prompt."""
        generation, ids = self._generation, output.prompt_token_ids
        prompts, prompt = generation.state.recent_prompts, to_bytes(ids)
        # An activated LoRA may find no tokens at which it begins.
        adapter = None if output.lora_request is None else generation.adapter_hash
        scheduled = output.metrics.first_scheduled_time
        found = None
        if scheduled is not None and len(ids) - output.num_cached_tokens >= LONG:
            found = prompts.find(self._scope, prompt, scheduled, adapter)
        if found is not None:
            engine = await generation.state.get_engine()
            emptied = engine.cache_emptied_at
            num_stored = output.metrics.num_stored_tokens
            num_cached = output.num_cached_tokens
            miss = explain(found, prompt, num_cached, num_stored, emptied, adapter)
            if miss is not None and generation.tokenizer is not None and output.prompt is not None:
                miss["message"] = await offload(
                    len(ids) // 4, self._message_of, output, generation.tokenizer, miss["token"]
                )
            if self._reports:
                generation.usage.cache_miss = miss
            if miss is not None:
                self._tell(found, prompt, miss)
        self._recorded = prompts.add(self._scope, prompt, adapter)

    def _tell(self, found: Found, prompt: bytes, miss: explain_answers.CacheMiss) -> None:
        """Record the missed prefix for `explain`."""
        generation = self._generation
        story, tokenizer = generation.context.story, generation.tokenizer
        if story is None:
            return
        story.cache_miss = miss
        if miss["reason"] == "changed" and tokenizer is not None:
            earlier = found.recorded.prompt + found.recorded.answer
            texts = generation.state.config.explain_prompts
            story.difference = find_difference(
                tokenizer, prompt, earlier, miss["token"], with_texts=texts
            )

    def _message_of(self, output: RequestOutput, tokenizer: Tokenizer, token: int) -> int | None:
        """Return the index of the message that has a token of the prompt."""
        before = tokenizer.decode(output.prompt_token_ids[:token])
        return self._generation.message_at(output.prompt or "", len(before))


class EventStream(Response):
    """Response of server-sent events.

    The response starts with the first event, so an earlier failure becomes an ordinary error
    answer. A later failure becomes an event `{"error": ...}`.

    Args:
        state: state of the server or router.
        events: the events; closed when the client disconnects.
        deadline: latest end of the response, as second of `time.monotonic`.
        last: bytes to send after the events.
        write_error: returns the event of an error.
        media_type: type of the events.
    """

    def __init__(
        self,
        state: HttpState,
        events: Events,
        deadline: float | None,
        last: bytes = DONE,
        write_error: Callable[[BaseException], bytes] = error_event,
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(
            media_type=media_type,
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._state = state
        self._events = events
        self._deadline = deadline
        self._last = last
        self._write_error = write_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end, fail, or the client disconnects."""
        started = False

        async def start() -> None:
            nonlocal started
            started = True
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )

        async def pump() -> None:
            async with aclosing(self._events) as events:
                async for piece in events:
                    if not started:
                        await start()
                    body = b"".join(piece)
                    await send({"type": "http.response.body", "body": body, "more_body": True})

        last = self._last
        try:
            await self._state.run(receive, pump(), self._deadline)
        except ClientDisconnectError:
            raise
        except Exception as error:
            if not started:
                raise
            log_unexpected(error)
            last = self._write_error(error) + last
        if not started:
            await start()
        await send({"type": "http.response.body", "body": last, "more_body": False})


def reading(state: ServerState, stream: Stream, number: int) -> EventStream:
    """Return a response with a stream's events from `number` on."""
    return EventStream(state, stream.read(number), None, last=b"")


def _join_parts(
    envelope: dict[str, object],
    choices: Iterable[bytes],
    others: Callable[[], dict[str, object]],
) -> Iterator[bytes]:
    """Yield the JSON of an answer in pieces."""
    before = encode(envelope)[:-1] + b',"choices":['
    for choice in choices:
        yield before
        yield choice
        before = b","
    yield b"]," + encode(others())[1:]


async def _merge(
    streams: list[AsyncGenerator[IndexedOutput, None]],
) -> AsyncGenerator[IndexedOutput, None]:
    """Merge streams in the order in which items arrive; the first error ends all."""
    queue: asyncio.Queue[IndexedOutput | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(stream: AsyncGenerator[IndexedOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks: list[asyncio.Task[None]] = []
    try:
        for i, stream in enumerate(streams):
            if i and i % _PROMPTS_AT_ONCE == 0:
                await asyncio.sleep(0)
            tasks.append(asyncio.create_task(pump(stream)))
        for _ in streams:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _num_candidates(output: RequestOutput) -> int:
    """Return the number of entries of all logprobs of an output."""
    rows = [output.prompt_logprobs, *(completion.logprobs for completion in output.outputs)]
    return sum(flat.num_candidates for flat in rows if isinstance(flat, FlatLogprobs))


def _writing_time(output: RequestOutput) -> int:
    """Estimate the microseconds to write an output."""
    num_tokens = len(output.prompt_token_ids) + sum(len(c.token_ids) for c in output.outputs)
    return 20 + num_tokens // 4 + _num_candidates(output)


def _num_written(output: RequestOutput) -> int:
    """Return the number of logprob entries of the longest choice, the prompt's included."""
    found = [c.logprobs for c in output.outputs] + [output.prompt_logprobs]
    sizes = [flat.num_candidates if isinstance(flat, FlatLogprobs) else 0 for flat in found]
    return sizes.pop() + max(sizes, default=0)


def raw(value: T) -> T:
    """Encode a part of an answer as JSON, which occupies less memory than objects."""
    return cast(T, msgspec.Raw(encode(value)))


def finite(logprob: float) -> float:
    """Return a logprob that JSON can express."""
    return max(logprob, MIN_LOGPROB)


def prompt_logprobs_json(rows: PromptLogprobs | None) -> generation_answers.PromptLogprobs | None:
    """Return vLLM's `prompt_logprobs`: for each position the candidates by token id."""
    if rows is None:
        return None
    return [None if row is None else raw(_prompt_candidates(row)) for row in rows]


def _prompt_candidates(row: dict[int, Logprob]) -> dict[str, generation_answers.PromptLogprob]:
    return {
        str(token): {
            "logprob": finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token, entry in row.items()
    }
