"""Detection of a model's format from its chat template.

The template renders conversations that contain a thought and tool calls. A format whose parser
finds exactly these in the rendered text is the model's format.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from octavo.errors import OctavoError
from octavo.parsers.answer import AnswerParser, Format
from octavo.parsers.calls import JsonCalls
from octavo.parsers.formats import FORMATS, REASONING_PARSERS, TOOL_CALL_PARSERS
from octavo.parsers.parts import CallArguments, CallStart
from octavo.structured_output.json_schema import schemas_of as subschemas_of

Render = Callable[..., str]
"""Function that renders a list of messages, with the options of `ChatTemplate.render`."""

_CALLS: list[tuple[str, dict[str, object]]] = [
    ("find_place", {"town": 'octavo "press"', "pages": 8}),
    ("sum_up", {"first": 1.5, "second": 2}),
]
_MOST_TURN = 2**14
"""Characters of a rendered turn that are parsed."""
_TYPES = {str: "string", int: "integer", float: "number"}
_SCHEMAS: dict[str, dict[str, Any]] = {
    name: {
        "type": "object",
        "properties": {
            key: {"type": _TYPES[type(value)], "description": key}
            for key, value in arguments.items()
        },
        "required": list(arguments),
    }
    for name, arguments in _CALLS
}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": schema},
    }
    for name, schema in _SCHEMAS.items()
]
_NOTES = ("title", "description", "examples", "$comment")
_QUESTION = {"role": "user", "content": "octavo-question"}


def find_format(
    render: Render, source: str, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> Format | None:
    """Return the format of a chat template; None if it shows neither reasoning nor tool calls.

    Args:
        render: renders messages with the template.
        source: the template.
        tool_parser: name of `TOOL_CALL_PARSERS`; None: what the template shows.
        reasoning_parser: name of `REASONING_PARSERS`; None: what the template shows.
    """
    found = _find(render, source)
    if tool_parser is not None:
        named = TOOL_CALL_PARSERS[tool_parser]
        thoughts = named.thoughts if found is None else found.thoughts
        found = replace(named, thoughts=thoughts)
    if reasoning_parser is not None:
        thoughts = REASONING_PARSERS[reasoning_parser]
        found = replace(found or Format(reasoning_parser), thoughts=thoughts)
    return found


def _find(render: Render, source: str) -> Format | None:
    if not source:
        return None  # without asking the process that renders
    turns = list(_turns(render))
    shown = "".join([source, *(turn for _, turn in turns)])
    formats = list(FORMATS.values())
    found: list[Format] = []
    for num_calls, turn in turns:
        found = found or [f for f in formats if _calls_in(f, turn) == _CALLS[:num_calls]]
    if not found:  # a template may describe calls to the model, and not render them
        found = [f for f in formats if _shows_calls(f, source)]
    if not found:
        thinking = next((f for f in formats if _shows_thoughts(f, shown)), None)
        return None if thinking is None else replace(thinking, calls=None, silent=())
    best = max(found, key=lambda f: _score(f, shown))
    if turns and isinstance(best.calls, JsonCalls):
        space = "\n" if f"{best.calls.begins[0]}\n" in turns[0][1] else ""
        best = replace(best, calls=replace(best.calls, space=space))
    return best if _shows_thoughts(best, shown) else replace(best, thoughts=None)


def _turns(render: Render) -> Iterator[tuple[int, str]]:
    """Yield (number of calls, turn of the assistant) for the probes that can be rendered."""
    fields: Sequence[dict[str, object]] = (
        {"content": "", "reasoning_content": "octavo-thought"},
        {"content": "", "thinking": "octavo-thought"},
        {"content": ""},
    )
    for num_calls in (2, 1):
        for extra in fields:
            calls = [
                {
                    "id": f"octavo{i:03}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for i, (name, arguments) in enumerate(_CALLS[:num_calls])
            ]
            turn = {"role": "assistant", **extra, "tool_calls": calls}
            try:
                prompt = render([_QUESTION], tools=_TOOLS)
                whole = render(
                    [_QUESTION, turn],
                    tools=_TOOLS,
                    add_generation_prompt=False,
                    may_drop_tool_calls=False,
                )
            except OctavoError:
                continue
            begin = _end_of_common(prompt, whole)
            yield num_calls, whole[begin : begin + _MOST_TURN]
            break


def _end_of_common(prompt: str, whole: str) -> int:
    """Return the position in `whole` at which the answer begins, or a little before."""
    end = next(
        (i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b),
        min(len(prompt), len(whole)),
    )
    # The first difference may be inside of a marker that both texts have.
    while end and whole[end - 1] not in ">]\n":
        end -= 1
    return end


def _calls_in(candidate: Format, turn: str) -> list[tuple[str, object]]:
    parser = AnswerParser(candidate, _SCHEMAS)
    calls: list[tuple[str, list[str]]] = []
    for part in parser.feed(turn) + parser.end():
        if isinstance(part, CallStart):
            calls.append((part.text, []))
        elif isinstance(part, CallArguments):
            calls[-1][1].append(part.text)
    try:
        return [(name, json.loads("".join(pieces))) for name, pieces in calls]
    except (ValueError, RecursionError):
        return []


def _score(candidate: Format, shown: str) -> int:
    """Return a number that is larger for formats with more of their markers in `shown`."""
    score = 0
    if candidate.thoughts is not None:
        score += 4 if _shows_thoughts(candidate, shown) else -4
    section = getattr(candidate.calls, "section", None)
    if section is not None:
        score += 2 if section[0] in shown else -2
    return score


def _shows_thoughts(candidate: Format, shown: str) -> bool:
    return candidate.thoughts is not None and all(m.strip() in shown for m in candidate.thoughts)


def _shows_calls(candidate: Format, source: str) -> bool:
    begins = () if candidate.calls is None else candidate.calls.begins
    return bool(begins) and all(len(text) > 1 and text in source for text in begins)


def without_notes(schema: Any) -> Any:
    """Return a copy of a JSON schema without its titles, descriptions and examples."""
    copied = copy.deepcopy(schema)
    for part in subschemas_of(copied):
        for note in _NOTES:
            part.pop(note, None)
    return copied


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON schemas of the parameters of OpenAI's tools by name."""
    return {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
