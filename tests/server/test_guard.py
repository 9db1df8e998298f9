"""thinking_token_budget and repetition_guard over HTTP, with a fake engine that obeys its guard."""

import json

import pytest
from msgspec.structs import replace

from octavo.frontend.input_processor import InputProcessor
from octavo.guard import MIN_LOOP, Guard
from octavo.messages import FinishReason, GuardSpec
from tests.server import fake_engine
from tests.server.fake_engine import FakeAsyncLLM, events, make_tokenizer, with_server
from tests.server.test_tools import CALL, TEMPLATE, TOOL

BEGIN, END = 258, 259
LOOP = "ab" * 200


class Guarded(FakeAsyncLLM):
    """Fake engine with tokens for <think> and </think>."""

    def __init__(self):
        tokenizer = make_tokenizer(TEMPLATE)
        tokenizer._backend.add_tokens(["<think>", "</think>"])
        super().__init__(tokenizer=tokenizer)
        self.spec.vocab_size = 260
        self._input = InputProcessor(self.config.model, self.spec, tokenizer, self.max_model_len)
        self.guards = {}

    def _step(self, core_id, request, index):
        spec = request.sampling_params.guard
        if spec is None:
            return super()._step(core_id, request, index)
        guard = self.guards.setdefault(core_id, Guard(spec))
        forced = guard.forced
        if forced is not None:  # the token of this step comes later
            self._progress[core_id] -= 1
        output = super()._step(core_id, request, index)
        if forced is not None:
            output.new_token_ids = [forced]
        guard.append(output.new_token_ids[0])
        if guard.must_stop and output.finish_reason is None:
            output.finish_reason = FinishReason.REPETITION
            self.live.pop(core_id)
        output.repetition = guard.found
        return output


@pytest.fixture(autouse=True)
def _long_prompts(monkeypatch):
    monkeypatch.setattr(fake_engine, "MAX_MODEL_LEN", 4096)


def serve(scenario, answer=LOOP, engine=Guarded, **settings):
    async def run(served):
        served.engine.answer = answer
        await scenario(served)

    with_server(run, engine, **settings)


THINK = {"chat_template_kwargs": {"think": True}}


async def guard_of(served, **fields):
    response = await served.chat(**fields, max_tokens=9)
    assert response.status_code == 200, response.text
    return served.engine.requests[-1].sampling_params.guard


def test_what_the_engine_gets():
    async def scenario(served):
        assert await guard_of(served) is None
        assert await guard_of(served, thinking_token_budget=-1) is None
        assert await guard_of(served, repetition_guard="off") is None
        assert await guard_of(served, repetition_guard="stop") == GuardSpec(repetition="stop")
        wanted = GuardSpec((BEGIN,), (END,), False, 5)
        assert await guard_of(served, thinking_token_budget=5) == wanted
        assert await guard_of(served, thinking_token_budget=5, **THINK) == replace(
            wanted, thinks=True
        )
        both = {"thinking_token_budget": "0", "repetition_guard": "close_thinking", **THINK}
        assert await guard_of(served, **both) == GuardSpec(
            (BEGIN,), (END,), True, 0, "close_thinking"
        )
        await served.complete(repetition_guard="report")
        assert served.engine.requests[-1].sampling_params.guard == GuardSpec(repetition="report")
        await served.complete(prompt="x <think>\n", thinking_token_budget=3)
        assert served.engine.requests[-1].sampling_params.guard.thinks
        await served.post(
            "/inference/v1/generate",
            token_ids=[65, BEGIN],
            sampling_params={"max_tokens": 3, "thinking_token_budget": 2},
        )
        assert served.engine.requests[-1].sampling_params.guard.thinks

    serve(scenario, "Hi")


def test_the_flag_is_the_default():
    async def scenario(served):
        assert (await guard_of(served)).repetition == "stop"
        assert await guard_of(served, repetition_guard="off") is None
        assert (await guard_of(served, repetition_guard="report")).repetition == "report"

    serve(scenario, "Hi", repetition_guard="stop")


def test_the_budget_closes_the_thought():
    async def scenario(served):
        fields = {"thinking_token_budget": 4, "max_tokens": 60, **THINK}
        message = (await served.chat(**fields)).json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("I th", "ink.")

    serve(scenario, "I think.")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget=-2 is not allowed"),
        ({"thinking_token_budget": "x"}, "thinking_token_budget"),
        ({"repetition_guard": "kill"}, "repetition_guard"),
        ({"thinking_token_budget": 3, "use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"repetition_guard": "stop", "use_beam_search": True, "n": 2}, "use_beam_search"),
    ],
    ids=str,
)
def test_wrong_values(fields, words):
    async def scenario(served):
        for send in (served.chat, served.complete):
            response = await send(**fields)
            assert response.status_code == 400
            error = response.json()["error"]
            assert words in error["message"]
            assert error["param"] in fields

    serve(scenario)


@pytest.mark.parametrize("thinks", [True, False])
def test_a_budget_needs_markers(thinks):
    """Markers must be tokens of their own; the bytes of plain text may be split in any way."""

    async def scenario(served):
        for send in (served.chat, served.complete):
            response = await send(thinking_token_budget=3)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "thinking_token_budget"
            words = "no token of its own" if thinks else "shows no reasoning"
            assert words in error["message"]
            fields = {"repetition_guard": "close_thinking"}
            fields |= THINK if send == served.chat else {"prompt": "<think>\n"}
            assert (await send(**fields)).status_code == 200
            found = served.engine.requests[-1].sampling_params.guard
            assert found == GuardSpec(repetition="close_thinking")

    template = TEMPLATE if thinks else "{% for m in messages %}{{ m.content }}{% endfor %}"
    serve(scenario, engine=lambda: FakeAsyncLLM(tokenizer=make_tokenizer(template)))


async def last_choice(response):
    *_, last = [json.loads(item) for item in await events(response)]
    return last["choices"][0]


def test_a_loop_ends_the_answer():
    async def scenario(served):
        for send in (served.chat, served.complete):
            fields = {"repetition_guard": "stop", "max_tokens": 300}
            answer = (await send(**fields)).json()
            (choice,) = answer["choices"]
            assert answer["usage"]["completion_tokens"] == MIN_LOOP
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition")
            assert choice["repetition_period"] == 2
            choice = await last_choice(await send(**fields, stream=True))
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition")
            assert choice["repetition_period"] == 2
        fields = {"repetition_guard": "report", "max_tokens": 300}
        (choice,) = (await served.chat(**fields)).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        assert choice["repetition_period"] == 2
        (choice,) = (await served.chat(max_tokens=300)).json()["choices"]
        assert "repetition_period" not in choice
        page = (await served.http.get("/metrics")).text
        count = {
            line.split('action="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
            for line in page.splitlines()
            if line.startswith("octavo:repetitions_total{")
        }
        assert count == {"stop": 4, "report": 1, "close_thinking": 0}

    serve(scenario)


def test_a_loop_in_the_thought():
    async def scenario(served):
        fields = {"repetition_guard": "close_thinking", "max_tokens": 400, **THINK}
        (choice,) = (await served.chat(**fields)).json()["choices"]
        assert len(choice["message"]["reasoning"]) == MIN_LOOP
        assert len(choice["message"]["content"]) == MIN_LOOP  # the loop goes on in the text
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition")
        page = (await served.http.get("/metrics")).text
        assert 'action="close_thinking"' in page

    serve(scenario)


def test_other_apis():
    """A loop after a call does not look like a call that is whole, nor like a stop sequence."""

    async def scenario(served):
        fields = {"tools": [TOOL], "repetition_guard": "stop", "max_tokens": 400}
        (choice,) = (await served.chat(**fields)).json()["choices"]
        assert choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition")
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400}
        message = (await served.post("/v1/messages", **body)).json()
        assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
        assert message["usage"]["output_tokens"] < 300
        response = (await served.post("/v1/responses", input="hi", store=False)).json()
        assert response["status"] == "incomplete"

    serve(scenario, CALL + LOOP, repetition_guard="stop")
