"""Tracer of a front end, from its settings and the environment; headers of its requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import octavo
from octavo.config import EngineConfig, traces_from_environment

if TYPE_CHECKING:
    from octavo.observability.tracing import (
        Tracer,  # imports an HTTP client, which only traced front ends need
    )


# Characters of a header that W3C demands to be passed on.
_MOST_CHARACTERS = 512


def read_trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that a span needs: W3C's traceparent and tracestate, and x-request-id.

    Other headers, and what cannot be a value of these, are left out.
    """
    found = {name: headers.get(name) for name in ("traceparent", "tracestate", "x-request-id")}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, str) and value.isascii() and len(value) <= _MOST_CHARACTERS
    }


def make_tracer(config: EngineConfig, note_dropped: Callable[[int], None]) -> Tracer | None:
    """Return the sender of spans to `otlp_traces_endpoint`; None without that setting.

    Args:
        config: the engine's settings.
        note_dropped: called with numbers of dropped spans, on any thread.

    Raises:
        ConfigError: the URL, or an environment variable with headers, is wrong.
    """
    url = config.observability.traces_url
    if url is None:
        return None
    from octavo.observability.tracing import Tracer

    service, headers = traces_from_environment()
    names = config.model.served_model_name
    return Tracer(
        url,
        service,
        headers,
        model_name=names[0] if names else config.model.model,
        version=octavo.__version__,
        note_dropped=note_dropped,
    )
