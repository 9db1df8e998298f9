"""Types of the clients' packages: what they accept and what not."""

import json

import client_types
import pytest

COMPLETION = {
    "id": "c",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "text": "x", "finish_reason": "stop", "logprobs": None}],
}


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in client_types.ANSWERS.values()
        if "ollama" not in getattr(kind, "__module__", "")
    ],
)
def test_answers_need_their_fields(kind):
    with pytest.raises(client_types.ValidationError):
        client_types.check(kind, b"{}", {})


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"finish_reason": None}, True),
        ({"finish_reason": "abort"}, True),
        ({"finish_reason": "repetition"}, False),
        ({"index": "0"}, False),
        ({"text": None}, False),
    ],
)
def test_choices(change, fits):
    kind = client_types.ANSWERS["POST /v1/completions"]
    data = json.dumps({**COMPLETION, "choices": [{**COMPLETION["choices"][0], **change}]})
    if fits:
        client_types.check(kind, data, {})
        return
    with pytest.raises(client_types.ValidationError):
        client_types.check(kind, data, {})


def test_a_role_that_vllms_fields_ask_for():
    kind = client_types.ANSWERS["POST /v1/chat/completions"]
    message = {"role": "user", "content": "x"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    data = json.dumps({**COMPLETION, "object": "chat.completion", "choices": [choice]})
    client_types.check(kind, data, {"continue_final_message": True})
    with pytest.raises(client_types.ValidationError):
        client_types.check(kind, data, {})
