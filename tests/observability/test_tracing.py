"""Spans: their form, their parents, and collectors that hang, fail or are absent."""

import logging
import socket
import threading
import time

import pytest

from octavo.errors import RequestError
from octavo.observability import tracing
from octavo.observability.tracing import Tracer
from octavo.outputs import RequestMetrics
from tests.collector import collector
from tests.params import core_params, core_request

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(tracing, "_INTERVAL", 0.01)
    monkeypatch.setattr(tracing, "_DELAYS", (0.01, 0.01))


class Bench:
    """Tracer, and the numbers of the spans that it dropped."""

    def __init__(self, url, headers=None):
        self.dropped = []
        self.tracer = Tracer(
            f"{url}/v1/traces",
            "my-service",
            headers or {},
            model_name="m",
            version="1.2",
            note_dropped=self.dropped.append,
        )

    def record(
        self, request_id="r", error=None, times=None, num_tokens=5, trace_headers=None, **params
    ):
        self.tracer.record_finished(
            request_id,
            core_request("core", [1, 2, 3], core_params(**params), trace_headers=trace_headers),
            times or RequestMetrics(arrival_time=time.monotonic()),
            num_generation_tokens=num_tokens,
            finish_reasons=["stop"],
            error=error,
        )

    def close(self):
        self.tracer.close()
        assert not self.tracer._thread.is_alive()


def test_a_span():
    arrival = time.monotonic() - 10.0
    times = RequestMetrics(arrival, arrival + 1, arrival + 3, arrival + 7, arrival + 8)
    with collector() as server:
        bench = Bench(server.url, {"authorization": "Bearer secret"})
        bench.record("cmpl-1", times=times, max_tokens=9, temperature=0.5, top_p=0.75)
        [span] = server.wait_for(1)
        bench.close()
    [(path, headers)] = server.headers
    assert path == "/v1/traces"
    assert headers["authorization"] == "Bearer secret"
    assert headers["content-type"] == "application/json"
    assert (span["name"], span["kind"], span["status"]) == ("llm_request", 2, {})
    assert len(bytes.fromhex(span["traceId"])) == 16
    assert len(bytes.fromhex(span["spanId"])) == 8
    assert "parentSpanId" not in span
    start, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
    assert end - start == pytest.approx(8e9, abs=1e6)
    assert start / 1e9 == pytest.approx(time.time() - 10.0, abs=60.0)
    assert span["resource"]["service.name"] == "my-service"
    assert span["resource"]["service.version"] == "1.2"
    latencies = {k: v for k, v in span["attributes"].items() if ".latency." in k}
    assert latencies == {
        "gen_ai.latency.e2e": pytest.approx(8.0),
        "gen_ai.latency.time_in_queue": pytest.approx(1.0),
        "gen_ai.latency.time_to_first_token": pytest.approx(3.0),
        "gen_ai.latency.time_in_model_prefill": pytest.approx(2.0),
        "gen_ai.latency.time_in_model_decode": pytest.approx(4.0),
        "gen_ai.latency.time_in_model_inference": pytest.approx(6.0),
    }
    assert {k: v for k, v in span["attributes"].items() if k not in latencies} == {
        "gen_ai.request.id": "cmpl-1",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 5,
    }
    assert bench.dropped == []


def test_an_error_is_named_but_not_quoted():
    with collector() as server:
        bench = Bench(server.url)
        bench.record(error=RequestError("the prompt 'my own' is bad", "prompt"))
        [span] = server.wait_for(1)
        bench.close()
    assert span["status"] == {"code": 2}
    assert span["attributes"]["error.type"] == "RequestError"
    assert "my own" not in str(server.messages)


@pytest.mark.parametrize(
    ("traceparent", "is_parent"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"00-{TRACE}-{PARENT}-03", True),
        (f"cc-{TRACE}-{PARENT}-01-of-a-later-version", True),
        (f"00-{TRACE}-{PARENT}-01-of-a-later-version", False),
        (f"ff-{TRACE}-{PARENT}-01", False),
        (f"00-{TRACE.upper()}-{PARENT}-01", False),
        (f"00-{'0' * 32}-{PARENT}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        ("nonsense", False),
    ],
)
def test_parents(traceparent, is_parent):
    with collector() as server:
        bench = Bench(server.url)
        bench.record(trace_headers={"traceparent": traceparent, "tracestate": "a=b"})
        [span] = server.wait_for(1)
        bench.close()
    found = span["traceId"], span.get("parentSpanId"), span.get("traceState")
    assert (found == (TRACE, PARENT, "a=b")) is is_parent
    if not is_parent:
        assert found[1:] == (None, None)


def test_what_the_caller_does_not_sample_is_not_sent():
    with collector() as server:
        bench = Bench(server.url)
        bench.record("no", trace_headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        bench.record("yes")
        bench.close()
        assert [s["attributes"]["gen_ai.request.id"] for s in server.spans] == ["yes"]


def test_a_request_that_never_ran():
    with collector() as server:
        bench = Bench(server.url)
        bench.record(times=RequestMetrics(arrival_time=time.monotonic() - 2.0), num_tokens=0)
        [span] = server.wait_for(1)
        bench.close()
    found = [name for name in span["attributes"] if ".latency." in name]
    assert found == ["gen_ai.latency.e2e"]
    assert span["attributes"]["gen_ai.latency.e2e"] >= 2.0


def test_many_spans_take_few_messages(monkeypatch):
    monkeypatch.setattr(tracing, "_MOST_SENT", 30)
    with collector() as server:
        bench = Bench(server.url)
        for number in range(100):
            bench.record(str(number))
        bench.close()
        ids = [span["attributes"]["gen_ai.request.id"] for span in server.spans]
        assert sorted(ids, key=int) == [str(number) for number in range(100)]
        assert len({span["spanId"] for span in server.spans}) == 100
        assert 4 <= len(server.messages) < 100
        assert all(
            len(m["resourceSpans"][0]["scopeSpans"][0]["spans"]) <= 30 for m in server.messages
        )


def test_a_busy_collector_is_tried_again():
    with collector(503, 429, 200) as server:
        bench = Bench(server.url)
        bench.record()
        server.wait_for(1)
        bench.close()
    assert len(server.headers) == 3
    assert bench.dropped == []


@pytest.mark.parametrize(("status", "tries"), [(500, 1), (400, 1), (302, 1), (503, 3)])
def test_a_collector_that_fails(status, tries, caplog):
    """Spans are dropped and counted; the log has one line, until the collector works again."""
    with collector(status) as server, caplog.at_level(logging.WARNING):
        bench = Bench(server.url)
        for number in range(3):
            bench.record(str(number))
            wait_until(lambda n=number: sum(bench.dropped) == n + 1)
        assert len(server.headers) == 3 * tries
        [line] = caplog.records
        assert f"status {status}" in line.getMessage()
        server.statuses = [200]
        bench.record("later")
        server.wait_for(1)
        server.statuses = [status]
        bench.record("last")
        wait_until(lambda: sum(bench.dropped) == 4)
        bench.close()
    assert len(caplog.records) == 2


def test_no_collector(caplog):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody else gets the port
        bench = Bench(f"http://127.0.0.1:{taken.getsockname()[1]}/v1/traces")
        bench.record()
        wait_until(lambda: bench.dropped == [1])
        bench.close()
    assert "ConnectError" in caplog.text


def test_a_collector_that_hangs(monkeypatch, caplog):
    """No request waits for it; the queue stays short, and the end takes a second at most."""
    monkeypatch.setattr(tracing, "_MOST_PENDING", 50)
    monkeypatch.setattr(tracing, "_TIMEOUT", 250.0)
    with collector(0) as server:
        bench = Bench(server.url)
        bench.record("stuck")
        wait_until(lambda: server.headers)
        for number in range(1000):
            bench.record(str(number))
        assert bench.tracer._queue.qsize() == 50
        assert sum(bench.dropped) == 950
        assert len(caplog.records) == 1
        bench.tracer.close()
        assert bench.tracer._thread.is_alive()
    bench.tracer._thread.join(60)
    assert not bench.tracer._thread.is_alive()


def test_a_slow_collector_is_given_up(monkeypatch):
    monkeypatch.setattr(tracing, "_TIMEOUT", 0.05)
    monkeypatch.setattr(tracing, "_DELAYS", ())
    with collector(0) as server:
        bench = Bench(server.url)
        bench.record()
        wait_until(lambda: bench.dropped == [1])
        bench.close()


def test_an_id_that_is_no_text_harms_no_other():
    with collector() as server:
        bench = Bench(server.url)
        bench.record("\ud800")
        bench.record("good")
        bench.close()
        assert bench.dropped == [1]
        assert [s["attributes"]["gen_ai.request.id"] for s in server.spans] == ["good"]


def test_the_end_of_the_program_sends_the_rest(monkeypatch):
    monkeypatch.setattr(tracing, "_INTERVAL", 60.0)
    with collector() as server:
        bench = Bench(server.url)
        bench.record()
        bench.close()
        bench.close()  # a second time is harmless
        bench.record("late")
        assert len(server.spans) == 1


def test_no_thread_is_left():
    before = threading.active_count()
    with collector() as server:
        Bench(server.url).close()
    assert threading.active_count() == before


def wait_until(condition):
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
