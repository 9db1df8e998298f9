"""Send thousands of odd requests to every address of a real server; none may cause a 5xx.

    python benchmarks/fuzz_api.py --requests 20000 [--seed 1] [--model MODEL]

Requests are made by hypothesis from the server's own `/openapi.json`: valid bodies, bodies with
wrong types, huge numbers and unknown fields, and bytes that are not JSON; odd methods, paths and
headers. Meanwhile a well-behaved client repeats the same request and must always receive the same
answer. A failing request is shrunk to the smallest one that fails. At the end the engine must be
idle.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import hypothesis
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from octavo.compat import request_fields as known_fields
from octavo.server import answers
from octavo.server.openapi import OPERATIONS, Operation

Json = dict[str, Any]
ANSWER_TIMEOUT = 60.0
"""Seconds after which a request counts as never answered."""
# Contexts and queues so small that even the largest possible request ends soon.
FLAGS = (
    *("--max-model-len", "64", "--max-num-batched-tokens", "256", "--max-num-seqs", "32"),
    *("--max-num-queued-reqs", "48", "--max-request-bytes", "64K", "--max-logprobs", "-1"),
    *("--served-model-name", "fuzzed", "--host", "127.0.0.1", "--port", "0", "--enable-admin"),
)


@dataclass(frozen=True)
class Request:
    """HTTP request; `operation` is its documented path."""

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


def _values(schema: Json, schemas: Json, name: str = "") -> st.SearchStrategy[Any]:
    """Return values of a JSON schema; sometimes other values."""
    fitting: st.SearchStrategy[Any]
    kind = schema.get("type")
    if name in _HINTS:
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
    return st.integers(0, 15).flatmap(lambda chance: _junk if chance == 13 else fitting)


def _objects(schema: Json, schemas: Json) -> st.SearchStrategy[Json]:
    inner = schema.get("properties", {})
    others = st.sampled_from((*known_fields.GENERATION, *known_fields.NO_EFFECT, "mood", "\u00e9"))
    required = schema.get("required", [])
    values = {name: _values(value, schemas, name) for name, value in inner.items()}
    names = st.lists(st.sampled_from(sorted(inner)), max_size=5) if inner else st.just([])

    @st.composite
    def draw_object(draw: st.DrawFn) -> Json:
        drawn = [*required, *draw(names)]
        found = {name: draw(values[name]) for name in drawn}
        if draw(st.integers(0, 7)) == 5:
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
        # Addresses with a body have more possible errors.
        for _ in range(12 if "requestBody" in operation else 1)
    ]
    bodies: dict[str, st.SearchStrategy[Any]] = {}
    for path, _, operation in operations:
        if "requestBody" in operation:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            bodies[path] = _values(schema, schemas)
    rare = st.integers(0, 11).map(lambda chance: chance == 7)

    @st.composite
    def draw_request(draw: st.DrawFn) -> Request:
        path, method, operation = draw(st.sampled_from(operations))
        if draw(rare):
            method = draw(st.sampled_from(_METHODS))
        target = path
        for parameter in operation.get("parameters", ()):
            value = draw(st.text(max_size=12) | st.sampled_from(("fuzzed", "../..", "a/b", "%00")))
            target = target.replace(
                f"{{{parameter['name']}}}", quote(value, errors="surrogatepass")
            )
        if draw(rare):
            target += draw(st.sampled_from(("/", "?", "?model=x", "%00", "%ff", "//..", "#x")))
        body = b""
        if path in bodies:
            body = json.dumps(draw(bodies[path])).encode()
            if draw(rare):
                body = draw(st.sampled_from(_BREAK))(body, draw(st.integers(0, 10**6)))
        headers = []
        if method == "POST" and not draw(rare):
            headers.append((b"Content-Type", b"application/json"))
        for _ in range(2 if draw(rare) else 0):
            headers.append((draw(st.sampled_from(_EXTRA_HEADERS)), draw(_header_values)))
        return Request(path, method, target.encode(), tuple(headers), body)

    return draw_request()


# Routes that undo the effect of another one on all later requests.
_UNDO = {"/sleep": "/wake_up", "/pause": "/resume"}


# Judging answers


def check(request: Request, status: int, headers: dict[str, str], body: bytes) -> None:
    """Check an answer against `/openapi.json`.

    Raises:
        FuzzError: a 5xx, an undeclared status, or another shape.
    """

    def fail(what: str) -> None:
        raise FuzzError(f"{what} for {request}: {body[:1000]!r}")

    if status >= 500:
        fail(f"status {status}")
    operation = OPERATIONS[request.operation.replace("}", ":path}")]
    kind = headers.get("content-type", "").partition(";")[0]
    declared = {*operation.states, *operation.errors, 404, 405}
    if status not in declared:
        fail(f"undeclared status {status}")
    if request.method == "HEAD":
        return
    try:
        if status >= 400:
            TypeAdapter(operation.error).validate_json(body)
        elif kind == "text/event-stream":
            _check_events(operation, body, fail)
        elif (
            kind == "application/json"
            and operation.answer is not None
            and re.split(rb"[?#]", request.target)[0] == request.operation.encode()
        ):
            TypeAdapter(operation.answer).validate_json(body)
    except ValidationError as error:
        fail(f"not as described ({error.errors()[:3]})")


def _check_events(operation: Operation, body: bytes, fail: Callable[[str], None]) -> None:
    items = body.decode().split("\n\n")
    anthropic = operation.chunk is answers.AnthropicEvent
    last = 'event: message_stop\ndata: {"type":"message_stop"}' if anthropic else "data: [DONE]"
    failed = anthropic and items[-2].startswith("event: error")
    if items[-1] or (items[-2] != last and not failed):
        fail("a stream without its end")
    for item in items[: -1 if anthropic else -2]:
        data = item.partition("data: ")[2]
        if data.startswith(('{"error"', '{"type":"error"')):
            found = TypeAdapter(operation.error).validate_json(data)["error"]
            if found["type"] in ("server_error", "api_error"):
                fail("a server's error in a stream")
        else:
            TypeAdapter(operation.chunk).validate_json(data)


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
    command += ["--profiler-dir", str(folder)]
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
            text: str = json.loads(body)["choices"][0]["text"]
            return text
        if status != 429:
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
) -> collections.Counter[int]:
    """Send requests and check the answers; return the number of each status.

    Raises:
        FuzzError: with the smallest request that fails.
    """
    statuses: collections.Counter[int] = collections.Counter()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num_requests,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    @hypothesis.given(requests(description))
    def one(request: Request) -> None:
        status, headers, body = send(request)
        statuses[status] += 1
        check(request, status, headers, body)
        if status == 200 and request.operation in _UNDO:
            undo = _UNDO[request.operation]
            send(Request(undo, "POST", undo.encode(), (), b""))

    one()
    return statuses


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
        time.sleep(1)
        metrics = connection.send(get("/metrics"))[2].decode()
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            (value,) = re.findall(rf"^octavo:{name}\{{.*\}} (.*)$", metrics, re.MULTILINE)
            if float(value) != 0:
                raise FuzzError(f"the engine is not idle: {name} is {value}")
        if "Traceback" in log.read_text():
            raise FuzzError(f"the server's log has an exception:\n{log.read_text()[-5000:]}")
    shown = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    print(f"{sum(statuses.values())} requests in {seconds:.0f} s (seed {args.seed}): {shown}")
    print(f"A neighbour got the same answer {neighbour.num_answers} times; the engine is idle.")


if __name__ == "__main__":
    main()
