"""Random load with aborts and disconnects: all requests end, and no resource is left."""

import asyncio
import random

import httpx
import pytest

from tests.e2e.harness import Server, serve

CONCURRENCY = 64


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ["--max-model-len", "512", "--kv-cache-memory-bytes", "24M", "--max-num-seqs", "48"]
    with serve(tmp_path_factory.mktemp("soak"), *flags) as server:
        yield server


async def one_request(client: httpx.AsyncClient, rng: random.Random) -> str:
    """Send a random request; in a third of the cases disconnect before its end."""
    prompt = [rng.randrange(10, 4000) for _ in range(rng.randrange(1, 300))]
    body = {
        "model": "octavo/stories",
        "prompt": prompt,
        "max_tokens": rng.randrange(1, 64),
        "temperature": rng.choice([0, 0.8]),
        "n": rng.choice([1, 1, 1, 3]),
        "ignore_eos": True,
        "stream": rng.random() < 0.6,
    }
    leaves = rng.random() < 0.33
    if not body["stream"]:
        request = client.post("/v1/completions", json=body)
        if leaves:
            try:
                await asyncio.wait_for(request, rng.random() * 0.5)
            except TimeoutError:
                return "left"
            return "answered"
        response = await request
        assert response.status_code == 200, response.text
        choices = response.json()["choices"]
        assert [c["index"] for c in choices] == list(range(body["n"]))
        assert response.json()["usage"]["completion_tokens"] == body["n"] * body["max_tokens"]
        return "answered"
    # A server that is slower than its engine sends few lines.
    stay = rng.choice((0, 1, 2, 2, 9)) if leaves else 10**9
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        last = ""
        async for line in response.aiter_lines():
            if line:
                assert "error" not in line
                last = line
                stay -= 1
            if stay <= 0:
                return "left"
        assert last == "data: [DONE]"
        return "answered"


async def run_round(server: Server, count: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    gate = asyncio.Semaphore(CONCURRENCY)
    limits = httpx.Limits(max_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:

        async def guarded(seed: int) -> str:
            async with gate:
                return await one_request(client, random.Random(seed))

        results = await asyncio.gather(*(guarded(rng.random()) for _ in range(count)))
    return {kind: results.count(kind) for kind in ("answered", "left")}


async def until_idle(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        for _ in range(2400):
            text = (await client.get("/metrics")).text
            busy = [
                line
                for line in text.splitlines()
                if line.startswith(("octavo:num_requests_running{", "octavo:num_requests_waiting{"))
                and not line.endswith(" 0.0")
            ]
            if not busy:
                return
            await asyncio.sleep(0.05)
    raise AssertionError(f"requests are left: {busy}")


def test_random_requests_with_aborts_and_disconnects(server):
    result = asyncio.run(run_round(server, 160, seed=1))
    assert sum(result.values()) == 160
    assert result["answered"] > 80
    assert result["left"] > 16
    asyncio.run(until_idle(server))
    assert server.metric("octavo:kv_cache_usage_perc") == 0
    assert server.get("/health").status_code == 200


def test_no_growth_over_ten_rounds(server):
    sizes = []
    for i in range(10):
        asyncio.run(run_round(server, 40, seed=100 + i))
        asyncio.run(until_idle(server))
        sizes.append(server.resident_bytes())
    assert server.metric("octavo:kv_cache_usage_perc") == 0
    # Pages of the KV cache and of allocators fill up in the first rounds; then it stays flat.
    assert min(sizes[-2:]) < 1.02 * max(sizes[2:6]), sizes
    assert server.get("/health").status_code == 200
