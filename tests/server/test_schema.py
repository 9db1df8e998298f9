"""Errors of a body are complete, and cost no more in millions than once."""

import pytest
from pydantic import ValidationError

from octavo.errors import RequestError
from octavo.sampling_params import MAX_LOGIT_BIAS
from octavo.server.body import validate
from octavo.server.schema import MAX_PROMPTS, ChatBody, CompletionBody, DetokenizeBody
from tests.server.fake_engine import with_server


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "bad_words"])
def test_a_list_is_given_up_at_its_first_wrong_entry(name):
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate({"prompt": "x", name: [None] * 1000})
    assert caught.value.error_count() == 1
    with pytest.raises(RequestError) as refused:
        validate(CompletionBody, {"prompt": "x", name: [None] * 1000})
    assert refused.value.param == f"{name}[0]"


def test_tokens_to_detokenize():
    with pytest.raises(ValidationError) as caught:
        DetokenizeBody.model_validate({"tokens": [-1] * 1000})
    assert caught.value.error_count() == 1


def test_numbers_of_entries_are_bounded():
    bias = {str(i): "x" for i in range(MAX_LOGIT_BIAS + 1)}
    for name, body in (("logit_bias", {"logit_bias": bias}), ("prompt", {"prompt": ["x"] * 5000})):
        with pytest.raises(RequestError, match="at most") as refused:
            validate(CompletionBody, {"prompt": "x"} | body)
        assert refused.value.param == name
    assert len(validate(CompletionBody, {"prompt": [[1]] * MAX_PROMPTS}).prompt) == MAX_PROMPTS


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BIG = 2**31


def messages(*found):
    return {"messages": list(found)}


# Bodies, and the complete error: the message, the field, the code.
WRONG = {
    "/v1/completions": [
        ({}, "prompt is missing; it is required.", "prompt", "missing_parameter"),
        (
            {"prompt": 5},
            "prompt=5 is not allowed; give a string, a list of strings, a list of token ids, or a "
            "list of lists of token ids.",
            "prompt",
            None,
        ),
        ({"prompt": []}, "prompt is an empty list; give at least one prompt.", "prompt", None),
        (
            {"prompt": [True]},
            "prompt[0]=True is not a token id (an integer >= 0).",
            "prompt",
            None,
        ),
        (
            {"prompt": [1.5]},
            "prompt[0]=1.5 is not a string, a token id or a list of token ids.",
            "prompt",
            None,
        ),
        ({"prompt": [0, -1]}, "prompt[1]=-1 is not a token id (an integer >= 0).", "prompt", None),
        (
            {"prompt": [BIG - 1, -1]},
            "prompt[1]=-1 is not a token id (an integer >= 0).",
            "prompt",
            None,
        ),
        (
            {"prompt": [0, BIG]},
            "prompt[1]=2147483648 is not a token id (an integer >= 0).",
            "prompt",
            None,
        ),
        (
            {"prompt": [0, BIG - 1]},
            "prompt holds the token id 2147483647, which is out of vocabulary: this model has 258 "
            "tokens.",
            "prompt",
            None,
        ),
        (
            {"prompt": ["a", ["b"]]},
            "prompt[1]=['b'] differs in kind from prompt[0]; the prompts of one request are all "
            "strings or all lists of token ids.",
            "prompt",
            None,
        ),
        ({"prompt": [[5], []]}, "prompt[1]=[] is not a list of token ids.", "prompt[1]", None),
        (
            {"prompt": [[5], [6, -1]]},
            "prompt[1][1]=-1 is not a token id (an integer >= 0).",
            "prompt[1]",
            None,
        ),
        (
            {"prompt": ["a"] * 4097},
            "prompt has 4097 prompts; at most 4096 are allowed.",
            "prompt",
            None,
        ),
        (
            {"prompt": "a", "stop": ["a", 5]},
            "stop=['a', 5] is not allowed; give a string or a list of strings.",
            "stop",
            None,
        ),
        (
            {"prompt": "a", "stop": ["a"] * 65},
            "stop has 65 strings; at most 64 are allowed.",
            "stop",
            None,
        ),
        (
            {"prompt": "a", "logit_bias": {str(i): 0 for i in range(1025)}},
            "logit_bias has 1025 entries; at most 1024 are allowed.",
            "logit_bias",
            None,
        ),
        (
            {"prompt": "a", "logit_bias": {"5": "x"}},
            "logit_bias.5='x' is not allowed: input should be a valid number.",
            "logit_bias.5",
            None,
        ),
        (
            {"prompt": "a", "priority": 2**70},
            "priority=1180591620717411303424 is not allowed; it is an integer in [-2147483648, "
            "2147483647].",
            "priority",
            None,
        ),
        (
            {"prompt": "a", "stream_options": {}},
            "stream_options needs stream=true.",
            "stream_options",
            None,
        ),
        (
            {"prompt": "a", "stream": True, "prompt_logprobs": 1},
            "prompt_logprobs is not available with stream=true; leave one of them out.",
            "prompt_logprobs",
            None,
        ),
        (
            {"prompt": "a", "best_of": 2, "n": 3},
            "best_of=2 is not allowed; it is the number of answers of which the best n=3 are "
            "returned, n to 1024.",
            "best_of",
            None,
        ),
        (
            {"prompt": "a", "deadline_ms": 0},
            "deadline_ms=0 is not allowed: input should be greater than 0.",
            "deadline_ms",
            None,
        ),
        (
            {"prompt": "a", "deadline_ms": 2**53 + 1},
            "deadline_ms=9007199254740993 is not allowed: input should be less than or equal to "
            "9007199254740992.",
            "deadline_ms",
            None,
        ),
        (
            {"prompt": "a", "cache_salt": ""},
            "cache_salt='' is not allowed: string should have at least 1 character.",
            "cache_salt",
            None,
        ),
    ],
    "/v1/chat/completions": [
        ({}, "messages is missing; it is required.", "messages", "missing_parameter"),
        (
            messages(),
            "messages=[] is not allowed; give a list of one or more messages.",
            "messages",
            None,
        ),
        (
            {"messages": "hi"},
            "messages='hi' is not allowed; give a list of one or more messages.",
            "messages",
            None,
        ),
        (
            messages("hi"),
            'messages[0]=\'hi\' is not a message; give {"role": "user", "content": "..."}.',
            "messages",
            None,
        ),
        (
            messages({"role": "function", "content": "x"}),
            "messages[0].name=None is not allowed; a message of role 'function' has the name of "
            "the function.",
            "messages",
            None,
        ),
        (
            messages({"role": "user", "content": "x", "tool_call_id": "c"}),
            "messages[0].tool_call_id is not allowed with role 'user'; it belongs to messages of "
            "role 'tool'.",
            "messages",
            None,
        ),
        (
            messages({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}),
            "messages[0].tool_calls[0].function.name is missing; it is required.",
            "messages[0].tool_calls[0].function.name",
            "missing_parameter",
        ),
        (
            {**CHAT, "tool_choice": "always"},
            'tool_choice=\'always\' is unknown; use "auto", "none", "required", '
            '{"type": "function", "function": {"name": "..."}} or {"type": "allowed_tools", ...}.',
            "tool_choice",
            None,
        ),
        (
            {**CHAT, "tool_choice": "required"},
            "tool_choice needs tools.",
            "tool_choice",
            None,
        ),
        (
            messages({"role": "", "content": "x"}),
            "messages[0].role='' is not allowed; it is a string of 1 to 64 characters, such as "
            "system, user or assistant.",
            "messages",
            None,
        ),
        (
            messages({"role": "assistant"}),
            "messages[0].content=None is not allowed; it is a string or a list of parts.",
            "messages",
            None,
        ),
        (
            messages({"role": "user", "content": None}),
            "messages[0].content=None is not allowed; it is a string or a list of parts.",
            "messages",
            None,
        ),
        (
            messages({"role": "user", "content": ["a", 5]}),
            'messages[0].content[1]=5 is not allowed; a part is {"type": "text", "text": "..."}.',
            "messages",
            None,
        ),
        (
            messages({"role": "user", "content": [{"type": "smell"}]}),
            "messages[0].content[0] is of type 'smell', which is not supported; use text, "
            "image_url, input_audio, audio_url or video_url.",
            "messages",
            "unsupported_parameter",
        ),
        (
            messages({"role": "user", "content": [{"type": "text", "text": 5}]}),
            "messages[0].content[0].text=5 is not allowed; it is a string.",
            "messages",
            None,
        ),
        (
            messages({"role": "user", "content": "a", "name": 5}),
            "messages[0].name=5 is not allowed: input should be a valid string.",
            "messages[0].name",
            None,
        ),
        ({**CHAT, "top_logprobs": 1}, "top_logprobs needs logprobs=true.", "top_logprobs", None),
        (
            {**CHAT, "logprobs": True, "top_logprobs": 21},
            "top_logprobs=21 is more than this server allows: 20 (--max-logprobs).",
            "top_logprobs",
            None,
        ),
        (
            {**CHAT, "logprobs": True, "top_logprobs": -2},
            "top_logprobs=-2 is not allowed: input should be greater than or equal to -1.",
            "top_logprobs",
            None,
        ),
        (
            {**CHAT, "max_tokens": 1, "max_completion_tokens": 2},
            "max_tokens=1 and max_completion_tokens=2 contradict; give one of them.",
            "max_tokens",
            None,
        ),
        (
            {**CHAT, "max_completion_tokens": 0},
            "max_completion_tokens=0 is not allowed: input should be greater than or equal to 1.",
            "max_completion_tokens",
            None,
        ),
        (
            {**CHAT, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message and add_generation_prompt exclude each other.",
            "continue_final_message",
            None,
        ),
    ],
    "/tokenize": [
        ({}, "Give either prompt or messages.", "prompt", None),
        ({"prompt": "a", **CHAT}, "Give either prompt or messages.", "prompt", None),
        (
            {"prompt": "a", "model": "x"},
            "The model 'x' does not exist here; this server has fake.",
            "model",
            "model_not_found",
        ),
    ],
    "/detokenize": [
        ({}, "tokens is missing; it is required.", "tokens", "missing_parameter"),
        (
            {"tokens": [0, -1]},
            "tokens[1]=-1 is not allowed: input should be greater than or equal to 0.",
            "tokens[1]",
            None,
        ),
        (
            {"tokens": [BIG]},
            "tokens[0]=2147483648 is not allowed: input should be less than or equal to "
            "2147483647.",
            "tokens[0]",
            None,
        ),
        (
            {"tokens": [5, 258]},
            "tokens holds the token id 258, which is out of vocabulary: this model has 258 tokens.",
            "tokens",
            None,
        ),
        (
            {"tokens": [], "model": "x"},
            "The model 'x' does not exist here; this server has fake.",
            "model",
            "model_not_found",
        ),
    ],
}


@pytest.mark.parametrize("path", WRONG)
def test_what_is_wrong_is_said_in_full(path):
    async def scenario(served):
        for body, message, param, code in WRONG[path]:
            response = await served.post(path, **body)
            assert response.status_code == (404 if code == "model_not_found" else 400), message
            assert response.json()["error"] == {
                "message": message,
                "type": "invalid_request_error",
                "param": param,
                "code": code,
            }

    with_server(scenario)


def test_what_lies_just_within_the_bounds():
    most = {str(i): 0 for i in range(258)}

    async def scenario(served):
        for path, body in [
            ("/v1/completions", {"prompt": [0, 257]}),
            ("/v1/completions", {"prompt": "a", "stop": ["zz"] * 64}),
            ("/v1/completions", {"prompt": "a", "logit_bias": most}),
            ("/v1/completions", {"prompt": "a", "best_of": 2, "n": 2}),
            ("/v1/completions", {"prompt": "a", "best_of": 1}),
            ("/v1/completions", {"prompt": "a", "deadline_ms": 2**53}),
            ("/v1/completions", {"prompt": "a", "cache_salt": "x"}),
            ("/v1/completions", {"prompt": "a", "priority": 0, "n": None}),
            ("/v1/completions", {"prompt": "a", "stream_options": {}, "stream": True}),
            ("/v1/completions", {"prompt": "a", "prompt_logprobs": 0, "stream": False}),
            ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 20}),
            ("/v1/chat/completions", {**CHAT, "logprobs": False, "top_logprobs": 0}),
            ("/v1/chat/completions", {**CHAT, "max_tokens": 2, "max_completion_tokens": 2}),
            ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 1}),
            ("/v1/chat/completions", messages({"role": "assistant", "content": None})),
            ("/detokenize", {"tokens": []}),
            ("/detokenize", {"tokens": [0, 257]}),
        ]:
            response = await served.post(path, **body)
            assert response.status_code == 200, (body, response.text)

    with_server(scenario)


def test_messages_are_given_up_at_the_first_wrong_one():
    wrong = messages(*[{"role": "user", "content": "a", "name": 5}] * 1000)
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate(wrong)
    assert caught.value.error_count() == 1


LENIENT = {
    "n": 2,
    "temperature": 0.5,
    "top_k": 3,
    "seed": -7,
    "max_tokens": 4,
    "repetition_penalty": 1.5,
    "priority": 0,
    "deadline_ms": 9000,
}


def test_numbers_as_others_write_them():
    plain = validate(CompletionBody, {"prompt": "a", **LENIENT})
    for write in (float, str, lambda v: f"{v:.1f}", lambda v: f"+{v}" if v > 0 else v):
        written = {name: write(value) for name, value in LENIENT.items()}
        assert validate(CompletionBody, {"prompt": "a", **written}) == plain
    assert validate(CompletionBody, {"prompt": "a", "temperature": "5e-1"}).temperature == 0.5
    lists = {"stop_token_ids": ["5", 6.0, 7], "allowed_token_ids": [5.0], "logit_bias": {"5": "1"}}
    body = validate(CompletionBody, {"prompt": "a", **lists})
    assert (body.stop_token_ids, body.allowed_token_ids) == ([5, 6, 7], [5])
    assert body.logit_bias == {"5": 1.0}
    assert validate(DetokenizeBody, {"tokens": ["5", 6.0]}).tokens == [5, 6]
    chat = validate(ChatBody, {**CHAT, "top_logprobs": "2", "max_completion_tokens": 3.0})
    assert (chat.top_logprobs, chat.max_completion_tokens) == (2, 3)


@pytest.mark.parametrize("value", ["", " 3", "3 ", "1_0", "٣", "0x3", "3.5", 3.5, True, [3], "nan"])
def test_what_is_no_integer(value):
    with pytest.raises(RequestError) as refused:
        validate(CompletionBody, {"prompt": "a", "max_tokens": value})
    assert refused.value.param == "max_tokens"
    assert refused.value.message.startswith("max_tokens=")


@pytest.mark.parametrize("value", ["", " 3", "1_0", "nan", "inf", "-Infinity", "1e", True, {}])
def test_what_is_no_number(value):
    with pytest.raises(RequestError) as refused:
        validate(CompletionBody, {"prompt": "a", "temperature": value})
    assert refused.value.param == "temperature"


def test_biases_are_clamped():
    bias = {"5": 1000, "6": -1000, "7": 100, "8": -99.5, "9": "1e999"}
    found = validate(CompletionBody, {"prompt": "a", "logit_bias": bias}).logit_bias
    assert found == {"5": 100, "6": -100, "7": 100, "8": -99.5, "9": 100}


def test_any_role_that_the_template_takes():
    async def scenario(served):
        response = await served.chat(
            {"role": "wizard", "content": "x"}, {"role": "a\nb", "content": "y"}
        )
        assert response.status_code == 200
        prompt = bytes(i for i in served.engine.requests[0].prompt_token_ids if i < 256)
        assert prompt == b"<wizard>x<a\nb>y<assistant>"

    with_server(scenario)


def test_a_priority_is_ignored_without_priorities(caplog):
    async def scenario(served):
        for stream in (False, True):
            response = await served.complete(priority=3, mood=1, stream=stream)
            assert response.status_code == 200
            assert response.headers["X-Octavo-Ignored-Fields"] == "mood, priority"
        assert "X-Octavo-Ignored-Fields" not in (await served.complete(priority=0)).headers
        assert len([r for r in caplog.records if "priority" in r.message]) == 1

    with caplog.at_level("WARNING", "octavo"):
        with_server(scenario)
