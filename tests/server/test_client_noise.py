"""--strip-client-noise, and Claude's budget of thinking."""

import pytest

from octavo.messages import GuardSpec
from octavo.server.anthropic_schema import without_client_noise
from tests.server import test_guard
from tests.server.test_anthropic import send, serve
from tests.server.test_guard import BEGIN, END

LINE = "x-anthropic-billing-header: cc_version=2.1.197.a1f; cc_entrypoint=cli; cch=00000;"


@pytest.fixture(autouse=True)
def _long_prompts(monkeypatch):
    monkeypatch.setattr("tests.server.fake_engine.MAX_MODEL_LEN", 4096)


@pytest.mark.parametrize(
    ("system", "kept"),
    [
        (f"{LINE}\nYou are an agent.", "You are an agent."),
        (f"{LINE}\n{LINE}\nYou\n", "You\n"),
        (LINE, ""),
        (f"You.\n{LINE}\nMore.", None),  # it may be about the header
        (f" {LINE}", None),
        ("x-anthropic-billing-headers: a", None),
        ("", None),
    ],
)
def test_lines_before_the_system_prompt(system, kept):
    assert without_client_noise(system) == (system if kept is None else kept)


@pytest.mark.parametrize("strips", [True, False])
def test_the_answer_says_so(strips):
    async def scenario(served):
        system = [{"type": "text", "text": LINE}, {"type": "text", "text": "You."}]
        prompts, counts = [], []
        for value in (system, "You.", [{"type": "text", "text": LINE.replace("00000", "1")}]):
            for stream in (False, True):
                response = await send(served, system=value, stream=stream)
                assert response.status_code == 200
                stripped = strips and value != "You."
                assert response.headers.get("x-octavo-stripped") == ("system" if stripped else None)
                prompts.append(served.tokenizer_text())
            body = {"messages": [{"role": "user", "content": LINE}], "system": value}
            counted = await served.post("/v1/messages/count_tokens", **body)
            counts.append(counted.json()["input_tokens"])
        assert (prompts[0] == prompts[2]) is strips
        assert (counts[0] == counts[1]) is strips
        # Only the system prompt: what the user writes stays.
        message = {"role": "user", "content": LINE}
        response = await send(served, message)
        assert LINE in served.tokenizer_text()
        assert "x-octavo-stripped" not in response.headers

    async def run(served):
        served.tokenizer_text = lambda: served.engine.tokenizer.decode(
            served.engine.requests[-1].prompt_token_ids
        )
        await scenario(served)

    serve(run, strip_client_noise=strips)


@pytest.mark.parametrize("stream", [False, True])
def test_the_budget_of_thinking(stream):
    async def scenario(served):
        async def guard_of(**thinking):
            response = await send(served, thinking=thinking, stream=stream, max_tokens=9)
            assert response.status_code == 200, response.text
            assert "x-octavo-ignored-fields" not in response.headers
            return served.engine.requests[-1].sampling_params.guard

        wanted = GuardSpec((BEGIN,), (END,), False, 5)
        assert await guard_of(type="enabled", budget_tokens=5) == wanted
        assert await guard_of(type="enabled") is None
        assert await guard_of(type="disabled", budget_tokens=5) is None
        for wrong in (-1, 2**70, "x"):
            response = await send(served, thinking={"type": "enabled", "budget_tokens": wrong})
            assert response.status_code == 400
            assert "thinking.budget_tokens" in response.json()["error"]["message"]

    test_guard.serve(scenario)


@pytest.mark.parametrize("template", [True, False], ids=["plain marker", "no reasoning"])
def test_a_budget_without_effect(template):
    """Claude's clients send it always, so it is no error."""

    async def scenario(served):
        for stream in (False, True):
            response = await send(
                served, thinking={"type": "enabled", "budget_tokens": 1024}, stream=stream
            )
            assert response.status_code == 200
            assert response.headers["x-octavo-ignored-fields"] == "thinking.budget_tokens"
            assert served.engine.requests[-1].sampling_params.guard is None

    serve(scenario, reasoning_parser=None if template else "none")
