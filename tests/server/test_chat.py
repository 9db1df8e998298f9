import json
import time

import pytest

from octavo.config import EngineConfig
from tests.params import pack_logprobs
from tests.server.fake_engine import ANSWER, FakeAsyncLLM, events, make_tokenizer, with_server

USER = {"role": "user", "content": "hi"}


def rendered(served, index=-1):
    return served.engine.tokenizer.decode(served.engine.requests[index].prompt_token_ids)


def test_answer():
    async def scenario(served):
        served.engine.num_cached_tokens = 16
        answer = (await served.chat()).json()
        assert answer["id"].startswith("chatcmpl-")
        assert answer["object"] == "chat.completion"
        assert answer["choices"] == [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": ANSWER,
                    "refusal": None,
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ]
        assert answer["prompt_logprobs"] is None
        assert answer["prompt_token_ids"] is None
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
        assert rendered(served) == "<s><user>hi</s><assistant>"

    with_server(scenario)


def test_several_chats_in_a_request():
    chats = [[USER], [{"role": "system", "content": "be short"}, {**USER, "content": "you"}]]

    async def scenario(served):
        async def batch(**body):
            return await served.post("/v1/chat/completions/batch", messages=chats, **body)

        answer = (await batch(max_tokens=20)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert [c["message"]["content"] for c in answer["choices"]] == [ANSWER, ANSWER]
        assert [rendered(served, i) for i in (0, 1)] == [
            "<s><user>hi</s><assistant>",
            "<s><system>be short</s><user>you</s><assistant>",
        ]
        prompts = [len(request.prompt_token_ids) for request in served.engine.requests]
        assert answer["usage"]["prompt_tokens"] == sum(prompts)
        echoed = (await batch(echo=True, continue_final_message=True)).json()["choices"]
        assert [c["message"]["content"] for c in echoed] == ["hi" + ANSWER, "you" + ANSWER]
        assert {c["message"]["role"] for c in echoed} == {"user"}
        for name, value in {
            "stream": True,
            "use_beam_search": True,
            "n": 2,
            "prompt_logprobs": 1,
            "kv_transfer_params": {"a": 1},
        }.items():
            response = await batch(**{name: value})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == name
        for wrong, said in (
            ([], "1 to 4096 conversations"),
            ([USER], "messages[0]={"),
            ([[USER], []], "messages[1]=[]"),
            ([[USER], [USER, {"role": "user"}]], "messages[1][1].content=None"),
        ):
            response = await served.post("/v1/chat/completions/batch", messages=wrong)
            assert response.status_code == 400
            assert said in response.json()["error"]["message"]

    with_server(scenario)


def test_stream_begins_with_the_role_and_ends_with_the_reason():
    async def scenario(served):
        response = await served.chat(
            stream=True, stream_options={"include_usage": True}, n=2, temperature=1
        )
        chunks = [json.loads(item) for item in await events(response)]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        first, second, *rest, last = chunks
        for i, chunk in enumerate((first, second)):
            (choice,) = chunk["choices"]
            assert choice["index"] == i
            assert choice["delta"] == {"role": "assistant", "content": ""}
        texts = ["", ""]
        ended = [None, None]
        for chunk in rest:
            (choice,) = chunk["choices"]
            assert ended[choice["index"]] is None
            texts[choice["index"]] += choice["delta"].get("content", "")
            ended[choice["index"]] = choice["finish_reason"]
            assert set(choice["delta"]) == {"content"}
        assert texts == [ANSWER, ANSWER]
        assert ended == ["stop", "stop"]
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 30

    with_server(scenario)


def test_no_chunk_splits_a_character():
    async def scenario(served):
        chunks = [json.loads(item) for item in await events(await served.chat(stream=True))]
        pieces = [c["choices"][0]["delta"].get("content", "") for c in chunks]
        assert "ö" in pieces
        assert not any("\ufffd" in piece for piece in pieces)

    with_server(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(stream):
    async def scenario(served):
        response = await served.chat(logprobs=True, top_logprobs=2, max_tokens=2, stream=stream)
        content = []
        for item in await events(response) if stream else [response.text]:
            logprobs = json.loads(item)["choices"][0]["logprobs"]
            content += logprobs["content"] if logprobs else []
        assert content == [
            {
                "token": token,
                "logprob": -0.5,
                "bytes": [ord(token)],
                "top_logprobs": [
                    {"token": token, "logprob": -0.5, "bytes": [ord(token)]},
                    {
                        "token": chr(ord(token) + 1),
                        "logprob": -9999.0,
                        "bytes": [ord(token) + 1],
                    },
                ],
            }
            for token in "He"
        ]

    with_server(scenario)


def test_logprobs_without_alternatives_and_of_parts_of_characters():
    async def scenario(served):
        answer = (await served.chat(logprobs=True)).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert all(entry["top_logprobs"] == [] for entry in content)
        # Concatenated bytes are the text, though single tokens are no whole characters.
        assert bytes(b for e in content[:-1] for b in e["bytes"]).decode() == ANSWER

    with_server(scenario)


def test_messages_of_all_kinds():
    async def scenario(served):
        await served.chat(
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
            {"role": "user", "content": "d", "name": "Ann"},
            {"role": "assistant", "content": None},
            {"role": "user", "content": "e"},
        )
        assert rendered(served) == (
            "<s><system>Be brief.</s><user>a\nb</s><assistant>c</s><user>d</s>"
            "<assistant></s><user>e</s><assistant>"
        )

    with_server(scenario)


def test_what_the_template_refuses_is_the_clients_mistake():
    async def scenario(served):
        response = await served.chat(USER, {"role": "system", "content": "late"})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "messages"
        assert "the system message must come first" in error["message"]

    with_server(scenario)


def test_template_flags_and_variables():
    async def scenario(served):
        await served.chat(add_generation_prompt=False)
        assert rendered(served) == "<s><user>hi</s>"
        await served.chat(chat_template_kwargs={"hint": "HINT"})
        assert rendered(served) == "<s><user>hi</s>HINT<assistant>"
        answer = await served.chat(
            USER, {"role": "assistant", "content": "Well,"}, continue_final_message=True
        )
        assert rendered(served) == "<s><user>hi</s><assistant>Well,"
        assert answer.json()["choices"][0]["message"]["role"] == "assistant"

    with_server(scenario)


@pytest.mark.parametrize("value", [1, None, {"a": [1]}, "x"])
def test_a_variable_may_have_any_name(value):
    ours = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    names = ["name", "self", "variables", "template", "kwargs", "args", "context", "loop", "caller"]
    names += ["True", "None", "range", "raise_exception", "bos_token", "__class__", "", "a b", "é"]

    async def scenario(served):
        for name in [*names, *ours]:
            response = await served.chat(chat_template_kwargs={name: value})
            if name in ours:
                assert response.status_code == 400, name
                assert response.json()["error"]["param"] == "chat_template_kwargs"
            else:
                # Variables that hide the template's own may make it fail; that is the caller's
                # error.
                assert response.status_code in (200, 400), (name, response.text)
        hidden = {"name": value, "self": value}
        assert (await served.chat(chat_template_kwargs=hidden)).status_code == 200
        tokenized = await served.post("/tokenize", messages=[USER], chat_template_kwargs=hidden)
        assert tokenized.status_code == 200

    with_server(scenario)


def test_a_template_of_ones_own():
    async def scenario(served):
        await served.chat()
        assert rendered(served) == "own:hi"

    with_server(scenario, chat_template="own:{{ messages[0].content }}", response_role="bot")


TOOL = {"type": "function", "function": {"name": "f", "description": "d"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"at": 1}'}}
SHOWS = "{{ messages[1].tool_calls | tojson }}|{{ messages[2] | tojson }}|{{ tools | tojson }}"


def test_tools_and_their_calls_go_to_the_template():
    history = [
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
    ]

    async def scenario(served):
        response = await served.chat(*history, tools=[TOOL], tool_choice="none")
        assert response.status_code == 200, response.text
        assert "X-Octavo-Ignored-Fields" not in response.headers
        calls, result, tools = map(json.loads, rendered(served).split("|"))
        assert calls == [{**CALL, "function": {"name": "f", "arguments": {"at": 1}}}]
        assert result == {"role": "tool", "content": "sunny", "tool_call_id": "c1"}
        assert tools == [TOOL]
        tokenized = await served.post("/tokenize", messages=history, tools=[TOOL])
        assert tokenized.json()["tokens"] == served.engine.requests[-1].prompt_token_ids
        await served.chat(*history, tools=[])
        assert rendered(served).endswith("|null")

    with_server(scenario, chat_template=SHOWS)


def test_tools_are_left_out_of_the_template_if_the_server_says_so():
    async def scenario(served):
        response = await served.chat(tools=[TOOL], tool_choice="none")
        assert response.status_code == 200, response.text
        assert rendered(served) == "null"

    template = "{{ tools | tojson }}"
    with_server(scenario, chat_template=template, exclude_tools_when_tool_choice_none=True)


def test_documents_go_to_the_template():
    documents = [{"title": "Weather", "text": "sunny"}, {"text": "é"}]

    async def shown(served):
        response = await served.chat(documents=documents)
        assert response.status_code == 200, response.text
        assert "X-Octavo-Ignored-Fields" not in response.headers
        assert json.loads(rendered(served)) == documents
        tokenized = await served.post("/tokenize", messages=[USER], documents=documents)
        assert tokenized.json()["tokens"] == served.engine.requests[-1].prompt_token_ids
        await served.chat(documents=[])
        assert rendered(served) == "null"
        response = await served.chat(documents=[{"text": 5}])
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "documents[0].text")

    with_server(shown, chat_template="{{ documents | tojson }}")

    async def left_out(served):
        assert (await served.chat(documents=documents)).status_code == 200
        assert rendered(served) == "<s><user>hi</s><assistant>"

    with_server(left_out)


def test_tool_calls_that_a_template_does_not_know_are_refused():
    async def scenario(served):
        history = [USER, {"role": "assistant", "tool_calls": [CALL]}, USER]
        # The tool's definition names it, too, but that does not make the call known.
        response = await served.chat(*history, tools=[TOOL], tool_choice="none")
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["message"].startswith("messages[1].tool_calls: the model's chat template does")
        assert error["code"] == "unsupported_parameter"

    with_server(scenario, chat_template="{{ tools | tojson }}{{ messages[-1].content }}")


def test_reasoning_effort_is_a_variable_of_the_template():
    async def scenario(served):
        for fields, expected in (
            ({}, "medium,"),
            ({"reasoning_effort": "high"}, "high,True"),
            ({"reasoning_effort": "none"}, "none,False"),
            (
                {
                    "reasoning_effort": "low",
                    "chat_template_kwargs": {"reasoning_effort": "max", "enable_thinking": False},
                },
                "low,False",
            ),
        ):
            response = await served.chat(**fields, store=True, prediction={"type": "content"})
            assert response.status_code == 200, response.text
            assert "X-Octavo-Ignored-Fields" not in response.headers
            assert rendered(served) == expected
        response = await served.chat(frobnicate="low")
        assert response.headers["X-Octavo-Ignored-Fields"] == "frobnicate"

    with_server(
        scenario,
        chat_template="{{ reasoning_effort }},{{ enable_thinking }}",
        default_chat_template_kwargs={"reasoning_effort": "medium"},
    )


def test_a_model_without_template():
    async def scenario(served):
        response = await served.chat()
        assert response.status_code == 400
        assert "chat template" in response.json()["error"]["message"]

    with_server(scenario, lambda: FakeAsyncLLM(tokenizer=make_tokenizer(template=None)))


def test_a_broken_template_is_the_servers_mistake():
    async def scenario(served):
        response = await served.chat()
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert (await served.complete()).status_code == 200

    with_server(scenario, lambda: FakeAsyncLLM(tokenizer=make_tokenizer("{% if %}")))


def test_the_answer_may_fill_the_context():
    async def scenario(served):
        served.engine.answer = "x" * 300
        answer = (await served.chat(ignore_eos=True)).json()
        assert answer["usage"]["total_tokens"] == 256
        assert answer["choices"][0]["finish_reason"] == "length"

    with_server(scenario)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_length_limits(name):
    async def scenario(served):
        answer = (await served.chat(**{name: 3})).json()
        assert answer["usage"]["completion_tokens"] == 3

    with_server(scenario, lambda: FakeAsyncLLM(generation_config={"max_tokens": 5}))


def test_the_models_own_limit_gives_way_to_what_fits():
    async def scenario(served):
        served.engine.answer = "x" * 300
        assert (await served.chat()).json()["usage"]["total_tokens"] == 256
        long = await served.chat({"role": "user", "content": "x" * 300})
        assert long.json()["error"]["code"] == "context_length_exceeded"

    with_server(scenario, lambda: FakeAsyncLLM(generation_config={"max_tokens": 1000}))


def test_errors_about_the_prompt_blame_the_messages():
    async def scenario(served):
        response = await served.chat({"role": "user", "content": "x" * 300}, max_tokens=1)
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")

    with_server(scenario)


def test_prompt_logprobs_and_token_ids():
    async def scenario(served):
        answer = (await served.chat(prompt_logprobs=0, return_token_ids=True)).json()
        assert answer["prompt_logprobs"][0] is None
        assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
        assert answer["choices"][0]["token_ids"] == [*ANSWER.encode(), 257]
        response = await served.chat(stream=True, return_token_ids=True)
        first, *rest = [json.loads(item) for item in await events(response)]
        assert first["prompt_token_ids"] == answer["prompt_token_ids"]
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all("prompt_token_ids" not in chunk for chunk in rest)
        chunks = [chunk["choices"][0] for chunk in rest]
        ids = [t for c in chunks for t in c.get("token_ids", [])]
        assert ids == answer["choices"][0]["token_ids"]

    with_server(scenario)


def test_a_token_that_completes_no_character_makes_no_chunk():
    async def scenario(served):
        served.engine.answer = "é" * 3
        response = await served.chat(stream=True, max_tokens=7)
        deltas = [json.loads(item)["choices"][0]["delta"] for item in await events(response)]
        assert [delta.get("content") for delta in deltas] == ["", "é", "é", "é", ""]

    with_server(scenario)


def test_a_server_that_gives_no_logprobs():
    config = EngineConfig.from_kwargs(served_model_name=["fake"], max_logprobs=0)

    async def scenario(served):
        for asked, status in ((0, 200), (1, 400), (-1, 400)):
            response = await served.chat(logprobs=True, top_logprobs=asked, max_tokens=1)
            assert response.status_code == status
            if status == 400:
                assert response.json()["error"]["param"] == "top_logprobs"

    with_server(scenario, lambda: FakeAsyncLLM(config))


def test_the_role_counts_no_token():
    options = {"include_usage": True, "continuous_usage_stats": True}

    async def scenario(served):
        served.engine.num_cached_tokens = 2
        response = await served.chat(stream=True, n=2, max_tokens=3, stream_options=options)
        chunks = [json.loads(item) for item in await events(response)]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts[:2] == [0, 0]
        assert counts[2] > 0
        assert counts == sorted(counts)
        assert counts[-1] == 6
        for chunk in chunks:
            usage = chunk["usage"]
            assert usage["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"] > 0
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert chunks[0]["prompt_token_ids"] is None

    with_server(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_the_most_probable_tokens_come_first(stream):
    # The sampled token is the first of a row, but need not be the most probable one.
    def engine():
        made = FakeAsyncLLM()
        step = made._step

        def shuffled(*live):
            output = step(*live)
            (token,) = output.new_token_ids
            ids = [token, 65, 66, 67]
            output.new_logprobs = pack_logprobs([ids], [[-3.0, -2.0, -0.5, -1.0]], [4])
            return output

        made._step = shuffled
        return made

    async def scenario(served):
        for asked, expected in ((1, "B"), (3, "BCA"), (20, "BCAH")):
            response = await served.chat(
                logprobs=True, top_logprobs=asked, max_tokens=1, stream=stream
            )
            entries = []
            for item in await events(response) if stream else [response.text]:
                logprobs = json.loads(item)["choices"][0]["logprobs"]
                entries += logprobs["content"] if logprobs else []
            (entry,) = entries
            assert (entry["token"], entry["logprob"]) == ("H", -3.0)
            assert "".join(top["token"] for top in entry["top_logprobs"]) == expected
            found = [top["logprob"] for top in entry["top_logprobs"]]
            assert found == sorted(found, reverse=True)

    with_server(scenario, engine)


def test_all_logprobs_where_the_server_allows_it():
    config = EngineConfig.from_kwargs(served_model_name=["fake"], max_logprobs=-1)

    async def allowed(served):
        response = await served.chat(logprobs=True, top_logprobs=-1, max_tokens=1)
        assert response.status_code == 200, response.text
        assert served.engine.requests[0].sampling_params.logprobs == -1
        (entry,) = response.json()["choices"][0]["logprobs"]["content"]
        assert len(entry["top_logprobs"]) == 256  # all candidates of the engine

    with_server(allowed, lambda: FakeAsyncLLM(config))

    async def limited(served):
        response = await served.chat(logprobs=True, top_logprobs=-1)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "top_logprobs"
        assert (await served.chat(top_logprobs=-1)).json()["error"]["param"] == "top_logprobs"
        assert (await served.chat(logprobs=True, top_logprobs=-2)).status_code == 400

    with_server(limited)


def test_more_logprobs_than_allowed():
    async def scenario(served):
        response = await served.chat(logprobs=True, top_logprobs=21)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "top_logprobs"

    with_server(scenario)


def token(text, byte, top=True):
    """Return a token's logprobs, with those of the most probable one."""
    entry = {"token": text, "logprob": -0.5, "bytes": [byte]}
    return {**entry, "top_logprobs": [entry] if top else []}


def delta(index, content, reason=None, **more):
    """Return a choice of a chunk."""
    return {
        "index": index,
        "delta": {"content": content},
        "logprobs": None,
        "finish_reason": reason,
        **more,
    }


def test_the_whole_answer():
    prompt = [256, *b"<user>a", 257, *b"<assistant>"]
    entries = [token("H", 72), token("\ufffd", 0xC3), token("\ufffd", 0xA9)]
    body = {"max_tokens": 3, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    usage = {
        "prompt_tokens": 20,
        "completion_tokens": 3,
        "total_tokens": 23,
        "prompt_tokens_details": {"cached_tokens": 0},
    }

    async def scenario(served):
        served.engine.answer = "Hé!"
        envelope = {
            "id": "chatcmpl-mine",
            "created": pytest.approx(time.time(), abs=20),
            "model": "fake",
            "system_fingerprint": served.state.system_fingerprint,
        }
        message = {"role": "user", "content": "a"}
        answer = (await served.chat(message, **body, request_id="mine")).json()
        assert answer == {
            **envelope,
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "message": {
                        "role": "assistant",
                        "content": "Hé",
                        "refusal": None,
                        "reasoning": None,
                    },
                    "logprobs": {"content": entries, "refusal": None},
                    "finish_reason": "length",
                    "stop_reason": None,
                    "token_ids": [72, 0xC3, 0xA9],
                }
            ],
            "usage": usage,
            "prompt_logprobs": None,
            "prompt_token_ids": prompt,
        }
        response = await served.chat(
            message,
            **body,
            request_id="mine",
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [json.loads(item) for item in await events(response)]
        role = delta(0, "")
        role["delta"]["role"] = "assistant"
        texts = ["H", "", "é"]
        reasons = [{}, {}, {"finish_reason": "length", "stop_reason": None}]
        expected = [
            {"choices": [role], "prompt_token_ids": prompt},
            *(
                {
                    "choices": [
                        delta(0, text, token_ids=[entry["bytes"][0]])
                        | {"logprobs": {"content": [entry], "refusal": None}}
                        | reason
                    ]
                }
                for text, entry, reason in zip(texts, entries, reasons, strict=True)
            ),
        ]
        envelope["object"] = "chat.completion.chunk"
        assert chunks[:-1] == [{**envelope, "usage": None, **chunk} for chunk in expected]
        assert chunks[-1] == {**envelope, "choices": [], "usage": usage}

    with_server(scenario)


def test_the_whole_stream_of_two_answers():
    async def scenario(served):
        served.engine.answer = "Hé!"
        response = await served.chat(stream=True, n=2, stop="!", max_tokens=8)
        chunks = [json.loads(item) for item in await events(response)]
        pair = range(2)
        assert [chunk["choices"] for chunk in chunks] == [
            *[[delta(i, "") | {"delta": {"role": "assistant", "content": ""}}] for i in pair],
            *[[delta(i, "H")] for i in pair],
            *[[delta(i, "é")] for i in pair],
            *[[delta(i, "", "stop", stop_reason="!")] for i in pair],
        ]
        assert all("usage" not in chunk for chunk in chunks)
        assert [chunk.get("prompt_token_ids", "none") for chunk in chunks] == [None] + ["none"] * 7

    with_server(scenario)


@pytest.mark.parametrize(
    ("fields", "role"),
    [
        ({}, "bot"),
        ({"continue_final_message": True}, "assistant"),
        ({"continue_final_message": False}, "bot"),
    ],
)
def test_whose_message_it_is(fields, role):
    async def scenario(served):
        messages = [USER, {"role": "assistant", "content": "Well,"}]
        answer = (await served.chat(*messages, max_tokens=1, **fields)).json()
        assert answer["choices"][0]["message"]["role"] == role

    with_server(scenario, response_role="bot")


@pytest.mark.parametrize(
    ("chars", "fields", "count"),
    [
        (225, {}, 12),  # all that fits after the prompt of 244 tokens
        (236, {}, 1),
        (225, {"min_tokens": 3}, 12),
        (100, {}, 50),  # the model's own limit
        (225, {"max_tokens": 7}, 7),
    ],
)
def test_how_long_an_answer_gets(chars, fields, count):
    async def scenario(served):
        served.engine.answer = "x" * 300
        message = {"role": "user", "content": "x" * chars}
        answer = (await served.chat(message, **fields)).json()
        assert answer["usage"]["prompt_tokens"] == chars + 19
        assert answer["usage"]["completion_tokens"] == count
        assert answer["choices"][0]["finish_reason"] == "length"

    with_server(scenario, lambda: FakeAsyncLLM(generation_config={"max_tokens": 50}))


def test_a_prompt_that_leaves_no_room_is_said_in_full():
    async def scenario(served):
        for chars, message in (
            (
                237,
                "This model's maximum context length is 256 tokens; your prompt has 256 tokens, "
                "which leaves no room for an answer. Shorten the prompt or set "
                "truncate_prompt_tokens.",
            ),
            (
                300,
                "This model's maximum context length is 256 tokens; your prompt has 319 tokens, "
                "which leaves no room for an answer. Shorten the prompt or set "
                "truncate_prompt_tokens.",
            ),
        ):
            response = await served.chat({"role": "user", "content": "x" * chars})
            assert response.status_code == 400
            assert response.json()["error"] == {
                "message": message,
                "type": "invalid_request_error",
                "param": "messages",
                "code": "context_length_exceeded",
            }

    with_server(scenario, lambda: FakeAsyncLLM(generation_config={"max_tokens": 50}))


def test_special_tokens_of_a_chat_are_the_templates_unless_asked_for():
    async def scenario(served):
        await served.chat(max_tokens=1)
        await served.chat(max_tokens=1, add_special_tokens=True)
        await served.chat(max_tokens=1, add_special_tokens=False)
        starts = [r.prompt_token_ids[:3] for r in served.engine.requests]
        assert starts == [[256, 60, 117], [256, 256, 60], [256, 60, 117]]

    with_server(scenario)


ASKED = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "So "}


@pytest.mark.parametrize(
    ("messages", "fields", "role", "before"),
    [
        ((ASKED, BEGUN), {"echo": True, "continue_final_message": True}, "assistant", "So "),
        ((ASKED, BEGUN), {"echo": True, "add_generation_prompt": False}, "assistant", "So "),
        ((ASKED, BEGUN), {"echo": True}, "assistant", "So "),
        ((ASKED,), {"echo": True, "add_generation_prompt": False}, "user", "hi"),
        ((ASKED,), {"echo": True}, "assistant", ""),
        ((ASKED, BEGUN), {"echo": False, "continue_final_message": True}, "assistant", ""),
    ],
)
def test_echo(messages, fields, role, before):
    async def scenario(served):
        answer = (await served.chat(*messages, **fields, n=2)).json()
        for choice in answer["choices"]:
            assert choice["message"]["role"] == role
            assert choice["message"]["content"] == before + ANSWER
        assert answer["usage"]["completion_tokens"] == 2 * (len(ANSWER.encode()) + 1)
        chunks = await events(await served.chat(*messages, **fields, n=2, stream=True))
        texts = {0: "", 1: ""}
        for choice in (c for item in chunks for c in json.loads(item)["choices"]):
            texts[choice["index"]] += choice["delta"].get("content", "")
            assert choice["delta"].get("role", role) == role
        assert texts == dict.fromkeys((0, 1), before + ANSWER)

    with_server(scenario)


def test_tokens_as_ids():
    async def scenario(served):
        fields = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
        answer = (await served.chat(**fields, max_tokens=1)).json()
        (entry,) = answer["choices"][0]["logprobs"]["content"]
        assert entry["token"] == entry["top_logprobs"][0]["token"] == "token_id:72"
        assert entry["bytes"] == [72]

    with_server(scenario)


def test_tokens_as_ids_unless_a_request_says_otherwise():
    async def scenario(served):
        for asked, token in ((None, "token_id:72"), (True, "token_id:72"), (False, "H")):
            fields = {"logprobs": True, "return_tokens_as_token_ids": asked, "max_tokens": 1}
            answer = (await served.chat(**fields)).json()
            assert answer["choices"][0]["logprobs"]["content"][0]["token"] == token

    with_server(scenario, return_tokens_as_token_ids=True)
