"""Output processor: text, stops, logprobs, kinds of output, n > 1, aborts, errors, metrics."""

import asyncio
from dataclasses import dataclass, replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.config import ModelConfig
from octavo.errors import (
    ContextLengthError,
    DeadlineError,
    EngineDeadError,
    OctavoError,
    RequestError,
)
from octavo.frontend.input_processor import InputProcessor
from octavo.frontend.output_processor import OutputProcessor, RequestOutputCollector
from octavo.messages import EngineCoreOutput, FinishReason, RequestOptions
from octavo.observability.metrics import EngineMetrics
from octavo.outputs import CompletionOutput, Logprob, RequestMetrics
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.system import clock
from tests.params import pack_logprobs
from tests.small_tokenizers import EOS, byte_level

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


@pytest.fixture(autouse=True)
def one_clock(monkeypatch):
    """Give messages the clock of `RequestMetrics`."""
    monkeypatch.setattr(clock, "_EPOCH", 0.0)


@dataclass(frozen=True)
class Spec:
    is_encoder_decoder = False
    generates: bool = True
    vocab_size: int = 270
    eos_token_ids: tuple[int, ...] = (EOS,)
    sees_all: bool = False


class Bench:
    """Output processor with outputs that the test sends for the engine core."""

    def __init__(self, tokenizer="default", metrics=None, tracer=None):
        self.tokenizer = byte_level() if tokenizer == "default" else tokenizer
        self.inputs = InputProcessor(ModelConfig(), Spec(), self.tokenizer, 1000)
        self.outputs = OutputProcessor(self.tokenizer, metrics, tracer=tracer)
        self.now = 100.0

    def add(self, request_id="r", prompt="ab", queue=False, **params):
        params = SamplingParams(**({"max_tokens": 100} | params))
        request, text = self.inputs.process(request_id, prompt, params, RequestOptions(self.now))
        collector = RequestOutputCollector(params.output_kind) if queue else None
        self.outputs.add_request(request, params, text, collector)
        return collector

    def step(self, *outputs):
        """Process one step; each output is (request id, text or tokens) or an EngineCoreOutput."""
        self.now += 1.0
        made = [
            o if isinstance(o, EngineCoreOutput) else EngineCoreOutput(o[0], list(tokens(o[1])))
            for o in outputs
        ]
        return self.outputs.process_outputs(made, self.now)


def tokens(text):
    return text.encode() if isinstance(text, str) else text


def end(request_id, text, reason=FinishReason.LENGTH, **kwargs):
    return EngineCoreOutput(request_id, list(tokens(text)), finish_reason=reason, **kwargs)


def only(processed):
    [output] = processed.request_outputs
    return output


def test_cumulative():
    bench = Bench()
    bench.add()
    first = only(bench.step(("r", "he")))
    assert (first.request_id, first.prompt, first.prompt_token_ids) == ("r", "ab", [97, 98])
    assert (first.finished, first.outputs[0].text) == (False, "he")
    last = only(bench.step(end("r", "y")))
    assert last.finished
    [answer] = last.outputs
    assert (answer.index, answer.text, answer.token_ids) == (0, "hey", list(b"hey"))
    assert (answer.finish_reason, answer.stop_reason) == ("length", None)
    assert (answer.cumulative_logprob, answer.logprobs, last.prompt_logprobs) == (None, None, None)
    assert first.outputs[0].text == "he"  # earlier outputs do not change
    assert first.outputs[0].token_ids == list(b"he")
    assert bench.outputs.num_unfinished_requests == 0


def test_delta():
    bench = Bench()
    bench.add(output_kind=DELTA)
    answers = [
        only(bench.step(o)).outputs[0] for o in (("r", "he"), ("r", [0xE4, 0xB8]), end("r", [0xAD]))
    ]
    assert [a.text for a in answers] == ["he", "", "中"]
    assert [a.token_ids for a in answers] == [list(b"he"), [0xE4, 0xB8], [0xAD]]
    assert [a.finish_reason for a in answers] == [None, None, "length"]


def test_progress_of_the_prompt():
    """It is delivered like an answer without tokens; the next output may replace it."""
    bench = Bench()
    bench.add(output_kind=DELTA)
    part = EngineCoreOutput(
        "r", [], first_scheduled_time=100.5, num_cached_tokens=1, num_computed_tokens=2
    )
    told = only(bench.step(part))
    assert (told.outputs, told.num_computed_tokens, told.num_cached_tokens) == ([], 2, 1)
    assert not told.finished
    assert only(bench.step(("r", "he"))).outputs[0].text == "he"

    async def scenario():
        bench = Bench()
        queue = bench.add(queue=True, output_kind=DELTA)
        bench.step(EngineCoreOutput("r", [], num_computed_tokens=1))
        bench.step(EngineCoreOutput("r", [], num_computed_tokens=2))
        assert (await queue.get()).num_computed_tokens == 2
        bench.step(EngineCoreOutput("r", [], num_computed_tokens=2))
        bench.step(end("r", "he"))
        output = await queue.get()
        assert (output.outputs[0].text, output.finished) == ("he", True)

    asyncio.run(scenario())
    quiet = Bench()
    quiet.add(output_kind=FINAL_ONLY)
    assert quiet.step(part).request_outputs == []


def test_drafts_of_a_request():
    bench = Bench()
    bench.add()
    bench.step(("r", "he"))
    drafts = {"first_scheduled_time": 100.5, "num_draft_tokens": 5, "num_accepted_tokens": 3}
    times = only(bench.step(end("r", "y", **drafts))).metrics
    assert (times.num_draft_tokens, times.num_accepted_tokens) == (5, 3)


def test_final_only():
    bench = Bench()
    bench.add(output_kind=FINAL_ONLY, logprobs=0)
    assert bench.step(("r", "he")).request_outputs == []
    assert only(bench.step(end("r", "y"))).outputs[0].text == "hey"


def test_end_of_sequence_has_no_text():
    bench = Bench()
    bench.add()
    answer = only(bench.step(end("r", [65, EOS], FinishReason.STOP))).outputs[0]
    assert (answer.text, answer.token_ids) == ("A", [65, EOS])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    bench.add(stop_token_ids=[66])
    answer = only(bench.step(end("r", "AB", FinishReason.STOP, stop_reason=66))).outputs[0]
    assert (answer.text, answer.stop_reason) == ("A", 66)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_stop_text(kind):
    bench = Bench()
    bench.add(stop=["STOP"], output_kind=kind, logprobs=0)
    seen = bench.step(("r", "one ST")).request_outputs
    rows = pack_logprobs([[t] for t in b"OPQ"], [[-0.5], [-0.25], [-4.0]], [1, 1, 9])
    processed = bench.step(EngineCoreOutput("r", list(b"OPQ"), rows))
    seen += processed.request_outputs
    assert processed.reqs_to_abort == ["r"]
    answer = seen[-1].outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "STOP")
    assert answer.cumulative_logprob == -0.75
    assert seen[-1].finished
    if kind == DELTA:
        assert "".join(o.outputs[0].text for o in seen) == "one "
        assert bytes(t for o in seen for t in o.outputs[0].token_ids) == b"one STOP"
        assert len(answer.logprobs) == 2
    else:
        assert answer.text == "one "
        assert bytes(answer.token_ids) == b"one STOP"
    # Further outputs of the core are skipped.
    assert bench.step(("r", "more")).request_outputs == []


def test_stop_text_in_the_cores_last_output_needs_no_abort():
    bench = Bench()
    bench.add(stop=["b"])
    processed = bench.step(end("r", "ab"))
    assert processed.reqs_to_abort == []
    assert only(processed).outputs[0].finish_reason == "stop"


def test_logprobs():
    bench = Bench()
    bench.add(logprobs=2)
    rows = pack_logprobs(
        token_ids=[[65, 66, 65], [0xE4, 97, 98]],
        logprobs=[[-1.0, -0.5, -1.0], [-9.0, -0.1, -0.2]],
        ranks=[2, 77],
    )
    answer = only(bench.step(EngineCoreOutput("r", [65, 0xE4], rows))).outputs[0]
    assert answer.cumulative_logprob == -10.0
    first, second = answer.logprobs
    assert list(first) == [65, 66]
    assert (first[65].logprob, first[65].rank, first[65].decoded_token) == (-1.0, 2, "A")
    assert (first[66].logprob, first[66].rank) == (-0.5, 1)
    assert {t: (p.rank, p.decoded_token) for t, p in second.items()} == {
        0xE4: (77, "\ufffd"),
        97: (1, "a"),
        98: (2, "b"),
    }


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_prompt_logprobs(kind):
    bench = Bench()
    bench.add(prompt="abcd", prompt_logprobs=1, output_kind=kind)

    def rows(text):
        return pack_logprobs([[t, 65] for t in text], [[-1.0, -0.5]] * len(text), [3] * len(text))

    assert bench.step(EngineCoreOutput("r", [], None, rows(b"b"))).request_outputs == []
    seen = bench.step(EngineCoreOutput("r", [65], None, rows(b"cd"))).request_outputs
    seen += bench.step(end("r", "B")).request_outputs
    held = [o.prompt_logprobs for o in seen]
    assert [h is not None for h in held] == {
        CUMULATIVE: [True, True],
        DELTA: [True, False],
        FINAL_ONLY: [True],
    }[kind]
    assert held[0][0] is None
    assert [next(iter(row)) for row in held[0][1:]] == list(b"bcd")
    assert held[0][1][98].decoded_token == "b"


def test_several_answers_in_the_end():
    bench = Bench()
    bench.add(n=3, output_kind=FINAL_ONLY)
    assert bench.outputs.num_unfinished_requests == 3
    assert bench.step(end("2_r", "c"), ("0_r", "a")).request_outputs == []
    assert bench.step(end("1_r", "b", FinishReason.LENGTH)).request_outputs == []
    output = only(bench.step(end("0_r", "a")))
    assert (output.request_id, output.finished) == ("r", True)
    assert [(a.index, a.text) for a in output.outputs] == [(0, "aa"), (1, "b"), (2, "c")]


def test_several_answers_on_the_way():
    bench = Bench()
    bench.add(n=2, output_kind=DELTA)
    both = only(bench.step(("1_r", "b"), ("0_r", "a")))
    assert [(a.index, a.text) for a in both.outputs] == [(0, "a"), (1, "b")]
    one = only(bench.step(end("0_r", "c")))
    assert [(a.index, a.text, a.finish_reason) for a in one.outputs] == [(0, "c", "length")]
    assert not one.finished
    assert only(bench.step(end("1_r", "d"))).finished

    bench.add(n=2, output_kind=CUMULATIVE)
    bench.step(("0_r", "a"))
    bench.step(("1_r", "b"))
    last = only(bench.step(("0_r", "c")))
    assert [a.text for a in last.outputs] == ["ac", "b"]


def test_prompt_logprobs_of_several_answers_come_once():
    bench = Bench()
    bench.add(n=2, output_kind=DELTA, prompt_logprobs=0)
    rows = pack_logprobs([[98]], [[-1.0]], [1])
    outputs = [EngineCoreOutput(f"{i}_r", [65], None, rows) for i in range(2)]
    assert len(only(bench.step(outputs[1])).prompt_logprobs or []) == 0
    assert len(only(bench.step(outputs[0])).prompt_logprobs) == 2
    assert only(bench.step(("0_r", "a"))).prompt_logprobs is None


def test_ids_are_unique_among_the_living():
    bench = Bench()
    bench.add()
    with pytest.raises(RequestError, match="'r'"):
        bench.add()
    bench.step(end("r", "a"))
    bench.add()
    bench.add("p", n=2)
    with pytest.raises(RequestError, match="'p'"):
        bench.add("p", n=2)
    with pytest.raises(RequestError):
        bench.add("0_p")
    # A group whose last answer's id is in use leaves no state.
    bench.add("2_q")
    with pytest.raises(RequestError, match="'q'"):
        bench.add("q", n=3)
    assert bench.outputs.abort_requests(["q"]) == []
    bench.step(end("2_q", "a"))
    bench.add("q", n=3)


def test_abort():
    bench = Bench()
    queue = bench.add(queue=True, stop=["abc"], output_kind=DELTA)
    bench.step(("r", "ab"))
    assert bench.outputs.abort_requests(["r", "nobody"]) == ["r"]
    output = queue.get_nowait()
    assert output.finished
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("ab", "abort")
    assert bench.outputs.abort_requests(["r"]) == []
    assert bench.step(("r", "c")).request_outputs == []


def test_abort_of_several_answers():
    bench = Bench()
    queue = bench.add(n=3, queue=True, output_kind=DELTA)
    bench.step(end("1_r", "x"))
    queue.get_nowait()
    assert bench.outputs.abort_requests(["2_r"]) == ["2_r"]
    assert not queue.get_nowait().finished
    assert bench.outputs.abort_requests(["r"]) == ["0_r"]
    assert queue.get_nowait().finished
    assert bench.outputs.num_unfinished_requests == 0
    bench.add(n=3)  # the id is free again


def test_abort_with_an_error():
    metrics = EngineMetrics("m", 1000)
    bench = Bench(metrics=metrics)
    queue = bench.add(queue=True)
    bench.outputs.abort_requests(["r"], DeadlineError("too late"))
    with pytest.raises(DeadlineError):
        queue.get_nowait()
    found = counts(metrics)
    assert found["request_success_total", "error"] == 1
    assert ("requests_aborted_total", None) not in found


def test_whose_request_it_is():
    bench = Bench()
    first = bench.add(queue=True)
    assert bench.outputs.is_live("r", first)
    assert not bench.outputs.is_live("other", first)
    bench.outputs.abort_requests(["r"])
    assert not bench.outputs.is_live("r", first)
    second = bench.add(queue=True)
    assert not bench.outputs.is_live("r", first)
    assert bench.outputs.is_live("r", second)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ContextLengthError", ContextLengthError),
        ("RequestError", RequestError),
        ("DeadlineError", DeadlineError),
        ("QueueFullError", OctavoError),
        ("NoSuchError", OctavoError),
        ("annotations", OctavoError),
        (None, OctavoError),
    ],
)
def test_errors_have_their_class(kind, expected):
    bench = Bench()
    bench.add()
    processed = bench.step(end("r", [], FinishReason.ERROR, error="why", error_kind=kind))
    error = processed.errors["r"]
    assert isinstance(error, expected)
    assert str(error) == "why"
    assert processed.request_outputs == []
    assert processed.reqs_to_abort == []
    assert bench.outputs.num_unfinished_requests == 0


def test_an_error_ends_the_siblings():
    bench = Bench()
    queue = bench.add(n=3, queue=True, output_kind=DELTA)
    bench.add("other")
    bench.step(end("2_r", "x"))
    processed = bench.step(
        ("0_r", "a"),
        end("1_r", [], FinishReason.ERROR, error="why", error_kind="RequestError"),
        ("other", "b"),
    )
    assert processed.reqs_to_abort == ["0_r"]
    assert only(processed).request_id == "other"
    with pytest.raises(RequestError, match="why"):
        queue.get_nowait()
    assert bench.outputs.num_unfinished_requests == 1


def test_propagate_error():
    bench = Bench()
    queues = [bench.add("a", queue=True), bench.add("b", n=2, queue=True)]
    bench.outputs.propagate_error(EngineDeadError("gone"))
    for queue in queues:
        with pytest.raises(EngineDeadError, match="gone"):
            queue.get_nowait()
    assert bench.outputs.num_unfinished_requests == 0


def test_collector_merges_deltas():
    bench = Bench()
    queue = bench.add(queue=True, n=2, output_kind=DELTA, logprobs=0, prompt_logprobs=0)

    def row(token):
        return pack_logprobs([[token]], [[-1.0]], [1])

    for token in b"xyz":
        assert bench.step(EngineCoreOutput("0_r", [token], row(token))).request_outputs == []
    bench.step(EngineCoreOutput("1_r", [65], row(65)))
    output = queue.get_nowait()
    assert [(a.index, a.text, a.token_ids) for a in output.outputs] == [
        (0, "xyz", list(b"xyz")),
        (1, "A", [65]),
    ]
    assert [next(iter(r)) for r in output.outputs[0].logprobs] == list(b"xyz")
    assert output.outputs[0].cumulative_logprob == -3.0
    assert output.prompt_logprobs == [None]
    assert not output.finished
    assert queue.get_nowait() is None
    bench.step(end("1_r", "B"), end("0_r", "!"))
    output = queue.get_nowait()
    assert output.finished
    assert [a.finish_reason for a in output.outputs] == ["length", "length"]


def test_collector_keeps_the_newest_of_cumulative_outputs():
    bench = Bench()
    queue = bench.add(queue=True)
    for text in "abc":
        bench.step(("r", text))
    assert queue.get_nowait().outputs[0].text == "abc"


def test_collector_wakes_its_consumer():
    async def scenario():
        bench = Bench()
        queue = bench.add(queue=True, output_kind=DELTA)
        texts = []

        async def consume():
            while True:
                output = await queue.get()
                texts.append(output.outputs[0].text)
                if output.finished:
                    return

        task = asyncio.create_task(consume())
        await asyncio.sleep(0)
        bench.step(("r", "a"))
        bench.step(("r", "b"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        bench.step(end("r", "c"))
        await asyncio.wait_for(task, 60)
        assert texts == ["ab", "c"]

        failing = bench.add(queue=True)
        task = asyncio.create_task(failing.get())
        await asyncio.sleep(0)
        bench.outputs.propagate_error(EngineDeadError("gone"))
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(task, 60)

    asyncio.run(scenario())


def test_an_error_is_not_overwritten():
    queue = RequestOutputCollector(CUMULATIVE)
    queue.put(ValueError("first"))
    queue.put(RuntimeError("second"))
    with pytest.raises(ValueError, match="first"):
        queue.get_nowait()


def test_times_and_cached_tokens():
    bench = Bench()
    bench.add()  # at 100
    first = EngineCoreOutput("r", [65], num_cached_tokens=1, first_scheduled_time=100.5)
    bench.step(first)
    bench.step(("r", "B"))
    output = only(bench.step(end("r", "C", first_scheduled_time=100.5, num_preemptions=2)))
    times = output.metrics
    assert output.num_cached_tokens == 1
    assert (times.arrival_time, times.first_scheduled_time) == (100.0, 100.5)
    assert (times.first_token_time, times.last_token_time, times.finished_time) == (101, 103, 103)
    assert times.num_preemptions == 2


def test_times_of_several_answers():
    bench = Bench()
    bench.add(n=2, output_kind=FINAL_ONLY)
    bench.step(EngineCoreOutput("0_r", [65], first_scheduled_time=100.2))
    bench.step(EngineCoreOutput("1_r", [65], first_scheduled_time=100.1))
    bench.step(end("0_r", "b"))
    times = only(bench.step(end("1_r", "b"))).metrics
    assert (times.first_scheduled_time, times.first_token_time) == (100.1, 101)
    assert (times.last_token_time, times.finished_time) == (104, 104)


def test_without_tokenizer():
    bench = Bench(tokenizer=None)
    bench.add(prompt=[1, 2], logprobs=0)
    rows = pack_logprobs([[65]], [[-1.0]], [1])
    answer = only(bench.step(EngineCoreOutput("r", [65], rows))).outputs[0]
    assert (answer.text, answer.token_ids) == ("", [65])
    assert answer.logprobs[0][65].decoded_token is None


def test_metrics():
    metrics = EngineMetrics("m", 1000)
    bench = Bench(metrics=metrics)
    bench.add("a")
    bench.add("b", n=2)
    bench.add("c")
    bench.step(EngineCoreOutput("a", [65, 66], num_cached_tokens=1), ("0_b", "x"), ("1_b", "x"))
    bench.step(end("a", "C"), end("0_b", "y"))
    bench.outputs.abort_requests(["b"])
    bench.step(end("c", [], FinishReason.ERROR, error="why"))
    bench.step()
    samples = {
        (s.name.removeprefix("octavo:"), s.labels.get("finished_reason")): s.value
        for f in text_string_to_metric_families(metrics.render().decode())
        for s in f.samples
    }
    expected = {
        ("prompt_tokens_total", None): 6,
        ("prompt_tokens_cached_total", None): 1,
        ("generation_tokens_total", None): 6,
        # Two prompt tokens each, one of them cached, and four tokens; two tokens; an error.
        ("iteration_tokens_total_count", None): 3,
        ("iteration_tokens_total_sum", None): 5 + 4 + 2,
        ("time_to_first_token_seconds_count", None): 3,
        ("inter_token_latency_seconds_count", None): 2,
        ("inter_token_latency_seconds_sum", None): 2,
        ("request_success_total", "length"): 2,
        ("request_success_total", "abort"): 1,
        ("request_success_total", "error"): 1,
        ("requests_aborted_total", None): 1,
        ("request_params_n_count", None): 3,
        ("request_params_n_sum", None): 4,
        ("request_max_num_generation_tokens_count", None): 3,
        ("request_max_num_generation_tokens_sum", None): 3 + 2,
        ("request_generation_tokens_sum", None): 6,
    }
    assert {key: samples[key] for key in expected} == expected


def counts(metrics):
    """Return all counts and sums that are not 0, by name and reason or source, without buckets."""
    return {
        (
            s.name.removeprefix("octavo:"),
            s.labels.get("finished_reason") or s.labels.get("source"),
        ): s.value
        for f in text_string_to_metric_families(metrics.render().decode())
        for s in f.samples
        if s.value and not s.name.endswith(("_bucket", "_created", "_sleep_state"))
    }


def test_all_metrics_of_a_request():
    metrics = EngineMetrics("m", 1000)
    bench = Bench(metrics=metrics)
    bench.add(prompt="abc", max_tokens=9)  # at 100
    bench.step(EngineCoreOutput("r", [65], num_cached_tokens=2, first_scheduled_time=100.5))
    bench.step(("r", "BC"))
    bench.step(end("r", "D"))  # at 103
    assert counts(metrics) == {
        ("prompt_tokens_total", None): 3,
        ("prompt_tokens_cached_total", None): 2,
        ("generation_tokens_total", None): 4,
        ("iteration_tokens_total_count", None): 3,
        ("iteration_tokens_total_sum", None): 1 + 4,
        ("time_to_first_token_seconds_count", None): 1,
        ("time_to_first_token_seconds_sum", None): 1,
        ("inter_token_latency_seconds_count", None): 2,
        ("inter_token_latency_seconds_sum", None): 2,
        ("request_time_per_output_token_seconds_count", None): 1,
        ("request_time_per_output_token_seconds_sum", None): pytest.approx(2 / 3),
        ("e2e_request_latency_seconds_count", None): 1,
        ("e2e_request_latency_seconds_sum", None): 3,
        ("request_queue_time_seconds_count", None): 1,
        ("request_queue_time_seconds_sum", None): 0.5,
        ("request_prefill_time_seconds_count", None): 1,
        ("request_prefill_time_seconds_sum", None): 0.5,
        ("request_decode_time_seconds_count", None): 1,
        ("request_decode_time_seconds_sum", None): 2,
        ("request_inference_time_seconds_count", None): 1,
        ("request_inference_time_seconds_sum", None): 2.5,
        ("request_prompt_tokens_count", None): 1,
        ("request_prompt_tokens_sum", None): 3,
        ("request_generation_tokens_count", None): 1,
        ("request_generation_tokens_sum", None): 4,
        ("request_max_num_generation_tokens_count", None): 1,
        ("request_max_num_generation_tokens_sum", None): 4,
        ("request_prefill_kv_computed_tokens_count", None): 1,
        ("request_prefill_kv_computed_tokens_sum", None): 1,
        ("request_num_preemptions_count", None): 1,
        ("prompt_tokens_by_source_total", "local_cache_hit"): 2,
        ("prompt_tokens_by_source_total", "local_compute"): 1,
        ("request_params_n_count", None): 1,
        ("request_params_n_sum", None): 1,
        ("request_params_max_tokens_count", None): 1,
        ("request_params_max_tokens_sum", None): 9,
        ("request_success_total", "length"): 1,
    }


def test_metrics_of_what_failed_before_its_first_step():
    metrics = EngineMetrics("m", 1000)
    bench = Bench(metrics=metrics)
    bench.add(n=2, max_tokens=9)
    bench.step(end("0_r", [], FinishReason.ERROR, error="why"))  # at 101; its sibling, too
    assert counts(metrics) == {
        ("iteration_tokens_total_count", None): 1,
        ("e2e_request_latency_seconds_count", None): 2,
        ("e2e_request_latency_seconds_sum", None): 2,
        ("request_prompt_tokens_count", None): 2,
        ("request_prompt_tokens_sum", None): 4,
        ("request_generation_tokens_count", None): 2,
        ("request_max_num_generation_tokens_count", None): 1,
        ("request_num_preemptions_count", None): 2,
        ("request_params_n_count", None): 1,
        ("request_params_n_sum", None): 2,
        ("request_params_max_tokens_count", None): 2,
        ("request_params_max_tokens_sum", None): 18,
        ("request_success_total", "error"): 2,
    }


def row(token, logprob, *others):
    """Return logprobs of one position: the token itself, then the most probable ones."""
    ids, values = [token], [logprob]
    for other, value in others:
        ids.append(other)
        values.append(value)
    return pack_logprobs([ids], [values], [len(others) + 1])


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_all_of_what_two_answers_bring(kind):
    bench = Bench()
    queue = bench.add(n=2, queue=True, output_kind=kind, logprobs=1, prompt_logprobs=0)
    seen = []

    def step(*outputs):
        bench.step(*outputs)
        output = queue.get_nowait()
        if output is not None:  # an ended answer is in later outputs as well
            output.outputs = [replace(c, logprobs=list(c.logprobs)) for c in output.outputs]
        seen.append(output)

    step(
        EngineCoreOutput(
            "0_r",
            [65],
            row(65, -2.0, (66, -0.5)),
            row(98, -1.0),
            num_cached_tokens=1,
            first_scheduled_time=100.25,
        )
    )
    step(
        EngineCoreOutput(
            "0_r", [66], row(66, -0.5, (66, -0.5)), first_scheduled_time=100.5, num_preemptions=1
        ),
        EngineCoreOutput(
            "1_r",
            [67],
            row(67, -0.25, (67, -0.25)),
            first_scheduled_time=100.5,
            num_cached_tokens=2,
        ),
    )
    step(end("1_r", [5], FinishReason.STOP, new_logprobs=row(5, -1.0, (5, -1.0)), stop_reason=5))
    step(end("0_r", [68], new_logprobs=row(68, -3.0, (5, -1.0))))

    def candidates(*found):
        return [{t: Logprob(p, rank, chr(t)) for t, p, rank in entry} for entry in found]

    a1 = [(65, -2.0, 2), (66, -0.5, 1)]
    a2 = [(66, -0.5, 2)]  # as packed here, the token's own rank
    a3 = [(68, -3.0, 2), (5, -1.0, 1)]
    b1, b2 = [(67, -0.25, 2)], [(5, -1.0, 2)]
    first = CompletionOutput(0, "A", [65], -2.0, candidates(a1))
    whole = [
        CompletionOutput(0, "ABD", [65, 66, 68], -5.5, candidates(a1, a2, a3), None, "length"),
        CompletionOutput(1, "C\x05", [67, 5], -1.25, candidates(b1, b2), None, "stop", 5),
    ]
    if kind == FINAL_ONLY:
        assert seen[:3] == [None] * 3
    elif kind == DELTA:
        assert [output.outputs for output in seen] == [
            [first],
            [
                CompletionOutput(0, "B", [66], -2.5, candidates(a2)),
                CompletionOutput(1, "C", [67], -0.25, candidates(b1)),
            ],
            [CompletionOutput(1, "\x05", [5], -1.25, candidates(b2), None, "stop", 5)],
            [CompletionOutput(0, "D", [68], -5.5, candidates(a3), None, "length")],
        ]
    else:
        second = CompletionOutput(0, "AB", [65, 66], -2.5, candidates(a1, a2))
        assert [output.outputs for output in seen] == [
            [first],
            [second, CompletionOutput(1, "C", [67], -0.25, candidates(b1))],
            [second, whole[1]],
            whole,
        ]
    if kind != DELTA:
        assert seen[-1].outputs == whole
    last = seen[-1]
    assert [output and output.finished for output in seen][-1:] == [True]
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("r", "ab", [97, 98])
    assert last.num_cached_tokens == 1
    assert last.metrics == RequestMetrics(
        arrival_time=100.0,
        first_scheduled_time=100.25,
        first_token_time=101.0,
        last_token_time=104.0,
        finished_time=104.0,
        num_preemptions=1,
    )
    with_prompt = [output.prompt_logprobs is not None for output in seen if output is not None]
    assert (
        with_prompt
        == {
            CUMULATIVE: [True] * 4,
            DELTA: [True, False, False, False],
            FINAL_ONLY: [True],
        }[kind]
    )


def test_deltas_of_one_request_that_come_together_are_one():
    bench = Bench()
    bench.add(output_kind=DELTA, logprobs=0)
    rows = [pack_logprobs([[i]], [[-float(i)]], [1]) for i in (104, 101)]
    made = [
        EngineCoreOutput("r", [104], new_logprobs=rows[0]),
        EngineCoreOutput("r", [101], new_logprobs=rows[1], finish_reason=FinishReason.LENGTH),
    ]
    [completion] = only(bench.step(*made)).outputs
    assert (completion.text, completion.token_ids) == ("he", [104, 101])
    assert completion.finish_reason == "length"
    assert [sorted(row) for row in completion.logprobs] == [[104], [101]]


def test_what_another_engine_gets():
    bench = Bench()
    bench.add("a", prompt_logprobs=1)
    bench.add("b", n=3, stop=["z"])
    bench.step(("a", "x"), ("0_b", "xy"), ("1_b", "z"))
    a, b = bench.outputs.unfinished()
    assert (a.request_id, a.output_token_ids, a.answers) == ("a", bench.tokenizer.encode("x"), None)
    assert a.num_prompt_logprobs == 1
    # Once, for any number of answers.
    assert (b.request_id, b.n, b.output_token_ids) == ("b", 3, [])
    assert b.answers == {0: bench.tokenizer.encode("xy"), 2: []}
    assert b.child_ids == ["0_b", "2_b"]


class Tracer:
    """Keeps what is known of the requests that have ended."""

    def __init__(self):
        self.ended = []

    def record_finished(self, request_id, request, times, **ended):
        error = ended.pop("error")
        seconds = None if times.finished_time is None else times.finished_time - times.arrival_time
        self.ended.append((request_id, seconds, *ended.values(), error and type(error)))


def test_spans_of_requests():
    """A span for each request, with all its answers, however it ends."""
    tracer = Tracer()
    bench = Bench(tracer=tracer)
    bench.add("a", n=2)
    bench.step(end("0_a", "xyz"))  # at 101
    assert tracer.ended == []
    bench.step(end("1_a", "x", FinishReason.STOP))
    assert tracer.ended.pop() == ("a", 2, 4, ["length", "stop"], None)
    bench.add("b", stop=["y"])
    bench.step(("b", "xyz"))
    assert tracer.ended.pop() == ("b", 1, 2, ["stop"], None)  # without what follows
    bench.add("c", n=2)
    bench.step(("0_c", "x"), end("1_c", [], FinishReason.ERROR, error="why"))
    assert tracer.ended.pop() == ("c", 1, 1, ["error", "error"], OctavoError)
    assert tracer.ended == []


def test_spans_of_requests_that_are_ended():
    tracer = Tracer()
    bench = Bench(tracer=tracer)
    for name in "abc":
        bench.add(name, n=2)
    bench.step(*((f"{i}_{name}", "xy") for i in range(2) for name in "abc"))
    bench.outputs.abort_requests(["a"])
    bench.outputs.abort_requests(["b"], DeadlineError("late"))
    bench.outputs.propagate_error(EngineDeadError("gone"))
    names, seconds, *rest = zip(*tracer.ended, strict=True)
    assert names == ("a", "b", "c")
    assert seconds[2] is None
    assert [*zip(*rest, strict=True)] == [
        (4, ["abort", "abort"], None),
        (4, ["error", "error"], DeadlineError),
        (4, [], EngineDeadError),
    ]
