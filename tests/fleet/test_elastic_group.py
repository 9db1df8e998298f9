"""Groups of engines that divide experts, of which one replaces the other; with stand-ins."""

import asyncio
import dataclasses

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import EngineConfig
from octavo.engine.core_messages import CoreReady
from octavo.errors import (
    ConfigError,
    EngineDeadError,
    ScalingBusyError,
    ScalingError,
    StepFailedError,
)
from octavo.fleet import elastic_group, supervisor
from octavo.fleet.data_parallel import DataParallelClient
from octavo.fleet.elastic_group import ElasticGroup
from octavo.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.plan.memory import MemoryItem
from tests.fleet.test_data_parallel import Engines, brought
from tests.fleet.test_supervisor import KILLED, READY
from tests.fleet.test_supervisor import Client as OneClient


class Client(OneClient):
    def __init__(self, process):
        super().__init__(process)
        self.is_loaded = False
        """True if it has been told to report that it is ready."""
        self.numbers = {}
        """Last token of each request."""

    def load(self):
        if not (self.is_loaded or self.ready.done()):
            self.is_loaded = True
            self.said.put_nowait(READY)

    def latest(self):
        """Return the requests that were not aborted."""
        aborted = {sent[1] for sent in self.sent if isinstance(sent, tuple)}
        found = {r.request_id: r for r in self.sent if not isinstance(r, tuple)}
        return [request for i, request in found.items() if i not in aborted]


class Groups(Engines):
    """Client of a group, and the records of a front end."""

    def __init__(self, size):
        super().__init__(size)
        self.launched.clear()
        Client.made.clear()
        self.made, self.failure = [], None
        self.client = ElasticGroup(self.make, size, lambda: list(self.records.values()))

    def make(self, size, plan=None, reserved=0):
        if self.failure is not None:
            raise self.failure
        self.made.append((size, plan, reserved))
        settings = {"enable_expert_parallel": True, "enable_elastic_ep": True}
        return DataParallelClient(
            self,
            lambda: list(self.records.values()),
            config=EngineConfig.from_kwargs(**settings).resized(size),
            max_restarts=100,
            progress_timeout=60.0,
            on_recovery=self.recoveries.append,
        )

    async def rest(self):
        for _ in range(60):
            await asyncio.sleep(0)

    async def become(self, size):
        """Scale to a size."""
        scaling = await self.scale(size)
        await self.start(size)
        await scaling
        await self.rest()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(supervisor, "AsyncMPClient", Client)
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 0.001)


def run(test, size=2):
    async def main():
        groups = Groups(size)
        reading = asyncio.ensure_future(groups.read())
        try:
            await groups.start(size)
            await test(groups)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await groups.client.shutdown()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_the_new_group_continues_all_requests_once_it_is_loaded():
    async def test(groups):
        client, old = groups.client, Client.made[:]
        await groups.add("a", "b", "c")
        await groups.say(0, brought(a=1))
        scaling = await groups.scale(3)
        assert client.scaling
        with pytest.raises(ScalingBusyError):
            await client.scale(1)
        assert groups.launched[2:] == [(0, None)]
        old[1].said.put_nowait(brought(b=2))  # the old group serves
        await groups.add("d")
        await groups.start(3)
        await scaling
        await groups.rest()
        assert not client.scaling
        assert all(process.closed for process in old)
        assert [groups.made[1][i] for i in (0, 1)] == [3, READY.plan]
        assert client.pids == [3, 4, 5]
        moved = {r.request_id: r.output_token_ids for i in range(3) for r in groups.process(i).sent}
        assert moved == {"a": [1], "b": [2], "c": [], "d": []}
        for index in range(3):
            tokens = dict.fromkeys(groups.ids(index), 7)
            await groups.say(index, brought(**tokens))
        assert [r.output_token_ids for r in groups.records.values()] == [[1, 7], [2, 7], [7], [7]]
        await groups.become(1)
        assert groups.ids(0) == ["a", "b", "c", "d"]
        assert client.down == {}

    run(test)


@pytest.mark.parametrize("ends", [False, True])
def test_the_old_group_speaks_at_the_moment_of_the_change(ends):
    """Its outputs are processed, or the new group makes them again."""

    async def test(groups, pause):
        old = Client.made[:]
        await groups.add("a")
        kept = groups.records["a"]
        scaling = await groups.scale(1)
        groups.process(0).said.put_nowait(READY)
        for _ in range(pause):
            await asyncio.sleep(0)
        end = FinishReason.STOP if ends else None
        output = EngineCoreOutput("a", [0], finish_reason=end)
        if not old[0].closed:
            old[0].said.put_nowait(EngineCoreOutputs([output]))
        await scaling
        if kept.output_token_ids:
            seen.add("processed")
        else:
            seen.add("made again")
            await groups.say(0, EngineCoreOutputs([output]))
        assert kept.output_token_ids == [0]
        assert ("a" in groups.ends) == ends

    seen = set()
    for pause in range(30):
        run(lambda groups, pause=pause: test(groups, pause))
    assert seen == {"processed", "made again"}


def test_statistics_begin_again():
    async def test(groups):
        await groups.become(3)
        zero = [o.engine_index for o in groups.outputs if o.stats == SchedulerStats()]
        assert zero == [0, 1]  # the third one has no older statistics
        groups.outputs.clear()
        await groups.become(1)
        assert [o.engine_index for o in groups.outputs] == [0]

    run(test)


@hypothesis.settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(st.sampled_from(["step", "step", "ready", "scale", "die"]), st.integers(0, 3)),
        max_size=40,
    ),
)
def test_every_request_gets_each_token_once(count, events):
    """The number of engines changes at random moments, and engines die."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(supervisor, "AsyncMPClient", Client)
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 0.0)
    length = 5

    def speak(groups, process):
        """Bring the next token of all requests of a process, which it may not have any more."""
        outputs = []
        for request in process.latest():
            process.numbers[request.request_id] = token = 1 + process.numbers.get(
                request.request_id, len(request.output_token_ids) - 1
            )
            if token < length:
                end = FinishReason.LENGTH if token == length - 1 else None
                outputs.append(EngineCoreOutput(request.request_id, [token], finish_reason=end))
        process.said.put_nowait(EngineCoreOutputs(outputs))

    async def test(groups):
        names = [f"r{i}" for i in range(count)]
        await groups.add(*names)
        kept, scaling, killed = dict(groups.records), None, 0

        def live():
            return [process for process in Client.made if not process.closed]

        for event, number in [*events, *[("ready", i) for i in range(4)] * 3]:
            there = live()
            process = there[number % len(there)]
            if event == "step" and process.ready.done():
                speak(groups, process)
            elif event == "ready":
                process.load()
            elif event == "scale" and (scaling is None or scaling.done()):
                scaling = asyncio.ensure_future(groups.client.scale(1 + number))
            elif event == "die" and process.ready.done() and not killed:
                killed += 1  # once: after two deaths in a row a request could be the cause
                process.said.put_nowait(EngineDeadError(KILLED))
            if number % 2:
                await groups.rest()
        for _ in range(40):
            if not groups.records and (scaling is None or scaling.done()):
                break
            for process in live():
                process.load()
                if process.ready.done():
                    speak(groups, process)
            await groups.rest()
            await asyncio.sleep(0.0005)
        assert groups.error is None
        if scaling is not None:
            await scaling
        assert all(kept[name].output_token_ids == [*range(length)] for name in names)
        assert set(groups.ends) == set(names)

    try:
        run(test)
    finally:
        monkeypatch.undo()


def test_a_request_that_ends_while_others_are_moved(monkeypatch):
    async def test(groups):
        await groups.add("a", "b", "c")
        add = Client.add_request

        async def add_and_abort(self, request):
            await add(self, request)
            if request.request_id == "a":
                del groups.records["c"]
                await groups.client.abort_requests(["c"])

        monkeypatch.setattr(Client, "add_request", add_and_abort)
        await groups.become(1)
        assert groups.ids(0) == ["a", "b"]

    run(test)


def test_calls_of_the_old_group_fail():
    async def test(groups):
        for process in Client.made:
            process.answers = False
        call = asyncio.ensure_future(groups.client.call_utility("is_sleeping"))
        await groups.become(1)
        with pytest.raises(StepFailedError, match="replaced"):
            await call

    run(test)


def test_suspects_stay_suspects():
    async def test(groups):
        await groups.add("a")
        old = groups.client._group._supervisors[groups.client.engine_of("a")]
        old._suspects["a"] = supervisor._Suspect({"a"}, deaths=2)
        await groups.become(1)
        assert groups.client._group.deaths_of("a") == 2

    run(test)


@pytest.mark.parametrize("how", ["settings", "memory", "time", "end"])
def test_a_group_that_cannot_be_started_changes_nothing(how, monkeypatch):
    async def test(groups):
        old, reason = Client.made[:], {"settings": "no such size", "memory": "no memory"}.get(how)
        await groups.add("a")
        if how == "settings":
            groups.failure = ConfigError("no such size.")
        if how == "time":
            monkeypatch.setattr(elastic_group, "_START_SECONDS", 0.01)
            reason = "the model was not loaded within 0 s"
        scaling = await groups.scale(3)
        if how == "memory":
            await groups.say(0, READY)
            await groups.say(2, EngineDeadError("no memory"))
        if how == "end":
            reason = "the server ends"
            groups.client.fail_calls(EngineDeadError("the server ends"))
        with pytest.raises(ScalingError, match=f"3 engines could not be started: {reason}."):
            await scaling
        assert not groups.client.scaling
        assert all(process.closed for process in Client.made[2:])
        assert not any(process.closed for process in old)
        assert groups.client.pids == [1, 2]
        index = groups.client.engine_of("a")
        old[index].said.put_nowait(brought(a=1))
        await groups.rest()
        assert groups.records["a"].output_token_ids == [1]

    run(test)


def test_an_engine_of_the_new_group_that_dies_once_it_is_loaded_is_replaced():
    async def test(groups):
        await groups.add("a")
        scaling = await groups.scale(3)
        await groups.say(0, READY)
        await groups.say(1, READY)
        await groups.die(1)
        await groups.say(1, READY)
        assert not scaling.done()
        await groups.say(2, READY)
        await scaling
        assert groups.client.up
        assert groups.records.keys() == {"a"}
        assert [r.engine_index for r in groups.recoveries] == [1]

    run(test)


def test_engines_that_die_at_last_end_the_change():
    async def test(groups):
        scaling = await groups.scale(1)
        groups.client._group._supervisors[0]._max_restarts = 0
        Client.made[0].said.put_nowait(EngineDeadError(KILLED))
        with pytest.raises(ScalingError, match="killed"):
            await scaling
        assert str(groups.error).startswith(KILLED)

    run(test)


def test_the_same_number_changes_nothing():
    async def test(groups):
        await groups.client.scale(2)
        assert len(groups.made) == 1

    run(test)


def test_memory_that_the_old_engines_have_not_used_yet_is_theirs(monkeypatch):
    monkeypatch.setattr(elastic_group, "resident_memory", lambda pid: 2**20)

    async def test(groups):
        plan = dataclasses.replace(READY.plan, items=(MemoryItem("weights", 2**30),))
        await groups.say(0, CoreReady(plan))
        await groups.say(1, CoreReady(plan))
        await groups.rest()
        scaling = await groups.scale(1)
        assert groups.made[1] == (1, plan, 2 * (2**30 - 2**20))
        await groups.start(1)
        await scaling

    async def main():
        groups = Groups(2)
        reading = asyncio.ensure_future(groups.read())
        try:
            await test(groups)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await groups.client.shutdown()

    asyncio.run(asyncio.wait_for(main(), 120))
