"""vLLM's arguments of calls, translated, or refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.errors import UnsupportedError
from octavo.sampling_params import SamplingParams


class StatLogger:
    """A logger of statistics that vLLM has: it stands for what `AsyncLLM.do_log_stats` logs."""


class AggregatedStatLogger(StatLogger):
    """The same over all engines, as it always is here."""


def check_stat_loggers(given: Sequence[object] | None) -> None:
    """Refuse loggers of statistics of the caller's own.

    Raises:
        UnsupportedError: one is given.
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
    """Refuses what asks for an adapter: one, or a list that is not of None only."""
    given = lora_request if isinstance(lora_request, list | tuple) else [lora_request]
    if any(adapter is not None for adapter in given):
        raise UnsupportedError(
            "lora_request: models with adapters cannot be served yet; merge the adapter into the "
            "weights and load the merged model.",
            "lora_request",
        )


def apply_tokenization(
    params: SamplingParams, tokenization_kwargs: Mapping[str, Any] | None, special: bool = True
) -> tuple[SamplingParams, bool]:
    """What vLLM's `tokenization_kwargs` ask for: parameters, and whether special tokens are added.

    Args:
        params: of the request; not changed.
        tokenization_kwargs: `truncate_prompt_tokens`, `truncation_side` and
            `add_special_tokens`.
        special: whether they are added if nothing is said.

    Raises:
        UnsupportedError: another one is given.
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
