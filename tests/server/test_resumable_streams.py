"""Streams that outlive their connections: the rights to resume them, and their costs."""

import asyncio
import gc
import json
import re

import pytest

from octavo.errors import RequestError
from octavo.server import resumable_streams as streams_module
from octavo.server.resumable_streams import DONE, StreamRegistry
from tests.server.fake_engine import Call, FakeAsyncLLM, with_server

GRACE = 20.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "hi", "max_tokens": 30, "ignore_eos": True, "stream": True}
CHAT_BODY = {**BODY, "messages": [{"role": "user", "content": "hi"}]}
del CHAT_BODY["prompt"]


def slow_engine():
    engine = FakeAsyncLLM()
    engine.step_time = 0.001
    return engine


def post(served, path=COMPLETIONS, body=BODY, name="abc", **headers):
    headers = {"X-Request-Id": name, **headers}
    return Call(served, path, json.dumps(body).encode(), headers)


def get(served, path, **headers):
    return Call(served, f"/v1/streams/{path}", b"", headers, method="GET")


async def leave(call, num_events=3):
    """Disconnect in the middle of a stream; return the received data."""
    while call.body.count(b"\n\n") < num_events:
        call.grown.clear()
        await call.grown.wait()
    call.disconnect()
    await call.task
    return call.body


async def whole(call):
    await call.task
    assert call.status == 200, call.body
    return call.body


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def bare(body):
    """Return a stream without the ids of its events."""
    return b"".join(line + b"\n" for line in body.split(b"\n")[:-1] if not line.startswith(b"id:"))


def numbers(body):
    return [int(line.rpartition(b":")[2]) for line in body.split(b"\n") if line.startswith(b"id:")]


def timeless(body):
    return re.sub(rb'"created":\d+', b"", body)


def error_of(call):
    return call.status, json.loads(call.body)["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, BODY),
        (COMPLETIONS, {**BODY, "n": 3, "stream_options": {"include_usage": True}}),
        (COMPLETIONS, {**BODY, "prompt": ["a", "b"], "logprobs": 2, "echo": True}),
        (CHAT, CHAT_BODY),
        (CHAT, {**CHAT_BODY, "n": 2, "logprobs": True, "stream_options": {"include_usage": True}}),
    ],
    ids=["plain", "n, usage", "prompts, echo", "chat", "chat, n, logprobs"],
)
@pytest.mark.parametrize("way", ["from", "GET", "POST", "another body"])
def test_who_comes_back_gets_what_was_missed_and_the_rest(path, body, way):
    async def scenario(served):
        name = "cmpl-abc" if path == COMPLETIONS else "chatcmpl-abc"
        first = await leave(post(served, path, body))
        seen = len(numbers(first))
        last = {"Last-Event-ID": f"{name}:{seen - 1}"}
        again = {
            "from": lambda: get(served, f"{name}?from={seen}"),
            "GET": lambda: get(served, name, **last),
            "POST": lambda: post(served, path, body, **last),
            "another body": lambda: post(served, "/invocations", {}, "other", **last),
        }[way]()
        both = first + await whole(again)
        assert numbers(both) == list(range(both.count(b"\n\n")))
        assert len(served.engine.requests) == (2 if "a" in body.get("prompt", "") else 1)
        assert served.engine.aborted == []
        # All of it once more, with the bytes of a client that stays.
        assert await whole(get(served, name)) == both
        assert served.state.streams._streams[None, name].finished
        undisturbed = await whole(post(served, path, body, "xyz"))
        assert timeless(undisturbed) == timeless(both.replace(b"abc", b"xyz"))
        assert bare(both).endswith(b"\n\n" + DONE)

    with_server(scenario, slow_engine, resume_grace=GRACE)


def test_without_a_grace_nothing_has_an_id_and_nobody_comes_back():
    async def scenario(served):
        kept = await whole(post(served))
        assert b"id: " not in kept
        assert json.loads(kept.split(b"\n\n")[0].removeprefix(b"data: "))["id"] == "cmpl-abc"
        await leave(post(served))
        assert served.engine.num_unfinished_requests == 0
        assert len(served.engine.aborted) == 1
        for call in (
            get(served, "cmpl-abc"),
            post(served, **{"Last-Event-ID": "cmpl-abc:2"}),
        ):
            await call.task
            status, error = error_of(call)
            assert (status, error["code"]) == (404, "stream_not_found")
            assert "--resume-grace" in error["message"]
        assert len(served.engine.requests) == 2

    with_server(scenario, slow_engine)


def test_ids_are_all_that_a_grace_adds():
    found = []

    async def scenario(served):
        body = await whole(post(served, body={**BODY, "n": 2}))
        texts = ["", ""]
        for event in bare(body).split(b"\n\n")[:-2]:
            (choice,) = json.loads(event.removeprefix(b"data: "))["choices"]
            texts[choice["index"]] += choice["text"]
        found.append((texts, bare(body).count(b"\n\n")))

    with_server(scenario)
    with_server(scenario, resume_grace=GRACE)
    assert found[0] == found[1]


def test_who_stays_away_loses_it_and_the_engine_is_free():
    async def scenario(served):
        served.engine.paused = True
        first = post(served)
        await until(lambda: served.engine.num_unfinished_requests)
        first.disconnect()
        await first.task
        assert first.sent == []
        assert served.engine.num_unfinished_requests == 1
        assert served.state.body_bytes > 0  # its prompt is still there
        await until(lambda: served.engine.aborted)
        call = get(served, "cmpl-abc")
        await call.task
        status, error = error_of(call)
        assert (status, error["code"]) == (404, "stream_not_found")
        assert "(0.05) seconds" in error["message"]
        await until(lambda: served.state.body_bytes == served.engine.request_memory.used == 0)

    with_server(scenario, resume_grace=0.05)


def test_who_comes_back_before_the_first_event():
    async def scenario(served):
        served.engine.paused = True
        first = post(served)
        await until(lambda: served.engine.num_unfinished_requests)
        first.disconnect()
        await first.task
        again = get(served, "cmpl-abc?from=0")
        await asyncio.sleep(0)
        served.engine.paused = False
        assert numbers(await whole(again))[:2] == [0, 1]

    with_server(scenario, resume_grace=GRACE)


def test_a_finished_stream_is_kept_for_the_grace_and_then_its_memory_is_free():
    async def scenario(served):
        memory = served.engine.request_memory
        body = await whole(post(served))
        assert memory.used >= len(body)
        served.state.streams.grace = 0.05
        assert await whole(get(served, "cmpl-abc")) == body
        await until(lambda: memory.used == 0)
        assert len(served.state.streams) == 0
        call = get(served, "cmpl-abc")
        await call.task
        assert call.status == 404

    with_server(scenario, resume_grace=GRACE)


def test_nothing_is_left_of_it():
    async def scenario(served):
        count = (await whole(post(served))).count(b"\n\n")
        for call in (
            get(served, "cmpl-abc", **{"Last-Event-ID": f"cmpl-abc:{count - 1}"}),
            get(served, f"cmpl-abc?from={count}"),
        ):
            await call.task
            assert (call.status, call.body) == (204, b"")

    with_server(scenario, resume_grace=GRACE)


@pytest.mark.parametrize(
    ("asked", "header", "param"),
    [
        ("cmpl-abc?from=-1", None, "from"),
        ("cmpl-abc?from=", None, "from"),
        ("cmpl-abc?from=1.0", None, "from"),
        ("cmpl-abc?from=٣", None, "from"),
        ("cmpl-abc?from=99", None, "from"),
        (f"cmpl-abc?from={'9' * 5000}", None, "from"),
        ("cmpl-abc", "cmpl-abc:99", "Last-Event-ID"),
        ("cmpl-abc", "cmpl-abc:-2", "Last-Event-ID"),
        ("cmpl-abc", "cmpl-abc", "Last-Event-ID"),
        ("cmpl-abc", "17", "Last-Event-ID"),
        ("cmpl-abc", "cmpl-other:1", "Last-Event-ID"),
    ],
)
def test_numbers_that_are_none_of_its_events(asked, header, param):
    async def scenario(served):
        await whole(post(served))
        call = get(served, asked, **({} if header is None else {"Last-Event-ID": header}))
        await call.task
        status, error = error_of(call)
        assert (status, error["param"]) == (400, param)
        assert param in error["message"]
        assert len(error["message"]) < 300

    with_server(scenario, resume_grace=GRACE)


def test_what_a_posts_body_must_be_even_if_it_is_not_read():
    async def scenario(served):
        last = {"Last-Event-ID": "cmpl-abc:0"}
        for content_type, size, status in (("text/plain", 2, 415), ("application/json", 2000, 413)):
            headers = {**last, "content-type": content_type}
            call = Call(served, COMPLETIONS, b"x" * size, headers)
            await call.task
            assert call.status == status

    with_server(scenario, resume_grace=GRACE, max_request_bytes=1024)


def test_who_comes_back_is_counted():
    async def scenario(served):
        def count():
            (found,) = re.findall(
                rb"^octavo:streams_resumed_total{.*} (.*)$",
                served.engine.metrics.render(),
                re.MULTILINE,
            )
            return float(found)

        body = await whole(post(served))
        assert count() == 0
        await whole(get(served, "cmpl-abc"))
        last = {"Last-Event-ID": f"cmpl-abc:{len(numbers(body)) // 2}"}
        await whole(post(served, **last))
        assert count() == 2
        for name in ("cmpl-other", f"cmpl-abc?from={len(numbers(body))}", "cmpl-abc?from=99"):
            await get(served, name).task
        assert count() == 2

    with_server(scenario, resume_grace=GRACE)


def test_only_the_key_that_asked():
    async def scenario(served):
        mine, other = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer other"}
        body = await whole(post(served, **mine))
        assert await whole(get(served, "cmpl-abc", **mine)) == body
        answers = []
        for name in ("cmpl-abc", "cmpl-no-such"):
            call = get(served, name, **other)
            await call.task
            answers.append((call.status, call.body.replace(name.encode(), b"NAME")))
        assert answers[0] == answers[1]
        assert answers[0][0] == 404
        call = get(served, "cmpl-abc")
        await call.task
        assert call.status == 401
        # The same id belongs to each of them.
        theirs = await whole(post(served, body={**BODY, "max_tokens": 3}, **other))
        assert await whole(get(served, "cmpl-abc", **other)) == theirs
        assert await whole(get(served, "cmpl-abc", **mine)) == body

    with_server(scenario, resume_grace=GRACE, api_key=["mine", "other"])


def test_nobody_takes_the_place_of_another_ones_stream():
    async def scenario(served):
        first = await leave(post(served))
        taken = await whole(post(served, body={**BODY, "prompt": "evil"}))
        assert b"id: " not in taken  # a plain stream, which ends with its connection
        rest = await whole(get(served, f"cmpl-abc?from={len(numbers(first))}"))
        assert await whole(get(served, "cmpl-abc")) == first + rest
        await leave(post(served))
        assert len(served.engine.aborted) == 1

    with_server(scenario, slow_engine, resume_grace=GRACE)


def test_readers_do_not_wait_for_each_other():
    async def scenario(served):
        first = post(served)
        stuck = asyncio.Event()

        async def never(message):
            await stuck.wait()

        first.send = never
        readers = [get(served, "cmpl-abc") for _ in range(3)]
        await asyncio.sleep(0)
        bodies = {await whole(reader) for reader in readers}
        assert len(bodies) == 1
        assert not first.task.done()
        first.send = first._send
        stuck.set()
        # It was in the middle of its first event, which was not delivered.
        await first.task
        (body,) = bodies
        assert body.endswith(first.body)

    with_server(scenario, slow_engine, resume_grace=GRACE)


def test_who_reconnects_in_a_loop_changes_nothing():
    async def scenario(served):
        first = post(served, body={**BODY, "max_tokens": 200})
        await first.wait_for_body()
        stream = served.state.streams.find("cmpl-abc", None)
        for _ in range(50):
            again = get(served, "cmpl-abc?from=0")
            await again.wait_for_body()
            again.disconnect()
            await again.task
        body = await whole(first)
        assert numbers(body) == list(range(stream.num_events))
        assert stream.num_readers == 0
        assert served.engine.request_memory.used == stream.nbytes
        assert len(served.engine.requests) == 1

    with_server(scenario, slow_engine, resume_grace=GRACE)


def test_an_error_in_the_middle_is_part_of_the_stream():
    async def scenario(served):
        first = await leave(post(served))
        served.engine.die("out of memory")
        await until(lambda: served.state.failure is not None)
        rest = await whole(get(served, f"cmpl-abc?from={len(numbers(first))}"))
        *_, error, done, nothing = bare(rest).split(b"\n\n")
        assert "out of memory" in json.loads(error.removeprefix(b"data: "))["error"]["message"]
        assert (done + b"\n\n", nothing) == (DONE, b"")
        assert numbers(rest)[-1] == (first + rest).count(b"\n\n") - 1

    with_server(scenario, slow_engine, resume_grace=GRACE)


def test_an_error_before_the_first_event_is_an_ordinary_one():
    async def scenario(served):
        for body, status in (
            ({**BODY, "prompt": "x" * 2000}, 400),
            ({**BODY, "n": 9}, 400),
            ({**BODY, "temperature": -1}, 400),
        ):
            call = post(served, body=body)
            await call.task
            assert call.status == status
            call = get(served, "cmpl-abc")
            await call.task
            assert call.status == 404
        assert len(served.state.streams) == 0

    with_server(scenario, resume_grace=GRACE, max_num_queued_reqs=8)


def test_deadlines_hold_while_nobody_reads():
    async def scenario(served):
        for deadline in (100, 6000):  # on a busy machine the first may pass before the first token
            served.engine.step_time = deadline / 10_000
            call = post(served, body={**BODY, "max_tokens": 200, "deadline_ms": deadline})
            await call.wait_for_body()
            if call.status == 200:
                break
            served.engine.aborted.clear()
        first = await leave(call, 1)
        await until(lambda: served.engine.aborted)
        rest = await whole(get(served, f"cmpl-abc?from={len(numbers(first))}"))
        assert b"deadline" in rest.split(b"\n\n")[-3]

    with_server(scenario, resume_grace=GRACE)


def test_abandoned_streams_keep_their_places():
    async def scenario(served):
        served.engine.paused = True
        for name in "abcd":
            call = post(served, name=name)
            await until(lambda: served.engine.num_unfinished_requests == ord(name) - 96)  # noqa: B023
            call.disconnect()
            await call.task
        refused = post(served, name="e")
        await refused.task
        assert refused.status == 429
        assert len(served.state.streams) == 4
        for name in "abcd":
            served.state.streams.find(f"cmpl-{name}", None)._leave()
        await until(lambda: served.engine.num_unfinished_requests == 0)

    with_server(scenario, resume_grace=GRACE, max_num_queued_reqs=4)


def test_draining_ends_what_nobody_reads():
    async def scenario(served):
        abandoned = post(served, name="a")
        read = post(served, name="b")
        await leave(abandoned)
        served.state.begin_drain()
        await until(lambda: served.engine.aborted)
        assert read.task.done() is False
        body = await whole(read)
        assert bare(body).endswith(DONE)
        await until(lambda: len(served.state.streams) == 0)
        assert len(served.engine.aborted) == 1
        call = get(served, "cmpl-b")
        await call.task
        assert call.status == 503

    with_server(scenario, slow_engine, resume_grace=GRACE)


def test_cut_and_closed():
    async def scenario(served):
        served.engine.step_time = 0.01
        abandoned, read = post(served, name="a"), post(served, name="b")
        await leave(abandoned, 1)
        await read.wait_for_body()
        served.state.begin_drain()
        served.state.cut()
        await read.task
        assert b"The server stopped" in read.body
        await until(lambda: len(served.engine.aborted) == 2)
        await served.state.close()
        assert served.engine.request_memory.used == 0

    with_server(scenario, resume_grace=GRACE)


def test_close_ends_what_is_left():
    async def scenario(served):
        served.engine.paused = True
        call = post(served)
        await until(lambda: served.engine.num_unfinished_requests)
        call.disconnect()
        await call.task
        await served.state.close()
        assert len(served.engine.aborted) == 1
        assert len(served.state.streams) == served.state.body_bytes == 0

    with_server(scenario, resume_grace=GRACE)


# Memory


def test_finished_streams_make_room_for_requests():
    async def scenario(served):
        memory = served.engine.request_memory
        memory.limit = 100_000
        for number in range(40):
            await whole(post(served, name=f"r{number}"))
            assert memory.used <= memory.limit
        kept = [name for _, name in served.state.streams._streams]
        assert kept == [f"cmpl-r{number}" for number in range(40 - len(kept), 40)]
        assert 2 < len(kept) < 40
        # A request that needs all memory receives it.
        with memory.reserve(memory.limit):
            assert len(served.state.streams) == 0

    with_server(scenario, resume_grace=GRACE)


def test_many_abandoned_streams_leave_nothing():
    async def scenario(served):
        for number in range(100):
            call = post(served, body={**BODY, "max_tokens": 2}, name=f"r{number}")
            await call.wait_for_body()
            call.disconnect()
            await call.task
        assert len(served.state.streams) <= 100
        served.state.begin_drain()
        await until(lambda: not len(served.state.streams))
        await until(lambda: not served.engine.request_memory.used)
        gc.collect()
        left = [o for o in gc.get_objects() if type(o) is streams_module.Stream]
        assert left == []

    with_server(scenario, resume_grace=GRACE)


def make(pieces, limit=2**20):
    """Return a stream of these pieces, each read on request, and its registry."""

    class Memory(streams_module.RequestMemory):
        pass

    async def run(receive, work, deadline):
        await work

    async def events():
        for piece in pieces:
            await asyncio.sleep(0)
            yield piece

    registry = StreamRegistry(GRACE, run)
    registry.memory = Memory(limit)
    return registry, registry.open("s", None, events(), None)


def test_a_stream_forgets_its_oldest_events_where_there_is_no_room():
    async def test():
        pieces = [[b"%d " % i + b"x" * 1000 + b"\n\n"] for i in range(1000)]
        registry, stream = make(pieces)  # a sixteenth is 64 KiB
        live = [piece async for piece in stream.read(0)]
        events = [event for piece in live for event in piece]
        assert len(events) == 1001  # a reader that keeps up misses nothing
        assert registry.memory.used == stream.nbytes < 2**16 + 3 * 1100 + streams_module._RECORD
        first = stream.num_events - sum(1 for _ in stream._events)
        assert 900 < first < 1000
        assert stream.nbytes > 2**15
        with pytest.raises(RequestError) as refused:
            await anext(stream.read(first - 1))
        assert refused.value.param == "Last-Event-ID"
        assert f"from {first} to 1000" in str(refused.value)
        again = [event async for piece in stream.read(first) for event in piece]
        assert again == events[first:]
        assert (
            registry.memory.used
            == stream.nbytes
            == sum(len(e) + 48 for e in again) + streams_module._RECORD
        )
        await registry.close()
        assert registry.memory.used == 0

    asyncio.run(test())


def test_a_stream_yields_to_running_requests():
    async def test():
        pieces = [[b"x" * 1000 + b"\n\n"] for _ in range(500)]
        registry, stream = make(pieces, 100 * 2**20)
        with registry.memory.hold(100 * 2**20):
            await stream.task
            assert stream.nbytes < 2**16 + 3 * 1100
        await registry.close()

    asyncio.run(test())


def test_large_pieces_come_whole_to_who_keeps_up():
    async def test():
        pieces = [[b"%d" % i + b"x" * 50_000 for i in range(10)] for _ in range(5)]
        registry, stream = make(pieces)
        events = [event async for piece in stream.read(0) for event in piece]
        assert len(events) == 51
        await registry.close()

    asyncio.run(test())


def test_pieces_that_are_sent_are_not_larger_than_needed():
    async def test():
        registry, stream = make([[b"x" * 1000] for _ in range(500)], 2**30)
        await stream.task
        sizes = [sum(map(len, piece)) async for piece in stream.read(0)]
        assert max(sizes) < 2**16 + 1100
        assert len(sizes) < 12
        await registry.close()

    asyncio.run(test())


def test_who_comes_when_it_is_given_up_is_not_left_waiting():
    async def scenario(served):
        served.engine.paused = True
        call = post(served)
        await until(lambda: served.engine.num_unfinished_requests)
        call.disconnect()
        await call.task
        served.state.streams.find("cmpl-abc", None)._leave()
        again = get(served, "cmpl-abc")
        await again.task
        assert again.status == 404
        await until(lambda: served.engine.num_unfinished_requests == 0)
        assert served.engine.request_memory.used == 0

    with_server(scenario, resume_grace=GRACE)
