"""Messages that docs/troubleshooting.md quotes are in the code."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"```text\n(.*?)\n```", TEXT, re.DOTALL)


def pattern(node):
    """Return a regular expression for a string of the code, and its number of fixed characters."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    fixed = [p.value if isinstance(p, ast.Constant) else None for p in parts]
    expression = "".join(".*" if text is None else re.escape(text) for text in fixed)
    return expression, sum(len(text) for text in fixed if text is not None)


@functools.cache
def patterns():
    """Return the expressions of all texts in the code with enough words to be recognised."""
    found = []
    for path in (ROOT / "octavo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr) or (
                isinstance(node, ast.Constant) and isinstance(node.value, str)
            ):
                expression, num_fixed = pattern(node)
                if num_fixed >= 20:
                    found.append(re.compile(expression + r"\Z", re.DOTALL))
    return found


def said(message):
    """Return True if one text of the code makes up most of the message."""
    found = [match.start() for p in patterns() if (match := p.search(message))]
    return bool(found) and min(found) < len(message) / 2


@pytest.mark.parametrize("message", QUOTED, ids=lambda message: message[:40])
def test_the_code_says_it(message):
    assert said(message)


def test_what_the_code_does_not_say_is_found():
    assert len(QUOTED) > 20
    assert not said("The engine is tired; let it sleep for a while and then try again.")
    assert not said(QUOTED[0].replace("Choose", "Take"))
