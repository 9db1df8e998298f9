"""GET /v1/requests and their explanations: who may see them, and what they say."""

import asyncio
import itertools
from urllib.parse import quote

import msgspec
import pytest

from octavo.frontend import time_line
from octavo.frontend.time_line import Span
from octavo.observability.steps import StepEvent, StepPart, StepRecord, StepWait
from octavo.server.explain import MAX_SPANS, TITLES, shortened, told_cache
from octavo.system import clock
from tests.server.fake_engine import Call, FakeAsyncLLM, with_server
from tests.server.pooled import EMBED, TOKENS


class Logging(FakeAsyncLLM):
    """Fake engine that logs steps of its requests: a wait, two chunks and a step."""

    async def _stream(self, request, sampling_params, text=None):
        async for output in super()._stream(request, sampling_params, text):
            yield output
        begin = clock.now()
        self.log_steps(f"{request.request_id}#1", begin)

    def log_steps(self, name, begin):
        other = StepPart("cmpl-o-0-999999#1", 10)
        at = [begin - 0.008 + 0.002 * i for i in range(5)]
        records = [
            StepRecord(
                1,
                *(at[0], at[0], at[0], at[1], at[1]),
                [other],
                StepWait(name, "SEAT"),
                events=[StepEvent(name, at[0], "ADDED")],
            ),
            StepRecord(
                2, *(at[1], at[1], at[1], at[2], at[2]), [StepPart(name, 2, 0, 0, 3), other]
            ),
            StepRecord(3, *(at[2], at[2], at[2], at[3], at[3]), [StepPart(name, 1), other]),
            StepRecord(4, *(at[3], at[3], at[3], at[4], at[4]), [StepPart(name, 1)]),
        ]
        steps = [msgspec.Raw(msgspec.msgpack.encode(record)) for record in records]
        self.step_log.add(0, begin, steps)


def slow():
    engine = Logging()
    engine.step_time = 0.01
    engine.step_log.ready = 0.0
    return engine


def test_the_time_line_of_a_request():
    async def scenario(served):
        call = await served.complete(max_tokens=2, request_id="mine")
        assert call.status_code == 200
        for name in ("mine", "cmpl-mine"):
            found = (await served.http.get(f"/v1/requests/{name}/explain")).json()
            assert found["id"] == "cmpl-mine"
        causes = [span["cause"] for span in found["timeline"]]
        assert causes[:4] == ["receive", "parse", "start", "render"]
        place = causes.index("prefill")
        assert causes[place - 1 :] == ["queued", "prefill", "decode", "deliver"]
        queued, prefill, decode, _ = found["timeline"][place - 1 :]
        assert (queued["reason"], queued["is_behind"], queued["others"]) == ("SEAT", False, 1)
        seats = served.engine.config.scheduler.max_num_seqs
        assert queued["text"] == (
            f"queued: other requests had all {seats} seats (max_num_seqs): #1"
        )
        assert queued["who"] == [{"number": "1", "ms": pytest.approx(queued["ms"], abs=0.01)}]
        assert queued["more"] == 0
        assert (prefill["steps"], prefill["tokens"]) == (2, 3)
        assert prefill["text"].startswith(
            "the prompt was computed in 2 chunks, 3 tokens, shared with 1 other: #1 ("
        )
        assert decode["others"] == 0
        assert sum(span["ms"] for span in found["timeline"]) == pytest.approx(found["wall_ms"])
        (advice,) = [a for a in found["advice"] if a["setting"] == "max_num_seqs"]
        assert advice["saved_ms"] == pytest.approx(queued["ms"], abs=0.01)
        assert advice["estimate"] == "at_most"
        (answer,) = found["answers"]
        assert (answer["prompt_chunks"], answer["steps"], answer["followed"]) == (2, 3, True)
        assert answer["number"] == "1"

    with_server(scenario, engine=slow)


class LoggingPool(FakeAsyncLLM):
    """Fake engine of a model of vectors that logs a step for each two texts."""

    def __init__(self):
        super().__init__(poolers=(EMBED, TOKENS))
        self.step_log.ready = 0.0
        self.waiting = []

    async def _stream(self, request, sampling_params, text=None):
        begin = clock.now()
        self.waiting.append((f"{request.request_id}#1", len(request.prompt_token_ids)))
        async for output in super()._stream(request, sampling_params, text):
            yield output
        if len(self.waiting) > 1:
            end = clock.now()
            parts = [StepPart(name, count, 0, 0, count) for name, count in self.waiting]
            self.waiting.clear()
            record = StepRecord(1, begin, begin, begin, end, end, parts)
            self.step_log.add(0, end, [msgspec.Raw(msgspec.msgpack.encode(record))])


POOLED = [
    ("/v1/embeddings", {"input": ["one", "two"]}, 8),
    ("/pooling", {"input": ["one", "two"], "task": "token_embed"}, 8),
    ("/rerank", {"query": "one", "documents": ["two"]}, 8),
    ("/v1/score", {"text_1": "one", "text_2": ["two"]}, 8),
    ("/api/embed", {"model": "fake", "input": ["one", "two"]}, 8),
    ("/v2/embed", {"texts": ["one", "two"]}, 8),
]


@pytest.mark.parametrize(("path", "body", "tokens"), POOLED)
def test_the_time_line_of_vectors(path, body, tokens):
    async def scenario(served):
        answer = (await served.post(path, request_id="mine", explain=True, **body)).json()
        told = answer["explanation"]
        found = (await served.http.get("/v1/requests/mine/explain")).json()
        assert (found["path"], found["status"], found["finished"]) == (path, 200, True)
        for explanation in (told, found):
            causes = [span["cause"] for span in explanation["timeline"]]
            assert causes[:2] == ["receive", "parse"]
            (step,) = [s for s in explanation["timeline"] if s["cause"] == "prefill"]
            assert (step["tokens"], step["others"]) == (tokens, 0)
            assert explanation["prompt_tokens"] == tokens
            assert explanation["completion_tokens"] == 0
            total = sum(span["ms"] for span in explanation["timeline"])
            assert total == pytest.approx(explanation["wall_ms"])
            assert [a["computed_tokens"] for a in explanation["answers"]] == [4, 4]
        assert {s["cause"] for s in found["timeline"]} >= {"deliver"}
        assert (await served.http.get("/v1/requests")).json()["data"][0]["request_id"] == "mine"

    with_server(scenario, engine=LoggingPool)


def test_very_many_texts_are_explained_by_the_last_ones():
    async def scenario(served):
        await served.post("/v1/embeddings", input="a", request_id="before")
        texts = [str(i) for i in range(4096)]
        answer = await served.post("/v1/embeddings", input=texts, request_id="mine", explain=True)
        told = answer.json()["explanation"]
        assert [a["prompt"] for a in told["answers"]] == list(range(3996, 4096))
        listed = (await served.http.get("/v1/requests")).json()["data"]
        assert [entry["request_id"] for entry in listed] == ["mine", "before"]

    with_server(scenario, engine=LoggingPool)


def test_answers_that_are_lists_have_no_explanation():
    async def scenario(served):
        bodies = {"/embed": {"inputs": "a"}, "/rerank": {"query": "a", "texts": ["b"]}}
        bodies["/similarity"] = {"inputs": {"source_sentence": "a", "sentences": ["b"]}}
        for path, body in bodies.items():
            answer = await served.post(path, explain=True, **body)
            assert answer.status_code == 400
            assert "has no place for it" in answer.text
        answer = await served.post("/embed", inputs="a")
        name = answer.headers["x-request-id"]
        found = (await served.http.get(f"/v1/requests/{name}/explain")).json()
        assert found["path"] == "/embed"

    with_server(scenario, engine=LoggingPool)


def test_a_refused_text_is_explained_to_its_end():
    async def scenario(served):
        answer = await served.post("/v1/embeddings", input="x" * 9999, request_id="mine")
        assert answer.status_code == 400
        found = (await served.http.get("/v1/requests/mine/explain")).json()
        assert (found["status"], found["finished"]) == (400, True)
        assert sum(s["ms"] for s in found["timeline"]) == pytest.approx(found["wall_ms"])

    with_server(scenario, engine=LoggingPool)
    with_server(refused_explanation, engine=LoggingPool, explain_requests=0)


async def refused_explanation(served):
    answer = await served.post("/v1/embeddings", input="x", explain=True)
    assert answer.json()["error"]["code"] == "explain_disabled"


def test_the_list_has_the_newest_first():
    async def scenario(served):
        await served.complete(request_id="one", max_tokens=3)
        await served.chat(request_id="two", max_tokens=1)
        data = (await served.http.get("/v1/requests")).json()["data"]
        assert [entry["id"] for entry in data] == ["chatcmpl-two", "cmpl-one"]
        assert [entry["path"] for entry in data] == ["/v1/chat/completions", "/v1/completions"]
        assert data[1]["completion_tokens"] == 3
        assert (data[1]["status"], data[1]["finished"]) == (200, True)

    with_server(scenario)


def test_a_running_request_is_explained_up_to_now():
    async def scenario(served):
        served.engine.paused = True
        call = Call(served, "/v1/completions", b'{"prompt":"hi","request_id":"slow"}')
        while not served.engine.live:
            await asyncio.sleep(0.01)
        found = (await served.http.get("/v1/requests/slow/explain")).json()
        assert (found["finished"], found["status"], found["first_token_ms"]) == (False, None, None)
        call.task.cancel()
        await asyncio.gather(call.task, return_exceptions=True)

    with_server(scenario)


KEYS = {"api_key": ["one", "two"], "admin_key": ["boss"]}


def key(name):
    return {"Authorization": f"Bearer {name}"}


def test_keys_see_their_own_requests_and_the_operator_sees_all():
    async def scenario(served):
        body = {"prompt": "hi", "max_tokens": 1, "request_id": "mine"}
        await served.http.post("/v1/completions", json=body, headers=key("one"))

        async def status(path, name):
            return (await served.http.get(path, headers=key(name))).status_code

        path = "/v1/requests/mine/explain"
        assert [await status(path, name) for name in ("one", "two", "boss")] == [200, 404, 200]
        lists = [
            (await served.http.get("/v1/requests", headers=key(name))).json()["data"]
            for name in ("one", "two", "boss")
        ]
        assert [len(data) for data in lists] == [1, 0, 1]
        # An id of another key is answered as an unknown one.
        theirs = (await served.http.get(path, headers=key("two"))).json()["error"]
        unknown = (await served.http.get("/v1/requests/none/explain", headers=key("two"))).json()
        assert theirs["code"] == unknown["error"]["code"] == "request_not_found"
        assert theirs["message"].replace("mine", "none") == unknown["error"]["message"]
        assert (await served.http.get(path)).status_code == 401

    with_server(scenario, **KEYS)


@pytest.mark.parametrize(("tokens", "told"), [(256, True), (255, False), (None, False)])
def test_another_engine_that_had_the_prefix_is_named(tokens, told):
    async def scenario(served):
        served.engine.holder = None if tokens is None else (1, tokens)
        answer = await served.complete(max_tokens=2, explain=True)
        found = answer.json()["explanation"]
        advice = {a["setting"]: a for a in found["advice"]}
        assert ("routing" in advice) == told
        if told:
            assert advice["routing"]["text"].startswith(
                "Engine 1 likely had the first 256 tokens of the prompt in its cache"
            )
            (prefill,) = [c["ms"] for c in found["causes"] if c["cause"] == "prefill"]
            assert advice["routing"]["saved_ms"] == prefill
            assert advice["routing"]["estimate"] == "at_most"

    with_server(scenario, engine=slow)


class Crowded(FakeAsyncLLM):
    """Fake engine in which each request waits for blocks that all earlier ones hold."""

    def __init__(self):
        super().__init__()
        self.step_time, self.step_log.ready = 0.01, 0.0
        self.seen = ["cmpl-unknown-0-999999#999"]

    async def _stream(self, request, sampling_params, text=None):
        name = f"{request.request_id}#{len(self.seen)}"
        begin = clock.now()
        async for output in super()._stream(request, sampling_params, text):
            yield output
        end = clock.now()
        middle = (begin + end) / 2
        holders = [(who, 40 - i) for i, who in enumerate(self.seen)]
        parts = [StepPart(who, 1) for who in self.seen]
        wait = StepWait(self.seen[-1], "BLOCKS", holders)
        added = [StepEvent(name, begin, "ADDED")]
        records = [
            StepRecord(1, *[begin] * 3, middle, middle, parts, wait, events=added),
            StepRecord(2, *[middle] * 3, end, end, [StepPart(name, 3, 0, 0, 3)]),
        ]
        self.step_log.add(0, end, [msgspec.Raw(msgspec.msgpack.encode(r)) for r in records])
        self.seen.append(name)


@pytest.mark.parametrize("keys", [{}, KEYS])
def test_others_have_numbers_for_those_who_may_see_them(keys):
    async def scenario(served):
        async def waited(name, who, **fields):
            body = {"prompt": "hi", "max_tokens": 1, "request_id": name, **fields}
            if fields:
                made = await served.http.post("/v1/completions", json=body, headers=key(who))
                found = made.json()["explanation"]
            else:
                path = f"/v1/requests/{name}/explain"
                found = (await served.http.get(path, headers=key(who))).json()
            return next(part for part in found["timeline"] if part["cause"] == "queued")

        for name, who in (("a", "one"), ("b", "two"), ("c", "one")):
            answered = await waited(name, who, explain=True)
        unknown = {"number": "999", "blocks": 40}
        a, b = ({"number": n, "id": f"cmpl-{i}", "blocks": 40 - int(n)} for n, i in ("1a", "2b"))
        all_of_them = "#999 (40), #1 (39), #2 (38)"
        for span, sees_all in (
            (answered, not keys),
            (await waited("c", "one"), not keys),
            (await waited("c", "boss"), True),
        ):
            assert span["others"] == 3
            assert span["is_behind"]
            if sees_all:
                assert (span["who"], span["more"]) == ([unknown, a, b], 0)
                assert [other["id"] for other in span["behind"]] == ["cmpl-b"]
                assert span["text"].startswith("queued behind #2: memory: other requests held")
                assert span["text"].endswith(all_of_them)
            else:
                assert (span["who"], span["more"]) == ([a], 2)
                assert span["behind"] == []
                assert span["text"].startswith("queued behind another request: memory")
                assert span["text"].endswith(": #1 (39) and 2 more")
                assert "cmpl-b" not in str(span)
                assert "999" not in str(span)

    with_server(scenario, engine=Crowded, **keys)


def test_without_records_the_setting_is_named():
    async def scenario(served):
        for path in ("/v1/requests", "/v1/requests/x/explain"):
            answer = await served.http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "explain_disabled")
            assert "--explain-requests" in answer.json()["error"]["message"]
        answer = await served.complete(explain=True)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "explain")
        assert "--explain-requests" in error["message"]
        assert (await served.complete()).status_code == 200

    with_server(scenario, explain_requests=0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("usage", [False, True])
def test_the_explanation_is_in_the_answer_on_request(stream, usage):
    async def scenario(served):
        options = {"stream_options": {"include_usage": usage}} if stream else {}
        answer = await served.complete(max_tokens=2, explain=True, stream=stream, **options)
        if not stream:
            assert answer.json()["explanation"]["object"] == "request.explanation"
            return
        events = [e.removeprefix("data: ") for e in answer.text.split("\n\n") if e]
        last = msgspec.json.decode(events[-2])
        assert last["choices"] == []
        assert last["explanation"]["completion_tokens"] == 2
        assert ("usage" in last) == usage
        assert not any("explanation" in event for event in events[:-2])

    with_server(scenario)


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
RUNNING = ("queued", "in_progress")
OTHERS = {
    "/v1/messages": {**CHAT, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/api/chat": {**CHAT, "model": "fake", "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "hi", "model": "fake", "options": {"num_predict": 2}},
}


def last_of(path, text):
    """Return the text of the last event of a stream, and of the others."""
    events = text.strip().split("\n" if path.startswith("/api/") else "\n\n")
    return msgspec.json.decode(events[-1][events[-1].index("{") :]), "".join(events[:-1])


@pytest.mark.parametrize("path", OTHERS)
def test_all_routes_explain_in_their_answer_or_last_event(path):
    async def scenario(served):
        body = {**OTHERS[path], "stream": False}
        plain = await served.http.post(path, json=body)
        assert "explanation" not in plain.json()
        answer = await served.http.post(path, json={**body, "explain": True})
        assert "X-Octavo-Ignored-Fields" not in answer.headers
        whole = answer.json()["explanation"]
        stream = {**body, "explain": True, "stream": True}
        last, before = last_of(path, (await served.http.post(path, json=stream)).text)
        assert '"explanation"' not in before
        streamed = last.get("response", last) if path == "/v1/responses" else last
        for found in (whole, streamed["explanation"]):
            assert found["path"] == path
            assert found["completion_tokens"] == 2
            causes = {part["cause"] for part in found["timeline"]}
            assert causes >= {"prefill", "decode"}
            name = found["id"]
            again = (await served.http.get(f"/v1/requests/{name}/explain?simulate=false")).json()
            assert again.keys() == found.keys()
            assert again["id"] == name
        if path.startswith("/v1/"):
            assert whole["id"] == answer.json()["id"]

    with_server(scenario, engine=slow)


@pytest.mark.parametrize("path", OTHERS)
def test_without_records_no_route_explains(path):
    async def scenario(served):
        answer = await served.http.post(path, json={**OTHERS[path], "explain": True})
        assert answer.status_code == 400
        assert "--explain-requests" in answer.text

    with_server(scenario, explain_requests=0)


def test_a_stored_background_response_has_its_explanation():
    async def scenario(served):
        body = {"input": "hi", "background": True, "explain": True, "max_output_tokens": 2}
        made = (await served.http.post("/v1/responses", json=body)).json()
        assert "explanation" not in made
        path = f"/v1/responses/{made['id']}"
        while (found := (await served.http.get(path)).json())["status"] in RUNNING:
            await asyncio.sleep(0.01)
        assert found["explanation"]["id"] == made["id"]

    with_server(scenario, engine=slow)


def test_requests_that_failed_are_explained():
    async def scenario(served):
        await served.complete(prompt="long " * 10_000, request_id="bad")
        answer = await served.http.get("/v1/requests/bad/explain")
        found = answer.json()
        assert found["status"] == 400
        assert found["timeline"][-1]["cause"] == "deliver"

    with_server(scenario)


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a/../b", "%2e%2e", "a?b#c", "{x}"])
def test_hostile_ids_are_text(name):
    async def scenario(served):
        answer = await served.complete(request_id=name, max_tokens=1)
        assert answer.status_code == 200
        answer = await served.http.get(f"/v1/requests/{quote(name, safe='')}/explain")
        assert answer.status_code == 200, answer.text
        assert answer.json()["request_id"] == name
        assert answer.headers["content-type"] == "application/json"

    with_server(scenario)


def test_other_settings_are_simulated_unless_the_client_declines():
    async def scenario(served):
        asked = []

        def what_if(past, settings):
            asked.append((past.core_id, len(past.steps), list(settings)))
            return {"max_num_seqs": 0.0015}

        served.state.what_if = what_if
        served.engine.num_blocks = 9
        await served.complete(request_id="mine", max_tokens=2)
        path = "/v1/requests/mine/explain"
        for query, estimate, about in (
            ("", "simulated", "about"),
            ("?simulate=false", "at_most", "at most"),
        ):
            (advice,) = (await served.http.get(path + query)).json()["advice"]
            assert advice["estimate"] == estimate
            saved = f" It would have saved {about} {advice['saved_ms']:,.1f} ms."
            assert advice["text"].endswith(saved)
        assert asked == [("cmpl-mine-0-0#1", 4, ["max_num_seqs"])]
        (advice,) = (await served.http.get(path)).json()["advice"]
        assert advice["saved_ms"] == 1.5
        assert (await served.http.get(path + "?simulate=maybe")).status_code == 400

    with_server(scenario, engine=slow)


def test_every_cause_has_a_title():
    source = {*time_line._HELD.values(), *time_line.STEPS, time_line.BETWEEN}
    assert source <= TITLES.keys()


def test_a_long_time_line_keeps_its_longest_parts_and_its_length():
    spans = [Span(float(i), i + 1.0, f"c{i % 2}") for i in range(5 * MAX_SPANS)]
    spans[77].cause = "long"
    spans[77].end += 3
    for span in spans[78:]:
        span.begin, span.end = span.begin + 3, span.end + 3
    short = shortened(spans)
    assert len(short) <= MAX_SPANS + 1
    assert "long" in [span.cause for span in short]
    assert (short[0].begin, short[-1].end) == (0.0, 5 * MAX_SPANS + 3.0)
    for before, after in itertools.pairwise(short):
        assert before.end == after.begin
    assert shortened(spans[:9]) == spans[:9]


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("changed", "Token 5 differs from the most alike recent prompt, in message 2."),
        ("forgotten", "The cache has given up the blocks from token 5 on, in message 2."),
        ("no_state", "The cache has no recurrent state after token 5, in message 2."),
        (
            "other_adapter",
            "A recent prompt of the same tokens used another adapter, or none, and adapters do not"
            " share the blocks from token 5 on, in message 2.",
        ),
        ("emptied", "The cache was emptied 3.5 s before, in message 2."),
    ],
)
def test_sentences_about_the_cache(reason, text):
    miss = {"reason": reason, "token": 5, "message": 2, "seconds": 3.456, "known_tokens": 9}
    cache = {
        "prompt_tokens": 9,
        "cached_tokens": 3,
        "miss": miss,
        "difference": {"volatile": "an id", "text": "a secret"},
        "given_up": {"token": 4, "seconds_before": 2.0, "by": None},
        "text": [],
    }
    assert told_cache(cache)["text"] == [
        "3 of 9 prompt tokens were in the cache.",
        text,
        "What differs is an id.",
        "The block of token 4 was given up for another request 2.0 s before.",
    ]
    cache["given_up"]["by"] = {"number": "17"}
    miss["message"] = None
    told = told_cache(cache)["text"]
    assert told[1] == f"{text.partition(', in')[0].removesuffix('.')}."
    assert told[3] == "The block of token 4 was given up for #17 2.0 s before."
    cache |= {"miss": None, "difference": None, "given_up": None}
    assert told_cache(cache)["text"] == ["3 of 9 prompt tokens were in the cache."]
