"""Ollama's API, with a fake engine and with Ollama's own client."""

import json
import time

import httpx
import ollama
import pytest
from ollama import _types
from pydantic import TypeAdapter

from octavo.checkpoints.registry import open_checkpoint
from octavo.config import BUILTIN_MODEL, EngineConfig
from octavo.models.hub import resolve_model
from octavo.models.registry import read_spec
from octavo.server import ollama_answers
from octavo.server.ollama_schema import OPTION_NAMES, OllamaChatBody, Options
from tests.server import fake_engine
from tests.server.fake_engine import Call, FakeAsyncLLM, make_tokenizer, with_server
from tests.server.test_tools import ANSWER, CALL, TEMPLATE, TOOL

USER = {"role": "user", "content": "hi"}
OF = {
    "/api/chat": (_types.ChatResponse, TypeAdapter(ollama_answers.OllamaChatAnswer)),
    "/api/generate": (_types.GenerateResponse, TypeAdapter(ollama_answers.OllamaGenerateAnswer)),
}
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration", "created_at")


@pytest.fixture(autouse=True)
def _long_prompts(monkeypatch):
    monkeypatch.setattr(fake_engine, "MAX_MODEL_LEN", 4096)


def serve(scenario, answer=ANSWER, template=TEMPLATE, **settings):
    async def run(served):
        served.engine.answer = answer
        await scenario(served)

    with_server(run, lambda: FakeAsyncLLM(tokenizer=make_tokenizer(template)), **settings)


def prompt_of(served):
    ids = served.engine.requests[-1].prompt_token_ids
    return bytes(t for t in ids if t < 256).decode()


async def whole_and_streamed(served, path="/api/chat", **fields):
    """Return the whole answer by the client's type, after a check of the streamed one."""
    kind, own = OF[path]
    body = {"model": "fake", **fields}
    if path == "/api/chat":
        body.setdefault("messages", [USER])
    response = await served.post(path, **body, stream=False)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    whole = own.validate_json(response.content)
    streamed = await served.post(path, **body)
    assert streamed.headers["content-type"].startswith("application/x-ndjson")
    assert streamed.text.endswith("}\n")
    lines = [own.validate_json(line) for line in streamed.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    merged = {"content": "", "thinking": "", "calls": [], "logprobs": []}
    for line in lines:
        part = line.get("message", line)
        merged["content"] += part.get("content", part.get("response"))
        merged["thinking"] += part.get("thinking", "")
        merged["calls"] += part.get("tool_calls", [])
        merged["logprobs"] += line.get("logprobs", [])
    part = whole.get("message", whole)
    assert merged["content"] == part.get("content", part.get("response"))
    assert merged["thinking"] == part.get("thinking", "")
    assert without_ids(merged["calls"]) == without_ids(part.get("tool_calls", []))
    assert merged["logprobs"] == whole.get("logprobs", [])
    end = {k: v for k, v in lines[-1].items() if k not in (*TIMES, "message", "response")}
    assert end.items() <= whole.items()
    for name in TIMES[:-1]:
        assert 0 <= whole[name] < 30e9
    assert whole["load_duration"] + whole["eval_duration"] <= whole["total_duration"]
    return kind(**json.loads(response.content))


def without_ids(calls):
    return [call["function"] for call in calls]


def client_of(served, **settings):
    return ollama.AsyncClient("http://test", transport=served.http._transport, **settings)


def test_a_chat_with_tools_and_thinking():
    chat = {"model": "fake", "messages": [USER], "tools": [TOOL]}

    async def scenario(served):
        answer = await whole_and_streamed(served, tools=[TOOL])
        assert answer.message.role == "assistant"
        assert answer.message.content == "Sure."
        assert answer.message.thinking == "I add."
        calls = [(c.function.name, c.function.arguments) for c in answer.message.tool_calls]
        assert calls == [("add", {"a": 1})] * 2
        whole = await served.post("/api/chat", **chat, stream=False)
        numbers = [c["function"]["index"] for c in whole.json()["message"]["tool_calls"]]
        assert numbers == [0, 1]
        assert len({c["id"] for c in whole.json()["message"]["tool_calls"]}) == 2
        assert (answer.model, answer.done_reason) == ("fake", "stop")
        assert answer.prompt_eval_count == len(served.engine.requests[-1].prompt_token_ids)
        assert answer.eval_count == len(ANSWER) + 1

    serve(scenario)


def test_durations():
    async def scenario(served):
        served.engine.step_time = 0.004
        answer = await whole_and_streamed(served)
        assert answer.eval_duration >= 4e6 * (answer.eval_count - 1)
        assert answer.total_duration > answer.eval_duration

    serve(scenario, answer="ab")


@pytest.mark.parametrize(
    ("options", "reason", "text"),
    [
        ({}, "stop", "Hello, you"),
        ({"num_predict": -1}, "stop", "Hello, you"),
        ({"num_predict": -2}, "stop", "Hello, you"),
        ({"num_predict": 5.0}, "length", "Hello"),
        ({"stop": [","]}, "stop", "Hello"),
        ({"stop": ","}, "stop", "Hello"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", OF)
def test_ends(path, options, reason, text):
    async def scenario(served):
        fields = {} if path == "/api/chat" else {"prompt": "hi"}
        answer = await whole_and_streamed(served, path, options=options, **fields)
        found = answer.message.content if path == "/api/chat" else answer.response
        assert (answer.done_reason, found) == (reason, text)

    serve(scenario, answer="Hello, you")


def test_options_reach_the_sampler():
    given = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": 3,
        "num_predict": 9,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.75,
        "frequency_penalty": -0.5,
    }
    assert {*given, "stop", "num_ctx"} == set(Options.model_fields)

    async def scenario(served):
        await whole_and_streamed(served, options=given)
        params = served.engine.params[-1]
        names = {option: name for name, option in OPTION_NAMES.items()}
        assert {n: getattr(params, names[n]) for n in given} == given
        await whole_and_streamed(served, options={"seed": -1})
        assert served.engine.params[-1].seed is None

    serve(scenario, answer="ab")


def test_ignored_options_are_reported():
    async def scenario(served):
        options = {"num_gpu": 5, "mirostat": 2, "num_ctx": 4095}
        for path in OF:
            body = {"model": "fake", "options": options, "messages": [USER], "prompt": "hi"}
            response = await served.post(path, **body, keep_alive="5m")
            assert response.status_code == 200
            ignored = response.headers["X-Octavo-Ignored-Fields"].split(", ")
            assert {"options.num_gpu", "options.mirostat", "options.num_ctx"} <= set(ignored)
        response = await served.post(
            "/api/chat", model="fake", messages=[USER], options={"num_ctx": 4096}, keep_alive=-1
        )
        assert "X-Octavo-Ignored-Fields" not in response.headers

    serve(scenario, answer="ab")


def test_the_conversation_reaches_the_template():
    async def scenario(served):
        call = {"function": {"name": "add", "arguments": {"a": 2}}}
        await whole_and_streamed(
            served,
            messages=[
                {"role": "system", "content": "Be kind."},
                USER,
                {"role": "assistant", "content": "Wait", "thinking": "Hm", "tool_calls": [call]},
                {"role": "tool", "tool_name": "add", "content": "3"},
            ],
        )
        assert prompt_of(served) == (
            "<system>Be kind.<user>hi<assistant><think>\nHm\n</think>\n\nWait<tool_call>\n"
            '{"name": "add", "arguments": {"a": 2}}\n</tool_call><tool>3<assistant>'
        )
        await whole_and_streamed(served, messages=[USER, {"role": "assistant", "content": "I"}])
        assert prompt_of(served).endswith("<assistant>I")

    serve(scenario, answer="ab")


def test_results_belong_to_calls():
    """Ollama's clients send no ids; templates receive one for each call."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls or [] %}[{{ c.id }} "
        "{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
        "{% if m.role == 'tool' %}[{{ m.tool_call_id }} {{ m.name }}]{% endif %}{{ m.content }}"
        "{% endfor %}"
    )

    def call(name, **more):
        return {"function": {"name": name, "arguments": {}}, **more}

    async def scenario(served):
        await whole_and_streamed(
            served,
            messages=[
                USER,
                {"role": "assistant", "tool_calls": [call("f"), call("g"), call("g", id="own")]},
                {"role": "tool", "tool_name": "g", "content": "1"},
                {"role": "tool", "tool_call_id": "own", "content": "2"},
                {"role": "tool", "content": "3"},
                {"role": "tool", "tool_name": "other", "content": "4"},
                {"role": "assistant", "tool_calls": [call("g", id="own")]},
                {"role": "tool", "tool_call_id": "own", "content": "5"},
            ],
        )
        assert prompt_of(served) == (
            "<user>hi<assistant>[call00000 f {}][call00001 g {}][own g {}]<tool>[call00001 g]1"
            "<tool>[own g]2<tool>[call00000 f]3<tool>[ other]4"
            "<assistant>[own g {}]<tool>[own g]5"
        )

    serve(scenario, answer="ab", template=template)


@pytest.mark.parametrize(
    ("think", "variables"),
    [
        (None, "- -"),
        (True, "True -"),
        (False, "False -"),
        ("low", "True low"),
        ("max", "True max"),
    ],
)
def test_think(think, variables):
    template = TEMPLATE + (
        "{{ enable_thinking | default('-') }} {{ reasoning_effort | default('-') }}"
    )

    async def scenario(served):
        answer = await whole_and_streamed(served, think=think)
        assert prompt_of(served).endswith("<assistant>" + variables)
        assert answer.message.thinking == "I add."
        answer = await whole_and_streamed(served, "/api/generate", prompt="hi", think=think)
        assert answer.thinking == "I add."

    serve(scenario, template=template)


def test_formats():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    async def scenario(served):
        for given, kind in (("json", "json_object"), (schema, "json"), ("", None), (None, None)):
            await whole_and_streamed(served, format=given)
            wanted = served.engine.params[-1].structured_outputs
            assert (wanted and wanted.kind) == kind
        await whole_and_streamed(served, "/api/generate", prompt="hi", format=schema)
        assert json.loads(served.engine.params[-1].structured_outputs.json) == schema

    serve(scenario, answer="{}")


def test_a_format_that_no_grammar_describes():
    async def scenario(served):
        served.engine.grammar_error = "no such type"
        for stream in (True, False):
            body = {"model": "fake", "messages": [USER], "format": {"type": 5}, "stream": stream}
            response = await served.post("/api/chat", **body)
            assert response.status_code == 400
            assert response.json() == {"error": "format: no such type"}

    serve(scenario, answer="{}")


def test_a_call_that_is_cut_is_text():
    async def scenario(served):
        limit = len('<tool_call>\n{"name": "add", "arguments": {"a"')
        answer = await whole_and_streamed(served, tools=[TOOL], options={"num_predict": limit})
        assert answer.message.tool_calls is None
        assert answer.message.content == 'add{"a"'
        assert answer.done_reason == "length"

    serve(scenario, answer=CALL)


def test_logprobs():
    async def scenario(served):
        for path, fields in (
            ("/api/chat", {}),
            ("/api/generate", {"prompt": "x"}),
            ("/api/generate", {"prompt": "x", "raw": True}),
        ):
            answer = await whole_and_streamed(served, path, **fields, logprobs=True, top_logprobs=2)
            assert "".join(entry.token for entry in answer.logprobs) == "ab</s>"
            assert [len(entry.top_logprobs) for entry in answer.logprobs] == [2, 2, 2]

    serve(scenario, answer="ab")


def test_generate():
    async def scenario(served):
        answer = await whole_and_streamed(served, "/api/generate", prompt="hi", system="Be kind.")
        assert prompt_of(served) == "<system>Be kind.<user>hi<assistant>"
        assert (answer.response, answer.thinking) == (f"Sure.\n{CALL}\n{CALL}", "I add.")
        answer = await whole_and_streamed(served, "/api/generate", prompt="hi", raw=True)
        assert prompt_of(served) == "hi"
        assert served.engine.requests[-1].prompt_token_ids[0] == fake_engine.BOS
        assert answer.response == ANSWER

    serve(scenario)


def test_a_model_without_a_chat_template_continues_the_prompt():
    async def scenario(served):
        await whole_and_streamed(served, "/api/generate", prompt="hi")
        assert prompt_of(served) == "hi"
        response = await served.post("/api/generate", model="fake", prompt="hi", system="s")
        assert response.status_code == 400
        assert "chat template" in response.json()["error"]

    serve(scenario, template=None)


@pytest.mark.parametrize("path", OF)
def test_an_empty_request_loads_the_model(path):
    async def scenario(served):
        kind, own = OF[path]
        for stream in (True, False):
            response = await served.post(path, model="fake:latest", stream=stream, keep_alive=0)
            found = kind(**own.validate_json(response.content))
            assert (found.done, found.done_reason, found.model) == (True, "load", "fake:latest")
        assert not served.engine.requests

    serve(scenario)


def test_names():
    async def scenario(served):
        for name in ("fake", "fake:latest"):
            answer = await whole_and_streamed(served, model=name)
            assert answer.model == name
        response = await served.post("/api/chat", model="fake:7b", messages=[USER])
        assert response.status_code == 404
        assert response.json() == {"error": "model 'fake:7b' not found; this server has fake."}

    serve(scenario, answer="ab")


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/api/chat", {"model": None}, "model=None is not allowed"),
        ("/api/chat", {"messages": "x"}, "messages='x'"),
        ("/api/chat", {"messages": ["x"]}, "messages[0]='x' is not a message"),
        ("/api/chat", {"messages": [{"role": "x"}]}, "messages[0].role='x'"),
        ("/api/chat", {"messages": [{**USER, "content": []}]}, "messages[0].content=[]"),
        ("/api/chat", {"messages": [{**USER, "images": ["eA=="]}]}, "not supported here"),
        ("/api/chat", {"messages": [{**USER, "images": [5]}]}, "messages[0].images=[5]"),
        (
            "/api/chat",
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments='{}' is not an object",
        ),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "is not a call"),
        ("/api/chat", {"tools": [{"type": "function"}]}, "tools[0].function is missing"),
        ("/api/chat", {"think": "deep"}, "think='deep'"),
        ("/api/chat", {"format": "xml"}, "format='xml'"),
        ("/api/chat", {"options": {"temperature": -1}}, "options.temperature=-1"),
        ("/api/chat", {"options": {"repeat_penalty": 0}}, "options.repeat_penalty=0"),
        ("/api/chat", {"options": {"num_predict": 0}}, "options.num_predict=0"),
        ("/api/chat", {"options": {"num_predict": 10**30}}, "options.num_predict"),
        ("/api/chat", {"options": {"num_ctx": 4097}}, "options.num_ctx=4097 is more than"),
        ("/api/chat", {"options": {"stop": [5]}}, "options.stop"),
        ("/api/chat", {"options": 5}, "options=5"),
        ("/api/chat", {"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ("/api/generate", {"suffix": "x"}, "suffix='x' is not supported"),
        ("/api/generate", {"template": "x"}, "template='x' is not supported"),
        ("/api/generate", {"context": [1]}, "context=[1] is not supported"),
        ("/api/generate", {"images": ["eA=="]}, "not supported here"),
        ("/api/generate", {"images": "eA=="}, "images='eA=='"),
        ("/api/generate", {"images": ["eA=="], "raw": True}, "images=['eA=='] needs the chat"),
        ("/api/generate", {"raw": True, "system": "s"}, "system='s' needs the chat template"),
        ("/api/generate", {"raw": True, "think": True}, "think=True needs the chat template"),
        ("/api/generate", {"prompt": 5}, "prompt=5"),
        ("/api/show", {"model": ""}, "model is missing"),
    ],
    ids=str,
)
def test_wrong_fields(path, fields, words):
    async def scenario(served):
        body = {"model": "fake", "messages": [USER], "prompt": "hi", **fields}
        if path != "/api/chat":
            del body["messages"]
        for stream in (True, False):
            response = await served.post(path, **body, stream=stream)
            assert response.status_code == 400, response.text
            (error,) = (
                TypeAdapter(ollama_answers.OllamaError).validate_json(response.content).values()
            )
            assert words in error
        assert not served.engine.requests

    serve(scenario, answer="ab")


def test_a_model_that_does_not_think():
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"

    async def scenario(served):
        for path in OF:
            body = {"model": "fake", "messages": [USER], "prompt": "hi", "stream": False}
            response = await served.post(path, **body, think=True)
            assert response.status_code == 400
            assert "does not support thinking" in response.json()["error"]
            assert (await served.post(path, **body, think=False)).status_code == 200
        response = await served.post("/api/chat", model="fake", messages=[USER], tools=[TOOL])
        assert "tools need a model" in response.json()["error"]

    serve(scenario, answer="ab", template=template)


def test_errors_of_the_server():
    async def scenario(served):
        for path, status, words in (
            ("/api/pull", 404, "octavo pull"),
            ("/api/create", 404, "octavo serve"),
            ("/api/copy", 404, "one model"),
            ("/api/delete", 404, "one model"),
            ("/api/blobs/sha256:0", 404, "one model"),
            ("/api/push", 404, "does not publish"),
            ("/api/other", 404, "no such route"),
            ("/api/tags", 405, "use GET"),
        ):
            response = await served.post(path, model="fake")
            assert response.status_code == status
            (error,) = response.json().values()
            assert words in error
        response = await served.http.post("/api/chat", content=b"{", headers={"content-type": "x"})
        assert (response.status_code, list(response.json())) == (415, ["error"])

    serve(scenario)


def test_an_error_in_a_stream():
    async def scenario(served):
        served.engine.step_time = 0.01
        body = json.dumps({"model": "fake", "messages": [USER]}).encode()
        call = Call(served, "/api/chat", body)
        await call.wait_for_body()
        served.engine.die("out of paper")
        await call.task
        lines = [json.loads(line) for line in call.body.splitlines()]
        assert lines[0]["message"]["content"]
        assert lines[-1] == {"error": "out of paper"}
        assert call.body.endswith(b"}\n")

    serve(scenario, answer="Hello, you")


def test_a_client_that_leaves_ends_its_request():
    async def scenario(served):
        served.engine.step_time = 0.01
        body = json.dumps({"model": "fake", "messages": [USER]}).encode()
        call = Call(served, "/api/chat", body)
        await call.wait_for_body()
        call.disconnect()
        await call.task
        assert served.engine.aborted

    serve(scenario, answer="x" * 1000)


def test_ollamas_client():
    def add(a: int) -> int:
        """Add.

        Args:
            a: A number.
        """
        return a + 1

    async def scenario(served):
        client = client_of(served)
        answer = await client.chat("fake", [USER], tools=[add], think=True, format="json")
        assert answer.message.tool_calls[0].function.arguments == {"a": 1}
        calls = []
        async for part in await client.chat(
            "fake", [USER, answer.message], tools=[add], stream=True
        ):
            calls += part.message.tool_calls or []
        assert [call.function.name for call in calls] == ["add", "add"]
        written = await client.generate("fake", "hi", options={"num_predict": 3})
        assert (written.eval_count, written.done_reason) == (3, "length")
        with pytest.raises(ollama.ResponseError, match="not found") as failure:
            await client.chat("other", [USER])
        assert failure.value.status_code == 404
        for refused in (client.pull("x"), client.delete("x")):
            with pytest.raises(ollama.ResponseError, match="not available"):
                await refused
        assert (await client.list()).models[0].details.parameter_size == "1.0K"

    serve(scenario)


def test_descriptions_of_the_model():
    builtin_spec = read_spec(open_checkpoint(resolve_model(BUILTIN_MODEL)))
    config = EngineConfig.from_kwargs(served_model_name=["fake"], dtype="float32", device="cpu")

    async def scenario(served):
        client = client_of(served)
        served.engine.spec, served.engine.config = builtin_spec, config
        (tag,) = (await client.list()).models
        (process,) = (await client.ps()).models
        assert tag.model == process.model == process.name == "fake"
        assert tag.digest == process.digest
        assert len(tag.digest) == 64
        assert tag.size == process.size == builtin_spec.weight_nbytes("float32")
        assert process.size_vram == 0
        assert process.context_length == 4096
        assert process.expires_at.year > tag.modified_at.year + 50
        shown = await client.show("fake:latest")
        assert shown.details == tag.details == process.details
        assert (shown.details.family, shown.details.quantization_level) == ("llama", "F32")
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert shown.template == TEMPLATE
        info = shown.modelinfo
        assert info["general.architecture"] == "llama"
        assert info["llama.context_length"] == 4096
        assert info["llama.block_count"] == len(builtin_spec.layers)
        assert info["llama.embedding_length"] == builtin_spec.hidden_size
        served.engine.ready = False
        assert not (await client.ps()).models
        assert (await served.http.get("/api/version")).json() == {"version": "0.14.2"}
        assert (await served.post("/api/show", name="fake")).status_code == 200
        for path, kind in (
            ("/api/tags", ollama_answers.OllamaTags),
            ("/api/ps", ollama_answers.OllamaRunning),
        ):
            TypeAdapter(kind).validate_json((await served.http.get(path)).content)
        response = await served.post("/api/show", model="fake")
        TypeAdapter(ollama_answers.OllamaShown).validate_json(response.content)

    serve(scenario)


def test_the_command_of_ollama_finds_a_server():
    async def scenario(served):
        response = await served.http.head("/")
        assert (response.status_code, response.content) == (200, b"")
        assert (await served.http.get("/")).json()["name"] == "octavo"

    serve(scenario)


def test_keys():
    async def scenario(served):
        response = await served.http.get("/api/tags")
        assert response.status_code == 401
        assert "API key" in response.json()["error"]
        client = client_of(served, headers={"Authorization": "Bearer secret"})
        assert isinstance(client._client, httpx.AsyncClient)
        assert (await client.chat("fake", [USER])).done

    serve(scenario, answer="ab", api_key=["secret"])


def test_many_calls_take_little_time():
    """A body of the largest number of values: each result finds its call at once."""
    many = 8000
    call = {"function": {"name": "f", "arguments": {}}}
    messages = [USER, {"role": "assistant", "tool_calls": [call] * many}]
    messages += [{"role": "tool", "tool_name": "f", "content": "1"}] * many
    begin = time.process_time()
    converted = OllamaChatBody(model="m", messages=messages).messages
    assert time.process_time() - begin < 2
    assert converted[-1]["tool_call_id"] == "call07999"
