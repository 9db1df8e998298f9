"""Structured outputs: every form of the request, and errors of impossible ones."""

import json

import pytest

from octavo.config import EngineConfig
from octavo.errors import RequestError
from octavo.messages import GrammarSpec
from octavo.server import answers
from octavo.server.schema import CompletionBody
from tests.server.fake_engine import ANSWER, FakeAsyncLLM, events, with_server

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TEXT = '{"type":"object","properties":{"b":{},"a":{}}}'
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
OLD_TAG = {"type": "structural_tag", "structures": [{"begin": "<a>"}], "triggers": ["<"]}
GUIDANCE = {"guided_decoding_backend": "guidance"}
PATHS = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


def json_schema(**fields):
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


def wanted(**fields):
    return {"structured_outputs": fields}


ASKED = [
    ({}, None),
    ({"response_format": None, "structured_outputs": None, "guided_json": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"grammar": ""}, None),
    ({"guided_decoding_backend": "xgrammar"}, None),
    ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object")),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, GrammarSpec("json", TEXT)),
    (json_schema(name="x", schema=SCHEMA, strict=True), GrammarSpec("json", TEXT, strict=True)),
    (json_schema(schema=SCHEMA, strict=False, description="d"), GrammarSpec("json", TEXT)),
    (json_schema(name="x", schema=True), GrammarSpec("json", "true")),
    ({"response_format": TAG}, GrammarSpec("structural_tag", json.dumps(TAG).replace(" ", ""))),
    (
        {"response_format": OLD_TAG},
        GrammarSpec("structural_tag", json.dumps(OLD_TAG).replace(" ", "")),
    ),
    (wanted(json=SCHEMA), GrammarSpec("json", TEXT)),
    (wanted(json=json.dumps(SCHEMA)), GrammarSpec("json", TEXT)),
    (wanted(json=False), GrammarSpec("json", "false")),
    (wanted(json={}, disable_any_whitespace=True), GrammarSpec("json", "{}", any_whitespace=False)),
    (wanted(json={}, whitespace_pattern=None, disable_fallback=False), GrammarSpec("json", "{}")),
    (wanted(json_object=True), GrammarSpec("json_object")),
    (wanted(regex="a+", json_object=False), GrammarSpec("regex", "a+")),
    (wanted(choice=["a", "b"]), GrammarSpec("choice", '["a", "b"]')),
    (wanted(grammar="root ::= x"), GrammarSpec("grammar", "root ::= x")),
    (wanted(structural_tag='{"a": 1}'), GrammarSpec("structural_tag", '{"a":1}')),
    (wanted(regex="a", backend="guidance"), GrammarSpec("regex", "a", "llguidance")),
    ({"guided_json": SCHEMA}, GrammarSpec("json", TEXT)),
    ({"guided_json": json.dumps(SCHEMA)}, GrammarSpec("json", TEXT)),
    ({"guided_regex": "a+"}, GrammarSpec("regex", "a+")),
    ({"guided_choice": ["a"]}, GrammarSpec("choice", '["a"]')),
    ({"guided_grammar": "x"}, GrammarSpec("grammar", "x")),
    (
        {"guided_regex": "a", "guided_decoding_backend": "xgrammar"},
        GrammarSpec("regex", "a", "xgrammar"),
    ),
    ({"guided_regex": "a", "response_format": {"type": "text"}}, GrammarSpec("regex", "a")),
    ({"json_schema": SCHEMA}, GrammarSpec("json", TEXT)),
    ({"json_schema": json.dumps(SCHEMA)}, GrammarSpec("json", TEXT)),
    ({"regex": "a+"}, GrammarSpec("regex", "a+")),
    ({"grammar": "root ::= x"}, GrammarSpec("grammar", "root ::= x")),
    ({"ebnf": "root ::= x"}, GrammarSpec("grammar", "root ::= x")),
    ({"structural_tag": {"a": 1}}, GrammarSpec("structural_tag", '{"a":1}')),
    # guidance's VLLMModel sends the grammar in the old and in the new spelling.
    (
        wanted(grammar="start: x") | {"guided_grammar": "start: x", **GUIDANCE},
        GrammarSpec("grammar", "start: x", "llguidance"),
    ),
    (json_schema(schema=SCHEMA) | {"guided_json": SCHEMA}, GrammarSpec("json", TEXT)),
]


@pytest.mark.parametrize("path", PATHS)
def test_every_spelling(path):
    async def scenario(served):
        for fields, spec in ASKED:
            response = await served.post(path, **PATHS[path], **fields)
            assert response.status_code == 200, (fields, response.text)
            assert "X-Octavo-Ignored-Fields" not in response.headers
            assert served.engine.requests[-1].sampling_params.grammar == spec, fields

    with_server(scenario)


@pytest.mark.parametrize("path", PATHS)
def test_streams_several_answers_and_several_prompts(path):
    async def scenario(served):
        body = {**PATHS[path], "regex": "a", "n": 2, "max_tokens": 3}
        if "prompt" in body:
            body["prompt"] = ["hi", "ho"]
        for stream in (False, True):
            response = await served.post(path, **body, stream=stream)
            assert response.status_code == 200
            if stream:
                found = [json.loads(event)["choices"] for event in await events(response)]
                reasons = [c["finish_reason"] for choices in found for c in choices]
                reasons = [reason for reason in reasons if reason]
            else:
                reasons = [c["finish_reason"] for c in response.json()["choices"]]
            # Clients of JSON see by this that the answer was truncated.
            assert reasons == ["length"] * (2 if "messages" in body else 4)
        assert {r.sampling_params.grammar for r in served.engine.requests} == {
            GrammarSpec("regex", "a")
        }

    with_server(scenario)


# Requests, and the complete error: the message, the field, the code.
WRONG = [
    (
        {"response_format": {"type": "grammar"}},
        "response_format.type='grammar' is not allowed: input should be 'text', 'json_object', "
        "'json_schema' or 'structural_tag'.",
        "response_format.type",
        None,
    ),
    (
        {"response_format": {}},
        "response_format.type is missing; it is required.",
        "response_format.type",
        "missing_parameter",
    ),
    (
        {"response_format": {"type": "json_schema"}},
        'response_format.json_schema is missing; give {"name": "...", "schema": {...}}.',
        "response_format.json_schema",
        "missing_parameter",
    ),
    (
        json_schema(name="x"),
        "response_format.json_schema.schema is missing; it is required.",
        "response_format.json_schema.schema",
        "missing_parameter",
    ),
    (
        {"response_format": {"type": "text", "triggers": []}},
        "response_format.triggers cannot be used with type 'text'.",
        "response_format.triggers",
        None,
    ),
    (
        json_schema(schema={"a": "x" * 2**19}),
        "response_format.json_schema.schema has 524296 bytes; at most 524288 are allowed.",
        "response_format.json_schema.schema",
        None,
    ),
    (
        json_schema(schema={}) | {"guided_regex": "a"},
        "response_format.json_schema.schema and guided_regex both constrain the form of the "
        "answer; give one of them.",
        "guided_regex",
        None,
    ),
    (
        wanted(),
        "structured_outputs is empty; give one of json, regex, choice, grammar, "
        "json_object, structural_tag.",
        "structured_outputs",
        None,
    ),
    (
        wanted(json={}, regex="a"),
        "structured_outputs.json and structured_outputs.regex both constrain the form of the "
        "answer; give one of them.",
        "structured_outputs.regex",
        None,
    ),
    (
        wanted(grammar="a") | {"guided_grammar": "b"},
        "structured_outputs.grammar and guided_grammar both constrain the form of the answer "
        "and differ; give one of them.",
        "guided_grammar",
        None,
    ),
    (
        wanted(choice=[]),
        "structured_outputs.choice=[] is not allowed; it is a list of one or more strings.",
        "structured_outputs.choice",
        None,
    ),
    (
        wanted(regex="a", backend="outlines"),
        "structured_outputs.backend='outlines' is not one of auto, xgrammar, llguidance, guidance.",
        "structured_outputs.backend",
        None,
    ),
    (
        wanted(json={}, whitespace_pattern=" "),
        "structured_outputs.whitespace_pattern=' ' is not supported yet; use "
        "structured_outputs.disable_any_whitespace.",
        "structured_outputs.whitespace_pattern",
        "unsupported_parameter",
    ),
    (
        {"guided_json": "{"},
        "guided_json='{' is not allowed: it is not valid JSON (Expecting property name enclosed in "
        "double quotes: line 1 column 2 (char 1)); it is a JSON schema, which is an object, true "
        "or false, or its text (of a pydantic model: Model.model_json_schema()).",
        "guided_json",
        None,
    ),
    (
        {"guided_json": '{"a":' * 65 + "{}" + "}" * 65},
        "guided_json is nested more than 64 levels deep.",
        "guided_json",
        None,
    ),
    (
        {"guided_choice": ["a"] * 100_000},
        "guided_choice has 100000 entries; at most 4096 are allowed.",
        "guided_choice",
        None,
    ),
    (
        {"guided_choice": ["a", 5]},
        "guided_choice[1]=5 is not allowed: input should be a valid string.",
        "guided_choice[1]",
        None,
    ),
    (
        {"guided_regex": "a", "guided_decoding_backend": "lm-format-enforcer"},
        "guided_decoding_backend='lm-format-enforcer' is not one of auto, xgrammar, llguidance, "
        "guidance.",
        "guided_decoding_backend",
        None,
    ),
    (
        {"ebnf": ""},
        "ebnf='' is not allowed; it is a non-empty string.",
        "ebnf",
        None,
    ),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_said_in_full(path, stream):
    async def scenario(served):
        for fields, message, param, code in WRONG:
            response = await served.post(path, **PATHS[path], **fields, stream=stream)
            assert response.status_code == 400, fields
            assert response.json()["error"] == {
                "message": message,
                "type": "invalid_request_error",
                "param": param,
                "code": code,
            }
        assert not served.engine.requests

    with_server(scenario)


def test_a_backend_that_is_not_installed_is_the_clients_mistake(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for field, fields in (
        ("structured_outputs.backend", wanted(regex="a", backend="xgrammar")),
        ("guided_decoding_backend", {"regex": "a", "guided_decoding_backend": "xgrammar"}),
    ):
        body = CompletionBody.model_validate({"prompt": "hi", **fields})
        with pytest.raises(RequestError, match=f"^{field}='xgrammar' needs the package") as error:
            body.structured_outputs_params()
        assert error.value.param == field


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", PATHS)
def test_what_only_the_engine_finds_is_an_ordinary_error(path, n, stream):
    """No part of a stream is sent before the first token, so it has a status as well."""
    blamed = {
        "response_format.json_schema.schema": json_schema(schema={"$ref": "#/nowhere"}),
        "response_format": {"response_format": TAG},
        "structured_outputs.regex": wanted(regex="("),
        "guided_grammar": {"guided_grammar": "("},
        "ebnf": {"ebnf": "("},
    }

    async def scenario(served):
        served.engine.grammar_error = "The grammar has no end."
        for param, fields in blamed.items():
            body = {**PATHS[path], **fields, "n": n, "stream": stream}
            if "prompt" in body:
                body["prompt"] = ["hi", "ho", "ha"]
            response = await served.post(path, **body)
            assert response.status_code == 400, response.text
            answers.ErrorAnswer.model_validate_json(response.text)
            assert response.json()["error"] == {
                "message": "The grammar has no end.",
                "type": "invalid_request_error",
                "param": param,
                "code": "invalid_grammar",
            }
        # The other requests are not affected.
        response = await served.post(path, **PATHS[path])
        assert response.status_code == 200
        assert ANSWER in response.text

    with_server(scenario)


def test_without_a_tokenizer_there_is_no_grammar():
    def engine():
        settings = {"served_model_name": ["fake"], "skip_tokenizer_init": True}
        return FakeAsyncLLM(EngineConfig.from_kwargs(**settings))

    async def scenario(served):
        response = await served.complete(prompt=[5], guided_choice=["a"])
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "guided_choice"
        assert "skip_tokenizer_init" in error["message"]

    with_server(scenario, engine)


def test_a_description_of_all_of_it():
    async def scenario(served):
        schemas = (await served.http.get("/openapi.json")).json()["components"]["schemas"]
        for body in ("CompletionBody", "ChatBody"):
            fields = set(schemas[body]["properties"])
            assert {name for asked, _ in ASKED for name in asked} <= fields
        assert set(schemas["ResponseFormat"]["properties"]) == {
            *("type", "json_schema", "schema", "format", "structures", "triggers")
        }
        assert schemas["JsonSchema"]["required"] == ["schema"]
        assert {"json", "choice", "backend"} <= set(schemas["StructuredOutputs"]["properties"])

    with_server(scenario)
