"""Answers as a model of a format writes them."""

import json

from octavo.parsers.calls import BARE, JsonCalls, OwnCalls, PatternCalls, PythonCalls

Call = tuple[str, dict]
"""Name of the function, and arguments."""


def write(fmt, thought, text, calls):
    """Return the answer of a model: reasoning, a text, and calls."""
    answer = ""
    if thought is not None:
        begin, end = fmt.thoughts
        answer += f"{begin}\n{thought}\n{end}\n\n"
    if fmt.name == "openai":
        if answer:
            answer = answer.rstrip() + "<|start|>assistant"
        if text:
            answer += f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant"
    elif text:
        answer += text + "\n"
    return answer + (write_calls(fmt.calls, calls) if calls else "")


def write_calls(way, calls):
    if isinstance(way, JsonCalls):
        return _write_json(way, calls)
    if isinstance(way, PythonCalls):
        inner = ", ".join(
            f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
            for name, arguments in calls
        )
        begin = "" if way.begins[0] in BARE else way.begins[0]
        return f"{begin}[{inner}]{way.end}"
    if isinstance(way, PatternCalls):
        written = "\n".join(_write_pattern(way, i, call) for i, call in enumerate(calls))
        if way.section is None:
            return written
        one_each = way.section[0] in ("<tool_call>", "<seed:tool_call>")
        if one_each:
            return "\n".join(
                way.section[0] + _write_pattern(way, i, call) + way.section[1]
                for i, call in enumerate(calls)
            )
        return way.section[0] + "\n" + written + "\n" + way.section[1]
    assert isinstance(way, OwnCalls)
    if way.begins == ("<|tool_call>",):
        return "".join(f"<|tool_call>call:{n}{_gemma(a)}<tool_call|>" for n, a in calls)
    ((name, arguments),) = calls[:1]
    return (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(arguments)}<|call|>"
    )


def _write_json(way, calls):
    if way.named_by_key:
        objects = [{name: arguments} for name, arguments in calls]
    else:
        objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    texts = [json.dumps(o, ensure_ascii=False) for o in objects]
    bare = way.begins[0] in BARE
    begin = "" if bare else way.begins[0]
    if way.end in ("</tool_call>", "<|action_end|>") or way.begins[0].startswith("<|function_call"):
        return "\n".join(f"{begin}\n{text}\n{way.end}" for text in texts)
    if way.begins[0] == "{":
        return "; ".join(texts)
    return f"{begin}[{', '.join(texts)}]{way.end}"


def _write_pattern(way, index, call):
    name, arguments = call
    before, after = way.call
    named = "{name}" in before
    before = before.replace("{name}", name)
    before = before.replace("{id}", f"id{index}" if named else f"functions.{name}:{index}")
    if way.argument is None:
        return before + json.dumps(arguments) + after
    inner = ""
    for key, value in arguments.items():
        begin, end = way.argument
        text = value if isinstance(value, str) else json.dumps(value)
        begin = begin.replace("{key}", key)
        inner += begin.replace("{text}", "true" if isinstance(value, str) else "false")
        inner += f"\n{text}{end}\n" if end.startswith("\n") else text + end
    return f"{before}\n{inner}{after}"


def _gemma(value):
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)
