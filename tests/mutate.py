"""Report faults that no test finds: put faults into the code, one at a time, and run the tests.

    python tests/mutate.py --paths octavo/scheduler octavo/kv_cache --count 30 --seed 1

The faults are a random sample of possible mistakes: a comparison that is off by one, a missing
condition, a missing call. The script puts each fault into a copy of the repository. It runs the
tests that mirror the module there, then the tests in `WIDER`; a timeout counts as found. After each
fault it writes the results to `--output` (JSON, and Markdown next to it). A second run with the
same arguments continues from there; `--again` tests the surviving faults once more.

mutmut is unsuitable: it observes only its own process to learn which tests reach a function, so it
reports that code in the engine-core process has no tests.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import ctypes
import difflib
import hashlib
import importlib.util
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).parents[1]

# In addition to tests/<package>: tests that run the code of a package from outside.
WIDER = {
    "octavo": [
        "tests/scheduler/test_endings.py",
        "tests/scheduler/test_preemption.py",
        "tests/scheduler/test_scheduler.py",
        "tests/engine/test_core.py",
        "tests/server/test_chat.py",
        "tests/e2e/test_llm.py",
    ],
    "octavo/engine": [
        "tests/server/test_*.py",
        "tests/e2e/test_llm.py",
        "tests/e2e/test_memory.py",
        "tests/e2e/test_openai_client.py",
        "tests/observability/test_metrics.py",
        "tests/observability/test_profiler.py",
    ],
    "octavo/executor": [
        "tests/e2e/test_llm.py",
        "tests/e2e/test_multiproc.py",
        "tests/e2e/test_fake_gpu.py",
    ],
    "octavo/kv_cache": ["tests/scheduler/test_*.py", "tests/plan/test_memory_plan.py"],
    "octavo/layers": ["tests/models/test_parity.py", "tests/models/test_text_parts.py"],
    "octavo/models": ["tests/layers/test_*.py", "tests/e2e/test_llm.py"],
    "octavo/sampling": ["tests/e2e/test_llm.py", "tests/e2e/test_prompt_logprobs.py"],
    "octavo/sampling/logits_processors": ["tests/sampling/test_*.py"],
    "octavo/scheduler": ["tests/engine/test_core.py", "tests/e2e/test_llm.py"],
    "octavo/server": [
        "tests/e2e/test_openai_client.py",
        "tests/frontend/test_async_llm.py",
        "tests/system/test_logs.py",
    ],
    "octavo/worker": [
        "tests/e2e/test_llm.py",
        "tests/e2e/test_fake_gpu.py",
        "tests/e2e/test_prompt_logprobs.py",
        "tests/plan/test_memory_plan.py",
        "tests/observability/test_profiler.py",
    ],
}

# Modules that every run of tests needs; imported once, before the forks.
WARM = ["pytest", "numpy", "torch", "transformers", "hypothesis", "fastapi", "httpx", "uvicorn"]
MEMORY = 12 * 2**30  # bytes that a run may map for data: a fault can request any number
SLACK = 10.0  # seconds for a run, in addition to twice its time without a fault
LONGEST = 60  # seconds of one test

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}


@dataclass(frozen=True)
class Fault:
    """Change of one place of a file."""

    path: str
    line: int
    kind: str
    begin: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.begin] + self.text.encode() + source[self.end :]

    def diff(self, source: bytes) -> str:
        before, after = (s.decode().splitlines() for s in (source, self.apply(source)))
        return "\n".join(
            [*difflib.unified_diff(before, after, self.path, self.path, "", "", 1, "")][2:]
        )


def find_sites(path: str, source: bytes) -> list[list[Fault]]:
    """Return the places of a file that can be changed, each with its faults."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return list(finder.sites.values())


def changes_program(fault: Fault, source: bytes) -> bool:
    """Return True if the changed file is a valid and different program."""
    try:
        compile(fault.apply(source), fault.path, "exec", ast.PyCF_ONLY_AST)
    except SyntaxError:
        return False
    return fault.text.encode() != source[fault.begin : fault.end]


class _Finder(ast.NodeVisitor):
    """Finder of possible faults; skips texts, annotations and log lines."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.sites: dict[tuple[int, int], list[Fault]] = {}

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = self.starts[node.lineno - 1] + node.col_offset
        return begin, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr) -> str:
        begin, end = self.span(node)
        return self.source[begin:end].decode()

    def add(self, node: ast.expr | ast.stmt, kind: str, text: str) -> None:
        begin, end = self.span(node)
        self.add_at(begin, end, node.lineno, kind, text)

    def add_at(self, begin: int, end: int, line: int, kind: str, text: str) -> None:
        fault = Fault(self.path, line, kind, begin, end, text)
        self.sites.setdefault((begin, end), []).append(fault)

    def swap(self, left: ast.expr, right: ast.expr, kind: str, old: str, new: str) -> None:
        """Add another operator between two expressions."""
        begin, end = self.span(left)[1], self.span(right)[0]
        between = self.source[begin:end].decode()
        self.add_at(begin, end, right.lineno, kind, between.replace(old, new, 1))

    def off_by_one(self, node: ast.expr) -> None:
        for sign in "+-":
            self.add(node, "off by one", f"(({self.text(node)}) {sign} 1)")

    def visit_block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)

    # Code that is not changed.

    def visit_Raise(self, node: ast.Raise) -> None: ...
    def visit_Assert(self, node: ast.Assert) -> None: ...
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if not any(isinstance(b, ast.Name) and b.id == "Protocol" for b in node.bases):
            self.visit_block(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        self.visit_block(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in ("strict", "exc_info", "stacklevel", "daemon"):
            self.visit(node.value)

    # Code that is changed.

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call):
            if _is_logging(call):
                return
            self.add(node, "dropped call", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], ast.Subscript):
            self.add(node, "dropped assignment", "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "dropped assignment", "pass")
        old, new = ARITHMETIC.get(type(node.op), ("", ""))
        if old:
            self.swap(node.target, node.value, "other operator", old + "=", new + "=")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(node, "dropped jump", "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.add(node, "dropped jump", "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self.add(node, "dropped jump", "pass")
        else:
            self.add(node, "other result", "return None")
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self.add(node.test, "condition", "False")
        if not isinstance(node, ast.While):
            self.add(node.test, "condition", "True")
        self.generic_visit(node)

    visit_IfExp = visit_If  # noqa: N815
    visit_While = visit_If  # noqa: N815

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self.add(condition, "condition", "True")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            self.swap(left, right, "comparison", *COMPARISONS[type(operator)])
            ordered = isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            if ordered and not isinstance(right, ast.Constant):
                self.off_by_one(right)
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self.add(
            node, "and/or", "(" + f" {new} ".join(f"({self.text(v)})" for v in node.values) + ")"
        )
        for dropped in node.values:
            rest = (f"({self.text(v)})" for v in node.values if v is not dropped)
            self.add(node, "dropped operand", "(" + f" {old} ".join(rest) + ")")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add(node, "dropped not", f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (ast.JoinedStr, ast.Constant)
        for side in (node.left, node.right):
            if isinstance(side, texts) and not isinstance(getattr(side, "value", 0), int | float):
                return
        if type(node.op) in ARITHMETIC:
            self.swap(node.left, node.right, "other operator", *ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, "constant", str(not node.value))
        elif isinstance(node.value, int):
            self.add(node, "constant", str(node.value + 1))
            if node.value > 0:
                self.add(node, "constant", str(node.value - 1))
        elif isinstance(node.value, float):
            self.add(node, "constant", repr(node.value * 2 or 1.0))

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant):
                self.off_by_one(bound)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name.endswith(("Error", "Warning")):
            return
        if name not in ("min", "max") and not any(isinstance(a, ast.Starred) for a in node.args):
            for first, second in zip(node.args, node.args[1:], strict=False):
                begin, end = self.span(first)[0], self.span(second)[1]
                between = self.source[self.span(first)[1] : self.span(second)[0]].decode()
                text = self.text(second) + between + self.text(first)
                self.add_at(begin, end, first.lineno, "swapped arguments", text)
        self.generic_visit(node)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_logging(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Attribute):
        return _name(function.value) in ("logger", "logging", "warnings")
    return _name(function) == "print"


def sample(paths: Sequence[str], count: int, seed: int) -> list[Fault]:
    """Return faults at `count` different places of the files and folders, chosen by the seed."""
    sites: list[list[Fault]] = []
    sources: dict[str, bytes] = {}
    for path in paths:
        at = ROOT / path
        for file in sorted(at.rglob("*.py")) if at.is_dir() else [at]:
            name = str(file.relative_to(ROOT))
            sources[name] = file.read_bytes()
            sites += find_sites(name, sources[name])
    chooser, faults = random.Random(seed), list[Fault]()
    chooser.shuffle(sites)
    for site in sites:
        fault = chooser.choice(site)
        if len(faults) < count and changes_program(fault, sources[fault.path]):
            faults.append(fault)
    return faults


def stages_for(path: str) -> list[list[str]]:
    """Return the test files that may find a fault in a module: its mirror, then others."""
    module = Path(path)
    folder = "tests" / module.parent.relative_to("octavo")
    mirror = [f"{folder}/test_{module.stem}.py"]
    inner = f"{folder}/test_*.py"
    patterns = [*([inner] if folder != Path("tests") else []), *WIDER.get(str(module.parent), [])]
    wider = {str(p.relative_to(ROOT)) for pattern in patterns for p in ROOT.glob(pattern)}
    mirror = [name for name in mirror if (ROOT / name).exists()]
    return [stage for stage in (mirror, sorted(wider - {*mirror})) if stage]


@dataclass(frozen=True)
class Outcome:
    """Result of a run of tests."""

    passed: bool
    first_failure: str
    """Id of a test, "timeout", or "" if all passed."""
    seconds: float


class Tree:
    """Copy of the files that git tracks or would add, with the native module, to run tests in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True).stdout.split(
            b"\0"
        )
        # In another process, because this one must not load the code that will be changed.
        code = "from octavo import _native; print(_native.__file__, end='')"
        native = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True
        ).stdout
        for name in (n.decode() for n in names if n):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        shutil.copy2(native.decode(), folder / "octavo")
        # The tests' models are next to the tree.
        if (ROOT.parent / "shared").exists():
            with contextlib.suppress(FileExistsError):  # another process was faster
                (folder.parent / "shared").symlink_to(ROOT.parent / "shared")
        self.path = folder.parent / f"{folder.name}-path"
        self.path.mkdir()
        # Child processes find the copy's modules even if an editable install points elsewhere.
        (self.path / "sitecustomize.py").write_text(
            "import sys\nfrom importlib.machinery import PathFinder\n"
            "sys.meta_path.insert(0, PathFinder)\n"
        )
        for package in ("octavo", "tests"):
            compileall.compile_dir(folder / package, quiet=2)

    def test(self, files: Sequence[str], timeout: float) -> Outcome:
        """Run test files until the first failure, in a fork of this process."""
        log, start, waited = self.path / "log", time.monotonic(), 0.0
        log.write_text("")
        child = os.fork()
        if child == 0:
            code = 70
            try:
                code = self._run_pytest(files, log)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        code = None
        while code is None and waited < timeout:
            pid, status = os.waitpid(
                -1, os.WNOHANG
            )  # also reap orphans: tests check that they ended
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
            elif not pid:
                time.sleep(0.02)
                waited += 0.02  # without the time in which the machine was stopped
        seconds = time.monotonic() - start
        _end_children()
        if code is None:
            return Outcome(False, "timeout", seconds)
        failure = re.search(r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.M)
        passed = code in (0, 5)  # 5: no tests to run, since an optional package is missing
        named = failure[1] if failure else f"exit {code}"
        return Outcome(passed, "" if passed else named, seconds)

    def _run_pytest(self, files: Sequence[str], log: Path) -> int:
        import pytest
        from hypothesis import Phase, settings

        assert "octavo" not in sys.modules
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.chdir(self.folder)
        os.environ["PYTHONPATH"] = f"{self.path}{os.pathsep}{self.folder}"
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        sys.path = [str(self.folder), *sys.path[1:]]  # the first is the folder of this file
        sys.meta_path.insert(0, PathFinder)
        # Stop at the first failing example; run the same examples each time.
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutate", deadline=None, database=None, phases=phases)
        options = ["-x", "-p", "no:cacheprovider", "--assert=plain", "--tb=short", "-rfE"]
        options += ["--hypothesis-profile=mutate", "--hypothesis-seed=0", f"--timeout={LONGEST}"]
        return int(pytest.main([*options, *files]))

    def put(self, path: str, source: bytes) -> None:
        """Write a file without leaving bytecode of another version."""
        file = self.folder / path
        file.write_bytes(source)
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def _end_children() -> None:
    """End all descendants of this process, including orphans."""
    import psutil

    children = psutil.Process().children(recursive=True)
    for process in children:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(children, timeout=10)


_tree: Tree


def _start(folder: Path) -> None:
    """Prepare this process for running tests."""
    global _tree
    prctl = ctypes.CDLL(None).prctl
    prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it ends with its parent
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _tree = Tree(Path(tempfile.mkdtemp(dir=folder)))


def _time(file: str) -> Outcome:
    return _tree.test([file], 900)


def _try(fault: Fault, stages: Sequence[tuple[Sequence[str], float]]) -> Outcome:
    """Put a fault in, run the stages until one finds it, and remove it again."""
    source = (_tree.folder / fault.path).read_bytes()
    outcome, seconds = Outcome(True, "", 0.0), 0.0
    _tree.put(fault.path, fault.apply(source))
    try:
        for files, timeout in stages:
            outcome = _tree.test(files, timeout)
            seconds += outcome.seconds
            if not outcome.passed:
                break
    finally:
        _tree.put(fault.path, source)
    return Outcome(outcome.passed, outcome.first_failure, seconds)


def report(results: Sequence[dict[str, object]]) -> str:
    """Return Markdown: a table by package, and the faults that no test found."""
    tried, found = Counter[str](), Counter[str]()
    for result in results:
        package = str(Path(str(result["path"])).parent)
        tried[package] += 1
        found[package] += bool(result["found"])
    lines = ["| package | faults | found | |", "| --- | ---: | ---: | ---: |"]
    for package in [*sorted(tried), "all"]:
        n, k = (
            (tried.total(), found.total()) if package == "all" else (tried[package], found[package])
        )
        lines.append(f"| {package} | {n} | {k} | {k / max(n, 1):.0%} |")
    for result in results:
        if not result["found"]:
            lines += ["", f"{result['path']}:{result['line']} ({result['kind']}) survived"]
            lines += ["```diff", str(result["diff"]), "```"]
    return "\n".join(lines) + "\n"


def _fingerprint() -> str:
    """Return a hash of all that affects tests: the measured times are valid until it changes."""
    digest = hashlib.sha256()
    for file in sorted([*ROOT.glob("octavo/**/*.py"), *ROOT.glob("tests/**/*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _tests_without_faults(
    pool: ProcessPoolExecutor, files: Sequence[str]
) -> Iterator[tuple[str, float]]:
    """Return the seconds of each test file."""
    for file, outcome in zip(files, pool.map(_time, files), strict=True):
        if not outcome.passed:
            raise SystemExit(f"{file} fails without a fault: {outcome.first_failure}")
        yield file, outcome.seconds


class Session:
    """Faults to try, and their known results, kept in a file."""

    def __init__(self, faults: Sequence[Fault], output: Path, *, again: bool) -> None:
        self.output, self.count = output, len(faults)
        state = json.loads(output.read_text()) if output.exists() else {}
        self.fingerprint = _fingerprint()
        same = state.get("fingerprint") == self.fingerprint
        self.seconds: dict[str, float] = state["seconds"] if same else {}
        """Seconds of each test file without a fault."""
        known = {result["diff"]: result for result in state.get("results", [])}
        self.results: list[dict[str, object]] = []
        self.todo: dict[Fault, str] = {}
        """Faults with their diffs."""
        for fault in faults:
            diff = fault.diff((ROOT / fault.path).read_bytes())
            earlier = known.get(diff)
            if earlier is None or (again and not earlier["found"]):
                self.todo[fault] = diff
            else:
                self.results.append(earlier)

    def save(self) -> None:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "fingerprint": self.fingerprint,
            "seconds": self.seconds,
            "results": self.results,
        }
        self.output.write_text(json.dumps(state, indent=1))
        self.output.with_suffix(".md").write_text(report(self.results))

    def run(self, pool: ProcessPoolExecutor) -> None:
        """Measure the needed tests, then try each fault."""
        stages = {fault.path: stages_for(fault.path) for fault in self.todo}
        files = {name for parts in stages.values() for part in parts for name in part}
        for file, took in _tests_without_faults(pool, sorted(files - {*self.seconds})):
            self.seconds[file] = took
            self.save()
        futures = {}
        for fault in self.todo:
            parts = [sorted(part, key=self.seconds.__getitem__) for part in stages[fault.path]]
            timed = [(part, SLACK + 2 * sum(self.seconds[f] for f in part)) for part in parts]
            futures[pool.submit(_try, fault, timed)] = fault
        for future in as_completed(futures):
            self._note(futures[future], future.result())

    def _note(self, fault: Fault, outcome: Outcome) -> None:
        diff = self.todo[fault]
        self.results.append(
            asdict(fault)
            | {"found": not outcome.passed, "by": outcome.first_failure}
            | {"seconds": round(outcome.seconds, 1), "diff": diff}
        )
        self.save()
        verdict = f"SURVIVED\n{diff}" if outcome.passed else f"found by {outcome.first_failure}"
        where = f"{fault.path}:{fault.line} {fault.kind}"
        done = f"[{len(self.results)}/{self.count}] {outcome.seconds:.0f} s"
        print(f"{done} {where}: {verdict}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--paths", nargs="+", default=["octavo"], help="files and folders")
    parser.add_argument("--count", type=int, default=30, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="number of concurrent test processes")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build/mutate.json", help="file of results"
    )
    parser.add_argument("--again", action="store_true", help="test surviving faults once more")
    args = parser.parse_args(argv)
    faults = sample(args.paths, args.count, args.seed)
    session = Session(faults, args.output, again=args.again)
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "TRITON_INTERPRET": "1"}
    for name in WARM:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    fork = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory(prefix="mutate-") as folder,
        ProcessPoolExecutor(args.jobs, fork, _start, (Path(folder),)) as pool,
    ):
        try:
            session.run(pool)
        except BaseException:  # Ctrl-C: do not wait for running tests
            _end_children()
            raise
    session.save()
    print("\n" + report(session.results), end="")


if __name__ == "__main__":
    main()
