"""Why a long prefix was not in the cache."""

import json
import math
import time
from types import SimpleNamespace

import pytest

from octavo.server import generation, recent_prompts
from octavo.server.recent_prompts import Found, RecentPrompts, explain, message_at, to_bytes
from tests.server.fake_engine import FakeAsyncLLM, with_server


def tokens(*ids):
    return to_bytes(ids)


@pytest.mark.parametrize("common", [0, 1, 255, 256, 4095, 4096, 4097, 8192, 10_000])
def test_common_beginning(common):
    """It is exact, on both sides of the borders of the pieces that are compared."""
    prompts = RecentPrompts()
    prompts.add("a", to_bytes(range(10_000)))
    found = prompts.find("a", to_bytes([*range(common), *[7_000_000] * 50]), math.inf)
    assert (0 if found is None else found.num_common) == common


def test_the_most_alike_prompt_is_found():
    prompts = RecentPrompts()
    prompts.add("a", tokens(1, 2, 3, 4))
    like = prompts.add("a", tokens(1, 2, 3, 9, 9))
    prompts.add("a", tokens(1, 8, 8))
    assert prompts.find("a", tokens(1, 2, 3, 9, 5), math.inf) == Found(like, 4)
    newest = prompts.add("a", tokens(1, 2, 3, 9, 8))
    assert prompts.find("a", tokens(1, 2, 3, 9, 5), math.inf) == Found(newest, 4)


def test_scopes_do_not_see_each_other():
    prompts = RecentPrompts()
    prompts.add("a", tokens(1, 2, 3))
    prompts.add(None, tokens(1, 2))
    assert prompts.find("b", tokens(1, 2, 3), math.inf) is None
    assert prompts.find(None, tokens(1, 2, 3), math.inf).num_common == 2


def test_what_came_later_does_not_count():
    prompts = RecentPrompts()
    begin = time.monotonic()
    recorded = prompts.add("a", tokens(1, 2))
    between = time.monotonic()
    prompts.add_answer(recorded, [3, 4])
    whole = tokens(1, 2, 3, 4)
    assert prompts.find("a", whole, begin - 1) is None
    recorded.ended = between + 1
    assert prompts.find("a", whole, between).num_common == 2
    assert prompts.find("a", whole, between + 1).num_common == 4


def test_prompts_with_other_adapters():
    """They count only if they have much more in common, and do not replace each other."""
    prompts, data = RecentPrompts(), to_bytes(range(1000))

    def reason(adapter, cached=0):
        found = prompts.find("a", data, math.inf, adapter)
        miss = found and explain(found, data, cached, 1000, None, adapter)
        return miss and (miss["reason"], miss["token"], miss["known_tokens"])

    prompts.add("a", to_bytes(range(900)), "x")
    assert reason("y") == ("other_adapter", 0, 900)
    assert reason(None) == ("other_adapter", 0, 900)
    assert reason("x") == ("no_state", 0, 900)
    assert reason("y", cached=700) is None
    prompts.add("a", to_bytes(range(800)))
    assert reason(None) == ("no_state", 0, 800)
    assert reason("x") == ("no_state", 0, 900)
    prompts.add("a", to_bytes(range(300)), "y")
    assert reason("y", cached=300) == ("other_adapter", 300, 900)


def test_turns_of_a_conversation_are_one_record():
    prompts = RecentPrompts()
    for turn in range(5):
        recorded = prompts.add("a", to_bytes(range(100 * turn + 50)))
        prompts.add_answer(recorded, range(100 * turn + 50, 100 * turn + 70))
    assert prompts.nbytes == recorded.nbytes == 512 + 1 + 4 * 470
    prompts.add("a", to_bytes([*range(460), 1]))  # the answer is not in this prompt
    assert prompts.nbytes > recorded.nbytes + 4 * 460


def test_limits():
    prompts = RecentPrompts(max_bytes=50_000)
    assert prompts.add("a", to_bytes(range(20_000))) is None
    first = prompts.add("a", to_bytes(range(2_000)))
    prompts.add("b", to_bytes(range(8_000)))
    prompts.add("b", to_bytes(range(1, 3_000)))
    assert prompts.find("a", to_bytes(range(2_000)), math.inf) is None  # the oldest one
    prompts.add_answer(first, [1])
    assert prompts.nbytes <= 50_000
    for number in range(200):
        prompts.add("c", tokens(number, number))
    assert prompts.find("c", tokens(135), math.inf) is None
    assert prompts.find("c", tokens(136), math.inf) is not None
    assert prompts.nbytes <= 50_000


def test_reasons(monkeypatch):
    monkeypatch.setattr(recent_prompts, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    prompts = RecentPrompts()
    recorded = prompts.add("a", to_bytes(range(1000)))
    recorded.since = 940.0

    def reason(prompt, cached, emptied=None, stored=0):
        data = to_bytes(prompt)
        miss = explain(prompts.find("a", data, math.inf), data, cached, stored, emptied)
        return None if miss is None else (miss["reason"], miss["token"], miss["seconds"])

    more = range(1100)
    assert reason(more, 992) is None
    assert reason(more, 745) is None
    assert reason(more, 744) == ("forgotten", 744, 60)
    assert reason(more, 0, 980.0) == ("emptied", 0, 20)
    assert reason(more, 0, 920.0) == ("forgotten", 0, 60)
    assert reason(range(257), 0) == ("forgotten", 0, 60)
    assert reason(more, 0, stored=744) == ("forgotten", 0, 60)
    assert reason(more, 0, stored=745) == ("no_state", 0, 60)
    assert reason(more, 0, 980.0, stored=992) == ("emptied", 0, 20)
    assert reason(range(256), 0) is None  # the last token is computed in any case
    replaced, left_out = [*range(500), 7, *range(503, 1000)], [*range(300), *range(600, 1000)]
    assert reason(replaced, 496) == ("changed", 500, 60)
    assert reason(left_out, 288) == ("changed", 300, 60)
    assert reason([*range(500), *range(7000, 8000)], 496) is None  # another conversation
    assert reason([*range(745), 7, *range(746, 1000)], 736) is None  # only 255 tokens after it
    assert reason(replaced[:700], 496) is None


def test_message_at():
    text = "<s>[system]Be kind.[user]Be kind. Hi[assistant][tool]42"
    contents = ["Be kind.", " Be kind. Hi\n", "", "42"]
    at = [message_at(text, contents, text.index(part)) for part in ("[sys", "kind", "Hi", "42")]
    assert at == [None, 0, 1, 3]
    assert message_at(text, contents, len(text)) == 3
    assert message_at(text, ["nowhere", "42"], len(text)) == 1
    assert message_at(text, ["nowhere"] * 8 + ["42"], len(text)) == 8
    assert message_at(text, ["nowhere"] * 9 + ["42"], len(text)) is None
    assert message_at(text, [""] * 9 + ["42"], len(text)) == 9


class Engine(FakeAsyncLLM):
    """Fake engine that schedules a request when it arrives."""

    num_stored_tokens = 0

    def _step(self, core_id, request, index):
        output = super()._step(core_id, request, index)
        output.first_scheduled_time = request.options.arrival_time
        output.num_stored_tokens = self.num_stored_tokens
        return output


@pytest.fixture
def short(monkeypatch):
    for module in (generation, recent_prompts):
        monkeypatch.setattr(module, "LONG", 32)


@pytest.mark.parametrize("stream", [False, True])
def test_usage(short, stream):
    """The usage tells the message that changed; another key learns nothing of it."""
    text = "It is a long text about a small town, and about many years. "

    async def scenario(served):
        async def miss(*contents, key="a", **more):
            served.http.headers["Authorization"] = f"Bearer {key}"
            roles = ["system", "user", "assistant", "user"]
            messages = [
                {"role": role, "content": content}
                for role, content in zip(roles, contents, strict=False)
            ]
            if not stream:
                usage = (await served.chat(*messages, **more)).json()["usage"]
            else:
                options = {"stream": True, "stream_options": {"include_usage": True}}
                answer = await served.chat(*messages, **options, **more)
                usage = served_usage(answer.text)
            return usage["prompt_tokens_details"].get("cache_miss")

        served.engine.num_cached_tokens = len(text)
        assert await miss(text, text) is None
        found = await miss(text, "No. " + text)
        assert (found["reason"], found["message"]) == ("changed", 1)
        assert found["token"] == len("<s><system>") - 2 + len(text) + len("</s><user>") - 3
        assert found["known_tokens"] > 2 * len(text)
        assert await miss(text, "Yes. " + text, key="b") is None
        assert await miss(text, "Why? " + text, cache_salt="s") is None
        served.engine.num_cached_tokens = 0
        found = await miss(text, text)
        assert (found["reason"], found["token"]) == ("forgotten", 0)
        served.engine.num_stored_tokens = 2 * len(text)
        assert (await miss(text, text))["reason"] == "no_state"
        served.engine.num_stored_tokens = 0
        served.engine.cache_emptied_at = time.monotonic()
        assert (await miss(text, text))["reason"] == "emptied"
        served.engine.num_cached_tokens = 100
        assert await miss(text, text[:36]) is None  # most of it was in the cache
        assert await miss(text, "Hm. " + text, n=2, temperature=1) is None
        served.engine.num_cached_tokens = 0
        if not stream:  # the cache is not read for these
            assert await miss(text, text, prompt_logprobs=1) is None
        assert (await miss(text, text))["reason"] == "forgotten"

    def served_usage(sent):
        *_, last, _ = [line for line in sent.split("\n\n") if line]
        return json.loads(last.removeprefix("data: "))["usage"]

    with_server(scenario, Engine, api_key=["a", "b"])
