"""Conversion of the engine core's tokens into outputs: text, logprobs, finished answers."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from octavo.errors import OctavoError, RequestError, make_error
from octavo.frontend.encoder_prompt import encoder_token_ids
from octavo.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    Repetition,
)
from octavo.observability.recording import Arrival, End, Outputs
from octavo.outputs import (
    CompletionOutput,
    FlatLogprobs,
    RequestMetrics,
    RequestOutput,
)
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.system import clock
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.observability.metrics import (
        EngineMetrics,  # imports Prometheus, which only servers need
    )
    from octavo.observability.tracing import (
        Tracer,  # imports an HTTP client
    )


class RequestOutputCollector:
    """Inbox of one request; holds at most one merged output until the consumer reads it.

    Producer and consumer run in the same asyncio event loop.
    """

    def __init__(self, output_kind: RequestOutputKind) -> None:
        self._delta = output_kind == RequestOutputKind.DELTA
        self._output: RequestOutput | Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        """Future of the waiting consumer; cheaper per token than an event."""

    def put(self, output: RequestOutput | Exception) -> None:
        """Add an output; merge it with an unread one. An exception replaces an unread output."""
        held = self._output
        if self._delta and isinstance(held, RequestOutput) and isinstance(output, RequestOutput):
            _merge_deltas(held, output)
        elif not isinstance(held, Exception):
            self._output = output
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    async def get(self) -> RequestOutput:
        """Wait for the next output and return it; raise an exception that was put."""
        while (output := self.get_nowait()) is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return output

    def get_nowait(self) -> RequestOutput | None:
        """Return the next output, or None; raise like `get`."""
        output, self._output = self._output, None
        if isinstance(output, Exception):
            raise output
        return output


@dataclass(slots=True)
class ProcessedOutputs:
    """Result of one call of `OutputProcessor.process_outputs`."""

    request_outputs: list[RequestOutput] = field(default_factory=list)
    """Outputs of requests without a collector."""
    reqs_to_abort: list[str] = field(default_factory=list)
    """Core request ids that the core must stop: a stop text was found, or a sibling failed."""
    errors: dict[str, OctavoError] = field(default_factory=dict)
    """Failed requests without a collector, by the caller's request id."""


class LiveAnswer(NamedTuple):
    """Unfinished answer, without its contents."""

    core_id: str
    """Id in the core: each of n answers has a separate one."""
    request_id: str
    """Id of the caller; the n answers share it."""
    tenant: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Number of cached tokens of its prompt; 0 before the first token."""
    arrival_time: float
    """Second of `octavo.system.clock`."""


@dataclass(slots=True)
class _Group:
    """Shared state of all answers to one prompt; n = 1 is a group of one."""

    request_id: str
    """Request id of the caller."""
    request: EngineCoreRequest
    prompt: str | None
    output_kind: RequestOutputKind
    queue: RequestOutputCollector | None
    prompt_logprobs: FlatLogprobs | None = None
    kv_transfer_params: dict[str, Any] | None = None
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    """Number of prompt tokens computed so far, if the request reports its progress."""
    pooled: bytes | None = None
    """Result of a pooling model."""
    live: dict[str, _RequestState] = field(default_factory=dict)
    """Unfinished answers by core request id."""
    outputs: dict[int, CompletionOutput] = field(default_factory=dict)
    """Latest output of each answer by index; with deltas, the undelivered delta."""
    times: dict[int, RequestMetrics] = field(default_factory=dict)
    max_num_generation_tokens: int = 0
    """Number of tokens of the longest finished answer."""
    num_generation_tokens: int = 0
    """Number of tokens of all finished answers."""
    finish_reasons: list[str] = field(default_factory=list)
    """Reasons for the end of the finished answers."""
    error: Exception | None = None
    """Error that ends the request."""

    @property
    def finished(self) -> bool:
        return not self.live

    def as_request(self) -> EngineCoreRequest:
        """Return the request with its output so far; see `OutputProcessor.unfinished`."""
        request, states = self.request, self.live.values()
        tokens = {state.index: state.detokenizer.token_ids.tolist() for state in states}
        given = next(iter(states)).num_prompt_logprobs  # of the first live answer
        if request.n == 1:
            return msgspec.structs.replace(
                request, output_token_ids=tokens[0], num_prompt_logprobs=given
            )
        return msgspec.structs.replace(request, answers=tokens, num_prompt_logprobs=given)

    def make_output(self) -> RequestOutput | None:
        """Return the output to deliver after a step, or None."""
        if self.output_kind == RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        outputs = self.outputs
        if self.request.n > 1:
            completions = [outputs[index] for index in sorted(outputs)]
            times = _merge_times(list(self.times.values()))
        else:
            completions = list(outputs.values())
            times = self.times[0]
        prompt_logprobs, adapter = self.prompt_logprobs, self.request.options.adapter
        if self.output_kind == RequestOutputKind.DELTA:
            outputs.clear()
            self.prompt_logprobs = None
        encoder_ids = encoder_token_ids(self.request.mm_features)
        return RequestOutput(
            self.request_id,
            self.prompt if encoder_ids is None else None,
            self.request.prompt_token_ids,
            prompt_logprobs,
            completions,
            self.finished,
            times,
            lora_request=None if adapter is None else adapter.request,
            encoder_prompt=None if encoder_ids is None else self.prompt,
            encoder_prompt_token_ids=encoder_ids,
            num_cached_tokens=self.num_cached_tokens,
            kv_transfer_params=self.kv_transfer_params,
            num_computed_tokens=self.num_computed_tokens,
            pooled=self.pooled,
        )


@dataclass(slots=True)
class _RequestState:
    """One live core request."""

    request_id: str
    index: int
    group: _Group
    detokenizer: IncrementalDetokenizer
    stop_token_ids: frozenset[int]
    max_tokens: int
    times: RequestMetrics
    logprobs: FlatLogprobs | None
    prompt_logprobs: FlatLogprobs | None
    """Prompt logprobs received before the first token; None for all but the first answer."""
    cumulative_logprob: float | None
    num_delivered: int = 0
    """Number of tokens in earlier deltas."""
    num_cached_tokens: int = 0
    """Number of cached tokens of its prompt, as reported with its first token."""
    engine_index: int = 0
    """Index of the engine that sent the latest output."""
    repetition: Repetition | None = None
    """Loop in the answer."""

    @property
    def num_prompt_logprobs(self) -> int:
        """Number of prompt logprobs received; meaningless if the request wants none."""
        if self.prompt_logprobs is not None:
            return max(0, len(self.prompt_logprobs) - 1)
        # The first token arrives after all prompt logprobs.
        return len(self.group.request.prompt_token_ids) - 1 if self.detokenizer.token_ids else 0

    def hand_over_prompt_logprobs(self) -> None:
        """Move the prompt's logprobs to the next output; its prompt is completely computed."""
        if self.prompt_logprobs is not None:
            self.group.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None

    def make_completion(
        self, reason: FinishReason | None, stop_reason: int | str | None
    ) -> CompletionOutput:
        """Return this answer's part of the next output."""
        detokenizer, logprobs = self.detokenizer, self.logprobs
        if self.group.output_kind == RequestOutputKind.DELTA:
            text = detokenizer.take_text()
            token_ids = detokenizer.token_ids[self.num_delivered :].tolist()
            self.num_delivered += len(token_ids)
            if logprobs is not None:
                self.logprobs = FlatLogprobs(logprobs.text_of, ranked=logprobs.ranked)
        else:
            text = detokenizer.text()
            token_ids = detokenizer.token_ids.tolist()
            logprobs = None if logprobs is None else logprobs.copy()
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            self.cumulative_logprob,
            logprobs,
            finish_reason=None if reason is None else str(reason),
            stop_reason=stop_reason,
            repetition_period=None if self.repetition is None else self.repetition.period,
        )


class OutputProcessor:
    """The front end's record of live requests; converts core outputs into request outputs.

    Args:
        tokenizer: converts tokens to text; None for no text (`skip_tokenizer_init`).
        metrics: counts the events of requests; None: nothing is counted.
        record: callback for arrivals, outputs and ends of requests.
        tracer: sends a span for each request; None: there are no traces.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        metrics: EngineMetrics | None = None,
        record: Callable[[Arrival | Outputs | End], None] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._record = record
        self._tracer = tracer
        self._states: dict[str, _RequestState] = {}
        self._groups: dict[str, _Group] = {}

    @property
    def num_unfinished_requests(self) -> int:
        """Number of live core requests; the n answers of a request count n times."""
        return len(self._states)

    def unfinished(self) -> list[EngineCoreRequest]:
        """Return the live requests with their output so far, in order of arrival.

        Another engine can continue these requests.
        """
        return [group.as_request() for group in self._groups.values()]

    def live_answers(self) -> Iterator[LiveAnswer]:
        """Yield the unfinished answers, in order of arrival."""
        for state in self._states.values():
            request = state.group.request
            yield LiveAnswer(
                state.request_id,
                state.group.request_id,
                request.options.tenant,
                len(request.prompt_token_ids),
                len(state.detokenizer.token_ids),
                state.num_cached_tokens,
                request.options.arrival_time,
            )

    def waiting(self) -> Iterator[EngineCoreRequest]:
        """Yield the live requests without a token. O(live requests)."""
        for group in self._groups.values():
            if all(times.first_token_time is None for times in group.times.values()):
                yield group.request

    def adapter_names(self) -> tuple[list[str], list[str]]:
        """Return the names of the adapters of live requests with a token, and of the others.

        Any thread may call it. O(live requests).
        """
        running: dict[str, None] = {}
        waiting: dict[str, None] = {}
        for group in list(self._groups.values()):
            if (adapter := group.request.options.adapter) is not None:
                times = list(group.times.values())
                is_waiting = all(its.first_token_time is None for its in times)
                (waiting if is_waiting else running)[adapter.name] = None
        return list(running), list(waiting)

    def num_running_in_background(self) -> int:
        """Return the number of core requests in the background with a token. O(live requests)."""
        waiting = {request.request_id for request in self.waiting()}
        groups = self._groups.values()
        return sum(
            group.request.n
            for group in groups
            if group.request.options.background and group.request.request_id not in waiting
        )

    def has_first_tokens(self, request_id: str) -> bool:
        """Return True if every answer of a request has a token, or if the request has ended."""
        group = self._groups.get(request_id)
        return group is None or all(
            times.first_token_time is not None for times in group.times.values()
        )

    def is_live(self, request_id: str, queue: RequestOutputCollector) -> bool:
        """Return True if the live request with the id delivers its outputs to `queue`."""
        group = self._groups.get(request_id)
        return group is not None and group.queue is queue

    def add_request(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        prompt_text: str | None = None,
        queue: RequestOutputCollector | None = None,
        request_id: str | None = None,
    ) -> None:
        """Register a request with all its answers, before the core receives it.

        Args:
            request: a result of `InputProcessor.process`.
            params: the sampling parameters from which it was made.
            prompt_text: the prompt as text, if the caller passed text.
            queue: destination of the outputs; None: `process_outputs` returns them.
            request_id: the caller's id; None: the core request's.

        Raises:
            RequestError: a live request has its id or the id of one of its answers.
        """
        child_ids = request.child_ids
        if request_id is None:
            request_id = request.request_id
        if request_id in self._groups or not self._states.keys().isdisjoint(child_ids):
            raise RequestError(
                f"A request with the id {request_id!r} is already running.", "request_id"
            )
        if self._record is not None:
            self._record(Arrival(request, params))
        group = self._groups[request_id] = _Group(
            request_id,
            request,
            prompt_text,
            params.output_kind,
            queue,
        )
        core_params = request.sampling_params
        text_of = None if self._tokenizer is None else self._tokenizer.token_text
        for index, child_id in enumerate(child_ids):
            times = RequestMetrics(arrival_time=clock.to_monotonic(request.options.arrival_time))
            state = _RequestState(
                request_id=child_id,
                index=index,
                group=group,
                detokenizer=IncrementalDetokenizer(
                    self._tokenizer, request.known_token_ids, params
                ),
                stop_token_ids=core_params.all_stop_token_ids,
                max_tokens=core_params.max_tokens,
                times=times,
                logprobs=None
                if params.num_logprobs is None
                else FlatLogprobs(text_of, ranked=params.logprob_token_ids is None),
                prompt_logprobs=FlatLogprobs(text_of, of_prompt=True)
                if params.prompt_logprobs is not None and not index
                else None,
                cumulative_logprob=None if params.num_logprobs is None else 0.0,
            )
            self._states[child_id] = group.live[child_id] = state
            group.times[index] = times

    def process_outputs(
        self, outputs: list[EngineCoreOutput], timestamp: float, engine_index: int = 0
    ) -> ProcessedOutputs:
        """Process the outputs of a step.

        Args:
            outputs: the list of an `EngineCoreOutputs`; unknown (aborted) requests are skipped.
            timestamp: its `timestamp`.
            engine_index: its `engine_index`.
        """
        if self._record is not None and outputs:
            self._record(Outputs(timestamp, outputs))
        timestamp = clock.to_monotonic(timestamp)
        result = ProcessedOutputs()
        touched: dict[str, _Group] = {}
        latencies: list[float] = []
        num_tokens = 0
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:
                continue
            state.engine_index = engine_index
            if output.finish_reason == FinishReason.ERROR:
                touched.pop(state.group.request_id, None)
                error = make_error(output.error_kind, output.error or "The request failed.")
                self._fail(state, error, timestamp, result)
                continue
            num_new = self._take_in(state, output, timestamp, latencies, result)
            num_tokens += num_new
            if num_new or output.finish_reason is not None or output.num_computed_tokens:
                touched[state.group.request_id] = state.group
        for group in touched.values():
            self._deliver(group, result.request_outputs)
        if self._metrics is not None and outputs:
            metrics = self._metrics.for_engine(engine_index)
            metrics.record_inter_token_latencies(latencies)
            metrics.record_generation_tokens(num_tokens)
        return result

    def abort_requests(
        self, request_ids: Iterable[str], error: OctavoError | None = None
    ) -> list[str]:
        """End requests now and return the core ids that the core must abort.

        A waiting consumer receives `error`, or if that is None a last output with `finish_reason`
        "abort". Ids may be a caller's request ids (all n answers end) or core ids; unknown ids
        are skipped.
        """
        now = time.monotonic()
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        aborted: list[str] = []
        touched: dict[str, _Group] = {}
        for request_id in request_ids:
            group = self._groups.pop(request_id, None)
            if group is not None:
                states = list(group.live.values())
            else:
                states = [self._states[request_id]] if request_id in self._states else []
            for state in states:
                state.group.error = error
                self._end(state, reason, None, now)
                aborted.append(state.request_id)
                touched[state.group.request_id] = state.group
        for group in touched.values():
            if error is None:
                self._deliver(group, [])
            elif group.queue is not None:
                group.queue.put(error)
        return aborted

    def propagate_error(self, error: Exception) -> None:
        """Fail every live request with `error` because the engine has died."""
        groups = list(self._groups.values())
        self._states.clear()
        self._groups.clear()
        for group in groups:
            group.error = error
            self._trace(group)
            if group.queue is not None:
                group.queue.put(error)

    def _take_in(
        self,
        state: _RequestState,
        output: EngineCoreOutput,
        timestamp: float,
        latencies: list[float],
        result: ProcessedOutputs,
    ) -> int:
        """Process one output without an error and return the number of tokens that it added."""
        group, times, detokenizer = state.group, state.times, state.detokenizer
        if output.first_scheduled_time is not None:
            _take_statistics(state, output)
        if output.num_computed_tokens:
            group.num_computed_tokens = output.num_computed_tokens
            if state.index == 0:
                group.num_cached_tokens = output.num_cached_tokens
        if output.new_prompt_logprobs is not None and state.prompt_logprobs is not None:
            rows = output.new_prompt_logprobs
            state.prompt_logprobs.append_rows(rows.token_ids, rows.logprobs, rows.ranks)
        if output.pooled is not None:
            group.pooled, group.num_cached_tokens = output.pooled, output.num_cached_tokens
            if self._metrics is not None:
                self._metrics.for_engine(state.engine_index).record_prompt(
                    len(group.request.prompt_token_ids), output.num_cached_tokens
                )
        if output.kv_transfer_params is not None:
            group.kv_transfer_params = output.kv_transfer_params
        if output.repetition is not None and state.repetition is None:
            state.repetition = output.repetition
            if self._metrics is not None:
                metrics = self._metrics.for_engine(state.engine_index)
                metrics.record_repetition(output.repetition.action)
        reason = output.finish_reason
        stop_text: str | None = None
        num_new = 0
        new_token_ids = output.new_token_ids
        if new_token_ids:
            if times.last_token_time is not None:
                latencies.append(timestamp - times.last_token_time)
            else:
                times.first_token_time = timestamp
                state.num_cached_tokens = output.num_cached_tokens
                if state.index == 0:  # the other answers find its newly computed blocks
                    group.num_cached_tokens = output.num_cached_tokens
                state.hand_over_prompt_logprobs()
                if self._metrics is not None:
                    self._metrics.for_engine(state.engine_index).record_first_token(
                        timestamp - times.arrival_time,
                        len(group.request.prompt_token_ids),
                        output.num_cached_tokens,
                    )
            times.last_token_time = timestamp
            num_before = len(detokenizer.token_ids)
            by_token = reason == FinishReason.STOP and new_token_ids[-1] in state.stop_token_ids
            stop_text = detokenizer.update(new_token_ids, by_token)
            num_new = len(detokenizer.token_ids) - num_before
            if output.new_logprobs is not None and state.logprobs is not None:
                rows = output.new_logprobs.select(0, num_new)
                assert state.cumulative_logprob is not None
                state.logprobs.append_rows(rows.token_ids, rows.logprobs, rows.ranks)
                # Add the sampled tokens' logprobs one by one: a sum depends on the order.
                for logprob in array("f", rows.logprobs)[:: len(rows.logprobs) // 4 // num_new]:
                    state.cumulative_logprob += logprob
        if stop_text is not None:
            if reason is None:
                result.reqs_to_abort.append(state.request_id)
            self._end(state, FinishReason.STOP, stop_text, timestamp)
        elif reason is not None:
            self._end(state, reason, output.stop_reason, timestamp)
        elif num_new and group.output_kind != RequestOutputKind.FINAL_ONLY:
            self._store(state, state.make_completion(None, None))
        return num_new

    def _end(
        self,
        state: _RequestState,
        reason: FinishReason,
        stop_reason: int | str | None,
        timestamp: float,
    ) -> None:
        """Finish and forget a live request; store its last output in the group."""
        group = state.group
        state.detokenizer.finish()
        state.times.finished_time = timestamp
        state.hand_over_prompt_logprobs()
        num_tokens = len(state.detokenizer.token_ids)
        if self._record is not None:
            when = clock.from_monotonic(timestamp)
            self._record(End(when, state.request_id, reason, stop_reason, num_tokens))
        self._store(state, state.make_completion(reason, stop_reason))
        del self._states[state.request_id]
        del group.live[state.request_id]
        group.num_generation_tokens += num_tokens
        group.finish_reasons.append(str(reason))
        if group.finished:
            self._groups.pop(group.request_id, None)
            self._trace(group)
        if self._metrics is not None:
            group.max_num_generation_tokens = max(group.max_num_generation_tokens, num_tokens)
            metrics = self._metrics.for_engine(state.engine_index)
            metrics.record_finished(
                reason,
                state.times,
                num_prompt_tokens=len(group.request.prompt_token_ids),
                num_cached_tokens=state.num_cached_tokens,
                num_generation_tokens=num_tokens,
                max_tokens=state.max_tokens,
            )
            if group.finished:
                metrics.record_all_finished(group.request.n, group.max_num_generation_tokens)

    def _fail(
        self, state: _RequestState, error: OctavoError, timestamp: float, result: ProcessedOutputs
    ) -> None:
        """End a request and its siblings with an error."""
        group = state.group
        group.error = error
        for sibling in list(group.live.values()):
            if sibling is not state:
                result.reqs_to_abort.append(sibling.request_id)
            self._end(sibling, FinishReason.ERROR, None, timestamp)
        if group.queue is not None:
            group.queue.put(error)
        else:
            result.errors[group.request_id] = error

    def _trace(self, group: _Group) -> None:
        """Send the span of a request that has ended, or whose engine has."""
        if self._tracer is not None:
            live = sum(len(state.detokenizer.token_ids) for state in group.live.values())
            self._tracer.record_finished(
                group.request_id,
                group.request,
                _merge_times(list(group.times.values())),
                num_generation_tokens=group.num_generation_tokens + live,
                finish_reasons=group.finish_reasons,
                error=group.error,
            )

    @staticmethod
    def _store(state: _RequestState, completion: CompletionOutput) -> None:
        outputs = state.group.outputs
        held = outputs.get(state.index)
        if held is not None and state.group.output_kind == RequestOutputKind.DELTA:
            _merge_completions(held, completion)
        else:
            outputs[state.index] = completion

    @staticmethod
    def _deliver(group: _Group, request_outputs: list[RequestOutput]) -> None:
        output = group.make_output()
        if output is None:
            return
        if group.queue is not None:
            group.queue.put(output)
        else:
            request_outputs.append(output)


def _take_statistics(state: _RequestState, output: EngineCoreOutput) -> None:
    times = state.times
    assert output.first_scheduled_time is not None
    if times.first_scheduled_time is None:
        times.first_scheduled_time = clock.to_monotonic(output.first_scheduled_time)
    # Another engine, which continues the answer, counts from zero.
    if output.num_preemptions:
        times.num_preemptions = output.num_preemptions
    if output.num_draft_tokens:
        times.num_draft_tokens = output.num_draft_tokens
        times.num_accepted_tokens = output.num_accepted_tokens
    if times.first_token_time is None:
        times.num_stored_tokens = output.num_stored_tokens


def _merge_completions(held: CompletionOutput, new: CompletionOutput) -> None:
    """Append the delta `new` to the earlier delta `held`."""
    held.text += new.text
    held.token_ids += new.token_ids
    held.cumulative_logprob = new.cumulative_logprob
    if isinstance(held.logprobs, FlatLogprobs) and isinstance(new.logprobs, FlatLogprobs):
        held.logprobs.extend(new.logprobs)
    held.finish_reason = new.finish_reason
    held.stop_reason = new.stop_reason
    held.repetition_period = new.repetition_period


def _merge_deltas(held: RequestOutput, new: RequestOutput) -> None:
    """Append a request's delta output `new` to the earlier one, `held`."""
    by_index = {completion.index: completion for completion in held.outputs}
    for completion in new.outputs:
        if completion.index in by_index:
            _merge_completions(by_index[completion.index], completion)
        else:
            by_index[completion.index] = completion
    held.outputs = [by_index[index] for index in sorted(by_index)]
    if held.prompt_logprobs is None:
        held.prompt_logprobs = new.prompt_logprobs
    held.finished = new.finished
    held.num_cached_tokens = new.num_cached_tokens
    held.kv_transfer_params = new.kv_transfer_params
    held.num_computed_tokens = new.num_computed_tokens
    held.metrics = new.metrics


def _merge_times(times: list[RequestMetrics]) -> RequestMetrics:
    """Return the times of a request: from the first answer's start to the last answer's end."""
    scheduled = [t.first_scheduled_time for t in times if t.first_scheduled_time is not None]
    first = [t.first_token_time for t in times if t.first_token_time is not None]
    last = [t.last_token_time for t in times if t.last_token_time is not None]
    finished = [t.finished_time for t in times if t.finished_time is not None]
    return RequestMetrics(
        arrival_time=times[0].arrival_time,
        first_scheduled_time=min(scheduled, default=None),
        first_token_time=min(first, default=None),
        last_token_time=max(last, default=None),
        finished_time=max(finished) if len(finished) == len(times) else None,
        num_preemptions=sum(t.num_preemptions for t in times),
        num_draft_tokens=sum(t.num_draft_tokens for t in times),
        num_accepted_tokens=sum(t.num_accepted_tokens for t in times),
    )
