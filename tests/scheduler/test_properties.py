"""Random lives of many requests with the fake worker, which checks every slot it reads."""

import dataclasses
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import octavo.kv_cache.states
from octavo.config import LoRAConfig
from octavo.kv_cache.groups import make_kv_cache_groups
from octavo.messages import FinishReason, PoolingSpec
from octavo.models.state_cache import StateCache
from octavo.request import Request, RequestStatus
from octavo.scheduler.adapters import key_of
from tests.fakes import (
    STATE,
    VOCAB,
    FakeEngine,
    expected_output,
    pages,
    picture,
    pooled,
    replace_tokens,
)
from tests.params import unpack_logprobs
from tests.transfers import FakeTransfers, make_connector

MAX_MODEL_LEN = 64
UNREAD = "the adapter cannot be read"

windows = st.sampled_from(
    [(None,), (None, None), (11,), (None, 9), (24, None, 24), (5, 12, None), (9, 9, 9, None)]
)
states = st.sampled_from([(), (), (), (STATE,), (STATE, STATE)])
connected_states = st.sampled_from([(), (STATE,), (STATE, STATE, StateCache(((40,), (2,))))])


@pytest.fixture(autouse=True, scope="module")
def near_snapshots():
    """Take more snapshots: requests are short."""
    with patch.multiple(octavo.kv_cache.states, ANSWER_SPACING=8, _FIRST_DISTANCE=8):
        yield


@st.composite
def engines(draw, **fixed):
    state = draw(states)
    layers = draw(windows | st.just(())) if state else draw(windows)
    caches = pages(*layers) + state
    caches = fixed.get("caches", caches)
    num_groups = max(1, sum(not group.has_states for group in make_kv_cache_groups(caches)))
    num_drafts = fixed.get("num_drafts", draw(st.sampled_from([0, 0, 3])))
    options = {
        "caches": caches,
        # From space for one request of the greatest length up to space for several.
        "num_blocks": num_groups * 8 * draw(st.integers(1, 4)) + draw(st.integers(1, 4)),
        "block_size": 8,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": draw(st.sampled_from([8, 13, 32, 200])),
        "max_num_seqs": draw(st.sampled_from([1, 3, 8])),
        "depth": draw(st.integers(1, 3)),
        "num_stages": draw(st.sampled_from([1, 1, 2, 3])),
        "caching": draw(st.booleans()),
        "num_drafts": num_drafts,
        "num_states": (1 + num_drafts) * draw(st.integers(1, 4)) + draw(st.integers(0, 5)),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 5])),
        "fail": ("r3",) if draw(st.booleans()) else (),
    }
    return FakeEngine(**(options | fixed))


@st.composite
def engines_with_connector(draw):
    slots, file_slots = draw(st.sampled_from([1, 4, 20, 200])), draw(st.sampled_from([0, 3, 50]))
    policy, state = draw(st.sampled_from(["lru", "arc"])), draw(connected_states)
    layers = draw(windows | st.just(())) if state else draw(windows)
    return draw(
        engines(
            caching=True,
            caches=pages(*layers) + state,
            num_drafts=draw(st.sampled_from([0, 0, 3])),
            preemption_mode=draw(st.sampled_from(["auto", "swap", "recompute"])),
            make_connector=lambda kv: make_connector(kv, slots, file_slots, eviction_policy=policy),
        )
    )


@dataclasses.dataclass
class Prompt:
    """Prompts of a few families, so that prefixes are shared often."""

    family: int
    length: int
    own: list[int]

    @property
    def tokens(self):
        shared = [(self.family * 17 + i * i) % VOCAB for i in range(self.length)]
        return (shared + self.own)[: MAX_MODEL_LEN - 1]

    def ending_with(self, token):
        """Return a prompt of this length with another last token."""
        return Prompt(self.family, self.length - (not self.own), [*self.own[:-1], token])


prompts = st.builds(
    Prompt,
    st.integers(0, 1),
    st.sampled_from([1, 7, 8, 16, 24, 31, 40]),
    st.lists(st.integers(0, VOCAB - 1), max_size=10) | st.just([]),
)
begins = st.sampled_from([0, 0, 3, 5, 12, 14, 30])
parameters = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 40),
        "seed": st.integers(0, 1),
        "priority": st.integers(0, 2),
        "turn": st.sampled_from([0, 0, 1, 5]),
        "stop": st.lists(st.integers(0, VOCAB - 1), max_size=2),
        "salt": st.sampled_from([None, None, "s"]),
        "tenant": st.sampled_from([None, "a", "b"]),
        "hashed": st.sampled_from([True, True, False]),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive, wait, run, are preempted, aborted or late; all state is always checked.

    `FakeEngine` checks after each turn that the records agree, that the budget is kept and that the
    worker's rows are the running requests.
    """

    @initialize(engine=engines())
    def start(self, engine):
        self.engine = engine
        self.scheduler = engine.scheduler
        self.requests: dict[str, Request] = {}
        self.ended_early: set[str] = set()

    def add(self, prompt, params, leader=None, scope=None, **deadlines):
        name = f"r{len(self.requests)}"
        room = MAX_MODEL_LEN - len(prompt.tokens)
        params = params | {"max_tokens": min(params["max_tokens"], room)}
        if params["salt"] is not None and not self.engine.hasher:
            params = params | {"salt": None}
        self.requests[name] = self.engine.add(
            name, prompt.tokens, leader=leader, scope=scope, **deadlines, **params
        )
        return name

    @rule(prompt=prompts, params=parameters)
    def arrive(self, prompt, params):
        self.add(prompt, params)

    @rule(prompt=prompts, params=parameters, n=st.integers(2, 4))
    def siblings_arrive(self, prompt, params, n):
        leader, scope = None, None if self.engine.hasher else f"s{len(self.requests)}"
        for seed in range(n):
            # Now and then two of them have one seed, and equal answers.
            its_params = params | {"seed": seed % 3, "turn": seed}
            name = self.add(prompt, its_params, leader=leader, scope=scope)
            leader = leader or self.requests[name]

    @rule(prompt=prompts, params=parameters, reads_all=st.booleans(), whole=st.booleans())
    def text_arrives(self, prompt, params, reads_all, whole):
        whole = whole and len(prompt.tokens) <= self.scheduler.max_num_batched_tokens
        params = params | {"max_tokens": 1, "prompt_logprobs": None}
        self.add(prompt, params, pooling=PoolingSpec("embed", reads_all or whole, whole))

    @rule(prompt=prompts, params=parameters, seconds=st.floats(0.5, 3))
    def arrive_with_deadline(self, prompt, params, seconds):
        self.add(prompt, params, deadline=self.engine.now + seconds)

    @rule(prompt=prompts, params=parameters, seconds=st.floats(0.5, 3))
    def arrive_in_a_hurry(self, prompt, params, seconds):
        self.add(prompt, params, first_token_deadline=self.engine.now + seconds)

    @precondition(lambda self: not self.scheduler.paused)
    @rule(prompt=prompts, params=parameters)
    def arrive_and_wait(self, prompt, params):
        name = self.add(prompt, params)
        self.scheduler.hold(name, RequestStatus.WAITING_FOR_FSM)

    @precondition(lambda self: self.scheduler._table.held)
    @rule(data=st.data())
    def be_ready(self, data):
        self.scheduler.set_ready(data.draw(st.sampled_from(sorted(self.scheduler._table.held))))

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        self.ended_early.add(name)
        self.scheduler.check_integrity()

    @rule(seconds=st.floats(0.1, 1))
    def time_passes(self, seconds):
        self.engine.now += seconds

    @precondition(lambda self: len(self.engine.in_flight) < self.engine.depth)
    @rule()
    def schedule(self):
        first = self.scheduler.running[0] if self.scheduler.running else None
        may_stand_still = (
            self.engine.in_flight
            or self.scheduler.config.scheduling_policy == "priority"
            or self.scheduler._encoders._run is not None  # it may wait for the next slices,
            or not self.scheduler._encoders.pace.may_begin  # or for the pace of its prompt
        )
        # Prompts of several tenants take turns: this step may be another one's.
        builder, tenants = self.scheduler._builder, self.scheduler._table.tenants
        takes_turns = tenants.several_compete and not builder._in_order
        work = self.engine.schedule()
        if first and first.status == RequestStatus.RUNNING and not may_stand_still:
            scheduled = {r.req_id for r in work.scheduled_reqs}
            assert first.request_id in scheduled or (
                takes_turns and (scheduled or builder._in_order)
            )

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def update(self):
        self.engine.update()

    @precondition(lambda self: self.engine.in_flight)
    @rule(rarely=st.sampled_from([False, False, True]), is_lost=st.booleans())
    def step_fails(self, rarely, is_lost):
        if rarely:
            work, _ = self.engine.in_flight.popleft()
            # The result of an empty step, or of one dropped after an earlier failure, cannot be
            # lost: later writes came after it.
            is_missed = work.scheduled_reqs and self.scheduler._in_flight[0].entries
            scheduler = self.scheduler
            for output in (
                scheduler.repeat_step(work)
                if is_lost
                else scheduler.fail_step(work, "the step failed")
            ):
                self.engine.outputs[output.request_id].append(output)
            if is_missed:
                self.engine.executor.forget()
            self.scheduler.check_integrity()

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.engine.step()

    @rule(mode=st.sampled_from(["abort", "wait", "keep", "keep"]))
    def fall_asleep(self, mode):
        if mode != "wait":
            while self.engine.in_flight:
                self.engine.update()
        if mode == "abort":
            self.ended_early |= self.scheduler.requests.keys()
        self.scheduler.pause(mode)
        if mode != "wait":
            assert self.scheduler.reset_prefix_cache()
            self.engine.executor.forget()
        self.scheduler.check_integrity()

    @precondition(lambda self: self.scheduler.paused)
    @rule()
    def wake_up(self):
        self.scheduler.resume()
        self.scheduler.check_integrity()

    @rule(restart=st.booleans(), connector=st.booleans())
    def reset_prefix_cache(self, restart, connector):
        while restart and self.engine.in_flight:
            self.engine.update()
        idle = restart or not self.scheduler.running
        assert self.scheduler.reset_prefix_cache(restart, connector) == idle
        assert not (restart and self.scheduler.running)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.scheduler.resume()
        for name in list(self.scheduler._table.held):
            self.scheduler.set_ready(name)
        self.engine.run()
        for name, request in self.requests.items():
            self.check(name, request)

    def check(self, name, request):
        outputs = self.engine.outputs[name]
        tokens = self.engine.tokens(name)
        prompt = request.all_token_ids[: request.num_prompt_tokens]
        prompt = replace_tokens(prompt, request.mm_features)
        adapter = key_of(request)
        begin = request.options.adapter_begin
        alone = expected_output(
            request.sampling_params, prompt, MAX_MODEL_LEN, None, adapter, begin
        )
        if request.pooling is not None:
            self.check_text(name, outputs, pooled(prompt, adapter, begin))
            return
        if name in self.ended_early:
            assert tokens == alone[: len(tokens)]
            return
        last = outputs[-1]
        if last.finish_reason == FinishReason.ERROR:
            assert tokens == alone[: len(tokens)]
            deadline = last.error_kind == "DeadlineError" and request.options.deadline is not None
            deadline |= last.error_kind == "FirstTokenError" and not tokens
            step_failed = last.error == "the step failed"
            unread = last.error == UNREAD and adapter is not None
            assert deadline or step_failed or unread or name in self.engine.executor.fail
            return
        assert tokens == alone
        is_stop = alone[-1] in request.stop_token_ids
        assert last.finish_reason == (FinishReason.STOP if is_stop else FinishReason.LENGTH)
        if request.skip_reading_prefix_cache:
            rows = [o.new_prompt_logprobs for o in outputs if o.new_prompt_logprobs is not None]
            assert [t for r in rows for (t,) in unpack_logprobs(r)[0]] == prompt[1:]

    def check_text(self, name, outputs, vector):
        if name in self.ended_early and not outputs:
            return
        *_, last = outputs
        if last.finish_reason == FinishReason.STOP:
            assert last.pooled == vector
        else:
            assert last.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
            assert last.pooled is None


class ConnectorMachine(SchedulerMachine):
    """Machine with blocks that are stored elsewhere, loaded late, in part, or not at all."""

    @initialize(engine=engines_with_connector())
    def start(self, engine):
        super().start(engine)
        self.transfers = FakeTransfers(engine.executor)
        engine.on_step = self.transfers.step

    def deliver_all(self):
        for name in list(self.transfers.pending):
            self.scheduler.update_connector_output(self.transfers.deliver(name))

    @precondition(lambda self: self.transfers.pending)
    @rule(data=st.data(), damaged=st.sampled_from([0, 0, 0, 1, 3, -1]))
    def blocks_arrive(self, data, damaged):
        name = data.draw(st.sampled_from(sorted(self.transfers.pending)))
        self.scheduler.update_connector_output(self.transfers.deliver(name, damaged))
        self.scheduler.check_integrity()

    @precondition(lambda self: self.waiting_for_nothing())
    @rule(data=st.data())
    def be_ready(self, data):
        self.scheduler.set_ready(data.draw(st.sampled_from(self.waiting_for_nothing())))

    def waiting_for_nothing(self):
        remote = RequestStatus.WAITING_FOR_REMOTE_KVS
        return sorted(i for i, r in self.scheduler._table.held.items() if r.status != remote)

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.engine.step()
            self.deliver_all()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.scheduler.resume()
        for name in self.waiting_for_nothing():
            self.scheduler.set_ready(name)
        for _ in range(2000):
            if not (self.scheduler.requests or self.engine.in_flight or self.transfers.pending):
                break
            self.engine.step()
            self.deliver_all()
        super().teardown()
        connector = self.scheduler._connector
        assert not connector._memory._pins
        assert not connector._unsure
        assert not connector._loads
        assert connector._file is None or not connector._file._pins


class AdapterMachine(SchedulerMachine):
    """Machine whose requests have adapters, which are read late or not at all."""

    @initialize(data=st.data(), max_loras=st.integers(1, 3), more=st.integers(0, 2))
    def start(self, data, max_loras, more):
        lora = LoRAConfig(enable_lora=True, max_loras=max_loras, max_cpu_loras=max_loras + more)
        super().start(data.draw(engines(lora=lora)))

    def add(self, prompt, params, adapter=None, begin=0, **fields):
        """Add a request whose adapter begins at a token, or at the last one of a short prompt."""
        adapter_begin = min(begin, len(prompt.tokens) - 1)
        return super().add(prompt, params, adapter=adapter, adapter_begin=adapter_begin, **fields)

    @rule(
        prompt=prompts,
        params=parameters,
        adapter=st.sampled_from("abcdef"),
        begin=begins,
        n=st.integers(1, 3),
    )
    def requests_with_adapters_arrive(self, prompt, params, adapter, begin, n):
        for _ in range(n):
            self.add(prompt, params, adapter, begin)

    @rule(prompt=prompts, params=parameters, adapter=st.sampled_from("ab"), begin=begins)
    def text_with_an_adapter_arrives(self, prompt, params, adapter, begin):
        params = params | {"max_tokens": 1, "prompt_logprobs": None}
        self.add(prompt, params, adapter, begin, pooling=PoolingSpec("embed"))

    @precondition(lambda self: self.engine.executor.reading)
    @rule(fails=st.sampled_from([False, False, True]))
    def an_adapter_is_read(self, fails):
        self.engine.finish_reading(UNREAD if fails else None)

    def teardown(self):
        super().teardown()
        if hasattr(self, "engine"):
            assert len(self.scheduler.adapters.in_memory) <= self.scheduler.adapters.num_slots


class EncoderMachine(SchedulerMachine):
    """Machine whose prompts contain pictures, some of them the same.

    Tokens of a picture may see each other, or also the text before it, or all of the prompt.
    """

    @initialize(data=st.data(), rows=st.integers(12, 60))
    def start(self, data, rows):
        layers = data.draw(st.sampled_from([0, 1, 4, 9]))
        cut = {"image": layers} if layers else None
        super().start(data.draw(engines(encoder_cache_size=rows, encoder_pieces=cut)))
        self.engine.piece_seconds = data.draw(st.sampled_from([0, 0.001, 0.02]))

    @rule(
        prompt=prompts,
        params=parameters,
        places=st.lists(
            st.tuples(
                st.integers(0, 12),
                st.sampled_from([1, 4, 9, 12]),
                st.sampled_from("abcdefg"),
                st.booleans(),
            ),
            min_size=1,
            max_size=4,
        ),
        patches=st.sampled_from([1, 1, 4]),
        sight=st.sampled_from(["causal", "picture", "text", "prompt"]),
        lasts=st.lists(st.none() | st.integers(0, VOCAB - 1), min_size=1, max_size=3),
    )
    def requests_with_pictures_arrive(self, prompt, params, places, patches, sight, lasts):
        features, end = [], 0
        for gap, length, name, broken in places:
            offset, before = end + gap, end
            if offset + length > len(prompt.tokens):
                break
            end = offset + length
            ranges = {
                "causal": (),
                "picture": ((offset, end),),
                "text": ((before, end),),
                "prompt": ((0, len(prompt.tokens)),),
            }[sight]
            is_embed = bytes([1, 0, 1] * 4)[:length] if broken else None
            name = f"{name}{length}{broken}"
            rows = length if is_embed is None else is_embed.count(1)
            features.append(picture(name, offset, length, is_embed, rows * patches, ranges))
        features = self.that_fit(features)
        params = params | {"prompt_logprobs": None}
        for last in lasts:
            its_prompt = prompt if last is None else prompt.ending_with(last)
            self.add(its_prompt, params, features=features)

    def that_fit(self, features):
        """Return items; without their ranges if these need more of a step or of the cache than it
        has, or if the text within a picture sees only that picture: its name does not contain it.
        """
        scheduler = self.scheduler
        rows = scheduler._encoders.cache.num_rows
        room = scheduler.max_num_batched_tokens - scheduler.config.max_num_seqs + 1
        lengths = [end - begin for item in features for begin, end in item.ranges]
        encoded = sum(item.num_encoder_tokens for item in features)
        fits = max(lengths, default=0) <= room and encoded <= min(rows, room)
        if fits and not any(
            item.mm_position.is_embed is not None and not item.reaches_text for item in features
        ):
            return features
        return [msgspec.structs.replace(item, ranges=()) for item in features]

    def teardown(self):
        super().teardown()
        if hasattr(self, "engine"):
            cache = self.scheduler._encoders.cache
            assert not cache.num_used_rows
            assert self.scheduler._encoders._run is None
            assert not self.scheduler._builder.has_waits


TestEncoderMachine = EncoderMachine.TestCase

TestConnectorMachine = ConnectorMachine.TestCase
TestConnectorMachine.settings = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

TestAdapterMachine = AdapterMachine.TestCase
TestAdapterMachine.settings = TestConnectorMachine.settings
TestEncoderMachine.settings = TestConnectorMachine.settings

TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), jobs=st.lists(st.tuples(prompts, parameters), min_size=4, max_size=14))
def test_everyone_is_served_from_a_tiny_pool(data, jobs):
    """All arrive at once at a pool with space for one or two: no starvation, same tokens."""
    engine = data.draw(engines(fail=()))
    requests = []
    for i, (prompt, params) in enumerate(jobs):
        params = params | {"max_tokens": MAX_MODEL_LEN - len(prompt.tokens)}
        requests.append(engine.add(f"r{i}", prompt.tokens, **params))
        if i % 4 == 0:
            its_params = params | {"seed": 5, "turn": 1}
            leader = requests[-1]
            requests.append(engine.add(f"s{i}", prompt.tokens, leader=leader, **its_params))
    engine.run()
    for request in requests:
        prompt = request.all_token_ids[: request.num_prompt_tokens]
        alone = expected_output(request.sampling_params, prompt, MAX_MODEL_LEN)
        assert engine.tokens(request.request_id) == alone


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    num_blocks=st.integers(9, 40),
    jobs=st.lists(
        st.tuples(
            st.integers(0, 1),  # the token that differs
            st.sampled_from([5, 11, 20, 29]),  # its place
            st.sampled_from([12, 20, 30]),  # end of the range
            st.sampled_from([None, None, "s"]),
            st.sampled_from([None, None, 4, 12]),  # begin of an adapter
        ),
        min_size=4,
        max_size=12,
    ),
)
def test_prompts_whose_tokens_see_each_other(num_blocks, jobs):
    """Blocks are shared only by prompts with the same range: the worker checks their contents."""
    lora = LoRAConfig(enable_lora=True, max_loras=1, max_cpu_loras=1)
    engine = FakeEngine(
        num_blocks=num_blocks,
        block_size=8,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=40,
        max_num_seqs=4,
        encoder_cache_size=40,
        lora=lora,
    )
    requests = []
    for i, (token, place, end, salt, begin) in enumerate(jobs):
        tokens = [0] * 30
        tokens[place] = token
        fields = {} if begin is None else {"adapter": "a", "adapter_begin": begin}
        item = picture("a", 2, 8, ranges=((0, end),))
        fields |= {"features": [item], "max_tokens": 20, "salt": salt}
        requests.append(engine.add(f"r{i}", tokens, **fields))
        if i % 2:
            engine.step()
            engine.finish_reading()
    for _ in range(1000):
        engine.step()
        engine.finish_reading()
        if not engine.scheduler.requests:
            break
    for request in requests:
        prompt = request.all_token_ids[: request.num_prompt_tokens]
        prompt = replace_tokens(prompt, request.mm_features)
        begin = request.options.adapter_begin
        params, adapter = request.sampling_params, key_of(request)
        alone = expected_output(params, prompt, MAX_MODEL_LEN, None, adapter, begin)
        assert engine.tokens(request.request_id) == alone


@settings(max_examples=30, deadline=None)
@given(prompt=prompts, params=parameters, chunk=st.sampled_from([1, 7, 16, 512]))
def test_a_request_alone_gives_the_expected_tokens(prompt, params, chunk):
    engine = FakeEngine(max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=chunk, max_num_seqs=1)
    request = engine.add("a", prompt.tokens, **params)
    engine.run()
    alone = expected_output(request.sampling_params, prompt.tokens, MAX_MODEL_LEN)
    assert engine.tokens("a") == alone
