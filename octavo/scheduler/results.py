"""The effects of a step's result on one request."""

from __future__ import annotations

from octavo.messages import LogprobsLists
from octavo.request import Request, RequestStatus


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
