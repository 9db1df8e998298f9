"""Small client of an OpenAI-compatible server, for `octavo chat` and `octavo complete`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from octavo.errors import OctavoError
from octavo.server.usage import Usage

# Answers may begin late; a connection may not.
_TIMEOUT = httpx.Timeout(None, connect=10.0)


class ServerError(OctavoError):
    """Unreachable server or rejected request; the message names the reason."""


class Served(NamedTuple):
    """Description of an Octavo server and its model."""

    address: str
    """Address of the server, without /v1."""
    model: str
    context_length: int
    has_tools: bool
    """True if the server knows how the model calls tools."""
    thinks: bool
    """True if the server knows how the model writes reasoning."""
    routes: frozenset[str]
    """Methods and paths, such as POST /v1/messages."""


class ListedRequest(msgspec.Struct):
    """Recent request; see `answers.RecentRequest`."""

    id: str
    path: str
    created: float
    seconds: float
    completion_tokens: int
    status: int | None


class RecentRequests(msgspec.Struct):
    """Recent requests of a key."""

    data: list[ListedRequest]


class ExplainedSpan(msgspec.Struct):
    """Part of a time line; see `answers.ExplainedSpan`."""

    cause: str
    begin_ms: float
    ms: float
    text: str


class ExplainedCause(msgspec.Struct):
    """All time with one cause."""

    cause: str
    ms: float
    text: str


class GivenAdvice(msgspec.Struct):
    """Setting that would have helped; see `answers.Advice`."""

    setting: str
    text: str


class Explanation(msgspec.Struct):
    """Reasons of a request's time; see `answers.Explanation`."""

    id: str
    path: str
    status: int | None
    finished: bool
    wall_ms: float
    first_token_ms: float | None
    completion_tokens: int
    timeline: list[ExplainedSpan]
    causes: list[ExplainedCause]
    cache: dict[str, Any]
    advice: list[GivenAdvice]


S = TypeVar("S")


class Client:
    """Connection to a server.

    Args:
        url: address of the API, such as http://localhost:8000/v1; an address without a path
            means /v1.
        api_key: bearer token to send, if any.
        model: model to use; None: the server's first one.

    Raises:
        ServerError: no server answers at the address, or it rejects the key.
    """

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._url = _api_address(url)
        self.usage: Usage | None = None
        """Tokens of the latest answer; None before its end, or if the server does not send them."""
        self.defaults: dict[str, Any] = {}
        """Default sampling parameters of the model, which servers do not report."""
        self._http = httpx.Client(headers=headers, timeout=_TIMEOUT)
        try:
            self.model = self._first_model() if model is None else model
        except ServerError:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def chat(self, messages: list[dict[str, str]], params: dict[str, Any]) -> Iterator[str]:
        """Stream the answer to a chat, piece by piece.

        Raises:
            ServerError: the request was rejected or failed.
        """
        for choice in self._stream("/chat/completions", {"messages": messages, **params}):
            yield choice["delta"].get("content") or ""

    def complete(self, prompt: str, params: dict[str, Any]) -> Iterator[str]:
        """Stream the continuation of a text, piece by piece.

        Raises:
            ServerError: the request was rejected or failed.
        """
        for choice in self._stream("/completions", {"prompt": prompt, **params}):
            yield choice["text"]

    def scale(self, num_engines: int) -> str:
        """Change the number of the server's engines; return its message.

        Raises:
            ServerError: the request was rejected or failed.
        """
        address = self._url.removesuffix("/v1") + "/scale_elastic_ep"
        try:
            response = self._http.post(address, json={"new_data_parallel_size": num_engines})
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code != 200:
            raise ServerError(_message(response.status_code, response.content))
        return str(response.json().get("message"))

    def watch_engines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events of the engine view: name and data. They end when the server stops.

        Raises:
            ServerError: the request was rejected or failed, or the answer has another form.
        """
        address = self._url.removesuffix("/v1") + "/v1/engine/view"
        name = ""
        try:
            with self._http.stream("GET", address) as response:
                if response.status_code != 200:
                    raise ServerError(_message(response.status_code, response.read()))
                for line in response.iter_lines():
                    if line.startswith("event: "):
                        name = line.removeprefix("event: ")
                    elif line.startswith("data: "):
                        yield name, msgspec.json.decode(line[6:], type=dict[str, Any])
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        except msgspec.MsgspecError:
            raise ServerError(f"{address} is not the engine view of an Octavo server.") from None

    def recent_requests(self) -> RecentRequests:
        """Return the recent requests of the key, the newest first.

        Raises:
            ServerError: the request was rejected or failed.
        """
        return self._get("/requests", RecentRequests)

    def explain(self, request_id: str) -> Explanation:
        """Return why a recent request took as long as it did.

        Raises:
            ServerError: the request was rejected or failed.
        """
        return self._get(f"/requests/{quote(request_id, safe='')}/explain", Explanation)

    def _get(self, path: str, kind: type[S]) -> S:
        """Return the answer of a route under /v1."""
        try:
            response = self._http.get(self._url + path)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code != 200:
            raise ServerError(_message(response.status_code, response.content))
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.MsgspecError:
            raise ServerError(f"{self._url} is not the address of an Octavo server.") from None

    def describe(self) -> Served:
        """Return the description of the server and its model.

        Raises:
            ServerError: the server is not ready, is not Octavo's, or does not have the model; or
                the model's name has control characters.
        """
        if not self.model.isprintable():
            raise ServerError(f"The model's name {self.model!r} has control characters.")
        address = self._url.removesuffix("/v1")
        try:
            ready = self._http.get(f"{address}/ready")
            index = self._http.get(f"{address}/")
            shown = self._http.post(f"{address}/api/show", json={"model": self.model})
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        for response in (index, shown):
            if response.status_code != 200:
                raise ServerError(_message(response.status_code, response.content))
        try:
            if ready.status_code != 200:
                raise ServerError(f"The server is not ready: {ready.json()['reason']}.")
            described = shown.json()
            info, capabilities = described["model_info"], described["capabilities"]
            length = int(info[f"{info['general.architecture']}.context_length"])
            routes = frozenset(map(str, index.json()["endpoints"]))
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{address} is not the address of an Octavo server.") from None
        return Served(
            address, self.model, length, "tools" in capabilities, "thinking" in capabilities, routes
        )

    def _first_model(self) -> str:
        try:
            response = self._http.get(f"{self._url}/models")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        except httpx.InvalidURL as error:
            raise ServerError(f"{self._url} is not a usable address: {error}") from None
        if response.status_code != 200:
            raise ServerError(_message(response.status_code, response.content))
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{self._url}/models does not list any model.") from None

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.usage = None
        options = {"include_usage": True}
        body = {"model": self.model, "stream": True, "stream_options": options, **body}
        try:
            with self._http.stream("POST", self._url + path, json=body) as response:
                if response.status_code != 200:
                    raise ServerError(_message(response.status_code, response.read()))
                for line in response.iter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    event = self._event(data)
                    if "error" in event:
                        raise ServerError(str(event["error"].get("message")))
                    self.usage = _usage(event.get("usage")) or self.usage
                    yield from event["choices"]
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _event(self, data: str) -> dict[str, Any]:
        try:
            event = msgspec.json.decode(data, type=dict[str, Any])
            event.setdefault("choices", [])
            return event
        except msgspec.MsgspecError:
            raise ServerError(
                f"{self._url} answered something that is not OpenAI's streaming format."
            ) from None

    def _unreachable(self, error: httpx.HTTPError) -> ServerError:
        reason = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectError):
            reason = re.sub(r"^\[Errno -?\d+\] ", "", reason)
        return ServerError(
            f"No answer from {self._url}: {reason}. Start a server with `octavo serve`, or name "
            "another one with --url."
        )


def _api_address(url: str) -> str:
    """Return the address with the optional parts: http:// and /v1."""
    if "://" not in url:
        url = "http://" + url
    scheme, _, rest = url.rstrip("/").partition("://")
    return f"{scheme}://{rest}" if "/" in rest else f"{scheme}://{rest}/v1"


def _usage(told: Any) -> Usage | None:
    """Return the reported tokens of an answer; None if they are not in OpenAI's form."""
    try:
        details = told.get("prompt_tokens_details") or {}
        return Usage(
            int(told["prompt_tokens"]),
            int(told["completion_tokens"]),
            details.get("cached_tokens"),
        )
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


def _message(status: int, body: bytes) -> str:
    """Return the message of an error answer."""
    try:
        error = msgspec.json.decode(body)["error"]
        return error if isinstance(error, str) else str(error["message"])
    except (msgspec.MsgspecError, LookupError, TypeError):
        return f"The server answered with status {status}."
