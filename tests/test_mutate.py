"""Tool that puts faults into the code."""

import json
import subprocess
import sys
from pathlib import Path

from tests import mutate

SOURCE = '''
"""No fault: 1 < 2."""
import logging
logger = logging.getLogger(__name__)
__all__ = ["clamp"]

def clamp(x: int, top: int | None = None) -> int:
    """No fault: x < 0."""
    if not x:
        raise ValueError(f"{x < 0}", 1 + 2)
    logger.info("%d", x + 1)
    return x if top is None or x < top else top

class A:
    def __repr__(self):
        return str(3)
'''


def texts(source: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for site in mutate.find_sites("a.py", source.encode()):
        for fault in site:
            found.setdefault(fault.kind, set()).add(fault.text)
    return found


def test_only_what_a_step_does_is_changed():
    assert texts(SOURCE) == {
        "condition": {"True", "False"},
        "dropped not": {"(x)"},
        "other result": {"return None"},
        "and/or": {"((top is None) and (x < top))"},
        "dropped operand": {"((top is None))", "((x < top))"},
        "comparison": {" is not ", " <= "},
        "off by one": {"((top) + 1)", "((top) - 1)"},
    }


def test_each_kind_of_fault():
    found = texts("for i in é:\n    if a[i:n] == 3: continue\n    f(i, not g(b))\n    n += 2 * k\n")
    assert found == {
        "off by one": {"((i) + 1)", "((i) - 1)", "((n) + 1)", "((n) - 1)"},
        "condition": {"True", "False"},
        "comparison": {" != "},
        "constant": {"1", "2", "3", "4"},
        "dropped jump": {"pass"},
        "dropped call": {"pass"},
        "swapped arguments": {"not g(b), i"},
        "dropped not": {"(g(b))"},
        "dropped assignment": {"pass"},
        "other operator": {" -= ", " // "},
    }


def test_the_seed_decides_and_each_fault_changes_the_program():
    faults = mutate.sample(["octavo/scheduler/queue.py", "octavo/request.py"], 20, 7)
    assert len({(fault.path, fault.begin, fault.end) for fault in faults}) == 20
    assert faults == mutate.sample(["octavo/scheduler/queue.py", "octavo/request.py"], 20, 7)
    assert faults != mutate.sample(["octavo/scheduler/queue.py", "octavo/request.py"], 20, 8)
    for fault in faults:
        compile(fault.apply((mutate.ROOT / fault.path).read_bytes()), fault.path, "exec")


def test_every_named_test_exists():
    for patterns in mutate.WIDER.values():
        for pattern in patterns:
            assert list(mutate.ROOT.glob(pattern)), pattern


FILES = {
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-q --import-mode=importlib"\n',
    "octavo/__init__.py": "",
    "octavo/_native.py": "",
    "octavo/limits.py": (
        "def keep(x):\n    if x > 2:\n        return 2\n    return x\n\n\n"
        "def drain(n):\n    while n:\n        n -= 1\n"
    ),
    "tests/test_limits.py": (
        "from octavo.limits import drain, keep\n\n\n"
        "def test_keep():\n    assert [keep(1), keep(3)] == [1, 2]\n    drain(1)\n"
    ),
}


def test_it_tells_what_tests_find_and_goes_on_where_it_stopped(tmp_path: Path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    # A separate tree; libraries of other tests are not loaded, and runs may take less time.
    tool = Path(mutate.__file__).read_text()
    for setting, other in (("WARM = [", "WARM = []; ["), ("SLACK = 10.0", "SLACK = 4.0")):
        assert setting in tool
        tool = tool.replace(setting, other)
    (tmp_path / "tests/mutate.py").write_text(tool)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)

    def run(count: int, *arguments: str) -> str:
        command = [sys.executable, "tests/mutate.py", "--paths", "octavo", "--count", str(count)]
        command += ["--output", "m.json", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("\n" + (tmp_path / "m.md").read_text())
        return done.stdout

    assert run(3).count("] ") == 3
    printed = run(99)
    assert printed.count("] ") == 7, "ten places, three of which were tried before"
    results = json.loads((tmp_path / "m.json").read_text())["results"]
    by = {(r["line"], r["kind"], r["text"]): r["by"] for r in results}
    assert len(by) == 10
    assert by[2, "comparison", " >= "] == "", "no test asks for the border"
    assert by[4, "other result", "return None"] == "tests/test_limits.py::test_keep"
    assert by[9, "dropped assignment", "pass"] == "timeout"
    survivors = sum(not result["found"] for result in results)
    assert printed.count("```diff") == survivors
    assert f"| all | 10 | {10 - survivors} |" in printed
    assert run(99, "--again").count("SURVIVED") == survivors
    assert (tmp_path / "octavo/limits.py").read_text() == FILES["octavo/limits.py"]
