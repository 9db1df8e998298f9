"""vLLM's arguments of calls: translation, or rejection with a reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.errors import UnsupportedError
from octavo.sampling_params import SamplingParams


class StatLogger:
    """Stand-in for vLLM's statistics logger; `AsyncLLM.do_log_stats` logs the statistics."""


class AggregatedStatLogger(StatLogger):
    """Stand-in for vLLM's logger of all engines together, which Octavo's log always covers."""


def check_stat_loggers(given: Sequence[object] | None) -> None:
    """Check for custom statistics loggers.

    Raises:
        UnsupportedError: `given` contains a custom logger.
    """
    for kind in given or ():
        if not (isinstance(kind, type) and issubclass(kind, StatLogger)):
            raise UnsupportedError(
                f"stat_loggers has {kind!r}; only LoggingStatLogger and "
                "AggregatedLoggingStatLogger of vllm.v1.metrics.loggers are supported; read "
                "AsyncLLM.stats or /metrics instead.",
                "stat_loggers",
            )


def refuse_adapter(lora_request: object) -> None:
    """Raise UnsupportedError for an adapter, or for a list with an adapter."""
    given = lora_request if isinstance(lora_request, list | tuple) else [lora_request]
    if any(adapter is not None for adapter in given):
        raise UnsupportedError(
            "lora_request: adapters are not supported yet; merge the adapter into the weights and "
            "load the merged model.",
            "lora_request",
        )


def apply_tokenization(
    params: SamplingParams, tokenization_kwargs: Mapping[str, Any] | None, special: bool = True
) -> tuple[SamplingParams, bool]:
    """Apply vLLM's `tokenization_kwargs` to a request.

    Args:
        params: parameters of the request; not changed.
        tokenization_kwargs: `truncate_prompt_tokens`, `truncation_side` and
            `add_special_tokens`.
        special: default of `add_special_tokens`.

    Returns:
        The new parameters, and True if special tokens are to be added.

    Raises:
        UnsupportedError: `tokenization_kwargs` has another key or a wrong value.
    """
    for name, value in (tokenization_kwargs or {}).items():
        if name in ("truncate_prompt_tokens", "truncation_side"):
            params = msgspec.structs.replace(params, **{name: value})
        elif name == "add_special_tokens" and isinstance(value, bool):
            special = value
        else:
            raise UnsupportedError(
                f"tokenization_kwargs has {name}={value!r}; only truncate_prompt_tokens, "
                "truncation_side and add_special_tokens (true or false) are supported.",
                "tokenization_kwargs",
            )
    return params, special
