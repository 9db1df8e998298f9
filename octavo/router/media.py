"""Media with uuids, which only the server that has received their contents knows."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from octavo.errors import RequestError
from octavo.media.content import UNKNOWN_UUID, named_media

PATHS = frozenset(
    ["/v1/chat/completions", "/v1/chat/completions/render", "/invocations", "/tokenize"]
)
"""Paths of chats whose media may have uuids."""


class NamedMedia(NamedTuple):
    """Media of a request that have uuids, by names that differ between clients and scopes."""

    sent: list[str]
    """Those with their contents."""
    recalled: list[str]
    """Those without."""


def read_named_media(fields: dict[str, Any], scope: list[Any]) -> NamedMedia:
    """Return the media of a chat that have uuids.

    Args:
        fields: the body; wrong parts are left out, since the server rejects them.
        scope: all on which the server's scope of kept media depends, such as the client's key.
    """
    found = NamedMedia([], [])
    root = hashlib.blake2b(repr(scope).encode(), digest_size=16).digest()
    for modality, uuid, is_sent in named_media(fields.get("messages")):
        text = f"{modality} {uuid}".encode(errors="surrogatepass")
        name = hashlib.blake2b(root + text, digest_size=16).hexdigest()
        (found.sent if is_sent else found.recalled).append(name)
    return found


def unknown_media() -> RequestError:
    """Return the error for media that no server can be known to have."""
    return RequestError(
        "The request has a uuid without its picture, sound or video, and no server of this router "
        "that can be reached is known to have all of them for this client; send them together "
        "with their uuids.",
        "messages",
        UNKNOWN_UUID,
    )
