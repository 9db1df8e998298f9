"""OpenAI's older fields for tools: functions, function_call and messages of the role function."""

from __future__ import annotations

from typing import Any

from octavo.errors import RequestError
from octavo.server.errors import show

_ID = "function{:02}"


def convert_message(message: dict[str, Any], where: str, calls: list[str]) -> None:
    """Turn an older message into one with tools, in place.

    Args:
        message: message of a chat.
        where: its place in the body.
        calls: ids of the older calls so far; a call adds its own, and a result takes the last one.

    Raises:
        RequestError: the message is wrong.
    """
    call = message.get("function_call")
    if call is not None:
        _check_call(call, message, where)
        del message["function_call"]
        call_id = _ID.format(len(calls))
        calls.append(call_id)
        message["tool_calls"] = [{"id": call_id, "type": "function", "function": call}]
    if message.get("role") != "function":
        return
    if not isinstance(message.get("name"), str):
        raise RequestError(
            f"{where}.name={show(message.get('name'))} is not allowed; a message of role "
            "'function' has the name of the function.",
            "messages",
        )
    if not calls:
        raise RequestError(
            f"{where}.role='function' answers no function_call of an earlier message; send that "
            "message, too.",
            "messages",
        )
    message["role"], message["tool_call_id"] = "tool", calls[-1]


def _check_call(call: object, message: dict[str, Any], where: str) -> None:
    if message.get("role") != "assistant":
        raise RequestError(
            f"{where}.function_call is not allowed with role {show(message.get('role'))}; it "
            "belongs to messages of role 'assistant'.",
            "messages",
        )
    if message.get("tool_calls"):
        raise RequestError(
            f"{where} has both function_call and tool_calls; send tool_calls.", "messages"
        )
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise RequestError(
            f'{where}.function_call={show(call)} is not allowed; give {{"name": "...", '
            '"arguments": "{...}"}.',
            "messages",
        )


def check_choice(value: object) -> object:
    """Check the form of function_call in a body.

    Raises:
        RequestError: it has another form.
    """
    if value in (None, "none", "auto"):
        return value
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return value
    raise RequestError(
        f'function_call={show(value)} is not allowed; use "none", "auto" or {{"name": "..."}}.',
        "function_call",
    )
