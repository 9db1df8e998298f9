"""OpenTelemetry traces: a span for each request, sent to a collector on a thread of its own.

Spans and their attributes have the names of vLLM. The encoding is OTLP over HTTP with JSON
(https://opentelemetry.io/docs/specs/otlp/); the headers of a request that continue a trace are
W3C's (https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import msgspec

from octavo.messages import EngineCoreRequest
from octavo.outputs import RequestMetrics

logger = logging.getLogger(__name__)

# Spans that may wait, and spans of one message; a span has about 2 KB.
_MOST_PENDING = 2048
_MOST_SENT = 512
# Seconds for which spans are collected.
_INTERVAL = 1.0
# Seconds that a collector may take for each part of an answer.
_TIMEOUT = 10.0
# Seconds before each further try, and statuses that allow one.
_DELAYS = (1.0, 2.0, 4.0)
_TRY_AGAIN = frozenset([429, 502, 503, 504])
# Seconds that `close` waits.
_CLOSE_TIMEOUT = 1.0

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SPAN_KIND_SERVER = 2
_STATUS_ERROR = 2


class Tracer:
    """Sender of spans. No method but `close` waits; spans that cannot be sent are dropped.

    Args:
        url: receives the spans.
        service: name of this service.
        headers: headers of each message, such as keys.
        model_name: value of the attribute `gen_ai.response.model`.
        version: version of Octavo.
        note_dropped: called with numbers of dropped spans, on any thread.
    """

    def __init__(
        self,
        url: str,
        service: str,
        headers: Mapping[str, str],
        *,
        model_name: str,
        version: str,
        note_dropped: Callable[[int], None],
    ) -> None:
        self._url, self._model_name, self._note_dropped = url, model_name, note_dropped
        self._resource = {
            "attributes": _attributes(
                {
                    "service.name": service,
                    "service.version": version,
                    "host.name": socket.gethostname(),
                    "process.pid": os.getpid(),
                }
            )
        }
        self._scope = {"name": "octavo", "version": version}
        self._client = httpx.Client(
            headers={**headers, "content-type": "application/json"}, timeout=_TIMEOUT
        )
        self._is_failing = False
        self._closing = threading.Event()
        self._queue: queue.SimpleQueue[msgspec.Raw | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="octavo-tracer", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def record_finished(
        self,
        request_id: str,
        request: EngineCoreRequest,
        times: RequestMetrics,
        *,
        num_generation_tokens: int,
        finish_reasons: Sequence[str],
        error: Exception | None,
    ) -> None:
        """Queue the span of a request that has ended with all its answers.

        Args:
            request_id: the caller's id.
            request: the request.
            times: its times, in seconds of `time.monotonic`.
            num_generation_tokens: number of tokens of all answers.
            finish_reasons: reason for the end of each answer.
            error: error that ended it.
        """
        headers = request.options.trace_headers or {}
        trace = _trace_of(headers)
        if trace is None or self._closing.is_set():
            return
        if self._queue.qsize() >= _MOST_PENDING:
            self._drop(1, "too many are waiting")
            return
        end = time.monotonic() if times.finished_time is None else times.finished_time
        epoch = time.time() - time.monotonic()
        params = request.sampling_params
        attributes = {
            "gen_ai.request.id": request_id,
            "gen_ai.request.n": request.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": list(finish_reasons),
            "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
            "gen_ai.usage.completion_tokens": num_generation_tokens,
            **_latencies(times, end),
            "http.request.header.x-request-id": [headers["x-request-id"]]
            if "x-request-id" in headers
            else None,
            "error.type": None if error is None else type(error).__name__,
        }
        span = {
            **trace,
            "spanId": secrets.token_hex(8),
            "name": "llm_request",
            "kind": _SPAN_KIND_SERVER,
            "startTimeUnixNano": _nanoseconds(times.arrival_time + epoch),
            "endTimeUnixNano": _nanoseconds(end + epoch),
            "attributes": _attributes(attributes),
            "status": {} if error is None else {"code": _STATUS_ERROR},
        }
        try:
            self._queue.put(msgspec.Raw(msgspec.json.encode(span)))
        except UnicodeEncodeError as wrong:  # such as an id of half a character
            self._drop(1, str(wrong))

    def close(self) -> None:
        """Send the remaining spans, for at most a second. A second call is harmless."""
        atexit.unregister(self.close)
        self._closing.set()
        self._queue.put(None)
        self._thread.join(_CLOSE_TIMEOUT)

    def _run(self) -> None:
        with self._client:
            while (span := self._queue.get()) is not None:
                if self._queue.qsize() < _MOST_SENT:
                    self._closing.wait(_INTERVAL)
                spans = [span]
                while len(spans) < _MOST_SENT and not self._queue.empty():
                    if (span := self._queue.get()) is None:
                        break
                    spans.append(span)
                self._send(spans)
                if span is None:
                    break

    def _send(self, spans: list[msgspec.Raw]) -> None:
        """Send spans, with a few tries; drop them if the collector does not take them."""
        scoped = [{"scope": self._scope, "spans": spans}]
        message = {"resourceSpans": [{"resource": self._resource, "scopeSpans": scoped}]}
        body = msgspec.json.encode(message)
        for delay in (*_DELAYS, None):
            try:
                status = self._client.post(self._url, content=body).status_code
            except httpx.HTTPError as error:
                reason, tries_again = f"{type(error).__name__}: {error}", True
            else:
                if 200 <= status < 300:
                    self._is_failing = False
                    return
                reason, tries_again = f"status {status}", status in _TRY_AGAIN
            if not tries_again or delay is None or self._closing.wait(delay):
                break
        self._drop(len(spans), reason)

    def _drop(self, count: int, reason: str) -> None:
        """Count dropped spans; log the first ones since the collector last took some."""
        self._note_dropped(count)
        if not self._is_failing:
            self._is_failing = True
            logger.warning(
                "spans are dropped until %s accepts them (OTLP over HTTP, usually port 4318); "
                "requests are not affected: %s",
                self._url,
                reason,
            )


def _trace_of(headers: Mapping[str, str]) -> dict[str, str] | None:
    """Return the members of a span that say to which trace it belongs; None: it is not sampled.

    Without a valid header `traceparent` the span begins a trace.
    """
    found = _PARENT.fullmatch(headers.get("traceparent", ""))
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return {"traceId": secrets.token_hex(16)}
    _, trace, parent, flags, _ = found.groups()
    if not int(trace, 16) or not int(parent, 16):
        return {"traceId": secrets.token_hex(16)}
    if not int(flags, 16) & 1:
        return None
    state = headers.get("tracestate")
    return {"traceId": trace, "parentSpanId": parent} | ({"traceState": state} if state else {})


def _latencies(times: RequestMetrics, end: float) -> dict[str, float]:
    """Return the attributes for the times of a request, in seconds, as far as it came."""
    arrival, scheduled = times.arrival_time, times.first_scheduled_time
    first, last = times.first_token_time, times.last_token_time
    found = {"e2e": end - arrival}
    if scheduled is not None:
        found["time_in_queue"] = scheduled - arrival
    if first is not None and last is not None:
        found["time_to_first_token"] = first - arrival
        found["time_in_model_decode"] = last - first
        if scheduled is not None:
            found["time_in_model_prefill"] = first - scheduled
            found["time_in_model_inference"] = last - scheduled
    return {f"gen_ai.latency.{name}": value for name, value in found.items()}


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return OTLP's form of attributes, without those that are None."""
    return [{"key": key, "value": _value(v)} for key, v in values.items() if v is not None]


def _value(value: str | int | float | list[str]) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    # OTLP writes integers of 64 bits as texts.
    return {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}


def _nanoseconds(seconds: float) -> str:
    return str(int(seconds * 1e9))
