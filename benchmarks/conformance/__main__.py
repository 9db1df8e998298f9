"""`python -m benchmarks.conformance`: see the package."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.conformance import fetch, report
from benchmarks.conformance.shim import MODEL_VARIABLE
from octavo.config import BUILTIN_MODEL
from octavo.models.hub import resolve_model

ROOT = Path(__file__).parents[2]
EXPECTED = Path(__file__).with_name("expected.toml")
# Of the tests, those of the server with OpenAI's API, and of related parts.
FOLDERS = ("openai", "serve", "launchers", "rl/state_transitions", "tool_parsers")
_ASKS_SERVER = re.compile(r"Remote\w*Server|\bfrom \.+conftest import|Popen\(|client: \S*OpenAI\b")
_FILE_SECONDS = 300
# As in most tests' models, so that their --max-model-len is possible.
_POSITIONS = 40960

# Replacement of `vllm` while the tests run: a command, and a module that is started with -m.
_COMMAND = """#!{python}
import os, sys
from benchmarks.conformance.shim import octavo_command
command = octavo_command(sys.argv[1:])
os.execv(command[0], command)
"""
_MODULES = (
    "vllm/entrypoints/openai/api_server.py",
    "vllm/entrypoints/launchers/api_server/entry.py",
)


def main(words: Sequence[str] | None = None) -> int:
    """Fetch, run and report; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance")
    parser.add_argument("--out", type=Path, help="file for the table; default: standard output")
    parser.add_argument(
        "--sdist", type=Path, help="file of vLLM's source distribution; default: download it"
    )
    parser.add_argument("--work", type=Path, help="folder for downloads")
    parser.add_argument("--only", default="", help="run only files with this text in their names")
    parser.add_argument("--jobs", type=int, default=2, help="number of concurrent files")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        prepare(work, options.sdist)
        files = [file for file in server_tests(work / "src") if options.only in file]
        with ThreadPoolExecutor(options.jobs) as pool:
            found = [r for results in pool.map(lambda f: run(work, f), files) for r in results]
    expected = report.read_expected(EXPECTED)
    lines = report.classify(found, expected)
    text = report.table(lines, fetch.VERSION)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text)
    if not options.only:
        for pattern in report.unused(found, expected):
            print(f"listed in {EXPECTED.name}, but nothing fails: {pattern}", file=sys.stderr)
    unexpected = [line for line in lines if line.kind == "UNEXPECTED"]
    for line in unexpected:
        print(f"{line.test}: {line.why}", file=sys.stderr)
    return 1 if unexpected or not lines else 0


def prepare(work: Path, sdist: Path | None) -> None:
    """Prepare `work` for running a file of tests."""
    for name in ("logs", "results", "bin"):
        (work / name).mkdir(parents=True, exist_ok=True)
    if not (work / "src").exists():
        fetch.unpack_tests(sdist or fetch.fetch_sdist(work), work / "src")
    fetch.install_packages(work / "packages")
    # Links to a checkout, which may no longer exist.
    for name in ("hub", "model"):
        shutil.rmtree(work / name, ignore_errors=True)
    make_model(work / "model")
    command = _COMMAND.format(python=sys.executable)
    (work / "bin" / "vllm").write_text(command)
    (work / "bin" / "vllm").chmod(0o755)
    for name in _MODULES:
        module = work / "modules" / name
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(command.replace("sys.argv[1:]", "['serve', *sys.argv[1:]]"))


def make_model(folder: Path) -> None:
    """Copy the built-in model, with more positions than it was trained on."""
    folder.mkdir()
    lengths = {
        "config.json": "max_position_embeddings",
        "tokenizer_config.json": "model_max_length",
    }
    for file in resolve_model(BUILTIN_MODEL).iterdir():
        if file.name in lengths:
            config = json.loads(file.read_text()) | {lengths[file.name]: _POSITIONS}
            (folder / file.name).write_text(json.dumps(config))
        elif file.suffix in (".json", ".safetensors"):
            (folder / file.name).symlink_to(file)


def server_tests(src: Path) -> Iterator[str]:
    """Yield the files in `src` with tests that use a server."""
    for folder in FOLDERS:
        for file in sorted((src / "tests" / "entrypoints" / folder).rglob("test_*.py")):
            if _ASKS_SERVER.search(file.read_text()):
                yield str(file.relative_to(src))


def run(work: Path, file: str) -> list[report.Result]:
    """Run a file of tests in a separate process, so that no file affects others."""
    name = file.replace("/", ".").removesuffix(".py")
    results, output = work / "results" / f"{name}.jsonl", work / "logs" / f"{name}.txt"
    results.write_text("")
    variables = {
        MODEL_VARIABLE: str(work / "model"),
        "CONFORMANCE_LOGS": str(work / "logs"),
        "HF_HOME": str(work / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{work / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (work / "src", ROOT, work / "modules"))),
    }
    command = [sys.executable, "-m", "benchmarks.conformance.inside"]
    with output.open("wb") as log:
        process = subprocess.Popen(
            [*command, str(work / "packages"), str(results), file],
            cwd=work / "src",
            env={**os.environ, **variables},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            process.wait(_FILE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = report.read_results(results)
    print(f"{file}: {sum(r.outcome == 'passed' for r in found)}/{len(found)}", file=sys.stderr)
    return found


if __name__ == "__main__":
    sys.exit(main())
