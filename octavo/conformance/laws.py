"""Laws of tool calls and reasoning, as checks of the answers to one case.

Texts compare without the white space at the ends of their blocks, which servers may keep or not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.conformance.cases import Call, Case

LAWS = {
    "text": "text and reasoning are complete, in order, and nowhere twice",
    "calls": "the calls are found, with their names and the values of their arguments",
    "verbatim": "arguments that the model writes as JSON are the very text it wrote",
    "stream": "the pieces of a stream add up to the whole answer",
    "deltas": "a call's id and name come first and once; its index and id are its own",
    "finish": "finish_reason is tool_calls if there is a call, else stop",
    "cut": "an answer at the length limit says length, and has a beginning of the parts",
    "markers": "a marker in an argument's text is none",
    "almost": "a text that only begins like a call, or shows one, stays text",
    "unmarked": "a call whose marker the model forgot is a call",
    "open": "a call is a call if its end, or that of the thought before it, is missing",
    "interleaved": "reasoning is kept apart between and after calls",
    "linear": "the time of an answer grows with its length, not with its square",
}
"""Laws by name."""
SUBJECTS = ("verbatim", "markers", "almost", "unmarked", "open", "interleaved")
"""Laws that have cases of their own."""


@dataclass
class FoundCall:
    """Call in a server's answer."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class Answer:
    """Answer of a server, whole or put together from a stream."""

    content: str = ""
    reasoning: str = ""
    calls: list[FoundCall] = field(default_factory=list)
    finish_reason: str | None = None
    num_tokens: int | None = None
    """Number of tokens of the answer; None: not stated."""
    written: bytes | None = None
    """Text of the model, from the logprobs of its tokens; None: not stated."""
    faults: list[str] = field(default_factory=list)
    """Problems of a stream's deltas, by which it breaks the law `deltas`."""


class Result:
    """Laws that a case tried, with what is wrong for each."""

    def __init__(self) -> None:
        self.problems: dict[str, list[str]] = {}
        """By law; an empty list: the law held."""

    def judge(self, law: str, problems: Sequence[str]) -> None:
        """Add a law that was tried."""
        self.problems.setdefault(law, []).extend(problems)

    @property
    def broken(self) -> dict[str, list[str]]:
        """Laws that did not hold."""
        return {law: found for law, found in self.problems.items() if found}


def read_whole(body: Mapping[str, Any]) -> Answer:
    """Return the answer in the body of a response."""
    choice = body["choices"][0]
    message = choice["message"]
    answer = Answer(
        message.get("content") or "",
        _reasoning(message) or "",
        finish_reason=choice["finish_reason"],
    )
    for made in message.get("tool_calls") or ():
        function = made["function"]
        answer.calls.append(
            FoundCall(made.get("id") or "", function["name"], function["arguments"])
        )
    ids = [call.id for call in answer.calls]
    if not all(ids) or len({*ids}) < len(ids):
        answer.faults.append(f"ids of the whole answer: {ids}")
    answer.num_tokens = (body.get("usage") or {}).get("completion_tokens")
    tokens = (choice.get("logprobs") or {}).get("content")
    if tokens and all(token.get("bytes") is not None for token in tokens):
        answer.written = b"".join(bytes(token["bytes"]) for token in tokens)
    return answer


def read_stream(chunks: Sequence[Mapping[str, Any]]) -> Answer:
    """Return the answer in the chunks of a stream."""
    answer = Answer()
    for choice in (choice for chunk in chunks for choice in chunk.get("choices") or ()):
        delta = choice.get("delta") or {}
        answer.content += delta.get("content") or ""
        answer.reasoning += _reasoning(delta) or ""
        for piece in delta.get("tool_calls") or ():
            _add_piece(answer, piece)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    ids = [call.id for call in answer.calls]
    if len({*ids}) < len(ids):
        answer.faults.append(f"two calls have one id: {ids}")
    return answer


def _reasoning(message: Mapping[str, Any]) -> str | None:
    return message.get("reasoning") or message.get("reasoning_content")


def _add_piece(answer: Answer, piece: Mapping[str, Any]) -> None:
    """Add a delta of a call."""
    index, function = piece.get("index"), piece.get("function") or {}
    number = len(answer.calls)
    name, call_id = function.get("name"), piece.get("id")
    if index == number:
        if not name or not call_id:
            answer.faults.append(f"the first piece of call {index} lacks its name or id: {piece}")
        answer.calls.append(FoundCall(call_id or "", name or "", function.get("arguments") or ""))
        return
    if not isinstance(index, int) or not 0 <= index < number:
        answer.faults.append(f"index {index} after {number} calls")
        answer.calls.append(FoundCall(call_id or "", name or "", function.get("arguments") or ""))
        return
    call = answer.calls[index]
    if index < number - 1:
        answer.faults.append(f"call {index} goes on after call {number - 1}")
    if call_id and call_id != call.id:
        answer.faults.append(f"call {index} has the ids {call.id} and {call_id}")
    if name:
        answer.faults.append(f"call {index} is named again: {name}")
        call.name = call.name or name
    call.arguments += function.get("arguments") or ""


def judge(case: Case, whole: Answer, streamed: Answer) -> Result:
    """Return the laws that the answers to a case keep and break."""
    result = Result()
    both = (("whole", whole), ("streamed", streamed))
    texts = [f"{mode}: {p}" for mode, answer in both for p in _text_problems(case, answer)]
    calls = [f"{mode}: {p}" for mode, answer in both for p in _call_problems(case, answer)]
    result.judge("text", texts)
    result.judge("calls", calls)
    if any(call.text is not None for call in case.calls) and not calls:
        result.judge(
            "verbatim", [f"{m}: {p}" for m, a in both for p in _verbatim_problems(case, a)]
        )
    result.judge("stream", stream_problems(whole, streamed))
    if case.calls:
        result.judge("deltas", [*whole.faults, *streamed.faults])
    expected = "tool_calls" if case.calls else "stop"
    reasons = [f"{m}: {a.finish_reason}" for m, a in both if a.finish_reason != expected]
    result.judge("finish", reasons)
    if case.subject is not None and case.subject != "verbatim":
        result.judge(case.subject, [*texts, *calls])
    return result


def judge_cut(case: Case, whole: Answer, streamed: Answer) -> Result:
    """Return how the answers to a case, cut by max_tokens, keep the laws of cut answers."""
    result = Result()
    both = (("whole", whole), ("streamed", streamed))
    problems = [f"{mode}: {p}" for mode, answer in both for p in _cut_problems(case, answer)]
    result.judge("cut", problems)
    result.judge("stream", [f"cut: {p}" for p in stream_problems(whole, streamed)])
    return result


def _pattern(blocks: Sequence[str]) -> str:
    return r"\s*" + r"\s*".join(re.escape(block.strip()) for block in blocks) + r"\s*"


def _text_problems(case: Case, answer: Answer) -> Iterator[str]:
    for kind, blocks, found in (
        ("content", case.content, answer.content),
        ("reasoning", case.reasoning, answer.reasoning),
    ):
        if re.fullmatch(_pattern(blocks), found) is None:
            yield f"{kind} is {_short(found)}, not {blocks}"


def _call_problems(case: Case, answer: Answer) -> Iterator[str]:
    names = [call.name for call in case.calls]
    found_names = [call.name for call in answer.calls]
    if names != found_names:
        yield f"calls of {found_names}, not {names}"
        return
    for call, found in zip(case.calls, answer.calls, strict=True):
        try:
            value = json.loads(found.arguments)
        except ValueError:
            yield f"the arguments of {call.name} are no JSON: {_short(found.arguments)}"
            continue
        if not same(value, call.arguments):
            yield f"{call.name} has {_short(found.arguments)}, not {call.arguments}"


def same(one: Any, other: Any) -> bool:
    """Return True if two values are the same JSON: 1 is 1.0, but not true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _verbatim_problems(case: Case, answer: Answer) -> Iterator[str]:
    for call, found in zip(case.calls, answer.calls, strict=True):
        if call.text is not None and found.arguments.strip() != call.text:
            yield f"{_short(found.arguments)}, not {_short(call.text)}"


def stream_problems(whole: Answer, streamed: Answer) -> list[str]:
    """Return the differences of a stream from a whole answer."""
    problems = []
    for kind in ("content", "reasoning", "finish_reason"):
        one, other = getattr(whole, kind) or "", getattr(streamed, kind) or ""
        if one != other:
            problems.append(f"{kind}: whole {_short(one)}, streamed {_short(other)}")
    calls = [[[c.name, c.arguments] for c in answer.calls] for answer in (whole, streamed)]
    if calls[0] != calls[1]:
        problems.append(f"calls: whole {_short(str(calls[0]))}, streamed {_short(str(calls[1]))}")
    return problems


def _cut_problems(case: Case, answer: Answer) -> Iterator[str]:
    if answer.finish_reason != "length":
        yield f"finish_reason is {answer.finish_reason}"
    for kind, blocks, found in (
        ("content", case.content, answer.content),
        ("reasoning", case.reasoning, answer.reasoning),
    ):
        whole, part = _bare("".join(blocks)), _bare(found)
        if not whole.startswith(part) and not _ends_with_begun_call(case, whole, part):
            yield f"{kind} is {_short(found)}"
    names = [call.name for call in case.calls]
    if [call.name for call in answer.calls] != names[: len(answer.calls)]:
        yield f"calls of {[call.name for call in answer.calls]}"
        return
    for call, begun in zip(case.calls, answer.calls, strict=False):
        if not _begins(case, call, begun.arguments):
            yield f"{call.name} has {_short(begun.arguments)}"


def _bare(text: str) -> str:
    """Return a text without its white space."""
    return "".join(text.split())


def _ends_with_begun_call(case: Case, whole: str, found: str) -> bool:
    """Return True if a text is a whole one, and then the beginning of a call that was cut.

    It may count as text: its beginning does not show whether it would become a call.
    """
    rest = found.removeprefix(whole)
    return bool(case.calls) and found.startswith(whole) and rest in _bare(case.text)


def _begins(case: Case, call: Call, found: str) -> bool:
    """Return True if a text is a beginning of a call's arguments, or all of them."""
    if call.text is not None:
        return call.text.startswith(found.strip())
    # The server wrote the JSON; what begins like the end of an argument may count as its text.
    one, other = (
        _bare(text.replace("\\n", ""))
        for text in (json.dumps(call.arguments, ensure_ascii=False), found)
    )
    ends = other.rstrip("}").rstrip('"')
    begin, mark, rest = ends.rpartition("<")
    if one.startswith(ends) or _is_part(call.arguments, found):
        return True
    return bool(mark) and one.startswith(begin) and f"{mark}{rest}" in _bare(case.text)


def _is_part(arguments: Mapping[str, Any], found: str) -> bool:
    try:
        value = json.loads(found)
    except ValueError:
        return False
    if not isinstance(value, dict) or value.keys() - arguments.keys():
        return False
    return all(str(arguments[key]).startswith(str(value[key])) for key in value)


def _short(text: str) -> str:
    return repr(text if len(text) <= 160 else f"{text[:100]} ... {text[-40:]}")
