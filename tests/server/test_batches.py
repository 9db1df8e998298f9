"""/v1/batches: answers in the background, wrong files, and interruptions."""

import asyncio
import contextlib
import json
import logging
import shutil
import time
from functools import partial

import openai
import pytest
from openai.types import Batch

from octavo.config import EngineConfig
from octavo.errors import SleepError
from octavo.server import batch_input, batch_line, batch_runner
from octavo.server.batch_journal import Journal
from octavo.server.batch_line import failed
from tests.server.fake_engine import FakeAsyncLLM, with_server
from tests.server.test_files import KEYS, as_user, client_of, post_file, strictly

URL = "/v1/completions"
CHAT = "/v1/chat/completions"


def line(custom_id, url=URL, **body):
    body = body or {"prompt": "x", "max_tokens": 3}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def lines(count, **body):
    return [line(f"n{i}", **body) for i in range(count)]


def data_of(*all_lines):
    return b"\n".join(x if isinstance(x, bytes) else x.encode() for x in all_lines)


async def begin(served, *all_lines, endpoint=URL, key=None, **fields):
    file = (await post_file(served, data_of(*all_lines), key=key)).json()
    made = await served.http.post(
        "/v1/batches",
        json={
            "input_file_id": file["id"],
            "endpoint": endpoint,
            "completion_window": "24h",
            **fields,
        },
        headers=as_user(key) if key else {},
    )
    assert made.status_code == 200, made.text
    return made.json()


async def get(served, batch, key=None):
    headers = as_user(key) if key else {}
    return (await served.http.get(f"/v1/batches/{batch['id']}", headers=headers)).json()


async def until(served, batch, *statuses, key=None, answered=0):
    while True:
        found = await get(served, batch, key)
        counts = found["request_counts"]
        enough = counts["completed"] + counts["failed"] >= answered
        if found["status"] in statuses and enough:
            return found
        assert found["status"] not in batch_runner.FINISHED, found
        await asyncio.sleep(0.005)


async def read(served, file_id):
    if file_id is None:
        return []
    found = await served.http.get(f"/v1/files/{file_id}/content")
    return [json.loads(text) for text in found.text.splitlines()]


def few_seats():
    return FakeAsyncLLM(EngineConfig.from_kwargs(max_num_seqs=2, served_model_name=["fake"]))


def slow_engine(step_time=0.01):
    engine = few_seats()
    engine.step_time = step_time
    return engine


def test_openai_client():
    async def scenario(served):
        client = client_of(served)
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        given = [
            line("b", CHAT, **chat),
            line("a", CHAT, **chat, max_tokens=2),
            "",
            line("wrong", CHAT, **chat, max_tokens=-1),
        ]
        file = await client.files.create(file=data_of(*given), purpose="batch")
        made = strictly(
            Batch,
            await client.batches.create(
                input_file_id=file.id,
                endpoint=CHAT,
                completion_window="24h",
                metadata={"for": "test"},
                output_expires_after={"anchor": "created_at", "seconds": 7200},
            ),
        )
        assert (made.status, made.metadata) == ("validating", {"for": "test"})
        assert made.expires_at == made.created_at + 86400
        while (found := await client.batches.retrieve(made.id)).status != "completed":
            strictly(Batch, found)
            await asyncio.sleep(0.005)
        strictly(Batch, found)
        counts = found.request_counts
        assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
        assert found.model == "fake"
        assert found.created_at <= found.in_progress_at <= found.finalizing_at <= found.completed_at
        output = await client.files.retrieve(found.output_file_id)
        assert (output.purpose, output.expires_at) == ("batch_output", output.created_at + 7200)
        good = await read(served, found.output_file_id)
        assert [answer["custom_id"] for answer in good] == ["b", "a"]
        for answer in good:
            assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
            body = openai.types.chat.ChatCompletion.model_validate(answer["response"]["body"])
            assert body.id == "chatcmpl-" + answer["response"]["request_id"]
            assert body.created == found.created_at
            assert body.usage.prompt_tokens_details is None  # it would depend on other requests
            assert answer["id"].startswith("batch_req_")
        assert body.choices[0].message.content == "He"
        (bad,) = await read(served, found.error_file_id)
        assert (bad["custom_id"], bad["error"]) == ("wrong", None)
        assert bad["response"]["status_code"] == 400
        assert bad["response"]["body"]["error"]["param"] == "max_tokens"
        assert [batch.id async for batch in client.batches.list()] == [made.id]
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.ConflictError, match="is completed and cannot be cancelled"):
            await client.batches.cancel(made.id)

    with_server(scenario)


RESPONSES = "/v1/responses"


def test_responses():
    """They are not stored, also after store=true; their times do not depend on when they run."""
    given = [
        line("a", RESPONSES, input="hi", store=True, max_output_tokens=4),
        line("b", RESPONSES, input=[{"role": "user", "content": "hi"}]),
        line("item", RESPONSES, input=[{"type": "item_reference", "id": "msg_1"}]),
        line("stream", RESPONSES, input="hi", stream=True),
        *(
            line(param, RESPONSES, input="hi", **{param: value})
            for param, value in (
                ("previous_response_id", "resp_1"),
                ("conversation", "conv_1"),
                ("background", True),
            )
        ),
    ]

    async def scenario(served):
        batch = await begin(served, *given, endpoint=RESPONSES)
        found = await until(served, batch, "completed")
        assert found["request_counts"] == {"total": 7, "completed": 2, "failed": 5}
        first, second = [a["response"]["body"] for a in await read(served, found["output_file_id"])]
        assert (first["status"], second["status"]) == ("incomplete", "completed")
        for response in (first, second):
            openai.types.responses.Response.model_validate(response, strict=True)
            assert response["store"] is False
            assert response["created_at"] == batch["created_at"]
            assert response["completed_at"] in (batch["created_at"], None)
            got = await served.http.get(f"{RESPONSES}/{response['id']}")
            assert got.status_code == 404
        assert second["output"][-1]["content"][0]["text"] == "Hello, wörld!"
        errors = await read(served, found["error_file_id"])
        params = [e["response"]["body"]["error"]["param"] for e in errors]
        assert params == ["input[0].type", "stream", *[e["custom_id"] for e in errors[2:]]]

    with_server(scenario)


HUGE = 8 * 2**20 + 2**17


@pytest.mark.parametrize(
    ("wrong", "code", "param", "said"),
    [
        (b"garbage", "invalid_json_line", None, "is not valid JSON"),
        (b"\x00" * 50, "invalid_json_line", None, "is not valid JSON"),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None, "is not valid JSON"),
        (b"[" * 100_000, "invalid_json_line", None, "is not"),
        (b'{"body": ' + b"[" * 100_000, "invalid_json_line", None, "is not"),
        (line("b", prompt="x", n={})[:-9], "invalid_json_line", None, "is not valid"),
        (b"a" * HUGE, "line_too_long", None, "is longer than a request"),
        (b"5", "invalid_json_line", None, "is not a JSON object"),
        (b'{"custom_id": "x"}', "missing_required_parameter", "method", "has no method"),
        (line("b", "/v1/images"), "invalid_url", "url", "has url='/v1/images'"),
        (line("b", CHAT), "invalid_url", "url", "the batch is for /v1/completions"),
        (line("b").replace("POST", "GET"), "invalid_method", "method", "has method='GET'"),
        (line("a"), "duplicate_custom_id", "custom_id", "'a' of an earlier line"),
        (line(""), "invalid_custom_id", "custom_id", "0 characters"),
        (line("b" * 513), "invalid_custom_id", "custom_id", "513 characters"),
        (line("b").replace('"b"', "5"), "invalid_type", "custom_id", "of JSON's type int"),
        (line("b", prompt="x", model="gpt"), "model_not_found", "body.model", "'gpt'; this server"),
        (line("b", prompt="x", model=5), "invalid_body", "body", "is no object"),
        (
            b'{"custom_id":"b","method":"POST","url":"/v1/completions","body":7}',
            *["invalid_body"],
            "body",
            "is no object",
        ),
    ],
)
def test_a_wrong_line_fails_the_batch_before_any_runs(wrong, code, param, said):
    async def scenario(served):
        batch = await begin(served, line("a"), wrong, line("c"))
        found = await until(served, batch, "failed")
        (error,) = found["errors"]["data"]
        assert (error["code"], error["param"], error["line"]) == (code, param, 2)
        assert said in error["message"]
        assert len(error["message"]) < 400
        assert found["output_file_id"] is found["error_file_id"] is None
        assert found["failed_at"] >= found["created_at"]
        assert served.engine.requests == []

    with_server(scenario)


def test_garbage_ends_early(tmp_path, monkeypatch):
    read_lines, read = batch_input.read_lines, []

    def noted(*args):
        for number, text in read_lines(*args):
            read.append(number)
            yield number, text

    monkeypatch.setattr(batch_input, "read_lines", noted)
    path = tmp_path / "in"
    path.write_bytes(b"x\n" * 1000)
    found = batch_input.check_input(path, URL, ["fake"], 2**20)
    assert len(found.errors) == len(read) == 100


def test_numbers_of_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_input, "MAX_LINES", 3)
    path = tmp_path / "in"
    for count, code in ((0, "empty_file"), (3, None), (4, "too_many_lines")):
        path.write_bytes(data_of(*lines(count), b" ", b"\r\n"))
        found = batch_input.check_input(path, URL, ["fake"], 2**20)
        assert [error.code for error in found.errors] == ([code] if code else [])


def test_a_long_line_is_not_kept_in_memory(tmp_path):
    path = tmp_path / "in"
    with path.open("wb") as stream:
        stream.write(line("a").encode() + b"\n")
        stream.truncate(100 * 2**20)  # a line of zeros that the disk need not hold
        stream.seek(0, 2)
        stream.write(b"\n" + line("c").encode())
    found = list(batch_input.read_lines(path, 2**20))
    assert [(number, data is None) for number, data in found] == [
        (1, False),
        (2, True),
        (3, False),
    ]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/v1/images"}, 400, "endpoint"),
        ({"endpoint": "/v1/messages"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"input_file_id": "../x"}, 404, "input_file_id"),
        ({"metadata": {str(i): "" for i in range(17)}}, 400, "metadata"),
        ({"metadata": {"a" * 65: ""}}, 400, "metadata." + "a" * 65),
        ({"metadata": {"a": "b" * 513}}, 400, "metadata.a"),
        (
            {"output_expires_after": {"anchor": "now", "seconds": 3600}},
            400,
            "output_expires_after.anchor",
        ),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            400,
            "output_expires_after.seconds",
        ),
    ],
)
def test_wrong_batches(fields, status, param):
    async def scenario(served):
        file = (await post_file(served, data_of(line("a")))).json()["id"]
        good = {"input_file_id": file, "endpoint": URL, "completion_window": "24h"}
        found = await served.post("/v1/batches", **good | fields)
        assert (found.status_code, found.json()["error"]["param"]) == (status, param)

    with_server(scenario)


def test_a_batch_needs_a_file_for_batches():
    async def scenario(served):
        file = (await post_file(served, purpose="user_data")).json()["id"]
        found = await served.post(
            "/v1/batches", input_file_id=file, endpoint=URL, completion_window="24h"
        )
        assert found.status_code == 400
        assert "purpose='user_data'" in found.json()["error"]["message"]

    with_server(scenario)


def test_batches_of_another_key_do_not_exist():
    async def scenario(served):
        mine = await begin(served, *lines(3), key="a")
        for method, path in (("GET", ""), ("POST", "/cancel")):
            url = f"/v1/batches/{mine['id']}{path}"
            theirs = await served.http.request(method, url, headers=as_user("b"))
            assert (theirs.status_code, theirs.json()["error"]["code"]) == (404, "batch_not_found")
        listed = await served.http.get("/v1/batches", headers=as_user("b"))
        assert listed.json()["data"] == []
        stolen = await served.http.post(
            "/v1/batches",
            json={
                "input_file_id": mine["input_file_id"],
                "endpoint": URL,
                "completion_window": "24h",
            },
            headers=as_user("b"),
        )
        assert stolen.status_code == 404
        done = await until(served, mine, "completed", key="a")
        output = await served.http.get(
            f"/v1/files/{done['output_file_id']}/content", headers=as_user("b")
        )
        assert output.status_code == 404
        salts = {request.options.cache_salt for request in served.engine.requests}
        assert len(salts) == 1
        assert None not in salts
        assert {request.options.tenant for request in served.engine.requests} != {None}

    with_server(scenario, api_key=["a", "b"])


def test_lines_run_in_the_background_a_few_at_a_time():
    async def scenario(served):
        served.engine.paused = True
        batch = await begin(served, *lines(40))
        while served.engine.num_unfinished_requests < 2:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert served.engine.num_unfinished_requests == 2
        served.engine.paused = False
        await until(served, batch, "completed")
        assert all(request.options.background for request in served.engine.requests)
        await served.complete()
        assert not served.engine.requests[-1].options.background

    with_server(scenario, few_seats)


def test_lines_take_no_places_of_others():
    async def scenario(served):
        served.engine.paused = True
        batch = await begin(served, *lines(40))
        while served.engine.num_unfinished_requests < 2:
            await asyncio.sleep(0.005)
        served.engine.paused = False
        answer = await served.complete()
        assert answer.status_code == 200
        await until(served, batch, "completed")

    with_server(scenario, few_seats, max_num_queued_reqs=1)


def test_lines_leave_most_of_the_memory_and_wait_for_room(monkeypatch):
    monkeypatch.setattr(batch_runner, "_LINE_RETRY", 0.01)
    engine = few_seats()

    async def scenario(served):
        held = served.engine.request_memory.reserve
        rejections = 0

        @contextlib.contextmanager
        def reserve(nbytes, tenant=None, *, background=False):
            nonlocal rejections
            assert background
            try:
                with held(2**28, tenant, background=background):  # a quarter of the memory
                    yield
            except batch_runner.QueueFullError:
                rejections += 1
                raise

        real = served.engine.serve

        async def serve(prompt, params, request_id, options, *, add_special_tokens, stages=None):
            with reserve(1, options.tenant, background=options.background):
                async for output in real(
                    prompt, params, request_id, options, add_special_tokens=add_special_tokens
                ):
                    yield output

        served.engine.serve = serve
        batch = await begin(served, *lines(6))
        done = await until(served, batch, "completed")
        assert done["request_counts"]["completed"] == 6
        assert rejections > 0
        assert served.engine.request_memory.used == 0

    with_server(scenario, lambda: engine)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (URL, {"prompt": "x"}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
        (RESPONSES, {"input": "x"}),
    ],
)
def test_lines_that_the_operator_stops_run_again(url, body, monkeypatch):
    monkeypatch.setattr(batch_runner, "_LINE_RETRY", 0.01)
    real, failures = batch_runner.answer_line, []

    async def answer_line(state, request, context, batches):
        answer = await real(state, request, context, batches)
        if not failures and b"rld!" in answer.body:
            failures.append(answer)
            return failed(context.request_id, SleepError("The engine fell asleep."))
        return answer

    monkeypatch.setattr(batch_runner, "answer_line", answer_line)

    async def scenario(served):
        served.engine.num_to_abort = 2
        batch = await begin(served, *(line(name, url, **body) for name in "abc"), endpoint=url)
        done = await until(served, batch, "completed")
        assert done["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        answers = [a["response"]["body"] for a in await read(served, done["output_file_id"])]
        assert all("Hello, wörld!" in json.dumps(a, ensure_ascii=False) for a in answers)
        assert len(served.engine.requests) == 6

    with_server(scenario)


def test_a_line_that_quotes_the_end_of_a_stopped_one_runs_once(monkeypatch):
    monkeypatch.setattr(batch_runner, "_LINE_RETRY", 0.01)
    quoted = {"finish_reason": "abort", "status": "cancelled"}

    async def scenario(served):
        given = line("a", RESPONSES, input="x", metadata=quoted)
        batch = await begin(served, given, endpoint=RESPONSES)
        while (await get(served, batch))["status"] != "completed":
            assert len(served.engine.requests) <= 1
            await asyncio.sleep(0.005)

    with_server(scenario)


def test_lines_are_recorded_beside_requests():
    async def scenario(served):
        await served.complete(request_id="mine", max_tokens=1)
        done = await until(
            served,
            await begin(served, line("bad", prompt="x", explain=True), *lines(5)),
            "completed",
        )
        written = await read(served, done["output_file_id"])
        (failed,) = await read(served, done["error_file_id"])
        assert failed["response"]["body"]["error"]["param"] == "explain"
        listed = (await served.http.get("/v1/requests")).json()["data"]
        ids = {answer["response"]["body"]["id"] for answer in written}
        # The last three, and the request, which more lines have not pushed out.
        assert len(ids & {entry["id"] for entry in listed}) == 3
        assert listed[-1]["id"] == "cmpl-mine"
        last = next(entry for entry in listed if entry["id"] in ids)
        assert (last["path"], last["status"], last["finished"]) == (URL, 200, True)
        for name in (last["id"], last["request_id"]):
            found = (await served.http.get(f"/v1/requests/{name}/explain")).json()
            assert found["id"] == last["id"]
            assert sum(p["ms"] for p in found["timeline"]) == pytest.approx(found["wall_ms"])
        assert found["cache"]["miss"] is None

    with_server(scenario, few_seats, explain_requests=3)


def test_a_try_of_a_line_that_found_no_room_is_not_recorded(monkeypatch):
    monkeypatch.setattr(batch_runner, "_LINE_RETRY", 0.01)

    async def scenario(served):
        serve, refused = served.engine.serve, []

        async def full(*args, **options):
            if len(refused) < 2:
                refused.append(1)
                raise batch_runner.QueueFullError("Try again.", 1)
            async for output in serve(*args, **options):
                yield output

        served.engine.serve = full
        await until(served, await begin(served, line("a")), "completed")
        listed = (await served.http.get("/v1/requests")).json()["data"]
        assert len(refused) == 2
        assert [entry["status"] for entry in listed] == [200]

    with_server(scenario)


def test_batches_take_turns():
    async def scenario(served):
        long = await begin(served, *lines(60))
        await until(served, long, "in_progress", answered=1)
        short = await begin(served, *lines(2))
        await until(served, short, "completed")
        assert (await get(served, long))["status"] == "in_progress"
        served.engine.step_time = 0.0
        await until(served, long, "completed")

    with_server(scenario, partial(slow_engine, 0.005))


def test_cancel():
    async def scenario(served):
        client = client_of(served)
        batch = await begin(served, *lines(500))
        before = await until(served, batch, "in_progress", answered=3)
        cancelling = strictly(Batch, await client.batches.cancel(batch["id"]))
        assert cancelling.status == "cancelling"
        found = await until(served, batch, "cancelled", "cancelling")
        found = await until(served, batch, "cancelled")
        assert found["cancelling_at"] <= found["cancelled_at"]
        answers = await read(served, found["output_file_id"])
        assert before["request_counts"]["completed"] <= len(answers) < 500
        assert len(answers) == found["request_counts"]["completed"]
        assert found["error_file_id"] is None
        assert served.engine.num_unfinished_requests == 0

    with_server(scenario, partial(slow_engine, 0.002))


def test_cancel_at_once():
    async def scenario(served):
        served.engine.paused = True
        batch = await begin(served, *lines(500))
        found = await served.http.post(f"/v1/batches/{batch['id']}/cancel")
        assert found.json()["status"] == "cancelling"
        again = await served.http.post(f"/v1/batches/{batch['id']}/cancel")
        assert again.status_code in (200, 409)
        served.engine.paused = False
        await until(served, batch, "cancelled")
        page = await served.http.post(
            f"/v1/batches/{batch['id']}/cancel", headers={"origin": "http://evil"}
        )
        assert page.status_code == 403

    with_server(scenario)


def test_a_batch_expires(monkeypatch):
    windows = iter((2, 20))
    short = [line(f"short {i}", prompt="x", max_tokens=1) for i in range(20)]

    async def scenario(served):
        endless = lines(2980, prompt="x", max_tokens=400, ignore_eos=True)
        found = {"output_file_id": None}
        while found["output_file_id"] is None:  # on a busy machine none is answered at first
            monkeypatch.setattr(batch_runner, "WINDOW", next(windows))
            batch = await begin(served, *short, *endless)
            found = await until(served, batch, "expired")
        assert found["expired_at"] >= found["expires_at"]
        good = await read(served, found["output_file_id"])
        bad = await read(served, found["error_file_id"])
        assert len(good) + len(bad) == 3000
        assert good
        assert {answer["error"]["code"] for answer in bad} == {"batch_expired"}
        assert all(answer["response"] is None for answer in bad)
        ids = {answer["custom_id"] for answer in good + bad}
        assert len(ids) == 3000
        assert found["request_counts"]["failed"] == len(bad)

    with_server(scenario, slow_engine)


def test_the_file_of_an_unfinished_batch_stays():
    async def scenario(served):
        served.engine.paused = True
        batch = await begin(served, *lines(100))
        found = await served.http.delete(f"/v1/files/{batch['input_file_id']}")
        assert (found.status_code, found.json()["error"]["code"]) == (409, "file_in_use")
        served.engine.paused = False
        await until(served, batch, "completed")
        assert (await served.http.delete(f"/v1/files/{batch['input_file_id']}")).is_success

    with_server(scenario)


def test_limit_of_unfinished_batches(monkeypatch):
    monkeypatch.setattr(batch_runner, "MAX_UNFINISHED", 3)

    async def scenario(served):
        served.engine.paused = True
        batches = [await begin(served, line("a")) for _ in range(3)]
        file = batches[0]["input_file_id"]
        body = {"input_file_id": file, "endpoint": URL, "completion_window": "24h"}
        found = await served.post("/v1/batches", **body)
        assert (found.status_code, found.json()["error"]["code"]) == (429, "queue_full")
        served.engine.paused = False
        for batch in batches:
            await until(served, batch, "completed")
        assert (await served.post("/v1/batches", **body)).is_success

    with_server(scenario)


def test_old_batches_are_forgotten(monkeypatch, tmp_path):
    monkeypatch.setattr(batch_runner, "_MAX_BATCHES", 2)

    async def scenario(served):
        batches = []
        for _ in range(4):
            batches.append(await begin(served, line("a")))
            await until(served, batches[-1], "completed")
        listed = (await served.http.get("/v1/batches?order=asc&limit=1")).json()
        assert listed["has_more"]
        assert listed["data"][0]["id"] == batches[2]["id"]
        assert len([*(tmp_path / "s" / "batches").glob("*.json")]) == 2

    with_server(scenario, state_dir=str(tmp_path / "s"))


def test_a_key_with_many_batches_forgets_its_own(monkeypatch):
    monkeypatch.setattr(batch_runner, "_MAX_BATCHES", 3)

    async def scenario(served):
        small = await begin(served, line("a"), key="a")
        await until(served, small, "completed", key="a")
        for _ in range(4):
            many = await begin(served, line("a"), key="b")
            await until(served, many, "completed", key="b")
        assert (await get(served, small, key="a"))["status"] == "completed"
        listed = await served.http.get("/v1/batches", headers=as_user("b"))
        assert len(listed.json()["data"]) == 2

    with_server(scenario, **KEYS)


BODIES = [
    {"prompt": "x", "max_tokens": 4, "temperature": 0, "n": 2},
    {"prompt": "x", "max_tokens": 30, "temperature": 1, "seed": 5, "logprobs": 1},
    {"prompt": "x", "max_tokens": -1},
]


def interrupted(tmp_path, name, answered):
    """Begin a batch, and stop the server after some answers; return the batch."""
    found = {}

    async def scenario(served):
        given = [line(f"n{i}", **BODIES[i % 3]) for i in range(60)]
        found["batch"] = await begin(served, *given)
        await until(served, found["batch"], "in_progress", answered=answered)
        served.state.begin_drain()
        while served.engine.num_unfinished_requests:
            await asyncio.sleep(0.005)

    with_server(scenario, partial(slow_engine, 0.001), state_dir=str(tmp_path / name))
    return found["batch"]


def finished(tmp_path, name, batch):
    """Finish a batch; return the bytes of its two files, and the number of lines that ran."""
    found = {}

    async def scenario(served):
        done = await until(served, batch, "completed")
        assert done["request_counts"] == {"total": 60, "completed": 40, "failed": 20}
        for kind in ("output", "error"):
            url = f"/v1/files/{done[f'{kind}_file_id']}/content"
            found[kind] = (await served.http.get(url)).content
        found["ran"] = len(served.engine.requests)
        while (tmp_path / name / "batches" / f"{batch['id']}.journal").exists():
            await asyncio.sleep(0.005)

    with_server(scenario, few_seats, state_dir=str(tmp_path / name))
    return found


def test_a_restart_continues_with_the_same_bytes(tmp_path, caplog):
    batch = interrupted(tmp_path, "a", 20)
    journal = tmp_path / "a" / "batches" / f"{batch['id']}.journal"
    num_done = journal.read_bytes().count(b"\n")
    assert 20 <= num_done < 60
    names = ("a", "fresh", "torn", "broken", "damaged")
    for name in names[1:]:
        shutil.copytree(tmp_path / "a", tmp_path / name)
    (tmp_path / "fresh" / "batches" / journal.name).unlink()
    with (tmp_path / "torn" / "batches" / journal.name).open("ab") as torn:
        torn.write(b'59 1 {"id": "batch_req_0", "cus')
    broken = tmp_path / "broken" / "batches" / journal.name
    broken.write_bytes(broken.read_bytes()[:-1500] + b"\x00" * 1500)
    damage(tmp_path / "damaged" / "batches" / journal.name)
    with caplog.at_level(logging.WARNING):
        found = {name: finished(tmp_path, name, batch) for name in names}
    for kind in ("output", "error"):
        assert len({each[kind] for each in found.values()}) == 1
        assert found["a"][kind].count(b"\n") == {"output": 40, "error": 20}[kind]
    assert found["fresh"]["ran"] == 40
    assert found["a"]["ran"] < 40
    assert found["torn"]["ran"] == found["a"]["ran"]
    assert found["damaged"]["ran"] == found["a"]["ran"] + 1
    told = [r.getMessage() for r in caplog.records if "incomplete or damaged" in r.getMessage()]
    assert [text.partition(": ")[2].split(" ")[0] for text in told] == ["1", "1", "2"]


def damage(journal):
    """Change a letter of the first answer in a journal, and the number of the first error."""
    records = journal.read_bytes().splitlines(keepends=True)
    answer = next(i for i, record in enumerate(records) if record.split()[1] == b"1")
    error = next(i for i, record in enumerate(records) if record.split()[1] == b"0")
    records[answer] = records[answer].replace(b"text_completion", b"test_completion")
    records[error] = b"1" + records[error]
    journal.write_bytes(b"".join(records))


def test_a_restart_while_the_files_are_written(tmp_path, monkeypatch):
    def interrupt(*_):
        raise OSError("power cut")

    with monkeypatch.context() as broken:
        broken.setattr(batch_runner.BatchRunner, "_forget_oldest", lambda self: asyncio.sleep(0))
        broken.setattr(batch_runner._Job, "_write_file", interrupt)
        batch = {}

        async def scenario(served):
            batch.update(await begin(served, *[line(f"n{i}", **BODIES[i % 3]) for i in range(60)]))
            await until(served, batch, "finalizing")

        with_server(scenario, few_seats, state_dir=str(tmp_path / "s"))
    shutil.copytree(tmp_path / "s", tmp_path / "damaged")
    damage(tmp_path / "damaged" / "batches" / f"{batch['id']}.journal")
    whole, damaged = (finished(tmp_path, name, batch) for name in ("s", "damaged"))
    assert (whole.pop("ran"), damaged.pop("ran")) == (0, 1)
    assert damaged == whole


def test_a_full_disk_pauses_a_batch(monkeypatch):
    monkeypatch.setattr(batch_runner, "_DISK_RETRY", 0.02)
    written, failures = Journal._write, []

    def write(self, data):
        if len(failures) < 3:
            self._stream.write(data[:20])
            self._stream.flush()
            failures.append(data)
            raise OSError(28, "No space left on device")
        written(self, data)

    monkeypatch.setattr(Journal, "_write", write)

    async def scenario(served):
        batch = await begin(served, *lines(20))
        done = await until(served, batch, "completed")
        assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        answers = await read(served, done["output_file_id"])
        assert [answer["custom_id"] for answer in answers] == [f"n{i}" for i in range(20)]
        assert len(failures) == 3

    with_server(scenario, few_seats)


def test_a_batch_waits_for_room_among_the_files(monkeypatch):
    monkeypatch.setattr(batch_runner, "_DISK_RETRY", 0.02)

    async def scenario(served):
        filler = [(await post_file(served, b"x" * 4000)).json()["id"] for _ in range(47)]
        batch = await begin(served, *lines(35))
        await until(served, batch, "in_progress", answered=20)
        await asyncio.sleep(0.2)
        stuck = await get(served, batch)
        assert stuck["status"] == "in_progress"
        assert stuck["request_counts"]["completed"] < 35
        for file_id in filler[:10]:
            await served.http.delete(f"/v1/files/{file_id}")
        await until(served, batch, "completed")

    with_server(scenario, max_file_bytes=4096)


def test_a_key_without_room_does_not_keep_the_places_of_others(monkeypatch):
    monkeypatch.setattr(batch_runner, "_DISK_RETRY", 0.02)

    async def scenario(served):
        files = [(await post_file(served, data_of(*lines(9)), key="a")).json() for _ in range(2)]
        filler = []
        for size in (4000, 1000, 300, 100, 30):
            while (made := await post_file(served, b"x" * size, key="a")).is_success:
                filler.append(made.json()["id"])
        full = []
        for file in files:
            body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
            found = await served.http.post("/v1/batches", json=body, headers=as_user("a"))
            full.append(found.json())
        while len(served.engine.requests) < 2:
            await asyncio.sleep(0.005)
        other = await begin(served, *lines(9), key="b")
        await until(served, other, "completed", key="b")
        assert len(served.engine.requests) == 2 + 9
        for file_id in filler[:10]:
            await served.http.delete(f"/v1/files/{file_id}", headers=as_user("a"))
        for batch in full:
            await until(served, batch, "completed", key="a")

    with_server(scenario, few_seats, max_file_bytes=4096, **KEYS)


def test_a_key_that_is_gone(tmp_path):
    batch = {}

    async def before(served):
        served.engine.paused = True
        batch.update(await begin(served, *lines(3), key="a"))

    async def after(served):
        listed = await served.http.get("/v1/batches", headers=as_user("b"))
        assert listed.json()["data"] == []
        file, record = tmp_path / "s" / "batches" / f"{batch['id']}.json", {"status": None}
        while record["status"] not in batch_runner.FINISHED:
            await asyncio.sleep(0.005)
            record = json.loads(file.read_text())
        assert (record["status"], record["errors"][0]["code"]) == ("failed", "invalid_api_key")
        assert served.engine.requests == []
        assert "a" not in json.dumps(record["owner"]).split('"')

    settings = {"state_dir": str(tmp_path / "s")}
    with_server(before, api_key=["a", "b"], **settings)
    with_server(after, api_key=["b"], **settings)


def test_an_engine_that_is_dead_for_good_leaves_the_batch(tmp_path):
    batch = {}

    async def before(served):
        batch.update(await begin(served, *lines(500)))
        await until(served, batch, "in_progress", answered=2)
        served.engine.die("it was killed too often")
        await asyncio.sleep(0.05)
        assert (await get(served, batch))["status"] == "in_progress"

    async def after(served):
        done = await until(served, batch, "completed")
        assert done["request_counts"] == {"total": 500, "completed": 500, "failed": 0}

    with_server(before, partial(slow_engine, 0.002), state_dir=str(tmp_path / "s"))
    with_server(after, state_dir=str(tmp_path / "s"))


def test_long_answers_are_written_one_at_a_time_and_have_a_limit(monkeypatch):
    monkeypatch.setattr(batch_line, "_SMALL", 1000)
    monkeypatch.setattr(batch_line, "MAX_ANSWER_BYTES", 50_000)
    writing, most = 0, 0

    class Counted(asyncio.Lock):
        async def acquire(self):
            nonlocal writing, most
            await super().acquire()
            writing, most = writing + 1, most + 1
            assert writing == 1
            return True

        def release(self):
            nonlocal writing
            writing -= 1
            super().release()

    async def scenario(served):
        served.state.long_line = Counted()
        long = {"prompt": "x", "n": 8, "logprobs": 5, "max_tokens": 13}
        given = [line(f"n{i}", **long) for i in range(4)]
        given.append(line("too long", **{**long, "n": 64}))
        batch = await begin(served, *given, line("short"))
        done = await until(served, batch, "completed")
        assert done["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
        (wrong,) = await read(served, done["error_file_id"])
        assert wrong["custom_id"] == "too long"
        error = wrong["response"]["body"]["error"]
        assert error["code"] == "answer_too_long"
        assert "50000 bytes" in error["message"]
        answers = await read(served, done["output_file_id"])
        assert [len(a["response"]["body"]["choices"]) for a in answers] == [8] * 4 + [1]
        assert most == 5
        assert not served.state.long_line.locked()

    with_server(scenario)


def test_many_batches_take_one_thread(monkeypatch):
    check, running, most = batch_runner.check_input, [], []

    def slow(*args):
        running.append(args)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()
        return check(*args)

    monkeypatch.setattr(batch_runner, "check_input", slow)

    async def scenario(served):
        for batch in await asyncio.gather(*(begin(served, *lines(2)) for _ in range(5))):
            await until(served, batch, "completed")
        assert most == [1] * 5

    with_server(scenario)


def test_records_are_written_in_their_order(monkeypatch, tmp_path):
    write, written = batch_runner.write_file, []

    def reordered(path, data):
        status = json.loads(data)["status"]
        if status == "in_progress":
            time.sleep(0.05)
        write(path, data)
        written.append(status)

    monkeypatch.setattr(batch_runner, "write_file", reordered)

    async def scenario(served):
        batch = await begin(served, *lines(200))
        await until(served, batch, "in_progress")
        await served.http.post(f"/v1/batches/{batch['id']}/cancel")
        await until(served, batch, "cancelled")
        while "cancelled" not in written:  # the batch ends a moment before its record is written
            await asyncio.sleep(0.005)
        assert written[:3] == ["validating", "in_progress", "cancelling"]
        assert written[-1] == "cancelled"

    with_server(scenario, slow_engine)
