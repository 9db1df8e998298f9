"""Records of steps that the engine core sends to the front end."""

import itertools

import msgspec
import pytest

from octavo.engine.step_reporter import HOLDERS_INTERVAL, StepReporter
from octavo.messages import EngineCoreOutputs, ScheduledRequest, SchedulerOutput
from octavo.observability.steps import StepPreemption, StepRecord
from tests.engine.test_core import make_core, request


def run(core):
    """Run a core until it is idle; return the records of its steps."""
    records = []
    while core.has_work():
        outputs = core.step()
        records += [msgspec.msgpack.decode(step, type=StepRecord) for step in outputs.steps]
    return records


def make_reporting_core(depth=1, **settings):
    """Return a core whose reporter has a clock that advances with every call."""
    ticks = itertools.count(1)
    return make_core(depth, listeners=[StepReporter(lambda: float(next(ticks)))], **settings)


@pytest.mark.parametrize("depth", [1, 2])
def test_every_step_is_reported_once_with_its_times_and_parts(depth):
    core = make_reporting_core(depth)
    core.add_request(request("1", list(range(1, 41)), max_tokens=3))  # two steps for the prompt
    core.add_request(request("2", [5, 6, 7], max_tokens=2))
    records = run(core)
    assert [r.number for r in records] == list(range(1, len(records) + 1))
    for record in records:
        times = record.schedule_begun, record.scheduled, record.begun
        assert list(times) == sorted(times)
        assert record.begun <= record.computed <= record.processed
        assert not record.failed
    for before, after in itertools.pairwise(records):
        assert before.computed <= after.begun  # one step after the other
    first = records[0].parts
    assert [(p.request_id, p.num_tokens) for p in first] == [("1", 32)]
    assert (first[0].num_known_tokens, first[0].num_prompt_tokens) == (0, 40)
    assert records[0].wait.request_id == "2"
    assert records[0].wait.reason == "BUDGET"
    computed = {"1": 0, "2": 0}
    for part in itertools.chain.from_iterable(r.parts for r in records):
        computed[part.request_id] += part.num_tokens
    assert computed["1"] >= 40 + 2  # steps ahead of a request's end may compute more
    assert computed["2"] >= 3 + 1
    core.shutdown()


def test_known_tokens_are_those_of_the_cache():
    core = make_reporting_core()
    core.add_request(request("1", list(range(1, 41)), max_tokens=1))
    run(core)
    core.add_request(request("2", list(range(1, 41)), max_tokens=1))
    part = run(core)[0].parts[0]
    assert (part.num_known_tokens, part.num_tokens, part.num_prompt_tokens) == (32, 8, 40)
    core.shutdown()


def test_preemptions_are_reported_with_the_request_that_needed_the_blocks():
    core = make_reporting_core(blocks=5, caching=False)
    core.add_request(request("1", list(range(1, 17)), max_tokens=30))
    core.add_request(request("2", list(range(20, 36)), max_tokens=30))
    records = run(core)
    assert StepPreemption("2", "1") in itertools.chain.from_iterable(r.preemptions for r in records)
    again = [p for r in records for p in r.parts if p.request_id == "2" and p.num_prompt_tokens]
    assert len(again) > 1
    assert again[1].num_prompt_tokens > again[0].num_prompt_tokens  # with its tokens so far
    core.shutdown()


def test_a_failed_step_is_reported_as_failed():
    core = make_reporting_core()
    core.add_request(request("1", [1, 2, 3], max_tokens=3))
    core.executor.failure = RuntimeError("no memory")
    assert [r.failed for r in run(core)] == [True]
    core.shutdown()


def test_arrivals_and_times_outside_of_the_queue_are_reported():
    core = make_reporting_core()
    core.sleep(0, "keep")
    core.add_request(request("1", [1, 2, 3], max_tokens=1))
    core.wake_up()
    core.add_request(request("2", [1, 2, 3], max_tokens=1))
    events = [event for record in run(core) for event in record.events]
    assert [(event.request_id, event.kind) for event in events] == [
        *(("1", "ADDED"), ("1", "WAITING_FOR_WAKE_UP"), ("1", "READY"), ("2", "ADDED"))
    ]
    times = [event.time for event in events]
    assert times == sorted(set(times))
    core.shutdown()


def test_events_before_an_idle_engine_are_reported_without_a_step():
    core = make_reporting_core()
    core.add_request(request("1", [1, 2, 3], max_tokens=1))
    core.abort_requests(["1"])
    (step,) = core.step().steps
    record = msgspec.msgpack.decode(step, type=StepRecord)
    assert (record.number, record.parts) == (0, [])
    assert [event.kind for event in record.events] == ["ADDED"]
    core.shutdown()


def test_a_step_that_was_scheduled_ahead_begins_after_the_step_before_it():
    ticks = itertools.count(1)
    reporter = StepReporter(lambda: float(next(ticks)))
    for number in (1, 2):
        reporter.on_begin(number)
        reporter.on_schedule(number, SchedulerOutput([ScheduledRequest("1", 1)]))
    for number in (1, 2):
        reporter.on_computed(number)
        reporter.on_result(number, 0.0, failed=False, sample_seconds=0.0)
    outputs = EngineCoreOutputs()
    reporter.on_outputs(outputs, is_idle=True)
    first, second = (msgspec.msgpack.decode(step, type=StepRecord) for step in outputs.steps)
    assert (first.scheduled, first.begun, first.computed) == (2.0, 2.0, 5.0)
    assert (second.scheduled, second.begun, second.computed) == (4.0, 5.0, 6.0)


def test_a_wait_for_blocks_names_their_holders_a_few_times_a_second():
    time = itertools.count(1, HOLDERS_INTERVAL / 40)
    core = make_core(1, listeners=[StepReporter(lambda: next(time))], blocks=6, caching=False)
    core.add_request(request("1", list(range(1, 33)), max_tokens=40))
    core.add_request(request("2", list(range(1, 33)), max_tokens=40))
    records = run(core)
    waits = [r.wait for r in records if r.wait is not None and r.wait.reason == "BLOCKS"]
    named = [wait for wait in waits if wait.holders]
    assert 2 <= len(named) < len(waits) / 2
    assert named[0] is waits[0]
    sizes = [dict(wait.holders) for wait in named]
    assert all(size.keys() == {"1"} for size in sizes)
    assert sizes[0]["1"] == 3  # two of the prompt, and the next
    assert sizes[-1]["1"] > 3
    core.shutdown()
