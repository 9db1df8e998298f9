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


_UNSUPPORTED = {
    "data_parallel_rank": "each request goes to the engine with the least load; leave it out",
    "chat_template_content_format": "each template gets the format that it can handle; leave it "
    "out",
}
"""Reason and remedy for each argument that is not supported."""


def refuse_unsupported(**given: object) -> None:
    """Reject arguments of vLLM's calls that have no counterpart here.

    Args:
        given: the arguments by name. None, a list of None, an empty dict and "auto" request
            nothing.

    Raises:
        UnsupportedError: an argument requests something.
    """
    for name, value in given.items():
        values = value if isinstance(value, list | tuple) else [value]
        if any(one not in (None, {}, "auto") for one in values):
            raise UnsupportedError(
                f"{name}={value!r} is not supported: {_UNSUPPORTED[name]}.", name
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
