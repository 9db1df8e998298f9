"""Items of the Responses API: their checks, their ids, and the chat that they describe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.errors import RequestError, UnsupportedError
from octavo.server.errors import show

Item = dict[str, Any]
"""Item in the form in which the API returns it; one of a request may lack its id."""

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
_ITEM_ID = re.compile(r"(?:msg|fc|fco|rs)_([0-9a-f]{32})_[0-9]{1,9}")
_GIVEN_ID = re.compile(r"[!-~]{1,128}")
_ROLES = ("user", "assistant", "system", "developer")
_STATUSES = ("in_progress", "completed", "incomplete")
_TEXTS = ("input_text", "output_text", "text")
MAX_REFERENCED = 64
"""Maximum number of stored responses and conversations to whose items a request may refer: each is
loaded as a whole."""


def read_input(value: object) -> list[Item]:
    """Return the items of `input`: a text of the user, or a list for `read_items`."""
    if isinstance(value, str):
        return [_message("user", value, "input")]
    return read_items(value, "input")


def read_items(value: object, where: str) -> list[Item]:
    """Return the items of a request, checked and in the form of `Item`.

    Args:
        value: a list of items.
        where: name of the field.

    Raises:
        RequestError: an item is wrong or not supported; the message names it.
    """
    if not isinstance(value, list) or not value:
        raise RequestError(
            f"{where}={show(value)} is not allowed; give a list of one or more items.", where
        )
    return [_read_item(item, f"{where}[{i}]") for i, item in enumerate(value)]


def _read_item(item: object, where: str) -> Item:
    if not isinstance(item, dict):
        raise RequestError(
            f'{where}={show(item)} is not an item; give {{"role": "user", "content": "..."}}.',
            where,
        )
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    if kind == "message":
        read = _message(item.get("role"), item.get("content"), where)
    elif kind == "function_call":
        read = {name: _text(item, name, where) for name in ("call_id", "name", "arguments")}
        if item.get("namespace") is not None:
            read["namespace"] = _text(item, "namespace", where)
    elif kind == "function_call_output":
        output = item.get("output")
        if not isinstance(output, str):
            output = _parts(output, f"{where}.output", "input_text")
        read = {"call_id": _text(item, "call_id", where), "output": output}
    elif kind == "reasoning":
        read = _reasoning(item, where)
    elif kind == "item_reference":
        return {"type": kind, "id": _text(item, "id", where)}
    else:
        raise UnsupportedError(
            f"{where}.type={show(kind)} is not supported; use message, function_call, "
            "function_call_output, reasoning or item_reference.",
            f"{where}.type",
        )
    status = item.get("status")
    if status not in (None, *_STATUSES):
        raise RequestError(
            f"{where}.status={show(status)} is not one of {', '.join(_STATUSES)}.",
            f"{where}.status",
        )
    read = {"type": kind, **read, "status": status or "completed"}
    if (given := item.get("id")) is not None:
        if not (isinstance(given, str) and _GIVEN_ID.fullmatch(given)):
            raise RequestError(
                f"{where}.id={show(given)} is not allowed; it is 1 to 128 printable characters.",
                f"{where}.id",
            )
        read["id"] = given
    return read


def _message(role: object, content: object, where: str) -> Item:
    if role not in _ROLES:
        raise RequestError(
            f"{where}.role={show(role)} is not allowed; use one of {', '.join(_ROLES)}.",
            f"{where}.role",
        )
    kind = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        parts = [_part(kind, content)]
    else:
        parts = _parts(content, f"{where}.content", kind)
    return {"type": "message", "role": role, "content": parts, "status": "completed"}


def _parts(value: object, where: str, kind: str) -> list[Item]:
    if not isinstance(value, list):
        raise RequestError(
            f"{where}={show(value)} is not allowed; give a string or a list of parts.", where
        )
    parts = []
    for i, part in enumerate(value):
        at = f"{where}[{i}]"
        given = part.get("type") if isinstance(part, dict) else None
        if given == "refusal" and kind == "output_text":
            parts.append({"type": "refusal", "refusal": _text(part, "refusal", at)})
            continue
        if not isinstance(given, str):
            raise RequestError(
                f'{at}={show(part)} is not a part; give {{"type": "{kind}", "text": "..."}}.', at
            )
        if given == "input_image" and kind == "input_text":
            parts.append(_picture(part, at))
            continue
        if given not in _TEXTS:
            allowed = "input_text or input_image" if kind == "input_text" else kind
            raise UnsupportedError(
                f"{at}.type={show(given)} is not supported; send {allowed}.", f"{at}.type"
            )
        parts.append(_part(kind, _text(part, "text", at)))
    return parts


def _picture(part: Mapping[str, Any], where: str) -> Item:
    detail = part.get("detail")
    if detail is not None and not isinstance(detail, str):
        raise RequestError(f"{where}.detail={show(detail)} is not a string.", f"{where}.detail")
    if part.get("file_id") is not None:
        if part.get("image_url") is not None:
            raise RequestError(
                f"{where} has both image_url and file_id; give one of them.", f"{where}.file_id"
            )
        name = _text(part, "file_id", where)
        return {"type": "input_image", "detail": detail or "auto", "file_id": name}
    if part.get("image_url") is None:
        raise RequestError(
            f"{where} has neither image_url nor file_id; give one of them.", f"{where}.image_url"
        )
    url = _text(part, "image_url", where)
    return {"type": "input_image", "detail": detail or "auto", "image_url": url}


def _part(kind: str, text: str) -> Item:
    part: Item = {"type": kind, "text": text}
    return part if kind == "input_text" else part | {"annotations": [], "logprobs": []}


def _reasoning(item: Mapping[str, Any], where: str) -> Item:
    read: Item = {}
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        given = item.get(name)
        if given is None:
            given = []
        at = f"{where}.{name}"
        if not isinstance(given, list) or not all(isinstance(part, dict) for part in given):
            raise RequestError(f"{at}={show(given)} is not a list of parts.", at)
        read[name] = [
            {"type": kind, "text": _text(part, "text", f"{at}[{i}]")}
            for i, part in enumerate(given)
        ]
    return read


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name}={show(value)} is not a string.", f"{where}.{name}")
    return value


def item_id(kind: str, owner: str, number: int) -> str:
    """Return the id of an item.

    Args:
        kind: type of the item.
        owner: id of the response or conversation to which it belongs.
        number: number of the item there.
    """
    return f"{_PREFIXES[kind]}_{owner.rpartition('_')[2]}_{number}"


def owner_of(name: str) -> str | None:
    """Return the hexadecimal part of the id of an item's response or conversation, if any."""
    found = _ITEM_ID.fullmatch(name)
    return None if found is None else found[1]


def too_many_owners() -> RequestError:
    """Return the error for references to items of more than `MAX_REFERENCED` objects."""
    return RequestError(
        f"input refers to items of more than {MAX_REFERENCED} responses; send the items "
        "themselves, or previous_response_id.",
        "input",
    )


def with_ids(items: Iterable[Item], owner: str, begin: int = 0) -> list[Item]:
    """Return items, each with an id: its own, or a new one of `item_id`."""
    return [
        item if "id" in item else {"id": item_id(item["type"], owner, number), **item}
        for number, item in enumerate(items, begin)
    ]


def with_other_ids(
    items: Sequence[Item], before: Iterable[Item], owner: str, begin: int
) -> list[Item]:
    """Return items; one with the id of an item before it gets a new id of `item_id`.

    Args:
        items: items with ids.
        before: items that come before them.
        owner: id of the response or conversation to which `items` belong.
        begin: number of the first one there.
    """
    taken = {item["id"] for item in before}
    found = []
    for number, item in enumerate(items, begin):
        if item["id"] in taken:
            item = {**item, "id": item_id(item["type"], owner, number)}
        taken.add(item["id"])
        found.append(item)
    return found


def full_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a function, also one of a namespace."""
    return name if namespace is None else f"{namespace}__{name}"


def to_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Reasoning, text and calls of one answer become one message.

    Raises:
        RequestError: an output answers no call.
    """
    messages: list[dict[str, Any]] = []
    calls: set[str] = set()
    answer: dict[str, Any] | None = None
    """Last message, if it is the assistant's and may grow."""

    def growing() -> dict[str, Any]:
        nonlocal answer
        if answer is None:
            answer = {"role": "assistant", "content": ""}
            messages.append(answer)
        return answer

    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            text = "\n".join(part["text"] for part in item["content"] or item["summary"])
            if text:
                if answer is not None and ("said" in answer or "tool_calls" in answer):
                    answer = None  # the next answer begins
                message = growing()
                thoughts = [message["reasoning"]] if "reasoning" in message else []
                message["reasoning"] = "\n".join([*thoughts, text])
        elif kind == "function_call":
            calls.add(item["call_id"])
            name = full_name(item["name"], item.get("namespace"))
            function = {"name": name, "arguments": item["arguments"]}
            growing().setdefault("tool_calls", []).append(
                {"id": item["call_id"], "type": "function", "function": function}
            )
        elif kind == "function_call_output":
            if item["call_id"] not in calls:
                raise RequestError(
                    f"input has an output for the call {show(item['call_id'])}, but no such "
                    "function_call comes before it; send that item too, or previous_response_id.",
                    "input",
                )
            output = item["output"]
            content = output if isinstance(output, str) else _content(output)
            answer = None
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif item["role"] == "assistant":
            if answer is not None and "said" in answer and "tool_calls" not in answer:
                answer = None  # two messages in a row
            message = growing()
            message["content"] += _joined(item["content"])
            message["said"] = True
        else:
            answer = None
            messages.append({"role": item["role"], "content": _content(item["content"])})
    for message in messages:
        message.pop("said", None)
    return messages


def _content(parts: Sequence[Item]) -> str | list[Item]:
    """Return a content of a chat: text, or the parts if there are pictures."""
    if not any(part["type"] == "input_image" for part in parts):
        return _joined(parts)
    return [
        part if part["type"] == "input_image" else {"type": "text", "text": _joined([part])}
        for part in parts
    ]


def _joined(parts: Iterable[Item]) -> str:
    return "\n".join(
        part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts
    )
