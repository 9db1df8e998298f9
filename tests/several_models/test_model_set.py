"""Models are loaded in turns, and every request gets an answer or a typed error."""

import asyncio
import contextlib
import random
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.errors import OctavoError
from octavo.server.errors import UnavailableError
from octavo.several_models import model_set
from octavo.several_models.model_set import Model, ModelFailedError, ModelSet


class FakeBackend:
    """Model whose loads and unloads take some turns of the event loop.

    Args:
        world: all backends of a set.
        turns: turns of each load and unload.
        failures: for each load, True if it fails; later loads succeed.
    """

    def __init__(self, world, turns=1, failures=()):
        self.world, self.turns, self.failures = world, turns, list(failures)
        self.held = False
        self.loads = self.unloads = 0
        self.gate = None
        self.model = None
        world.append(self)

    async def load(self):
        assert not self.held
        self.held = True
        self.loads += 1
        try:
            for _ in range(self.turns):
                await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
            if self.failures and self.failures.pop(0):
                raise OctavoError("broken")
        except BaseException:
            self.held = False
            raise

    async def unload(self):
        assert not self.model.num_users, "a busy model was unloaded"
        self.unloads += 1
        for _ in range(self.turns):
            await asyncio.sleep(0)
        self.held = False


def make(count, most, timeout=20.0, **options):
    world = []
    models = []
    for number in range(count):
        backend = FakeBackend(world, **options)
        backend.model = Model([f"m{number}"], backend)
        models.append(backend.model)
    return ModelSet(models, most, timeout), models


async def settle(turns=50):
    for _ in range(turns):
        await asyncio.sleep(0)


def check(models, most):
    held = [m for m in models if m.backend.held]
    assert len(held) <= most, [m.names for m in held]


@contextlib.asynccontextmanager
async def started(models):
    models.start()
    await settle()
    yield models
    await models.close()
    assert not any(m.backend.held for m in models.models)


def run(coroutine):
    asyncio.run(asyncio.wait_for(coroutine, 60))


def test_the_first_models_are_loaded_at_the_start():
    async def main():
        models, (a, b, c) = make(3, 2)
        async with started(models):
            assert [m.state for m in (a, b, c)] == ["loaded", "loaded", "unloaded"]

    run(main())


def test_the_least_recently_used_idle_model_leaves():
    async def main():
        models, (a, b, c) = make(3, 2)
        async with started(models):
            async with models.use(b):
                pass
            async with models.use(a):
                pass
            async with models.use(c):
                assert [m.state for m in (a, b, c)] == ["loaded", "unloaded", "loaded"]
            async with models.use(b):
                assert [m.state for m in (a, b, c)] == ["unloaded", "loaded", "loaded"]

    run(main())


def test_a_busy_model_stays_though_it_is_the_least_recently_used():
    async def main():
        models, (a, b, c) = make(3, 2)
        async with started(models), models.use(a):
            async with models.use(b):
                pass
            async with models.use(c):
                assert [m.state for m in (a, b, c)] == ["loaded", "unloaded", "loaded"]
            assert a.num_users == 1

    run(main())


def test_requests_for_a_closed_model_wait_and_are_served_in_its_next_turn():
    async def main():
        models, (a, b) = make(2, 1)
        order = []

        async def ask(model, name):
            async with models.use(model):
                order.append(name)
                await asyncio.sleep(0)

        async with started(models):
            running = asyncio.Event()

            async def long():
                async with models.use(a):
                    order.append("long")
                    await running.wait()

            tasks = [asyncio.create_task(long())]
            await settle()
            tasks += [asyncio.create_task(ask(b, f"b{i}")) for i in range(3)]
            await settle()
            assert a.closed
            tasks += [asyncio.create_task(ask(a, f"a{i}")) for i in range(3)]
            await settle()
            assert order == ["long"]
            assert (a.num_waiting, b.num_waiting) == (3, 3)
            running.set()
            await asyncio.gather(*tasks)
            assert order == ["long", "b0", "b1", "b2", "a0", "a1", "a2"]
            assert (a.backend.loads, b.backend.loads) == (2, 1)

    run(main())


def test_a_closed_model_opens_again_if_nobody_waits_for_another():
    async def main():
        models, (a, b) = make(2, 1)
        async with started(models):
            async with models.use(a):
                waiting = asyncio.create_task(models._enter(b))
                await settle()
                other = asyncio.create_task(models._enter(a))
                await settle()
                assert a.closed
                assert not other.done()
                waiting.cancel()
                await settle()
                assert not a.closed
                assert other.done()
                models._leave(a, None)
            assert a.state == "loaded"

    run(main())


def test_a_thousand_requests_that_flap_between_two_models_need_few_loads():
    async def main():
        models, pair = make(2, 1, turns=3)
        async with started(models):

            async def ask(model):
                async with models.use(model):
                    check(pair, 1)
                    await asyncio.sleep(0)

            await asyncio.gather(*(ask(pair[i % 2]) for i in range(1000)))
            assert sum(m.backend.loads for m in pair) <= 4

    run(main())


def test_a_steady_load_does_not_starve_another_model():
    async def main():
        models, (a, b) = make(2, 1)
        stop = False

        async def ask_always():
            while not stop:
                async with models.use(a):
                    await asyncio.sleep(0)

        async with started(models):
            tasks = [asyncio.create_task(ask_always()) for _ in range(5)]
            await settle()
            async with models.use(b):
                assert a.state == "unloaded"
            stop = True
            await asyncio.gather(*tasks)

    run(main())


def test_a_model_that_fails_harms_only_its_requests(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(model_set, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def main():
        models, (a, b) = make(2, 2)
        b.backend.failures = [True, True, False]
        async with started(models):
            assert (a.state, b.state) == ("loaded", "failed")
            with pytest.raises(ModelFailedError, match="'m1' could not be loaded: broken") as found:
                await models._enter(b)
            assert (found.value.status, found.value.code) == (503, "model_failed")
            assert found.value.retry_after == 5
            async with models.use(a):
                pass
            now[0] += 6
            with pytest.raises(ModelFailedError):  # it was tried again
                await models._enter(b)
            assert b.backend.loads == 2
            now[0] += 6
            with pytest.raises(ModelFailedError):  # the pause has doubled
                await models._enter(b)
            assert b.backend.loads == 2
            models.load(b)  # the operator does not have to wait
            await settle()
            assert (b.state, b.error) == ("loaded", None)

    run(main())


def test_an_unexpected_error_is_a_failure_too():
    async def main():
        models, (a,) = make(1, 1)

        async def load():
            raise ValueError("oh")

        a.backend.load = load
        models.start()
        with pytest.raises(ModelFailedError, match="Unexpected: ValueError"):
            await models._enter(a)
        await models.close()

    run(main())


def test_a_request_does_not_wait_for_ever():
    async def main():
        models, (a,) = make(1, 1, timeout=0.02)
        a.backend.gate = asyncio.Event()
        models.start()
        with pytest.raises(UnavailableError, match=r"was not loaded within 0\.02 s") as found:
            await models._enter(a)
        assert found.value.retry_after
        assert a.num_waiting == 0
        await models.close()
        assert not a.backend.held

    run(main())


def test_unloading_waits_for_running_requests_and_a_later_request_loads_again():
    async def main():
        models, (a,) = make(1, 1)
        async with started(models):
            async with models.use(a):
                models.unload(a)
                later = asyncio.create_task(models._enter(a))
                await settle()
                assert (a.state, a.closed, later.done()) == ("loaded", True, False)
            await later
            assert (a.backend.loads, a.backend.unloads) == (2, 1)
            models._leave(a, None)
            models.unload(a)
            await settle()
            assert a.state == "unloaded"

    run(main())


def test_unloading_ends_a_load_and_its_requests():
    async def main():
        models, (a,) = make(1, 1)
        a.backend.gate = asyncio.Event()
        models.start()
        waiting = asyncio.create_task(models._enter(a))
        await settle()
        models.unload(a)
        with pytest.raises(UnavailableError, match="was unloaded while it was loading"):
            await waiting
        await settle()
        assert (a.state, a.backend.held) == ("unloaded", False)
        await models.close()

    run(main())


def test_loading_by_the_operator_makes_room():
    async def main():
        models, (a, b) = make(2, 1)
        async with started(models):
            models.load(b)
            await settle()
            assert (a.state, b.state) == ("unloaded", "loaded")
            models.load(b)  # it is already
            await settle()
            assert b.backend.loads == 1

    run(main())


def test_keep_alive():
    async def main():
        models, (a, b) = make(2, 2)
        async with started(models):
            async with models.use(a, keep_alive=0):
                pass
            async with models.use(b, keep_alive=0.5):
                timer = b._timer
            assert timer is None
            timer = b._timer
            await settle()
            assert a.state == "unloaded"
            assert b.expires is not None
            async with models.use(b):  # the last request decides: it stays
                pass
            assert b.expires is None
            assert timer.cancelled()
            assert b.state == "loaded"
            async with models.use(b, keep_alive=0.02):
                pass
            while b.state != "unloaded":
                await asyncio.sleep(0.005)

    run(main())


def test_a_loaded_model_that_is_lost():
    async def main():
        models, (a, b) = make(2, 1)
        async with started(models):
            models.note_failure(a, OctavoError("no process"))
            assert a.state == "failed"
            a.backend.held = False
            async with models.use(b):
                pass
            models.note_failure(a, OctavoError("again"))  # it has failed already
            assert str(a.error) == "no process"

    run(main())


@given(
    count=st.integers(1, 4),
    most=st.integers(1, 4),
    turns=st.integers(0, 3),
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 60),
)
@example(count=2, most=2, turns=3, seed=2, num_requests=33)
@settings(max_examples=120, deadline=None)
def test_whatever_happens_the_laws_hold(count, most, turns, seed, num_requests):
    """Random requests, cancellations, failures, loads and unloads; at last all are answered."""
    most = min(most, count)
    chance = random.Random(seed)

    async def main():
        models, members = make(count, most, turns=turns)
        for member in members:
            member.backend.failures = [chance.random() < 0.1 for _ in range(100)]
            member._pause = 0.0
        models.start()
        outcomes = []

        async def ask():
            await settle(chance.randrange(40))
            model = chance.choice(members)
            keep_alive = chance.choice([None, None, None, 0])
            try:
                async with models.use(model, keep_alive):
                    check(members, most)
                    assert model.state == "loaded"
                    assert model.backend.held
                    await settle(chance.randrange(4))
                    assert model.backend.held
                outcomes.append("answer")
            except ModelFailedError:
                outcomes.append("failed")
            except UnavailableError:
                outcomes.append("unavailable")
            except asyncio.CancelledError:
                outcomes.append("cancelled")

        async def operate():
            for _ in range(5):
                await settle(chance.randrange(20))
                chance.choice([models.load, models.unload])(chance.choice(members))
                check(members, most)

        tasks = [asyncio.create_task(ask()) for _ in range(num_requests)]
        operator = asyncio.create_task(operate())
        for task in tasks:
            if chance.random() < 0.1:
                await settle(chance.randrange(10))
                task.cancel()
        for ended in await asyncio.gather(operator, *tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        not_started = [task for task in tasks if task.cancelled()]
        assert len(outcomes) + len(not_started) == num_requests
        assert all(m.num_users == 0 and m.num_waiting == 0 for m in members)
        await models.close()
        assert not any(m.backend.held for m in members)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_set, "_FIRST_PAUSE", 0.0)
        run(main())
