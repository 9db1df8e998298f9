"""Generator of docs/openai_fields.md: every request field of OpenAI's API, and what becomes of it.

The names are those of the installed package `openai`, which OpenAI generates from its own
description of the API:

    python docs/make_openai_table.py
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import openai

from octavo.compat.request_fields import NO_EFFECT
from octavo.server.audio_schema import AudioBody
from octavo.server.batches import CreateBatchBody
from octavo.server.body import Body
from octavo.server.field_docs import field_doc
from octavo.server.openapi import UPLOAD
from octavo.server.pooling_schema import EmbeddingsBody
from octavo.server.responses_schema import ConversationBody, InputTokensBody, ResponseBody
from octavo.server.schema import ChatBody, CompletionBody

PAGE = Path(__file__).parent / "openai_fields.md"

_CHAT = "openai.types.chat.completion_create_params.CompletionCreateParamsStreaming"
_COMPLETION = "openai.types.completion_create_params.CompletionCreateParamsStreaming"
_RESPONSE = "openai.types.responses.response_create_params.ResponseCreateParamsStreaming"
_COUNT = "openai.types.responses.input_token_count_params.InputTokenCountParams"
_CONVERSATION = "openai.types.conversations.conversation_create_params.ConversationCreateParams"
_SOUND = "openai.types.audio.transcription_create_params.TranscriptionCreateParamsStreaming"
ROUTES: Mapping[str, tuple[str, type[Body] | None]] = {
    "/v1/chat/completions": (_CHAT, ChatBody),
    "/v1/completions": (_COMPLETION, CompletionBody),
    "/v1/embeddings": (
        "openai.types.embedding_create_params.EmbeddingCreateParams",
        EmbeddingsBody,
    ),
    "/v1/responses": (_RESPONSE, ResponseBody),
    "/v1/responses/input_tokens": (_COUNT, InputTokensBody),
    "/v1/conversations": (_CONVERSATION, ConversationBody),
    "/v1/audio/transcriptions": (_SOUND, AudioBody),
    "/v1/files": ("openai.types.file_create_params.FileCreateParams", None),
    "/v1/batches": ("openai.types.batch_create_params.BatchCreateParams", CreateBatchBody),
}
"""Type of a request's fields in the package, and class of its body here; None: a form."""

REASONS: Mapping[str, str] = {
    "access_programs": "the server has no such programs",
    "audio": "models write text only",
    "background_options": "a background response has no options",
    "chunking_strategy": "a sound is divided where it is quiet",
    "context_management": "the server shortens no prompts",
    "image": "models write text only",
    "include": "a transcript has no logprobs of its tokens",
    "keywords": "write them into prompt",
    "known_speaker_names": "speakers are not told apart",
    "known_speaker_references": "speakers are not told apart",
    "languages": "give one as language, or let it be detected",
    "modalities": "models write text only",
    "moderation": "the server judges no texts",
    "personality": "the server has no personalities; write one into instructions",
    "prompt": "the server stores no prompts",
    "service_tier": "the server has one tier",
    "suffix": "models continue a text only at its end",
    "truncation": "the server shortens no prompts",
    "web_search_options": "the server has no tools of its own",
    # Without effect
    "metadata": "a note for a store of answers",
    "prediction": "a hint for drafting, which does not change the answer",
    "prompt_cache_key": "a hint for caching; prefixes are cached always",
    "prompt_cache_options": "a hint for caching; prefixes are cached always",
    "prompt_cache_retention": "a hint for caching; prefixes are cached always",
    "safety_identifier": "a name of the end user",
    "store": "chats are not stored",
    "verbosity": "a hint for models that know it",
}
"""Why the server refuses or ignores a field."""


class Field(NamedTuple):
    """Field of a request."""

    name: str
    status: str
    """supported, no effect or refused."""
    note: str


def names(route: str) -> list[str]:
    """Return the names of a route's fields in the package."""
    module, _, kind = ROUTES[route][0].rpartition(".")
    params = getattr(importlib.import_module(module), kind)
    return sorted(params.__required_keys__ | params.__optional_keys__)


def fields(route: str) -> Iterator[Field]:
    """Yield the fields of a route.

    Raises:
        LookupError: the server does not know a field, or there is no reason for its status.
    """
    body = ROUTES[route][1]
    for name in names(route):
        if body is None:
            if not any(known.partition("[")[0] == name for known in UPLOAD["properties"]):
                raise LookupError(f"{route}: the form has no {name}")
            yield Field(name, "supported", "")
        elif name == "file":
            yield Field(name, "supported", "A sound file, or a video with sound.")
        elif name in {info.alias or known for known, info in body.model_fields.items()}:
            note = field_doc(body, name)
            ignored = "no effect" in note.lower() and name != "include"
            yield Field(name, "no effect" if ignored else "supported", note)
        elif name in body.unsupported:
            accepted = ", ".join(f"`{json.dumps(v)}`" for v in body.unsupported[name])
            instead = f"; use {body.instead[name]}" if name in body.instead else ""
            note = f"{_reason(route, name)}{instead}. Accepted: {accepted}."
            yield Field(name, "refused", note[0].upper() + note[1:])
        elif name in NO_EFFECT:
            note = _reason(route, name)
            yield Field(name, "no effect", note[0].upper() + note[1:] + ".")
        else:
            raise LookupError(f"{route}: add {name} to octavo/compat/request_fields.py")


def _reason(route: str, name: str) -> str:
    if name not in REASONS:
        raise LookupError(f"{route}: write a reason for {name} into docs/make_openai_table.py")
    return REASONS[name]


def document() -> str:
    """Return the whole text of docs/openai_fields.md."""
    parts = [
        "# Fields of OpenAI's API",
        "<!-- Written by docs/make_openai_table.py; a test checks it and sends each field. -->",
        "Every field of the requests of OpenAI's API, by the package `openai` "
        f"{openai.__version__}.\nA refused field gets 400 with its name, except with the accepted "
        "values. All fields of Octavo,\nwith those of vLLM, are in [the API](api.md).",
    ]
    for route in ROUTES:
        rows = [
            f"| `{name}` | {status} | {note.replace('|', chr(92) + '|')} |"
            for name, status, note in fields(route)
        ]
        parts += [
            f"## {route}",
            "\n".join(["| field | status | note |", "| --- | --- | --- |", *rows]),
        ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
