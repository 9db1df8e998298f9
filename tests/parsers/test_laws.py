"""Laws of the parsers of answers, for each format."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.parsers.answer import AnswerParser
from octavo.parsers.calls import BARE
from octavo.parsers.formats import FORMATS
from octavo.parsers.parts import CallArguments, CallStart, Reasoning, Text
from tests.parsers.writers import write

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "search": {"type": "object", "properties": {"query": {"type": "string"}, "tags": {}}},
    "now": {"type": "object", "properties": {}},
}
CALLS = [
    ("get_weather", {"city": 'São "Paulo"\n', "days": 3}),
    ("search", {"query": "a\\b {[<x>]}", "tags": ["x", {"y": None, "z": [1.5, True]}]}),
    ("now", {}),
]
NAMES = sorted(FORMATS)


def parse(fmt, pieces, schemas=SCHEMAS, thinks=False):
    """Return the blocks of an answer: [kind, text] or ["call", name, arguments]."""
    parser = AnswerParser(fmt, schemas, thinks)
    blocks = []
    for part in [part for piece in pieces for part in parser.feed(piece)] + parser.end():
        assert part.text
        if isinstance(part, CallStart):
            blocks.append(["call", part.text, ""])
        elif isinstance(part, CallArguments):
            blocks[-1][2] += part.text
        elif blocks and blocks[-1][0] == type(part).__name__:
            blocks[-1][1] += part.text
        else:
            blocks.append([type(part).__name__, part.text])
    return blocks


def calls_of(fmt):
    """Return the calls to write: gpt-oss makes one at a time."""
    return CALLS[:1] if fmt.name == "openai" else CALLS


def is_bare(fmt):
    """Return True if the writer of the tests writes calls without a marker."""
    return fmt.calls.begins[0] in BARE


def blocks_of(fmt, thought, text, calls):
    blocks = [["Reasoning", thought]] if thought else []
    blocks += [["Text", text]] if text else []
    return blocks + [["call", *call] for call in calls]


def values(blocks):
    return [[*b[:2], json.loads(b[2])] if b[0] == "call" else [*b] for b in blocks]


def answers(fmt):
    """Yield (answer, blocks) of several shapes."""
    calls = calls_of(fmt)
    thoughts = [None] if fmt.thoughts is None else [None, "I think.\nThen <b> act"]
    for thought in thoughts:
        for text in ("", "Let me see: 1 < 2."):
            for some in ([], calls[:1], calls):
                if is_bare(fmt) and text and some:
                    continue
                if thought or text or some:
                    yield write(fmt, thought, text, some), blocks_of(fmt, thought, text, some)


@pytest.mark.parametrize("name", NAMES)
def test_every_block_is_found_at_every_split(name):
    fmt = FORMATS[name]
    rng = random.Random(name)
    for answer, blocks in answers(fmt):
        whole = parse(fmt, [answer])
        found = values(whole)
        if blocks[-1][0] == "Text":
            found[-1][1] = found[-1][1].rstrip()
        assert found == blocks, answer
        for cut in range(len(answer)):
            assert parse(fmt, [answer[:cut], answer[cut:]]) == whole, answer[:cut]
        assert parse(fmt, answer) == whole
        for _ in range(20):
            cuts = sorted(rng.choices(range(len(answer)), k=5))
            bounds = zip([0, *cuts], [*cuts, len(answer)], strict=True)
            assert parse(fmt, [answer[a:b] for a, b in bounds]) == whole


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_was_cut(name):
    """Its parts are the beginning of the whole answer's parts."""
    fmt = FORMATS[name]
    answer = write(fmt, "thought" if fmt.thoughts else None, "", calls_of(fmt))
    whole = parse(fmt, [answer])
    close = fmt.calls.argument[1].strip() if getattr(fmt.calls, "argument", None) else '<|"|>'
    endings = [
        json.dumps(close[:n], ensure_ascii=False)[1:-1] for n in range(len(close) - 1, 0, -1)
    ]
    for end in range(len(answer)):
        blocks = parse(fmt, [answer[:end]])
        begun = [b for b in blocks if b[0] == "call"]
        full = [b for b in whole if b[0] == "call"]
        for cut, complete in zip(begun, full, strict=False):
            assert cut[1] == complete[1]
            arguments = cut[2]
            if not complete[2].startswith(arguments):  # the beginning of a value's end may be text
                ending = next(e for e in endings if arguments.endswith(e))
                arguments = arguments.removesuffix(ending).removesuffix("\\n")
            assert complete[2].startswith(arguments)
        assert len(begun) <= len(full)


@pytest.mark.parametrize("name", NAMES)
def test_a_marker_in_an_argument_is_none(name):
    fmt = FORMATS[name]
    markers = [*fmt.in_thoughts.markers, "</tool_call>", "</think>", '"}', "[/THINK]"]
    if getattr(fmt.calls, "argument", None):
        markers += [fmt.calls.argument[1], fmt.calls.call[1]]
    for marker in markers:
        call = ("search", {"query": f"say {marker} now"})
        if fmt.name == "gemma4" and marker == '<|"|>':
            continue
        answer = write(fmt, None, "", [call])
        for pieces in ([answer], answer):
            assert values(parse(fmt, pieces)) == [["call", *call]], answer


@pytest.mark.parametrize("name", [n for n in NAMES if FORMATS[n].thoughts])
def test_calls_in_an_open_thought(name):
    fmt = FORMATS[name]
    written = write(fmt, None, "", CALLS[:1])
    if fmt.name == "openai" or is_bare(fmt):
        return
    answer = f"I think\n{written}"
    assert values(parse(fmt, [answer], thinks=True)) == [
        ["Reasoning", "I think"],
        ["call", *CALLS[0]],
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_request_without_tools(name):
    """A call in the text stays text."""
    fmt = FORMATS[name]
    if fmt.silent:
        return
    answer = write(fmt, None, "", calls_of(fmt)).strip()
    assert parse(fmt, answer, schemas=None) == [["Text", answer]]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150)
@given(data=st.data())
def test_any_text(name, data):
    """No text is lost, repeated or reordered, at any split."""
    fmt = FORMATS[name]
    markers = list(fmt.in_thoughts.markers)
    bits = ["a", " ", "\n", "{", "}", "[", "]", '"', "(", ")", "=", ":", ",", "\\", "now", "name"]
    bits += ['{"name": "now"', '"arguments": {', "now(", "<", ">", "1"]
    pieces = data.draw(st.lists(st.sampled_from([*markers, *bits]), max_size=12))
    answer = "".join(pieces)
    whole = parse(fmt, [answer])
    assert parse(fmt, answer) == whole
    assert parse(fmt, pieces) == whole
    parser = AnswerParser(fmt, SCHEMAS)
    at = 0
    for part in parser.feed(answer) + parser.end():
        if isinstance(part, Text | Reasoning):
            at = answer.index(part.text, at) + len(part.text)
    if all(block[0] != "call" for block in whole):
        texts = [answer, "".join(block[1] for block in whole)]
        left, kept = ("".join(text.split()) for text in texts)
        for marker in [*(fmt.thoughts or ()), *fmt.silent]:
            mark = "".join(marker.split())
            left, kept = left.replace(mark, ""), kept.replace(mark, "")
        assert left == kept


def test_long_answers():
    """Long answers in small pieces."""
    for name in NAMES:
        fmt = FORMATS[name]
        call = ("search", {"query": 'x" <y' * 4_000})
        for answer in (write(fmt, None, "", [call]), "a < b [c {" * 5_000, " \n" * 20_000):
            pieces = [answer[i : i + 7] for i in range(0, len(answer), 7)]
            parse(fmt, pieces)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "pythonic", "xlam"])
def test_calls_without_a_marker(name):
    """They are calls only if they begin the text, and name a tool."""
    fmt = FORMATS[name]
    call = {
        "pythonic": "[now()]",
        "xlam": '[{"name": "now", "arguments": {}}]',
    }.get(name, '{"name": "now", "parameters": {}}')
    assert parse(fmt, call) == [["call", "now", "{}"]]
    for text in (f"See: {call}", call.replace("now", "then"), '{"a": [1, {"name": 2}]}', "[1, 2]"):
        assert parse(fmt, text) == [["Text", text]]
    if fmt.thoughts:
        begin, end = fmt.thoughts
        assert parse(fmt, f"{begin}{call}{end}") == [["Reasoning", call]]


@pytest.mark.parametrize(
    ("name", "answer", "blocks"),
    [
        ("glm45", "Use <tool_call>tag to call", [["Text", "Use <tool_call>tag to call"]]),
        ("glm45", "<tool_call>...</tool_call>", [["Text", "<tool_call>...</tool_call>"]]),
        ("glm45", "<tool_call>now</tool_call>", [["call", "now", "{}"]]),
        ("qwen3_coder", "Write <function=foo> then", [["Text", "Write <function=foo> then"]]),
        ("pythonic", '[now("x")]', [["Text", '[now("x")]']]),
        ("hermes", '<tool_call>{"name": "now", "arguments": ""}', [["call", "now", "{}"]]),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}', [["call", "now", "{}"]]),
        ("hermes", '{"function":' * 3000, [["Text", '{"function":' * 3000]]),
        (
            "hermes",
            '<tool_call>{"name": "\\ud800", "arguments": {}}',
            [["call", "\\ud800", "{}"]],
        ),
        (
            "hermes",
            '{"name": "now", "arguments": {}}\n{"weather": "sunny"}',
            [["call", "now", "{}"], ["Text", '{"weather": "sunny"}']],
        ),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": {}} {"a": 1} </tool_call> b',
            [["call", "now", "{}"], ["Text", '{"a": 1}  b']],
        ),
        (
            "llama3_json",
            '{"name": "now", "parameters": {}}; {"weather": 1}',
            [["call", "now", "{}"], ["Text", '; {"weather": 1}']],
        ),
        (
            "llama3_json",
            '{"name": "now", "parameters": {}}; and',
            [["call", "now", "{}"], ["Text", "; and"]],
        ),
        (
            "xlam",
            '[{"name": "now", "arguments": {}}, ',
            [["call", "now", "{}"], ["Text", ", "]],
        ),
        ("xlam", '[{"name": "now", "arguments": {}},] a', [["call", "now", "{}"], ["Text", "a"]]),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": {}}; </tool_call> b',
            [["call", "now", "{}"], ["Text", "b"]],
        ),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": {}}; b</tool_call>',
            [["call", "now", "{}"], ["Text", "; b</tool_call>"]],
        ),
        ("pythonic", "[now(), 1]", [["call", "now", "{}"], ["Text", ", 1]"]]),
        (
            "pythonic",
            "[now(), then it rained (a lot)]",
            [["call", "now", "{}"], ["Text", ", then it rained (a lot)]"]],
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|>no call",
            [["call", "now", "{}"], ["Text", "<|tool_call_begin|>no call"]],
        ),
        ("openai", f" to=functions.{'x' * 300}<|message|>{{}}", None),
    ],
    ids=lambda v: str(v)[:30],
)
def test_what_is_almost_a_call(name, answer, blocks):
    found = parse(FORMATS[name], [answer])
    assert parse(FORMATS[name], answer) == found
    assert found == ([["Text", answer]] if blocks is None else blocks)
    json.dumps(found).encode()


def test_json_that_is_no_call_is_streamed():
    parser = AnswerParser(FORMATS["hermes"], SCHEMAS)
    parts = parser.feed('{"answer": "word')
    assert "".join(part.text for part in parts) == '{"answer": "word'
