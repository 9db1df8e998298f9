"""Common code of the benchmarks that run the engine in their own process."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from typing import Any

from octavo.bench.metrics import RequestRecord
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig
from octavo.config.arguments import engine_kwargs
from octavo.config.engine_settings import engine_settings
from octavo.errors import ConfigError
from octavo.llm import LLM
from octavo.models.hub import resolve_folders
from octavo.models.registry import read_spec
from octavo.models.spec import ModelSpec
from octavo.outputs import RequestOutput
from octavo.plan.memory_plan import resolve_max_model_len


class ObservedLLM(LLM):
    """Variant of `LLM` that reports every answer as soon as it is complete.

    So an interrupted run loses no complete answers, while `generate` returns all answers or none.

    Args:
        on_output: called with each answer.
        **kwargs: as for `LLM`.

    Attributes:
        kv_cache_usage_max: maximum share of KV blocks in use after a step, 0 to 1.
    """

    def __init__(self, on_output: Callable[[RequestOutput], None], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._on_output = on_output
        self.kv_cache_usage_max = 0.0

    def _step(self) -> list[str]:
        request_ids = super()._step()
        self.kv_cache_usage_max = max(self.kv_cache_usage_max, self.stats().kv_cache_usage)
        for request_id in request_ids:
            output = self._inboxes[request_id][0]
            if isinstance(output, RequestOutput):
                self._on_output(output)
        return request_ids


def check_settings(args: argparse.Namespace) -> tuple[dict[str, Any], ModelSpec, int]:
    """Check the engine's settings before its weights are loaded.

    Returns:
        The arguments for `LLM`, the model's spec, and the longest context in tokens.

    Raises:
        ConfigError, ModelError: a setting or the model is unusable.
    """
    kwargs = engine_kwargs(args)
    config = EngineConfig.from_kwargs(**engine_settings(kwargs))
    checkpoint = open_checkpoint(resolve_folders(config)[0], config.load.load_format)
    spec = read_spec(checkpoint, config.model)
    return kwargs, spec, resolve_max_model_len(config, spec)


def check_least(args: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Raise ConfigError for a flag below its minimum value."""
    for name, value in least.items():
        if getattr(args, name) < value:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {getattr(args, name)}: must be at least {value}.")


def record_of(output: RequestOutput, origin: float) -> RequestRecord:
    """Convert an answer to a benchmark's record.

    Only the times of the first and the last token are known. With n > 1 answers the record
    describes the request as a whole: all tokens, from the first of any answer to the last.

    Args:
        output: the answer; complete.
        origin: `time.monotonic` when the run began.
    """
    times = output.metrics
    token_times = [t - origin for t in (times.first_token_time, times.last_token_time) if t]
    failed = [a.stop_reason for a in output.outputs if a.finish_reason == "error"]
    start = times.arrival_time - origin
    return RequestRecord(
        num_prompt_tokens=len(output.prompt_token_ids),
        num_output_tokens=sum(len(answer.token_ids) for answer in output.outputs),
        scheduled_time=start,
        start_time=start,
        token_times=token_times,
        error=str(failed[0]) if failed else None,
        num_cached_tokens=output.num_cached_tokens,
    )


def finite(figures: Mapping[str, float], *names: str) -> dict[str, float]:
    """Return the figures with a name that contains one of `names`, without NaN."""
    return {
        key: value
        for key, value in figures.items()
        if any(name in key for name in names) and not math.isnan(value)
    }
