"""Choice of the server for a request, and readiness."""

import asyncio
import contextlib
from collections import Counter
from functools import partial

import aiohttp
import pytest

from octavo.router.pool import Pool
from tests.router.servers import FakeServer, upstream, whole

PIECES = [bytes([i]) * 16 for i in range(8)]


def pooled(test, adapters=((), (), ()), timeout=60):
    """Run a test with a pool of three ready servers, which have the named adapters."""

    async def run():
        pool = Pool(0.01, timeout, lists_adapters=True)
        servers = [FakeServer(whole()) for _ in range(3)]
        for server, names in zip(servers, adapters, strict=True):
            server.adapters = names
        for number, server in enumerate(servers):
            pool.add(upstream(f"s{number}", server))
        try:
            await until(lambda: len(pool.choosable()) == 3)
            await test(pool, servers)
        finally:
            await pool.close()

    return lambda: asyncio.run(run())


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


@pooled
async def test_equals_take_turns(pool, servers):
    chosen = Counter(pool.choose([], {}).name for _ in range(9))
    assert set(chosen.values()) == {3}


@pooled
async def test_the_least_busy_server_is_chosen_and_long_prompts_count_more(pool, servers):
    first, second, third = pool.upstreams
    with pool.hold(first, 1), pool.hold(second, 5) as long, pool.hold(third, 1) as begun:
        begun.begin()
        assert pool.choose([], {}) is third
        with pool.hold(third, 2):
            assert pool.choose([], {}) is first
        long.begin()
        assert (second.num_waiting, second.num_running) == (0, 1)
    assert [u.load for u in pool.upstreams] == [0, 0, 0]


@pooled
async def test_a_server_that_has_the_prefix_may_be_somewhat_busier(pool, servers):
    known = pool.choose(PIECES, {})
    assert [pool.choose(PIECES, {}) for _ in range(3)] == [known] * 3
    assert pool.num_known == 24
    with pool.hold(known, 1):
        assert pool.choose(PIECES, {}) is known
        assert pool.choose([], {}) is not known
    holds = [pool.hold(known, 1) for _ in range(9)]
    for hold in holds:
        hold.__enter__()
    assert pool.choose(PIECES, {}) is not known
    for hold in holds:
        hold.__exit__(None, None, None)


@pooled
async def test_a_server_that_was_started_again_has_nothing_cached(pool, servers):
    known = pool.choose(PIECES, {})
    pool.restarted(known)
    assert not known.ready
    await until(lambda: known.ready)
    before = pool.num_known
    pool.choose(PIECES, {})
    assert pool.num_known == before


@pooled
async def test_one_that_failed_is_tried_again_only_when_it_has_come_back(pool, servers):
    chosen = pool.choose([], {})
    tried = {chosen: chosen.epoch}
    assert chosen not in [pool.choose([], tried) for _ in range(6)]
    pool.suspect(chosen)
    assert not chosen.ready
    await until(lambda: chosen.ready)
    assert chosen in pool.choosable(tried)
    everybody = {u: u.epoch for u in pool.upstreams}
    assert pool.choose([], everybody) is None
    assert not await pool.wait_ready(everybody, 0.02)
    pool.suspect(chosen)
    assert await pool.wait_ready(everybody, 60)


@pooled
async def test_one_that_leaves_gets_nothing(pool, servers):
    pool.upstreams[0].leaving = True
    assert pool.upstreams[0] not in [pool.choose([], {}) for _ in range(6)]
    await pool.remove(pool.upstreams[0])
    assert len(pool.upstreams) == 2


@pytest.mark.parametrize(
    "state", [503, 500, 404, aiohttp.ClientError("no"), RuntimeError("?")], ids=str
)
def test_one_that_is_not_ready_gets_nothing_until_it_is(state):
    @pooled
    async def test(pool, servers):
        servers[0].ready = state
        await until(lambda: not pool.upstreams[0].ready)
        assert len(pool.choosable()) == 2
        servers[0].ready = 200
        await until(lambda: pool.upstreams[0].ready)

    test()


@partial(pooled, timeout=0.03)
async def test_what_is_awaited_of_a_silent_server_ends(pool, servers):
    servers[0].ready = asyncio.Event()
    with pytest.raises(TimeoutError):
        async with pool.upstreams[0].guard():
            await asyncio.Event().wait()
    assert pool.upstreams[0].silent >= 2
    async with pool.upstreams[1].guard():
        await asyncio.sleep(0.05)


def busy(pool, upstream, count):
    """Return a context in which a server has begun `count` answers."""
    stack = contextlib.ExitStack()
    for _ in range(count):
        stack.enter_context(pool.hold(upstream, 1)).begin()
    return stack


@partial(pooled, adapters=("ab", "b", None))
async def test_a_server_that_lists_the_adapter_is_preferred(pool, servers):
    """Unless it is much busier. The name of the model itself prefers none."""
    first, second, third = pool.upstreams
    assert [first.adapters, second.adapters, third.adapters] == [{"a", "b"}, {"b"}, None]
    assert {pool.choose([], {}, model="a") for _ in range(6)} == {first}
    for model in ("m", "x"):
        assert len({pool.choose([], {}, model=model) for _ in range(3)}) == 3
    with busy(pool, first, 15):
        assert pool.choose([], {}, model="a") is first
    with busy(pool, first, 17):
        assert pool.choose([], {}, model="a") is not first
    assert pool.choose([], {first: first.epoch}, model="a") is not first


@partial(pooled, adapters=("abc", "abc", "abc"))
async def test_a_server_that_has_the_adapter_in_memory_is_preferred(pool, servers):
    """Adapters that all servers list are divided among them; a restart forgets it."""
    homes = {name: pool.choose([], {}, model=name) for name in "abc"}
    assert len(set(homes.values())) == 3
    assert all(pool.choose([], {}, model=name) is home for name, home in homes.items())
    with busy(pool, homes["a"], 9):
        assert pool.choose([], {}, model="a") is not homes["a"]
    pool.restarted(homes["b"])
    await until(lambda: homes["b"].ready)
    assert homes["b"].adapters == {"a", "b", "c"}
    with busy(pool, homes["b"], 1):
        assert pool.choose([], {}, model="b") is not homes["b"]


@partial(pooled, adapters=("a", "", "a"))
async def test_lists_are_renewed_and_servers_that_lack_a_model_are_left_out(pool, servers):
    first, second, third = pool.upstreams
    with busy(pool, first, 30), busy(pool, third, 30):
        assert pool.choose([], {}, model="a") is second
        assert pool.note_lack(second, "a")
        assert pool.choose([], {}, model="a") is not second
        servers[1].adapters = ["a"]
        second.list_at = 0.0
        await until(lambda: second.adapters)
        assert pool.choose([], {}, model="a") is second
    assert not pool.note_lack(first, "x")
    assert not pool.note_lack(first, "a" * 10_000)
    for i in range(3000):
        pool.note_lack(first, str(i))
    assert len(first.lacking) < 2000
