"""ORCA load report: the server's load in a header of answers, on request.

A load balancer requests it with `endpoint-load-metrics-format`, TEXT or JSON. As with vLLM, answers
that are not streamed have it.
"""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import Response

from octavo.observability.metrics import EngineMetrics

_ASKED = "endpoint-load-metrics-format"
_HEADER = "endpoint-load-metrics"


def add_load_report(request: Request, response: Response, metrics: EngineMetrics) -> None:
    """Add the header to an answer if the request names a known format."""
    asked = request.headers.get(_ASKED, "").upper()
    named = metrics.load()
    if asked == "JSON":
        response.headers[_HEADER] = "JSON " + json.dumps({"named_metrics": named})
    elif asked == "TEXT":
        texts = [f"named_metrics.{name}={value}" for name, value in named.items()]
        response.headers[_HEADER] = "TEXT " + ", ".join(texts)
