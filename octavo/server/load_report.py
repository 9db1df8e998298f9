"""How loaded the server is, in a header of answers to whoever asks for it: ORCA's load report.

A load balancer asks with `endpoint-load-metrics-format`, TEXT or JSON; as with vLLM, answers that
are not streamed have it.
"""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import Response

from octavo.observability.metrics import EngineMetrics

_ASKED = "endpoint-load-metrics-format"
_HEADER = "endpoint-load-metrics"


def add_load_report(request: Request, response: Response, metrics: EngineMetrics) -> None:
    """Put the header into an answer if the request asks for it in a format that is known."""
    asked = request.headers.get(_ASKED, "").upper()
    named = metrics.load()
    if asked == "JSON":
        response.headers[_HEADER] = "JSON " + json.dumps({"named_metrics": named})
    elif asked == "TEXT":
        texts = [f"named_metrics.{name}={value}" for name, value in named.items()]
        response.headers[_HEADER] = "TEXT " + ", ".join(texts)
