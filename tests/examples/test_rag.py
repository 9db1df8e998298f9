"""examples/rag.py: each question finds its note, and the answer is right."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "rag.py"


def run(*questions: str) -> dict[str, tuple[str, str]]:
    """Return the best note and the answer of each question."""
    command = [sys.executable, str(EXAMPLE), *questions]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(
        r"^(\S.*)\n  retrieved: .*\n  best, [\d.]+: (.*)\n  answer: (.*)$", done.stdout, re.M
    )
    return {question: (note, answer) for question, note, answer in found}


def test_it_answers_from_its_notes():
    assert run() == {
        "How many apples does Mia have now?": (
            "Mia has 7 apples. She finds 2 more.",
            "7 + 2 = 9. Mia has 9 apples now.",
        ),
        "How many shells does Lucy have now?": (
            "Lucy has 8 shells. She buys 5 more.",
            "8 + 5 = 13. Lucy has 13 shells now.",
        ),
        "How many books does Tom have now?": (
            "Tom has 10 books. He sells 4.",
            "10 - 4 = 6. Tom has 6 books now.",
        ),
        "How many coins does Anna have now?": ("Anna just turned 7.", "no note answers this"),
    }


def test_it_answers_another_question():
    assert run("How many apples does Tom have now?") == {
        "How many apples does Tom have now?": (
            "Tom has 3 apples. He gets 6 more.",
            "3 + 6 = 9. Tom has 9 apples now.",
        )
    }
