"""Checks of requests on arrival, and of the scheduler's state."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from octavo.config import SchedulerConfig
from octavo.errors import ContextLengthError, RequestError
from octavo.kv_cache.groups import KVCacheConfig, max_blocks_per_request
from octavo.kv_connector.base import KVConnectorScheduler
from octavo.request import Request, RequestStatus
from octavo.scheduler.step import ScheduledStep


def check_fits(
    request: Request,
    config: SchedulerConfig,
    kv_cache_config: KVCacheConfig,
    *,
    max_model_len: int,
    budget: int,
    num_usable_blocks: int,
) -> None:
    """Reject a request that can never run.

    Raises:
        ContextLengthError: the request exceeds the context, the KV cache, or a step that must
            compute its whole prompt.
        RequestError: its prompt is empty, or its output is complete.
    """
    prompt = request.num_prompt_tokens
    if prompt == 0:
        raise RequestError("The prompt is empty.", "prompt")
    if request.pooling is not None:
        if prompt > max_model_len:
            raise ContextLengthError(
                f"The text has {prompt} tokens, but the context holds {max_model_len} tokens. "
                "Shorten the text.",
                "prompt",
            )
    elif prompt >= max_model_len:
        raise ContextLengthError(
            f"The prompt has {prompt} tokens and at least one is to be generated, but the "
            f"context holds {max_model_len} tokens. Shorten the prompt.",
            "prompt",
        )
    limit = min(request.max_tokens, max_model_len - prompt)
    if request.num_output_tokens >= max(limit, 1) and request.pooling is None:
        raise RequestError(
            f"The request has {request.num_output_tokens} output tokens already, and may have "
            f"{limit}: nothing is left to be generated.",
            "max_tokens",
        )
    if prompt > budget and (request.whole or not config.enable_chunked_prefill):
        why = "its model sees all of it" if request.whole else "chunked prefill is off"
        raise ContextLengthError(
            f"The prompt has {prompt} tokens, but a step takes {budget}, and {why}. Shorten the "
            "prompt, or raise max_num_batched_tokens.",
            "prompt",
        )
    most = min(prompt + request.max_tokens, max_model_len)
    encoded = rows = 0
    if any(group.is_cross for group in kv_cache_config.groups):
        encoded = sum(item.num_encoder_tokens for item in request.mm_features)
        rows = sum(item.num_rows for item in request.mm_features)
        if not rows:
            raise RequestError("The encoder's prompt is empty.", "prompt")
    if encoded >= budget:
        raise ContextLengthError(
            f"The encoder's input has {encoded} tokens, but a step computes {budget}, one of them "
            f"the decoder's. Shorten it, or raise max_num_batched_tokens to {encoded + 1}.",
            "prompt",
        )
    if prompt + encoded > budget and request.whole:  # a part of it would give another result
        raise ContextLengthError(
            f"The encoder's input has {encoded} tokens and the prompt {prompt}, but a step takes "
            f"{budget}, and computes all of both. Raise max_num_batched_tokens to "
            f"{encoded + prompt}.",
            "prompt",
        )
    needed = max_blocks_per_request(
        kv_cache_config.groups, kv_cache_config.block_size, most, budget, rows
    )
    if needed > num_usable_blocks:
        beside = f" and {rows} of the encoder" if rows else ""
        raise ContextLengthError(
            f"The prompt of {prompt} tokens{beside} and up to {request.max_tokens} more need "
            f"{needed} KV-cache blocks, but there are {num_usable_blocks}. Shorten the prompt or "
            "lower max_tokens.",
            "max_tokens",
        )


def check_books(
    requests: dict[str, Request],
    running: Collection[Request],
    others: Iterable[Request],
    in_flight: Iterable[ScheduledStep],
    max_num_seqs: int,
) -> None:
    """Check that the records of requests and of steps in flight are consistent.

    Raises:
        AssertionError: the records are inconsistent; the message names the error.
    """
    places = [*running, *others]
    if {r.request_id: r for r in places} != requests or len(places) != len(requests):
        raise AssertionError("a request is lost, or in two places")
    placeholders: dict[Request, int] = dict.fromkeys(places, 0)
    drafts = placeholders.copy()
    for step in in_flight:
        for request, _, num_sampled in step.entries:
            if request in placeholders and num_sampled:
                placeholders[request] += num_sampled
                drafts[request] += num_sampled - 1
    for i, request in enumerate(places):
        is_running = request.status == RequestStatus.RUNNING
        if is_running != (i < len(running)) or request.status.finished:
            raise AssertionError(f"{request.request_id} is {request.status!r}")
        if not is_running and request.num_computed_tokens:
            raise AssertionError(f"{request.request_id} waits with computed tokens")
        if request.num_output_placeholders != placeholders[request]:
            raise AssertionError(f"{request.request_id} misses tokens of steps in flight")
        if request.num_spec_in_flight != drafts[request]:
            raise AssertionError(f"{request.request_id} misses drafts of steps in flight")
        if request.num_computed_tokens > request.num_tokens + placeholders[request]:
            raise AssertionError(f"{request.request_id} is computed beyond its tokens")
    keys = [request.queue_key for request in running]
    if keys != sorted(keys) or len(keys) > max_num_seqs:
        raise AssertionError("too many requests run, or not in order")


def check_transfer(request: Request, connector: KVConnectorScheduler | None) -> None:
    """Check the parameters that a request has for the KV connector; None: there is none.

    Raises:
        RequestError: the connector rejects them, or there is no connector.
    """
    if connector is not None:
        connector.check_request(request)
    elif request.options.kv_transfer_params is not None:
        raise RequestError(
            "kv_transfer_params: this server has no KV connector; leave them out, or start it "
            "with --kv-transfer-config.",
            "kv_transfer_params",
        )


def check_adapter(request: Request, *, enabled: bool) -> None:
    """Check that a request has no adapter, unless adapters are enabled.

    Raises:
        RequestError: it has one.
    """
    if request.options.adapter is not None and not enabled:
        raise RequestError(
            f"The adapter {request.options.adapter.name!r} cannot be used: adapters are off; "
            "start the engine with enable_lora (--enable-lora).",
            "lora_request",
        )
