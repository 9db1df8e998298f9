"""Record of the part of a stream that a client has, so that another server can continue it.

An answer may be split into events differently each time, so the sent part is counted in characters
of each text and entries of each list, choice by choice. Texts are also hashed: a different answer
is detected before any of it is sent.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from octavo.errors import OctavoError

Event = dict[str, Any]
"""Decoded event of a stream."""

# Fields that arrive once and whole; other texts arrive in pieces.
_WHOLE = frozenset(["role", "id", "type", "name", "finish_reason", "stop_reason", "object"])
# Index that names the part; it is not news.
_INDEX = "index"


class DifferentAnswerError(OctavoError):
    """Error: another server's answer to the same request differs from the part that was sent."""

    def __init__(self) -> None:
        super().__init__(
            "The server that answered was lost, and the answer of another one differs from what "
            "was sent already; send the request again. Servers of one router have to serve the "
            "same model with the same settings on the same kind of machine."
        )


class _Text:
    """Text with the numbers of its sent, and of its repeated, characters."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.missing = 0
        """Number of characters that were sent and not repeated so far."""
        self._sent = hashlib.blake2b()
        self._again = hashlib.blake2b()

    def begin_again(self) -> None:
        self.missing = self.num_sent
        self._again = hashlib.blake2b()

    def take(self, text: str) -> str:
        """Return the new part of the text; it counts as sent."""
        if self.missing:
            known, text = text[: self.missing], text[self.missing :]
            self.missing -= len(known)
            self._again.update(known.encode())
            if not self.missing and self._again.digest() != self._sent.digest():
                raise DifferentAnswerError
        self.num_sent += len(text)
        self._sent.update(text.encode())
        return text


class _Entries:
    """List with the numbers of its sent, and of its not yet repeated, entries."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.missing = 0

    def take(self, entries: list[Any]) -> list[Any]:
        """Return the new entries; they count as sent."""
        known = min(self.missing, len(entries))
        self.missing -= known
        self.num_sent += len(entries) - known
        return entries[known:]


class SentAnswer:
    """Stream of one request, over all servers that take part."""

    def __init__(self) -> None:
        self.num_sent = 0
        """Number of events with new parts."""
        self._again = False
        self._envelope: Event = {}
        self._texts: dict[str, _Text] = {}
        self._entries: dict[str, _Entries] = {}
        self._once: set[str] = set()
        self._usage_sent = False

    def begin_again(self) -> None:
        """Start over: the next events repeat the same request from its beginning."""
        self._again = self.num_sent > 0
        for text in self._texts.values():
            text.begin_again()
        for entries in self._entries.values():
            entries.missing = entries.num_sent

    def take(self, data: bytes) -> bytes | None:
        """Return the data of an event to send, or None if the client has all of it.

        Raises:
            DifferentAnswerError: the answer differs from the part that the client has.
            ValueError: the data is not a JSON object.
        """
        event = msgspec.json.decode(data, type=Event)
        if not self._again:
            self._envelope = self._envelope or {
                name: event[name] for name in ("id", "created", "model") if name in event
            }
            self._cut_event(event)
            self.num_sent += 1
            return data
        if not self._cut_event(event):
            return None
        self.num_sent += 1
        return msgspec.json.encode(event | self._envelope)

    def check_complete(self) -> None:
        """Check completeness at the answer's end.

        Raises:
            DifferentAnswerError: the client has more than the answer contains.
        """
        if any(text.missing for text in self._texts.values()):
            raise DifferentAnswerError

    def _cut_event(self, event: Event) -> bool:
        """Remove the parts of an event that the client has; return True if any part is left."""
        choices = event.get("choices")
        if not isinstance(choices, list):
            return True  # not an event of Octavo's streams
        if "prompt_progress" in event:
            return not self._again  # the client has its own server's progress
        if not choices:  # usage, at the end
            news = not self._usage_sent
            self._usage_sent = True
            return news
        new: list[Any] = []
        for choice in choices:
            if not isinstance(choice, dict):
                raise ValueError("a choice is no object")
            path = str(choice.get(_INDEX, 0))
            cut, news = self._cut(path, choice)
            if choice.get("finish_reason") is not None:
                begin = f"{path}."
                if any(t.missing for name, t in self._texts.items() if name.startswith(begin)):
                    raise DifferentAnswerError
            if news:
                new.append(cut)
        event["choices"] = new
        for name in ("prompt_token_ids", "prompt_logprobs"):
            if isinstance(event.get(name), list):
                event[name], _ = self._cut(f"{name}.{choices[0].get(_INDEX, 0)}", event[name])
        return bool(new)

    def _cut(self, path: str, value: Any) -> tuple[Any, bool]:
        """Return the new part of a value, and True if there is any."""
        name = path.rpartition(".")[2]
        if value is None or name == _INDEX:
            return value, False
        if isinstance(value, dict):
            parts = {key: self._cut(f"{path}.{key}", part) for key, part in value.items()}
            kept = {
                key: part
                for key, (part, news) in parts.items()
                if news or value[key] is None or f"{path}.{key}" not in self._once
            }
            return kept, any(news for _, news in parts.values())
        if isinstance(value, list):
            if name == "tool_calls":
                calls = [self._cut(f"{path}.{_index(call)}", call) for call in value]
                return [call for call, news in calls if news], any(news for _, news in calls)
            new = self._entries.setdefault(path, _Entries()).take(value)
            return new, bool(new)
        if isinstance(value, str) and name not in _WHOLE:
            text = self._texts.setdefault(path, _Text()).take(value)
            return text, bool(text)
        if path in self._once:
            return None, False
        self._once.add(path)
        return value, True


def _index(call: Any) -> object:
    return call.get(_INDEX, 0) if isinstance(call, dict) else 0
