"""Output items of a response, made from the parts of an answer, and the events that report them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from octavo.parsers.parts import CallArguments, CallStart, Part, Reasoning, Text
from octavo.server.response_items import Item

Event = dict[str, Any]

_DELTAS = {
    "function_call": (CallArguments, "response.function_call_arguments.delta"),
    "reasoning": (Reasoning, "response.reasoning_text.delta"),
    "message": (Text, "response.output_text.delta"),
}
"""Part that continues an item of a type, and the type of its event."""


def write_event(event: Event, number: object) -> bytes:
    """Return an event with its number, as a server-sent event."""
    kind = event["type"]
    numbered = {"type": kind, "sequence_number": number, **event}
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(numbered))


class OutputItems:
    """Output items of a response.

    Args:
        new_id: returns the id of the next item of a type.
        begin_call: counts a call, and returns its id.
        namespaces: names and namespaces of functions, by the names that the model knows; others
            have none.
    """

    def __init__(
        self,
        new_id: Callable[[str], str],
        begin_call: Callable[[CallStart], str],
        namespaces: Mapping[str, tuple[str, str]],
    ) -> None:
        self._new_id = new_id
        self._namespaces = namespaces
        self._begin_call = begin_call
        self._done: list[Item] = []
        self._open: Item | None = None
        """Item that grows, without its text."""
        self._pieces: list[str] = []
        """Pieces of its text."""
        self._logprobs: list[object] = []
        """Logprobs of its text."""
        self._grows: type[Part] | None = None
        """Part that continues it."""
        self._template = b""
        """Template of the event of such a part; see `grow`."""

    def add(self, part: Part, logprobs: Sequence[object] = ()) -> list[Event]:
        """Add a part, and the logprobs of its tokens; return the events that report it."""
        events: list[Event] = []
        if isinstance(part, CallStart):
            events = self.close()
            name, namespace = self._namespaces.get(part.text, (part.text, None))
            call = {"call_id": self._begin_call(part), "name": name, "arguments": ""}
            if namespace is not None:
                call["namespace"] = namespace
            return events + self._begin("function_call", call)
        kind = next(kind for kind, (part_type, _) in _DELTAS.items() if isinstance(part, part_type))
        if self._open is None or self._open["type"] != kind:
            events = self.close() + self._begin_text(kind)
        self._pieces.append(part.text)
        if kind == "message":
            self._logprobs += logprobs
        return [*events, self._delta(part.text, logprobs)]

    def grow(self, part: Part) -> bytes | None:
        """Add a part that has no logprobs to the item that grows.

        Returns the server-sent event that reports it, as a template for its number and its text in
        JSON. None: the part begins another item, and is not added.
        """
        if type(part) is not self._grows:
            return None
        self._pieces.append(part.text)
        return self._template

    def close(self, status: str = "completed") -> list[Event]:
        """End the item that grows; return the events that report it."""
        item = self._grown(status)
        if item is None:
            return []
        place, text = self._place(), "".join(self._pieces)
        events: list[Event] = []
        if item["type"] == "function_call":
            kind = "response.function_call_arguments.done"
            events = [{"type": kind, **place, "name": item["name"], "arguments": text}]
        else:
            (part,) = item["content"]
            told: Event = {"text": text}
            kind = "response.reasoning_text.done"
            if item["type"] == "message":
                kind = "response.output_text.done"
                told |= {"logprobs": self._logprobs}
            events = [
                {"type": kind, **place, **told},
                {"type": "response.content_part.done", **place, "part": part},
            ]
        index = len(self._done)
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
        self._done.append(item)
        self._open, self._grows, self._pieces, self._logprobs = None, None, [], []
        return events

    def end(self, status: str = "completed") -> list[Event]:
        """End the output, which has at least one item; return the events that report it."""
        events = [] if self._done or self._open else self._begin_text("message")
        return events + self.close(status)

    def whole(self) -> list[Item]:
        """Return the items so far."""
        item = self._grown("in_progress")
        return self._done if item is None else [*self._done, item]

    def reasoning(self) -> list[str]:
        """Return the texts of the reasoning."""
        return [i["content"][0]["text"] for i in self._done if i["type"] == "reasoning"]

    def _begin(self, kind: str, fields: Item) -> list[Event]:
        self._open = {"type": kind, "id": self._new_id(kind), **fields, "status": "in_progress"}
        self._grows, _ = _DELTAS[kind]
        # Ids and names of types contain no percent sign.
        self._template = write_event(self._delta(msgspec.Raw(b"%b"), []), msgspec.Raw(b"%d"))
        index = len(self._done)
        return [{"type": "response.output_item.added", "output_index": index, "item": self._open}]

    def _begin_text(self, kind: str) -> list[Event]:
        fields: Item = {"role": "assistant"} if kind == "message" else {"summary": []}
        events = self._begin(kind, {**fields, "content": []})
        part = _part(kind, "", [])
        return [*events, {"type": "response.content_part.added", **self._place(), "part": part}]

    def _delta(self, text: object, logprobs: Sequence[object]) -> Event:
        """Return the event that reports a piece of the item's text."""
        assert self._open is not None
        kind = self._open["type"]
        event = {"type": _DELTAS[kind][1], **self._place(), "delta": text}
        return event | {"logprobs": list(logprobs)} if kind == "message" else event

    def _place(self) -> Event:
        """Return the fields that tell the place of an event's part."""
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._done)}
        if self._open["type"] != "function_call":
            place["content_index"] = 0
        return place

    def _grown(self, status: str) -> Item | None:
        """Return the item that grows, with its text and a status."""
        if self._open is None:
            return None
        text = "".join(self._pieces)
        if self._open["type"] == "function_call":
            return self._open | {"arguments": text, "status": status}
        part = _part(self._open["type"], text, self._logprobs)
        return self._open | {"content": [part], "status": status}


def _part(kind: str, text: str, logprobs: list[object]) -> Item:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
