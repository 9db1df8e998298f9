"""Send thousands of odd requests to every address of a real server; none may cause a 5xx.

    python benchmarks/fuzz_api.py --requests 20000 [--seed 1] [--model MODEL]

Requests are made by hypothesis from the server's own `/openapi.json`: valid bodies, bodies with
wrong types, huge numbers and unknown fields, and bytes that are not JSON; odd methods, paths and
headers. They name objects that earlier answers made: responses, conversations, items, files and
batches. Each answer and each event must have the form that `/openapi.json` says, and the strict
types of the packages `openai`, `anthropic` (if it is installed) and `ollama`. Meanwhile a
well-behaved client repeats the same request and must always receive the same answer. A failing
request is shrunk to the smallest one that fails. At the end the engine must be idle.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import client_types
import hypothesis
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from octavo.compat import request_fields as known_fields
from octavo.server import answers, anthropic_answers, response_answers
from octavo.server.app import OLLAMA_PROBE, ROUTES
from octavo.server.openapi import Operation, operation_of

Json = dict[str, Any]
ANSWER_TIMEOUT = 60.0
"""Seconds after which a request counts as never answered."""
# Contexts and queues so small that even the largest possible request ends soon.
FLAGS = (
    *("--max-model-len", "384", "--max-num-batched-tokens", "256", "--max-num-seqs", "32"),
    *("--max-num-queued-reqs", "48", "--max-request-bytes", "64K", "--max-logprobs", "-1"),
    *("--served-model-name", "fuzzed", "--host", "127.0.0.1", "--port", "0", "--enable-admin"),
)


@dataclass(frozen=True)
class Request:
    """HTTP request; `operation` is its documented path. `Known.fill` replaces its placeholders."""

    operation: str
    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def encode(self) -> bytes:
        """Return the bytes to send."""
        lines = [self.method.encode() + b" " + self.target + b" HTTP/1.1", b"Host: localhost"]
        lines += [name + b": " + value for name, value in self.headers]
        lines.append(b"Content-Length: %d" % len(self.body))
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


class FuzzError(AssertionError):
    """Error: the answer to a request is not allowed."""


# Objects that earlier answers made

_KINDS = {"resp": "response", "conv": "conversation", "file": "file", "batch": "batch"}
_ID = re.compile(rb'"id":"((resp|conv|msg|fc|fco|rs|file|batch)[_-][0-9a-f]{32}(?:_[0-9]+)?)"')
_PLACEHOLDER = re.compile(rb"~([a-z]+)-([0-9]+)~")
_MOST_KNOWN = 20


class Known:
    """Ids of objects that answers named, the newest ones of each kind."""

    def __init__(self) -> None:
        self._ids: dict[str, list[bytes]] = {}

    def learn(self, answer: bytes) -> None:
        """Add the ids of an answer."""
        for found in _ID.finditer(answer):
            ids = self._ids.setdefault(_KINDS.get(found[2].decode(), "item"), [])
            if found[1] not in ids:
                ids.append(found[1])
                del ids[:-_MOST_KNOWN]

    def fill(self, data: bytes) -> bytes:
        """Replace each placeholder, such as ~response-3~, by an id of its kind.

        An item after a conversation is one of its items, if there is one.
        """
        owner = b""

        def one(found: re.Match[bytes]) -> bytes:
            nonlocal owner
            kind = found[1].decode()
            ids = self._ids.get(kind, [b"none"])
            if kind == "item":
                ids = [name for name in ids if owner in name] or ids
            name = ids[int(found[2]) % len(ids)]
            if kind == "conversation":
                owner = name.removeprefix(b"conv_")
            return name

        return _PLACEHOLDER.sub(one, data)


def _named(kind: str) -> st.SearchStrategy[str]:
    return st.integers(0, _MOST_KNOWN - 1).map(lambda number: f"~{kind}-{number}~")


# Making requests

_HUGE = (2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 1e308, -0.0, 5e-324)
_ODD_TEXTS = ("", " ", "\0", "\ud800", "\U0001f600", "</s>", "{{ 1 }}", "%n", "a" * 5000, "NaN")
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from(_HUGE),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(_ODD_TEXTS),
)
_junk = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
_ids = st.lists(st.integers(0, 400), max_size=8)
_texts = st.text(max_size=12) | st.sampled_from(("Once upon a time", "hi", *_ODD_TEXTS))
# Valid schemas, and some invalid ones.
_SCHEMAS: tuple[Any, ...] = (
    *({}, True, False, {"type": "object"}, {"type": "string", "maxLength": 3}, {"const": None}),
    *({"type": "integer", "minimum": 3}, {"enum": ["a", 1]}, {"$ref": "#"}, {"pattern": "("}),
    *({"type": "array", "uniqueItems": True}, {"not": {}}, {"type": "strin"}, {"enum": []}),
    *({"type": "string", "format": "date"}, {"type": "array", "minItems": 10**9}, {"$ref": "#/x"}),
    {"type": "string", "pattern": "^(a{1000}){1000}$"},
)
_schemas = st.recursive(
    st.sampled_from(_SCHEMAS),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
        st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
                "required": st.lists(st.sampled_from("abc"), max_size=2),
            }
        ),
    ),
    max_leaves=5,
)
_schemas_or_text = _schemas | _schemas.map(json.dumps)
_regexes = st.sampled_from(("a+", "[0-9]{2}", "(a|b)*c", "(", "(?=a)", "^$", "a{1,1000000000}"))
_grammars = st.sampled_from(
    (
        *(
            'root ::= "a" | "b"',
            'root ::= "a" root | "b"',
            "root ::= root",
            "root ::= x",
            "root ::=",
        ),
        *('start: "a" start | "b"', "start: /a+/", 'root ::= [a-z]{3} "\\n"', "x" * 2000),
    )
)
_choices = st.lists(st.sampled_from(("yes", "no", "a" * 300, "\u00e9", "")), max_size=4)
_names = st.sampled_from(("add", "get_weather", "a.b", ""))
_functions = st.fixed_dictionaries(
    {"name": _names},
    optional={"description": _texts, "parameters": _schemas, "strict": st.booleans()},
)
_arguments = st.sampled_from(('{"a": 1}', "{}", "", "nonsense"))
_calls = st.fixed_dictionaries(
    {"type": st.just("function_call"), "call_id": st.just("c1"), "name": _names}
    | {"arguments": _arguments}
)
_outputs = st.fixed_dictionaries(
    {"type": st.just("function_call_output"), "call_id": st.just("c1"), "output": _texts}
)
_roles = st.sampled_from(("user", "assistant", "system", "developer"))
_items = st.one_of(
    st.fixed_dictionaries({"role": _roles, "content": _texts}),
    st.fixed_dictionaries(
        {
            "type": st.just("message"),
            "role": st.just("assistant"),
            "content": st.lists(
                st.fixed_dictionaries({"type": st.just("output_text"), "text": _texts}), max_size=2
            ),
        },
        optional={"id": _names, "status": st.sampled_from(("completed", "incomplete", "x"))},
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("reasoning"),
            "summary": st.just([]),
            "content": st.lists(
                st.fixed_dictionaries({"type": st.just("reasoning_text"), "text": _texts}),
                max_size=2,
            ),
        }
    ),
    _calls,
    _outputs,
    st.fixed_dictionaries({"type": st.just("item_reference"), "id": _named("item")}),
    _junk,
)
_item_lists = st.lists(_items, min_size=1, max_size=3) | st.tuples(_calls, _outputs).map(list)
_blocks = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": _texts}),
    st.fixed_dictionaries(
        {"type": st.just("tool_use"), "id": st.just("c1"), "name": _names, "input": _junk}
    ),
    st.fixed_dictionaries(
        {"type": st.just("tool_result"), "tool_use_id": st.just("c1"), "content": _texts}
    ),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": _texts}),
    _junk,
)
_messages_of_blocks = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(("user", "assistant")),
            "content": _texts | st.lists(_blocks, max_size=2),
        }
    ),
    min_size=1,
    max_size=3,
)
_chats = st.one_of(
    st.lists(st.fixed_dictionaries({"role": _roles, "content": _texts}), min_size=1, max_size=3),
    st.just(
        [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a": 1}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ]
    ),
    _junk,
)
_chat_hints = {
    "messages": _chats,
    "tool_choice": st.sampled_from(
        (
            *("auto", "none", "required", {"type": "function", "function": {"name": "add"}}),
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "add"}}],
                },
            },
        )
    ),
}
_add: Json = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
_tools = st.just([{"type": "function", "function": _add}]) | st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": _functions}), max_size=2
)
_flat_tools = st.just([{"type": "function", **_add}]) | st.lists(
    _functions.map(lambda function: {"type": "function", **function}), max_size=2
)
_input_tools = st.just([{"name": "add", "input_schema": _add["parameters"]}]) | st.lists(
    st.fixed_dictionaries({"name": _names, "input_schema": _schemas}), max_size=2
)
_ollama_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(("user", "assistant", "system", "tool")), "content": _texts},
        optional={
            "thinking": _texts,
            "tool_name": _names,
            "tool_calls": st.lists(
                st.fixed_dictionaries(
                    {"function": st.fixed_dictionaries({"name": _names, "arguments": _junk})}
                ),
                max_size=2,
            ),
        },
    ),
    max_size=3,
)
_tags = st.sampled_from(
    (
        *({"type": "structural_tag", "format": {"type": "any_text"}}, {"type": "structural_tag"}),
        {
            "type": "structural_tag",
            "triggers": ["<f"],
            "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
        },
    )
)
# Meaningful values, so that requests pass the first checks.
_HINTS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(("fuzzed", None)),
    "prompt": _texts | _ids | st.lists(_texts, max_size=3) | st.lists(_ids, max_size=3),
    "tokens": _ids,
    "role": st.sampled_from(("user", "assistant", "system", "developer")),
    "type": st.just("text"),
    "name": _names,
    "parameters": _schemas,
    "input_schema": _schemas,
    "schema": _schemas,
    "arguments": _arguments,
    "tool_call_id": st.just("c1"),
    "input": _texts | _item_lists,
    "items": _item_lists,
    "previous_response_id": _named("response"),
    "conversation": _named("conversation") | _named("conversation").map(lambda c: {"id": c}),
    "input_file_id": _named("file"),
    "include": st.lists(st.just("message.output_text.logprobs"), max_size=2),
    "metadata": st.dictionaries(_texts, _texts, max_size=2),
    "max_output_tokens": st.integers(1, 8),
    "num_predict": st.integers(-2, 8),
    "thinking_token_budget": st.integers(-1, 5),
    "max_tokens": st.integers(0, 8),
    "max_completion_tokens": st.integers(1, 8),
    "min_tokens": st.integers(0, 4),
    "n": st.integers(1, 4),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
    "logprobs": st.integers(-1, 5) | st.booleans(),
    "top_logprobs": st.integers(-1, 5),
    "prompt_logprobs": st.integers(-1, 3),
    "logit_bias": st.dictionaries(st.integers(0, 400).map(str), st.floats(-100, 100), max_size=3),
    "stop_token_ids": _ids,
    "allowed_token_ids": st.lists(st.integers(0, 400), min_size=1, max_size=5),
    "deadline_ms": st.integers(1, 10**6),
    "max_ttft_ms": st.integers(1, 10**6),
    "request_id": st.sampled_from(("same", "other")),
    "priority": st.just(0),
    "response_format": st.one_of(
        st.just({"type": "json_object"}),
        _schemas.map(lambda found: {"type": "json_object", "schema": found}),
        _schemas.map(lambda found: {"type": "json_schema", "json_schema": {"schema": found}}),
        _tags,
        _junk,
    ),
    **dict.fromkeys(("json", "guided_json", "json_schema"), _schemas_or_text),
    **dict.fromkeys(("regex", "guided_regex"), _regexes),
    **dict.fromkeys(("grammar", "guided_grammar", "ebnf"), _grammars),
    **dict.fromkeys(("choice", "guided_choice"), _choices),
    "structural_tag": _tags | _tags.map(json.dumps),
    **dict.fromkeys(
        ("backend", "guided_decoding_backend"),
        st.sampled_from(("auto", "xgrammar", "guidance", "outlines")),
    ),
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(("self", "name", "messages", "bos_token", "range")) | _texts,
        _junk,
        max_size=3,
    ),
}


_HINTS_OF: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "/v1/chat/completions": {**_chat_hints, "tools": _tools},
    "/v1/chat/completions/render": {**_chat_hints, "tools": _tools},
    "/v1/chat/completions/batch": {"messages": st.lists(_chats, min_size=1, max_size=2)},
    "/v1/messages": {"messages": _messages_of_blocks, "tools": _input_tools},
    "/v1/messages/count_tokens": {"messages": _messages_of_blocks, "tools": _input_tools},
    "/api/chat": {
        "messages": _ollama_messages,
        "model": st.just("fuzzed"),
        "format": _schemas,
        "tools": _tools,
    },
    "/api/generate": {"prompt": _texts, "model": st.just("fuzzed"), "format": _schemas},
    "/v1/responses/input_tokens": {"tools": _flat_tools},
    "/v1/responses": {
        "tools": _flat_tools,
        "input": st.just("hi") | _texts | _item_lists,
        "tool_choice": st.sampled_from(
            (
                *("auto", "none", "required", {"type": "function", "name": "add"}),
                {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "add"}],
                },
            )
        ),
    },
}
"""Meaningful values of some routes only."""
_STREAMED = ({}, {"stream": True})
_WAYS: dict[str, tuple[Json, ...]] = {
    **dict.fromkeys(("/v1/completions", "/v1/chat/completions", "/v1/messages"), _STREAMED),
    "/v1/responses": ({}, {"stream": True}, {"background": True}, {}),
}
"""Ways of an answer, in the order of their shrinking."""
# Fields of most bodies: what they need, and limits of the answers.
_DEFAULTS: dict[str, Json] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 6},
    "/v1/chat/completions": {"max_tokens": 6},
    "/v1/chat/completions/batch": {"max_tokens": 6},
    "/invocations": {"max_tokens": 6},
    "/v1/completions/render": {"prompt": "hi"},
    "/v1/responses": {"input": "hi", "max_output_tokens": 6},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/api/show": {"model": "fuzzed"},
    "/api/chat": {"options": {"num_predict": 6}},
    "/api/generate": {"options": {"num_predict": 6}},
}


def _values(schema: Json, schemas: Json, name: str = "") -> st.SearchStrategy[Any]:
    """Return values of a JSON schema; sometimes other values."""
    fitting: st.SearchStrategy[Any]
    kind = schema.get("type")
    if "const" in schema or "enum" in schema:
        fitting = st.sampled_from(schema.get("enum") or [schema["const"]])
    elif name in _HINTS:
        fitting = _HINTS[name]
    elif "$ref" in schema:
        fitting = _values(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    elif "anyOf" in schema:
        fitting = st.one_of([_values(option, schemas) for option in schema["anyOf"]])
    elif kind == "object":
        fitting = _objects(schema, schemas)
    elif kind == "array":
        fitting = st.lists(_values(schema["items"], schemas), max_size=3)
    elif kind in ("integer", "number"):
        fitting = st.integers(-2, 5) | st.floats(-2, 3)
    else:
        simple = {"boolean": st.booleans(), "null": st.none(), "string": _texts}
        fitting = simple.get(str(kind), _junk)
    return st.integers(0, 31).flatmap(lambda chance: _junk if chance == 13 else fitting)


def _objects(
    schema: Json, schemas: Json, hints: dict[str, st.SearchStrategy[Any]] | None = None
) -> st.SearchStrategy[Json]:
    inner = schema.get("properties", {})
    others = st.sampled_from((*known_fields.GENERATION, *known_fields.NO_EFFECT, "mood", "\u00e9"))
    required = schema.get("required", [])
    values = {name: _values(value, schemas, name) for name, value in inner.items()}
    values |= hints or {}
    names = st.lists(st.sampled_from(sorted(inner)), max_size=4) if inner else st.just([])

    @st.composite
    def draw_object(draw: st.DrawFn) -> Json:
        drawn = [*required, *draw(names)]
        found = {name: draw(values[name]) for name in drawn}
        if draw(st.integers(0, 15)) == 5:
            found[draw(others)] = draw(_junk)
        return found

    return draw_object()


def _cut(body: bytes, at: int) -> bytes:
    return body[: at % (len(body) + 1)]


def _flip(body: bytes, at: int) -> bytes:
    at %= len(body)
    return body[:at] + bytes([body[at] ^ (1 << at % 8)]) + body[at + 1 :]


def _insert(body: bytes, at: int) -> bytes:
    at %= len(body) + 1
    odd = (b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\0", b"\\ud800", b"}", b'"', b"1e999", b",")
    return body[:at] + odd[at % len(odd)] + body[at:]


def _repeat_key(body: bytes, at: int) -> bytes:
    return b'{"n": [], "prompt": 5, "messages": 5, "stream": null, ' + body.lstrip(b"{")


def _nest(body: bytes, at: int) -> bytes:
    depth = 1 + at % 20_000
    return b'{"user": ' + b"[" * depth + body + b"]" * depth + b"}"


_BREAK: tuple[Callable[[bytes, int], bytes], ...] = (
    *(_cut, _flip, _insert, _repeat_key, _nest),
    lambda body, at: b"\xef\xbb\xbf" + body,
    lambda body, at: body.decode("latin-1").encode("utf-16"),
    lambda body, at: b"[" + body + b"]",
    lambda body, at: body + body,
    lambda body, at: b'{"user": "' + b"x" * 70_000 + b'"}',
    lambda body, at: b"",
)
_BOUNDARY = b"xx-boundary"


def _form(parts: list[tuple[str, bytes]]) -> bytes:
    """Return the form of an upload."""
    lines = []
    for name, value in parts:
        file = b'; filename="lines.jsonl"' if name == "file" else b""
        head = b'Content-Disposition: form-data; name="%b"%b' % (name.encode(), file)
        lines.append(b"--%b\r\n%b\r\n\r\n%b\r\n" % (_BOUNDARY, head, value))
    return b"".join(lines) + b"--%b--\r\n" % _BOUNDARY


def _files(bodies: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[bytes]:
    """Return forms of files for batches, with lines for one endpoint; some are wrong."""

    def lines(url: str) -> st.SearchStrategy[bytes]:
        line = st.fixed_dictionaries(
            {
                "custom_id": st.integers(0, 30).map(lambda number: f"n{number}"),
                "method": st.just("POST"),
                "url": st.just(url),
                "body": bodies[url],
            }
        )
        return st.lists(line, max_size=4).map(lambda ls: "\n".join(map(json.dumps, ls)).encode())

    data = st.one_of(
        lines("/v1/completions"), lines("/v1/chat/completions"), st.binary(max_size=50)
    )
    others = st.sampled_from(
        (
            *(("purpose", b"batch"), ("purpose", b"user_data"), ("purpose", b"x")),
            ("expires_after[anchor]", b"created_at"),
            *(("expires_after[seconds]", b"3600"), ("expires_after[seconds]", b"1")),
            *(("mood", b"\xff"), ("file", b"more")),
        )
    )
    purpose = st.integers(0, 5).map(lambda chance: [("purpose", b"batch")] if chance else [])
    return st.tuples(data, purpose, st.lists(others, max_size=1)).map(
        lambda parts: _form([*parts[1], *parts[2], ("file", parts[0])])
    )


_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE")
_header_values = st.binary(max_size=40).map(lambda v: v.translate(None, b"\r\n\0"))
_EXTRA_HEADERS = (
    *(b"Authorization", b"X-Request-Id", b"Accept", b"Origin", b"Content-Encoding", b"Cookie"),
    *(b"Range", b"If-None-Match", b"X-Forwarded-For", b"Content-Type", b"Expect", b"Host"),
)


def requests(description: Json) -> st.SearchStrategy[Request]:
    """Return requests to the addresses of an OpenAPI description."""
    schemas = description["components"]["schemas"]
    operations = [
        (path, method.upper(), operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
        # Addresses with a body, or of objects, have more possible errors.
        for _ in range(12 if "requestBody" in operation else 6 if "_id}" in path else 1)
    ]
    bodies: dict[str, st.SearchStrategy[Any]] = {}
    for path, method, operation in operations:
        content = operation.get("requestBody", {}).get("content", {})
        if method == "POST" and "application/json" in content:
            schema = content["application/json"]["schema"]
            schema = schemas[schema["$ref"].rpartition("/")[2]]
            if schema.get("type") == "object":
                bodies[path] = _completed(path, _objects(schema, schemas, _HINTS_OF.get(path)))
            else:
                bodies[path] = _values(schema, schemas)
    forms = _files(bodies)
    rare = st.integers(0, 11).map(lambda chance: chance == 7)

    @st.composite
    def draw_request(draw: st.DrawFn) -> Request:
        path, method, operation = draw(st.sampled_from(operations))
        if draw(rare):
            method = draw(st.sampled_from(_METHODS))
        target = path
        query = []
        odd = st.text(max_size=12) | st.sampled_from(("fuzzed", "../..", "a/b", "%00"))
        for parameter in operation.get("parameters", ()):
            name = parameter["name"]
            named = _named(name.removesuffix("_id")) if name.endswith("_id") else odd
            if parameter["in"] == "path":
                value = draw(odd if draw(rare) else named)
                target = target.replace(f"{{{name}}}", quote(value, errors="surrogatepass"))
            elif draw(st.booleans()):
                fits = st.sampled_from(parameter["schema"].get("enum") or ("3", "1", "~item-1~"))
                value = draw(odd if draw(rare) else fits)
                query.append(f"{name}={quote(value, errors='surrogatepass')}")
        if query:
            target += "?" + "&".join(query)
        if draw(rare):
            target += draw(st.sampled_from(("/", "?", "?model=x", "%00", "%ff", "//..", "#x")))
        body, kind = b"", b"application/json"
        if "multipart/form-data" in operation.get("requestBody", {}).get("content", {}):
            body, kind = draw(forms), b"multipart/form-data; boundary=" + _BOUNDARY
        elif "requestBody" in operation:
            body = json.dumps(draw(bodies[path])).encode()
        if body and draw(rare):
            body = draw(st.sampled_from(_BREAK))(body, draw(st.integers(0, 10**6)))
        headers = []
        if method == "POST" and not draw(rare):
            headers.append((b"Content-Type", kind))
        for _ in range(2 if draw(rare) else 0):
            headers.append((draw(st.sampled_from(_EXTRA_HEADERS)), draw(_header_values)))
        return Request(path, method, target.encode(), tuple(headers), body)

    return draw_request()


def _completed(path: str, bodies: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    """Return bodies of a route, most with its usual fields."""
    usual = _DEFAULTS.get(path, {})
    ways = st.sampled_from(_WAYS.get(path, ({},)))
    return st.tuples(bodies, ways, st.integers(0, 15)).map(
        lambda drawn: drawn[0] if drawn[2] == 7 else {**usual, **drawn[1], **drawn[0]}
    )


# Routes that undo the effect of another one on all later requests.
_UNDO = {"/sleep": "/wake_up", "/pause": "/resume"}


# Judging answers


def _operations() -> dict[str, Operation]:
    """Return the documentation of each route, by method and path as in `/openapi.json`."""
    return {
        f"{method} {path.replace(':path}', '}')}": operation_of(path, method)
        for path, _, method in (*ROUTES, OLLAMA_PROBE)
    }


_OPERATIONS = _operations()


def check(request: Request, status: int, headers: dict[str, str], body: bytes) -> None:
    """Check an answer against `/openapi.json` and the types of the clients' packages.

    Raises:
        FuzzError: a 5xx, an undeclared status, or another shape.
    """

    def fail(what: str) -> None:
        raise FuzzError(f"{what} for {request}: {body[:1000]!r}")

    if status >= 500:
        fail(f"status {status}")
    route = f"{request.method} {request.operation}"
    methods = {name.partition(" ")[2]: found for name, found in _OPERATIONS.items()}
    known = _OPERATIONS.get(route)
    operation = known or methods[request.operation]
    declared = {*(operation.states if known else ()), *operation.errors, 404, 405}
    if status == 204 and known and operation.answer is None:
        return  # a stream that has ended
    if request.method == "HEAD":
        return
    if status not in declared:
        fail(f"undeclared status {status}")
    path = re.split(rb"[?#]", request.target)[0].decode()
    fits = re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", request.operation), path) is not None
    kind = headers.get("content-type", "").partition(";")[0]
    try:
        if status >= 400 and b'"bad_http_request"' in body:  # its address may be unknown
            TypeAdapter(answers.ErrorAnswer).validate_json(body)
        elif status >= 400:
            TypeAdapter(operation.error).validate_json(body)
            # A path with an odd end may have the errors of another API.
            if fits:
                client_types.check(client_types.error_type(route), body, {})
        elif not fits:
            return
        elif kind in ("text/event-stream", "application/x-ndjson"):
            _check_events(operation, client_types.EVENTS.get(route), _body(request), body, fail)
        elif kind == "application/json" and operation.answer is not None:
            TypeAdapter(operation.answer).validate_json(body)
            if (client := client_types.ANSWERS.get(route)) is not None:
                client_types.check(client, body, _body(request))
        elif request.operation == "/v1/files/{file_id}/content":
            _check_lines(body)
    except ValidationError as error:
        fail(f"not as described ({error.errors()[:3]})")


def _body(request: Request) -> Json:
    """Return the body of a request that succeeded."""
    if request.operation == "/v1/files" or not request.body:
        return {}
    body: Json = json.loads(request.body)
    return body


def _check_lines(data: bytes) -> None:
    """Check the answers in the output of a batch; other files have any bytes."""
    for line in data.splitlines():
        if not line.startswith(b'{"id":"batch_req_'):
            return
        response = json.loads(line)["response"]
        answer = response["body"]
        kind = client_types.error_type("")
        if response["status_code"] == 200:
            route = "chat/" if answer["object"].startswith("chat") else ""
            kind = client_types.ANSWERS[f"POST /v1/{route}completions"]
        elif response["status_code"] >= 500:
            raise FuzzError(f"a server's error in a batch: {line[:1000]!r}")
        # The request is not known here: its fields may change the role.
        client_types.check(kind, json.dumps(answer), {"continue_final_message": True})


_LAST_RESPONSES = ("response.completed", "response.incomplete", "response.failed", "error")


def _check_events(
    operation: Operation, client: Any, asked: Json, body: bytes, fail: Callable[[str], None]
) -> None:
    """Check the events of a stream, and that it has its end."""
    text = body.decode()
    lines = operation.chunk is not None and operation.error.__name__ == "OllamaError"
    items = text.split("\n" if lines else "\n\n")
    datas = [item if lines else item.partition("data: ")[2] for item in items]
    if items[-1]:
        fail("a stream without its end")
    found = [json.loads(data) for data in datas[:-1] if data and data != "[DONE]"]
    last = found[-1] if found else {}
    failed = "error" in last or last.get("type") == "error"
    if lines:
        ended = bool(last.get("done"))
    elif operation.chunk is anthropic_answers.AnthropicEvent:
        ended = last.get("type") == "message_stop"
    elif operation.chunk is response_answers.ResponseEvent:
        # A reader may begin after the last event.
        ended = not found or last.get("type") in _LAST_RESPONSES
    else:
        failed = False
        ended = datas[-2] == "[DONE]"
    if not (ended or failed):
        fail("a stream without its end")
    for event in found:
        data = json.dumps(event)
        if "error" in event and event["error"] is not None and "response" not in event:
            TypeAdapter(operation.error).validate_json(data)
            inner = event["error"]
            if isinstance(inner, dict) and inner["type"] in ("server_error", "api_error"):
                fail("a server's error in a stream")
            continue
        if operation.chunk is not None:
            TypeAdapter(operation.chunk).validate_json(data)
        if client is not None:
            client_types.check(client, data, asked)


# The real server


class Connection:
    """Connection that is reopened whenever the server has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None

    def send(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        """Send a request; return status, headers by lower-case name, and body."""
        for attempt in range(3):
            fresh = self._socket is None
            if self._socket is None:
                self._socket = socket.create_connection(("127.0.0.1", self._port), ANSWER_TIMEOUT)
            try:
                return self._exchange(self._socket, request)
            except (http.client.HTTPException, ConnectionError) as error:
                self.close()  # closed while idle, or in the middle of the last answer
                if fresh and attempt:
                    raise FuzzError(f"no answer ({error!r}) for {request}") from error
            except TimeoutError as error:
                raise FuzzError(f"no answer within {ANSWER_TIMEOUT} s for {request}") from error
        raise FuzzError(f"no answer for {request}")

    def _exchange(self, raw: socket.socket, request: Request) -> tuple[int, dict[str, str], bytes]:
        raw.sendall(request.encode())
        response = http.client.HTTPResponse(raw, method=request.method)
        response.begin()
        body = response.read()
        headers = {name.lower(): value for name, value in response.getheaders()}
        if response.will_close:
            self.close()
        return response.status, headers, body

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@contextmanager
def running_server(model: str | None, folder: Path) -> Iterator[tuple[int, Path]]:
    """Run `octavo serve`; yield its port and its log."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "octavo", "serve", *([model] if model else []), *FLAGS]
    command += ["--profiler-dir", str(folder), "--state-dir", str(folder / "state")]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        while (match := re.search(r"listening on http://127.0.0.1:(\d+)", log.read_text())) is None:
            if process.poll() is not None:
                raise SystemExit(f"The server ended:\n{log.read_text()}")
            time.sleep(0.05)
        yield int(match[1]), log
        if process.poll() is not None:
            raise FuzzError(f"the server ended:\n{log.read_text()[-3000:]}")
    finally:
        process.terminate()
        process.wait(60)


def get(path: str) -> Request:
    """Return a plain request."""
    return Request(path, "GET", path.encode(), (), b"")


HEALTHY = Request(
    "/v1/completions",
    "POST",
    b"/v1/completions",
    ((b"Content-Type", b"application/json"),),
    json.dumps({"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}).encode(),
)


def healthy_text(connection: Connection) -> str:
    """Return the answer to a well-behaved client; retry while the queue is full."""
    while True:
        status, _, body = connection.send(HEALTHY)
        if status == 200:
            (choice,) = json.loads(body)["choices"]
            text: str = choice["text"]
            if choice["finish_reason"] != "abort":  # by /pause or /sleep
                return text
        elif status != 429:
            raise FuzzError(f"status {status} for a healthy request: {body!r}")
        time.sleep(0.1)


class Neighbour:
    """Well-behaved client that repeats a request while others misbehave."""

    def __init__(self, port: int, expected: str) -> None:
        self.num_answers = 0
        self.failure: Exception | None = None
        self._connection = Connection(port)
        self._expected = expected
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        try:
            while not self._ending.wait(0.01):
                text = healthy_text(self._connection)
                if text != self._expected:
                    raise FuzzError(f"a healthy request got {text!r}, not {self._expected!r}")
                self.num_answers += 1
        except Exception as error:
            self.failure = error

    def end(self) -> None:
        """Stop the client; raise its error, if any."""
        self._ending.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure


def fuzz(
    description: Json,
    send: Callable[[Request], tuple[int, dict[str, str], bytes]],
    num_requests: int,
    seed: int,
) -> collections.Counter[tuple[str, int]]:
    """Send requests and check the answers; return the number of each route and status.

    Raises:
        FuzzError: with the smallest request that fails.
    """
    statuses: collections.Counter[tuple[str, int]] = collections.Counter()
    known = Known()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num_requests,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    @hypothesis.given(requests(description))
    def one(drawn: Request) -> None:
        request = replace(drawn, target=known.fill(drawn.target), body=known.fill(drawn.body))
        status, headers, body = send(request)
        statuses[request.operation, status] += 1
        known.learn(body)
        check(request, status, headers, body)
        if status == 200 and request.operation in _UNDO:
            undo = _UNDO[request.operation]
            send(Request(undo, "POST", undo.encode(), (), b""))

    with warnings.catch_warnings():
        # Of a long request that is shown.
        warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
        one()
    return statuses


def wait_until_idle(connection: Connection) -> None:
    """Wait for the background's end.

    Raises:
        FuzzError: the engine is not idle after `ANSWER_TIMEOUT`.
    """
    end = time.monotonic() + ANSWER_TIMEOUT
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while True:
        time.sleep(1)
        metrics = connection.send(get("/metrics"))[2].decode()
        pattern = rf"^octavo:({'|'.join(names)})\{{.*\}} (.*)$"
        found = {name: float(n) for name, n in re.findall(pattern, metrics, re.MULTILINE)}
        if not any(found.values()):
            return
        if time.monotonic() > end:
            raise FuzzError(f"the engine is not idle: {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", help="model; default: the built-in one")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(args.model, Path(folder)) as (port, log),
    ):
        connection = Connection(port)
        expected = healthy_text(connection)
        description = json.loads(connection.send(get("/openapi.json"))[2])
        neighbour = Neighbour(port, expected)
        begin = time.monotonic()
        try:
            statuses = fuzz(description, connection.send, args.requests, args.seed)
        finally:
            neighbour.end()
        seconds = time.monotonic() - begin
        if healthy_text(connection) != expected:
            raise FuzzError("a healthy request is answered otherwise than before")
        wait_until_idle(connection)
        if "Traceback" in log.read_text():
            raise FuzzError(f"the server's log has an exception:\n{log.read_text()[-5000:]}")
    print(f"{statuses.total()} requests in {seconds:.0f} s (seed {args.seed}), answers by status:")
    for route in sorted({route for route, _ in statuses}):
        found = sorted((status, n) for (name, status), n in statuses.items() if name == route)
        print(f"  {route}: {', '.join(f'{n} x {status}' for status, n in found)}")
    print(f"A neighbour got the same answer {neighbour.num_answers} times; the engine is idle.")


if __name__ == "__main__":
    main()
