"""Try the laws of tool calls and reasoning on a server.

    python -m octavo.conformance.tools http://localhost:8000 --format hermes

Each case is a text that a model of the format may write. The server's model has to write it:

- choice: with structured output (`structured_outputs.choice`, as in Octavo and vLLM).
- parrot: the server has a checkpoint of `python -m octavo.conformance.parrot`, which repeats what
  the prompt has.

The tokens of the answer, from its logprobs, show whether the model wrote the text. If not, the case
cannot be forced here, and does not count. Exit status: 0 if no law is broken, 1 if one is, 2 if
nothing could be tried.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from octavo.conformance.cases import Case, formats_of, read_cases
from octavo.conformance.laws import (
    LAWS,
    Answer,
    Result,
    judge,
    judge_cut,
    read_stream,
    read_whole,
)
from octavo.conformance.parrot import DISTANCE, END, STAND_INS, TOKENS
from octavo.errors import ConfigError, OctavoError

_TIMEOUT = httpx.Timeout(300.0, connect=10.0)
_SPARE_TOKENS = 16
_GROWTH = 4
_SLACK = 2.0
_ATTEMPTS, _MOST_ATTEMPTS = 3, 10
_CODE = 5
_MARKERS = re.compile(f"({'|'.join(map(re.escape, TOKENS))})")
_LAST_TOKEN = re.compile(rb"(<[^<>\s]+>)?")
"""End-of-sequence token, which some servers state after the text."""
_ADDRESS_ENDS = ("/v1/chat/completions", "/v1")


class NotForcedError(Exception):
    """The server's model did not write the text of a case; the message says why."""


class ServerFaultError(Exception):
    """The server failed at a case, which counts as a broken law."""


class Server:
    """Server under trial.

    Args:
        url: its address, with or without /v1.
        api_key: bearer token to send, if any.
        force: "choice" or "parrot".
        model: model to use; None: the server's first one.

    Raises:
        ConfigError: no such server answers.
    """

    def __init__(
        self, url: str, api_key: str | None = None, force: str = "choice", model: str | None = None
    ) -> None:
        url = url if "://" in url else f"http://{url}"
        for end in _ADDRESS_ENDS:
            url = url.rstrip("/").removesuffix(end)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            # Some servers close a connection after a number of requests without a word.
            limits = httpx.Limits(max_keepalive_connections=0)
            self._http = httpx.Client(
                base_url=url, headers=headers, timeout=_TIMEOUT, limits=limits
            )
            found = self._http.get("/v1/models")
            found.raise_for_status()
            self.model = model or str(found.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"No OpenAI-compatible server answers at {url} ({error}); give the address of one."
            ) from None
        self._force = force
        self._place: int | None = None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def whole(self, case: Case, max_tokens: int | None = None) -> Answer:
        """Return the answer to a case in one piece.

        Raises:
            NotForcedError: the model did not write the text.
        """
        answer = _read(read_whole, self._post(self._body(case, max_tokens) | {"logprobs": True}))
        expected = case.text.encode()
        if max_tokens is None and answer.written is not None:
            rest = answer.written.removeprefix(expected)
            if not answer.written.startswith(expected) or _LAST_TOKEN.fullmatch(rest) is None:
                written = answer.written.decode("utf-8", "replace")
                raise NotForcedError(f"the model wrote {written[:200]!r}")
        return answer

    def streamed(self, case: Case, max_tokens: int | None = None) -> Answer:
        """Return the answer to a case, put together from a stream."""
        chunks = [*self._chunks(self._body(case, max_tokens) | {"stream": True})]
        return _read(read_stream, chunks)

    def _body(self, case: Case, max_tokens: int | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "tools": case.tools,
            "tool_choice": "auto",
            "temperature": 0.0,
            "max_tokens": max_tokens or len(case.text.encode()) + _SPARE_TOKENS,
        }
        if self._force == "choice":
            content = "Go."
            body["structured_outputs"] = {"choice": [case.text]}
        else:
            content = self._lesson(case)
        return body | {"messages": [{"role": "user", "content": content}]}

    def _lesson(self, case: Case) -> str:
        """Return the message that makes a parrot write a text."""
        if self._place is None:
            self._place = self._find_place(case)
        pieces = _MARKERS.split(case.text)
        size = sum(1 if i % 2 else len(piece.encode()) for i, piece in enumerate(pieces))
        rest = DISTANCE - self._place - size - 1
        if rest < 0:
            room = DISTANCE - self._place - 1
            raise NotForcedError(f"the text has {size} tokens; the parrot repeats up to {room}")
        text = "".join(STAND_INS[piece] if i % 2 else piece for i, piece in enumerate(pieces))
        return f"{'.' * self._place}{text}{STAND_INS[END]}{'.' * rest}"

    def _find_place(self, case: Case) -> int:
        """Return the place in a message of `DISTANCE` tokens at which the answer begins."""
        message = "".join(f"{i:04}," for i in range(DISTANCE // _CODE + 1))[:DISTANCE]
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": message}],
            "tools": case.tools,
            "tool_choice": "auto",
            "temperature": 0.0,
            "max_tokens": 4 * _CODE,
        }
        answer = _read(read_whole, self._post(body))
        found = message.find(answer.reasoning + answer.content)
        if found < 0 or not answer.reasoning + answer.content:
            raise NotForcedError(
                f"the model wrote {(answer.reasoning + answer.content)!r}, and is no parrot; serve "
                "a checkpoint of python -m octavo.conformance.parrot"
            )
        return found

    def _post(self, body: dict[str, Any]) -> Any:
        try:
            response = self._http.post("/v1/chat/completions", json=body)
        except httpx.HTTPError as error:
            raise ConfigError(f"The server does not answer any more ({error!r}).") from None
        _check(response)
        try:
            return response.json()
        except ValueError:
            raise ServerFaultError(f"no JSON: {response.text[:200]!r}") from None

    def _chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                _check(response)
                for line in response.iter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    chunk = json.loads(data)
                    if not isinstance(chunk, dict) or "error" in chunk:
                        raise ServerFaultError(f"error in the stream: {data[:200]}")
                    yield chunk
        except httpx.HTTPError as error:
            raise ConfigError(f"The server does not answer any more ({error!r}).") from None
        except ValueError as error:
            raise ServerFaultError(f"no JSON in the stream: {error}") from None


def _read(reader: Callable[[Any], Answer], body: Any) -> Answer:
    """Return what `reader` makes of a server's body."""
    try:
        return reader(body)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ServerFaultError(f"no chat completion ({error!r}): {str(body)[:200]}") from None


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    message = f"HTTP {response.status_code}: {response.text[:200]}"
    if response.is_client_error:
        raise NotForcedError(message)
    raise ServerFaultError(message)


@dataclass
class Report:
    """Outcome of the suite on a server."""

    format: str
    force: str
    model: str
    results: dict[str, Result] = field(default_factory=dict)
    """By case."""
    not_forced: dict[str, str] = field(default_factory=dict)
    """Reasons by case."""

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return (number of cases that keep it, number that tried it) by law."""
        found = {}
        for law in LAWS:
            tried = [r.problems[law] for r in self.results.values() if law in r.problems]
            if tried:
                found[law] = (sum(not problems for problems in tried), len(tried))
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON's values."""
        return {
            "model": self.model,
            "format": self.format,
            "force": self.force,
            "laws": {law: {"kept": n, "tried": of} for law, (n, of) in self.counts().items()},
            "broken": {case: r.broken for case, r in self.results.items() if r.broken},
            "not_forced": self.not_forced,
        }

    def as_text(self) -> str:
        """Return the report for a terminal."""
        rows = [
            f"{law:12} {kept:3} of {tried:3}  {LAWS[law]}"
            for law, (kept, tried) in self.counts().items()
        ]
        for case, result in self.results.items():
            rows += [
                f"BROKEN {case} {law}: {problem}"
                for law, problems in result.broken.items()
                for problem in problems
            ]
        reasons: dict[str, list[str]] = {}
        for case, reason in self.not_forced.items():
            reasons.setdefault(reason, []).append(case.partition("/")[2])
        rows += [f"cannot be forced: {', '.join(names)}: {why}" for why, names in reasons.items()]
        return "\n".join(rows)


def run_suite(server: Server, cases: Sequence[Case], size: int, force: str = "choice") -> Report:
    """Return the outcome of the cases of one format.

    Args:
        server: server under trial.
        cases: the cases.
        size: number of characters of the longest answer.
        force: how the server's model is made to write a text.
    """
    report = Report(cases[0].format, force, server.model)
    for case in cases:
        try:
            report.results[case.id] = _try(server, case, size)
        except NotForcedError as error:
            report.not_forced[case.id] = str(error)
        except ServerFaultError as error:
            report.results[case.id] = result = Result()
            result.judge("text", [str(error)])
    return report


def _try(server: Server, case: Case, size: int) -> Result:
    """Return the outcome of one case."""
    if case.is_long:
        return _try_long(server, case, size)
    whole = server.whole(case)
    result = judge(case, whole, server.streamed(case))
    if case.cuts and whole.num_tokens is not None:
        for tokens in {whole.num_tokens // 3, whole.num_tokens // 2, whole.num_tokens * 3 // 4}:
            if tokens:
                cut = judge_cut(case, server.whole(case, tokens), server.streamed(case, tokens))
                for law, problems in cut.problems.items():
                    result.judge(law, [f"{tokens} tokens: {p}" for p in problems])
    return result


def _try_long(server: Server, case: Case, size: int) -> Result:
    sizes = (size // _GROWTH, size)
    seconds = dict.fromkeys(sizes, float("inf"))
    result = Result()
    growth = float("inf")
    for attempt in range(_MOST_ATTEMPTS):  # other work of the machine makes some of them slower
        if attempt >= _ATTEMPTS and growth <= _GROWTH * _SLACK:
            break
        for part in sizes:
            filled = case.filled(part)
            begin = time.perf_counter()
            streamed = server.streamed(filled)
            seconds[part] = min(seconds[part], time.perf_counter() - begin)
            if attempt == 0:
                for law, problems in judge(filled, server.whole(filled), streamed).problems.items():
                    result.judge(law, [f"{part} characters: {p}" for p in problems])
        growth = seconds[size] / seconds[size // _GROWTH]
    problem = f"{_GROWTH} times the text takes {growth:.1f} times the time"
    result.judge("linear", [problem] if growth > _GROWTH * _SLACK else [])
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    cases = read_cases()
    parser = argparse.ArgumentParser(
        prog="python -m octavo.conformance.tools",
        description="Try the laws of tool calls and reasoning on an OpenAI-compatible server.",
    )
    parser.add_argument("url", help="address of the server, such as http://localhost:8000")
    parser.add_argument(
        "--format",
        required=True,
        choices=formats_of(cases),
        help="format of the server's model: what --tool-call-parser names",
    )
    parser.add_argument("--api-key", help="bearer token to send")
    parser.add_argument("--model", help="model to use (default: the server's first one)")
    parser.add_argument(
        "--force",
        choices=("choice", "parrot"),
        default="choice",
        help="how the model is made to write a text (default: %(default)s)",
    )
    parser.add_argument("--only", default="", help="regular expression that the cases' ids contain")
    parser.add_argument(
        "--long",
        type=int,
        default=2000,
        metavar="N",
        help="characters of the longest answer (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the report as JSON")
    args = parser.parse_args(argv)
    try:
        wanted = re.compile(args.only)
    except re.error as error:
        parser.error(f"--only {args.only!r} is no regular expression: {error}")
    if args.long < 2 * _GROWTH:
        parser.error(f"--long {args.long} is too short; give at least {2 * _GROWTH}")
    chosen = [case for case in cases if case.format == args.format and wanted.search(case.id)]
    if not chosen:
        parser.error(f"--only {args.only!r}: no case of {args.format} has such an id")
    try:
        server = Server(args.url, args.api_key, args.force, args.model)
        try:
            report = run_suite(server, chosen, args.long, args.force)
        finally:
            server.close()
        if args.json is not None:
            args.json.write_text(json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n")
    except (OctavoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report.as_text())
    if not report.results:
        return 2
    return 1 if any(result.broken for result in report.results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
