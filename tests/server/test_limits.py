"""Limits of size, number and time, and the end of a server."""

import asyncio
import gc
import json
import math
import time
from types import SimpleNamespace

import pytest

from octavo.config import EngineConfig, ServerConfig
from octavo.errors import QueueFullError
from octavo.server import http_state
from octavo.server import state as state_module
from octavo.server.state import ServerState
from octavo.system import clock
from tests.server.fake_engine import Call, events, with_server


def body(**fields):
    return json.dumps({"prompt": "hi", "max_tokens": 200, "ignore_eos": True, **fields}).encode()


async def until(condition, timeout=60.0):
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_large_body_is_refused_by_its_announced_length_unread():
    async def scenario(served):
        call = Call(served, "/v1/completions", b"x" * 100, {"content-length": "2000"}, chunks=10)
        await call.task
        assert call.status == 413
        assert call.num_read == 0

    with_server(scenario, max_request_bytes=1024)


def test_an_announcement_that_is_no_number_is_not_believed():
    async def scenario(served):
        call = Call(served, "/v1/completions", body(max_tokens=1), {"content-length": "many"})
        await call.task
        assert call.status == 200

    with_server(scenario, max_request_bytes=1024)


def test_a_large_body_without_announcement_is_refused_while_it_is_read():
    async def scenario(served):
        call = Call(served, "/v1/completions", b"x" * 10_000, chunks=10)
        await call.task
        assert call.status == 413
        assert call.num_read == 2
        assert json.loads(call.body)["error"]["code"] == "request_too_large"

    with_server(scenario, max_request_bytes=1024)


def test_a_body_in_pieces():
    async def scenario(served):
        call = Call(served, "/v1/completions", body(max_tokens=1), chunks=7)
        await call.task
        assert call.status == 200

    with_server(scenario)


def test_the_queue_is_limited():
    async def scenario(served):
        served.engine.paused = True
        tasks = [asyncio.create_task(served.complete(n=n)) for n in (1, 2)]
        await until(lambda: served.engine.num_unfinished_requests == 3)
        for more in ({"n": 2}, {"prompt": ["a", "b"]}):
            response = await served.complete(**more)
            assert response.status_code == 429
            assert response.json()["error"]["code"] == "queue_full"
            assert int(response.headers["retry-after"]) >= 1
        tasks.append(asyncio.create_task(served.complete()))
        await until(lambda: served.engine.num_unfinished_requests == 4)
        assert (await served.complete(stream=True)).status_code == 429
        never = await served.complete(prompt=["a"] * 5)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")
        served.engine.paused = False
        assert [(await t).status_code for t in tasks] == [200] * 3
        assert (await served.complete(n=4)).status_code == 200

    with_server(scenario, max_num_queued_reqs=4)


def test_the_estimate_of_the_wait_follows_the_throughput(monkeypatch):
    async def scenario(served):
        state = served.state
        assert state._retry_after(10) == 1  # nothing is known yet
        clock = SimpleNamespace(monotonic=lambda: 1000.0, time=time.time)
        monkeypatch.setattr(state_module, "time", clock)
        state._finish_times.extend(990 + i / 10 for i in range(100))  # ten a second
        assert state._retry_after(1) == 1
        assert state._retry_after(100) == 10
        assert state._retry_after(10**6) == 60

    with_server(scenario)


def test_the_estimate_of_the_wait_forgets_an_idle_time():
    async def scenario(served):
        served.state._finish_times.extend(time.monotonic() - 1000 + 10 * i for i in range(90))
        served.engine.paused = True
        waiting = asyncio.create_task(served.complete(n=4))
        await until(lambda: served.engine.num_unfinished_requests == 4)
        # One in ten seconds, long ago: 4 places would take 40 s.
        assert (await served.complete(n=4)).headers["retry-after"] == "1"
        served.engine.paused = False
        await waiting

    with_server(scenario, max_num_queued_reqs=4)


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_left_of_requests(stream):
    def num_tasks():
        gc.collect()
        return sum(issubclass(type(found), asyncio.Task) for found in gc.get_objects())

    async def scenario(served):
        async def use():
            assert (await served.complete(stream=stream, prompt=["a", "b"])).status_code == 200
            call = Call(served, "/v1/completions", body(stream=stream))
            await until(lambda: served.engine.num_unfinished_requests)
            call.disconnect()
            await call.task
            assert (await served.complete(deadline_ms=1, stream=stream)).status_code in (200, 408)

        served.engine.step_time = 0.0005
        await use()
        before = num_tasks()
        for _ in range(10):
            await use()
        assert num_tasks() <= before + 2

    with_server(scenario)


def test_the_depth_of_json():
    def nested(levels):
        return b'{"prompt": "hi", "max_tokens": 1, "x": %b}' % (
            b"[" * (levels - 1) + b"]" * (levels - 1)
        )

    async def scenario(served):
        for levels, status in ((2, 200), (64, 200), (65, 400), (66, 400), (1000, 400)):
            call = Call(served, "/v1/completions", nested(levels))
            await call.task
            assert call.status == status, levels
        assert b"more than 64 levels" in call.body

    with_server(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_deadline_before_the_first_token(stream):
    async def scenario(served):
        served.engine.paused = True
        for deadline in (30, 3000):  # on a busy machine the first may pass before the engine has it
            response = await served.complete(deadline_ms=deadline, stream=stream)
            assert response.status_code == 408
            if served.engine.requests:
                break
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("deadline_exceeded", "deadline_ms")
        assert len(served.engine.aborted) == 1
        assert served.engine.requests[0].options.deadline is not None

    with_server(scenario)


def test_deadline_in_a_stream_is_an_event():
    async def scenario(served):
        for deadline in (150, 6000):  # on a busy machine the first may pass before the first token
            served.engine.step_time = deadline / 30_000
            response = await served.complete(
                deadline_ms=deadline, stream=True, max_tokens=200, ignore_eos=True
            )
            if response.status_code == 200:
                break
            served.engine.aborted.clear()
        *chunks, last = [json.loads(item) for item in await events(response)]
        assert 1 < len(chunks) < 200
        assert all("choices" in chunk for chunk in chunks)
        assert last["error"]["code"] == "deadline_exceeded"
        assert len(served.engine.aborted) == 1

    with_server(scenario)


def test_the_servers_own_time_limit():
    async def scenario(served):
        served.engine.paused = True
        response = await served.complete(deadline_ms=60_000)
        assert response.status_code == 408

    with_server(scenario, request_timeout=0.03)


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"prompt": ["a", "b", "c"]}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_the_engine(stream, fields):
    async def scenario(served):
        served.engine.step_time = 0.002
        call = Call(served, "/v1/completions", body(stream=stream, **fields))
        if stream:
            await call.wait_for_body()
        else:
            await until(lambda: served.engine.num_unfinished_requests)
        call.disconnect()
        await asyncio.wait_for(call.task, 60)
        assert served.engine.num_unfinished_requests == 0
        ids = {child for r in served.engine.requests for child in r.child_ids}
        assert set(served.engine.aborted) == ids

    with_server(scenario)


def test_a_client_that_goes_away_before_its_request_is_complete():
    async def scenario(served):
        call = Call(served, "/v1/completions", body(), chunks=3, cut_after=2)
        await asyncio.wait_for(call.task, 60)
        assert call.sent == []
        assert not served.engine.requests

    with_server(scenario)


def test_one_bad_prompt_ends_the_batch_and_its_siblings():
    async def scenario(served):
        response = await served.complete(prompt=[[5], [6], [300]])
        assert response.status_code == 400
        assert served.engine.num_unfinished_requests == 0

    with_server(scenario)


def test_draining_finishes_what_is_in_flight_and_takes_nothing_new():
    async def scenario(served):
        served.engine.paused = True
        running = asyncio.create_task(served.complete(stream=True))
        await until(lambda: served.engine.num_unfinished_requests)
        served.state.begin_drain()
        ready = await served.http.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
        assert (await served.http.get("/health")).status_code == 200
        for response in (await served.complete(), await served.http.get("/v1/models")):
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "unavailable"
        assert served.state.num_active == 1
        served.engine.paused = False
        assert len(await events(await running)) > 5
        assert served.state.num_active == 0

    with_server(scenario)


def test_what_comes_after_the_cut_is_not_begun():
    async def scenario(served):
        served.state.cut()
        for stream in (False, True):
            response = await served.complete(stream=stream)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "unavailable"
        assert not served.engine.requests

    with_server(scenario)


def test_cutting_ends_what_is_in_flight_with_an_error():
    async def scenario(served):
        served.engine.step_time = 0.002
        served.engine.answer = "x" * 200
        stream = Call(served, "/v1/completions", body(stream=True))
        await stream.wait_for_body()
        plain = asyncio.create_task(served.complete(max_tokens=200))
        await until(lambda: served.engine.num_unfinished_requests == 2)
        served.state.cut()
        await stream.task
        assert stream.status == 200
        last = stream.body.decode().split("\n\n")[-3]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
        assert stream.body.endswith(b"data: [DONE]\n\n")
        assert (await plain).status_code == 503
        assert served.engine.num_unfinished_requests == 0

    with_server(scenario)


def test_many_large_bodies_at_once_are_refused_and_small_ones_pass(monkeypatch):
    monkeypatch.setattr(http_state, "_BODIES_NBYTES", 200_000)

    async def scenario(served):
        served.engine.paused = True
        large = {"prompt": "hi", "user": "x" * 90_000, "max_tokens": 60, "ignore_eos": True}
        calls = [Call(served, "/v1/completions", body(**large)) for _ in range(2)]
        await until(lambda: served.engine.num_unfinished_requests == 2)
        response = await served.complete(**large)
        assert response.status_code == 429
        assert "bodies" in response.json()["error"]["message"]
        assert int(response.headers["Retry-After"]) >= 1
        small = asyncio.create_task(served.complete())
        await until(lambda: served.engine.num_unfinished_requests == 3)
        served.engine.paused = False
        assert (await small).status_code == 200
        for call in calls:
            await call.task
            assert call.status == 200
        assert served.state.body_bytes == 0
        assert (await served.complete(**large)).status_code == 200

    with_server(scenario, max_request_bytes=100_000)


def test_refusals_of_the_queue_in_full():
    async def scenario(served):
        served.engine.paused = True
        waiting = asyncio.create_task(served.complete(n=3))
        await until(lambda: served.engine.num_unfinished_requests == 3)
        response = await served.complete(n=2)
        assert response.json()["error"] == {
            "message": "The server already has 3 unfinished answers, and the limit is 4 "
            "(--max-num-queued-reqs); try again later.",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
        }
        assert (await served.http.get("/metrics")).text.count('reason="queue_full"} 1.0') == 1
        for fields, param in (({"n": 5}, "n"), ({"prompt": ["a"] * 5}, "prompt")):
            response = await served.complete(**fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
            assert "asks for 5 answers (prompts x n)" in response.json()["error"]["message"]
        response = await served.complete(prompt=["a"] * 5, n=5)
        assert response.json()["error"]["param"] == "prompt"
        served.engine.paused = False
        await waiting

    with_server(scenario, max_num_queued_reqs=4)


def test_without_a_limit_any_number_is_taken():
    async def scenario(served):
        assert (await served.complete(prompt=["a"] * 50, n=3, max_tokens=1)).status_code == 200

    with_server(scenario, max_num_queued_reqs=0)


@pytest.mark.parametrize(
    ("timeout", "asked", "expected"),
    [
        (0.0, None, None),
        (0.0, 500, 100.5),
        (3.0, None, 103.0),
        (3.0, 500, 100.5),
        (3.0, 5000, 103.0),
    ],
)
def test_the_earlier_limit_counts(timeout, asked, expected):
    async def scenario(served):
        assert served.state.deadline(100.0, asked) == expected

    with_server(scenario, request_timeout=timeout)


def test_what_the_engine_is_told_of_the_deadline():
    async def scenario(served):
        before = clock.now()
        await served.complete(deadline_ms=5000, max_tokens=1)
        after = clock.now()
        assert before + 5 <= served.engine.requests[-1].options.deadline <= after + 5
        await served.complete(max_tokens=1)
        assert served.engine.requests[-1].options.deadline is None

    with_server(scenario)


@pytest.mark.parametrize(
    ("name", "field", "told"),
    [
        ("X-Deadline-Ms", "deadline_ms", "deadline"),
        ("X-Max-TTFT-Ms", "max_ttft_ms", "first_token_deadline"),
    ],
)
def test_limits_in_headers(name, field, told):
    async def scenario(served):
        async def check(limit, headers, **fields):
            before = clock.now()
            body = {"prompt": "hi", "max_tokens": 1, **fields}
            response = await served.http.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 200
            found = getattr(served.engine.requests[-1].options, told)
            assert before + limit <= found <= clock.now() + limit

        await check(40, {name: "40000"})
        await check(70, {name.lower(): "40000"}, **{field: 70_000})
        await check(70, {}, **{field: 70_000})
        for wrong in ("", "0", "-5", "1.5", "soon", "9" * 16, "٣"):
            for body in ({"prompt": "hi"}, {"prompt": "hi", field: 0}, {"prompt": 5}):
                response = await served.http.post(
                    "/v1/completions", json=body, headers={name: wrong.encode()}
                )
                assert response.status_code == 400
                error = response.json()["error"]
                assert error["param"] == name
                assert error["message"].startswith(f"The header {name} is ")

    with_server(scenario)


def test_the_servers_own_limit_makes_no_request_urgent():
    async def scenario(served):
        await served.complete(max_tokens=1)
        assert served.engine.requests[-1].options.due == math.inf

    with_server(scenario, request_timeout=100)


def test_the_wait_is_estimated_from_what_has_finished_lately(monkeypatch):
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr(state_module, "time", clock)

    async def start():
        raise AssertionError

    state = ServerState(ServerConfig(max_num_queued_reqs=1000), EngineConfig(), start)

    def finish(count):
        with state.admit(count, "n"):
            pass

    def wait_for(places):
        """Return the Retry-After of a request that needs `places` more answers to end."""
        with pytest.raises(QueueFullError) as refused:
            state.admit(10 + places, "n").__enter__()
        return refused.value.retry_after

    with state.admit(990, "n"):
        assert wait_for(400) == 1  # nothing is known yet
        finish(10)
        now[0] += 10.0  # one each second
        assert wait_for(20) == 20
        now[0] += 49.0
        assert wait_for(400) == 60  # the maximum
        now[0] += 1.0
        assert wait_for(400) == 1  # too long ago for an estimate
        finish(10)
        assert wait_for(50) == 1  # a hundred each second
        assert wait_for(150) == 2
        now[0] += 4.0
        assert wait_for(11) == 5  # rounded up: 4.4
        assert wait_for(1) == 1
        finish(10)
        now[0] += 4.0
        assert wait_for(25) == 10  # 20 in 8 s
    with state.admit(1, "n"):  # only the last 256 answers of a large request count
        now[0] += 10.0
        with state.admit(999, "n"):
            with pytest.raises(QueueFullError) as refused:
                state.admit(256, "n").__enter__()
            assert refused.value.retry_after == 10


def test_only_the_size_of_large_bodies_is_looked_at(monkeypatch):
    monkeypatch.setattr(http_state, "_BODIES_NBYTES", 100_000)

    async def scenario(served):
        state = served.state
        state.check_bodies(10**9)  # nothing else is in flight
        state.body_bytes = 100_000
        state.check_bodies(100_000)
        state.body_bytes = 100_001
        state.check_bodies(65_536)
        with pytest.raises(QueueFullError) as refused:
            state.check_bodies(65_537)
        assert refused.value.message == (
            "The requests being served already have 100001 bytes of bodies, and the limit is "
            "100000; try again later, or send less at once."
        )
        state.body_bytes = 0

    with_server(scenario, max_request_bytes=2000)

    async def one_large_body_always_fits(served):
        served.state.body_bytes = 200_000
        served.state.check_bodies(200_000)
        served.state.body_bytes = 0

    with_server(one_large_body_always_fits, max_request_bytes=200_000)


def test_numbers_of_requests_are_never_given_again():
    async def scenario(served):
        await asyncio.gather(*(served.complete(request_id="same", max_tokens=1) for _ in range(9)))
        ids = [request.request_id for request in served.engine.requests]
        assert len(set(ids)) == 9
        assert all(name.startswith("cmpl-same-0-") for name in ids)

    with_server(scenario)
