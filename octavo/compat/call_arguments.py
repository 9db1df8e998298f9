"""What vLLM's variables and arguments of calls ask for, or why it cannot be had."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.config import settings_from_environment, unknown_variables
from octavo.errors import UnsupportedError
from octavo.sampling_params import SamplingParams
from octavo.system.logs import setup_default_logging
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_warned: set[str] = set()


def heed_environment() -> str | None:
    """Sets up logging, and names vLLM's variables without meaning here, each once.

    Returns:
        The minimum level to log that the environment asks for.

    Raises:
        ConfigError: a variable's value is wrong.
    """
    level: str | None = settings_from_environment().get("log_level")
    setup_default_logging(level or "info")
    if names := [name for name in unknown_variables() if name not in _warned]:
        _warned.update(names)
        logger.warning("ignored environment variables (see docs/vllm.md): %s", ", ".join(names))
    return level


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


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer of an engine.

    Raises:
        UnsupportedError: there is none.
    """
    if tokenizer is None:
        raise UnsupportedError(
            "There is no tokenizer: the engine was made with skip_tokenizer_init=True."
        )
    return tokenizer
