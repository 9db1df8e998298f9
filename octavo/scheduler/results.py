"""The effects of a step's result on its requests."""

from __future__ import annotations

from octavo.kv_cache.encoder_cache import EncoderCacheManager
from octavo.kv_cache.manager import KVCacheManager
from octavo.kv_connector.base import KVConnectorScheduler
from octavo.messages import EngineCoreOutput, FinishReason, LogprobsLists, ModelRunnerOutput
from octavo.request import Request, RequestStatus
from octavo.scheduler.fairness import OUTPUT_WEIGHT
from octavo.scheduler.request_table import RequestTable
from octavo.scheduler.speculation import Drafting
from octavo.scheduler.step import ScheduledStep


class StepResults:
    """Applies the results of steps to their requests, and makes the outputs.

    Args:
        table: all unfinished requests.
        kv_cache_manager: manager of the blocks.
        encoder_cache: manager of the rows of encoders.
        drafting: counters of drafts.
        connector: the scheduler's half of a KV connector; None: there is none.
    """

    def __init__(
        self,
        *,
        table: RequestTable,
        kv_cache_manager: KVCacheManager,
        encoder_cache: EncoderCacheManager,
        drafting: Drafting,
        connector: KVConnectorScheduler | None,
    ) -> None:
        self._table, self._drafting = table, drafting
        self._kv_cache_manager, self._encoder_cache = kv_cache_manager, encoder_cache
        self._connector = connector

    def apply(
        self, step: ScheduledStep, result: ModelRunnerOutput, outputs: list[EngineCoreOutput]
    ) -> None:
        """Apply the result of a step, and append the new outputs in batch order.

        A request in `errors` failed alone, after the forward pass: the KV of all tokens of the
        step is in the cache, and other requests rely on it. If the encoder of an item failed, this
        KV is NaN, so all requests that rely on it fail, too; then it is forgotten.

        Requests that end stay in `RequestTable.running` until `drop_finished`.
        """
        sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
        for request, start, num_sampled in step.entries:
            has_ended = request.status > RequestStatus.PREEMPTED  # while the step was in flight
            error = result.errors.get(request.request_id) if result.errors else None
            if error is not None:
                if not has_ended:
                    outputs.append(self._table.fail(request, error, "RequestError"))
                if _has_come_to_items(request):
                    self._forget_items(request)
                continue
            if has_ended:
                continue
            output = self._take_result(request, start, num_sampled, sampled, result)
            if output is not None:
                outputs.append(output)
            elif request.options.reports_progress and _is_first_prefill(request):
                outputs.append(_progress(step, request, start))

    def _forget_items(self, request: Request) -> None:
        """Forget what the caches hold of a request's items, and of the tokens after them."""
        self._kv_cache_manager.forget_items(request)
        self._encoder_cache.forget(request)
        if self._connector is not None:
            self._connector.forget_items(request)

    def _take_result(
        self,
        request: Request,
        start: int,
        num_sampled: int,
        sampled: dict[str, list[int]],
        result: ModelRunnerOutput,
    ) -> EngineCoreOutput | None:
        """Apply a step's result to an entry of the step; return the new output, or None.

        This runs once per request and step: code that few requests need is in other functions.
        """
        if request.pooling is not None:
            return self._take_pooled(request, num_sampled, result)
        req_id = request.request_id
        tokens: list[int] = []
        logprobs = prompt_logprobs = finished = None
        if num_sampled:
            tokens = sampled[req_id]
            assert 0 < len(tokens) <= num_sampled, f"{req_id} got {len(tokens)} tokens"
            request.num_output_placeholders -= num_sampled
            request.num_spec_in_flight -= num_sampled - 1
            if request.status == RequestStatus.RUNNING:  # a preempted request starts again
                # Places without an accepted draft add no token.
                request.num_computed_tokens -= num_sampled - len(tokens)
            if result.num_draft_tokens and req_id in result.num_draft_tokens:
                num_drafts = result.num_draft_tokens[req_id]
                self._drafting.count(num_drafts, len(tokens) - 1)
                request.num_draft_tokens += num_drafts
                request.num_accepted_tokens += len(tokens) - 1
                request.has_news = True
            finished, count = check_stop(request, tokens)
            logprobs = result.logprobs.get(req_id) if result.logprobs else None
            if count < len(tokens):
                tokens = tokens[:count]
                logprobs = logprobs and logprobs.select(0, count)
            request.append_output_token_ids(tokens)
            self._table.tenants.charge(request.options.share, OUTPUT_WEIGHT * len(tokens))
        if result.prompt_logprobs and req_id in result.prompt_logprobs:
            prompt_logprobs = take_prompt_logprobs(request, start, result.prompt_logprobs[req_id])
        if not tokens and prompt_logprobs is None:
            return None
        output = EngineCoreOutput(req_id, tokens, logprobs, prompt_logprobs)
        if finished is not None:
            if self._connector is not None:
                output.kv_transfer_params = self._connector.request_finished(request)
            self._table.finish(request, finished)
            output.finish_reason = finished.finish_reason
            output.stop_reason = request.stop_reason
        if request.guard is not None:
            output.repetition = request.guard.found
        if request.has_news or finished is not None:
            request.has_news = not tokens
            _add_statistics(output, request)
        return output

    def _take_pooled(
        self, request: Request, num_sampled: int, result: ModelRunnerOutput
    ) -> EngineCoreOutput | None:
        """Apply a step's result to a request of a pooling model; it ends with its last token."""
        if not num_sampled:
            return None
        request.num_output_placeholders -= num_sampled
        output = EngineCoreOutput(
            request.request_id,
            [],
            finish_reason=FinishReason.STOP,
            pooled=result.pooled[request.request_id],
        )
        self._table.finish(request, RequestStatus.FINISHED_STOPPED)
        _add_statistics(output, request)
        return output


def check_stop(request: Request, tokens: list[int]) -> tuple[RequestStatus | None, int]:
    """Return the status with which new tokens end a request, and their number in its output.

    The status is None if the request continues. The request's guard reads the tokens.
    """
    num_output, guard = request.num_output_tokens, request.guard
    for count, token in enumerate(tokens, 1):
        if guard is not None:
            guard.append(token)
        if token in request.stop_token_ids:
            params = request.sampling_params
            if num_output + count > params.min_tokens:
                if token in params.stop_token_ids:
                    request.stop_reason = token
                return RequestStatus.FINISHED_STOPPED, count
        if num_output + count >= request.max_tokens:
            return RequestStatus.FINISHED_LENGTH_CAPPED, count
        if guard is not None and guard.must_stop:
            return RequestStatus.FINISHED_REPETITION, count
    return None, len(tokens)


def take_prompt_logprobs(request: Request, start: int, rows: LogprobsLists) -> LogprobsLists | None:
    """Return the prompt logprobs that were not returned yet, or None.

    A preempted request computes earlier ones again.

    Args:
        request: a request with prompt positions in the step.
        start: first position of the step.
        rows: logprobs; the first row is for position `start` + 1.
    """
    known = max(0, request.num_prompt_logprobs - start)
    if known >= rows.num_rows:
        return None
    request.num_prompt_logprobs = start + rows.num_rows
    return rows.select(known, rows.num_rows)


def _has_come_to_items(request: Request) -> bool:
    """Return True if a step had tokens of a request's items, also before a preemption."""
    begins = (item.begin for item in request.mm_features)
    return request.num_charged > min(begins, default=request.num_prompt_tokens)


def _is_first_prefill(request: Request) -> bool:
    """Return True if a request computes its prompt, and no other one computes it for this one."""
    return not request.num_output_tokens and request.leader is None


def _add_statistics(output: EngineCoreOutput, request: Request) -> None:
    output.num_cached_tokens = request.num_cached_tokens
    output.first_scheduled_time = request.first_scheduled_time
    output.num_preemptions = request.num_preemptions
    output.num_draft_tokens = request.num_draft_tokens
    output.num_accepted_tokens = request.num_accepted_tokens
    output.num_stored_tokens = request.num_stored_tokens


def _progress(step: ScheduledStep, request: Request, start: int) -> EngineCoreOutput:
    """Return the output of a step that computed a part of a request's prompt, from `start`."""
    scheduled = next(s for s in step.output.scheduled_reqs if s.req_id == request.request_id)
    output = EngineCoreOutput(
        request.request_id, [], num_computed_tokens=start + scheduled.num_tokens
    )
    _add_statistics(output, request)
    return output
