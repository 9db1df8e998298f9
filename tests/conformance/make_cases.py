"""Make the suite's file of cases: python -m tests.conformance.make_cases.

Most follow from the descriptions of the formats; `HARD` has more, as models really wrote them.
"""

import json
import re

import msgspec

from octavo.conformance.cases import FILE, FILLER, Call, Case
from octavo.parsers.calls import BARE, JsonCalls, PatternCalls
from octavo.parsers.formats import FORMATS
from tests.parsers.writers import write

NAMES = [
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "pythonic",
    "mistral",
    "mistral_v13",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "glm45",
    "minimax_m2",
    "granite",
    "gemma4",
    "openai",
    "lfm2",
    "seed_oss",
]


def _tool(name, properties):
    schema = {"type": "object", "properties": properties}
    return {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": schema},
    }


# Keys are sorted, since some models write them in this order, and others in the schema's.
TOOLS = [
    _tool("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}}),
    _tool(
        "search",
        {
            "filters": {
                "type": "object",
                "properties": {"exact": {"type": "boolean"}, "since": {"type": "number"}},
            },
            "query": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
    ),
    _tool("now", {}),
]
PARIS = ("get_weather", {"city": "Paris", "days": 3})
ROME = ("get_weather", {"city": "Rome", "days": 10})
QUOTES = ("search", {"query": 'São "Paulo"\nC:\\new\t<b> & 東京 😀'})
NESTED = ("search", {"filters": {"exact": True, "since": 1.5}, "query": "a", "tags": ["x", "{y}"]})
NOW = ("now", {})
TEXT = "Let me see: 1 < 2."
THOUGHT = "I should look.\nThen <b> act"


# White space that models of a format write, and the tests' writer does not: patterns.
SPACES = {
    "qwen3_coder": [("(<tool_call>)<", r"\1\n<"), ("(</function>)(</tool_call>)", r"\1\n\2")],
    "seed_oss": [
        ("(<seed:tool_call>)<", r"\1\n<"),
        ("(</function>)(</seed:tool_call>)", r"\1\n\2"),
        ("(</parameter>)<", r"\1\n<"),
    ],
    "glm45": [("(</arg_key>) (<arg_value>)", r"\1\n\2"), ("(</arg_value>)<", r"\1\n<")],
    "minimax_m2": [("(</parameter>)<", r"\1\n<")],
    "deepseek_v3": [
        (" (```json)({.*?})(```) (<｜tool▁call▁end｜>)", r"\n\1\n\2\n\3\4"),
        ("(<｜tool▁calls▁begin｜>)\n", r"\1"),
        ("\n(<｜tool▁calls▁end｜>)", r"\1"),
    ],
}


class Maker:
    """Maker of the cases of one format."""

    def __init__(self, name):
        self.fmt = FORMATS[name]
        self.cases = []
        calls = self.fmt.calls
        self.is_bare = calls.begins[0] in BARE
        self.verbatim = isinstance(calls, JsonCalls) or (
            isinstance(calls, PatternCalls) and calls.argument is None
        )
        self.verbatim = self.verbatim or name == "openai"

    def write(self, thought, text, calls):
        """Return the text of a model, with the keys of the format."""
        written = write(self.fmt, thought, text, calls)
        if isinstance(self.fmt.calls, JsonCalls) and not self.fmt.calls.named_by_key:
            for key, own in zip(("name", "arguments"), self.fmt.calls.keys, strict=True):
                written = written.replace(f'"{key}": ', f'"{own}": ')
        for _, arguments in calls:
            written = written.replace(
                json.dumps(arguments), json.dumps(arguments, ensure_ascii=False)
            )
        for pattern, spaced in SPACES.get(self.fmt.name, ()):
            written = re.sub(pattern, spaced, written)
        return written

    def arguments(self, written, arguments):
        """Return the text of arguments as it was written; None if it is no JSON."""
        if not self.verbatim:
            return None
        dumped = json.dumps(arguments, ensure_ascii=False)
        assert dumped in written
        return dumped

    def add(self, name, text, content=(), reasoning=(), calls=(), **more):
        """Add a case."""
        calls = [
            Call(n, a, self.arguments(text, a)) if isinstance(a, dict) else Call(n, *a)
            for n, a in calls
        ]
        case = Case(
            f"{self.fmt.name}/{name}",
            self.fmt.name,
            text,
            list(content),
            list(reasoning),
            calls,
            tools=TOOLS,
            **more,
        )
        self.cases.append(case)

    def make(self):
        """Add all cases that follow from the description."""
        self.add("text", TEXT, [TEXT])
        for name, calls in {
            "call": [PARIS],
            "no-arguments": [NOW],
            "escapes": [QUOTES],
            "nested": [NESTED],
        }.items():
            self.add(
                name, self.write(None, "", calls), calls=calls, cuts=name in ("call", "nested")
            )
        if self.fmt.name != "openai":
            several = [PARIS, ROME, NOW]
            self.add("several", self.write(None, "", several), calls=several, cuts=True)
        if not self.is_bare:
            self.add("text-call", self.write(None, TEXT, [PARIS]), [TEXT], calls=[PARIS])
        if not (self.is_bare or self.fmt.name == "openai"):
            after = self.write(None, "", [PARIS]) + "\nThat is all."
            self.add("call-text", after, ["That is all."], calls=[PARIS])
        self._markers()
        self._texts()
        if self.verbatim:
            self._verbatim()
        else:
            digits = [("get_weather", {"city": "007", "days": 1}), ("search", {"query": "[1, 2]"})]
            self.add("texts-like-json", self.write(None, "", digits), calls=digits)
        if self.fmt.thoughts is not None:
            self._thoughts()
        call = ("search", {"query": FILLER})
        self.add("long", self.write(None, "", [call]), calls=[call])

    def _markers(self):
        """Add cases with markers in arguments."""
        calls = self.fmt.calls
        pattern = isinstance(calls, PatternCalls)
        begin = calls.begins[-1] if not self.is_bare else '{"name": "now", "parameters": {}}'
        end = calls.call[1] if pattern else getattr(calls, "end", "")
        if self.fmt.name == "gemma4":
            end = "<tool_call|>"
        thoughts = self.fmt.thoughts or ("<think>", "</think>")
        marks = {
            "begin": begin,
            "end": end or "]",
            "thought": f"{thoughts[0].strip()} a {thoughts[1]}",
            "json": '"}} ]} {"name": "now"',
        }
        for name, mark in marks.items():
            call = ("search", {"query": f"say {mark} twice"})
            if not (pattern and calls.argument) or name != "json":
                self.add(
                    f"marker-{name}", self.write(None, "", [call]), calls=[call], subject="markers"
                )

    def _texts(self):
        """Add texts that are almost calls."""
        if self.is_bare:
            call = self.write(None, "", [NOW])
            for name, text in {
                "example": f"Write {call} for that.",
                "other-json": '{"answer": [1, {"x": 2}]}' if call[0] == "{" else "[1, [2, 3]]",
            }.items():
                self.add(name, text, [text], subject="almost")
            return
        begin = self.fmt.calls.begins[-1]
        texts = {
            "begun": f"A call begins with {begin} and ends",
            "begun-only": f"It begins with {begin}",
        }
        if self.fmt.name != "openai":
            for name, text in texts.items():
                self.add(name, text, [text], subject="almost")

    def _verbatim(self):
        """Add arguments whose JSON has many forms."""
        call = ("search", {"query": "MARK"})
        written = self.write(None, "", [call])
        old = self.arguments(written, call[1])
        for name, text in {
            "spaced": '{ "filters" :  {"exact": true,\n  "since":1.50e1},"query": "caf\\u00e9" }',
            "compact": '{"query":"a/b \\/ c","tags":["x","y"]}',
        }.items():
            value = json.loads(text)
            self.add(
                name,
                written.replace(old, text),
                calls=[("search", (value, text))],
                subject="verbatim",
            )

    def _thoughts(self):
        begin, end = self.fmt.thoughts
        self.add("thought-text", self.write(THOUGHT, TEXT, []), [TEXT], [THOUGHT])
        if self.is_bare:
            return
        self.add(
            "thought-call", self.write(THOUGHT, "", [PARIS]), [], [THOUGHT], [PARIS], cuts=True
        )
        self.add(
            "thought-text-call", self.write(THOUGHT, TEXT, [PARIS]), [TEXT], [THOUGHT], [PARIS]
        )
        if self.fmt.name == "openai":
            return
        one, two = (self.write(None, "", [call]) for call in (PARIS, NOW))
        thoughts = [f"{begin}\n{text}\n{end}\n\n" for text in ("First.", "Second.")]
        if self.fmt.name in ("kimi_k2", "deepseek_v3", "deepseek_v31"):
            two = two.replace(":0", ":1")
        self.add(
            "thought-between",
            thoughts[0] + one + "\n" + thoughts[1] + two,
            [],
            ["First.", "Second."],
            [PARIS, NOW],
            subject="interleaved",
        )
        self.add(
            "thought-after",
            one + "\n" + thoughts[0] + TEXT,
            [TEXT],
            ["First."],
            [PARIS],
            subject="interleaved",
        )
        self.add(
            "open-thought",
            f"{begin}\nI call it.\n{one}",
            [],
            ["I call it."],
            [PARIS],
            subject="open",
        )


def _object(name, text, key="arguments"):
    return f'{{"name": "{name}", "{key}": {text}}}'


_CITY = '{"city": "Oslo"}'
_OSLO = ("get_weather", ({"city": "Oslo"}, _CITY))
_EMPTY = ("now", ({}, "{}"))
_CODE = "def f(a):\n    return a < 1 and [a]\n\n\nprint(f(0))"
# By format: name of the case, text of the model, blocks of text, calls, subject.
HARD = {
    "hermes": [
        ("one-line", f"<tool_call>{_object('get_weather', _CITY)}</tool_call>", [], [_OSLO], None),
        ("not-closed", f"<tool_call>\n{_object('get_weather', _CITY)}", [], [_OSLO], "open"),
        ("not-marked", _object("get_weather", _CITY), [], [_OSLO], "unmarked"),
        (
            "arguments-first",
            f'<tool_call>\n{{"arguments": {_CITY}, "name": "get_weather"}}\n</tool_call>',
            [],
            [_OSLO],
            None,
        ),
        (
            "end-in-argument",
            '<tool_call>\n{"name": "search", "arguments": {"query": "</tool_call>"}}\n'
            "</tool_call>\n"
            f"<tool_call>\n{_object('now', '{}')}\n</tool_call>",
            [],
            [("search", ({"query": "</tool_call>"}, '{"query": "</tool_call>"}')), _EMPTY],
            "markers",
        ),
        (
            "html",
            "Use <tool_bar> or <tool_call >.",
            ["Use <tool_bar> or <tool_call >."],
            [],
            "almost",
        ),
        (
            "other-object",
            'As JSON: {"name": "now", "size": 3}',
            ['As JSON: {"name": "now", "size": 3}'],
            [],
            "almost",
        ),
    ],
    "qwen3_coder": [
        (
            "no-section",
            "<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>",
            [],
            [("get_weather", {"city": "Oslo"})],
            "unmarked",
        ),
        (
            "code",
            f"<tool_call>\n<function=search>\n<parameter=query>\n{_CODE}\n</parameter>\n"
            "</function>\n</tool_call>",
            [],
            [("search", {"query": _CODE})],
            None,
        ),
    ],
    "llama3_json": [
        ("tag", f"<|python_tag|>{_object('get_weather', _CITY, 'parameters')}", [], [_OSLO], None),
        ("arguments-key", _object("get_weather", _CITY), [], [_OSLO], None),
        (
            "type-first",
            f'{{"type": "function", {_object("now", "{}", "parameters")[1:]}',
            [],
            [_EMPTY],
            None,
        ),
    ],
    "pythonic": [
        (
            "python-text",
            "[search(query='it\\'s (a, b) = [c]', filters={'exact': True}), now()]",
            [],
            [("search", {"query": "it's (a, b) = [c]", "filters": {"exact": True}}), NOW],
            "markers",
        ),
    ],
    "glm45": [
        ("no-newline", "<tool_call>now</tool_call>", [], [NOW], None),
    ],
    "kimi_k2": [
        (
            "far-index",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:12"
            f"<|tool_call_argument_begin|>{_CITY}<|tool_call_end|><|tool_calls_section_end|>",
            [],
            [_OSLO],
            None,
        ),
    ],
}


def make():
    """Return all cases."""
    cases = []
    for name in NAMES:
        maker = Maker(name)
        maker.make()
        for case, text, content, calls, subject in HARD.get(name, ()):
            maker.add(case, text, content, calls=calls, subject=subject)
        cases += maker.cases
    return cases


def encode(cases):
    """Return the file."""
    return b"".join(msgspec.json.encode(case) + b"\n" for case in cases)


if __name__ == "__main__":
    FILE.write_bytes(encode(make()))
