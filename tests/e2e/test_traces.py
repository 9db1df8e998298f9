"""Spans of real engines: every API, several front ends, an engine that dies, `LLM`."""

import subprocess
import sys

import httpx
import pytest

from octavo import LLM, EngineArgs, LLMEngine, SamplingParams
from tests.collector import collector
from tests.e2e import harness

SIZE = ["--max-model-len", "256", "--kv-cache-memory-bytes", "8M", "--num-threads", "1"]
SETTINGS = {"max_model_len": 256, "kv_cache_memory_bytes": "8M", "num_threads": 1}
MODEL = "octavo/stories"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
PROMPT = {"model": MODEL, "prompt": "Once upon", "max_tokens": 5, "ignore_eos": True}
APIS = {
    "/v1/completions": PROMPT,
    "/v1/chat/completions": CHAT | {"stream": True},
    "/v1/messages": CHAT,
    "/v1/responses": {"model": MODEL, "input": "Hi", "max_output_tokens": 5, "store": False},
    "/api/generate": {"model": MODEL, "prompt": "Hi", "options": {"num_predict": 5}},
    "/api/chat": CHAT | {"options": {"num_predict": 5}},
    "/inference/v1/generate": {
        "model": MODEL,
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 5},
    },
}


def trace_of(number):
    return f"{number:032x}", f"{number:016x}"


def headers_of(number, flags="01"):
    trace, parent = trace_of(number)
    return {"traceparent": f"00-{trace}-{parent}-{flags}", "x-request-id": f"mine-{number}"}


@pytest.fixture(scope="module")
def receiver():
    with collector() as made:
        yield made


@pytest.fixture(scope="module")
def server(receiver, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    flags = [*SIZE, "-asc", "2", "-dp", "2", "--otlp-traces-endpoint", receiver.url]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_SERVICE_NAME", "stories")
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20b,x-other=c")
        with harness.serve(folder, *flags, spare=True) as made:
            yield made


@pytest.fixture
def spans(receiver):
    receiver.messages.clear()
    return receiver


def test_every_api_continues_the_trace_of_its_request(server, spans):
    for number, (path, body) in enumerate(APIS.items(), 1):
        response = httpx.post(server.url + path, json=body, headers=headers_of(number), timeout=60)
        assert response.status_code == 200, (path, response.text)
        assert response.headers["x-request-id"] == f"mine-{number}"
    found = spans.wait_for(len(APIS))
    by_trace = {span["traceId"]: span for span in found}
    for number, path in enumerate(APIS, 1):
        trace, parent = trace_of(number)
        span = by_trace[trace]
        assert span["parentSpanId"] == parent
        assert span["name"] == "llm_request"
        attributes = span["attributes"]
        assert attributes["http.request.header.x-request-id"] == [f"mine-{number}"], path
        assert attributes["gen_ai.request.max_tokens"] == 5
        assert 0 < attributes["gen_ai.usage.completion_tokens"] <= 5
        assert attributes["gen_ai.usage.prompt_tokens"] > 0
        assert attributes["gen_ai.response.model"] == MODEL
        e2e = attributes["gen_ai.latency.e2e"]
        assert 0 < attributes["gen_ai.latency.time_to_first_token"] <= e2e
        assert span["resource"]["service.name"] == "stories"
    _, headers = spans.headers[-1]
    assert (headers["x-key"], headers["x-other"]) == ("a b", "c")


def test_every_front_end_sends_its_spans(server, spans):
    number = 0
    while len({span["resource"]["process.pid"] for span in spans.spans}) < 2:
        assert number < 500, "one front end sends all spans"
        # A new connection, which any front end may accept.
        assert server.post("/v1/completions", PROMPT).status_code == 200
        number += 1
    found = spans.wait_for(number)
    assert len({span["traceId"] for span in found}) == number
    assert server.metric("octavo:trace_spans_dropped_total") == 0


def test_engines_that_die_leave_one_span(server, spans):
    body = PROMPT | {"stream": True, "max_tokens": 200}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=240) as response:
        lines = response.iter_lines()
        next(lines)
        for process in harness.processes(server.process.pid, harness.ENGINE):
            process.kill()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    [span] = spans.wait_for(1)
    assert span["attributes"]["gen_ai.usage.completion_tokens"] == 200
    assert span["attributes"]["gen_ai.response.finish_reasons"] == ["length"]


def test_answers_of_one_prompt_share_a_span_and_prompts_have_one_each(server, spans):
    body = PROMPT | {"prompt": ["Once upon", "There was"], "n": 3, "temperature": 1}
    assert server.post("/v1/completions", body).status_code == 200
    found = spans.wait_for(2)
    assert all(span["attributes"]["gen_ai.request.n"] == 3 for span in found)
    assert all(span["attributes"]["gen_ai.usage.completion_tokens"] == 15 for span in found)
    assert found[0]["attributes"]["gen_ai.response.finish_reasons"] == ["length"] * 3


def test_each_step_of_a_beam_search_is_a_request(server, spans):
    body = PROMPT | {"use_beam_search": True, "n": 2, "max_tokens": 2, "temperature": 0}
    response = httpx.post(
        server.url + "/v1/completions", json=body, headers=headers_of(1), timeout=60
    )
    assert response.status_code == 200
    found = spans.wait_for(3)
    assert {span["parentSpanId"] for span in found} == {trace_of(1)[1]}


def test_what_the_caller_does_not_sample(server, spans):
    for number, flags in ((1, "00"), (2, "01")):
        httpx.post(
            server.url + "/v1/completions",
            json=PROMPT,
            headers=headers_of(number, flags),
            timeout=60,
        ).raise_for_status()
    [span] = spans.wait_for(1)
    assert span["traceId"] == trace_of(2)[0]


def test_a_client_that_leaves(server, spans):
    body = PROMPT | {"stream": True, "max_tokens": 200}
    for _ in range(20):  # the answer may end before the server knows
        spans.messages.clear()
        url = server.url + "/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=120) as response:
            next(response.iter_lines())
        [span] = spans.wait_for(1)
        if span["attributes"]["gen_ai.response.finish_reasons"] != ["length"]:
            break
    assert span["attributes"]["gen_ai.response.finish_reasons"] == ["abort"]
    assert 0 < span["attributes"]["gen_ai.usage.completion_tokens"] < 200


def test_a_collector_that_hangs_harms_no_request(tmp_path):
    with collector(0) as hanging:
        flags = [*SIZE, "--otlp-traces-endpoint", hanging.url, "--shutdown-timeout", "5"]
        with harness.serve(tmp_path, *flags) as server:
            for _ in range(5):
                assert server.post("/v1/completions", PROMPT).status_code == 200
            harness.wait_until(lambda: hanging.headers)
            assert server.post("/v1/completions", PROMPT).status_code == 200
            server.process.terminate()
            assert server.process.wait(60) == 0


def test_a_collector_that_fails_is_counted(tmp_path):
    with collector(500) as failing:
        flags = [*SIZE, "--otlp-traces-endpoint", failing.url]
        with harness.serve(tmp_path, *flags) as server:
            for _ in range(3):
                assert server.post("/v1/completions", PROMPT).status_code == 200
            server.wait_for_metric("octavo:trace_spans_dropped_total", 3)
            assert server.log.read_text().count("spans are dropped") == 1
            assert "status 500" in server.log.read_text()


def test_the_end_of_a_server_sends_the_last_spans(tmp_path):
    with collector() as receiver:
        flags = [*SIZE, "--otlp-traces-endpoint", receiver.url]
        with harness.serve(tmp_path, *flags) as server:
            assert server.post("/v1/completions", PROMPT).status_code == 200
            server.process.terminate()
            assert server.process.wait(60) == 0
            assert len(receiver.spans) == 1


def test_an_llm_sends_spans():
    with collector() as receiver:
        with LLM(otlp_traces_endpoint=receiver.url, **SETTINGS) as llm:
            llm.generate(["Once", "There was"], SamplingParams(max_tokens=4, ignore_eos=True))
        found = receiver.wait_for(2)
    assert [span["attributes"]["gen_ai.usage.completion_tokens"] for span in found] == [4, 4]


def test_an_llm_that_nobody_ends_sends_spans():
    code = (
        "import sys; from octavo import LLM, SamplingParams\n"
        f"llm = LLM(otlp_traces_endpoint=sys.argv[1], **{SETTINGS!r})\n"
        "llm.generate('Once', SamplingParams(max_tokens=4))\n"
    )
    with collector() as receiver:
        subprocess.run([sys.executable, "-c", code, receiver.url], check=True, timeout=240)
        assert len(receiver.spans) == 1


def test_trace_headers_of_an_llm_engine():
    with collector() as receiver:
        engine = LLMEngine.from_engine_args(
            EngineArgs(otlp_traces_endpoint=receiver.url, **SETTINGS)
        )
        headers = headers_of(7) | {"tracestate": 5, "x-other": "a"}
        engine.add_request("r", "Once", SamplingParams(max_tokens=4), trace_headers=headers)
        while engine.has_unfinished_requests():
            engine.step()
        [span] = receiver.wait_for(1)
        engine.shutdown()
    assert (span["traceId"], span["parentSpanId"]) == trace_of(7)
    assert "traceState" not in span
    assert span["attributes"]["gen_ai.request.id"] == "r"
