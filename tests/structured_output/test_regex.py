"""Regular expressions with one meaning in all backends."""

from __future__ import annotations

import json
import re
import string

import pytest

from octavo.errors import GrammarError
from octavo.messages import GrammarSpec
from octavo.structured_output.vocabulary import Vocabulary
from octavo.structured_output.xgrammar_backend import XGrammarBackend
from tests.structured_output.test_backends import ALL_BYTES, accepts, allowed

PROBES = [
    *(chr(code) for code in range(0x20)),
    *"09azAFZ_^]-\\\"'/.$ bxu1deA\x7f",
    *"\x80\x85\xa0é٣\u07fb\u180e\u2028\u2029\u212a\u3000\ud7ff\ue000\ufeff中\U0001f600\U0010ffff",
]
SPACE = "[\\t-\\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]"
# Meaning of an escape, as Python's `re` writes it (with re.ASCII); all others are rejected.
MEANING = {
    **{f"\\{char}": f"\\{char}" for char in "dDwWnrtfv"},
    **{f"\\{char}": re.escape(char) for char in string.punctuation + " "},
    "\\s": SPACE,
    "\\S": f"[^{SPACE[1:]}",
    "\\0": "\\x00",
    **{f"\\x{code:02x}": re.escape(chr(code)) for code in range(0, 256, 5)},
    **{f"\\u{code:04X}": re.escape(chr(code)) for code in (9, 0x41, 0x5E, 0x7F, 0xE9, 0x2028)},
    **{f"\\u{{{code:x}}}": re.escape(chr(code)) for code in (0xA, 0x22, 0xFEFF, 0x1F600)},
    "\\uD83D\\uDE00": "\U0001f600",
    **{f"\\c{char}": f"\\x{ord(char) % 32:02x}" for char in "AJjz"},
}
REFUSED = [
    *(f"\\{char}" for char in string.ascii_letters + "123456789é" if f"\\{char}" not in MEANING),
    *("\\x4", "\\x{41}", "\\u41", "\\ud83d", "\\ude00", "\\U00000041", "\\u{110000}", "\\c1"),
]


@pytest.mark.parametrize("backend", ALL_BYTES)
def test_each_escape_means_what_is_documented(backend):
    wrong, checked = [], 0
    for escape, meaning in MEANING.items():
        for pattern, judge in (
            (escape, meaning),
            (escape + "b", meaning + "b"),
            (f"[{escape}]", meaning),
            (f"[{escape}b]", f"(?:{meaning}|b)"),
            (f"[^{escape}b]", f"(?!{meaning}|b)[\\s\\S]"),
        ):
            compiled = ALL_BYTES[backend].compile(GrammarSpec("regex", pattern))
            tail = "b" if pattern == escape + "b" else ""
            for probe in PROBES:
                wanted = bool(re.fullmatch(judge, probe + tail, re.ASCII))
                if accepts(compiled, probe + tail) != wanted:
                    wrong.append((pattern, probe + tail, wanted))
            checked += 1
    assert wrong == []
    assert checked > 500


@pytest.mark.parametrize("backend", ALL_BYTES)
def test_what_dialects_read_in_different_ways_is_refused(backend):
    patterns = [*REFUSED, *(f"[{escape}]" for escape in REFUSED if escape != "\\b")]
    patterns += ["[]a]", "[^]", "[a[b]", "[a&&b]", "[a--b]", "[z-a]", "[a-\\d]", "[[:alpha:]]"]
    patterns += [
        "a++",
        "a{2}{3}",
        "a{,3}",
        "a{",
        "*a",
        "(a",
        "a)",
        "(?=a)",
        "(?<!a)",
        "(?s).",
        "a^b",
    ]
    for pattern in patterns:
        with pytest.raises(GrammarError, match="regular expression"):
            ALL_BYTES[backend].compile(GrammarSpec("regex", pattern))


WHOLE = [
    ("^yes$|^no$|", ["yes", "no", ""], ["^yes"]),
    ("(?:a|(?<n>b)|){2,3}?c", ["abc", "c", "bbbc"], ["aaaac", "ab"]),
    ("[a-z-9]+[.-]", ["a-9-", "z."], ["b", "8-"]),
    ("]}/", ["]}/"], []),
    ("(ab){3}", ["ababab"], ["ab", "abababab"]),
]


@pytest.mark.parametrize("backend", ALL_BYTES)
@pytest.mark.parametrize(("pattern", "right", "wrong"), WHOLE, ids=lambda v: str(v)[:20])
def test_the_rest_of_the_syntax(backend, pattern, right, wrong):
    compiled = ALL_BYTES[backend].compile(GrammarSpec("regex", pattern))
    assert [text for text in right if not accepts(compiled, text)] == []
    assert [text for text in wrong if accepts(compiled, text)] == []


def test_case_and_properties_are_for_llguidance():
    for pattern, right, wrong in (
        (r"(?i)k[\Wk]", "K\u212a", "K1"),
        (r"\p{Lu}[^\p{Lu}]", "Éé", "éé"),
    ):
        spec = GrammarSpec("regex", pattern)
        compiled = ALL_BYTES["llguidance"].compile(spec)
        assert accepts(compiled, right)
        assert not accepts(compiled, wrong)
        with pytest.raises(GrammarError, match="xgrammar does not support"):
            ALL_BYTES["xgrammar"].compile(spec)


def spelt(compiled, text):
    """Return whether a text is accepted as JSON, with escapes or without."""
    return any(accepts(compiled, json.dumps(text, ensure_ascii=e)) for e in (True, False))


@pytest.mark.parametrize("backend", ALL_BYTES)
def test_patterns_of_schemas_have_the_same_meaning(backend):
    for pattern, right, wrong in (
        (r"^[\^\d]b$", ["^b", "5b"], ["ab", "٣b"]),
        (r"^[\^]b$", ["^b"], ["ab"]),
        (r"^[\^-b]\x41b$", ["^Ab", "_Ab", "aAb"], ["cAb", "^\u041b"]),
        (r"^[\]\-]\x7fb$", ["]\x7fb", "-\x7fb"], ["]\u07fb"]),
    ):
        spec = GrammarSpec("json", json.dumps({"type": "string", "pattern": pattern}))
        compiled = ALL_BYTES[backend].compile(spec)
        assert [t for t in right if not spelt(compiled, t)] == []
        assert [t for t in wrong if spelt(compiled, t)] == []


CONTROLS = ["line one\nbecause", "line one\nafter", "\x01b", "\x7fb", "\x1f\x00F", '"\\x0ab']


@pytest.mark.parametrize("backend", ALL_BYTES)
def test_no_hexadecimal_digit_is_swallowed(backend):
    """xgrammar's \\x reads all that follow."""
    make = ALL_BYTES[backend].compile
    choices = make(GrammarSpec("choice", json.dumps(CONTROLS)))
    assert [text for text in CONTROLS if not accepts(choices, text)] == []
    assert not accepts(choices, "line on\u0ae7ter")
    for grammar, text in ((r'"\x41b"', "Ab"), (r"[\x41b]", "b"), (r'"\\x41" "b"', r"\x41b")):
        assert accepts(make(GrammarSpec("grammar", f"root ::= {grammar}")), text)


def test_structural_tags_swallow_none_either():
    for content, text in (
        ({"type": "regex", "pattern": r"\x41b"}, "Ab"),
        ({"type": "grammar", "grammar": r'root ::= "\x41b"'}, "Ab"),
    ):
        tag = {"type": "tag", "begin": "\nb", "content": content, "end": "\nb"}
        spec = GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))
        for backend in ALL_BYTES.values():
            assert accepts(backend.compile(spec), f"\nb{text}\nb")


@pytest.mark.parametrize("backend", ALL_BYTES)
@pytest.mark.parametrize(
    ("kind", "text", "around"),
    [
        ("regex", "[^a]", b""),
        ("grammar", "root ::= [^a]", b""),
        ("json", '{"type": "string"}', b'"'),
    ],
)
def test_half_a_surrogate_pair_is_no_character(backend, kind, text, around):
    compiled = ALL_BYTES[backend].compile(GrammarSpec(kind, text))
    grammar = compiled.start()
    assert grammar.accept_tokens([*around, 0xED]) == len(around) + 1
    assert not set(allowed(grammar, 257)) & set(range(0xA0, 0x100))
    assert grammar.accept_tokens([0xA0]) == 0
    assert grammar.accept_tokens([0x9F, 0xBF, *around, 256]) == len(around) + 3


def test_a_token_with_half_a_surrogate_pair_is_never_allowed():
    tokens = [b"a", b"\xed\xa0\x80", b"\xed\x9f\xbf", b""]
    vocabulary = Vocabulary(tokens, [3], lambda text: [])
    grammar = XGrammarBackend(vocabulary).compile(GrammarSpec("regex", "[^b]{2}")).start()
    assert [token for token in allowed(grammar, 4) if token < 4] == [0, 2]
