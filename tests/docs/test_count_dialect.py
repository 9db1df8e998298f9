"""docs/count_dialect.py counts the markers of known texts, and skips quoted code."""

import importlib.util
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "count_dialect.py"


def load():
    spec = importlib.util.spec_from_file_location("count_dialect", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dialect = load()

MARKDOWN = """# Nobody

The server is told so
many ports behind it, besides `told` and ``as `many` as``. There is none of its own;
a class of one's own. [Asked](taken.md) so `x` many.

```sh
octavo told asked taken
```
"""

PYTHON = '''"""Which way: likewise."""  # noqa: nobody

count = 1  # Somebody else has
# taken it, as
# many as before.
"""Number of things; not told by `told`."""
text = "nobody asked whoever"  # type: ignore


class Thing:
    """Thing that stands beside another."""

    def whether(self):
        """Whether it is."""

    def of(self):
        """Offer it."""
'''

CPP = """// Told so
// many times.
const char* url = "http://asked";  // Nobody.
const char quote = '"';  /* Behind `asked`,
   whoever. */
"""


def counts(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    found, num_words = dialect.count(path)
    return dict(+found), num_words


def test_markdown(tmp_path):
    found, num_words = counts(tmp_path, "a.md", MARKDOWN)
    assert found == {
        "nobody": 1,
        "told": 1,
        "so many": 1,
        "behind": 1,
        "there is none": 1,
        "of (?:its|one's) own": 2,
        "asked": 1,
    }
    assert num_words == 1 + 5 + 6 + 6 + 5 + 3


def test_python(tmp_path):
    found, num_words = counts(tmp_path, "a.py", PYTHON)
    assert found == {
        dialect.OPENING: 2,
        "likewise": 1,
        "somebody": 1,
        "taken": 1,
        "as many": 1,
        "told": 1,
        "beside": 1,
    }
    assert num_words == 3 + 3 + 3 + 3 + 6 + 5 + 3 + 2


def test_cpp(tmp_path):
    found, num_words = counts(tmp_path, "a.cpp", CPP)
    assert found == {"told": 1, "so many": 1, "nobody": 1, "behind": 1, "whoever": 1}
    assert num_words == 4 + 1 + 2


def test_the_table(tmp_path):
    (tmp_path / "a.md").write_text(MARKDOWN)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "b.py").write_text(PYTHON)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "c.cpp").write_text(CPP)
    (tmp_path / "d.txt").write_text("told")
    words = [sys.executable, SCRIPT, tmp_path, "--files", "1"]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = {line[:24].strip(): line[24:].split() for line in lines}
    assert rows["told"] == ["2", "60.61"]
    assert rows["of its/one's own"] == ["2", "60.61"]
    assert rows["sum"] == ["13", "393.94"]
    assert "33 words of prose in 2 files" in lines
    assert lines[-1].startswith(str(tmp_path / "a.md"))
