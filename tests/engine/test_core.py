"""The engine core with a fake worker: order of calls, refusals, failures."""

import json
import logging
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

from octavo.config import BUILTIN_MODEL, EngineConfig
from octavo.engine import core as core_module
from octavo.engine.core import EngineCore
from octavo.errors import EngineDeadError, ProfilerError
from octavo.messages import EngineCoreRequest, FinishReason
from octavo.models.hub import resolve_model
from octavo.worker.memory import DeviceMemory, Scratch
from tests.fakes import FakeExecutor, expected_output
from tests.params import core_params


class InterruptedFuture(Future):
    """A result during the first wait for which Ctrl-C is pressed."""

    interrupted = False

    def result(self, timeout=None):
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return super().result(timeout)


class FakeWorkerExecutor:
    """An `Executor` on the fake worker that records the calls it gets."""

    def __init__(self, setup):
        self.calls = []
        self.failure = None
        self.interrupt = False
        self._max_num_seqs = setup.config.scheduler.max_num_seqs
        self._step = None

    @staticmethod
    def measure_scratch(setup):
        return Scratch(0, 0, 0)

    def initialize_kv_cache(self, kv_cache):
        self._worker = FakeExecutor(kv_cache, self._max_num_seqs)

    def execute_model(self, scheduler_output):
        self.calls.append("execute")
        self._step = scheduler_output
        future = InterruptedFuture() if self.interrupt else Future()
        self.interrupt = False
        if self.failure is not None:
            future.set_exception(self.failure)
        else:
            future.set_result(None)
        return future

    def sample_tokens(self):
        self.calls.append("sample")
        future = Future()
        future.set_result(self._worker.execute(self._step))
        return future

    def shutdown(self):
        self.calls.append("shutdown")


def make_core(monkeypatch, **settings):
    monkeypatch.setattr(core_module, "get_executor_class", lambda config: FakeWorkerExecutor)
    settings = {"max_num_seqs": 4, "num_gpu_blocks_override": 20, "max_model_len": 64} | settings
    config = EngineConfig.from_kwargs(**settings)
    return EngineCore(config, resolve_model(BUILTIN_MODEL), default_batched_tokens=32)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def core(request, monkeypatch):
    core = make_core(monkeypatch, async_scheduling=request.param)
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


def test_the_caller_s_token_budget_holds_where_the_config_sets_none(monkeypatch):
    for settings, budget in (({}, 32), ({"max_num_batched_tokens": 48}, 48)):
        core = make_core(monkeypatch, **settings)
        core.add_request(request("0", list(range(60)), max_tokens=2))
        core.step()
        assert core.executor._step.total_num_scheduled_tokens in (budget, 60 - budget)
        assert core.scheduler.max_num_batched_tokens == budget
        assert core.max_model_len == 64
        run(core)
        core.shutdown()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_memory_is_planned_before_loading_on_a_cpu_and_after_it_on_a_gpu(kind, monkeypatch, caplog):
    order, setups = [], []

    class Measured(FakeWorkerExecutor):
        def __init__(self, setup):
            super().__init__(setup)
            order.append("load")
            setups.append(setup)

        @staticmethod
        def measure_scratch(setup):
            order.append("measure the step")
            setups.append(setup)
            return Scratch(1000, 2000, 3000)

        def measure_memory(self):
            order.append("measure the memory")
            return DeviceMemory(total=2**31, foreign=2**20, weights=2**20, step=2**20)

        def initialize_kv_cache(self, kv_cache):
            order.append("allocate")
            self.kv_cache = kv_cache
            super().initialize_kv_cache(kv_cache)

    caplog.set_level(logging.INFO, "octavo.engine.core")
    monkeypatch.setattr(core_module, "resolve_device", lambda device: kind)
    monkeypatch.setattr(core_module, "resident_memory", lambda: 123 * 2**20)
    monkeypatch.setattr(core_module, "get_executor_class", lambda config: Measured)
    config = EngineConfig.from_kwargs(max_num_seqs=4, num_gpu_blocks_override=20, max_model_len=-1)
    core = EngineCore(
        config, resolve_model(BUILTIN_MODEL), default_batched_tokens=32, request_memory=2**20
    )
    longest = 19 * 16
    lines = "\n".join(record.getMessage() for record in caplog.records)
    assert core.plan.report() in lines
    assert "model ready in " in lines
    assert core.executor.kv_cache.num_blocks == core.plan.num_blocks == 20
    assert core.max_model_len == core.plan.max_model_len == longest
    assert setups[0].max_num_batched_tokens == core.scheduler.max_num_batched_tokens == 32
    assert setups[0].max_model_len == core.spec.max_model_len
    if kind == "cpu":
        assert order == ["measure the step", "load", "allocate"]
        assert setups[1] == replace(
            setups[0], max_model_len=longest, scratch=Scratch(1000, 2000, 3000)
        )
        assert core.plan.compare(123 * 2**20) in lines
        assert core.plan.requests == 2**20
    else:
        assert order == ["load", "measure the memory", "allocate"]
        assert "resident memory" not in lines
        assert core.plan.requests == 0
    core.shutdown()


def test_async_scheduling_hands_out_the_next_step_before_the_last_result(core):
    core.add_request(request("0", [1, 2, 3], max_tokens=4))
    core.step()
    ahead = 2 if core.config.scheduler.async_scheduling else 1
    assert core.executor.calls == ["execute", "sample"] * ahead
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
def test_prefixes_are_shared_as_the_settings_say(caching, salt, monkeypatch):
    core = make_core(monkeypatch, enable_prefix_caching=caching)
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


def test_shutdown_writes_the_profile_that_is_being_recorded(monkeypatch, tmp_path):
    core = make_core(monkeypatch, profiler_dir=str(tmp_path))
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
