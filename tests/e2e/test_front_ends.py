"""Several front ends of the same engines: the answers of one, even if any process dies."""

import asyncio
import contextlib
import signal
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.e2e import harness
from tests.e2e.test_data_parallel import (
    MODEL,
    NUM_TOKENS,
    PARAMS,
    PROMPTS,
    ask_all,
    engines,
    of_engines,
    wait_for_engines,
    wait_until_idle,
)
from tests.e2e.test_data_parallel import expected as expected

FLAGS = ["--max-model-len", "256", "--kv-cache-memory-bytes", "8M", "--num-threads", "1"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with harness.serve(folder, *FLAGS, "-asc", "2", "-dp", "2", spare=True) as made:
        yield made


def front_ends(server):
    return harness.processes(server.process.pid, "octavo.server.api_server_process")


def wait_for_front_ends(server, number, but=()):
    """Wait until `number` front ends serve, none of them in `but`."""

    def look():
        ready = server.log.read_text().count("INFO ready")
        found = front_ends(server)
        return len(found) == 2 and ready >= number and not {p.pid for p in found} & set(but)

    harness.wait_until(look, server.log.read_text)


def answers_by(server, count):
    """Return the number of answers of each front end, by its number, of `count` answers."""

    def look():
        lines = server.log.read_text().splitlines()
        found = [
            sum("POST /v1" in line and f"api_server={number}" in line for line in lines)
            for number in range(2)
        ]
        return found if sum(found) == count else None

    return harness.wait_until(look, server.log.read_text)  # lines may follow the answers


def test_both_give_the_answers_of_one_and_count_together(server, expected):
    for rounds in range(1, 51):  # a free front end accepts the connection
        assert asyncio.run(ask_all(server)) == expected
        if by_each := min(answers_by(server, rounds * len(PROMPTS))):
            break
    assert by_each > 0
    counts = of_engines(server, "octavo:generation_tokens_total")
    assert sum(counts) == NUM_TOKENS * 11 * rounds
    assert min(counts) > 0
    assert sum(of_engines(server, "octavo:request_success_total")) > 0
    wait_until_idle(server)
    assert len(of_engines(server, "octavo_engine_process_resident_memory_bytes")) == 2
    models = {server.get("/v1/models").text for _ in range(10)}
    assert len(models) == 1


def test_streams_outlive_an_engine(server, expected):
    chunks = 0

    def on_chunk():
        nonlocal chunks
        chunks += 1
        if chunks == len(PROMPTS):  # each has one, even if this process reads too late
            engines(server)[1].send_signal(signal.SIGKILL)

    assert asyncio.run(ask_all(server, on_chunk)) == expected
    server.wait_for_metric("octavo:engine_restarts_total", 1)
    wait_for_engines(server)
    assert of_engines(server, "octavo:engine_restarts_total") == [0, 1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_outlive_the_process_that_has_the_engines(server, expected, number):
    [victim] = harness.processes(server.process.pid, "octavo.server.coordinator_process")
    family = victim.children(recursive=True)
    chunks = 0

    def on_chunk():
        nonlocal chunks
        chunks += 1
        if chunks == len(PROMPTS):  # each has one, even if this process reads too late
            victim.send_signal(number)

    assert asyncio.run(ask_all(server, on_chunk)) == expected
    assert chunks >= len(PROMPTS)
    reason = "was killed by SIGKILL" if number == signal.SIGKILL else "was stopped by a signal"
    server.wait_for_line(f"the coordinator {reason}")
    assert not psutil.wait_procs(family, 60)[1]
    wait_for_engines(server)
    assert asyncio.run(ask_all(server)) == expected


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_is_gone_harms_nobody_else(server, expected, number):
    before = server.log.read_text().count("INFO ready")
    victim = front_ends(server)[0]

    async def storm():
        async with openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key="none", max_retries=9, timeout=120
        ) as client:

            async def ask(prompt, params):
                answer = await client.completions.create(
                    model=MODEL, prompt=prompt, extra_body={"ignore_eos": True}, **params
                )
                return [choice.text for choice in answer.choices]

            asked = [asyncio.create_task(ask(*both)) for both in zip(PROMPTS, PARAMS, strict=True)]
            await asyncio.sleep(0.05)
            victim.send_signal(number)
            return await asyncio.gather(*asked)

    # The clients that were connected to it connect again, as real ones do.
    assert asyncio.run(storm()) == expected
    wait_for_front_ends(server, before + 1, but=[victim.pid])
    reason = "was killed by SIGKILL" if number == signal.SIGKILL else "was stopped by a signal"
    server.wait_for_line(reason)
    assert asyncio.run(ask_all(server)) == expected
    wait_until_idle(server)


def test_one_that_is_killed_while_it_takes_a_place_is_replaced(server, expected):
    before = server.log.read_text().count("INFO ready")
    both = set(front_ends(server))
    victims = list(both)[:1]
    victims[0].kill()
    victims += harness.wait_until(lambda: set(front_ends(server)) - both)
    victims[1].kill()
    wait_for_front_ends(server, before + 1, but=[p.pid for p in victims])
    assert asyncio.run(ask_all(server)) == expected


def test_what_is_wrong_is_told_by_each(server):
    for _ in range(6):
        answer = server.post("/v1/completions", {"model": MODEL, "prompt": "a", "n": 0})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "n"


def test_all_end_with_the_first_process(tmp_path):
    with harness.serve(tmp_path, *FLAGS, "--api-server-count", "2", wait="") as server:

        def look():
            """Return the front ends once they serve: then each has a process for templates."""
            found = front_ends(server)
            return found if len(found) == 2 and all(p.children() for p in found) else None

        found = harness.wait_until(look, server.log.read_text)
        family = psutil.Process(server.process.pid).children(recursive=True)
        sockets = [c.laddr for p in found for c in p.net_connections("unix")]
        folders = {Path(s).parent for s in sockets if "/octavo-" in s}
        assert len(folders) == 1
        front_ends(server)[0].send_signal(signal.SIGSTOP)
        server.process.kill()
        server.process.wait()
        assert not psutil.wait_procs(family, 120)[1]
        assert not any(folder.exists() for folder in folders)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--kv-cache-memory-bytes", "4K"], "octavo: error: The KV cache has 0 blocks"),
        ([*FLAGS, "--chat-template", "{% if %}"], "octavo: error: Front end "),
    ],
)
def test_a_start_that_fails_says_why_once(tmp_path, flags, error):
    with harness.serve(tmp_path, *flags, "-asc", "2", wait="") as server:
        assert server.process.wait(120) == 1
        said = server.log.read_text()
        assert said.count("octavo: error: ") == said.count(error) == 1
        assert "Traceback" not in said


def test_the_end(server):
    family = psutil.Process(server.process.pid).children(recursive=True)
    with httpx.stream(
        "POST",
        server.url + "/v1/completions",
        json={"prompt": "Once", "max_tokens": 200, "stream": True, "ignore_eos": True},
        timeout=120,
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        for process in [psutil.Process(server.process.pid), *family]:  # as systemd does
            with contextlib.suppress(psutil.NoSuchProcess):  # another one has ended it
                process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.process.wait(120) == 0
    assert "Traceback" not in server.log.read_text()
    assert not psutil.wait_procs(family, 120)[1]
