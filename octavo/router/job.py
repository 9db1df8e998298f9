"""A request as the router sees it: what it weighs, what its prompt begins with, what is added."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.server.auth import private_salt
from octavo.server.body import parse_json

# Bytes of text that are looked at together: some 30 tokens.
_PIECE_NBYTES = 128
# Pieces of a prompt that are looked at, since hashing holds the event loop.
_MOST_PIECES = 1024
# Bytes of a prompt that weigh as much as one more request: about a step's tokens.
_WEIGHT_NBYTES = 8192
# Bits of the seed of a request without one: any JSON parser can read such a number.
_SEED_BITS = 48
GENERATING = frozenset(["/v1/completions", "/v1/chat/completions", "/invocations"])
"""Paths whose answers another server can go on with."""


@dataclass(slots=True, eq=False)
class Job:
    """One request to pass on."""

    method: str
    path: str
    """With the query, as it came."""
    headers: list[tuple[str, str]]
    body: bytes = field(repr=False)
    generates: bool = False
    """Whether its answer is text that any server makes alike."""
    splits: bool = False
    """Whether its prefill may be another server's."""
    fields: dict[str, Any] = field(default_factory=dict, repr=False)
    """The parsed body of one that generates."""
    pieces: list[bytes] = field(default_factory=list, repr=False)
    """Chained hashes of the prompt's first pieces."""
    weight: int = 1

    def prefill_body(self) -> bytes:
        """The body for a server that only computes the prompt (vLLM's contract)."""
        changes: dict[str, Any] = {
            "max_tokens": 1,
            "stream": False,
            "n": 1,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        if self.fields.get("max_completion_tokens") is not None:
            changes["max_completion_tokens"] = 1
        if self.fields.get("stream_options") is not None:
            changes["stream_options"] = None  # refused without a stream
        if self.fields.get("min_tokens") is not None:
            changes["min_tokens"] = 0
        return with_fields(self.body, changes)

    def decode_body(self, params: Any) -> bytes:
        """The body for the server that answers, with what the prefill's one said."""
        return with_fields(self.body, {"kv_transfer_params": params})


def read_job(
    method: str,
    path: str,
    query: str,
    headers: list[tuple[str, str]],
    body: bytes,
    api_key: str | None,
) -> Job:
    """Makes the job of a request.

    A request without a seed gets one, so that another server would answer the same. A request with
    several prompts gets none, as a seed would tie their answers together; nor does a beam search,
    which does not sample. Where the router knows its clients by their keys, each key is a scope of
    cached prefixes of its own, as at a server.

    Args:
        method: GET, POST ...
        path: without the query.
        query: the query, as it came.
        headers: those to pass on.
        body: all of it.
        api_key: the client's, if the router has keys.

    Raises:
        RequestError: the body is no JSON object, or says where cached tokens are.
    """
    target = f"{path}?{query}" if query else path
    job = Job(method, target, headers, body)
    if method != "POST" or path not in GENERATING:
        return job
    fields = job.fields = parse_json(body)
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
    salt = fields.get("cache_salt")
    if api_key is not None and (salt is None or isinstance(salt, str)):
        salt = changes["cache_salt"] = private_salt(api_key, salt)
    job.body = with_fields(body, changes)
    asks_prompt = any(
        fields.get(name) not in (None, False, 0) for name in ("prompt_logprobs", "echo")
    )
    # Servers take kv_transfer_params with one answer only; a wrong n is for them to refuse.
    alone = not several and not beams and fields.get("n") in (None, 1)
    job.splits = alone and not asks_prompt
    text = _prompt_text(fields)
    job.pieces = _pieces(text, [fields.get("model"), salt, _authorization(headers)])
    job.weight = 1 + len(text) // _WEIGHT_NBYTES
    return job


def with_fields(body: bytes, changes: dict[str, Any]) -> bytes:
    """A JSON object with fields added: of two of a name, the last counts.

    All else stays as it was written, numbers that no parser here could hold included.
    """
    if not changes:
        return body
    begin = body.rstrip()[:-1].rstrip()
    comma = b"" if begin.endswith(b"{") and not begin[:-1].strip() else b","
    return begin + comma + msgspec.json.encode(changes)[1:]


def _authorization(headers: list[tuple[str, str]]) -> str:
    return next((value for name, value in headers if name == "authorization"), "")


def _num_prompts(fields: dict[str, Any]) -> int:
    prompt, embeds = fields.get("prompt"), fields.get("prompt_embeds")
    num_prompts, num_embeds = int(bool(prompt)), int(bool(embeds))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        num_prompts = len(prompt)
    if isinstance(embeds, list):
        num_embeds = len(embeds)
    return num_prompts + num_embeds


def _prompt_text(fields: dict[str, Any]) -> bytes:
    """What a server computes first of a request, as bytes; equal prompts begin with equal ones."""
    if "messages" in fields:
        return msgspec.json.encode(
            [fields.get("chat_template_kwargs"), fields.get("tools"), fields["messages"]]
        )
    prompt, embeds = fields.get("prompt"), fields.get("prompt_embeds")
    if embeds:
        return msgspec.json.encode([embeds, prompt])
    if isinstance(prompt, str):
        return prompt.encode()
    return msgspec.json.encode(prompt)


def _pieces(text: bytes, scope: list[Any]) -> list[bytes]:
    """Chained hashes of a text's full pieces, of which servers with another scope share none."""
    last = hashlib.blake2b(repr(scope).encode(), digest_size=16).digest()
    pieces: list[bytes] = []
    end = min(len(text), _MOST_PIECES * _PIECE_NBYTES)
    for begin in range(0, end - _PIECE_NBYTES + 1, _PIECE_NBYTES):
        piece = text[begin : begin + _PIECE_NBYTES]
        last = hashlib.blake2b(last + piece, digest_size=16).digest()
        pieces.append(last)
    return pieces
