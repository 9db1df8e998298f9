"""Engines that die, and their requests; the processes are stand-ins."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.core_messages import CoreReady
from octavo.errors import EngineDeadError, EngineStoppedError, StepFailedError
from octavo.fleet import supervisor
from octavo.fleet.supervisor import Supervisor
from octavo.messages import (
    CoreSamplingParams,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from octavo.observability.scheduler_stats import SchedulerStats
from tests.params import core_request
from tests.plan.plans import make_plan

READY = CoreReady(make_plan(2048, 100, warm_spare=True))
KILLED = "the engine process was killed by SIGKILL (out of memory?)"


class Process:
    """Stand-in for an engine process."""

    def __init__(self, number):
        self.pid, self.reason, self.naps = number, None, []
        self.is_victim = False

    def kill(self, reason, *, is_victim=False):
        self.reason, self.is_victim = reason, is_victim

    def kill_if_stopped(self, nap, limit):
        self.naps.append((nap, limit))

    def shutdown(self):
        pass


class Client:
    """Requests to one process, and answers that the test sends for it."""

    made: list

    def __init__(self, process):
        self.process, self.closed = process, False
        self.ready = asyncio.get_running_loop().create_future()
        self.said = asyncio.Queue()
        self.sent, self.calls = [], []
        self.stats = SchedulerStats()
        self.answers = True
        self.made.append(self)

    async def get_output(self):
        while True:
            said = await self.said.get()
            if isinstance(said, CoreReady):
                self.ready.set_result(said)
            elif isinstance(said, Exception):
                raise said
            else:
                return said

    def get_output_nowait(self):
        is_there = not self.said.empty() and isinstance(self.said._queue[0], EngineCoreOutputs)
        return self.said.get_nowait() if is_there else None

    def close(self):
        self.closed = True

    async def add_request(self, request):
        assert not self.closed
        self.sent.append(request)

    async def abort_requests(self, request_ids):
        assert not self.closed
        self.sent += [("abort", i) for i in request_ids]

    async def call_utility(self, method, *args):
        call = asyncio.get_running_loop().create_future()
        self.calls.append(call)
        if self.answers:
            call.set_result(list(msgspec.structs.astuple(self.stats)))
        return await call

    def fail_calls(self, error):
        for call in [self.ready, *self.calls]:
            if not call.done():
                call.set_exception(error)
                call.exception()

    async def shutdown(self, timeout=5.0):
        self.closed = True

    @property
    def ids(self):
        return [r.request_id for r in self.sent if isinstance(r, EngineCoreRequest)]


class Engine:
    """Supervisor, the records of a front end, and the events of both."""

    def __init__(self, **settings):
        self.records: dict[str, EngineCoreRequest] = {}
        self.launched, self.spares, self.recoveries, self.ends = [], 0, [], {}
        self.refused = 0
        Client.made = []
        self.supervisor = Supervisor(
            self,
            lambda: list(self.records.values()),
            **{"max_restarts": 100, "progress_timeout": 60.0, **settings},
            on_recovery=self.recoveries.append,
        )

    def launch(self, ready, engine_index):
        self.launched.append(ready)
        if self.refused and ready is not None:
            self.refused -= 1
            raise OSError(12, "no room")
        return Process(len(self.launched))

    def make_spare(self):
        self.spares += 1

    def shutdown(self):
        self.spares = None

    @property
    def client(self):
        return Client.made[-1]

    async def add(self, *ids):
        for request_id in ids:
            request = core_request(request_id, [1, 2], CoreSamplingParams())
            self.records[request_id] = request
            await self.supervisor.add_request(request)

    async def say(self, *what):
        """Send outputs of the engine and let the front end process them."""
        for said in what:
            self.client.said.put_nowait(said)
        for _ in range(20):
            await asyncio.sleep(0)

    async def die(self, reason=KILLED, kind=EngineDeadError):
        before = len(Client.made)
        await self.say(kind(reason))
        while len(Client.made) == before:
            await asyncio.sleep(0.001)

    async def read(self):
        """Read outputs as a front end does."""
        while True:
            outputs = self.supervisor.get_output_nowait() or await self.supervisor.get_output()
            for output in outputs.outputs:
                record = self.records.get(output.request_id)
                if record is None:
                    continue
                record.output_token_ids = record.output_token_ids + output.new_token_ids
                if output.finish_reason is not None:
                    self.ends[output.request_id] = output
                    del self.records[output.request_id]

    def brought(self, **tokens):
        return EngineCoreOutputs([EngineCoreOutput(i, [t]) for i, t in tokens.items()])


class Records(dict):
    """Records that note missing answers."""

    def __init__(self, records, asked):
        super().__init__(records)
        self.asked = asked

    def get(self, answer):
        if answer not in self:
            self.asked.append(answer)
        return super().get(answer)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(supervisor, "AsyncMPClient", Client)
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 0.001)
    monkeypatch.setattr(supervisor, "_START_SECONDS", 0.0)


@pytest.fixture
def gate(monkeypatch):
    """Return an event; while it is not set, no engine is started after two deaths in a row."""
    found, sleep = asyncio.Event(), asyncio.sleep
    found.set()
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 7.0)

    async def wait(seconds):
        await (found.wait() if seconds >= 7 else sleep(seconds))

    monkeypatch.setattr(asyncio, "sleep", wait)
    return found


def run(test, ready=True, **how):
    async def main():
        engine = Engine(**how)
        reading = asyncio.ensure_future(engine.read())
        try:
            if ready:
                await engine.say(READY)
            await test(engine)
        finally:
            reading.cancel()
            await engine.supervisor.shutdown()
            await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_requests_go_on_with_what_they_have():
    async def test(engine):
        await engine.add("a", "b", "c")
        assert engine.client.ids == ["a", "b", "c"]
        await engine.say(engine.brought(a=7, b=8), engine.brought(a=9))
        await engine.say(
            EngineCoreOutputs([EngineCoreOutput("b", [5], finish_reason=FinishReason.STOP)])
        )
        await engine.die()
        assert Client.made[0].closed
        assert [(r.request_id, r.output_token_ids) for r in engine.client.sent] == [
            ("a", [7, 9]),
            ("c", []),
        ]
        assert engine.launched == [None, READY]
        assert not engine.supervisor.up
        assert engine.recoveries == []
        await engine.say(READY)
        assert engine.supervisor.up
        (recovery,) = engine.recoveries
        assert (recovery.reason, recovery.num_requests) == (KILLED, 2)
        assert 0 < recovery.seconds < 30
        assert engine.spares == 2
        await engine.say(engine.brought(a=1, c=2))
        assert engine.records["a"].output_token_ids == [7, 9, 1]

    run(test)


def test_what_comes_while_there_is_no_engine_waits(gate):
    async def test(engine):
        await engine.die()  # the second time it waits
        gate.clear()
        await engine.say(EngineDeadError(KILLED))
        assert Client.made[1].closed
        await engine.add("a", "b")
        await engine.supervisor.abort_requests(["b"])
        del engine.records["b"]
        call = asyncio.ensure_future(engine.supervisor.call_utility("stats"))
        gate.set()
        while len(Client.made) < 3:
            await asyncio.sleep(0.001)
        await engine.add("c")
        assert engine.client.ids == ["a", "c"]
        assert not call.done()
        await engine.say(READY)
        assert await call is not None

    run(test)


def test_a_call_that_the_engine_did_not_answer():
    async def test(engine):
        engine.client.answers = False
        call = asyncio.ensure_future(engine.supervisor.call_utility("reset_prefix_cache"))
        await asyncio.sleep(0)
        await engine.die()
        with pytest.raises(StepFailedError, match="started again before it answered"):
            await call

    run(test)


def test_a_model_that_cannot_be_loaded_is_not_tried_again():
    async def test(engine):
        reading = asyncio.ensure_future(engine.supervisor.get_output())
        engine.client.said.put_nowait(EngineDeadError("no memory"))
        with pytest.raises(EngineDeadError, match="no memory"):
            await reading
        assert len(Client.made) == 1

    async def main():
        engine = Engine()
        await test(engine)
        await engine.supervisor.shutdown()

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_an_engine_that_dies_too_often(restarts):
    async def main():
        engine = Engine(max_restarts=restarts)
        reading = asyncio.ensure_future(engine.read())
        await engine.say(READY)
        for i in range(restarts):
            await engine.die()
            await engine.say(READY)
            await engine.add(f"a{i}")
            await engine.say(engine.brought(**{f"a{i}": 1}))
        engine.client.said.put_nowait(EngineDeadError(KILLED))
        with pytest.raises(EngineDeadError) as caught:
            await reading
        assert str(caught.value).startswith(KILLED)
        assert (f"death {restarts + 1} within ten minutes" in str(caught.value)) == (restarts > 0)
        assert len(Client.made) == restarts + 1
        engine.supervisor.fail_calls(caught.value)
        assert not engine.supervisor.up
        with pytest.raises(EngineDeadError):
            await engine.supervisor.call_utility("stats")
        await engine.supervisor.shutdown()
        assert engine.spares is None

    asyncio.run(asyncio.wait_for(main(), 120))


def test_deaths_long_ago_do_not_count(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def test(engine):
        for _ in range(5):
            await engine.die()
            await engine.say(READY)
            now[0] += 601.0

    run(test, max_restarts=1)


def test_a_request_that_kills_alone_is_given_up():
    async def test(engine):
        await engine.add("a")
        await engine.die()
        await engine.say(READY)
        assert engine.client.ids == ["a"]
        await engine.die()
        await engine.say()
        assert engine.client.ids == []
        end = engine.ends["a"]
        assert (end.finish_reason, end.error_kind) == (FinishReason.ERROR, "GivenUpError")
        assert KILLED in end.error
        await engine.say(READY)
        await engine.add("b")
        assert engine.client.ids == ["b"]

    run(test)


def test_that_a_signal_held_the_engine_tells_nothing_of_requests():
    async def test(engine):
        await engine.add("a", "b")
        await engine.die()
        await engine.say(READY)
        for _ in range(4):
            await engine.die("it was stopped", EngineStoppedError)
            await engine.say(READY)
            assert engine.client.ids == ["a", "b"]
        await engine.die()
        for _ in range(4):
            await engine.say(READY)
            assert engine.client.ids == ["a"]
            await engine.die("it was stopped", EngineStoppedError)
        assert engine.supervisor.deaths_of("a") == 2
        assert engine.ends == {}

    run(test)


def test_tokens_between_deaths_clear_a_request():
    async def test(engine):
        await engine.add("a")
        for _ in range(6):
            await engine.die()
            await engine.say(READY, *(engine.brought(a=token) for token in range(3)))
        assert engine.ends == {}
        assert engine.records["a"].output_token_ids == [0, 1, 2] * 6

    run(test)


def test_who_brought_something_is_followed_without_a_pause(caplog):
    """Others that were in flight have received nothing, and may be the cause."""

    async def test(engine):
        for request_id in "ab":
            await engine.add(request_id)
        await engine.die()
        await engine.say(READY, engine.brought(a=1))
        await engine.die()
        assert "before it produced output" not in caplog.text
        await engine.die()
        assert "before it produced output" in caplog.text

    run(test)


def test_a_request_that_kills_with_a_certain_token():
    """The request receives one more token each time, as do the others."""

    async def test(engine):
        await engine.add("a", "b", "c", "d")
        deaths = 0
        while "c" in engine.records:
            ids = [i for i in engine.client.ids if i in engine.records]
            await engine.say(engine.brought(**dict.fromkeys(ids, 5)))
            if "c" in ids:
                deaths += 1
                await engine.die()
                await engine.say(READY)
        assert deaths == 5  # the maximum of a server
        assert set(engine.records) == {"a", "b", "d"}
        await engine.say(*[engine.brought(d=5)] * 3)
        assert sorted(engine.client.ids) == ["a", "b", "d"]

    run(test)


def test_answers_to_one_prompt_are_tried_together():
    async def test(engine):
        request = core_request("a", [1, 2], CoreSamplingParams(), n=3)
        engine.records["a"] = request
        await engine.supervisor.add_request(request)
        await engine.add("b")
        for _ in range(2):
            await engine.die()
            await engine.say(READY)
        assert engine.client.ids == ["a"]
        await engine.say(engine.brought(**{f"{i}_a": 5 for i in range(3)}))
        assert engine.client.ids == ["a"]  # it was only one step
        end = EngineCoreOutput("1_a", [], finish_reason=FinishReason.STOP)
        await engine.say(EngineCoreOutputs([end]))
        await engine.supervisor.abort_requests(["2_a"])
        assert engine.client.ids == ["a"]
        await engine.say(engine.brought(**{"0_a": 5}))
        assert engine.client.ids == ["a", "b"]

    run(test)


def test_of_one_that_is_given_up_the_first_answer_is_named():
    async def test(engine):
        answers = {2: [5], 3: []}
        engine.records["a"] = core_request("a", [1], CoreSamplingParams(), n=4, answers=answers)
        seen = []
        engine.records = Records(engine.records, seen)
        for _ in range(2):
            await engine.die()
            await engine.say(READY)
        await engine.say()
        assert seen == ["2_a"]

    run(test)


def test_who_comes_between_two_engines_was_not_in_flight(gate):
    async def test(engine):
        await engine.add("a")
        await engine.die()
        await engine.say(READY)
        gate.clear()
        await engine.say(EngineDeadError(KILLED))
        await engine.add("b")  # the next engine is not ready yet
        gate.set()
        while "a" in engine.records:
            await asyncio.sleep(0.005)
        assert engine.client.ids == ["b"]

    run(test)


def test_who_was_cleared_goes_on_beside_the_next_trial():
    async def test(engine):
        await engine.add("a", "b", "c")
        for _ in range(2):
            await engine.die()
            await engine.say(READY)
        await engine.say(*[engine.brought(a=1)] * 3)
        assert engine.client.ids == ["a", "b"]
        await engine.die()
        await engine.say(READY)
        assert engine.client.ids == ["b"]  # this time alone
        await engine.say(*[engine.brought(b=1)] * 3)
        assert engine.client.ids == ["b", "c"]
        await engine.say(*[engine.brought(c=1)] * 3)
        assert engine.client.ids == ["b", "c", "a"]
        assert engine.ends == {}

    run(test)


def test_who_leaves_a_trial_that_has_no_engine(gate):
    async def test(engine):
        await engine.add("a", "b")
        for _ in range(2):
            await engine.die()
            await engine.say(READY)
        gate.clear()
        await engine.say(EngineDeadError(KILLED))
        assert engine.client.closed
        del engine.records["a"]
        await engine.supervisor.abort_requests(["a"])
        gate.set()
        while engine.client.closed:
            await asyncio.sleep(0.005)
        assert engine.client.ids == ["b"]

    run(test)


def test_a_process_that_cannot_be_started_is_tried_again():
    async def test(engine):
        await engine.add("a")
        engine.refused = 2
        await engine.die()
        await engine.say(READY)
        assert engine.client.ids == ["a"]
        assert len(engine.launched) == 4
        assert engine.ends == {}
        (recovery,) = engine.recoveries
        assert recovery.reason == KILLED

    run(test)


def test_processes_that_can_never_be_started():
    async def main():
        engine = Engine(max_restarts=2)
        reading = asyncio.ensure_future(engine.read())
        await engine.say(READY)
        engine.refused = 10
        engine.client.said.put_nowait(EngineDeadError(KILLED))
        with pytest.raises(EngineDeadError, match="no process can be started: no room; that was"):
            await reading
        await engine.supervisor.shutdown()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_recovery_lasts_from_the_first_death(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def test(engine):
        await engine.die("the first")
        now[0] += 5
        await engine.die("the second, while the model was loaded")
        now[0] += 2
        await engine.say(READY)
        (recovery,) = engine.recoveries
        assert (recovery.seconds, recovery.reason) == (7.0, "the first")

    run(test)


def test_shutdown_while_an_engine_is_replaced(gate):
    async def test(engine):
        await engine.die()
        gate.clear()
        await engine.say(EngineDeadError(KILLED))
        made = len(Client.made)
        await engine.supervisor.shutdown()
        gate.set()
        await engine.say()
        assert len(Client.made) == made  # no other engine would be ended

    run(test)


def test_a_model_that_is_not_loaded_again():
    async def test(engine):
        engine.supervisor._load_seconds = 0.01
        await engine.die()
        process = engine.client.process
        while process.reason is None:
            await asyncio.sleep(0.005)
        assert process.reason.startswith("the model was not loaded after 0.1")
        assert len(process.naps) >= 4
        assert len(set(process.naps)) == 1
        nap, limit = process.naps[0]
        assert limit == pytest.approx(2 * nap)

    run(test, progress_timeout=0.1)


def test_a_spare_that_died_is_replaced(monkeypatch):
    monkeypatch.setattr(supervisor, "_SPARE_INTERVAL", 0.02)

    async def test(engine):
        while engine.spares < 3:
            await asyncio.sleep(0.005)

    run(test, progress_timeout=0.04)


def test_the_first_model_may_take_its_time():
    async def test(engine):
        await asyncio.sleep(0.2)
        assert engine.client.process.reason is None

    run(test, ready=False, progress_timeout=0.05)


def test_a_death_while_loading_is_nobodys_fault():
    async def test(engine):
        await engine.add("a")
        for _ in range(4):
            await engine.die()
        await engine.say(READY, engine.brought(a=3))
        assert engine.ends == {}

    run(test)


def test_a_victim_is_started_again_even_while_it_loads_for_the_first_time():
    async def test(engine):
        await engine.add("a")
        engine.supervisor._first = READY  # as of the first one of several engines
        victim = engine.client.process
        engine.supervisor.restart("it is a victim")
        assert (victim.reason, victim.is_victim) == ("it is a victim", True)
        await engine.die("it is a victim", EngineStoppedError)
        assert not engine.supervisor.ready.done()
        await engine.say(READY, engine.brought(a=3))
        assert engine.client.ids == ["a"]
        assert engine.supervisor.deaths_of("a") == 0

    run(test, ready=False)


def test_who_leaves_during_its_trial():
    async def test(engine):
        await engine.add("a", "b", "c")
        for _ in range(2):
            await engine.die()
            await engine.say(READY)
        assert engine.client.ids == ["a"]
        del engine.records["a"], engine.records["b"]
        await engine.supervisor.abort_requests(["b"])
        assert engine.client.ids == ["a"]
        await engine.supervisor.abort_requests(["a"])
        assert engine.client.ids == ["a", "c"]
        await engine.add("d")
        assert engine.client.ids == ["a", "c"]
        await engine.say(*[engine.brought(c=1)] * 2)
        assert engine.client.ids == ["a", "c"]
        await engine.say(engine.brought(c=1))
        assert engine.client.ids == ["a", "c", "d"]

    run(test)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8),
    st.sets(st.integers(0, 7), max_size=2),
    st.sets(st.integers(0, 7)),
    st.integers(0, 2),
)
def test_only_the_cause_is_given_up(count, poison, late, waiting):
    """Engines that die of some requests: these end with an error, all others are answered."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(supervisor, "AsyncMPClient", Client)
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 0.0)
    names = [f"r{i}" for i in range(count)]
    bad = {f"r{i}" for i in poison if i < count}

    async def test(engine):
        early = [n for i, n in enumerate(names) if i not in late]
        await engine.add(*early)
        deaths, served = 0, set()
        for _ in range(200):
            if deaths == waiting:
                await engine.add(
                    *(
                        n
                        for n in names
                        if n not in early
                        and n not in engine.records
                        and n not in served
                        and n not in engine.ends
                    )
                )
                early = names
            ids = [i for i in engine.client.ids if i in engine.records]
            if bad & set(ids):
                deaths += 1
                await engine.die()
                await engine.say(READY)
                continue
            if not ids and not engine.records and early is names:
                break
            if not ids:
                deaths = max(deaths, waiting)
            end = FinishReason.LENGTH
            await engine.say(
                EngineCoreOutputs([EngineCoreOutput(i, [1], finish_reason=end) for i in ids])
            )
            served |= set(ids)
        assert engine.records == {}
        assert {i for i, e in engine.ends.items() if e.error} == bad
        assert set(engine.ends) == set(names)
        assert deaths <= 4 * max(1, len(bad)) + waiting

    try:
        run(test)
    finally:
        monkeypatch.undo()


def test_a_process_that_does_not_answer_is_killed():
    async def test(engine):
        engine.client.answers = False
        while engine.client.process.reason is None:
            await asyncio.sleep(0.005)
        assert engine.client.process.reason.startswith("the engine has not answered for")

    run(test, progress_timeout=0.1)


@pytest.mark.parametrize("state", [{"num_running_reqs": 1}, {"num_waiting_reqs": 2}])
def test_requests_for_which_no_step_is_made(state):
    async def test(engine):
        engine.client.stats = SchedulerStats(**state, num_scheduled_tokens=5)
        while engine.client.process.reason is None:
            await asyncio.sleep(0.005)
        assert "although requests are waiting" in engine.client.process.reason

    run(test, progress_timeout=0.1)


@pytest.mark.parametrize(
    "state", [{}, {"num_waiting_reqs": 2, "num_held_reqs": 2}, {"num_running_reqs": 1}]
)
def test_an_engine_at_work_or_idle_is_left_alone(state):
    async def test(engine):
        for i in range(40):
            running = state.get("num_running_reqs", 0)
            engine.client.stats = SchedulerStats(**state, num_scheduled_tokens=i * running)
            await asyncio.sleep(0.01)
        assert engine.client.process.reason is None
        assert len(engine.client.calls) > 2

    run(test, progress_timeout=0.1)


def test_an_engine_that_wakes_up_is_given_time():
    async def test(engine):
        engine.client.answers = False
        call = asyncio.ensure_future(engine.supervisor.call_utility("wake_up", None))
        await asyncio.sleep(0.4)
        assert engine.client.process.reason is None
        call.cancel()
        while engine.client.process.reason is None:
            await asyncio.sleep(0.005)

    run(test, progress_timeout=0.1)
