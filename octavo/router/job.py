"""Request as seen by the router: its weight, its prompt's prefix, and added fields."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.router.media import PATHS, NamedMedia, read_named_media
from octavo.router.pool import KEY_HEADERS
from octavo.router.stored_objects import CREATING, named_objects
from octavo.server.auth import private_salt
from octavo.server.body import parse_json

# Bytes of text that are hashed together: some 30 tokens.
_PIECE_NBYTES = 128
# Maximum number of hashed pieces of a prompt, since hashing blocks the event loop.
_MOST_PIECES = 1024
# Bytes of a prompt with the weight of one more request: about a step's tokens.
_WEIGHT_NBYTES = 8192
# Bits of the seed for a request without one: any JSON parser can read such a number.
_SEED_BITS = 48
GENERATING = frozenset(["/v1/completions", "/v1/chat/completions", "/invocations"])
"""Paths with answers that another server can continue."""
_ANSWERING = frozenset(["/v1/messages", "/v1/responses", "/api/chat", "/api/generate"])
"""Paths with answers that no other server continues."""
POOLING = (
    "/v1/embeddings",
    "/v1/classify",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/score",
    "/classify",
    "/pooling",
    "/v1/embed",
    "/v2/embed",
    "/embed",
    "/embed_all",
    "/embed_sparse",
    "/predict",
    "/similarity",
    "/api/embed",
    "/api/embeddings",
)
"""Paths with vectors or scores."""
SOUNDS = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""Paths with forms (multipart/form-data) that have a sound."""
_READING = frozenset(
    [
        "/tokenize",
        "/v1/chat/completions/render",
        "/v1/messages/count_tokens",
        "/v1/responses/input_tokens",
    ]
)
"""Paths of prompts that are read, but not answered; they may have media."""
# Fields that make up a prompt, in the order in which chat templates write them.
_PROMPT_FIELDS = ("chat_template_kwargs", "tools", "system", "instructions", "messages", "input")


@dataclass(slots=True, eq=False)
class Job:
    """Request to pass on."""

    method: str
    path: str
    """Path with the query, unchanged."""
    headers: list[tuple[str, str]]
    body: bytes = field(repr=False)
    generates: bool = False
    """True if its answer is text that all servers make alike."""
    splits: bool = False
    """True if another server may compute its prefill."""
    fields: dict[str, Any] = field(default_factory=dict, repr=False)
    """Parsed body of a generating request."""
    pieces: list[bytes] = field(default_factory=list, repr=False)
    """Chained hashes of the prompt's first pieces."""
    weight: int = 1
    model: str | None = None
    """Model or adapter that the request names."""
    api_key: str | None = field(default=None, repr=False)
    """Key of the client, if the router has keys."""
    media: NamedMedia = field(default_factory=lambda: NamedMedia([], []), repr=False)
    """Its media that have uuids."""
    objects: list[tuple[str, ...]] = field(default_factory=list)
    """Ids of the stored objects that it names; see `named_objects`."""
    creates: bool = False
    """True if its answer is a new object that a server stores."""
    request_ids: set[str] = field(default_factory=set)
    """Ids that a server may give it: the header's and the body's; {} if the router has no keys."""

    def prefill_body(self) -> bytes:
        """Return the body for a server that only computes the prompt (vLLM's contract)."""
        changes: dict[str, Any] = {
            "max_tokens": 1,
            "stream": False,
            "n": 1,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        if self.fields.get("max_completion_tokens") is not None:
            changes["max_completion_tokens"] = 1
        if self.fields.get("stream_options") is not None:
            changes["stream_options"] = None  # rejected without a stream
        if self.fields.get("min_tokens") is not None:
            changes["min_tokens"] = 0
        return with_fields(self.body, changes)

    def decode_body(self, params: Any) -> bytes:
        """Return the body for the answering server, with the parameters from the prefill server."""
        return with_fields(self.body, {"kv_transfer_params": params})


def read_job(
    method: str,
    path: str,
    query: str,
    headers: list[tuple[str, str]],
    body: bytes,
    api_key: str | None,
) -> Job:
    """Make the job of a request.

    A request without a seed receives one, so that another server would give the same answer. A
    request with several prompts receives none, as a seed would correlate their answers; nor does a
    beam search, which does not sample. Nor do answers of the Responses API and of Anthropic's and
    Ollama's APIs, which no other server continues. If the router has API keys, each key has its own
    scope of cached prefixes, as at a server.

    Args:
        method: GET, POST ...
        path: path without the query.
        query: the query, unchanged.
        headers: headers to pass on.
        body: the whole body.
        api_key: the client's key, if the router has keys.

    Raises:
        RequestError: the body is not a JSON object, or contains kv_transfer_params.
    """
    target = f"{path}?{query}" if query else path
    job = Job(method, target, headers, body, api_key=api_key)
    posts = method == "POST"
    if posts and api_key is not None:
        job.request_ids = _request_ids(headers, body)
    job.creates = posts and path in CREATING
    if not posts or path not in GENERATING | _ANSWERING | _READING:
        job.objects = named_objects(path, {})
        if path in POOLING:
            job.weight = 1 + len(body) // _WEIGHT_NBYTES
            job.model = _model_of(body)
        return job
    fields = job.fields = parse_json(body)
    if isinstance(fields.get("model"), str):
        job.model = fields["model"]
    salt = _salt(fields, api_key)
    if path in PATHS:
        scope = [(salt or fields).get("cache_salt"), _authorization(headers)]
        job.media = read_named_media(fields, scope)
    if path not in GENERATING:
        job.objects = named_objects(path, fields)
        job.creates = job.creates and fields.get("store") is not False
        job.body = with_fields(body, salt)
        if path in _ANSWERING:
            _place(job, salt)
        return job
    if fields.get("kv_transfer_params") is not None:
        raise RequestError(
            "kv_transfer_params is between the router and its servers; leave it out.",
            "kv_transfer_params",
        )
    job.generates = True
    changes: dict[str, Any] = {}
    several = _num_prompts(fields) > 1
    beams = fields.get("use_beam_search") not in (None, False)
    if fields.get("seed") is None and not several and not beams:
        changes["seed"] = secrets.randbits(_SEED_BITS)
    changes |= salt
    job.body = with_fields(body, changes)
    asks_prompt = any(
        fields.get(name) not in (None, False, 0) for name in ("prompt_logprobs", "echo")
    )
    # Servers only accept kv_transfer_params with one answer; a server rejects a wrong n.
    alone = not several and not beams and fields.get("n") in (None, 1)
    job.splits = alone and not asks_prompt
    _place(job, changes)
    return job


class _OfModel(msgspec.Struct):
    model: str | None = None


def _model_of(body: bytes) -> str | None:
    """Return the model that a body names; the server rejects a wrong body."""
    try:
        return msgspec.json.decode(body, type=_OfModel).model
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class _Named(msgspec.Struct):
    request_id: str | None = None


def _request_ids(headers: list[tuple[str, str]], body: bytes) -> set[str]:
    found = {value for name, value in headers if name == "x-request-id"}
    with contextlib.suppress(msgspec.MsgspecError, ValueError):  # the server rejects the body
        found.add(msgspec.json.decode(body, type=_Named).request_id or "")
    return found - {""}


def _salt(fields: dict[str, Any], api_key: str | None) -> dict[str, Any]:
    """Return the field that gives a key its own scope of cached prefixes."""
    salt = fields.get("cache_salt")
    if api_key is None or not (salt is None or isinstance(salt, str)):
        return {}
    return {"cache_salt": private_salt(api_key, salt)}


def _place(job: Job, changes: dict[str, Any]) -> None:
    """Set the fields by which a server is chosen."""
    fields = job.fields
    salt = changes.get("cache_salt", fields.get("cache_salt"))
    text = _prompt_text(fields)
    job.pieces = _pieces(text, [fields.get("model"), salt, _authorization(job.headers)])
    job.weight = 1 + len(text) // _WEIGHT_NBYTES


def with_fields(body: bytes, changes: dict[str, Any]) -> bytes:
    """Add fields to a JSON object: among duplicate names, the last counts.

    The rest stays unchanged, including numbers beyond this parser's range.
    """
    if not changes:
        return body
    begin = body.rstrip()[:-1].rstrip()
    comma = b"" if begin.endswith(b"{") and not begin[:-1].strip() else b","
    return begin + comma + msgspec.json.encode(changes)[1:]


def _authorization(headers: list[tuple[str, str]]) -> str:
    return next((value for name, value in headers if name in KEY_HEADERS), "")


def _num_prompts(fields: dict[str, Any]) -> int:
    prompt, embeds = fields.get("prompt"), fields.get("prompt_embeds")
    num_prompts, num_embeds = int(bool(prompt)), int(bool(embeds))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        num_prompts = len(prompt)
    if isinstance(embeds, list):
        num_embeds = len(embeds)
    return num_prompts + num_embeds


def _prompt_text(fields: dict[str, Any]) -> bytes:
    """Return the first computed part of a request as bytes; equal prompts have equal prefixes."""
    if "messages" in fields or "input" in fields:
        return msgspec.json.encode([fields.get(name) for name in _PROMPT_FIELDS])
    prompt, embeds = fields.get("prompt"), fields.get("prompt_embeds")
    if embeds:
        return msgspec.json.encode([embeds, prompt])
    if isinstance(prompt, str):
        return prompt.encode()
    return msgspec.json.encode(prompt)


def _pieces(text: bytes, scope: list[Any]) -> list[bytes]:
    """Return chained hashes of a text's full pieces; they differ between scopes."""
    last = hashlib.blake2b(repr(scope).encode(), digest_size=16).digest()
    pieces: list[bytes] = []
    end = min(len(text), _MOST_PIECES * _PIECE_NBYTES)
    for begin in range(0, end - _PIECE_NBYTES + 1, _PIECE_NBYTES):
        piece = text[begin : begin + _PIECE_NBYTES]
        last = hashlib.blake2b(last + piece, digest_size=16).digest()
        pieces.append(last)
    return pieces
