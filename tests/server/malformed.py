"""Malformed requests for unit and end-to-end tests. Each must get a 4xx in OpenAI's form."""

import json
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = "application/json"
HUGE = 10**30


@dataclass(frozen=True)
class Case:
    """Request, and its expected answer: the status, and the field that it names."""

    name: str
    path: str
    body: bytes
    status: int = 400
    param: str | None = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": JSON})

    def check(self, status: int, body: bytes) -> None:
        assert status == self.status, (self.name, status, body[:300])
        answer = json.loads(body)
        assert set(answer) == {"error"}
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert 10 <= len(error["message"]) <= 1100
        assert isinstance(error["type"], str)
        assert error["code"] is None or isinstance(error["code"], str)
        if self.param is not None:
            assert (error["param"] or "").startswith(self.param), (self.name, error)


def _nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def _fields() -> dict[str, list[Any]]:
    """Return wrong values of fields that both endpoints have."""
    number = ["half", "nan", "1_0", " 1", [], {}, True]
    integer = [*number, 1.5, "1e3"]
    return {
        "model": ["nope", "", 5, [], {}, True],
        "n": [*integer, 0, -1, 1025, HUGE],
        "temperature": [*number, -0.1, 100.5, 1e300, HUGE],
        "top_p": [*number, 0, -1, 1.01],
        "top_k": [*integer, -2, HUGE],
        "min_p": [*number, -0.1, 1.5],
        "seed": [*integer, 2**64, -(2**63) - 1],
        "stop": [5, {}, [5], [""], "", [None], True, ["x"] * 65],
        "presence_penalty": [*number, 2.5, -2.5],
        "frequency_penalty": [*number, 2.5, -2.5],
        "repetition_penalty": [*number, 0, -1],
        "logit_bias": [
            [],
            "5",
            {"a": 1},
            {"5": "x"},
            {"5": "nan"},
            {"-1": 1},
            {"5": None},
            {"9999999": 1},
            {str(HUGE): 1},
        ],
        "stream": ["true", 1, [], {}],
        "stream_options": ["x", 5, [], {"include_usage": "yes"}],
        "max_tokens": [*integer, -1, HUGE],
        "min_tokens": [*integer, -1, HUGE, 2**62, 100_000],
        "stop_token_ids": ["x", 5, [-1], ["x"], [1.5], [2**31], [HUGE], [9_999_999], [None]],
        "ignore_eos": ["no", 0, []],
        "skip_special_tokens": ["no", 0],
        "include_stop_str_in_output": ["no", 0],
        "truncate_prompt_tokens": [*integer, 0, -2, HUGE, 9_999_999],
        "truncation_side": ["middle", "", 5, []],
        "return_tokens_as_token_ids": ["yes", 1],
        "prompt_logprobs": [*integer, -2, 10_000, HUGE],
        "allowed_token_ids": [[], "x", [-1], ["x"], [9_999_999], [HUGE]],
        "bad_words": ["x", [5], [""], [[]]],
        "priority": [*integer, 2**31, HUGE],
        "cache_salt": [5, "", [], True],
        "vllm_xargs": ["x", [], 5, {"a": None}, {"a": {}}, {"a": [[1]]}, {"a": HUGE}],
        "return_token_ids": ["no", 0],
        "request_id": [5, "", "a b", "a\nb", "x" * 129, "é"],
        "deadline_ms": [*integer, 0, -5, HUGE],
        "max_ttft_ms": [*integer, 0, -5, HUGE],
        "response_format": [
            "json",
            {},
            {"type": "grammar"},
            {"type": 5},
            {"type": "text", "schema": {}},
            {"type": "json_object", "json_schema": {"name": "x", "schema": {}}},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": "x"}},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}},
            {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}},
            {"type": "structural_tag", "triggers": "x"},
        ],
        "guided_json": ["", "{", "1.5", 5, [], ["{}"], '{"a": NaN}', "[" * 100_000],
        "guided_regex": ["", 5, {}, ["a"], "x" * (2**19 + 1)],
        "guided_choice": [[], "a", [5], [""], ["a"] * 5000, {"a": 1}],
        "guided_grammar": ["", 5, {}],
        "guided_whitespace_pattern": [" "],
        "structured_outputs": [
            "x",
            {},
            {"json_object": False},
            {"regex": ""},
            {"regex": "a", "choice": ["a"]},
            {"regex": "a", "backend": "outlines"},
            {"json": {}, "whitespace_pattern": " "},
            {"json": {}, "disable_additional_properties": True},
            {"json": {}, "disable_any_whitespace": "yes"},
        ],
        "use_beam_search": ["yes", 1],
        "length_penalty": [2.0, "one", HUGE],
        "early_stopping": [True, "always", 2],
        "prompt_embeds": ["AAAA"],
        "logits_processors": [["x"]],
        "logprob_token_ids": [[5], 5, ["x"], [-1], [1.5], [10**30]],
        "stream_interval": [5],
        "grammar": [5, {"type": "json"}],
        "json_schema": ["", [], 5],
        "regex": ["", 5],
        "ebnf": ["", 5],
        "structural_tag": ["x", True, "[]"],
        "n_predict": [5],
    }


def cases(max_request_bytes: int = 8 * 2**20) -> list[Case]:
    """Return all malformed requests, for a server without API keys."""
    found: list[Case] = []

    def add(name: str, path: str, body: bytes | str | dict[str, Any], **kwargs: Any) -> None:
        if isinstance(body, dict):
            body = json.dumps(body)
        if isinstance(body, str):
            body = body.encode()
        found.append(Case(f"{path} {name}", path, body, **kwargs))

    chat = [{"role": "user", "content": "hi"}]
    good = {
        COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
        CHAT: {"messages": chat, "max_tokens": 2},
    }
    for path, body in good.items():
        for name, values in _fields().items():
            for value in values:
                status = 404 if name == "model" and isinstance(value, str) else 400
                add(
                    f"{name}={str(value)[:80]!r}",
                    path,
                    {**body, name: value},
                    status=status,
                    # min_tokens is compared with max_tokens, and so on: the error may name the
                    # related field.
                    param=None if name in ("max_tokens", "min_tokens") else name,
                )
        add("stream_options alone", path, {**body, "stream_options": {}}, param="stream_options")
        add(
            "prompt_logprobs in a stream",
            path,
            {**body, "stream": True, "prompt_logprobs": 1},
            param="prompt_logprobs",
        )
        add("min > max", path, {**body, "min_tokens": 5, "max_tokens": 2}, param="min_tokens")
        add("wrong type in a stream", path, {**body, "stream": True, "temperature": "hot"})
        add("two constraints", path, {**body, "regex": "a", "ebnf": "a"}, param="ebnf")
        wanted = {"guided_decoding_backend": "outlines", "guided_regex": "a"}
        add("unknown backend", path, {**body, **wanted}, param="guided_decoding_backend")
        add("out of range in a stream", path, {**body, "stream": True, "top_p": 7})

        text = json.dumps(body)[1:-1]
        for name, raw in {
            "empty": b"",
            "white space": b"  \n ",
            "half": b"{",
            "cut": text.encode()[:-3],
            "null": b"null",
            "number": b"5",
            "string": b'"hi"',
            "list": b"[]",
            "true": b"true",
            "trailing": ("{" + text + "} x").encode(),
            "two objects": ("{" + text + "}{}").encode(),
            "trailing comma": ("{" + text + ",}").encode(),
            "single quotes": b"{'prompt': 'hi'}",
            "NaN": ("{" + text + ', "temperature": NaN}').encode(),
            "Infinity": ("{" + text + ', "temperature": Infinity}').encode(),
            "-Infinity": ("{" + text + ', "top_p": -Infinity}').encode(),
            "1e999": ("{" + text + ', "temperature": 1e999}').encode(),
            "-1e999": ("{" + text + ', "temperature": -1e999}').encode(),
            "leading zero": ("{" + text + ', "n": 01}').encode(),
            "hex": ("{" + text + ', "n": 0x1}').encode(),
            "4000 digits": ("{" + text + ', "n": ' + "9" * 4000 + "}").encode(),
            "6000 digits": ("{" + text + ', "n": ' + "9" * 6000 + "}").encode(),
            "bad UTF-8 in a value": ("{" + text + ', "user": "').encode() + b'\xff\xfe"}',
            "bad UTF-8 in a key": ("{" + text + ', "').encode() + b'\xc3\x28": 1}',
            "bad UTF-8 alone": b"\xff\xff\xff",
            "UTF-16": ("{" + text + "}").encode("utf-16"),
            "overlong UTF-8": ("{" + text + ', "user": "').encode() + b'\xc0\xaf"}',
            "lone surrogate": ("{" + text + ', "user": "\\ud800"}').encode(),
            "reversed surrogates": ("{" + text + ', "user": "\\udc00\\ud800"}').encode(),
            "control character": ("{" + text + ', "user": "\x01"}').encode(),
            "deep list": ("{" + text + ', "x": ' + _nested(100) + "}").encode(),
            "very deep list": ("{" + text + ', "x": ' + _nested(200_000) + "}").encode(),
            "only deep": _nested(100_000).encode(),
            "deep objects": b'{"x":' * 50_000 + b"1" + b"}" * 50_000,
            "unclosed depth": b"[" * 300_000,
        }.items():
            add(name, path, raw)
        add("no type", path, json.dumps(body), status=415, headers={})
        add("form", path, "prompt=hi", status=415, headers={"content-type": "text/plain"})
        add(
            "form data",
            path,
            json.dumps(body),
            status=415,
            headers={"content-type": "application/x-www-form-urlencoded"},
        )
        add(
            "compressed",
            path,
            b"\x1f\x8b\x08",
            status=415,
            headers={"content-type": JSON, "content-encoding": "gzip"},
        )
        big = ("{" + text + ', "user": "' + "x" * max_request_bytes + '"}').encode()
        add("too large", path, big, status=413)

    for name, prompt in {
        "missing": ...,
        "null": None,
        "number": 5,
        "boolean": True,
        "object": {"text": "hi"},
        "empty list": [],
        "empty ids": [[]],
        "mixed": ["a", 5],
        "mixed ids": [5, "a"],
        "mixed lists": [[5], "a"],
        "nulls": [None],
        "booleans": [True, False],
        "floats": [1.5, 2.5],
        "negative id": [-1],
        "huge id": [HUGE],
        "unknown id": [2_000_000_000],
        "deep ids": [[[1]]],
        "text ids": [["1"]],
        "one bad of many": [[1], [2], []],
        "long": "word " * 200_000,
        "long ids": [5] * 300_000,
        "one of them long": ["hi", "word " * 200_000],
    }.items():
        body = {"max_tokens": 2} if prompt is ... else {"prompt": prompt, "max_tokens": 2}
        add(f"prompt {name}", COMPLETIONS, body, param="prompt")
    add("long in a stream", COMPLETIONS, {"prompt": [5] * 300_000, "stream": True}, param="prompt")
    for value in ("five", True, 1.5, -2, 10_000, HUGE, [], {}):
        body = {"prompt": "hi", "logprobs": value}
        add(f"logprobs={value!r}", COMPLETIONS, body, param="logprobs")
    for value in ("no", 1, []):
        add(f"echo={value!r}", COMPLETIONS, {"prompt": "hi", "echo": value}, param="echo")
    for value in ("two", 0, -1, 1025, HUGE, []):
        add(f"best_of={value!r}", COMPLETIONS, {"prompt": "hi", "best_of": value}, param="best_of")
    add("suffix", COMPLETIONS, {"prompt": "hi", "suffix": "."}, param="suffix")
    add("no room", COMPLETIONS, {"prompt": "hi", "max_tokens": 0}, param="max_tokens")
    add("too many prompts", COMPLETIONS, {"prompt": ["a"] * 5000}, param="prompt")

    text_part = {"type": "text", "text": "hi"}
    tool_call = {"id": "x", "function": {"name": "f", "arguments": "{}"}}
    for name, messages in {
        "missing": ...,
        "null": None,
        "string": "hi",
        "number": 5,
        "object": {"role": "user", "content": "hi"},
        "empty": [],
        "strings": ["hi"],
        "nulls": [None],
        "lists": [[]],
        "no role": [{"content": "hi"}],
        "no content": [{"role": "user"}],
        "null content": [{"role": "user", "content": None}],
        "number content": [{"role": "user", "content": 5}],
        "object content": [{"role": "user", "content": text_part}],
        "role number": [{"role": 5, "content": "hi"}],
        "role list": [{"role": ["user"], "content": "hi"}],
        "long role": [{"role": "x" * 65, "content": "hi"}],
        "empty role": [{"role": "", "content": "hi"}],
        "tool role without content": [*chat, {"role": "tool", "tool_call_id": "x"}],
        "tool call id of a user": [{**chat[0], "tool_call_id": "x"}],
        "tool calls of a user": [{**chat[0], "tool_calls": [tool_call]}],
        "function role": [*chat, {"role": "function", "name": "f", "content": "5"}],
        "function call": [*chat, {"role": "assistant", "function_call": {"name": []}}],
        "function call list": [*chat, {"role": "assistant", "function_call": [1]}],
        "function call of a user": [{**chat[0], "function_call": {"name": "f"}}],
        "tool calls": [*chat, {"role": "assistant", "content": "x", "tool_calls": [{"id": "x"}]}],
        "image": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}],
            }
        ],
        "audio": [{"role": "user", "content": [text_part, {"type": "input_audio"}]}],
        "video": [{"role": "user", "content": [{"type": "video_url"}]}],
        "unknown part": [{"role": "user", "content": [{"type": "smell"}]}],
        "part without type": [{"role": "user", "content": [{"text": "hi"}]}],
        "part without text": [{"role": "user", "content": [{"type": "text"}]}],
        "part with number": [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        "part null": [{"role": "user", "content": [None]}],
        "part number": [{"role": "user", "content": [5]}],
        "part type list": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}],
        "second bad": [*chat, {"role": "assistant"}],
        "name number": [{"role": "user", "content": "hi", "name": 5}],
        "long": [{"role": "user", "content": "word " * 200_000}],
    }.items():
        body = {"max_tokens": 2} if messages is ... else {"messages": messages, "max_tokens": 2}
        add(f"messages {name}", CHAT, body, param="messages")
    for name, value in [
        ("tools", [{"type": "function", "function": {"name": 5}}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 200),
        ("tools", "x"),
        ("tool_choice", "always"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f g"}]),
        ("function_call", "auto"),
        ("function_call", {"name": 5}),
        ("functions", [{"name": "f"}] * 200),
        ("functions", [{}]),
        ("functions", "x"),
        ("tools", [{"type": "custom", "custom": {"name": "x"}}]),
        ("tools", [{"type": ["custom"]}]),
        ("tool_choice", {"type": "allowed_tools"}),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}),
        (
            "tool_choice",
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [None]}},
        ),
        (
            "tool_choice",
            {"type": "allowed_tools", "allowed_tools": {"mode": [], "tools": [{}] * 200}},
        ),
        ("thinking_token_budget", 5),
        ("thinking_token_budget", 2**70),
        ("thinking_token_budget", {}),
        ("repetition_guard", "on"),
        ("repetition_guard", []),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("reasoning_effort", "very much"),
        ("reasoning_effort", 5),
        ("web_search_options", {}),
        ("chat_template", "{{ messages }}"),
        ("documents", "x"),
        ("documents", ["x"]),
        ("documents", [{"text": 5}]),
        ("documents", [{}] * 4097),
        ("echo", "yes"),
        ("echo", 1),
        ("logprobs", 5),
        ("logprobs", "yes"),
        ("top_logprobs", 5),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", -1),
        ("max_completion_tokens", "five"),
        ("max_completion_tokens", HUGE),
        ("max_completion_tokens", 5),
        ("add_generation_prompt", "no"),
        ("continue_final_message", "no"),
        ("chat_template_kwargs", []),
        ("chat_template_kwargs", "x"),
        ("chat_template_kwargs", {"messages": []}),
    ]:
        blamed = "max_tokens" if value == 5 and name == "max_completion_tokens" else name
        add(f"{name}={value!r}", CHAT, {**good[CHAT], name: value}, param=blamed)
    for value in (-1, "two", 1.5, True, 10_000, HUGE):
        body = {**good[CHAT], "logprobs": True, "top_logprobs": value}
        add(f"top_logprobs={value!r}", CHAT, body, param="top_logprobs")
    both = {"add_generation_prompt": True, "continue_final_message": True}
    add("contradiction", CHAT, {**good[CHAT], **both}, param="continue_final_message")

    for name, body in {
        "nothing": {},
        "null": {"prompt": None},
        "number": {"prompt": 5},
        "list": {"prompt": ["a"]},
        "both": {"prompt": "a", "messages": chat},
        "no messages": {"messages": []},
        "flag": {"prompt": "a", "add_special_tokens": "no"},
        "tools": {"messages": chat, "tools": [{}]},
    }.items():
        add(name, "/tokenize", body)
    add("model", "/tokenize", {"prompt": "a", "model": "nope"}, status=404, param="model")
    for name, tokens in {
        "null": None,
        "number": 5,
        "string": "5",
        "strings": ["x"],
        "negative": [-1],
        "float": [1.5],
        "huge": [HUGE],
        "nested": [[5]],
        "outside": [5, 2**31 - 1],
        "far outside": [2**62],
    }.items():
        add(f"tokens {name}", "/detokenize", {"tokens": tokens}, param="tokens")
    add("nothing", "/detokenize", {}, param="tokens")
    add("model", "/detokenize", {"tokens": [5], "model": "nope"}, status=404, param="model")

    for path in ("/v1/nothing", "/v1/completions/", "/v2", "/v1/images", "/%00", "/é"):
        add("unknown address", path, good[COMPLETIONS], status=404)
    add("unknown model", "/v1/models/nope", b"", status=404, method="GET", param="model")
    add("odd model", "/v1/models/%ff%00../x", b"", status=404, method="GET", param="model")
    for path in good:
        for method in ("GET", "PUT", "DELETE", "PATCH"):
            add(f"method {method}", path, b"", status=405, method=method)
    for path in ("/health", "/v1/models", "/metrics", "/"):
        add("method POST", path, good[COMPLETIONS], status=405)
    return found
