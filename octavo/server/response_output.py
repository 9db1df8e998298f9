"""Output items of a response, made from the parts of an answer, and the events that tell them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.parsers.parts import CallArguments, CallStart, Part, Reasoning
from octavo.server.response_items import Item

Event = dict[str, Any]


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

    def add(self, part: Part, logprobs: Sequence[object] = ()) -> list[Event]:
        """Add a part, and the logprobs of its tokens; return the events that tell it."""
        events: list[Event] = []
        if isinstance(part, CallStart):
            events = self.close()
            name, namespace = self._namespaces.get(part.text, (part.text, None))
            call = {"call_id": self._begin_call(part), "name": name, "arguments": ""}
            if namespace is not None:
                call["namespace"] = namespace
            return events + self._begin("function_call", call)
        if isinstance(part, CallArguments):
            kind, delta = "function_call", "response.function_call_arguments.delta"
        elif isinstance(part, Reasoning):
            kind, delta = "reasoning", "response.reasoning_text.delta"
        else:
            kind, delta = "message", "response.output_text.delta"
        if self._open is None or self._open["type"] != kind:
            events = self.close() + self._begin_text(kind)
        self._pieces.append(part.text)
        told: Event = {"type": delta, **self._place(), "delta": part.text}
        if kind == "message":
            self._logprobs += logprobs
            told["logprobs"] = list(logprobs)
        return [*events, told]

    def close(self, status: str = "completed") -> list[Event]:
        """End the item that grows; return the events that tell it."""
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
        self._open, self._pieces, self._logprobs = None, [], []
        return events

    def end(self, status: str = "completed") -> list[Event]:
        """End the output, which has at least one item; return the events that tell it."""
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
        index = len(self._done)
        return [{"type": "response.output_item.added", "output_index": index, "item": self._open}]

    def _begin_text(self, kind: str) -> list[Event]:
        fields: Item = {"role": "assistant"} if kind == "message" else {"summary": []}
        events = self._begin(kind, {**fields, "content": []})
        part = _part(kind, "", [])
        return [*events, {"type": "response.content_part.added", **self._place(), "part": part}]

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
