"""The engine core with a fake worker: order of calls, refusals, failures."""

import json
from types import SimpleNamespace

import msgspec
import pytest

from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.errors import EngineDeadError, ProfilerError
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.messages import EngineCoreRequest, FinishReason
from octavo.models.cache import AttentionCache
from octavo.profiler import Profiler
from octavo.request import RequestStatus
from octavo.scheduler.scheduler import Scheduler
from tests.fakes import FakeExecutor, expected_output
from tests.params import core_params


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def make_core(depth=1, caching=True, profiler=None, observer=None, **settings):
    """A core on fakes; its clock is `core.clock`."""
    kv_cache = KVCacheConfig(20, 16, make_kv_cache_groups([AttentionCache(1, 1)]))
    clock = Clock()
    scheduler = Scheduler(
        msgspec.convert({"max_num_seqs": 4} | settings, SchedulerConfig),
        kv_cache,
        max_model_len=64,
        max_num_batched_tokens=32,
        enable_caching=caching,
        clock=clock,
        observer=observer,
    )
    core = EngineCore(
        scheduler, FakeExecutor(kv_cache, depth), clock=clock, profiler=profiler, engine_index=3
    )
    core.clock = clock
    return core


@pytest.fixture(params=[1, 2], ids=["sync", "async"])
def core(request):
    core = make_core(request.param)
    yield core
    core.check_integrity()
    core.shutdown()


def request(request_id, prompt, **params):
    sampling = core_params(temperature=0, seed=3, **params)
    return EngineCoreRequest(request_id, prompt, sampling, arrival_time=float(request_id))


def run(core):
    tokens, reasons = {}, {}
    while core.has_work():
        for output in core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
    return SimpleNamespace(tokens=tokens, reasons=reasons)


def test_all_requests_are_served(core):
    requests = [request(str(i), list(range(i, 3 * i + 5)), max_tokens=9) for i in range(10)]
    for item in requests:
        core.add_request(item)
    result = run(core)
    for item in requests:
        assert result.tokens[item.request_id] == expected_output(
            item.sampling_params, item.prompt_token_ids, 64
        )
        assert result.reasons[item.request_id] == FinishReason.LENGTH
    assert core.stats().num_used_blocks == 0
    assert not core.has_unfinished_requests()


def test_async_scheduling_hands_out_the_next_step_before_the_last_result(core):
    core.add_request(request("0", [1, 2, 3], max_tokens=4))
    core.step()
    assert core.executor.calls == ["execute", "sample"] * core.executor.max_in_flight
    run(core)


def test_what_can_never_fit_is_answered_with_an_error(core):
    core.add_request(request("0", list(range(65)), max_tokens=4))
    core.add_request(request("1", [1], max_tokens=1))
    outputs = {o.request_id: o for o in core.step().outputs}
    assert outputs["0"].finish_reason == FinishReason.ERROR
    assert outputs["0"].error_kind == "ContextLengthError"
    assert "64" in outputs["0"].error
    assert len(outputs["1"].new_token_ids) == 1
    run(core)


def test_aborted_requests_end_and_free_their_blocks(core):
    for i in range(6):
        core.add_request(request(str(i), [1, 2, 3], max_tokens=40))
    core.step()
    core.abort_requests(["0", "5", "unknown"])
    result = run(core)
    assert len(result.tokens["1"]) == 39  # and the one of the first step
    assert len(result.tokens.get("0", [])) < 3
    assert not result.tokens.get("5")


def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(core):
    core.add_request(request("0", [1, 2, 3], max_tokens=4))
    core.executor.failure = ArithmeticError("the forward pass broke")
    (output,) = core.step().outputs
    assert output.finish_reason == FinishReason.ERROR
    assert output.error_kind == "StepFailedError"
    assert "ArithmeticError: the forward pass broke" in output.error
    core.executor.failure = None
    core.add_request(request("1", [1, 2, 3], max_tokens=4))
    assert len(run(core).tokens["1"]) == 4


def test_an_interrupt_while_waiting_loses_no_step(core):
    core.add_request(request("0", [1, 2, 3], max_tokens=4))
    core.executor.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert len(run(core).tokens["0"]) == 4


def test_reset_prefix_cache(core):
    prompt = list(range(40))
    core.add_request(request("0", prompt, max_tokens=2))
    run(core)
    core.add_request(request("1", prompt, max_tokens=2))
    run(core)
    assert core.stats().prefix_cache_hits > 0
    assert core.reset_prefix_cache()
    before = core.stats().prefix_cache_hits
    core.add_request(request("2", prompt, max_tokens=2))
    run(core)
    assert core.stats().prefix_cache_hits == before


def test_a_refusal_is_work_until_it_has_been_told(core):
    assert not core.has_work()
    assert not core.has_unfinished_requests()
    core.add_request(request("0", list(range(65)), max_tokens=4))
    assert core.has_work()
    assert core.has_unfinished_requests()
    assert [o.request_id for o in core.step().outputs] == ["0"]
    assert not core.has_work()
    assert not core.has_unfinished_requests()
    assert core.step().outputs == []
    assert core.executor.calls == [], "there was nothing to compute"


def test_an_id_in_use_is_refused_and_its_owner_goes_on(core):
    core.add_request(request("0", [1, 2, 3], max_tokens=4))
    core.add_request(request("0", [4, 5], max_tokens=4))
    outputs = []
    while core.has_work():
        outputs += core.step().outputs
    (refusal,) = [o for o in outputs if o.error is not None]
    assert "'0' is in use" in refusal.error
    assert refusal.error_kind == "RequestError"
    assert sum(len(o.new_token_ids) for o in outputs) == 4


def test_a_dead_engine_is_no_failed_step(core):
    core.add_request(request("0", [1, 2, 3], max_tokens=4))
    core.executor.failure = EngineDeadError("The GPU failed")
    with pytest.raises(EngineDeadError, match="The GPU failed"):
        core.step()


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("salt", [None, "scope"])
def test_prefixes_are_shared_as_the_settings_say(caching, salt):
    core = make_core(caching=caching)
    for i in range(2):  # the first still holds its blocks when the second comes
        item = request(str(i), list(range(40)), max_tokens=20)
        item.cache_salt = salt
        core.add_request(item)
        for _ in range(3):
            core.step()
    assert (core.stats().prefix_cache_hits > 0) == caching


def test_without_a_folder_for_profiles_there_are_none(core):
    for call in (core.start_profile, core.stop_profile):
        with pytest.raises(ProfilerError, match="--profiler-dir"):
            call()


def test_shutdown_writes_the_profile_that_is_being_recorded(tmp_path):
    core = make_core(profiler=Profiler(str(tmp_path)))
    core.start_profile()
    core.add_request(request("0", [1, 2, 3], max_tokens=2))
    run(core)
    core.shutdown()
    (trace,) = tmp_path.glob("*.trace.json")
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [(e["name"], e.get("args", {}).get("step")) for e in events if e.get("ph") == "X"]
    for name in ("schedule", "wait", "update_from_output"):
        assert {step for other, step in spans if other == name} >= {1, 2}, name
    core.shutdown()
    assert core.executor.calls[-2:] == ["shutdown", "shutdown"]
    assert list(tmp_path.glob("*.trace.json")) == [trace]


def test_outputs_say_when_and_from_where(core):
    core.add_request(request("0", [1, 2, 3], max_tokens=1))
    core.clock.now = 1234.5
    outputs = core.step()
    assert (outputs.timestamp, outputs.engine_index) == (1234.5, 3)
    assert outputs.outputs[0].first_scheduled_time == 1234.5


def test_a_request_that_is_held_is_no_work(core):
    core.add_request(request("0", [1, 2, 3], max_tokens=4))
    core.scheduler.hold("0", RequestStatus.WAITING_FOR_FSM)
    assert not core.has_work()
    assert core.has_unfinished_requests()
    assert core.seconds_to_deadline() is None
    assert core.step().outputs == []
    assert core.executor.calls == []
    core.scheduler.set_ready("0")
    assert core.has_work()
    assert len(run(core).tokens["0"]) == 4


def test_the_deadline_of_a_request_that_is_held_is_work_when_it_comes(core):
    item = request("0", [1, 2, 3], max_tokens=4)
    item.deadline = core.clock.now + 5
    core.add_request(item)
    core.scheduler.hold("0", RequestStatus.WAITING_FOR_REMOTE_KVS)
    assert not core.has_work()
    assert core.seconds_to_deadline() == 5
    core.clock.now += 6
    assert core.seconds_to_deadline() == 0
    assert core.has_work()
    outputs = []
    while core.has_work():
        outputs += core.step().outputs
    assert [o.error_kind for o in outputs] == ["DeadlineError"]
    assert core.seconds_to_deadline() is None


def test_the_deadline_of_a_request_that_is_gone_wakes_nobody(core):
    item = request("0", [1, 2, 3], max_tokens=4)
    item.deadline = core.clock.now + 5
    core.add_request(item)
    assert len(run(core).tokens["0"]) == 4
    assert core.seconds_to_deadline() is None
    core.clock.now += 6
    assert not core.has_work()


def test_utilities_are_called_by_name(core):
    assert core.call_utility("reset_prefix_cache") is True
    assert core.call_utility("stats") == list(msgspec.structs.astuple(core.stats()))
    with pytest.raises(ValueError, match="no utility method 'shutdown'"):
        core.call_utility("shutdown")


@pytest.mark.parametrize("given", [1, 5, 8])
def test_a_request_goes_on_behind_the_output_that_it_has(core, given):
    params = {"max_tokens": 9, "min_tokens": 3, "logprobs": 0}
    core.add_request(request("0", [1, 2, 3], **params))
    whole = run(core).tokens["0"]
    item = request("1", [1, 2, 3], **params)
    item.output_token_ids = whole[:given]
    core.add_request(item)
    result = run(core)
    assert result.tokens["1"] == whole[given:]
    assert result.reasons["1"] == FinishReason.LENGTH


def test_prompt_logprobs_that_a_request_has_are_not_sent_again(core):
    def rows(item):
        core.add_request(item)
        parts = []
        while core.has_work():
            parts += [o.new_prompt_logprobs for o in core.step().outputs if o.new_prompt_logprobs]
        return sum(part.num_rows for part in parts)

    prompt = list(range(40))
    assert rows(request("0", prompt, max_tokens=2, prompt_logprobs=0)) == 39
    item = request("1", prompt, max_tokens=2, prompt_logprobs=0)
    item.num_prompt_logprobs = 30
    assert rows(item) == 9


def test_a_request_that_has_all_its_output_is_refused(core):
    item = request("0", [1, 2, 3], max_tokens=4)
    item.output_token_ids = [5, 6, 7, 8]
    core.add_request(item)
    (output,) = core.step().outputs
    assert output.error_kind == "RequestError"
    assert "has 4 output tokens already, and may have 4" in output.error
