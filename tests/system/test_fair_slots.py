"""Places are given to tenants in turns, also if waiting tasks are cancelled."""

import asyncio

from octavo.system import fair_slots
from octavo.system.fair_slots import FairShares, FairSlots


def served(names, cancelled=(), count=1, of_one=None):
    """Return the order of service of tasks named by their tenants, and the largest number held."""

    async def main():
        slots, order, held, most = FairSlots(count, of_one), [], 0, 0
        go = asyncio.Event()

        async def work(name):
            nonlocal held, most
            async with slots.hold(name[0]):
                order.append(name)
                held += 1
                most = max(most, held)
                await go.wait()
                await asyncio.sleep(0)
                held -= 1

        tasks = {name: asyncio.create_task(work(name)) for name in names}
        await asyncio.sleep(0)
        for name in cancelled:
            tasks[name].cancel()
        go.set()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        async with asyncio.timeout(60), slots.hold("last"):  # no place is lost
            return order, most

    return asyncio.run(main())


def test_tenants_take_turns():
    assert served(["a1", "a2", "a3", "a4", "b1", "c1", "b2"]) == (
        ["a1", "b1", "c1", "a2", "b2", "a3", "a4"],
        1,
    )
    assert served(["a1", "a2", "a3", "b1"], count=2) == (["a1", "a2", "b1", "a3"], 2)


def test_none_is_a_tenant():
    async def main():
        slots, ended = FairSlots(1), []

        async def work(tenant):
            async with slots.hold(tenant):
                await asyncio.sleep(0)
                ended.append(tenant)

        async with asyncio.timeout(60):
            await asyncio.gather(*map(work, [None, None, "a", None]))
        assert ended == [None, "a", None, None]

    asyncio.run(main())


def test_a_tenant_leaves_places_to_others():
    order, most = served(["a1", "a2", "a3", "b1", "c1"], count=2, of_one=1)
    assert (order[:3], most) == (["a1", "b1", "c1"], 2)
    assert served(["a1", "a2", "a3"], ["a2"], count=2, of_one=1) == (["a1", "a3"], 1)


def test_cancelled_tasks_lose_no_place():
    assert served(["a1", "a2", "b1", "b2"], ["a2", "b1"]) == (["a1", "b2"], 1)
    assert served(["a1", "a2"], ["a1"])[0] == ["a1", "a2"]  # it held a place


def test_a_task_that_is_cancelled_when_it_gets_a_place_passes_it_on():
    async def main():
        slots = FairSlots(1)

        async def work():
            async with slots.hold("a"):
                pass

        async with slots.hold("a"):
            first, second = asyncio.create_task(work()), asyncio.create_task(work())
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait_for(second, 60)
        return first

    assert asyncio.run(main()).cancelled()


class Shares:
    """Tasks of tenants that begin by `FairShares` and end when a test says so."""

    def __init__(self, multiple, monkeypatch):
        monkeypatch.setattr(fair_slots, "_PAUSE_SECONDS", 1000)
        self.shares, self.begun, self.tasks = FairShares(multiple, 0), [], {}

    async def start(self, *names):
        """Start tasks, named by their tenants."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._work(name))
        return await self.settle()

    async def end(self, name):
        """End a task that has begun, or cancel one that waits."""
        self.tasks[name].cancel()
        return await self.settle()

    async def settle(self):
        """Return the tasks that have begun since the last call."""
        for _ in range(50):
            await asyncio.sleep(0)
        begun, self.begun = self.begun, []
        return begun

    async def _work(self, name):
        async with self.shares.hold(name[0]):
            self.begun.append(name)
            await asyncio.Event().wait()


def test_a_tenant_with_one_task_meets_few_of_others(monkeypatch):
    async def main():
        it = Shares(2, monkeypatch)
        with it.shares.be_present("a"):
            assert await it.start("a1", "a2", "a3", "a4") == ["a1", "a2", "a3", "a4"]
            with it.shares.be_present("b"):
                assert await it.start("a5", "b1", "a6", "a7") == ["b1"]
                assert await it.end("a1") == await it.end("a5") == await it.end("a2") == []
                assert await it.end("a3") == ["a6"]  # a4 is the other one
                assert await it.start("b2", "b3") == ["b2", "a7", "b3"]
                assert await it.start("a8", "a9", "c1") == ["a8", "a9", "c1"]
                for name in ("b1", "b2", "b3"):
                    assert await it.end(name) == []
                assert await it.start("a0") == []
            await asyncio.sleep(0.01)
            assert await it.settle() == ["a0"]  # b has left

    asyncio.run(main())


def test_the_tenant_with_fewest_tasks_sets_the_limit(monkeypatch):
    async def main():
        it = Shares(2, monkeypatch)
        with it.shares.be_present("c"):
            assert await it.start("c1", "c2") == ["c1", "c2"]
            with it.shares.be_present("b"):
                assert await it.start("b1", "a1", "a2", "a3") == ["b1", "a1", "a2"]
            await asyncio.sleep(0.01)
            assert await it.settle() == ["a3"]  # b has left, and c has two tasks

    asyncio.run(main())


def test_beside_others_tasks_begin_after_pauses(monkeypatch):
    async def main():
        it = Shares(1, monkeypatch)
        with it.shares.be_present("b"):
            assert await it.start("a1", "a2", "a3") == ["a1"]
            monkeypatch.setattr(fair_slots, "_PAUSE_SECONDS", 0)
            assert await it.end("a1") == ["a2", "a3"]

    asyncio.run(main())


def test_a_task_does_not_pass_those_of_its_tenant_that_wait(monkeypatch):
    async def main():
        it = Shares(1, monkeypatch)
        with it.shares.be_present("b"):
            assert await it.start("a1", "a2") == ["a1"]
            monkeypatch.setattr(fair_slots, "_PAUSE_SECONDS", 0)  # the timer has not ended
            assert await it.start("a3") == ["a2", "a3"]
        for name in ("a1", "a2", "a3"):
            await it.end(name)
        assert not it.shares._begun_at  # a was never present

    asyncio.run(main())


def test_tasks_that_have_waited_begin_in_different_rounds():
    async def main():
        shares, rounds, number = FairShares(1, 0), [], 0

        async def work():
            async with shares.hold("a"):
                rounds.append(number)
                await asyncio.Event().wait()

        with shares.be_present("b"):
            tasks = [asyncio.create_task(work()) for _ in range(5)]
            await asyncio.sleep(0)
        while len(rounds) < 5:
            number += 1
            await asyncio.sleep(0)
        assert len(set(rounds)) == 5
        for task in tasks:
            task.cancel()

    asyncio.run(main())
