"""Several engines of one front end, some of which die; the processes are stand-ins."""

import asyncio
import dataclasses
import itertools
import logging

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import EngineConfig
from octavo.engine.core_messages import CoreReady
from octavo.errors import (
    ConfigError,
    EngineDeadError,
    EngineStoppedError,
    NodeMissingError,
    ScalingError,
    StepFailedError,
)
from octavo.fleet import data_parallel, start, supervisor
from octavo.fleet.data_parallel import DataParallelClient
from octavo.fleet.start import share_cores
from octavo.messages import (
    CoreSamplingParams,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.plan.memory import MemoryItem
from octavo.platforms.cuda import CUDAPlatform
from tests.fleet.test_supervisor import KILLED, READY, Client, Process
from tests.params import core_request


class Engines:
    """Client of several engines, and the records of a front end."""

    def __init__(self, size, first=None, **how):
        self.records: dict[str, EngineCoreRequest] = {}
        self.launched, self.recoveries, self.ends, self.outputs = [], [], {}, []
        self.error = None
        self.generation, self.generations = 0, {}
        Client.made = []
        self.client = DataParallelClient(
            self,
            lambda: list(self.records.values()),
            config=EngineConfig.from_kwargs(data_parallel_size=size, data_parallel_rank=first),
            **{"max_restarts": 100, "progress_timeout": 60.0, **how},
            on_recovery=self.recoveries.append,
        )

    def launch(self, ready, engine_index):
        self.note_launch(engine_index)
        self.launched.append((engine_index, ready))
        return Process(len(self.launched))

    def make_setup(self, ready, engine_index):
        return ready

    def note_launch(self, engine_index):
        self.generations[engine_index] = self.generation

    def begin_generation(self):
        self.generation += 1

    def is_outdated(self, engine_index):
        return self.generations[engine_index] != self.generation

    def make_spare(self):
        pass

    def shutdown(self):
        pass

    def close(self):
        pass

    def engines_behind(self):
        return []

    def process(self, index):
        """Return the newest process of an engine: its requests, and its answers."""
        numbers = [n for n, (i, _) in enumerate(self.launched) if i == index]
        return Client.made[numbers[-1]]

    async def add(self, *ids, prompt=(1, 2), **fields):
        for request_id in ids:
            request = core_request(request_id, list(prompt), CoreSamplingParams(), **fields)
            self.records[request_id] = request
            await self.client.add_request(request)

    async def say(self, index, *what):
        for said in what:
            self.process(index).said.put_nowait(said)
        for _ in range(40):
            await asyncio.sleep(0)

    async def die(self, index, reason=KILLED):
        before = len(Client.made)
        await self.say(index, EngineDeadError(reason))
        while len(Client.made) == before:
            await asyncio.sleep(0.001)

    async def start(self, size):
        await self.say(0, READY)
        for index in range(1, size):
            await self.say(index, READY)

    async def read(self):
        """Read outputs as a front end does."""
        try:
            for number in itertools.count():
                further = self.client.get_output_nowait() if number % 8 else None
                outputs = further or await self.client.get_output()
                self.outputs.append(outputs)
                for output in outputs.outputs:
                    record = self.records.get(output.request_id)
                    if record is None:
                        continue
                    record.output_token_ids = record.output_token_ids + output.new_token_ids
                    if output.finish_reason is not None:
                        self.ends[output.request_id] = output
                        del self.records[output.request_id]
        except EngineDeadError as error:
            self.error = error
            self.client.fail_calls(error)

    def ids(self, index):
        return self.process(index).ids

    async def scale(self, size):
        """Begin to scale; the started engines must report that they are ready."""
        task = asyncio.ensure_future(self.client.scale(size))
        for _ in range(40):
            await asyncio.sleep(0)
        return task


def brought(**tokens):
    return EngineCoreOutputs([EngineCoreOutput(i, [t]) for i, t in tokens.items()])


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(supervisor, "AsyncMPClient", Client)
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 0.001)


def run(test, size=2, ready=True, **how):
    async def main():
        engines = Engines(size, **how)
        reading = asyncio.ensure_future(engines.read())
        try:
            if ready:
                await engines.start(size)
            await test(engines)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await engines.client.shutdown()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_the_first_engines_plan_is_that_of_all():
    async def test(engines):
        client = engines.client
        assert engines.launched == [(0, None)]
        assert client.pid_of(2) == -1
        await engines.add("a", "b")
        assert engines.ids(0) == ["a", "b"]  # no other engine is ready yet
        await engines.say(0, READY)
        assert engines.launched == [(0, None), (1, READY), (2, READY)]
        await engines.add("c")
        assert engines.ids(0) == ["a", "b", "c"]  # the others do not serve yet
        await engines.say(1, READY)
        assert not client.up
        assert not client.ready.done()
        assert client.down == {2: "is being started"}
        await engines.add("d")
        assert engines.ids(1) == ["d"]
        await engines.say(2, READY)
        assert client.up
        assert client.ready.result() == READY
        assert (client.down, client.pid_of(2)) == ({}, 3)

    run(test, size=3, ready=False)


@pytest.mark.parametrize("index", [0, 1])
def test_a_model_that_cannot_be_loaded_ends_the_start(index):
    async def test(engines):
        call = asyncio.ensure_future(engines.client.call_utility("stats"))
        for engine in range(index):
            await engines.say(engine, READY)
        await engines.say(index, EngineDeadError("no memory"))
        assert str(engines.error) == "no memory"
        with pytest.raises(EngineDeadError, match="no memory"):
            await call
        assert not engines.client.up

    run(test, ready=False)


def test_requests_and_what_is_asked_of_them_go_to_their_engines():
    async def test(engines):
        await engines.add("a", "b", "c", n=1)
        await engines.add("d", n=2)
        assert (engines.ids(0), engines.ids(1)) == (["a", "c"], ["b", "d"])
        await engines.say(1, brought(b=5, a=6))  # the second is not a request of this engine
        assert engines.records["b"].output_token_ids == [5]
        assert engines.records["a"].output_token_ids == []
        assert [o.engine_index for o in engines.outputs] == [1]
        await engines.client.abort_requests(["a", "1_d", "unknown"])
        assert engines.process(0).sent[-1] == ("abort", "a")
        assert engines.process(1).sent[-1] == ("abort", "1_d")
        end = EngineCoreOutput("b", [6], finish_reason=FinishReason.STOP)
        await engines.say(1, EngineCoreOutputs([end]))
        assert engines.client.engine_of("b") is None
        assert engines.client.engine_of("0_d") == 1

    run(test)


def test_a_busy_engine_does_not_keep_others_from_being_heard():
    async def test(engines):
        await engines.add("a", "b")
        for token in range(20):
            engines.process(0).said.put_nowait(brought(a=token))
        engines.process(1).said.put_nowait(brought(b=7))
        await engines.say(1)
        order = [o.engine_index for o in engines.outputs]
        assert sorted(order) == [0] * 20 + [1]
        assert 1 in order[:10]  # some steps of the same engine are processed at once

    run(test)


def test_streams_of_a_dead_engine_go_on_at_another_at_once(caplog):
    async def test(engines):
        await engines.add("a", "b", "c", "d")
        await engines.say(1, brought(b=7, d=8), brought(b=9))
        with caplog.at_level(logging.WARNING):
            await engines.die(1)
        assert "other engines continue requests of engine 1 (requests: 2)" in caplog.text
        assert engines.client.up
        assert engines.client.down == {1: "is being started"}
        moved = engines.process(0).sent[2:]
        assert [(r.request_id, r.output_token_ids) for r in moved] == [("b", [7, 9]), ("d", [8])]
        assert engines.ids(1) == []
        await engines.say(0, brought(a=1, b=2))
        await engines.client.abort_requests(["d"])
        assert engines.process(0).sent[-1] == ("abort", "d")
        await engines.add("e")
        assert engines.ids(0)[-1] == "e"
        assert engines.recoveries == []
        await engines.say(1, READY)
        (recovery,) = engines.recoveries
        assert (recovery.num_requests, recovery.engine_index) == (2, 1)
        assert engines.client.down == {}
        await engines.add("f")
        assert engines.ids(1) == ["f"]
        assert engines.records["b"].output_token_ids == [7, 9, 2]

    run(test)


def test_where_no_other_engine_serves_streams_wait_for_theirs():
    async def test(engines):
        await engines.add("a", "b")
        await engines.die(0)
        assert engines.ids(1) == ["b", "a"]
        await engines.say(1, brought(a=3), brought(a=3), brought(a=3))
        await engines.die(1)
        assert not engines.client.up
        assert engines.ids(0) == []
        assert engines.ids(1) == ["a", "b"]
        await engines.say(1, READY, brought(a=4, b=5))
        assert engines.records["a"].output_token_ids == [3, 3, 3, 4]

    run(test)


def test_what_waits_for_an_engine_goes_on_at_another_that_is_there_before():
    async def test(engines):
        await engines.die(0)
        await engines.die(1)
        await engines.add("a", "b")  # no engine serves
        assert (engines.ids(0), engines.ids(1)) == (["a"], ["b"])
        await engines.say(0, READY)
        assert engines.ids(0) == ["a", "b"]
        assert engines.process(1).sent[-1] == ("abort", "b")
        await engines.say(1, READY, brought(b=1))  # it did not receive that in time
        assert engines.records["b"].output_token_ids == []
        await engines.say(0, brought(a=2, b=3))
        assert engines.records["b"].output_token_ids == [3]

    run(test)


def test_a_suspect_waits_for_its_own_engine():
    async def test(engines):
        await engines.add("a", "b")
        engines.client._supervisors[1]._suspects["b"] = supervisor._Suspect({"b"}, deaths=2)
        await engines.die(1)
        await engines.say(0, brought(a=1))
        assert engines.ids(0) == ["a"]
        assert engines.ids(1) == ["b"]

    run(test)


class Nodes:
    """Only node of engine 1, on which its processes run."""

    def __init__(self, engines):
        self.engines, self.there = engines, False

    def has(self, index):
        return self.there

    def launch(self, index, setup):
        if not self.there:
            raise NodeMissingError(f"no node has joined for engine {index}")
        self.engines.launched.append((index, setup))
        return Process(len(self.engines.launched))

    def attach(self):
        pass

    def make_spare(self, index):
        pass

    async def shutdown(self):
        pass


def test_an_engine_that_has_lost_its_node():
    async def test(engines):
        client, nodes = engines.client, Nodes(engines)
        client._hub, client._local = nodes, 1
        await engines.say(0, READY)
        assert client.missing == [1]
        nodes.there = True
        client._news.set()
        await engines.say(0)
        assert client.pid_of(1) == 2
        await engines.say(1, READY)
        await engines.add("a", "b")
        # It dies with its node; a suspect must be removed as well.
        client._supervisors[1]._suspects["b"] = supervisor._Suspect({"b"}, deaths=2)
        nodes.there = False
        await engines.say(1, EngineDeadError("the node has closed the connection"))
        assert client.down == {1: "waits for its node"}
        assert engines.ids(0) == ["a", "b"]
        assert client._supervisors[0].deaths_of("b") == 3
        nodes.there = True
        client._news.set()
        await engines.say(0, brought(a=1))
        assert client.down == {1: "is being started"}
        await engines.say(1, READY)
        assert client.down == {}
        await engines.add("c")
        assert engines.ids(1) == ["c"]

    run(test, ready=False)


async def start_on_machines(engines):
    """Start two engines that divide experts, the second on a node; return the nodes."""
    client, nodes = engines.client, Nodes(engines)
    client._hub, client._local, client._divides_experts = nodes, 1, True
    nodes.there = True
    await engines.start(2)
    await engines.add("a", "b")
    return nodes


async def end_victim(engines, index, guilty):
    """Report the death of a victim, and wait for the process that replaces it."""
    process = engines.process(index).process
    assert process.is_victim
    assert f"divides experts with engine {guilty}, which died" in process.reason
    before = len(Client.made)
    await engines.say(index, EngineStoppedError(process.reason))
    while len(Client.made) == before:
        await asyncio.sleep(0.001)


def test_engines_that_divide_experts_on_several_machines_start_again_together():
    async def test(engines):
        await start_on_machines(engines)
        for guilty in (0, 1):
            await engines.die(guilty)
            await end_victim(engines, 1 - guilty, guilty)
            assert engines.generation == guilty + 1, "a victim begins no generation"
            assert engines.process(guilty).process.reason is None
            for index in (1, 0):
                await engines.say(index, READY)
            assert (engines.ids(0), engines.ids(1)) == (["a"], ["b"])
            await engines.say(0, brought(a=1))
            await engines.say(1, brought(b=1))
        await engines.die(1)
        await engines.die(1)  # while it loads: the other one has not been started again yet
        assert engines.generation == 4
        await end_victim(engines, 0, 1)
        assert engines.generation == 4
        await engines.die(0)  # and this one, too
        assert engines.generation == 5
        await end_victim(engines, 1, 0)
        assert engines.generations == {0: 5, 1: 5}
        supervisors = engines.client._supervisors
        deaths = supervisors[0].deaths_of("a"), supervisors[1].deaths_of("b")
        assert deaths == (1, 2), "only those of their own engine"
        assert engines.error is None

    run(test, ready=False)


def test_engines_that_divide_experts_wait_for_a_lost_node(caplog):
    async def test(engines):
        nodes, client = await start_on_machines(engines), engines.client
        nodes.there = False
        await engines.say(1, EngineDeadError("the node has closed the connection"))
        assert client.down[1] == "waits for its node"
        assert "engine 1 stays down, the others wait for it" in caplog.text
        await end_victim(engines, 0, 1)
        await engines.say(0, READY)
        assert engines.ids(0) == ["a", "b"]
        nodes.there = True
        client._news.set()
        await engines.say(0)
        assert client.down[1] == "is being started"
        nodes.there = False
        await engines.say(1, EngineDeadError("the node has closed the connection"))
        assert client.down[1] == "waits for its node"
        assert engines.generation == 2
        await end_victim(engines, 0, 1)
        nodes.there = True
        client._news.set()
        await engines.say(0, READY)
        await engines.say(1, READY)
        assert client.down == {}
        assert engines.generations == {0: 2, 1: 2}
        assert engines.error is None

    run(test, ready=False)


def test_a_request_that_ends_while_others_are_moved(monkeypatch):
    async def test(engines):
        await engines.add("a", "b", "c", "d")
        add = Client.add_request

        async def add_and_abort(self, request):
            await add(self, request)
            if request.request_id == "a":
                del engines.records["c"]
                await engines.client.abort_requests(["c"])

        monkeypatch.setattr(Client, "add_request", add_and_abort)
        await engines.die(0)
        assert engines.ids(1) == ["b", "d", "a"]

    run(test)


def test_an_engine_that_died_too_often_stays_down(caplog):
    async def test(engines):
        await engines.add("a", "b")
        await engines.say(1, EngineDeadError(KILLED))
        assert "engine 1 stays down, the others serve" in caplog.text
        assert engines.client.down == {1: "has died too often"}
        assert engines.ids(0) == ["a", "b"]
        assert engines.outputs[-1].stats == SchedulerStats()
        await engines.add("c")
        assert engines.ids(0) == ["a", "b", "c"]
        assert await engines.client.call_utility("stats")
        await engines.say(0, EngineDeadError(KILLED))
        assert str(engines.error) == KILLED

    run(test, max_restarts=0)


def test_calls_go_to_all_engines():
    async def test(engines):
        client = engines.client
        for index in range(2):
            engines.process(index).stats = SchedulerStats(
                num_running_reqs=1 + index,
                num_used_blocks=10,
                num_total_blocks=40,
                num_accepted_tokens_per_pos=[3, 1][: 1 + index],
            )
        stats = SchedulerStats(*await client.call_utility("stats"))
        assert (stats.num_running_reqs, stats.kv_cache_usage) == (3, 0.25)
        assert stats.num_accepted_tokens_per_pos == [6, 1]
        for process in Client.made:
            process.answers = False
        call = asyncio.ensure_future(client.call_utility("reset_prefix_cache"))
        await engines.say(0)
        assert not call.done()
        for index, answer in enumerate([True, False]):
            engines.process(index).calls[-1].set_result(answer)
        assert await call is False
        call = asyncio.ensure_future(client.call_utility("stop_profile"))
        await engines.say(0)
        for index in range(2):
            engines.process(index).calls[-1].set_result(f"/{index}")
        assert await call == "/0, /1"
        call = asyncio.ensure_future(client.call_utility("reset_prefix_cache"))
        await engines.say(0)
        engines.process(0).calls[-1].set_result(True)
        await engines.die(1)
        with pytest.raises(StepFailedError):
            await call

    run(test)


def test_a_prefix_is_looked_for_again_after_a_reset():
    async def test(engines):
        prompt = range(64)
        await engines.add("a", prompt=prompt)
        await engines.add("b", prompt=prompt)
        assert engines.ids(0) == ["a", "b"]
        for process in Client.made:
            process.answers = False
        call = asyncio.ensure_future(engines.client.call_utility("reset_prefix_cache"))
        await engines.say(0)
        for process in Client.made:
            process.calls[-1].set_result(True)
        await call
        await engines.add("c", prompt=prompt)
        assert engines.ids(1) == ["c"]

    run(test)


def test_a_suspect_is_tried_where_it_was_and_the_others_go_on_elsewhere():
    async def test(engines):
        await engines.add("a", "b")
        await engines.die(0)
        assert engines.ids(1) == ["b", "a"]
        await engines.say(0, READY)
        await engines.die(1)  # the second death with a in flight, the first with b
        assert engines.ids(0) == ["b"]
        assert engines.ids(1) == ["a"]
        assert engines.client.engine_of("a") == 1
        await engines.say(1, READY)
        await engines.add("c")
        assert engines.ids(0) == ["b", "c"]  # an engine with a suspect receives no other request
        for _ in range(2):  # alone
            assert "a" not in engines.ends
            await engines.die(1)
            await engines.say(1, READY)
        assert engines.ends["a"].error_kind == "GivenUpError"
        await engines.add("d")
        assert engines.ids(1) == ["d"]

    run(test)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 3),
    st.integers(1, 8),
    st.sets(st.integers(0, 7), max_size=1),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=25),
)
def test_every_request_gets_each_token_once(size, count, poison, events):
    """Engines die at random, and of one request: it fails, the others are answered once."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(supervisor, "AsyncMPClient", Client)
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 0.0)
    names = [f"r{i}" for i in range(count)]
    bad = {f"r{i}" for i in poison if i < count}

    async def test(engines):
        await engines.add(*names)
        deaths = 0

        async def step(index):
            """Send the next token of all requests of an engine, or its death."""
            nonlocal deaths
            process = engines.process(index)
            if not process.ready.done():
                await engines.say(index, READY)
                return
            live = engines.records
            ids = [i for i in process.ids if i in live and engines.client.engine_of(i) == index]
            if bad & set(ids):
                deaths += 1
                await engines.die(index)
                return
            outputs = []
            for request_id in dict.fromkeys(ids):
                token = len(live[request_id].output_token_ids)
                end = FinishReason.LENGTH if token == 3 else None
                outputs.append(EngineCoreOutput(request_id, [token], finish_reason=end))
            await engines.say(index, EngineCoreOutputs(outputs))

        kept, killed = dict(engines.records), set()
        for index, kind in events:
            if index >= size:
                continue
            if kind == 0 and index not in killed and engines.process(index).ready.done():
                killed.add(index)  # once: after two deaths in a row a request could be the cause
                await engines.die(index)
            else:
                await step(index)
        for _ in range(200):
            if not engines.records:
                break
            for index in range(size):
                await step(index)
        assert engines.error is None
        assert set(engines.ends) == set(names)
        failed = {i for i, end in engines.ends.items() if end.error}
        assert failed == bad
        for name in set(names) - bad:
            assert kept[name].output_token_ids == [0, 1, 2, 3]
        assert deaths <= 4

    try:
        run(test, size=size)
    finally:
        monkeypatch.undo()


def test_cores_are_divided(monkeypatch, caplog):
    monkeypatch.setattr(start, "num_cpus", lambda: 8)

    def threads(**how):
        config = EngineConfig.from_kwargs(device="cpu", **how)
        shared = share_cores(config)
        same = msgspec.structs.replace(shared, device=config.device)
        assert same == config
        return shared.device.num_threads

    assert threads() is None
    assert threads(tensor_parallel_size=2) is None  # each rank divides them itself
    assert threads(data_parallel_size=2) == 4
    assert threads(data_parallel_size=3) == 2
    assert threads(data_parallel_size=2, num_threads=3) == 3
    assert caplog.text == ""
    assert threads(data_parallel_size=16) == 1
    assert "16 processes with 1 threads each exceed the 8 available cores" in caplog.text
    assert threads(data_parallel_size=2, num_threads=6) == 6
    assert "2 processes with 6 threads" in caplog.text
    assert threads(data_parallel_size=2, tensor_parallel_size=2) == 2


def test_a_device_that_one_engine_takes(monkeypatch):
    monkeypatch.setattr(start, "get_platform", lambda device: CUDAPlatform())
    share_cores(EngineConfig())
    with pytest.raises(ConfigError, match="data_parallel_size=2 is not supported on device=cuda"):
        share_cores(EngineConfig.from_kwargs(data_parallel_size=2))


def test_engines_come_and_go_while_requests_go_on():
    async def test(engines):
        await engines.add("a", "b")
        scaling = await engines.scale(3)
        await engines.add("c")
        assert engines.client.scaling
        assert engines.ids(0) == ["a", "b", "c"]  # the others do not serve yet
        for index in (1, 2):
            assert not scaling.done()
            await engines.say(index, READY)
        await scaling
        assert not engines.client.scaling
        await engines.add("d", "e")
        assert {tuple(engines.ids(i)) for i in (1, 2)} == {("d",), ("e",)}
        await engines.say(1, brought(**{engines.ids(1)[0]: 5}))
        scaling = await engines.scale(1)
        await scaling
        assert engines.process(1).closed
        assert engines.process(2).closed
        assert len(engines.ids(1)) == len(engines.ids(2)) == 1  # no more for the one that leaves
        assert engines.ids(0) == ["a", "b", "c", "e", "d"] or engines.ids(0)[3:] == ["d", "e"]
        went_on = next(r for r in engines.process(0).sent if r.output_token_ids)
        assert went_on.output_token_ids == [5]
        await engines.say(0, brought(a=1, b=2, c=3, d=4, e=5))
        assert engines.error is None
        again = await engines.scale(2)
        await engines.say(1, READY)
        await again
        await engines.add("f")
        assert engines.ids(1) == ["f"]

    run(test, size=1)


@pytest.mark.parametrize("hangs", ["answer", "step"])
def test_the_engine_that_others_wait_for_is_killed_in_their_place(hangs):
    async def test(engines):
        waiting, guilty = (engines.process(index) for index in (0, 1))
        engines.engines_behind = lambda: [1]
        waiting.stats = SchedulerStats(num_running_reqs=1, num_scheduled_tokens=5)
        waiting.answers = hangs == "step"
        while guilty.process.reason is None:
            await asyncio.sleep(0.005)
        assert guilty.process.reason.startswith("another engine waits for this one: ")
        assert waiting.process.reason is None
        engines.engines_behind = list  # nobody is behind: it hangs itself
        while waiting.process.reason is None:
            await asyncio.sleep(0.005)
        assert not waiting.process.reason.startswith("another")

    run(test, progress_timeout=0.1)


def test_an_engine_that_cannot_be_started_leaves_all_as_it_was():
    async def test(engines):
        await engines.add("a")
        scaling = await engines.scale(3)
        with pytest.raises(ScalingError, match="being changed already"):
            await engines.client.scale(2)
        await engines.say(1, READY)
        await engines.say(2, EngineDeadError("the model does not fit"))
        with pytest.raises(ScalingError, match="the model does not fit"):
            await scaling
        assert engines.process(1).closed
        assert engines.client.down == {}
        await engines.say(0, brought(a=1))
        assert engines.error is None
        await engines.add("b")
        assert engines.ids(0) == ["a", "b"]

    run(test, size=1)


def test_there_must_be_room_for_more_engines(monkeypatch):
    monkeypatch.setattr(data_parallel, "cpu_memory", lambda: (2**40, 2**29))

    async def test(engines):
        plan = dataclasses.replace(READY.plan, items=(MemoryItem("weights", 2**30),))
        await engines.say(0, CoreReady(plan))
        with pytest.raises(ScalingError, match=r"1 more engines need 1,\d+ MiB, and 512 MiB"):
            await engines.client.scale(2)
        assert len(engines.launched) == 1

    run(test, size=1, ready=False)


def test_engines_are_named_by_their_number_among_all_and_a_dead_one_has_no_requests(caplog):
    async def test(engines):
        await engines.add("a", "b")
        await engines.say(0, brought(a=5))
        engines.outputs.clear()
        await engines.die(0)
        assert list(engines.client.down) == [6]
        await engines.add("c")  # wakes the reader
        idle = [o for o in engines.outputs if o.engine_index == 0 and o.stats is not None]
        assert [o.stats.num_running_reqs for o in idle] == [0]

    run(test, first=6)
    assert "other engines continue requests of engine 6" in caplog.text
