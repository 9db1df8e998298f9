"""Two engines of one server: the answers of one, also when an engine is killed."""

import asyncio
import signal

import openai
import psutil
import pytest

from octavo import LLM, SamplingParams, cli
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.fleet.start import EngineProcesses
from octavo.frontend.async_llm import AsyncLLM
from octavo.observability.recording import RecordSettings
from tests.e2e import harness

MODEL = "octavo/stories"
PROMPTS = [f"Once upon a time there were {i} dogs" for i in range(10)]
NUM_TOKENS = 160
PARAMS = [
    {
        "max_tokens": NUM_TOKENS,
        "seed": i,
        "temperature": 0.9 * (i % 3),
        "top_p": 1.0,
        "n": 1 + (i == 7),
    }
    for i in range(len(PROMPTS))
]
SETTINGS = {"max_model_len": 256, "kv_cache_memory_bytes": "8M", "num_threads": 1}


@pytest.fixture(scope="module")
def expected():
    llm = LLM(MODEL, **SETTINGS)
    params = [SamplingParams(**p, ignore_eos=True) for p in PARAMS]
    answers = llm.generate(PROMPTS, params, use_tqdm=False)
    return [[output.text for output in answer.outputs] for answer in answers]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ["--max-model-len", "256", "--kv-cache-memory-bytes", "8M", "--num-threads", "1"]
    flags += ["--enable-elastic-ep", "--enable-admin"]
    with harness.serve(tmp_path_factory.mktemp("server"), "-dp", "2", *flags, spare=True) as made:
        yield made


def engines(server):
    """Return the two engines' first processes; a spare one is younger."""
    return harness.processes(server.process.pid, harness.ENGINE)[:2]


async def ask_all(server, on_chunk=lambda: None):
    """Return the texts of all prompts, streamed at the same time."""
    async with openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0
    ) as client:

        async def ask(prompt, params):
            texts = [""] * params["n"]
            stream = await client.completions.create(
                model=MODEL, prompt=prompt, stream=True, extra_body={"ignore_eos": True}, **params
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                on_chunk()
            return texts

        return await asyncio.gather(*(ask(*both) for both in zip(PROMPTS, PARAMS, strict=True)))


def of_engines(server, name, count=2):
    """Return a metric's value for each engine."""
    lines = server.get("/metrics").text.splitlines()
    return [
        float(line.rsplit(" ", 1)[1])
        for index in range(count)
        for line in lines
        if line.startswith(f"{name}{{") and f'engine="{index}"' in line
    ]


def wait_for_engines(server, meanwhile=None):
    """Wait until all engines serve; the reason is `meanwhile`, if that is given, until then."""

    def look():
        reason = server.get("/health").json()["reason"]
        assert reason == "ok" or meanwhile in (reason, None)
        return reason == "ok"

    harness.wait_until(look, server.log.read_text)


def wait_until_idle(server):
    """Wait until both engines have told that no request runs, after their last tokens."""
    harness.wait_until(lambda: of_engines(server, "octavo:num_requests_running") == [0, 0])


def test_both_engines_give_the_answers_of_one(server, expected):
    assert len(engines(server)) == 2
    assert asyncio.run(ask_all(server)) == expected
    counts = of_engines(server, "octavo:generation_tokens_total")
    assert sum(counts) == NUM_TOKENS * 11
    assert min(counts) > 0
    assert len(of_engines(server, "octavo_engine_process_resident_memory_bytes")) == 2
    assert server.get("/health").json() == {"status": "ok", "reason": "ok"}


def test_streams_of_an_engine_that_is_killed_go_on_at_the_other(server, expected):
    victims, chunks = [], 0

    def on_chunk():
        nonlocal chunks
        chunks += 1
        if chunks == len(PROMPTS):  # each has one, even if this process reads too late
            victims[1].send_signal(signal.SIGKILL)

    # If the client was not scheduled, the engine may have made all tokens before it was killed.
    for kills in range(1, 6):
        victims, chunks = engines(server), 0
        assert asyncio.run(ask_all(server, on_chunk)) == expected
        # One restart of the engine; its requests did not wait for it.
        server.wait_for_metric("octavo:engine_restarts_total", kills)
        harness.wait_for(server, "/ready")
        wait_for_engines(server, "engine 1 is being started; the others serve")
        assert of_engines(server, "octavo:engine_restarts_total") == [0, kills]
        if of_engines(server, "octavo:requests_recovered_total")[1]:
            break
    assert of_engines(server, "octavo:requests_recovered_total")[1] > 0
    assert "other engines continue requests of engine 1" in server.log.read_text()
    assert asyncio.run(ask_all(server)) == expected
    wait_until_idle(server)


def test_engines_come_and_go_under_load(server, expected):
    def scale(size):
        return cli.main(["scale", str(size), "--url", server.url])

    async def storm():
        rounds = asyncio.create_task(ask_again_and_again())
        assert await asyncio.to_thread(scale, 3) == 0
        assert len(server.get("/health").json()) == 2
        assert await asyncio.to_thread(scale, 1) == 0
        assert await asyncio.to_thread(scale, 2) == 0
        done.set()
        return await rounds

    async def ask_again_and_again():
        count = 0
        while not done.is_set() or count < 2:
            assert await ask_all(server) == expected
            count += 1
        return count

    done = asyncio.Event()
    before = sum(of_engines(server, "octavo:generation_tokens_total", 3))
    rounds = asyncio.run(storm())
    after = of_engines(server, "octavo:generation_tokens_total", 3)
    assert sum(after) - before == NUM_TOKENS * 11 * rounds  # each token once
    assert len(engines(server)) == 2
    assert server.get("/health").json()["reason"] == "ok"


def test_nothing_is_left_after_the_end(server):
    """The last test of this file: it ends the server."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(120) == 0
    _, left = psutil.wait_procs(family, timeout=120)
    assert left == []


def test_what_one_engine_alone_can_do(tmp_path):
    with pytest.raises(ConfigError, match="is for engines on several machines"):
        LLM(MODEL, data_parallel_address="localhost")

    async def start():
        config = EngineConfig.from_kwargs(data_parallel_size=2, **SETTINGS)
        record = RecordSettings(str(tmp_path / "r"), "full", 2**20)
        await AsyncLLM.start(config, EngineProcesses(record=record))

    with pytest.raises(ConfigError, match="a recording is of one engine"):
        asyncio.run(start())
