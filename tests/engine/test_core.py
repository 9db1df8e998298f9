"""Engine core with a fake worker: order of calls, rejections, failures."""

import contextlib
import json
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from octavo.config import SchedulerConfig
from octavo.engine import core as core_module
from octavo.engine.core import EngineCore
from octavo.engine.record import StepRecorder
from octavo.errors import EngineDeadError, ModelError, ProfilerError, RequestError, SleepError
from octavo.kv_cache.block_map import OWNER_SHIFT, BlockMap
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.messages import FinishReason
from octavo.models.cache import AttentionCache
from octavo.observability.profiler import Profiler
from octavo.request import RequestStatus
from octavo.scheduler.scheduler import Scheduler
from tests.fakes import VOCAB, FakeExecutor, expected_output
from tests.params import core_params, core_request, set_options
from tests.structured_output.toys import STOP, ToyBackend, make_manager, spec


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def make_core(
    depth=1,
    caching=True,
    profiler=None,
    blocks=20,
    enable_sleep_mode=True,
    listeners=(),
    **settings,
):
    """Return a core on fakes; its clock is `core.clock`."""
    kv_cache = KVCacheConfig(blocks, 16, make_kv_cache_groups([AttentionCache(1, 1)]))
    clock = Clock()
    scheduler = Scheduler(
        msgspec.convert({"max_num_seqs": 4} | settings, SchedulerConfig),
        kv_cache,
        max_model_len=64,
        max_num_batched_tokens=32,
        enable_caching=caching,
        clock=clock,
        listeners=listeners,
    )
    backend = ToyBackend()
    core = EngineCore(
        scheduler,
        FakeExecutor(kv_cache, depth),
        clock=clock,
        structured_output=make_manager(backend, vocab_size=VOCAB),
        profiler=profiler,
        engine_index=3,
        enable_sleep_mode=enable_sleep_mode,
        listeners=listeners,
    )
    core.clock, core.backend = clock, backend
    return core


@pytest.fixture(params=[1, 2], ids=["sync", "async"])
def core(request):
    core = make_core(request.param)
    yield core
    core.check_integrity()
    core.backend.go.set()
    core.shutdown()


def request(request_id, prompt, **params):
    sampling = core_params(temperature=0, seed=3, **params)
    return core_request(request_id, prompt, sampling, arrival_time=float(request_id))


def guided(request_id, text, **params):
    """Return a request whose output follows a grammar of `ToyBackend`."""
    item = request(request_id, params.pop("prompt", [1, 2, 3]), **{"max_tokens": 30} | params)
    item.sampling_params = msgspec.structs.replace(item.sampling_params, grammar=spec(text))
    return item


def run(core):
    tokens, reasons, errors = {}, {}, {}
    while core.has_work() or core.structured_output.is_compiling:
        core.wait(10)
        for output in core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
            if output.error is not None:
                errors[output.request_id] = (output.error_kind, output.error)
    return SimpleNamespace(tokens=tokens, reasons=reasons, errors=errors)


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


def test_only_empty_steps_serve_other_engines(core, monkeypatch):
    wave = SimpleNamespace(wanted=True)
    monkeypatch.setattr(FakeExecutor, "wave", wave)
    steps = core.executor.steps
    core.step()
    assert [(step.serves, step.scheduled_reqs) for step in steps] == [(True, [])]
    core.add_request(request("0", [1, 2, 3], max_tokens=4))
    while core.has_unfinished_requests():
        core.step()
    assert len(steps) > 4
    assert not any(step.serves for step in steps[1:] if step.scheduled_reqs)
    wave.wanted = False
    del steps[:]
    run(core)
    assert not any(step.serves for step in steps)


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


def test_running_requests_start_over_so_that_all_is_forgotten(core):
    prompt = list(range(40))
    core.add_request(request("0", prompt, max_tokens=20))
    item, tokens = core.scheduler.requests["0"], []
    while len(tokens) < 5:
        tokens += [token for output in core.step().outputs for token in output.new_token_ids]
    assert not core.reset_prefix_cache()
    assert core.reset_prefix_cache(True)
    tokens += run(core).tokens["0"]
    assert tokens == expected_output(item.sampling_params, prompt, 64)
    assert core.stats().num_preemptions == 1


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
    for i in range(2):  # the first still holds its blocks when the second arrives
        item = request(str(i), list(range(40)), max_tokens=20)
        set_options(item, cache_salt=salt)
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
    set_options(item, deadline=core.clock.now + 5)
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
    set_options(item, deadline=core.clock.now + 5)
    core.add_request(item)
    assert len(run(core).tokens["0"]) == 4
    assert core.seconds_to_deadline() is None
    core.clock.now += 6
    assert not core.has_work()


def test_the_map_of_the_blocks_is_a_utility(core):
    core.add_request(request("1", list(range(1, 41)), max_tokens=50))
    for _ in range(4):
        core.step()
    (block_map,) = core.call_utility("block_map").values()
    found = msgspec.convert(block_map, BlockMap)
    assert found.owners == ["1"]
    owners = np.frombuffer(found.cells, "<u4") >> OWNER_SHIFT
    assert len(owners) == found.num_blocks == core.stats().num_total_blocks
    assert (owners == 1).sum() == core.stats().num_used_blocks >= 3


def test_utilities_are_called_by_name(core):
    assert core.call_utility("reset_prefix_cache") is True
    assert core.call_utility("stats") == list(msgspec.structs.astuple(core.stats()))
    with pytest.raises(ValueError, match="utility method 'shutdown' does not exist"):
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


def follows(tokens, text):
    places = [[int(t) for t in place.split(",")] for place in text.split()]
    return len(tokens) == len(places) + 1 and all(
        token in place for token, place in zip(tokens, [*places, [STOP]], strict=True)
    )


LONG = "3,4,5,6 " * 12 + "7 8 9"


def test_answers_follow_their_grammars(core):
    others = [request(str(i), list(range(i, 3 * i + 5)), max_tokens=9) for i in range(3)]
    texts = {"3": LONG, "4": "10,11 12", "5": LONG, "6": "20"}
    for item in others:
        core.add_request(item)
    for request_id, text in texts.items():
        core.add_request(guided(request_id, text, prompt=list(range(int(request_id) * 5))))
    result = run(core)
    for request_id, text in texts.items():
        assert follows(result.tokens[request_id], text), result.tokens[request_id]
        assert result.reasons[request_id] == FinishReason.STOP
    for item in others:
        assert result.tokens[item.request_id] == expected_output(
            item.sampling_params, item.prompt_token_ids, 64
        )
    assert not result.errors
    assert set(core.backend.compiled) == set(texts.values())


def test_a_step_with_a_grammar_is_sampled_when_all_tokens_are_known():
    core = make_core(depth=2)
    core.add_request(guided("0", LONG))
    core.wait(10)
    executor, order = core.executor, []
    update = core.scheduler.update_from_output
    core.scheduler.update_from_output = lambda *args: order.append("update") or update(*args)
    executor.calls = order
    tokens = [len(o.new_token_ids) for _ in range(3) for o in core.step().outputs]
    # The next step's forward pass begins before the last result is examined.
    assert order == ["execute", "sample", *["execute", "update", "sample"] * 3]
    assert tokens == [1, 1, 1]
    assert follows([*[3] * 12, 7, 8, 9, STOP], LONG)
    run(core)
    core.shutdown()


def test_steps_without_a_grammar_do_not_wait():
    core = make_core(depth=2)
    core.add_request(guided("0", "3 4"))
    run(core)
    core.executor.calls.clear()
    core.add_request(request("1", [1, 2, 3], max_tokens=4))
    core.step()
    assert core.executor.calls == ["execute", "sample"] * 2
    run(core)
    core.shutdown()


def test_a_prompt_in_chunks_has_a_mask_only_where_it_samples(core):
    core.add_request(guided("0", "3,4 5", prompt=list(range(50))))
    assert follows(run(core).tokens["0"], "3,4 5")
    flags = [[r.has_grammar for r in step.scheduled_reqs] for step in core.executor.steps]
    assert flags[:2] == [[False], [True]]


def test_a_request_waits_for_its_grammar_and_holds_nobody_up(core):
    core.add_request(guided("0", "slow 3 4"))
    core.add_request(request("1", [1, 2, 3], max_tokens=4))
    tokens = []
    while core.has_work():
        tokens += [o.request_id for o in core.step().outputs]
    assert tokens == ["1"] * 4
    assert core.has_unfinished_requests()
    assert core.scheduler.requests["0"].status == RequestStatus.WAITING_FOR_FSM
    assert core.stats().num_held_reqs == 1
    core.check_integrity()
    core.backend.go.set()
    core.wait(10)
    assert core.has_work()
    assert run(core).tokens["0"] == [3, 4, STOP]


def test_a_grammar_that_is_refused_fails_its_request(core):
    core.add_request(guided("0", "bad have uniqueItems"))
    core.add_request(guided("1", "3 4"))
    core.add_request(guided("2", "3" * 600_000))
    result = run(core)
    assert result.tokens == {"0": [], "1": [3, 4, STOP], "2": []}
    assert result.errors["0"][0] == result.errors["2"][0] == "GrammarError"
    assert "have uniqueItems" in result.errors["0"][1]
    assert "at most 524288" in result.errors["2"][1]
    assert not core.scheduler.requests


def test_a_request_that_is_gone_is_not_started_by_its_grammar(core):
    core.add_request(guided("0", "slow 3 4"))
    assert core.backend.running.acquire(timeout=60)
    core.abort_requests(["0"])
    core.add_request(guided("0", "slow 5 6"))  # another request of that name
    core.backend.go.set()
    assert run(core).tokens == {"0": [5, 6, STOP]}


def test_a_deadline_passes_while_a_grammar_is_compiled(core):
    item = guided("0", "slow 3 4")
    set_options(item, deadline=core.clock.now + 5)
    core.add_request(item)
    core.clock.now += 6
    (output,) = core.step().outputs
    assert output.error_kind == "DeadlineError"
    core.backend.go.set()
    assert run(core).tokens == {}


def test_the_answers_of_one_request_have_one_grammar_and_states_of_their_own(core):
    item = guided("0", LONG)
    item.n = 3
    core.add_request(item)
    result = run(core)
    assert core.backend.compiled == [LONG]
    assert [follows(tokens, LONG) for tokens in result.tokens.values()] == [True] * 3
    assert len({tuple(tokens) for tokens in result.tokens.values()}) == 3


def test_output_that_a_request_has_already_counts(core):
    item = guided("0", "3,4 5,6 7 8")
    item.output_token_ids = [4, 5]
    core.add_request(item)
    wrong = guided("1", "3,4 5,6 7 8")
    wrong.output_token_ids = [4, 9]
    core.add_request(wrong)
    result = run(core)
    assert result.tokens == {"0": [7, 8, STOP], "1": []}
    assert "does not allow the output" in result.errors["1"][1]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_request_goes_on_in_its_grammar(depth):
    core = make_core(depth, caching=False, blocks=6)
    for i in range(3):
        core.add_request(guided(str(i), LONG, prompt=list(range(20))))
    result = run(core)
    assert core.stats().num_preemptions > 0
    assert [follows(result.tokens[str(i)], LONG) for i in range(3)] == [True] * 3
    core.shutdown()


def test_the_request_s_own_stop_tokens_end_it_as_ever(core):
    core.add_request(guided("0", "3 4 5", stop_token_ids=[4]))
    result = run(core)
    assert result.tokens["0"] == [3, 4]
    assert result.reasons["0"] == FinishReason.STOP


def test_a_grammar_that_is_stuck_fails_its_request_and_the_others_go_on(core):
    make_output = core.structured_output.make_output

    def with_error(requests, drafts):
        stuck = [r for r, _ in requests if r.request_id == "0" and r.num_output_tokens == 2]
        rest = [item for item in requests if item[0] not in stuck]
        output, errors = make_output(rest, drafts)
        return output, errors | dict.fromkeys(stuck, "its grammar takes too long")

    core.structured_output.make_output = with_error
    for i in range(2):
        core.add_request(guided(str(i), LONG))
    result = run(core)
    assert result.errors["0"] == ("RequestError", "its grammar takes too long")
    assert len(result.tokens["0"]) == 2
    assert follows(result.tokens["1"], LONG)


def test_an_interrupt_while_a_grammar_waits_loses_no_step(core):
    core.add_request(guided("0", LONG))
    core.wait(10)
    tokens = []

    def step():
        tokens.extend(t for o in core.step().outputs for t in o.new_token_ids)

    step()
    core.executor.interrupt = True
    with contextlib.suppress(KeyboardInterrupt):
        step()
        step()
        raise AssertionError("nobody was interrupted")
    tokens += run(core).tokens["0"]
    assert follows(tokens, LONG)


def test_a_step_with_a_grammar_that_fails_fails_its_requests(core):
    core.add_request(guided("0", LONG))
    core.wait(10)
    core.executor.failure = ArithmeticError("the forward pass broke")
    outputs = []
    while core.has_work():
        outputs += core.step().outputs
    assert [o.error_kind for o in outputs] == ["StepFailedError"]
    core.executor.failure = None
    core.add_request(guided("1", LONG))
    assert follows(run(core).tokens["1"], LONG)


def test_without_a_tokenizer_there_are_no_grammars(core):
    core.structured_output = None
    core.add_request(guided("0", "3"))
    (output,) = core.step().outputs
    assert output.error_kind == "UnsupportedError"
    assert "no tokenizer" in output.error
    assert not core.has_work()
    core.structured_output = make_manager(core.backend, vocab_size=VOCAB)


# Sleeping


def add_some(core, count=6):
    requests = [request(str(i), list(range(i, 3 * i + 5)), max_tokens=12) for i in range(count)]
    for item in requests:
        core.add_request(item)
    return {
        r.request_id: expected_output(r.sampling_params, r.prompt_token_ids, 64) for r in requests
    }


def tokens_of(outputs):
    tokens = {}
    for output in outputs:
        tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_what_becomes_of_requests_when_the_engine_falls_asleep(core, level, mode):
    expected = add_some(core)
    outputs = core.step().outputs + core.step().outputs
    while not core.sleep(level, mode):
        assert mode == "wait"
        outputs += core.step().outputs
    assert core.is_sleeping()
    assert core.executor.worker.awake == (level == 0)
    late = request("9", [7, 8, 9], max_tokens=5)
    core.add_request(late)
    num_steps = core.stats().num_steps
    while core.has_work():
        outputs += core.step().outputs
    assert core.stats().num_steps == num_steps
    assert core.stats().num_used_blocks == 0
    assert core.stats().num_held_reqs == core.stats().num_waiting_reqs
    core.check_integrity()
    ended = {o.request_id: o.finish_reason for o in outputs if o.finish_reason is not None}
    reason = {"abort": FinishReason.ABORT, "wait": FinishReason.LENGTH}.get(mode)
    assert ended == ({} if reason is None else dict.fromkeys(expected, reason))
    before = tokens_of(outputs)
    assert any(before.values())
    assert core.wake_up()
    assert not core.is_sleeping()
    after = run(core)
    for request_id, tokens in expected.items():
        found = before.get(request_id, []) + after.tokens.get(request_id, [])
        assert found == tokens[: len(found)] if mode == "abort" else found == tokens
    assert after.tokens["9"] == expected_output(late.sampling_params, late.prompt_token_ids, 64)


def test_prefixes_are_forgotten_with_the_memory_only(core):
    prompt = list(range(40))
    for level, hits in ((0, True), (1, False)):
        core.add_request(request("0", prompt, max_tokens=2))
        run(core)
        assert core.sleep(level)
        assert core.wake_up()
        before = core.stats().prefix_cache_hits
        core.add_request(request("1", prompt, max_tokens=2))
        run(core)
        assert (core.stats().prefix_cache_hits > before) == hits


def test_parts_wake_up_one_by_one(core):
    assert core.wake_up()  # it is awake
    core.sleep()
    core.add_request(request("0", [1, 2, 3], max_tokens=3))
    for tags in (["scheduling"], ["weights"], ["weights"], []):
        assert core.wake_up(tags) is False
        assert core.is_sleeping()
        assert not core.has_work()
    assert core.executor.worker.reloads == [True]
    assert core.wake_up(["kv_cache"]) is True
    assert len(run(core).tokens["0"]) == 3
    core.sleep(0)
    assert core.wake_up(["scheduling"]) is True
    assert core.executor.worker.reloads == [True]


@pytest.mark.parametrize(
    ("steps", "same"),
    [
        ([1], True),
        ([1, 1], True),
        ([0, 1], True),
        ([1, 0], True),
        ([2], False),
        ([1, 2], False),
        ([2, 1], False),  # both have ended
        ([2, "weights", 1], True),
        ([2, "kv_cache", 1], False),
    ],
)
def test_which_weights_wake_up(core, steps, same):
    for step in steps:
        if isinstance(step, int):
            assert core.sleep(step)
        else:
            assert core.wake_up([step]) is False
    assert core.wake_up()
    assert core.executor.worker.reloads[-1] == same
    assert core.sleep(1)
    assert core.wake_up("weights") is False
    assert core.executor.worker.reloads[-1] is True


def test_what_cannot_wake_up_sleeps_on(core):
    expected = add_some(core)
    outputs = core.step().outputs
    core.sleep(1, "keep")
    worker = core.executor.worker
    reload = worker.reload_weights

    def fail(*, same):
        raise ModelError("gone")

    worker.reload_weights = fail
    for _ in range(2):
        with pytest.raises(ModelError, match="gone"):
            core.wake_up()
        assert core.is_sleeping()
        assert not worker.awake
    worker.reload_weights = reload
    assert core.wake_up()
    before, after = tokens_of(outputs), run(core).tokens
    assert {i: before.get(i, []) + after[i] for i in expected} == expected


def test_wrong_levels_modes_and_tags(core):
    add_some(core)
    core.step()
    for call, args, name in (
        (core.sleep, (3,), "level"),
        (core.sleep, (-1,), "level"),
        (core.sleep, ("1",), "level"),
        (core.sleep, (1, "stop"), "mode"),
        (core.wake_up, (["weight"],), "tags"),
        (core.wake_up, ("everything",), "tags"),
    ):
        with pytest.raises(RequestError, match=name) as error:
            call(*args)
        assert error.value.param == name
        assert not core.is_sleeping()
    core.executor.worker.sleep = None
    with pytest.raises(SleepError, match="enable_sleep_mode"):
        make_core(enable_sleep_mode=False).sleep(1)
    assert make_core(enable_sleep_mode=False).sleep(0)
    run(core)


def test_requests_end_while_the_engine_sleeps(core):
    add_some(core)
    core.step()
    core.sleep(1, "keep")
    core.add_request(request("7", [1], max_tokens=5))
    core.abort_requests(["0", "5", "7"])
    late = request("8", [1, 2], max_tokens=5)
    set_options(late, deadline=core.clock.now + 5)
    core.add_request(late)
    core.step()  # the rows of the requests that ran
    assert not core.has_work()
    assert core.seconds_to_deadline() == 5
    core.clock.now += 5
    assert core.has_work()
    (output,) = core.step().outputs
    assert (output.request_id, output.error_kind) == ("8", "DeadlineError")
    core.check_integrity()
    core.wake_up()
    assert set(run(core).tokens) == {"1", "2", "3", "4"}


def test_a_grammar_that_is_compiled_while_the_engine_sleeps(core):
    core.backend.go.clear()
    core.add_request(guided("0", "slow 5,6 7"))
    assert core.sleep(1, "keep")
    core.backend.go.set()
    core.wait(10)
    core.step()
    assert not core.has_work()
    assert core.stats().num_held_reqs == 1
    core.check_integrity()
    core.wake_up()
    assert run(core).tokens["0"]


def test_requests_with_grammars_in_flight_go_on(core):
    def tokens(sleeps):
        core.add_request(guided("0", "5,6 7 8,9 10 11 12,13 14"))
        core.add_request(guided("1", "5 6,7 8,9 10,11 12"))
        outputs = []
        while core.has_work() or core.structured_output.is_compiling:
            core.wait(10)
            outputs += core.step().outputs
            if sleeps and outputs:
                core.sleep(2, "keep")
                core.wake_up()
        return tokens_of(outputs)

    assert tokens(True) == tokens(False) != {}


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_recorded_of_steps(depth, monkeypatch):
    """The schedule, and the duration of earlier steps: here each look at the clock adds 1 s."""
    now = [0.0]

    def look():
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(core_module.time, "perf_counter", look)
    steps = []
    core = make_core(depth, listeners=[StepRecorder(steps.append)])
    for name in "ab":
        core.add_request(core_request(name, [1, 2, 3], core_params(max_tokens=4)))
        while core.has_work():
            core.step()
        now[0] += 1000.0  # nothing is requested
    core.shutdown()
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert [name for step in steps for name in step.added] == ["a", "b"]
    computed = [step.number for step in steps if step.requests]
    ended = [end for step in steps for end in step.ended]
    assert [end.number for end in ended] == computed[: len(ended)]
    assert len(ended) >= len(computed) - depth
    assert all(0 < end.seconds < 10 for end in ended)
    # Time without requests does not count.
    idle = [end.number for end in ended if end.host_seconds is None]
    second = next(step.number for step in steps if "b" in step.added)
    assert idle == [1, second]
    assert all(0 < end.host_seconds < 20 for end in ended if end.host_seconds is not None)


def test_a_step_that_failed_has_no_time():
    steps = []
    core = make_core(listeners=[StepRecorder(steps.append)])
    core.executor.failure = RuntimeError("no memory")
    core.add_request(core_request("a", [1, 2, 3], core_params(max_tokens=4)))
    core.step()
    core.executor.failure = None
    core.add_request(core_request("b", [1, 2, 3], core_params(max_tokens=4)))
    while core.has_work():
        core.step()
    core.shutdown()
    assert steps[0].requests
    assert 1 not in {end.number for step in steps for end in step.ended}
