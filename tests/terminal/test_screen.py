import pytest

from octavo.terminal.screen import Wrapper, harmless


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three four", ["one two", "three four"]),
        ("exactlyten more", ["exactlyten", "more"]),
        ("abcdefghijklmnopqrstuvwx yz", ["abcdefghij", "klmnopqrst", "uvwx yz"]),
        ("  x = 1\n    y\n\nz", ["  x = 1", "    y", "", "z"]),
        ("a\tb", ["a       b"]),
        ("你好你好你好", ["你好你好你", "好"]),
        ("ab 你好你好", ["ab 你好你", "好"]),
        ("e\u0301" * 12, ["e\u0301" * 10, "e\u0301" * 2]),
        ("a\rb\x1b[2J", ["a␍b␛[2J"]),
        ("", [""]),
    ],
)
def test_words_are_wrapped_however_they_come(text, lines):
    for size in (1, 2, 3, len(text) + 1):
        wrapper = Wrapper(10)
        out = [wrapper.feed(text[i : i + size]) for i in range(0, len(text), size)]
        assert ("".join(out) + wrapper.end()).split("\n") == lines


def test_what_commands_a_terminal_becomes_visible():
    assert harmless("a\tb\nc\x1b[31m\x7f\x9b2J\r") == "a\tb\nc␛[31m␡\ufffd2J␍"
